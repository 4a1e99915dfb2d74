"""Ones in few digits: the sums shown are those of NumPy, ml_dtypes and torch, one by one."""

from __future__ import annotations

import itertools
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.explorables.conftest import WIDE, as_number
from tests.explorables.test_all import FAULTS

FORMATS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
WAYS = ["one by one", "in chunks of 16", "in pairs", "one by one, sum in float32"]


@pytest.fixture(scope="module")
def sums(explore):
    return explore("fig-sums-stick")


def rounded(sums, name: str, numbers: np.ndarray) -> np.ndarray:
    """What the page rounds numbers to."""
    numbers = numbers.astype(float).tolist()
    texts = sums.page.evaluate(f"xs => xs.map(x => String(roundings.{name}(x)))", numbers)
    return np.array([float(x.replace("Infinity", "inf")) for x in texts])


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_as_numpy_does(sums, name: str) -> None:
    rng = np.random.default_rng(0)
    dtype = FORMATS[name]
    # Numbers of float32, since from wider ones ml_dtypes rounds twice.
    x = rng.standard_normal(2000).astype(np.float32) * np.float32(2.0) ** rng.integers(
        -30, 17, 2000
    )
    x = np.concatenate([x, 2.0 ** np.arange(-25, 17), np.arange(3000), [65504, 65519, 65520, 1e38]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        floats = np.unique(x.astype(dtype).astype(float))
    floats = floats[np.isfinite(floats)]
    x = np.concatenate([x, (floats[1:] + floats[:-1]).astype(np.float32) / 2])  # many ties
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded(sums, name, x), x.astype(dtype).astype(float))


def test_ties_and_the_ends_of_the_range(sums) -> None:
    assert rounded(sums, "bfloat16", np.array([257, 258, 259, 261, 0, -257])).tolist() == [
        256, 258, 260, 260, 0, -256]  # fmt: skip
    tiny, largest = 2.0**-24, 65504.0
    ends = np.array([tiny / 2, tiny * 0.51, tiny * 1.5, largest, largest + 15, largest + 16])
    assert rounded(sums, "float16", ends).tolist() == [0, tiny, 2 * tiny, largest, largest, np.inf]
    wide = np.array([2.0**24 + 1, 2.0**24 + 3, 0.1])
    assert rounded(sums, "float32", wide).tolist() == wide.astype(np.float32).tolist()


@cache
def one_by_one(name: str, N: int, one: float = 1.0) -> float:
    """In NumPy, which adds along an axis from one end to the other; a loop for bfloat16."""
    if name != "bfloat16":
        return float(np.add.accumulate(np.full(N, one, FORMATS[name]))[-1])
    total, addend = torch.zeros((), dtype=torch.bfloat16), torch.tensor(one, dtype=torch.bfloat16)
    for _ in range(N):
        total = total + addend
    return total.item()


def in_chunks(name: str, N: int) -> float:
    dtype = FORMATS[name]
    total = dtype(0)
    for start in range(0, N, 16):
        total = dtype(total + dtype(one_by_one(name, min(16, N - start))))
    return float(total)


def in_pairs(name: str, N: int) -> float:
    if N == 1:
        return 1.0
    half = 2 ** int(np.ceil(np.log2(N)) - 1)
    dtype = FORMATS[name]
    with np.errstate(over="ignore"):
        return float(dtype(dtype(in_pairs(name, half)) + dtype(in_pairs(name, N - half))))


@pytest.mark.parametrize("name", FORMATS)
def test_the_sums_are_those_of_numpy_and_torch(sums, name: str) -> None:
    sums.press("reset")
    sums.choose("format", name)
    oracles = [one_by_one, in_chunks, in_pairs, lambda _, N: one_by_one("float32", N)]
    for way, oracle in zip(WAYS, oracles, strict=True):
        sums.choose("way", way)
        for N in (1, 2, 17, 255, 256, 257, 384, 1023, 2047, 2049, 4095, 4096, 4097, 6144):
            sums.slide("N", f"{N:,}")
            assert sums.number("sum") == oracle(name, N), (way, N)


def test_float32_sticks_as_well(sums) -> None:
    sums.press("reset")
    sums.choose("format", "float32")
    for N in (2**24 - 1, 2**24, 2**24 + 1, 2**25 + 1):
        sums.slide("N", f"{N:,}")
        assert sums.number("sum") == min(N, 2**24)
    assert one_by_one("float32", 2**24 + 1) == 2**24
    assert "is stuck, and 16,777,217 ones are lost" in sums.said()
    sums.choose("way", "in pairs")
    assert sums.number("sum") == np.ones(2**25, np.float32).sum()


@pytest.mark.parametrize("name, last", [("bfloat16", 256), ("float16", 2048)])
def test_where_a_sum_sticks(sums, name: str, last: int) -> None:
    sums.press("reset")
    sums.choose("format", name)
    sums.slide("N", f"{last:,}")
    assert sums.said() == f"{last - 1:,} + 1 = {last:,} is a float of {name}. Nothing is lost."
    sums.press("N-next")
    assert sums.number("sum") == last
    assert f"lies midway between {last:,} and {last + 2:,}" in sums.said()
    assert "The sum is stuck, and 1 one is lost" in sums.said()
    sums.choose("way", "in chunks of 16")  # puts it off
    for N, total in ((last * 16, last * 16), (last * 16 + 1, last * 16), (last * 32, last * 16)):
        sums.slide("N", f"{N:,}")
        assert sums.number("sum") == total
    sums.choose("way", "one by one, sum in float32")
    assert sums.number("sum") == last * 32
    end = {"bfloat16": "8,192", "float16": "∞"}[name]
    assert sums.said().endswith(f"Rounded once, at the end, to {name}: {end}.")


def test_pairs_overflow_where_the_range_ends(sums) -> None:
    sums.press("reset")
    sums.choose("format", "float16")
    sums.choose("way", "in pairs")
    sums.slide("N", "65,536")
    assert sums.text("sum") == "∞" and "overflows to infinity" in sums.said()
    assert "NaN" not in sums.root.inner_html() and "Infinity" not in sums.root.inner_html()
    with np.errstate(over="ignore"):
        assert np.isinf(in_pairs("float16", 65_536))


@pytest.mark.parametrize("N, gap", [(48, 0.25), (96, 0.5), (192, 1), (384, 2)])
def test_the_floats_on_the_line_are_as_far_apart_as_they_are(sums, N: int, gap: float) -> None:
    sums.press("reset")
    sums.choose("way", "one by one" if N < 256 else "in pairs")
    sums.slide("N", f"{N}")
    assert gap == float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps) * 2 ** np.floor(np.log2(N))
    drawing = sums.part("line")
    spacing = drawing.locator("text.quiet").text_content()
    shown = f"{gap:g}" if gap >= 1 else f"1/{1 / gap:g}"
    assert spacing == f"bfloat16: {shown} apart at {N}"
    if N < 256:
        ticks = drawing.locator("path.float").evaluate_all(
            "all => all.map(tick => Number(tick.getAttribute('d').split(' ')[1]))"
        )
        apart = np.diff(ticks)
        pixels = (drawing.bounding_box()["width"] - 12) / 12  # of one addition
        assert apart.min() == pytest.approx(pixels * gap, rel=0.02)


def test_the_curve_follows_the_sums(sums) -> None:
    """Positions of the last point on both logarithmic axes."""
    sums.press("reset")
    sums.slide("N", "12,288")
    drawing = sums.part("growth")
    dot = drawing.locator("circle")
    ticks = drawing.locator("text.end.quiet").all()[:4]
    y = [float(tick.get_attribute("y")) - 4 for tick in ticks]  # of 1, 100, 10,000, ...
    shown = 10 ** (2 * (float(dot.get_attribute("cy")) - y[0]) / (y[1] - y[0]))
    assert shown == pytest.approx(as_number(sums.text("sum"))) == pytest.approx(256)


@pytest.mark.parametrize("width", [WIDE, 320])
def test_every_position_fits(explore, width: int) -> None:
    sums = explore("fig-sums-stick", width)
    for name, way in itertools.product(FORMATS, WAYS):
        sums.choose("format", name)
        sums.choose("way", way)
        for N in ("1", "3", "12", "1,025", "131,071", "33,554,433"):
            sums.slide("N", N)
            assert sums.root.evaluate(FAULTS) == [], (name, way, N)
    sums.page.close()
