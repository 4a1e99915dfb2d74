"""The attention-free transformer: every channel takes its own weighted mean of the values."""

import numpy as np

from lesson_code import _arguments
from lesson_code.numpy.elementwise import divide, sigmoid
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import tokens
from lesson_code.numpy.wkv import EMPTY, WKVState, add_token


@operator("Nq D, N D, N D -> Nq D")
def aft_simple(q: Array, k: Array, v: Array, *, causal: bool = False) -> Array:
    r"""AFT-simple: a mean of the values weighted by their keys, and a gate made of the query.

    Computes :eq:`eq-aft-simple` in every channel (Zhai et al., 2021), over all positions or, with
    ``causal=True``, over those up to t:

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i} v_i}{\sum_i e^{k_i}}

    Parameters
    ----------
    q, k, v : array, shape (..., N, D)
        Queries before their sigmoid, keys, the logarithms of the weights, of which -inf is weight
        0, and values. With ``causal=False`` there may be more or fewer queries than keys.
    causal : bool
        Let each position see those up to its own only.

    Returns
    -------
    array, shape (..., N, D)
        Outputs; 0 where no position has a weight.

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
    if not causal:
        return sigmoid(q) * _weighted_mean(k, v)[..., None, :]
    _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    k, v = np.broadcast_arrays(k, v)
    mean, zeros = np.empty_like(v), np.zeros((*v.shape[:-2], v.shape[-1]), v.dtype)
    state = WKVState(zeros, zeros, zeros + EMPTY)
    for t, (k_t, v_t) in enumerate(tokens(k, v)):
        state = add_token(state, 0, k_t, v_t)
        mean[..., t, :] = divide(state.numerator, state.denominator)
    return sigmoid(q) * mean


@operator("Nq D, N D, N D, (Nq N) -> Nq D")
def aft_full(q: Array, k: Array, v: Array, position_bias: Array, *, causal: bool = False) -> Array:
    r"""AFT-full: as AFT-simple, with a bias for each pair of positions.

    Computes :eq:`eq-aft-full` in every channel (Zhai et al., 2021), over all positions or, with
    ``causal=True``, over those up to t:

    .. math:: o_t = \sigma(q_t) \frac{\sum_i e^{k_i + p_{ti}} v_i}{\sum_i e^{k_i + p_{ti}}}

    Parameters
    ----------
    q, k, v, causal
        As in :func:`aft_simple`.
    position_bias : array, shape (N, N)
        The bias p, the same in all channels; a row for each query, a column for each key. It is
        added to the key; -inf hides the key from the query.

    Returns
    -------
    array, shape (..., N, D)
        Outputs; 0 where no position has a weight. The exponents of one query at a time are stored,
        (..., N, D).

    Examples
    --------
    >>> q, k = np.zeros((2, 1)), np.zeros((2, 1))
    >>> v = np.array([[10.0], [30.0]])
    >>> position_bias = np.array([[0.0, 0.0], [np.log(3), 0.0]])  # query 2 sees key 1 threefold
    >>> aft_full(q, k, v, position_bias)
    array([[10. ],
           [ 7.5]])
    """
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    Nq = q.shape[-2]
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    mean = np.empty((*leading, Nq, v.shape[-1]), v.dtype)
    for t in range(Nq):
        seen = slice(t + 1) if causal else slice(None)
        bias = position_bias[t, seen, None]
        mean[..., t, :] = _weighted_mean(k[..., seen, :] + bias, v[..., seen, :])
    return sigmoid(q) * mean


def _weighted_mean(exponents, v):
    """The mean over positions of v, (..., N, D) -> (..., D), with weights e^exponents."""
    weights = np.exp(exponents - exponents.max(axis=-2, keepdims=True, initial=EMPTY))
    return divide((weights * v).sum(axis=-2), weights.sum(axis=-2))
