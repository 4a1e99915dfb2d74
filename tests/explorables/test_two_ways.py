"""One output, two ways: both are linear_attention of lesson_code.numpy, term by term."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lesson_code.numpy import identity, linear_attention
from tests.explorables.conftest import as_number

Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
NUMBER = r"-?[\d.]+(?:e-?\d+)?"


@pytest.fixture(scope="module")
def ways(explore):
    return explore("fig-two-ways")


def shown(text: str):
    """A number to half a unit of the last digit that a page shows."""
    mantissa, _, power = text.partition("e")
    digits = len(mantissa.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - digits)
    return pytest.approx(as_number(text), rel=0, abs=0.5001 * unit)


def drawn(ways) -> dict[str, str]:
    """The numbers of the drawing by their names: written-2-0-1 is token 2, row 0, column 1."""
    return ways.part("terms").evaluate(
        "svg => Object.fromEntries([...svg.querySelectorAll('text[data-name]')]"
        ".map(text => [text.dataset.name, text.textContent.replaceAll('−', '-')]))"
    )


def put(ways, q, k, v) -> None:
    for name, array in (("queries", q), ("keys", k), ("values", v)):
        ways.type(name, array)


def compare(ways, q, k, v, t: int) -> None:
    """Everything that is shown for output t."""
    ways.slide("t", t)
    past = {"feature_map": identity, "causal": True, "return_state": True}
    out, state = linear_attention(q[:t], k[:t], v[:t], normalize=False, form="recurrent", **past)
    A = np.tril(q @ k.T)
    written = k[:, :, None] * v[:, None, :]
    expected = {"weights-sum": [[A[t - 1].sum()]], "written-sum": state.S}
    expected |= {f"{band}-query": [q[t - 1]] for band in ("weights", "written")}
    expected |= {"attention-sum": [(A @ v)[t - 1]], "memory-sum": [out[-1]]}
    for j in range(t):
        expected |= {
            f"weights-{j + 1}": [[A[t - 1, j]]],
            f"values-{j + 1}": [v[j]],
            f"attention-{j + 1}": [A[t - 1, j] * v[j]],
            f"memory-{j + 1}": [q[t - 1] @ written[j]],
            f"written-{j + 1}": written[j],
        }
    numbers = {f"{name}-{i}-{m}": x for name, block in expected.items()
               for (i, m), x in np.ndenumerate(np.array(block))}  # fmt: skip
    texts = drawn(ways)
    assert set(texts) == set(numbers)
    for name, text in texts.items():
        assert shown(text) == numbers[name], name
    assert all(texts[f"attention-{rest}"] == texts[f"memory-{rest}"]
               for rest in (name[7:] for name in texts if name.startswith("memory-")))  # fmt: skip
    for way, form in (("attention", "masked"), ("memory", "recurrent")):
        mean = linear_attention(q, k, v, feature_map=identity, causal=True, form=form)[t - 1]
        assert shown(ways.text(f"{way}-divisor").replace("−", "-")) == A[t - 1].sum()
        found = re.findall(NUMBER, ways.text(f"{way}-normalized").replace("−", "-"))
        for text, x in zip(found, mean, strict=True):
            assert shown(text) == x
    cells = ways.part("scores").locator("td").all_inner_texts()
    for text, x, visible in zip(cells, A.ravel(), np.tri(3).ravel(), strict=True):
        assert shown(text.replace("−", "-")) == x if visible else not text


def test_it_begins_as_the_picture(ways) -> None:
    assert ways.part("t").input_value() == "1"  # it can be stepped at once
    ways.slide("t", 3)
    assert [drawn(ways)[f"attention-sum-0-{m}"] for m in (0, 1)] == ["140", "180"]
    assert "[35, 45] is a weighted mean of the values so far" in ways.root.inner_text()
    assert ways.said() == (
        "Row 3 of the matrix weighs 3 values: [140, 180]. "
        "The query reads [140, 180] from one state, S₃."
    )
    compare(ways, Q, K, V, 3)


@pytest.mark.parametrize("t", [1, 2])
def test_earlier_outputs_know_less(ways, t: int) -> None:
    compare(ways, Q, K, V, t)


def test_random_numbers(ways) -> None:
    rng = np.random.default_rng(4)
    for t in (3, 1, 2, 3):
        q, k = rng.integers(-900, 901, (2, 3, 2)) / 100
        v = rng.integers(-990, 991, (3, 2)) / 10
        put(ways, q, k, v)
        compare(ways, q, k, v, t)


def test_awkward_numbers(ways) -> None:
    zero = np.zeros((3, 2))
    put(ways, Q, zero, V)
    compare(ways, Q, zero, V, 3)
    assert "the normalized output is set to 0" in ways.root.inner_text()
    opposite = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    put(ways, opposite, opposite, V)
    ways.slide("t", 2)
    assert "normalized output is set to 0" in ways.root.inner_text()
    compare(ways, opposite, opposite, V, 2)
    assert (ways.text("memory-divisor"), ways.text("memory-normalized")) == ("0", "[0, 0]")
    large = np.full((3, 2), 9.0)
    put(ways, large, -large, 11 * large)
    compare(ways, large, -large, 11 * large, 3)
    assert drawn(ways)["memory-sum-0-0"] == "-48114"
    assert "no mean" in ways.root.inner_text()
    tenths = np.array([[0.1, 0.0], [0.2, 0.0], [-0.3, 0.0]])
    put(ways, np.ones((3, 2)), tenths, V)
    ways.slide("t", 3)
    assert "but for rounding errors" in ways.root.inner_text()


def test_the_halves_are_read_towards_the_middle(ways) -> None:
    paths = (
        ways.part("terms")
        .locator("path.line")
        .evaluate_all("all => all.map(path => path.getAttribute('d').split(' '))")
    )
    (top, above), (bottom, below) = [
        [float(path[i]) for i in (2, 4)] for path in paths
    ]  # M 6 . V .
    assert top < above < below < bottom
    texts = ways.part("terms").locator("text").all_text_contents()
    assert {"attention", "memory"} < set(texts)


def test_bad_numbers_are_not_taken_and_the_first_come_back(ways) -> None:
    ways.press("reset")
    field = ways.part("values").locator("input").first
    for bad in ("", "100", "-1e5"):
        field.fill(bad)
        ways.settle()
        assert field.get_attribute("aria-invalid") == "true"
    compare(ways, Q, K, V, 3)
    field.blur()
    assert field.input_value() == "10"
    ways.press("t-back", 2)
    compare(ways, Q, K, V, 1)
