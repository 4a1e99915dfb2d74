"""Figures of forgetting and correcting: what a memory answers, and for how long it keeps."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import canvas, rectangle, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, INK, MARKERS, VERMILION
from lesson_code.plots.lines import beside, legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def answers(
    said: Sequence[str], wanted: ArrayLike, memories: Mapping[str, ArrayLike], names: Sequence[str]
) -> BookFigure:
    """What each rule's memory answers after each token: a row for each rule.

    wanted (N, D) and each of the memories (N, D) have an answer for each token and name. An answer
    other than the one wanted has a thick frame and a cross at its corner.
    """
    wanted = np.asarray(wanted, float)
    wide, high, left = 2.6, 1.0, 3.9
    N, D = wanted.shape
    rows = {"wanted": wanted, **{name: np.asarray(x, float) for name, x in memories.items()}}
    step = D * high + 0.55
    figure, axes = canvas(left + N * wide + 0.4, 1.5 + len(rows) * step, unit=0.365)
    for t, text in enumerate(said):
        write(axes, left + (t + 0.5) * wide, -0.75, text, fontsize=10.5)
    for r, (rule, found) in enumerate(rows.items()):
        top = r * step
        bold = "bold" if r == 0 else "normal"
        write(axes, 0.1, top + D * high / 2, rule, ha="left", fontweight=bold)
        for i, name in enumerate(names):
            if r == 0:
                write(
                    axes, left - 0.15, top + (i + 0.5) * high, name, ha="right", color=GRAY, size=9
                )
            for t in range(N):
                wrong = not np.isclose(found[t, i], wanted[t, i])
                x, y = left + t * wide + 0.12, top + i * high
                fill = pale.VERMILION if wrong else ("white" if r else pale.GRAY)
                edge, thick = (VERMILION, 2) if wrong else (GRAY, 0.8)
                box = {"linewidth": thick, "zorder": 3 if wrong else 2}
                rectangle(axes, x, y, wide - 0.24, high, fill, edge, **box)
                style = {"color": INK, "fontweight": "bold" if wrong else "normal", "zorder": 4}
                mark = r" $\times$" if wrong else ""
                write(axes, x + wide / 2 - 0.12, y + high / 2, f"{found[t, i]:g}{mark}", **style)
    axes.set(xlim=(0, left + N * wide + 0.2), ylim=(len(rows) * step - 0.4, -1.5))
    return figure


@drawing
def two_shares() -> BookFigure:
    """What one token can leave of the memory along its key and elsewhere, for three rules."""
    figure, ((axes,),) = new_figure(width=4.9, height=4.3)
    axes.fill([0, 0, 1], [0, 1, 1], color=pale.GREEN, zorder=1)
    axes.plot([0, 1], [0, 1], color=BLUE, linewidth=3)
    axes.plot([0, 1], [1, 1], color=VERMILION, linewidth=3, linestyle=(0, (4, 1.5)))
    write(axes, 0.56, 0.49, "decay", color=BLUE, rotation=45)
    write(axes, 0.5, 1.05, "delta", color=VERMILION)
    write(axes, 0.3, 0.62, "gated delta")
    points = {
        (0, 1): ("replace\none fact", (-8, 0), "right"),
        (0, 0): ("clear\nall", (-8, 0), "right"),
        (1, 1): ("keep\nall", (9, 0), "left"),
    }
    for (x, y), (text, offset, ha) in points.items():
        axes.plot(x, y, marker="o", color=INK, markersize=8, zorder=5, clip_on=False)
        beside(axes, text, (x, y), offset, ha=ha, va="center", fontweight="bold")
    axes.set(xlim=(-0.36, 1.22), ylim=(-0.08, 1.12), aspect="equal")
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_yticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set(xlabel="share left along the key", ylabel="share left elsewhere")
    return figure


@drawing
def half_lives(tokens: Mapping[str, ArrayLike], marks: Sequence[tuple[float, str]]) -> BookFigure:
    """In how many tokens each head or channel loses half: a stroke for each, a row for each layer.

    The longest stroke of a row is its median.
    """
    figure, ((axes,),) = new_figure(height=0.62 * len(tokens) + 1.0)
    for row, x in enumerate(tokens.values()):
        x, color = np.ravel(x), COLORS[row]
        few = x.size <= 64
        look = {"color": color, "alpha": 0.9 if few else 0.25, "linewidth": 1.4 if few else 0.8}
        axes.vlines(x, row - 0.2, row + 0.2, **look)
        axes.vlines(np.median(x), row - 0.4, row + 0.4, color=INK, linewidth=2.4)
        beside(axes, f"{np.median(x):.0f}", (np.median(x), row - 0.36), (5, -2), fontsize=10)
    for place, text in marks:
        axes.axvline(place, color=GRAY, linestyle=":", linewidth=1.4)
        at = {"xycoords": ("data", "axes fraction"), "color": GRAY, "ha": "center", "fontsize": 9.5}
        beside(axes, text, (place, 1), (0, 3), **at)
    axes.set_xscale("log")
    axes.set_yticks(range(len(tokens)), list(tokens))
    axes.set_ylim(len(tokens) - 0.5, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("tokens until half is forgotten")
    return figure


@drawing
def right_answers(
    tasks: Mapping[str, Mapping[str, ArrayLike]], kinds: Sequence[str], chance: float
) -> BookFigure:
    """Shares of right answers to each kind of question: a panel for each task, a row for each rule.

    A rule has an array (seeds, kinds). A marker stands at the median, on a line over all seeds.
    """
    rules = list(next(iter(tasks.values())))
    height = 0.42 * len(rules) + 1.5
    figure, (panels,) = new_figure(len(tasks), height=height, sharey=True, sharex=True)
    looks = list(zip((BLUE, VERMILION, INK), MARKERS, strict=False))
    for axes, (title, found) in zip(panels, tasks.items(), strict=True):
        for row, rule in enumerate(rules):
            shares = np.asarray(found[rule], float)
            for i, (color, marker) in enumerate(looks[: len(kinds)]):
                y = row + 0.22 * (i - (len(kinds) - 1) / 2)
                axes.plot([shares[:, i].min(), shares[:, i].max()], [y, y], color=color)
                axes.plot(np.median(shares[:, i]), y, color=color, marker=marker, markersize=6.5)
        axes.set_title(title)
        axes.axvline(chance, color=GRAY, linestyle=":", linewidth=1.4)
        axes.set_xlim(0, 1.04)
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    panels[0].set_yticks(range(len(rules)), rules)
    panels[0].set_ylim(len(rules) - 0.5, -0.5)
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none")
        for color, marker in looks[: len(kinds)]
    ]
    legend_below(figure, handles, kinds)
    return figure
