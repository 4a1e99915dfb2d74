"""RWKV-7: its time mix, its channel mix, and the block of both."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    group_norm,
    merge_heads,
    orthogonal,
    ratios,
    shift,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.values import ValueMixer
from lesson_code.torch.precision import accumulate
from lesson_code.torch.rwkv7 import rwkv7

# Exponents of the initial shares, and the six that look at a mixture each.
SHARES = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}


class RWKV7State(NamedTuple):
    """What :class:`RWKV7TimeMix` remembers.

    Parameters
    ----------
    last : tensor, shape (B, F)
        The last input, in the dtype of the inputs.
    S : tensor, shape (B, H, D, D)
        Memory, in float32 at least.
    """

    last: Tensor
    S: Tensor


class RWKV7BlockState(NamedTuple):
    """What a block of RWKV-7 remembers.

    Parameters
    ----------
    time_last : tensor, shape (B, F)
        The last input of the time mix, after its norm.
    S : tensor, shape (B, H, D, D)
        Memory, in float32 at least.
    channel_last : tensor, shape (B, F)
        The last input of the channel mix, after its norm.
    """

    time_last: Tensor
    S: Tensor
    channel_last: Tensor


class LowRank(nn.Module):
    """b + B' f(A' x), which begins as the constant b: A is 0 at first."""

    def __init__(self, base: Tensor | None, width: int, factor: float) -> None:
        super().__init__()
        rank = min(max(32, 32 * round(factor * width**0.5 / 32)), width)
        self.base = None if base is None else nn.Parameter(base)
        self.down = nn.Parameter(torch.zeros(width, rank))
        self.up = nn.Parameter(orthogonal(torch.empty(rank, width), gain=0.1))

    def forward(self, x: Tensor, between=None) -> Tensor:
        """(B, N, F) -> (B, N, F), in float32 at least."""
        few = x @ self.down
        (y,) = accumulate((few if between is None else between(few)) @ self.up)
        return y if self.base is None else y + self.base.to(y.dtype)


class RWKV7TimeMix(ValueMixer):
    r"""The time mix of RWKV-7 (Goose).

    Receptance r, decay w, key k, value v, learning rate a and gate g each look at a mixture of x_t
    and x_{t-1} of their own, :math:`x^r` to :math:`x^g`, with fixed shares. Four of them are of low
    rank:

    .. math::

        \ln w_t &= -e^{-1/2} \sigma(w_0 + W_2^\top \tanh(W_1^\top x^w_t)) \\
        a_t &= \sigma(a_0 + A_2^\top A_1^\top x^a_t) \\
        g_t &= G_2^\top \sigma(G_1^\top x^g_t) \\
        v_t &\leftarrow v_t + (v^{\mathrm{first}}_t - v_t) \odot
        \sigma(v_0 + V_2^\top V_1^\top x^v_t)

    where the last holds in all layers but the first, whose values are :math:`v^{\mathrm{first}}`.
    In each head of width D = F/H the memory of :func:`lesson_code.torch.rwkv7` is written at
    :math:`\tilde k` and corrected at :math:`\kappa`, a vector of length 1; what the current token
    wrote counts once more, with the bonus u:

    .. math::

        \kappa_t &= \frac{k_t \odot \xi}{|k_t \odot \xi|} \qquad
        \tilde k_t = k_t \odot (1 + (a_t - 1) \odot \zeta) \\
        y_t &= W_O^\top \left(g_t \odot \left(\mathrm{norm}(o_t)
        + (r_t \cdot (u \odot \tilde k_t)) v_t\right)\right)

    The state is an :class:`RWKV7State`. Alone, a module is the first layer. In a
    :class:`LanguageModel` the first values go from layer to layer, past layers of other kinds;
    whoever stacks modules otherwise passes them on, by ``first_values`` and
    ``return_first_values`` of `forward` and `step`.

    Parameters
    ----------
    layer : int
        Which of the layers this is, from 0: initial decays and shares depend on it. All but layer 0
        mix the first values with their own; who is given none takes its own for them.
    num_layers : int
        Number of layers.

    Notes
    -----
    ``shares`` (6, F) are the shares of the *last* token, of r, w, k, v, a and g. ``receptance``,
    ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F. ``decay``, ``rate``, ``gate`` and
    ``first_share`` (None in layer 0) have the low-rank maps: ``base`` (F,), which the gate has not,
    ``down`` (F, R) and ``up`` (R, F). R is the multiple of 32 that is closest to
    :math:`2.5 \sqrt F`, for the gate :math:`5 \sqrt F`, for the values :math:`1.7 \sqrt F`, at
    least 32 and at most F. ``removal`` (F,) is :math:`\xi`, ``replacement`` (F,) is
    :math:`\zeta`, ``bonus`` (H, D) is u. ``norm`` has the weight and bias of a group norm that
    sees one token and head at a time.

    All begin as in the code of RWKV-7: ``output`` at 0, so that the layer gives 0 at first, and
    ``down`` too, so that decays, rates and shares do not depend on the token. Decays are between
    :math:`\exp(-e^{-1/2}) \approx 0.545` and 1 for any weights. Its authors train ``decay.base`` at
    twice the learning rate, and let only matrices decay.

    References
    ----------
    Peng et al. (2025), "RWKV-7 Goose with expressive dynamic state evolution";
    initialization as in its code.

    Examples
    --------
    >>> state = RWKV7TimeMix(width=8, num_heads=2).initial_state(1)
    >>> state.last.shape, state.S.shape
    (torch.Size([1, 8]), torch.Size([1, 2, 4, 4]))
    """

    def __init__(self, width: int, num_heads: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        self.num_heads = H = check_heads(width, num_heads)
        part, one_to_almost_zero, zero_to_one = ratios(width, layer, num_layers)
        exponents = torch.tensor([[p * one_to_almost_zero] for p in SHARES.values()])
        self.shares = nn.Parameter(1 - part**exponents)
        self.receptance, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        for linear, gain in ((self.receptance, 1), (self.key, 0.1), (self.value, 1)):
            orthogonal(linear.weight, gain=gain)
        nn.init.zeros_(self.output.weight)
        self.norm = nn.GroupNorm(H, width, eps=64e-5)
        nn.init.constant_(self.norm.weight, ((layer + 1) / num_layers) ** 0.7)

        to_one = torch.arange(width) / max(width - 1, 1)  # 0 ... 1
        centered = to_one - 0.5
        D = width // H
        place = (torch.arange(D) - (D - 1) / 2) / max((D - 1) / 2, 0.5)  # -1 ... 1 in a head
        zigzag = (place * place.abs()).repeat(H)
        speed = to_one ** (1 + zero_to_one**0.3)
        self.decay = LowRank(-5.5 + 6 * speed + 2.5 * zigzag, width, 2.5)
        self.rate = LowRank(-0.19 + 0.3 * zigzag + 0.4 * centered, width, 2.5)
        self.first_share = LowRank(0.73 - 0.4 * centered, width, 1.7) if layer else None
        self.gate = LowRank(None, width, 5)
        self.removal = nn.Parameter(0.71 - 0.1 * centered)
        self.replacement = nn.Parameter(torch.full((width,), 1.02))
        self.bonus = nn.Parameter(torch.full((H, D), -0.04))

    def mix_values(
        self, x: Tensor, state: RWKV7State | None, first_values: Tensor | None
    ) -> tuple[Tensor, RWKV7State, Tensor]:
        (B, _, F), H = x.shape, self.num_heads
        D = F // H
        check_state(state, RWKV7State, (B, F), (B, H, D, D))
        last, S = state or (None, None)
        before, last = shift(x, last)
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * share for share in self.shares)

        r, k, v = accumulate(self.receptance(x_r), self.key(x_k), self.value(x_v))
        if self.first_share is None or first_values is None:
            first_values = v
        if self.first_share is not None:
            v = v + (first_values.to(v.dtype) - v) * self.first_share(x_v).sigmoid()
        log_decay = -math.exp(-0.5) * self.decay(x_w, torch.tanh).sigmoid()
        a = self.rate(x_a).sigmoid()
        removal, replacement, bonus = (
            parameter.to(k.dtype) for parameter in (self.removal, self.replacement, self.bonus)
        )
        removal_key, k = k * removal, k * (1 + (a - 1) * replacement)

        heads = (r, k, v, log_decay, removal_key, a)
        r, k, v, log_decay, removal_key, a = (split_heads(y, H) for y in heads)  # (B, H, N, D)
        removal_key = normalize(removal_key, dim=-1, eps=1e-12)
        read, S = rwkv7(r, k, v, log_decay, removal_key, a, initial_state=S, return_state=True)
        own = (r * k * bonus[:, None]).sum(dim=-1, keepdim=True) * v
        read = group_norm(self.norm, read.transpose(1, 2)) + merge_heads(own)
        gated = (read * self.gate(x_g, torch.sigmoid)).to(self.output.weight.dtype)
        return self.output(gated), RWKV7State(last, S), first_values


class RWKV7ChannelMix(Mixer):
    r"""The channel mix of RWKV-7: a feed-forward sublayer that also sees the token before.

    .. math::

        y_t = W_V^\top \operatorname{relu}(W_K^\top x'_t)^2 \qquad
        x'_t = x_t + (x_{t-1} - x_t) \odot \mu

    with 4 F hidden channels. Unlike that of RWKV-4 it has no receptance. The state is the last
    input (B, F).

    Parameters
    ----------
    layer, num_layers : int
        As in :class:`RWKV7TimeMix`.

    Notes
    -----
    ``share`` (F,) is :math:`\mu`, the share of the *last* token; ``key``, F to 4 F, and ``value``,
    4 F to F, are ``nn.Linear``. They begin as in the code of RWKV-7, ``value`` at 0.

    References
    ----------
    Peng et al. (2025); initialization as in its code.

    Examples
    --------
    >>> RWKV7ChannelMix(width=8).initial_state(1).shape
    torch.Size([1, 8])
    """

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        part, one_to_almost_zero, _ = ratios(width, layer, num_layers)
        self.share = nn.Parameter(1 - part ** (one_to_almost_zero**4))
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        orthogonal(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def mix(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        check_state(state, Tensor, (len(x), self.width))
        before, last = shift(x, state)
        hidden = self.key(x + (before - x) * self.share)  # (B, N, 4 F)
        return self.value(hidden.relu().square()), last


class RWKV7Block(ValueMixer):
    r"""A whole block of RWKV-7: time mix and channel mix, each after a norm and with a residual.

    .. math::

        u &= x + \mathrm{TimeMix}(\mathrm{norm}_1(x)) \\
        y &= u + \mathrm{ChannelMix}(\mathrm{norm}_2(u))

    In the first block x is normed once before (``norm_0``), as embeddings of RWKV begin close to 0.
    The state is an :class:`RWKV7BlockState`, with the *normed* last inputs of both sublayers. First
    values go through a block as they go through :class:`RWKV7TimeMix`.

    Parameters
    ----------
    layer, num_layers : int
        As in :class:`RWKV7TimeMix`.

    Notes
    -----
    ``norm_0`` (None but in block 0), ``norm_1`` and ``norm_2`` are ``nn.LayerNorm``. The sublayers
    ``time_mix`` and ``channel_mix`` give 0 at first, so a new block passes on its input, normed in
    block 0.

    References
    ----------
    Peng et al. (2025); initialization as in its code.

    Examples
    --------
    Two of them in a :class:`LanguageModel`, which tells each its place:

    >>> from lesson_code.torch.modules import LanguageModel
    >>> model = LanguageModel(10, 8, mixers=[RWKV7Block, RWKV7Block])
    >>> [block.time_mix.first_share is not None for block in model.blocks]
    [False, True]
    """

    is_block = True

    def __init__(self, width: int, num_heads: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        place = {"layer": layer, "num_layers": num_layers}
        self.time_mix = RWKV7TimeMix(width, num_heads, **place)
        self.channel_mix = RWKV7ChannelMix(width, **place)
        self.num_heads = self.time_mix.num_heads
        self.norm_0 = nn.LayerNorm(width) if layer == 0 else None
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)

    def mix_values(
        self, x: Tensor, state: RWKV7BlockState | None, first_values: Tensor | None
    ) -> tuple[Tensor, RWKV7BlockState, Tensor]:
        (B, _, F), H = x.shape, self.num_heads
        check_state(state, RWKV7BlockState, (B, F), (B, H, F // H, F // H), (B, F))
        time_state: RWKV7State | None = None
        channel_state: Tensor | None = None
        if state is not None:
            time_state, channel_state = RWKV7State(*state[:-1]), state.channel_last
        if self.norm_0 is not None:
            x = self.norm_0(x)
        y, time_state, first_values = self.time_mix.mix_values(
            self.norm_1(x), time_state, first_values
        )
        x = x + y
        y, channel_state = self.channel_mix.mix(self.norm_2(x), channel_state)
        return x + y, RWKV7BlockState(*time_state, channel_state), first_values
