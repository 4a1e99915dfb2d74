"""The figures of what a state can hold draw what they are given."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from lesson_code.plots import recall

WEIGHTS = np.tril(np.arange(1.0, 17.0).reshape(4, 4))
TOKENS = np.array([7, 8, 9, 7])
MASK = np.array([False, True, False, True])
PAIRS = [4, 8, 16]
RUNS = {"one": [[1.0, 0.5, 0.2], [0.8, 0.7, 0.0]], "two": [[0.9, 0.9, 0.9]]}

FIGURES = {
    "overflow": lambda: recall.overflow({"a": np.eye(4, dtype=bool), "b": WEIGHTS > 2}, 2),
    "lookups": lambda: recall.lookups({"a": (WEIGHTS / 16, TOKENS, MASK)}),
    "blocks": lambda: recall.blocks({"a": WEIGHTS, "b": WEIGHTS.T}, 1),
    "spread": lambda: recall.spread(PAIRS, RUNS, xlabel="pairs", chance=0.1),
    "groups": lambda: recall.groups(
        PAIRS,
        {"first": {"one": RUNS["one"]}, "second": {"two": RUNS["two"]}},
        law=[1.0, 0.5, 0.1],
        xlabel="pairs",
    ),
    "against_law": lambda: recall.against_law(
        [2, 1, 2], [0.1, 0.9, 0.3], {"a": {"512": ([1, 2], [0.8, 0.2])}}
    ),
    "sizes": lambda: recall.sizes(
        {"a": {"512": [0.2, 0.4], "1,024": [0.7]}, "b": {"512": [0.1], "1,024": [0.5, 0.2, 0.8]}},
        {"512": 0.5, "1,024": 0.8},
        xlabel="share right",
    ),
}


def test_overflow_shows_the_pairs_that_are_written() -> None:
    one, other = FIGURES["overflow"]().axes
    np.testing.assert_array_equal(
        one.images[0].get_array()[np.tri(4, dtype=bool)], np.eye(4)[np.tri(4, dtype=bool)]
    )
    assert one.images[0].get_array().mask.sum() == 6  # pairs to come
    assert one.get_title(loc="left") == "a: 1 of 4" and other.get_title(loc="left") == "b: 4 of 4"
    assert set(one.lines[0].get_ydata()) == {2.5}


def test_lookups_show_the_rows_that_are_asked() -> None:
    (axes,) = FIGURES["lookups"]().axes
    np.testing.assert_array_equal(axes.images[0].get_array(), WEIGHTS[MASK] / 16)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["7", "8", "9", "7"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["8", "7"]


def test_lookups_are_drawn_to_one_scale() -> None:
    wide = np.eye(8)
    panels = {"a": (WEIGHTS / 16, TOKENS, MASK), "b": (wide, np.arange(8), np.ones(8, bool))}
    figure = recall.lookups(panels)
    small, large = (axes.get_window_extent() for axes in figure.axes)
    assert large.width == pytest.approx(2 * small.width)
    assert large.height == pytest.approx(4 * small.height)
    assert large.y1 < small.y0  # one below the other


def test_blocks_frame_what_later_rows_read_before_the_cut() -> None:
    figure = recall.blocks({"a": WEIGHTS}, 1)
    (axes,) = figure.axes
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (-0.5, 0.5, 1, 3)
    shown = axes.images[0]
    assert shown.get_clim()[1] == 13  # the largest entry of rows 1, 2, 3 and column 0
    np.testing.assert_array_equal(shown.get_array().mask, np.triu(np.ones((4, 4), bool), 1))


def test_spread_draws_means_and_extremes() -> None:
    figure = FIGURES["spread"]()
    (axes,) = figure.axes
    one, two = axes.get_lines()[:2]
    np.testing.assert_allclose(one.get_ydata(), [0.9, 0.6, 0.1])
    np.testing.assert_allclose(two.get_ydata(), [0.9, 0.9, 0.9])
    np.testing.assert_array_equal(one.get_xdata(), PAIRS)
    bars = axes.collections[0].get_segments()
    np.testing.assert_allclose([bar[:, 1] for bar in bars], [[0.8, 1], [0.5, 0.7], [0, 0.2]])
    names = {text.get_text() for text in axes.texts}
    assert {"one", "two", "chance"} <= names


def test_nine_lines_differ_in_color_or_in_dashes() -> None:
    runs = {str(i): [[i / 10] * 3] for i in range(9)}
    (axes,) = recall.spread(PAIRS, runs, xlabel="pairs").axes
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == 9


def test_groups_draw_all_lines_in_each_panel_and_name_their_own() -> None:
    for axes, name in zip(FIGURES["groups"]().axes, RUNS, strict=True):
        *gray, law, own = axes.get_lines()
        np.testing.assert_allclose(
            [line.get_ydata() for line in gray], [[0.9, 0.6, 0.1], [0.9] * 3]
        )
        np.testing.assert_allclose(law.get_ydata(), [1, 0.5, 0.1])
        np.testing.assert_allclose(own.get_ydata(), np.mean(RUNS[name], axis=0))
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [name]


def test_the_law_is_a_line_through_its_means() -> None:
    (axes,) = FIGURES["against_law"]().axes
    law, points = axes.get_lines()
    np.testing.assert_allclose(law.get_xydata(), [[1, 0.9], [2, 0.2]])
    np.testing.assert_array_equal(points.get_xydata(), [[1, 0.8], [2, 0.2]])
    assert points.get_linestyle() == "None"


def test_sizes_draw_a_mean_on_a_line_over_all_runs_of_each() -> None:
    figure = FIGURES["sizes"]()
    (axes,) = figure.axes
    found = [np.ravel(line.get_xdata()) for line in axes.get_lines()]
    law_512, *small, law_1024 = found[:6]
    np.testing.assert_allclose([*law_512, *law_1024], [0.5, 0.5, 0.8, 0.8])
    np.testing.assert_allclose(np.concatenate(small), [0.2, 0.4, 0.3, 0.1, 0.1, 0.1])
    np.testing.assert_allclose(np.concatenate(found[6:]), [0.7, 0.7, 0.7, 0.2, 0.8, 0.5])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row on top
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["512", "1,024"]
