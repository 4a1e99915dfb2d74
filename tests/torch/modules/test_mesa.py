"""What is special in the Mesa layer; what it shares with all modules is in test_mixer.py."""

import math

import numpy as np
import torch
from torch.nn.functional import softplus

from lesson_code.torch.modules import MesaLayer
from tests.torch.modules.family import disturb, draw

F, H, D = 12, 3, 4


def make():
    torch.manual_seed(0)
    return disturb(MesaLayer(F, H))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def of_length_one(x):
    return x / math.sqrt(sum(x**2) + 1e-6)


def token_by_token(module, x):
    """The layer for one sequence (N, F), from its weights: a system solved for each token."""
    W = {name: value.detach().numpy() for name, value in module.named_parameters()}
    projected = x @ np.concatenate([W["query.weight"], W["key.weight"]]).T
    y, A, G = np.zeros_like(x), np.zeros((H, D, D)), np.zeros((H, D, D))
    for t, x_t in enumerate(x):
        taps = [W["convolution.weight"][:, 3 - i] * projected[t - i] for i in range(min(t, 3) + 1)]
        convolved = sum(taps) / (1 + np.exp(-sum(taps)))
        v, read = W["value.weight"] @ x_t, np.zeros(F)
        for h in range(H):
            own = slice(h * D, h * D + D)
            q, k = of_length_one(convolved[:F][own]), of_length_one(convolved[F:][own])
            beta = sigmoid(W["beta.weight"][h] @ x_t + W["beta.bias"][h])
            alpha = sigmoid(W["decay.weight"][h] @ x_t + W["decay.bias"][h])
            A[h] = alpha * A[h] + beta * np.outer(k, k)
            G[h] = alpha * G[h] + beta * np.outer(k, v[own])
            ridge = np.log1p(np.exp(W["ridge"][h])) + 0.25
            out = G[h].T @ np.linalg.inv(A[h] + np.diag(ridge)) @ q
            read[own] = W["norm.weight"] * out / math.sqrt(sum(out**2) / D + 1e-5)
        y[t] = W["output.weight"] @ read
    return y, A, G


def test_it_is_the_layer_of_the_paper():
    module = make()
    x = draw(module, 9)
    y, state = module(x, return_state=True)
    for i in range(2):
        expected, A, G = token_by_token(module, x[i].numpy())
        np.testing.assert_allclose(y[i].detach().numpy(), expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(state.H[i].detach().numpy(), A, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state.G[i].detach().numpy(), G, rtol=0, atol=1e-12)


def test_a_ridge_begins_at_one_and_stays_above_a_quarter():
    module = MesaLayer(F, H)
    torch.testing.assert_close(softplus(module.ridge) + 0.25, torch.ones(H, D))
    with torch.no_grad():
        module.ridge -= 1000
    y = module(torch.randn(1, 9, F))
    assert y.isfinite().all() and y.abs().max() > 0


def test_a_prompt_of_any_length_is_read_as_its_tokens_are():
    """By iterations for many tokens, exactly for one: also when keys hardly differ."""
    module = make()
    x = draw(module, 1).expand(2, 100, F) + 0.01 * draw(module, 100)
    whole, state = module(x, return_state=True)
    now, outputs = module.initial_state(2), []
    for x_t in x.unbind(1):
        y_t, now = module.step(x_t, now)
        outputs.append(y_t)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, rtol=0, atol=1e-8)
    torch.testing.assert_close(now.H, state.H, rtol=0, atol=1e-10)
