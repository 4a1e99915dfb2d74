"""Colors, and what tells lines and cells apart beside them.

The colors are those of Okabe and Ito (2008), which stay apart in color-blind vision; lines also
differ in dash and marker, so that they stay apart in print.
"""

from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
)
INK, GRAY = "#222222", "#6b6b6b"
COLORS = (BLUE, VERMILION, GREEN, PINK, SKY, ORANGE)
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P")

LOOKS = [
    *zip(COLORS, DASHES, MARKERS, strict=True),
    (INK, "-", "X"),
    (GRAY, "--", "*"),
    ("#8a3800", (0, (4, 1, 1, 1)), "h"),
]

POSITIVE = LinearSegmentedColormap.from_list("positive", ["#ffffff", "#9ecae8", BLUE, "#023858"])
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#8a3800", VERMILION, "#ffffff", BLUE, "#023858"]
)


def look(index: int, **changed) -> dict[str, Any]:
    """Color, dashes and marker of a line: those that no other line of the figure has."""
    color, dashes, marker = LOOKS[index % len(LOOKS)]
    return {"color": color, "linestyle": dashes, "marker": marker, **changed}


def luminance(rgba) -> float:
    """Relative luminance of a color, on which the contrast of a text with its ground depends."""
    rgb = np.array(rgba[:3])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
