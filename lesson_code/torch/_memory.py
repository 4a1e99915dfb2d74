"""What the models with a memory share: the state that they begin with."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code._custom_ops import check_values as check_values


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
