"""The attention-free transformer: every channel takes its own weighted mean of the values."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lesson_code import _arguments
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines.fading import EMPTY, fading
from lesson_code.torch.operator import operator

TILE = 2**20  # how many exponents aft_full forms at a time


@operator("Nq D, N D, N D -> Nq D")
def aft_simple(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    r"""AFT-simple: a mean of the values weighted by their keys, and a gate made of the query.

    Computes :eq:`eq-aft-simple`, as :func:`lesson_code.numpy.aft_simple` does. With ``causal=True``
    it is the parallel form of :func:`wkv` without decay and bonus.

    Examples
    --------
    >>> q, k = torch.zeros(3, 1), torch.zeros(3, 1)  # a gate of 1/2, equal weights
    >>> v = torch.tensor([[10.0], [30.0], [50.0]])
    >>> aft_simple(q, k, v, causal=True)
    tensor([[ 5.],
            [10.],
            [15.]])
    >>> aft_simple(q, k, v)[0]
    tensor([15.])
    """
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
        mean, _ = fading("parallel", k, v, 0, 0)
    else:
        mean = _weighted_mean(k, v).unsqueeze(-2)
    return q.sigmoid() * mean


@operator("Nq D, N D, N D, (Nq N) -> Nq D")
def aft_full(
    q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor, *, causal: bool = False
) -> Tensor:
    r"""AFT-full: as AFT-simple, with a bias for each pair of positions.

    Computes :eq:`eq-aft-full`, as :func:`lesson_code.numpy.aft_full` does. It takes some queries at
    a time, so that their exponents fit into memory: (..., T, N, D) for T queries. In eager mode the
    backward pass computes those of each tile again; under ``torch.compile`` and ``torch.func`` all
    are kept. With ``causal=True`` a NaN in a value may reach earlier positions.

    Examples
    --------
    >>> import math
    >>> q, k = torch.zeros(2, 1), torch.zeros(2, 1)
    >>> v = torch.tensor([[10.0], [30.0]])
    >>> # query 2 sees key 1 threefold
    >>> position_bias = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    >>> aft_full(q, k, v, position_bias)
    tensor([[10.0000],
            [ 7.5000]])
    """
    Nq, Nk = position_bias.shape
    if causal:
        _arguments.check_size("q", Nq, "the length of k when causal=True", Nk)
        future = torch.ones(Nq, Nk, dtype=torch.bool, device=k.device).triu(1)
        position_bias = position_bias.masked_fill(future, -torch.inf)
    leading = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    rows = max(1, TILE // max(1, leading.numel() * Nk * v.shape[-1]))
    means = [v.new_zeros(*leading, 0, v.shape[-1])]
    for start in range(0, Nq, rows):
        seen = slice(min(start + rows, Nk) if causal else Nk)
        tile = k[..., seen, :], v[..., seen, :], position_bias[start : start + rows, seen]
        means.append(_forgetful(_biased_mean, *tile) if rows < Nq else _biased_mean(*tile))
    return q.sigmoid() * torch.cat(means, dim=-2)


def _biased_mean(k, v, bias):
    """Means over I keys for T queries: k and v (..., I, D), bias (T, I) -> (..., T, D)."""
    return _weighted_mean(k[..., None, :, :] + bias[..., None], v[..., None, :, :])


def _weighted_mean(exponents, v):
    """The mean over positions of v, (..., N, D) -> (..., D), with weights e^exponents."""
    if exponents.shape[-2]:
        top = exponents.detach().amax(dim=-2, keepdim=True).clamp(min=EMPTY)
        exponents = exponents - top
    weights = exponents.exp()
    return divide((weights * v).sum(dim=-2), weights.sum(dim=-2))


def _forgetful(function, *tensors):
    """function(*tensors), which the backward pass computes again, where torch can do that."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
