"""The delta rules: memories that write only what they do not know yet."""

import numpy as np

from lesson_code.numpy import generalized_delta
from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks, solve
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


@operator(
    "N D, N D, N M, N, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def kimi_delta_attention(
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
    r"""Kimi delta attention: each channel forgets at its own rate, then the memory is corrected.

    Computes :eq:`eq-kimi-delta`, the gated delta rule with the gates of
    :func:`gated_linear_attention` (Kimi Team, 2025, section
    3), :math:`\alpha_t = e^{g_t}`. The error is that of the memory after its decay:

    .. math::

        S'_t &= \operatorname{diag}(\alpha_t) S_{t-1} \\
        S_t &= S'_t + \beta_t k_t \left(v_t - S_t'^\top k_t\right)^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k, v, beta
        As in :func:`delta_rule`.
    log_decay : array, shape (..., N, D)
        Logarithms g of the decays, in [-inf, 0]; -inf empties a row of the memory, exactly.
    form : str, optional
        "recurrent", the default, or "chunkwise", which :func:`generalized_delta_rule` explains.

    Examples
    --------
    The second token keeps the first channel and halves the other before it looks for its error:

    >>> k = np.array([[1.0, 1.0], [0.0, 1.0]])
    >>> v = np.array([[8.0], [10.0]])
    >>> log_decay = np.log([[1.0, 1.0], [1.0, 0.5]])
    >>> out, S = kimi_delta_attention(k, k, v, np.array([1.0, 0.5]), log_decay, return_state=True)
    >>> S
    array([[8.],
           [7.]])
    """
    if form == "chunkwise":
        k_beta, decay = beta[..., None] * k, np.exp(log_decay)
        return generalized_delta.chunkwise(
            q, k_beta, v, decay * k, -k_beta, log_decay, initial_state, chunk_size
        )
    S, out = initial_state, []
    for q_t, k_t, v_t, beta_t, g_t in tokens(q, k, v, beta[..., None], log_decay):
        S = np.exp(g_t)[..., :, None] * S
        u_t = beta_t * (v_t - read(S, k_t))
        S = S + outer(k_t, u_t)
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), S


@operator(
    "N D, N J D, N J M, N J, N -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def gated_delta_product(
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
    r"""Gated DeltaProduct: a token forgets once, then corrects the memory J times, then reads.

    Computes :eq:`eq-delta-product` for j = 1 to J (Siems et al., 2025, section 3), with
    :math:`\alpha_t = e^{g_t}`,

    .. math::

        S_{t,0} &= \alpha_t S_{t-1,J} \\
        S_{t,j} &= S_{t,j-1} + \beta_{tj} k_{tj} \left(v_{tj} - S_{t,j-1}^\top k_{tj}\right)^\top \\
        o_t &= S_{t,J}^\top q_t

    so that what was stored passes through a product of J transitions, each a reflection where
    β|k|² = 2. With J = 1 it is :func:`gated_delta_rule`.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries, not scaled.
    k : array, shape (..., N, J, D)
        J keys of each token, not normalized: for a bounded memory β|k|² is at most 2.
    v : array, shape (..., N, J, M)
        A value for each of them.
    beta : array, shape (..., N, J)
        Step sizes; any number.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets everything, exactly.
    form : str, optional
        "recurrent", or "chunkwise", the default for more than one correction in all. A chunk has
        `chunk_size` corrections.

    Examples
    --------
    Two reflections of one token turn what is stored by a quarter:

    >>> k = np.array([[[1.0, 0.0], [np.sqrt(0.5), np.sqrt(0.5)]]])
    >>> v, beta, log_decay = np.zeros((1, 2, 1)), np.full((1, 2), 2.0), np.zeros(1)
    >>> S = np.array([[0.0], [1.0]])
    >>> gated_delta_product(k[:, 0], k, v, beta, log_decay, initial_state=S).round(6)
    array([[-1.]])
    """
    N, J = beta.shape[-2:]
    if J and (form == "chunkwise" or (form is None and N * J > 1)):
        q, k, v, beta, g = _steps(q, k, v, beta, log_decay)
        out, S = _chunkwise(q, k, v, beta, g, initial_state, chunk_size)
        return out[..., J - 1 :: J, :], S
    S, out = initial_state, []
    for t in range(N):
        S = np.exp(log_decay[..., t, None, None]) * S
        for j in range(J):
            k_tj, v_tj, beta_tj = k[..., t, j, :], v[..., t, j, :], beta[..., t, j, None]
            u_tj = beta_tj * (v_tj - read(S, k_tj))
            S = S + outer(k_tj, u_tj)
        out.append(read(S, q[..., t, :]))
    return np.stack(out, axis=-2), S


def _chunkwise(q, k, v, beta, g, S, chunk_size):
    out = []
    for Q, K, V, b, G in in_chunks(chunk_size, q, k, v, beta[..., None], g[..., None]):
        through, between = decays_through(G), decays_between(G)[..., 0]  # (..., L, 1), (..., L, L)
        K_T = K.swapaxes(-1, -2)
        A = np.tril(b * (K @ K_T) * between, -1)
        U = solve(A, b * V)  # (..., L, M), what would be written into an empty memory
        W = solve(A, b * through * K)  # (..., L, D), what each finds of the memory that there is
        u = U - W @ S
        out.append(through * (Q @ S) + (Q @ K_T * between) @ u)
        to_end = between[..., -1, None, :]  # (..., 1, L)
        S = through[..., -1:, :] * S + (K_T * to_end) @ u
    return np.concatenate(out, axis=-2), S


def _steps(q, k, v, beta, log_decay):
    """The gated delta rule of N·J tokens that corrects J times for each: only the first decays."""
    N, J = beta.shape[-2:]
    g = np.where(np.arange(J) == 0, log_decay[..., None], 0)
    return (
        np.repeat(q, J, axis=-2),
        *(x.reshape(*x.shape[:-3], N * J, x.shape[-1]) for x in (k, v)),
        *(x.reshape(*x.shape[:-2], N * J) for x in (beta, g)),
    )
