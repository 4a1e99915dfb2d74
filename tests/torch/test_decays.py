"""Decays of any strength in torch: nothing overflows, in no value and in no gradient."""

import math

import numpy as np
import pytest
import torch

import lesson_code.torch as lt
from tests.arrays import TOLERANCE, assert_close, in_dtype
from tests.operators import CONTRACTS, draw, draw_state, special

NAMES = ["gated_linear_attention", "rwkv6", "gated_delta_rule", "state_space_dual"]
CALLS = [(name, form) for name in NAMES for form in CONTRACTS[name].forms]


@pytest.mark.parametrize("strength", [-50.0, -1e4, -math.inf])
@pytest.mark.parametrize(("name", "form"), CALLS)
def test_values_and_gradients(name, form, strength):
    """A product with exp(-G), G a cumulative sum, would be inf, and its gradient NaN."""
    arrays = special(name, draw(name, 40), np.random.default_rng(0))
    g = arrays["log_decay"] = np.clip(arrays["log_decay"], -2, 0)
    g[::2], g[5] = strength, 0
    results = []
    for dtype, one in ((torch.float32, form), (torch.float64, "recurrent")):
        leaves = {x: in_dtype(y, dtype) for x, y in arrays.items()}
        leaves["initial_state"] = in_dtype(draw_state(name), dtype)
        for x in leaves.values():
            x.requires_grad_()
        out, S = getattr(lt, name)(**leaves, form=one, chunk_size=16, return_state=True)
        loss = out.square().sum() + S.square().sum()
        gradients = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
        results.append([out, S, *gradients.values()])
        assert (gradients["log_decay"][leaves["log_decay"] == -math.inf] == 0).all()
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        assert_close(found, expected, torch.float32, 2 * TOLERANCE["float32"])
