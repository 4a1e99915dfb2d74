"""Drawings on a canvas: matrices as cells with numbers, boxes with words, and arrows.

The unit of a canvas is one cell of a matrix, and y goes downward where its limits say so.
"""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.colors import BLUE, GRAY, GREEN
from lesson_code.plots.style import BookFigure, new_figure


def canvas(columns: float, rows: float, unit: float = 0.42) -> tuple[BookFigure, Axes]:
    """An empty drawing, `unit` inches to a cell."""
    figure, ((axes,),) = new_figure(width=unit * columns, height=unit * rows)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, **style) -> None:
    """A text with its middle at (x, y), unless the style says otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", **style})


def rectangle(
    axes: Axes, x: float, y: float, width: float, height: float, fill, edge=GRAY, **style
) -> None:
    """A rectangle whose corner, the upper left one where y goes downward, is at (x, y)."""
    axes.add_patch(Rectangle((x, y), width, height, fc=fill, ec=edge, **style))


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, fill, edge=GRAY, **style
) -> None:
    """A rectangle with a text in its middle."""
    rectangle(axes, x, y, width, height, fill, edge)
    write(axes, x + width / 2, y + height / 2, text, **style)


def entries(
    axes: Axes, x: float, y: float, values: ArrayLike, fill, name: str = "", offset: float = 0
) -> None:
    """A matrix with its upper left corner at (x, y) and its name above it."""
    values = np.atleast_2d(values)
    for (i, j), value in np.ndenumerate(values):
        rectangle(axes, x + j, y + i, 1, 1, fill, linewidth=0.8)
        write(axes, x + j + 0.5, y + i + 0.5, f"{value:g}")
    write(axes, x + values.shape[1] / 2 + offset, y - 0.25, name, va="bottom")


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = GRAY,
    *,
    gap: float = 2,
    zorder: float = 3,
    **style,
) -> None:
    """An arrow, with a gap in points before both of its ends."""
    look = {"arrowstyle": "-|>", "color": color, "shrinkA": gap, "shrinkB": gap, **style}
    axes.annotate("", end, start, arrowprops=look, zorder=zorder)


def way(
    axes: Axes, *points: tuple[float, float], color: str = GRAY, linewidth: float = 1.4, **style
) -> None:
    """A line through the points, with its head at the last."""
    *_, before, last = points
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=color, linewidth=linewidth, solid_capstyle="butt")
    arrow(axes, before, last, color, gap=0, linewidth=linewidth, **style)


def scan_row(
    axes: Axes, y: float, row: Iterable, finished: int, pitch: float, width: float = 1
) -> None:
    """One row of a scan, a box for each item; the first `finished` ones are complete."""
    for i, item in enumerate(row):
        fill, edge = (pale.GREEN, GREEN) if i < finished else ("white", GRAY)
        box(axes, pitch * i, y, width, 1, str(item), fill, edge)


def scan_arrows(
    axes: Axes, top: float, bottom: float, N: int, distance: int, pitch: float, width: float = 1
) -> None:
    """From each item of one row to itself, and to that at the distance, in the next row."""
    for i in range(N):
        x = pitch * i + width / 2
        arrow(axes, (x, top), (x, bottom), "#b5b5b5")
        if i >= distance:
            arrow(axes, (x - pitch * distance, top), (x, bottom), BLUE)
