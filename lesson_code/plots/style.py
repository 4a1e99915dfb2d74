"""One look for every figure of the book.

The colors are those of Okabe and Ito (2008), which stay apart in color-blind vision; lines also
differ in dash and marker, so that they stay apart in print. Figures are made without pyplot:
nothing global changes, and a function returns a figure that notebooks show as SVG, the same bytes
every time.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)
INK, GRAY = "#222222", "#6b6b6b"
PALE_BLUE, PALE_VERMILION, PALE_GREEN, PALE_GRAY = "#cfe3f2", "#fbdcc6", "#cdebe0", "#ececec"
COLORS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE)
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P")

LOOKS = [
    *zip(COLORS, DASHES, MARKERS, strict=True),
    (INK, "-", "X"),
    (GRAY, "--", "*"),
    ("#8a3800", (0, (4, 1, 1, 1)), "h"),
]

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


def look(index: int, **changed) -> dict[str, Any]:
    """Color, dashes and marker of a line: those that no other line of the figure has."""
    color, dashes, marker = LOOKS[index % len(LOOKS)]
    return {"color": color, "linestyle": dashes, "marker": marker, **changed}


def luminance(rgba) -> float:
    """Relative luminance of a color, on which the contrast of a text with its ground depends."""
    rgb = np.array(rgba[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
