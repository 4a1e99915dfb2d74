"""Gated linear attention in torch: against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.torch import gated_linear_attention

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,  # computed in float32 and rounded once
    torch.bfloat16: 2.0**-8 + 1e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def draw(seed=0, N=7, D=3, M=4, leading=((),) * 5, dtype=torch.float64, closed=True):
    """q, k, v, log_decay with a few gates that are closed, and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D, M))
    q, k, v, g, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -np.exp(2 * g)
    g[rng.random(g.shape) < 0.1] = 0
    if closed:
        g[rng.random(g.shape) < 0.1] = -math.inf
    return [torch.from_numpy(np.asarray(x)).to(dtype) for x in (q, k, v, g, S)]


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def kept(dtype):
    """The dtype of the state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_close(found, expected, tolerance=1e-12, dtype=torch.float64):
    assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


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
@example(BroadcastableShapes(((2, 1), (3,), (1, 1), (), ()), ()), True, 37, 7, 3, 5, *"??")
@example(BroadcastableShapes(((5, 2, 3), (3,), (2, 1), (), (3,)), ()), True, 9, 4, 3, 2, *"??")
@example(BroadcastableShapes(((), (2,), (3, 1), (1,), ()), ()), False, 1, 4, 2, 3, *"??")
@example(BroadcastableShapes(((2,), (1,), (1,), (1,), ()), ()), True, 0, 4, 2, 3, *"??")
def test_every_form_is_numpys(shapes, with_state, N, chunk_size, D, M, dtype, seed):
    dtype, seed = (torch.float64, 0) if dtype == "?" else (dtype, seed)
    *inputs, S = draw(seed, N, D, M, shapes.input_shapes, dtype)
    S = S.to(kept(dtype)) if with_state else None
    state = None if S is None else S.double().numpy()
    expected, last = reference.gated_linear_attention(
        *arrays(*inputs), initial_state=state, return_state=True
    )
    for form in [*FORMS, None]:
        options = {"form": form, "chunk_size": chunk_size, "return_state": True}
        out, found = gated_linear_attention(*inputs, initial_state=S, **options)
        assert_close(out, expected, TOLERANCE[dtype], dtype)
        assert_close(found, last, TOLERANCE[kept(dtype)], kept(dtype))


KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
GATES = torch.tensor([[0.0, 0.5], [0.5, 1.0], [1.0, 0.0]])


@every_form
@every_dtype
def test_worked_numbers(form, dtype):
    inputs = (x.to(dtype) for x in (KEYS, KEYS, VALUES, GATES.log()))
    out, S = gated_linear_attention(*inputs, form=form, chunk_size=2, return_state=True)
    assert out.round().tolist() == [[10, 20], [30, 40], [105, 130]]
    assert S.round().tolist() == [[55, 70], [50, 60]]


@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.parametrize("strength", [-50.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_strong_decay_in_value_and_gradient(form, strength, dtype):
    """A product with exp(-G), G a cumulative sum, would be inf, and its gradient NaN."""
    args = draw(1, N=40, dtype=dtype)
    args[3][::2] = strength
    args[3][5] = 0
    args = [x.requires_grad_() for x in args]
    double = [x.detach().double().requires_grad_() for x in args]
    options = {"chunk_size": 16, "return_state": True}
    results = [
        gated_linear_attention(*x[:4], form=f, initial_state=x[4], **options)
        for x, f in ((args, form), (double, "recurrent"))
    ]
    gradients = [
        torch.autograd.grad(out.square().sum() + S.square().sum(), x)
        for (out, S), x in zip(results, (args, double), strict=True)
    ]
    both = zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True)
    for found, expected in both:
        assert found.isfinite().all()
        assert_close(found, expected, TOLERANCE[dtype], dtype)
    assert (gradients[0][3][args[3] == -math.inf] == 0).all()


@every_form
def test_segments_keep_their_digits(form):
    """A difference of cumulative sums would have lost them: 1e6 - 1e6 - 0.004."""
    g = torch.full((6, 1), -0.001)
    g[0] = -1e6
    q, k, v = torch.zeros(3, 6, 1)
    q[-1], k[1], v[1] = 1, 1, 1
    out = gated_linear_attention(q, k, v, g, form=form)
    assert_close(out[-1], [math.exp(-0.004)], 1e-6, torch.float32)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    *inputs, S = draw(3)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(*inputs, **options)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in inputs]
    found, memory = gated_linear_attention(*padded, **options)
    assert_close(found[:7], out)
    assert_close(memory, last)


@every_form
def test_gradients_of_broadcast_inputs(form):
    args = draw(7, N=9, leading=((2, 1), (3,), (1, 1), (2, 3), (3,)))

    def gradients(form):
        leaves = [x.clone().requires_grad_() for x in args]
        out, S = gated_linear_attention(
            *leaves[:4], form=form, chunk_size=4, initial_state=leaves[4], return_state=True
        )
        return torch.autograd.grad(out.sin().sum() + S.sin().sum(), leaves)

    for found, expected in zip(gradients(form), gradients("recurrent"), strict=True):
        assert_close(found, expected, 1e-11)
