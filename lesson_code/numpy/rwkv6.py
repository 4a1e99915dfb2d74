"""RWKV-6: a gated memory that is read before it is written, with a bonus for the current token."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy._memory import initial_memory
from lesson_code.numpy.gated import _decays_between
from lesson_code.numpy.softmax import _accumulate

Array = NDArray[np.floating]


def rwkv6(
    r: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    bonus: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The memory of RWKV-6 (Finch), and of RWKV-5 (Eagle) where the decay is constant.

    Computes :eq:`eq-rwkv6`, with the decay :math:`\alpha_t = \exp(\mathrm{log\_decay}_t)` and the
    bonus u:

    .. math::

        o_t &= (S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top r_t \\
        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top

    The memory is read before it is written: a token's write decays for the first time when the next
    token has been read. The current token counts u times, and is stored once.

    Parameters
    ----------
    r : array, shape (..., N, D)
        Receptances: the queries.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N, D)
        Logarithms of the decays, in [-inf, 0]. The same at every position, they make RWKV-5.
    bonus : array, shape (..., D)
        Weight u of the current token in each channel, the same at every position. Its leading
        dimensions broadcast with those of the outputs, such as (H, D) for H heads.
    form : str, optional
        "recurrent" (:eq:`eq-rwkv6`) or "chunkwise" (:eq:`eq-rwkv6-decay`: all pairs of a chunk, a
        state between chunks). None takes "recurrent", the fastest in NumPy.
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
    in "chunkwise" it may reach the earlier positions of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Peng et al. (2024), "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence",
    section 4.

    Examples
    --------
    Everything is forgotten but what came last, and a token counts twice when it is the current one:

    >>> r = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> log_decay, bonus = np.full((3, 2), -np.inf), np.array([2.0, 2.0])
    >>> out, S = rwkv6(r, k, v, log_decay, bonus, return_state=True)
    >>> out
    array([[ 20.,  40.],
           [ 60.,  80.],
           [230., 280.]])
    >>> S
    array([[50., 60.],
           [50., 60.]])
    """
    _arguments.check_arrays(np.ndarray, r=r, k=k, v=v, log_decay=log_decay, bonus=bonus)
    _arguments.check_flags(return_state=return_state)
    axes = {"r": (r, "N, D"), "k": (k, "N, D"), "v": (v, "N, M"), "log_decay": (log_decay, "N, D")}
    _arguments.check_axes(**axes, bonus=(bonus, "D"))
    _arguments.check_form(form, ("recurrent", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _arguments.check_values("log_decay", log_decay, "at most 0", log_decay > 0)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2], "log_decay": log_decay.shape[:-2]}
    sizes = {"D": k.shape[-1], "M": v.shape[-1]}
    S = initial_memory(initial_state, "v", v, sizes, **leading)
    all_leading = _arguments.check_leading(
        r=r.shape[:-2], bonus=bonus.shape[:-1], initial_state=S.shape[:-2]
    )

    dtype, (r, k, v, g, u) = r.dtype, _accumulate(r, k, v, log_decay, bonus)
    out = np.empty((*all_leading, *v.shape[-2:]), r.dtype)
    if form in (None, "recurrent"):
        S = _recurrent(r, k, v, g, u, S, out)
    else:
        for start in range(0, k.shape[-2], chunk_size):
            chunk = slice(start, start + chunk_size)
            r_L, k_L, v_L, g_L = (x[..., chunk, :] for x in (r, k, v, g))
            out[..., chunk, :], S = _chunk(r_L, k_L, v_L, g_L, u, S)
    out = out.astype(dtype, copy=False)
    return (out, S) if return_state else out


def _recurrent(r, k, v, g, u, S, out):
    """Write the outputs into `out`; the memory after the last token."""
    for t in range(k.shape[-2]):
        write = k[..., t, :, None] * v[..., t, None, :]  # (..., D, M)
        out[..., t, :] = (r[..., t, None, :] @ (S + u[..., :, None] * write))[..., 0, :]
        S = np.exp(g[..., t, :, None]) * S + write
    return S


def _chunk(r, k, v, g, u, S):
    """Outputs of at least one token and the memory after the last, with no loop over tokens."""
    between = _decays_between(g)  # (..., L, L, D), through the token in the row
    from_start = np.exp(np.cumsum(g, axis=-2))  # (..., L, D), the same
    # What a token reads has decayed through the token before it, and the first reads S as it is.
    read_between = np.insert(between[..., :-1, :, :], 0, 0, axis=-3)
    read_from_start = np.insert(from_start[..., :-1, :], 0, 1, axis=-2)

    A = (r[..., :, None, :] * read_between * k[..., None, :, :]).sum(axis=-1)  # (..., L, L)
    own = (r * u[..., None, :] * k).sum(axis=-1, keepdims=True)  # (..., L, 1)
    out = (r * read_from_start) @ S + A @ v + own * v
    to_end = between[..., -1, :, :]  # (..., L, D)
    S = from_start[..., -1, :, None] * S + (k * to_end).swapaxes(-1, -2) @ v
    return out, S
