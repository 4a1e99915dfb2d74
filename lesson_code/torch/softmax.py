"""Softmax attention, and the ways to keep its matrix or its cache small."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate, full_precision


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Scaled dot-product attention.

    Computes :eq:`eq-softmax-attention`: the weighted mean
    :math:`o_i = \sum_j a_{ij} v_j` with the weights of :func:`attention_weights`.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values, as many as keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`). The queries
        are the last ones: with fewer queries than keys, the last query sees all keys.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs, one for each query, in the dtype of the input. Leading dimensions broadcast as in
        ``matmul``. Half precision is computed in float32, under ``torch.autocast`` too. A query
        that sees no key gives 0.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or the dtypes differ.
    ValueError
        If the shapes or devices do not fit together, or `scale` is not finite.

    Notes
    -----
    NaN and infinities in the outputs are those of :func:`lesson_code.numpy.softmax_attention`: with
    ``causal=True`` a NaN in a later key or value leaves earlier outputs as they are. Gradients are
    finite where the inputs are, also for a query that sees no key. A NaN or infinity in a value
    leaves the gradients of earlier outputs as they are; one in a query or key does not, as a weight
    of 0 times NaN is NaN.

    ``torch.nn.functional.scaled_dot_product_attention`` differs in two ways: its ``is_causal`` lets
    the first query see the first key only, however many keys there are, and its hidden values are
    multiplied by 0, which keeps their NaN.

    References
    ----------
    Vaswani et al. (2017), equation 1.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> v = torch.tensor([[2.0], [4.0]])
    >>> softmax_attention(q, k, v)[0]       # the first query scores both keys 0: a plain mean
    tensor([3.])
    >>> softmax_attention(q, k, v, causal=True)[0]
    tensor([2.])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    with full_precision(q):
        return _softmax_attention(q, k, v, scale, _seen(q, k, causal)).to(dtype)


def attention_weights(
    q: Tensor, k: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Weights of softmax attention: the N×N matrix.

    Computes :eq:`eq-attention-weights`: :math:`a_{ij} = e^{s_{ij}} / \sum_l e^{s_{il}}` from the
    scores :math:`s_{ij} = q_i \cdot k_j \cdot \mathrm{scale}`.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : tensor, shape (..., N, D)
        Keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    tensor, shape (..., N, N)
        One row for each query, in the dtype of the input. A row sums to 1, or is 0 where its query
        sees no key. Half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or the dtypes differ.
    ValueError
        If the shapes or devices do not fit together, or `scale` is not finite.

    Notes
    -----
    NaN in a query makes its row NaN; NaN in a key makes the rows NaN that see this key.

    References
    ----------
    Vaswani et al. (2017), equation 1.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> attention_weights(q, k, scale=math.log(3), causal=True)
    tensor([[1.0000, 0.0000],
            [0.2500, 0.7500]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys(q, k)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k) = q.dtype, accumulate(q, k)
    with full_precision(q):
        return _softmax(_scores(q, k, scale, _seen(q, k, causal))).to(dtype)


def similarity_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    similarity: Callable[[Tensor, Tensor], Tensor],
    *,
    causal: bool = False,
) -> Tensor:
    r"""Attention under any similarity: a weighted mean of the values.

    Computes :eq:`eq-similarity-attention`:
    :math:`o_i = \sum_j \mathrm{sim}(q_i, k_j) v_j / \sum_j \mathrm{sim}(q_i, k_j)`. With
    :math:`\mathrm{sim}(q, k) = e^{q \cdot k / \sqrt{D}}` it is softmax attention.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values, as many as keys.
    similarity : callable
        Called once, as ``similarity(q, k)``; returns the non-negative similarities of every query
        and key, floats of shape (..., N, N). That they are not negative is not checked: with
        negative ones the output is no mean any more.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input. Half precision is computed in float32, and `similarity`
        is given float32. Where the similarities sum to exactly 0 the output and its gradient are 0.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, or `similarity` is not
        callable.
    ValueError
        If the shapes or devices do not fit together, or `similarity` returns another shape or no
        floats.

    Notes
    -----
    NaN reaches the outputs that see it and no others. `similarity` is given copies, so that it
    cannot write into the caller's tensors.

    References
    ----------
    Katharopoulos et al. (2020), equation 3.

    Examples
    --------
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> similarity_attention(q, k, v, lambda q, k: q @ k.T, causal=True)
    tensor([[10., 20.],
            [30., 40.],
            [35., 45.]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    if not callable(similarity):
        raise TypeError(f"similarity must be callable, got {type(similarity).__name__}.")
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    with full_precision(q):
        weights = similarity(q.clone(), k.clone())
    expected = (q.shape[-2], k.shape[-2])
    if not (
        isinstance(weights, Tensor)
        and weights.is_floating_point()
        and weights.shape[-2:] == expected
    ):
        raise ValueError(
            f"similarity must return a torch tensor of floats of shape "
            f"(..., {expected[0]}, {expected[1]}), got {_describe(weights)}."
        )
    _arguments.check_leading(similarity=weights.shape[:-2], v=v.shape[:-2])
    weights = weights.to(q.dtype)
    seen = _seen(q, k, causal)
    if seen is not None:
        weights = torch.where(_mask(seen, k), weights, 0)
    total = weights.sum(dim=-1, keepdim=True)  # (..., N, 1)
    with full_precision(q):
        return _divide(_weighted_sum(weights, v, seen), total).to(dtype)


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

    Computes the same outputs as :func:`softmax_attention`, one tile of queries and keys at a time.
    A running maximum :math:`\mu`, sum :math:`\ell` and mixed values :math:`u` replace the matrix;
    the last two are scaled down whenever the maximum grows (:eq:`eq-online-softmax`). The
    operations stay quadratic in N; the memory is linear.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values, as many as keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.
    tile_size : int
        Queries and keys in a tile. It need not divide N.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input; half precision is computed in float32. A query that sees
        no key gives 0.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, or `tile_size` is no
        integer.
    ValueError
        If the shapes or devices do not fit together, `scale` is not finite, or `tile_size` is below
        1.

    Notes
    -----
    NaN and infinities do what they do in :func:`softmax_attention`.

    Autograd keeps the inputs only. The backward pass computes the weights again, ``tile_size`` rows
    at a time, so that its memory is linear in N as well. Forward-mode derivatives are not offered.
    ``torch.compile`` unrolls the loops over tiles: take a larger `tile_size` for long sequences.

    References
    ----------
    Milakov and Gimelshein (2018), algorithm 3; Dao et al. (2022), algorithm 1.

    Examples
    --------
    >>> q = k = torch.tensor([[0.0], [1.0]])
    >>> v = torch.tensor([[2.0], [4.0]])
    >>> tiled_softmax_attention(q, k, v, scale=math.log(3), tile_size=1)
    tensor([[3.0000],
            [3.5000]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    tile_size = _arguments.check_integer("tile_size", tile_size, minimum=1)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    N = q.shape[-2]
    out = []
    for start in range(0, max(N, 1), tile_size):  # one tile without queries where N = 0
        stop = min(start + tile_size, N)
        # Without the keys that come after them, the queries of a tile are again the last ones.
        keys = slice(max(k.shape[-2] + stop - N, 0) if causal else None)
        tile = q[..., start:stop, :], k[..., keys, :], v[..., keys, :]
        with full_precision(q):
            out.append(_Tile.apply(*tile, causal, scale, tile_size))
    return torch.cat(out, dim=-2).to(dtype)


def grouped_query_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    r"""Softmax attention in which groups of query heads share a key and value head.

    Query head :math:`h` reads key and value head :math:`\lfloor h / (H_q / H_{kv}) \rfloor`
    (:eq:`eq-grouped-query`), so that a cache holds :math:`H_{kv}` heads instead of :math:`H_q`. One
    key and value head is multi-query attention; as many as queries, multi-head attention.

    Parameters
    ----------
    q : tensor, shape (..., Hq, N, D)
        Queries.
    k : tensor, shape (..., Hkv, N, D)
        Keys; Hkv divides Hq.
    v : tensor, shape (..., Hkv, N, M)
        Values.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    tensor, shape (..., Hq, N, M)
        Outputs in the dtype of the input; half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or the dtypes differ.
    ValueError
        If the shapes or devices do not fit together, Hkv does not divide Hq, or `scale` is not
        finite.

    Notes
    -----
    NaN does what it does in :func:`softmax_attention`; it stays in the heads that read it. Keys and
    values are not copied for the heads that share them.

    References
    ----------
    Shazeer (2019) for one head; Ainslie et al. (2023), section 2.2.

    Examples
    --------
    >>> q = torch.zeros(4, 1, 1)
    >>> k = torch.zeros(2, 1, 1)
    >>> v = torch.tensor([[[5.0]], [[7.0]]])
    >>> grouped_query_attention(q, k, v).ravel()
    tensor([5., 5., 7., 7.])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_rank("q", q, "Hq, N, D")
    _arguments.check_rank("k", k, "Hkv, N, D")
    _arguments.check_rank("v", v, "Hkv, N, M")
    _arguments.check_leading(q=q.shape[:-3], k=k.shape[:-3], v=v.shape[:-3])
    Hq, Hkv = q.shape[-3], k.shape[-3]
    _arguments.check_size("v", v.shape[-3], "the heads of k", Hkv)
    group = Hq // max(Hkv, 1)
    if group * Hkv != Hq:
        raise ValueError(f"q must have a multiple of the {Hkv} heads of k, got {Hq}.")
    q = q.reshape(*q.shape[:-3], Hkv, group, *q.shape[-2:])  # (..., Hkv, Hq/Hkv, N, D)
    _arguments.check_queries_keys_values(q, k[..., None, :, :], v[..., None, :, :])
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    with full_precision(q):
        out = _shared_softmax_attention(q, k, v, causal, scale)  # (..., Hkv, Hq/Hkv, N, M)
    return out.reshape(*out.shape[:-4], Hq, *out.shape[-2:]).to(dtype)


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

    Head :math:`h` has the keys :math:`k = c\, U_k^{(h)}` and the values :math:`v = c\, U_v^{(h)}`
    of the latent :math:`c` (:eq:`eq-latent-attention`). As
    :math:`q \cdot (c\, U_k) = (q\, U_k^\top) \cdot c`, the up-projections can be absorbed into the
    query and the output, and neither k nor v is ever formed.

    Parameters
    ----------
    q : tensor, shape (..., H, N, D)
        Queries. Their number may differ from that of the latents.
    latent : tensor, shape (..., N, R)
        What a cache keeps of each token, shared by the heads.
    up_k : tensor, shape (H, R, D)
        Up-projection to the keys.
    up_v : tensor, shape (H, R, M)
        Up-projection to the values.
    causal : bool
        Let each query see the latents up to its own position only (:eq:`eq-causal-mask`); the
        queries are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default, also when absorbed.
    absorb : bool
        Absorb the up-projections; the result is the same.

    Returns
    -------
    tensor, shape (..., H, N, M)
        Outputs in the dtype of the input; half precision is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, or the dtypes differ.
    ValueError
        If the shapes or devices do not fit together, or `scale` is not finite.

    Notes
    -----
    NaN does what it does in :func:`softmax_attention`; in a latent it reaches every head. The
    decoupled rotary key of the paper is left out.

    References
    ----------
    DeepSeek-AI (2024), DeepSeek-V2, section 2.1.2.

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
    _arguments.check_arrays(Tensor, q=q, latent=latent, up_k=up_k, up_v=up_v)
    _arguments.check_flags(causal=causal, absorb=absorb)
    _arguments.check_rank("q", q, "H, N, D")
    _arguments.check_rank("latent", latent, "N, R")
    H, _, D = q.shape[-3:]
    R = latent.shape[-1]
    if up_k.shape != (H, R, D):
        raise ValueError(f"up_k must have shape (H, R, D), {(H, R, D)}, got {tuple(up_k.shape)}.")
    if up_v.ndim != 3 or up_v.shape[:2] != (H, R):
        raise ValueError(f"up_v must have shape (H, R, M), ({H}, {R}, M), got {tuple(up_v.shape)}.")
    _arguments.check_leading(q=q.shape[:-3], latent=latent.shape[:-2])
    scale = _arguments.resolve_scale(scale, D)
    dtype, (q, latent, up_k, up_v) = q.dtype, accumulate(q, latent, up_k, up_v)
    with full_precision(q):
        if absorb:
            q = q @ up_k.mT  # (..., H, N, R)
            out = _shared_softmax_attention(q, latent, latent, causal, scale) @ up_v
        else:
            latent = latent[..., None, :, :]  # (..., 1, N, R)
            k, v = latent @ up_k, latent @ up_v
            out = _softmax_attention(q, k, v, scale, _seen(q, k, causal))
    return out.to(dtype)


def _softmax_attention(q, k, v, scale, seen):
    return _weighted_sum(_softmax(_scores(q, k, scale, seen)), v, seen)


def _shared_softmax_attention(q, k, v, causal, scale):
    """Heads q (..., H, N, D) that share one k (..., N, D) and v (..., N, M).

    The heads become further queries of one head: broadcast, ``matmul`` would copy k and v for each.
    """
    H, N, D = q.shape[-3:]
    seen = _seen(q, k, causal)
    if seen is not None:
        seen = seen.repeat(H)
    out = _softmax_attention(q.reshape(*q.shape[:-3], H * N, D), k, v, scale, seen)
    return out.reshape(*out.shape[:-2], H, N, v.shape[-1])


def _scores(q, k, scale, seen):
    """Scaled scores (..., N, N); -inf for the keys that a query does not see."""
    scores = (q * scale) @ k.mT
    return scores if seen is None else torch.where(_mask(seen, k), scores, -math.inf)


def _softmax(scores):
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
    seen = _seen(q, k, causal)
    maximum = q.new_full((*leading, N, 1), -math.inf)
    total = q.new_zeros((*leading, N, 1))
    out = q.new_zeros((*leading, N, M))
    for start in range(0, k.shape[-2], tile_size):
        keys = slice(start, start + tile_size)
        all_seen = seen is None or start + tile_size <= 1 + k.shape[-2] - N  # by the first query
        seen_of_tile = None if all_seen else seen - start
        scores = _scores(q, k[..., keys, :], scale, seen_of_tile)  # (..., tile, tile)
        previous = maximum
        maximum = torch.maximum(previous, _maximum(scores))
        weights = _exp(scores, maximum)
        shrink = _exp(previous, maximum)  # what was summed so far, under the new maximum
        total = shrink * total + weights.sum(dim=-1, keepdim=True)
        out = shrink * out + _weighted_sum(weights, v[..., keys, :], seen_of_tile)
    return out / torch.where(total == 0, 1, total)  # as in _softmax: NaN stays NaN


def _exp(scores, maximum):
    """exp(scores - maximum), and exp(-inf) = 0 where the maximum is -inf: no key seen yet."""
    return torch.exp(scores - torch.where(maximum == -math.inf, 0, maximum))


def _weighted_sum(weights, v, seen):
    """``weights @ v``, except that a value which is not seen adds nothing: 0 * NaN would be NaN."""
    if seen is None:
        return weights @ v
    finite = torch.isfinite(v)
    added = torch.where(finite, 0, v.detach()).cumsum(dim=-2)
    added = torch.nn.functional.pad(added, (0, 0, 1, 0))  # the NaN and inf among the first j values
    seen = seen.clamp(0, v.shape[-2])
    return weights @ torch.where(finite, v, 0) + added.index_select(-2, seen)


def _seen(q, k, causal):
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


def _divide(numerator, denominator):
    """``numerator / denominator``, and 0 where the denominator is exactly 0."""
    zero = denominator == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, denominator))


def _describe(value):
    """A returned value in an error message: its shape and dtype, or its type."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return type(value).__name__
