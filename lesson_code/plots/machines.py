"""Figures of a sequence that is split over ranks: what travels, when, and how long that takes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, canvas, entries, rectangle, way, write
from lesson_code.plots.colors import BLUE, GRAY, look
from lesson_code.plots.lines import name_lines, named_bars
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def states_that_travel(writes: Sequence[ArrayLike], outputs: Sequence[ArrayLike]) -> BookFigure:
    """What each rank writes, T_r, goes to all later ranks, whose B_r is the sum; outputs below.

    Each output reads its own T_r, past B_r, and B_r.
    """
    states = [np.atleast_2d(T) for T in writes]
    rows, columns = states[0].shape
    pitch, below = columns + 2.6, rows + 2.2
    last = below + rows + 1.4  # the top of the outputs
    figure, axes = canvas(pitch * len(writes) + 1.3, last + 2.5)
    before = np.zeros_like(states[0])
    for r, (T, out) in enumerate(zip(states, outputs, strict=True)):
        x, middle = pitch * r, pitch * r + columns / 2
        write(axes, middle, -0.4, f"rank {r}", va="bottom")
        rows_of = ((f"$T_{r}$", 0, rows), (f"$B_{r}$", below, rows), (f"$o_{r + 1}$", last, 1))
        for (name, y, height), values, fill in zip(
            rows_of, (T, before, out), (pale.VERMILION, pale.BLUE, pale.GREEN), strict=True
        ):
            entries(axes, x, y, values, fill)
            write(axes, x - 0.2, y + height / 2, name, ha="right")
        arrow(axes, (middle, below + rows), (middle, last))
        edge = x + columns
        past = [(edge, 0.5), (edge + 0.5, 0.5), (edge + 0.5, last + 0.5), (edge, last + 0.5)]
        way(axes, *past, linewidth=1)
        for later in range(r + 1, len(writes)):
            end = (pitch * later + 0.3 + 0.5 * r, below)
            arrow(axes, (middle + 0.3, rows), end, color=BLUE)
        before = before + T
    style = {"color": GRAY, "fontsize": 10}
    write(axes, middle - 0.15, last - 0.7, "all before", ha="right", **style)
    write(axes, edge + 0.65, last - 0.7, "own part", ha="left", **style)
    axes.set(xlim=(-1.3, pitch * len(writes)), ylim=(last + 1.2, -1.3))
    return figure


@drawing
def timeline(inside: Sequence[float]) -> BookFigure:
    """One call: what each rank computes, and on a strip below that, what travels meanwhile.

    The fold grows with the number of ranks before; rank 0 has none.
    """
    figure, ((axes,),) = new_figure(height=0.95 * len(inside) + 0.75)
    axes.set_axis_off()
    sent, states = 1.8, 3.0
    arrived, end = sent + states, 0.0
    for r, length in enumerate(inside):
        y = 1.3 * r
        _bar(axes, 0, sent, y, pale.VERMILION, f"$T_{r}$")
        _bar(axes, sent, length, y, "white", "inside")
        ready = max(sent + length, arrived)
        if r:
            fold = 1.6 + 0.5 * r
            _bar(axes, ready, fold, y, pale.GREEN, f"fold, $B_{r}$")
            ready += fold
        end = max(end, ready)
        _bar(axes, sent, states, y + 0.55, pale.BLUE, "states", height=0.42)
        write(axes, -0.15, y + 0.5, f"rank {r}", ha="right")
    for x, text in ((sent, "sent"), (arrived, "arrived")):
        axes.plot([x, x], [-0.15, 1.3 * len(inside) - 0.2], color=GRAY, linestyle=":", zorder=0)
        write(axes, x, -0.2, text, va="bottom", color=GRAY, fontsize=10)
    y = 1.3 * len(inside)
    arrow(axes, (0, y), (end, y))
    axes.text(end, y - 0.05, "time", ha="right", va="bottom", color=GRAY, fontsize=10)
    axes.set(xlim=(-1.3, end + 0.05), ylim=(y + 0.15, -0.6))
    return figure


def _bar(
    axes: Axes, x: float, length: float, y: float, fill: str, text: str, height: float = 0.55
) -> None:
    rectangle(axes, x, y, length, height, fill, linewidth=0.8)
    write(axes, x + length / 2, y + height / 2, text, fontsize=10)


@drawing
def prediction(rows: Sequence[Mapping]) -> BookFigure:
    """Measured times of exchanges against the bytes sent, and lines through those predicted.

    Each row has `ranks`, `bytes`, `seconds`, `predicted` and `fitted`; marks are filled where the
    row took part in the fit.
    """
    figure, ((axes,),) = new_figure(height=3.6)
    counts = sorted({row["ranks"] for row in rows})
    for index, ranks in enumerate(counts):
        own = sorted((r for r in rows if r["ranks"] == ranks), key=lambda row: row["bytes"])
        sent = [row["bytes"] for row in own]
        predicted = [1e3 * row["predicted"] for row in own]
        axes.plot(sent, predicted, **look(index, marker=None, label=f"{ranks} ranks"))
    for row in sorted(rows, key=lambda row: row["ranks"]):
        style = look(counts.index(row["ranks"]), linestyle="none", markersize=6, label="_")
        fill = style["color"] if row["fitted"] else "white"
        axes.plot(row["bytes"], 1e3 * row["seconds"], markerfacecolor=fill, **style)
    axes.set(xlabel="bytes that a rank sends", ylabel="milliseconds", xscale="log", yscale="log")
    axes.margins(x=0.02)
    name_lines(axes, axes.get_lines()[: len(counts)], 3.6)
    return figure


@drawing
def durations(seconds: Mapping[str, float]) -> BookFigure:
    """Named times as bars on a logarithmic axis, the first on top, its time at each end.

    Those whose names begin with "softmax" have another color.
    """
    shortest, longest = min(seconds.values()), max(seconds.values())
    start = 10.0 ** np.floor(np.log10(shortest) - 0.5)
    figure, axes = named_bars(seconds, map(_time, seconds.values()), start=start)
    for bar, name in zip(axes.patches, seconds, strict=True):
        if name.startswith("softmax"):
            bar.set_facecolor(pale.VERMILION)
    axes.set(xscale="log", xlim=(start, longest * 30), xlabel="seconds")
    return figure


def _time(seconds: float) -> str:
    """Two digits of a time, in a unit that suits it."""
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "µs")
    return f"{float(f'{seconds / units[unit]:.2g}'):,g} {unit}"
