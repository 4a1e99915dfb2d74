"""Figures of what a state can hold: who reads whom in a task, and how many answers are right."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import ListedColormap
from numpy.typing import ArrayLike

from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
from lesson_code.plots.lines import beside, legend_below, name_lines
from lesson_code.plots.matrices import draw_causal, draw_matrix, frame_past
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def overflow(panels: Mapping[str, ArrayLike], rows: int) -> BookFigure:
    """Which pairs are found while more and more are written: blue if so, vermilion if not.

    Each panel is (N, N): row n - 1 says of each of the first n pairs whether it is found. A dotted
    line stands below the row in which as many pairs are written as a state has `rows`.
    """
    figure, axes = new_figure(len(panels), height=6.9 / len(panels) + 0.45, sharey=True)
    for panel, (name, found) in zip(axes[0], panels.items(), strict=True):
        found = np.asarray(found, bool)
        N = len(found)
        ends = (0.5, N + 0.5)
        written = np.where(np.tri(N, dtype=bool), found, np.nan)
        colors = ListedColormap([VERMILION, BLUE])
        panel.imshow(written, cmap=colors, vmin=0, vmax=1, extent=(*ends, *ends[::-1]))
        panel.plot(ends, [rows + 0.5] * 2, color=INK, linestyle=":", linewidth=1.2)
        panel.set_title(f"{name}: {found[-1].sum()} of {N}", loc="left")
        panel.set_xlabel("pair")
        panel.grid(visible=False)
        panel.set_xticks([1, rows, N])
        panel.set_yticks([1, rows, N])
    axes[0, 0].set_ylabel("pairs written")
    return figure


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
def groups(
    x: ArrayLike,
    panels: Mapping[str, Mapping[str, ArrayLike]],
    law: ArrayLike,
    *,
    xlabel: str,
    ylabel: str = "share right",
) -> BookFigure:
    """Small multiples that share their lines: each panel has those of its group in color.

    Each run of a panel is (number of runs, len(x)): a line through the means, with bars from the
    lowest to the highest. The lines of all other panels are gray, and the law is dotted.
    """
    columns = 2
    rows = -(-len(panels) // columns)
    figure, grid = new_figure(columns, rows, height=2.35 * rows, sharex=True, sharey=True)
    x = np.asarray(x)
    means = [np.asarray(runs).mean(axis=0) for group in panels.values() for runs in group.values()]
    for axes, (title, group) in zip(grid.ravel(), panels.items(), strict=False):
        for mean in means:
            axes.plot(x, mean, color="#d4d4d4", linewidth=1, zorder=1)
        axes.plot(x, law, color=INK, linestyle=":", linewidth=1.4, zorder=2)
        for index, (name, runs) in enumerate(group.items()):
            style = look(index, markersize=4.5)
            runs = np.asarray(runs, float)
            axes.vlines(x, runs.min(axis=0), runs.max(axis=0), color=style["color"], linewidth=1.2)
            axes.plot(x, runs.mean(axis=0), label=name, **style)
        axes.set_title(title, loc="left")
        axes.legend(loc="lower left", fontsize=9.4, handlelength=1.4, labelspacing=0.3)
    grid[0, 0].set(xscale="log", ylim=(0, 1.03))
    grid[0, 0].set_xticks(x, [f"{value:g}" for value in x])
    for axes in grid.ravel():
        axes.minorticks_off()
    figure.supxlabel(xlabel, fontsize=11)
    figure.supylabel(ylabel, fontsize=11)
    return figure


@drawing
def against_law(
    load: ArrayLike,
    law: ArrayLike,
    panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
) -> BookFigure:
    """What trained models reach, as points, over the load, with a law as a line; a panel for each.

    Each set of points is (loads, shares), two arrays of one shape. Where a load comes several
    times, the line goes through the mean of the law's values.
    """
    figure, grid = new_figure(len(panels), height=3.3, sharex=True, sharey=True)
    ticks, place = np.unique(load, return_inverse=True)
    line = np.bincount(place.ravel(), weights=np.ravel(law)) / np.bincount(place.ravel())
    for axes, (title, sizes) in zip(grid[0], panels.items(), strict=True):
        axes.plot(ticks, line, color=INK, linestyle=":", linewidth=1.4, label="random keys")
        for index, (name, (x, y)) in enumerate(sizes.items()):
            axes.plot(x, y, label=name, **look(index, linestyle="none", markersize=6.5))
        axes.set_title(title, loc="left")
    axes = grid[0, 0]
    axes.set(xscale="log", ylim=(0, 1.05), ylabel="share right")
    axes.set_xticks(ticks, [f"{t:g}" if t >= 1 else f"1/{1 / t:g}" for t in ticks])
    for axes in grid[0]:
        axes.minorticks_off()
    grid[0, 0].legend(loc="lower left")
    figure.supxlabel("load: pairs / D", fontsize=11)
    return figure


@drawing
def sizes(
    runs: Mapping[str, Mapping[str, ArrayLike]], law: Mapping[str, float], *, xlabel: str
) -> BookFigure:
    """What each mixer answers with memories of several sizes: a row for each, the first on top.

    ``runs[mixer][size]`` has a share for each run: a mark at their mean, on a line over all of
    them. A dotted line stands at what the law says of each size.
    """
    figure, ((axes,),) = new_figure(height=0.3 * len(runs) + 1.3)
    for index, size in enumerate(law):
        style = look(index, linestyle="-", markersize=6.5)
        axes.axvline(law[size], color=style["color"], linestyle=":", linewidth=1.4)
        for row, shares in enumerate(runs.values()):
            y, found = row + 0.15 * (2 * index - len(law) + 1), np.asarray(shares[size], float)
            axes.plot([found.min(), found.max()], [y, y], color=style["color"], linewidth=1.5)
            axes.plot(found.mean(), y, label=size if row == 0 else None, **style)
    axes.set(xlabel=xlabel, xlim=(-0.02, 1.02), ylim=(len(runs) - 0.4, -0.6))
    axes.set_yticks(range(len(runs)), runs)
    axes.grid(visible=False, axis="y")
    legend_below(figure, *axes.get_legend_handles_labels())
    return figure
