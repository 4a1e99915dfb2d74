"""What the models with a memory share: the state that they begin with, and checks of values."""

import torch
from torch import Tensor

from lesson_code import _arguments


def initial_memory(initial_state, like_name, like, sizes, **arrays):
    """The state before the first token: a fresh tensor of `sizes`, zeros where None is given.

    It has the accumulation dtype of `like`, and the leading dimensions that it shares with
    `arrays`, each given as name=leading shape. `sizes` names the axes: {"C": 4, "M": 3}.
    """
    dtype = getattr(torch, _arguments.accumulation_dtype(like))
    if initial_state is None:
        initial_state = torch.zeros(tuple(sizes.values()), dtype=dtype, device=like.device)
    _arguments.check_initial_state(Tensor, initial_state, like_name, like, **sizes)
    leading = tuple(initial_state.shape[: -len(sizes)])
    leading = _arguments.check_leading(**arrays, initial_state=leading)
    return initial_state.to(dtype).expand(*leading, *sizes.values()).clone()


def check_values(name, tensor, expected, is_wrong):
    """Refuse a tensor with a value for which `is_wrong`, where values can be looked at.

    Under ``torch.compile`` and ``torch.func`` a tensor stands for values that are not known yet.
    """
    traced = (
        torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
        or isinstance(tensor, torch._subclasses.FakeTensor)
        or tensor.is_meta
    )
    if not traced:
        tensor = tensor.detach()
        _arguments.check_values(name, tensor, expected, is_wrong(tensor))
