"""Functions of single numbers: a quotient without division by zero, and a turn of a plane."""

import torch
from torch import Tensor


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is exactly 0."""
    zero = denominator == 0
    return torch.where(zero, 0, numerator / torch.where(zero, 1, denominator))


def turn(a: Tensor, b: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Points (a, b) of planes, turned by an angle each."""
    return a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
