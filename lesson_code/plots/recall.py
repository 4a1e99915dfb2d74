"""Figures of what a state can hold: who reads whom in a task, and how many answers are right."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots.colors import GRAY, INK, look
from lesson_code.plots.lines import beside, name_lines
from lesson_code.plots.matrices import draw_causal, draw_matrix, frame_past
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def lookups(panels: Mapping[str, tuple[ArrayLike, ArrayLike, ArrayLike]]) -> BookFigure:
    """Where each question of a task looks: a row for each position that is asked.

    A panel is (weights, tokens, mask) of one sequence: (N, N), (N,) and (N,). Columns bear the
    tokens, rows the token that asks.
    """
    shown = {
        name: (np.asarray(weights)[np.asarray(mask)], np.asarray(tokens), np.flatnonzero(mask))
        for name, (weights, tokens, mask) in panels.items()
    }
    rows = [len(asked) for _, _, asked in shown.values()]
    longest = max(len(tokens) for _, tokens, _ in shown.values())
    cell, title = 0.31, 0.62
    width = longest * cell + 0.4
    height = sum(rows) * cell + title * len(rows)
    figure = BookFigure(figsize=(width, height))
    top = height
    for (name, (weights, tokens, asked)), count in zip(shown.items(), rows, strict=True):
        top -= title + count * cell
        size = (len(tokens) * cell / width, count * cell / height)
        axes = figure.add_axes((0.4 / width, top / height, *size))
        draw_matrix(axes, weights, limit=1.0, numbers=False)
        axes.tick_params(labelleft=True, labeltop=True, pad=2)
        axes.set_xticks(range(len(tokens)), tokens)
        axes.set_yticks(range(count), tokens[asked])
        axes.set_title(name, loc="left", pad=6)
    return figure


@drawing
def blocks(panels: Mapping[str, ArrayLike], cut: int) -> BookFigure:
    """Causal matrices of weights, with a frame around what later rows read before the cut.

    The largest weight inside the frame has the full color, in each matrix.
    """
    figure, axes = new_figure(len(panels), width=6.4, height=6.4 / len(panels) + 0.2)
    for panel, (name, weights) in zip(axes[0], panels.items(), strict=True):
        weights = np.asarray(weights)
        limit = float(np.abs(weights[cut:, :cut]).max())
        draw_causal(panel, weights, title=name, limit=limit)
        frame_past(panel, len(weights), cut, linewidth=2)
        panel.set(xlabel="read", ylabel="reads")
    return figure


@drawing
def spread(
    x: ArrayLike,
    runs: Mapping[str, ArrayLike],
    *,
    xlabel: str,
    ylabel: str = "share right",
    chance: float | None = None,
) -> BookFigure:
    """Named lines through the means of several runs, with bars from the lowest to the highest.

    Each of `runs` is (number of runs, len(x)); the axis of x is logarithmic with a tick at each x.
    """
    height = 3.9
    figure, ((axes,),) = new_figure(height=height)
    x = np.asarray(x)
    axes.set_xscale("log")
    for index, (name, values) in enumerate(runs.items()):
        style = look(index)
        values = np.atleast_2d(np.asarray(values, float))
        lowest, highest = values.min(axis=0), values.max(axis=0)
        axes.vlines(x, lowest, highest, color=style["color"], linewidth=1.2)
        axes.plot(x, values.mean(axis=0), label=name, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.03))
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    name_lines(axes, axes.get_lines(), height)
    if chance is not None:
        axes.axhline(chance, color=GRAY, linestyle=":", linewidth=1.4)
        beside(axes, "chance", (x[0], chance), (0, 3))
    return figure


@drawing
def against_law(
    load: ArrayLike, law: ArrayLike, points: Mapping[str, tuple[ArrayLike, ArrayLike]]
) -> BookFigure:
    """What trained models reach, as points, over the load, with a law as a line.

    Each of `points` is (loads, shares), two arrays of one shape. Where a load comes several times,
    the line goes through the mean of the law's values.
    """
    figure, ((axes,),) = new_figure(height=3.6)
    ticks, place = np.unique(load, return_inverse=True)
    line = np.bincount(place.ravel(), weights=np.ravel(law)) / np.bincount(place.ravel())
    axes.plot(ticks, line, color=INK, linewidth=1.6, label="random keys, one layer")
    for index, (name, (x, y)) in enumerate(points.items()):
        hollow = {"markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 6}
        axes.plot(np.ravel(x), np.ravel(y), label=name, **look(index, linestyle="none", **hollow))
    axes.set(xlabel="load: pairs / D", ylabel="share right", ylim=(0, 1.05), xscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(loc="lower left")
    return figure
