"""Figures of the whole family: what tokens weigh, what memories hold, how states grow."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots.cells import write
from lesson_code.plots.colors import GRAY, INK
from lesson_code.plots.lines import beside, named_bars
from lesson_code.plots.matrices import draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def memory_over_time(
    panels: Mapping[str, ArrayLike], events: Mapping[int, str], *, columns: int = 2
) -> BookFigure:
    """How much of each token's value its key still reads, as time goes on: one map for each rule.

    Each panel is (N, N): row j is a stored token, column t the time, both counted from the top left
    corner. What lies below the diagonal is not stored yet. events names columns, whose left edges
    get a dotted line.
    """
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(columns, rows, width=5.6, height=2.85 * rows + 0.2)
    figure.set_layout_engine("constrained", h_pad=0.12)
    for panel, (name, values) in zip(axes.flat, panels.items(), strict=False):
        values = np.asarray(values)
        future = np.tril(np.ones(values.shape, bool), -1)
        draw_matrix(panel, values, title=name, limit=1.0, hidden=future)
        for t, event in events.items():
            panel.axvline(t - 0.5, color=INK, linestyle=(0, (1, 1.5)), linewidth=1.2)
            beside(panel, event, (t - 0.5, -0.5), (0, 2), ha="center", color=GRAY, fontsize=10)
        panel.set_title(name, pad=16)
        panel.set(xlabel="time", ylabel="stored token")
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    return figure


@drawing
def token_weights(k: ArrayLike, v: ArrayLike, rules: Mapping[str, ArrayLike]) -> BookFigure:
    """What each token of a stream weighs in one read, and what is read: a column for each rule.

    Keys k are (N, D), values v (N,), one number each. A rule has the N weights of the tokens; below
    its column stands what it reads, the sum of weight times value.
    """
    k, v, weights = np.asarray(k), np.asarray(v), np.transpose(list(rules.values()))  # (N, rules)
    N, columns = weights.shape
    figure, ((axes,),) = new_figure(width=6.2, height=0.44 * N + 1.1)
    draw_matrix(axes, weights, numbers=True)
    axes.set_aspect("auto")
    keys = ["[" + ", ".join(f"{x:g}" for x in row) + "]" for row in k]
    tokens = [
        f"{t}:  {key} \u2192 {x:g}" for t, (key, x) in enumerate(zip(keys, v, strict=True), 1)
    ]
    axes.set_yticks(range(N), tokens)
    axes.set_xticks(range(columns), list(rules))
    axes.tick_params(labelleft=True, labeltop=True)
    for column, read in enumerate(v @ weights):
        write(axes, column, N, f"{read:.1f}", weight="bold")
    write(axes, -0.58, N, "reads", weight="bold", ha="right")
    return figure


@drawing
def continuation(prompt: str, written: str, *, columns: int = 46) -> BookFigure:
    """A prompt, in bold, and what a model wrote after it: a picture, as machines differ in that."""
    figure = BookFigure(figsize=(5.6, 1))
    axes = figure.add_axes((0, 0, 1, 1))
    row = column = 0
    for place, character in enumerate(prompt + written):
        if character == "\n" or column == columns:
            row, column = row + 1, 0
        if character != "\n":
            weight = "bold" if place < len(prompt) else "normal"
            axes.text(column, row, character, family="monospace", weight=weight, ha="center")
            column += 1
    axes.set(xlim=(-1, columns), ylim=(row + 0.7, -0.7))
    axes.set_axis_off()
    figure.set_size_inches(5.6, 0.24 * (row + 1.4))
    return figure


@drawing
def bars(values: Mapping[str, float], *, xlabel: str) -> BookFigure:
    """Named numbers as horizontal bars, the first on top, each with its number at its end."""
    figure, axes = named_bars(values, [f"{x:.2f}" for x in values.values()], height=0.7)
    axes.margins(x=0.12)
    axes.set(xlabel=xlabel)
    return figure
