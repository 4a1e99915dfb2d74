"""Figures of the bracket trick: both orders to scale, rows of weights, their price, the gain."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from lesson_code.numpy import attention_weights, elu_plus_one
from lesson_code.plots import pale
from lesson_code.plots.cells import canvas, rectangle, write
from lesson_code.plots.colors import GRAY, look
from lesson_code.plots.lines import beside, legend_below, mark, name_lines
from lesson_code.plots.style import BookFigure, drawing, new_figure

PLAIN, SQUARE, STATE = "#e4e4e4", "#f6c9a8", "#a9d0ea"


@drawing
def two_brackets(N: int, D: int, M: int | None = None) -> BookFigure:
    """(Q Kᵀ) V and Q (Kᵀ V) for N tokens of width D and values of width M, to scale."""
    M = D if M is None else M
    figure, axes = canvas(5.6, 4.2, unit=1)
    upper = 1.7 * N
    first = [
        "(", ("$Q$", N, D, PLAIN), ("$K^\\top$", D, N, PLAIN), ")", ("$V$", N, M, PLAIN),
        "=", ("$QK^\\top$", N, N, SQUARE), ("$V$", N, M, PLAIN),
    ]  # fmt: skip
    second = [
        ("$Q$", N, D, PLAIN), "(", ("$K^\\top$", D, N, PLAIN), ("$V$", N, M, PLAIN), ")",
        "=", ("$Q$", N, D, PLAIN), ("$S$", D, M, STATE),
    ]  # fmt: skip
    right = max(_row(axes, first, upper, N), _row(axes, second, 0, N))
    for y, name in ((upper, "matrix"), (0, "state")):
        write(axes, 0, y + 0.82 * N, f"with the {name}", fontsize=13, ha="left")
    axes.set(xlim=(-0.12 * N, right), ylim=(-0.6 * N, upper + 0.95 * N))
    return figure


def _row(axes, parts, y, N):
    """Draw rectangles and signs from left to right around height y; return where they end.

    The shape stands at the first rectangle of each kind in the row.
    """
    x, gap, seen = 0.0, 0.14 * N, set()
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
        if (rows, columns) not in seen:
            below = {"va": "top", "ha": "left" if rows == columns < N else "center"}
            place = x if below["ha"] == "left" else center
            shape, style = f"{rows}×{columns}", {"fontsize": 11, "color": GRAY}
            if fill != PLAIN:
                shape, style["linespacing"] = f"{shape} =\n{rows * columns:,} numbers", 1.3
            write(axes, place, y - rows / 2 - gap_above, shape, **style, **below)
        seen.add((rows, columns))
        x += columns + gap
    return x


@drawing
def weight_rows(q: NDArray, k: NDArray, factors: Sequence[float] = (1, 16)) -> BookFigure:
    """Softmax and linear attention (elu + 1) weights of one query q, multiplied by each factor.

    The keys are ordered by the softmax weights of q. A mark over each shows the most that any
    query can give it with elu + 1.
    """
    features = elu_plus_one(k)
    order = attention_weights(q, k)[0].argsort()[::-1]
    ceilings = (features / features.sum(axis=0)).max(axis=-1)
    figure, axes = new_figure(len(factors), height=3.8, sharex=True, sharey=True)
    keys = range(1, len(k) + 1)
    for panel, factor in zip(axes[0], factors, strict=True):
        similarity = elu_plus_one(factor * q) @ features.T
        linear = (similarity / similarity.sum(axis=-1, keepdims=True))[0]
        softmax = attention_weights(factor * q, k)[0]
        panel.axhline(1 / len(k), color=GRAY, linestyle=":", linewidth=1.4, label="all equal")
        sharp = look(1, linestyle="")
        panel.plot(keys, softmax[order], label="softmax", **sharp)
        panel.plot(keys, linear[order], label="linear", **look(0, linestyle=""))
        tick = look(6, linestyle="", marker="_", markersize=7)
        panel.plot(keys, ceilings[order], label="linear at most", **tick)
        query = "q" if factor == 1 else f"{factor:g}\\,q"
        panel.set(title=f"query ${query}$", xlabel="keys, by softmax weight for $q$")
        panel.set(yscale="log", ylim=(1e-3, 1.8))
        if softmax.max() > 0.9:
            text = f"{softmax.max():.2f}, all on one key"
            at = (1 + float(softmax[order].argmax()), softmax.max())
            beside(panel, text, at, (8, 0), va="center", fontsize=11, color=sharp["color"])
        panel.set_xticks([])
    axes[0, 0].set_ylabel("weight")
    axes[0, 0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    legend_below(figure, *axes[0, 0].get_legend_handles_labels())
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
    mark(axes, 65, "65")
    right = {"ha": "right", "color": GRAY, "fontsize": 12}
    beside(axes, "above: the state is faster", (N[-1], 1), (0, 5), va="bottom", **right)
    beside(axes, "below: the matrix is faster", (N[-1], 1), (0, -6), va="top", **right)
    return figure


@drawing
def sharpness(
    N: Sequence[int], softmax: Mapping[int, Sequence[float]], linear: Sequence[float], C: int
) -> BookFigure:
    """The weight of the right one of N keys: the most that C features allow, and what is reached.

    softmax has measured weights for queries of each length, linear those of elu + 1.
    """
    height, floor, top = 3.9, 1e-4, 1.6
    figure, ((axes,),) = new_figure(height=height)
    bound = np.minimum(1, C / np.asarray(N))
    axes.fill_between(N, bound, top, color=pale.BLUE, linewidth=0)
    axes.plot(N, bound, label=f"{C} features\nat most", **look(0, marker=None))
    for index, (length, weights) in enumerate(softmax.items()):
        style = look(1, markersize=6) | {"linestyle": ("-", "--")[index]}
        axes.plot(N, weights, label=f"softmax,\n$|q| = {length}$", **style)
    axes.plot(N, linear, label="elu + 1", **look(2, markersize=6))
    for line in axes.get_lines():
        at = tuple(np.asarray(line.get_xydata())[-1])
        up = -12 if str(line.get_label()).endswith("most") else 0
        up = 12 if line.get_linestyle() == "--" and "5" in str(line.get_label()) else up
        style = {"color": line.get_color(), "va": "center", "annotation_clip": False}
        beside(axes, str(line.get_label()), at, (8, up), linespacing=1, **style)
    axes.set(xscale="log", yscale="log", xlabel="words N", ylabel="weight of the right word")
    axes.set(xlim=(0.94 * N[0], 1.06 * N[-1]), ylim=(floor, top))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    text = f"no map of {C} features\ngets here"
    beside(axes, text, (2600, 0.19), (0, 0), ha="center", va="center", fontsize=12)
    return figure
