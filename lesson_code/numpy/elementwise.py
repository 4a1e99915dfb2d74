"""Functions of single numbers that must not overflow or divide by zero."""

import numpy as np


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """``numerator / denominator``, and 0 where the denominator is exactly 0."""
    zero = denominator == 0
    return np.where(zero, 0, numerator / np.where(zero, 1, denominator))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x), of any x without overflow, and with all digits where it is small."""
    small = np.exp(-abs(x))
    return np.where(x < 0, small, 1) / (1 + small)
