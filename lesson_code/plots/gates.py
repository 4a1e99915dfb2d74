"""Figures of gates: what they keep, when they close, and how a chunk is halved."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import box, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, INK, POSITIVE, VERMILION, look
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def plane(models: Mapping[str, ArrayLike], best: float) -> BookFigure:
    """The losses of words that end and of a sign that lasts, one against the other.

    models has (seeds, 2) losses for each name, best is the least loss of the words. Whoever guesses
    the sign among four is at the upper dotted line.
    """
    figure, ((axes,),) = new_figure(height=3.6)
    for index, (name, losses) in enumerate(models.items()):
        words, sign = np.asarray(losses).T
        style = look(index, linestyle="none")
        axes.plot(words, sign, markersize=8, **style)
        at = (words.max(), sign.mean())
        beside(axes, name, at, (8, 8), color=style["color"], va="center")
    for line, text in ((best, "best"), (np.log(4), "guessed")):
        if text == "best":
            axes.axvline(line, color=GRAY, linestyle=":", linewidth=1.4)
            beside(axes, "best words", (line, 0.75), (5, 0), color=GRAY, fontsize=10, rotation=90)
        else:
            axes.axhline(line, color=GRAY, linestyle=":", linewidth=1.4)
            beside(axes, "sign guessed", (1.42, line), (0, 5), color=GRAY, fontsize=10)
    axes.set(xlabel="words: loss in nats", ylabel="sign: loss in nats")
    axes.set(xlim=(best - 0.03, 1.66), ylim=(-0.06, 1.56))
    return figure


@drawing
def over_time(gates: ArrayLike, tokens: Sequence[int]) -> BookFigure:
    """The gates of one head (channels, tokens), white where they are closed, over the tokens.

    Above them stands what each token is: a new letter (0), a sign (1 to 4), or a word, a dot.
    """
    figure, ((axes,),) = new_figure(height=3.4)
    gates = np.asarray(gates)
    axes.imshow(gates, cmap=POSITIVE, vmin=0, vmax=1.25, aspect="auto", interpolation="nearest")
    for t, token in enumerate(tokens):
        kind = "0" if token == 0 else "s" if token < 5 else "\N{MIDDLE DOT}"
        color = VERMILION if token == 0 else INK
        write(axes, t, -1.8, kind, color=color, fontsize=10)
    axes.grid(visible=False)
    axes.set(xlabel="token", ylabel="channel (dark: open, white: closed)")
    axes.spines[["top", "right"]].set_visible(True)
    return figure


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
