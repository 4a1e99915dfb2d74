"""AFT in torch: the tiles of exponents, keys of any size, and memory.

That both functions are their sums is tested in test_definitions.py.
"""

import sys

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import aft_full, aft_simple, wkv
from tests.arrays import assert_close, normal, numbers, tensors

module = sys.modules["lesson_code.torch.aft"]
causal_or_not = pytest.mark.parametrize("causal", [True, False])


def draw(Nq=7, Nk=7, D=3, dtype=torch.float64):
    return tensors(*normal((Nq, D), (Nk, D), (Nk, D), (Nq, Nk)), dtype=dtype)


def test_more_or_fewer_queries_than_keys(tile):
    for Nq, Nk in ((5, 9), (9, 5), (4, 0)):
        args = draw(Nq, Nk)
        assert_close(aft_full(*args), reference.aft_full(*map(numbers, args)), torch.float64)


@pytest.fixture(params=[1, 100, 2**20], ids=lambda size: f"tile {size}")
def tile(request, monkeypatch):
    monkeypatch.setattr(module, "TILE", request.param)


def test_aft_simple_is_wkv_without_decay():
    q, k, v, _ = draw()
    w = torch.full((3,), 1e-15, dtype=torch.float64)
    expected = q.sigmoid() * wkv(k, v, w, 0 * w)
    assert_close(aft_simple(q, k, v, causal=True), expected)


@causal_or_not
def test_keys_and_biases_of_any_size(causal, tile):
    rng = np.random.default_rng(4)
    q, k, v, bias = draw(20, 20)
    k = k + torch.from_numpy(rng.choice([-80.0, 0.0, 80.0], size=k.shape))
    k[:2, ::2] = k[:, 1] = -torch.inf
    bias = bias + torch.from_numpy(rng.choice([-300.0, 0.0, 300.0], size=bias.shape))
    bias[5] = bias[:, 7] = -torch.inf
    exact = [q, k, v, bias]
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        args = [x.to(dtype).requires_grad_() for x in exact]
        full = aft_full(*args, causal=causal)
        assert_close(full, reference.aft_full(*map(numbers, exact), causal=causal), dtype, bound)
        assert (full[5] == 0).all() and (full[:, 1] == 0).all()
        simple = aft_simple(*args[:3], causal=causal)
        expected = reference.aft_simple(*map(numbers, exact[:3]), causal=causal)
        assert_close(simple, expected, dtype, bound)
        for found in (
            *torch.autograd.grad(full.sum(), args),
            *torch.autograd.grad(simple.sum(), args[:3]),
        ):
            assert found.isfinite().all() and found.any()


@causal_or_not
def test_gradcheck(causal, tile):
    args = [x.requires_grad_() for x in draw(4, 4, 2)]
    assert torch.autograd.gradcheck(lambda *args: aft_full(*args, causal=causal), args)
    assert torch.autograd.gradgradcheck(lambda *args: aft_full(*args, causal=causal), args)


def test_memory_is_that_of_a_tile(monkeypatch):
    """256² 16 exponents take 4 MiB in float32; also where the backward pass needs them."""
    monkeypatch.setattr(module, "TILE", 2**15)
    args = [x.requires_grad_() for x in draw(256, 256, 16, dtype=torch.float32)]
    aft_full(*args).sum().backward()
    assert peak_bytes(lambda: aft_full(*args).sum().backward()) < 2**20 * 2
