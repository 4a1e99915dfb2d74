"""Pairs in three memories: which are found is what lesson_code.numpy finds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import lesson_code.numpy as ln
from tests.explorables.conftest import ROOT, WIDE, explorables
from tests.explorables.test_all import FAULTS

N = 32
KINDS = """boxes => boxes.map(box =>
  ["right", "wrong", "later"].find(kind => box.classList.contains(kind)))"""
TITLES = {"sum": "plain sum", "delta": "delta rule", "cache": "cache"}


@pytest.fixture(scope="module")
def recall(explore):
    return explore("fig-recall-overflow")


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Park and Miller's generator, and the formula of Box and Muller."""
    u = []
    for _ in range(2 * int(np.prod(shape))):
        seed = 48271 * seed % (2**31 - 1)
        u.append(seed / (2**31 - 1))
    a, b = np.reshape(u, (*shape, 2)).T
    return (np.sqrt(-2 * np.log(a)) * np.cos(2 * np.pi * b)).T


def pairs(seed: int, D: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    k, v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in normal(seed, (2, N, D)))
    if kind == "at right angles":
        for start in range(0, N, D):  # Q with the signs that Gram and Schmidt give
            Q, R = np.linalg.qr(k[start : start + D].T)
            k[start : start + D] = (Q * np.sign(np.diag(R))).T
    return k, v


def expected(k: np.ndarray, v: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """Whether each of the first n pairs is found, for each memory."""
    k, own = k[:n], v[:n]
    reads = {
        "sum": k @ (k.T @ own),
        "delta": k @ ln.delta_rule(k, k, own, np.ones(n), return_state=True)[1],
        "cache": ln.softmax_attention(k, k, own, scale=16.0),
    }
    return {name: (o @ v.T).argmax(axis=1) == np.arange(n) for name, o in reads.items()}


def compare(recall, seed: int, D: int, kind: str, n: int) -> None:
    recall.slide("n", n)
    for name, right in expected(*pairs(seed, D, kind), n).items():
        boxes = recall.part(f"pairs-{name}").locator("rect[data-name]")
        shown = boxes.evaluate_all(KINDS)
        assert shown == [*("right" if x else "wrong" for x in right), *["later"] * (N - n)]
        assert recall.text(f"found-{name}") == f"{right.sum()} of {n}"
        numbers = 2 * D * n if name == "cache" else D * D
        big = recall.part(f"found-{name}").locator("xpath=..").inner_text()
        assert f"{numbers:,} numbers kept" in big


@pytest.mark.parametrize("n", [1, 4, 8, 9, 32])
def test_the_first_pairs(recall, n: int) -> None:
    recall.press("reset")
    compare(recall, 1, 8, "by lot", n)


def test_it_begins_as_the_picture(recall) -> None:
    notebook = ROOT / Path(explorables()["fig-recall-overflow"]).with_suffix(".ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"np": np, "ln": ln}
    for mark in ("48271", "found[name]"):
        [source] = [source for source in sources if mark in source]
        exec(source, names)
    recall.press("reset")
    for n in (3, 12, 32):
        recall.slide("n", n)
        for name, title in TITLES.items():
            count = int(np.sum(names["found"][title][n - 1]))
            assert recall.text(f"found-{name}") == f"{count} of {n}"


@pytest.mark.parametrize("D", [4, 8, 16])
@pytest.mark.parametrize("kind", ["by lot", "at right angles"])
def test_other_pairs(recall, D: int, kind: str) -> None:
    recall.press("reset")
    recall.choose("D", str(D))
    recall.choose("keys", kind)
    for seed in (2, 3):
        recall.press("again")
        for n in (D, D + 1, 20, N):
            compare(recall, seed, D, kind, n)


def test_keys_at_right_angles_are_all_found_while_there_is_room(recall) -> None:
    recall.press("reset")
    recall.choose("keys", "at right angles")
    for n in range(1, 9):
        recall.slide("n", n)
        assert [recall.text(f"found-{name}") for name in TITLES] == [f"{n} of {n}"] * 3
    assert recall.said() == "Pair 8 is written. No pair is lost by it. As many pairs as rows."
    recall.slide("n", 9)
    assert recall.said().endswith("From here on there are more pairs than rows.")


def test_what_a_write_costs_is_said(recall) -> None:
    recall.press("reset")
    k, v = pairs(1, 8, "by lot")
    for n in range(1, N + 1):
        before, after = expected(k, v, n - 1) if n > 1 else {}, expected(k, v, n)
        recall.slide("n", n)
        for name, words in (("sum", "the sum pair"), ("delta", "the delta rule pair")):
            lost = [] if n == 1 else list(np.flatnonzero(before[name] & ~after[name][:-1]) + 1)
            assert (words in recall.said()) == bool(lost)
            for pair in lost:
                assert str(pair) in recall.said()


def test_the_curves_end_at_what_is_found(recall) -> None:
    recall.press("reset")
    recall.slide("n", 24)
    right = expected(*pairs(1, 8, "by lot"), 24)
    drawing = recall.part("curves")
    heights = {name: float(recall.part(f"point-{name}").get_attribute("cy")) for name in TITLES}
    top = next(
        float(text.get_attribute("y")) - 5
        for text in drawing.locator("text.end").all()
        if text.text_content() == "32"
    )
    bottom = heights["cache"] + (heights["cache"] - top) * 24 / 8
    for name in TITLES:
        share = (bottom - heights[name]) / (bottom - top)
        assert share * N == pytest.approx(right[name].sum(), abs=0.01)


@pytest.mark.parametrize("width", [WIDE, 320])
def test_every_position_fits(explore, width: int) -> None:
    recall = explore("fig-recall-overflow", width)
    for D in ("4", "16"):
        recall.choose("D", D)
        for n in (0, 1, 5, 20, N):
            recall.slide("n", n)
            assert recall.root.evaluate(FAULTS) == [], (D, n)
    recall.page.close()
