"""What is special in the delta layers; what they share with all modules is in test_mixer.py."""

import math

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.torch.modules import (
    DeltaNet,
    DeltaNetState,
    GatedDeltaNet,
    GatedDeltaProduct,
    KimiDeltaAttention,
)
from tests.torch.modules.family import disturb, draw, refuses

F, H, D = 12, 3, 4
both = pytest.mark.parametrize("kind", [DeltaNet, GatedDeltaNet])
all_kinds = pytest.mark.parametrize(
    "kind", [DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention]
)


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


@all_kinds
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
    writes = 300 * module.num_steps
    assert state.S.square().sum(dim=(-2, -1)).sqrt().max() < writes * 2 * values * D


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


@all_kinds
def test_the_range_of_beta_is_a_flag(kind):
    with refuses(TypeError, "allow_negative_eigenvalues must be True or False, got 1."):
        kind(F, H, allow_negative_eigenvalues=1)


# Kimi delta attention and DeltaProduct, in plain loops over heads, channels and corrections.


def convolved_token_by_token(W, projected):
    """Each channel of (N, C) with its last four values, through SiLU."""
    out = np.zeros_like(projected)
    for t in range(len(projected)):
        for c in range(projected.shape[1]):
            taps = [W[c, 3 - i] * projected[t - i, c] for i in range(4) if t - i >= 0]
            out[t, c] = silu(sum(taps))
    return out


def of_length_one(x):
    return x / math.sqrt(sum(x_i**2 for x_i in x) + 1e-6)


def normed(read, weight):
    return weight * read / math.sqrt(sum(r**2 for r in read) / len(read) + 1e-5)


def weights_and_convolved(module, x):
    """The weights, and queries, keys and values of one sequence, side by side."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    projected = [x @ W[f"{name}.weight"].T for name in ("query", "key", "value")]
    projected = np.concatenate(projected, axis=1)
    return W, convolved_token_by_token(W["convolution.weight"], projected)


def kimi_token_by_token(module, x, largest_beta):
    """The layer for one sequence (N, F), and its last memory."""
    W, convolved = weights_and_convolved(module, x)
    S, y = np.zeros((H, D, D)), np.zeros_like(x)
    for t, x_t in enumerate(x):
        fade = W["decay.1.weight"] @ (W["decay.0.weight"] @ x_t)
        gate = sigmoid(W["gate.1.weight"] @ (W["gate.0.weight"] @ x_t) + W["gate.1.bias"])
        read = np.zeros(F)
        for h in range(H):
            q, k, v = (convolved[t, part * F + h * D :][:D] for part in range(3))
            q, k = of_length_one(q) / math.sqrt(D), of_length_one(k)
            beta = largest_beta * sigmoid(W["beta.weight"][h] @ x_t)
            for i in range(D):
                size = math.log1p(math.exp(fade[h * D + i] + W["decay_bias"][h * D + i]))
                S[h, i] *= math.exp(-math.exp(W["log_rate"][h]) * size)
            error = v - S[h].T @ k  # of the memory that has faded
            S[h] += beta * np.outer(k, error)
            read[h * D : h * D + D] = normed(S[h].T @ q, W["norm.weight"])
        y[t] = W["output.weight"] @ (read * gate)
    return y, S


@pytest.mark.parametrize("negative", [False, True])
def test_kimi_delta_attention_is_the_layer_of_the_paper(negative):
    module = make(KimiDeltaAttention, allow_negative_eigenvalues=negative)
    x = draw(module, 9)
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, S = kimi_token_by_token(module, x[i].numpy(), 2 if negative else 1)
        np.testing.assert_allclose(y[i].detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.S[i].detach().numpy(), S, rtol=0, atol=1e-12)


def product_token_by_token(module, x, J, largest_beta):
    """The layer for one sequence (N, F), and its last memory."""
    W, convolved = weights_and_convolved(module, x)
    S, y = np.zeros((H, D, D)), np.zeros_like(x)
    for t, x_t in enumerate(x):
        read = np.zeros(F)
        for h in range(H):
            size = math.log1p(math.exp(W["decay.weight"][h] @ x_t + W["decay_bias"][h]))
            S[h] *= math.exp(-math.exp(W["log_rate"][h]) * size)  # once
            for j in range(J):
                k = of_length_one(convolved[t, F + j * F + h * D :][:D])
                v = convolved[t, F + J * F + j * F + h * D :][:D]
                beta = largest_beta * sigmoid(W["beta.weight"][j * H + h] @ x_t)
                S[h] += beta * np.outer(k, v - S[h].T @ k)
            q = of_length_one(convolved[t, h * D :][:D]) / math.sqrt(D)
            read[h * D : h * D + D] = normed(S[h].T @ q, W["norm.weight"])
        y[t] = W["output.weight"] @ (read * silu(W["gate.weight"] @ x_t))
    return y, S


@pytest.mark.parametrize(("J", "negative"), [(1, True), (2, True), (3, False)])
def test_delta_product_is_the_layer_of_the_paper(J, negative):
    module = make(GatedDeltaProduct, num_steps=J, allow_negative_eigenvalues=negative)
    x = draw(module, 9)
    y, state = module(x, return_state=True)
    assert state.tail.shape == (2, 3, (1 + 2 * J) * F)
    for i in range(2):
        expected, S = product_token_by_token(module, x[i].numpy(), J, 2 if negative else 1)
        np.testing.assert_allclose(y[i].detach().numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.S[i].detach().numpy(), S, rtol=0, atol=1e-12)


def test_delta_product_with_one_correction_is_the_gated_delta_net():
    one = make(GatedDeltaProduct, num_steps=1)
    other = GatedDeltaNet(F, H, allow_negative_eigenvalues=True).double()
    other.load_state_dict(one.state_dict())
    x = draw(one, 9)
    torch.testing.assert_close(one(x), other(x), rtol=0, atol=1e-12)


def test_delta_product_reflects_unless_told_otherwise():
    assert GatedDeltaProduct(F, H).largest_beta == 2 and GatedDeltaProduct(F, H).num_steps == 2
    assert KimiDeltaAttention(F, H).largest_beta == DeltaNet(F, H).largest_beta == 1


def test_what_delta_product_refuses():
    with refuses(ValueError, "num_steps must be at least 1, got 0."):
        GatedDeltaProduct(F, H, 0)
    with refuses(TypeError, "num_steps must be an integer, got 2.0."):
        GatedDeltaProduct(F, H, 2.0)
    state = GatedDeltaProduct(F, H, 3).initial_state(2)
    with refuses(ValueError, "tail of state must have shape (2, 3, 60), got (2, 3, 84)."):
        GatedDeltaProduct(F, H, 2)(torch.zeros(2, 4, F), state=state)


def test_initial_decays_of_kimi_delta_attention():
    """A rate for each head, uniform in [1, 16]; a step for each channel, log-uniform."""
    torch.manual_seed(0)
    module = KimiDeltaAttention(4000, 2000)
    size, rate = torch.nn.functional.softplus(module.decay_bias), module.log_rate.exp()
    assert size.shape == (4000,) and rate.shape == (2000,)
    assert 0.00099 < size.min() < 0.0011 and 0.09 < size.max() < 0.101
    assert abs(size.log().mean() - math.log(1e-2)) < 0.1
    assert 1 <= rate.min() < 1.1 and 15.9 < rate.max() <= 16.001
    assert abs(rate.mean() - 8.5) < 0.5
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes["decay.0.weight"] == shapes["gate.0.weight"] == (2, 4000)
    assert shapes["decay.1.weight"] == shapes["gate.1.weight"] == (4000, 2)
    biases = [name for name in shapes if name.endswith(".bias")]
    assert biases == ["gate.1.bias"]
