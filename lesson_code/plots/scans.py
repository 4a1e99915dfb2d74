"""Figures of the scans: pairs in rounds, four orders, chunk sizes, and the backward pass."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, NullLocator
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import (
    arrow,
    canvas,
    entries,
    rectangle,
    scan_arrows,
    scan_row,
    write,
)
from lesson_code.plots.colors import BLUE, GRAY, GREEN, VERMILION, look
from lesson_code.plots.lines import legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def scan_of_pairs(pairs: Sequence[tuple[int, int]]) -> BookFigure:
    """Hillis and Steele's scan of the steps h -> a h + b, pairs (a, b), in log2 N rounds."""
    N, pitch, height = len(pairs), 1.7, 2.3
    rounds = int(np.ceil(np.log2(N)))
    figure, axes = canvas(pitch * N + 1.6, height * rounds + 1.2)
    row, distance = list(pairs), 1
    write(axes, -0.3, 0.5, "steps", ha="right")
    scan_row(axes, 0, map(_shown, row), 1, pitch, width=1.4)
    for r in range(1, rounds + 1):
        y = height * r
        scan_arrows(axes, y - height + 1, y, N, distance, pitch, width=1.4)
        row = row[:distance] + [
            (a1 * a2, a2 * b1 + b2)
            for (a1, b1), (a2, b2) in zip(row[:-distance], row[distance:], strict=True)
        ]
        distance *= 2
        write(axes, -0.3, y + 0.5, f"round {r}", ha="right")
        scan_row(axes, y, map(_shown, row), distance, pitch, width=1.4)
    axes.set(xlim=(-2.2, pitch * (N - 1) + 1.5), ylim=(height * rounds + 1.1, -0.1))
    return figure


def _shown(pair: tuple[int, int]) -> str:
    return f"{pair[0]}, {pair[1]}"


@drawing
def row_and_column(chunks: int, L: int, i: int) -> BookFigure:
    """The causal triangle in chunks: chunk i, from 1, reads its row and is read in its column.

    A state stands for what is left of its own triangle, the gradient of one for what is below.
    """
    N, start, end = chunks * L, (i - 1) * L, i * L
    figure, axes = canvas(N + 8.2, N + 1.6, unit=6.2 / (N + 8.2))
    for t in range(N):
        for j in range(t + 1):
            fill = pale.VERMILION if start <= j and t < end else "white"
            rectangle(axes, j, t, 1, 1, fill, "#c9c9c9", linewidth=0.6)
    rectangle(axes, 0, start, start, L, pale.BLUE, BLUE, linewidth=1.6)
    rectangle(axes, start, end, L, N - end, pale.GREEN, GREEN, linewidth=1.6)
    lines = {"hatch": "//", "alpha": 0.25, "linewidth": 0}
    rectangle(axes, start, end, L, N - end, "none", GREEN, **lines)
    regions = (
        (start / 2, (start + end) / 2, BLUE, f"S_{{[{i - 1}]}}", "reads", "before"),
        ((start + end) / 2, (end + N) / 2, GREEN, f"dS_{{[{i}]}}", "is read", "after"),
    )
    for x, y, color, name, does, chunks_where in regions:
        write(axes, x, y, f"${name}$", fontsize=13)
        arrow(axes, (N + 0.4, y), (end + 0.2, y), color=color)
        write(axes, N + 0.6, y, f"chunk {i} {does}", ha="left", va="bottom", fontweight="bold")
        words = f"chunks {chunks_where}: ${name}$"
        write(axes, N + 0.6, y + 0.15, words, ha="left", va="top")
        write(axes, N + 0.6, y + 1, f"own triangle: $A_{{[{i}]}}$", ha="left", va="top")
    write(axes, start + L / 3, end - L / 3, f"$A_{{[{i}]}}$", fontsize=11)
    write(axes, N / 2, -0.55, "keys and values $j$")
    write(axes, -0.6, N / 2, "queries $t$", rotation=90)
    axes.set(xlim=(-1.1, N + 7.1), ylim=(N + 0.2, -1.2))
    return figure


@drawing
def orders(N: int, L: int, steps: int) -> BookFigure:
    """What four causal forms have computed after some steps; cell (t, j) is token j in output t.

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
    columns, rows = 2 * N + 3.2, 2 * N + 6.6
    figure, axes = canvas(columns, rows, unit=4.6 / columns)
    for place, (name, step) in enumerate(step_of.items()):
        x, y = place % 2 * (N + 2), place // 2 * (N + 3.4)
        formed = weights.get(name, np.full((N, N), False))
        write(axes, x, y - 0.7, name, ha="left", fontweight="bold")
        if place == 0:
            write(axes, x - 0.6, y + N / 2, "$t$")
            write(axes, x + N - 0.5, y - 0.7, "$j$")
        for a, b in np.argwhere((i <= t) | formed):
            fill = "white"
            if step[a, b] <= steps:
                early, now = (pale.VERMILION, VERMILION) if formed[a, b] else (pale.BLUE, BLUE)
                fill = "#dddddd" if b > a else now if step[a, b] == steps else early
            if b <= a or fill != "white":
                rectangle(axes, x + b, y + a, 1, 1, fill, "#b5b5b5", linewidth=0.6)
        last = int(step[-1].max())
        done = f"{min(steps, last)} of {last} step{'s' * (last > 1)}"
        write(axes, x, y + N + 0.9, done, ha="left", color=GRAY)
    axes.set(xlim=(-1.0, 2 * N + 2.2), ylim=(2 * N + 5, -1.6))
    kinds = {
        "multiplied out": VERMILION,
        "through a state": BLUE,
        "multiplied, then masked": "#dddddd",
        "still to come": "white",
    }
    patches = [Patch(facecolor=color, edgecolor="#b5b5b5") for color in kinds.values()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.02), "handlelength": 1}
    legend_below(figure, patches, list(kinds), ncols=2, **below)
    return figure


@drawing
def chunk_sizes(lines: Mapping[str, Mapping[float, float]], *, ylabel: str) -> BookFigure:
    """Named lines {L: y} over chunk sizes, the lowest point of each in a ring.

    Lines of more than 12 points are drawn as curves, without marks for the points.
    """
    figure, ((axes,),) = new_figure(width=5.2, height=3.9)
    sizes = min(lines.values(), key=len)
    handles = []
    for index, line in enumerate(lines.values()):
        x, y = np.array(list(line.items())).T
        style = look(index) if len(x) <= 12 else look(index, marker=None)
        handles += axes.plot(x, y, **style)
        lowest = y.argmin()
        ring = {"markersize": 12, "markerfacecolor": "none", "color": style["color"]}
        axes.plot(x[lowest], y[lowest], "o", **ring)
    axes.set(xscale="log", yscale="log", xlabel="chunk size L", ylabel=ylabel)
    axes.set_xticks(list(sizes), [f"{L:,}" for L in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.yaxis.set_minor_formatter(NullFormatter())
    legend_below(figure, handles, list(lines), ncols=min(2, len(lines)) if len(lines) > 3 else 3)
    return figure


@drawing
def gradients(q: ArrayLike, k: ArrayLike, v: ArrayLike, grad_out: ArrayLike) -> BookFigure:
    """States S_t, from the left, give dq_t; states dS_t, from the right, give dk_t and dv_t."""
    q, k, v, grad_out = (np.asarray(x) for x in (q, k, v, grad_out))
    N, pitch = len(q), 4.2
    S = np.cumsum(k[:, :, None] * v[:, None, :], axis=0)
    dS = np.cumsum((q[:, :, None] * grad_out[:, None, :])[::-1], axis=0)[::-1]
    figure, axes = canvas(pitch * N + 2.4, 13.0)
    for t in range(N):
        x, i = pitch * t + 1.5, t + 1
        entries(axes, x, 0, S[t] @ grad_out[t], pale.GREEN, f"$dq_{i}$")
        arrow(axes, (x + 1, 3), (x + 1, 1))
        write(axes, x + 1.2, 2.1, f"$g_{i}$", ha="left")
        entries(axes, x, 3, S[t], pale.BLUE)
        write(axes, x + 2.1, 3.45, f"$S_{i}$", ha="left")
        entries(axes, x, 6.2, dS[t], pale.VERMILION)
        axes.text(x - 0.1, 6.65, f"$dS_{i}$", va="center", ha="right")
        arrow(axes, (x + 1, 8.2), (x + 1, 10))
        write(axes, x + 1.2, 9.1, f"$v_{i},\\ k_{i}$", ha="left")
        entries(axes, x, 10, dS[t] @ v[t], pale.GREEN)
        entries(axes, x, 11.2, dS[t].T @ k[t], pale.GREEN)
        for y, name in ((10.5, "dk"), (11.7, "dv")):
            write(axes, x - 0.15, y, f"${name}_{i}$", ha="right")
    for t in range(N + 1):
        x = pitch * t + 1.5
        arrow(axes, (x - pitch + 2 if t else 0.2, 4.4), (x if t < N else x - 0.9, 4.4))
        arrow(axes, (x if t < N else x - 0.9, 7.6), (x - pitch + 2 if t else 0.2, 7.6))
    write(axes, 0.1, 4.4, "0", ha="right")
    write(axes, pitch * N + 0.75, 7.6, "0", ha="left")
    axes.set(xlim=(-0.5, pitch * N + 1.3), ylim=(12.4, -0.8))
    return figure
