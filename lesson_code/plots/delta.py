"""Figures of the delta rule: a memory that is moved onto what each token says."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots.cells import arrow
from lesson_code.plots.colors import BLUE, GRAY, INK, VERMILION, look
from lesson_code.plots.lines import beside, mark, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def rewritten(notes: Mapping[str, ArrayLike], reads: Mapping[str, ArrayLike]) -> BookFigure:
    """What each key finds under several rules, in a panel for each key.

    notes gives for each key, at each of N steps, the value that is written then, or nan. reads
    gives for each rule an array (N, keys) of what the keys find. Rings show the values written.
    """
    height = 2.2 * len(notes)
    figure, axes = new_figure(1, len(notes), height=height, sharex=True)
    for row, (name, written) in enumerate(notes.items()):
        panel = axes[row, 0]
        written = np.asarray(written, float)
        steps = np.arange(1, len(written) + 1)
        for index, (rule, found) in enumerate(reads.items()):
            panel.plot(steps, np.asarray(found)[:, row], label=rule, **look(index, markersize=4))
        ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "linestyle": "none"}
        panel.plot(steps, written, label="_written", color=INK, **ring)
        panel.set_title(name, loc="left")
        panel.set(ylabel="what it finds")
        panel.margins(x=0.03, y=0.12)
        lines = [line for line in panel.get_lines() if line.get_label()[0] != "_"]
        name_lines(panel, lines, height / len(notes))
    axes[-1, 0].set(xlabel="step")
    return figure


@drawing
def many_keys(
    keys: Sequence[int],
    right: Mapping[str, ArrayLike],
    *,
    marks: Sequence[tuple[float, str]] = (),
) -> BookFigure:
    """Share of right answers of several models by the number of keys: means and ranges.

    Each entry of right is an array (seeds, keys).
    """
    height = 4.2
    figure, ((axes,),) = new_figure(height=height)
    for index, (name, runs) in enumerate(right.items()):
        runs = np.asarray(runs)
        mean = runs.mean(axis=0)
        bars = np.maximum([mean - runs.min(axis=0), runs.max(axis=0) - mean], 0)  # but for rounding
        axes.plot(keys, mean, label=name, **look(index))
        axes.errorbar(keys, mean, bars, fmt="none", ecolor=look(index)["color"], capsize=3)
    axes.set_xscale("log")
    axes.set_xticks(keys, [str(count) for count in keys])
    axes.minorticks_off()
    axes.set(xlabel="number of keys", ylabel="share right", ylim=(0, 1.03))
    name_lines(axes, [line for line in axes.get_lines() if line.get_label()[0] != "_"], height)
    for position, text in marks:
        mark(axes, position, text)
    return figure


@drawing
def projections(k: ArrayLike, v: ArrayLike, beta: ArrayLike) -> BookFigure:
    """A memory s of two numbers, moved by each token towards the line of all s with k·s = v.

    k is (N, 2), v and beta are (N,). The axes show the plane of s, with a line for each token and
    the way that s takes from 0.
    """
    k, v, beta = (np.asarray(x, float) for x in (k, v, beta))
    states = [np.zeros(2)]
    for k_t, v_t, beta_t in zip(k, v, beta, strict=True):
        states.append(states[-1] + beta_t * (v_t - k_t @ states[-1]) * k_t)
    path = np.array(states)
    low, high = path.min() - 0.2 * np.ptp(path), path.max() + 0.35 * np.ptp(path)
    figure, ((axes,),) = new_figure(width=4.6, height=4.4)
    for t, (k_t, v_t) in enumerate(zip(k, v, strict=True), start=1):
        ends = _line_in_box(k_t, v_t, low, high)
        axes.plot(*ends.T, color=BLUE, linewidth=1.4, linestyle="--")
        place, offset, ha, va = _place_of_name(k_t, ends)
        beside(axes, f"$k_{t} \\cdot s = {v_t:g}$", place, offset, color=BLUE, ha=ha, va=va)
    for start, end in zip(path[:-1], path[1:], strict=True):
        arrow(axes, start, end, VERMILION, gap=0, linewidth=2)
    axes.plot(*path.T, color=VERMILION, marker="o", linestyle="none")
    for t, state in enumerate(path):
        beside(axes, f"$s_{t}$", state, (8, 4) if t == len(k) else (7, -13))
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="first entry of $s$", ylabel="second entry of $s$")
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.axvline(0, color=GRAY, linewidth=0.8)
    return figure


def _place_of_name(k, ends):
    """Where the name of a line stands: a point, an offset from it, and how to align."""
    if k[1] == 0:
        return ends[0], (5, -4), "left", "top"
    if k[0] == 0:
        return ends[1] if ends[1][0] > ends[0][0] else ends[0], (-4, 3), "right", "bottom"
    return 0.4 * ends[0] + 0.6 * ends[1], (6, 2), "left", "bottom"


def _line_in_box(k: NDArray, v: float, low: float, high: float) -> NDArray:
    """The ends of the line k·s = v inside a square, the upper one first."""
    points = []
    for axis in (0, 1):
        for edge in (low, high):
            if k[1 - axis] != 0:
                other = (v - k[axis] * edge) / k[1 - axis]
                if low <= other <= high:
                    point = [edge, other] if axis == 0 else [other, edge]
                    points.append(point)
    points = sorted(points, key=lambda point: (-point[1], -point[0]))
    return np.array([points[0], points[-1]])
