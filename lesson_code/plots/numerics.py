"""Figures of rounding: the floats on a line, features that round to zero, errors by size."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, VERMILION, look
from lesson_code.plots.lines import beside, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def number_lines() -> BookFigure:
    """The floats of 3 digits up to 16 (top) and those of bfloat16 around 256 (bottom).

    On each line an arrow shows the first sum of ones that is rounded back to where it came from.
    """
    figure, axes = new_figure(1, 2, width=5.6, height=2.6)
    _number_line(axes[0, 0], 3, 1, 16, stuck=8, title="3 binary digits")
    _number_line(axes[1, 0], 8, 248, 268, stuck=256, title="bfloat16: 8 binary digits")
    return figure


def _number_line(axes: Axes, digits: int, start: int, stop: int, stuck: int, title: str) -> None:
    """The floats of so many binary digits from start to stop, and the tie at stuck + 1."""
    whole = np.arange(start * 8, stop * 8 + 1) / 8
    spacing = 2.0 ** (np.floor(np.log2(whole)) - digits + 1)
    floats = whole[whole % spacing == 0]
    axes.axhline(0, color=GRAY, linewidth=1)
    axes.plot(floats, np.zeros(len(floats)), "|", color=BLUE, markersize=16, markeredgewidth=2)
    axes.plot([stuck + 1], [0], "x", color=VERMILION, markersize=8, markeredgewidth=2)
    tie, back = (stuck + 1, 0.1), (stuck, 0.34)
    arrow(axes, tie, back, VERMILION, gap=0, connectionstyle="arc3,rad=0.5")
    write(axes, stuck + 1, 0.5, f"{stuck} + 1 becomes {stuck}", color=VERMILION, ha="left")
    step = 1 if digits < 5 else 2
    axes.set(xlim=(start - 0.6, stop + 0.6), ylim=(-0.5, 0.8), xticks=range(start, stop + 1, step))
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    write(axes, start - 0.3, 0.5, title, color=BLUE, ha="left")


@drawing
def sums_stick(count: ArrayLike, sums: Mapping[str, ArrayLike]) -> BookFigure:
    """The sum of so many ones against their number, a line for each format that it is kept in."""
    figure, ((axes,),) = new_figure(height=3.0)
    for index, (name, total) in enumerate(sums.items()):
        axes.plot(np.asarray(count), np.asarray(total), label=name, **look(index))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="ones added", ylabel="sum")
    name_lines(axes, axes.get_lines(), 3.0)
    return figure


@drawing
def rounded_features(x: ArrayLike, ratios: Mapping[str, ArrayLike]) -> BookFigure:
    """Computed over exact features; each line is named above the place where it drops to 0."""
    figure, ((axes,),) = new_figure(height=3.0)
    x = np.asarray(x)
    for index, (name, ratio) in enumerate(ratios.items()):
        ratio = np.asarray(ratio)
        axes.plot(x, ratio, color=COLORS[index], linewidth=1.4)
        end = x[ratio > 0].min()
        # The last two ends may be close: their names point away from each other.
        side = "left" if index == len(ratios) - 1 else "right"
        axes.text(end, 2.12, name, color=COLORS[index], ha=side, va="bottom")
    axes.set(xlabel="x", ylabel="computed / exact", ylim=(-0.1, 2.5), yticks=(0, 1, 2))
    return figure


@drawing
def errors_by_size(size: ArrayLike, error: ArrayLike, tolerance: float) -> BookFigure:
    """Errors of single entries, relative to the entry (left) and to the largest one (right)."""
    figure, (panels,) = new_figure(2, height=3.0, sharey=True)
    size, error = np.asarray(size), np.asarray(error)
    largest = size.max()
    titles = ("relative to the entry", "relative to the largest")
    for axes, relative, title in zip(panels, (error / size, error / largest), titles, strict=True):
        shown = relative > 0
        axes.plot(size[shown] / largest, relative[shown], ".", color=BLUE, markersize=3)
        axes.axhline(tolerance, color=VERMILION, linestyle="--")
        axes.set(xscale="log", yscale="log", title=title, xlabel="entry / largest entry")
    panels[0].set_ylabel("error")
    at_end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top"}
    beside(panels[1], "tolerance", (1, tolerance), (0, -3), color=VERMILION, **at_end)
    return figure
