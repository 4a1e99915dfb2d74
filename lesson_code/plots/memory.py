"""Figures of the outer-product memory: writes, signal and crosstalk, the capacity law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots.style import (
    BLUE,
    COLORS,
    DASHES,
    GRAY,
    INK,
    MARKERS,
    PINK,
    VERMILION,
    BookFigure,
    draw_matrix,
    drawing,
    new_figure,
)

TOKEN_COLORS = (BLUE, PINK, VERMILION)
HATCHES = ("", "//", "\\\\")
FILLS = ("#9ecae8", "#ffffff", "#f6d9a8")


@drawing
def writes(k: NDArray, v: NDArray) -> BookFigure:
    """What each token adds (top) and the state after it (bottom), one column for each token."""
    notes = k[:, :, None] * v[:, None, :]  # (N, D, M)
    states = np.cumsum(notes, axis=0)
    figure, axes = new_figure(len(k), 2, width=5.4, height=3.5)
    limit = float(np.abs(states).max())
    for t, (note, state) in enumerate(zip(notes, states, strict=True)):
        draw_matrix(axes[0, t], note, title=rf"$k_{t + 1} v_{t + 1}^\top$", limit=limit)
        draw_matrix(axes[1, t], state, title=f"$S_{t + 1}$", limit=limit)
    axes[0, 0].set_ylabel("written")
    axes[1, 0].set_ylabel("state after")
    return figure


@drawing
def contributions(
    k: NDArray,
    v: NDArray,
    queries: Sequence[Sequence[float]],
    after: Sequence[int],
    component: int = 0,
) -> BookFigure:
    """One component of what each query reads, stacked by the token that it comes from.

    There is one panel for each number in `after`: the memory when that many tokens are written.
    """
    q = np.asarray(queries, float)
    figure, axes = new_figure(len(after), width=6.4, height=3.9, sharey=True)
    for panel, n in zip(axes[0], after, strict=True):
        parts = (q @ k[:n].T) * v[:n, component]  # (queries, tokens)
        for x, row in enumerate(parts):
            bottom = 0.0
            for j, part in enumerate(row):
                if part == 0:
                    continue
                style = {"facecolor": FILLS[j], "hatch": HATCHES[j], "edgecolor": GRAY}
                panel.bar(x, part, bottom=bottom, width=0.78, linewidth=0.8, **style)
                label = rf"$v_{j + 1}$: {part:g}"
                box = {"fc": "white", "ec": "none", "pad": 0.8} if HATCHES[j] else None
                panel.text(
                    x, bottom + part / 2, label, ha="center", va="center", fontsize=10, bbox=box
                )
                bottom += part
            panel.text(x, bottom + 1, f"{bottom:g}", ha="center", va="bottom", color=INK)
        panel.set_xticks(range(len(queries)), [f"[{a:g}, {b:g}]" for a, b in queries])
        panel.set(title=f"read from $S_{n}$", xlabel="query")
        panel.grid(visible=False, axis="x")
        panel.margins(y=0.1)
    axes[0, 0].set_ylabel(f"component {component + 1} of the output")
    return figure


@drawing
def signal_and_crosstalk(k: NDArray, v: NDArray, i: int) -> BookFigure:
    """Keys in the plane, and what key i (from 0) reads: its own part, the others', and their sum.

    There is one panel for each entry of the values; a bar begins where the one above it ended.
    """
    parts = (k @ k[i])[:, None] * v  # (N, M)
    ends = np.cumsum(parts, axis=0)
    N, M = v.shape
    ratios = {"width_ratios": [1.5, *[1] * M]}
    figure, axes = new_figure(1 + M, width=6.4, height=2.7, gridspec_kw=ratios)
    plane, *bars = axes[0]
    reach = 1.2 * max(1.0, float(np.abs(k).max()))
    circle = np.linspace(0, 2 * np.pi, 200)
    plane.plot(np.cos(circle), np.sin(circle), color=GRAY, linewidth=0.8)
    for j, key in enumerate(k):
        color = TOKEN_COLORS[j]
        tip = tuple(key)
        plane.annotate("", tip, (0, 0), arrowprops={"arrowstyle": "->", "color": color, "lw": 1.8})
        name = f"$q = k_{j + 1}$" if j == i else f"$k_{j + 1}$"
        beside = {"xytext": (4, 4), "textcoords": "offset points"}
        plane.annotate(name, tip, color=color, **beside)
    plane.set(xlim=(-reach, reach), ylim=(-reach, 1.15 * reach), aspect="equal", title="keys")
    names = [f"{'signal' if j == i else 'crosstalk'} $v_{j + 1}$" for j in range(N)]
    for m, panel in enumerate(bars):
        for j, part in enumerate(parts[:, m]):
            style = {"color": TOKEN_COLORS[j], "alpha": 1 if j == i else 0.4}
            panel.barh(j, part, left=ends[j, m] - part, height=0.7, **style)
        panel.barh(N, ends[-1, m], height=0.7, color=GRAY)
        read = ends[-1, m]
        numbers = zip((*parts[:, m], read), (*ends[:, m], read), strict=True)
        for y, (part, end) in enumerate(numbers):
            beside = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            panel.annotate(f"{part:g}", (max(end, end - part), y), fontsize=10, **beside)
        panel.set_yticks(range(N + 1), [*names, "read $o$"] if m == 0 else [""] * (N + 1))
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")
        panel.margins(x=0.3)
        panel.set_title(f"entry {m + 1}")
    return figure


@drawing
def capacity(others: ArrayLike, simulated: Mapping[int, ArrayLike]) -> BookFigure:
    """The power of crosstalk over that of the signal: the law as lines, the simulation as markers.

    others holds the values of n - 1; simulated the measured ratios for each width D.
    """
    others = np.asarray(others)
    figure, ((axes,),) = new_figure(height=3.8)
    for index, (D, ratio) in enumerate(simulated.items()):
        color = COLORS[index]
        axes.plot(others, others / D, color=color, linestyle=DASHES[index])
        marker = {"marker": MARKERS[index], "markersize": 7, "markerfacecolor": "white"}
        axes.plot(others, ratio, color=color, linestyle="none", **marker)
        end = (others[-1], others[-1] / D)
        beside = {"xytext": (8, 0), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(f"$D = {D}$", end, color=color, va="center", **beside)
    axes.axhline(1, color=GRAY, linestyle=":", linewidth=1.4)
    axes.annotate("as strong as the signal", (others[0], 1), color=GRAY, va="bottom", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="other pairs in the memory, $n - 1$")
    axes.set_ylabel("crosstalk power / signal power")
    return figure
