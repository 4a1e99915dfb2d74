"""Gated linear attention: worked numbers, gates that close, and decays of any strength.

That every form is the double sum over decayed products is tested in test_definitions.py.
"""

import functools
import math

import numpy as np
import pytest

from lesson_code.numpy import gated_linear_attention, identity, linear_attention
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw_all
from tests.oracles import gated_linear_attention as double_sum

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
draw = functools.partial(draw_all, "gated_linear_attention")


@every_form
def test_worked_numbers(form):
    """The gate of a token acts on what was there before it, channel by channel."""
    with np.errstate(divide="ignore"):
        g = np.log(np.array([[0.0, 0.5], [0.5, 1.0], [1.0, 0.0]]))
    states = []
    for t in (1, 2, 3):
        inputs = KEYS[:t], KEYS[:t], VALUES[:t], g[:t]
        out, S = gated_linear_attention(*inputs, form=form, chunk_size=2, return_state=True)
        states.append(S.tolist())
    assert out.tolist() == [[10, 20], [30, 40], [105, 130]]
    assert states == [[[10, 20], [0, 0]], [[5, 10], [30, 40]], [[55, 70], [50, 60]]]


@every_form
def test_open_gates_are_linear_attention(form):
    q, k, v, _, S = draw()
    g = np.zeros_like(k)
    expected = linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(gated_linear_attention(q, k, v, g, form=form, chunk_size=3), expected)


@every_form
def test_the_gate_is_that_of_the_key_channel(form):
    """A row of S has its own gate; a column of S has none."""
    q, k, v, g, S = draw(1)
    _, found = gated_linear_attention(q, k, v, g, form=form, initial_state=S, return_state=True)
    assert_close(found, np.exp(g[0])[:, None] * S + np.outer(k[0], v[0]))


@every_form
def test_a_closed_gate_forgets_exactly(form):
    """What comes after log_decay = -inf is what a new sequence gives, however large S was."""
    q, k, v, g, S = draw(9)
    g[4] = -math.inf
    out, last = gated_linear_attention(
        q, 1e30 * k, v, g, form=form, chunk_size=6, initial_state=1e30 * S, return_state=True
    )
    fresh, expected = gated_linear_attention(
        q[4:], 1e30 * k[4:], v[4:], g[4:], form=form, return_state=True
    )
    np.testing.assert_allclose(out[4:], fresh, rtol=1e-9)
    np.testing.assert_allclose(last, expected, rtol=1e-9)


@every_form
@pytest.mark.parametrize("strength", [-50, -1e4, -math.inf])
def test_strong_decay(form, strength):
    """exp(-G) of a cumulative sum G would overflow at once: nothing here is above 1."""
    q, k, v, g, S = draw(40, dtype="float32")
    g[::2] = strength
    options = {"form": form, "chunk_size": 16, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(q, k, v, g, **options)
    expected, memory = double_sum(q, k, v, g, S)
    assert_close(out, expected, "float32")
    assert_close(last, memory, "float32")


def test_segments_keep_their_digits():
    """A difference of cumulative sums would have lost them: 1e6 - 1e6 - 0.003."""
    N = 6
    g = np.full((N, 1), -0.001, "float32")
    g[0] = -1e6
    q, k, v = np.zeros((3, N, 1), "float32")
    q[-1], k[1], v[1] = 1, 1, 1
    for form in FORMS:
        out = gated_linear_attention(q, k, v, g, form=form)
        np.testing.assert_allclose(out[-1], np.exp(-0.004), rtol=1e-6)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    q, k, v, g, S = draw()
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(q, k, v, g, **options)
    padded = [np.concatenate([x, np.zeros((5, x.shape[-1]))]) for x in (q, k, v, g)]
    found, memory = gated_linear_attention(*padded, **options)
    np.testing.assert_array_equal(found[:7], out)
    np.testing.assert_array_equal(memory, last)
