"""What is special in the block of Mamba-3; what it shares with all modules is in test_mixer.py."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from lesson_code.torch import mamba3
from lesson_code.torch.modules import Mamba3
from tests.torch.modules.family import disturb, draw, refuses

F, H, K, E = 6, 3, 8, 12
P = E // H


def make():
    torch.manual_seed(0)
    return disturb(Mamba3(F, H, state_width=K))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def rate_of(a):
    return max(1 + a if a > 0 else 1 / (1 - a), 1e-4)


def normed(y, weight, bias):
    return y / math.sqrt(sum(y**2) / len(y) + 1e-5) * weight + bias


def turned(y, angles):
    """Pairs (0, 1), (2, 3), ...; those without an angle stay."""
    out = y.copy()
    for i, angle in enumerate(angles):
        z = complex(y[2 * i], y[2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
        out[2 * i : 2 * i + 2] = z.real, z.imag
    return out


def token_by_token(module, x):
    """The block for one sequence (N, F), from its weights."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    y = np.zeros_like(x)
    S, angles = np.zeros((H, K, P)), np.zeros((H, K // 4))
    k_last, u_last = np.zeros((H, K)), np.zeros((H, P))
    for t, x_t in enumerate(x):
        sizes = [E, E, K, K, H, H, H, K // 4]
        z, u, B, C, step, a, share, turn = np.split(W["input.weight"] @ x_t, np.cumsum(sizes)[:-1])
        read = np.zeros(E)
        for h in range(H):
            own = slice(h * P, h * P + P)
            delta = math.log1p(math.exp(step[h] + W["step_bias"][h]))
            alpha, part = math.exp(-rate_of(a[h]) * delta), sigmoid(share[h])
            angles[h] += delta * math.pi * np.tanh(turn)
            k = turned(normed(B, W["norm_B"], W["bias_B"][h]), angles[h])
            q = turned(normed(C, W["norm_C"], W["bias_C"][h]), angles[h])
            S[h] = alpha * S[h] + (1 - part) * delta * alpha * np.outer(k_last[h], u_last[h])
            S[h] += part * delta * np.outer(k, u[own])
            k_last[h], u_last[h] = k, u[own]
            read[own] = S[h].T @ q + W["skip"][h] * u[own]
        y[t] = W["output.weight"] @ (read * z / (1 + np.exp(-z)))
    return y, S


def test_it_is_the_block_of_the_paper():
    module = make()
    x = draw(module, 9)
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, S = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(y[i].detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.S[i].detach().numpy(), S, rtol=0, atol=1e-12)


def log_decays(module, a, monkeypatch):
    """What the block hands on as log_decay over Δ, where the projection for A is a."""
    seen = {}

    def watch(u, delta, log_decay, *args, **options):
        seen["rate"] = log_decay / delta
        return mamba3(u, delta, log_decay, *args, **options)

    monkeypatch.setattr("lesson_code.torch.modules.mamba3.mamba3", watch)
    with torch.no_grad():
        module.input.weight.zero_()
        row = 2 * E + 2 * K + H
        module.input.weight[row : row + H, 0] = 1
    x = torch.zeros(1, len(a), F, dtype=torch.float64)
    x[0, :, 0] = torch.tensor(a)
    module(x)
    return seen["rate"][0]


def test_rates_are_negative_and_have_a_floor(monkeypatch):
    """`-f(a).clamp(max=-floor)` negates last: all rates would be +0.0001, and nothing forgotten."""
    a = [-1e6, -1e5, -1e4, -99.0, -1.0, 0.0, 1.0, 99.0]
    rates = log_decays(make(), a, monkeypatch)
    expected = [-1e-4, -1e-4, -1 / 10001, -0.01, -0.5, -1.0, -2.0, -100.0]
    expected[2] = -1e-4  # 1/10001 is below the floor
    for rate in rates:  # of each head
        np.testing.assert_allclose(rate.detach(), expected, rtol=1e-12)


def test_gradients_of_the_rate_are_finite_everywhere():
    """At a = 1 the other branch, 1/(1 - a), would be 1/0."""
    module = make()
    with torch.no_grad():
        module.input.weight.zero_()
        row = 2 * E + 2 * K + H
        module.input.weight[row : row + H, 0] = 1
    x = torch.ones(1, 4, F, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([1.0, 0.0, -1e6, 1e3])
    module(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_the_second_half_of_the_state_does_not_rotate():
    module = make()
    _, state = module(draw(module, 9), return_state=True)
    assert (state.angle[..., : K // 4] != 0).all() and (state.angle[..., K // 4 :] == 0).all()


def test_initialization():
    torch.manual_seed(0)
    module = Mamba3(512, 256)
    for name in ("norm_B", "norm_C", "bias_B", "bias_C", "skip"):
        assert (getattr(module, name) == 1).all()
    assert module.bias_B.shape == (256, 64) and module.input.bias is module.output.bias is None
    steps = softplus(module.step_bias)
    assert steps.min() > 0.00099 and steps.max() < 0.101
    assert abs(steps.log10().mean() + 2) < 0.15


@pytest.mark.parametrize("width", [2, 6])
def test_what_is_refused(width):
    with refuses(ValueError, f"state_width must be a multiple of 4, got {width}."):
        Mamba3(F, H, state_width=width)
