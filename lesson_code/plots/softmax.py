"""Figures of softmax attention: who takes from whom, the causal mask, tiles."""

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights
from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, POSITIVE, VERMILION
from lesson_code.plots.matrices import draw_causal, draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def words_and_weights(
    rows: Sequence[tuple[Sequence[str], NDArray]], names: Sequence[str] = ()
) -> BookFigure:
    """Sentences, one above the other, and how much their last words take from each word.

    A row has the words and their weights; the first sentence stands on top. Curves from the last
    word are as thick as the weights, and so are the words' grounds dark; weights of 0.05 and more
    are written below. names stand before the rows.
    """
    figure, axes = canvas(6.4, 1.25 * len(rows) + 0.1, unit=1)
    axes.set_aspect("auto")
    size, gap, above, below = 11, 7, 66, 24
    left = max((width_of(name, size) + 2 * gap for name in names), default=0)
    right = 0.0
    for row, (words, weights) in enumerate(rows):
        y = -(above + below + size) * row
        x, middles = left, []
        for word in words:
            width = width_of(word, size)
            middles.append(x + width / 2)
            x += width + gap
        right = max(right, x)
        if names:
            write(axes, 0, y, names[row], ha="left", size=size, weight="bold")
        asking = middles[-1]
        for word, middle, weight in zip(words, middles, weights, strict=True):
            ground = POSITIVE(0.4 * weight)
            edge = INK if middle == asking else "none"
            style = {"facecolor": ground, "edgecolor": edge, "boxstyle": "square,pad=0.16"}
            write(axes, middle, y, word, size=size, bbox=style)
            if weight >= 0.05:
                write(axes, middle, y - 18, f"{weight:.2f}", color=BLUE, weight="bold")
            if weight >= 0.01 and middle != asking:
                top = y + size + 1.15 * above * min(1, (asking - middle) / 260)
                ends = (asking, y + size), (asking, top), (middle, top), (middle, y + size)
                codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
                line = {"edgecolor": BLUE, "linewidth": 6 * weight, "capstyle": "butt"}
                axes.add_patch(PathPatch(Path(ends, codes), facecolor="none", **line))
    lowest = -(above + below + size) * (len(rows) - 1) - below
    axes.set(xlim=(-6, right), ylim=(lowest, above + 2 * size))
    return figure


def width_of(text: str, size: float) -> float:
    """Width in points."""
    return TextPath((0, 0), text, size=size).get_extents().width


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
