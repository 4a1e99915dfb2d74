"""Lines, bars and points over axes, and what is written beside them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import ArrayLike

from lesson_code.plots.colors import BLUE, GRAY, look
from lesson_code.plots.style import BookFigure, drawing, new_figure


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

    Each line's name stands at its right end, so that no legend has to be matched by color. A line
    that ends before the others is NaN from there on; its name stands at the height of its end.
    """
    figure, ((axes,),) = new_figure(height=height)
    x = np.asarray(x)
    for index, (name, y) in enumerate(lines.items()):
        style = look(index) if len(x) <= 12 else look(index, marker=None)
        axes.plot(x, np.asarray(y), label=name, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(x=0.02)
    if logx:
        axes.set_xscale("log")
    if logy:
        axes.set_yscale("log")
    name_lines(axes, axes.get_lines(), height)
    for position, text in marks:
        mark(axes, position, text)
    return figure


def name_lines(axes: Axes, lines: Iterable[Line2D], height: float) -> None:
    """Write each line's name beside its right end, pushed up where it would cover another.

    height is the figure's, in inches.
    """
    axes.autoscale_view()
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends = []
    for line in lines:
        points = np.asarray(line.get_xydata())
        last = points[np.isfinite(points).all(axis=1)][-1]
        ends.append((to_fraction.transform(last)[1], line))
    apart = 14 / (72 * height * 0.8)  # a line of text, as a fraction of the axes' height
    lowest = -1.0
    for fraction, line in sorted(ends, key=lambda end: end[0]):
        lowest = max(fraction, lowest + apart)
        style: dict[str, Any] = {"color": line.get_color(), "va": "center"}
        axes.text(1.01, lowest, str(line.get_label()), transform=axes.transAxes, **style)


def mark(axes: Axes, x: float, text: str) -> None:
    """A dotted vertical with a text above it."""
    axes.axvline(x, color=GRAY, linestyle=":", linewidth=1.4)
    above = {"xycoords": ("data", "axes fraction"), "color": GRAY, "ha": "center", "fontsize": 10}
    beside(axes, text, (x, 1), (0, 3), **above)


def beside(axes: Axes, text: str, at: tuple, offset: tuple[float, float], **style) -> None:
    """A text so many points to the right of a place and above it."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **style)


def bars(axes: Axes, heights: ArrayLike, *, color: str = BLUE, width: float = 0.85) -> None:
    """Bars side by side, which need no numbers below them."""
    axes.bar(range(np.size(heights)), heights, color=color, width=width)
    axes.grid(visible=False, axis="x")
    axes.set_xticks([])


def named_bars(
    lengths: Mapping[str, float], texts: Iterable[str], *, start: float = 0, **style
) -> tuple[BookFigure, Axes]:
    """Named horizontal bars, the first on top, each with a text at its end."""
    figure, ((axes,),) = new_figure(height=0.42 * len(lengths) + 0.7)
    ends = np.array(list(lengths.values()))
    axes.barh(range(len(ends)), ends - start, left=start, color="#9ecae8", edgecolor=GRAY, **style)
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        beside(axes, text, (end, row), (4, 0), va="center")
    axes.set_yticks(range(len(ends)), list(lengths))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure, axes


def legend_below(figure: BookFigure, handles: Sequence, names: Sequence[str], **style) -> None:
    """A legend of one row, unless the style says otherwise."""
    style = {"ncols": len(names), "loc": "outside lower center", **style}
    figure.legend(handles, names, **style)


def label_decades(axis: Axis) -> None:
    """Label powers of ten where two of them are in view, otherwise 1, 2 and 5 times those."""
    axis.set_minor_formatter(NullFormatter())
    low, high = axis.get_view_interval()
    if np.floor(np.log10(high)) - np.ceil(np.log10(low)) < 1:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
