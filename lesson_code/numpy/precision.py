"""The dtype in which sums are kept: float32 at least."""

import numpy as np

from lesson_code import _arguments


def accumulate(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays in the dtype in which sums over the first are kept."""
    dtype = _arguments.accumulation_dtype(arrays[0])
    return tuple(array.astype(dtype, copy=False) for array in arrays)
