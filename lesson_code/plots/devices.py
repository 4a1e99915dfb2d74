"""Figures of measurements: lines here and elsewhere, single calls, and where lines cross."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from lesson_code.plots.colors import BLUE, GRAY, look
from lesson_code.plots.lines import beside, label_decades, legend_below, mark, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure

NARROW = 4.6  # inches


@drawing
def side_by_side(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
) -> BookFigure:
    """Named lines in one panel for each title, beside each other, on the same logarithmic axes.

    A line is {x: y}; a line that several panels have looks the same in each and stands once in the
    legend. `marks` draws a dotted vertical with its value in the panels that it names, where that
    is a finite number.
    """
    figure, (axes,) = new_figure(len(panels), height=3.5, sharex=True, sharey=True)
    draw_panels(figure, list(axes), panels, ylabel, marks or {})
    for panel in axes:
        panel.set_xlabel(xlabel)
    return figure


@drawing
def one_above_the_other(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
) -> BookFigure:
    """The same with the panels below each other, narrow enough for a phone."""
    height = 2.6 * len(panels) + 0.6
    figure, grid = new_figure(1, len(panels), width=NARROW, height=height, sharex=True, sharey=True)
    draw_panels(figure, list(grid[:, 0]), panels, ylabel, marks or {})
    for panel in grid[:, 0]:
        panel.set_ylabel(ylabel)
    grid[-1, 0].set_xlabel(xlabel)
    return figure


def draw_panels(
    figure: BookFigure,
    axes: Sequence[Axes],
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    ylabel: str,
    marks: Mapping[str, float],
) -> None:
    """Lines, titles, marks and a legend; the first panel has the label of y."""
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    handles = {}
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, line in lines.items():
            style = look(names.index(name))
            (handles[name],) = panel.plot(list(line), list(line.values()), **style)
        panel.set(xscale="log", yscale="log")
        panel.set_title(title, pad=20 if marks else None)
        position = marks.get(title, np.inf)
        if np.isfinite(position):
            mark(panel, position, f"{position:,.0f}")
    axes[0].set_ylabel(ylabel)
    label_decades(axes[0].xaxis)
    label_decades(axes[0].yaxis)
    legend_below(figure, [handles[name] for name in names], names, handlelength=3)


@drawing
def calls(seconds: Sequence[float]) -> BookFigure:
    """One dot for each call, in their order; best, median and mean are those after the first."""
    figure, ((axes,),) = new_figure(width=NARROW, height=3.0)
    times = 1e3 * np.asarray(seconds)
    axes.plot(range(1, len(times) + 1), times, **look(0, linestyle="none"))
    axes.set(yscale="log", xlabel="call", ylabel="milliseconds")
    axes.margins(x=0.03)
    label_decades(axes.yaxis)
    rest = times[1:]
    levels = {"best": np.min(rest), "median": np.median(rest), "mean": np.mean(rest)}
    for row, (name, level) in enumerate(levels.items()):
        axes.axhline(float(level), label=name, **look(row + 1, marker=None))
    name_lines(axes, axes.get_lines()[1:], height=3.0)
    return figure


@drawing
def quotients(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> BookFigure:
    """A row of dots for each way of comparing two equal times; right answers lie on the line."""
    every = [x for rows in panels.values() for values in rows.values() for x in values]
    largest = max(2.2, *(max(x, 1 / x) for x in every)) * 1.15
    ticks = [x for x in (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100) if 1 / largest < x < largest]
    height = sum(0.36 * len(rows) + 0.5 for rows in panels.values()) + 0.5
    figure, grid = new_figure(1, len(panels), width=NARROW, height=height, sharex=True)
    for axes, (title, rows) in zip(grid[:, 0], panels.items(), strict=True):
        for row, values in enumerate(rows.values()):
            axes.plot(values, [row] * len(values), **look(0, linestyle="none", alpha=0.55))
        axes.axvline(1, color=GRAY, linestyle=":", linewidth=1.4)
        axes.set(xscale="log", xlim=(1 / largest, largest), title=title)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    grid[-1, 0].set_xlabel("time of a / time of b")
    return figure


@drawing
def moved(
    crossings: Mapping[str, Sequence[float]],
    best: Mapping[str, float],
    base: str,
    claimed: tuple[float, float],
) -> BookFigure:
    """Where the lines cross in each setting: single runs as dots, their best times as a diamond.

    A bar leads from the base to the diamond, which has its number; a range is gray.
    """
    figure, ((axes,),) = new_figure(width=NARROW, height=0.36 * len(crossings) + 1.1)
    axes.axvspan(*claimed, color=GRAY, alpha=0.2, lw=0)
    axes.axvline(best[base], color=GRAY, linestyle=":", linewidth=1.4)
    for row, (name, runs) in enumerate(crossings.items()):
        axes.plot([best[base], best[name]], [row, row], color=BLUE, linewidth=2.4)
        dots = look(0, linestyle="none", markerfacecolor="white", markersize=5)
        axes.plot(runs, [row] * len(runs), **dots)
        axes.plot(best[name], row, "D", color=BLUE, markersize=8)
        left = best[name] < best[base]
        place = {"ha": "right" if left else "left", "va": "center", "fontsize": 10}
        end, offset = (min(*runs, best[name]), -8) if left else (max(*runs, best[name]), 8)
        beside(axes, f"{best[name]:,.0f}", (end, row), (offset, 0), **place)
    lowest = min(min(runs) for runs in crossings.values())
    axes.set(xscale="log", xlim=(lowest / 2, claimed[1] * 1.3), xlabel="tokens N at the crossing")
    axes.set_yticks(range(len(crossings)), list(crossings))
    axes.set_ylim(len(crossings) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    label_decades(axes.xaxis)
    center = float(np.sqrt(claimed[0] * claimed[1]))
    above = {"xycoords": ("data", "axes fraction"), "color": GRAY, "ha": "center", "fontsize": 10}
    beside(axes, "claimed", (center, 1), (0, 3), **above)
    return figure
