"""Linear attention in torch: every form against NumPy in float64, and under all that torch adds.

The chunkwise form's own backward pass and operators are in engines/test_linear.py.
"""

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.checks import check_linear_cost, random_qkv
from lesson_code.measure import peak_bytes
from lesson_code.torch.engines import linear as engine
from lesson_code.torch.feature_maps import (
    elu_plus_one,
    exponential,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)
from lesson_code.torch.linear import LinearAttentionState, linear_attention
from tests.arrays import TOLERANCE, assert_close, kept, normal, numbers
from tests.arrays import tensors as to_tensors

CAUSAL = ["masked", "recurrent", "cumsum", "scan", "chunkwise"]
GLOBAL = ["quadratic", "linear"]
FORMS = [(True, form) for form in CAUSAL] + [(False, form) for form in GLOBAL]
every_causal_form = pytest.mark.parametrize("form", CAUSAL)
every_form = pytest.mark.parametrize(("causal", "form"), FORMS)
both_normalizations = pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
precise_and_half = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)


def widen(x):
    """A positive map that is not elementwise, C = 2 D + 1, for NumPy and torch alike."""
    if isinstance(x, np.ndarray):
        return np.concatenate([x * x, abs(x[..., ::-1]), np.ones_like(x[..., :1])], axis=-1)
    return torch.cat([x * x, x.flip(-1).abs(), torch.ones_like(x[..., :1])], dim=-1)


# Makers of a map and of its NumPy twin for a width D.
MAPS = {
    "elu_plus_one": lambda D: (elu_plus_one, reference.elu_plus_one),
    "relu": lambda D: (relu, reference.relu),
    "exponential": lambda D: (exponential, reference.exponential),
    "identity": lambda D: (identity, reference.identity),
    "taylor": lambda D: (taylor(D), reference.taylor(D)),
    "widen": lambda D: (widen, widen),
}


def draw(seed=0, Nq=7, Nk=7, D=3, M=4, leading=((), (), ()), dtype=torch.float64):
    shapes = ((Nq, D), (Nk, D), (Nk, M))
    own = (lead + shape for lead, shape in zip(leading, shapes, strict=True))
    return to_tensors(*normal(*own, seed=seed), dtype=dtype)


def draw_state(C=3, M=4, leading=(), seed=1, dtype=torch.float64):
    """A state whose normalizer is positive."""
    S, z = normal((*leading, C, M), (*leading, C), seed=seed)
    return LinearAttentionState(*to_tensors(S, 1 + abs(z), dtype=dtype))


def arrays(*tensors):
    return [numbers(x) for x in tensors]


def numpy_state(state):
    return None if state is None else reference.LinearAttentionState(*arrays(*state))


def assert_result(found, expected, dtype):
    """Outputs and state, against NumPy's."""
    (out, state), (expected_out, expected_state) = found, expected
    assert_close(out, expected_out, dtype)
    for x, y in zip(state, expected_state, strict=True):
        assert_close(x, y, kept(dtype))


# Every form is NumPy's function.


@settings(max_examples=100, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=4, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    segment=st.sampled_from([1, 13, 32, 1024]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(list(MAPS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 1), (3,), (1, 1), ()), (2, 3)), True, 37, 7, 16, 3, 5, *"???")
@example(BroadcastableShapes(((5, 2, 3), (3,), (2, 1), (2, 3)), ()), True, 9, 4, 8, 3, 2, *"???")
@example(BroadcastableShapes(((), (2,), (3, 1), ()), ()), False, 1, 4, 8, 2, 3, *"???")
@example(BroadcastableShapes(((2,), (2,), (2,), (2,)), ()), True, 0, 4, 8, 2, 3, *"???")
def test_causal_forms_are_numpys(
    shapes, with_state, N, chunk_size, segment, D, M, dtype, name, seed
):
    if dtype == "?":
        dtype, name, seed = torch.float64, "elu_plus_one", 0
    *leading, state_leading = shapes.input_shapes
    q, k, v = draw(seed, N, N, D, M, leading, dtype)
    feature_map, twin = MAPS[name](D)
    C = twin(np.zeros(D)).shape[-1]
    state = draw_state(C, M, state_leading, seed, kept(dtype)) if with_state else None
    options = {"causal": True, "normalize": name != "identity", "chunk_size": chunk_size}
    options["return_state"] = True
    expected = reference.linear_attention(
        *arrays(q, k, v), feature_map=twin, initial_state=numpy_state(state), **options
    )
    options |= {"feature_map": feature_map, "initial_state": state}
    with mock.patch.dict(engine.SEGMENT, cpu=segment):
        for form in [*CAUSAL, None]:
            assert_result(linear_attention(q, k, v, form=form, **options), expected, dtype)


@settings(max_examples=80, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3, min_side=0),
    Nq=st.integers(0, 30),
    Nk=st.integers(0, 30),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(list(MAPS)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 3), (3,), (2, 1)), ()), 5, 9, 2, 3, torch.float64, "widen", 0)
@example(BroadcastableShapes(((2,), (), ()), ()), 5, 0, 2, 3, torch.float64, "elu_plus_one", 0)
def test_global_forms_are_numpys(shapes, Nq, Nk, D, M, dtype, name, seed):
    q, k, v = draw(seed, Nq, Nk, D, M, shapes.input_shapes, dtype)
    feature_map, twin = MAPS[name](D)
    normalize = name != "identity"
    expected = reference.linear_attention(*arrays(q, k, v), feature_map=twin, normalize=normalize)
    for form in [*GLOBAL, None]:
        out = linear_attention(q, k, v, feature_map=feature_map, normalize=normalize, form=form)
        assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    "make", [polynomial, positive_random_features], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("causal", [False, True])
def test_other_maps(causal, make):
    q, k, v = draw(3, 9, 9, leading=((2,), (2,), (2,)))
    twin = getattr(reference, make.__name__)(4, 3)
    expected = reference.linear_attention(*arrays(q, k, v), feature_map=twin, causal=causal)
    options = {"causal": causal, "chunk_size": 4}
    assert_close(linear_attention(q, k, v, feature_map=make(4, 3), **options), expected)


# What lesson_code.checks says, of tensors.


def tensors(rng, N, **sizes):
    return to_tensors(*random_qkv(rng, N, **sizes))


@pytest.mark.parametrize(
    ("causal", "form"), [(True, f) for f in ("recurrent", "cumsum", "scan", "chunkwise", None)]
)
def test_memory_is_linear(causal, form):
    check_linear_cost(lambda *qkv: linear_attention(*qkv, causal=causal, form=form), inputs=tensors)


def test_memory_of_the_other_forms():
    check_linear_cost(lambda *qkv: linear_attention(*qkv), inputs=tensors)
    for causal, form in ((True, "masked"), (False, "quadratic")):
        with pytest.raises(AssertionError, match="Memory grows with N²"):
            check_linear_cost(
                lambda *qkv, causal=causal, form=form: linear_attention(
                    *qkv, causal=causal, form=form
                ),
                inputs=tensors,
            )


# The state: streaming, single steps, precision.


@precise_and_half
@both_normalizations
def test_write_and_read_are_one_step_of_the_recurrence(dtype, normalize):
    q, k, v = (x.abs() for x in draw(5, leading=((2, 3), (3,), (2, 1)), dtype=dtype))
    options = {"causal": True, "normalize": normalize, "return_state": True}
    out, final = reference.linear_attention(
        *arrays(q, k, v), feature_map=reference.identity, **options
    )
    for given_dtype in {dtype, kept(dtype)}:
        state = LinearAttentionState.zeros(3, 4, (2, 3), given_dtype)
        for t in range(7):
            state = state.write(k[..., t, :], v[..., t, :])
            read = state.read(q[..., t, :], normalize=normalize)
            assert_close(read, out[..., t, :], dtype)
        for x, y in zip(state, final, strict=True):
            assert_close(x, y, kept(dtype))


def test_write_and_read_broadcast():
    """Whichever of the four brings a leading dimension, S and z both get it."""
    for bringer in range(4):
        lead = [(5,) if i == bringer else () for i in range(4)]
        shapes = ((*lead[0], 3), (*lead[1], 4), (*lead[2], 3, 4), (*lead[3], 3), (2, 1, 3))
        k, v, S, z, q = to_tensors(*normal(*shapes))
        state = LinearAttentionState(S, z)
        written = state.write(k, v)
        expected = numpy_state(state).write(*arrays(k, v))
        assert written.S.shape == (5, 3, 4) and written.z.shape == (5, 3)
        for x, y in zip(written, expected, strict=True):
            assert_close(x, y)
        assert_close(written.read(q), expected.read(*arrays(q)))
        assert written.read(q).shape == (2, 5, 4)
        assert (state.z[..., 0] != written.z[..., 0]).all(), "the given state was written"


def test_zeros():
    state = LinearAttentionState.zeros(2, 3)
    assert state.S.dtype == state.z.dtype == torch.float32 and state.S.device.type == "cpu"
    state = LinearAttentionState.zeros(2, 3, [4, 0], torch.bfloat16, "meta")
    assert state.S.shape == (4, 0, 2, 3) and state.z.shape == (4, 0, 2)
    assert state.z.dtype == torch.bfloat16 and state.S.device.type == "meta"
    assert LinearAttentionState.zeros(3, 4).read(torch.ones(3)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_million_tokens_in_constant_memory(dtype):
    """Float32 sums of a million terms: wrong by less than 2e-5 of what they are."""
    N, piece, D, M = 1_000_000, 50_000, 4, 3
    q, k, v = draw(6, N, N, D, M, dtype=dtype)
    v = v + 1  # else the sums stay small
    outputs, peaks, state = [], [], None

    def step(start):
        nonlocal state
        parts = (x[start : start + piece] for x in (q, k, v))
        out, state = linear_attention(*parts, causal=True, initial_state=state, return_state=True)
        return out

    for start in range(0, N, piece):
        if start in (2 * piece, N - piece):
            peaks.append(peak_bytes(lambda start=start: outputs.append(step(start))))
        else:
            outputs.append(step(start))
    assert peaks[0] == peaks[1] < 20 * piece * M * q.element_size() + 2**22
    fq, fk = elu_plus_one(q.double()), elu_plus_one(k.double())
    S = (fk[:, :, None] * v.double()[:, None]).cumsum(dim=0)  # (N, D, M), in float64
    z = fk.cumsum(dim=0)
    expected = (fq[:, None] @ S)[:, 0] / (fq * z).sum(dim=-1, keepdim=True)
    assert_close((state.S / S[-1]).float(), torch.ones(D, M), torch.float32)
    assert_close((state.z / z[-1]).float(), torch.ones(D), torch.float32)
    bound = 2e-5 + (dtype == torch.bfloat16) * TOLERANCE["bfloat16"]
    assert ((torch.cat(outputs) - expected).abs() <= bound * expected.abs() + 2e-5).all()


# Inputs, outputs, memory.


def call(q, k, v, causal, form, state=None, **options):
    if causal:
        options |= {"initial_state": state, "return_state": True}
    result = linear_attention(q, k, v, causal=causal, form=form, chunk_size=3, **options)
    return [result[0], *result[1]] if causal else [result]


@every_form
def test_outputs_own_their_memory(causal, form):
    """A view would keep every state of the scan alive, or write into what the caller owns."""
    sizes = itertools.product((0, 1, 9), (((), (), ()), ((2, 3), (3,), (2, 1))))
    for N, leading in sizes:
        q, k, v = draw(9, N, N, leading=leading)
        state = draw_state() if causal else None
        given_tensors = [q, k, v, *(state or ())]
        found = call(q, k, v, causal, form, state, feature_map=identity, normalize=False)
        for x in found:
            assert x.untyped_storage().nbytes() == x.nbytes
            x.fill_(math.nan)
        assert not any(x.isnan().any() for x in given_tensors)


def test_states_own_their_memory():
    state = draw_state()
    for written in (
        state.write(state.S[:, 0], state.S[0]),
        LinearAttentionState.zeros(3, 4, (2,)),
    ):
        for x in written:
            assert x.untyped_storage().nbytes() == x.nbytes
            x.fill_(math.nan)
    assert not any(x.isnan().any() for x in state)


# NaN, the normalizer, extreme numbers.


@every_form
def test_a_normalizer_of_zero_gives_zero_and_no_gradient(causal, form):
    q, k, v = (x.abs() for x in draw(11, 6, 6))
    k[:2] = -k[:2]  # nothing is remembered before position 2
    q[4] = -q[4]  # and nothing is asked at position 4
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options = {"feature_map": relu, "causal": causal, "form": form, "chunk_size": 4}
    out = linear_attention(q, k, v, **options)
    zero = [0, 1, 4] if causal else [4]
    assert (out[zero] == 0).all() and (out[[2, 3, 5]] > 0).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert (dq[zero] == 0).all() and (dk[:2] == 0).all() and (dv[:2] == 0).all()
    assert (dv[2:] != 0).all()


@every_form
def test_a_normalizer_of_zero_beside_a_numerator_that_is_not(causal, form):
    """The second query finds 1 - 1; only the others have an output and a gradient."""
    q = torch.tensor([[1.0], [1.0]]).requires_grad_()
    k = torch.tensor([[1.0], [-1.0]]).requires_grad_()
    v = torch.tensor([[2.0], [3.0]]).requires_grad_()
    options = {"feature_map": identity, "causal": causal, "form": form}
    out = linear_attention(q, k, v, **options)
    assert out.tolist() == [[2.0 if causal else 0.0], [0.0]]
    for gradient in torch.autograd.grad(out[1].sum(), (q, k, v)):
        assert (gradient == 0).all()
    state = LinearAttentionState(torch.ones(1, 2), torch.zeros(1).requires_grad_())
    out = state.read(torch.ones(1))
    assert out.tolist() == [0, 0]
    assert torch.autograd.grad(out.sum(), state.z)[0] == 0


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_strongly_negative_inputs(causal, form, dtype):
    """exp(-80) is a number, and a mean of equal values is this value."""
    q, k, _ = draw(12, 9, 9, dtype=dtype)
    v = torch.full((9, 2), 3.0, dtype=dtype)
    k = (k * 0 - 80).requires_grad_()
    options = {"causal": causal, "form": form, "chunk_size": 4}
    out = linear_attention(q, k, v, **options)
    assert_close(out, torch.full((9, 2), 3.0), dtype)
    assert torch.autograd.grad(out.sum(), k)[0].isfinite().all()
    if causal:
        _, state = linear_attention(q, k, v, return_state=True, **options)
        assert (state.z > 0).all()
    q, k = q * 0 - 80, k.detach()  # the products are exp(-160): 0 in float32
    out = linear_attention(q.requires_grad_(), k.requires_grad_(), v, **options)
    assert_close(out, torch.full((9, 2), 3.0 * (dtype == torch.float64)), dtype)
    for gradient in torch.autograd.grad(out.sum(), (q, k)):
        assert gradient.isfinite().all()


# Derivatives and transformations.


@pytest.mark.parametrize(("causal", "form"), [x for x in FORMS if x != (True, "chunkwise")])
def test_second_derivatives(causal, form):
    """The chunkwise form says that it has none, in engines/test_linear.py."""
    args = [x.requires_grad_() for x in draw(17, 4, 4, 2, 2)]
    assert torch.autograd.gradgradcheck(
        lambda *args: linear_attention(*args, causal=causal, form=form), args
    )


def test_gradients_through_write_and_read():
    q, k, v = draw(18, 1, 1, leading=((2,), (), (3, 1)))
    args = [x[..., 0, :].requires_grad_() for x in (q, k, v)] + [
        x.requires_grad_() for x in draw_state()
    ]

    def function(q, k, v, S, z):
        state = LinearAttentionState(S, z).write(k, v)
        return state.S, state.z, state.read(q), state.read(q, normalize=False)

    assert torch.autograd.gradcheck(function, args)


class Trainable(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W = torch.nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return torch.nn.functional.softplus(x @ self.W.mT)


@every_form
def test_a_map_with_parameters_trains(causal, form):
    q, k, v = draw(19, 9, 9)
    phi = Trainable()
    out = linear_attention(q, k, v, feature_map=phi, causal=causal, form=form, chunk_size=4)
    (found,) = torch.autograd.grad(out.square().sum(), phi.parameters())

    A = phi(q) @ phi(k).mT
    A = A.tril() if causal else A
    expected = A @ v / A.sum(dim=-1, keepdim=True)
    assert_close(out, expected)
    (expected,) = torch.autograd.grad(expected.square().sum(), phi.parameters())
    assert expected.abs().max() > 0.1
    assert_close(found, expected)


@every_form
def test_vmap_over_any_dimension(causal, form):
    q, k, v = draw(20, 9, 9, leading=((2,), (2,), (2,)))
    options = {"causal": causal, "form": form, "chunk_size": 4}
    whole = linear_attention(q, k, v, **options)

    def attention(q, k, v):
        return linear_attention(q, k, v, **options)

    moved = [x.movedim(0, i) for i, x in zip((1, 2, -1), (q, k, v), strict=True)]
    assert_close(torch.vmap(attention, in_dims=(1, 2, -1), out_dims=1)(*moved), whole.movedim(0, 1))
    shared = torch.vmap(attention, in_dims=(0, None, None))(q, k[0], v[0])
    assert_close(shared, linear_attention(q, k[0], v[0], **options))
    shared = torch.vmap(attention, in_dims=(None, 0, None))(q[1], k, v[0])
    assert_close(shared, linear_attention(q[1], k, v[0], **options))
    twice = torch.vmap(torch.vmap(attention), in_dims=1)(*(x[:, None] for x in (q, k, v)))
    assert_close(twice, whole[None])


def test_vmap_over_states():
    q, k, v = draw(22)
    states = draw_state(leading=(5,))

    def step(state, q, k, v):
        state = state.write(k, v)
        return state, state.read(q)

    states, outs = torch.vmap(step, in_dims=(0, None, None, None))(states, q[0], k[0], v[0])
    expected, out = step(draw_state(leading=(5,)), q[0], k[0], v[0])
    for x, y in zip((*states, outs), (*expected, out), strict=True):
        assert_close(x, y)


# Dynamo makes an instance of what should have none.
ignore_dynamo = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@ignore_dynamo
def test_every_form_compiles_as_one_graph():
    """Forward and backward, with a state in and out."""

    def run(q, k, v, S, z):
        state, outs = LinearAttentionState(S, z), []
        for causal, form in [*FORMS, (True, None), (False, None)]:
            outs += call(q, k, v, causal, form, state if causal else None)
        return outs

    args = [x.requires_grad_() for x in (*draw(23, 5, 5, leading=((2,), (), (2,))), *draw_state())]
    found, expected = compiled(run)(*args), run(*args)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)
    found, expected = (
        torch.autograd.grad(sum(x.square().sum() for x in outs), args) for outs in (found, expected)
    )
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_steps_compile_as_one_graph():
    def step(state, q, k, v):
        state = state.write(k, v)
        return state, state.read(q), state.read(q, normalize=False)

    q, k, v = draw(24)
    state = same = draw_state()
    fast = compiled(step)
    for t in range(3):
        state, *outs = fast(state, q[t], k[t], v[t])
        same, *expected = step(same, q[t], k[t], v[t])
        for x, y in zip((*state, *outs), (*same, *expected), strict=True):
            assert_close(x, y)


@ignore_dynamo
def test_lengths_that_change_still_compile():
    fast = compiled(lambda *qkv: linear_attention(*qkv, causal=True, chunk_size=4), dynamic=True)
    for N in (6, 9, 13):
        q, k, v = draw(N, N, N)
        assert_close(fast(q, k, v), linear_attention(q, k, v, causal=True, chunk_size=4))


@every_form
def test_shapes_alone(causal, form):
    """On the meta device nothing is computed, and reading a number would be an error."""
    q, k, v = (x.to("meta") for x in draw(25, 9, 9, leading=((2, 1), (3,), ())))
    out, *state = call(q, k, v, causal, form)
    assert out.shape == (2, 3, 9, 4) and out.device.type == "meta"
    if causal:
        state = LinearAttentionState(*state).write(k[:, 0], v[0])
        assert state.S.shape == (3, 3, 4) and state.read(q[..., 0, :]).shape == (2, 3, 4)


# Known bugs of known libraries: what they compute, that it differs, and that ours does not.


def masked(fq, fk, v, eps=0.0):
    """The definition, with room for mistakes."""
    A = (fq @ fk.mT).tril()
    return A @ v / (A.sum(dim=-1, keepdim=True) + eps)


def all_forms(q, k, v, **options):
    for form in CAUSAL:
        yield linear_attention(q, k, v, causal=True, form=form, chunk_size=16, **options)


def error(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("library", "normalized"),
    [
        ("added to the normalizer", lambda A, fq, z: A.sum(-1) + 1e-6),
        ("a smaller one", lambda A, fq, z: A.sum(-1) + 1e-10),
        ("added to each entry of z", lambda A, fq, z: (fq * (z + 1e-6)).sum(-1)),
        ("a lower bound", lambda A, fq, z: A.sum(-1).clamp(min=1e-3)),
    ],
)
def test_known_bug_an_epsilon_changes_results(library, normalized):
    """Four libraries, four conventions; where features are small, all of them give another mean."""
    q, k, v = draw(30, 20, 20, dtype=torch.float32)
    q, k = q - 15, k - 15
    exact = reference.linear_attention(*arrays(q, k, v), causal=True)
    exact = torch.from_numpy(exact)
    fq, fk = elu_plus_one(q), elu_plus_one(k)
    A = (fq @ fk.mT).tril()
    wrong = A @ v / normalized(A, fq, fk.cumsum(dim=-2))[..., None]
    assert error(wrong, exact) > 0.5
    for out in all_forms(q, k, v):
        assert error(out, exact) < 1e-5


def test_known_bug_an_epsilon_can_make_the_normalizer_zero():
    """With products of both signs -1e-6 + 1e-6 is a normalizer, too."""
    q, k, v = torch.ones(1, 1), torch.full((1, 1), -1e-6), torch.full((1, 1), 2.0)
    assert masked(q, k, v, eps=1e-6).isinf()
    for out in all_forms(q, k, v, feature_map=identity):
        assert out == 2


def test_known_bug_the_normalizer_is_summed_over_the_heads():
    """``cumsum(dim=1)`` is time in (B, N, H, D), and heads in (B, H, N, D)."""
    q, k, v = draw(31, 9, 9, leading=((2, 3),) * 3)
    fq, fk = elu_plus_one(q), elu_plus_one(k)
    z = fk.cumsum(dim=1)
    wrong = (fq @ fk.mT).tril() @ v / (fq * z).sum(dim=-1, keepdim=True)
    assert error(wrong, masked(fq, fk, v)) > 0.5
    for out in all_forms(q, k, v):
        assert error(out, masked(fq, fk, v)) < 1e-13


def test_known_bug_the_keys_gradient_misses_the_normalizer():
    """A backward pass of its own for the numerator, and none for k in the denominator."""
    q, k, v = draw(32, 9, 9)
    k.requires_grad_()

    def gradient(out):
        return torch.autograd.grad(out.square().sum(), k, retain_graph=True)[0]

    fq, fk = elu_plus_one(q), elu_plus_one(k)
    A = (fq @ fk.mT).tril()
    right = gradient(masked(fq, fk, v))
    assert error(gradient(A @ v / A.sum(dim=-1, keepdim=True).detach()), right) > 0.1
    for out in all_forms(q, k, v):
        assert error(gradient(out), right) < 1e-12


def test_known_bug_the_first_bucket_is_zero():
    """Sums over whole buckets before the own one: position 0 does not even see itself."""
    q, k, v = draw(33, 128, 128)
    fq, fk = elu_plus_one(q), elu_plus_one(k)
    buckets = (fk.mT.reshape(3, 2, 64).movedim(1, 0) @ v.reshape(2, 64, 4)).cumsum(dim=0)
    S = torch.cat([torch.zeros(1, 3, 4), buckets[:-1]])
    wrong = (fq.reshape(2, 64, 3) @ S).flatten(0, 1)
    assert (wrong[:64] == 0).all()
    for out in all_forms(q, k, v):
        assert error(out[0], v[0]) < 1e-13
    out = linear_attention(q, k, v, causal=True, form="chunkwise")  # in chunks of 64 as well
    assert error(out, masked(fq, fk, v)) < 1e-13


def test_known_bug_the_length_must_be_a_multiple_of_the_chunk():
    q, k, v = draw(34, 130, 130)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        k.reshape(-1, 64, 3)
    expected = masked(elu_plus_one(q), elu_plus_one(k), v)
    for out in all_forms(q, k, v):
        assert error(out, expected) < 1e-13


def test_known_bug_float64_is_computed_in_float32():
    """float64 in, float64 out, and float32 between: it cannot serve as a reference."""
    q, k, v = draw(35, 100, 100)
    exact = torch.from_numpy(reference.linear_attention(*arrays(q, k, v), causal=True))
    wrong = masked(elu_plus_one(q.float()), elu_plus_one(k.float()), v.float()).double()
    assert error(wrong, exact) > 1e-8
    for out in all_forms(q, k, v):
        assert out.dtype == torch.float64 and error(out, exact) < 1e-13


@pytest.mark.parametrize(("dtype", "stuck"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_known_bug_sums_in_half_precision_stick(dtype, stuck):
    """256 + 1 is 256 in bfloat16."""
    wrong = torch.zeros((), dtype=dtype)
    for _ in range(4096):
        wrong = wrong + 1
    assert wrong == stuck
    ones = torch.ones(4096, 1, dtype=dtype)
    options = {"feature_map": identity, "normalize": False, "return_state": True}
    for out, state in all_forms(ones, ones, ones, **options):
        assert state.S == state.z == out[-1] == 4096 and state.S.dtype == torch.float32
    state = LinearAttentionState.zeros(1, 1, dtype=dtype)
    for _ in range(2 * stuck):
        state = state.write(ones[0], ones[0])
    assert state.S == 2 * stuck


def test_known_bug_keys_far_below_zero_are_lost():
    """``elu(x) + 1`` rounds to 0 below -16.6, and a mean over such keys is 0/0."""
    q, k, v = draw(36, 9, 9, dtype=torch.float32)
    k = k - 25
    fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    assert masked(fq, fk, v).isnan().all()
    exact = torch.from_numpy(reference.linear_attention(*arrays(q, k, v), causal=True))
    for out in all_forms(q, k, v):
        assert error(out, exact) < 1e-5


def test_known_bug_a_hidden_scale():
    """Multiplying q by 1/√D cancels in the mean and nowhere else."""
    q, k, v = draw(37, 9, 9)
    fq, fk = elu_plus_one(q), elu_plus_one(k)
    right = (fq @ fk.mT).tril() @ v
    assert error(right / math.sqrt(3), right) > 0.4
    for out in all_forms(q, k, v, normalize=False):
        assert error(out, right) < 1e-13


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v: masked(q.exp(), (k - k.amax()).exp() + 1e-4, v),
        lambda q, k, v: ((A := q.exp() @ k.exp().mT) / A.sum(dim=-1, keepdim=True)).tril() @ v,
        lambda q, k, v: q.exp() @ (k.exp().mT @ v) / (q.exp() @ k.exp().sum(dim=-2))[:, None],
    ],
    ids=["a maximum over all keys, and an epsilon", "a mask after the mean", "sums over all keys"],
)
def test_known_bug_a_later_key_changes_the_past(wrong):
    q, k, v = draw(38, 9, 9)
    other = k.clone()
    other[-1] = 4
    assert error(wrong(q, other, v)[:8], wrong(q, k, v)[:8]) > 1e-4
    options = {"feature_map": exponential}
    for after, before in zip(
        all_forms(q, other, v, **options), all_forms(q, k, v, **options), strict=True
    ):
        assert error(after[:8], before[:8]) < 1e-14


def test_known_bug_the_state_forgets_the_normalizer():
    """S alone does not continue a mean, even where the first part was not normalized."""
    q, k, v = draw(39, 8, 8)
    expected = masked(elu_plus_one(q), elu_plus_one(k), v)
    for form in CAUSAL:
        options = {"causal": True, "form": form, "return_state": True}
        _, state = linear_attention(q[:4], k[:4], v[:4], normalize=False, **options)
        out, _ = linear_attention(q[4:], k[4:], v[4:], initial_state=state, **options)
        assert error(out, expected[4:]) < 1e-13
        without = state._replace(z=torch.zeros_like(state.z))
        wrong, _ = linear_attention(q[4:], k[4:], v[4:], initial_state=without, **options)
        assert error(wrong, expected[4:]) > 0.3


def test_known_bug_the_state_is_written_in_place():
    """Two continuations from one state, as beam search makes them."""
    state = draw_state()
    k, v = torch.ones(3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)

    def in_place(state):
        state.S.add_(k[:, None] * v)
        return state

    wrong = LinearAttentionState(state.S.clone(), state.z)
    assert not torch.equal(in_place(wrong).S.clone(), in_place(wrong).S)
    assert torch.equal(state.write(k, v).S, state.write(k, v).S)


# Arguments.


STATE = draw_state()


@pytest.mark.parametrize("feature_map", [elu_plus_one, widen])
def test_a_state_is_as_wide_as_the_features(feature_map):
    C = 7 if feature_map is widen else 3
    options = {"feature_map": feature_map, "causal": True}
    linear_attention(*draw(), initial_state=draw_state(C), **options)
    message = f"^S of initial_state must have the width C, {C}, got 4"
    with pytest.raises(ValueError, match=message):
        linear_attention(*draw(), initial_state=draw_state(4), **options)


def test_causal_attention_needs_as_many_queries_as_keys():
    q, k, v = draw()
    linear_attention(q[:5], k, v)
    with pytest.raises(ValueError, match="^q must have the length of k when causal=True, 7, got 5"):
        linear_attention(q[:5], k, v, causal=True)


def test_a_feature_map_that_does_not_fit_is_described():
    q, k, v = draw()
    message = (
        r"^feature_map must return a torch tensor of floats of shape \(7, C\) for an input of "
        r"shape \(7, 3\), got shape \(7,\) and dtype torch.float64\.$"
    )
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, feature_map=lambda x: x.sum(dim=-1))


@precise_and_half
@pytest.mark.parametrize("causal", [False, True])
def test_feature_maps_are_given_and_cast_to_the_accumulation_dtype(causal, dtype):
    q, k, v = draw(dtype=dtype)
    seen = []

    def phi(x):
        seen.append(x.dtype)
        return x.double().square()

    out = linear_attention(q, k, v, feature_map=phi, causal=causal)
    assert seen == [kept(dtype)] * 2
    expected = linear_attention(q, k, v, feature_map=torch.square, causal=causal)
    assert_close(out, expected, dtype)


def test_states_refuse():
    k, v = torch.ones(3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    far, several = k.to("meta"), LinearAttentionState.zeros(3, 4, (2,), torch.float64)
    for call, error, message in (
        (
            lambda: STATE.write(v, v),
            ValueError,
            r"S of the state must have shape .*4, 4\), got \(3, 4\)",
        ),
        (
            lambda: STATE.write(k, k),
            ValueError,
            r"S of the state must have shape .*3, 3\), got \(3, 4\)",
        ),
        (
            lambda: STATE.read(v),
            ValueError,
            r"S of the state must have shape .*4, 4\), got \(3, 4\)",
        ),
        (lambda: STATE.write([1.0], v), TypeError, "k must be a torch tensor"),
        (lambda: STATE.write(k.float(), v), TypeError, "v must have the dtype of k, float32"),
        (lambda: STATE.write(k[0], v), ValueError, r"k must have shape \(\.\.\., C\)"),
        (lambda: STATE.write(far, v), ValueError, "v must be on the device of k, meta, got cpu"),
        (lambda: STATE.read(k.float()), TypeError, "S of the state must have dtype float32"),
        (lambda: STATE.read(far), ValueError, "S of the state must be on the device of q"),
        (lambda: STATE.read(k, normalize=0), TypeError, "normalize must be True or False, got 0"),
        (lambda: LinearAttentionState([[1.0]], k).read(k), TypeError, "S of the state must be a"),
        (
            lambda: several.write(k.expand(5, 3), v),
            ValueError,
            "the leading dimensions of k, v, S of",
        ),
        (lambda: LinearAttentionState.zeros(-1, 2), ValueError, "C must be at least 0, got -1"),
        (lambda: LinearAttentionState.zeros(1, 2.0), TypeError, "M must be an integer"),
        (lambda: LinearAttentionState.zeros(1, 2, 5), TypeError, "batch_shape must be a tuple"),
        (lambda: LinearAttentionState.zeros(1, 2, dtype=torch.int32), TypeError, "dtype must have"),
    ):
        with pytest.raises(error, match="^" + message):
            call()
