"""What is special in sliding windows as a layer; what modules share is in test_mixer.py."""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch.modules import SlidingWindowAttention, SoftmaxAttention
from tests.torch.modules.family import disturb, draw, in_steps, refuses

F, H, D = 12, 3, 4


def make(window):
    torch.manual_seed(0)
    return disturb(SlidingWindowAttention(F, H, window))


def turned(y, position):
    """RoPE, written with complex numbers: channel i with channel i + D/2."""
    angles = position / 10000 ** (2 * np.arange(D // 2) / D)
    z = (y[: D // 2] + 1j * y[D // 2 :]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag])


def token_by_token(module, x):
    """The layer for one sequence (N, F), from its weights."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    y = np.zeros_like(x)
    for t in range(len(x)):
        read = np.zeros(F)
        for h in range(H):
            own = slice(h * D, h * D + D)
            q, total = turned(W["query.weight"][own] @ x[t], t), 0
            for j in range(max(t - module.window + 1, 0), t + 1):
                k = turned(W["key.weight"][own] @ x[j], j)
                weight = math.exp(q @ k / math.sqrt(D))
                read[own] += weight * (W["value.weight"][own] @ x[j])
                total += weight
            read[own] /= total
        y[t] = W["output.weight"] @ read
    return y


@pytest.mark.parametrize("window", [1, 3, 4, 20])
def test_it_is_the_layer_of_the_paper(window):
    module = make(window)
    x = draw(module, 9)
    for i in range(2):
        expected = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(module(x)[i].detach().numpy(), expected, rtol=0, atol=1e-12)


def test_a_long_window_is_softmax_attention():
    module = make(64)
    softmax = SoftmaxAttention(F, H).double()
    softmax.load_state_dict(module.state_dict())
    x = draw(module, 9)
    torch.testing.assert_close(module(x), softmax(x), rtol=0, atol=1e-12)


def test_the_cache_stops_growing():
    module = make(4)
    for N in (1, 3, 4, 30):
        _, cache = in_steps(module, draw(module, N))
        assert cache.k.shape[-2] == cache.v.shape[-2] == min(N, 3)
        for x in cache:  # and what has left it is not kept alive behind it
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_what_is_refused():
    with refuses(ValueError, "window must be at least 1, got 0."):
        SlidingWindowAttention(F, H, 0)
    with refuses(TypeError, "window must be an integer, got 2.5."):
        SlidingWindowAttention(F, H, 2.5)
