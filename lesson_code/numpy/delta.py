"""The delta rules: memories that write only what they do not know yet."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator("N D, N D, N M, N -> N M", state="D M", reads="q", forms=("recurrent", "chunkwise"))
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

    Computes :eq:`eq-delta-rule` (Widrow and Hoff, 1960; as a memory Schlag et al., 2021, section
    4.2), one step of gradient descent on :math:`\frac12 |v_t - S^\top k_t|^2`
    (:eq:`eq-delta-least-squares`):

    .. math::

        u_t &= \beta_t \left(v_t - S_{t-1}^\top k_t\right) \\
        S_t &= S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries, not scaled, and keys, not normalized: for a bounded memory β|k|² is at most 2.
    v : array, shape (..., N, M)
        Values.
    beta : array, shape (..., N)
        Step sizes; any number.
    form : str, optional
        "recurrent", the default for a single token, or "chunkwise" (:eq:`eq-delta-chunkwise`; Yang
        et al., 2024, section 3), for more.

    Examples
    --------
    The same key is written twice. What it finds is the second value, not the sum:

    >>> k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> delta_rule(k, k, v, np.ones(3))[-1]
    array([50., 60.])
    """
    if form == "chunkwise" or (form is None and k.shape[-2] > 1):
        return _chunkwise(q, k, v, beta, np.zeros_like(beta), initial_state, chunk_size)
    S, out = initial_state, []
    for q_t, k_t, v_t, beta_t in tokens(q, k, v, beta[..., None]):
        u_t = beta_t * (v_t - read(S, k_t))
        S = S + outer(k_t, u_t)
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), S


@operator(
    "N D, N D, N M, N, N -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
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

    Computes :eq:`eq-gated-delta-rule` (Yang et al., 2025, section 3), with
    :math:`\alpha_t = e^{g_t}`. The error is that of the memory after its decay:

    .. math::

        u_t &= \beta_t \left(v_t - (\alpha_t S_{t-1})^\top k_t\right) \\
        S_t &= \alpha_t S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k, v, beta
        As in :func:`delta_rule`.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets everything, exactly.
    form : str, optional
        "recurrent", the default for a single token, or "chunkwise"
        (:eq:`eq-gated-delta-chunkwise`), for more.

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
    if form == "chunkwise" or (form is None and k.shape[-2] > 1):
        return _chunkwise(q, k, v, beta, log_decay, initial_state, chunk_size)
    S, out = initial_state, []
    for q_t, k_t, v_t, beta_t, g_t in tokens(q, k, v, beta[..., None], log_decay[..., None]):
        S = np.exp(g_t)[..., None] * S
        u_t = beta_t * (v_t - read(S, k_t))
        S = S + outer(k_t, u_t)
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), S


def _chunkwise(q, k, v, beta, g, S, chunk_size):
    out = []
    for Q, K, V, b, G in in_chunks(chunk_size, q, k, v, beta[..., None], g[..., None]):
        through, between = decays_through(G), decays_between(G)[..., 0]  # (..., L, 1), (..., L, L)
        K_T = K.swapaxes(-1, -2)
        A = np.tril(b * (K @ K_T) * between, -1)
        U = _solve(A, b * V)  # (..., L, M), what would be written into an empty memory
        W = _solve(A, b * through * K)  # (..., L, D), what each finds of the memory that there is
        u = U - W @ S
        out.append(through * (Q @ S) + (Q @ K_T * between) @ u)
        to_end = between[..., -1, None, :]  # (..., 1, L)
        S = through[..., -1:, :] * S + (K_T * to_end) @ u
    return np.concatenate(out, axis=-2), S


def _solve(A, b):
    """The x of (I + A) x = b, where A is 0 on and above its diagonal: row after row."""
    leading = np.broadcast_shapes(A.shape[:-2], b.shape[:-2])
    x = np.array(np.broadcast_to(b, (*leading, *b.shape[-2:])))
    for t in range(1, A.shape[-1]):
        x[..., t, None, :] -= A[..., t, None, :t] @ x[..., :t, :]
    return x
