"""Figures of random features: how far one draw is off, and what that does to the weights."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.numpy import positive_random_features
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def misplaced_weight(
    num_features: ArrayLike,
    misplaced: ArrayLike,
    others: Mapping[str, tuple[float, float]],
    level: float,
) -> BookFigure:
    """Weight on wrong letters against the number of features: a line of random ones, and marks.

    others has for each name its number of features and its weight; level is that of equal weights.
    """
    figure, ((axes,),) = new_figure(height=3.2)
    axes.plot(num_features, misplaced, **look(0))
    end = np.asarray(num_features)[-1], np.asarray(misplaced)[-1]
    beside(axes, "random features", end, (4, -18), ha="right", color=BLUE)
    axes.axhline(level, color=GRAY, linestyle="--", linewidth=1.4)
    right = {"xycoords": ("axes fraction", "data"), "ha": "right", "color": GRAY}
    beside(axes, "equal weights", (1, level), (-2, 4), **right)
    for index, (name, at) in enumerate(others.items(), start=1):
        axes.plot(*at, **look(index, linestyle="none", markersize=8))
        beside(axes, name, at, (0, -16), ha="center", color=INK)
    axes.set(xscale="log", xlabel="features C", ylabel="weight on wrong letters")
    axes.set_ylim(0, 1.08 * max(np.max(misplaced), level))
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
