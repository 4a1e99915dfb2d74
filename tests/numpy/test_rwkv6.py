"""The memory of RWKV-5 and 6: worked numbers, what it reads when, and its relatives.

That both forms are the double sum over decayed products is tested in test_definitions.py.
"""

import functools
import math

import numpy as np
import pytest

from lesson_code.numpy import gated_linear_attention, identity, linear_attention, rwkv6
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw_all
from tests.oracles import rwkv6 as double_sum

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
draw = functools.partial(draw_all, "rwkv6")


with np.errstate(divide="ignore"):
    LOGS = np.log(np.array([[0.0, 0.5], [0.5, 1.0], [1.0, 0.0]]))


@every_form
def test_worked_numbers(form):
    """The same tokens and gates as for gated linear attention: read first, bonus 2."""
    inputs = KEYS, KEYS, VALUES, LOGS, np.array([2.0, 2.0])
    out, S = rwkv6(*inputs, form=form, chunk_size=2, return_state=True)
    assert out.tolist() == [[20, 40], [60, 80], [235, 290]]
    assert S.tolist() == [[55, 70], [50, 60]]


@every_form
def test_the_bonus_counts_for_the_current_token_only_and_is_not_stored(form):
    r, k, v, g, u, S = draw()
    options = {"form": form, "chunk_size": 3, "initial_state": S, "return_state": True}
    out, last = rwkv6(r, k, v, g, u, **options)
    more, same = rwkv6(r, k, v, g, u + 1, **options)
    assert_close(more - out, (r * k).sum(axis=-1, keepdims=True) * v)
    np.testing.assert_array_equal(same, last)


@every_form
def test_read_before_write(form):
    """Without a bonus a token does not see itself, and what it sees has not decayed at its time."""
    r, k, v, g, u, S = draw()
    out = rwkv6(r, k, v, g, 0 * u, form=form, chunk_size=3, initial_state=S)
    np.testing.assert_allclose(out[0], r[0] @ S, rtol=1e-12)
    _, before = gated_linear_attention(
        k[:1], k[:1], v[:1], g[:1], initial_state=S, return_state=True
    )
    np.testing.assert_allclose(out[1], r[1] @ before, rtol=1e-12)
    later = g.copy()
    later[-1] = -math.inf  # the decay of a token is not for its own read
    assert_close(rwkv6(r, k, v, later, 0 * u, form=form, chunk_size=3, initial_state=S), out)


@every_form
def test_it_is_gated_linear_attention_one_token_late(form):
    """o_t = (GLA's S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t, and the memory is the same."""
    r, k, v, g, u, S = draw()
    out, last = rwkv6(r, k, v, g, u, form=form, initial_state=S, return_state=True)
    late_r = np.concatenate([r[1:], 0 * r[:1]])
    read, expected = gated_linear_attention(late_r, k, v, g, initial_state=S, return_state=True)
    own = (r * u * k).sum(axis=-1, keepdims=True) * v
    assert_close(out, np.concatenate([[r[0] @ S], read[:-1]]) + own)
    assert_close(last, expected)


@every_form
def test_rwkv5_is_a_constant_decay(form):
    """RWKV-5's own sum, powers of one w for each channel: sum over j < t of w^(t-1-j)."""
    r, k, v, _, u, _ = draw()
    w = np.array([0.9, 0.5, 0.3, 0.1])
    expected = np.zeros(v.shape)
    for t in range(7):
        for j in range(t):
            expected[t] += (r[t] * k[j] * w ** (t - 1 - j)).sum() * v[j]
        expected[t] += (r[t] * k[t] * u).sum() * v[t]
    constant = np.broadcast_to(np.log(w), k.shape)
    assert_close(rwkv6(r, k, v, constant, u, form=form, chunk_size=3), expected)


@every_form
def test_open_gates_and_a_bonus_of_one_are_linear_attention(form):
    r, k, v, g, u, _ = draw()
    out = rwkv6(r, k, v, 0 * np.maximum(g, -1), 0 * u + 1, form=form, chunk_size=3)
    expected = linear_attention(r, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(out, expected)


@every_form
@pytest.mark.parametrize("strength", [-50, -1e4, -math.inf])
def test_strong_decay(form, strength):
    r, k, v, g, u, S = draw(40, dtype="float32")
    g[::2] = strength
    options = {"form": form, "chunk_size": 16, "initial_state": S, "return_state": True}
    out, last = rwkv6(r, k, v, g, u, **options)
    expected, memory = double_sum(r, k, v, g, u, S)
    assert_close(out, expected, "float32")
    assert_close(last, memory, "float32")


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    *inputs, u, S = draw()
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = rwkv6(*inputs, u, **options)
    padded = [np.concatenate([x, np.zeros((5, x.shape[-1]))]) for x in inputs]
    found, memory = rwkv6(*padded, u, **options)
    np.testing.assert_array_equal(found[:7], out)
    np.testing.assert_array_equal(memory, last)
