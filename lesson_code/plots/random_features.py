"""Figures of random features: two rooms, how far one draw is off, what that does to weights."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from lesson_code.numpy import positive_random_features
from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def two_rooms(q: float, k: float, draws: Sequence[float]) -> BookFigure:
    """Two numbers in two rooms, which share draws w: lists of features, products, and their mean.

    A row for each draw: e^{wq - q²/2} on the left, e^{wk - k²/2} on the right, then the product.
    """
    w = np.asarray(draws)
    left, right = np.exp(w * q - q * q / 2), np.exp(w * k - k * k / 2)
    figure, axes = canvas(15.2, len(w) + 5.0)
    bottom = len(w) + 0.5
    for x, name, given in ((0, "room one", f"$q = {q:g}$"), (7.5, "room two", f"$k = {k:g}$")):
        rectangle(axes, x, -0.9, 3.3, bottom + 1.1, "none", linestyle=(0, (3, 2)))
        write(axes, x + 1.65, -2.1, name, color=GRAY)
        write(axes, x + 1.65, -1.4, given)
    for x, name in ((1.65, r"$e^{wq - q^2/2}$"), (5.4, "shared"), (9.15, r"$e^{wk - k^2/2}$")):
        write(axes, x, -0.35, name)
    write(axes, 13.2, -0.35, "product")
    for i in range(len(w)):
        y = i + 0.5
        box(axes, 0.65, i, 2, 1, f"{left[i]:.2f}", pale.BLUE)
        box(axes, 8.15, i, 2, 1, f"{right[i]:.2f}", pale.BLUE)
        write(axes, 5.4, y, f"$w_{i + 1} = {w[i]:g}$")
        arrow(axes, (4.1, y), (2.7, y), gap=0)
        arrow(axes, (6.7, y), (8.1, y), gap=0)
        arrow(axes, (11.0, y), (12.1, y), gap=0)
        box(axes, 12.2, i, 2, 1, f"{left[i] * right[i]:.2f}", pale.GREEN)
    axes.plot([12.2, 14.2], [bottom - 0.2] * 2, color=INK, linewidth=1.2)
    write(axes, 14.2, bottom + 0.45, f"mean {np.mean(left * right):.2f}", ha="right")
    write(axes, 14.2, bottom + 1.35, f"$e^{{qk}}$ = {np.exp(q * k):.2f}", ha="right")
    axes.set(xlim=(-0.2, 15.0), ylim=(bottom + 2.0, -2.6))
    return figure


@drawing
def misplaced_weight(
    num_features: ArrayLike,
    lines: Mapping[str, ArrayLike],
    others: Mapping[str, tuple[float, float]],
    level: float,
) -> BookFigure:
    """Weight on wrong letters against the number of features: lines of random ones, and marks.

    lines has for each way to draw the weight at each number of features, others for each name its
    number of features and its weight; level is that of equal weights.
    """
    figure, ((axes,),) = new_figure(height=3.2)
    x = np.asarray(num_features, dtype=float)
    random = {name: np.asarray(misplaced, dtype=float) for name, misplaced in lines.items()}
    for index, (name, y) in enumerate(random.items()):
        style = look(index)
        axes.plot(x, y, **style)
        beside(axes, name, (x[-1], y[-1]), (7, 0), va="center", color=style["color"])
    axes.axhline(level, color=GRAY, linestyle="--", linewidth=1.4)
    right = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": GRAY}
    beside(axes, "equal weights", (1, level), (-2, 4), **right)
    for index, (name, at) in enumerate(others.items(), start=len(lines)):
        axes.plot(*at, **look(index, linestyle="none", markersize=8))
        rivals = [weight for C, weight in others.values() if C == at[0]]
        lowest = min(np.interp(at[0], x, y) for y in random.values())
        if len(rivals) == 1 and at[1] < lowest:
            beside(axes, name, at, (0, -16), ha="center", color=INK)
        elif len(rivals) == 1:  # a line passes below
            beside(axes, name, at, (9, 0), va="center", color=INK)
        else:
            place = "bottom" if at[1] == max(rivals) else "top"
            beside(axes, name, at, (9, 0), va=place, color=INK)
    axes.set(xscale="log", xlabel="features $C$", ylabel="weight on wrong letters")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlim(right=10 * x[-1])  # room for the names of the lines
    axes.set_ylim(0, 1.08 * max(level, *(y.max() for y in random.values())))
    return figure


@drawing
def best_rank(lines: Mapping[str, NDArray], level: float) -> BookFigure:
    """The error of the best matrix of each rank 0, 1, 2, ...; marks where it falls to the level."""
    figure, ((axes,),) = new_figure(height=3.4)
    axes.axhline(level, color=GRAY, linestyle="--", linewidth=1.4)
    beside(axes, f"{level:.0%}", (0, level), (4, -14), color=GRAY)
    for index, (name, error) in enumerate(lines.items()):
        style = look(index, marker=None)
        axes.plot(np.arange(len(error)), error, label=name, **style)
        rank = int((error > level).sum())
        axes.plot(rank, level, "o", color=style["color"])
        beside(axes, f"{rank}", (rank, level), (2, 6), color=style["color"])
    axes.set(xlabel="features $C$", ylabel="relative error")
    axes.margins(x=0.02)
    axes.legend(loc="upper right")
    return figure


@drawing
def where_the_mean_is(lengths: Sequence[float]) -> BookFigure:
    """Along y: the density of the rolls, and of what they contribute to the mean, for some |y|."""
    figure, ((axes,),) = new_figure(height=2.6)
    w = np.linspace(-4, max(lengths) + 3.5, 301)

    def bell(center: float) -> NDArray:
        return np.exp(-((w - center) ** 2) / 2) / np.sqrt(2 * np.pi)

    axes.fill_between(w, bell(0), color=pale.BLUE, edgecolor=BLUE)
    beside(axes, "rolls", (-0.9, 0.27), (-6, 0), ha="right", color=BLUE)
    for index, y in enumerate(lengths, start=1):
        style = look(index, marker=None)
        axes.plot(w, bell(y), **style)
        beside(axes, f"mean, $|y| = {y:g}$", (y - 0.4, 0.41), (0, 2), color=style["color"])
    axes.set(xlabel="$w$ in the direction of $y$", ylabel="density", ylim=(0, 0.48), yticks=[])
    return figure


@drawing
def estimated_over_exact(
    num_features: Sequence[int], dim: int = 4, pairs: int = 300, seed: int = 0
) -> BookFigure:
    """Estimated over exact similarity of pairs q = k against the length of y = q' + k'.

    Each pair has a draw of its own. One panel for each number of features; the dashed line is the
    median of all draws.
    """
    rng = np.random.default_rng(seed)
    length = np.linspace(0.02, 4, pairs)
    direction = rng.standard_normal((pairs, dim))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    x = dim**0.25 * length[:, None] / 2 * direction
    exact = np.exp(length**2 / 4)
    along = np.linspace(0.02, 4, 40)
    figure, panels = new_figure(rows=len(num_features), height=4.8, sharex=True)
    for axes, m in zip(panels[:, 0], num_features, strict=True):
        features = [
            positive_random_features(m, dim, orthogonal=False, seed=s)(row)
            for s, row in enumerate(x)
        ]
        ratio = np.array([phi @ phi for phi in features]) / exact
        draws = rng.standard_normal((1_000, m))  # w along y: the rest does not matter
        median = [np.median(np.exp(draws * y - y * y / 2).mean(axis=1)) for y in along]
        axes.axhline(1, color=GRAY, linewidth=1.2)
        axes.plot(length, ratio, ".", color=VERMILION, markersize=4)
        axes.plot(along, median, color=BLUE, linestyle="--")
        beside(axes, "mean of all draws", (0, 1), (2, 9), color=GRAY)
        beside(axes, "median", (along[-1], median[-1]), (4, 0), color=BLUE, va="center")
        axes.set(yscale="log", ylim=(1e-3, 1e2), title=f"m = {m}", ylabel="estimate / exact")
    panels[-1, 0].set_xlabel(r"$|y| = |q + k| \,/\, D^{1/4}$")
    return figure
