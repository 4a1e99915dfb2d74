"""Gated linear attention: each channel of the memory forgets at a rate that each token sets."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N D, N D, N M, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
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

    Computes :eq:`eq-gla` (Yang et al., 2024, section 4), with :math:`\alpha_t = e^{g_t}`:

    .. math::

        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries, which are not scaled, and keys.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N, D)
        Logarithms g of the gates, in [-inf, 0]; -inf empties a row of the memory, exactly.
    form : str, optional
        "recurrent" (the default), "parallel" (:eq:`eq-gla-parallel`, N·N·D decays) or "chunkwise"
        (:eq:`eq-gla-chunkwise`, "parallel" inside a chunk).

    Examples
    --------
    The first channel keeps everything. The second keeps half, then nothing:

    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> log_decay = np.array([[0.0, 0.0], [0.0, np.log(0.5)], [0.0, -np.inf]])
    >>> gated_linear_attention(q, k, v, log_decay)
    array([[ 10.,  20.],
           [ 30.,  40.],
           [110., 140.]])
    """
    if form in ("parallel", "chunkwise"):
        return _chunkwise(q, k, v, log_decay, initial_state, form, chunk_size)
    S, out = initial_state, []
    for q_t, k_t, v_t, g_t in tokens(q, k, v, log_decay):
        S = np.exp(g_t)[..., :, None] * S + outer(k_t, v_t)
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), S


def _chunkwise(q, k, v, g, S, form, chunk_size):
    out = []
    L = k.shape[-2] if form == "parallel" else chunk_size
    for Q, K, V, G in in_chunks(L, q, k, v, g):
        through, between = decays_through(G), decays_between(G)  # (..., L, D), (..., L, L, D)
        A = (Q[..., :, None, :] * between * K[..., None, :, :]).sum(axis=-1)  # (..., L, L)
        out.append((Q * through) @ S + A @ V)
        to_end = between[..., -1, :, :]  # (..., L, D)
        S = through[..., -1, :, None] * S + (K * to_end).swapaxes(-1, -2) @ V
    return np.concatenate(out, axis=-2), S
