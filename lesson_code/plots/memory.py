"""Figures of the outer-product memory: writes, signal and crosstalk, the capacity law."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, GRAY, PINK, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.matrices import matrix_rows
from lesson_code.plots.style import BookFigure, drawing, new_figure

TOKEN_COLORS = (BLUE, PINK, VERMILION)
HATCHES = ("", "//", "\\\\")
FILLS = ("#9ecae8", "#ffffff", "#f6d9a8")


@drawing
def writes(k: NDArray, v: NDArray) -> BookFigure:
    """What each token adds (top) and the state after it (bottom), one column for each token."""
    notes = k[:, :, None] * v[:, None, :]  # (N, D, M)
    states = np.cumsum(notes, axis=0)
    rows = {
        "written": [(rf"$k_{t} v_{t}^\top$", note) for t, note in enumerate(notes, 1)],
        "state after": [(f"$S_{t}$", state) for t, state in enumerate(states, 1)],
    }
    return matrix_rows(rows, width=5.4, height=3.5, limit=float(np.abs(states).max()))


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
                behind = {"fc": "white", "ec": "none", "pad": 0.8} if HATCHES[j] else None
                write(panel, x, bottom + part / 2, label, fontsize=10, bbox=behind)
                bottom += part
            write(panel, x, bottom + 1, f"{bottom:g}", va="bottom")
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
        color, tip = TOKEN_COLORS[j], tuple(key)
        arrow(plane, (0, 0), tip, color, arrowstyle="->", lw=1.8)
        name = f"$q = k_{j + 1}$" if j == i else f"$k_{j + 1}$"
        beside(plane, name, tip, (4, 4), color=color)
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
            right = max(end, end - part)
            beside(panel, f"{part:g}", (right, y), (3, 0), va="center", fontsize=10)
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
        axes.plot(others, others / D, **look(index, marker=None))
        marker = look(index, linestyle="none", markersize=7, markerfacecolor="white")
        axes.plot(others, ratio, **marker)
        at_end = {"color": marker["color"], "va": "center", "annotation_clip": False}
        beside(axes, f"$D = {D}$", (others[-1], others[-1] / D), (8, 0), **at_end)
    axes.axhline(1, color=GRAY, linestyle=":", linewidth=1.4)
    axes.annotate("as strong as the signal", (others[0], 1), color=GRAY, va="bottom", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="other pairs in the memory, $n - 1$")
    axes.set_ylabel("crosstalk power / signal power")
    return figure
