"""AFT-simple and RWKV-4 as modules: against the equations, how they begin, what they carry."""

import math

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.torch.modules import (
    AFTSimple,
    LanguageModel,
    RWKV4Block,
    RWKV4BlockState,
    RWKV4ChannelMix,
    RWKV4TimeMix,
)
from tests.torch.modules.family import disturb, draw, refuses


def make(kind, width=6, **options):
    torch.manual_seed(0)
    module = disturb(kind(width, **options))
    return module, draw(module, 9)


def weights(module):
    """Parameters in NumPy, matrices as (in, out)."""
    return {name: p.detach().numpy().T for name, p in module.named_parameters()}


def time_mix(W, x, prefix=""):
    names = ["mix_key", "mix_value", "mix_receptance"]
    names += ["key.weight", "value.weight", "receptance.weight", "output.weight"]
    arrays = [np.ascontiguousarray(W[prefix + name]) for name in names]
    decay = np.exp(W[prefix + "log_rate"])
    return reference.time_mix(x, *arrays, decay, np.array(W[prefix + "bonus"]))


def channel_mix(W, x, prefix=""):
    names = ["mix_key", "mix_receptance", "key.weight", "value.weight", "receptance.weight"]
    return reference.channel_mix(x, *(np.ascontiguousarray(W[prefix + name]) for name in names))


def layer_norm(u, weight, bias):
    centered = u - u.mean(-1, keepdims=True)
    return weight * centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) + bias


def assert_close(found, expected, tolerance=1e-11):
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=tolerance)


# The equations.


def test_aft_simple():
    module, x = make(AFTSimple)
    W, x_ = weights(module), x.numpy()
    q, k, v = (x_ @ W[f"{name}.weight"] for name in ("query", "key", "value"))
    assert_close(module(x), reference.aft_simple(q, k, v, causal=True) @ W["output.weight"])


def test_time_mix():
    module, x = make(RWKV4TimeMix, layer=1, num_layers=3)
    assert_close(module(x), time_mix(weights(module), x.numpy()))


def test_channel_mix():
    module, x = make(RWKV4ChannelMix, layer=1, num_layers=3)
    assert_close(module(x), channel_mix(weights(module), x.numpy()))


@pytest.mark.parametrize("layer", [0, 1])
def test_block(layer):
    module, x = make(RWKV4Block, layer=layer, num_layers=2)
    W, u = weights(module), x.numpy()
    norms = [(W.get(f"norm_{i}.weight"), W.get(f"norm_{i}.bias")) for i in range(3)]
    assert (norms[0][0] is not None) == (layer == 0)
    if layer == 0:
        u = layer_norm(u, *norms[0])
    u = u + time_mix(W, layer_norm(u, *norms[1]), "time_mix.")
    u = u + channel_mix(W, layer_norm(u, *norms[2]), "channel_mix.")
    assert_close(module(x), u)


# How they begin, number by number as in the code of RWKV-4.


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_initial_values_of_the_time_mix(width, layer, num_layers):
    module = RWKV4TimeMix(width, layer=layer, num_layers=num_layers)
    zero_to_one = layer / (num_layers - 1) if num_layers > 1 else 0
    one_to_almost_zero = 1 - layer / num_layers
    for i in range(width):
        share = (i / width) ** one_to_almost_zero
        speed = (i / (width - 1)) ** (0.7 + 1.3 * zero_to_one) if width > 1 else 0
        zigzag = 0.5 * ((i + 1) % 3 - 1)
        for parameter, expected in (
            (module.mix_key, share),
            (module.mix_value, share + 0.3 * zero_to_one),
            (module.mix_receptance, (i / width) ** (0.5 * one_to_almost_zero)),
            (module.log_rate, -5 + 8 * speed),
            (module.bonus, math.log(0.3) + zigzag),
        ):
            assert abs(parameter[i].item() - expected) < 1e-5
    for zero in (module.key, module.receptance, module.output):
        assert not zero.weight.any()
    product = module.value.weight @ module.value.weight.T
    torch.testing.assert_close(product, torch.eye(width), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (0, 3), (2, 3)])
def test_initial_values_of_the_channel_mix(layer, num_layers):
    module = RWKV4ChannelMix(5, layer=layer, num_layers=num_layers)
    expected = [(i / 5) ** (1 - layer / num_layers) for i in range(5)]
    for mix in (module.mix_key, module.mix_receptance):
        torch.testing.assert_close(mix.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert module.key.weight.shape == (20, 5) and module.value.weight.shape == (5, 20)
    assert not module.value.weight.any() and not module.receptance.weight.any()
    product = module.key.weight.T @ module.key.weight
    torch.testing.assert_close(product, 4 * torch.eye(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_new_block_passes_on_its_input_and_learns_nevertheless(layer):
    torch.manual_seed(0)
    block = RWKV4Block(6, layer=layer, num_layers=2)
    x = torch.randn(2, 9, 6)
    passed = torch.nn.functional.layer_norm(x, (6,)) if layer == 0 else x
    torch.testing.assert_close(block(x), passed)
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    target = torch.randn(2, 9, 6)
    moved = {name: p.detach().clone() for name, p in block.named_parameters()}
    for _ in range(4):
        loss = (block(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, p in block.named_parameters():
        assert not torch.equal(p, moved[name]), name
    assert (block(x) - target).square().mean() < loss


# What they carry.


def test_the_state_holds_the_normed_last_inputs():
    block, x = make(RWKV4Block)
    _, state = block(x, return_state=True)
    assert isinstance(state, RWKV4BlockState)
    u = block.norm_1(block.norm_0(x))
    torch.testing.assert_close(state.time_last, u[:, -1])
    assert not torch.allclose(state.time_last, x[:, -1], atol=0.01)
    u = block.norm_0(x) + block.time_mix(u)
    torch.testing.assert_close(state.channel_last, block.norm_2(u)[:, -1])


def test_a_language_model_of_blocks_has_no_other():
    mixers = [lambda width, i=i: RWKV4Block(width, layer=i, num_layers=2) for i in range(2)]
    model = LanguageModel(10, 8, mixers)
    assert [type(block) for block in model.blocks] == [RWKV4Block] * 2
    assert [block.norm_0 is not None for block in model.blocks] == [True, False]


def test_what_is_refused():
    for kind in (RWKV4TimeMix, RWKV4ChannelMix, RWKV4Block):
        with refuses(ValueError, "layer must be below num_layers, 2, got 2."):
            kind(6, layer=2, num_layers=2)
        with refuses(ValueError, "layer must be at least 0, got -1."):
            kind(6, layer=-1)
        with refuses(ValueError, "num_layers must be at least 1, got 0."):
            kind(6, num_layers=0)
        with refuses(TypeError, "layer must be an integer, got 0.0."):
            kind(6, layer=0.0)
