"""Figures of Mamba: steps that tokens choose, two writes, a state that turns, and the blocks."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from numpy.typing import ArrayLike

from lesson_code.plots.cells import way, write
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
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
def inflow(steps: int = 4) -> BookFigure:
    """A sine as inflow, and what one write a step takes of it (left), and two writes (right)."""
    figure, (panels,) = new_figure(2, height=2.7, sharey=True)
    fine, ends = np.linspace(0, steps, 201), np.arange(steps + 1)
    x = np.sin(ends)
    corners = {"one write, λ = 1": x[1:], "two writes, λ = 1/2": x[:-1]}
    for axes, (title, starts) in zip(panels, corners.items(), strict=True):
        for t in range(steps):
            axes.fill(
                ends[[t, t, t + 1, t + 1]],
                [0, starts[t], x[t + 1], 0],
                facecolor=MEMORY,
                edgecolor=BLUE,
                linewidth=1.2,
            )
        axes.plot(fine, np.sin(fine), color=VERMILION, linestyle="--", zorder=3)
        axes.plot(ends, x, "o", color=VERMILION, zorder=4)
        axes.axhline(0, color=GRAY, linewidth=0.8)
        axes.set(title=title, xlabel="time τ", xticks=ends)
    panels[0].set(ylabel="inflow x")
    return figure


@drawing
def turns(states: Mapping[str, ArrayLike]) -> BookFigure:
    """Named sequences of complex numbers, each as an arrow for its last and dots before."""
    figure, (panels,) = new_figure(len(states), height=2.6, sharex=True, sharey=True)
    around = np.exp(1j * np.linspace(0, 2 * np.pi, 101))
    for axes, (name, state) in zip(panels, states.items(), strict=True):
        z = np.asarray(state)
        axes.plot(around.real, around.imag, color=GRAY, linewidth=0.8, linestyle=":")
        axes.axhline(0, color=GRAY, linewidth=0.8)
        axes.axvline(0, color=GRAY, linewidth=0.8)
        axes.plot(z.real, z.imag, color=BLUE, linewidth=1, linestyle="--")
        axes.plot(z.real, z.imag, "o", color=BLUE, markerfacecolor="white", zorder=4)
        axes.plot(z.real[:1], z.imag[:1], "o", color=VERMILION, markersize=8, zorder=5)
        axes.plot(z.real[-1:], z.imag[-1:], "s", color=BLUE, markersize=7, zorder=6)
        axes.set(title=name, xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), xticks=(-1, 0, 1))
        axes.set(yticks=(-1, 0, 1), aspect="equal")
        axes.grid(False)
    return figure


@drawing
def blocks() -> BookFigure:
    """The blocks of Mamba, Mamba-2 and Mamba-3, from the bottom to the top."""
    figure, (panels,) = new_figure(3, height=5.4)
    main, side = -0.36, 0.8  # where the memory stands, and the gate
    for axes, title in zip(panels, ("Mamba", "Mamba-2", "Mamba-3"), strict=True):
        axes.set(xlim=(-1.04, 1.12), ylim=(-0.55, 7.1), title=title)
        axes.set_axis_off()
        write(axes, 0.2, -0.4, "$x$")
        way(axes, (side, 1.2), (side, 1.7))
        way(axes, (side, 2.3), (side, 4.9), (main + 0.2, 4.9))
        way(axes, (main, 4.15), (main, 4.7))
        _box(axes, side, 2.0, "SiLU", GATE, 0.56)
        axes.plot([main], [4.9], "o", markersize=17, mfc="white", mec=INK, zorder=5)
        write(axes, main, 4.9, "×", zorder=6)
        write(axes, side + 0.07, 1.45, "$z$", ha="left")
        write(axes, main, 7.0, "$y$")
        way(axes, (main, 6.4), (main, 6.8))
        _box(axes, main, 6.1, "$W_O$", PLAIN, 0.8)

    first, second, third = panels
    way(first, (0.2, -0.2), (0.2, 0.15), (main, 0.15), (main, 0.6))
    way(first, (0.2, -0.2), (0.2, 0.15), (side, 0.15), (side, 0.6))
    _box(first, main, 0.9, "$W_u$", PLAIN, 0.8)
    _box(first, side, 0.9, "$W_z$", PLAIN, 0.56)
    way(first, (main, 1.2), (main, 1.65))
    write(first, main - 0.08, 1.43, "$u$", ha="right")
    _box(first, main, 2.05, "convolution\nSiLU", PLAIN, 1.2, height=0.8)
    way(first, (-0.7, 2.45), (-0.7, 3.35))
    write(first, -0.78, 2.9, "$u$", ha="right")
    way(first, (-0.2, 2.45), (-0.2, 3.35))
    write(first, -0.12, 2.9, r"$\Delta, B, C$", ha="left")
    _box(first, main, 3.75, "selective\nscan", MEMORY, 1.2, height=0.8)
    way(first, (main, 5.1), (main, 5.8))

    for axes in (second, third):
        way(axes, (0.2, -0.2), (0.2, 0.6))
        _box(axes, 0.06, 0.9, "one projection", PLAIN, 2.04)
        way(axes, (0.42, 1.2), (0.42, 2.9), (0.1, 2.9), (0.1, 3.35))
    way(second, (main, 1.2), (main, 1.65))
    write(second, main - 0.08, 1.43, "$u, B, C$", ha="right")
    write(second, 0.36, 1.43, r"$\Delta$", ha="right")
    _box(second, main, 2.05, "convolution\nSiLU", PLAIN, 1.2, height=0.8)
    way(second, (main, 2.45), (main, 3.35))
    write(second, main - 0.08, 2.9, "$u, B, C$", ha="right")
    _box(second, main, 3.75, "state-space\ndual", MEMORY, 1.2, height=0.8)
    way(second, (main, 5.1), (main, 5.22))
    _box(second, main, 5.45, "norm", GATE, 0.8, height=0.46)
    way(second, (main, 5.68), (main, 5.8))

    way(third, (-0.86, 1.2), (-0.86, 3.35))
    write(third, -0.78, 1.43, "$u$", ha="left")
    way(third, (-0.22, 1.2), (-0.22, 1.65))
    write(third, -0.28, 1.43, "$B, C$", ha="right")
    write(third, 0.36, 1.43, r"$\Delta, \lambda$", ha="right")
    _box(third, -0.22, 2.05, "norm, bias,\nturn by θ", GATE, 0.98, height=0.8)
    way(third, (-0.22, 2.45), (-0.22, 3.35))
    write(third, -0.28, 2.9, "$k, q$", ha="right")
    _box(third, main, 3.75, "two writes,\none read", MEMORY, 1.2, height=0.8)
    way(third, (main, 5.1), (main, 5.8))
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
