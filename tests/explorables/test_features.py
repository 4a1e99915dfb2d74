"""Weights of one query under several maps: what is shown is what lesson_code.numpy gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lesson_code.numpy import (
    attention_weights,
    elu_plus_one,
    linear_attention,
    positive_random_features,
    relu,
    taylor,
)
from tests.explorables.conftest import ROOT, as_number, explorables

NAMES = ["softmax", "Taylor", "random", "elu + 1", "ReLU"]
HANDLES = ["drag-q", *(f"drag-k{j}" for j in range(1, 6))]
HALF_UNIT = 0.0052  # of the second digit; the rows in the script have five digits
START = [[2, 1], [1, 0], [0, 1], [1, 1], [-1, 1], [-1, -1]]


@pytest.fixture(scope="module")
def page(explore):
    return explore("fig-plane-weights")


def place(page, name: str) -> list[float]:
    """Where a handle says that it stands."""
    words = page.part(name).get_attribute("aria-valuetext")
    return [as_number(x) for x in words.split(", ")]


def move_to(page, name: str, wanted) -> None:
    """Move a handle by the arrow keys, all of them at once, which is fast."""
    x, y = (round(4 * d) for d in np.subtract(wanted, place(page, name)))
    keys = ["ArrowRight" if x > 0 else "ArrowLeft"] * abs(x)
    keys += ["ArrowUp" if y > 0 else "ArrowDown"] * abs(y)
    page.part(name).evaluate(
        "(knob, keys) => keys.forEach(key =>"
        " knob.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true})))",
        keys,
    )
    page.settle()
    assert place(page, name) == list(wanted)


def arrange(page, vectors, *, factor: float = 1, m: int = 16, draw: int = 1) -> None:
    for name, wanted in zip(HANDLES, vectors, strict=True):
        move_to(page, name, wanted)
    page.slide("factor", f"{factor:g}")
    page.slide("m", m)
    page.choose("seed", str(draw))


def rows_of(vectors, factor: float, m: int, seed: int) -> dict[str, np.ndarray]:
    q, *keys = np.array(vectors, dtype=float)
    q, k = factor * q[None], np.array(keys)
    random = positive_random_features(m, 2, orthogonal=False, seed=seed)
    rows = {"softmax": attention_weights(q, k)[0]}
    for name, phi in zip(NAMES[1:], (taylor(2), random, elu_plus_one, relu), strict=True):
        similarities = (phi(q) @ phi(k).T)[0]
        rows[name] = similarities / (similarities.sum() or np.nan)
    return rows


def entropy(weights) -> float:
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1)))


def assert_shown(page, vectors, *, factor: float = 1, m: int = 16, seed: int = 0) -> None:
    rows = rows_of(vectors, factor, m, seed)
    for row, shown in zip(rows.values(), page.matrix("weights"), strict=True):
        assert shown[:5] == pytest.approx(row, abs=HALF_UNIT)
        assert shown[5] == pytest.approx(entropy(row), abs=HALF_UNIT)
    assert_said(page.said(), rows)


def assert_said(said: str, rows) -> None:
    softmax, polynomial = rows["softmax"], rows["Taylor"]
    turned = re.match(r"Taylor prefers k(.) to k(.)", said)
    if turned:
        j, i = ("₁₂₃₄₅".index(x) for x in turned.groups())
        assert softmax[i] > softmax[j] and polynomial[j] > polynomial[i]
        return
    order = np.argsort(softmax)
    assert (np.diff(polynomial[order]) > -1e-9).all()
    moved = {name: np.abs(rows[name] - softmax).sum() / 2 for name in NAMES[1:]}
    nearest = re.match(r"Nearest to softmax: (.*?)\. ([\d.]+) of its weight", said)
    assert moved[nearest[1]] == pytest.approx(min(moved.values()), abs=1e-4)
    assert float(nearest[2]) == pytest.approx(min(moved.values()), abs=HALF_UNIT)


def test_it_starts_as_the_picture(page) -> None:
    assert [place(page, name) for name in HANDLES] == START
    assert_shown(page, START)
    page_of_the_figure = Path(explorables()["fig-plane-weights"])
    notebook = json.loads((ROOT / page_of_the_figure.with_suffix(".ipynb")).read_text("utf-8"))
    [source] = [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "plane_and_weights" in "".join(cell["source"])
    ]
    [q], [k] = (re.findall(rf"^{name} = np\.array\((.*)\)$", source, re.M) for name in "qk")
    assert [*json.loads(q), *json.loads(k)] == START
    assert "positive_random_features(16, 2, orthogonal=False)" in source


def test_the_random_rows_are_those_of_the_package() -> None:
    script = (ROOT / "book/_static/explorables/features.js").read_text(encoding="utf-8")
    pairs = re.findall(r"\[(-?[\d.]+), (-?[\d.]+)\]", script.split("function randomRows")[1])
    rows = np.array(pairs, dtype=float).reshape(3, 64, 2)
    for seed, given in enumerate(rows):
        expected = np.random.default_rng(seed).standard_normal((64, 2))
        assert np.abs(given - expected).max() <= 0.5001e-5


@pytest.mark.parametrize("factor", [0.25, 1, 8])
@pytest.mark.parametrize("m, draw", [(1, 1), (4, 2), (64, 3)])
def test_knobs(page, factor: float, m: int, draw: int) -> None:
    arrange(page, START, factor=factor, m=m, draw=draw)
    assert_shown(page, START, factor=factor, m=m, seed=draw - 1)


@pytest.mark.parametrize("seed", range(3))
def test_vectors_drawn_at_random(page, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.integers(-8, 9, size=(6, 2)) / 4
    vectors[0] = np.abs(vectors[0]) + 0.25  # one positive key and query: ReLU has a sum
    vectors[1] = np.abs(vectors[1]) + 0.25
    arrange(page, vectors.tolist())
    assert_shown(page, vectors.tolist())


def test_where_relu_has_nothing_to_divide_by(page) -> None:
    vectors = [[-1, -0.25], *START[1:4], [0, 0], [0, 0]]
    arrange(page, vectors)
    *rows, last = page.part("weights").locator("tr").all()
    assert last.locator("td").all_inner_texts() == ["0/0"] * 5 + ["none"]
    assert "0/0 is no weight" in page.said() and "output 0" in page.said()
    expected = rows_of(vectors, 1, 16, 0)
    for name, shown in zip(NAMES[:4], page.matrix("weights"), strict=False):
        assert shown[:5] == pytest.approx(expected[name], abs=HALF_UNIT)
    q, k = (np.array(x, dtype=float) for x in (vectors[:1], vectors[1:]))
    assert linear_attention(q, k, np.ones((5, 1)), feature_map=relu).item() == 0
    assert "NaN" not in page.root.inner_text()


def test_all_vectors_zero(page) -> None:
    arrange(page, [[0, 0]] * 6)
    assert page.matrix("weights")[0] == pytest.approx([0.2] * 5 + [np.log(5)], abs=HALF_UNIT)
    assert page.matrix("weights")[3] == pytest.approx([0.2] * 5 + [np.log(5)], abs=HALF_UNIT)
    assert "0/0 is no weight" in page.said()


def test_the_keyboard_moves_a_handle(page) -> None:
    arrange(page, START)
    page.keys("drag-q", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown")
    told = page.root.get_by_role("slider", name="query q", exact=True)
    assert told.get_attribute("aria-valuetext") == "2.75, 0.75"
    assert_shown(page, [[2.75, 0.75], *START[1:]])


def center(page, name: str) -> tuple[float, float]:
    box = page.part(name).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def pull(page, start, right: float, down: float) -> None:
    """Press the mouse at a point of the page, whatever is there, and move it."""
    x, y = start
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + right, y + down, steps=4)
    page.page.mouse.up()
    page.settle()


def test_of_handles_that_cover_each_other_the_nearest_is_dragged(page) -> None:
    arrange(page, START)
    page.part("plane").scroll_into_view_if_needed()
    unit = min(page.part("plane").bounding_box()["width"], 270) / 2 / 3.25
    page.keys("drag-k1", "ArrowUp", "ArrowUp")  # half covered by that of k3
    pull(page, center(page, "drag-k1"), 0, 1.5 * unit)
    assert [place(page, name) for name in ("drag-k1", "drag-k3")] == [[1, -1], [1, 1]]
    # q on k3, in one place: what moved last is on top, and can be taken off again
    page.drag("drag-q", -unit, 0)
    assert place(page, "drag-q") == place(page, "drag-k3") == [1, 1]
    pull(page, center(page, "drag-q"), unit, unit)
    assert (place(page, "drag-q"), place(page, "drag-k3")) == ([2, 0], [1, 1])


def test_no_name_covers_another_or_a_handle(page) -> None:
    rng = np.random.default_rng(5)
    cases = [
        START,
        [[1, 1], [1, 1], [1, 1], [1, 0.75], [1.25, 1], [1, 1]],
        [*[[3, 3]] * 3, *START[3:]],
    ]
    cases += [(rng.integers(-12, 13, (6, 2)) / 4).tolist() for _ in range(4)]
    for vectors in cases:
        arrange(page, vectors)
        boxes = (
            page.part("plane")
            .locator("text")
            .evaluate_all("all => all.map(text => text.getBoundingClientRect())")
        )
        for i, a in enumerate(boxes):
            for b in boxes[:i]:
                apart = (abs(a["x"] - b["x"]), abs(a["y"] - b["y"]))
                assert apart[0] > 14 or apart[1] > 12, vectors


def test_handles_follow_the_mouse_and_stay_inside(page) -> None:
    arrange(page, START)
    unit = page.part("plane").bounding_box()["width"]
    unit = min(unit, 270) / 2 / 3.25
    page.drag("drag-k5", 3 * unit, 0.5 * unit)
    assert place(page, "drag-k5") == [2, -1.5]
    page.drag("drag-q", 20 * unit, -20 * unit)
    assert place(page, "drag-q") == [3, 3]
    assert_shown(page, [[3, 3], *START[1:5], [2, -1.5]])
