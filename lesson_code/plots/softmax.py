"""Figures of softmax attention: who takes from whom, the causal mask, tiles."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights
from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, POSITIVE, VERMILION, look
from lesson_code.plots.lines import legend_below
from lesson_code.plots.matrices import draw_causal, draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def words_and_weights(
    columns: Sequence[tuple[Sequence[str], NDArray]], names: Sequence[str] = ()
) -> BookFigure:
    """Sentences, one beside the other, and how much their last words take from each word.

    A column has the words, from top to bottom, and their weights. Curves from the last word are as
    thick as the weights, and so are the words' grounds dark; weights of 0.05 and more are written
    on the left. names stand above the columns.
    """
    size, step, gap, numbers, above = 14, 22, 26, 46, 30 if names else 8
    words_wide = max(width_of(word, size) for words, _ in columns for word in words)
    longest = max(len(words) for words, _ in columns)
    reach = 84
    pitch = numbers + words_wide + reach + gap
    wide, high = pitch * len(columns) - gap, above + step * longest
    figure, axes = canvas(wide / 72, high / 72, unit=1)
    for column, (words, weights) in enumerate(columns):
        right = pitch * column + numbers + words_wide
        asking = (len(words) - 1) * step
        if names:
            style = {"ha": "left", "size": size, "weight": "bold"}
            write(axes, pitch * column, -step - 6, names[column], **style)
        for i, (word, weight) in enumerate(zip(words, weights, strict=True)):
            y = i * step
            edge = INK if i == len(words) - 1 else "none"
            ground = {"facecolor": POSITIVE(0.4 * weight), "edgecolor": edge}
            ground["boxstyle"] = "square,pad=0.16"
            write(axes, right, y, word, size=size, ha="right", bbox=ground)
            if weight >= 0.05:
                style = {"color": BLUE, "weight": "bold", "ha": "left", "size": size - 1}
                write(axes, right - words_wide - numbers, y, f"{weight:.2f}", **style)
            if weight >= 0.01 and y != asking:
                start, depth = right + 5, 1.2 * reach * min(1, 0.3 + (asking - y) / 260)
                ends = (start, asking), (start + depth, asking), (start + depth, y), (start, y)
                codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
                line = {"edgecolor": BLUE, "linewidth": 6 * weight, "capstyle": "butt"}
                axes.add_patch(PathPatch(Path(ends, codes), facecolor="none", **line))
    axes.set(xlim=(-4, wide), ylim=(step * (longest - 0.5), -step / 2 - above + 8))
    return figure


def width_of(text: str, size: float) -> float:
    """Width in points."""
    return TextPath((0, 0), text, size=size).get_extents().width


@drawing
def learning(
    steps: Sequence[int], panels: Mapping[str, NDArray], names: Sequence[str]
) -> BookFigure:
    """Weights of named words over the steps of training, one panel for each word that asks.

    A panel has the shape (steps, words).
    """
    figure, axes = new_figure(len(panels), height=3.2, sharex=True, sharey=True)
    for panel, (word, weights) in zip(axes[0], panels.items(), strict=True):
        for index, (name, y) in enumerate(zip(names, weights.T, strict=True)):
            panel.plot(steps, y, label=name, **look(index, markersize=4, markevery=2))
        panel.set(title=f"“{word}” asks", xlabel="step of training")
    axes[0, 0].set_ylabel("weight")
    legend_below(figure, *axes[0, 0].get_legend_handles_labels())
    return figure


@drawing
def weights_side_by_side(q: NDArray, k: NDArray, names: Sequence[str]) -> BookFigure:
    """The attention weights of q and k without and with the causal mask, for tokens with names."""
    figure, ((left, right),) = new_figure(2, width=5.6, height=3.4)
    draw_matrix(left, attention_weights(q, k), title="every position", limit=1)
    draw_causal(right, attention_weights(q, k, causal=True), title="causal", limit=1)
    for axes in (left, right):
        axes.set(xlabel="key $j$", xticks=range(len(names)), xticklabels=names)
        axes.tick_params(labelbottom=True, labelsize=11)
    left.set(ylabel="query $i$", yticks=range(len(names)), yticklabels=names)
    left.tick_params(labelleft=True)
    return figure


TO_COME = "#f3f7fb"  # of tiles, paler than pale blue


@drawing
def tiles(num_tiles: int) -> BookFigure:
    """The causal N×N matrix in tiles: done, in memory, still to come, half masked and skipped."""
    figure, axes = canvas(5.2, 3.4, unit=1)
    current = (num_tiles - 2, 0)
    order = 0
    for i, x in np.ndindex(num_tiles, num_tiles):
        y = num_tiles - 1 - i
        if x > i:
            rectangle(axes, x, y, 1, 1, "none", "#c4c4c4")
            continue
        order += 1
        fill, color = pale.BLUE if (i, x) < current else TO_COME, INK
        if (i, x) == current:
            fill, color = VERMILION, "white"
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
    for text, i in (("done", 1), ("in memory now", current[0]), ("to come", num_tiles - 1)):
        row = num_tiles - 0.5 - i
        axes.annotate(text, (0, row), (-0.4, row), va="center", ha="right", arrowprops=line)
    axes.set(xlim=(-2.9, num_tiles + 2.4), ylim=(-0.05, num_tiles + 0.05))
    return figure
