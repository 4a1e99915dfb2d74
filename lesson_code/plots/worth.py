"""The figure of what a state is worth: what a memory keeps, and what it answers."""

from collections.abc import Mapping

from lesson_code.plots.colors import BLUE, GRAY, VERMILION
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def exchange(points: Mapping[str, tuple[float, float]], yardstick: float) -> BookFigure:
    """For each memory the numbers that it keeps, and beside them its share of right answers.

    A value is (numbers, share). Memories with "softmax" in their name have another color, and a
    dotted line is drawn at the share that the yardstick has.
    """
    order = sorted(points, key=lambda name: points[name][1])
    figure, ((left, right),) = new_figure(2, height=0.27 * len(order) + 0.9, sharey=True)
    for row, name in enumerate(order):
        kept, share = points[name]
        color = VERMILION if "softmax" in name else BLUE
        left.barh(row, kept, color=color, height=0.6)
        beside(left, f"{kept:,}", (kept, row), (4, 0), va="center")
        right.plot([0, share], [row, row], color=GRAY, linewidth=0.8)
        right.plot(share, row, "o", color=color)
        beside(right, f"{share:.2f}", (1, row), (9, 0), va="center")
    right.axvline(yardstick, color=GRAY, linestyle=":", linewidth=1.4, zorder=0)
    most = max(kept for kept, _ in points.values())
    left.set(xlim=(0, 1.4 * most), xlabel="numbers kept")
    left.set_xticks([])
    left.set_yticks(range(len(order)), order)
    right.set(xlim=(-0.02, 1.25), xlabel="share right of 64")
    right.set_xticks([0, yardstick, 1], ["0", f"{yardstick:.2f}", "1"])
    for axes in (left, right):
        axes.grid(visible=False)
    return figure
