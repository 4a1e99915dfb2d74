"""One token after the other: what every recurrence is written with."""

from collections.abc import Iterator

import numpy as np


def tokens(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Rows (..., D) of arrays (..., N, D), token by token."""
    return zip(*(np.moveaxis(array, -2, 0) for array in arrays), strict=True)


def outer(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """What a token writes, k vᵀ: (..., D) and (..., M) -> (..., D, M)."""
    return k[..., :, None] * v[..., None, :]


def read(S: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What a query finds, Sᵀ q: (..., D, M) and (..., D) -> (..., M)."""
    return (q[..., None, :] @ S)[..., 0, :]
