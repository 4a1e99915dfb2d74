"""Forgetting attention: what it is with open and closed gates, and what gates are not scaled by."""

import math

import numpy as np
import pytest

from lesson_code.numpy import forgetting_attention, softmax_attention
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw


def test_open_gates_are_softmax_attention():
    q, k, v, g = draw("forgetting_attention", 9, leading=(2,)).values()
    for scale in (None, 0.3):
        expected = softmax_attention(q, k, v, causal=True, scale=scale)
        assert_close(forgetting_attention(q, k, v, 0 * g, scale=scale), expected)


def test_worked_numbers():
    """All products 0, gates 1, 1/2, 1/4: the last token weighs 1/8, 1/4 and 1."""
    gates = np.log([1.0, 0.5, 0.25])
    out = forgetting_attention(0 * KEYS, KEYS, VALUES, gates)
    assert_close(out, np.array([[10, 20], [70 / 3, 100 / 3], [(10 + 60 + 400) / 11, 580 / 11]]))


def test_a_gate_hides_what_came_before_its_token_not_the_token():
    q, k, v, g = draw("forgetting_attention", 9).values()
    g[4] = -math.inf
    out = forgetting_attention(q, k, v, g)
    assert_close(out[4], v[4])
    assert_close(out[4:], forgetting_attention(q[4:], k[4:], v[4:], g[4:]))
    g[:] = -math.inf
    assert_close(forgetting_attention(q, k, v, g), v)


def test_the_first_gate_does_nothing():
    q, k, v, g = draw("forgetting_attention", 5).values()
    out = forgetting_attention(q, k, v, g)
    for first in (0, -3.0, -math.inf):
        g[0] = first
        assert_close(forgetting_attention(q, k, v, g), out)


@pytest.mark.parametrize("D", [1, 4, 64])
def test_gates_are_not_scaled(D):
    """With (products + gates) / √D a gate of 1/2 would leave 2^(-1/8) of a weight at D = 64."""
    q, v = np.zeros((2, D)), np.array([[0.0], [1.0]])
    gates = np.log([0.5, 0.5])
    assert_close(forgetting_attention(q, q, v, gates)[1], np.array([2 / 3]))
    assert_close(forgetting_attention(q, q, v, gates, scale=0.01)[1], np.array([2 / 3]))


def test_a_constant_gate_is_a_slope_of_the_distance():
    """As in ALiBi: -m (t - j) is added to the scores."""
    q, k, v, _ = draw("forgetting_attention", 9).values()
    t = np.arange(9.0)
    scores = q @ k.T / 2 - 0.3 * (t[:, None] - t)
    weights = np.tril(np.exp(scores))
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    assert_close(forgetting_attention(q, k, v, np.full(9, -0.3)), expected)


def test_strong_gates_leave_no_nan():
    q, k, v, _ = draw("forgetting_attention", 9, dtype="float32").values()
    for strong in (-1e4, -1e30):
        out = forgetting_attention(q, k, v, np.full(9, strong, "float32"))
        assert_close(out, v, "float32")
