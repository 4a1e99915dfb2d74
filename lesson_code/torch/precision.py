"""The precision in which sums are kept: float32 at least, under autocast too."""

import contextlib

import torch
from torch import Tensor

from lesson_code import _arguments


def accumulate(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which sums over the first are kept."""
    dtype = getattr(torch, _arguments.accumulation_dtype(tensors[0]))
    return tuple(tensor.to(dtype) for tensor in tensors)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager:
    """A context in which autocast does not round the factors of products to half precision."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
