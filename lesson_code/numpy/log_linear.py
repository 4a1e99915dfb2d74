"""Log-linear attention: a state for each of log₂ N blocks of the past, longer ones further away."""

from typing import Any, NamedTuple

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, tokens


class LogLinearState(NamedTuple):
    """What log-linear attention remembers: the states of its levels, as the last token read them.

    Parameters
    ----------
    S : array, shape (..., levels, D, M)
        The states, 0 where a level is absent.
    position : int, or array of integers that broadcasts to the leading dimensions
        How many tokens were read.
    """

    S: Array
    position: Any  # an integer, or several


@operator(
    "N D, N D, N M, N, N levels -> N M",
    state=LogLinearState._make(("levels D M", "count")),
    reads="q level_weights",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
def log_linear_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    level_weights: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: LogLinearState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, LogLinearState]:
    r"""Log-linear attention: a Fenwick tree of states, each of which a token weighs by itself.

    The past is cut into blocks whose sizes are powers of two, short ones near the token and long
    ones far from it. Each block has a state, and the states fade together (Guo et al., 2025,
    section 3):

    .. math:: o_t = \sum_l \lambda_{tl}\, S_t^{(l)\top} q_t

    For t counted from 0, level 0 is token t itself, and level :math:`l \ge 1` exists where bit
    :math:`l - 1` of t is set: it holds the :math:`2^{l-1}` tokens of its block. So token j is on
    the level that is the place of the highest bit in which t and j differ.

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets everything, exactly.
    level_weights : array, shape (..., N, levels)
        What each level weighs at each token, λ. There are levels for :math:`2^{levels - 1}` tokens,
        those of the initial state counted; more are refused.
    form : str, optional
        "recurrent" (the default), "parallel" (the masked product of all N² pairs) or "chunkwise"
        (the same inside a chunk, and a state for each level between chunks: O(N log N)).

    Examples
    --------
    The level of each earlier token, for 8 tokens of which the last one reads; then what that reads
    with weights of 1, 2, 4 and 8:

    >>> [(7 ^ j).bit_length() for j in range(8)]
    [3, 3, 3, 3, 2, 2, 1, 0]
    >>> ones = np.ones((8, 1))
    >>> weights = ones * np.array([1.0, 2.0, 4.0, 8.0])
    >>> log_linear_attention(ones, ones, ones, np.zeros(8), weights)[-1]
    array([43.])
    """
    S, position = initial_state
    N, levels = level_weights.shape[-2:]
    if np.max(position) + N > 2 ** (levels - 1):
        raise ValueError(
            f"level_weights must have levels for all tokens, got {levels}, which are enough for "
            f"{int(2 ** (levels - 1))}, not for {np.max(position) + N}."
        )
    at, g = np.asarray(position)[..., None], log_decay[..., None]  # (..., 1)
    if form in (None, "recurrent"):
        out = []
        for t, (q_t, k_t, v_t, g_t, w_t) in enumerate(tokens(q, k, v, g, level_weights)):
            S = np.exp(g_t)[..., None, None] * _merged(S, _level(at + t, at + t - 1))
            S[..., 0, :, :] = outer(k_t, v_t)
            out.append(np.einsum("...l,...ldm,...d->...m", w_t, S, q_t))
        return np.stack(out, axis=-2), LogLinearState(S, position + N)
    L, out = N if form == "parallel" else chunk_size, []
    for Q, K, V, G, w in in_chunks(L, q, k, v, g, level_weights):
        now = at + np.arange(Q.shape[-2])  # (..., L)
        levels_between = _level(now[..., :, None], now[..., None, :])  # (..., L, L)
        since = _level(now, at - 1)  # (..., L), to which the older levels up to it have been merged
        through, between = decays_through(G), decays_between(G)[..., 0]
        A = Q @ K.swapaxes(-1, -2) * between * _pick(w, levels_between)
        old = np.maximum(np.arange(levels), since[..., None])  # (..., L, levels)
        reads = np.einsum("...td,...ldm,...tl->...tm", through * Q, S, _pick(w, old))
        out.append(A @ V + reads)
        kept = through[..., -1, :, None, None] * _merged(S, since[..., -1:])
        last = (levels_between[..., -1, :, None] == np.arange(levels)) * between[..., -1, :, None]
        S = kept + np.einsum("...tl,...td,...tm->...ldm", last, K, V)
        at = at + Q.shape[-2]
    return np.concatenate(out, axis=-2), LogLinearState(S, position + N)


def _level(t, j):
    """The place of the highest bit in which two positions differ; -1 counts as 0."""
    return np.frexp(t ^ np.maximum(j, 0))[1]


def _merged(S, level):
    """The states after all up to a level (..., 1) have gone into that one."""
    own = np.arange(S.shape[-3])
    to = np.maximum(own, level)[..., :, None] == own  # (..., levels, levels)
    return np.einsum("...ij,...idm->...jdm", to, S)


def _pick(weights, level):
    """The weights (..., L, levels) of each row at its own levels (..., L, n)."""
    leading = np.broadcast_shapes(weights.shape[:-1], level.shape[:-1])
    weights = np.broadcast_to(weights, (*leading, weights.shape[-1]))
    return np.take_along_axis(weights, np.broadcast_to(level, (*leading, level.shape[-1])), axis=-1)
