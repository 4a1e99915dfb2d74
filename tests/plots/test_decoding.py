"""The figure of decoding: its lines are the rows, and what was not run is seen to be so."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import same_color

from lesson_code.plots import decoding

ROWS = [
    {"N": 10, "seconds": {"cache": 0.1, "state": 0.2}, "bytes": {"cache": 40, "state": 64}},
    {"N": 100, "seconds": {"cache": 1.0, "state": 0.2}, "bytes": {"cache": 400, "state": 64}},
    {"N": 1000, "seconds": {"cache": None, "state": 0.2}, "bytes": {"cache": 4000, "state": 64}},
]


def points(line) -> list[tuple[float, float]]:
    return [tuple(map(float, point)) for point in zip(*line.get_data(), strict=True)]


def test_seconds_end_where_nothing_was_run_and_bytes_go_on() -> None:
    seconds, kept = decoding.contexts(ROWS, ["cache", "state"]).axes
    assert [points(line) for line in seconds.get_lines()] == [
        [(10, 0.1), (100, 1.0)],
        [(10, 0.2), (100, 0.2), (1000, 0.2)],
    ]
    drawn = [line for line in kept.get_lines() if line.get_linestyle() != "None"]
    assert [points(line) for line in drawn] == [
        [(10, 40), (100, 400), (1000, 4000)],
        [(10, 64), (100, 64), (1000, 64)],
    ]


def test_only_the_bytes_of_what_was_not_run_are_hollow() -> None:
    _, kept = decoding.contexts(ROWS, ["cache", "state"]).axes
    markers = [line for line in kept.get_lines() if line.get_linestyle() == "None"]
    hollow = [line for line in markers if same_color(line.get_markerfacecolor(), "white")]
    assert np.concatenate([points(line) for line in hollow if points(line)]).tolist() == [
        [1000, 4000]
    ]
    filled = sum(len(points(line)) for line in markers) - 1
    assert filled == 5


def test_every_line_is_named_once() -> None:
    for axes in decoding.contexts(ROWS, ["state", "cache"]).axes:
        assert [text.get_text() for text in axes.texts] == ["state", "cache"]


def test_readers_who_do_not_fit_are_hollow() -> None:
    (axes,) = decoding.readers(8e6, {"cache": 4e6, "state": 1e6}, {"cache": 2, "state": 6}).axes
    markers = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    cache, beyond, state, nobody = markers
    assert points(cache) == [(1, 12), (2, 8)]
    assert points(beyond) == [(4, 6), (6, 4 + 8 / 6)]
    assert [x for x, _ in points(state)] == [1, 2, 4, 6] and not points(nobody)
    assert same_color(beyond.get_markerfacecolor(), "white")
    assert [text.get_text() for text in axes.texts[:1]] == ["8.0 MB, 2 readers"]
