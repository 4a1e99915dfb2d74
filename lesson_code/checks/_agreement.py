"""When two results agree."""

import numpy as np

from lesson_code._arguments import dtype_name

EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def tolerance_of(*arrays):
    """Half the digits of the least precise dtype among some arrays."""
    return max(EPSILONS.get(dtype_name(x), EPSILONS["float64"]) for x in arrays) ** 0.5


def close(a, b, tolerance):
    """Which entries of a agree with b, relative to the value and to the largest one."""
    finite = np.abs(b[np.isfinite(b)])
    largest = finite.max() if finite.any() else 1.0
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def same(a, b, tolerance):
    """Whether all of a agrees with b."""
    return a.shape == b.shape and bool(close(a, b, tolerance).all())


def first(wrong):
    """The index at which something is wrong for the first time."""
    indices = np.argwhere(wrong)
    row = np.argmin(indices[:, -2]) if wrong.ndim > 1 else 0
    return tuple(int(i) for i in indices[row])


def row_factors(a, b, tolerance):
    """One factor per position if each row of a is a multiple of that row of b, else None."""
    norms = (b * b).sum(-1)
    if a.shape[-1] < 2 or not norms.all():
        return None
    factors = (a * b).sum(-1) / norms
    return factors if same(a, factors[..., None] * b, tolerance) else None
