"""Figures of feature maps: heads that read, and the rows of weights that maps can give."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, GREEN, INK, look
from lesson_code.plots.lines import bars, beside
from lesson_code.plots.matrices import draw_causal, draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


def visible(letters: str) -> list[str]:
    """The letters of a text, with a sign for the space."""
    return ["\N{OPEN BOX}" if letter.isspace() else letter for letter in letters]


@drawing
def heads_reading(weights: Mapping[str, ArrayLike], letters: str) -> BookFigure:
    """Causal weights (N, N) of each name over the letters that were read, in one scale of gray."""
    figure, (panels,) = new_figure(len(weights), width=5.4, height=5.4 / len(weights) + 0.4)
    shown = visible(letters)
    for axes, (name, a) in zip(panels, weights.items(), strict=True):
        draw_causal(axes, a, numbers=False, title=name, limit=1)
        axes.set_xticks(range(len(shown)), shown)
        axes.set_yticks(range(len(shown)), shown)
        axes.tick_params(labelbottom=True, labelleft=True, pad=1)
        axes.set_xlabel("key")
    panels[0].set_ylabel("query")
    return figure


@drawing
def fixed_rows(rows: Mapping[str, ArrayLike], letters: str) -> BookFigure:
    """The rows of weights (C, N) that the queries of each map can mix, sorted by their peaks."""
    figure, (panels,) = new_figure(len(rows), width=5.4, height=3.9)
    for axes, (name, weights) in zip(panels, rows.items(), strict=True):
        a = np.asarray(weights, dtype=float)
        peaks_in_order = np.lexsort((-a.max(axis=1), a.argmax(axis=1)))
        draw_matrix(axes, a[peaks_in_order], numbers=False, title=name, limit=1)
        axes.set_aspect("auto")
        axes.set_xticks(range(len(letters)), visible(letters))
        axes.tick_params(labelbottom=True, pad=1)
        axes.set_xlabel("key")
    panels[0].set_ylabel("fixed rows")
    return figure


@drawing
def trained_and_not(
    maps: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
) -> BookFigure:
    """Divergence over the number of features of each map: untrained, and trained (or {}).

    Untrained is hollow, trained is filled, and an arrow leads from one to the other where both
    have as many features.
    """
    figure, ((axes,),) = new_figure(width=5.4, height=3.7)

    def place(name: str, C: int) -> float:
        """Maps of one width stand side by side."""
        beside_it = [other for other, both in maps.items() if any(C in points for points in both)]
        return C * 1.06 ** (beside_it.index(name) - (len(beside_it) - 1) / 2)

    for index, (name, (untrained, trained)) in enumerate(maps.items()):
        style = look(index, markersize=8)
        places = [place(name, C) for C in trained]
        axes.plot(places, list(trained.values()), **{**style, "linewidth": 1.4})
        for C, height in untrained.items():
            x = place(name, C)
            axes.plot(x, height, **{**style, "markerfacecolor": "white", "linestyle": "none"})
            beside(axes, name, (x, height), (8, 0), va="center", color=style["color"])
            if C in trained:
                arrow(axes, (x, height - 0.03), (x, trained[C] + 0.03), style["color"], linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks([16, 32, 64, 128], ["16", "32", "64", "128"])
    axes.set_xlim(13, 250)
    axes.set_ylim(0, 1.1 * max(max(points.values()) for points, _ in maps.values()))
    axes.set(xlabel="features C", ylabel="divergence from softmax")
    return figure


@drawing
def plane_and_weights(q: ArrayLike, keys: ArrayLike, rows: Mapping[str, ArrayLike]) -> BookFigure:
    """A query and keys of width 2 as arrows (left), and rows of weights over the keys (right).

    The first row is drawn as a line across the others.
    """
    query, tips = np.asarray(q, dtype=float), np.asarray(keys, dtype=float)
    names = [f"$k_{j}$" for j in range(1, len(tips) + 1)]
    figure, panels = new_figure(
        2, len(rows), height=0.85 * len(rows), width_ratios=[1.25, 1], sharex="col", sharey="col"
    )
    grid = panels[0, 0].get_gridspec()
    for axes in panels[:, 0]:
        axes.remove()
    plane = figure.add_subplot(grid[:, 0])
    for tip, name, color in zip(
        [*tips, query], [*names, "$q$"], [*[BLUE] * len(tips), GREEN], strict=True
    ):
        arrow(plane, (0, 0), tip, color, gap=0, linewidth=1.8)
        x, y = tip + 0.3 * tip / max(float(np.linalg.norm(tip)), 1e-9)  # beyond the tip
        write(plane, x, y, name, color=color)
    reach = max(3.0, float(np.abs([*tips, query]).max()) + 0.5)
    plane.set(xlim=(-reach, reach), ylim=(-reach, reach))
    plane.set_aspect("equal")
    first = np.asarray(next(iter(rows.values())), dtype=float)
    for axes, (name, weights) in zip(panels[:, 1], rows.items(), strict=True):
        bars(axes, weights, width=0.7)
        axes.hlines(first, np.arange(len(tips)) - 0.42, np.arange(len(tips)) + 0.42, color=INK)
        axes.set_title(name, fontsize="medium")
        axes.set_xticks(range(len(tips)), names, fontsize=13)
    panels[len(rows) // 2, 1].set_ylabel("weight")
    return figure
