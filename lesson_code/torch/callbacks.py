"""What comes back from a function of the caller's."""

from torch import Tensor


def is_float_tensor(value: object) -> bool:
    """Whether a function has returned a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def described(value: object) -> str:
    """A returned value in an error message: its shape and dtype, or its type."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and dtype {value.dtype}"
    return type(value).__name__
