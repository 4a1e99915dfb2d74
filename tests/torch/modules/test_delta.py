"""What is special in the delta layers; what they share with all modules is in test_mixer.py."""

import math

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.torch.modules import DeltaNet, DeltaNetState, GatedDeltaNet
from tests.torch.modules.family import disturb, draw, refuses

F, H, D = 12, 3, 4
both = pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet])


def make(kind, **options):
    torch.manual_seed(0)
    return disturb(kind(F, H, **options))


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_in_numpy(module, x, largest_beta=1):
    """The layer as the chapter writes it, in NumPy and token by token where it convolves."""
    p = {name: value.detach().numpy() for name, value in module.named_parameters()}
    x = x.numpy()

    def convolved(name, part):
        projected = x @ p[f"{name}.weight"].T
        w = p["convolution.weight"][part * F : (part + 1) * F]
        out = np.zeros_like(projected)
        for t in range(x.shape[1]):
            for i in range(4):
                if t - 3 + i >= 0:
                    out[:, t] += w[:, i] * projected[:, t - 3 + i]
        return np.moveaxis(silu(out).reshape(*x.shape[:2], H, D), 2, 1)  # (B, H, N, D)

    q, k, v = (convolved(name, part) for part, name in enumerate(["query", "key", "value"]))
    q, k = (y / np.sqrt((y**2).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    beta = largest_beta * np.moveaxis(sigmoid(x @ p["beta.weight"].T), 2, 1)
    args = [q / math.sqrt(D), k, v, beta]
    if isinstance(module, GatedDeltaNet):
        size = np.log1p(np.exp(x @ p["decay.weight"].T + p["decay_bias"]))
        log_decay = np.moveaxis(-np.exp(p["log_rate"]) * size, 2, 1)
        read = reference.gated_delta_rule(*args, log_decay, form="recurrent")
    else:
        read = reference.delta_rule(*args, form="recurrent")
    normed = read / np.sqrt((read**2).mean(axis=-1, keepdims=True) + 1e-5) * p["norm.weight"]
    normed = np.moveaxis(normed, 1, 2).reshape(x.shape)
    if isinstance(module, GatedDeltaNet):
        normed = normed * silu(x @ p["gate.weight"].T)
    return normed @ p["output.weight"].T


@both
@pytest.mark.parametrize("negative", [False, True])
def test_the_layer_is_the_chapters(kind, negative):
    module = make(kind, allow_negative_eigenvalues=negative)
    x = draw(module, 9)
    expected = layer_in_numpy(module, x, largest_beta=2 if negative else 1)
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=0, atol=1e-12)


@both
def test_the_state_is_three_tokens_and_one_memory(kind):
    module = make(kind)
    x = draw(module, 5)
    _, state = module(x, return_state=True)
    assert isinstance(state, DeltaNetState)
    assert state.tail.shape == (2, 3, 3 * F) and state.S.shape == (2, H, D, D)
    projected = torch.cat([module.query(x), module.key(x), module.value(x)], dim=-1)
    torch.testing.assert_close(state.tail, projected[:, -3:], rtol=0, atol=1e-12)


@both
def test_the_memory_stays_bounded_for_any_weights(kind):
    """Keys of length 1 and beta below 2: |S| grows at most by what is written."""
    module = make(kind, allow_negative_eigenvalues=True)
    with torch.no_grad():
        for name in ("key", "value", "beta"):
            getattr(module, name).weight *= 50
    x = draw(module, 300)
    _, state = module(x, return_state=True)
    values = module.value(x).abs().max() * 4 * module.convolution.weight.abs().max()
    assert state.S.isfinite().all()
    assert state.S.square().sum(dim=(-2, -1)).sqrt().max() < 300 * 2 * values * D


def test_initial_decays():
    """softplus(bias) is log-uniform in [0.001, 0.1] and the rate uniform up to 16, never 0."""
    torch.manual_seed(0)
    module = GatedDeltaNet(4000, 2000)
    size, rate = torch.nn.functional.softplus(module.decay_bias), module.log_rate.exp()
    assert 0.00099 < size.min() < 0.0011 and 0.09 < size.max() < 0.101
    assert abs(size.log().mean() - math.log(1e-2)) < 0.1  # the middle of the logarithms
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() <= 16.001
    assert abs(rate.mean() - 8) < 0.5
    assert module.log_rate.isfinite().all()


def test_a_rate_of_zero_is_never_drawn(monkeypatch):
    """Its logarithm would be -inf, and the gradient NaN."""

    def lowest(tensor, low=0.0, high=1.0, **_):
        return torch.full_like(tensor, low)

    monkeypatch.setattr(torch.Tensor, "uniform_", lowest)
    module = GatedDeltaNet(F, H)
    assert module.log_rate.isfinite().all() and module.decay_bias.isfinite().all()


@both
def test_the_range_of_beta_is_a_flag(kind):
    with refuses(TypeError, "allow_negative_eigenvalues must be True or False, got 1."):
        kind(F, H, allow_negative_eigenvalues=1)
