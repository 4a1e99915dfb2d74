"""Retention: every form against the sum over tokens, and against every other form."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

from lesson_code.numpy import identity, linear_attention, retention, retention_decays

pytestmark = pytest.mark.filterwarnings("error")

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-3}


def one_retention(q, k, v, decay, S):
    """The sum for one sequence, token by token: what is n - m tokens old weighs decay^(n - m)."""
    N = len(k)
    out = np.zeros((N, v.shape[-1]))
    for n in range(N):
        out[n] = decay ** (n + 1) * (q[n] @ S)
        for m in range(n + 1):
            out[n] += decay ** (n - m) * (q[n] @ k[m]) * v[m]
    S = decay**N * S
    for m in range(N):
        S = S + decay ** (N - 1 - m) * np.outer(k[m], v[m])
    return out, S


def loop(q, k, v, decay, S=None):
    """`one_retention` for every sequence of the broadcast leading dimensions, in float64."""
    S = np.zeros((k.shape[-1], v.shape[-1])) if S is None else S
    arrays = [(q, 2), (k, 2), (v, 2), (np.asarray(decay), 0), (S, 2)]
    leading = np.broadcast_shapes(*(x.shape[: x.ndim - axes] for x, axes in arrays))
    q, k, v, decay, S = (
        np.broadcast_to(x.astype(float), leading + x.shape[x.ndim - axes :]) for x, axes in arrays
    )
    out, S_N = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(S.shape)
    for at in np.ndindex(leading):
        out[at], S_N[at] = one_retention(q[at], k[at], v[at], float(decay[at]), S[at])
    return out, S_N


def draw(seed=0, N=7, D=3, M=4, leading=((), (), ()), dtype="float64"):
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M))
    return [
        rng.normal(size=(*lead, *shape)).astype(dtype)
        for lead, shape in zip(leading, shapes, strict=True)
    ]


def draw_decay(shape=(), seed=1, dtype="float64"):
    return np.array(np.random.default_rng(seed).uniform(0.1, 1, size=shape), dtype)


def draw_state(leading=(), D=3, M=4, seed=2, dtype="float64"):
    return np.random.default_rng(seed).normal(size=(*leading, D, M)).astype(dtype)


def kept(dtype):
    """The dtype of the state."""
    return "float64" if dtype == "float64" else "float32"


def assert_close(found, expected, dtype="float64", tolerance=None):
    """Dtype, shape, and the error relative to the largest number of all."""
    assert found.dtype == dtype and found.shape == expected.shape
    bound = (tolerance or TOLERANCE[dtype]) * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


# Every form is the definition.


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=5, max_dims=2, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 20),
    chunk_size=st.integers(1, 25),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    BroadcastableShapes(((5, 1, 1), (3, 1), (1, 1), (2,), ()), (5, 3, 2)),
    *(True, 13, 4, 3, 5, "float64", 0),
)
@example(BroadcastableShapes(((), (), (), (2, 3), ()), (2, 3)), False, 5, 2, 2, 3, "float32", 0)
@example(BroadcastableShapes(((2,),) * 5, (2,)), True, 0, 4, 3, 5, "float64", 0)
@example(BroadcastableShapes(((),) * 5, ()), True, 1, 4, 1, 5, "float16", 0)
def test_forms_are_the_definition(shapes, with_state, N, chunk_size, D, M, dtype, seed):
    *leading, of_decay, of_state = shapes.input_shapes
    q, k, v = draw(seed, N, D, M, leading, dtype)
    decay = draw_decay(of_decay, seed, kept(dtype))
    S = draw_state(of_state, D, M, seed, kept(dtype)) if with_state else None
    expected, _ = loop(q, k, v, decay, S)
    _, expected_S = loop(k, k, v, decay, S)  # the queries and their leading dimensions stay out
    for form in [*FORMS, None]:
        options = {"form": form, "chunk_size": chunk_size, "initial_state": S}
        out, state = retention(q, k, v, decay, return_state=True, **options)
        assert_close(out, expected, dtype)
        assert_close(state, expected_S, kept(dtype))
        assert_close(retention(q, k, v, decay, **options), expected, dtype)


KEYS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = np.array([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0]])


@every_form
def test_worked_numbers(form):
    """Chapter 12, by hand, with a decay of 1/2: whole numbers after each of three tokens."""
    states = []
    for t in (1, 2, 3):
        out, S = retention(
            *(x[:t] for x in (KEYS, KEYS, VALUES)), 0.5, form=form, chunk_size=2, return_state=True
        )
        states.append(S.tolist())
    assert states == [
        [[16, 8], [0, 0]],
        [[8, 4], [4, 12]],
        [[6, 8], [4, 12]],
    ]
    assert out.tolist() == [[16, 8], [4, 12], [10, 20]]


@every_form
def test_the_own_token_is_not_decayed(form):
    """The memory fades before a token is written: D_nn = 1, and the token before has one decay."""
    q = k = v = np.ones((3, 1))
    assert retention(q, k, v, 0.5, form=form).tolist() == [[1], [1.5], [1.75]]


@every_form
def test_a_decay_of_one_is_linear_attention(form):
    q, k, v = draw(3, 20)
    expected = linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(retention(q, k, v, 1, form=form, chunk_size=6), expected)
    assert_close(retention(q, k, v, np.ones(()), form=form, chunk_size=6), expected)


@every_form
def test_there_is_neither_scale_nor_normalizer(form):
    """Libraries multiply q by 1/sqrt(D), divide rows, or clamp: S is the plain sum here."""
    q, k, v = draw(4, 9)
    out, S = retention(q, k, v, 0.9, form=form, return_state=True)
    twice, same = retention(2 * q, k, v, 0.9, form=form, return_state=True)
    assert_close(twice, 2 * out)
    assert_close(same, S)
    _, S = retention(q, k, 2 * v, 0.9, form=form, return_state=True)
    assert_close(S, 2 * same)


def test_the_decays_of_the_paper():
    """Not the spacing by exponentials that depends on the number of heads."""
    assert retention_decays(8).tolist() == [
        31 / 32,
        63 / 64,
        127 / 128,
        255 / 256,
        511 / 512,
        1023 / 1024,
        2047 / 2048,
        4095 / 4096,
    ]
    assert retention_decays(1).shape == (1,) and retention_decays(2).dtype == "float64"
    assert (1 / (1 - retention_decays(4))).tolist() == [32, 64, 128, 256]


def test_one_decay_for_each_head():
    q, k, v = draw(5, 9, leading=((2, 3),) * 3)
    decays = retention_decays(3)
    out = retention(q, k, v, decays)
    for h in range(3):
        assert_close(out[:, h], retention(q[:, h], k[:, h], v[:, h], decays[h]))
        assert_close(out[:, h], retention(q[:, h], k[:, h], v[:, h], float(decays[h])))


# Streaming.


# Precision and extreme decays.


@every_form
def test_strong_decays(form):
    """0.01^n underflows, and what remains is what the last few tokens wrote."""
    q, k, v = draw(10, 400)
    for decay in (1e-2, 1e-30, 5e-324):
        out, S = retention(q, k, v, decay, form=form, return_state=True)
        assert np.isfinite(out).all() and np.isfinite(S).all()
        expected = (q * k).sum(axis=-1, keepdims=True) * v
        expected[1:] += decay * (q[1:] * k[:-1]).sum(axis=-1, keepdims=True) * v[:-1]
        assert_close(out, expected, tolerance=100 * decay**2 + 1e-11)


def test_no_cumulative_product_is_divided_by_another():
    """Cumulative products 0.5^n, one divided by the other, would be 0/0 after 1,100 tokens."""
    q, k, v = draw(11, 1300)
    for form in FORMS:
        out = retention(q, k, v, 0.5, form=form, chunk_size=1300)
        assert_close(out[-1:], loop(q[-60:], k[-60:], v[-60:], 0.5)[0][-1:])


# NaN, causality, strides.


def test_padding_at_the_front_changes_nothing_and_at_the_end_fades_the_memory():
    q, k, v = draw(15)
    out, S = retention(q, k, v, 0.5, return_state=True)
    front = [np.pad(x, ((3, 0), (0, 0))) for x in (q, k, v)]
    padded, same = retention(*front, 0.5, return_state=True)
    assert_close(padded[3:], out)
    assert_close(same, S)
    end = [np.pad(x, ((0, 3), (0, 0))) for x in (q, k, v)]
    padded, faded = retention(*end, 0.5, return_state=True)
    assert_close(padded[:7], out)
    assert_close(faded, S / 8)


# Known bugs of known libraries.


def test_known_bug_the_decay_before_the_own_token():
    """S = decay * (S + k vᵀ) decays the own token as well."""
    q, k, v = draw(16)
    wrong = 0.9 * retention(q, k, v, 0.9)
    right, _ = loop(q, k, v, 0.9)
    assert np.abs(wrong - right).max() > 0.05 * np.abs(right).max()
    for form in FORMS:
        assert_close(retention(q, k, v, 0.9, form=form), right)


def test_known_bug_rows_of_the_mask_are_divided_by_the_root_of_their_sum():
    """It cancels in the norm of each head and nowhere else; the state is another one too."""
    q, k, v = draw(17, 20)
    n = np.arange(20)
    mask = np.tril(0.9 ** np.abs(n[:, None] - n))
    scaled = (q @ k.T * mask / np.sqrt(mask.sum(axis=-1, keepdims=True))) @ v
    out = retention(q, k, v, 0.9)
    assert np.abs(scaled - out).max() > 0.5 * np.abs(out).max()

    def norm(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True))

    assert_close(norm(scaled), norm(out))


def test_known_bug_the_length_must_be_a_multiple_of_the_chunk():
    q, k, v = draw(18, 130)
    right, S = loop(q, k, v, 0.9)
    for chunk_size in (1, 7, 64, 129, 130, 1000):
        out, state = retention(
            q, k, v, 0.9, form="chunkwise", chunk_size=chunk_size, return_state=True
        )
        assert_close(out, right)
        assert_close(state, S)


# Arguments.


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (0, ValueError, r"decay must be in \(0, 1\], got 0\.0\."),
        (1.5, ValueError, r"decay must be in \(0, 1\], got 1\.5\."),
        (-0.5, ValueError, r"decay must be in \(0, 1\], got -0\.5\."),
        (np.array([0.5, 1.25]), ValueError, r"decay must be in \(0, 1\], got 1\.25\."),
        (float("nan"), ValueError, "decay must be finite, got nan"),
        (True, TypeError, "decay must be a real number, got True"),
        ("half", TypeError, "decay must be a real number, got 'half'"),
        ([0.5], TypeError, r"decay must be a real number, got \[0.5\]"),
        (None, TypeError, "decay must be a real number, got None"),
        (np.array(1), TypeError, "decay must have a floating dtype"),
        (np.array(0.5, "float32"), TypeError, "decay must have dtype float64, got float32"),
    ],
)
def test_decays_that_do_not_fit(decay, error, message):
    with pytest.raises(error, match="^" + message):
        retention(*draw(), decay)


def test_numbers_of_heads_that_are_none():
    with pytest.raises(ValueError, match="^num_heads must be at least 1, got 0"):
        retention_decays(0)
    with pytest.raises(TypeError, match="^num_heads must be an integer, got 2.0"):
        retention_decays(2.0)
