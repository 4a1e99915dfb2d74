"""Figures of the recurrence: states in time, one output two ways, chunks, composed steps."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray

from lesson_code.plots import pale
from lesson_code.plots.cells import (
    arrow,
    canvas,
    entries,
    rectangle,
    write,
)
from lesson_code.plots.colors import BLUE, GRAY, look
from lesson_code.plots.lines import beside, legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure


def plus(axes: Axes, x: float, y: float) -> None:
    """A plus in a circle, where two arrows meet."""
    axes.add_patch(Circle((x, y), 0.36, fc="white", ec=GRAY))
    write(axes, x, y, "$+$")


@drawing
def unrolled(q: NDArray, k: NDArray, v: NDArray) -> BookFigure:
    """The states S_0 ... S_N in a row: what tokens write below them, what queries read above."""
    pitch, N = 4.0, len(q)
    figure, axes = canvas(pitch * N + 2.2, 11.2)
    S = np.zeros((k.shape[1], v.shape[1]))
    entries(axes, 0, 0, S, pale.BLUE, "$S_0$")
    for t in range(N):
        x = pitch * (t + 1)
        middle = x - (pitch - 2) / 2
        note = np.outer(k[t], v[t])
        S = S + note
        entries(axes, x, 0, S, pale.BLUE, f"$S_{t + 1}$", offset=-0.75)
        entries(axes, middle - 1, 3.6, note, pale.VERMILION)
        entries(axes, x, -3.2, q[t] @ S, pale.GREEN, rf"$\tilde o_{t + 1}^\top$")
        plus(axes, middle, 1)
        arrow(axes, (x - pitch + 2, 1), (middle - 0.36, 1), gap=0)
        arrow(axes, (middle + 0.36, 1), (x, 1), gap=0)
        arrow(axes, (middle, 3.6), (middle, 1.36))
        arrow(axes, (x + 1, 0), (x + 1, -2.2))
        write(axes, middle, 5.75, f"$k_{t + 1}v_{t + 1}^\\top$", va="top")
        axes.text(x + 1.2, -1.1, f"$q_{t + 1}$", va="center")
    axes.set(xlim=(-0.1, pitch * N + 2.1), ylim=(6.8, -4.4))
    return figure


@drawing
def two_ways(q: NDArray, k: NDArray, v: NDArray, t: int) -> BookFigure:
    """Output t token by token: A_tj times v_j from above, q_t reading k_j v_j from below."""
    pitch, left = 3.0, 2.8
    figure, axes = canvas(left + pitch * t + 2.1, 10.4)
    query, weights = q[t - 1], k[:t] @ q[t - 1]
    written = k[:t, :, None] * v[:t, None, :]
    for j in range(t):
        x = left + pitch * j
        write(axes, x + 1, -0.6, f"token {j + 1}")
        entries(axes, x + 0.5, 0, weights[j], pale.VERMILION)
        write(axes, x + 1, 1.3, r"$\times$")
        entries(axes, x, 1.6, v[j], pale.VERMILION)
        arrow(axes, (x + 1, 2.6), (x + 1, 4.0))
        entries(axes, x, 4.0, weights[j] * v[j], pale.GREEN)
        arrow(axes, (x + 1, 6.8), (x + 1, 5.0))
        entries(axes, x, 6.8, written[j], pale.BLUE)
        for y in (4.5, 7.8):
            write(axes, x + 2.5, y, "$+$" if j < t - 1 else "$=$", fontsize=13)
    x = left + pitch * t
    entries(axes, x, 4.0, weights @ v[:t], pale.GREEN, rf"$\tilde o_{t}^\top$")
    entries(axes, x, 6.8, written.sum(axis=0), pale.BLUE)
    write(axes, x + 1, 9.2, f"$S_{t}$")
    arrow(axes, (x + 1, 6.8), (x + 1, 5.0))
    reading = f"$q_{t}^\\top$ = [{', '.join(f'{number:g}' for number in query)}]"
    names = (
        (0.5, f"row {t} of $A$"),
        (2.1, "$v_j^\\top$"),
        (4.5, f"output {t}"),
        (5.9, f"{reading}\nreads"),
        (7.8, "$k_j v_j^\\top$"),
    )
    for y, name in names:
        write(axes, 0, y, name, ha="left")
    axes.set(xlim=(-0.1, x + 2.1), ylim=(9.5, -0.9))
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
                style = look(list(after).index(t), marker=None)
                axes.plot(start, h, label=f"$t = {t}$", **style)
        axes.set(title=title, xlabel="$h_0$")
    left.set_ylabel("$h_t$")
    right.set_ylim(-1.3, 1.3)
    for limit in (-1, 1):
        right.axhline(limit, color=GRAY, linestyle="--", linewidth=1, zorder=1)
    beside(right, "limits of one step", (-3, 1), (0, 5), color=GRAY, fontsize=10)
    low, high = np.tanh(np.array([-weight, weight]) + inputs[1])
    note = {"ha": "right", "fontsize": 10, "color": look(1)["color"]}
    beside(right, f"{high:.2f}", (3, high), (0, -13), **note)
    beside(right, f"{low:.2f}".replace("-", "\u2212"), (-0.3, low), (0, -13), **note)
    legend_below(figure, *left.get_legend_handles_labels())
    return figure


@drawing
def between(N: int, sizes: Sequence[int]) -> BookFigure:
    """The causal triangle cut into chunks of several sizes: weights inside, one state before."""
    pitch = N + 1.2
    figure, axes = canvas(pitch * len(sizes) - 0.1, N + 3.5, unit=6.4 / (pitch * len(sizes) - 0.1))
    for place, L in enumerate(sizes):
        x = pitch * place
        for t in range(N):
            for j in range(t // L * L, t + 1):
                rectangle(axes, x + j, t, 1, 1, pale.VERMILION, linewidth=0.8)
        for start in range(L, N, L):
            height = min(L, N - start)
            rectangle(axes, x, start, start, height, pale.BLUE, BLUE, linewidth=1.4)
            write(axes, x + start / 2, start + height / 2, f"$S_{start}$", fontsize=11)
        rectangle(axes, x, 0, N, N, "none", "#b5b5b5", linewidth=0.8)
        write(axes, x + N / 2, -1.4, f"$L = {L}$")
        write(axes, x + N / 2, -0.5, r"keys $\rightarrow$", fontsize=10)
        steps = -(-N // L)
        write(axes, x + N / 2, N + 0.65, f"{steps} step" + "s" * (steps > 1), fontsize=10)
    key = ((0, pale.VERMILION, GRAY, "a weight"), (pitch, pale.BLUE, BLUE, "read from a state"))
    for x, fill, edge, text in key:
        rectangle(axes, x, N + 1.5, 0.7, 0.7, fill, edge, linewidth=0.8)
        write(axes, x + 1, N + 1.85, text, ha="left", fontsize=10)
    write(axes, -0.5, N / 2, r"$\leftarrow$ queries", rotation=90, fontsize=10)
    axes.set(xlim=(-1, pitch * len(sizes) - 1.1), ylim=(N + 2.3, -1.9))
    return figure


@drawing
def marks(start: NDArray, linear: NDArray, tanh: NDArray) -> BookFigure:
    """The derivative of h_n with respect to each input against h_0: linear steps, tanh steps."""
    figure, ((left, right),) = new_figure(2, width=5.8, height=3.4)
    for axes, rows, title in ((left, linear, "linear"), (right, tanh, "tanh")):
        for j, row in enumerate(rows):
            axes.plot(start, row, label=f"$j = {j + 1}$", **look(j, marker=None))
        axes.set(title=title, xlabel="$h_0$", ylim=(0, None))
    left.set_ylabel(rf"$\partial h_{len(linear)} / \partial x_j$")
    legend_below(figure, *left.get_legend_handles_labels())
    return figure


@drawing
def valley(
    lengths: Sequence[int], milliseconds: Sequence[float], operations: Sequence[float]
) -> BookFigure:
    """Time against the length of a chunk, and what its operations alone would take.

    The operations, in any unit, are given the speed of the fastest length.
    """
    figure, ((axes,),) = new_figure(height=3.4)
    axes.plot(lengths, milliseconds, **look(0))
    lowest = int(np.argmin(milliseconds))
    at = (lengths[lowest], milliseconds[lowest])
    alone = np.asarray(operations) * at[1] / operations[lowest]
    axes.plot(lengths, alone, color=GRAY, linestyle="--", zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="chunk length $L$", ylabel="milliseconds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_ylim(0.5 * min(alone), 2 * max(milliseconds))
    beside(axes, f"$L = {at[0]}$", at, (0, -9), ha="center", va="top", fontsize=12)
    note = {"color": GRAY, "fontsize": 12}
    beside(axes, "waiting", (lengths[0], np.sqrt(milliseconds[0] * alone[0])), (2, -4), **note)
    beside(axes, "operations alone", (lengths[0], alone[0]), (0, 7), **note)
    return figure
