"""Softmax attention in all its shapes, against plain loops over Python floats."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)
from tests.arrays import TOLERANCE, assert_close, in_dtype, normal
from tests.oracles import every_sequence

DTYPES = ["float64", "float32", "float16"]
LEADING = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 3), (3,), (2, 1)),
    ((), (2,), (3, 1)),
    ((0,), (1,), (0,)),
]


def one_softmax_attention(q, k, v, causal, scale):
    """The definition for one sequence: weights and outputs, a scalar at a time."""
    weights = np.zeros((len(q), len(k)))
    out = np.zeros((len(q), v.shape[-1]))
    for i in range(len(q)):
        position = i + len(k) - len(q)  # the queries are the last ones
        exps = {}
        for j in range(len(k)):
            if j <= position or not causal:
                exps[j] = math.exp(scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)))
        for j, e in exps.items():
            weights[i, j] = e / sum(exps.values())
            for m in range(v.shape[-1]):
                out[i, m] += weights[i, j] * v[j, m]
    return weights, out


def loop(q, k, v, *, causal=False, scale=None):
    """`one_softmax_attention` for every sequence of the broadcast leading dimensions."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    arrays = [x.astype(float) for x in (q, k, v)]
    return every_sequence(one_softmax_attention, arrays, (2, 2, 2), causal=causal, scale=scale)


def draw(seed=0, Nq=6, Nk=6, D=3, M=4, leading=((), (), ()), dtype="float64"):
    shapes = ((Nq, D), (Nk, D), (Nk, M))
    own = (lead + shape for lead, shape in zip(leading, shapes, strict=True))
    return [in_dtype(x, dtype) for x in normal(*own, seed=seed)]


@settings(max_examples=150, deadline=None)
@given(
    Nq=st.integers(0, 9),
    Nk=st.integers(0, 9),
    D=st.integers(1, 4),
    M=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    scale=st.sampled_from([None, 1.0, -0.3, 0]),
    tile_size=st.integers(1, 11),
    seed=st.integers(0, 2**32 - 1),
)
@example(3, 7, 2, 3, LEADING[3], "float64", True, None, 2, 0)
@example(7, 3, 2, 3, LEADING[4], "float64", True, None, 2, 0)
@example(5, 0, 2, 3, LEADING[1], "float32", False, None, 2, 0)
def test_softmax_attention_whole_and_tiled(
    Nq, Nk, D, M, leading, dtype, causal, scale, tile_size, seed
):
    q, k, v = draw(seed, Nq, Nk, D, M, leading, dtype)
    options = {"causal": causal, "scale": scale}
    weights, out = loop(q, k, v, **options)
    assert_close(softmax_attention(q, k, v, **options), out, dtype)
    assert_close(tiled_softmax_attention(q, k, v, tile_size=tile_size, **options), out, dtype)
    found = attention_weights(q, k, **options)
    assert_close(np.broadcast_to(found, weights.shape), weights, dtype)
    assert found.shape[:-2] == np.broadcast_shapes(*leading[:2])


def test_a_wrong_axis_cannot_pass():
    """The loop itself, on numbers worked by hand: scores 0 and ln 3 weigh 1/4 and 3/4."""
    q, k, v = np.array([[1.0]]), np.array([[0.0], [math.log(3)]]), np.array([[4.0, 0], [8.0, 2]])
    weights, out = loop(q, k, v)
    np.testing.assert_allclose(weights, [[0.25, 0.75]])
    np.testing.assert_allclose(out, [[7, 1.5]])


@pytest.mark.parametrize("attention", [softmax_attention, tiled_softmax_attention])
def test_decoding_with_a_cache(attention):
    """One query at a time against the keys so far gives the rows of the causal whole."""
    q, k, v = draw(Nq=7, Nk=7)
    whole = attention(q, k, v, causal=True)
    for t in range(7):
        step = attention(q[t : t + 1], k[: t + 1], v[: t + 1], causal=True)
        np.testing.assert_allclose(step, whole[t : t + 1], rtol=1e-12)
    np.testing.assert_allclose(attention(q[4:], k, v, causal=True), whole[4:], rtol=1e-12)


ATTENTIONS = {
    "softmax": softmax_attention,
    "tiled": lambda *args, **options: tiled_softmax_attention(*args, tile_size=3, **options),
    "similarity": lambda *args, **options: similarity_attention(*args, exp_similarity, **options),
    "grouped": lambda q, k, v, **options: grouped_query_attention(
        q[..., None, :, :], k[..., None, :, :], v[..., None, :, :], **options
    )[..., 0, :, :],
}
every_attention = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)


def exp_similarity(q, k):
    return np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))


@every_attention
@pytest.mark.parametrize("causal", [False, True])
def test_every_function_is_softmax_attention(attention, causal):
    q, k, v = draw(1, 5, 8, 3, 2, LEADING[3])
    assert_close(attention(q, k, v, causal=causal), loop(q, k, v, causal=causal)[1])


@every_attention
def test_the_future_is_hidden_even_when_it_is_nan(attention):
    q, k, v = draw(2, 8, 8)
    past = attention(q, k, v, causal=True)[:5]
    for spoiled, value in ((k, np.nan), (v, np.nan), (v, np.inf), (k, 100.0), (v, -7.0)):
        before = spoiled[5:].copy()
        spoiled[5:] = value
        with np.errstate(over="ignore", invalid="ignore"):
            out = attention(q, k, v, causal=True)
        np.testing.assert_allclose(out[:5], past, rtol=1e-12)
        if not np.isfinite(value):
            assert not np.isfinite(out[5:]).any()
        spoiled[5:] = before


@every_attention
@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_what_depends_on_it_and_no_other_sequence(attention, causal):
    q, k, v = draw(3, 6, 6, leading=LEADING[1])
    q[0, 4, 1] = np.nan
    assert np.isnan(attention(q, k, v, causal=causal)).any(-1).sum() == 1
    q, k, v = draw(3, 6, 6, leading=LEADING[1])
    k[1, 2, 0] = np.nan
    rows = np.isnan(attention(q, k, v, causal=causal)).all(-1)
    assert not rows[0].any()
    assert rows[1].tolist() == [not causal] * 2 + [True] * 4
    q, k, v = draw(3, 6, 6, leading=LEADING[1])
    v[1, 2, 3] = np.nan
    spoiled = np.isnan(attention(q, k, v, causal=causal))
    assert not spoiled[0].any() and not spoiled[1, :, :3].any()
    assert spoiled[1, :, 3].tolist() == [not causal] * 2 + [True] * 4


@pytest.mark.parametrize("attention", [softmax_attention, tiled_softmax_attention])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_maximum_keeps_exp_from_overflowing(attention, dtype):
    q = np.array([[1.0]], dtype)
    k = np.array([[88.0], [89.0], [60000.0], [59999.0 if dtype != "float16" else 0.0]], dtype)
    v = np.array([[1.0], [2.0], [3.0], [4.0]], dtype)
    with np.errstate(over="raise"):
        out = attention(q, k[:2], v[:2])
        np.testing.assert_allclose(out, [[1 + 1 / (1 + math.exp(-1))]], rtol=TOLERANCE[dtype])
        last = 1 / (1 + math.e) if dtype != "float16" else 0
        np.testing.assert_allclose(attention(q, k, v), [[3 + last]], rtol=TOLERANCE[dtype])
        first = 1 + 1 / (1 + math.e)
        np.testing.assert_allclose(attention(q, -k[:3], v[:3]), [[first]], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tile_size", [1, 2, 5])
def test_infinite_scores(tile_size):
    q = np.array([[1.0], [-1.0], [0.5]])
    k = np.array([[1.0], [-np.inf], [2.0]])
    v = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    kept = softmax_attention(q, k[[0, 2]], v[[0, 2]])
    for out in (softmax_attention(q, k, v), tiled_softmax_attention(q, k, v, tile_size=tile_size)):
        np.testing.assert_allclose(out[[0, 2]], kept[[0, 2]], rtol=1e-12)
        assert np.isnan(out[1]).all()  # its score is +inf
    all_hidden = np.full((3, 1), -np.inf)
    np.testing.assert_array_equal(softmax_attention(q[:1], all_hidden, v), [[0, 0]])
    np.testing.assert_array_equal(
        tiled_softmax_attention(q[:1], all_hidden, v, tile_size=tile_size), [[0, 0]]
    )


@every_attention
def test_queries_that_see_no_key_give_zero(attention):
    q, k, v = draw(5, 7, 3)
    out = attention(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:4], 0)
    assert (out[4:] != 0).all()
    v[:] = np.nan
    np.testing.assert_array_equal(attention(q, k, v, causal=True)[:4], 0)
    np.testing.assert_array_equal(attention(q, k[:0], v[:0]), np.zeros((7, 4)))
    assert attention(q[:0], k, v).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_sum_to_one(dtype):
    q, k, _ = draw(6, 70, 70, 16, dtype=dtype)
    weights = attention_weights(q, k, causal=True)
    np.testing.assert_allclose(weights.astype(float).sum(-1), 1, rtol=TOLERANCE[dtype])
    assert not np.triu(weights, 1).any()


def peak_bytes(function, *args, **options):
    tracemalloc.start()
    function(*args, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("causal", [False, True])
def test_tiled_memory_is_linear(causal):
    growth = {}
    for attention in (softmax_attention, tiled_softmax_attention):
        small, large = (
            peak_bytes(attention, *draw(0, N, N, 8, 8), causal=causal) for N in (1024, 2048)
        )
        growth[attention] = large / small
    assert growth[softmax_attention] > 3.5
    assert growth[tiled_softmax_attention] < 2.5
    assert large < 2048 * 2048  # a quarter of the N×N matrix would be more


# Similarity attention.


def test_similarities_are_normalized_whatever_they_are():
    q, k, v = draw(8, 4, 7, leading=LEADING[1])
    out = similarity_attention(q, k, v, lambda q, k: 1 / (1 + (q @ k.swapaxes(-1, -2)) ** 2))
    for b in range(2):
        for i in range(4):
            weights = [1 / (1 + (q[b, i] @ k[b, j]) ** 2) for j in range(7)]
            expected = sum(w * x for w, x in zip(weights, v[b], strict=True)) / sum(weights)
            np.testing.assert_allclose(out[b, i], expected, rtol=1e-12)


def test_similarities_that_sum_to_zero_give_zero():
    q, k, v = draw(9, 3, 2)
    np.testing.assert_array_equal(similarity_attention(q, k, v, lambda q, k: np.zeros((3, 2))), 0)
    signed = np.array([[1.0, -1.0], [1.0, 1.0], [0.5, 0.25]])
    out = similarity_attention(q, k, v, lambda q, k: signed)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(out[1], v.mean(axis=0), rtol=1e-12)


# Grouped-query and latent attention.


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1), (0, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries_are_repeated_keys(heads, causal):
    Hq, Hkv = heads
    q, k, v = draw(10, 4, 5, 3, 2, ((2, Hq), (Hkv,), (2, Hkv)))
    out = grouped_query_attention(q, k, v, causal=causal, scale=0.7)
    assert out.shape == (2, Hq, 4, 2)
    for h in range(Hq):
        kv = h * Hkv // Hq
        expected = loop(q[:, h], k[kv], v[:, kv], causal=causal, scale=0.7)[1]
        np.testing.assert_allclose(out[:, h], expected, rtol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_latent_attention(causal, scale, dtype="float32"):
    H, Nq, Nk, R, D, M = 3, 4, 6, 2, 5, 7
    rng = np.random.default_rng(11)
    q = rng.normal(size=(2, 1, H, Nq, D)).astype(dtype)
    latent = rng.normal(size=(3, Nk, R)).astype(dtype)
    up_k = rng.normal(size=(H, R, D)).astype(dtype)
    up_v = rng.normal(size=(H, R, M)).astype(dtype)
    heads = []
    for h in range(H):
        k = latent.astype(float) @ up_k[h].astype(float)
        v = latent.astype(float) @ up_v[h].astype(float)
        heads.append(loop(q[..., h, :, :], k, v, causal=causal, scale=scale)[1])
    for absorb in (False, True):
        out = latent_attention(q, latent, up_k, up_v, causal=causal, scale=scale, absorb=absorb)
        assert_close(out, np.stack(heads, axis=-3), dtype)


def test_absorbed_keys_are_never_formed():
    H, N, R, D = 8, 500, 4, 64
    rng = np.random.default_rng(12)
    q, latent = rng.normal(size=(H, 1, D)), rng.normal(size=(N, R))
    up_k, up_v = rng.normal(size=(2, H, R, D))
    keys = 8 * H * N * D  # bytes
    assert peak_bytes(latent_attention, q, latent, up_k, up_v) > 2 * keys
    assert peak_bytes(latent_attention, q, latent, up_k, up_v, absorb=True) < keys / 8


# Arguments.


def test_a_similarity_in_another_precision_is_cast():
    q, k, v = (x.astype("float32") for x in draw(Nq=4, Nk=7))
    out = similarity_attention(q, k, v, lambda q, k: np.exp(q @ k.T / np.float64(3)))
    assert out.dtype == "float32"
    np.testing.assert_allclose(out, softmax_attention(q, k, v, scale=1 / 3), rtol=1e-5)


def test_nan_reaches_a_row_whose_weights_are_all_zero():
    """All scores are -inf: the weights are 0, and 0 * NaN is NaN in every form."""
    q, k = np.full((2, 1), -np.inf), np.ones((3, 1))
    v = np.array([[1.0, np.nan], [2.0, 3.0], [4.0, 5.0]])
    expected = np.array([[0.0, np.nan]] * 2)
    np.testing.assert_array_equal(softmax_attention(q, k, v), expected)
    for tile_size in (1, 2, 3):
        got = tiled_softmax_attention(q, k, v, tile_size=tile_size)
        np.testing.assert_array_equal(got, expected)


def test_a_similarity_cannot_write_into_the_callers_arrays():
    q, k, v = draw(Nq=4, Nk=7)
    before = q.copy()

    def doubled(q, k):
        q *= 2
        return np.exp(q @ k.T)

    with pytest.raises(ValueError, match="read-only"):
        similarity_attention(q, k, v, doubled)
    np.testing.assert_array_equal(q, before)
