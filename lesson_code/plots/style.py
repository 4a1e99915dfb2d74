"""One look for every figure of the book.

Figures are made without pyplot: nothing global changes, and a function returns a figure that
notebooks show as SVG, the same bytes every time.
"""

import functools
import io
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lesson_code.plots.colors import GRAY, INK

STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.edgecolor": GRAY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.hashsalt": "lesson_code",
    "svg.fonttype": "path",
}


class BookFigure(Figure):
    """A matplotlib figure that a notebook shows as SVG, without a date: the same in every run."""

    def _repr_svg_(self) -> str:
        buffer = io.StringIO()
        with matplotlib.rc_context(STYLE):
            self.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
        return buffer.getvalue()


def drawing(function: Callable) -> Callable:
    """Run a drawing function in the book's style and leave matplotlib's settings as they were."""

    @functools.wraps(function)
    def draw(*args, **kwargs):
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return draw


def new_figure(
    columns: int = 1, rows: int = 1, *, width: float = 6.4, height: float = 3.2, **grid
) -> tuple[BookFigure, np.ndarray]:
    """An empty figure and its axes, (rows, columns). Call it inside a `drawing` function."""
    figure = BookFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **grid)
