"""The attention free transformer: weights without queries, and a gate where the query was."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.softmax import _divide
from lesson_code.torch.wkv import EMPTY, begin, fading_mean

TILE = 2**20  # how many exponents aft_full forms at a time


def aft_simple(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    r"""AFT-simple: one weighted mean of the values for all queries, gated by each.

    In every channel, over all positions or, with ``causal=True``, over those up to t
    (:eq:`eq-aft-simple`),

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i} v_i}{\sum_i e^{k_i}}

    The division is of the two sums, not inside them.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries, before their sigmoid. With ``causal=False`` their number may differ from that of
        the keys.
    k : tensor, shape (..., N, D)
        Keys, the logarithms of the weights. -inf has weight 0.
    v : tensor, shape (..., N, D)
        Values.
    causal : bool
        Let each position see those up to its own only.

    Returns
    -------
    tensor, shape (..., N, D)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Where no
        position has a weight the output is 0. Half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or their dtypes differ.
    ValueError
        If the shapes or devices do not fit together.

    Notes
    -----
    Differentiable in all arguments, any number of times. With ``causal=True`` it is the parallel
    form of WKV without decay and bonus.

    No exponential overflows: each is of a difference to the largest key (keys below -1e38 count as
    -inf). NaN reaches the outputs that depend on it, in its own channel and sequence only. A zero
    key has weight: pad with keys of -inf.

    References
    ----------
    Zhai et al. (2021), AFT-simple.

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
    _check(q, k, v, causal)
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    with full_precision(q):
        if causal:
            state = begin(None, "k", k, k.shape[-1], k=k.shape[:-2], v=v.shape[:-2])
            mean, _ = fading_mean("parallel", k, v, 0, 0, state)
        else:
            mean = _weighted_mean(k, v).unsqueeze(-2)
        return (q.sigmoid() * mean).to(dtype)


def aft_full(
    q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor, *, causal: bool = False
) -> Tensor:
    r"""AFT-full: as AFT-simple, with a bias for each pair of positions.

    In every channel, over all positions or, with ``causal=True``, over those up to t
    (:eq:`eq-aft-full`),

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i + b_{ti}} v_i}{\sum_i e^{k_i + b_{ti}}}

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries, before their sigmoid. With ``causal=False`` their number may differ from that of
        the keys.
    k : tensor, shape (..., N, D)
        Keys. -inf has weight 0.
    v : tensor, shape (..., N, D)
        Values.
    position_bias : tensor, shape (N, N)
        The bias b, the same in all channels; a row for each query, a column for each key. It is
        added to the key; -inf hides the key from the query.
    causal : bool
        Let each position see those up to its own only.

    Returns
    -------
    tensor, shape (..., N, D)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Where no
        position has a weight the output is 0. Half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or their dtypes differ.
    ValueError
        If the shapes or devices do not fit together.

    Notes
    -----
    Differentiable in all arguments, any number of times. It takes some queries at a time, so that
    their exponents fit into memory: (..., T, N, D) for T queries. In eager mode the backward pass
    computes those of each tile again; under ``torch.compile`` and ``torch.func`` all are kept.

    No exponential overflows: each is of a difference to the largest exponent of its query and
    channel (exponents below -1e38 count as -inf). NaN reaches the outputs that depend on it; with
    ``causal=True`` a NaN in a value may reach earlier positions, as 0 * NaN is NaN.

    References
    ----------
    Zhai et al. (2021), AFT-full.

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
    _check(q, k, v, causal, position_bias=position_bias)
    Nq, Nk = q.shape[-2], k.shape[-2]
    if position_bias.shape != (Nq, Nk):
        raise ValueError(
            f"position_bias must have shape ({Nq}, {Nk}), a row for each query and a column for "
            f"each key, got {tuple(position_bias.shape)}."
        )
    dtype, (q, k, v, bias) = q.dtype, accumulate(q, k, v, position_bias)
    if causal:
        future = torch.ones(Nq, Nk, dtype=torch.bool, device=bias.device).triu(1)
        bias = bias.masked_fill(future, -torch.inf)
    leading = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    rows = max(1, TILE // max(1, leading.numel() * Nk * v.shape[-1]))
    with full_precision(q):
        means = [v.new_zeros(*leading, 0, v.shape[-1])]
        for start in range(0, Nq, rows):
            seen = slice(min(start + rows, Nk) if causal else Nk)
            tile = k[..., seen, :], v[..., seen, :], bias[start : start + rows, seen]
            means.append(_forgetful(_biased_mean, *tile) if rows < Nq else _biased_mean(*tile))
        return (q.sigmoid() * torch.cat(means, dim=-2)).to(dtype)


def _biased_mean(k, v, bias):
    """Means over I keys for T queries: k and v (..., I, D), bias (T, I) -> (..., T, D)."""
    return _weighted_mean(k[..., None, :, :] + bias[..., None], v[..., None, :, :])


def _weighted_mean(exponents, v):
    """The mean over positions of v, (..., N, D) -> (..., D), with weights e^exponents."""
    if exponents.shape[-2]:
        top = exponents.detach().amax(dim=-2, keepdim=True).clamp(min=EMPTY)
        exponents = exponents - top
    weights = exponents.exp()
    return _divide((weights * v).sum(dim=-2), weights.sum(dim=-2))


def _forgetful(function, *tensors):
    """function(*tensors), which the backward pass computes again, where torch can do that."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def _check(q, k, v, causal, **bias):
    """Refuse all but tensors (..., N, D), as many queries as keys if causal."""
    _arguments.check_arrays(Tensor, q=q, k=k, v=v, **bias)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    _arguments.check_size("v", v.shape[-1], "the width of k", k.shape[-1])
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
