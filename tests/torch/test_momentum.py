"""The delta rule with momentum is torch's own optimizer, whose weights are the memory."""

import torch

from lesson_code.torch import momentum_delta_rule
from tests.arrays import assert_close
from tests.operators import draw, to_torch


def test_it_is_gradient_descent_with_momentum():
    """A step for each token; torch's weight decay goes through the momentum, so without any."""
    q, k, v, beta, g, momentum = to_torch(draw("momentum_delta_rule", 9)).values()
    S = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    optimizer = torch.optim.SGD([S], lr=0.1, momentum=0.8)
    for k_t, v_t in zip(k, v, strict=True):
        optimizer.zero_grad()
        ((v_t - k_t @ S).square().sum() / 2).backward()
        optimizer.step()
    gates = 0.1 + 0 * beta, 0 * g, 0.8 + 0 * momentum
    _, last = momentum_delta_rule(q, k, v, *gates, return_state=True)
    assert_close(last.S, S, torch.float64)


def test_a_closed_gate_has_a_gradient_of_zero():
    inputs = [x.requires_grad_() for x in to_torch(draw("momentum_delta_rule", 7)).values()]
    with torch.no_grad():
        inputs[4][4] = -torch.inf
    found = torch.autograd.grad(momentum_delta_rule(*inputs).sum(), inputs)
    assert all(x.isfinite().all() for x in found) and found[4][4] == 0
    assert (found[1][:4] != 0).all()  # what is on its way is not forgotten
