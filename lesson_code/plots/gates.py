"""Figures of gates: how a chunk is halved until every decay is a product of two."""

from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, INK, VERMILION
from lesson_code.plots.style import BookFigure, drawing


@drawing
def halving(L: int) -> BookFigure:
    """Who computes which weight of a chunk of L tokens, a power of two: a level for each block.

    Dotted lines show the middle of the chunk, to which both sides of the first block are decayed.
    """
    figure, axes = canvas(4.6, 4.2, unit=1)
    rectangle(axes, 0, 0, L, L, pale.GRAY, "none")
    level, size = 1, L // 2
    while size:
        color = COLORS[level - 1]
        for start in range(0, L, 2 * size):
            middle = start + size
            rectangle(axes, start, middle, size, size, color, "none", alpha=0.3)
            font = {1: 11, 2: 13}.get(size, 15)
            rectangle(axes, start, middle, size, size, "none", color, linewidth=1.6)
            write(axes, start + size / 2, middle + size / 2, str(level), fontsize=font)
        level, size = level + 1, size // 2
    for t in range(L):
        box(axes, t, t, 1, 1, "own", "white", fontsize=9, color=GRAY)
    half = L // 2
    axes.plot([0, L], [half, half], color=INK, linestyle=":", linewidth=1.6)
    axes.plot([half, half], [0, L], color=INK, linestyle=":", linewidth=1.6)
    keys, queries = "keys: decayed\nto the middle", "queries: decayed\nfrom the middle"
    write(axes, half / 2, -0.45, keys, color=BLUE, fontsize=10)
    write(axes, L + 0.15, half + half / 2, queries, color=VERMILION, ha="left", fontsize=10)
    axes.set(xlim=(-0.1, L + 2.9), ylim=(L + 0.1, -0.95))
    return figure
