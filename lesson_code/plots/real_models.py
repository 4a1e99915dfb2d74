"""Figures of models that are published: which layers remember how, and one layer from inside."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from lesson_code.plots import pale
from lesson_code.plots.cells import box, rectangle, way, write
from lesson_code.plots.colors import BLUE, GRAY, INK
from lesson_code.plots.lines import beside
from lesson_code.plots.style import BookFigure, drawing, new_figure

STATE, CACHE = "S", "C"  # any other letter is a layer without memory


@drawing
def hybrids(models: Mapping[str, str]) -> BookFigure:
    """The layers of models from the first to the last: low boxes have a state, tall ones a cache.

    Each model is a text with a letter for each layer: S has a state, C a cache, others neither.
    Below its name stands how many there are of each.
    """
    figure, ((axes,),) = new_figure(height=0.62 * len(models) + 0.5)
    axes.set_axis_off()
    longest = max(map(len, models.values()))
    for row, (name, layers) in enumerate(models.items()):
        counts = f"{layers.count(STATE)} states, {layers.count(CACHE)} caches"
        write(axes, -1.2, row + 0.35, name, ha="right")
        write(axes, -1.2, row + 0.7, counts, ha="right", fontsize=10, color=GRAY)
        for i, layer in enumerate(layers):
            if layer == STATE:
                rectangle(axes, i, row + 0.55, 0.9, 0.3, pale.BLUE, edge=BLUE, linewidth=0.6)
            elif layer == CACHE:
                rectangle(axes, i, row + 0.1, 0.9, 0.75, INK, edge=INK, linewidth=0.6)
            else:
                axes.plot([i + 0.1, i + 0.8], [row + 0.85] * 2, color=GRAY, linewidth=1)
    tall = next(iter(models.values())).index(CACHE)
    axes.plot([tall + 0.45] * 2, [-0.02, 0.1], color=INK, linewidth=1)
    write(axes, tall + 0.45, -0.13, "cache", ha="left", fontsize=10)
    write(axes, -0.2, len(models) - 0.65, "state", ha="left", fontsize=10)
    axes.set(xlim=(-0.42 * longest, longest), ylim=(len(models), -0.3))
    return figure


@drawing
def layer() -> BookFigure:
    """A gated delta layer, from x at the bottom to y: the tensors of the file in the boxes."""
    figure, ((axes,),) = new_figure(height=4.7)
    axes.set_axis_off()
    axes.set(xlim=(0, 12), ylim=(0, 9.9))
    q, gates, z = 3.0, 7.4, 10.6  # the columns: what is stored and read, rates, output gate
    write(axes, 6.0, 0.25, "$x_t$")
    for middle, text, width in ((q, "in_proj_qkvz", 4.2), (gates, "in_proj_ba", 2.8)):
        _part(axes, middle, 1.75, text, width)
        way(axes, (6.0, 0.5), (6.0, 0.85), (middle, 0.85), (middle, 1.4))
    way(axes, (q + 1.5, 2.1), (q + 1.5, 2.75), (z, 2.75), (z, 6.7))
    way(axes, (z, 7.4), (z, 8.0))
    write(axes, z + 0.15, 5.3, "$z_t$", ha="left")
    way(axes, (q, 2.1), (q, 3.2))
    _part(axes, q, 3.55, "conv1d, SiLU", 4.2)
    for x, text in ((q - 1.3, "$q_t$"), (q, "$k_t$"), (q + 1.3, "$v_t$")):
        way(axes, (x, 3.9), (x, 4.7 if x <= q else 6.0))
        write(axes, x - 0.15, 4.3, text, ha="right")
    box(axes, q - 2.1, 4.7, 2.5, 0.7, "length 1", pale.GRAY, fontsize=10)
    for x in (q - 1.3, q):
        way(axes, (x, 5.4), (x, 6.0))
    write(axes, q - 1.45, 5.72, r"$\div\sqrt{D}$", ha="right", fontsize=10)
    _part(axes, gates, 3.55, "A_log, dt_bias", 2.8)
    way(axes, (gates - 0.6, 2.1), (gates - 0.6, 3.2))
    write(axes, gates - 0.75, 2.45, "$a_t$", ha="right")
    way(axes, (gates - 0.6, 3.9), (gates - 0.6, 5.5), (6.4, 5.5), (6.4, 6.0))
    write(axes, gates - 0.75, 4.5, r"$\alpha_t$", ha="right")
    corner = gates + 1.75
    way(axes, (gates + 1.2, 2.1), (gates + 1.2, 2.4), (corner, 2.4), (corner, 6.6), (6.95, 6.6))
    write(axes, gates + 1.6, 4.5, r"$\beta_t=\sigma(b_t)$", ha="right", fontsize=10)
    rectangle(axes, 0.9, 6.0, 6.0, 1.2, pale.BLUE, edge=BLUE, linewidth=1.6)
    write(axes, 3.9, 6.82, r"$S_t$, one $D \times M$ matrix a head")
    write(axes, 3.9, 6.34, "made while reading, in no file", fontsize=10)
    way(axes, (3.9, 7.2), (3.9, 8.0))
    write(axes, 3.75, 7.6, "$o_t$", ha="right")
    _part(axes, 3.9, 8.35, "norm", 2.4)
    way(axes, (5.1, 8.35), (z - 0.35, 8.35))
    axes.plot([z], [8.35], "o", markersize=17, mfc="white", mec=INK, zorder=5)
    write(axes, z, 8.35, "×", zorder=6)
    box(axes, z - 0.8, 6.7, 1.6, 0.7, "SiLU", pale.GRAY, fontsize=10)
    way(axes, (z, 8.7), (z, 9.3), (7.2, 9.3))
    _part(axes, 5.9, 9.3, "out_proj", 2.6)
    way(axes, (4.6, 9.3), (3.4, 9.3))
    write(axes, 3.1, 9.3, "$y_t$")
    return figure


def _part(axes: Axes, middle: float, y: float, text: str, width: float) -> None:
    """A box with tensors of the file."""
    fill = pale.YELLOW
    box(axes, middle - width / 2, y - 0.35, width, 0.7, text, fill, family="monospace", fontsize=10)


@drawing
def speeds(rows: Sequence[Mapping]) -> BookFigure:
    """How many times as fast each model runs on these operators as by the library, by task.

    Each row has `model`, `task`, `tokens` and `seconds`, a mapping of "library" and "here". What
    gains at least a tenth is a filled mark, all else a hollow one.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, ((axes,),) = new_figure(height=0.3 * (len(rows) + len(tasks)) + 0.9)
    y, places, names = 0.0, [], []
    for task in tasks:
        beside(
            axes,
            task,
            (0, y),
            (-4, 0),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontweight="bold",
        )
        for row in (row for row in rows if row["task"] == task):
            y += 1
            gain = row["seconds"]["library"] / row["seconds"]["here"]
            filled = BLUE if gain >= 1.1 else "white"
            axes.plot([1, gain], [y, y], color=BLUE)
            axes.plot(gain, y, "o", color=BLUE, mfc=filled, markersize=8)
            side = 1 if gain >= 1 else -1
            beside(
                axes,
                f"{gain:.2f}",
                (gain, y),
                (8 * side, 0),
                va="center",
                ha="left" if side > 0 else "right",
            )
            places.append(y)
            names.append(row["model"])
        y += 1
    axes.axvline(1, color=GRAY, linewidth=1.2, zorder=0)
    axes.set_yticks(places, names)
    axes.set(xscale="log", xlim=(0.6, 5), ylim=(y - 0.3, -0.6))
    axes.set_xticks([0.7, 1, 2, 3, 4], ["0.7", "1", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the library's own operators")
    axes.grid(visible=False, axis="y")
    return figure
