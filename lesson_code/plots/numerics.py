"""Figures of rounding and of ranges: sums that stick, floats on a line, outputs that fade."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import ArrayLike

from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, INK, SIGNED, VERMILION, look
from lesson_code.plots.lines import beside, legend_below, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure

WHITE = {"fc": "white", "ec": "none", "alpha": 0.85, "pad": 2}


@drawing
def sums_stick(sums: Mapping[str, ArrayLike]) -> BookFigure:
    """Running sums of ones by the format in which they are kept, against the number of ones.

    Both axes are logarithmic. Each line's name stands at its right end, with the sum where it
    stopped growing.
    """
    height = 3.0
    figure, ((axes,),) = new_figure(height=height)
    for index, (name, values) in enumerate(sums.items()):
        values = np.asarray(values, dtype=float)
        count = np.arange(1, len(values) + 1)
        corner = int(np.argmax(values)) + 1  # the first place of the largest sum
        shown = np.unique([1, corner, len(values)])
        stuck = f"{name}: {values.max():,.0f}" if corner < len(values) else name
        style = look(index, marker=None) | {"linewidth": 2.2}
        axes.plot(count[shown - 1], values[shown - 1], label=stuck, **style)
        if corner < len(values):
            axes.plot([corner], [values.max()], "o", color=style["color"], markersize=6)
    axes.set(xlabel="ones added", ylabel="running sum")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    name_lines(axes, [line for line in axes.get_lines() if line.get_linestyle() != "None"], height)
    return figure


@drawing
def bit_layouts(formats: Mapping[str, tuple[int, int]]) -> BookFigure:
    """The bits of formats: one for the sign, those of the exponent, and those of the fraction."""
    figure, ((axes,),) = new_figure(width=6.4, height=0.42 * len(formats) + 0.55)
    for row, (exponent, fraction) in enumerate(formats.values()):
        x = 0.0
        for bits, color in ((1, "#d9d9d9"), (exponent, "#f6c9a4"), (fraction, "#9ecae8")):
            axes.barh(row, bits, left=x, height=0.72, color=color, edgecolor=INK, linewidth=1.2)
            ticks = x + np.arange(1, bits)
            axes.vlines(ticks, row - 0.36, row + 0.36, color="white", linewidth=0.8)
            write(axes, x + bits / 2, row, str(bits))
            x += bits
        write(axes, x + 0.4, row, f"p = {fraction + 1}", ha="left")
    exponent = next(iter(formats.values()))[0]
    above = {"ha": "left", "fontsize": 11}
    for x, text in ((0, "sign"), (3, "exponent"), (1 + exponent + 0.5, "fraction")):
        write(axes, x, -0.72, text, **above)
    axes.set_yticks(range(len(formats)), list(formats))
    axes.set(xlim=(-0.1, 37), ylim=(len(formats) - 0.5, -1.0), xticks=[])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@drawing
def number_lines() -> BookFigure:
    """The floats of 3 digits up to 16 (top) and those of bfloat16 around 256 (bottom).

    On each line an arrow shows the first sum of ones that is rounded back to where it came from.
    """
    figure, axes = new_figure(1, 2, width=5.6, height=2.4)
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
    axes.set(xlim=(start - 0.6, stop + 0.6), ylim=(-0.22, 0.8), xticks=labeled)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=0)
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
def growth(
    tokens: ArrayLike, sizes: Mapping[str, ArrayLike], guides: Mapping[str, float]
) -> BookFigure:
    """Named sizes against the number of tokens t, both logarithmic.

    A guide, gray and dotted, has the slope of a power of t and lies a little above a named line.
    """
    height = 3.6
    figure, ((axes,),) = new_figure(height=height)
    tokens = np.asarray(tokens, dtype=float)
    for index, (name, values) in enumerate(sizes.items()):
        axes.plot(tokens, np.asarray(values), label=name, **look(index, marker=None))
    lines = list(axes.get_lines())
    half = tokens[len(tokens) // 2 - 1 :]
    for name, power in guides.items():
        guide = 2.6 * np.asarray(sizes[name], dtype=float)[-1] * (half / half[-1]) ** power
        axes.plot(half, guide, ":", color=GRAY, linewidth=1.6)
        text = r"like $\sqrt{t}$" if power == 0.5 else "like $t$"
        beside(axes, text, (half[-3], guide[-3]), (-4, 3), color=GRAY, ha="right", va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="tokens t", ylabel="root mean square")
    axes.margins(x=0.02)
    name_lines(axes, lines, height)
    return figure


@drawing
def fading(similarity: ArrayLike, outputs: Mapping[str, ArrayLike]) -> BookFigure:
    """Outputs that should be level, against a similarity that falls from left to right.

    A line that fades bears its name to the right of the place where half of it is lost.
    """
    figure, ((axes,),) = new_figure(height=2.9)
    s = np.asarray(similarity, dtype=float)
    for index, (name, values) in enumerate(outputs.items()):
        values, style = np.asarray(values, dtype=float), look(index, marker=None)
        axes.plot(s, values, label=name, **style)
        text = {"color": style["color"], "fontsize": 10, "ha": "left"}
        lost = values < values.max() / 2
        if lost.any():
            half = s[lost].max()
            beside(axes, name, (half, 0.62 * values.max()), (9, 0), va="center", **text)
        else:
            beside(axes, name, (s.max(), values.max()), (2, 4), va="bottom", **text)
    axes.set(xscale="log", xlabel="similarity s", ylabel="output", ylim=(0, None))
    axes.set_xlim(s.max(), s.min())
    return figure


@drawing
def running_maximum(exponents: ArrayLike) -> BookFigure:
    """Exponents of one feature with their running maximum, and the scaled sum, token by token."""
    b = np.asarray(exponents, dtype=float)
    mu, t = np.maximum.accumulate(b), np.arange(1, len(b) + 1)
    figure, panels = new_figure(1, 2, width=5.0, height=4.2, sharex=True, height_ratios=(1, 1.2))
    (above,), (below,) = panels
    edges = np.arange(len(b) + 1) + 0.5
    above.stairs(mu, edges, baseline=None, color=INK, linewidth=2, label="running maximum")
    above.plot(t, b, "o", color=BLUE, markersize=8, label="exponent of the token")
    above.set(ylabel="exponent", ylim=(b.min() - 0.7, b.max() + 0.7))
    above.legend(loc="upper left")
    for now in range(len(b)):
        bottom = 0.0
        for j, part in enumerate(np.exp(b[: now + 1] - mu[now])):
            color = COLORS[j % len(COLORS)]
            below.bar(now + 1, part, 0.62, bottom, color=color, alpha=0.35, ec=INK, linewidth=0.8)
            if part > 0.12:
                middle = (now + 1, bottom + part / 2)
                below.annotate(f"token {j + 1}", middle, ha="center", va="center", fontsize=9)
            bottom += part
    below.set(ylabel="scaled sum", xlabel="token", xticks=t)
    for axes in (above, below):
        axes.grid(visible=False, axis="x")
    return figure


@drawing
def masked_exponents(exponents: ArrayLike, limit: float) -> BookFigure:
    """The exponents G_t - G_j of a chunk: at most 0 where j <= t, and rising where it is masked.

    In the hatched corner they are above the limit, so that their exponential is infinite.
    """
    figure, ((axes,),) = new_figure(width=5.0, height=3.9)
    exponents = np.asarray(exponents, dtype=float)
    n, largest = len(exponents), np.abs(exponents).max()
    image = axes.imshow(exponents, cmap=SIGNED.reversed(), vmin=-largest, vmax=largest)
    axes.contour(exponents, [limit], colors=[INK], linestyles="--", linewidths=1.6)
    axes.contourf(exponents, [limit, 2 * largest], colors="none", hatches=["xxx"])
    axes.plot([0, n - 1], [0, n - 1], color=INK, linewidth=1.2)
    write(axes, 0.3 * n, 0.72 * n, "seen:\nat most 0", bbox=WHITE)
    write(axes, 0.6 * n, 0.33 * n, "masked:\npositive", bbox=WHITE)
    write(axes, 0.91 * n, 0.09 * n, "inf", bbox=WHITE)
    axes.set(xlabel="token j", ylabel="token t")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="exponent $G_t - G_j$", shrink=0.9)
    return figure


@drawing
def errors_by_size(size: ArrayLike, error: ArrayLike, tolerance: float) -> BookFigure:
    """Errors of single entries, relative to the entry (left) and to the largest one (right).

    Those above the tolerance are orange triangles; of the others every twelfth is drawn.
    """
    figure, (panels,) = new_figure(2, height=3.0, sharey=True)
    size, error = np.ravel(size), np.ravel(error)
    largest = size.max()
    titles = ("relative to the entry", "relative to the largest")
    for axes, relative, title in zip(panels, (error / size, error / largest), titles, strict=True):
        above = relative > tolerance
        shown = (relative > 0) & ~above & (np.arange(len(size)) % 12 == 0)
        axes.plot(size[shown] / largest, relative[shown], ".", color=BLUE, markersize=3)
        axes.plot(size[above] / largest, relative[above], "^", color=VERMILION, markersize=6)
        axes.axhline(tolerance, color=VERMILION, linestyle="--")
        axes.set(xscale="log", yscale="log", title=title, xlabel="entry / largest entry")
    panels[0].set(ylabel="relative error", ylim=(1e-10, None))
    at_end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
    beside(panels[1], "tolerance", (1, tolerance), (0, 3), color=VERMILION, **at_end)
    return figure


@drawing
def rounded_parts(
    panels: Mapping[str, Mapping[str, tuple[float, ...]]],
    measures: Sequence[str],
    marks: Mapping[str, float],
) -> BookFigure:
    """Errors by what was rounded, a row each, in a panel for each kind of weights.

    Each measure of the error has a marker of its own; dotted verticals are named above.
    """
    figure, (row,) = new_figure(len(panels), width=6.4, height=3.9, sharey=True)
    for axes, (title, errors) in zip(row, panels.items(), strict=True):
        for index, found in enumerate(zip(*errors.values(), strict=True)):
            style = look(index, linestyle="none", markersize=8, label=measures[index])
            if index == 0:
                style |= {"markerfacecolor": "none", "markersize": 10, "zorder": 5}
            axes.plot(found, range(len(found)), **style)
        for y, found in enumerate(errors.values()):  # what belongs to one row
            axes.plot([min(found), max(found)], [y, y], color="#bdbdbd", zorder=1)
        axes.axvspan(max(marks.values()), 1e4, color="#f0f0f0", zorder=0)
        for text, value in marks.items():
            axes.axvline(value, color=GRAY, linestyle=":", linewidth=1.4, zorder=0)
            at_top = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            beside(axes, text, (value, 1), (0, 2), color=GRAY, fontsize=10, **at_top)
        axes.set(xscale="log", xlim=(4e-6, 9e3), xlabel="error")
        axes.set_xticks([1e-4, 1e-2, 1, 100], ["0.0001", "0.01", "1", "100"])
        axes.minorticks_off()
        axes.set_title(title, pad=20)
    row[0].set_yticks(range(len(errors)), list(errors))
    row[0].set_ylim(len(errors) - 0.5, -0.5)
    legend_below(figure, row[0].get_lines()[: len(measures)], measures)
    return figure
