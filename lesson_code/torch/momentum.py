"""The delta rule with momentum: a correction goes on for some tokens after its own."""

from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code.torch.operator import operator


class MomentumState(NamedTuple):
    """What the delta rule with momentum remembers, as :class:`lesson_code.numpy.MomentumState`.

    Parameters
    ----------
    S : tensor, shape (..., D, M)
        The memory.
    M : tensor, shape (..., D, M)
        What was written last, and will be written again with the next token's momentum.
    """

    S: Tensor
    M: Tensor


@operator(
    "N D, N D, N M, N, N, N -> N M",
    state=MomentumState._make(("D M", "D M")),
    reads="q",
    log_decay="at most 0",
)
def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    momentum: Tensor,
    *,
    initial_state: MomentumState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, MomentumState]:
    r"""The delta rule with momentum, which is the memory of Titans where that is linear.

    As :func:`lesson_code.numpy.momentum_delta_rule`: a loop over tokens, of which autograd keeps
    every state.

    Examples
    --------
    The first write goes on for a token that writes nothing, with half its size:

    >>> k, v = torch.tensor([[1.0], [0.0]]), torch.tensor([[8.0], [0.0]])
    >>> ones = torch.ones(2)
    >>> momentum_delta_rule(torch.ones(2, 1), k, v, ones, 0 * ones, ones / 2)
    tensor([[ 8.],
            [12.]])
    """
    S, M = initial_state
    out = []
    gates = (x[..., None, None] for x in (beta, log_decay.exp(), momentum))
    rows = (x.unbind(-3) for x in (q[..., None, :], k[..., None, :], v[..., None, :], *gates))
    for q_t, k_t, v_t, beta_t, alpha_t, mu_t in zip(*rows, strict=True):  # (..., 1, ·)
        M = mu_t * M + k_t.mT @ (beta_t * (v_t - k_t @ S))
        S = alpha_t * S + M
        out.append(q_t @ S)
    return torch.cat(out, dim=-2), MomentumState(S, M)
