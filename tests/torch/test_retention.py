"""Retention in torch: decays in half precision, of any strength, and over many tokens.

That every form is its sum is tested in test_definitions.py.
"""

import math

import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.checks import check_linear_cost, random_qkv
from lesson_code.torch import retention, retention_decays
from tests.arrays import assert_close, normal, numbers
from tests.arrays import tensors as to_tensors
from tests.oracles import retention as loop

every_form = pytest.mark.parametrize("form", ["recurrent", "parallel", "chunkwise"])


def draw(N=7, D=3, M=4, leading=(), dtype=torch.float64):
    arrays = normal((*leading, N, D), (*leading, N, D), (*leading, N, M))
    return to_tensors(*arrays, dtype=dtype)


@every_form
def test_a_number_a_tensor_and_half_precision(form):
    """A decay of either dtype, or a number; a state of either dtype; sums in float32."""
    q, k, v = draw(9, leading=(3,), dtype=torch.float16)
    for dtype in (torch.float16, torch.float32):
        S = to_tensors(*normal((3, 4), seed=2), dtype=dtype)[0]
        for decay in (0.75, torch.tensor(0.75, dtype=dtype)):
            options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
            out, state = retention(q, k, v, decay, **options)
            expected, last = loop(q, k, v, 0.75, S)
            assert_close(out, expected, torch.float16)
            assert_close(state, last, torch.float32)


def test_the_decays_are_numpys():
    found = retention_decays(8)
    assert found.dtype == torch.float32 and found.tolist() == reference.retention_decays(8).tolist()
    with pytest.raises(ValueError, match="^num_heads must be at least 1, got 0"):
        retention_decays(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_known_bug_decays_in_half_precision_are_one(dtype):
    """1 - 2^-12 rounds to 1, which never forgets: decays are float32 whatever the inputs are."""
    q, k, v = draw(2000, leading=(8,), dtype=dtype)
    decays = retention_decays(8)
    assert decays.to(dtype)[7] == 1
    _, S = retention(q, k, v, decays, return_state=True)
    _, expected = reference.retention(*map(numbers, (q, k, v, decays)), return_state=True)
    assert_close(S, expected, torch.float32)
    _, wrong = retention(q, k, v, decays.to(dtype), return_state=True)
    assert abs(wrong.numpy()[7] - expected[7]).max() > 0.1 * abs(expected[7]).max()


def tensors(rng, N, **sizes):
    return to_tensors(*random_qkv(rng, N, **sizes))


@pytest.mark.parametrize("form", ["recurrent", "chunkwise", None])
def test_memory_is_linear(form):
    check_linear_cost(lambda *qkv: retention(*qkv, 0.9, form=form), inputs=tensors)


@every_form
def test_strong_decays(form):
    """exp(-50) per step, and a decay that is 0 in float32, which forgets everything."""
    q, k, v = (x.requires_grad_() for x in draw(130, leading=(2,), dtype=torch.float32))
    for decay in (math.exp(-50), 1e-60):
        out, S = retention(q, k, v, decay, form=form, return_state=True)
        expected = (q * k).double().sum(dim=-1, keepdim=True) * v.double()
        assert_close(out, expected, torch.float32)
        assert_close(S, k[:, -1, :, None].double() * v[:, -1, None].double(), torch.float32)
        for gradient in torch.autograd.grad(out.sum() + S.sum(), (q, k, v)):
            assert gradient.isfinite().all()
    decay = torch.tensor([math.exp(-50), 1.0], requires_grad=True)
    out, S = retention(q, k, v, decay, form=form, return_state=True)
    (gradient,) = torch.autograd.grad(out.float().sum() + S.sum(), decay)
    assert out.isfinite().all() and gradient.isfinite().all()


def test_float32_keeps_its_digits():
    """A difference of cumulative sums of logarithms would lose three of them in 8,192 tokens."""
    q, k, v = draw(8192, 8, 8)
    for decay in (0.5, 1 - 2**-12):
        exact, exact_S = reference.retention(*map(numbers, (q, k, v)), decay, return_state=True)
        for chunk_size in (64, 1000):
            out, S = retention(
                *(x.float() for x in (q, k, v)), decay, chunk_size=chunk_size, return_state=True
            )
            assert_close(out, exact, torch.float32, 2e-6)
            assert_close(S, exact_S, torch.float32, 2e-6)


@every_form
def test_shapes_alone(form):
    """On the meta device nothing is computed, and reading a number would be an error."""
    shapes = ((2, 1, 9, 3), (3, 9, 3), (9, 4))
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    for decay in (0.9, torch.empty(3, device="meta")):
        out, S = retention(q, k, v, decay, form=form, chunk_size=4, return_state=True)
        assert out.shape == (2, 3, 9, 4) and S.shape == (3, 3, 4) and out.device.type == "meta"
