"""Softmax attention, and the ways to keep its matrix or its cache small."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.callbacks import described, is_float_tensor
from lesson_code.torch.elementwise import divide
from lesson_code.torch.operator import operator
from lesson_code.torch.precision import full_precision


@operator("Nq D, N D, N M -> Nq M")
def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Scaled dot-product attention.

    Computes :eq:`eq-softmax-attention`, as :func:`lesson_code.numpy.softmax_attention` does.
    Gradients are finite where the inputs are, also for a query that sees no key. A NaN or infinity
    in a value leaves the gradients of earlier outputs as they are; one in a query or key does not,
    as a weight of 0 times NaN is NaN.

    ``torch.nn.functional.scaled_dot_product_attention`` differs in two ways: its ``is_causal`` lets
    the first query see the first key only, however many keys there are, and its hidden values are
    multiplied by 0, which keeps their NaN.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> v = torch.tensor([[2.0], [4.0]])
    >>> softmax_attention(q, k, v)[0]       # the first query scores both keys 0: a plain mean
    tensor([3.])
    >>> softmax_attention(q, k, v, causal=True)[0]
    tensor([2.])
    """
    return _softmax_attention(q, k, v, _scale(scale, q), keys_seen(q, k, causal))


@operator("Nq D, N D -> Nq N")
def attention_weights(
    q: Tensor, k: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Weights of softmax attention: the N×N matrix.

    Computes :eq:`eq-attention-weights`, as :func:`lesson_code.numpy.attention_weights` does.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> attention_weights(q, k, scale=math.log(3), causal=True)
    tensor([[1.0000, 0.0000],
            [0.2500, 0.7500]])
    """
    return normalized(scaled_scores(q, k, _scale(scale, q), keys_seen(q, k, causal)))


@operator("Nq D, N D, N M -> Nq M")
def similarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similarity: Callable[[Tensor, Tensor], Tensor],
    *,
    causal: bool = False,
) -> Tensor:
    r"""Attention under any similarity: a weighted mean of the values.

    Computes :eq:`eq-similarity-attention`, as :func:`lesson_code.numpy.similarity_attention` does.
    `similarity` is given copies of q and k, in float32 where they are in half precision. Where the
    similarities sum to exactly 0 the gradient is 0, as the output is.

    Examples
    --------
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> similarity_attention(q, k, v, lambda q, k: q @ k.T, causal=True)
    tensor([[10., 20.],
            [30., 40.],
            [35., 45.]])
    """
    if not callable(similarity):
        raise TypeError(f"similarity must be callable, got {type(similarity).__name__}.")
    weights = similarity(q.clone(), k.clone())
    Nq, N = q.shape[-2], k.shape[-2]
    if not (is_float_tensor(weights) and weights.shape[-2:] == (Nq, N)):
        raise ValueError(
            f"similarity must return a torch tensor of floats of shape (..., {Nq}, {N}), "
            f"got {described(weights)}."
        )
    _arguments.check_leading(similarity=weights.shape[:-2], v=v.shape[:-2])
    weights = weights.to(q.dtype)
    seen = keys_seen(q, k, causal)
    if seen is not None:
        weights = torch.where(_mask(seen, k), weights, 0)
    total = weights.sum(dim=-1, keepdim=True)  # (..., N, 1)
    return divide(weighted_sum(weights, v, seen), total)


@operator("Nq D, N D, N M -> Nq M")
def tiled_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_size: int = 64,
) -> Tensor:
    r"""Softmax attention without the N×N matrix: the online softmax.

    Computes :eq:`eq-online-softmax`, as :func:`lesson_code.numpy.tiled_softmax_attention` does.
    Autograd keeps the inputs only: the backward pass computes the weights again, ``tile_size`` rows
    at a time, so that its memory is linear in N as well. Forward-mode derivatives are not offered.
    ``torch.compile`` unrolls the loops over tiles: take a larger `tile_size` for long sequences.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> v = torch.tensor([[2.0], [4.0]])
    >>> tiled_softmax_attention(q, k, v, scale=math.log(3), tile_size=1)
    tensor([[3.0000],
            [3.5000]])
    """
    scale, N = _scale(scale, q), q.shape[-2]
    out = []
    for start in range(0, max(N, 1), tile_size):  # one tile without queries where N = 0
        stop = min(start + tile_size, N)
        # Without the keys that come after them, the queries of a tile are again the last ones.
        keys = slice(max(k.shape[-2] + stop - N, 0) if causal else None)
        tile = q[..., start:stop, :], k[..., keys, :], v[..., keys, :]
        out.append(_Tile.apply(*tile, causal, scale, tile_size))
    return torch.cat(out, dim=-2)


@operator("Hq Nq D, Hkv N D, Hkv N M -> Hq Nq M")
def grouped_query_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Softmax attention in which groups of query heads share a key and value head.

    Computes :eq:`eq-grouped-query`, as :func:`lesson_code.numpy.grouped_query_attention` does. Keys
    and values are not copied for the heads that share them.

    Examples
    --------
    >>> q = torch.zeros(4, 1, 1)
    >>> k = torch.zeros(2, 1, 1)
    >>> v = torch.tensor([[[5.0]], [[7.0]]])
    >>> grouped_query_attention(q, k, v).ravel()
    tensor([5., 5., 7., 7.])
    """
    Hq, Hkv = q.shape[-3], k.shape[-3]
    group = Hq // max(Hkv, 1)
    if group * Hkv != Hq:
        raise ValueError(f"q must have a multiple of the {Hkv} heads of k, got {Hq}.")
    q = q.unflatten(-3, (Hkv, group))  # (..., Hkv, Hq/Hkv, N, D)
    out = _shared_softmax_attention(q, k, v, causal, _scale(scale, q))
    return out.flatten(-4, -3)  # (..., Hkv, Hq/Hkv, N, M) -> (..., Hq, N, M)


@operator("H Nq D, N R, (H R D), (H R M) -> H Nq M")
def latent_attention(
    q: Tensor,
    latent: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    absorb: bool = False,
) -> Tensor:
    r"""Core of multi-head latent attention: every head's keys and values from one cached latent.

    Computes :eq:`eq-latent-attention`, as :func:`lesson_code.numpy.latent_attention` does.

    Examples
    --------
    >>> q = torch.tensor([[[1.0]], [[1.0]]])          # two heads, one query
    >>> latent = torch.tensor([[0.0], [1.0]])         # two tokens
    >>> up_k = torch.tensor([[[0.0]], [[math.log(3)]]])
    >>> up_v = torch.tensor([[[4.0]], [[8.0]]])
    >>> latent_attention(q, latent, up_k, up_v).ravel().round(decimals=4)
    tensor([2., 6.])
    >>> latent_attention(q, latent, up_k, up_v, absorb=True).ravel().round(decimals=4)
    tensor([2., 6.])
    """
    scale = _scale(scale, q)
    if absorb:
        q = q @ up_k.mT  # (..., H, N, R)
        return _shared_softmax_attention(q, latent, latent, causal, scale) @ up_v
    latent = latent[..., None, :, :]  # (..., 1, N, R)
    k, v = latent @ up_k, latent @ up_v
    return _softmax_attention(q, k, v, scale, keys_seen(q, k, causal))


def _scale(scale, q):
    return _arguments.resolve_scale(scale, q.shape[-1])


def _softmax_attention(q, k, v, scale, seen):
    return weighted_sum(normalized(scaled_scores(q, k, scale, seen)), v, seen)


def _shared_softmax_attention(q, k, v, causal, scale):
    """Heads q (..., H, N, D) that share one k (..., N, D) and v (..., N, M).

    The heads become further queries of one head: broadcast, ``matmul`` would copy k and v for each.
    """
    H, N, D = q.shape[-3:]
    seen = keys_seen(q, k, causal)
    if seen is not None:
        seen = seen.repeat(H)
    out = _softmax_attention(q.reshape(*q.shape[:-3], H * N, D), k, v, scale, seen)
    return out.reshape(*out.shape[:-2], H, N, v.shape[-1])


def scaled_scores(q, k, scale, seen):
    """Scaled scores (..., N, N); -inf for the keys that a query does not see."""
    scores = (q * scale) @ k.mT
    return scores if seen is None else torch.where(_mask(seen, k), scores, -math.inf)


def normalized(scores):
    """Softmax over the last axis; 0 in a row that holds nothing but -inf, or nothing at all."""
    if scores.shape[-1] == 0:
        return scores
    weights = _exp(scores, _maximum(scores))
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total)


def _maximum(scores):
    """Largest score of each row (..., N, 1): a constant to autograd, as it cancels."""
    return scores.detach().amax(dim=-1, keepdim=True)


class _Tile(torch.autograd.Function):
    """`_online_softmax`, of which autograd keeps the inputs only, to compute the rest again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, causal, scale, tile_size):
        return _online_softmax(q, k, v, causal, scale, tile_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.options = inputs
        ctx.save_for_backward(q, k, v)

    @staticmethod
    def backward(ctx, gradient):
        def again(q, k, v):
            return _online_softmax(q, k, v, *ctx.options)

        with full_precision(gradient):
            backward = torch.func.vjp(again, *ctx.saved_tensors)[1]
            return *backward(gradient), None, None, None


def _online_softmax(q, k, v, causal, scale, tile_size):
    """One tile of queries against all keys, a tile of them at a time."""
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    N, M = q.shape[-2], v.shape[-1]
    seen = keys_seen(q, k, causal)
    maximum = q.new_full((*leading, N, 1), -math.inf)
    total = q.new_zeros((*leading, N, 1))
    out = q.new_zeros((*leading, N, M))
    for start in range(0, k.shape[-2], tile_size):
        keys = slice(start, start + tile_size)
        all_seen = seen is None or start + tile_size <= 1 + k.shape[-2] - N  # by the first query
        seen_of_tile = None if all_seen else seen - start
        scores = scaled_scores(q, k[..., keys, :], scale, seen_of_tile)  # (..., tile, tile)
        previous = maximum
        maximum = torch.maximum(previous, _maximum(scores))
        weights = _exp(scores, maximum)
        shrink = _exp(previous, maximum)  # what was summed so far, under the new maximum
        total = shrink * total + weights.sum(dim=-1, keepdim=True)
        out = shrink * out + weighted_sum(weights, v[..., keys, :], seen_of_tile)
    return out / torch.where(total == 0, 1, total)  # as in normalized: NaN stays NaN


def _exp(scores, maximum):
    """exp(scores - maximum), and exp(-inf) = 0 where the maximum is -inf: no key seen yet."""
    return torch.exp(scores - torch.where(maximum == -math.inf, 0, maximum))


def weighted_sum(weights, v, seen):
    """``weights @ v``, except that a value which is not seen adds nothing: 0 * NaN would be NaN."""
    if seen is None:
        return weights @ v
    finite = torch.isfinite(v)
    added = torch.where(finite, 0, v.detach()).cumsum(dim=-2)
    added = torch.nn.functional.pad(added, (0, 0, 1, 0))  # the NaN and inf among the first j values
    seen = seen.clamp(0, v.shape[-2])
    return weights @ torch.where(finite, v, 0) + added.index_select(-2, seen)


def keys_seen(q, k, causal):
    """How many keys each query sees, none where that is below 1; None: each query sees all keys.

    Under the causal mask the queries are the last ones, so that a single query sees all keys.
    """
    N = q.shape[-2]
    if not causal or N == 1:
        return None
    return torch.arange(N, device=q.device) + (1 + k.shape[-2] - N)  # (N,)


def _mask(seen, k):
    """True where a query sees a key, (N, N)."""
    return torch.arange(k.shape[-2], device=k.device) < seen[:, None]
