"""TTT-Linear as a module: a memory that is fitted while it reads, from a start that is learned."""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from lesson_code import _arguments
from lesson_code.torch.elementwise import turn
from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    merge_heads,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate
from lesson_code.torch.ttt import TTTState, ttt_linear


class TTTLinear(Mixer):
    r"""TTT-Linear: each head is a linear model that learns while it reads.

    In each head, where token t is the i-th of its batch, counted from 0, and R turns queries and
    keys by the position i as in :class:`SoftmaxAttention`,

    .. math::

        q_t &= R_i W_Q^\top x_t \qquad k_t = R_i W_K^\top x_t \qquad v_t = W_V^\top x_t \\
        \eta_t &= \tfrac1D\, \sigma(w_\eta \cdot x_t + b_\eta) \qquad
        \gamma_t = \max\!\left(\tfrac1{i + 1} + c_i,\, 0\right) \\
        y_t &= W_O^\top \mathrm{norm}(o_t)

    with the o of :func:`lesson_code.torch.ttt_linear`, which begins at a W and b that are learned,
    and a layer norm over all F channels. The state is a
    :class:`lesson_code.torch.TTTState`, (B, H, ...), whose W and b are what was learned since that
    beginning, with a position of (B, 1). A text that continues from a state is read token by token.

    Parameters
    ----------
    batch_size : int
        Tokens in a batch: all of its gradients are taken at its start.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F, ``rate`` is one of F×H
    with bias; ``W`` (H, D, D) and ``b`` (H, D) are the memory to begin with, ``share`` is c, for
    each place in a batch; ``norm_weight`` and ``norm_bias`` (H, D) belong to the model that learns,
    ``weight`` and ``bias`` (F,) to the last norm. W and the weight of ``rate`` begin with a
    standard deviation of 0.02, weights of norms at 1, all biases and c at 0.

    References
    ----------
    Sun et al. (2024), sections 2.4 to 2.7; γ, positions and initialization as in its code.

    Examples
    --------
    >>> state = TTTLinear(width=8, num_heads=2).initial_state(1)
    >>> state.W.shape, state.position
    (torch.Size([1, 2, 4, 4]), tensor([[0]]))
    """

    def __init__(self, width: int, num_heads: int, *, batch_size: int = 16) -> None:
        super().__init__(width)
        self.num_heads = H = check_heads(width, num_heads)
        self.batch_size = _arguments.check_integer("batch_size", batch_size, minimum=1)
        D = width // H
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.rate = nn.Linear(width, H)
        nn.init.normal_(self.rate.weight, std=0.02)
        nn.init.zeros_(self.rate.bias)
        self.W, self.b = nn.Parameter(0.02 * torch.randn(H, D, D)), nn.Parameter(torch.zeros(H, D))
        self.share = nn.Parameter(torch.zeros(self.batch_size))
        self.norm_weight, self.norm_bias = (
            nn.Parameter(x(H, D)) for x in (torch.ones, torch.zeros)
        )
        self.weight, self.bias = (nn.Parameter(x(width)) for x in (torch.ones, torch.zeros))

    def mix(self, x: Tensor, state: TTTState | None) -> tuple[Tensor, TTTState]:
        (B, N, F), H = x.shape, self.num_heads
        D = F // H
        shapes = (B, H, D, D), (B, H, D), (B, H, D, D), (B, H, D), (B, 1)
        check_state(state, TTTState, *shapes)
        maps = self.query(x), self.key(x), self.value(x), self.rate(x)
        q, k, v, rate = accumulate(*(split_heads(y, H) for y in maps))
        own = self.W, self.b, self.share, self.norm_weight, self.norm_bias
        W, b, share, *norm = (y.to(q.dtype) for y in own)
        if state is None:
            none_W, none_b = q.new_zeros(B, H, D, D), q.new_zeros(B, H, D)
            none = q.new_zeros(B, 1, dtype=torch.long)
            state = TTTState(none_W, none_b, none_W, none_b, none)
            first, position = state.position, 0
        else:
            first = position = state.position
        memory = state._replace(W=W + state.W, b=b + state.b, position=position)
        place = (first + torch.arange(N, device=x.device)) % self.batch_size  # (B, N)
        read, memory = ttt_linear(
            _rotated(q, place),
            _rotated(k, place),
            v,
            rate[..., 0].sigmoid() / D,
            (1 / (place + 1) + share[place]).clamp(min=0).to(q.dtype)[:, None],
            *norm,
            batch_size=self.batch_size,
            initial_state=memory,
            return_state=True,
        )
        y = layer_norm(merge_heads(read), (F,), eps=1e-6).to(self.weight.dtype)
        learned = memory._replace(W=memory.W - W, b=memory.b - b, position=first + N)
        return self.output(self.weight * y + self.bias), learned


def _rotated(x, place):
    """Channels i and i + D/2 of (B, H, N, D) turned by 10000^(-2i/D) for each place (B, N)."""
    D = x.shape[-1]
    plane = torch.arange(D // 2, device=x.device, dtype=x.dtype)
    angle = place[:, None, :, None] * 10000 ** (-2 * plane / D)
    a, b, rest = x.split([D // 2, D // 2, D % 2], dim=-1)
    return torch.cat([*turn(a, b, angle), rest], dim=-1)
