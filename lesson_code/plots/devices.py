"""Figures of measurements: the same lines on the reader's device and on the reference machine."""

from collections.abc import Mapping

import numpy as np

from lesson_code.plots.colors import look
from lesson_code.plots.lines import label_decades, legend_below, mark
from lesson_code.plots.style import BookFigure, drawing, new_figure


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
            style = look(names.index(name))
            (handles[name],) = panel.plot(list(line), list(line.values()), **style)
        panel.set(xscale="log", yscale="log", xlabel=xlabel)
        panel.set_title(title, pad=20 if marks else None)
        position = (marks or {}).get(title, np.inf)
        if np.isfinite(position):
            mark(panel, position, f"{position:,.0f}")
    axes[0].set_ylabel(ylabel)
    label_decades(axes[0].xaxis)
    label_decades(axes[0].yaxis)
    legend_below(figure, [handles[name] for name in names], names, handlelength=3)
    return figure
