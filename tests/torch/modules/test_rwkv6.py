"""What is special in the time mix of RWKV-6."""

import math

import pytest
import torch

from lesson_code.torch.modules import RWKV6State, RWKV6TimeMix
from tests.torch.modules.family import disturb, draw

WIDTH, HEADS = 12, 3


def make():
    torch.manual_seed(0)
    module = disturb(RWKV6TimeMix(WIDTH, HEADS))
    return module, draw(module, 9)


def token_by_token(module, x):
    """RWKV-6's time mix for one sequence (N, F), from its weights, one token and head at a time."""
    weight = {name: parameter.detach() for name, parameter in module.named_parameters()}
    H, D = HEADS, WIDTH // HEADS
    S = torch.zeros(H, D, D, dtype=x.dtype)
    last, outputs = torch.zeros(WIDTH, dtype=x.dtype), []
    for x_t in x:
        first = x_t + (last - x_t) * weight["first_share"]
        lowered = torch.tanh(first @ weight["shares_down"]).chunk(5)
        mixed = []
        for i in range(5):
            share = weight["shares"][i] + lowered[i] @ weight["shares_up"][i]
            mixed.append((1 - share) * x_t + share * last)
        x_w, x_k, x_v, x_r, x_g = mixed
        raw = weight["decay_base"] + torch.tanh(x_w @ weight["decay_down"]) @ weight["decay_up"]
        w = torch.exp(-torch.exp(raw))
        r, k, v, g = (
            weight[f"{name}.weight"] @ x_name
            for name, x_name in (("receptance", x_r), ("key", x_k), ("value", x_v), ("gate", x_g))
        )
        read = torch.zeros(WIDTH, dtype=x.dtype)
        for h in range(H):
            at = slice(h * D, h * D + D)
            write = torch.outer(k[at], v[at])
            read[at] = (S[h] + weight["bonus"][h][:, None] * write).T @ r[at]
            S[h] = w[at, None] * S[h] + write
        read = torch.nn.functional.group_norm(
            read[None], H, weight["norm.weight"], weight["norm.bias"], eps=64e-5
        )[0]
        outputs.append(weight["output.weight"] @ (read * g * torch.sigmoid(g)))
        last = x_t
    return torch.stack(outputs), RWKV6State(last, S)


def test_it_is_the_time_mix_of_the_paper():
    module, x = make()
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, last = token_by_token(module, x[i])
        torch.testing.assert_close(y[i], expected, rtol=0, atol=1e-10)
        for found, wanted in zip(state, last, strict=True):
            torch.testing.assert_close(found[i], wanted, rtol=0, atol=1e-10)


def test_a_share_is_that_of_the_last_token():
    """RWKV-6's sense, the opposite of RWKV-4's: with shares of 1 everything is a token late."""
    module, x = make()
    with torch.no_grad():
        module.shares_up.zero_()
        module.shares.zero_()
        now = module(x)
        module.shares.fill_(1)
        late = module(x)
    torch.testing.assert_close(late[:, 1:], now[:, :-1], rtol=0, atol=1e-12)
    assert not late[:, 0].allclose(now[:, 0])


def test_sizes_and_initialization():
    torch.manual_seed(0)
    module = RWKV6TimeMix(128, 4)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    square = ("receptance", "key", "value", "gate", "output")
    assert shapes == {f"{name}.weight": (128, 128) for name in square} | {
        "norm.weight": (128,),
        "norm.bias": (128,),
        "first_share": (128,),
        "shares": (5, 128),
        "shares_down": (128, 5 * 32),
        "shares_up": (5, 32, 128),
        "decay_base": (128,),
        "decay_down": (128, 64),
        "decay_up": (64, 128),
        "bonus": (4, 32),
    }
    for name in ("shares_down", "decay_down", "output.weight", "norm.bias"):
        assert not module.get_parameter(name).any()
    for name in ("shares_up", "decay_up"):
        assert 0.009 < module.get_parameter(name).abs().max() <= 0.01
    for name, gain in (("receptance", 1), ("value", 1), ("key", 0.1), ("gate", 0.1)):
        W = module.get_parameter(f"{name}.weight")
        torch.testing.assert_close(W @ W.T, gain**2 * torch.eye(128), rtol=0, atol=1e-5)
    decays = torch.exp(-torch.exp(module.decay_base))
    assert decays[0].item() == pytest.approx(math.exp(-math.exp(-6)))
    assert decays[-1].item() == pytest.approx(math.exp(-math.exp(-1)))
    assert (decays.diff() < 0).all()
    torch.testing.assert_close(module.bonus.flatten()[:4], torch.tensor([0.0, 0.1, -0.1, 0.0]))
    assert module.first_share[[0, 32]].tolist() == [1, 0.75]
    assert module.shares[:, 32].tolist() == [0.75, 0.75, 0.75, 0.5, 0.5]
    assert module.norm.eps == 64e-5
    # Small widths have small ranks.
    small = RWKV6TimeMix(8, 2)
    assert small.shares_up.shape == (5, 8, 8) and small.decay_down.shape == (8, 8)
