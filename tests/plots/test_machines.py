"""The figures of a sequence over ranks: what they draw is what they are given."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.text import Annotation, Text

from lesson_code import costs
from lesson_code.plots import machines
from lesson_code.plots.style import BLUE, PALE_BLUE, PALE_GREEN, PALE_VERMILION

WRITES = [np.array([[10, 20], [0, 0]]), np.array([[0, 0], [30, 40]]), np.array([[50, 60]] * 2)]
OUTPUTS = [[10, 20], [30, 40], [140, 180]]
MODEL = {"latency": 1e-4, "bandwidth": 1e9}


def measured() -> list[dict]:
    rows = []
    for ranks, heads in itertools.product((2, 3, 4), (1, 4, 16, 64, 256)):
        predicted = costs.exchange_seconds(ranks, 64, 64, heads=heads, **MODEL)
        rows.append(
            {
                "ranks": ranks,
                "bytes": costs.state_exchange_bytes(ranks, 64, 64, heads=heads),
                "predicted": predicted,
                "seconds": predicted * (1.3 if heads % 3 == 1 else 0.8),
                "fitted": ranks == 2 and heads != 4,
            }
        )
    return rows


TIMES = {"one": 0.98, "two": 0.0077, "three": 0.00062, "four": 21_500.0}
FIGURES = {
    "states_that_travel": lambda: machines.states_that_travel(WRITES, OUTPUTS),
    "timeline": lambda: machines.timeline([2.4, 4.6, 3.3]),
    "prediction": lambda: machines.prediction(measured()),
    "durations": lambda: machines.durations(TIMES),
}


@functools.cache
def figure_of(name: str):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    return figure


def texts(figure) -> list[Text]:
    """The texts that are seen."""
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


def boxes(figure, color) -> list[Rectangle]:
    found = (patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle))
    return [patch for patch in found if same_color(patch.get_facecolor()[:3], color)]


def arrows(figure, color) -> list[Annotation]:
    notes = (text for text in figure.axes[0].texts if isinstance(text, Annotation))
    return [
        note
        for note in notes
        if isinstance(note.arrow_patch, FancyArrowPatch)
        and same_color(note.arrow_patch.get_edgecolor()[:3], color)
    ]


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_figure_is_the_same_bytes(name: str) -> None:
    assert FIGURES[name]()._repr_svg_() == FIGURES[name]()._repr_svg_()


@pytest.mark.parametrize("name", FIGURES)
def test_a_phone_can_show_it(name: str) -> None:
    figure = figure_of(name)
    assert figure.get_figwidth() <= 6.4
    smallest = min(text.get_fontsize() for text in texts(figure))
    assert smallest * 350 / (figure.get_figwidth() * 72) > 7


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_covers_another(name: str) -> None:
    found = [
        (text.get_text(), text.get_window_extent().padded(-1)) for text in texts(figure_of(name))
    ]
    for (a, box), (b, other) in itertools.combinations(found, 2):
        assert not box.overlaps(other), (a, b)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_has_the_sum_of_what_reaches_it(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    writes = list(rng.integers(1, 90, (ranks, 2, 3)))
    figure = machines.states_that_travel(writes, list(rng.integers(1, 90, (ranks, 3))))
    numbers = {
        tuple(np.round(text.get_position(), 3)): float(text.get_text())
        for text in figure.axes[0].texts
        if text.get_text().isdigit()
    }
    before = [
        numbers[tuple(np.round((box.get_x() + 0.5, box.get_y() + 0.5), 3))]
        for box in boxes(figure, PALE_BLUE)
    ]
    expected = np.cumsum([np.zeros((2, 3)), *writes[:-1]], axis=0)
    assert before == expected.ravel().tolist()
    assert len(boxes(figure, PALE_VERMILION)) == 6 * ranks
    assert len(boxes(figure, PALE_GREEN)) == 3 * ranks
    assert len(arrows(figure, BLUE)) == ranks * (ranks - 1) // 2


def test_a_fold_begins_when_both_the_inside_and_the_states_are_there() -> None:
    inside = [1.0, 6.0, 2.5]
    figure = machines.timeline(inside)
    states, folds = boxes(figure, PALE_BLUE), boxes(figure, PALE_GREEN)
    works = [box for box in boxes(figure, "white") if box.get_width() in inside]
    assert [box.get_width() for box in works] == inside
    for work, state, fold in zip(works, states, folds, strict=True):
        assert work.get_x() == state.get_x()  # nothing waits before it
        ends = (box.get_x() + box.get_width() for box in (work, state))
        assert fold.get_x() == max(ends)


def test_lines_are_predictions_and_marks_are_measured() -> None:
    figure, rows = machines.prediction(measured()), measured()
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    marks = [line for line in figure.axes[0].get_lines() if line.get_label() == "_"]
    found = {
        (float(mark.get_xdata()[0]), float(mark.get_ydata()[0])): mark.get_markerfacecolor()
        for mark in marks
    }
    for row in rows:
        assert (found[row["bytes"], 1e3 * row["seconds"]] != "white") == row["fitted"]
    for ranks in (2, 3, 4):
        own = [row for row in rows if row["ranks"] == ranks]
        line = lines[f"{ranks} ranks"]
        assert list(line.get_xdata()) == [row["bytes"] for row in own]
        assert list(line.get_ydata()) == [1e3 * row["predicted"] for row in own]
    low, high = figure.axes[0].get_ylim()
    assert all(low < y < high for _, y in found)


def test_bars_end_at_their_times() -> None:
    figure = figure_of("durations")
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(ends, list(TIMES.values()))
    words = {text.get_text() for text in texts(figure)}
    assert {"980 ms", "7.7 ms", "620 µs", "22,000 s", *TIMES} <= words
