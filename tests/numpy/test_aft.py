"""AFT: worked numbers, the mistakes of a known library, and keys of any size.

That both functions are their sums is tested in test_definitions.py.
"""

import math
import tracemalloc

import numpy as np
import pytest

from lesson_code.numpy import aft_full, aft_simple
from tests.arrays import assert_close, normal
from tests.oracles import aft_full as loop

causal_or_not = pytest.mark.parametrize("causal", [True, False])


def draw(Nq=7, Nk=7, D=3, leading=()):
    return normal((*leading, Nq, D), (*leading, Nk, D), (*leading, Nk, D), (Nq, Nk))


def test_more_or_fewer_queries_than_keys():
    for Nq, Nk in ((5, 9), (9, 5), (4, 0)):
        q, k, v, bias = draw(Nq, Nk)
        assert_close(aft_full(q, k, v, bias), *loop(q, k, v, bias))
        assert_close(aft_simple(q, k, v), *loop(q, k, v, 0 * bias))


def test_worked_numbers():
    """Weights 1, 2, 1 and a gate of 1/2: 10, 70/3 and 30 halved; with all positions 30 halved."""
    q, v = np.zeros((3, 1)), np.array([[10.0], [30.0], [50.0]])
    k = np.log([[1.0], [2.0], [1.0]])
    assert_close(aft_simple(q, k, v, causal=True), np.array([[5.0], [35 / 3], [15.0]]))
    assert_close(aft_simple(q, k, v), np.array([[15.0]] * 3))
    bias = np.log([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 4.0]])
    expected = [[5.0], [(20 + 60) / 4 / 2], [(10 + 60 + 200) / 7 / 2]]
    assert_close(aft_full(q, k, v, bias, causal=True), np.array(expected))


def test_the_query_gates_its_own_position_only():
    q, k, v, bias = draw()
    for f in (aft_simple, lambda *args: aft_full(*args, bias)):
        changed = q.copy()
        changed[3] += 1
        rows = (f(changed, k, v) != f(q, k, v)).any(axis=-1)
        assert rows.nonzero()[0].tolist() == [3]


def test_idiap_causal_aft_simple_divides_inside_the_sum():
    """There each term is divided by the sum up to itself; the whole sum has to be divided."""
    q, k, v, _ = draw(6, 6)
    out = aft_simple(q, k, v, causal=True)
    inside = np.cumsum(np.exp(k) * v / np.cumsum(np.exp(k), axis=0), axis=0) / (1 + np.exp(-q))
    outside = np.cumsum(np.exp(k) * v, axis=0) / np.cumsum(np.exp(k), axis=0) / (1 + np.exp(-q))
    assert_close(out, outside)
    assert np.abs(inside - outside).max() > 0.5
    # A running mean of equal values is this value.
    assert_close(aft_simple(q + 1e4, k, 0 * v + 3, causal=True), 0 * v + 3)


def test_idiap_aft_full_multiplies_by_the_bias():
    """The bias and the mask are added to the keys: 0 changes nothing, -inf hides, any sign of k."""
    q, k, v, bias = draw(6, 6)
    for causal in (True, False):
        simple = aft_simple(q, k, v, causal=causal)
        assert_close(aft_full(q, k, v, 0 * bias, causal=causal), simple)
        assert_close(aft_full(q, k, v, 0 * bias + 3, causal=causal), simple)
    mask = np.where(np.tri(6), bias, -np.inf)
    for keys in (k, -abs(k), abs(k), 0 * k):
        hidden = aft_full(q, keys, v, mask)
        assert np.isfinite(hidden).all()
        assert_close(hidden, aft_full(q, keys, v, bias, causal=True))


def test_idiap_causal_aft_simple_shifts_by_the_largest_key_of_all():
    """That is not causal, and the early weights underflow: 0 / 0."""
    q, k, v, _ = draw(6, 6)
    early = aft_simple(q, k, v, causal=True)[:5]
    k[5] = 1e4
    np.testing.assert_array_equal(aft_simple(q, k, v, causal=True)[:5], early)


@causal_or_not
def test_keys_and_biases_of_any_size(causal):
    rng = np.random.default_rng(5)
    q, k, v, bias = draw(20, 20)
    k = rng.choice([-80.0, 0.0, 80.0], size=k.shape) + k
    bias = rng.choice([-300.0, 0.0, 300.0], size=bias.shape) + bias
    exact = aft_full(q, k, v, bias, causal=causal)
    # The definition, once the largest exponent is taken off.
    exponents = np.where(np.tri(20) > 0 if causal else True, bias, -np.inf)[..., None] + k
    exponents -= exponents.max(axis=1, keepdims=True)
    weights = np.exp(exponents)
    expected = (weights * v).sum(axis=1) / weights.sum(axis=1) / (1 + np.exp(-q))
    assert_close(exact, expected)
    args = [x.astype("float32") for x in (q, k, v, bias)]
    found = aft_full(*args, causal=causal)
    np.testing.assert_allclose(
        found, exact, rtol=0, atol=1e-4
    )  # exponents of 380 are rounded to 3e-5
    simple = aft_simple(*args[:3], causal=causal)
    assert_close(simple, aft_full(q, k, v, 0 * bias, causal=causal), "float32")
    assert_close(aft_simple(q, k + 1e3, v), aft_simple(q, k, v))


@causal_or_not
def test_what_nobody_sees_is_zero(causal):
    q, k, v, bias = draw(6, 6)
    k[:2], bias[4], k[:, 1] = -np.inf, -np.inf, -np.inf
    simple = aft_simple(q, k, v, causal=causal)
    full = aft_full(q, k, v, bias, causal=causal)
    np.testing.assert_array_equal(simple[:, 1], 0)
    np.testing.assert_array_equal(full[4], 0)
    assert (simple[:2] == 0).all() == causal and np.isfinite(simple).all()
    if not causal:
        assert_close(simple[:, [0, 2]], aft_simple(q, k[2:], v[2:])[:, [0, 2]])


def test_a_gate_of_any_size():
    v = np.ones((1, 1))
    for q, gate in ((-800.0, 0.0), (-40.0, math.exp(-40)), (0.0, 0.5), (800.0, 1.0)):
        found = aft_simple(np.full((1, 1), q), 0 * v, v)
        np.testing.assert_allclose(found, gate, rtol=1e-12)


@causal_or_not
def test_nan_stays_in_its_channel_and_sequence(causal):
    for spoiled in range(3):
        *arrays, bias = draw(9, 9, leading=(2,))
        arrays[spoiled][1, 5, 2] = np.nan
        rows = slice(5, 6) if spoiled == 0 else slice(5 if causal else 0, 9)
        for f in (aft_simple, lambda *args, bias=bias, **kw: aft_full(*args, bias, **kw)):
            bad = np.isnan(f(*arrays, causal=causal))
            assert bad[1, rows, 2].all() and bad.sum() == bad[1, rows, 2].sum()


def test_one_query_at_a_time():
    """The exponents of all queries would take 256² 32 numbers, 16 MiB."""
    q, k, v, bias = draw(256, 256, 32)
    tracemalloc.start()
    try:
        aft_full(q, k, v, bias)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * q.nbytes
