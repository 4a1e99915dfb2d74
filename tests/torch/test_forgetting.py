"""Forgetting attention in torch: gradients of closed gates."""

import math

import torch

from lesson_code.torch import forgetting_attention
from tests.arrays import assert_close
from tests.operators import draw, to_torch


def test_a_gate_that_hides_has_a_gradient_of_zero():
    inputs = [x.requires_grad_() for x in to_torch(draw("forgetting_attention", 9)).values()]
    with torch.no_grad():
        inputs[3][[0, 4, 5]] = -math.inf
    found = torch.autograd.grad(forgetting_attention(*inputs)[5:].sin().sum(), inputs)
    assert all(x.isfinite().all() and (x[:5] == 0).all() for x in found)
    assert found[3][5] == 0 and (found[3][6:] != 0).all()


def test_the_gradient_of_a_gate_is_the_weight_that_passes_it():
    """With values that are 1 before token 3 and 0 after, d o_t / d g_3 = w (1 - w)."""
    q, k, v, g = to_torch(draw("forgetting_attention", 6)).values()
    v = torch.zeros(6, 1, dtype=torch.float64)
    v[:3] = 1
    g.requires_grad_()
    out = forgetting_attention(q, k, v, g)
    w = out[5, 0].item()
    (gradient,) = torch.autograd.grad(out[5, 0], g)
    assert_close(gradient[3], torch.tensor(w * (1 - w), dtype=torch.float64), torch.float64)
