"""Retention in torch: every form against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.checks import (
    check_linear_cost,
    random_qkv,
)
from lesson_code.torch import retention, retention_decays

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def tensor(rng, *shape, dtype=torch.float64):
    return torch.from_numpy(rng.normal(size=shape)).to(dtype)


def draw(seed=0, N=7, D=3, M=4, leading=((), (), ()), dtype=torch.float64):
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M))
    return [
        tensor(rng, *lead, *shape, dtype=dtype) for lead, shape in zip(leading, shapes, strict=True)
    ]


def draw_decay(shape=(), seed=1, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).uniform(0.1, 1, size=shape)).to(dtype)


def draw_state(leading=(), D=3, M=4, seed=2, dtype=torch.float64):
    return tensor(np.random.default_rng(seed), *leading, D, M, dtype=dtype)


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def kept(dtype):
    """The dtype of the state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_close(found, expected, tolerance=1e-12, dtype=None):
    """The same shape, and an error relative to the largest number; expected may be NumPy's."""
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


# Every form is NumPy's function.


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=5, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    BroadcastableShapes(((5, 1, 1), (3, 1), (1, 1), (2,), ()), (5, 3, 2)),
    *(True, 37, 7, 3, 5, torch.float64, 0),
)
@example(BroadcastableShapes(((), (), (), (2, 3), ()), (2, 3)), False, 5, 2, 2, 3, torch.float32, 0)
@example(BroadcastableShapes(((2,),) * 5, (2,)), True, 0, 4, 3, 5, torch.bfloat16, 0)
def test_forms_are_numpys(shapes, with_state, N, chunk_size, D, M, dtype, seed):
    *leading, of_decay, of_state = shapes.input_shapes
    q, k, v = draw(seed, N, D, M, leading, dtype)
    decay = draw_decay(of_decay, seed, kept(dtype))
    S = draw_state(of_state, D, M, seed, kept(dtype)) if with_state else None
    numpys = {"initial_state": arrays(S)[0] if with_state else None, "chunk_size": chunk_size}
    expected, expected_S = reference.retention(*arrays(q, k, v, decay), return_state=True, **numpys)
    options = {"initial_state": S, "chunk_size": chunk_size}
    for form in [*FORMS, None]:
        out, state = retention(q, k, v, decay, form=form, return_state=True, **options)
        assert_close(out, expected, TOLERANCE[dtype], dtype)
        assert_close(state, expected_S, TOLERANCE[kept(dtype)], kept(dtype))


@every_form
@every_dtype
def test_a_number_a_half_and_states_of_either_dtype(form, dtype):
    q, k, v = draw(2, 9, leading=((5, 1, 1), (3, 1), (3, 1)), dtype=dtype)
    for given_dtype in {dtype, kept(dtype)}:
        S = draw_state((2,), dtype=given_dtype)
        for decay in (0.75, torch.tensor(0.75, dtype=given_dtype)):
            out, state = retention(
                q, k, v, decay, form=form, chunk_size=4, initial_state=S, return_state=True
            )
            assert state.shape == (3, 2, 3, 4) and out.shape == (5, 3, 2, 9, 4)
            expected = reference.retention(
                *arrays(q, k, v), 0.75, initial_state=arrays(S)[0], return_state=True
            )
            assert_close(out, expected[0], TOLERANCE[dtype], dtype)
            assert_close(state, expected[1], TOLERANCE[kept(dtype)], kept(dtype))


@every_form
@every_dtype
def test_worked_numbers(form, dtype):
    """Chapter 12, by hand; the logarithm of 1/2 costs the last digit."""
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=dtype)
    v = torch.tensor([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0]], dtype=dtype)
    out, S = retention(k, k, v, 0.5, form=form, chunk_size=2, return_state=True)
    assert_close(out, [[16, 8], [4, 12], [10, 20]], 1e-6, dtype)
    assert_close(S, [[6, 8], [4, 12]], 1e-6, kept(dtype))


def test_the_decays_are_numpys():
    found = retention_decays(8)
    assert found.dtype == torch.float32 and found.tolist() == reference.retention_decays(8).tolist()
    with pytest.raises(ValueError, match="^num_heads must be at least 1, got 0"):
        retention_decays(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_known_bug_decays_in_half_precision_are_one(dtype):
    """1 - 2^-12 rounds to 1, which never forgets: decays are float32 whatever the inputs are."""
    q, k, v = draw(3, 2000, leading=((8,),) * 3, dtype=dtype)
    decays = retention_decays(8)
    assert decays.to(dtype)[7] == 1
    _, S = retention(q, k, v, decays, return_state=True)
    _, expected = reference.retention(*arrays(q, k, v, decays), return_state=True)
    assert_close(S, expected, 1e-5)
    _, wrong = retention(q, k, v, decays.to(dtype), return_state=True)
    assert abs(wrong.numpy()[7] - expected[7]).max() > 0.1 * abs(expected[7]).max()


# What lesson_code.checks says, of tensors.


def tensors(rng, N, **sizes):
    return [torch.from_numpy(x) for x in random_qkv(rng, N, **sizes)]


@pytest.mark.parametrize("form", ["recurrent", "chunkwise", None])
def test_memory_is_linear(form):
    check_linear_cost(lambda *qkv: retention(*qkv, 0.9, form=form), inputs=tensors)


# Strong decays, precision, NaN.


@every_form
@every_dtype
def test_strong_decays(form, dtype):
    """exp(-50) per step, and a decay that is 0 in float32, which forgets everything."""
    q, k, v = (x.requires_grad_() for x in draw(6, 130, leading=((2,),) * 3, dtype=dtype))
    for decay in (math.exp(-50), 1e-60):
        out, S = retention(q, k, v, decay, form=form, return_state=True)
        expected = (q * k).double().sum(dim=-1, keepdim=True) * v.double()
        assert_close(out, expected, 2 * TOLERANCE[dtype], dtype)
        assert_close(S, k[:, -1, :, None].double() * v[:, -1, None].double(), 1e-5)
        for gradient in torch.autograd.grad(out.sum() + S.sum(), (q, k, v)):
            assert gradient.isfinite().all()
    decay = torch.tensor([math.exp(-50), 1.0], dtype=kept(dtype), requires_grad=True)
    out, S = retention(q, k, v, decay, form=form, return_state=True)
    (gradient,) = torch.autograd.grad(out.float().sum() + S.sum(), decay)
    assert out.isfinite().all() and gradient.isfinite().all()


def test_float32_keeps_its_digits():
    """A difference of cumulative sums of logarithms would lose three of them in 8,192 tokens."""
    q, k, v = draw(7, 8192, 8, 8)
    for decay in (0.5, 1 - 2**-12):
        exact, exact_S = reference.retention(*arrays(q, k, v), decay, return_state=True)
        for chunk_size in (64, 1000):
            out, S = retention(
                *(x.float() for x in (q, k, v)), decay, chunk_size=chunk_size, return_state=True
            )
            assert_close(out, exact, 2e-6)
            assert_close(S, exact_S, 2e-6)


# Derivatives and transformations.


@every_form
def test_shapes_alone(form):
    """On the meta device nothing is computed, and reading a number would be an error."""
    q, k, v = (x.to("meta") for x in draw(14, 9, leading=((2, 1), (3,), ())))
    for decay in (0.9, draw_decay((3,)).to("meta")):
        out, S = retention(q, k, v, decay, form=form, chunk_size=4, return_state=True)
        assert out.shape == (2, 3, 9, 4) and S.shape == (3, 3, 4) and out.device.type == "meta"


# Arguments.
