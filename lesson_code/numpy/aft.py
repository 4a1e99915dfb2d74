"""The attention free transformer: weights without queries, and a gate where the query was."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy.elementwise import divide, sigmoid
from lesson_code.numpy.precision import accumulate
from lesson_code.numpy.wkv import EMPTY

Array = NDArray[np.floating]


def aft_simple(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    r"""AFT-simple: one weighted mean of the values for all queries, gated by each.

    In every channel, over all positions or, with ``causal=True``, over those up to t
    (:eq:`eq-aft-simple`),

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i} v_i}{\sum_i e^{k_i}}

    The division is of the two sums, not inside them.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries, before their sigmoid. With ``causal=False`` their number may differ from that of
        the keys.
    k : array, shape (..., N, D)
        Keys, the logarithms of the weights. -inf has weight 0.
    v : array, shape (..., N, D)
        Values.
    causal : bool
        Let each position see those up to its own only.

    Returns
    -------
    array, shape (..., N, D)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Where no
        position has a weight the output is 0. float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or their dtypes differ.
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    No exponential overflows: each is of a difference to the largest key (keys below -1e38 count as
    -inf). NaN reaches the outputs that depend on it, in its own channel and sequence only. A zero
    key has weight: pad with keys of -inf.

    References
    ----------
    Zhai et al. (2021), AFT-simple.

    Examples
    --------
    >>> q, k = np.zeros((3, 1)), np.zeros((3, 1))  # a gate of 1/2, equal weights
    >>> v = np.array([[10.0], [30.0], [50.0]])
    >>> aft_simple(q, k, v, causal=True)
    array([[ 5.],
           [10.],
           [15.]])
    >>> aft_simple(q, k, v)[0]
    array([15.])
    """
    _check(q, k, v, causal)
    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    mean = _running_mean(k, v) if causal else _weighted_mean(k, v)[..., None, :]
    return (sigmoid(q) * mean).astype(dtype, copy=False)


def aft_full(q: Array, k: Array, v: Array, position_bias: Array, *, causal: bool = False) -> Array:
    r"""AFT-full: as AFT-simple, with a bias for each pair of positions.

    In every channel, over all positions or, with ``causal=True``, over those up to t
    (:eq:`eq-aft-full`),

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i + b_{ti}} v_i}{\sum_i e^{k_i + b_{ti}}}

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries, before their sigmoid. With ``causal=False`` their number may differ from that of
        the keys.
    k : array, shape (..., N, D)
        Keys. -inf has weight 0.
    v : array, shape (..., N, D)
        Values.
    position_bias : array, shape (N, N)
        The bias b, the same in all channels; a row for each query, a column for each key. It is
        added to the key; -inf hides the key from the query.
    causal : bool
        Let each position see those up to its own only.

    Returns
    -------
    array, shape (..., N, D)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Where no
        position has a weight the output is 0. float16 is computed in float32.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, or their dtypes differ.
    ValueError
        If the shapes do not fit together.

    Notes
    -----
    No exponential overflows: each is of a difference to the largest exponent of its query and
    channel (exponents below -1e38 count as -inf). NaN reaches the outputs that depend on it. The
    exponents of one query at a time are stored, (..., N, D).

    References
    ----------
    Zhai et al. (2021), AFT-full.

    Examples
    --------
    >>> q, k = np.zeros((2, 1)), np.zeros((2, 1))
    >>> v = np.array([[10.0], [30.0]])
    >>> position_bias = np.array([[0.0, 0.0], [np.log(3), 0.0]])  # query 2 sees key 1 threefold
    >>> aft_full(q, k, v, position_bias)
    array([[10. ],
           [ 7.5]])
    """
    _check(q, k, v, causal, position_bias=position_bias)
    Nq, Nk = q.shape[-2], k.shape[-2]
    if position_bias.shape != (Nq, Nk):
        raise ValueError(
            f"position_bias must have shape ({Nq}, {Nk}), a row for each query and a column for "
            f"each key, got {position_bias.shape}."
        )
    dtype, (q, k, v, bias) = q.dtype, accumulate(q, k, v, position_bias)
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    mean = np.empty((*leading, Nq, v.shape[-1]), v.dtype)
    for t in range(Nq):
        seen = slice(t + 1) if causal else slice(None)
        mean[..., t, :] = _weighted_mean(k[..., seen, :] + bias[t, seen, None], v[..., seen, :])
    return (sigmoid(q) * mean).astype(dtype, copy=False)


def _weighted_mean(exponents, v):
    """The mean over positions of v, (..., N, D) -> (..., D), with weights e^exponents."""
    weights = np.exp(exponents - exponents.max(axis=-2, keepdims=True, initial=EMPTY))
    return divide((weights * v).sum(axis=-2), weights.sum(axis=-2))


def _running_mean(k, v):
    """Row t is the mean of v up to t with weights e^k: (..., N, D) -> (..., N, D)."""
    k, v = np.broadcast_arrays(k, v)
    mean = np.empty(v.shape, v.dtype)
    a = b = np.zeros_like(v[..., :1, :].sum(axis=-2))  # sums of weights times values, of weights
    maximum = np.full_like(a, EMPTY)  # both are divided by e^maximum
    for t in range(k.shape[-2]):
        top = np.maximum(maximum, k[..., t, :])
        past, own = np.exp(maximum - top), np.exp(k[..., t, :] - top)
        a, b, maximum = past * a + own * v[..., t, :], past * b + own, top
        mean[..., t, :] = divide(a, b)
    return mean


def _check(q, k, v, causal, **bias):
    """Refuse all but arrays (..., N, D), as many queries as keys if causal."""
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v, **bias)
    _arguments.check_flags(causal=causal)
    _arguments.check_queries_keys_values(q, k, v)
    _arguments.check_same("v", v.shape[-1], "the width of k", k.shape[-1])
    if causal:
        _arguments.check_same("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
