"""Decoding in three ways: counts as in lesson_code.costs, outputs as in lesson_code.numpy."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code import costs
from lesson_code.numpy import linear_attention, relu
from tests.explorables.conftest import as_number

KEYS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
RECOMPUTE, CACHE, STATE = range(3)
WAYS = "recompute", "cache", "state"


@pytest.fixture(scope="module")
def decoding(explore):
    return explore("fig-three-ways")


def go_to(decoding, t: int, D: int) -> None:
    decoding.slide("t", t)
    decoding.slide("D", D)


def areas(decoding) -> dict[tuple[str, bool], float]:
    """What all blocks of a color cover, those that are made now and those that are kept."""
    area: dict[tuple[str, bool], float] = {}
    for block in (
        decoding.part("cells").locator("rect.lit").all()[2:-2]
    ):  # token before, legend after
        width, height = (float(block.get_attribute(x)) for x in ("width", "height"))
        color, pale = (
            block.get_attribute("class").split()[0],
            "pale" in block.get_attribute("class"),
        )
        area[color, pale] = area.get((color, pale), 0) + width * height
    return area


def steps_so_far(t: int, D: int) -> list[int]:
    return [
        sum(costs.quadratic_operations(i, D, D).total for i in range(1, t + 1)),
        sum(costs.cached_step_operations(i, D, D) for i in range(1, t + 1)),
        costs.linear_operations(t, D, D).total,
    ]


def test_it_starts_where_the_state_soon_wins(decoding) -> None:
    assert decoding.part("t").input_value() == "1"
    cache, state = costs.kv_cache_entries(1, 8, 8), costs.state_entries(8, 8, normalizer=True)
    assert decoding.matrix("counts")[2] == [0, cache, state]
    go_to(decoding, 3, 2)
    assert decoding.matrix("counts")[2] == [0, 12, 6]  # what a chapter prints for t = 3


@pytest.mark.parametrize(
    "t, D",
    [(1, 2), (3, 2), (100, 2), (100, 64), (1, 64), (32, 64), (65, 64), (66, 64), (7, 8), (21, 16)],
)
def test_the_counts_are_those_of_the_package(decoding, t: int, D: int) -> None:
    go_to(decoding, t, D)
    cache, s = costs.kv_cache_entries(t, D, D), costs.state_entries(D, D, normalizer=True)
    one = costs.kv_cache_entries(1, D, D)
    step = [
        costs.quadratic_operations(t, D, D).total,
        costs.cached_step_operations(t, D, D),
        costs.linear_operations(1, D, D).total,
    ]
    reads, writes, keeps, operations, so_far = decoding.matrix("counts")
    assert reads == [t, cache, s]
    assert writes == [cache, one, s]
    assert keeps == [0, cache, s]
    assert operations == step
    assert so_far == steps_so_far(t, D)
    said = decoding.said()
    assert ("smaller" in said) == (cache < s)
    assert ("dearer to read" in said) == (cache >= s and step[CACHE] > step[STATE])


@pytest.mark.parametrize("D", [2, 4, 8, 16, 32, 64])
def test_where_the_cache_passes_the_state(decoding, D: int) -> None:
    decoding.slide("D", D)
    assert decoding.number("passes-S") == costs.cache_passes_state(D, D)
    s = costs.state_entries(D, D, normalizer=True)
    first = next(t for t in range(1, 200) if costs.kv_cache_entries(t, D, D) >= s)
    assert decoding.number("passes-Sz") == first
    assert decoding.number("passes-operations") == costs.crossover(D, D)


@pytest.mark.parametrize("t", [1, 2, 5, 12, 100])
def test_all_ways_give_the_output_of_the_package(decoding, t: int) -> None:
    go_to(decoding, t, 2)
    k, v = (np.resize(x, (t, 2)) for x in (KEYS, VALUES))
    expected = linear_attention(k, k, v, feature_map=relu, causal=True)[-1]
    for way in WAYS:
        shown = [row[WAYS.index(way)] for row in decoding.matrix("outputs")]
        assert shown == pytest.approx(expected, abs=0.0501)


def test_buttons_stop_at_both_ends(decoding) -> None:
    go_to(decoding, 1, 2)
    decoding.keys("t-back", "Enter")
    assert decoding.part("t-back").get_attribute("aria-disabled") == "true"
    assert decoding.matrix("counts")[0] == [1, 4, 6]
    decoding.press("t-next", times=2)
    assert decoding.matrix("counts")[0] == [3, 12, 6]
    decoding.slide("t", 100)
    assert decoding.part("t-back").get_attribute("aria-disabled") == "false"
    decoding.keys("t-next", "Enter")
    assert decoding.part("t-next").get_attribute("aria-disabled") == "true"
    assert decoding.matrix("counts")[0] == [100, 400, 6]


def test_blocks_are_to_one_scale(decoding) -> None:
    go_to(decoding, 90, 32)
    area = areas(decoding)
    number = area["green", False] / costs.state_entries(32, 32, normalizer=True)
    one, cache = (costs.kv_cache_entries(t, 32, 32) for t in (1, 90))
    assert area["vermilion", False] / number == pytest.approx(cache + one)  # recomputed; one is new
    assert area["blue", True] / number == pytest.approx(cache - one)


def test_the_operations_stand_below_the_piles(decoding) -> None:
    go_to(decoding, 90, 32)
    shown = decoding.part("cells").locator("text.small:not(.quiet)").all_text_contents()[:3]
    assert [as_number(x) for x in shown] == decoding.matrix("counts")[3]


@pytest.mark.parametrize("curve", ["operations of a step", "since token 1", "numbers kept"])
def test_the_curves_stand_where_their_ticks_say(decoding, curve: str) -> None:
    """Positions of the three dots, read off the axis of powers of ten."""
    go_to(decoding, 30, 8)
    decoding.choose("curve", curve)
    digits = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
    drawing = decoding.part("curves")
    ticks = {
        int(tick.inner_html()[2:].translate(digits)): float(tick.get_attribute("y")) - 4
        for tick in drawing.locator("text.end").all()
    }
    (low, y_low), *_, (high, y_high) = sorted(ticks.items())
    shown = [
        10 ** (low + (float(dot.get_attribute("cy")) - y_low) * (high - low) / (y_high - y_low))
        for dot in drawing.locator("circle").all()
    ]
    expected = {
        "operations of a step": [
            costs.quadratic_operations(30, 8, 8).total,
            costs.cached_step_operations(30, 8, 8),
            costs.linear_operations(1, 8, 8).total,
        ],
        "since token 1": steps_so_far(30, 8),
        "numbers kept": [
            0,
            costs.kv_cache_entries(30, 8, 8),
            costs.state_entries(8, 8, normalizer=True),
        ],
    }[curve]
    for way in (CACHE, STATE) if curve == "numbers kept" else (RECOMPUTE, CACHE, STATE):
        assert shown[way] == pytest.approx(expected[way], rel=1e-6)
