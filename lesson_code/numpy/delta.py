"""The delta rules: memories that write only what they do not know yet."""

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy._memory import initial_memory
from lesson_code.numpy.gated import _decays_between
from lesson_code.numpy.softmax import _accumulate

Array = NDArray[np.floating]


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The delta rule: write the difference between a value and what its key finds already.

    Computes :eq:`eq-delta-rule`:

    .. math::

        u_t &= \beta_t \left(v_t - S_{t-1}^\top k_t\right) \\
        S_t &= S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    which is :math:`S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top`, one step of
    gradient descent on :math:`\frac12 |v_t - S^\top k_t|^2` with the step size :math:`\beta_t`
    (:eq:`eq-delta-least-squares`). For a key of length 1 and :math:`\beta_t = 1` the memory then
    returns exactly :math:`v_t` at :math:`k_t`.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. They are not scaled.
    k : array, shape (..., N, D)
        Keys. They are not normalized: that the memory stays bounded needs
        :math:`0 \le \beta_t |k_t|^2 \le 2`.
    v : array, shape (..., N, M)
        Values.
    beta : array, shape (..., N)
        Step sizes, not checked.
    form : str, optional
        "recurrent", token by token, or "chunkwise" (:eq:`eq-delta-chunkwise`), which finds all
        :math:`u_t` of a chunk from a unit lower triangular system. None takes the fastest:
        "recurrent" for a single token, else "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : array, shape (..., D, M), optional
        Memory before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    array, shape (..., N, M)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``.
    array, shape (..., D, M)
        With ``return_state=True``: the memory, in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of k, v, beta and the initial state.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, or `chunk_size` is no
        integer.
    ValueError
        If the shapes do not fit together, `form` is unknown, or `chunk_size` is below 1.

    Notes
    -----
    A token with k = 0 and beta = 0 leaves the memory as it is, so that a sequence can be padded.

    NaN stays in the memory from its token on, and reaches no other sequence of the batch. In
    "chunkwise" it may reach earlier positions of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Widrow and Hoff (1960) for the rule; Schlag et al. (2021), section 4.2, for its use as a memory;
    Yang et al. (2024), "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length", section 3, for the chunks.

    Examples
    --------
    The same key is written twice. What it finds is the second value, not the sum:

    >>> k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, S = delta_rule(k, k, v, np.ones(3), return_state=True)
    >>> S
    array([[50., 60.],
           [30., 40.]])
    """
    S = _check(q, k, v, form, chunk_size, initial_state, return_state, beta=beta)
    dtype = q.dtype
    q, *written = _accumulate(q, k, v, beta[..., None])
    k, v, beta = _with_leading_dimensions_of(S, *written)
    if form == "recurrent" or (form is None and k.shape[-2] == 1):
        out, S = _recurrent(q, k, v, beta, S)
    else:
        out, S = _chunkwise(q, k, v, beta, S, chunk_size)
    out = out.astype(dtype, copy=False)
    return (out, S) if return_state else out


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The gated delta rule: forget first, then correct what is left.

    Computes :eq:`eq-gated-delta-rule`, with the decay :math:`\alpha_t = e^{g_t}`:

    .. math::

        u_t &= \beta_t \left(v_t - (\alpha_t S_{t-1})^\top k_t\right) \\
        S_t &= \alpha_t S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    which is :math:`S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top`.
    The error is that of the memory *after* its decay, so that a key of length 1 with
    :math:`\beta_t = 1` finds exactly its value, whatever the decay.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. They are not scaled.
    k : array, shape (..., N, D)
        Keys. They are not normalized: that the memory stays bounded needs
        :math:`0 \le \beta_t |k_t|^2 \le 2`.
    v : array, shape (..., N, M)
        Values.
    beta : array, shape (..., N)
        Step sizes, not checked.
    log_decay : array, shape (..., N)
        Logarithms :math:`g_t` of the decays, at most 0; -inf forgets everything, exactly.
    form : str, optional
        "recurrent", token by token, or "chunkwise" (:eq:`eq-gated-delta-chunkwise`). None takes the
        fastest: "recurrent" for a single token, else "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : array, shape (..., D, M), optional
        Memory before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    array, shape (..., N, M)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``.
    array, shape (..., D, M)
        With ``return_state=True``: the memory, in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of k, v, beta, log_decay and the initial
        state.

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, the dtypes differ, or `chunk_size` is no
        integer.
    ValueError
        If the shapes do not fit together, `log_decay` is above 0 somewhere, `form` is unknown, or
        `chunk_size` is below 1.

    Notes
    -----
    With a decay log of 0 this is `delta_rule`. A token with k = 0, beta = 0 and a decay log of 0
    leaves the memory as it is, so that a sequence can be padded.

    NaN stays in the memory from its token on, and reaches no other sequence of the batch. In
    "chunkwise" it may reach earlier positions of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Yang et al. (2025), "Gated Delta Networks", section 3.

    Examples
    --------
    The second token halves what is stored before it looks for its error:

    >>> k = np.array([[1.0, 0.0], [1.0, 1.0]])
    >>> v = np.array([[8.0], [10.0]])
    >>> beta, log_decay = np.array([1.0, 0.5]), np.log([1.0, 0.5])
    >>> out, S = gated_delta_rule(k, k, v, beta, log_decay, return_state=True)
    >>> S
    array([[7.],
           [3.]])
    """
    by_token = {"beta": beta, "log_decay": log_decay}
    S = _check(q, k, v, form, chunk_size, initial_state, return_state, **by_token)
    dtype = q.dtype
    q, *written = _accumulate(q, k, v, beta[..., None], log_decay[..., None])
    k, v, beta, g = _with_leading_dimensions_of(S, *written)
    if form == "recurrent" or (form is None and k.shape[-2] == 1):
        out, S = _gated_recurrent(q, k, v, beta, g, S)
    else:
        out, S = _gated_chunkwise(q, k, v, beta, g, S, chunk_size)
    out = out.astype(dtype, copy=False)
    return (out, S) if return_state else out


# The forms. Each takes q, k (..., N, D), v (..., N, M), beta and g (..., N, 1) and the memory S
# (..., D, M) before the first token, and returns outputs (..., N, M) and S after the last one.


def _recurrent(q, k, v, beta, S):
    out = _empty_outputs(q, v)
    for t in range(k.shape[-2]):
        q_t, k_t, v_t, beta_t = (x[..., t, None, :] for x in (q, k, v, beta))  # (..., 1, ·), rows
        u_t = beta_t * (v_t - k_t @ S)
        S = S + _transposed(k_t) @ u_t
        out[..., t, None, :] = q_t @ S
    return out, S


def _gated_recurrent(q, k, v, beta, g, S):
    out = _empty_outputs(q, v)
    for t in range(k.shape[-2]):
        q_t, k_t, v_t, beta_t, g_t = (x[..., t, None, :] for x in (q, k, v, beta, g))
        S = np.exp(g_t) * S
        u_t = beta_t * (v_t - k_t @ S)
        S = S + _transposed(k_t) @ u_t
        out[..., t, None, :] = q_t @ S
    return out, S


def _chunkwise(q, k, v, beta, S, chunk_size):
    out = _empty_outputs(q, v)
    for start in range(0, k.shape[-2], chunk_size):
        chunk = slice(start, start + chunk_size)
        Q, K, V, b = (x[..., chunk, :] for x in (q, k, v, beta))  # (..., L, ·)
        A = np.tril(b * (K @ _transposed(K)), -1)  # (..., L, L)
        U = _solve(A, b * V)  # (..., L, M), without any state
        W = _solve(A, b * K)  # (..., L, D)
        u = U - W @ S
        out[..., chunk, :] = Q @ S + np.tril(Q @ _transposed(K)) @ u
        S = S + _transposed(K) @ u
    return out, S


def _gated_chunkwise(q, k, v, beta, g, S, chunk_size):
    out = _empty_outputs(q, v)
    for start in range(0, k.shape[-2], chunk_size):
        chunk = slice(start, start + chunk_size)
        Q, K, V, b, g_chunk = (x[..., chunk, :] for x in (q, k, v, beta, g))
        decay = np.exp(np.cumsum(g_chunk, axis=-2))  # (..., L, 1), from the chunk's start
        between = _decays_between(g_chunk)[..., 0]  # (..., L, L)
        A = np.tril(b * (K @ _transposed(K)) * between, -1)
        U = _solve(A, b * V)
        W = _solve(A, b * decay * K)
        u = U - W @ S
        out[..., chunk, :] = decay * (Q @ S) + (Q @ _transposed(K) * between) @ u
        to_end = between[..., -1, :, None]  # (..., L, 1)
        S = decay[..., -1:, :] * S + _transposed(to_end * K) @ u
    return out, S


def _solve(A, b):
    """The x of (I + A) x = b, where A is 0 on and above its diagonal: row after row."""
    x = b.copy()
    for t in range(1, A.shape[-1]):
        x[..., t, None, :] -= A[..., t, None, :t] @ x[..., :t, :]
    return x


def _transposed(x):
    return x.swapaxes(-1, -2)


def _empty_outputs(q, v):
    leading = np.broadcast_shapes(q.shape[:-2], v.shape[:-2])
    return np.empty((*leading, *v.shape[-2:]), v.dtype)


def _with_leading_dimensions_of(S, *arrays):
    return [np.broadcast_to(x, (*S.shape[:-2], *x.shape[-2:])) for x in arrays]


def _check(q, k, v, form, chunk_size, initial_state, return_state, **by_token):
    """Refuse what does not fit together; return the memory before the first token."""
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v, **by_token)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_form(form, ("recurrent", "chunkwise"))
    _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _arguments.check_queries_keys_values(q, k, v)
    (N, D), M = k.shape[-2:], v.shape[-1]
    _arguments.check_same("q", q.shape[-2], "the length of k", N)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2]}
    for name, array in by_token.items():
        _arguments.check_rank(name, array, "N")
        _arguments.check_same(name, array.shape[-1], "the length of k", N)
        leading[name] = array.shape[:-1]
    if "log_decay" in by_token:
        log_decay = by_token["log_decay"]
        _arguments.check_values("log_decay", log_decay, "at most 0", log_decay > 0)
    S = initial_memory(initial_state, "k", k, {"D": D, "M": M}, **leading)
    _arguments.check_leading(q=q.shape[:-2], **leading, initial_state=S.shape[:-2])
    return S
