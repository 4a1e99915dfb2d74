"""The sublayers of RWKV-4: worked numbers, and where gates, squares and the state are.

That they are their equations is tested in test_definitions.py.
"""

import numpy as np

from lesson_code.numpy import WKVState, channel_mix, time_mix, token_shift, wkv
from tests.arrays import assert_close
from tests.operators import draw


def test_worked_numbers():
    x = np.array([[8.0], [4.0], [2.0]])
    assert token_shift(x, np.array([0.75])).tolist() == [[6.0], [5.0], [2.5]]
    assert token_shift(x, np.array([0.75]), np.array([4.0])).tolist() == [[7.0], [5.0], [2.5]]
    assert token_shift(x, np.array([1.0])).tolist() == x.tolist()  # mix is for the current token
    assert token_shift(x, np.array([0.0])).tolist() == [[0.0], [8.0], [4.0]]


def test_token_shift_is_a_causal_depthwise_convolution_of_two_taps():
    x, mix, last = draw("token_shift", 9).values()
    found = token_shift(x, mix, last)
    for f in range(len(mix)):
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


def test_the_state_of_time_mix_is_that_of_wkv():
    time = draw("time_mix")
    _, state = time_mix(**time, return_state=True)
    k, v = (token_shift(time["x"], time[f"mix_{x}"], time["last"]) @ time[f"W_{x}"] for x in "kv")
    _, expected = wkv(k, v, time["decay"], time["bonus"], return_state=True)
    assert isinstance(state, WKVState)
    np.testing.assert_array_equal(state, expected)
