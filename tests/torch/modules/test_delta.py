"""What is special in the delta layers; what they share with all modules is in test_mixer.py."""

import io
import math
import re

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.torch.modules import DeltaNet, DeltaNetState, GatedDeltaNet

F, H, D = 12, 3, 4
both = pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet])


def make(kind, **options):
    torch.manual_seed(0)
    module = kind(F, H, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


def draw(N=9, B=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, N, F, generator=generator, dtype=torch.float64)


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
    module, x = make(kind, allow_negative_eigenvalues=negative), draw()
    expected = layer_in_numpy(module, x, largest_beta=2 if negative else 1)
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=0, atol=1e-12)


@both
def test_the_state_is_three_tokens_and_one_memory(kind):
    module = make(kind)
    x = draw(5)
    _, state = module(x, return_state=True)
    assert isinstance(state, DeltaNetState)
    assert state.tail.shape == (2, 3, 3 * F) and state.S.shape == (2, H, D, D)
    projected = torch.cat([module.query(x), module.key(x), module.value(x)], dim=-1)
    torch.testing.assert_close(state.tail, projected[:, -3:], rtol=0, atol=1e-12)


@both
def test_the_state_goes_through_a_file(kind):
    module = make(kind)
    x = draw(5)
    _, state = module(x, return_state=True)
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    loaded = torch.load(stored)
    assert type(loaded) is DeltaNetState
    assert torch.equal(module.step(x[:, 0], loaded)[0], module.step(x[:, 0], state)[0])


def test_the_memory_is_kept_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        module = GatedDeltaNet(F, H).to(dtype)
        _, state = module(draw().to(dtype), return_state=True)
        assert state.S.dtype == torch.float32 and state.tail.dtype == dtype


@both
def test_the_memory_stays_bounded_for_any_weights(kind):
    """Keys of length 1 and beta below 2: |S| grows at most by what is written."""
    module = make(kind, allow_negative_eigenvalues=True)
    with torch.no_grad():
        for name in ("key", "value", "beta"):
            getattr(module, name).weight *= 50
    x = draw(300)
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


def refuses(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


@both
def test_arguments_are_refused(kind):
    with refuses(ValueError, "width must be a multiple of num_heads, 5, got 12."):
        kind(12, 5)
    with refuses(ValueError, "num_heads must be at least 1, got 0."):
        kind(12, 0)
    with refuses(TypeError, "allow_negative_eigenvalues must be True or False, got 1."):
        kind(12, 3, allow_negative_eigenvalues=1)
    module, x = make(kind), draw()
    _, (tail, S) = module(x, return_state=True)
    with refuses(TypeError, "state must be a DeltaNetState, got tuple."):
        module(x, state=(tail, S))
    message = "tail of state must have shape (2, 3, 36), got (2, 2, 36)."
    with refuses(ValueError, message):
        module(x, state=DeltaNetState(tail[:, 1:], S))
    message = "S of state must have shape (2, 3, 4, 4), got (1, 3, 4, 4)."
    with refuses(ValueError, message):
        module.step(x[:, 0], DeltaNetState(tail, S[:1]))
