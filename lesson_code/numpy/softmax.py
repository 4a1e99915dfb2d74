"""Softmax attention, and the ways to keep its matrix or its cache small."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.precision import accumulate

Array = NDArray[np.floating]


def softmax_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Scaled dot-product attention.

    Computes :eq:`eq-softmax-attention`: the weighted mean
    :math:`o_i = \sum_j a_{ij} v_j` with the weights of :func:`attention_weights`.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
        Values, as many as keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`). The queries
        are the last ones: with fewer queries than keys, the last query sees all keys.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., N, M)
        Outputs, one for each query, in the dtype of the input. Leading dimensions broadcast as in
        ``matmul``. float16 is computed in float32. A query that sees no key gives 0.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or the dtypes differ.
    ValueError
        If the shapes do not fit together, or `scale` is not finite.

    Notes
    -----
    The largest score of each row is subtracted before exp, which changes nothing but keeps exp from
    overflowing. A score of -inf gives its key the weight 0; a score of +inf has no softmax and
    makes its row NaN. NaN reaches the outputs that see it and no others: with ``causal=True`` a NaN
    in a later key or value leaves earlier outputs as they are.

    References
    ----------
    Vaswani et al. (2017), equation 1.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> v = np.array([[2.0], [4.0]])
    >>> softmax_attention(q, k, v)[0]       # the first query scores both keys 0: a plain mean
    array([3.])
    >>> softmax_attention(q, k, v, causal=True)[0]
    array([2.])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    return _softmax_attention(q, k, v, causal, scale).astype(dtype, copy=False)


def attention_weights(
    q: Array, k: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Weights of softmax attention: the N×N matrix.

    Computes :eq:`eq-attention-weights`: :math:`a_{ij} = e^{s_{ij}} / \sum_l e^{s_{il}}` from the
    scores :math:`s_{ij} = q_i \cdot k_j \cdot \mathrm{scale}`.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : array, shape (..., N, D)
        Keys.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., N, N)
        One row for each query, in the dtype of the input. A row sums to 1, or is 0 where its query
        sees no key. float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or the dtypes differ.
    ValueError
        If the shapes do not fit together, or `scale` is not finite.

    Notes
    -----
    NaN in a query makes its row NaN; NaN in a key makes the rows NaN that see this key.

    References
    ----------
    Vaswani et al. (2017), equation 1.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> attention_weights(q, k, scale=np.log(3), causal=True)
    array([[1.  , 0.  ],
           [0.25, 0.75]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys(q, k)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k) = q.dtype, accumulate(q, k)
    seen = _seen(q.shape[-2], k.shape[-2]) if causal else None
    return _softmax(_scores(q, k, scale, seen)).astype(dtype, copy=False)


def similarity_attention(
    q: Array,
    k: Array,
    v: Array,
    similarity: Callable[[Array, Array], Array],
    *,
    causal: bool = False,
) -> Array:
    r"""Attention under any similarity: a weighted mean of the values.

    Computes :eq:`eq-similarity-attention`:
    :math:`o_i = \sum_j \mathrm{sim}(q_i, k_j) v_j / \sum_j \mathrm{sim}(q_i, k_j)`. With
    :math:`\mathrm{sim}(q, k) = e^{q \cdot k / \sqrt{D}}` it is softmax attention.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
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
    array, shape (..., N, M)
        Outputs in the dtype of the input. float16 is computed in float32, and `similarity` is
        given float32. Where the similarities sum to exactly 0 the output is 0.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, or `similarity` is not
        callable.
    ValueError
        If the shapes do not fit together, or `similarity` returns another shape or no floats.

    Notes
    -----
    NaN reaches the outputs that see it and no others.

    References
    ----------
    Katharopoulos et al. (2020), equation 3.

    Examples
    --------
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> similarity_attention(q, k, v, lambda q, k: q @ k.T, causal=True)
    array([[10., 20.],
           [30., 40.],
           [35., 45.]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    if not callable(similarity):
        raise TypeError(f"similarity must be callable, got {type(similarity).__name__}.")
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    weights = similarity(_read_only(q), _read_only(k))
    expected = (q.shape[-2], k.shape[-2])
    if not (
        isinstance(weights, np.ndarray)
        and np.issubdtype(weights.dtype, np.floating)
        and weights.shape[-2:] == expected
    ):
        raise ValueError(
            f"similarity must return a NumPy array of floats of shape "
            f"(..., {expected[0]}, {expected[1]}), got {_describe(weights)}."
        )
    _arguments.check_leading(similarity=weights.shape[:-2], v=v.shape[:-2])
    weights = weights.astype(q.dtype, copy=False)
    seen = None
    if causal:
        seen = _seen(*expected)
        weights = np.where(np.arange(expected[1]) < seen[:, None], weights, 0)
    total = weights.sum(axis=-1, keepdims=True)  # (..., N, 1)
    return divide(_weighted_sum(weights, v, seen), total).astype(dtype, copy=False)


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

    Computes the same outputs as :func:`softmax_attention`, one tile of queries and keys at a time.
    A running maximum :math:`\mu`, sum :math:`\ell` and mixed values :math:`u` replace the matrix;
    the last two are scaled down whenever the maximum grows (:eq:`eq-online-softmax`). The
    operations stay quadratic in N; the memory is linear.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. Their number may differ from that of the keys.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
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
    array, shape (..., N, M)
        Outputs in the dtype of the input; float16 is computed in float32. A query that sees no key
        gives 0.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, or `tile_size` is no integer.
    ValueError
        If the shapes do not fit together, `scale` is not finite, or `tile_size` is below 1.

    Notes
    -----
    NaN and infinities do what they do in :func:`softmax_attention`.

    References
    ----------
    Milakov and Gimelshein (2018), algorithm 3; Dao et al. (2022), algorithm 1.

    Examples
    --------
    >>> q = k = np.array([[0.0], [1.0]])
    >>> v = np.array([[2.0], [4.0]])
    >>> tiled_softmax_attention(q, k, v, scale=np.log(3), tile_size=1)
    array([[3. ],
           [3.5]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    tile_size = _arguments.check_integer("tile_size", tile_size, minimum=1)
    scale = _arguments.resolve_scale(scale, q.shape[-1])
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    N = q.shape[-2]
    seen = _seen(N, k.shape[-2]) if causal else None
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    out = np.empty((*leading, N, v.shape[-1]), dtype)
    for start in range(0, N, tile_size):
        rows = slice(start, start + tile_size)
        seen_by_rows = None if seen is None else seen[rows]
        out[..., rows, :] = _online_softmax(q[..., rows, :], k, v, scale, seen_by_rows, tile_size)
    return out


def grouped_query_attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, scale: float | None = None
) -> Array:
    r"""Softmax attention in which groups of query heads share a key and value head.

    Query head :math:`h` reads key and value head :math:`\lfloor h / (H_q / H_{kv}) \rfloor`
    (:eq:`eq-grouped-query`), so that a cache holds :math:`H_{kv}` heads instead of :math:`H_q`. One
    key and value head is multi-query attention; as many as queries, multi-head attention.

    Parameters
    ----------
    q : array, shape (..., Hq, N, D)
        Queries.
    k : array, shape (..., Hkv, N, D)
        Keys; Hkv divides Hq.
    v : array, shape (..., Hkv, N, M)
        Values.
    causal : bool
        Let each query see the keys up to its own position only (:eq:`eq-causal-mask`); the queries
        are the last ones.
    scale : float, optional
        Factor of the scores; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., Hq, N, M)
        Outputs in the dtype of the input; float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or the dtypes differ.
    ValueError
        If the shapes do not fit together, Hkv does not divide Hq, or `scale` is not finite.

    Notes
    -----
    NaN does what it does in :func:`softmax_attention`; it stays in the heads that read it.

    References
    ----------
    Shazeer (2019) for one head; Ainslie et al. (2023), section 2.2.

    Examples
    --------
    >>> q = np.zeros((4, 1, 1))
    >>> k = np.zeros((2, 1, 1))
    >>> v = np.array([[[5.0]], [[7.0]]])
    >>> grouped_query_attention(q, k, v).ravel()
    array([5., 5., 7., 7.])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
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
    k, v = k[..., None, :, :], v[..., None, :, :]  # (..., Hkv, 1, N, ·)
    out = softmax_attention(q, k, v, causal=causal, scale=scale)
    return out.reshape(*out.shape[:-4], Hq, *out.shape[-2:])


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

    Head :math:`h` has the keys :math:`k = c\, U_k^{(h)}` and the values :math:`v = c\, U_v^{(h)}`
    of the latent :math:`c` (:eq:`eq-latent-attention`). As
    :math:`q \cdot (c\, U_k) = (q\, U_k^\top) \cdot c`, the up-projections can be absorbed into the
    query and the output, and neither k nor v is ever formed.

    Parameters
    ----------
    q : array, shape (..., H, N, D)
        Queries. Their number may differ from that of the latents.
    latent : array, shape (..., N, R)
        What a cache keeps of each token, shared by the heads.
    up_k : array, shape (H, R, D)
        Up-projection to the keys.
    up_v : array, shape (H, R, M)
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
    array, shape (..., H, N, M)
        Outputs in the dtype of the input; float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or the dtypes differ.
    ValueError
        If the shapes do not fit together, or `scale` is not finite.

    Notes
    -----
    NaN does what it does in :func:`softmax_attention`; in a latent it reaches every head. The
    decoupled rotary key of the paper is left out.

    References
    ----------
    DeepSeek-AI (2024), DeepSeek-V2, section 2.1.2.

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
    _arguments.check_arrays(np.ndarray, q=q, latent=latent, up_k=up_k, up_v=up_v)
    _arguments.check_flags(causal=causal, absorb=absorb)
    _arguments.check_rank("q", q, "H, N, D")
    _arguments.check_rank("latent", latent, "N, R")
    H, _, D = q.shape[-3:]
    R = latent.shape[-1]
    if up_k.shape != (H, R, D):
        raise ValueError(f"up_k must have shape (H, R, D), {(H, R, D)}, got {up_k.shape}.")
    if up_v.ndim != 3 or up_v.shape[:2] != (H, R):
        raise ValueError(f"up_v must have shape (H, R, M), ({H}, {R}, M), got {up_v.shape}.")
    _arguments.check_leading(q=q.shape[:-3], latent=latent.shape[:-2])
    scale = _arguments.resolve_scale(scale, D)
    dtype, (q, latent, up_k, up_v) = q.dtype, accumulate(q, latent, up_k, up_v)
    latent = latent[..., None, :, :]  # (..., 1, N, R)
    if absorb:
        q = q @ np.swapaxes(up_k, -1, -2)  # (..., H, N, R)
        out = _softmax_attention(q, latent, latent, causal, scale) @ up_v
    else:
        out = _softmax_attention(q, latent @ up_k, latent @ up_v, causal, scale)
    return out.astype(dtype, copy=False)


def _softmax_attention(q, k, v, causal, scale):
    seen = _seen(q.shape[-2], k.shape[-2]) if causal else None
    return _weighted_sum(_softmax(_scores(q, k, scale, seen)), v, seen)


def _scores(q, k, scale, seen):
    """Scaled scores (..., N, N); -inf for the keys that a query does not see."""
    scores = (q * scale) @ np.swapaxes(k, -1, -2)
    if seen is None:
        return scores
    return np.where(np.arange(k.shape[-2]) < seen[:, None], scores, -np.inf)


def _softmax(scores):
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
        scores = _scores(q, k[..., keys, :], scale, seen_of_tile)  # (..., tile, tile)
        previous = maximum
        maximum = np.maximum(previous, scores.max(axis=-1, keepdims=True))
        weights = _exp(scores, maximum)
        shrink = _exp(previous, maximum)  # what was summed so far, under the new maximum
        total = shrink * total + weights.sum(axis=-1, keepdims=True)
        out = shrink * out + _weighted_sum(weights, v[..., keys, :], seen_of_tile)
    return out / np.where(total == 0, 1, total)  # as in _softmax: NaN stays NaN


def _exp(scores, maximum):
    """exp(scores - maximum), and exp(-inf) = 0 where the maximum is -inf: no key seen yet."""
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as documented
        return np.exp(scores - np.where(maximum == -np.inf, 0, maximum))


def _weighted_sum(weights, v, seen):
    """``weights @ v``, except that a value which is not seen adds nothing: 0 * NaN would be NaN."""
    finite = np.isfinite(v)
    if seen is None or finite.all():
        return weights @ v
    added = np.cumsum(np.where(finite, 0, v), axis=-2)  # the NaN and inf among the first j values
    added = np.concatenate([np.zeros_like(added[..., :1, :]), added], axis=-2)
    return weights @ np.where(finite, v, 0) + added[..., np.minimum(seen, v.shape[-2]), :]


def _seen(num_queries, num_keys):
    """How many keys each query sees under the causal mask; the queries are the last ones."""
    return np.maximum(np.arange(num_queries) + 1 + num_keys - num_queries, 0)


def _read_only(array):
    """A view for a function of the caller's, which must not write into the caller's arrays."""
    view = array.view()
    view.flags.writeable = False
    return view


def _describe(value):
    """A returned value in an error message: its shape and dtype, or its type."""
    if isinstance(value, np.ndarray):
        return f"shape {value.shape} and dtype {value.dtype}"
    return type(value).__name__
