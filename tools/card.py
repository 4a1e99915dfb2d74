"""Draws the picture that networks and chats show beside a link to the book.

python tools/card.py            writes book/_static/card.png
python tools/card.py FILE       writes another file
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from lesson_code.numpy import attention_weights, linear_attention

BLUE, INK, PAPER = "#0072b2", "#1a1a1a", "#ffffff"
PIXELS = (1200, 630)


def blues() -> LinearSegmentedColormap:
    """From the paper to the book's blue."""
    return LinearSegmentedColormap.from_list("blues", ["#e3edf4", BLUE, "#003a5c"])


def draw() -> Figure:
    """Weights of softmax attention, and the state of linear attention on the same tokens."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 26, 4))
    weights = attention_weights(2 * q, k, causal=True)
    weights[np.triu_indices(len(weights), 1)] = np.nan
    _, (S, _) = linear_attention(q, k, v, causal=True, return_state=True)

    figure = Figure(figsize=(PIXELS[0] / 100, PIXELS[1] / 100), dpi=100, facecolor=PAPER)
    figure.text(0.06, 0.79, "Linear attention", size=60, weight="bold", color=INK)
    figure.text(0.06, 0.69, "From the softmax matrix to a state", size=31, color=INK)

    def square(left: float, bottom: float, width: float, values: np.ndarray, most: float) -> None:
        axes = figure.add_axes((left, bottom, width, width * PIXELS[0] / PIXELS[1]))
        axes.pcolormesh(
            values[::-1], cmap=blues(), vmin=0, vmax=most, edgecolors=PAPER, linewidth=1.2
        )
        axes.set_aspect("equal")
        axes.axis("off")

    square(0.06, 0.07, 0.285, weights, 0.6)
    square(0.53, 0.222, 0.125, np.abs(S), float(np.abs(S).max()))
    arrow = {"arrowstyle": "-|>", "mutation_scale": 34, "lw": 4, "color": INK}
    figure.add_artist(FancyArrowPatch((0.38, 0.34), (0.50, 0.34), **arrow))
    math = {"size": 40, "color": INK, "va": "center"}
    figure.text(0.70, 0.45, r"$(QK^{\!\top\!})\,V$", **math)
    figure.text(0.70, 0.34, r"$=$", **math)
    figure.text(0.70, 0.23, r"$Q\,(K^{\!\top\!}V\,)$", **math)
    return figure


def main() -> None:
    default = Path(__file__).parent.parent / "book" / "_static" / "card.png"
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    with matplotlib.rc_context({"mathtext.fontset": "cm", "font.family": "DejaVu Sans"}):
        draw().savefig(output, metadata={"Software": None})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
