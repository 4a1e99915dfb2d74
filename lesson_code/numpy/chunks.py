"""Pieces of a sequence, and decays between the tokens of a piece.

Decays are products of numbers between 0 and 1, kept as sums of their logarithms g <= 0. Each sum
is made of its own terms: differences of one long sum would lose digits, and -inf - -inf is NaN.
"""

from collections.abc import Iterator

import numpy as np


def in_chunks(chunk_size: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Pieces (..., L, D) of arrays (..., N, D), chunk by chunk; the last may be shorter."""
    for start in range(0, arrays[0].shape[-2], chunk_size):
        yield tuple(array[..., start : start + chunk_size, :] for array in arrays)


def decays_through(g: np.ndarray) -> np.ndarray:
    """Row t is exp(g_1 + ... + g_t), what the state before a chunk has left at t: (..., L, D)."""
    return np.exp(np.cumsum(g, axis=-2))


def sums_between(g: np.ndarray) -> np.ndarray:
    """Entry [t, j] is g_{j+1} + ... + g_t, -inf where j > t: (..., L, D) -> (..., L, L, D)."""
    L = g.shape[-2]
    later, seen = np.tri(L, k=-1, dtype=bool), np.tri(L, dtype=bool)
    terms = np.where(later[..., None], g[..., :, None, :], 0)  # [i, j] is g_i if i > j
    return np.where(seen[..., None], np.cumsum(terms, axis=-3), -np.inf)


def decays_between(g: np.ndarray) -> np.ndarray:
    """Entry [t, j] is exp(g_{j+1} + ... + g_t), 0 where j > t: (..., L, D) -> (..., L, L, D)."""
    return np.exp(sums_between(g))  # masked before exp: g may be -inf


def solve(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x of (I + A) x = b, where A is 0 on and above its diagonal: row after row."""
    leading = np.broadcast_shapes(A.shape[:-2], b.shape[:-2])
    x = np.array(np.broadcast_to(b, (*leading, *b.shape[-2:])))
    for t in range(1, A.shape[-1]):
        x[..., t, None, :] -= A[..., t, None, :t] @ x[..., :t, :]
    return x
