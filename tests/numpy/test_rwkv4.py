"""The sublayers of RWKV-4, against their equations one number at a time."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import WKVState, channel_mix, time_mix, token_shift, wkv

pytestmark = pytest.mark.filterwarnings("error")

TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 3e-3}
LEADING = [((), ()), ((2,), (2,)), ((2, 1), (3,)), ((), (2,)), ((0,), (1,))]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def shifted(x, mix, last):
    """Rows of one sequence, mixed with the row before."""
    rows = [last, *x]
    return [
        [mix[f] * rows[t + 1][f] + (1 - mix[f]) * rows[t][f] for f in range(len(mix))]
        for t in range(len(x))
    ]


def times(row, W):
    """x @ W for one row, one number at a time."""
    return [sum(row[i] * W[i, j] for i in range(len(W))) for j in range(W.shape[1])]


def one_channel_mix(x, mix_k, mix_r, W_k, W_v, W_r, last):
    out = []
    for k, r in zip(shifted(x, mix_k, last), shifted(x, mix_r, last), strict=True):
        hidden = [max(h, 0) ** 2 for h in times(k, W_k)]
        gate = [sigmoid(g) for g in times(r, W_r)]
        out.append([g * y for g, y in zip(gate, times(hidden, W_v), strict=True)])
    return out


def one_time_mix(x, mix_k, mix_v, mix_r, W_k, W_v, W_r, W_o, decay, bonus, last):
    k, v, r = (
        np.array([times(row, W) for row in shifted(x, mix, last)])
        for mix, W in ((mix_k, W_k), (mix_v, W_v), (mix_r, W_r))
    )
    out = []
    for t in range(len(x)):
        gated = []
        for d in range(W_k.shape[1]):
            weights = [math.exp(k[i, d] - (t - 1 - i) * decay[d]) for i in range(t)]
            weights.append(math.exp(k[t, d] + bonus[d]))
            mean = sum(a * b for a, b in zip(weights, v[: t + 1, d], strict=True)) / sum(weights)
            gated.append(sigmoid(r[t, d]) * mean)
        out.append(times(gated, W_o))
    return out


def every_sequence(one, x, *args, last):
    leading = np.broadcast_shapes(x.shape[:-2], last.shape[:-1])
    x = np.broadcast_to(x, leading + x.shape[-2:]).astype(float)
    last = np.broadcast_to(last, leading + last.shape[-1:]).astype(float)
    args = [a.astype(float) for a in args]
    out = [one(x[at], *args, last[at]) for at in np.ndindex(leading)]
    return np.array(out, float).reshape(x.shape)


def draw(seed=0, N=7, F=3, D=4, leading=((), ()), dtype="float64"):
    """x, last, and what time_mix and channel_mix take after x."""
    rng = np.random.default_rng(seed)
    x, last = rng.normal(size=(*leading[0], N, F)), rng.normal(size=(*leading[1], F))
    mixes = rng.uniform(-0.2, 1.2, size=(5, F))
    matrices = [rng.normal(size=s) for s in [(F, D)] * 3 + [(D, F)]]
    time = [*mixes[:3], *matrices, rng.uniform(0.1, 3, size=D), rng.normal(size=D)]
    hidden = 2 * D + 1
    matrices = [rng.normal(size=s) / F for s in ((F, hidden), (hidden, F), (F, F))]
    channel = [*mixes[3:], *matrices]
    x, last, *rest = (a.astype(dtype) for a in (x, last, *time, *channel))
    return x, last, rest[: len(time)], rest[len(time) :]


def assert_close(found, expected, dtype="float64"):
    assert found.dtype == dtype and found.shape == expected.shape
    bound = TOLERANCE[dtype] * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@settings(max_examples=50, deadline=None)
@given(
    N=st.integers(0, 9),
    F=st.integers(1, 4),
    D=st.integers(1, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(9, 3, 4, LEADING[2], "float64", 0)
@example(0, 3, 2, LEADING[1], "float32", 0)
@example(1, 1, 1, LEADING[3], "float64", 0)
def test_they_are_their_equations(N, F, D, leading, dtype, seed):
    x, last, time, channel = draw(seed, N, F, D, leading, dtype)
    for given_last in (last, None):
        before = np.zeros(F) if given_last is None else last
        expected = every_sequence(shifted, x, time[0], last=before)
        assert_close(token_shift(x, time[0], given_last), expected, dtype)
        expected = every_sequence(one_channel_mix, x, *channel, last=before)
        assert_close(channel_mix(x, *channel, last=given_last), expected, dtype)
        expected = every_sequence(one_time_mix, x, *time, last=before)
        assert_close(time_mix(x, *time, last=given_last), expected, dtype)


def test_worked_numbers():
    x = np.array([[8.0], [4.0], [2.0]])
    assert token_shift(x, np.array([0.75])).tolist() == [[6.0], [5.0], [2.5]]
    assert token_shift(x, np.array([0.75]), np.array([4.0])).tolist() == [[7.0], [5.0], [2.5]]
    assert token_shift(x, np.array([1.0])).tolist() == x.tolist()  # mix is for the current token
    assert token_shift(x, np.array([0.0])).tolist() == [[0.0], [8.0], [4.0]]


def test_token_shift_is_a_causal_depthwise_convolution_of_two_taps():
    x, last, (mix, *_), _ = draw(1, N=9)
    found = token_shift(x, mix, last)
    for f in range(3):
        column = np.concatenate([last[f : f + 1], x[:, f]])
        taps = [mix[f], 1 - mix[f]]  # convolve turns them round: the first is for the current token
        np.testing.assert_allclose(found[:, f], np.convolve(column, taps, mode="valid"), atol=1e-12)


def test_the_gates_and_squares_are_where_the_equations_have_them():
    """A bonus that hides the past, and weights of 1: the sublayers as plain functions of x."""
    x, one, unit = np.array([[2.0], [-3.0]]), np.array([1.0]), np.eye(1)
    gate = 1 / (1 + np.exp(-x))
    found = channel_mix(x, one, one, unit, unit, unit)
    assert_close(found, gate * np.maximum(x, 0) ** 2)
    found = time_mix(x, one, one, one, 0 * unit, unit, unit, unit, one, 500 * one)
    assert_close(found, gate * x)


# Streaming.


@pytest.mark.parametrize("cut", range(8))
def test_a_split_carries_the_last_input_and_the_memory(cut):
    x, last, time, channel = draw(2, leading=((2,), (2,)))
    head, tail = x[:, :cut], x[:, cut:]
    between = x[:, cut - 1] if cut else last
    pieces = [token_shift(head, time[0], last), token_shift(tail, time[0], between)]
    assert_close(np.concatenate(pieces, axis=1), token_shift(x, time[0], last))
    pieces = [channel_mix(head, *channel, last=last), channel_mix(tail, *channel, last=between)]
    assert_close(np.concatenate(pieces, axis=1), channel_mix(x, *channel, last=last))
    whole, final = time_mix(x, *time, last=last, return_state=True)
    first, state = time_mix(head, *time, last=last, return_state=True)
    options = {"last": between, "initial_state": state, "return_state": True}
    second, end = time_mix(tail, *time, **options)
    assert_close(np.concatenate([first, second], axis=1), whole)
    for a, b in zip(end, final, strict=True):
        assert_close(a, b)


def test_the_state_of_time_mix_is_that_of_wkv():
    x, last, time, _ = draw(3)
    mix_k, mix_v, _, W_k, W_v, *_, decay, bonus = time
    _, state = time_mix(x, *time, last=last, return_state=True)
    k, v = token_shift(x, mix_k, last) @ W_k, token_shift(x, mix_v, last) @ W_v
    _, expected = wkv(k, v, decay, bonus, return_state=True)
    assert isinstance(state, WKVState)
    np.testing.assert_array_equal(state, expected)


# Causality, NaN, errors.
