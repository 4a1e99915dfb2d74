"""Figures of the whole family: what tokens weigh, and where transitions have eigenvalues."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from lesson_code.plots import pale
from lesson_code.plots.cells import box, write
from lesson_code.plots.colors import BLUE, GRAY
from lesson_code.plots.matrices import draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def eigenvalues(panels: Mapping[str, ArrayLike], *, columns: int = 3) -> BookFigure:
    """Eigenvalues of a model's transitions as dots in the unit disk: a panel for each model."""
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(columns, rows, width=5.6, height=2.05 * rows)
    angle = np.linspace(0, 2 * np.pi, 200)
    for panel, (name, values) in zip(axes.flat, panels.items(), strict=False):
        values = np.asarray(values)
        panel.axhline(0, color=GRAY, linewidth=0.6)
        panel.axvline(0, color=GRAY, linewidth=0.6)
        panel.plot(np.cos(angle), np.sin(angle), color=GRAY, linestyle="--", linewidth=1)
        panel.plot(
            values.real, values.imag, color=BLUE, marker="o", linestyle="none", ms=3, alpha=0.35
        )
        panel.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal")
        panel.set(xticks=[-1, 0, 1], yticks=[-1, 0, 1])
        panel.set_title(name)
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
def learning(
    steps: ArrayLike, runs: Mapping[str, ArrayLike], level: float, *, columns: int = 3
) -> BookFigure:
    """Losses while models learn, with a panel for each and a line for each of its seeds.

    Each of `runs` is (number of seeds, len(steps)). The dotted level is what a guess would pay. The
    means of all panels are pale lines.
    """
    rows = -(-len(runs) // columns)
    size = {"width": 6.4, "height": 1.45 * rows + 0.4}
    figure, grid = new_figure(columns, rows, **size, sharex=True, sharey=True)
    losses = {name: np.asarray(lines) for name, lines in runs.items()}
    means = np.array([lines.mean(axis=0) for lines in losses.values()])
    for axes, (name, lines) in zip(grid.flat, losses.items(), strict=False):
        axes.plot(steps, means.T, color="#dadada", linewidth=0.8, zorder=1)
        axes.plot(steps, lines.T, color=BLUE, linewidth=1.5, zorder=2)
        axes.axhline(level, color=GRAY, linestyle=":", linewidth=1.2)
        axes.set_title(name, loc="left", fontsize=10)
    for axes in grid.flat[len(runs) :]:
        axes.set_axis_off()
    for axes in grid.flat[max(0, len(runs) - columns) : len(runs)]:  # the last of each column
        axes.tick_params(labelbottom=True)
    grid[0, 0].set(ylim=(0, 1.15 * level), xlim=(0, None))
    figure.supxlabel("steps", fontsize=11)
    figure.supylabel("loss on facts, nats", fontsize=11)
    return figure


@drawing
def two_axes(rows: Mapping[str, Sequence[Sequence[str]]], columns: Sequence[str]) -> BookFigure:
    """What models can follow, in rows, by how much they keep, in columns: names in each field.

    rows has, for each class of transitions, the names in each of the columns. A field without a
    name is gray.
    """
    heights = [max(1, *map(len, fields)) + 0.7 for fields in rows.values()]
    figure, ((axes,),) = new_figure(width=6.4, height=0.21 * sum(heights) + 0.6)
    y = 0.0
    for (name, fields), height in zip(rows.items(), heights, strict=True):
        write(axes, -0.06, y + height / 2, name, weight="bold", ha="right")
        for x, names in enumerate(fields):
            fill = pale.BLUE if names else pale.GRAY
            box(axes, x, y, 1, height, "\n".join(names), fill, "white", fontsize=9.5)
        y += height
    for x, column in enumerate(columns):
        write(axes, x + 0.5, -0.6, column, fontsize=9.5)
    write(axes, len(columns) / 2, -1.7, "numbers kept by a head after 8,192 tokens", fontsize=10)
    axes.set_axis_off()
    axes.set(xlim=(-0.62, len(columns)), ylim=(y, -2.2))
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
