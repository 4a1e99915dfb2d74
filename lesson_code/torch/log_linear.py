"""Log-linear attention: a state for each of log₂ N blocks of the past, longer ones further away."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lesson_code.torch.operator import operator


class LogLinearState(NamedTuple):
    """What log-linear attention remembers: the states of its levels, as the last token read them.

    As :class:`lesson_code.numpy.LogLinearState`.

    Parameters
    ----------
    S : tensor, shape (..., levels, D, M)
        The states, 0 where a level is absent.
    position : int, or tensor of integers that broadcasts to the leading dimensions
        How many tokens were read.
    """

    S: Tensor
    position: Any  # an integer, or several


@operator(
    "N D, N D, N M, N, N levels -> N M",
    state=LogLinearState._make(("levels D M", "count")),
    reads="q level_weights",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    level_weights: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: LogLinearState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LogLinearState]:
    r"""Log-linear attention: a Fenwick tree of states, each of which a token weighs by itself.

    As :func:`lesson_code.numpy.log_linear_attention`. "chunkwise" is the default for more than one
    token.

    Examples
    --------
    The last of 8 tokens reads 1, 1, 2 and 4 of them, which weigh 1, 2, 4 and 8:

    >>> ones = torch.ones(8, 1)
    >>> weights = ones * torch.tensor([1.0, 2.0, 4.0, 8.0])
    >>> log_linear_attention(ones, ones, ones, torch.zeros(8), weights)[-1]
    tensor([43.])
    """
    S, position = initial_state
    N, levels = level_weights.shape[-2:]
    read = position + N
    _check_room(levels, read)
    at = torch.as_tensor(position, device=q.device)[..., None]  # (..., 1)
    g, ends = log_decay[..., None], 2 ** torch.arange(levels, device=q.device)
    own, out = torch.arange(levels, device=q.device), []

    def level(t, j):
        """The place of the highest bit in which two positions differ; -1 counts as 0."""
        return torch.bucketize(t ^ j.clamp(min=0), ends, right=True)

    def merged(S, level):
        """The states after all up to a level (..., 1) have gone into that one."""
        to = torch.maximum(own, level)[..., :, None] == own  # (..., levels, levels)
        return torch.einsum("...ij,...idm->...jdm", to.to(S.dtype), S)

    def pick(weights, level):
        """The weights (..., L, levels) of each row at its own levels (..., L, n)."""
        leading = torch.broadcast_shapes(weights.shape[:-1], level.shape[:-1])
        return weights.expand(*leading, -1).gather(-1, level.expand(*leading, -1))

    if form == "recurrent" or (form is None and N == 1):
        rows = (x.unbind(-2) for x in (q, k, v, g.exp(), level_weights))
        for t, (q_t, k_t, v_t, alpha_t, w_t) in enumerate(zip(*rows, strict=True)):
            S = alpha_t[..., None, None] * merged(S, level(at + t, at + t - 1))
            write = (k_t[..., :, None] * v_t[..., None, :])[..., None, :, :]
            S = torch.cat([write.expand_as(S[..., :1, :, :]), S[..., 1:, :, :]], dim=-3)
            out.append(torch.einsum("...l,...ldm,...d->...m", w_t, S, q_t))
        return torch.stack(out, dim=-2), LogLinearState(S, read)
    L = N if form == "parallel" else chunk_size
    for Q, K, V, G, w in zip(*(x.split(L, -2) for x in (q, k, v, g, level_weights)), strict=True):
        now = at + torch.arange(Q.shape[-2], device=q.device)  # (..., L)
        levels_between = level(now[..., :, None], now[..., None, :])  # (..., L, L)
        since = level(now, at - 1)  # (..., L), to which the older levels up to it have been merged
        through = G.cumsum(dim=-2).exp()  # (..., L, 1)
        between = G.expand(*G.shape[:-1], G.shape[-2]).tril(-1).cumsum(dim=-2).exp().tril()
        A = Q @ K.mT * between * pick(w, levels_between)
        old = pick(w, torch.maximum(own, since[..., None]))
        reads = torch.einsum("...td,...ldm,...tl->...tm", through * Q, S, old)
        out.append(A @ V + reads)
        last = (levels_between[..., -1, :, None] == own) * between[..., -1, :, None]
        writes = torch.einsum("...tl,...td,...tm->...ldm", last, K, V)
        S = through[..., -1, :, None, None] * merged(S, since[..., -1:]) + writes
        at = at + Q.shape[-2]
    return torch.cat(out, dim=-2), LogLinearState(S, read)


def _check_room(levels, read):
    if not isinstance(read, int):
        if torch.compiler.is_compiling() or not read.numel():
            return
        read = int(read.max())
    if read > 2 ** (levels - 1):
        raise ValueError(
            f"level_weights must have levels for all tokens, got {levels}, which are enough for "
            f"{int(2 ** (levels - 1))}, not for {read}."
        )
