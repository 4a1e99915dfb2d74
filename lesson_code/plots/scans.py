"""Figures of the scans: pairs in rounds, the mask in blocks, and the scans of the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from lesson_code.plots.recurrence import (
    PALE_BLUE,
    PALE_GREEN,
    PALE_VERMILION,
    _arrow,
    _canvas,
    _cells,
)
from lesson_code.plots.style import BLUE, GRAY, GREEN, VERMILION, BookFigure, drawing, new_figure


@drawing
def scan_of_pairs(pairs: Sequence[tuple[int, int]]) -> BookFigure:
    """Hillis and Steele's scan of the steps h -> a h + b, pairs (a, b), in log2 N rounds."""
    N, pitch, height = len(pairs), 1.7, 2.3
    rounds = int(np.ceil(np.log2(N)))
    figure, axes = _canvas(pitch * N + 1.6, height * rounds + 1.2)
    row, distance = list(pairs), 1
    _pairs(axes, 0, "steps", row, 1, pitch)
    for r in range(1, rounds + 1):
        y = height * r
        for i in range(N):
            x = pitch * i + 0.7
            _arrow(axes, (x, y - height + 1), (x, y), color="#b5b5b5")
            if i >= distance:
                _arrow(axes, (x - pitch * distance, y - height + 1), (x, y), color=BLUE)
        row = row[:distance] + [
            (a1 * a2, a2 * b1 + b2)
            for (a1, b1), (a2, b2) in zip(row[:-distance], row[distance:], strict=True)
        ]
        distance *= 2
        _pairs(axes, y, f"round {r}", row, distance, pitch)
    axes.set(xlim=(-2.2, pitch * (N - 1) + 1.5), ylim=(height * rounds + 1.1, -0.1))
    return figure


@drawing
def blocks(chunks: int, L: int) -> BookFigure:
    """The causal mask in blocks of L by L, and beside it the states that replace the full ones."""
    N = chunks * L
    x = N + 1.6  # of the chain of chunks
    figure, axes = _canvas(N + 6.1, N + 0.3)
    for i in range(N):
        for j in range(N):
            inside = j // L == i // L
            fill = "#ececec" if j > i else PALE_VERMILION if inside else PALE_BLUE
            axes.add_patch(Rectangle((j, i), 1, 1, fc=fill, ec="#c9c9c9", linewidth=0.6))
    for i in range(chunks):
        y = i * L
        for j in range(chunks):
            axes.add_patch(Rectangle((j * L, y), L, L, fill=False, ec=GRAY, linewidth=1.4))
        if i:
            axes.add_patch(Rectangle((0, y), y, L, fc=PALE_BLUE, ec=BLUE, linewidth=1.4))
            text = f"$Q_{{[{i + 1}]}}\\,S_{{[{i}]}}$"
            axes.text(y / 2, y + L / 2, text, ha="center", va="center")
        axes.add_patch(Rectangle((x, y + 0.8), 2.4, L - 1.6, fc=PALE_VERMILION, ec=GRAY))
        axes.text(x + 1.2, y + L / 2, f"chunk {i + 1}", ha="center", va="center", fontsize=10)
        _arrow(axes, (x + 2.4, y + L / 2), (x + 3.3, y + L / 2))
        axes.text(x + 3.4, y + L / 2, f"$O_{{[{i + 1}]}}$", va="center")
        if i < chunks - 1:
            _arrow(axes, (x + 1.2, y + L - 0.8), (x + 1.2, y + L + 0.8), color=BLUE)
            axes.text(x + 1.45, y + L, f"$S_{{[{i + 1}]}}$", va="center")
    axes.set(xlim=(-0.1, N + 6.0), ylim=(N + 0.15, -0.15))
    return figure


@drawing
def orders(N: int, L: int, steps: int) -> BookFigure:
    """What four causal forms have computed after some steps; cell (t, i) is token i in output t.

    Vermilion cells are multiplied out, blue ones stand in a state; the last step is darker. Gray
    ones are multiplied and then masked.
    """
    t, i = np.indices((N, N))
    step_of = {  # the step that computes a cell, from 1
        "masked": np.ones((N, N), int),
        "recurrent": t + 1,
        "scan": np.array([[max(a - b, 1).bit_length() for b in range(N)] for a in range(N)]),
        "chunkwise": t // L + 1,
    }
    weights = {"masked": np.full((N, N), True), "chunkwise": t // L == i // L}
    width = 7.2
    figure, ((axes,),) = new_figure(width=width, height=width * (N + 3.2) / (4 * N + 6.4))
    axes.set_aspect("equal")
    axes.set_axis_off()
    for place, (name, step) in enumerate(step_of.items()):
        x = place * (N + 2)
        formed = weights.get(name, np.full((N, N), False))
        axes.text(x, -0.7, name, va="center", fontweight="bold")
        for a, b in np.argwhere((i <= t) | formed):
            fill = "white"
            if step[a, b] <= steps:
                pale, full = (PALE_VERMILION, VERMILION) if formed[a, b] else (PALE_BLUE, BLUE)
                fill = "#dddddd" if b > a else full if step[a, b] == steps else pale
            if b <= a or fill != "white":
                axes.add_patch(Rectangle((x + b, a), 1, 1, fc=fill, ec="#b5b5b5", linewidth=0.6))
        last = int(step[-1].max())
        done = f"{min(steps, last)} of {last} step{'s' * (last > 1)}"
        axes.text(x, N + 0.9, done, va="center", color=GRAY)
    axes.set(xlim=(-0.2, 4 * N + 6.2), ylim=(N + 1.6, -1.6))
    return figure


@drawing
def gradients(q: ArrayLike, k: ArrayLike, v: ArrayLike, grad_out: ArrayLike) -> BookFigure:
    """States S_t, from the left, give dq_t; states dS_t, from the right, give dk_t and dv_t."""
    q, k, v, grad_out = (np.asarray(x) for x in (q, k, v, grad_out))
    N, pitch = len(q), 4.2
    S = np.cumsum(k[:, :, None] * v[:, None, :], axis=0)
    dS = np.cumsum((q[:, :, None] * grad_out[:, None, :])[::-1], axis=0)[::-1]
    figure, axes = _canvas(pitch * N + 2.4, 13.0)
    for t in range(N):
        x, i = pitch * t + 1.5, t + 1
        _cells(axes, x, 0, S[t] @ grad_out[t], PALE_GREEN, f"$dq_{i}$")
        _arrow(axes, (x + 1, 3), (x + 1, 1))
        axes.text(x + 1.2, 2.1, f"$do_{i}$", va="center")
        _cells(axes, x, 3, S[t], PALE_BLUE)
        axes.text(x + 2.1, 3.45, f"$S_{i}$", va="center")
        _cells(axes, x, 6.2, dS[t], PALE_VERMILION)
        axes.text(x - 0.1, 6.65, f"$dS_{i}$", va="center", ha="right")
        _arrow(axes, (x + 1, 8.2), (x + 1, 10))
        axes.text(x + 1.2, 9.1, f"$v_{i},\\ k_{i}$", va="center")
        _cells(axes, x, 10, dS[t] @ v[t], PALE_GREEN)
        _cells(axes, x, 11.2, dS[t].T @ k[t], PALE_GREEN)
        for y, name in ((10.5, "dk"), (11.7, "dv")):
            axes.text(x - 0.15, y, f"${name}_{i}$", ha="right", va="center")
    for t in range(N + 1):
        x = pitch * t + 1.5
        _arrow(axes, (x - pitch + 2 if t else 0.2, 4.4), (x if t < N else x - 0.9, 4.4))
        _arrow(axes, (x if t < N else x - 0.9, 7.6), (x - pitch + 2 if t else 0.2, 7.6))
    axes.text(0.1, 4.4, "0", ha="right", va="center")
    axes.text(pitch * N + 0.75, 7.6, "0", va="center")
    axes.set(xlim=(-0.5, pitch * N + 1.3), ylim=(12.4, -0.8))
    return figure


def _pairs(
    axes: Axes, y: float, name: str, row: Sequence[tuple[int, int]], finished: int, pitch: float
) -> None:
    """One row of a scan of pairs; the first `finished` ones are complete."""
    axes.text(-0.3, y + 0.5, name, ha="right", va="center")
    for i, (a, b) in enumerate(row):
        done = i < finished
        fill, edge = (PALE_GREEN, GREEN) if done else ("white", GRAY)
        axes.add_patch(Rectangle((pitch * i, y), 1.4, 1, fc=fill, ec=edge))
        axes.text(pitch * i + 0.7, y + 0.5, f"{a}, {b}", ha="center", va="center")
