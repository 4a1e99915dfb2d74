"""One look for every figure of the book, and the two kinds of figure that every chapter uses.

The colors are those of Okabe and Ito (2008), which stay apart in color-blind vision; lines also
differ in dash and marker, so that they stay apart in print. Figures are made without pyplot:
nothing global changes, and a function returns a figure that notebooks show as SVG, the same bytes
every time.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)
INK, GRAY = "#222222", "#6b6b6b"
COLORS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE)
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P")

POSITIVE = LinearSegmentedColormap.from_list("positive", ["#ffffff", "#9ecae8", BLUE, "#023858"])
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#8a3800", VERMILION, "#ffffff", BLUE, "#023858"]
)

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


def draw_matrix(
    axes: Axes,
    values: ArrayLike,
    *,
    title: str = "",
    numbers: bool | None = None,
    digits: int = 2,
    limit: float | None = None,
    hidden: ArrayLike | None = None,
) -> None:
    """Draw a matrix as a grid of cells, row 0 at the top.

    numbers writes each entry into its cell (None: where there are at most 144 of them); limit is
    the magnitude that takes the full color; hidden marks the entries to leave out.
    """
    values = np.atleast_2d(np.asarray(values, dtype=float))
    hidden = np.zeros(values.shape, bool) if hidden is None else np.asarray(hidden, bool)
    shown = np.ma.array(values, mask=hidden)
    signed = bool((shown < 0).any())
    limit = limit or float(np.abs(shown).max()) or 1.0
    axes.set_facecolor("#ececec")
    image = axes.imshow(
        shown,
        cmap=SIGNED if signed else POSITIVE,
        vmin=-limit if signed else 0,
        vmax=limit,
        interpolation="nearest",
    )
    rows, columns = values.shape
    small = rows * columns <= 144
    if numbers if numbers is not None else small:
        for i, j in zip(*np.nonzero(~hidden), strict=True):
            value = values[i, j]
            text = f"{value:.0f}" if value == round(value) else f"{value:.{digits}f}"
            color = INK if _luminance(image.to_rgba(value)) > 0.213 else "white"
            text = text.replace("-", "\N{MINUS SIGN}")
            axes.text(j, i, text, ha="center", va="center", color=color)
    if small:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#bdbdbd", linewidth=0.8)
    axes.grid(which="major", visible=False)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.set_title(title)


def _luminance(rgba) -> float:
    """Relative luminance of a color, on which the contrast of a text with its ground depends."""
    rgb = np.array(rgba[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@drawing
def matrix_equation(
    *parts: tuple[str, ArrayLike] | str, digits: int = 2, cell: float = 0.5
) -> BookFigure:
    """Draw matrices and the signs between them: ("Q", Q), "+", ("K", K), "=", ("Q + K", Q + K).

    Every matrix is drawn to the same scale, `cell` inches to an entry, so that shapes can be
    compared by eye. Names are set as mathematics.
    """
    shapes = [None if isinstance(part, str) else np.atleast_2d(part[1]).shape for part in parts]
    widths = [0.45 if shape is None else max(shape[1] * cell, 0.45) for shape in shapes]
    tallest = max(shape[0] for shape in shapes if shape) * cell
    gap = 0.12
    total = sum(widths) + gap * (len(parts) - 1)
    full = tallest + 0.45  # with the names above
    figure = BookFigure(figsize=(total, full))
    left = 0.0
    for part, shape, width in zip(parts, shapes, widths, strict=True):
        height = tallest if shape is None else shape[0] * cell
        axes = figure.add_axes(
            (left / total, (tallest - height) / 2 / full, width / total, height / full)
        )
        if shape is None:
            axes.set_axis_off()
            axes.text(0.5, 0.5, f"${part}$", ha="center", va="center", fontsize=15)
        else:
            draw_matrix(axes, part[1], title=f"${part[0]}$", digits=digits)
        left += width + gap
    return figure


@drawing
def curves(
    x: ArrayLike,
    lines: Mapping[str, ArrayLike],
    *,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    height: float = 3.4,
) -> BookFigure:
    """Draw named lines over a common x, and dotted verticals with a label where `marks` says.

    Each line's name stands at its right end, so that no legend has to be matched by color.
    """
    figure, ((axes,),) = new_figure(height=height)
    x = np.asarray(x)
    for index, (name, y) in enumerate(lines.items()):
        y = np.asarray(y)
        axes.plot(
            x,
            y,
            label=name,
            color=COLORS[index % 6],
            linestyle=DASHES[index % 6],
            marker=MARKERS[index % 6] if len(x) <= 12 else None,
        )
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(x=0.02)
    if logx:
        axes.set_xscale("log")
    if logy:
        axes.set_yscale("log")
    _name_lines(axes, height)
    for position, text in marks:
        axes.axvline(position, color=GRAY, linestyle=":", linewidth=1.4)
        axes.annotate(
            text,
            (position, 1),
            xytext=(0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=GRAY,
            ha="center",
            fontsize=10,
        )
    return figure


def _name_lines(axes: Axes, height: float) -> None:
    """Write each line's name beside its right end, pushed up where it would cover another."""
    axes.autoscale_view()
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends = [
        (to_fraction.transform(np.asarray(line.get_xydata())[-1])[1], line)
        for line in axes.get_lines()
    ]
    apart = 14 / (72 * height * 0.8)  # a line of text, as a fraction of the axes' height
    lowest = -1.0
    for fraction, line in sorted(ends, key=lambda end: end[0]):
        lowest = max(fraction, lowest + apart)
        axes.text(
            1.01,
            lowest,
            str(line.get_label()),
            transform=axes.transAxes,
            color=line.get_color(),
            va="center",
        )
