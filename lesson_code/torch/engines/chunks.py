"""What `additive` and `delta` do with chunks and with logarithms of decays.

Only sums of decay logs over a segment are ever formed, never a difference of two cumulative sums:
a sum of terms ≤ 0 keeps its digits, its exp cannot overflow, and -inf stays -inf.
"""

import torch
from torch import Tensor


def split(x: Tensor, chunk_size: int) -> Tensor:
    """(..., N, C) -> (..., n, L, C), padded with zeros, which change nothing that is remembered."""
    n = -(-x.shape[-2] // chunk_size)
    return pad(x, n * chunk_size).unflatten(-2, (n, chunk_size))


def pad(x: Tensor, N: int) -> Tensor:
    """The rows of x, followed by zeros up to N rows."""
    missing = N - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x  # else a copy


def merge(x: Tensor, N: int) -> Tensor:
    """(..., n, L, C) -> (..., N, C), without what was padded."""
    return x.flatten(-3, -2)[..., :N, :]


def sums_through(g: Tensor) -> Tensor:
    """Row t is g_1 + ... + g_t: (..., L, C) -> (..., L, C)."""
    return g.cumsum(dim=-2)


def sums_before(g: Tensor) -> Tensor:
    """Row t is g_1 + ... + g_{t-1}."""
    return torch.nn.functional.pad(g[..., :-1, :], (0, 0, 1, 0)).cumsum(dim=-2)


def sums_after(g: Tensor) -> Tensor:
    """Row j is g_{j+1} + ... + g_L."""
    return sums_before(g.flip(-2)).flip(-2)


def decays_between(g: Tensor) -> Tensor:
    """Entry [t, j] is exp(g_{j+1} + ... + g_t), 0 where j > t: (..., L, 1) -> (..., L, L)."""
    L = g.shape[-2]
    sums = g.expand(*g.shape[:-1], L).tril(-1).cumsum(dim=-2)  # row i of column j is g_i if i > j
    future = torch.ones(L, L, dtype=torch.bool, device=g.device).triu(1)
    return sums.masked_fill(future, -torch.inf).exp()


def carry(S: Tensor, transitions: Tensor, writes: Tensor, apply) -> tuple[Tensor, Tensor]:
    """The state before each of n chunks, (..., n, C, M), and after the last.

    A chunk takes S to ``apply(transition, S) + write``; both have n on their third axis from last.
    """
    starts = []
    for transition, write in zip(transitions.unbind(-3), writes.unbind(-3), strict=True):
        starts.append(S)
        S = apply(transition, S) + write
    return torch.stack(starts, dim=-3), S
