"""What is special in forgetting attention as a layer; what modules share is in test_mixer.py."""

import math

import numpy as np
import torch

from lesson_code.torch.modules import ForgettingAttention, SoftmaxAttention
from tests.torch.modules.family import disturb, draw

F, H, D = 12, 3, 4


def make():
    torch.manual_seed(0)
    return disturb(ForgettingAttention(F, H))


def token_by_token(module, x):
    """The layer for one sequence (N, F), from its weights."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    y = np.zeros_like(x)
    for t in range(len(x)):
        read = np.zeros(F)
        for h in range(H):
            own = slice(h * D, h * D + D)
            q, total = W["query.weight"][own] @ x[t], 0
            for j in range(t + 1):
                score = q @ (W["key.weight"][own] @ x[j]) / math.sqrt(D)
                for i in range(j + 1, t + 1):  # gates are not divided by the root
                    logit = W["forget.weight"][h] @ x[i] + W["forget.bias"][h]
                    score -= math.log1p(math.exp(-logit))
                read[own] += math.exp(score) * (W["value.weight"][own] @ x[j])
                total += math.exp(score)
            read[own] /= total
        y[t] = W["output.weight"] @ read
    return y


def test_it_is_the_layer_of_the_paper():
    module = make()
    x = draw(module, 9)
    for i in range(2):
        expected = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(module(x)[i].detach().numpy(), expected, rtol=0, atol=1e-12)


def test_gates_that_stay_open_are_softmax_attention_without_positions():
    module = make()
    with torch.no_grad():
        module.forget.weight.zero_()
        module.forget.bias.fill_(1000)
    softmax = SoftmaxAttention(F, H, rotary=False).double()
    softmax.load_state_dict(module.state_dict(), strict=False)
    x = draw(module, 9)
    torch.testing.assert_close(module(x), softmax(x), rtol=0, atol=1e-12)


def test_a_gate_begins_half_open():
    module = ForgettingAttention(F, H)
    assert module.forget.bias.shape == (H,) and (module.forget.bias == 0).all()


def test_the_cache_says_how_far_each_key_has_faded():
    module = make()
    x = draw(module, 7)
    _, cache = module(x, return_state=True)
    gates = torch.nn.functional.logsigmoid(module.forget(x)).mT
    for j in range(7):
        torch.testing.assert_close(cache.fade[..., j], gates[..., j + 1 :].sum(-1))
