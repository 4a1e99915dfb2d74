"""What is special in log-linear attention as a layer; the rest is in test_mixer.py."""

import math

import numpy as np
import torch

from lesson_code.torch.modules import LogLinearAttention
from tests.torch.modules.family import disturb, draw, refuses

F, H, D, LEVELS = 12, 3, 4, 5


def make():
    torch.manual_seed(0)
    return disturb(LogLinearAttention(F, H, levels=LEVELS))


def silu(x):
    return x / (1 + np.exp(-x))


def softplus(x):
    return math.log1p(math.exp(x))


def token_by_token(module, x):
    """The layer for one sequence (N, F), from its weights: levels merge as a counter counts."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    projected = x @ np.concatenate([W[f"{y}.weight"] for y in ("query", "key", "value")]).T
    y, S = np.zeros_like(x), np.zeros((H, LEVELS, D, D))
    for t, x_t in enumerate(x):
        taps = [W["convolution.weight"][:, 3 - i] * projected[t - i] for i in range(min(t, 3) + 1)]
        convolved, read = silu(sum(taps)), np.zeros(F)
        weights = (W["level.weight"] @ x_t).reshape(H, LEVELS)
        carry = (t & -t).bit_length() if t else 0  # to which levels 0 to carry - 1 are merged
        for h in range(H):
            q, k, v = (convolved[part * F + h * D :][:D] for part in range(3))
            size = softplus(W["decay.weight"][h] @ x_t + W["decay_bias"][h])
            S[h] *= math.exp(-math.exp(W["log_rate"][h]) * size)
            if carry:
                S[h, carry] += S[h, :carry].sum(axis=0)
                S[h, :carry] = 0
            S[h, 0] = np.outer(k, v)
            out = np.zeros(D)
            for level in range(LEVELS):
                weight = softplus(W["level_scale"][h, level] * weights[h, level])
                out += weight * S[h, level].T @ q / math.sqrt(D)
            read[h * D : h * D + D] = out / math.sqrt(sum(out**2) / D + 1e-5) * W["norm.weight"]
        y[t] = W["output.weight"] @ (read * silu(W["gate.weight"] @ x_t))
    return y, S


def test_it_is_the_layer_of_the_paper():
    module = make()
    x = draw(module, 13)
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, S = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(y[i].detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.S[i].detach().numpy(), S, rtol=0, atol=1e-12)
    assert state.position.tolist() == [13, 13]


def test_levels_limit_the_text():
    """15 of them are enough for 16,384 tokens."""
    assert LogLinearAttention(F, H).levels == 15
    module = make()
    _, state = module(draw(module, 16), return_state=True)
    words = "level_weights must have levels for all tokens, got 5, which are enough for 16, not for"
    with refuses(ValueError, f"{words} 17."):
        module(draw(module, 17))
    with refuses(ValueError, f"{words} 17."):
        module(draw(module, 1), state=state)


def test_equal_weights_of_the_levels_are_the_start():
    """With nothing in the map of the levels each one weighs ln 2."""
    module = make()
    with torch.no_grad():
        module.level.weight.zero_()
        once = module(draw(module, 9))
        module.level_scale.normal_()
        torch.testing.assert_close(module(draw(module, 9)), once, rtol=0, atol=0)
    assert (LogLinearAttention(F, H).level_scale == 1).all()
