"""Figures of what a state can follow: cups that change places, eigenvalues, and how far it goes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Circle, Polygon
from matplotlib.ticker import NullFormatter
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, box, canvas, write
from lesson_code.plots.colors import BLUE, GRAY, GREEN, INK, MARKERS, VERMILION
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def cups(swaps: Sequence[tuple[int, int]], start: int, count: int = 5) -> BookFigure:
    """A ball that starts under one of some cups, and pairs of cups, from 1, that change places.

    Each column of cells is the state: 1 where the ball is, 0 elsewhere.
    """
    pitch, ball = 2.3, start
    figure, axes = canvas(pitch * len(swaps) + 3.6, count + 1.6, unit=0.36)
    for t in range(len(swaps) + 1):
        x = pitch * t
        for cup in range(1, count + 1):
            fill, edge = (pale.YELLOW, INK) if cup == ball else ("white", GRAY)
            weight = "bold" if cup == ball else "normal"
            box(axes, x, cup, 1, 1, str(int(cup == ball)), fill, edge, fontweight=weight)
        if t == len(swaps):
            break
        a, b = swaps[t]
        write(axes, x + (1 + pitch) / 2, 0.5, f"{a}↔{b}")
        for cup in range(1, count + 1):
            to = {a: b, b: a}.get(cup, cup)
            color, width = (VERMILION, 2.6) if cup == ball else (GRAY, 1)
            ends = (x + 1, cup + 0.5), (x + pitch, to + 0.5)
            if cup in (a, b) or cup == ball:
                arrow(axes, *ends, color, gap=1, linewidth=width)
        ball = {a: b, b: a}.get(ball, ball)
    for cup in range(1, count + 1):
        write(axes, -0.3, cup + 0.5, f"cup {cup}", ha="right")
    axes.set(xlim=(-2.2, pitch * len(swaps) + 1.2), ylim=(count + 1.2, 0))
    return figure


@drawing
def disk() -> BookFigure:
    """The unit disk of the complex plane, with what an eigenvalue of each place does."""
    figure, ((axes,),) = new_figure(width=4.8, height=4.3)
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color=GREEN, linestyle="--", linewidth=2)
    axes.plot([0, 1], [0, 0], color=BLUE, linewidth=5, solid_capstyle="butt")
    axes.plot([-1, 0], [0, 0], color=VERMILION, linewidth=5, linestyle=(0, (1.2, 0.6)))
    thirds = np.exp(2j * np.pi * np.arange(1, 3) / 3)
    axes.plot(thirds.real, thirds.imag, color=GREEN, marker="o", linestyle="none")
    axes.plot([-1, 0, 1], [0, 0, 0], color=INK, marker="o", linestyle="none")
    for place, name in ((-1, "flip"), (0, "erase"), (1, "keep")):
        beside(
            axes,
            name,
            (place, 0),
            (-8 if place > 0 else 8, -18),
            ha="right" if place > 0 else "left",
        )
    beside(axes, "fade", (0.5, 0), (0, 8), color=BLUE, ha="center")
    beside(axes, "flip and fade", (-0.47, 0), (0, 8), color=VERMILION, ha="center")
    beside(axes, "a third\nof a turn", (-0.5, thirds[0].imag), (10, -10), color=GREEN, va="top")
    for x, name in ((0.5, "decays,\nβ below 1"), (-0.46, "β from\n1 to 2")):
        beside(axes, name, (x, -0.22), (0, 0), color=GRAY, ha="center", va="top")
    below = {"color": GRAY, "ha": "center", "va": "center"}
    beside(axes, "a rotating state,\ntwo reflections", (0.14, -0.75), (0, 0), **below)
    beside(axes, "rotate", (0.7, 0.72), (8, 2), color=GREEN)
    turn = 0.98 * np.exp(1j * np.array([0.55, 0.75]))
    arrow(axes, (turn[0].real, turn[0].imag), (turn[1].real, turn[1].imag), GREEN, gap=0)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.15, 1.15), aspect="equal")
    axes.set(xlabel="real part", ylabel="imaginary part", xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    return figure


@drawing
def mirrors() -> BookFigure:
    """A ring of three places, whose letters change places at two mirrors, one after the other."""
    figure, axes = canvas(16.2, 4.2, unit=0.385)
    names = dict(zip("ABC", (pale.BLUE, pale.YELLOW, pale.GREEN), strict=True))
    angles = np.radians([90, 210, 330])
    places = 1.5 * np.stack([np.cos(angles), -np.sin(angles)], axis=1)
    pitch, y = 6.0, 2.9
    for n, (things, fixed) in enumerate((("ABC", 0), ("ACB", 2), ("CAB", None))):
        x = 2 + pitch * n
        corners = places + [x, y]
        axes.add_patch(Polygon(corners, fill=False, edgecolor=GRAY))
        if fixed is not None:
            along = places[fixed] / 1.5
            ends = np.array([x, y]) + np.outer([1.15, -1.15] * np.array([2.15, 1.55]), along)
            axes.plot(*ends.T, color=VERMILION, linestyle="--", linewidth=1.8, zorder=1)
            others = [place + 1 for place in range(3) if place != fixed]
            write(axes, x + pitch / 2, y - 0.55, "{}↔{}".format(*others))
            arrow(axes, (x + pitch / 2 - 0.75, y), (x + pitch / 2 + 0.75, y), INK, gap=0)
        for place, name in enumerate(things):
            axes.add_patch(Circle(tuple(corners[place]), 0.48, fc=names[name], ec=INK, zorder=3))
            write(axes, corners[place, 0], corners[place, 1], name, zorder=4, fontweight="bold")
        for place, (dx, dy) in enumerate(((0.75, -0.3), (-0.75, -0.25), (0.75, -0.25))):
            at = corners[place] + [dx, dy]
            write(axes, at[0], at[1], str(place + 1), color=GRAY, fontsize="small")
    axes.set(xlim=(-0.6, 2 * pitch + 4.6), ylim=(4.7, 0.5))
    return figure


@drawing
def reach(followed: Mapping[str, Mapping[str, ArrayLike]], trained: float) -> BookFigure:
    """How many moves each model follows, ``followed[task][model]``, with a mark for each seed.

    0 is drawn at the left edge. A dotted vertical stands at the length of the training.
    """
    rows = [len(models) for models in followed.values()]
    figure, axes = new_figure(
        1, len(rows), height=0.36 * sum(rows) + 0.75 * len(rows), sharex=True, height_ratios=rows
    )
    most = max(np.max(moves) for models in followed.values() for moves in models.values())
    for panel, (task, models) in zip(axes[:, 0], followed.items(), strict=True):
        panel.set_title(task, loc="left", fontweight="bold")
        panel.axvline(trained, color=GRAY, linestyle=":")
        for row, moves in enumerate(map(np.asarray, models.values())):
            for seed, reached in enumerate(moves):
                style = {"marker": MARKERS[seed % len(MARKERS)], "color": BLUE, "markersize": 5}
                panel.plot(max(reached, 8), row + 0.18 * (seed - (len(moves) - 1) / 2), **style)
        panel.set_yticks(range(len(models)), list(models))
        panel.set(ylim=(len(models) - 0.4, -0.6), xscale="log")
        panel.xaxis.set_minor_formatter(NullFormatter())
    ticks = [8, *2 ** np.arange(4, int(np.log2(most)) + 1)]
    names = ["none", *(str(tick) for tick in ticks[1:])]
    axes[-1, 0].set_xticks(ticks, names)
    axes[-1, 0].minorticks_off()
    axes[-1, 0].set_xlabel("moves followed")
    return figure
