"""Figures of feature maps: heads that read, slopes, random features, rows of weights."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.numpy import elu_plus_one, relu
from lesson_code.plots.cells import arrow, write
from lesson_code.plots.colors import BLUE, GREEN, INK, look
from lesson_code.plots.lines import bars
from lesson_code.plots.matrices import draw_causal
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def heads_reading(weights: Mapping[str, ArrayLike], letters: str) -> BookFigure:
    """Causal weights (N, N) of each name over the letters that were read, in one scale of gray."""
    figure, (panels,) = new_figure(len(weights), height=6.9 / len(weights) + 0.1)
    shown = ["\N{OPEN BOX}" if letter.isspace() else letter for letter in letters]
    size = min(10, 330 / len(weights) / len(letters))
    for axes, (name, a) in zip(panels, weights.items(), strict=True):
        draw_causal(axes, a, numbers=False, title=name, limit=1)
        axes.set_xticks(range(len(shown)), shown, fontsize=size)
        axes.set_yticks(range(len(shown)), shown, fontsize=size)
        axes.tick_params(labelbottom=True, labelleft=True, pad=1)
        axes.set_xlabel("key")
    panels[0].set_ylabel("query")
    return figure


@drawing
def values_and_slopes(limit: float = 3) -> BookFigure:
    """elu(x) + 1 and relu(x) over x (left), and the slopes of both (right)."""
    figure, ((left, right),) = new_figure(2, height=2.9)
    below, above = np.linspace(-limit, 0, 100), np.linspace(0, limit, 100)
    x = np.concatenate([below, above])
    slopes = {
        "elu(x) + 1": np.concatenate([np.exp(below), np.ones(100)]),
        "relu(x)": np.concatenate([np.zeros(100), np.ones(100)]),
    }
    values = {"elu(x) + 1": elu_plus_one(x), "relu(x)": relu(x)}
    for axes, lines, title in (left, values, "value"), (right, slopes, "slope"):
        for index, (name, y) in enumerate(lines.items()):
            axes.plot(x, y, label=name, **look(index, marker=None))
        axes.set(xlabel="x", title=title)
    right.set_ylim(-0.08, 1.3)
    left.legend(loc="upper left")
    return figure


@drawing
def plane_and_weights(q: ArrayLike, keys: ArrayLike, rows: Mapping[str, ArrayLike]) -> BookFigure:
    """A query and keys of width 2 as arrows (left), and rows of weights over the keys (right).

    The first row is drawn as a line across the others.
    """
    query, tips = np.asarray(q, dtype=float), np.asarray(keys, dtype=float)
    names = [f"$k_{j}$" for j in range(1, len(tips) + 1)]
    figure, panels = new_figure(
        2, len(rows), height=0.85 * len(rows), width_ratios=[1.25, 1], sharex="col", sharey="col"
    )
    grid = panels[0, 0].get_gridspec()
    for axes in panels[:, 0]:
        axes.remove()
    plane = figure.add_subplot(grid[:, 0])
    for tip, name, color in zip(
        [*tips, query], [*names, "$q$"], [*[BLUE] * len(tips), GREEN], strict=True
    ):
        arrow(plane, (0, 0), tip, color, gap=0, linewidth=1.8)
        x, y = tip + 0.3 * tip / max(float(np.linalg.norm(tip)), 1e-9)  # beyond the tip
        write(plane, x, y, name, color=color)
    reach = max(3.0, float(np.abs([*tips, query]).max()) + 0.5)
    plane.set(xlim=(-reach, reach), ylim=(-reach, reach))
    plane.set_aspect("equal")
    first = np.asarray(next(iter(rows.values())), dtype=float)
    for axes, (name, weights) in zip(panels[:, 1], rows.items(), strict=True):
        bars(axes, weights, width=0.7)
        axes.hlines(first, np.arange(len(tips)) - 0.42, np.arange(len(tips)) + 0.42, color=INK)
        axes.set_title(name, fontsize="medium")
        axes.set_xticks(range(len(tips)), names)
    return figure
