"""Figures of the layer: cell, orders, model, ways to decode, who is recalled, places, who sees."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, canvas, rectangle, write
from lesson_code.plots.colors import BLUE, GRAY, GREEN, INK, VERMILION, look
from lesson_code.plots.lines import name_lines
from lesson_code.plots.matrices import draw_matrix
from lesson_code.plots.style import BookFigure, drawing, new_figure


@drawing
def cell() -> BookFigure:
    """The layer as a recurrent cell: the state passes from left to right, a token goes upward."""
    figure, axes = canvas(5.6, 4.8, unit=1)
    rectangle(axes, 1.25, 1.05, 8.0, 7.35, "#f7f7f7", linestyle=(0, (4, 3)))
    state, added, tap, query, skip = 5.0, 2.75, 4.55, 6.1, 8.3  # a height, then four columns

    _line(axes, (-0.7, state), (added - 0.28, state), BLUE, head=True)
    _line(axes, (added + 0.28, state), (10.7, state), BLUE, head=True, zorder=2)
    write(axes, 0.2, state + 0.25, "$S_{t-1},\\, z_{t-1}$", va="bottom")
    write(axes, 10.0, state + 0.25, "$S_t,\\, z_t$", va="bottom")

    write(axes, 5.2, 0.0, "$x_t$", fontsize=13)
    _line(axes, (5.2, 0.3), (5.2, 1.4), INK)
    _line(axes, (2.0, 1.4), (skip, 1.4), INK)
    for x, name in (2.0, "K"), (3.5, "V"), (query, "Q"):
        _line(axes, (x, 1.4), (x, 1.75), INK, head=True)
        _box(axes, x, 2.05, f"$W_{name}$", "white")
        write(axes, x + 0.2, 2.53, f"${name.lower()}_t$", ha="left", fontsize=10)
    for x in (2.0, query):
        _line(axes, (x, 2.35), (x, 2.7), INK, head=True)
        _box(axes, x, 3.0, r"$\phi$", "white")
    _line(axes, (2.0, 3.3), (2.0, 3.75), VERMILION, head=True)
    _line(axes, (3.5, 2.35), (3.5, 3.75), VERMILION, head=True)
    _box(axes, added, 4.05, r"$\phi(k_t)\,v_t^\top,\ \phi(k_t)$", pale.VERMILION, width=2.6)
    _line(axes, (added, 4.35), (added, state - 0.26), VERMILION, head=True)
    _plus(axes, added, state)

    for x in (query, skip):  # a gap where the state passes underneath
        axes.plot([x, x], [state - 0.2, state + 0.2], color="#f7f7f7", linewidth=9, zorder=3)
    _line(axes, (query, 3.3), (query, 5.85), GREEN, head=True)
    _line(axes, (tap, state), (tap, 6.15), BLUE)
    _line(axes, (tap, 6.15), (5.1, 6.15), BLUE, head=True)
    axes.add_patch(Circle((tap, state), 0.09, fc=BLUE, ec="none", zorder=5))
    _box(axes, query, 6.15, "read", pale.GREEN, width=1.9)
    _line(axes, (7.05, 6.15), (skip - 0.28, 6.15), GREEN, head=True)
    write(axes, 7.5, 6.3, "$o_t$", va="bottom")
    _line(axes, (skip, 1.4), (skip, 5.87), GRAY, head=True)
    _plus(axes, skip, 6.15)
    _line(axes, (skip, 6.43), (skip, 7.05), INK, head=True)
    _box(axes, skip, 7.4, "$f_l$", pale.BLUE, width=1.1, height=0.7)
    _line(axes, (skip, 7.75), (skip, 8.95), INK, head=True)
    write(axes, skip, 9.2, "$y_t$", fontsize=13)

    axes.text(added - 0.4, state + 0.3, "write", ha="right", va="bottom", color=VERMILION)
    write(axes, skip + 0.15, 3.6, "residual", ha="left", color=GRAY, rotation=90)
    axes.set(xlim=(-0.9, 10.9), ylim=(-0.35, 9.5))
    return figure


@drawing
def two_orders(layers: int, tokens: int) -> BookFigure:
    """Which (token, layer) is computed at which step: row by row (left), column by column."""
    figure, ((left, right),) = new_figure(2, width=5.8, height=2.7)
    for axes, by_row, title in (left, True, "forward"), (right, False, "step"):
        axes.set_aspect("equal")
        axes.set_axis_off()
        count = layers if by_row else tokens
        for i in range(count):  # what is computed together
            corner = (-0.42, i - 0.32) if by_row else (i - 0.32, -0.42)
            size = (tokens - 0.16, 0.64) if by_row else (0.64, layers - 0.16)
            box = "round,pad=0,rounding_size=0.3"
            axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=box, fc=pale.BLUE, ec="none"))
        for layer in range(layers):
            for token in range(tokens):
                at = (token, layer)
                if layer:
                    _line(axes, (token, layer - 0.75), (token, layer - 0.27), GRAY, head=True)
                if token:
                    _line(axes, (token - 0.75, layer), (token - 0.27, layer), BLUE, head=True)
                axes.add_patch(Circle(at, 0.25, fc="white", ec=INK, zorder=4))
                number = layer if by_row else token
                write(axes, *at, str(number + 1), zorder=5)
        for token in range(tokens):
            write(axes, token, -0.75, f"$x_{token + 1}$")
        axes.set(xlim=(-0.6, tokens - 0.4), ylim=(-1.0, layers - 0.4))
        axes.set_title(title)
    left.text(-0.75, (layers - 1) / 2, "layers", ha="center", va="center", rotation=90)
    return figure


@drawing
def model() -> BookFigure:
    """The model of the tales on seven words: what each part makes of them, with its shape."""
    words = "Ida knits . Roy sails . Ida".split()
    asking, width = len(words) - 1, 0.84
    embedded, added, state, guess = 0.85, 1.75, 3.05, 4.3  # heights of the rows
    figure, axes = canvas(6.4, 3.75, unit=1)

    def part(y: float, name: str, shape: str) -> None:
        write(axes, -2.2, y, name + "\n" + shape, ha="left", linespacing=1.4)

    part(0, "words", "$(N)$")
    part(embedded, "embedding", "$(N,\\ 32)$")
    part(added, "plus the\nword before", "$(N,\\ 32)$")
    part(state, "layer, with\nits state $S$", "$(32,\\ 32)$")
    part(guess, "logits", "$(N,\\ 33)$")
    for x, word in enumerate(words):
        write(axes, x, 0, word, fontstyle="italic")
        _line(axes, (x, 0.2), (x, embedded - 0.2), GRAY, head=True)
        _box(axes, x, embedded, word, pale.BLUE, width=width, height=0.36)
        _line(axes, (x, embedded + 0.18), (x, added - 0.32), GRAY, head=True)
        _box(axes, x, added + 0.15, word, pale.BLUE, width=width, height=0.3)
        before = words[x - 1] if x else "0"
        _box(axes, x, added - 0.15, before, pale.VERMILION, width=width, height=0.3)
        if x:
            start, end = (x - 0.9 + 0.2, embedded + 0.18), (x - 0.25, added - 0.32)
            _line(axes, start, end, VERMILION, head=True)

    _line(axes, (-0.5, state), (asking + 0.6, state), BLUE, head=True)
    kept: list[str] = []
    for x in 1, 4:
        _line(axes, (x, added + 0.3), (x, state - 0.22), VERMILION, head=True)
        write(axes, x + 0.1, added + 0.68, "writes", ha="left", color=VERMILION, fontsize=10)
        _plus(axes, x, state)
        kept.append(f"{words[x - 1]}: {words[x]}")
        _box(axes, x + 0.93, state, "\n".join(kept), "white", width=1.2, height=0.7)
    _line(axes, (asking, added + 0.3), (asking, state - 0.2), GREEN, head=True)
    write(axes, asking - 0.1, added + 0.68, "asks", ha="right", color=GREEN, fontsize=10)
    _box(axes, asking, state, "read", pale.GREEN, width=0.7, height=0.4)
    _line(axes, (asking, state + 0.2), (asking, guess - 0.25), GREEN, head=True)
    write(axes, asking, guess, "knits", fontstyle="italic")
    axes.set(xlim=(-2.25, asking + 0.7), ylim=(-0.4, guess + 0.4))
    return figure


@drawing
def three_ways(k: NDArray, v: NDArray, kept: Mapping[str, Sequence[int | str]]) -> BookFigure:
    """What each token needs: computed again from the start, with a KV cache, with S and z.

    Frames mark what is computed at that token. kept gives, under a heading each, the numbers to
    write below the three columns, or texts of two lines.
    """
    N, D, M = len(k), k.shape[1], v.shape[1]
    pitch, width = 5.9, D + M + 0.3
    tops = np.cumsum([0] + [max(t, D) + 0.8 for t in range(1, N)])  # where token t begins
    bottom = tops[-1] + N + 0.4
    height = bottom + 2.9 * len(kept) - 0.7
    figure, axes = canvas(5.8, 0.32 * (height + 2), unit=1)
    for column, name in enumerate(("recompute", "KV cache", "state")):
        x = pitch * column
        write(axes, x + width / 2, -0.9, name, fontweight="bold")
        for t, top in enumerate(tops, start=1):
            if column == 2:
                left = x + (width - M - 1.3) / 2
                _cells(axes, left, top, k[:t].T @ v[:t], pale.GREEN, new=True)
                z = k[:t].sum(axis=0)[:, None]
                _cells(axes, left + M + 0.3, top, z, pale.GREEN, new=True)
                continue
            for j in range(t):
                new = column == 0 or j == t - 1
                fill = pale.VERMILION if new else pale.BLUE
                _cells(axes, x, top + j, k[j], fill, new)
                _cells(axes, x + D + 0.3, top + j, v[j], fill, new)
        for row, numbers in enumerate(kept.values()):
            y = bottom + 2.9 * row + 1.6
            number, *below = str(numbers[column]).splitlines()
            write(axes, x + width / 2, y, f"{int(number):,}" if number.isdigit() else number)
            for note in below:
                write(axes, x + width / 2, y + 0.8, note, color=GRAY, fontsize=10)
    for row, heading in enumerate(kept):
        y = bottom + 2.9 * row + 0.6
        write(axes, -2.2, y, heading, ha="left", color=GRAY)
    for t, top in enumerate(tops, start=1):
        write(axes, -0.4, top + 0.5, f"$t = {t}$", ha="right")
    axes.set(xlim=(-2.4, 2 * pitch + width + 0.2), ylim=(height + 0.1, -1.5))
    return figure


@drawing
def by_people(
    people: Sequence[tuple[int, int]], probabilities: Mapping[str, ArrayLike]
) -> BookFigure:
    """Probability of a known verb by the number of people who have come: means and ranges.

    people gives the first and last number of each group; each entry of probabilities is an array
    (seeds, groups).
    """
    height = 3.6
    figure, ((axes,),) = new_figure(height=height)
    groups = range(len(people))
    for index, (name, runs) in enumerate(probabilities.items()):
        runs = np.asarray(runs)
        mean = runs.mean(axis=0)
        bars = np.stack([mean - runs.min(axis=0), runs.max(axis=0) - mean])
        axes.plot(groups, mean, label=name, **look(index))
        axes.errorbar(groups, mean, bars, fmt="none", ecolor=look(index)["color"], capsize=3)
    names = [f"{first} to {last}" for first, last in people]
    axes.set_xticks(groups, names)
    axes.set(xlabel="people so far", ylabel="probability of the verb", ylim=(0, 1.03))
    name_lines(axes, [line for line in axes.get_lines() if line.get_label()[0] != "_"], height)
    return figure


@drawing
def places(names: Sequence[str], match: ArrayLike, probability: ArrayLike) -> BookFigure:
    """Whose keys each name's query matches, its own at 1, and beside it how well it is recalled.

    match has a row for each name that asks and a column for each name written under.
    """
    figure, (panels,) = new_figure(2, width=6.4, height=4.3, width_ratios=(2.1, 1))
    left, right = panels
    everyone = range(len(names))
    draw_matrix(left, match, title="match", numbers=False, limit=1)
    left.tick_params(labelbottom=True, labelleft=True, pad=1)
    left.set_xticks(everyone, names, rotation=90)
    left.set_yticks(everyone, names)
    left.set(xlabel="keys of", ylabel="query of")
    for i in np.arange(len(names) + 1) - 0.5:
        left.axhline(i, color="#d9d9d9", linewidth=0.6)
        left.axvline(i, color="#d9d9d9", linewidth=0.6)
    right.barh(everyone, probability, height=0.72, color=pale.BLUE, edgecolor=GRAY)
    right.set_ylim(left.get_ylim())
    right.set_yticks(everyone, names)
    right.tick_params(axis="y", length=0, pad=1)
    right.grid(visible=False, axis="y")
    right.set(xlim=(0, 1), title="recall", xlabel="probability\nof the verb")
    right.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    return figure


@drawing
def who_sees_whom(
    moved: Mapping[str, ArrayLike], floor: float = 0.01, borders: Sequence[int] = ()
) -> BookFigure:
    """For each name, how far each output (row) moves when one token (column) is changed.

    One logarithmic scale for all, without color up to floor; a line runs above the diagonal, and
    dashed ones before the tokens in borders.
    """
    figure, (panels,) = new_figure(len(moved), width=6.2, height=2.9)
    shown = {name: np.maximum(np.asarray(matrix), floor) for name, matrix in moved.items()}
    top = max(float(matrix.max()) for matrix in shown.values())
    for axes, (name, matrix) in zip(panels, shown.items(), strict=True):
        decades, limit = np.log10(matrix / floor), float(np.log10(top / floor))
        draw_matrix(axes, decades, title=name, numbers=False, limit=limit)
        corners = np.arange(len(matrix) + 1) - 0.5
        axes.step(corners, corners, where="post", color=VERMILION, linewidth=2)
        for border in borders:
            axes.axhline(border - 0.5, color=INK, linestyle="--", linewidth=1.4)
            axes.axvline(border - 0.5, color=INK, linestyle="--", linewidth=1.4)
        axes.set(xlabel="changed token", ylabel="output")
    bar = figure.colorbar(panels[-1].images[0], ax=list(panels), shrink=0.8, aspect=16)
    ticks = [floor * 10**i for i in range(int(limit) + 1)]
    bar.set_ticks(range(len(ticks)), labels=[f"{tick:g}" for tick in ticks])
    bar.outline.set_visible(False)
    return figure


def _line(axes: Axes, start, end, color: str, head: bool = False, zorder: int = 4) -> None:
    style = {"arrowstyle": "-|>" if head else "-", "linewidth": 1.6}
    arrow(axes, start, end, color, gap=0, zorder=zorder, **style)


def _box(axes: Axes, x, y, text: str, fill: str, width: float = 1.1, height: float = 0.6) -> None:
    """A box with its center at (x, y)."""
    rectangle(axes, x - width / 2, y - height / 2, width, height, fill, zorder=4)
    write(axes, x, y, text, zorder=5)


def _plus(axes: Axes, x: float, y: float) -> None:
    axes.add_patch(Circle((x, y), 0.26, fc="white", ec=INK, zorder=5))
    write(axes, x, y, "$+$", zorder=6)


def _cells(axes: Axes, x: float, y: float, values: ArrayLike, fill: str, new: bool) -> None:
    """A matrix with its upper left corner at (x, y), in a frame if it is new."""
    values = np.atleast_2d(values)
    for (i, j), value in np.ndenumerate(values):
        rectangle(axes, x + j, y + i, 1, 1, fill, linewidth=0.6)
        size = 11 if abs(value) < 100 else 9.5
        write(axes, x + j + 0.5, y + i + 0.5, f"{value:g}", fontsize=size)
    if new:
        rows, columns = values.shape
        rectangle(axes, x, y, columns, rows, "none", INK, linewidth=2, zorder=3)
