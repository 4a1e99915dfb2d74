"""Linear attention: every form against a double loop, and against every other form."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lesson_code.numpy import (
    LinearAttentionState,
    elu_plus_one,
    exponential,
    identity,
    linear_attention,
    polynomial,
    relu,
    similarity_attention,
    taylor,
)
from tests.arrays import KEYS, VALUES, assert_close, in_dtype, kept, normal
from tests.oracles import every_sequence

CAUSAL = ["masked", "recurrent", "cumsum", "scan", "chunkwise"]
GLOBAL = ["quadratic", "linear"]
every_causal_form = pytest.mark.parametrize("form", CAUSAL)
every_form = pytest.mark.parametrize(
    ("causal", "form"), [(True, form) for form in CAUSAL] + [(False, form) for form in GLOBAL]
)
LEADING = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((2, 3), (2, 3), (2, 3)),
    ((2, 3), (3,), (2, 1)),
    ((3,), (), ()),
    ((), (2,), (3, 1)),
    ((0,), (1,), (0,)),
]


def widen(x):
    """A positive map that is not elementwise: C = 2 D + 1."""
    return np.concatenate([x * x, abs(x[..., ::-1]), np.ones_like(x[..., :1])], axis=-1)


# The map, and the same for one vector, from scratch.
MAPS = {
    "elu_plus_one": (elu_plus_one, lambda x: [t + 1 if t > 0 else math.exp(t) for t in x]),
    "widen": (widen, lambda x: [t * t for t in x] + [abs(t) for t in x[::-1]] + [1]),
    "identity": (identity, list),
}


def one_linear_attention(q, k, v, S, z, causal=False, normalize=True):
    """The definition for one sequence of feature-mapped q and k: two loops, float64."""
    out = np.zeros((len(q), v.shape[-1]))
    for i in range(len(q)):
        numerator, denominator = q[i] @ S, q[i] @ z
        for j in range(len(k)):
            if j <= i or not causal:
                numerator = numerator + (q[i] @ k[j]) * v[j]
                denominator += q[i] @ k[j]
        if normalize:
            numerator = numerator / denominator if denominator != 0 else 0
        out[i] = numerator
    for j in range(len(k)):
        S, z = S + np.outer(k[j], v[j]), z + k[j]
    return out, S, z


def mapped(x, phi):
    rows = [phi(row) for row in x.astype(float).reshape(-1, x.shape[-1])]
    return np.array(rows, float).reshape(*x.shape[:-1], len(phi(np.zeros(x.shape[-1]))))


def loop(q, k, v, phi, *, state=None, **options):
    """`one_linear_attention` for every sequence of the broadcast leading dimensions."""
    q, k = mapped(q, phi), mapped(k, phi)
    C, M = k.shape[-1], v.shape[-1]
    S, z = (np.zeros((C, M)), np.zeros(C)) if state is None else state
    arrays = [x.astype(float) for x in (q, k, v, S, z)]
    return every_sequence(one_linear_attention, arrays, (2, 2, 2, 2, 1), **options)


def draw(seed=0, Nq=7, Nk=7, D=3, M=4, leading=((), (), ()), dtype="float64"):
    shapes = ((Nq, D), (Nk, D), (Nk, M))
    own = (lead + shape for lead, shape in zip(leading, shapes, strict=True))
    return [in_dtype(x, dtype) for x in normal(*own, seed=seed)]


def draw_state(C, M, batch_shape=(), dtype="float64"):
    S, z = normal((*batch_shape, C, M), (*batch_shape, C), seed=1)
    return LinearAttentionState(in_dtype(S, dtype), in_dtype(1 + abs(z), dtype))


# Every form is the definition.


@settings(max_examples=80, deadline=None)
@given(
    N=st.integers(0, 70),
    chunk_size=st.integers(1, 75),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
    name=st.sampled_from(list(MAPS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(70, 16, 3, 5, LEADING[3], "float64", "widen", 0)
@example(0, 16, 3, 5, LEADING[2], "float64", "elu_plus_one", 0)
@example(1, 1, 1, 2, LEADING[4], "float32", "elu_plus_one", 0)
def test_causal_forms_are_the_definition(N, chunk_size, D, M, leading, dtype, name, seed):
    q, k, v = draw(seed, N, N, D, M, leading, dtype)
    feature_map, phi = MAPS[name]
    normalize = name != "identity"  # whose normalizer comes near zero
    expected, _, _ = loop(q, k, v, phi, causal=True, normalize=normalize)
    _, S, z = loop(k[..., :0, :], k, v, phi)  # without the queries and their leading dimensions
    for form in [*CAUSAL, None]:
        out, state = linear_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            causal=True,
            normalize=normalize,
            form=form,
            chunk_size=chunk_size,
            return_state=True,
        )
        assert_close(out, expected, dtype)
        assert_close(state.S, S, kept(dtype))
        assert_close(state.z, z, kept(dtype))


@settings(max_examples=80, deadline=None)
@given(
    Nq=st.integers(0, 30),
    Nk=st.integers(0, 30),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
    name=st.sampled_from(list(MAPS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(5, 9, 2, 3, LEADING[3], "float64", "elu_plus_one", 0)
@example(5, 0, 2, 3, LEADING[1], "float64", "elu_plus_one", 0)
def test_global_forms_are_the_definition(Nq, Nk, D, M, leading, dtype, name, seed):
    q, k, v = draw(seed, Nq, Nk, D, M, leading, dtype)
    feature_map, phi = MAPS[name]
    normalize = name != "identity"
    expected, _, _ = loop(q, k, v, phi, normalize=normalize)
    for form in [*GLOBAL, None]:
        out = linear_attention(q, k, v, feature_map=feature_map, normalize=normalize, form=form)
        assert_close(out, expected, dtype)


@every_causal_form
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_forms_start_from_a_state(form, normalize, dtype):
    q, k, v = draw(2, leading=((5, 1, 1), (3, 1), (3, 1)), dtype=dtype)
    for given_dtype in {dtype, kept(dtype)}:
        state = draw_state(3, 4, (2,), dtype=given_dtype)
        found = linear_attention(
            q,
            k,
            v,
            causal=True,
            normalize=normalize,
            form=form,
            chunk_size=3,
            initial_state=state,
            return_state=True,
        )
        phi = MAPS["elu_plus_one"][1]
        expected = loop(q, k, v, phi, causal=True, normalize=normalize, state=state)
        assert_close(found[0], expected[0], dtype)
        assert found[1].S.shape == (3, 2, 3, 4) and found[1].z.shape == (3, 2, 3)
        assert_close(found[1].S, expected[1][0], kept(dtype))
        assert_close(found[1].z, expected[2][0], kept(dtype))


@every_causal_form
def test_worked_numbers_causal(form):
    options = {"feature_map": identity, "causal": True, "form": form, "chunk_size": 2}
    out = linear_attention(KEYS, KEYS, VALUES, normalize=False, **options)
    assert out.tolist() == [[10, 20], [30, 40], [140, 180]]
    out = linear_attention(KEYS, KEYS, VALUES, **options)
    assert out.tolist() == [[10, 20], [30, 40], [35, 45]]
    states = []
    for t in (1, 2, 3):
        q, k, v = KEYS[:t], KEYS[:t], VALUES[:t]
        states.append(linear_attention(q, k, v, return_state=True, **options)[1])
    assert [state.S.tolist() for state in states] == [
        [[10, 20], [0, 0]],
        [[10, 20], [30, 40]],
        [[60, 80], [80, 100]],
    ]
    assert [state.z.tolist() for state in states] == [[1, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("form", GLOBAL)
def test_worked_numbers_global(form):
    out = linear_attention(KEYS, KEYS, VALUES, feature_map=identity, normalize=False, form=form)
    assert out.tolist() == [[60, 80], [80, 100], [140, 180]]
    out = linear_attention(KEYS, KEYS, VALUES, feature_map=identity, form=form)
    assert out.tolist() == [[30, 40], [40, 50], [35, 45]]


def test_worked_numbers_written_and_read():
    state = LinearAttentionState.zeros(2, 2)
    for k, v in zip(KEYS, VALUES, strict=True):
        state = state.write(k, v)
    assert state.S.tolist() == [[60, 80], [80, 100]]
    for q, plain, normalized in (
        ([1.0, 0.0], [60, 80], [30, 40]),
        ([0.0, 1.0], [80, 100], [40, 50]),
        ([0.5, 0.5], [70, 90], [35, 45]),
    ):
        assert state.read(np.array(q), normalize=False).tolist() == plain
        assert state.read(np.array(q)).tolist() == normalized


# Streaming.


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("normalize", [True, False])
def test_write_and_read_are_one_step_of_the_recurrence(dtype, normalize):
    q, k, v = draw(4, leading=((2, 3), (3,), (2, 1)), dtype=dtype)
    out, final = linear_attention(
        q, k, v, feature_map=abs, causal=True, normalize=normalize, return_state=True
    )
    for start in {dtype, kept(dtype)}:
        state = LinearAttentionState.zeros(3, 4, (2, 3), start)
        for t in range(7):
            state = state.write(abs(k[..., t, :]), v[..., t, :])
            read = state.read(abs(q[..., t, :]), normalize=normalize)
            assert_close(read, out[..., t, :], dtype)
        assert_close(state.S, final.S, kept(dtype))
        assert_close(state.z, final.z, kept(dtype))


def test_states_in_float32_do_not_stick():
    """4,096 ones in float16 would stop at 2,048."""
    ones = np.ones((4096, 1), "float16")
    for form in CAUSAL:
        out, state = linear_attention(
            ones,
            ones,
            ones,
            feature_map=identity,
            causal=True,
            normalize=False,
            form=form,
            return_state=True,
        )
        assert state.S == state.z == out[-1] == 4096 and state.S.dtype == "float32"
    state = LinearAttentionState.zeros(1, 1, dtype="float16")
    for _ in range(2100):
        state = state.write(ones[0], ones[0])
    assert state.S == 2100


# Causality, NaN, sequences of a batch.


@every_causal_form
def test_nan_and_the_past(form):
    """It may reach the past of its chunk in the masked form; in the others it does not."""
    first = {"masked": 0, "chunkwise": 4}.get(form, 5)
    options = {"causal": True, "form": form, "chunk_size": 4}
    q, k, v = draw(8, 9, 9)
    v[5, 1] = np.nan
    spoiled = np.isnan(linear_attention(q, k, v, **options))
    assert spoiled[:, 1].tolist() == [False] * first + [True] * (9 - first)
    assert not spoiled[:, [0, 2, 3]].any()
    q, k, v = draw(8, 9, 9)
    k[5, 1] = np.nan
    rows = np.isnan(linear_attention(q, k, v, **options)).any(axis=-1)
    assert rows.tolist() == [False] * 5 + [True] * 4
    q, k, v = draw(8, 9, 9)
    q[5, 1] = np.nan
    rows = np.isnan(linear_attention(q, k, v, **options)).any(axis=-1)
    assert rows.nonzero()[0].tolist() == [5]


# The normalizer.


@every_form
def test_a_normalizer_of_zero_gives_zero(causal, form):
    q, k, v = (abs(x) for x in draw(9, 6, 6))
    k[:2] = -k[:2]  # nothing is remembered before position 2
    q[4] = -q[4]  # and nothing is asked at position 4
    options = {"feature_map": relu, "causal": causal, "form": form, "chunk_size": 4}
    out = linear_attention(q, k, v, **options)
    zero = [0, 1, 4] if causal else [4]
    np.testing.assert_array_equal(out[zero], 0)
    assert (out[[2, 3, 5]] > 0).all()
    # Here the numerator is not 0, yet the normalizer is: 1 - 1.
    q, k, v = np.ones((2, 1)), np.array([[1.0], [-1.0]]), np.array([[2.0], [3.0]])
    assert linear_attention(q, k, v, **options | {"feature_map": identity})[1] == 0


@every_form
def test_no_epsilon(causal, form):
    """A mean of equal values is this value, however small the features are."""
    q, k, _ = draw(10, 6, 6)
    v = np.full((6, 2), 3.0)
    out = linear_attention(
        q, k, v, feature_map=lambda x: 1e-120 * np.exp(x), causal=causal, form=form
    )
    np.testing.assert_allclose(out, 3, rtol=1e-12)
    q32, k32, v32 = (x.astype("float32") for x in (q, k - 80, v))
    out = linear_attention(q32, k32, v32, causal=causal, form=form)
    np.testing.assert_allclose(out, 3, rtol=1e-4)


def test_reading_an_empty_state():
    state = LinearAttentionState.zeros(3, 4)
    np.testing.assert_array_equal(state.read(np.ones(3)), np.zeros(4))
    assert state.S.dtype == state.z.dtype == "float64"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", [elu_plus_one, exponential, taylor(3), polynomial(2, 3)])
def test_the_similarity_is_the_product_of_the_features(causal, feature_map):
    q, k, v = draw(11)
    out = linear_attention(q, k, v, feature_map=feature_map, causal=causal)
    expected = similarity_attention(
        q, k, v, lambda q, k: feature_map(q) @ feature_map(k).T, causal=causal
    )
    assert_close(out, expected)


# Memory.


def peak_bytes(N, **options):
    q, k, v = draw(0, N, N, 8, 8)
    tracemalloc.start()
    linear_attention(q, k, v, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("form", ["recurrent", "cumsum", "chunkwise", "linear", None])
def test_memory_is_linear(form):
    causal = form != "linear"
    assert peak_bytes(2048, causal=causal, form=form) < 2.2 * peak_bytes(
        1024, causal=causal, form=form
    )


def test_memory_that_is_not():
    for causal, form in ((True, "masked"), (False, "quadratic")):
        small, large = (peak_bytes(N, causal=causal, form=form) for N in (1024, 2048))
        assert large > 3.5 * small
    # cumsum keeps N states of C·M numbers, the recurrence one.
    states = 8 * 2048 * 8 * 8
    assert peak_bytes(2048, causal=True, form="cumsum") > states
    assert peak_bytes(2048, causal=True, form="recurrent") < states
    assert peak_bytes(2048, causal=True, form="chunkwise") < states


STATE = draw_state(3, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_features_in_another_precision_are_cast(causal):
    q, k, v = draw(dtype="float32")
    options = {"causal": causal}
    out = linear_attention(q, k, v, feature_map=lambda x: np.exp(x / np.float64(2)), **options)
    expected = linear_attention(q, k, v, feature_map=lambda x: np.exp(x / 2), **options)
    assert out.dtype == "float32"
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_feature_maps_are_given_the_accumulation_dtype():
    given_dtypes = []
    q, k, v = draw(dtype="float16")
    linear_attention(q, k, v, feature_map=lambda x: given_dtypes.append(x.dtype) or x * x)
    assert given_dtypes == ["float32", "float32"]


def test_states_refuse():
    k, v = np.ones(3), np.ones(4)
    single = np.ones(3, "f4")
    for call, error, message in (
        (lambda: STATE.write(v, v), ValueError, "S of the state must have shape"),
        (lambda: STATE.write(k, k), ValueError, "S of the state must have shape"),
        (lambda: STATE.read(v), ValueError, "S of the state must have shape"),
        (lambda: STATE.write([1.0], v), TypeError, "k must be a NumPy array"),
        (lambda: STATE.write(k, v.astype(int)), TypeError, "v must have a floating dtype"),
        (lambda: STATE.write(single, v), TypeError, "v must have the dtype of k, float32"),
        (lambda: STATE.read(single), TypeError, "S of the state must have dtype float32"),
        (lambda: STATE.read(k > 0), TypeError, "q must have a floating dtype"),
        (lambda: STATE.read(np.array(1.0)), ValueError, r"q must have shape \(\.\.\., C\)"),
        (lambda: LinearAttentionState([[1.0]], k).read(k), TypeError, "S of the state must be a"),
        (lambda: LinearAttentionState.zeros(-1, 2), ValueError, "C must be at least 0, got -1"),
        (lambda: LinearAttentionState.zeros(1, 2.0), TypeError, "M must be an integer"),
        (lambda: LinearAttentionState.zeros(1, 2, dtype=int), TypeError, "dtype must have a flo"),
    ):
        with pytest.raises(error, match="^" + message):
            call()
    several = LinearAttentionState.zeros(3, 4, (2,))
    with pytest.raises(ValueError, match="^the leading dimensions of k, v, S of the state"):
        several.write(np.ones((5, 3)), v)
    with pytest.raises(ValueError, match="^the leading dimensions of q, S of the state"):
        several.read(np.ones((5, 3)))


def test_a_feature_map_cannot_write_into_the_callers_arrays():
    q, k, v = draw()
    before = q.copy()
    with pytest.raises(ValueError, match="read-only"):
        linear_attention(q, k, v, feature_map=lambda x: np.exp(x, out=x))
    np.testing.assert_array_equal(q, before)


def test_batch_shape_must_be_a_tuple():
    with pytest.raises(TypeError, match="^batch_shape must be a tuple of integers, got 5"):
        LinearAttentionState.zeros(2, 3, 5)
