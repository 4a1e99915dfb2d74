"""Figures of the outer-product memory: writes, a drowning picture, the capacity law."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axis import Axis
from matplotlib.patches import Ellipse
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots.cells import arrow
from lesson_code.plots.colors import BLUE, GRAY, INK, PINK, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.matrices import matrix_rows
from lesson_code.plots.style import BookFigure, drawing, new_figure

TOKEN_COLORS = (BLUE, PINK, VERMILION)  # those of the explorable, where green is the query


@drawing
def writes(k: NDArray, v: NDArray, names: Sequence[str] = ()) -> BookFigure:
    """What each token adds (top) and the state after it (bottom), one column for each token."""
    called = [f"{name}: " for name in names] or [""] * len(k)
    notes = k[:, :, None] * v[:, None, :]  # (N, D, M)
    states = np.cumsum(notes, axis=0)
    rows = {
        "written": [
            (rf"{name}$k_{t} v_{t}^\top$", note)
            for t, (name, note) in enumerate(zip(called, notes, strict=True), 1)
        ],
        "state after": [(f"$S_{t}$", state) for t, state in enumerate(states, 1)],
    }
    return matrix_rows(rows, width=5.4, height=3.5, limit=float(np.abs(states).max()))


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
        beside(plane, name, tip, (4, 4))
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
        panel.set_title(f"entry {m + 1}")
    low, high = min(0.0, float(ends.min())), max(0.0, float(ends.max()))
    for panel in bars:  # one scale, so that equal bars are equal numbers
        panel.set_xlim(low, high + 0.35 * (high - low))
        panel.xaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    return figure


@drawing
def capacity(pairs: ArrayLike, measured: Mapping[int, ArrayLike]) -> BookFigure:
    """The power of crosstalk over that of the signal: the law as lines, measurements as markers.

    pairs holds the values of n; measured the ratios for each width D.
    """
    pairs = np.asarray(pairs)
    n = np.geomspace(pairs[0], pairs[-1], 100)
    figure, ((axes,),) = new_figure(height=3.8)
    for index, (D, ratio) in enumerate(measured.items()):
        axes.plot(n, (n - 1) / D, **look(index, marker=None))
        marker = look(index, linestyle="none", markersize=7, markerfacecolor="white")
        axes.plot(pairs, ratio, **marker)
        at_end = {"color": marker["color"], "va": "center", "annotation_clip": False}
        beside(axes, f"$D = {D}$", (n[-1], (n[-1] - 1) / D), (8, 0), **at_end)
    axes.axhline(1, color=GRAY, linestyle=":", linewidth=1.4)
    axes.annotate("as strong as the signal", (pairs[0], 1), color=GRAY, va="bottom", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="pairs in the memory, $n$")
    axes.set_ylabel("crosstalk power / signal power")
    plain_ticks(axes.xaxis, pairs[::2])
    plain_ticks(axes.yaxis, [0.01, 0.1, 1, 10])
    return figure


@drawing
def drowning(rows: Mapping[str, Mapping[int, NDArray]]) -> BookFigure:
    """Square pictures, one row for each reader, one column for each number of facts.

    A row maps the number of facts to what was read, with pixels around -1 (paper) and 1 (ink).
    """
    counts = list(next(iter(rows.values())))
    width = 6.4
    height = width / len(counts) * len(rows) + 0.45
    figure, axes = new_figure(len(counts), len(rows), width=width, height=height)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for panel, n in zip(line, counts, strict=True):
            side = round(np.sqrt(pictures[n].size))
            pixels = pictures[n].reshape(side, side)
            panel.imshow(pixels, cmap="Greys", vmin=-2, vmax=2, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
            panel.grid(visible=False)
            panel.spines[["top", "right"]].set_visible(True)
        line[0].set_ylabel(name, fontsize=13)
    for panel, n in zip(axes[0], counts, strict=True):
        panel.set_title(f"$n = {n}$", fontsize=13)
    return figure


@drawing
def halfway(n: int, D: int, M: int) -> BookFigure:
    """Two values, the line halfway between them, and the noise around the first, to 4 spreads.

    Dashed is noise that is the same in all directions, filled that of the memory, to which the
    rival's own share is added.
    """
    x, distance = (n - 1) / D, np.sqrt(2 * M)
    across, along = np.sqrt(x), np.sqrt(x + M / (2 * D))
    line, reach = distance / 2, 4.6 * across
    figure, ((axes,),) = new_figure(height=3.6)
    axes.axvspan(line, 1.3 * distance, color=VERMILION, alpha=0.12, linewidth=0)
    axes.axvline(line, color=INK, linestyle="--", linewidth=1.4)
    for spreads in (4, 3, 2, 1):
        size = (2 * spreads * along, 2 * spreads * across)
        axes.add_patch(Ellipse((0, 0), *size, facecolor=BLUE, alpha=0.16, edgecolor="none"))
    size = (8 * along, 8 * across)
    axes.add_patch(Ellipse((0, 0), *size, facecolor="none", edgecolor=BLUE, linewidth=1.6))
    circle = Ellipse((0, 0), 8 * across, 8 * across, facecolor="none", edgecolor=GRAY)
    circle.set(linestyle=(0, (3, 2)), linewidth=1.6)
    axes.add_patch(circle)
    arrow(axes, (0, 0), (distance, 0), VERMILION, lw=1.6)
    axes.plot([0, distance], [0, 0], "o", color=INK, markersize=7, zorder=4)
    beside(axes, "right value $v_i$", (0, 0), (0, -16), ha="center")
    beside(axes, "rival $v_j$", (distance, 0), (0, -16), ha="center")
    beside(axes, f"halfway: {line:.1f}", (line, reach), (-4, -2), ha="right", va="top")
    beside(axes, "the rival is nearer", (line, reach), (6, -2), va="top", color=VERMILION)
    axes.set(aspect="equal", xlim=(-1.06 * 4 * along, 1.3 * distance), ylim=(-reach, reach))
    axes.set(xlabel="toward the rival", ylabel="another direction")
    axes.locator_params(integer=True)
    axes.grid(visible=False)
    return figure


@drawing
def retrieval(
    load: ArrayLike,
    wrong: Mapping[int, ArrayLike],
    vocabulary: tuple[ArrayLike, ArrayLike],
    predicted: Mapping[int, float],
) -> BookFigure:
    """How often the nearest value is the wrong one, for each width D, against the load n / D.

    vocabulary holds loads and shares for D = 64 when the choice is among 10,000, and predicted the
    load at which one read in ten should go wrong, for each D. Shares below one in a thousand are
    left out.
    """
    lines = [(load, shares, f"$D = {D}$", "left") for D, shares in wrong.items()]
    lines.append((*vocabulary, "$D = 64$,\nof 10,000", "right"))
    figure, ((axes,),) = new_figure(height=3.8)
    for share in (0.01, 0.1):
        axes.axhline(share, color=GRAY, linestyle="--", linewidth=1)
    for index, (x, y, name, side) in enumerate(lines):
        shown = np.asarray(y) >= 1e-3
        x, y = np.asarray(x)[shown], np.asarray(y)[shown]
        style = look(index, markersize=5)
        axes.plot(x, y, **style)
        at_end = {"color": style["color"], "ha": side, "va": "center"}
        beside(axes, name, (x[0], y[0]), (8 if side == "left" else -6, -4), **at_end)
    for index, x in enumerate(predicted.values()):
        cross = {"marker": "X", "markersize": 12, "markeredgecolor": INK, "zorder": 5}
        axes.plot(x, 0.1, color=look(index)["color"], linestyle="none", **cross)
        if index == 0:
            beside(axes, "formula", (x, 0.1), (-10, 4), ha="right")
    axes.set(xscale="log", yscale="log", ylim=(1e-3, 1.2))
    axes.set(xlabel="pairs stored, $n / D$", ylabel="share of wrong choices")
    plain_ticks(axes.xaxis, 2.0 ** np.arange(-2, 5))
    axes.yaxis.set_ticks([0.001, 0.01, 0.1, 1], ["0.1%", "1%", "10%", "100%"])
    axes.yaxis.set_ticks([], minor=True)
    return figure


def plain_ticks(axis: Axis, at: ArrayLike) -> None:
    """These ticks on a logarithmic axis and no others, written as plain numbers."""
    axis.set_ticks(np.asarray(at), [f"{x:g}" for x in np.asarray(at)])
    axis.set_ticks([], minor=True)
