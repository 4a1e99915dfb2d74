"""The time mix of RWKV-6: each token says how it mixes with the last one and what is forgotten."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    group_norm,
    orthogonal,
    shift,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate
from lesson_code.torch.rwkv6 import rwkv6

MIX_RANK, DECAY_RANK = 32, 64  # at most; a small width needs less
MIXED = 5  # the decay, keys, values, receptances and gates look at a mixture each


class RWKV6State(NamedTuple):
    """What :class:`RWKV6TimeMix` remembers.

    Parameters
    ----------
    last : tensor, shape (B, F)
        The last input, in the dtype of the inputs.
    S : tensor, shape (B, H, D, D)
        Memory, in float32 at least.
    """

    last: Tensor
    S: Tensor


class RWKV6TimeMix(Mixer):
    r"""The time mix of RWKV-6 (Finch).

    What is remembered and read is :eq:`eq-rwkv6`, in heads of width D = F/H. Receptance r, key,
    value, gate g and decay each look at a mixture of x_t and x_{t-1} of their own, which depends on
    the token (:eq:`eq-rwkv6-mix`), and the decay depends on its mixture :math:`x^w`
    (:eq:`eq-rwkv6-rate`):

    .. math::

        \alpha_t &= \exp(-\exp(w_0 + W_2^\top \tanh(W_1^\top x^w_t))) \\
        y_t &= W_O^\top \left(\mathrm{norm}(o_t) \odot \mathrm{silu}(g_t)\right)

    The state is an :class:`RWKV6State`.

    Notes
    -----
    A mixture is :math:`x_t + (x_{t-1} - x_t) \mu`: here :math:`\mu` is the share of the *last*
    token, as in RWKV-6, whose code calls it ``maa``. The ``mix`` of ``token_shift`` is the share of
    the current token, as in RWKV-4.

    ``shares`` (5, F) are the :math:`\mu` of w, k, v, r and g, to which each token adds
    :math:`W_{c2}^\top \tanh(W_{c1}^\top \bar x_t)`, with all :math:`W_{c1}` side by side in
    ``shares_down`` (F, 5·32), :math:`W_{c2}` in ``shares_up`` (5, 32, F), and a mixture
    :math:`\bar x_t` of its own, with the share ``first_share`` (F,).
    ``decay_base`` (F,), ``decay_down`` (F, 64) and ``decay_up`` (64, F) are :math:`w_0`,
    :math:`W_1` and :math:`W_2`; the ranks 32 and 64 are at most F. ``bonus`` is (H, D).
    ``receptance``, ``key``, ``value``, ``gate`` and ``output`` are ``nn.Linear`` of F×F, ``norm``
    has the weight and bias of a group norm that sees one token and head at a time.

    All begin as in the first layer of RWKV-6: :math:`W_{c1}`, :math:`W_1` and ``output`` at 0, so
    that at first neither shares nor decays depend on the token; decays from
    :math:`\exp(-e^{-6})`, a memory of 400 tokens, in the first channel to :math:`\exp(-e^{-1})`, of
    3, in the last.

    RWKV-5 has constant shares and decays, so none of these narrow maps; r, k, v and
    g see mixtures as in RWKV-4; the memory is the same.

    References
    ----------
    Peng et al. (2024), "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence",
    section 4; initialization as in its code.

    Examples
    --------
    >>> state = RWKV6TimeMix(width=8, num_heads=2).initial_state(1)
    >>> state.last.shape, state.S.shape
    (torch.Size([1, 8]), torch.Size([1, 2, 4, 4]))
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        self.receptance, self.key, self.value, self.gate, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        for linear, gain in ((self.receptance, 1), (self.value, 1), (self.key, 0.1)):
            orthogonal(linear.weight, gain=gain)
        orthogonal(self.gate.weight, gain=0.1)
        nn.init.zeros_(self.output.weight)
        self.norm = nn.GroupNorm(self.num_heads, width, eps=64e-5)

        channel = torch.arange(width)
        part = channel / width  # 0 ... 1 - 1/F
        to_one = channel / max(width - 1, 1)  # 0 ... 1
        straight, root = 1 - part, 1 - part**0.5
        self.first_share = nn.Parameter(straight.clone())
        self.shares = nn.Parameter(torch.stack([straight, straight, straight, root, root]))
        rank = min(MIX_RANK, width)
        self.shares_down = nn.Parameter(torch.zeros(width, MIXED * rank))
        self.shares_up = nn.Parameter(torch.empty(MIXED, rank, width).uniform_(-0.01, 0.01))

        rank = min(DECAY_RANK, width)
        self.decay_base = nn.Parameter(-6 + 5 * to_one**0.7)
        self.decay_down = nn.Parameter(torch.zeros(width, rank))
        self.decay_up = nn.Parameter(torch.empty(rank, width).uniform_(-0.01, 0.01))
        zigzag = 0.1 * ((channel + 1) % 3 - 1)
        self.bonus = nn.Parameter(zigzag.unflatten(0, (self.num_heads, -1)))

    def mix(self, x: Tensor, state: RWKV6State | None) -> tuple[Tensor, RWKV6State]:
        (B, _, F), H = x.shape, self.num_heads
        D = F // H
        check_state(state, RWKV6State, (B, F), (B, H, D, D))
        last, S = state or (None, None)
        before, last = shift(x, last)
        x_w, x_k, x_v, x_r, x_g = self._mixtures(x, before - x)

        raw = self.decay_base + torch.tanh(x_w @ self.decay_down) @ self.decay_up
        heads = (self.receptance(x_r), self.key(x_k), self.value(x_v), raw)
        r, k, v, raw, bonus = accumulate(*(split_heads(a, H) for a in heads), self.bonus)
        read, S = rwkv6(r, k, v, -raw.exp(), bonus, initial_state=S, return_state=True)

        read = group_norm(self.norm, read.transpose(1, 2))
        return self.output(read * nn.functional.silu(self.gate(x_g))), RWKV6State(last, S)

    def _mixtures(self, x, change):
        """x + change * share, for five shares that the token itself moves: five (B, N, F)."""
        first = x + change * self.first_share
        moves = torch.tanh(first @ self.shares_down).unflatten(-1, (MIXED, -1))  # (B, N, 5, R)
        shares = self.shares + torch.einsum("bnmr,mrf->bnmf", moves, self.shares_up)
        return (x[..., None, :] + change[..., None, :] * shares).unbind(dim=-2)
