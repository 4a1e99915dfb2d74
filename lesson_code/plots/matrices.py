"""Matrices as heat maps: one, several in a grid, and equations between them."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from lesson_code.plots.cells import rectangle
from lesson_code.plots.colors import INK, POSITIVE, SIGNED, VERMILION, luminance
from lesson_code.plots.style import BookFigure, drawing, new_figure


def draw_matrix(
    axes: Axes,
    values: ArrayLike,
    *,
    title: str = "",
    numbers: bool | None = None,
    digits: int = 2,
    limit: float | None = None,
    hidden: ArrayLike | None = None,
) -> None:
    """Draw a matrix as a grid of cells, row 0 at the top.

    numbers writes each entry into its cell (None: where there are at most 144 of them); limit is
    the magnitude that takes the full color; hidden marks the entries to leave out.
    """
    values = np.atleast_2d(np.asarray(values, dtype=float))
    hidden = np.zeros(values.shape, bool) if hidden is None else np.asarray(hidden, bool)
    shown = np.ma.array(values, mask=hidden)
    signed = bool((shown < 0).any())
    limit = limit or float(np.abs(shown).max()) or 1.0
    axes.set_facecolor("#ececec")
    image = axes.imshow(
        shown,
        cmap=SIGNED if signed else POSITIVE,
        vmin=-limit if signed else 0,
        vmax=limit,
        interpolation="nearest",
    )
    rows, columns = values.shape
    small = rows * columns <= 144
    if numbers if numbers is not None else small:
        for i, j in zip(*np.nonzero(~hidden), strict=True):
            value = values[i, j]
            text = f"{value:.0f}" if value == round(value) else f"{value:.{digits}f}"
            color = INK if luminance(image.to_rgba(value)) > 0.213 else "white"
            text = text.replace("-", "\N{MINUS SIGN}")
            axes.text(j, i, text, ha="center", va="center", color=color)
    if small:
        axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#bdbdbd", linewidth=0.8)
    axes.grid(which="major", visible=False)
    axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.set_title(title)


def draw_causal(axes: Axes, weights: ArrayLike, **options) -> None:
    """Draw a matrix of causal weights, without those of later tokens."""
    weights = np.asarray(weights)
    draw_matrix(axes, weights, hidden=np.triu(np.ones(weights.shape, bool), 1), **options)


def frame_past(axes: Axes, N: int, cut: int, linewidth: float) -> None:
    """Frame what queries from the cut on see of the keys before it."""
    rectangle(axes, -0.5, cut - 0.5, cut, N - cut, "none", VERMILION, linewidth=linewidth)


def matrix_rows(
    rows: Mapping[str, Sequence[tuple[str, ArrayLike]]],
    *,
    width: float,
    height: float,
    limit: float,
) -> BookFigure:
    """Draw named rows of matrices with their titles, all with one scale of colors."""
    columns = len(next(iter(rows.values())))
    figure, axes = new_figure(columns, len(rows), width=width, height=height)
    for panels, (name, matrices) in zip(axes, rows.items(), strict=True):
        for panel, (title, matrix) in zip(panels, matrices, strict=True):
            draw_matrix(panel, matrix, title=title, limit=limit)
        panels[0].set_ylabel(name)
    return figure


@drawing
def matrix_equation(
    *parts: tuple[str, ArrayLike] | str,
    digits: int = 2,
    cell: float = 0.5,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    limit: float | None = None,
) -> BookFigure:
    """Draw matrices and the signs between them: ("Q", Q), "+", ("K", K), "=", ("Q + K", Q + K).

    Every matrix is drawn to the same scale, `cell` inches to an entry, so that shapes can be
    compared by eye. Names are set as mathematics. rows and columns name those of the last matrix,
    on its right and below it. limit is the magnitude that takes the full color in every matrix
    (None: in each the largest of its own).
    """
    shapes = [None if isinstance(part, str) else np.atleast_2d(part[1]).shape for part in parts]
    widths = [0.45 if shape is None else max(shape[1] * cell, 0.45) for shape in shapes]
    tallest = max(shape[0] for shape in shapes if shape) * cell
    gap = 0.12
    total = sum(widths) + gap * (len(parts) - 1)
    right = 0.1 * max((len(name) for name in rows), default=0)
    below = 0.3 if columns else 0.0
    total, full = total + right, tallest + 0.45 + below  # with the names above
    figure = BookFigure(figsize=(total, full))
    left = 0.0
    for part, shape, width in zip(parts, shapes, widths, strict=True):
        height = tallest if shape is None else shape[0] * cell
        axes = figure.add_axes(
            (left / total, (below + (tallest - height) / 2) / full, width / total, height / full)
        )
        if shape is None:
            axes.set_axis_off()
            axes.text(0.5, 0.5, f"${part}$", ha="center", va="center", fontsize=15)
        else:
            draw_matrix(axes, part[1], title=f"${part[0]}$", digits=digits, limit=limit)
        left += width + gap
    height, width = shapes[-1] or (0, 0)
    for i, name in enumerate(rows):
        axes.text(width - 0.4, i, name, va="center", fontsize=10)
    for j, name in enumerate(columns):
        axes.text(j, height - 0.4, name, ha="center", va="top", fontsize=10)
    return figure
