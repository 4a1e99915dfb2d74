"""Figures of gates: how a chunk is halved until every decay is a product of two."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from lesson_code.plots.style import (
    BLUE,
    COLORS,
    GRAY,
    INK,
    VERMILION,
    BookFigure,
    drawing,
    new_figure,
)  # fmt: skip


@drawing
def halving(L: int) -> BookFigure:
    """Who computes which weight of a chunk of L tokens, a power of two: a level for each block.

    Dotted lines show the middle of the chunk, to which both sides of the first block are decayed.
    """
    figure, ((axes,),) = new_figure(width=4.6, height=4.2)
    axes.add_patch(Rectangle((0, 0), L, L, fc="#ececec", ec="none"))
    level, size = 1, L // 2
    while size:
        color = COLORS[level - 1]
        for start in range(0, L, 2 * size):
            middle = start + size
            block = Rectangle((start, middle), size, size, fc=color, alpha=0.3, ec="none")
            axes.add_patch(block)
            axes.add_patch(Rectangle((start, middle), size, size, fill=False, ec=color, lw=1.6))
            font = {1: 11, 2: 13}.get(size, 15)
            axes.text(start + size / 2, middle + size / 2, str(level), ha="center", va="center",
                      fontsize=font, color=INK)  # fmt: skip
        level, size = level + 1, size // 2
    for t in range(L):
        axes.add_patch(Rectangle((t, t), 1, 1, fc="white", ec=GRAY, lw=1))
        axes.text(t + 0.5, t + 0.5, "own", ha="center", va="center", fontsize=9, color=GRAY)
    half = L // 2
    axes.plot([0, L], [half, half], color=INK, linestyle=":", linewidth=1.6)
    axes.plot([half, half], [0, L], color=INK, linestyle=":", linewidth=1.6)
    axes.text(half / 2, -0.45, "keys: decayed\nto the middle",
              color=BLUE, ha="center", va="center", fontsize=10)  # fmt: skip
    axes.text(L + 0.15, half + half / 2, "queries: decayed\nfrom the middle",
              color=VERMILION, ha="left", va="center", fontsize=10)  # fmt: skip
    axes.set(xlim=(-0.1, L + 2.9), ylim=(L + 0.1, -0.95), aspect="equal")
    axes.set_axis_off()
    return figure
