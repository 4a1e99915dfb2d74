"""What is seen in a figure."""

from __future__ import annotations

from matplotlib.colors import same_color
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text


def texts(figure) -> list[Text]:
    """The texts that are seen, laid out."""
    figure.draw_without_rendering()
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axes.axison:
                unseen |= set(axis.findobj(Text))
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not low <= tick.get_loc() <= high:
                    unseen |= set(tick.findobj(Text))
    seen = (text for text in figure.findobj(Text) if text.get_text() and text.get_visible())
    return [text for text in seen if text not in unseen]


def words(figure) -> list[str]:
    return [text.get_text() for text in texts(figure)]


def patches(figure, kind: type[Patch] = Rectangle, color=None) -> list:
    found = [patch for axes in figure.axes for patch in axes.patches if type(patch) is kind]
    return [p for p in found if color is None or same_color(p.get_facecolor()[:3], color)]
