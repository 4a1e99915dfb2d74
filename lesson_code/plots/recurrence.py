"""Figures of the recurrence: states in time, one output two ways, chunks, composed steps."""

from collections.abc import Sequence

import numpy as np
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
from lesson_code.plots.lines import legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def unrolled(q: NDArray, k: NDArray, v: NDArray) -> BookFigure:
    """The states S_0 ... S_N in a row: what tokens write below them, what queries read above."""
    pitch, N = 3.4, len(q)
    figure, axes = canvas(pitch * N + 2.2, 11.6)
    S = np.zeros((k.shape[1], v.shape[1]))
    entries(axes, 0, 0, S, pale.BLUE, "$S_0$")
    for t in range(N):
        x = pitch * (t + 1)
        note = np.outer(k[t], v[t])
        S = S + note
        entries(axes, x, 0, S, pale.BLUE, f"$S_{t + 1}$", offset=-0.75)
        entries(axes, x, 4.0, note, pale.VERMILION)
        entries(axes, x, -3.2, q[t] @ S, pale.GREEN, f"$o_{t + 1}$")
        arrow(axes, (x - pitch + 2, 1), (x, 1))
        arrow(axes, (x + 1, 4.0), (x + 1, 2))
        arrow(axes, (x + 1, 0), (x + 1, -2.2))
        write(axes, x + 1, 6.15, f"$k_{t + 1}v_{t + 1}^\\top$", va="top")
        axes.text(x + 1.2, -1.1, f"$q_{t + 1}$", va="center")
    axes.set(xlim=(-0.1, pitch * N + 2.1), ylim=(7.2, -4.4))
    return figure


@drawing
def two_ways(q: NDArray, k: NDArray, v: NDArray, t: int) -> BookFigure:
    """Output t as row t of the masked matrix times V, and as query t times the state S_t."""
    figure, axes = canvas(10.8, 8.9)
    N, scores = len(q), np.tril(q @ k.T)
    for i in range(N):
        fill = pale.VERMILION if i == t - 1 else "white"
        entries(axes, 1.6, i, scores[i, : i + 1], fill)
        for j in range(i + 1, N):
            rectangle(axes, 1.6 + j, i, 1, 1, pale.GRAY, "#bdbdbd")
    axes.text(1.6 + N / 2, -0.3, r"$QK^\top \odot m$", ha="center")
    write(axes, 1.4, t - 0.5, f"row {t}", ha="right")
    entries(axes, 5.5, 0, v, pale.VERMILION, "$V$")
    entries(axes, 8.6, 1, scores[t - 1] @ v, pale.GREEN, f"$o_{t}$")
    state = k[:t].T @ v[:t]
    entries(axes, 2.1, 6.1, q[t - 1], pale.BLUE, f"$q_{t}^\\top$")
    entries(axes, 5.5, 5.6, state, pale.BLUE, f"$S_{t}$")
    entries(axes, 8.6, 6.1, q[t - 1] @ state, pale.GREEN, f"$o_{t}$")
    for y in (1.5, 6.6):
        write(axes, 5.05, y, r"$\times$", fontsize=15)
        write(axes, 8.05, y, "$=$", fontsize=15)
    axes.set(xlim=(-0.1, 10.7), ylim=(7.8, -1.1))
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
    right.set_ylim(-1.1, 1.1)
    legend_below(figure, *left.get_legend_handles_labels())
    return figure


@drawing
def between(N: int, sizes: Sequence[int]) -> BookFigure:
    """The causal triangle cut into chunks of several sizes: weights inside, one state before."""
    pitch = N + 1.2
    figure, axes = canvas(pitch * len(sizes) - 1, N + 2.9, unit=6.4 / (pitch * len(sizes) - 1))
    for place, L in enumerate(sizes):
        x = pitch * place
        for t in range(N):
            for j in range(t // L * L, t + 1):
                rectangle(axes, x + j, t, 1, 1, pale.VERMILION, linewidth=0.8)
        for start in range(L, N, L):
            height = min(L, N - start)
            rectangle(axes, x, start, start, height, pale.BLUE, BLUE, linewidth=1.4)
            write(axes, x + start / 2, start + height / 2, "$S$")
        rectangle(axes, x, 0, N, N, "none", "#b5b5b5", linewidth=0.8)
        write(axes, x + N / 2, -0.55, f"$L = {L}$")
        steps = -(-N // L)
        write(axes, x + N / 2, N + 0.65, f"{steps} step" + "s" * (steps > 1), fontsize=10)
    key = ((0, pale.VERMILION, GRAY, "a weight"), (pitch, pale.BLUE, BLUE, "read from a state"))
    for x, fill, edge, text in key:
        rectangle(axes, x, N + 1.5, 0.7, 0.7, fill, edge, linewidth=0.8)
        write(axes, x + 1, N + 1.85, text, ha="left", fontsize=10)
    axes.set(xlim=(-0.1, pitch * len(sizes) - 1.1), ylim=(N + 2.3, -1.0))
    return figure
