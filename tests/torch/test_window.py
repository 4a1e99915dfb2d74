"""Sliding windows in torch: memory, and tokens that are not seen."""

import pytest
import torch

from lesson_code.measure import peak_bytes
from lesson_code.torch import sliding_window_attention
from tests.operators import draw, to_torch


def given(N, **options):
    return [
        x.requires_grad_()
        for x in to_torch(draw("sliding_window_attention", N, **options)).values()
    ]


@pytest.mark.parametrize("N", [1, 5, 6, 13])
@pytest.mark.parametrize("window", [1, 3, 6])
def test_what_is_not_seen_has_no_gradient(N, window):
    """The token that last left the window, and those that the last block was filled up with."""
    q, k, v = given(N)
    out = sliding_window_attention(q, k, v, window=window)
    found = torch.autograd.grad(out[-1].sum(), (k, v))
    hidden = max(N - window, 0)
    assert all((x[:hidden] == 0).all() and x.isfinite().all() for x in found)
    assert (found[1][hidden:] != 0).all()


def test_no_square_array_is_made():
    """With its gradient: some arrays of 2 N window scores, far from N²."""
    inputs = given(4096, dtype="float32")

    def run():
        torch.autograd.grad(sliding_window_attention(*inputs, window=16).sum(), inputs)

    assert peak_bytes(run) < 12 * 4 * 2 * 4096 * 16 < 4 * 4096**2 / 5
