"""Figures of decoding: what one more token costs after a long context."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lesson_code.plots.colors import look
from lesson_code.plots.lines import beside, label_decades, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def contexts(rows: Sequence[Mapping], names: Sequence[str]) -> BookFigure:
    """Seconds of one step and bytes of what is kept, against the length of the context.

    A row is a dictionary: ``N``, ``seconds`` and ``bytes``, the latter two again dictionaries of a
    number for each name. Where the seconds are None the step was not run, and the marker of its
    bytes is hollow. Names stand at the ends of their lines; where several keep nearly as many
    bytes, only the first of them is drawn, as "states".
    """
    height = 6.4
    figure, ((seconds,), (kept,)) = new_figure(rows=2, height=height, sharex=True)
    above: list[Line2D] = []
    below: list[Line2D] = []
    last: list[float] = []
    for index, name in enumerate(names):
        line, points = look(index, marker=None), look(index, linestyle="none")
        run = [row for row in rows if row["seconds"][name] is not None]
        not_run = [row for row in rows if row["seconds"][name] is None]
        above += _plot(seconds, run, "seconds", name, {**look(index), "label": name})
        size = rows[-1]["bytes"][name]
        if any(math.isclose(size, other, rel_tol=0.1) for other in last):
            below[-1].set_label("states")
            continue
        last.append(size)
        below += _plot(kept, rows, "bytes", name, {**line, "label": name})
        _plot(kept, run, "bytes", name, points)
        _plot(kept, not_run, "bytes", name, {**points, "markerfacecolor": "white"})
    for axes, title in ((seconds, "seconds of one step"), (kept, "bytes kept")):
        axes.set(xscale="log", yscale="log", title=title)
        label_decades(axes.xaxis)
        label_decades(axes.yaxis)
    kept.set_xlabel("context N")
    name_lines(seconds, [line for line in above if np.size(line.get_ydata())], height / 2)
    name_lines(kept, below, height / 2)
    return figure


def _plot(axes: Axes, rows: Sequence[Mapping], what: str, name: str, style: dict) -> list[Line2D]:
    return axes.plot([row["N"] for row in rows], [row[what][name] for row in rows], **style)


@drawing
def readers(shared: float, own: Mapping[str, float], fit: Mapping[str, int]) -> BookFigure:
    """Megabytes that one token moves per reader: a share of what all read, and what is one's own.

    Both are in bytes. Markers are filled up to the number of readers that fit, where the value is
    written, and hollow beyond.
    """
    height = 3.8
    figure, ((axes,),) = new_figure(height=height)
    most = max(fit.values())
    top = math.ceil(math.log2(most))
    lines = []
    for index, (name, mine) in enumerate(own.items()):
        counts = sorted({2**i for i in range(top)} | {fit[name], most})
        within = [count for count in counts if count <= fit[name]]
        beyond = [count for count in counts if count > fit[name]]

        def megabytes(counts: Sequence[int], mine: float = mine) -> list[float]:
            return [(shared / count + mine) / 1e6 for count in counts]

        lines += axes.plot(counts, megabytes(counts), label=name, **look(index, marker=None))
        points = look(index, linestyle="none")
        axes.plot(within, megabytes(within), **points)
        axes.plot(beyond, megabytes(beyond), **{**points, "markerfacecolor": "white"})
        (value,) = megabytes(within[-1:])
        text = f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"
        text += "\n" if within[-1] == most else ", "
        text += f"{fit[name]} reader" + "s" * (fit[name] > 1)
        side = "right" if within[-1] == most else "left"
        above = 14 if within[-1] == most else 8  # clear of the line, which comes from the left
        beside(axes, text, (within[-1], value), (0, above), ha=side, fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="readers", ylabel="megabytes per reader")
    axes.margins(y=0.18)
    label_decades(axes.xaxis)
    name_lines(axes, lines, height)
    return figure
