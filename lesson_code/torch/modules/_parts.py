"""Parts that the modules share."""

import torch
from torch import nn

from lesson_code import _arguments


def check_heads(width: int, num_heads: int) -> int:
    """Return num_heads as an int; refuse what does not divide the width."""
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    if width % num_heads:
        raise ValueError(f"width must be a multiple of num_heads, {num_heads}, got {width}.")
    return num_heads


def check_state(state, kind: type, B: int, H: int) -> None:
    """Refuse all but a NamedTuple of one kind whose tensors are (B, H, ...)."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__}, got {type(state).__name__}.")
    for name, array in zip(kind._fields, state, strict=True):
        if array.shape[:2] != (B, H):
            raise ValueError(
                f"{name} of state must have shape ({B}, {H}, ...) for {B} sequences and {H} heads, "
                f"got {tuple(array.shape)}."
            )


def split_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, N, H D) -> (B, H, N, D)"""
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) -> (B, N, H D)"""
    return x.transpose(1, 2).flatten(-2)


def feed_forward(width: int) -> nn.Sequential:
    """Two linear maps with a GELU in between, where the width is four times as large."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
