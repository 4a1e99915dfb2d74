"""Figures of measurements: the same lines on the reader's device and on the reference machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lesson_code.plots.style import COLORS, DASHES, GRAY, MARKERS, BookFigure, drawing, new_figure


@drawing
def side_by_side(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
) -> BookFigure:
    """Named lines in one panel for each title, on the same logarithmic axes.

    A line is {x: y}; a line that several panels have looks the same in each and stands once in the
    legend. `marks` draws a dotted vertical with its value in the panels that it names, where that
    is a finite number.
    """
    figure, (axes,) = new_figure(len(panels), height=3.5, sharex=True, sharey=True)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    handles = {}
    for panel, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, line in lines.items():
            index = names.index(name) % 6
            (handles[name],) = panel.plot(
                list(line),
                list(line.values()),
                color=COLORS[index],
                linestyle=DASHES[index],
                marker=MARKERS[index],
            )
        panel.set(xscale="log", yscale="log", xlabel=xlabel)
        panel.set_title(title, pad=20 if marks else None)
        position = (marks or {}).get(title, np.inf)
        if np.isfinite(position):
            panel.axvline(position, color=GRAY, linestyle=":", linewidth=1.4)
            panel.annotate(
                f"{position:,.0f}",
                (position, 1),
                xytext=(0, 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=GRAY,
                ha="center",
                fontsize=10,
            )
    axes[0].set_ylabel(ylabel)
    _label_ticks(axes[0].xaxis)
    _label_ticks(axes[0].yaxis)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=len(names),
        handlelength=3,
    )
    return figure


def _label_ticks(axis: Axis) -> None:
    """Powers of ten where two of them are in view, otherwise 1, 2 and 5 times those."""
    axis.set_minor_formatter(NullFormatter())
    low, high = axis.get_view_interval()
    if np.floor(np.log10(high)) - np.ceil(np.log10(low)) < 1:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
