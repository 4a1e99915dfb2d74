"""Figures of softmax attention: sharpness, the causal mask, tiles."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Polygon
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights
from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION
from lesson_code.plots.lines import bars
from lesson_code.plots.matrices import draw_causal, draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def sharpness(widths: Sequence[int], num_keys: int, seed: int = 0) -> BookFigure:
    """One row of attention weights for each width D, without the scale (top) and with it."""
    rng = np.random.default_rng(seed)
    figure, axes = new_figure(len(widths), 2, height=3.6, sharex=True, sharey=True)
    for column, D in enumerate(widths):
        q, k = rng.standard_normal((1, D)), rng.standard_normal((num_keys, D))
        for row, (scale, color) in enumerate([(1.0, VERMILION), (None, BLUE)]):
            bars(axes[row, column], attention_weights(q, k, scale=scale)[0], color=color)
        axes[0, column].set_title(f"$D = {D}$")
        axes[1, column].set_xlabel("keys")
    axes[0, 0].set_ylabel("weight, no scale")
    axes[1, 0].set_ylabel("weight, scaled")
    return figure


@drawing
def weights_side_by_side(q: NDArray, k: NDArray) -> BookFigure:
    """The attention weights of q and k without and with the causal mask."""
    figure, ((left, right),) = new_figure(2, width=5.2, height=2.6)
    draw_matrix(left, attention_weights(q, k), title="every position", limit=1)
    draw_causal(right, attention_weights(q, k, causal=True), title="causal", limit=1)
    for axes in (left, right):
        axes.set(xlabel="key $j$", ylabel="query $i$")
    return figure


@drawing
def tiles(num_tiles: int) -> BookFigure:
    """The causal N×N matrix in tiles: computed, half masked, skipped, and the one in memory."""
    figure, axes = canvas(5.2, 3.4, unit=1)
    current = (num_tiles - 2, 0)
    order = 0
    for i, x in np.ndindex(num_tiles, num_tiles):
        y = num_tiles - 1 - i
        if x > i:
            rectangle(axes, x, y, 1, 1, "none", "#c4c4c4")
            continue
        order += 1
        fill, color = (VERMILION, "white") if (i, x) == current else (pale.BLUE, INK)
        if i == x:
            axes.add_patch(Polygon([(x, y), (x + 1, y), (x, y + 1)], fc=fill, ec="none"))
            rectangle(axes, x, y, 1, 1, "none")
            write(axes, x + 0.33, y + 0.3, str(order), color=color)
        else:
            box(axes, x, y, 1, 1, str(order), fill, color=color)
    line = {"arrowstyle": "-", "color": GRAY}
    for text, column, row in (
        ("skipped", num_tiles - 0.2, num_tiles - 0.5),
        ("half masked", num_tiles - 1.3, 1.6),
    ):
        axes.annotate(text, (column, row), (num_tiles + 0.4, row), va="center", arrowprops=line)
    row = num_tiles - 0.5 - current[0]
    axes.annotate("in memory now", (0, row), (-0.4, row), va="center", ha="right", arrowprops=line)
    axes.set(xlim=(-2.9, num_tiles + 2.4), ylim=(-0.05, num_tiles + 0.05))
    return figure
