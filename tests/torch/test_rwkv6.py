"""The memory of RWKV-5 and 6 in torch: against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.torch import rwkv6

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,  # computed in float32 and rounded once
    torch.bfloat16: 2.0**-8 + 1e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def draw(seed=0, N=7, D=3, M=4, leading=((),) * 6, dtype=torch.float64, closed=True):
    """r, k, v, log_decay with a few that are -inf or 0, bonus, and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D,), (D, M))
    r, k, v, g, u, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -np.exp(2 * g)
    g[rng.random(g.shape) < 0.1] = 0
    if closed:
        g[rng.random(g.shape) < 0.1] = -math.inf
    return [torch.from_numpy(np.asarray(x)).to(dtype) for x in (r, k, v, g, u, S)]


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
    shapes=mutually_broadcastable_shapes(num_shapes=6, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 1), (3,), (1, 1), (), (3,), ()), ()), True, 37, 7, 3, 5, *"??")
@example(BroadcastableShapes(((5, 2, 3), (3,), (2, 1), (), (), (3,)), ()), True, 9, 4, 3, 2, *"??")
@example(BroadcastableShapes(((), (2,), (3, 1), (1,), (2,), ()), ()), False, 1, 4, 2, 3, *"??")
@example(BroadcastableShapes(((2,), (1,), (), (1,), (3, 1), ()), ()), True, 0, 4, 2, 3, *"??")
def test_every_form_is_numpys(shapes, with_state, N, chunk_size, D, M, dtype, seed):
    dtype, seed = (torch.float64, 0) if dtype == "?" else (dtype, seed)
    *inputs, S = draw(seed, N, D, M, shapes.input_shapes, dtype)
    S = S.to(kept(dtype)) if with_state else None
    state = None if S is None else S.double().numpy()
    expected, last = reference.rwkv6(*arrays(*inputs), initial_state=state, return_state=True)
    for form in [*FORMS, None]:
        options = {"form": form, "chunk_size": chunk_size, "return_state": True}
        out, found = rwkv6(*inputs, initial_state=S, **options)
        assert_close(out, expected, TOLERANCE[dtype], dtype)
        assert_close(found, last, TOLERANCE[kept(dtype)], kept(dtype))


KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
GATES = torch.tensor([[0.0, 0.5], [0.5, 1.0], [1.0, 0.0]])


@every_form
@every_dtype
def test_worked_numbers(form, dtype):
    """The same tokens and gates as for gated linear attention: read first, bonus 2."""
    inputs = (x.to(dtype) for x in (KEYS, KEYS, VALUES, GATES.log(), torch.full((2,), 2.0)))
    out, S = rwkv6(*inputs, form=form, chunk_size=2, return_state=True)
    assert out.round().tolist() == [[20, 40], [60, 80], [235, 290]]
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
        rwkv6(*x[:5], form=f, initial_state=x[5], **options)
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
    """A difference of cumulative sums would have lost them: 1e6 - 1e6 - 0.003."""
    g = torch.full((6, 1), -0.001)
    g[0] = -1e6
    r, k, v = torch.zeros(3, 6, 1)
    r[-1], k[1], v[1] = 1, 1, 1
    out = rwkv6(r, k, v, g, torch.zeros(1), form=form)
    assert_close(out[-1], [math.exp(-0.003)], 1e-6, torch.float32)


@every_form
def test_the_bonus_counts_for_the_current_token_only_and_is_not_stored(form):
    r, k, v, g, u, S = draw(20)
    options = {"form": form, "chunk_size": 3, "initial_state": S, "return_state": True}
    out, last = rwkv6(r, k, v, g, u, **options)
    more, same = rwkv6(r, k, v, g, u + 1, **options)
    assert_close(more - out, (r * k).sum(dim=-1, keepdim=True) * v)
    assert torch.equal(same, last)


@every_form
def test_read_before_write(form):
    """Without a bonus the first token reads what there was, and the last decay is for no read."""
    r, k, v, g, u, S = draw(21)
    options = {"form": form, "chunk_size": 3, "initial_state": S}
    out = rwkv6(r, k, v, g, 0 * u, **options)
    assert_close(out[0], r[0] @ S)
    g[-1] = -math.inf
    assert_close(rwkv6(r, k, v, g, 0 * u, **options), out)


@every_form
def test_rwkv5_is_a_constant_decay(form):
    """RWKV-5's own sum, powers of one w for each channel: sum over j < t of w^(t-1-j)."""
    r, k, v, _, u, _ = draw(22)
    w = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    expected = torch.stack(
        [
            (r[t] * u * k[t]).sum() * v[t]
            + sum(((r[t] * k[j] * w ** (t - 1 - j)).sum() * v[j] for j in range(t)), 0 * v[t])
            for t in range(7)
        ]
    )
    assert_close(rwkv6(r, k, v, w.log().expand(7, 3), u, form=form, chunk_size=3), expected)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    *inputs, u, S = draw(3)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = rwkv6(*inputs, u, **options)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in inputs]
    found, memory = rwkv6(*padded, u, **options)
    assert_close(found[:7], out)
    assert_close(memory, last)
