"""Log-linear attention as a module: a token weighs what it reads of each block of the past."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lesson_code import _arguments
from lesson_code.torch.log_linear import LogLinearState, log_linear_attention
from lesson_code.torch.modules._parts import (
    HeadNorm,
    ShortConvolution,
    check_heads,
    check_state,
    initial_step_bias,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate


class LogLinearAttentionState(NamedTuple):
    """What a :class:`LogLinearAttention` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, 3 F)
        The last three inputs of the convolution, in the dtype of the parameters.
    S : tensor, shape (B, H, levels, D, D)
        Memory of each level and head, in float32 at least.
    position : tensor of integers, shape (B,)
        How many tokens were read.
    """

    tail: Tensor
    S: Tensor
    position: Tensor


class LogLinearAttention(Mixer):
    r"""Log-linear attention, with one decay for each head as in Mamba-2.

    In each head, with * for the causal convolution over four tokens,

    .. math::

        q, k, v &= \mathrm{silu}(w * (x [W_Q, W_K, W_V])) \qquad
        g_t = -e^a \mathrm{softplus}(w_g \cdot x_t + b) \\
        \lambda_t &= \mathrm{softplus}(s \odot W_\lambda^\top x_t) \qquad
        y_t = W_O^\top \left(\mathrm{norm}(o_t) \odot \mathrm{silu}(W_G^\top x_t)\right)

    where o is that of :func:`lesson_code.torch.log_linear_attention`, with queries scaled by
    :math:`1 / \sqrt D`. The state is a :class:`LogLinearAttentionState`.

    Parameters
    ----------
    levels : int
        Number of levels: a text has at most :math:`2^{levels - 1}` tokens.

    Notes
    -----
    ``query``, ``key``, ``value``, ``gate`` and ``output`` are ``nn.Linear`` of F×F, ``decay`` of
    F×H, ``level`` of F to H times the levels; ``convolution`` has four weights for each of 3 F
    channels; ``level_scale`` (H, levels) is s, which begins at 1; ``log_rate`` (H) is a and
    ``decay_bias`` (H) b, which begin as in Mamba-2.

    References
    ----------
    Guo et al. (2025), section 3.

    Examples
    --------
    >>> state = LogLinearAttention(width=8, num_heads=2, levels=5).initial_state(1)
    >>> state.S.shape, state.position
    (torch.Size([1, 2, 5, 4, 4]), tensor([0]))
    """

    def __init__(self, width: int, num_heads: int, *, levels: int = 15) -> None:
        super().__init__(width)
        self.num_heads = H = check_heads(width, num_heads)
        self.levels = _arguments.check_integer("levels", levels, minimum=1)
        self.query, self.key, self.value, self.gate, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.decay = nn.Linear(width, H, bias=False)
        self.level = nn.Linear(width, H * self.levels, bias=False)
        self.level_scale = nn.Parameter(torch.ones(H, self.levels))
        self.convolution = ShortConvolution(3 * width, bias=False)
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.decay_bias = nn.Parameter(initial_step_bias(H))
        self.norm = HeadNorm(width // H)

    def mix(
        self, x: Tensor, state: LogLinearAttentionState | None
    ) -> tuple[Tensor, LogLinearAttentionState]:
        (B, _, F), H = x.shape, self.num_heads
        D = F // H
        shapes = (B, 3, 3 * F), (B, H, self.levels, D, D), (B,)
        check_state(state, LogLinearAttentionState, *shapes)
        tail, S, position = state or (None, None, torch.zeros(B, dtype=torch.long, device=x.device))
        projected = torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)
        convolved, tail = self.convolution(projected, tail)
        maps = *convolved.chunk(3, dim=-1), self.level(x), self.decay(x)
        q, k, v, levels, decay = accumulate(*(split_heads(y, H) for y in maps))
        scale, a, b = (y.to(q.dtype) for y in (self.level_scale, self.log_rate, self.decay_bias))
        log_decay = -a.exp()[:, None] * softplus(decay[..., 0] + b[:, None])  # (B, H, N)
        if S is None:
            S = q.new_zeros(B, H, self.levels, D, D)
        read, memory = log_linear_attention(
            q * D**-0.5,
            k,
            v,
            log_decay,
            softplus(scale[:, None] * levels),
            initial_state=LogLinearState(S, position[:, None]),
            return_state=True,
        )
        y = self.output(self.norm(read.transpose(1, 2)) * silu(self.gate(x)))
        return y, LogLinearAttentionState(tail, memory.S, memory.position[:, 0])
