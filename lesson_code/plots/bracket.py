"""Figures of the bracket trick: both orders to scale, rows of weights, the measured gain."""

from collections.abc import Sequence

from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights, elu_plus_one
from lesson_code.plots.cells import canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, VERMILION, look
from lesson_code.plots.lines import bars, beside, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure

PLAIN, SQUARE, STATE = "#e4e4e4", "#f6c9a8", "#a9d0ea"


@drawing
def two_brackets(N: int, D: int, M: int | None = None) -> BookFigure:
    """(Q Kᵀ) V and Q (Kᵀ V) for N tokens of width D and values of width M, to scale."""
    M = D if M is None else M
    figure, axes = canvas(5.6, 4.2, unit=1)
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
    axes.set(xlim=(-0.12 * N, right), ylim=(-0.7 * N, upper + 0.72 * N))
    return figure


def _row(axes, parts, y, N):
    """Draw rectangles and signs from left to right around height y; return where they end."""
    x, gap = 0.0, 0.14 * N
    for part in parts:
        if isinstance(part, str):
            write(axes, x + 0.05 * N, y, part, fontsize=30 if part in "()" else 15)
            x += 0.1 * N + gap
            continue
        name, rows, columns, fill = part
        rectangle(axes, x, y - rows / 2, columns, rows, fill)
        center, top, gap_above = x + columns / 2, y + rows / 2, 0.04 * N
        if rows == columns == N:
            write(axes, center, y, name, fontsize=13)
        else:
            write(axes, center, top + gap_above, name, va="bottom", fontsize=13)
        below = {"va": "top", "fontsize": 11, "color": GRAY}
        write(axes, center, y - rows / 2 - gap_above, f"{rows}×{columns}", **below)
        x += columns + gap
    return x


@drawing
def weight_rows(q: NDArray, k: NDArray, factors: Sequence[float] = (1, 16)) -> BookFigure:
    """Softmax and linear attention (elu + 1) weights of one query q, multiplied by each factor."""
    figure, axes = new_figure(2, len(factors), height=2.1 * len(factors), sharex=True, sharey=True)
    for row, factor in enumerate(factors):
        similarity = elu_plus_one(factor * q) @ elu_plus_one(k).T
        linear = similarity / similarity.sum(axis=-1, keepdims=True)
        softmax = attention_weights(factor * q, k)
        for column, (name, A, color) in enumerate(
            [("softmax", softmax[0], VERMILION), ("linear", linear[0], BLUE)]
        ):
            bars(axes[row, column], A, color=color, width=0.8)
            axes[row, column].set_title(f"{name}, largest {A.max():.2f}")
        query = "q" if factor == 1 else f"{factor:g}\\,q"
        axes[row, 0].set_ylabel(f"weight for ${query}$")
    for column in range(2):
        axes[-1, column].set_xlabel("keys")
    return figure


@drawing
def gain(N: Sequence[int], measured: Sequence[float], counted: Sequence[float]) -> BookFigure:
    """Matrix divided by state, in time and in operations, against the number of tokens."""
    height = 3.3
    figure, ((axes,),) = new_figure(height=height)
    axes.axhline(1, color=GRAY, linestyle=":", linewidth=1.4)
    axes.plot(N, counted, label="operations", **look(2, marker=None))
    axes.plot(N, measured, label="time", **look(0))
    axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="matrix / state")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    name_lines(axes, axes.get_lines()[1:], height)
    right = {"ha": "right", "color": GRAY, "fontsize": 12}
    beside(axes, "above: the state is faster", (N[-1], 1), (0, 5), va="bottom", **right)
    beside(axes, "below: the matrix is faster", (N[-1], 1), (0, -6), va="top", **right)
    return figure
