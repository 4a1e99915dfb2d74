"""Functions of single numbers that must not divide by zero, in value and in gradient."""

import torch
from torch import Tensor


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is exactly 0."""
    zero = denominator == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, denominator))
