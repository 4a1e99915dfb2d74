"""The selective scan and the state-space dual: worked numbers, details, and their relatives.

That every form is the sum that it stands for is tested in test_definitions.py.
"""

import functools

import numpy as np
import pytest

from lesson_code.numpy import (
    gated_linear_attention,
    retention,
    selective_scan,
    state_space_dual,
)
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw_all

SELECTIVE = ["recurrent", "scan"]
DUAL = ["recurrent", "parallel", "chunkwise"]
every_selective_form = pytest.mark.parametrize("form", SELECTIVE)
every_dual_form = pytest.mark.parametrize("form", DUAL)
draw_selective = functools.partial(draw_all, "selective_scan")
draw_dual = functools.partial(draw_all, "state_space_dual")
X = np.array([[8.0], [4.0], [2.0]])
ONES = np.ones((3, 1))
HALF = np.array([[-np.log(2)]])


def assert_result(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@every_selective_form
def test_worked_numbers_selective(form):
    """8, then 8/2 + 4 = 8, then 8/2 + 2 = 6."""
    y, h = selective_scan(X, ONES, HALF, ONES, ONES, form=form, return_state=True)
    assert_close(y[:, 0], np.array([8.0, 8.0, 6.0]))
    assert_close(h, np.array([[6.0]]))
    # A step of 2 decays by 1/4 and writes twice as much: 8/4 + 2 * 4 = 10. One of 0 does neither.
    y = selective_scan(X, np.array([[1.0], [2.0], [0.0]]), HALF, ONES, ONES, form=form)
    assert_close(y[:, 0], np.array([8.0, 10.0, 10.0]))
    # B says how much is written, C how much is read, D how much goes past.
    B, C = np.array([[1.0], [0.0], [3.0]]), np.array([[1.0], [2.0], [1.0]])
    y = selective_scan(X, ONES, HALF, B, C, np.array([10.0]), form=form)
    assert_close(y[:, 0], np.array([8 + 80, 2 * 4 + 40, 2 + 3 * 2 + 20.0]))


@every_selective_form
def test_each_entry_has_a_decay_of_its_own(form):
    """Two channels of two numbers each: decays 1/2, 1/4 and 1/8, 1/16, and what is left of 16."""
    A = -np.log(2) * np.array([[1.0, 2.0], [3.0, 4.0]])
    x, delta = np.array([[16.0, 16.0], [0.0, 0.0]]), np.ones((2, 2))
    B = C = np.ones((2, 2))
    y, h = selective_scan(x, delta, A, B, C, form=form, return_state=True)
    assert_close(h, np.array([[8.0, 4.0], [2.0, 1.0]]))
    assert_close(y, np.array([[32.0, 32.0], [12.0, 3.0]]))


@every_dual_form
def test_worked_numbers_dual(form):
    g = np.log(0.5) * np.ones(3)
    options = {"form": form, "chunk_size": 2, "return_state": True}
    y, S = state_space_dual(X, g, ONES, ONES, **options)
    assert_close(y[:, 0], np.array([8.0, 8.0, 6.0]))
    assert_close(S, np.array([[6.0]]))
    # The three tokens of the book, halved at each step.
    y, S = state_space_dual(VALUES, g, KEYS, KEYS, **options)
    assert_close(y, np.array([[10, 20], [30, 40], [117.5, 145]]))
    assert_close(S, np.array([[52.5, 65.0], [65.0, 80.0]]))


@every_selective_form
def test_A_is_discretized_exactly_and_B_as_delta_B(form):
    """Zero-order hold for B as well would write (exp(Δ A) - 1) / A instead of Δ: another model."""
    delta, A = np.array([[2.0]]), np.array([[-0.5]])
    one = np.ones((1, 1))
    _, h = selective_scan(one, delta, A, one, one, form=form, return_state=True)
    assert h == 2.0
    assert abs(np.expm1(delta * A) / A - h) > 0.7
    _, h = selective_scan(
        0 * one, delta, A, one, one, form=form, initial_state=one, return_state=True
    )
    assert_close(h, np.exp([[-1.0]]))  # and not 1 + Δ A = 0


@every_selective_form
def test_delta_comes_after_its_softplus(form):
    x, delta, A, B, C, D, _ = draw_selective()
    raw = np.random.default_rng(0).normal(size=delta.shape)
    with pytest.raises(ValueError, match=r"^delta must be at least 0, got -"):
        selective_scan(x, raw, A, B, C, D, form=form)
    y = selective_scan(x, np.log1p(np.exp(raw)), A, B, C, D, form=form)
    assert abs(y - selective_scan(x, abs(raw), A, B, C, D, form=form)).max() > 0.1


@every_selective_form
def test_a_step_of_zero_leaves_the_state_as_it_is(form):
    x, delta, A, B, C, D, h = draw_selective()
    y, after = selective_scan(x, 0 * delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert np.array_equal(after, h)
    assert_close(y, C @ h.T)


@every_selective_form
def test_a_large_step_forgets(form):
    """exp(Δ A) = 0: only what is written now is read."""
    x, delta, A, B, C, D, h = draw_selective()
    delta = np.full_like(delta, 1e5)
    y, after = selective_scan(x, delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert_close(y, 1e5 * x * (C * B).sum(axis=-1, keepdims=True))
    assert_close(after, 1e5 * np.outer(x[-1], B[-1]))


@every_selective_form
def test_it_is_read_after_it_is_written(form):
    x, delta, A, B, C, D, h = draw_selective(N=1)
    y, after = selective_scan(x, delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert_close(y, (after @ C[0])[None])
    assert abs(y - (h @ C[0])[None]).max() > 0.1


def test_padding_is_exact():
    x, delta, A, B, C, D, h = draw_selective()
    padded = [np.concatenate([a, np.ones((3, a.shape[-1]))]) for a in (x, delta, B, C)]
    padded[1][7:] = 0
    for form in SELECTIVE:
        options = {"form": form, "initial_state": h, "return_state": True}
        y, state = selective_scan(x, delta, A, B, C, D, **options)
        y_padded, state_padded = selective_scan(padded[0], padded[1], A, *padded[2:], D, **options)
        assert_close(y_padded[:7], y)
        assert_close(state_padded, state)
    x, g, B, C, S = draw_dual()
    for form in DUAL:
        options = {"form": form, "initial_state": S, "chunk_size": 4, "return_state": True}
        y, state = state_space_dual(x, g, B, C, **options)
        x_, B_, C_ = (np.concatenate([a, np.zeros((3, a.shape[-1]))]) for a in (x, B, C))
        y_padded, state_padded = state_space_dual(x_, np.append(g, np.zeros(3)), B_, C_, **options)
        assert_close(y_padded[:7], y)
        assert_close(state_padded, state)


@every_dual_form
def test_a_decay_of_zero_forgets_exactly(form):
    x, g, B, C, S = draw_dual(N=9)
    g = np.where(np.arange(9) == 5, -np.inf, -0.1)
    options = {"form": form, "chunk_size": 4, "return_state": True}
    y, state = state_space_dual(x, g, B, C, initial_state=S, **options)
    y_new, state_new = state_space_dual(x[5:], g[5:], B[5:], C[5:], **options)
    assert_close(y[5:], y_new)
    assert_close(state, state_new)


@every_dual_form
@pytest.mark.parametrize("strong", [-50.0, -1e30])
def test_strong_decay(form, strong):
    """Each token sees itself and next to nothing else: no exponent above 0 is ever formed."""
    x, _, B, C, S = draw_dual(9, dtype="float32")
    y = state_space_dual(x, np.full(9, strong, "float32"), B, C, form=form, initial_state=S)
    assert_close(y, (C * B).sum(axis=-1, keepdims=True) * x, "float32")


def test_one_rate_for_all_entries_is_the_dual():
    """Selective scan with the same A everywhere and one step for all channels."""
    x, delta, _, B, C, _, h = draw_selective(11, leading=(2, 3))
    delta = delta[..., :1]
    A = np.full((4, 3), -0.7)
    y, h_last = selective_scan(
        x, np.repeat(delta, 4, axis=-1), A, B, C, initial_state=h, return_state=True
    )
    for form in DUAL:
        y_dual, S = state_space_dual(
            delta * x,
            -0.7 * delta[..., 0],
            B,
            C,
            form=form,
            chunk_size=4,
            initial_state=h.swapaxes(-1, -2),
            return_state=True,
        )
        assert_close(y_dual, y)
        assert_close(S, h_last.swapaxes(-1, -2))


def test_the_dual_is_gated_linear_attention_and_with_a_constant_decay_retention():
    x, g, B, C, S = draw_dual(N=11)
    options = {"initial_state": S, "return_state": True}
    gates = np.repeat(g[:, None], 3, axis=1)
    assert_result(
        state_space_dual(x, g, B, C, **options), gated_linear_attention(C, B, x, gates, **options)
    )
    assert_result(
        state_space_dual(x, np.full(11, np.log(0.9)), B, C, **options),
        retention(C, B, x, 0.9, **options),
    )


def test_one_channel_of_the_selective_scan_is_gated_linear_attention():
    """With E = 1, h is a memory of keys B and values Δ x under the gates exp(Δ A)."""
    x, delta, A, B, C, _, h = draw_selective()
    x, delta, A, h = x[:, :1], delta[:, :1], A[:1], h[:1]
    y, h_last = selective_scan(x, delta, A, B, C, initial_state=h, return_state=True)
    out, S = gated_linear_attention(
        C, B, delta * x, delta * A, initial_state=h.T, return_state=True
    )
    assert_close(y, out)
    assert_close(h_last, S.T)
