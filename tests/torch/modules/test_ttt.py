"""What is special in TTT-Linear as a layer; what it shares with all modules is in test_mixer.py."""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch.modules import TTTLinear
from tests.torch.modules.family import disturb, draw, refuses

F, H, D, L = 12, 3, 4, 5


def make():
    torch.manual_seed(0)
    return disturb(TTTLinear(F, H, batch_size=L))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def turned(y, position):
    angles = position / 10000 ** (2 * np.arange(D // 2) / D)
    z = (y[: D // 2] + 1j * y[D // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def token_by_token(module, x):
    """The layer for one sequence (N, F), from its weights; gradients by finite differences."""
    P = {name: value.detach().numpy() for name, value in module.named_parameters()}
    out = np.zeros_like(x)
    for h in range(H):
        own = slice(h * D, h * D + D)
        W, b = P["W"][h], P["b"][h]

        def norm(z, h=h):
            z = (z - z.mean()) / math.sqrt(z.var() + 1e-6)
            return P["norm_weight"][h] * z + P["norm_bias"][h]

        for t, x_t in enumerate(x):
            i = t % L
            if i == 0:
                sum_W, sum_b = np.zeros((D, D)), np.zeros(D)
            q, k = (turned(P[f"{y}.weight"][own] @ x_t, i) for y in ("query", "key"))
            v = P["value.weight"][own] @ x_t
            z, g = k @ W + b, np.zeros(D)
            for c, step in enumerate(1e-5 * np.eye(D)):
                up, down = (((norm(y) - (v - k)) ** 2).sum() / 2 for y in (z + step, z - step))
                g[c] = (up - down) / 2e-5
            eta = sigmoid(P["rate.weight"][h] @ x_t + P["rate.bias"][h]) / D
            sum_W, sum_b = sum_W + eta * np.outer(k, g), sum_b + eta * g
            share = max(1 / (i + 1) + P["share"][i], 0)
            W_t, b_t = W - share * sum_W, b - share * sum_b
            out[t, own] = q + norm(q @ W_t + b_t)
            if i == L - 1:
                W, b = W_t, b_t
    centered = out - out.mean(axis=1, keepdims=True)
    y = centered / np.sqrt(out.var(axis=1, keepdims=True) + 1e-6)
    return (P["weight"] * y + P["bias"]) @ P["output.weight"].T


@pytest.mark.parametrize("N", [3, 5, 13])
def test_it_is_the_layer_of_the_paper(N):
    module = make()
    x = draw(module, N)
    for i in range(2):
        expected = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(module(x)[i].detach().numpy(), expected, rtol=0, atol=1e-6)


def test_a_share_is_never_negative():
    module = make()
    x = draw(module, 9)
    with torch.no_grad():
        module.share.fill_(-2)
        y, state = module(x, return_state=True)
    assert y.isfinite().all()
    assert (state.W == 0).all() and (state.b == 0).all()


def test_initialization():
    module = TTTLinear(F, H)
    assert module.W.std() < 0.04 and (module.b == 0).all() and (module.share == 0).all()
    assert (module.norm_weight == 1).all() and (module.norm_bias == 0).all()
    state = module.initial_state(2)
    assert state.position.tolist() == [[0], [0]] and module.batch_size == 16


def test_it_learns_to_begin_with():
    """W and b are parameters: what the layer reads has a gradient for them."""
    module = make()
    module(draw(module, 9)).sum().backward()
    assert all((p.grad != 0).any() for p in module.parameters())


def test_what_is_refused():
    with refuses(ValueError, "batch_size must be at least 1, got 0."):
        TTTLinear(F, H, batch_size=0)
