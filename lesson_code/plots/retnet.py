"""Figures of retention: a memory that fades, what that buys, and its three factors in chunks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from lesson_code.plots import pale
from lesson_code.plots.cells import canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, INK, POSITIVE, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.matrices import matrix_rows
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def fading(k: NDArray, v: NDArray, gamma: float) -> BookFigure:
    """What is left of the state (top), what a token writes, and their sum: a column for each."""
    left, writes, states = [], [], []
    S = np.zeros((k.shape[1], v.shape[1]))
    for k_t, v_t in zip(k, v, strict=True):
        left.append(gamma * S)
        writes.append(np.outer(k_t, v_t))
        S = left[-1] + writes[-1]
        states.append(S)
    rows = {
        "left": [(rf"$\gamma S_{t}$", matrix) for t, matrix in enumerate(left)],
        "written": [(rf"$k_{t} v_{t}^\top$", matrix) for t, matrix in enumerate(writes, 1)],
        "their sum": [(f"$S_{t}$", matrix) for t, matrix in enumerate(states, 1)],
    }
    return matrix_rows(rows, width=5.4, height=5.0, limit=float(np.abs(states).max()))


@drawing
def noise(measured: Mapping[str, NDArray], D: int) -> BookFigure:
    """What other tokens add to one of each age, as a share of its own power: a line for each decay.

    A thin line is the least that a decay can do with keys of width D; at the dotted one the others
    are as strong as the token itself.
    """
    figure, ((axes,),) = new_figure(height=3.6)
    for index, (decay, power) in enumerate(measured.items()):
        ages = np.unique(np.geomspace(1, len(power) / 1.2, 30).astype(int)) - 1
        means = [power[int(n / 1.15) : int(1.15 * n) + 1].mean() for n in ages]
        axes.plot(ages + 1, means, **look(index, marker=None))
        beside(axes, rf"$\gamma$ = {decay}", (1.05, means[0]), (0, 7), color=look(index)["color"])
    n = np.arange(len(measured[decay]))
    axes.plot(n + 1, (n + 1) / D * (1 + 1 / np.maximum(n, 1)) ** n, color=GRAY, linewidth=1.2)
    beside(axes, "the best decay for each age", (7, 0.05), (0, 0), color=GRAY)
    axes.axhline(1, color=GRAY, linestyle=":", linewidth=1.4)
    axes.set(xscale="log", yscale="log", ylim=(0.012, 300), xlim=(1, 1000))
    axes.set(xlabel="age n + 1: 1 for the newest", ylabel="noise / signal, as powers")
    return figure


@drawing
def exponents(gamma: float, chunks: int, L: int) -> BookFigure:
    """How often each token has faded for each query, and the two sums of which that is made.

    The numbers beside the rows count from the start of a chunk, those below the columns to its end.
    """
    N = chunks * L
    figure, axes = canvas(4.8, 4.4, unit=1)
    for t, j in np.ndindex(N, N):
        color = POSITIVE(0.75 * gamma ** (t - j)) if j <= t else pale.GRAY
        rectangle(axes, j, t, 1, 1, color, "#c9c9c9", linewidth=0.6)
        if j <= t:
            _number(axes, j, t, t - j, INK if gamma ** (t - j) < 0.6 else "white")
    for i in range(chunks):
        rectangle(axes, i * L, i * L, L, L, "none", linewidth=1.6)
        if i:
            rectangle(axes, 0, i * L, i * L, L, "none", BLUE, linewidth=1.8)
    for t in range(N):
        _number(axes, -1.2, t, t % L + 1, VERMILION)
        _number(axes, t, N + 0.2, L - 1 - t % L, BLUE)
    write(axes, -1.75, N / 2, "from the start", rotation=90, color=VERMILION)
    write(axes, N / 2, N + 1.75, "to the end", color=BLUE)
    axes.set(xlim=(-2.1, N + 0.1), ylim=(N + 2.1, -0.1))
    return figure


def _number(axes: Axes, column: float, row: float, number: int, color: Any) -> None:
    """A number in the middle of a cell."""
    write(axes, column + 0.5, row + 0.5, str(number), color=color)
