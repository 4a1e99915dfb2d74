"""Retention, the memory of RetNet: all that it holds fades at one rate."""

import numpy as np

from lesson_code import _arguments
from lesson_code.numpy._memory import initial_memory
from lesson_code.numpy.softmax import Array, _accumulate


def retention(
    q: Array,
    k: Array,
    v: Array,
    decay: float | Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Retention: a memory that fades by the same factor with each token.

    Computes :eq:`eq-retention`, with the decay :math:`\gamma`:

    .. math::

        S_t &= \gamma S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    The memory fades before token t is written, so a query weighs its own token by 1. There is no
    normalizer and no scale. Every form computes the same outputs.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
        Values.
    decay : number or array, shape (...)
        The factor :math:`\gamma`, in (0, 1]. An array has one for each sequence of the leading
        dimensions, with which it broadcasts: shape (H,) for heads. Its dtype is that of the input
        or the accumulation dtype.
    form : str, optional
        "recurrent" (:eq:`eq-retention`), "parallel" (:eq:`eq-retention-parallel`, all positions at
        once) or "chunkwise" (:eq:`eq-retention-chunkwise`, parallel inside a chunk, a state between
        chunks). None takes "chunkwise", the fastest.
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : array, shape (..., D, M), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    array, shape (..., N, M)
        Outputs in the dtype of the input, with all leading dimensions, broadcast as in ``matmul``.
        float16 is computed in float32.
    array, shape (..., D, M)
        With ``return_state=True``: S after the last token, in the accumulation dtype (float64 for
        float64, otherwise float32), with the leading dimensions of k, v, decay and the initial
        state: queries are not remembered.

    Raises
    ------
    TypeError
        If q, k or v is no NumPy array of floats, their dtypes differ, `decay` is neither a number
        nor an array of a fitting dtype, `chunk_size` is no integer, or `initial_state` is no array
        of a fitting dtype.
    ValueError
        If the shapes do not fit together, a decay is not in (0, 1], `form` is unknown, or
        `chunk_size` is below 1.

    Notes
    -----
    NaN, in `decay` too, reaches the outputs that depend on it and no other sequence. "recurrent"
    keeps it from earlier positions; in "parallel" a NaN in a value reaches the earlier positions of
    its sequence and in "chunkwise" those of its chunk, as 0 * NaN is NaN.

    Tokens whose keys are 0 fade the memory like any other: to pad a batch, pad at the front.

    References
    ----------
    Sun et al. (2023), equations 5 to 7: there with rotated queries and keys, which a caller may
    rotate, as the module ``Retention`` does.

    Examples
    --------
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, state = retention(q, k, v, 0.5, return_state=True)
    >>> out
    array([[ 10. ,  20. ],
           [ 30. ,  40. ],
           [117.5, 145. ]])
    >>> state
    array([[52.5, 65. ],
           [65. , 80. ]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(q=(q, "N, D"), k=(k, "N, D"), v=(v, "N, M"))
    _arguments.check_form(form, tuple(_FORMS))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    decays = _decays(decay, q)
    S = initial_memory(
        initial_state,
        "v",
        v,
        {"D": k.shape[-1], "M": v.shape[-1]},
        k=k.shape[:-2],
        v=v.shape[:-2],
        decay=decays.shape,
    )
    _arguments.check_leading(q=q.shape[:-2], initial_state=S.shape[:-2])

    dtype, (q, k, v) = q.dtype, _accumulate(q, k, v)
    form = form or "chunkwise"
    options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
    out, S = _FORMS[form](q, k, v, decays[..., None, None], S, **options)
    out = out.astype(dtype, copy=False)
    return (out, S) if return_state else out


def retention_decays(num_heads: int) -> Array:
    r"""The decays of RetNet's heads: :math:`\gamma_h = 1 - 2^{-5-h}` for h = 0 ... H - 1.

    Computes :eq:`eq-retention-decays`. Head h remembers about :math:`1/(1-\gamma_h) = 2^{5+h}`
    tokens.

    Parameters
    ----------
    num_heads : int
        Number H of heads.

    Returns
    -------
    array, shape (H,)
        Decays in float64.

    Raises
    ------
    TypeError
        If `num_heads` is no integer.
    ValueError
        If `num_heads` is below 1.

    Notes
    -----
    Rounded to float16, the decay is 1 from the eighth head on, which forgets nothing: `retention`
    takes decays in float32 for float16 input.

    References
    ----------
    Sun et al. (2023), equation 8.

    Examples
    --------
    >>> retention_decays(3)
    array([0.96875  , 0.984375 , 0.9921875])
    """
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    return 1 - 2.0 ** (-5 - np.arange(num_heads))


# The forms. Each takes q and k (..., N, D), v (..., N, M), the decay (..., 1, 1) and the state
# before the first token, and returns outputs (..., N, M) and the state after the last one.


def _recurrent(q, k, v, decay, S):
    outputs = _empty_outputs(q, S)
    for t in range(k.shape[-2]):
        S = decay * S + k[..., t, :, None] * v[..., t, None, :]
        outputs[..., t, :] = (q[..., t, None, :] @ S)[..., 0, :]
    return outputs, S


def _parallel(q, k, v, decay, S):
    N = k.shape[-2]
    m = np.arange(1, N + 1, dtype=q.dtype)
    n = m[:, None]
    fading = np.where(n >= m, decay ** np.maximum(n - m, 0), 0)  # (..., N, N)
    outputs = (q @ k.swapaxes(-1, -2) * fading) @ v + decay**n * (q @ S)
    to_end = decay ** (N - n)  # (..., N, 1)
    return outputs, decay**N * S + (k * to_end).swapaxes(-1, -2) @ v


def _chunkwise(q, k, v, decay, S, chunk_size):
    outputs = _empty_outputs(q, S)
    for start in range(0, k.shape[-2], chunk_size):
        chunk = slice(start, start + chunk_size)
        outputs[..., chunk, :], S = _parallel(
            q[..., chunk, :], k[..., chunk, :], v[..., chunk, :], decay, S
        )
    return outputs, S


_FORMS: dict = {
    "recurrent": _recurrent,
    "parallel": _parallel,
    "chunkwise": _chunkwise,
}


def _decays(decay, like):
    """The decay as an array (...) of the accumulation dtype, checked."""
    dtypes = _arguments.state_dtypes(like)
    if not isinstance(decay, np.ndarray):
        decay = np.asarray(_arguments.check_number("decay", decay))
    else:
        _arguments.check_arrays(np.ndarray, decay=decay)
        if _arguments.dtype_name(decay) not in dtypes:
            expected = " or ".join(dict.fromkeys(dtypes))
            raise TypeError(f"decay must have dtype {expected}, got {decay.dtype}.")
    _arguments.check_values("decay", decay, "in (0, 1]", (decay <= 0) | (decay > 1))
    return decay.astype(dtypes[1], copy=False)


def _empty_outputs(q, S):
    leading = np.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    return np.empty((*leading, q.shape[-2], S.shape[-1]), q.dtype)
