"""Figures of images that are made pixel by pixel."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
from lesson_code.plots.lines import beside, label_decades
from lesson_code.plots.style import BookFigure, drawing, new_figure

HIDDEN = pale.VERMILION


@drawing
def raster(image: ArrayLike, known: int, levels: int) -> BookFigure:
    """An image in the order of its pixels: those that are known, the next one, and the rest.

    On the left the square image, on the right its pixels side by side, one row below the other only
    because the page is not wide enough.
    """
    image = np.asarray(image)
    side = round(len(image) ** 0.5)
    figure, ((left, right),) = new_figure(
        2, width=6.2, height=3.0, gridspec_kw={"width_ratios": (1, 1.25)}
    )
    for row in range(side):
        for column in range(side):
            _pixel(left, column, row, image, row * side + column, known, levels)
        arrow(left, (-0.6, row), (side - 0.4, row), BLUE, arrowstyle="->", linewidth=1)
    left.set(xlim=(-0.9, side - 0.1), ylim=(side - 0.3, -0.8), aspect="equal")
    left.set_title("the image")
    per_row, step = 2 * side, 2.4
    for pixel in range(len(image)):
        row, column = divmod(pixel, per_row)
        _pixel(right, column, step * row, image, pixel, known, levels)
    row, column = divmod(known, per_row)
    write(right, column, step * row - 0.65, "next", color=VERMILION, va="bottom")
    right.set(xlim=(-0.7, per_row - 0.3), ylim=(step * (len(image) / per_row) - 1.5, -1.9))
    right.set(aspect="equal")
    right.set_title("the sequence")
    for axes in (left, right):
        axes.set_axis_off()
    return figure


def _pixel(axes: Axes, x, y, image: NDArray, pixel: int, known: int, levels: int) -> None:
    ink = 1 - image[pixel] / (levels - 1)
    color = (ink, ink, ink) if pixel < known else "white" if pixel == known else HIDDEN
    rectangle(axes, x - 0.5, y - 0.5, 1, 1, color, linewidth=0.5)
    if pixel == known:
        rectangle(axes, x - 0.5, y - 0.5, 1, 1, "none", VERMILION, linewidth=2, zorder=3)


@drawing
def bins(
    weights: ArrayLike, means: ArrayLike, scales: ArrayLike, probabilities: ArrayLike
) -> BookFigure:
    """The density of a mixture of logistics, and the probability of each level below it.

    means and scales are in levels. The first and the last bin reach to infinity.
    """
    weights, means, scales = (np.asarray(x, float) for x in (weights, means, scales))
    probabilities = np.asarray(probabilities, float)
    levels = len(probabilities)
    figure, ((density,), (mass,)) = new_figure(rows=2, width=6.0, height=4.2, sharex=True)
    x = np.linspace(-3.5, levels + 2.5, 600)
    z = (x[:, None] - means) / scales
    each = weights / (scales * (2 * np.cosh(z / 2)) ** 2)
    total = each.sum(axis=1)
    for edge in np.arange(levels - 1) + 0.5:
        density.axvline(edge, color="#d8d8d8", linewidth=0.8)
    density.fill_between(x, total, where=x <= 0.5, color=HIDDEN, linewidth=0)
    density.fill_between(x, total, where=x >= levels - 1.5, color=HIDDEN, linewidth=0)
    for index in range(len(weights)):
        density.plot(x, each[:, index], **look(index + 1, marker=None))
    density.plot(x, total, color=BLUE)
    density.set(ylabel="density", ylim=(0, None))
    colors = [HIDDEN if level in (0, levels - 1) else "#9ecae8" for level in range(levels)]
    mass.bar(np.arange(levels), probabilities, width=1, color=colors, edgecolor=GRAY)
    mass.set(xlabel="level of the pixel", ylabel="probability", xlim=(x[0], x[-1]))
    mass.set_xticks(range(0, levels, 4))
    for axes in (density, mass):
        axes.grid(visible=False)
    return figure


@drawing
def gallery(rows: Mapping[str, Sequence[ArrayLike]], levels: int) -> BookFigure:
    """Rows of square images, each row with its name above it."""
    count = max(len(images) for images in rows.values())
    per_row = min(count, 12)
    lines = [(name, k) for name, images in rows.items() for k in range(0, len(images), per_row)]
    figure, axes = new_figure(
        per_row, len(lines), width=6.2, height=(6.2 / per_row) * len(lines) + 0.3 * len(rows)
    )
    for panels, (name, start) in zip(axes, lines, strict=True):
        for panel, image in zip_longest(panels, rows[name][start : start + per_row]):
            if image is None:
                panel.set_axis_off()
            else:
                _show(panel, image, levels)
        if start == 0:  # a long name is no reason for a wider column
            panels[-1].set_title(" ")
            at = {"xytext": (0, 5), "xycoords": "axes fraction", "textcoords": "offset points"}
            panels[0].annotate(name, (0, 1), va="bottom", **at).set_in_layout(False)
    return figure


@drawing
def completions(
    originals: Sequence[ArrayLike], made: Sequence[Sequence[ArrayLike]], known: int, levels: int
) -> BookFigure:
    """In each row an image, the part of it that was given, and what was made of that part."""
    columns = 2 + len(made[0])
    figure, axes = new_figure(
        columns, len(originals), width=6.2, height=6.2 / columns * len(originals) + 0.4
    )
    for row, (original, ways) in enumerate(zip(originals, made, strict=True)):
        original = np.asarray(original, float)
        _show(axes[row, 0], original, levels)
        given = np.where(np.arange(len(original)) < known, original, np.nan)
        _show(axes[row, 1], given, levels)
        for column, image in enumerate(ways, start=2):
            _show(axes[row, column], image, levels)
            side = round(len(original) ** 0.5)
            axes[row, column].axhline(known / side - 0.5, color=VERMILION, linewidth=1)
    for column, title in enumerate(("original", "given", "completed")):
        axes[0, column].set_title(title, loc="left" if column == 2 else "center")
    return figure


def _show(axes: Axes, image: ArrayLike, levels: int) -> None:
    image = np.asarray(image, float)
    side = round(image.size**0.5)
    axes.set_facecolor(HIDDEN)
    axes.imshow(
        np.ma.masked_invalid(image.reshape(side, side)),
        cmap="Greys",
        vmin=0,
        vmax=levels - 1,
        interpolation="nearest",
    )
    axes.grid(visible=False)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(INK)
    axes.spines[:].set_linewidth(0.5)


@drawing
def distances(kinds: Mapping[str, ArrayLike], *, xlabel: str) -> BookFigure:
    """Where the numbers of each kind lie: a histogram below the other, its median marked."""
    values = {name: np.asarray(x, float) for name, x in kinds.items()}
    top = max(x.max() for x in values.values())
    edges = np.arange(0, np.ceil(top) + 1)
    figure, axes = new_figure(
        rows=len(values), width=6.2, height=0.62 * len(values) + 0.6, sharex=True
    )
    for (axis,), (index, (name, x)) in zip(axes, enumerate(values.items()), strict=True):
        color = look(index)["color"]
        axis.hist(x, edges, weights=np.full(len(x), 1 / len(x)), color=color, alpha=0.45)
        middle = float(np.median(x))
        axis.axvline(middle, color=color, linewidth=1.8)
        axis.margins(y=0.5)  # for the number above the bars
        right = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": 10}
        beside(axis, f"{middle:.1f}", (middle, 1), (4, 0), **right)
        axis.set_ylabel(name, rotation=0, ha="right", va="center")
        axis.set(yticks=[], xlim=(0, edges[-1]))
        axis.grid(visible=False)
        axis.spines["left"].set_visible(False)
    axes[-1, 0].set(xlabel=xlabel)
    return figure


@drawing
def gains(
    N: ArrayLike,
    panels: Mapping[str, Mapping[str, ArrayLike]],
    points: Mapping[str, Mapping[str, Mapping[int, float]]],
) -> BookFigure:
    """Factors against the number N of pixels, computed as lines and measured as points.

    In each panel every line has a name; `points` gives the measured factors of the same names, by
    N. Both axes are logarithmic and shared.
    """
    figure, (axes,) = new_figure(len(panels), width=6.4, height=3.6, sharey=True)
    N = np.asarray(N)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for index, (name, factors) in enumerate(lines.items()):
            style, factors = look(index, marker=None), np.asarray(factors, float)
            axis.plot(N, factors, label=name, **style)
            for pixels, factor in points[title].get(name, {}).items():
                axis.plot(pixels, factor, marker="o", markersize=6, color=style["color"])
                above = factor > np.interp(pixels, N, factors)
                near = [known.get(pixels, 0) / factor for known in points[title].values()]
                if above and not any(1 < other < 4 for other in near):
                    at, side = (-6, 4), "right"
                else:
                    at, side = (5, -13), "left"
                beside(axis, f"{factor:,.0f}", (pixels, factor), at, ha=side, fontsize=10)
        axis.set(xscale="log", yscale="log", xlabel="pixels N", title=title)
        axis.margins(x=0.1)
        label_decades(axis.xaxis)
        label_decades(axis.yaxis)
        axis.legend(fontsize=10, loc="upper left")
    axes[0].set(ylabel="times as long as the state")
    return figure
