"""The selective scan and the state-space dual: every form against the sum that it stands for."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import (
    gated_linear_attention,
    retention,
    selective_scan,
    state_space_dual,
)

pytestmark = pytest.mark.filterwarnings("error")

SELECTIVE = ["recurrent", "scan"]
DUAL = ["recurrent", "parallel", "chunkwise"]
every_selective_form = pytest.mark.parametrize("form", SELECTIVE)
every_dual_form = pytest.mark.parametrize("form", DUAL)
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}
# Leading dimensions of x, delta or log_decay, B, C and the state.
LEADING = [
    ((), (), (), (), ()),
    ((2,), (2,), (2,), (2,), (2,)),
    ((2, 3), (3,), (2, 1), (), (3,)),
    ((), (3,), (), (2, 1), ()),
    ((), (), (), (), (2, 1)),
    ((0,), (1,), (), (0,), ()),
]


def kept(dtype):
    """The dtype of the state."""
    return "float64" if dtype == "float64" else "float32"


def draw_selective(seed=0, N=7, E=4, K=3, leading=LEADING[0], dtype="float64"):
    """x, delta, A, B, C, D and a state; a third of the steps is 0, a third is large."""
    rng = np.random.default_rng(seed)
    x, delta, B, C, h = (
        rng.normal(size=(*lead, *shape))
        for lead, shape in zip(leading, ((N, E), (N, E), (N, K), (N, K), (E, K)), strict=True)
    )
    delta = abs(delta) * rng.choice([0, 1, 30], size=delta.shape)
    A, D = -rng.uniform(0.1, 3, size=(E, K)), rng.normal(size=E)
    return [array.astype(dtype) for array in (x, delta, A, B, C, D)], h.astype(kept(dtype))


def draw_dual(seed=0, N=7, K=3, P=4, leading=LEADING[0], dtype="float64"):
    """x, log_decay, B, C and a state; some decays are 0 or nearly 0."""
    rng = np.random.default_rng(seed)
    shapes = ((N, P), (N,), (N, K), (N, K), (K, P))
    x, g, B, C, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -abs(g) * rng.choice([0, 1, 30, np.inf], p=[0.3, 0.5, 0.1, 0.1], size=g.shape)
    return [array.astype(dtype) for array in (x, g, B, C)], S.astype(kept(dtype))


def spread(arrays, leading):
    """Each array, given with the number of its own axes, with the same leading dimensions."""
    return [np.broadcast_to(a, leading + a.shape[a.ndim - axes :]) for a, axes in arrays]


def selective_states(x, delta, A, B, h, t):
    """The state (E, K) of one sequence after t tokens, as a sum over what was written."""
    states = np.exp(A * delta[:t].sum(axis=0)[:, None]) * h
    for j in range(t):
        since = delta[j + 1 : t].sum(axis=0)
        states = states + np.exp(A * since[:, None]) * np.outer(delta[j] * x[j], B[j])
    return states


def selective_sum(x, delta, A, B, C, D, h):
    """Outputs and last state: each x_j that was written, and the first state, by one exp."""
    x, delta, A, B, C, D, h = (array.astype(float) for array in (x, delta, A, B, C, D, h))
    shared = np.broadcast_shapes(x.shape[:-2], delta.shape[:-2], B.shape[:-2], h.shape[:-2])
    leading = np.broadcast_shapes(shared, C.shape[:-2])
    N, E = x.shape[-2:]
    written = [(x, 2), (delta, 2), (B, 2), (h, 2)]
    y, last = np.zeros((*leading, N, E)), np.zeros((*shared, *h.shape[-2:]))
    each = spread([*written, (C, 2)], leading)
    for at in np.ndindex(leading):
        x_, delta_, B_, h_, C_ = (a[at] for a in each)
        for t in range(N):
            y[at][t] = selective_states(x_, delta_, A, B_, h_, t + 1) @ C_[t] + D * x_[t]
    each = spread(written, shared)
    for at in np.ndindex(shared):
        x_, delta_, B_, h_ = (a[at] for a in each)
        last[at] = selective_states(x_, delta_, A, B_, h_, N)
    return y, last


def dual_sum(x, g, B, C, S):
    """y_t = Σ_j (C_t·B_j) exp(g_{j+1} + ... + g_t) x_j, and what the first state adds."""
    x, g, B, C, S = (array.astype(float) for array in (x, g, B, C, S))
    shared = np.broadcast_shapes(x.shape[:-2], g.shape[:-1], B.shape[:-2], S.shape[:-2])
    leading = np.broadcast_shapes(shared, C.shape[:-2])
    N, P = x.shape[-2:]
    written = [(x, 2), (g, 1), (B, 2), (S, 2)]
    y, last = np.zeros((*leading, N, P)), np.zeros((*shared, *S.shape[-2:]))
    each = spread([*written, (C, 2)], leading)
    for at in np.ndindex(leading):
        x_, g_, B_, S_, C_ = (a[at] for a in each)
        for t in range(N):
            y[at][t] = np.exp(g_[: t + 1].sum()) * C_[t] @ S_
            for j in range(t + 1):
                y[at][t] += (C_[t] @ B_[j]) * np.exp(g_[j + 1 : t + 1].sum()) * x_[j]
    each = spread(written, shared)
    for at in np.ndindex(shared):
        x_, g_, B_, S_ = (a[at] for a in each)
        last[at] = np.exp(g_.sum()) * S_
        for j in range(N):
            last[at] += np.exp(g_[j + 1 :].sum()) * np.outer(B_[j], x_[j])
    return y, last


def assert_close(found, expected, dtype="float64", tolerance=None):
    """Dtype, shape, and the error relative to the largest number of all."""
    assert found.dtype == dtype and found.shape == expected.shape
    bound = (tolerance or TOLERANCE[dtype]) * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def assert_result(found, expected, dtype="float64"):
    assert_close(found[0], expected[0], dtype)
    assert_close(found[1], expected[1], kept(dtype))


# Every form is the definition.


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(0, 12),
    E=st.integers(0, 3),
    K=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(9, 3, 2, LEADING[2], "float64", 0)
@example(9, 3, 2, LEADING[3], "float64", 0)
@example(0, 3, 2, LEADING[2], "float16", 0)
def test_selective_scan_is_the_sum(N, E, K, leading, dtype, seed):
    (x, delta, A, B, C, D), h = draw_selective(seed, N, E, K, leading, dtype)
    expected = selective_sum(x, delta, A, B, C, D, h)
    for form in [*SELECTIVE, None]:
        options = {"form": form, "return_state": True}
        assert_result(
            selective_scan(x, delta, A, B, C, D, initial_state=h, **options), expected, dtype
        )
    expected = selective_sum(x, delta, A, B, C, 0 * D, np.zeros((E, K)))
    for form in SELECTIVE:
        found = selective_scan(x, delta, A, B, C, form=form, return_state=True)
        assert_result(found, expected, dtype)


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(0, 20),
    chunk_size=st.integers(1, 22),
    K=st.integers(0, 3),
    P=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(20, 6, 2, 4, LEADING[2], "float64", 0)
@example(0, 6, 2, 4, LEADING[3], "float32", 0)
def test_state_space_dual_is_the_sum(N, chunk_size, K, P, leading, dtype, seed):
    arrays, S = draw_dual(seed, N, K, P, leading, dtype)
    expected = dual_sum(*arrays, S)
    for form in [*DUAL, None]:
        options = {"form": form, "chunk_size": chunk_size, "return_state": True}
        assert_result(state_space_dual(*arrays, initial_state=S, **options), expected, dtype)
    without = S.shape[-2:]
    options = {"chunk_size": chunk_size, "return_state": True}
    assert_result(state_space_dual(*arrays, **options), dual_sum(*arrays, np.zeros(without)), dtype)


# Worked numbers.

X = np.array([[8.0], [4.0], [2.0]])
ONES = np.ones((3, 1))
HALF = np.array([[-np.log(2)]])


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
    q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    y, S = state_space_dual(v, g, k, q, **options)
    assert_close(y, np.array([[10, 20], [30, 40], [117.5, 145]]))
    assert_close(S, np.array([[52.5, 65.0], [65.0, 80.0]]))


# Details that people get wrong.


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
    (x, delta, A, B, C, D), _ = draw_selective()
    raw = np.random.default_rng(0).normal(size=delta.shape)
    with pytest.raises(ValueError, match=r"^delta must be at least 0, got -"):
        selective_scan(x, raw, A, B, C, D, form=form)
    y = selective_scan(x, np.log1p(np.exp(raw)), A, B, C, D, form=form)
    assert abs(y - selective_scan(x, abs(raw), A, B, C, D, form=form)).max() > 0.1


@every_selective_form
def test_a_step_of_zero_leaves_the_state_as_it_is(form):
    (x, delta, A, B, C, D), h = draw_selective()
    y, after = selective_scan(x, 0 * delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert np.array_equal(after, h)
    assert_close(y, C @ h.T)


@every_selective_form
def test_a_large_step_forgets(form):
    """exp(Δ A) = 0: only what is written now is read."""
    (x, delta, A, B, C, D), h = draw_selective()
    delta = np.full_like(delta, 1e5)
    y, after = selective_scan(x, delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert_close(y, 1e5 * x * (C * B).sum(axis=-1, keepdims=True))
    assert_close(after, 1e5 * np.outer(x[-1], B[-1]))


@every_selective_form
def test_it_is_read_after_it_is_written(form):
    (x, delta, A, B, C, D), h = draw_selective(N=1)
    y, after = selective_scan(x, delta, A, B, C, form=form, initial_state=h, return_state=True)
    assert_close(y, (after @ C[0])[None])
    assert abs(y - (h @ C[0])[None]).max() > 0.1


def test_padding_is_exact():
    (x, delta, A, B, C, D), h = draw_selective()
    padded = [np.concatenate([a, np.ones((3, a.shape[-1]))]) for a in (x, delta, B, C)]
    padded[1][7:] = 0
    for form in SELECTIVE:
        options = {"form": form, "initial_state": h, "return_state": True}
        y, state = selective_scan(x, delta, A, B, C, D, **options)
        y_padded, state_padded = selective_scan(padded[0], padded[1], A, *padded[2:], D, **options)
        assert_close(y_padded[:7], y)
        assert_close(state_padded, state)
    (x, g, B, C), S = draw_dual()
    for form in DUAL:
        options = {"form": form, "initial_state": S, "chunk_size": 4, "return_state": True}
        y, state = state_space_dual(x, g, B, C, **options)
        x_, B_, C_ = (np.concatenate([a, np.zeros((3, a.shape[-1]))]) for a in (x, B, C))
        y_padded, state_padded = state_space_dual(x_, np.append(g, np.zeros(3)), B_, C_, **options)
        assert_close(y_padded[:7], y)
        assert_close(state_padded, state)


@every_dual_form
def test_a_decay_of_zero_forgets_exactly(form):
    (x, g, B, C), S = draw_dual(N=9)
    g = np.where(np.arange(9) == 5, -np.inf, -0.1)
    options = {"form": form, "chunk_size": 4, "return_state": True}
    y, state = state_space_dual(x, g, B, C, initial_state=S, **options)
    y_new, state_new = state_space_dual(x[5:], g[5:], B[5:], C[5:], **options)
    assert_close(y[5:], y_new)
    assert_close(state, state_new)


@every_dual_form
@pytest.mark.parametrize("strong", [-50.0, -1e30])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_strong_decay(form, strong, dtype):
    """Each token sees itself and next to nothing else: no exponent above 0 is ever formed."""
    (x, _, B, C), S = draw_dual(N=9, dtype=dtype)
    y = state_space_dual(x, np.full(9, strong, dtype), B, C, form=form, initial_state=S)
    assert_close(y, (C * B).sum(axis=-1, keepdims=True) * x, dtype)


# The same recurrence under other names.


def test_one_rate_for_all_entries_is_the_dual():
    """Selective scan with the same A everywhere and one step for all channels."""
    (x, delta, _, B, C, _), h = draw_selective(N=11, leading=LEADING[2])
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
    (x, g, B, C), S = draw_dual(N=11)
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
    (x, delta, A, B, C, _), h = draw_selective(E=1)
    y, h_last = selective_scan(x, delta, A, B, C, initial_state=h, return_state=True)
    out, S = gated_linear_attention(
        C, B, delta * x, delta * A, initial_state=h.T, return_state=True
    )
    assert_close(y, out)
    assert_close(h_last, S.T)


# Streaming, dtypes, NaN.


# Arguments.
