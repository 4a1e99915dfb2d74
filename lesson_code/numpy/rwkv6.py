"""RWKV-6: a gated memory that is read before it is written, with a bonus for the current token."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N D, N D, N M, N D, D -> N M",
    state="D M",
    reads="r bonus",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
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

    Computes :eq:`eq-rwkv6` (Peng et al., 2024, section 4), with :math:`\alpha_t = e^{g_t}` and the
    bonus u. The memory is read before it is written: a write decays for the first time after the
    next token has been read.

    .. math::

        o_t &= (S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top r_t \\
        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top

    Parameters
    ----------
    r, k : array, shape (..., N, D)
        Receptances, which are the queries, and keys.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N, D)
        Logarithms g of the decays, in [-inf, 0]. The same at every position, they make RWKV-5.
    bonus : array, shape (..., D)
        Weight u of the current token in each channel, such as (H, D) for H heads.
    form : str, optional
        "recurrent" (the default) or "chunkwise" (:eq:`eq-rwkv6-decay`: all pairs of a chunk, a
        state between chunks).

    Examples
    --------
    Everything is forgotten but what came last, and a token counts twice when it is the current one:

    >>> r = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> rwkv6(r, k, v, np.full((3, 2), -np.inf), np.array([2.0, 2.0]))
    array([[ 20.,  40.],
           [ 60.,  80.],
           [230., 280.]])
    """
    if form == "chunkwise":
        return _chunkwise(r, k, v, log_decay, bonus, initial_state, chunk_size)
    S, out = initial_state, []
    for r_t, k_t, v_t, g_t in tokens(r, k, v, log_decay):
        write = outer(k_t, v_t)
        out.append(read(S + bonus[..., :, None] * write, r_t))
        S = np.exp(g_t)[..., :, None] * S + write
    return np.stack(out, axis=-2), S


def _chunkwise(r, k, v, g, u, S, chunk_size):
    out = []
    for R, K, V, G in in_chunks(chunk_size, r, k, v, g):
        through, between = decays_through(G), decays_between(G)  # (..., L, D), (..., L, L, D)
        # What a token reads has decayed through the token before it, and the first reads S itself.
        read_through = np.insert(through[..., :-1, :], 0, 1, axis=-2)
        read_between = np.insert(between[..., :-1, :, :], 0, 0, axis=-3)
        A = (R[..., :, None, :] * read_between * K[..., None, :, :]).sum(axis=-1)  # (..., L, L)
        own = (R * u[..., None, :] * K).sum(axis=-1, keepdims=True)  # (..., L, 1)
        out.append((R * read_through) @ S + A @ V + own * V)
        to_end = between[..., -1, :, :]  # (..., L, D)
        S = through[..., -1, :, None] * S + (K * to_end).swapaxes(-1, -2) @ V
    return np.concatenate(out, axis=-2), S
