"""Figures of the chapter on converted models: what layers read before and after."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots.cells import rectangle
from lesson_code.plots.colors import GRAY, VERMILION, look
from lesson_code.plots.matrices import draw_causal
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def reading(
    weights: Mapping[str, ArrayLike],
    words: Sequence[str],
    marks: Sequence[tuple[int, int]] = (),
) -> BookFigure:
    """Causal weights (N, N) of each name over the words that were read, two panels in a row.

    The cells (query, key) of `marks` have a frame.
    """
    rows = -(-len(weights) // 2)
    figure, axes = new_figure(2, rows, width=5.4, height=3.0 * rows, sharex=True, sharey=True)
    for panel, (name, a) in zip(axes.flat, weights.items(), strict=True):
        draw_causal(panel, np.asarray(a), numbers=False, title=name, limit=1)
        for query, key in marks:
            rectangle(panel, key - 0.5, query - 0.5, 1, 1, "none", VERMILION, linewidth=2)
        panel.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
        panel.set_yticks(range(len(words)), words, fontsize=8)
    for panel in axes[-1]:
        panel.tick_params(labelbottom=True, pad=1)
        panel.set_xlabel("key")
    for panel in axes[:, 0]:
        panel.tick_params(labelleft=True, pad=1)
        panel.set_ylabel("query")
    return figure


@drawing
def by_age(
    ages: ArrayLike, panels: Mapping[str, Mapping[str, ArrayLike]], chance: float
) -> BookFigure:
    """Recall over the age of a fact, ``panels[title][name]`` (ages,), and a guess as a dotted line.

    A name has the same look in all panels. Many lines end at the same height, so their names stand
    in a list at the right and not at their ends.
    """
    figure, axes = new_figure(1, len(panels), height=2.7 * len(panels), sharex=True)
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    looks = {name: look(index) for index, name in enumerate(names)}
    for panel, (title, lines) in zip(axes[:, 0], panels.items(), strict=True):
        panel.set_title(title, loc="left", fontweight="bold")
        panel.axhline(chance, color=GRAY, linestyle=":", label="a guess")
        for name, recall in lines.items():
            panel.plot(np.asarray(ages), np.asarray(recall), label=name, **looks[name])
        panel.set(ylim=(-0.03, 1.05), ylabel="recall")
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
    axes[-1, 0].set_xlabel("tokens since the fact")
    return figure
