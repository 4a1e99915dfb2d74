"""Figures of AFT and RWKV-4: weights, blocks of a bias, and the block of both mixes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow, box, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, POSITIVE, VERMILION
from lesson_code.plots.matrices import draw_causal, frame_past
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def weights(matrices: Mapping[str, ArrayLike], words: Sequence[str]) -> BookFigure:
    """Causal weights of words: a row for each query, a column for each key, no matter their size.

    The darkest cell of each matrix is its largest weight.
    """
    figure, (panels,) = new_figure(len(matrices), width=6.4, height=2.9)
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        draw_causal(axes, matrix, title=title, numbers=False)
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(words)), words)
        axes.tick_params(which="major", labelbottom=True, labelleft=axes is panels[0])
    panels[0].set_ylabel("query")
    for axes in panels:
        axes.set_xlabel("key")
    return figure


@drawing
def blocks(matrices: Mapping[str, ArrayLike], cut: int) -> BookFigure:
    """Causal weights, a row for each query; framed is what queries from `cut` on see before it."""
    figure, (panels,) = new_figure(len(matrices), width=6.0, height=3.2)
    for axes, (title, weights) in zip(panels, matrices.items(), strict=True):
        draw_causal(axes, weights, title=title, numbers=False)
        frame_past(axes, len(np.asarray(weights)), cut, linewidth=2.5)
    return figure


@drawing
def weights_of_the_past(decay: ArrayLike, distance: int) -> BookFigure:
    """e^{-(n-1) w}: a row for each channel, a column for each distance n, or for a few far ones."""
    decay = np.asarray(decay)
    n = np.unique(np.geomspace(1, distance, 50).round())
    figure, ((axes,),) = new_figure(height=3.3)
    edges = np.append(n, distance + 1) - 0.5, np.arange(len(decay) + 1) - 0.5
    # Faces alone would leave hairlines between them.
    image = axes.pcolormesh(
        *edges,
        np.exp(-(n - 1) * decay[:, None]),
        cmap=POSITIVE,
        vmin=0,
        edgecolor="face",
        linewidth=1.0,
    )
    half = 1 + np.log(2) / decay  # where a weight is 1/2
    axes.plot(half, np.arange(len(decay)), color=VERMILION)
    axes.text(half[0] * 0.97, 1.2, "half", color=VERMILION, ha="right", va="bottom")
    axes.set(xlabel="distance in tokens", ylabel="channel", xscale="log", xlim=(0.9, distance))
    axes.set_xticks([n for n in (1, 3, 10, 30, 100, 300, 1000) if n <= distance])
    axes.get_xaxis().set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="weight")
    return figure


@drawing
def block() -> BookFigure:
    """The block of RWKV-4 from the left to the right: two sublayers, each around a residual.

    Beside the parts that remember stands how many vectors they carry from token to token.
    """
    figure, ((axes,),) = new_figure(height=2.9)
    axes.set(xlim=(-0.8, 10.6), ylim=(-0.3, 4.1))
    axes.set_axis_off()
    for start, name, rows, carried in (
        (1.0, "time mix", ["norm 1", "token shift", "WKV, gate"], [0, 1, 3]),
        (6.1, "channel mix", ["norm 2", "token shift", "ReLU², gate"], [0, 1, 0]),
    ):
        middle, turn = start + 1.55, start + 3.75
        rectangle(axes, start, 0.75, 3.1, 2.75, "none", linestyle=(0, (3, 2)))
        write(axes, middle, 3.58, name, va="bottom", color=GRAY)
        for i, row in enumerate(rows):
            box(axes, start + 0.25, 0.9 + 0.85 * i, 2.6, 0.6, row, "#e3eef8", BLUE)
            if carried[i]:
                vectors = "1 vector" if carried[i] == 1 else f"{carried[i]} vectors"
                x, y = start - 0.08, 1.2 + 0.85 * i
                write(axes, x, y, vectors, ha="right", color=VERMILION, fontsize=9.5)
            if i:
                _arrow(axes, (middle, 0.65 + 0.85 * i), (middle, 0.9 + 0.85 * i))
        _arrow(axes, (middle, 0.0), (middle, 0.9))
        axes.plot([start + 2.85, turn], [2.93, 2.93], color=INK, linewidth=1.4)
        _arrow(axes, (turn, 2.93), (turn, 0.2))
        write(axes, turn, 0, "+", fontsize=15, color=BLUE)
    _arrow(axes, (0.0, 0), (4.55, 0))
    _arrow(axes, (4.95, 0), (9.65, 0))
    _arrow(axes, (10.05, 0), (10.4, 0))
    write(axes, -0.1, 0, "x", ha="right")
    write(axes, 10.5, 0, "y", ha="left")
    return figure


def _arrow(axes: Axes, start: tuple, end: tuple) -> None:
    arrow(axes, start, end, INK, gap=0)
