"""Figures of the recurrence: states in time, one output two ways, composed steps, a prefix scan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike, NDArray

from lesson_code.numpy import identity, linear_attention
from lesson_code.plots.style import (
    BLUE,
    COLORS,
    DASHES,
    GRAY,
    GREEN,
    INK,
    BookFigure,
    draw_matrix,
    drawing,
    new_figure,
)  # fmt: skip

PALE_BLUE, PALE_VERMILION, PALE_GREEN = "#cfe3f2", "#fbdcc6", "#cdebe0"
ARROW = {"arrowstyle": "-|>", "color": GRAY, "shrinkA": 2, "shrinkB": 2}


@drawing
def unrolled(q: NDArray, k: NDArray, v: NDArray) -> BookFigure:
    """The states S_0 ... S_N in a row: what tokens write below them, what queries read above."""
    pitch, N = 3.4, len(q)
    figure, axes = _canvas(pitch * N + 2.2, 11.6)
    S = np.zeros((k.shape[1], v.shape[1]))
    _cells(axes, 0, 0, S, PALE_BLUE, "$S_0$")
    for t in range(N):
        x = pitch * (t + 1)
        write = np.outer(k[t], v[t])
        S = S + write
        _cells(axes, x, 0, S, PALE_BLUE, f"$S_{t + 1}$", offset=-0.75)
        _cells(axes, x, 4.0, write, PALE_VERMILION)
        _cells(axes, x, -3.2, q[t] @ S, PALE_GREEN, f"$o_{t + 1}$")
        _arrow(axes, (x - pitch + 2, 1), (x, 1))
        _arrow(axes, (x + 1, 4.0), (x + 1, 2))
        _arrow(axes, (x + 1, 0), (x + 1, -2.2))
        axes.text(x + 1, 6.15, f"$k_{t + 1}v_{t + 1}^\\top$", ha="center", va="top")
        axes.text(x + 1.2, -1.1, f"$q_{t + 1}$", va="center")
    axes.set(xlim=(-0.1, pitch * N + 2.1), ylim=(7.2, -4.4))
    return figure


@drawing
def two_ways(q: NDArray, k: NDArray, v: NDArray, t: int) -> BookFigure:
    """Output t as row t of the masked matrix times V, and as query t times the state S_t."""
    figure, axes = _canvas(10.8, 8.9)
    N, scores = len(q), np.tril(q @ k.T)
    for i in range(N):
        fill = PALE_VERMILION if i == t - 1 else "white"
        _cells(axes, 1.6, i, scores[i, : i + 1], fill)
        for j in range(i + 1, N):
            axes.add_patch(Rectangle((1.6 + j, i), 1, 1, fc="#ececec", ec="#bdbdbd"))
    axes.text(1.6 + N / 2, -0.3, r"$QK^\top \odot m$", ha="center")
    axes.text(1.4, t - 0.5, f"row {t}", ha="right", va="center")
    _cells(axes, 5.5, 0, v, PALE_VERMILION, "$V$")
    _cells(axes, 8.6, 1, scores[t - 1] @ v, PALE_GREEN, f"$o_{t}$")
    state = k[:t].T @ v[:t]
    _cells(axes, 2.1, 6.1, q[t - 1], PALE_BLUE, f"$q_{t}^\\top$")
    _cells(axes, 5.5, 5.6, state, PALE_BLUE, f"$S_{t}$")
    _cells(axes, 8.6, 6.1, q[t - 1] @ state, PALE_GREEN, f"$o_{t}$")
    for y in (1.5, 6.6):
        axes.text(5.05, y, r"$\times$", ha="center", va="center", fontsize=15)
        axes.text(8.05, y, "$=$", ha="center", va="center", fontsize=15)
    axes.set(xlim=(-0.1, 10.7), ylim=(7.8, -1.1))
    return figure


@drawing
def four_outputs(q: NDArray, k: NDArray, v: NDArray) -> BookFigure:
    """Outputs with the identity map: every position or causal, not normalized or normalized."""
    figure, axes = new_figure(2, 2, width=4.4, height=4.8)
    for row, normalize in enumerate((False, True)):
        for column, causal in enumerate((False, True)):
            out = linear_attention(
                q, k, v, feature_map=identity, causal=causal, normalize=normalize
            )
            title = ("every position", "causal")[column] if row == 0 else ""
            draw_matrix(axes[row, column], out, title=title, limit=60 if normalize else 180)
        axes[row, 0].set_ylabel("normalized" if normalize else "not normalized")
    return figure


@drawing
def composed_steps(weight: float, inputs: Sequence[float], after: Sequence[int]) -> BookFigure:
    """h_t as a function of h_0 for some t: h_t = w h_{t-1} + x_t (left) or its tanh (right)."""
    figure, ((left, right),) = new_figure(2, width=5.8, height=3.4)
    start = np.linspace(-3, 3, 241)
    for axes, step, title in ((left, lambda h: h, "linear"), (right, np.tanh, "tanh")):
        h = start
        for t, x in enumerate(inputs, start=1):
            h = step(weight * h + x)
            if t in after:
                index = list(after).index(t)
                axes.plot(
                    start, h, color=COLORS[index], linestyle=DASHES[index], label=f"$t = {t}$"
                )
        axes.set_title(title)
        axes.set_xlabel("$h_0$")
    left.set_ylabel("$h_t$")
    right.set_ylim(-1.1, 1.1)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(after))
    return figure


@drawing
def hillis_steele(numbers: Sequence[int]) -> BookFigure:
    """Prefix sums in log2 N rounds: each adds what stands `distance` to the left."""
    row, pitch, height = np.asarray(numbers), 1.35, 2.2
    N, rounds = len(row), int(np.ceil(np.log2(len(row))))
    figure, axes = _canvas(pitch * N + 2.6, height * rounds + 1.4)
    distance = 1
    _scan_row(axes, 0, row, 1, pitch)
    axes.text(-0.5, 0.5, "numbers", ha="right", va="center")
    for r in range(1, rounds + 1):
        y = height * r
        for i in range(N):
            _arrow(axes, (pitch * i + 0.5, y - height + 1), (pitch * i + 0.5, y), color="#b5b5b5")
            if i >= distance:
                left = pitch * (i - distance) + 0.5
                _arrow(axes, (left, y - height + 1), (pitch * i + 0.5, y), color=BLUE)
        row = np.concatenate([row[:distance], row[:-distance] + row[distance:]])
        axes.text(-0.5, y + 0.5, f"distance {distance}", ha="right", va="center")
        distance *= 2
        _scan_row(axes, y, row, distance, pitch)
    axes.set(xlim=(-3.4, pitch * (N - 1) + 1.1), ylim=(height * rounds + 1.1, -0.1))
    return figure


def _canvas(columns: float, rows: float) -> tuple[BookFigure, Axes]:
    """An empty drawing whose unit is one matrix cell, y downward."""
    figure, ((axes,),) = new_figure(width=0.42 * columns, height=0.42 * rows)
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure, axes


def _cells(
    axes: Axes, x: float, y: float, values: ArrayLike, fill: str, name: str = "", offset: float = 0
) -> None:
    """A matrix with its upper left corner at (x, y) and its name above it."""
    values = np.atleast_2d(values)
    for (i, j), value in np.ndenumerate(values):
        axes.add_patch(Rectangle((x + j, y + i), 1, 1, fc=fill, ec=GRAY, linewidth=0.8))
        axes.text(x + j + 0.5, y + i + 0.5, f"{value:g}", ha="center", va="center", color=INK)
    axes.text(x + values.shape[1] / 2 + offset, y - 0.25, name, ha="center", va="bottom")


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = GRAY
) -> None:
    axes.annotate("", end, start, arrowprops={**ARROW, "color": color})


def _scan_row(axes: Axes, y: float, row: NDArray, finished: int, pitch: float) -> None:
    """One row of a scan; the first `finished` sums are complete."""
    for i, value in enumerate(row):
        fill = PALE_GREEN if i < finished else "white"
        axes.add_patch(Rectangle((pitch * i, y), 1, 1, fc=fill, ec=GREEN if i < finished else GRAY))
        axes.text(pitch * i + 0.5, y + 0.5, str(value), ha="center", va="center")
