"""Figures of retention: a memory that fades, and the three factors of its chunkwise form."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from lesson_code.plots.style import (
    BLUE,
    GRAY,
    INK,
    POSITIVE,
    VERMILION,
    BookFigure,
    draw_matrix,
    drawing,
    new_figure,
)


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
    figure, axes = new_figure(len(k), 3, width=5.4, height=5.0)
    limit = float(np.abs(states).max())
    for t in range(len(k)):
        draw_matrix(axes[0, t], left[t], title=rf"$\gamma S_{t}$", limit=limit)
        title = rf"$k_{t + 1} v_{t + 1}^\top$"
        draw_matrix(axes[1, t], writes[t], title=title, limit=limit)
        draw_matrix(axes[2, t], states[t], title=f"$S_{t + 1}$", limit=limit)
    for row, name in enumerate(("left", "written", "their sum")):
        axes[row, 0].set_ylabel(name)
    return figure


@drawing
def exponents(gamma: float, chunks: int, L: int) -> BookFigure:
    """How often each token has faded for each query, and the two sums of which that is made.

    The numbers beside the rows count from the start of a chunk, those below the columns to its end.
    """
    N = chunks * L
    figure, ((axes,),) = new_figure(width=4.8, height=4.4)
    for t in range(N):
        for j in range(N):
            seen = j <= t
            color = POSITIVE(0.75 * gamma ** (t - j)) if seen else "#ececec"
            axes.add_patch(Rectangle((j, t), 1, 1, fc=color, ec="#c9c9c9", linewidth=0.6))
            if seen:
                _number(axes, j, t, t - j, INK if gamma ** (t - j) < 0.6 else "white")
    for i in range(chunks):
        own = Rectangle((i * L, i * L), L, L, fill=False, ec=GRAY, linewidth=1.6)
        axes.add_patch(own)
        if i:
            earlier = Rectangle((0, i * L), i * L, L, fill=False, ec=BLUE, linewidth=1.8)
            axes.add_patch(earlier)
    for t in range(N):
        _number(axes, -1.2, t, t % L + 1, VERMILION)
        _number(axes, t, N + 0.2, L - 1 - t % L, BLUE)
    options = {"ha": "center", "va": "center"}
    axes.text(-1.75, N / 2, "from the start", rotation=90, color=VERMILION, **options)
    axes.text(N / 2, N + 1.75, "to the end", color=BLUE, **options)
    axes.set(xlim=(-2.1, N + 0.1), ylim=(N + 2.1, -0.1), aspect="equal")
    axes.set_axis_off()
    return figure


def _number(axes: Axes, column: float, row: float, number: int, color: Any) -> None:
    """A number in the middle of a cell."""
    axes.text(column + 0.5, row + 0.5, str(number), ha="center", va="center", color=color)
