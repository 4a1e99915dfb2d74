"""Mamba-3: a state that rotates, and writes each token twice."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lesson_code.torch.elementwise import turn
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator


class Mamba3State(NamedTuple):
    """What Mamba-3 remembers: its memory, and of the last token what the next one writes again.

    As :class:`lesson_code.numpy.Mamba3State`.

    Parameters
    ----------
    S : tensor, shape (..., 2R, P)
        The memory.
    k : tensor, shape (..., 2R)
        The last key, rotated.
    x : tensor, shape (..., P)
        The last input.
    angle : tensor, shape (..., R)
        The angles by which it was rotated, modulo 2π.
    """

    S: Tensor
    k: Tensor
    x: Tensor
    angle: Tensor


@operator(
    "N P, N, N, N, N R, N 2R, N 2R -> N P",
    state=Mamba3State._make(("2R P", "2R", "P", "R")),
    reads="C",
    forms=("recurrent", "parallel", "chunkwise"),
    delta="at least 0",
    log_decay="at most 0",
    trapezoid="in [0, 1]",
)
def mamba3(
    x: Tensor,
    delta: Tensor,
    log_decay: Tensor,
    trapezoid: Tensor,
    angle: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Mamba3State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Mamba3State]:
    r"""The state space of Mamba-3, one head: written by the trapezoidal rule, and rotating.

    As :func:`lesson_code.numpy.mamba3`. A token's two writes are one for all later tokens, so that
    "parallel" and "chunkwise" are those of a memory that is read before it is written, and the
    token's own write is added. Where log_decay is -inf its gradient is 0.

    Examples
    --------
    A quarter turn at each token: what is stored on one channel is found on the other one.

    >>> x, ones = torch.tensor([[8.0], [0.0]]), torch.ones(2)
    >>> B, angle = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.full((2, 1), torch.pi / 2)
    >>> C = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    >>> mamba3(x, ones, 0 * ones, ones, angle, B, C)
    tensor([[8.],
            [8.]])
    """
    S, k_last, x_last, theta = initial_state
    theta = theta[..., None, :] + angle.cumsum(dim=-2)
    k, q = rotated(B, theta), rotated(C, theta)
    g, late, own = (y[..., None] for y in (log_decay, (1 - trapezoid) * delta, trapezoid * delta))
    if form == "recurrent":
        outputs = []
        rows = (z.unbind(-2) for z in (x, k, q, g.exp(), late, own))
        for x_t, k_t, q_t, alpha_t, late_t, own_t in zip(*rows, strict=True):
            S = alpha_t[..., None] * (S + _outer(late_t * k_last, x_last)) + _outer(
                own_t * k_t, x_t
            )
            outputs.append(q_t[..., None, :] @ S)
            k_last, x_last = k_t, x_t
        y = torch.cat(outputs, dim=-2)
    else:
        S = S + _outer(late[..., 0, :] * k_last, x_last)
        # What a later token finds of a token: its own write, and that of the next one.
        both = own + pad(late[..., 1:, :], (0, 0, 0, 1))
        nothing = torch.zeros_like(k[..., 0, :])
        y, S = additive(form, g.exp() * q, k, both * x, g, S, bonus=nothing, chunk_size=chunk_size)
        y = y + own * (q * k).sum(dim=-1, keepdim=True) * x
    last = (part[..., -1, :] for part in (k, x, theta.remainder(2 * torch.pi)))
    return y, Mamba3State(S, *(part.expand(*S.shape[:-2], -1).clone() for part in last))


def _outer(k, v):
    return k[..., :, None] * v[..., None, :]


def rotated(x: Tensor, theta: Tensor) -> Tensor:
    """The pairs of channels (2i, 2i + 1) turned by the angle i: (..., 2R) and (..., R)."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack(turn(a, b, theta), dim=-1).flatten(-2)
