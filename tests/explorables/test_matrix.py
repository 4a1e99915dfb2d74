"""Both orders of brackets: what is shown is what lesson_code.costs counts."""

from __future__ import annotations

import pytest

from lesson_code import costs
from tests.explorables.conftest import NARROW
from tests.explorables.test_all import FAULTS


@pytest.fixture(scope="module")
def matrix(explore):
    return explore("fig-two-brackets")


@pytest.mark.parametrize("N, D", [(512, 64), (8, 256), (128, 128), (1_048_576, 4)])
def test_the_counts_are_those_of_the_package(matrix, N: int, D: int) -> None:
    matrix.slide("N", f"{N:,}")
    matrix.slide("D", D)
    assert matrix.number("quadratic-middle") == costs.attention_matrix_entries(N)
    assert matrix.number("linear-middle") == costs.state_entries(D, D)
    assert matrix.number("quadratic-operations") == costs.quadratic_operations(N, D, D).total
    assert matrix.number("linear-operations") == costs.linear_operations(N, D, D).total
    assert matrix.number("quadratic-bytes") == 4 * costs.quadratic_memory(N, D)
    assert matrix.number("linear-bytes") == 4 * costs.linear_memory(N, D, D)
    assert matrix.number("crossover") == costs.crossover(D, D)


def test_rectangles_are_to_one_scale(matrix) -> None:
    matrix.slide("N", "256")
    matrix.slide("D", 32)
    (square, _), (_, state) = (
        [rectangle.bounding_box()["width"] for rectangle in matrix.part(way).locator("rect").all()]
        for way in ("quadratic", "linear")
    )
    assert square / state == pytest.approx(256 / 32, rel=0.1)


def test_it_says_which_order_is_cheaper_and_how_much(matrix) -> None:
    matrix.slide("D", 64)
    for N, way in ((32, "matrix"), (128, "state"), (512, "state"), (1_048_576, "state")):
        matrix.slide("N", f"{N:,}")
        times = (
            costs.quadratic_operations(N, 64, 64).total / costs.linear_operations(N, 64, 64).total
        )
        times = max(times, 1 / times)
        shown = f"{times:.1f}" if times < 10 else f"{times:,.0f}"
        assert matrix.text("ratio") == f"{shown}×"
        assert f"hrough the {way} it takes {shown} times fewer operations" in matrix.said()


def test_the_sliders_stay_in_sight_on_a_phone(explore) -> None:
    matrix = explore("fig-two-brackets", NARROW, folded=True)
    matrix.part("crossing").evaluate("plot => plot.scrollIntoView({block: 'end'})")
    for name in ("N", "D"):
        assert 0 < matrix.part(name).bounding_box()["y"] < 300


def test_the_largest_numbers_fit(explore) -> None:
    narrow = explore("fig-two-brackets", NARROW)
    narrow.slide("N", "1,048,576")
    for D in (4, 256):
        narrow.slide("D", D)
        for width in (320, 390, 560, 640):
            narrow.page.set_viewport_size({"width": width, "height": 900})
            narrow.settle()
            assert narrow.root.evaluate(FAULTS) == []
