r"""A memory that decays and corrects, in recurrent and in chunkwise form.

    u_t = β_t (v_t - (a_t S_{t-1})ᵀ k_t)        S_t = a_t S_{t-1} + k_t u_tᵀ        o_t = S_tᵀ q_t

with a_t = exp(g_t): the memory decays, is read at k_t, and the error of what it says is written.
Inside a chunk that begins with S, with Γ_tj = exp(g_{j+1} + ... + g_t) and c_t = exp(g_1 + ... +
g_t), the written errors u depend on each other through a unit lower triangular system,

    (I + tril(diag(β) (K Kᵀ ∘ Γ), -1)) u = diag(β) (V - diag(c) K S)

so u = U - W S, where U and W solve it for diag(β) V and diag(β c) K: no state is needed for that,
and all chunks are solved at once (Yang et al., 2024, for β alone; 2025, with decay).

Here q and k are (..., N, C), v is (..., N, M), β and g are (..., N, 1), and S is (..., C, M), with
the leading dimensions that k, v, β, g and S share. All have the accumulation dtype.
"""

from functools import partial

import torch
from torch import Tensor

from lesson_code.torch.engines import chunks


def delta(
    form: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    S: Tensor,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, M) and the last state (..., C, M), by "recurrent" or "chunkwise".

    None takes "recurrent" for a single token, else "chunkwise".
    """
    N = k.shape[-2]
    if form == "recurrent" or N == 0 or (form is None and N == 1):
        return _recurrent(q, k, v, beta, log_decay, S)
    return _chunkwise(q, k, v, beta, log_decay, S, min(chunk_size, N))


def _recurrent(q, k, v, beta, log_decay, S):
    outputs = []
    # Unbound at once: the gradient of a slice is as long as the sequence, for each of N tokens.
    tokens = (x[..., None, :].unbind(-3) for x in (q, k, v, beta, log_decay.exp()))
    for q_t, k_t, v_t, beta_t, decay_t in zip(*tokens, strict=True):  # (..., 1, ·)
        S = decay_t * S
        S = S + k_t.mT @ (beta_t * (v_t - k_t @ S))
        outputs.append(q_t @ S)
    return torch.cat(outputs, dim=-2) if outputs else q @ S, S


def _chunkwise(q, k, v, beta, log_decay, S, chunk_size):
    N, C = k.shape[-2:]
    q, k, v, beta, g = (chunks.split(x, chunk_size) for x in (q, k, v, beta, log_decay))
    decay = chunks.sums_through(g).exp()  # (..., n, L, 1), from the chunk's start
    between = chunks.decays_between(g)  # (..., n, L, L)

    system = (beta * (k @ k.mT) * between).tril(-1)  # and ones on the diagonal
    solve = partial(torch.linalg.solve_triangular, system, upper=False, unitriangular=True)
    U, W = solve(beta * v), solve(beta * decay * k)  # (..., n, L, M) and (..., n, L, C)

    k_end = k * chunks.sums_after(g).exp()  # decayed to the end of the chunk
    identity = torch.eye(C, dtype=k.dtype, device=k.device)
    transitions = decay[..., -1:, :] * identity - k_end.mT @ W  # (..., n, C, C)
    starts, S = chunks.carry(S, transitions, k_end.mT @ U, torch.matmul)

    u = U - W @ starts
    out = (q * decay) @ starts + (q @ k.mT * between) @ u
    return chunks.merge(out, N), S
