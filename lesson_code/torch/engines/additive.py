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
    through = chunks.sums_through(g)
    before = through if bonus is None else chunks.sums_before(g)  # decay from the chunk's start

    writes = (k * chunks.sums_after(g).exp()).mT @ v  # (..., n, C, M)
    decays = through[..., -1, :, None].exp()  # (..., n, C or 1, 1)
    starts, S = chunks.carry(S, decays, writes, torch.mul)

    if bonus is None and g.shape[-1] == 1:
        A = (q @ k.mT * chunks.decays_between(g)).tril(-1)  # (..., n, L, L)
    else:
        A = _earlier_tokens(q, k, g, read_first=bonus is not None)
    return chunks.merge((q * before.exp()) @ starts + A @ v, N) + own, S


def _earlier_tokens(q, k, g, read_first):
    """Weights of a chunk's earlier tokens, below the diagonal: (..., L, L), in log2(L) levels.

    The second half of a chunk sees the first through a matrix product, both sides decayed to the
    middle, which is after every key and before every query: no exponent is above 0. Inside each
    half, the same again.
    """
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], g.shape[:-2])
    q, k, g = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, g))
    L = q.shape[-2]
    if L == 1:
        return q.new_zeros(*leading, 1, 1)
    if L % 2:
        q, k, g = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (q, k, g))
        return _earlier_tokens(q, k, g, read_first)[..., :L, :L]
    q, k, g = (x.unflatten(-2, (2, L // 2)) for x in (q, k, g))
    (_, q_late), (k_early, _), (g_early, g_late) = (x.unbind(-3) for x in (q, k, g))
    to_query = chunks.sums_before(g_late) if read_first else chunks.sums_through(g_late)
    late = (q_late * to_query.exp()) @ (k_early * chunks.sums_after(g_early).exp()).mT
    first, second = _earlier_tokens(q, k, g, read_first).unbind(-3)  # inside the halves
    upper = torch.cat([first, torch.zeros_like(late)], dim=-1)
    return torch.cat([upper, torch.cat([late, second], dim=-1)], dim=-2)
