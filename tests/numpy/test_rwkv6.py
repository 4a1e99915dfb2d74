"""The memory of RWKV-5 and 6: both forms against the double sum over decayed products."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import gated_linear_attention, identity, linear_attention, rwkv6

pytestmark = pytest.mark.filterwarnings("error")

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}
LEADING = [  # of r, k, v, log_decay, bonus and the initial state
    ((), (), (), (), (), ()),
    ((2,), (2,), (2,), (2,), (2,), (2,)),
    ((2, 3), (3,), (2, 1), (), (3,), (3,)),
    ((5, 1, 1), (3,), (2, 1), (2, 3), (1, 3), ()),
    ((), (), (), (2,), (), ()),
    ((), (), (), (), (2,), ()),
    ((), (), (), (), (2, 1), (4,)),
    ((0,), (1,), (0,), (1,), (), ()),
]


def draw(seed=0, N=7, D=3, M=4, leading=((),) * 6, dtype="float64"):
    """r, k, v, log_decay with a few that are -inf or 0, bonus, and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D,), (D, M))
    r, k, v, g, u, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -np.exp(2 * g)
    g[rng.random(g.shape) < 0.1] = -math.inf
    g[rng.random(g.shape) < 0.1] = 0
    return [x.astype(dtype) for x in (r, k, v, g, u, S)]


def one_sum(r, k, v, g, u, S):
    """o_t = sum over j < t of sum_d r_td k_jd prod_{j < i < t} alpha_id v_j, plus u: loops."""
    N, D = k.shape
    alpha = np.exp(g)
    out = np.zeros((N, v.shape[-1]))
    for t in range(N):
        for d in range(D):
            out[t] += r[t, d] * np.prod(alpha[:t, d]) * S[d]
            for j in range(t):
                out[t] += r[t, d] * k[j, d] * np.prod(alpha[j + 1 : t, d]) * v[j]
            out[t] += r[t, d] * u[d] * k[t, d] * v[t]
    last = np.prod(alpha, axis=0)[:, None] * S
    for j in range(N):
        last += np.prod(alpha[j + 1 :], axis=0)[:, None] * np.outer(k[j], v[j])
    return out, last


def double_sum(r, k, v, g, u, S):
    """`one_sum` for every sequence of the broadcast leading dimensions."""
    arrays = [(x.astype(float), 2) for x in (r, k, v, g, S)] + [(u.astype(float), 1)]
    leading = np.broadcast_shapes(*(x.shape[: x.ndim - axes] for x, axes in arrays))
    r, k, v, g, S, u = (
        np.broadcast_to(x, leading + x.shape[x.ndim - axes :]) for x, axes in arrays
    )
    out, last = np.zeros((*r.shape[:-1], v.shape[-1])), np.zeros(S.shape)
    for at in np.ndindex(leading):
        out[at], last[at] = one_sum(r[at], k[at], v[at], g[at], u[at], S[at])
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
@example(0, 4, 3, 5, LEADING[5], True, "float64", 0)
@example(1, 4, 3, 5, LEADING[2], False, "float32", 0)
def test_both_forms_are_the_sum(N, chunk_size, D, M, leading, with_state, dtype, seed):
    *inputs, S = draw(seed, N, D, M, leading, dtype)
    kept = "float64" if dtype == "float64" else "float32"
    state = S if with_state else np.zeros((D, M), dtype)
    expected, _ = double_sum(*inputs, state)
    # Neither receptances nor bonus are remembered, and so their leading dimensions are not.
    _, last = double_sum(np.zeros((N, D)), *inputs[1:4], np.zeros(D), state)
    for form in [*FORMS, None]:
        out, found = rwkv6(
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
    r, k, v, g, u, S = draw(1)
    options = {"form": form, "chunk_size": 3, "initial_state": S, "return_state": True}
    out, last = rwkv6(r, k, v, g, u, **options)
    more, same = rwkv6(r, k, v, g, u + 1, **options)
    assert_close(more - out, (r * k).sum(axis=-1, keepdims=True) * v)
    np.testing.assert_array_equal(same, last)


@every_form
def test_read_before_write(form):
    """Without a bonus a token does not see itself, and what it sees has not decayed at its time."""
    r, k, v, g, u, S = draw(2)
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
    r, k, v, g, u, S = draw(3)
    out, last = rwkv6(r, k, v, g, u, form=form, initial_state=S, return_state=True)
    late_r = np.concatenate([r[1:], np.zeros((1, 3))])
    read, expected = gated_linear_attention(late_r, k, v, g, initial_state=S, return_state=True)
    own = (r * u * k).sum(axis=-1, keepdims=True) * v
    assert_close(out, np.concatenate([[r[0] @ S], read[:-1]]) + own)
    assert_close(last, expected)


@every_form
def test_rwkv5_is_a_constant_decay(form):
    """RWKV-5's own sum, powers of one w for each channel: sum over j < t of w^(t-1-j)."""
    r, k, v, _, u, _ = draw(4)
    w = np.array([0.9, 0.5, 0.1])
    expected = np.zeros((7, 4))
    for t in range(7):
        for j in range(t):
            expected[t] += (r[t] * k[j] * w ** (t - 1 - j)).sum() * v[j]
        expected[t] += (r[t] * k[t] * u).sum() * v[t]
    constant = np.broadcast_to(np.log(w), (7, 3))
    assert_close(rwkv6(r, k, v, constant, u, form=form, chunk_size=3), expected)


@every_form
def test_open_gates_and_a_bonus_of_one_are_linear_attention(form):
    r, k, v, g, u, _ = draw(5)
    out = rwkv6(r, k, v, 0 * np.maximum(g, -1), 0 * u + 1, form=form, chunk_size=3)
    expected = linear_attention(r, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(out, expected)


@every_form
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strength", [-50, -1e4, -math.inf])
def test_strong_decay(form, dtype, strength):
    r, k, v, g, u, S = draw(6, N=40, dtype=dtype)
    g[::2] = strength
    options = {"form": form, "chunk_size": 16, "initial_state": S, "return_state": True}
    out, last = rwkv6(r, k, v, g, u, **options)
    expected, memory = double_sum(r, k, v, g, u, S)
    assert_close(out, expected, dtype)
    assert_close(last, memory, dtype)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    *inputs, u, S = draw(8)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = rwkv6(*inputs, u, **options)
    padded = [np.concatenate([x, np.zeros((5, x.shape[-1]))]) for x in inputs]
    found, memory = rwkv6(*padded, u, **options)
    np.testing.assert_array_equal(found[:7], out)
    np.testing.assert_array_equal(memory, last)
