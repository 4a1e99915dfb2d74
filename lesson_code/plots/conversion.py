"""Figures of the chapter on converted models: what layers read before and after."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots.cells import rectangle
from lesson_code.plots.colors import VERMILION
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
