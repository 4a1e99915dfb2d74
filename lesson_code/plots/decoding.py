"""Figures of decoding: what one more token costs after a long context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lesson_code.plots.devices import _label_ticks
from lesson_code.plots.style import COLORS, DASHES, MARKERS, BookFigure, drawing, new_figure


@drawing
def contexts(rows: Sequence[Mapping], names: Sequence[str]) -> BookFigure:
    """Seconds of one step and bytes of what is kept, against the length of the context.

    A row is a dictionary: ``N``, ``seconds`` and ``bytes``, the latter two again dictionaries of a
    number for each name. Where the seconds are None the step was not run, and the marker of its
    bytes is hollow.
    """
    figure, ((seconds, kept),) = new_figure(2, height=3.9, sharex=True)
    handles = []
    for index, name in enumerate(names):
        color, marker = COLORS[index % 6], MARKERS[index % 6]
        line = {"color": color, "linestyle": DASHES[index % 6]}
        run = [row for row in rows if row["seconds"][name] is not None]
        not_run = [row for row in rows if row["seconds"][name] is None]
        handles += seconds.plot(
            [row["N"] for row in run],
            [row["seconds"][name] for row in run],
            marker=marker,
            **line,
        )
        kept.plot([row["N"] for row in rows], [row["bytes"][name] for row in rows], **line)
        for some, face in ((run, color), (not_run, "white")):
            kept.plot(
                [row["N"] for row in some],
                [row["bytes"][name] for row in some],
                color=color,
                linestyle="none",
                marker=marker,
                markerfacecolor=face,
            )
    for axes, title in ((seconds, "seconds of one step"), (kept, "bytes kept")):
        axes.set(xscale="log", yscale="log", xlabel="context N", title=title)
        _label_ticks(axes.xaxis)
        _label_ticks(axes.yaxis)
    figure.legend(handles, list(names), loc="outside lower center", ncols=3, handlelength=3)
    return figure
