"""Gated linear attention: each channel of the memory forgets at a rate that each token sets."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy._memory import initial_memory
from lesson_code.numpy.softmax import _accumulate

Array = NDArray[np.floating]


def gated_linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Linear attention whose memory decays by a gate for each token and key channel.

    Computes :eq:`eq-gla`, with the gate :math:`\alpha_t = \exp(\mathrm{log\_decay}_t)`:

    .. math::

        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    The memory decays before it is written: a token's own write is read undecayed.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. They are not scaled.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N, D)
        Logarithms of the gates, in [-inf, 0]: 0 keeps a row of the memory as it is, -inf empties
        it, exactly.
    form : str, optional
        "recurrent" (:eq:`eq-gla`), "parallel" (:eq:`eq-gla-parallel`, with N·N·D decays) or
        "chunkwise" (:eq:`eq-gla-chunkwise`, "parallel" inside a chunk, a state between chunks).
        None takes "recurrent", the fastest in NumPy.
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : array, shape (..., D, M), optional
        Memory before the first token, zero by default, in the dtype of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    array, shape (..., N, M)
        Outputs in the dtype of the input, with the leading dimensions of all inputs, broadcast as
        in ``matmul``. float16 is computed in float32.
    array, shape (..., D, M)
        With ``return_state=True``: the memory after the last token, in the accumulation dtype
        (float64 for float64, otherwise float32), with the leading dimensions of k, v, log_decay and
        the initial state.

    Raises
    ------
    TypeError
        If an input is no NumPy array of floats, their dtypes differ, `chunk_size` is no integer, or
        the dtype of `initial_state` does not fit.
    ValueError
        If the shapes do not fit together, a logarithm is above 0, `form` is unknown, or
        `chunk_size` is below 1.

    Notes
    -----
    No exponent above 0 is ever formed, so no decay overflows. Positions with k = 0, v = 0 and
    log_decay = 0 leave the memory as it is: pad with them.

    NaN is not refused. It reaches the outputs that depend on it and no other sequence of the batch;
    in "parallel" and "chunkwise" it may reach the earlier positions of its sequence or chunk, as
    0 * NaN is NaN.

    References
    ----------
    Yang et al. (2024), "Gated linear attention transformers with hardware-efficient training",
    section 4.

    Examples
    --------
    The first channel keeps everything. The second keeps half, then nothing:

    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> log_decay = np.array([[0.0, 0.0], [0.0, np.log(0.5)], [0.0, -np.inf]])
    >>> out, S = gated_linear_attention(q, k, v, log_decay, return_state=True)
    >>> out
    array([[ 10.,  20.],
           [ 30.,  40.],
           [110., 140.]])
    >>> S
    array([[60., 80.],
           [50., 60.]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v, log_decay=log_decay)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(
        q=(q, "N, D"), k=(k, "N, D"), v=(v, "N, M"), log_decay=(log_decay, "N, D")
    )
    _arguments.check_form(form, ("recurrent", "parallel", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _arguments.check_values("log_decay", log_decay, "at most 0", log_decay > 0)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2], "log_decay": log_decay.shape[:-2]}
    sizes = {"D": k.shape[-1], "M": v.shape[-1]}
    S = initial_memory(initial_state, "v", v, sizes, **leading)
    all_leading = _arguments.check_leading(q=q.shape[:-2], initial_state=S.shape[:-2])

    dtype, (q, k, v, g) = q.dtype, _accumulate(q, k, v, log_decay)
    out = np.empty((*all_leading, *v.shape[-2:]), q.dtype)
    if form in (None, "recurrent"):
        S = _recurrent(q, k, v, g, S, out)
    else:
        N = k.shape[-2]
        size = max(N, 1) if form == "parallel" else chunk_size
        for start in range(0, N, size):
            chunk = slice(start, start + size)
            q_L, k_L, v_L, g_L = (x[..., chunk, :] for x in (q, k, v, g))
            out[..., chunk, :], S = _parallel(q_L, k_L, v_L, g_L, S)
    out = out.astype(dtype, copy=False)
    return (out, S) if return_state else out


def _recurrent(q, k, v, g, S, out):
    """Write the outputs into `out`; the memory after the last token."""
    for t in range(k.shape[-2]):
        S = np.exp(g[..., t, :, None]) * S + k[..., t, :, None] * v[..., t, None, :]
        out[..., t, :] = (q[..., t, None, :] @ S)[..., 0, :]
    return S


def _parallel(q, k, v, g, S):
    """Outputs of at least one token and the memory after the last, with no loop over tokens."""
    between = _decays_between(g)  # (..., N, N, D)
    A = (q[..., :, None, :] * between * k[..., None, :, :]).sum(axis=-1)  # (..., N, N)
    from_start = np.exp(np.cumsum(g, axis=-2))  # (..., N, D)
    to_end = between[..., -1, :, :]  # (..., N, D)
    out = (q * from_start) @ S + A @ v
    S = from_start[..., -1, :, None] * S + (k * to_end).swapaxes(-1, -2) @ v
    return out, S


def _decays_between(g):
    """Entry [t, j] is exp(g_{j+1} + ... + g_t), 0 where j > t: (..., N, D) -> (..., N, N, D)."""
    N = g.shape[-2]
    later, seen = np.tri(N, k=-1, dtype=bool), np.tri(N, dtype=bool)
    terms = np.where(later[..., None], g[..., :, None, :], 0)  # [i, j] is g_i if i > j
    sums = np.cumsum(terms, axis=-3)
    return np.exp(np.where(seen[..., None], sums, -np.inf))  # masked before exp
