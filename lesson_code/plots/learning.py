"""Figures of memories that learn: how each walks towards a solution, and how fast."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow
from lesson_code.plots.colors import BLUE, INK, LOOKS, look
from lesson_code.plots.lines import beside, label_decades, legend_below, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def walks(
    k: ArrayLike,
    v: ArrayLike,
    paths: Mapping[str, ArrayLike],
    names: Sequence[str],
    tokens: Sequence[str],
) -> BookFigure:
    """The ways of several memories of two numbers, over the sum of their squared errors.

    k is (N, 2), with no 0 in its first column, and v (N,); a path is (steps, 2). Each token is a
    dashed line, all memories that answer it exactly, with its name at the foot, and contours show
    the sum of the squares. Steps that all paths begin with are black; their names stand below.
    """
    k, v = np.asarray(k, float), np.asarray(v, float)
    ways = [np.asarray(path, float) for path in paths.values()]
    ends = np.concatenate(ways)
    low, high = ends.min(axis=0) - 4, ends.max(axis=0) + 4
    figure, ((axes,),) = new_figure(width=5.4, height=5.0)
    x, y = np.meshgrid(*(np.linspace(a, b, 200) for a, b in zip(low, high, strict=True)))
    loss = sum((v_t - k_t[0] * x - k_t[1] * y) ** 2 / 2 for k_t, v_t in zip(k, v, strict=True))
    levels = np.square([3, 6, 10, 15, 21, 28]) / 2
    axes.contour(x, y, loss, levels=levels, colors="#d0d0d0", linewidths=1, zorder=0)
    for k_t, v_t, token in zip(k, v, tokens, strict=True):
        along = np.array([-k_t[1], k_t[0]])
        line = k_t * v_t / (k_t @ k_t) + np.array([[-99.0], [99.0]]) * along
        axes.plot(*line.T, color=BLUE, linestyle="--", linewidth=1.2, zorder=1)
        foot = (v_t - k_t[1] * low[1]) / k_t[0], low[1]
        beside(axes, token, foot, (-14, 4), color=BLUE, ha="right", fontsize=10)
    shortest = min(len(way) for way in ways)
    same = np.all([way[:shortest] == ways[0][:shortest] for way in ways], axis=(0, 2))
    common = int(np.argmin([*same, False]))  # places that all paths begin with
    for start, end in zip(ways[0][: common - 1], ways[0][1:common], strict=False):
        arrow(axes, start, end, INK, gap=0, linewidth=1.8)
    begin = max(common - 1, 0)
    handles = []
    for (color, _, marker), way in zip(LOOKS[1:], ways, strict=False):
        for start, end in zip(way[begin:-1], way[begin + 1 :], strict=True):
            arrow(axes, start, end, color, gap=0, linewidth=1.8)
        places, look = way[begin + 1 :].T, {"linestyle": "none", "markersize": 6, "zorder": 6}
        axes.plot(*places, color=color, marker=marker, **look)  # on the star, not behind it
        handles.append(Line2D([], [], color=color, marker=marker, markersize=6))
    best = np.linalg.lstsq(k, v, rcond=None)[0]
    axes.plot(*best, color=INK, marker="*", markersize=15, zorder=5)
    beside(axes, "solution", tuple(best), (8, 8), fontweight="bold")
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.grid(visible=False)
    legend_below(figure, handles, list(paths), ncols=min(len(paths), 3))
    return figure


@drawing
def exam(examples: ArrayLike, tasks: Mapping[str, Mapping[str, ArrayLike]]) -> BookFigure:
    """Errors against the number of examples: a panel for each task, a line for each rule.

    A rule has an array (seeds, len(examples)): its line is the mean over the seeds, in a band from
    the smallest to the largest.
    """
    rules = list(dict.fromkeys(rule for task in tasks.values() for rule in task))
    each = 2.6
    figure, axes = new_figure(1, len(tasks), height=each * len(tasks), sharex=True)
    for panel, (task, found) in zip(axes[:, 0], tasks.items(), strict=True):
        panel.set_title(task, loc="left", fontweight="bold")
        panel.set(xscale="log", yscale="log", ylabel="error")
        panel.margins(x=0.02)
        drawn = []
        for rule, errors in found.items():
            line, errors = look(rules.index(rule), markersize=5), np.asarray(errors, float)
            drawn += panel.plot(examples, errors.mean(axis=0), label=rule, **line)
            band = errors.min(axis=0), errors.max(axis=0)
            style = {"color": line["color"], "alpha": 0.2, "linewidth": 0}
            panel.fill_between(np.asarray(examples), *band, **style)
        name_lines(panel, drawn, each)
        label_decades(panel.yaxis)
        panel.xaxis.set_minor_formatter(NullFormatter())
    axes[-1, 0].set_xticks(examples, [str(n) for n in np.asarray(examples)])
    axes[-1, 0].minorticks_off()
    axes[-1, 0].set_xlabel("examples read")
    return figure
