"""Parts that the modules share."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate


def check_heads(width: int, num_heads: int) -> int:
    """Return num_heads as an int; refuse what does not divide the width."""
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    if width % num_heads:
        raise ValueError(f"width must be a multiple of num_heads, {num_heads}, got {width}.")
    return num_heads


def check_tokens(name: str, tokens, axes: str) -> None:
    """Refuse all but a tensor of int64 or int32 with these axes, "B, N" or "B"."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tokens).__name__}.")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must have dtype int64 or int32, got {tokens.dtype}.")
    if tokens.ndim != len(axes.split(", ")):
        axes = axes if "," in axes else f"{axes},"
        raise ValueError(f"{name} must have shape ({axes}), got {tuple(tokens.shape)}.")


def check_state(state, kind: Any, *shapes: tuple) -> None:
    """Refuse a state that is not of a kind, Tensor or a NamedTuple of tensors, with these shapes.

    A letter in a shape stands for any size. None is no state yet, and passes.
    """
    if state is None:
        return
    if kind is Tensor:
        _arguments.check_arrays(Tensor, state=state)
        pieces = {"state": state}
    elif isinstance(state, kind):
        pieces = {f"{name} of state": x for name, x in state._asdict().items()}
    else:
        raise TypeError(f"state must be a {kind.__name__}, got {type(state).__name__}.")
    for (name, piece), shape in zip(pieces.items(), shapes, strict=True):
        found = tuple(piece.shape)
        same = (isinstance(n, str) or n == m for n, m in zip(shape, found, strict=False))
        if len(found) != len(shape) or not all(same):
            shown = str(shape).replace("'", "")
            raise ValueError(f"{name} must have shape {shown}, got {found}.")


def check_memory(memory: Any, like: Tensor) -> None:
    """Refuse a memory, a NamedTuple of tensors, in another dtype or place than `like`."""
    for name, part in ({} if memory is None else memory._asdict()).items():
        _arguments.check_beside(f"{name} of state", part, "x", like)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H D) -> (B, H, N, D)"""
    return x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H D)"""
    return x.transpose(1, 2).flatten(-2)


def of_length_one(x: Tensor) -> Tensor:
    """Rows divided by their length, and 0 where they are 0."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def shift(x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """The input before each of x (B, N, F), and the last of all; before x comes `last`, or 0."""
    last = x.new_zeros(len(x), x.shape[-1]) if last is None else last.to(x.dtype)
    x = torch.cat([last[:, None], x], dim=1)
    return x[:, :-1], x[:, -1].clone()


def ratios(width: int, layer: int, num_layers: int) -> tuple[Tensor, float, float]:
    """What RWKV's initial values depend on: i/F for channel i, 1 - layer/L, and layer/(L-1)."""
    num_layers = _arguments.check_integer("num_layers", num_layers, minimum=1)
    layer = _arguments.check_integer("layer", layer, minimum=0)
    if layer >= num_layers:
        raise ValueError(f"layer must be below num_layers, {num_layers}, got {layer}.")
    part = torch.arange(width) / width
    return part, 1 - layer / num_layers, layer / max(num_layers - 1, 1)


def group_norm(norm: nn.GroupNorm, read: Tensor) -> Tensor:
    """(B, N, H, M) -> (B, N, H M): a group norm that sees one token and head at a time."""
    read = nn.functional.layer_norm(read, read.shape[-1:], eps=norm.eps)
    return norm.weight * read.flatten(-2).to(norm.weight.dtype) + norm.bias


class HeadNorm(nn.Module):
    """Root mean square norm over the channels of one token and head, which sees nothing else.

    (B, N, H, M) -> (B, N, H M), in the dtype of the weight, which has one entry for each channel of
    a head.
    """

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_width))

    def forward(self, read: Tensor) -> Tensor:
        read = nn.functional.rms_norm(read, self.weight.shape, eps=1e-5)
        return (self.weight * read.to(self.weight.dtype)).flatten(-2)


class ShortConvolution(nn.Module):
    """Each channel by itself, convolved with its last few values: causal, with a tail to stream.

    Output t is w_0 x_{t-K+1} + ... + w_{K-1} x_t + b, followed by SiLU. The tail is the last K - 1
    inputs, (B, K - 1, F): zeros before the first token.
    """

    def __init__(self, width: int, size: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.size = size
        bound = size**-0.5  # as torch initializes a convolution
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, N, F) and the tail -> (B, N, F) and the new tail."""
        if tail is None:
            tail = x.new_zeros(len(x), self.size - 1, x.shape[-1])
        x = torch.cat([tail.to(x.dtype), x], dim=1)
        N = x.shape[1] - self.size + 1
        taps = [self.weight[:, i] * x[:, i : i + N] for i in range(self.size)]
        y = sum(taps[1:], start=taps[0])
        y = y if self.bias is None else y + self.bias
        return nn.functional.silu(y), x[:, N:].clone()


def orthogonal(weight: Tensor, gain: float = 1) -> Tensor:
    """Fill a matrix with an orthogonal one, times a gain; half precision gets a rounded one."""
    with torch.no_grad():
        (drawn,) = accumulate(weight)  # a copy, where that dtype has no QR decomposition
        return weight.copy_(nn.init.orthogonal_(drawn, gain=gain))


def feed_forward(width: int) -> nn.Sequential:
    """Two linear maps with a GELU in between, where the width is four times as large."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def initial_step_bias(size: int) -> Tensor:
    """Numbers whose softplus is between 0.001 and 0.1, evenly on a logarithmic scale."""
    steps = torch.empty(size).uniform_(math.log(0.001), math.log(0.1)).exp()
    return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
