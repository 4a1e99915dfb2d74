"""Figures of decoding: what one more token costs after a long context."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lesson_code.plots.colors import look
from lesson_code.plots.lines import label_decades, legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def contexts(rows: Sequence[Mapping], names: Sequence[str]) -> BookFigure:
    """Seconds of one step and bytes of what is kept, against the length of the context.

    A row is a dictionary: ``N``, ``seconds`` and ``bytes``, the latter two again dictionaries of a
    number for each name. Where the seconds are None the step was not run, and the marker of its
    bytes is hollow.
    """
    figure, ((seconds,), (kept,)) = new_figure(rows=2, height=6.4, sharex=True)
    handles = []
    for index, name in enumerate(names):
        line, points = look(index, marker=None), look(index, linestyle="none")
        run = [row for row in rows if row["seconds"][name] is not None]
        not_run = [row for row in rows if row["seconds"][name] is None]
        handles += _plot(seconds, run, "seconds", name, look(index))
        _plot(kept, rows, "bytes", name, line)
        _plot(kept, run, "bytes", name, points)
        _plot(kept, not_run, "bytes", name, {**points, "markerfacecolor": "white"})
    for axes, title in ((seconds, "seconds of one step"), (kept, "bytes kept")):
        axes.set(xscale="log", yscale="log", title=title)
        label_decades(axes.xaxis)
        label_decades(axes.yaxis)
    kept.set_xlabel("context N")
    legend_below(figure, handles, names, ncols=3, handlelength=3)
    return figure


def _plot(axes: Axes, rows: Sequence[Mapping], what: str, name: str, style: dict) -> list[Line2D]:
    return axes.plot([row["N"] for row in rows], [row[what][name] for row in rows], **style)
