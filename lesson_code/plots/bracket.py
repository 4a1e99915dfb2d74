"""Figures of the bracket trick: both orders of the product to scale, and rows of weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights, elu_plus_one
from lesson_code.plots.style import BLUE, GRAY, INK, VERMILION, BookFigure, drawing, new_figure

PLAIN, SQUARE, STATE = "#e4e4e4", "#f6c9a8", "#a9d0ea"


@drawing
def two_brackets(N: int, D: int, M: int | None = None) -> BookFigure:
    """(Q Kᵀ) V and Q (Kᵀ V) for N tokens of width D and values of width M, to scale."""
    M = D if M is None else M
    figure, ((axes,),) = new_figure(width=5.6, height=4.2)
    upper = 1.5 * N
    first = [
        "(", ("$Q$", N, D, PLAIN), ("$K^\\top$", D, N, PLAIN), ")", ("$V$", N, M, PLAIN),
        "=", ("$QK^\\top$", N, N, SQUARE), ("$V$", N, M, PLAIN),
    ]  # fmt: skip
    second = [
        ("$Q$", N, D, PLAIN), "(", ("$K^\\top$", D, N, PLAIN), ("$V$", N, M, PLAIN), ")",
        "=", ("$Q$", N, D, PLAIN), ("$S$", D, M, STATE),
    ]  # fmt: skip
    right = max(_row(axes, first, upper, N), _row(axes, second, 0, N))
    axes.set(xlim=(-0.12 * N, right), ylim=(-0.7 * N, upper + 0.72 * N), aspect="equal")
    axes.set_axis_off()
    return figure


def _row(axes, parts, y, N):
    """Draw rectangles and signs from left to right around height y; return where they end."""
    x, gap = 0.0, 0.14 * N
    for part in parts:
        if isinstance(part, str):
            size = 30 if part in "()" else 15
            axes.text(x + 0.05 * N, y, part, ha="center", va="center", fontsize=size, color=INK)
            x += 0.1 * N + gap
            continue
        name, rows, columns, fill = part
        axes.add_patch(Rectangle((x, y - rows / 2), columns, rows, fc=fill, ec=GRAY))
        center = x + columns / 2
        square = rows == columns == N
        axes.text(
            center, y if square else y + rows / 2 + 0.04 * N, name,
            ha="center", va="center" if square else "bottom", fontsize=13, color=INK,
        )  # fmt: skip
        axes.text(
            center, y - rows / 2 - 0.04 * N, f"{rows}×{columns}",
            ha="center", va="top", fontsize=10, color=GRAY,
        )  # fmt: skip
        x += columns + gap
    return x


@drawing
def weight_rows(q: NDArray, k: NDArray, factors: Sequence[float] = (1, 4)) -> BookFigure:
    """Softmax and linear attention (elu + 1) weights of one query q, multiplied by each factor."""
    figure, axes = new_figure(2, len(factors), height=2.1 * len(factors), sharex=True, sharey=True)
    for row, factor in enumerate(factors):
        similarity = elu_plus_one(factor * q) @ elu_plus_one(k).T
        linear = similarity / similarity.sum(axis=-1, keepdims=True)
        softmax = attention_weights(factor * q, k)
        for column, (name, a, color) in enumerate(
            [("softmax", softmax[0], VERMILION), ("linear", linear[0], BLUE)]
        ):
            entropy = -np.sum(a * np.log(np.where(a > 0, a, 1)))
            axes[row, column].bar(range(len(a)), a, color=color, width=0.8)
            axes[row, column].grid(visible=False, axis="x")
            axes[row, column].set_xticks([])
            axes[row, column].set_title(f"{name}, entropy {entropy:.2f}")
        query = "q" if factor == 1 else f"{factor:g}q"
        axes[row, 0].set_ylabel(f"weight for ${query}$")
    for column in range(2):
        axes[-1, column].set_xlabel("keys")
    return figure
