r"""A memory that decays and adds, in recurrent and in chunkwise form.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

With a bonus u it is read before it is written, and the current token counts u times:

    o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t

Here q and k are (..., N, C), v is (..., N, M), the logarithm g of the decay is (..., N, C), or
(..., N, 1) for one decay for all channels; u is (..., C) and S (..., C, M), with the leading
dimensions that k, v, g and S share. All have the accumulation dtype. N zeros of k, v and g leave S
as it is.
"""

import torch
from torch import Tensor

from lesson_code.torch.engines import chunks


def additive(
    form: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    S: Tensor,
    bonus: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, M) and the last state (..., C, M).

    The form is "recurrent", "chunkwise", or "parallel", which is a single chunk. None takes
    "recurrent" for a single token, else "chunkwise".
    """
    N = k.shape[-2]
    if form == "recurrent" or N == 0 or (form is None and N == 1):
        return _recurrent(q, k, v, log_decay, S, bonus)
    chunk_size = N if form == "parallel" else min(chunk_size, N)
    return _chunkwise(q, k, v, log_decay, S, bonus, chunk_size)


def _recurrent(q, k, v, log_decay, S, bonus):
    outputs = []
    # Unbound at once: the gradient of a slice is as long as the sequence, for each of N tokens.
    tokens = (x.unbind(-2) for x in (q, k, v, log_decay.exp()))
    for q_t, k_t, v_t, decay_t in zip(*tokens, strict=True):
        before, write = S, k_t[..., :, None] * v_t[..., None, :]  # (..., C, M)
        S = decay_t[..., :, None] * S + write
        read = S if bonus is None else before + bonus[..., :, None] * write
        outputs.append(q_t[..., None, :] @ read)
    if not outputs:
        nothing = q if bonus is None else q * bonus[..., None, :]  # with all leading dimensions
        return nothing @ S, S
    return torch.cat(outputs, dim=-2), S


def _chunkwise(q, k, v, log_decay, S, bonus, chunk_size):
    # A token weighs its own value by q·k, or by q·diag(u)k; the rest is about earlier tokens.
    own = (q * k if bonus is None else q * bonus[..., None, :] * k).sum(dim=-1, keepdim=True) * v
    N = k.shape[-2]
    q, k, v, g = (chunks.split(x, chunk_size) for x in (q, k, v, log_decay))  # (..., n, L, ·)
    if bonus is None and g.shape[-1] == 1:
        A = (q @ k.mT * chunks.decays_between(g)).tril(-1)  # (..., n, L, L)
        through = chunks.sums_through(g)
        q, k = q * through.exp(), k * chunks.sums_after(g).exp()
        decays = through[..., -1:, :].exp()  # (..., n, 1, 1)
    else:
        A, q, k, decays = _by_halves(q, k, g, read_first=bonus is not None)
    starts, S = chunks.carry(S, decays.mT, k.mT @ v, torch.mul)
    return chunks.merge(q @ starts + A @ v, N) + own, S


def _by_halves(q, k, g, read_first):
    """Weights A (..., L, L) of a chunk's earlier tokens, and what leads into and out of the chunk:
    q decayed from its start, k decayed to its end, and the decays (..., 1, C) from start to end.

    From blocks of one token to blocks of two, of four, and so on. The second half of a block sees
    the first through a matrix product, both sides decayed to the middle, which is after every key
    and before every query: no exponent is above 0.
    """
    L = q.shape[-2]
    size = 1 << (L - 1).bit_length()  # a power of two
    q, k, g = (chunks.pad(x, size) for x in (q, k, g))
    shared = torch.broadcast_shapes(k.shape[:-1], g.shape[:-1])
    k, g = k.expand(*shared, -1), g.expand(*shared, -1)
    q = (q if read_first else q * g.exp()).expand(*torch.broadcast_shapes(q.shape[:-1], shared), -1)
    q, k, g = (x[..., None, :] for x in (q, k, g))  # blocks of one: (..., size, 1, C)
    A = torch.zeros_like(q[..., :1])
    while A.shape[-3] > 1:
        halves = (x.unflatten(-3, (-1, 2)).unbind(-3) for x in (q, k, g, A))
        (q, q_late), (k, k_late), (g, g_late), (A, A_late) = halves
        late = q_late @ k.mT
        A = torch.cat([A, torch.zeros_like(late)], dim=-1)
        A = torch.cat([A, torch.cat([late, A_late], dim=-1)], dim=-2)
        q = torch.cat([q, q_late * g.exp()], dim=-2)
        k = torch.cat([k * g_late.exp(), k_late], dim=-2)
        g = g + g_late  # of a block: (..., 1, C)
    A, q, k, g = (x[..., 0, :, :] for x in (A, q, k, g))
    return A[..., :L, :L], q[..., :L, :], k[..., :L, :], g.exp()
