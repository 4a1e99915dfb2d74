"""What goes to a function of the caller's, and what comes back from it."""

import numpy as np


def read_only(array: np.ndarray) -> np.ndarray:
    """A view for a function that must not write into the caller's arrays."""
    view = array.view()
    view.flags.writeable = False
    return view


def is_float_array(value: object) -> bool:
    """Whether a function has returned an array of floats."""
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)


def described(value: object) -> str:
    """A returned value in an error message: its shape and dtype, or its type."""
    if isinstance(value, np.ndarray):
        return f"shape {value.shape} and dtype {value.dtype}"
    return type(value).__name__
