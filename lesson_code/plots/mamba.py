"""Figures of Mamba: a memory whose steps the tokens choose, and the blocks of both versions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from numpy.typing import ArrayLike

from lesson_code.plots.cells import way, write
from lesson_code.plots.colors import GRAY, INK, VERMILION, look
from lesson_code.plots.style import BookFigure, drawing, new_figure

PLAIN, MEMORY, GATE = "white", "#d6e8f5", "#e3f1ec"


@drawing
def selection(x: ArrayLike, marked: Sequence[int], states: Mapping[str, ArrayLike]) -> BookFigure:
    """Tokens above, the marked ones filled; below, named states over the same tokens."""
    figure, ((top,), (below,)) = new_figure(1, 2, height=4.2, sharex=True, sharey=True)
    x = np.asarray(x)
    t = np.arange(1, len(x) + 1)
    stands_out = np.isin(np.arange(len(x)), list(marked))
    top.vlines(t, 0, x, color=GRAY, linewidth=1)
    top.plot(t[~stands_out], x[~stands_out], "o", color=GRAY, markerfacecolor="white")
    top.plot(t[stands_out], x[stands_out], "o", color=VERMILION, markersize=7)
    for at in t[stands_out]:
        below.axvline(at, color=VERMILION, linestyle=":", linewidth=1.2)
    for index, (name, state) in enumerate(states.items()):
        state = np.asarray(state)
        below.step(t, state, where="post", label=name, **look(index, marker=None))
    below.legend(loc="lower right", bbox_to_anchor=(1, 0.96), ncols=2, borderaxespad=0)
    top.set(ylabel="$x_t$")
    below.set(xlabel="token t", ylabel="$h_t$", xlim=(0, len(x) + 0.6))
    for axes in (top, below):
        axes.axhline(0, color=GRAY, linewidth=0.8)
    return figure


@drawing
def blocks() -> BookFigure:
    """The block of Mamba (left) and that of Mamba-2 (right), from the bottom to the top."""
    figure, (panels,) = new_figure(2, height=5.2)
    for axes, title in zip(panels, ("Mamba", "Mamba-2"), strict=True):
        axes.set(xlim=(-1.75, 1.75), ylim=(-0.55, 7.1), title=title)
        axes.set_axis_off()
    left, right = panels
    main, side = -0.55, 1.15  # where the memory stands, and the gate

    for axes in panels:
        write(axes, 0.3, -0.4, "$x$")
        way(axes, (main, 1.2), (main, 1.7))
        way(axes, (main, 2.3), (main, 3.2))
        way(axes, (main, 3.8), (main, 4.42))
        way(axes, (side, 2.3), (side, 4.6), (main + 0.2, 4.6))
        _box(axes, main, 2.0, "convolution, SiLU", PLAIN, 2.0)
        _box(axes, side, 2.0, "SiLU", GATE, 0.9)
        way(axes, (side, 1.2), (side, 1.7))
        axes.plot([main], [4.6], "o", markersize=18, mfc="white", mec=INK, zorder=5)
        write(axes, main, 4.6, "×", zorder=6)
        write(axes, main, 7.0, "$y$")
        way(axes, (main, 6.3), (main, 6.8))
        _box(axes, main, 6.0, "$W_O$", PLAIN, 1.0)

    way(left, (0.3, -0.2), (0.3, 0.15), (main, 0.15), (main, 0.6))
    way(left, (0.3, -0.2), (0.3, 0.15), (side, 0.15), (side, 0.6))
    _box(left, main, 0.9, "$W_u$", PLAIN, 1.0)
    _box(left, side, 0.9, "$W_z$", PLAIN, 0.9)
    _box(left, main, 3.5, "selective scan", MEMORY, 2.0)
    way(left, (main + 0.35, 2.3), (main + 0.35, 3.2))
    write(left, main + 0.45, 2.75, r"$\Delta, B, C$", ha="left")
    way(left, (main, 4.78), (main, 5.7))

    way(right, (0.3, -0.2), (0.3, 0.6))
    _box(right, 0.3, 0.9, "one projection", PLAIN, 2.6)
    _box(right, main, 3.5, "state-space dual", MEMORY, 2.0)
    write(right, main - 0.1, 2.75, "$u, B, C$", ha="right")
    write(right, main - 0.1, 1.45, "$u, B, C$", ha="right")
    write(right, side + 0.1, 1.45, "$z$", ha="left")
    way(right, (0.57, 1.2), (0.57, 2.75), (0.2, 2.75), (0.2, 3.2))
    write(right, 0.47, 1.45, r"$\Delta$", ha="right")
    write(left, side + 0.1, 1.45, "$z$", ha="left")
    write(left, main - 0.1, 1.45, "$u$", ha="right")
    write(left, main - 0.1, 2.75, "$u$", ha="right")
    way(right, (main, 4.78), (main, 5.0))
    _box(right, main, 5.25, "norm", GATE, 1.0, height=0.46)
    way(right, (main, 5.48), (main, 5.7))
    return figure


def _box(
    axes: Axes, x: float, y: float, text: str, fill: str, width: float, height: float = 0.6
) -> None:
    """A box with its center at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch(corner, width, height, boxstyle=shape, fc=fill, ec=GRAY, zorder=4)
    axes.add_patch(patch)
    write(axes, x, y, text, zorder=5)
