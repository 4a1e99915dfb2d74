"""Mamba's selective scan and Mamba-2's state-space dual, in the letters of their papers."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy._memory import initial_memory
from lesson_code.numpy.softmax import _accumulate

Array = NDArray[np.floating]


def selective_scan(
    x: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    *,
    form: str | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The selective state space of Mamba: each entry of the state has a decay of its own.

    Computes :eq:`eq-selective-scan`. In the paper's letters, for each of E channels of x with K
    numbers of state, so that h is (E, K),

    .. math::

        h_t &= \exp(\Delta_t A) \odot h_{t-1} + (\Delta_t \odot x_t) B_t^\top \\
        y_t &= h_t C_t + D \odot x_t

    where :math:`\Delta_t` multiplies the rows of A: entry (e, k) of the decay is
    :math:`\exp(\Delta_{te} A_{ek})`. The state is read after it is written.

    Parameters
    ----------
    x : array, shape (..., N, E)
        Inputs.
    delta : array, shape (..., N, E)
        Step sizes, after their softplus: at least 0. A step of 0 leaves the state as it is.
    A : array, shape (E, K)
        Rates, negative.
    B : array, shape (..., N, K)
        What x writes with.
    C : array, shape (..., N, K)
        What reads.
    D : array, shape (E,), optional
        Weight with which x goes past the memory; 0 where it is None.
    form : str, optional
        "recurrent", one token after the other, or "scan", an associative prefix scan over pairs
        (decay, write) in log2 N steps (:eq:`eq-scan-operator`), which stores N states. None takes
        "recurrent".
    initial_state : array, shape (..., E, K), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    array, shape (..., N, E)
        Outputs in the dtype of the input, with the leading dimensions of x, delta, B, C and the
        initial state, broadcast as in ``matmul``. float16 is computed in float32.
    array, shape (..., E, K)
        With ``return_state=True``: the state in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of x, delta, B and the initial state: what
        reads is not remembered.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, `initial_state` has another
        dtype, or `return_state` is neither True nor False.
    ValueError
        If the shapes do not fit together, `form` is unknown, an entry of `A` is not negative, or
        one of `delta` is.

    Notes
    -----
    A is discretized exactly (zero-order hold) and B as :math:`\Delta_t B_t`
    (:eq:`eq-discretization`), as in the paper's code.

    NaN reaches the outputs of its own position and of later ones, and no other sequence of the
    batch. Positions with delta = 0 may be appended: they change nothing that is remembered.

    References
    ----------
    Gu and Dao (2024), equations 2 to 4 and algorithm 2; Blelloch (1990) for the scan.

    Examples
    --------
    With a decay of 1/2, :math:`h = 8`, :math:`8/2 + 4 = 8` and :math:`8/2 + 2 = 6`:

    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> ones = np.ones((3, 1))
    >>> selective_scan(x, ones, np.array([[-np.log(2.0)]]), ones, ones)
    array([[8.],
           [8.],
           [6.]])
    """
    arrays = {"x": x, "delta": delta, "A": A, "B": B, "C": C} | ({} if D is None else {"D": D})
    _arguments.check_arrays(np.ndarray, **arrays)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(
        x=(x, "N, E"), delta=(delta, "N, E"), A=(A, "E, K"), B=(B, "N, K"), C=(C, "N, K")
    )
    _arguments.check_alone("A", A, "E, K")
    E, K = A.shape
    if D is not None:
        _arguments.check_alone("D", D, "E")
        _arguments.check_same("D", len(D), "the width of x", E)
    _arguments.check_form(form, tuple(_SELECTIVE))
    _arguments.check_values("A", A, "negative", A >= 0)
    _arguments.check_values("delta", delta, "at least 0", delta < 0)
    sizes, leading = {"E": E, "K": K}, {"delta": delta.shape[:-2], "B": B.shape[:-2]}
    h = initial_memory(initial_state, "x", x, sizes, x=x.shape[:-2], **leading)
    _arguments.check_leading(C=C.shape[:-2], initial_state=h.shape[:-2])

    dtype, (x, delta, A, B, C) = x.dtype, _accumulate(x, delta, A, B, C)
    y, h = _SELECTIVE[form or "recurrent"](x, delta, A, B, C, h)
    if D is not None:
        y = y + D.astype(x.dtype, copy=False) * x
    y = y.astype(dtype, copy=False)
    return (y, h) if return_state else y


def _selective_recurrent(x, delta, A, B, C, h):
    N, E = x.shape[-2:]
    y = np.empty((*np.broadcast_shapes(h.shape[:-2], C.shape[:-2]), N, E), x.dtype)
    for t in range(N):
        decay = np.exp(delta[..., t, :, None] * A)  # (..., E, K)
        write = (delta[..., t, :] * x[..., t, :])[..., :, None] * B[..., t, None, :]
        h = decay * h + write
        y[..., t, :] = (h @ C[..., t, :, None])[..., 0]
    return y, h


def _selective_scan(x, delta, A, B, C, h):
    decays = np.exp(delta[..., :, :, None] * A)  # (..., N, E, K)
    writes = (delta * x)[..., :, :, None] * B[..., :, None, :]
    # The state before the first token is what the first pair writes.
    shape = (*h.shape[:-2], 1 + x.shape[-2], *h.shape[-2:])
    a, b = np.zeros(shape, x.dtype), np.empty(shape, x.dtype)
    a[..., 1:, :, :], b[..., 1:, :, :], b[..., 0, :, :] = decays, writes, h
    h = _prefix_scan(a, b)  # (..., 1 + N, E, K)
    y = (h[..., 1:, :, :] @ C[..., :, :, None])[..., 0]
    return y, h[..., -1, :, :].copy()


def _prefix_scan(a, b):
    """h_t = a_t h_{t-1} + b_t for all t at once, from pairs that are joined in log2 N steps.

    First (a, b), then (a', b'): together h -> a' (a h + b) + b', the pair (a' a, a' b + b').
    """
    a, b = np.moveaxis(a, -3, 0), np.moveaxis(b, -3, 0)
    d = 1
    while d < len(b):
        b = np.concatenate([b[:d], a[d:] * b[:-d] + b[d:]])
        a = np.concatenate([a[:d], a[d:] * a[:-d]])
        d *= 2
    return np.moveaxis(b, 0, -3)


_SELECTIVE = {"recurrent": _selective_recurrent, "scan": _selective_scan}


def state_space_dual(
    x: Array,
    log_decay: Array,
    B: Array,
    C: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The state space of Mamba-2: one decay for the whole state, and so a masked product.

    Computes :eq:`eq-state-space-dual` for one head: with :math:`a_t = e^{g_t}`, g the `log_decay`,

    .. math::

        S_t &= a_t S_{t-1} + B_t x_t^\top, \qquad y_t = S_t^\top C_t \\
        Y &= \left(C B^\top \odot \Gamma\right) X \\
        \Gamma_{tj} &= a_t a_{t-1} \cdots a_{j+1} \text{ for } j \le t, \text{ else } 0

    B is the key, C the query and x the value of linear attention.

    Parameters
    ----------
    x : array, shape (..., N, P)
        Inputs, already times their step size Δ.
    log_decay : array, shape (..., N)
        Logarithm of the decay, Δ A: at most 0. -inf forgets everything, exactly.
    B : array, shape (..., N, K)
        Keys.
    C : array, shape (..., N, K)
        Queries.
    form : str, optional
        "recurrent", "parallel" (the masked product, a single chunk), or "chunkwise" (the masked
        product inside a chunk, a state between chunks). None takes "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : array, shape (..., K, P), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    array, shape (..., N, P)
        Outputs in the dtype of the input, with the leading dimensions of all arguments, broadcast
        as in ``matmul``. float16 is computed in float32.
    array, shape (..., K, P)
        With ``return_state=True``: the state in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of x, log_decay, B and the initial state.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, `chunk_size` is no integer,
        `initial_state` has another dtype, or `return_state` is neither True nor False.
    ValueError
        If the shapes do not fit together, `form` is unknown, `chunk_size` is below 1, or an entry
        of `log_decay` is above 0.

    Notes
    -----
    A weight of x that goes past the memory, the D of Mamba, belongs to the module.

    NaN reaches the outputs that depend on it and no other sequence of the batch. "recurrent" keeps
    it from earlier positions; in the other forms it may reach those of its chunk, as 0 * NaN is
    NaN. Positions with x = B = 0 and log_decay = 0 may be appended: they change nothing that is
    remembered.

    References
    ----------
    Dao and Gu (2024), sections 3 and 5, and listing 1 for the chunks.

    Examples
    --------
    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> ones = np.ones((3, 1))
    >>> y, state = state_space_dual(x, np.log(0.5) * np.ones(3), ones, ones, return_state=True)
    >>> y
    array([[8.],
           [8.],
           [6.]])
    >>> state
    array([[6.]])
    """
    _arguments.check_arrays(np.ndarray, x=x, log_decay=log_decay, B=B, C=C)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(x=(x, "N, P"), log_decay=(log_decay, "N"), B=(B, "N, K"), C=(C, "N, K"))
    K, P = B.shape[-1], x.shape[-1]
    _arguments.check_form(form, ("recurrent", "parallel", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _arguments.check_values("log_decay", log_decay, "at most 0", log_decay > 0)
    sizes, leading = {"K": K, "P": P}, {"log_decay": log_decay.shape[:-1], "B": B.shape[:-2]}
    S = initial_memory(initial_state, "x", x, sizes, x=x.shape[:-2], **leading)
    _arguments.check_leading(C=C.shape[:-2], initial_state=S.shape[:-2])

    dtype, (x, log_decay, B, C) = x.dtype, _accumulate(x, log_decay, B, C)
    if form == "recurrent":
        y, S = _dual_recurrent(x, log_decay, B, C, S)
    else:
        chunk_size = max(1, x.shape[-2]) if form == "parallel" else chunk_size
        y, S = _dual_chunkwise(x, log_decay, B, C, S, chunk_size)
    y = y.astype(dtype, copy=False)
    return (y, S) if return_state else y


def _dual_recurrent(x, log_decay, B, C, S):
    y = _empty_outputs(x, C, S)
    for t in range(x.shape[-2]):
        decay = np.exp(log_decay[..., t, None, None])
        S = decay * S + B[..., t, :, None] * x[..., t, None, :]  # (..., K, P)
        y[..., t, :] = (C[..., t, None, :] @ S)[..., 0, :]
    return y, S


def _dual_chunkwise(x, log_decay, B, C, S, chunk_size):
    y = _empty_outputs(x, C, S)
    for start in range(0, x.shape[-2], chunk_size):
        chunk = slice(start, start + chunk_size)
        y[..., chunk, :], S = _dual_masked(
            x[..., chunk, :], log_decay[..., chunk], B[..., chunk, :], C[..., chunk, :], S
        )
    return y, S


def _dual_masked(x, log_decay, B, C, S):
    decays = np.exp(_segment_sums(log_decay))  # (..., L, L): from token j to token t
    from_start = np.exp(np.cumsum(log_decay, axis=-1))[..., :, None]  # (..., L, 1)
    to_end = decays[..., -1, :, None]  # (..., L, 1)
    y = (C @ B.swapaxes(-1, -2) * decays) @ x + from_start * (C @ S)
    S = from_start[..., -1:, :] * S + (to_end * B).swapaxes(-1, -2) @ x
    return y, S


def _segment_sums(g):
    """Entry [t, j] is g_{j+1} + ... + g_t, and -inf where j > t: (..., L) -> (..., L, L).

    Each sum is made of its own terms: differences of one long sum lose digits, and -inf - -inf is
    NaN.
    """
    L = g.shape[-1]
    g = np.broadcast_to(g[..., :, None], (*g.shape, L))  # row t holds g_t
    return np.where(np.tri(L, dtype=bool), np.cumsum(np.tril(g, -1), axis=-2), -np.inf)


def _empty_outputs(x, C, S):
    leading = np.broadcast_shapes(C.shape[:-2], S.shape[:-2])
    return np.empty((*leading, *x.shape[-2:]), x.dtype)
