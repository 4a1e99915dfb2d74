"""What tests of arrays share, be they NumPy's or torch's: numbers, precision, comparison."""

from __future__ import annotations

import numpy as np
import torch

# Relative to the largest number. Half precision is computed in float32 and rounded once.
TOLERANCE = {
    "float64": 1e-11,
    "float32": 2e-5,
    "float16": 2.0**-11 + 2e-5,
    "bfloat16": 2.0**-8 + 2e-5,
}

# Three tokens that the book works by hand.
KEYS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


def name_of(dtype) -> str:
    return str(np.dtype(dtype) if not isinstance(dtype, torch.dtype) else dtype).split(".")[-1]


def kept(dtype):
    """The dtype in which sums and states of an input are kept; of the same library."""
    if isinstance(dtype, torch.dtype):
        return torch.float64 if dtype == torch.float64 else torch.float32
    return "float64" if dtype == "float64" else "float32"


def numbers(x) -> np.ndarray:
    """An array, tensor or list as NumPy's float64."""
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, float)


def in_dtype(x, dtype):
    """A tensor for a dtype of torch, else an array."""
    if isinstance(dtype, torch.dtype):
        return torch.from_numpy(np.array(x)).to(dtype)
    return np.asarray(x, dtype)


def normal(*shapes, seed: int = 0) -> list[np.ndarray]:
    """Arrays of random numbers."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def tensors(*arrays, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(x)).to(dtype) for x in arrays]


def assert_close(found, expected, dtype="float64", tolerance: float | None = None) -> None:
    """The dtype, the shape, and the error relative to the largest number of all.

    What is expected beyond the largest number of the dtype must be infinite.
    """
    assert name_of(found.dtype) == name_of(dtype)
    tolerance = TOLERANCE[name_of(dtype)] if tolerance is None else tolerance
    found, expected = numbers(found), numbers(expected)
    assert found.shape == expected.shape
    largest = torch.finfo(getattr(torch, name_of(dtype))).max
    expected = np.where(np.abs(expected) > largest, np.copysign(np.inf, expected), expected)
    bound = tolerance * np.abs(expected).max(initial=1, where=np.isfinite(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
