"""The figures of a sequence over ranks: what they draw is what they are given."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Annotation

from lesson_code import costs
from lesson_code.plots import machines, pale
from lesson_code.plots.colors import BLUE
from tests.plots.conftest import patches, words

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


def arrows(figure, color) -> list[Annotation]:
    notes = (text for text in figure.axes[0].texts if isinstance(text, Annotation))
    return [
        note
        for note in notes
        if isinstance(note.arrow_patch, FancyArrowPatch)
        and same_color(note.arrow_patch.get_edgecolor()[:3], color)
    ]


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
        for box in patches(figure, color=pale.BLUE)
    ]
    expected = np.cumsum([np.zeros((2, 3)), *writes[:-1]], axis=0)
    assert before == expected.ravel().tolist()
    assert len(patches(figure, color=pale.VERMILION)) == 6 * ranks
    assert len(patches(figure, color=pale.GREEN)) == 3 * ranks
    assert len(arrows(figure, BLUE)) == ranks * (ranks - 1) // 2


def test_a_fold_begins_when_both_the_inside_and_the_states_are_there() -> None:
    inside = [1.0, 6.0, 2.5]
    figure = machines.timeline(inside)
    states, folds = patches(figure, color=pale.BLUE), patches(figure, color=pale.GREEN)
    works = [box for box in patches(figure, color="white") if box.get_width() in inside]
    assert [box.get_width() for box in works] == inside
    for work, state in zip(works, states, strict=True):
        assert work.get_x() == state.get_x()  # nothing waits before it
    for work, state, fold in zip(works[1:], states[1:], folds, strict=True):  # rank 0 has no fold
        ends = (box.get_x() + box.get_width() for box in (work, state))
        assert fold.get_x() == max(ends)
    assert folds[0].get_width() < folds[1].get_width()  # more states to fold


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
    figure = machines.durations(TIMES)
    ends = [bar.get_x() + bar.get_width() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(ends, list(TIMES.values()))
    assert {"980 ms", "7.7 ms", "620 µs", "22,000 s", *TIMES} <= set(words(figure))
