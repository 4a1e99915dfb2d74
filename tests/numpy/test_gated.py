"""Gated linear attention: every form against the double sum over decayed products."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import gated_linear_attention, identity, linear_attention

pytestmark = pytest.mark.filterwarnings("error")

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}
LEADING = [  # of q, k, v, log_decay and the initial state
    ((), (), (), (), ()),
    ((2,), (2,), (2,), (2,), (2,)),
    ((2, 3), (3,), (2, 1), (), (3,)),
    ((5, 1, 1), (3,), (2, 1), (2, 3), ()),
    ((), (), (), (2,), ()),
    ((2,), (), (), (), ()),
    ((), (), (), (), (4,)),
    ((0,), (1,), (0,), (1,), ()),
]


def draw(seed=0, N=7, D=3, M=4, leading=((),) * 5, dtype="float64"):
    """q, k, v, log_decay with a few gates that are closed, and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D, M))
    q, k, v, g, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -np.exp(2 * g)
    g[rng.random(g.shape) < 0.1] = -math.inf
    g[rng.random(g.shape) < 0.1] = 0
    return [x.astype(dtype) for x in (q, k, v, g, S)]


def one_sum(q, k, v, g, S):
    """o_t = sum over j <= t of sum_d q_td k_jd prod_{j < i <= t} alpha_id v_j, and S_N: loops."""
    N, D = k.shape
    alpha = np.exp(g)
    out = np.zeros((N, v.shape[-1]))
    last = np.prod(alpha, axis=0)[:, None] * S
    for t in range(N):
        for d in range(D):
            out[t] += q[t, d] * np.prod(alpha[: t + 1, d]) * S[d]
            for j in range(t + 1):
                out[t] += q[t, d] * k[j, d] * np.prod(alpha[j + 1 : t + 1, d]) * v[j]
    for j in range(N):
        last += np.prod(alpha[j + 1 :], axis=0)[:, None] * np.outer(k[j], v[j])
    return out, last


def double_sum(q, k, v, g, S):
    """`one_sum` for every sequence of the broadcast leading dimensions."""
    arrays = [x.astype(float) for x in (q, k, v, g, S)]
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    q, k, v, g, S = (np.broadcast_to(x, leading + x.shape[-2:]) for x in arrays)
    out, last = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(S.shape)
    for at in np.ndindex(leading):
        out[at], last[at] = one_sum(q[at], k[at], v[at], g[at], S[at])
    return out, last


def assert_close(found, expected, dtype="float64"):
    """Dtype, shape, and the error relative to the largest number of all."""
    assert found.dtype == dtype and found.shape == expected.shape
    bound = TOLERANCE[dtype] * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(0, 20),
    chunk_size=st.integers(1, 25),
    D=st.integers(0, 4),
    M=st.integers(0, 5),
    leading=st.sampled_from(LEADING),
    with_state=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(17, 4, 3, 5, LEADING[3], True, "float64", 0)
@example(0, 4, 3, 5, LEADING[3], True, "float64", 0)
@example(1, 4, 3, 5, LEADING[2], False, "float32", 0)
def test_every_form_is_the_sum(N, chunk_size, D, M, leading, with_state, dtype, seed):
    *inputs, S = draw(seed, N, D, M, leading, dtype)
    kept = "float64" if dtype == "float64" else "float32"
    state = S if with_state else np.zeros((D, M), dtype)
    expected, _ = double_sum(*inputs, state)
    _, last = double_sum(np.zeros((N, D)), *inputs[1:], state)  # without what only q has
    for form in [*FORMS, None]:
        out, found = gated_linear_attention(
            *inputs,
            form=form,
            chunk_size=chunk_size,
            initial_state=S.astype(kept) if with_state else None,
            return_state=True,
        )
        assert_close(out, expected, dtype)
        assert_close(found, last, kept)


KEYS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


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
    q, k, v, _, S = draw(1, leading=((2,), (), (2, 1), (), ()))
    g = np.zeros_like(k)
    expected = linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(gated_linear_attention(q, k, v, g, form=form, chunk_size=3), expected)


@every_form
def test_the_gate_is_that_of_the_key_channel(form):
    """A row of S has its own gate; a column of S has none."""
    q, k, v, g, S = draw(2, N=1)
    _, found = gated_linear_attention(q, k, v, g, form=form, initial_state=S, return_state=True)
    assert_close(found, np.exp(g[0])[:, None] * S + np.outer(k[0], v[0]))


@every_form
def test_a_closed_gate_forgets_exactly(form):
    """What comes after log_decay = -inf is what a new sequence gives, however large S was."""
    q, k, v, g, S = draw(3, N=9)
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
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strength", [-50, -1e4, -math.inf])
def test_strong_decay(form, dtype, strength):
    """exp(-G) of a cumulative sum G would overflow at once: nothing here is above 1."""
    q, k, v, g, S = draw(4, N=40, dtype=dtype)
    g[::2] = strength
    options = {"form": form, "chunk_size": 16, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(q, k, v, g, **options)
    expected, memory = double_sum(q, k, v, g, S)
    assert_close(out, expected, dtype)
    assert_close(last, memory, dtype)


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
    q, k, v, g, S = draw(6)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(q, k, v, g, **options)
    padded = [np.concatenate([x, np.zeros((5, x.shape[-1]))]) for x in (q, k, v, g)]
    found, memory = gated_linear_attention(*padded, **options)
    np.testing.assert_array_equal(found[:7], out)
    np.testing.assert_array_equal(memory, last)
