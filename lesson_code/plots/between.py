"""Figures of what lies between a state and a cache: what covers which tokens, and how far back."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, NullFormatter
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, GREEN, INK, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure

LEVELS = ((pale.YELLOW, INK), (pale.BLUE, BLUE), (pale.GREEN, GREEN), (pale.VERMILION, VERMILION))


def _blocks(t: int) -> list[tuple[int, int, int]]:
    """Level, first token and length of each state that token t reads, the oldest first."""
    found, start = [], 0
    for level in range(t.bit_length(), 0, -1):
        length = 2 ** (level - 1)
        if t & length:
            found.append((level, start, length))
            start += length
    return [*found, (0, t, 1)]


@drawing
def covers(t: int, window: int, fade: float) -> BookFigure:
    """What each kind of memory keeps of the tokens 0 ... t: a box stands for its own place."""
    figure, axes = canvas(t + 12, 9.3, unit=0.245)
    alone = [(j, 1) for j in range(t + 1)]
    one, last = [(0, t + 1)], alone[t + 1 - window :]
    tree = [(start, length) for _, start, length in _blocks(t)]
    rows = {
        "cache": (alone, f"{t + 1} keys and values"),
        "forgetting": (alone, "all, but they fade"),
        f"window of {window}": (last, f"{window} keys and values"),
        "log-linear": (tree, f"{len(tree)} states"),
        "window + state": (last, f"{window}, and 1 state"),
        "state": (one, "1 state"),
    }
    for row, (name, (boxes, kept)) in enumerate(rows.items()):
        y = 1.5 * row
        write(axes, -0.4, y + 0.5, name, ha="right")
        write(axes, t + 1.4, y + 0.5, kept, ha="left")
        if name == "window + state":
            rectangle(axes, 0, y - 0.1, t + 1, 1.2, pale.GREEN, GREEN)
        for start, length in boxes:
            a_state = length > 1 or name == "log-linear"  # a state may have one token
            fill, edge = (pale.GREEN, GREEN) if a_state else (pale.BLUE, BLUE)
            height = fade ** (t - start) if name == "forgetting" else 1
            rectangle(axes, start, y + 1 - height, length, height, fill, edge)
    write(axes, 0.5, 9.1, "0")
    write(axes, t + 0.5, 9.1, f"t = {t}")
    axes.set(xlim=(-6, t + 8.5), ylim=(9.5, -0.3))
    return figure


@drawing
def levels(N: int) -> BookFigure:
    """The blocks of log-linear attention: a row for each token that reads, with its bits."""
    figure, axes = canvas(N + 9, N + 1.4, unit=0.37)
    bits = (N - 1).bit_length()
    write(axes, -1.5, -0.55, "t")
    write(axes, -0.3 - bits / 2 - 2, -0.55, "bits", ha="center")
    write(axes, N + 1.1, -0.55, "states", ha="center")
    for t in range(N):
        for level, start, length in _blocks(t):
            fill, edge = LEVELS[level % len(LEVELS)]
            box(axes, start + 0.04, t + 0.1, length - 0.08, 0.8, str(level), fill, edge)
        write(axes, -1.5, t + 0.5, str(t))
        write(axes, -2.3 - bits / 2, t + 0.5, f"{t:0{bits}b}", family="monospace")
        write(axes, N + 1.1, t + 0.5, str(t.bit_count() + 1))
    for j in range(N):
        write(axes, j + 0.5, N + 0.4, str(j), color=GRAY)
    write(axes, N + 0.4, N + 0.4, "tokens read", ha="left", color=GRAY)
    axes.set(xlim=(-4.6, N + 4), ylim=(N + 0.8, -0.9))
    return figure


@drawing
def by_distance(
    distance: ArrayLike,
    panels: Mapping[str, Mapping[str, ArrayLike]],
    *,
    ylabel: str,
    marks: Sequence[tuple[float, str]] = (),
    floor: float | None = None,
) -> BookFigure:
    """Lines over distance, ``panels[title][name]`` (runs, distances): their median and range.

    A dotted horizontal stands at the floor, which is what a guess would reach. Many lines end at
    the same height, so their names stand in a list at the right and not at their ends.
    """
    distance, each = np.asarray(distance), 2.7 if len(panels) < 3 else 2.1
    figure, axes = new_figure(1, len(panels), height=each * len(panels) + 0.3, sharex=True)
    for panel, (title, lines) in zip(axes[:, 0], panels.items(), strict=True):
        panel.set_title(title, loc="left", fontweight="bold")
        if floor is not None:
            panel.axhline(floor, color=GRAY, linestyle=":")
        for index, (name, runs) in enumerate(lines.items()):
            runs, style = np.asarray(runs), look(index, markersize=5)
            panel.plot(distance, np.median(runs, axis=0), label=name, **style)
            low, high = runs.min(axis=0), runs.max(axis=0)
            panel.fill_between(distance, low, high, color=style["color"], alpha=0.15, lw=0)
        panel.set(xscale="log", ylim=(-0.03, 1.05), ylabel=ylabel)
        panel.margins(x=0.02)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        for place, text in marks:
            panel.axvline(place, color=GRAY, linestyle=":", linewidth=1.4)
            if panel is axes[0, 0]:
                beside(panel, text, (place, 0.5), (-5, 0), color=GRAY, ha="right", fontsize=10)
    axes[-1, 0].xaxis.set_major_locator(FixedLocator(list(distance[:: 1 + len(distance) // 11])))
    axes[-1, 0].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1, 0].xaxis.set_minor_formatter(NullFormatter())
    axes[-1, 0].minorticks_off()
    axes[-1, 0].set_xlabel("distance d, in tokens")
    return figure
