"""Batches whose rows end at different places: the first tokens of each are real, the rest padding.

No token sees a later one, so padding at the end can only reach the last states. Rows of one length
are therefore read together, without their padding, wherever states are asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lesson_code._arguments import check_device, check_integer


def check_lengths(lengths: Any, x: Tensor, minimum: int = 0) -> Tensor:
    """How many tokens of each row of x (B, N, ...) are real, as a tensor (B,)."""
    B, N = x.shape[:2]
    if isinstance(lengths, Sequence) and not isinstance(lengths, str):
        numbers = [check_integer("lengths", n, minimum=minimum) for n in lengths]
        lengths = torch.tensor(numbers, dtype=torch.int64, device=x.device)
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor of integers, got {type(lengths).__name__}.")
    if lengths.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"lengths must have dtype int64 or int32, got {lengths.dtype}.")
    check_device("lengths", lengths, "x", x)
    if lengths.shape != (B,):
        raise ValueError(f"lengths must have shape ({B},), got {tuple(lengths.shape)}.")
    if not torch.compiler.is_compiling():
        wrong = lengths[(lengths < minimum) | (lengths > N)]
        if len(wrong):
            raise ValueError(f"lengths must be between {minimum} and {N}, got {int(wrong[0])}.")
    return lengths


def read_rows(
    function: Callable[..., tuple],
    lengths: Tensor,
    state: Any,
    return_state: bool,
    *inputs: Tensor | None,
) -> tuple:
    """The states and outputs of function(state, *inputs), each row as if it were alone.

    Inputs and outputs are (B, N, ...); outputs at padding are 0. An input may be None. The states
    are None where nobody asks for them: a single pass is enough then.
    """
    if not return_state:
        _, *out = function(state, *(_without_padding(x, lengths) for x in inputs))
        return None, *(_without_padding(y, lengths) for y in out)
    N = max(x.shape[1] for x in inputs if x is not None)
    rows_read, states, outputs = [], [], []
    for n in lengths.unique().tolist() or [0]:
        rows = (lengths == n).nonzero()[:, 0]
        of_rows = (x if x is None else x[rows, :n] for x in inputs)
        state_after, *out = function(_rows_of(state, rows), *of_rows)
        rows_read.append(rows)
        states.append(state_after)
        outputs.append([_padded(y, N) for y in out])
    back = torch.cat(rows_read).argsort()
    joined = (torch.cat(pieces)[back] for pieces in zip(*outputs, strict=True))
    return _rows_of(_joined(states), back), *joined


def _without_padding(x, lengths):
    """x (B, N, ...) with 0 at padding, whatever stood there; None stays."""
    if x is None:
        return None
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.where(real.view(*real.shape, *[1] * (x.ndim - 2)), x, 0)


def _rows_of(state, rows):
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, tuple):
        return _made(state, [_rows_of(part, rows) for part in state])
    return state


def _joined(states):
    """One state of those of several groups of rows."""
    if len(states) == 1:
        return states[0]
    if isinstance(states[0], Tensor):
        return torch.cat(states)
    if hasattr(states[0], "aligned"):  # a cache, which is as long as the text
        N = max(state.k.shape[-2] for state in states)
        states = [state.aligned(N) for state in states]
    return _made(states[0], [_joined(parts) for parts in zip(*states, strict=True)])


def _made(like, parts):
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def _padded(y, N):
    return torch.cat([y, y.new_zeros(len(y), N - y.shape[1], *y.shape[2:])], dim=1)
