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


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_split_anywhere_and_hand_the_state_to_any_form(first, second):
    *inputs, S = draw(5, leading=LEADING[2])
    options = {"chunk_size": 3, "return_state": True}
    whole, final = gated_linear_attention(*inputs, initial_state=S, **options)
    for t in range(8):
        before, after = ([x[..., part, :] for x in inputs] for part in (np.s_[:t], np.s_[t:]))
        head, state = gated_linear_attention(*before, form=first, initial_state=S, **options)
        tail, last = gated_linear_attention(*after, form=second, initial_state=state, **options)
        assert_close(np.concatenate([head, tail], axis=-2), whole)
        assert_close(last, final)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    q, k, v, g, S = draw(6)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(q, k, v, g, **options)
    padded = [np.concatenate([x, np.zeros((5, x.shape[-1]))]) for x in (q, k, v, g)]
    found, memory = gated_linear_attention(*padded, **options)
    np.testing.assert_array_equal(found[:7], out)
    np.testing.assert_array_equal(memory, last)


@every_form
def test_states_and_inputs_stay_as_they_were(form):
    for N in (0, 1, 5):
        *inputs, S = draw(7, N)
        for x in (*inputs, S):
            x.flags.writeable = False
        out, last = gated_linear_attention(*inputs, form=form, initial_state=S, return_state=True)
        assert not any(np.shares_memory(x, y) for x in (out, last) for y in (*inputs, S))
        if N == 0:
            np.testing.assert_array_equal(last, S)
            assert out.shape == (0, 4)
        strided = [np.asfortranarray(np.repeat(x, 2, axis=-1))[..., ::2] for x in inputs]
        found = gated_linear_attention(*strided, form=form, initial_state=S)
        np.testing.assert_allclose(found, out, rtol=0, atol=1e-14)


@every_form
def test_the_future_does_not_reach_the_past(form):
    *inputs, S = draw(8, N=9)
    options = {"form": form, "chunk_size": 4, "initial_state": S}
    past = gated_linear_attention(*inputs, **options)[:5]
    for x in inputs:
        x[5:] = -3 * abs(x[5:]) - 1
    np.testing.assert_array_equal(gated_linear_attention(*inputs, **options)[:5], past)


@every_form
def test_nan(form):
    """It stays in its sequence, in "recurrent" with the positions from its own on."""
    for spoiled in range(4):
        *inputs, _ = draw(9, N=9, leading=((2,),) * 4 + ((),))
        inputs[3] = np.maximum(inputs[3], -1)
        inputs[spoiled][1, 5, 1] = np.nan
        out = gated_linear_attention(*inputs, form=form, chunk_size=4)
        rows = np.isnan(out).any(axis=-1)
        assert rows[1, 5] and not rows[0].any()
        if form == "recurrent":
            assert not rows[1, :5].any()
        if form == "chunkwise":
            assert not rows[1, :4].any()


@every_form
def test_arguments_that_are_no_float_arrays(form):
    names = ["q", "k", "v", "log_decay"]
    args = dict(zip(names, draw()[:4], strict=True))
    for name in names:
        for wrong in (np.ones((7, 3), int), np.ones((7, 3), bool), args[name].astype(complex)):
            with pytest.raises(TypeError, match=f"^{name} must have a floating dtype"):
                gated_linear_attention(**args | {name: wrong}, form=form)
        with pytest.raises(TypeError, match=f"^{name} must be a NumPy array, got list"):
            gated_linear_attention(**args | {name: args[name].tolist()}, form=form)
        with pytest.raises(TypeError, match="must have the dtype of q, float"):
            gated_linear_attention(**args | {name: args[name].astype("float32")}, form=form)


@every_form
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"form": "masked"}, ValueError, "form must be None or one of 'recurrent', 'parallel', 'c"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be an integer, got 2.0"),
        ({"return_state": "no"}, TypeError, "return_state must be True or False, got 'no'"),
        ({"k": np.ones((7, 2))}, ValueError, r"k must have shape \(\.\.\., N, D\), \(\.\.\., 7, 3"),
        ({"v": np.ones((6, 4))}, ValueError, r"v must have shape \(\.\.\., N, M\), \(\.\.\., 7, 4"),
        ({"log_decay": np.zeros((7, 1))}, ValueError, r"log_decay must have shape .* got \(7, 1"),
        ({"log_decay": np.zeros(7)}, ValueError, r"log_decay must have shape .* got \(7,\)"),
        ({"q": np.ones((1, 3))}, ValueError, r"k must have shape .*, \(\.\.\., 1, 3\), got \(7, 3"),
        ({"log_decay": np.full((7, 3), 0.5)}, ValueError, "log_decay must be at most 0, got 0.5"),
        (
            {"log_decay": np.full((7, 3), math.inf)},
            ValueError,
            "log_decay must be at most 0, got",
        ),
        (
            {"q": np.ones((2, 7, 3)), "log_decay": np.zeros((3, 7, 3))},
            ValueError,
            "the leading dimensions of q, k, v and log_decay must broadcast",
        ),
        (
            {"initial_state": np.ones((4, 3))},
            ValueError,
            "initial_state must have shape",
        ),
        (
            {"initial_state": np.ones((3, 4), "f4")},
            TypeError,
            "initial_state must have dtype",
        ),
        ({"initial_state": [[1.0]]}, TypeError, "initial_state must be a NumPy array, got list"),
        (
            {"q": np.ones((2, 7, 3)), "initial_state": np.ones((3, 3, 4))},
            ValueError,
            "the leading dimensions of q and initial_state must broadcast",
        ),
    ],
)
def test_what_is_refused(form, changes, error, message):
    args = dict(zip(["q", "k", "v", "log_decay"], draw()[:4], strict=True)) | {"form": form}
    with pytest.raises(error, match="^" + message):
        gated_linear_attention(**args | changes)
