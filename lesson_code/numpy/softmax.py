"""Softmax attention, and the ways to keep its matrix or its cache small."""

from collections.abc import Callable

import numpy as np

from lesson_code import _arguments
from lesson_code.numpy.callbacks import described, is_float_array, read_only
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.operator import Array, operator


@operator("Nq D, N D, N M -> Nq M")
def softmax_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Scaled dot-product attention: a mean of the values under the weights of the N×N matrix.

    Computes :eq:`eq-softmax-attention` (Vaswani et al., 2017, equation 1),
    :math:`o_i = \sum_j a_{ij} v_j` with the weights of :func:`attention_weights`.

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys. Their numbers may differ.
    v : array, shape (..., N, M)
        Values, as many as keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`). The queries
        are the last ones: with fewer queries than keys, the last query sees all keys.
    scale : float, optional
        Factor of the scores, finite; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., N, M)
        Outputs, one for each query; 0 for a query that sees no key. A score of -inf has the weight
        0, one of +inf makes its row NaN.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> v = np.array([[2.0], [4.0]])
    >>> softmax_attention(q, k, v)[0]       # the first query scores both keys 0: a plain mean
    array([3.])
    >>> softmax_attention(q, k, v, causal=True)[0]
    array([2.])
    """
    seen = keys_seen(q, k) if causal else None
    return weighted_sum(normalized(scaled_scores(q, k, scale, seen)), v, seen)


@operator("Nq D, N D -> Nq N")
def attention_weights(
    q: Array, k: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Weights of softmax attention: the N×N matrix.

    Computes :eq:`eq-attention-weights` (Vaswani et al., 2017, equation 1),
    :math:`a_{ij} = e^{s_{ij}} / \sum_l e^{s_{il}}` from the scores
    :math:`s_{ij} = q_i \cdot k_j \cdot \mathrm{scale}`. The largest score of each row is subtracted
    first, which changes nothing but keeps exp from overflowing.

    Parameters
    ----------
    q, k, causal, scale
        As in :func:`softmax_attention`.

    Returns
    -------
    array, shape (..., N, N)
        One row for each query, which sums to 1, or is 0 where its query sees no key.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> attention_weights(q, k, scale=np.log(3), causal=True)
    array([[1.  , 0.  ],
           [0.25, 0.75]])
    """
    return normalized(scaled_scores(q, k, scale, keys_seen(q, k) if causal else None))


@operator("Nq D, N D, N M -> Nq M")
def similarity_attention(
    q: Array,
    k: Array,
    v: Array,
    similarity: Callable[[Array, Array], Array],
    *,
    causal: bool = False,
) -> Array:
    r"""Attention under any similarity: a weighted mean of the values.

    Computes :eq:`eq-similarity-attention` (Katharopoulos et al., 2020, equation 3),
    :math:`o_i = \sum_j \mathrm{sim}(q_i, k_j) v_j / \sum_j \mathrm{sim}(q_i, k_j)`. With
    :math:`\mathrm{sim}(q, k) = e^{q \cdot k / \sqrt{D}}` it is softmax attention.

    Parameters
    ----------
    q, k, v, causal
        As in :func:`softmax_attention`.
    similarity : callable
        Called once, as ``similarity(q, k)``, with arrays in the accumulation dtype that it must not
        change; returns the similarities of every query and key, floats of shape (..., N, N). That
        they are not negative is not checked: with negative ones the output is no mean any more.

    Returns
    -------
    array, shape (..., N, M)
        Outputs; 0 where the similarities sum to exactly 0.

    Examples
    --------
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> similarity_attention(q, k, v, lambda q, k: q @ k.T, causal=True)
    array([[10., 20.],
           [30., 40.],
           [35., 45.]])
    """
    if not callable(similarity):
        raise TypeError(f"similarity must be callable, got {type(similarity).__name__}.")
    weights = similarity(read_only(q), read_only(k))
    N, seen = k.shape[-2], keys_seen(q, k) if causal else None
    if not (is_float_array(weights) and weights.shape[-2:] == (q.shape[-2], N)):
        raise ValueError(
            f"similarity must return a NumPy array of floats of shape (..., {q.shape[-2]}, {N}), "
            f"got {described(weights)}."
        )
    _arguments.check_leading(similarity=weights.shape[:-2], v=v.shape[:-2])
    weights = weights.astype(q.dtype, copy=False)
    if seen is not None:
        weights = np.where(np.arange(N) < seen[:, None], weights, 0)
    return divide(weighted_sum(weights, v, seen), weights.sum(axis=-1, keepdims=True))


@operator("Nq D, N D, N M -> Nq M")
def tiled_softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    tile_size: int = 64,
) -> Array:
    r"""Softmax attention without the N×N matrix: the online softmax.

    Computes :eq:`eq-online-softmax` (Milakov and Gimelshein, 2018, algorithm 3; Dao et al., 2022,
    algorithm 1), the outputs of :func:`softmax_attention`, one tile of queries and keys at a time.
    A running maximum, sum and mixed values replace the matrix. The operations stay quadratic in N;
    the memory is linear.

    Parameters
    ----------
    q, k, v, causal, scale
        As in :func:`softmax_attention`.
    tile_size : int
        Queries and keys in a tile. It need not divide N.

    Returns
    -------
    array, shape (..., N, M)
        Outputs.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> v = np.array([[2.0], [4.0]])
    >>> tiled_softmax_attention(q, k, v, scale=np.log(3), tile_size=1)
    array([[3. ],
           [3.5]])
    """
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    out = np.empty((*leading, q.shape[-2], v.shape[-1]), q.dtype)
    seen = keys_seen(q, k) if causal else None
    for start in range(0, q.shape[-2], tile_size):
        rows = slice(start, start + tile_size)
        seen_by_rows = None if seen is None else seen[rows]
        out[..., rows, :] = _online_softmax(q[..., rows, :], k, v, scale, seen_by_rows, tile_size)
    return out


@operator("Hq Nq D, Hkv N D, Hkv N M -> Hq Nq M")
def grouped_query_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Softmax attention in which groups of query heads share a key and value head.

    Computes :eq:`eq-grouped-query` (Ainslie et al., 2023, section 2.2; Shazeer, 2019, for one key
    and value head): query head :math:`h` reads head :math:`\lfloor h / (H_q / H_{kv}) \rfloor`, so
    that a cache holds :math:`H_{kv}` heads instead of :math:`H_q`.

    Parameters
    ----------
    q : array, shape (..., Hq, N, D)
        Queries.
    k : array, shape (..., Hkv, N, D)
        Keys; Hkv divides Hq.
    v : array, shape (..., Hkv, N, M)
        Values.
    causal, scale
        As in :func:`softmax_attention`.

    Returns
    -------
    array, shape (..., Hq, N, M)
        Outputs.

    Examples
    --------
    >>> q = np.zeros((4, 1, 1))
    >>> k = np.zeros((2, 1, 1))
    >>> v = np.array([[[5.0]], [[7.0]]])
    >>> grouped_query_attention(q, k, v).ravel()
    array([5., 5., 7., 7.])
    """
    Hq, Hkv = q.shape[-3], k.shape[-3]
    group = Hq // max(Hkv, 1)
    if group * Hkv != Hq:
        raise ValueError(f"q must have a multiple of the {Hkv} heads of k, got {Hq}.")
    q = q.reshape(*q.shape[:-3], Hkv, group, *q.shape[-2:])  # (..., Hkv, Hq/Hkv, N, D)
    k, v = k[..., None, :, :], v[..., None, :, :]  # (..., Hkv, 1, N, ·)
    out = softmax_attention(q, k, v, causal=causal, scale=scale)
    return out.reshape(*out.shape[:-4], Hq, *out.shape[-2:])


@operator("H Nq D, N R, (H R D), (H R M) -> H Nq M")
def latent_attention(
    q: Array,
    latent: Array,
    up_k: Array,
    up_v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    absorb: bool = False,
) -> Array:
    r"""Core of multi-head latent attention: every head's keys and values from one cached latent.

    Computes :eq:`eq-latent-attention` (DeepSeek-AI, 2024, DeepSeek-V2, section 2.1.2, without the
    decoupled rotary key). Head :math:`h` has the keys :math:`k = c\, U_k^{(h)}` and the values
    :math:`v = c\, U_v^{(h)}` of the latent :math:`c`. As :math:`q \cdot (c\, U_k) = (q\, U_k^\top)
    \cdot c`, neither k nor v need ever be formed.

    Parameters
    ----------
    q : array, shape (..., H, N, D)
        Queries. Their number may differ from that of the latents.
    latent : array, shape (..., N, R)
        What a cache keeps of each token, shared by the heads.
    up_k, up_v : array, shape (H, R, D), (H, R, M)
        Up-projections to the keys and to the values.
    causal, scale
        As in :func:`softmax_attention`; the scale is 1/√D also when absorbed.
    absorb : bool
        Absorb the up-projections into the query and the output; the result is the same.

    Returns
    -------
    array, shape (..., H, N, M)
        Outputs.

    Examples
    --------
    >>> q = np.array([[[1.0]], [[1.0]]])              # two heads, one query
    >>> latent = np.array([[0.0], [1.0]])             # two tokens
    >>> up_k = np.array([[[0.0]], [[np.log(3.0)]]])
    >>> up_v = np.array([[[4.0]], [[8.0]]])
    >>> latent_attention(q, latent, up_k, up_v).round(12).ravel()
    array([2., 6.])
    >>> latent_attention(q, latent, up_k, up_v, absorb=True).round(12).ravel()
    array([2., 6.])
    """
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    latent = latent[..., None, :, :]  # (..., 1, N, R)
    if absorb:
        q = q @ up_k.swapaxes(-1, -2)  # (..., H, N, R)
        return softmax_attention(q, latent, latent, causal=causal, scale=scale) @ up_v
    return softmax_attention(q, latent @ up_k, latent @ up_v, causal=causal, scale=scale)


def scaled_scores(q, k, scale, seen):
    """Scaled scores (..., N, N); -inf for the keys that a query does not see."""
    scores = q * _arguments.resolve_scale(scale, q.shape[-1]) @ k.swapaxes(-1, -2)
    if seen is None:
        return scores
    return np.where(np.arange(k.shape[-2]) < seen[:, None], scores, -np.inf)


def normalized(scores: Array) -> Array:
    """Softmax over the last axis; 0 in a row that holds nothing but -inf, or nothing at all."""
    maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)  # (..., N, 1)
    weights = _exp(scores, maximum)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def _online_softmax(q, k, v, scale, seen, tile_size):
    """One tile of queries against all keys, a tile of them at a time."""
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    N, M = q.shape[-2], v.shape[-1]
    maximum = np.full((*leading, N, 1), -np.inf, q.dtype)
    total = np.zeros((*leading, N, 1), q.dtype)
    out = np.zeros((*leading, N, M), q.dtype)
    for start in range(0, k.shape[-2] if seen is None else seen.max(), tile_size):
        keys = slice(start, start + tile_size)
        seen_of_tile = None if seen is None else np.clip(seen - start, 0, tile_size)
        scores = scaled_scores(q, k[..., keys, :], scale, seen_of_tile)  # (..., tile, tile)
        previous = maximum
        maximum = np.maximum(previous, scores.max(axis=-1, keepdims=True))
        weights = _exp(scores, maximum)
        shrink = _exp(previous, maximum)  # what was summed so far, under the new maximum
        total = shrink * total + weights.sum(axis=-1, keepdims=True)
        out = shrink * out + weighted_sum(weights, v[..., keys, :], seen_of_tile)
    return out / np.where(total == 0, 1, total)  # as in normalized: NaN stays NaN


def _exp(scores, maximum):
    """exp(scores - maximum), and exp(-inf) = 0 where the maximum is -inf: no key seen yet."""
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as documented
        return np.exp(scores - np.where(maximum == -np.inf, 0, maximum))


def weighted_sum(weights, v, seen):
    """``weights @ v``, except that a value which is not seen adds nothing: 0 * NaN would be NaN."""
    finite = np.isfinite(v)
    if seen is None or finite.all():
        return weights @ v
    added = np.cumsum(np.where(finite, 0, v), axis=-2)  # the NaN and inf among the first j values
    added = np.concatenate([np.zeros_like(added[..., :1, :]), added], axis=-2)
    return weights @ np.where(finite, v, 0) + added[..., np.minimum(seen, v.shape[-2]), :]


def keys_seen(q, k):
    """How many keys each query sees under the causal mask; the queries are the last ones."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    return np.maximum(np.arange(num_queries) + 1 + num_keys - num_queries, 0)
