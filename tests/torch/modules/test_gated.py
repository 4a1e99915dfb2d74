"""What is special in the module of gated linear attention."""

import math

import pytest
import torch

from lesson_code.torch.modules import GatedLinearAttention
from lesson_code.torch.modules.gated import GATE_RANK
from tests.torch.modules.family import disturb, draw


def token_by_token(module, x, heads):
    """The layer of the paper for one sequence (N, F), from its weights, one head at a time."""
    weight = {name: parameter.detach() for name, parameter in module.named_parameters()}
    M = x.shape[-1] // heads
    D = weight["query.weight"].shape[0] // heads
    logits = (x @ weight["forget.0.weight"].T) @ weight["forget.1.weight"].T
    alpha = torch.sigmoid(logits + weight["forget.1.bias"]) ** (1 / 16)
    swish = x @ weight["gate.weight"].T + weight["gate.bias"]
    swish = swish * torch.sigmoid(swish)
    outputs = []
    S = torch.zeros(heads, D, M, dtype=x.dtype)
    for t in range(len(x)):
        read = []
        for h in range(heads):
            key, value = slice(h * D, h * D + D), slice(h * M, h * M + M)
            q = weight["query.weight"][key] @ x[t] / math.sqrt(D)
            k = weight["key.weight"][key] @ x[t]
            v = weight["value.weight"][value] @ x[t]
            S[h] = alpha[t, key, None] * S[h] + torch.outer(k, v)
            o = S[h].T @ q
            read.append(weight["norm.weight"] * o / (o.square().mean() + 1e-5).sqrt())
        outputs.append(weight["output.weight"] @ (swish[t] * torch.cat(read)))
    return torch.stack(outputs), S


@pytest.mark.parametrize("heads", [1, 3, 4])  # with 4, a head is 3 wide and its keys 1
def test_it_is_the_layer_of_the_paper(heads):
    torch.manual_seed(0)
    module = disturb(GatedLinearAttention(12, heads))
    x = draw(module, 9)
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, S = token_by_token(module, x[i], heads)
        torch.testing.assert_close(y[i], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(state[i], S, rtol=0, atol=1e-10)


def test_sizes_and_initialization():
    torch.manual_seed(0)
    module = GatedLinearAttention(64, 4)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "query.weight": (32, 64),
        "key.weight": (32, 64),
        "value.weight": (64, 64),
        "forget.0.weight": (GATE_RANK, 64),
        "forget.1.weight": (32, GATE_RANK),
        "forget.1.bias": (32,),
        "gate.weight": (64, 64),
        "gate.bias": (64,),
        "norm.weight": (16,),
        "output.weight": (64, 64),
    }
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif name != "norm.weight":
            bound = 2**-2.5 * math.sqrt(6 / sum(parameter.shape))
            assert 0.9 * bound < parameter.abs().max() <= bound
    x = torch.randn(1, 100, 64)
    gates = torch.sigmoid(module.forget(x)) ** (1 / 16)
    assert (gates - 2 ** (-1 / 16)).abs().max() < 0.01  # half of the memory for 16 tokens
    assert module.initial_state(3).shape == (3, 4, 8, 16)
