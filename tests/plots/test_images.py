"""The figures of images made pixel by pixel: what they draw is what they were given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import Rectangle

from lesson_code.plots import images
from lesson_code.plots.colors import VERMILION
from tests.plots.conftest import words

LEVELS = 5
IMAGES = np.arange(64).reshape(4, 16) % LEVELS


def pixels(axes) -> list[Rectangle]:
    return [p for p in axes.patches if isinstance(p, Rectangle) and p.get_facecolor()[3] > 0]


def test_raster_shows_the_known_pixels_alone_in_order():
    figure = images.raster(IMAGES[1], 6, LEVELS)
    for axes in figure.axes:
        drawn = pixels(axes)
        assert len(drawn) == 16
        for patch, level in zip(drawn[:6], IMAGES[1], strict=False):
            assert same_color(patch.get_facecolor(), (1 - level / 4,) * 3)
        assert all(same_color(patch.get_facecolor(), images.HIDDEN) for patch in drawn[7:])
        (frame,) = (p for p in axes.patches if same_color(p.get_edgecolor(), VERMILION))
        assert frame.get_xy() == drawn[6].get_xy()
    corners = [patch.get_xy() for patch in pixels(figure.axes[0])]
    assert corners == sorted(corners, key=lambda corner: (corner[1], corner[0]))


def test_bins_are_the_area_under_the_density():
    edges = np.arange(LEVELS - 1) + 0.5
    weights, means, scales = np.array([0.3, 0.7]), np.array([1.0, 3.5]), np.array([0.4, 0.6])
    below = 1 / (1 + np.exp(-(edges[:, None] - means) / scales)) @ weights
    probabilities = np.diff(below, prepend=0, append=1)
    density, mass = images.bins(weights, means, scales, probabilities).axes
    assert np.allclose([patch.get_height() for patch in mass.patches], probabilities)
    x, total = next(line for line in density.get_lines() if len(line.get_xdata()) > 2).get_data()
    lines = [line.get_data() for line in density.get_lines() if len(line.get_xdata()) > 2]
    assert len(lines) == 3
    x, total = lines[-1]
    assert np.allclose(total, sum(y for _, y in lines[:-1]))
    for level in (1, 2, 3):
        inside = (x >= level - 0.5) & (x <= level + 0.5)
        area = np.trapezoid(total[inside], x[inside])
        assert area == pytest.approx(probabilities[level], abs=0.02)


def test_a_gallery_has_every_image_under_its_name():
    figure = images.gallery({"one": IMAGES[:3], "other": IMAGES}, LEVELS)
    shown = [np.asarray(axes.images[0].get_array()).ravel() for axes in figure.axes if axes.images]
    assert np.array_equal(shown, [*IMAGES[:3], *IMAGES])
    assert {"one", "other"} <= set(words(figure))


def test_completions_hide_what_was_not_given():
    figure = images.completions(IMAGES[:2], [IMAGES[1:], IMAGES[1:]], 8, LEVELS)
    assert len(figure.axes) == 2 * 5
    for row in range(2):
        original, given, *made = (axes.images[0].get_array() for axes in figure.axes[5 * row :][:5])
        assert np.array_equal(np.asarray(original).ravel(), IMAGES[row])
        assert np.array_equal(given.mask.ravel(), np.arange(16) >= 8)
        assert np.array_equal(given.compressed(), IMAGES[row, :8])
        assert np.array_equal([np.asarray(image).ravel() for image in made], IMAGES[1:])


def test_distances_are_shares_with_their_median():
    figure = images.distances({"near": [0.2, 0.4, 1.5, 1.6], "far": [7.5, 8.5, 9.9]}, xlabel="d")
    near, far = figure.axes
    assert [patch.get_height() for patch in near.patches][:3] == [0.5, 0.5, 0]
    assert sum(patch.get_height() for patch in far.patches) == pytest.approx(1)
    (line,) = far.get_lines()
    assert set(line.get_xdata()) == {8.5}
    assert {"near", "far", "0.9", "8.5", "d"} <= set(words(figure))


def test_gains_have_their_points_in_the_color_of_the_line():
    lines = {"a": [10, 40], "b": [1, 2]}
    points = {"here": {"b": {64: 3.0}}, "there": {"a": {16: 1234.4}}}
    figure = images.gains([16, 64], {"here": lines, "there": lines}, points)
    for axes, (name, pixels, factor) in zip(
        figure.axes, [("b", 64, 3.0), ("a", 16, 1234.4)], strict=True
    ):
        drawn = {line.get_label(): line for line in axes.get_lines()}
        assert all(np.array_equal(drawn[key].get_ydata(), y) for key, y in lines.items())
        (point,) = (line for line in axes.get_lines() if line.get_marker() == "o")
        assert (point.get_xdata()[0], point.get_ydata()[0]) == (pixels, factor)
        assert same_color(point.get_color(), drawn[name].get_color())
    assert {"3", "1,234", "here", "there", "a", "b"} <= set(words(figure))
