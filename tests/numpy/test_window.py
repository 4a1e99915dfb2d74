"""Sliding windows: their ends, and that a token sees no further."""

import tracemalloc

import numpy as np
import pytest

from lesson_code.numpy import sliding_window_attention, softmax_attention
from tests.arrays import assert_close
from tests.operators import draw


@pytest.mark.parametrize("window", [9, 10, 1000])
def test_a_window_as_long_as_the_text_is_softmax_attention(window):
    q, k, v = draw("sliding_window_attention", 9, leading=(2,)).values()
    for scale in (None, 0.3):
        expected = softmax_attention(q, k, v, causal=True, scale=scale)
        found = sliding_window_attention(q, k, v, window=window, scale=scale)
        assert_close(found, expected)


def test_a_window_of_one_returns_the_values():
    q, k, v = draw("sliding_window_attention", 9).values()
    assert_close(sliding_window_attention(q, k, v, window=1), v)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_as_many_keys_are_seen_as_the_window_is_long(window):
    """Equal scores: each of the last tokens weighs 1 / window, and no other one."""
    zeros = np.zeros((7, 1))
    weights = sliding_window_attention(zeros, zeros, np.eye(7), window=window)
    for t, row in enumerate(weights):
        seen = min(t + 1, window)
        assert_close(row, np.where((np.arange(7) > t - window) & (np.arange(7) <= t), 1 / seen, 0))


def test_what_a_layer_sees_grows_with_layers():
    """Two windows of 3 above each other see 5 tokens."""
    zeros, first = np.zeros((9, 1)), np.eye(9)
    twice = sliding_window_attention(
        zeros, zeros, sliding_window_attention(zeros, zeros, first, window=3), window=3
    )
    assert (np.nonzero(twice[8])[0] == [4, 5, 6, 7, 8]).all()


def test_no_square_array_is_made():
    q, k, v = draw("sliding_window_attention", 1024, sizes={"D": 4, "M": 3}).values()
    tracemalloc.start()
    sliding_window_attention(q, k, v, window=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 1024**2 / 50
