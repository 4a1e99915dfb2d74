"""AFT: both functions against their sums, and the mistakes of a known library."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import aft_full, aft_simple

pytestmark = pytest.mark.filterwarnings("error")

TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-3}
LEADING = [((), (), ()), ((2,),) * 3, ((2, 3), (3,), (2, 1)), ((3,), (), ()), ((0,), (1,), ())]
causal_or_not = pytest.mark.parametrize("causal", [True, False])


def one_channel(q, k, v, bias, causal):
    """The sums of the paper, one number at a time."""
    outputs = []
    for t in range(len(q)):
        seen = range(t + 1) if causal else range(len(k))
        weights = {i: math.exp(k[i] + bias[t, i]) for i in seen}
        mean = sum(weights[i] * v[i] for i in seen) / sum(weights.values()) if weights else 0
        outputs.append(mean / (1 + math.exp(-q[t])))
    return outputs


def loop(q, k, v, bias, causal):
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    q, k, v = (np.broadcast_to(x.astype(float), leading + x.shape[-2:]) for x in (q, k, v))
    out = np.zeros(q.shape)
    for *at, d in np.ndindex(*leading, k.shape[-1]):
        channel = (*at, slice(None), d)
        out[channel] = one_channel(q[channel], k[channel], v[channel], bias.astype(float), causal)
    return out


def draw(seed=0, Nq=7, Nk=7, D=3, leading=((), (), ()), dtype="float64"):
    rng = np.random.default_rng(seed)
    shapes = ((Nq, D), (Nk, D), (Nk, D))
    arrays = [rng.normal(size=(*lead, *s)) for lead, s in zip(leading, shapes, strict=True)]
    return [x.astype(dtype) for x in (*arrays, rng.normal(size=(Nq, Nk)))]


def assert_close(found, expected, dtype="float64"):
    assert found.dtype == dtype and found.shape == expected.shape
    bound = TOLERANCE[dtype] * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@settings(max_examples=80, deadline=None)
@given(
    Nq=st.integers(0, 12),
    Nk=st.integers(0, 12),
    causal=st.booleans(),
    D=st.integers(1, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(5, 9, False, 3, LEADING[2], "float64", 0)
@example(9, 9, True, 3, LEADING[2], "float64", 0)
@example(4, 0, False, 2, LEADING[1], "float32", 0)
@example(0, 0, True, 2, LEADING[1], "float64", 0)
def test_they_are_their_definitions(Nq, Nk, causal, D, leading, dtype, seed):
    q, k, v, bias = draw(seed, Nq, Nq if causal else Nk, D, leading, dtype)
    assert_close(aft_full(q, k, v, bias, causal=causal), loop(q, k, v, bias, causal), dtype)
    assert_close(aft_simple(q, k, v, causal=causal), loop(q, k, v, 0 * bias, causal), dtype)


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
    q, k, v, bias = draw(1)
    for f in (aft_simple, lambda *args: aft_full(*args, bias)):
        changed = q.copy()
        changed[3] += 1
        rows = (f(changed, k, v) != f(q, k, v)).any(axis=-1)
        assert rows.nonzero()[0].tolist() == [3]


# Mistakes of idiap's fast-transformers, as regression tests.


def test_idiap_causal_aft_simple_divides_inside_the_sum():
    """There each term is divided by the sum up to itself; the whole sum has to be divided."""
    q, k, v, _ = draw(2, 6, 6)
    out = aft_simple(q, k, v, causal=True)
    inside = np.cumsum(np.exp(k) * v / np.cumsum(np.exp(k), axis=0), axis=0) / (1 + np.exp(-q))
    outside = np.cumsum(np.exp(k) * v, axis=0) / np.cumsum(np.exp(k), axis=0) / (1 + np.exp(-q))
    assert_close(out, outside)
    assert np.abs(inside - outside).max() > 0.5
    # A running mean of equal values is this value.
    assert_close(aft_simple(q + 1e4, k, 0 * v + 3, causal=True), 0 * v + 3)


def test_idiap_aft_full_multiplies_by_the_bias():
    """The bias and the mask are added to the keys: 0 changes nothing, -inf hides, any sign of k."""
    q, k, v, bias = draw(3, 6, 6)
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
    q, k, v, _ = draw(4, 6, 6)
    early = aft_simple(q, k, v, causal=True)[:5]
    k[5] = 1e4
    np.testing.assert_array_equal(aft_simple(q, k, v, causal=True)[:5], early)


# Keys of any size.


@causal_or_not
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_keys_and_biases_of_any_size(causal, dtype):
    rng = np.random.default_rng(5)
    q, k, v, bias = draw(5, 20, 20)
    k = rng.choice([-80.0, 0.0, 80.0], size=k.shape) + k
    bias = rng.choice([-300.0, 0.0, 300.0], size=bias.shape) + bias
    exact = aft_full(q, k, v, bias, causal=causal)
    # The definition, once the largest exponent is taken off.
    exponents = np.where(np.tri(20) > 0 if causal else True, bias, -np.inf)[..., None] + k
    exponents -= exponents.max(axis=1, keepdims=True)
    weights = np.exp(exponents)
    expected = (weights * v).sum(axis=1) / weights.sum(axis=1) / (1 + np.exp(-q))
    assert_close(exact, expected)
    args = [x.astype(dtype) for x in (q, k, v, bias)]
    bound = 1e-4 if dtype == "float32" else 1e-11  # exponents of 380 are rounded to 3e-5
    np.testing.assert_allclose(aft_full(*args, causal=causal), exact, rtol=0, atol=bound)
    simple = aft_simple(*args[:3], causal=causal)
    assert_close(simple, aft_full(q, k, v, 0 * bias, causal=causal), dtype)
    assert_close(aft_simple(q, k + 1e3, v), aft_simple(q, k, v))


@causal_or_not
def test_what_nobody_sees_is_zero(causal):
    q, k, v, bias = draw(6, 6, 6)
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


# Causality, NaN, memory, errors.


@causal_or_not
def test_nan_stays_in_its_channel_and_sequence(causal):
    for spoiled in range(3):
        *arrays, bias = draw(7, 9, 9, leading=((2,),) * 3)
        arrays[spoiled][1, 5, 2] = np.nan
        rows = slice(5, 6) if spoiled == 0 else slice(5 if causal else 0, 9)
        for f in (aft_simple, lambda *args, bias=bias, **kw: aft_full(*args, bias, **kw)):
            bad = np.isnan(f(*arrays, causal=causal))
            assert bad[1, rows, 2].all() and bad.sum() == bad[1, rows, 2].sum()


def test_one_query_at_a_time():
    """The exponents of all queries would take 256² 32 numbers, 16 MiB."""
    q, k, v, bias = draw(8, 256, 256, 32)
    tracemalloc.start()
    try:
        aft_full(q, k, v, bias)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * q.nbytes
