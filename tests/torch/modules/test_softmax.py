"""Softmax attention as a module: against NumPy, its positions, its cache."""

import numpy as np
import pytest
import torch

from lesson_code import numpy as reference
from lesson_code.torch.modules import KVCache, SoftmaxAttention
from tests.torch.modules.family import refuses


def in_numpy(module, x, rotate=lambda heads: heads):
    """One sequence x (N, F) through the module's weights, head by head, in NumPy."""
    x = x.numpy()
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    D = x.shape[-1] // module.num_heads
    read = []
    for h in range(module.num_heads):
        rows = slice(h * D, (h + 1) * D)
        q, k, v = (x @ weights[f"{name}.weight"][rows].T for name in ("query", "key", "value"))
        read.append(reference.softmax_attention(rotate(q), rotate(k), v, causal=True))
    return np.concatenate(read, axis=-1) @ weights["output.weight"].T


def rotate_by_complex_numbers(heads):
    """Channels i and i + D/2 as one complex number, times e^(i angle)."""
    N, D = heads.shape
    half = D // 2
    frequency = 10000.0 ** (-2 * np.arange(half) / D)
    turned = heads[:, :half] + 1j * heads[:, half : 2 * half]
    turned = turned * np.exp(1j * np.arange(N)[:, None] * frequency)
    return np.concatenate([turned.real, turned.imag, heads[:, 2 * half :]], axis=-1)


@pytest.mark.parametrize("num_heads", [1, 3, 4, 12])  # head widths 12, 4, 3 and 1
@pytest.mark.parametrize("rotary", [True, False])
def test_against_numpy(num_heads, rotary):
    torch.manual_seed(0)
    module = SoftmaxAttention(12, num_heads, rotary=rotary).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    y = module(x).detach().numpy()
    for i in range(2):
        rotate = rotate_by_complex_numbers if rotary else lambda heads: heads
        np.testing.assert_allclose(y[i], in_numpy(module, x[i], rotate), rtol=0, atol=1e-12)


def test_positions_tell_the_order_of_earlier_tokens():
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    shuffled = x[:, [2, 0, 3, 1, 4]]  # the last token stays the last
    for rotary in (True, False):
        module = SoftmaxAttention(8, 2, rotary=rotary).double()
        same = torch.allclose(module(x)[:, -1], module(shuffled)[:, -1], rtol=0, atol=1e-12)
        assert same != rotary


def test_positions_count_by_their_distance():
    """Wherever a sequence begins, the angle between any two of its keys is the same."""
    torch.manual_seed(0)
    module = SoftmaxAttention(8, 2).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    _, cache = module(x, return_state=True)
    for start in (1, 100, 100_000):
        zeros = torch.zeros(1, 2, start, 4, dtype=torch.float64)
        _, state = module(x, state=KVCache(zeros, zeros), return_state=True)
        k = state.k[:, :, start:]
        assert not torch.allclose(k, cache.k, atol=0.1)
        torch.testing.assert_close(k @ k.mT, cache.k @ cache.k.mT, rtol=0, atol=1e-9)


def test_the_cache_holds_every_token():
    module = SoftmaxAttention(8, 2, rotary=False)
    x = torch.randn(3, 5, 8)
    _, cache = module(x, return_state=True)
    for kept, linear in ((cache.k, module.key), (cache.v, module.value)):
        torch.testing.assert_close(kept.transpose(1, 2).flatten(-2), linear(x))
    assert [a.shape for a in module.initial_state(3)] == [(3, 2, 0, 4)] * 2


def test_what_is_refused():
    module, x = SoftmaxAttention(8, 2), torch.randn(3, 5, 8)
    k, v = module(x, return_state=True)[1]
    with refuses(ValueError, "v of state must have the length of k, 5, got 4."):
        module(x, state=KVCache(k, v[:, :, 1:]))
    with refuses(ValueError, "k of state must have shape (3, 2, N, 4), got (3, 4, 0, 2)."):
        module(x, state=SoftmaxAttention(8, 4).initial_state(3))
    with refuses(TypeError, "rotary must be True or False, got 1."):
        SoftmaxAttention(8, 2, rotary=1)
