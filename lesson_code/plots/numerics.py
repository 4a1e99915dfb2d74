"""Figures of rounding: sums that stick, the floats on a line, errors by size."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, GRAY, VERMILION, look
from lesson_code.plots.lines import beside, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def sums_stick(sums: Mapping[str, ArrayLike]) -> BookFigure:
    """Running sums of ones by the format in which they are kept, against the number of ones.

    Each line's name stands at its right end, with the sum where it stopped growing.
    """
    height = 3.0
    figure, ((axes,),) = new_figure(height=height)
    for index, (name, values) in enumerate(sums.items()):
        values = np.asarray(values, dtype=float)
        count = np.arange(1, len(values) + 1)
        corner = int(np.argmax(values)) + 1  # the first place of the largest sum
        shown = np.unique([1, corner, len(values)])
        stuck = f"{name}\nsticks at {values.max():,.0f}" if corner < len(values) else name
        style = look(index, marker=None) | {"linewidth": 2.2}
        axes.plot(count[shown - 1], values[shown - 1], label=stuck, **style)
        if corner < len(values):
            axes.plot([corner], [values.max()], "o", color=style["color"], markersize=6)
    axes.set(xlabel="ones added", ylabel="running sum", xlim=(0, None), ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    name_lines(axes, [line for line in axes.get_lines() if line.get_linestyle() != "None"], height)
    return figure


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
    labeled = (
        [*range(start, stuck), *range(stuck, stop + 1, 2)]
        if digits < 5
        else range(start, stop + 1, 2)
    )
    axes.set(xlim=(start - 0.6, stop + 0.6), ylim=(-0.5, 0.8), xticks=labeled)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    write(axes, start - 0.3, 0.5, title, color=BLUE, ha="left")


@drawing
def stored_state(tokens: float, states: Mapping[str, ArrayLike]) -> BookFigure:
    """An entry of a state after each piece of so many tokens, both counted in thousands.

    Dotted levels are the powers of two at which the floats of bfloat16 get sparser: above them
    they are twice as far apart.
    """
    height = 3.2
    figure, ((axes,),) = new_figure(height=height)
    for index, (name, values) in enumerate(states.items()):
        values = np.asarray(values, dtype=float)
        count = tokens * np.arange(1, len(values) + 1)
        axes.plot(count, values, label=name, **look(index, marker=None))
    lines = list(axes.get_lines())
    axes.set(xlabel="thousands of tokens", ylabel="entry of S, in thousands")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for power in (17, 18, 19):
        axes.axhline(2**power / 1000, color=GRAY, linestyle=":", linewidth=1.2)
        beside(axes, f"$2^{{{power}}}$", (5, 2**power / 1000), (0, 2), color=GRAY, fontsize=11)
    name_lines(axes, lines, height)
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
    panels[0].set_ylabel("relative error")
    at_end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top"}
    beside(panels[1], "tolerance", (1, tolerance), (0, -3), color=VERMILION, **at_end)
    return figure
