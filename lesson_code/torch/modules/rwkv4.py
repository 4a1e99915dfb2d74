"""RWKV-4: its time mix, its channel mix, and the block of both."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lesson_code.torch.engines.fading import fading
from lesson_code.torch.modules._parts import check_memory, check_state, orthogonal, ratios, shift
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.wkv import WKVState


class RWKV4State(NamedTuple):
    """What the time mix of RWKV-4 remembers.

    Parameters
    ----------
    last : tensor, shape (B, F)
        The last input, in the dtype of the inputs.
    numerator, denominator, maximum : tensor, shape (B, F)
        The memory, a :class:`WKVState`, in float32 at least.
    """

    last: Tensor
    numerator: Tensor
    denominator: Tensor
    maximum: Tensor


class RWKV4BlockState(NamedTuple):
    """What a block of RWKV-4 remembers.

    Parameters
    ----------
    time_last : tensor, shape (B, F)
        The last input of the time mix, after its norm.
    numerator, denominator, maximum : tensor, shape (B, F)
        The memory, a :class:`WKVState`, in float32 at least.
    channel_last : tensor, shape (B, F)
        The last input of the channel mix, after its norm.
    """

    time_last: Tensor
    numerator: Tensor
    denominator: Tensor
    maximum: Tensor
    channel_last: Tensor


class RWKV4TimeMix(Mixer):
    r"""The time mix of RWKV-4: WKV of shifted tokens, with a gate.

    Computes :eq:`eq-time-mix`. Key, value and receptance each look at a mixture of x_t and x_{t-1}
    of their own, with fixed shares (:eq:`eq-token-shift`). There are no heads, as every channel has
    its own weights. The state is an :class:`RWKV4State`.

    Parameters
    ----------
    layer : int
        Which of the layers this is, from 0: the initial decays and shares depend on it.
    num_layers : int
        Number of layers.

    Notes
    -----
    ``mix_key``, ``mix_value`` and ``mix_receptance`` (F,) are the share of the current token,
    ``log_rate`` (F,) is the logarithm of the decay, :math:`w = e^{\mathrm{log\_rate}} > 0`,
    ``bonus`` is (F,), and ``key``, ``value``, ``receptance`` and ``output`` are ``nn.Linear`` of
    F×F.

    They begin as in the code of RWKV-4. Decays go from :math:`w = e^{-5}`, a memory of 148 tokens,
    in the first channel to :math:`e^3`, in which only the token before has weight, in the last. In
    later layers more of them are small. The first channels see the token before, the last ones
    the current token. ``key``, ``receptance`` and ``output`` are 0, so that the layer gives 0 at
    first and its gradient begins in ``output``.

    References
    ----------
    Peng et al. (2023), time mixing; initialization as in its code.

    Examples
    --------
    >>> x = torch.randn(1, 5, 8)
    >>> _, state = RWKV4TimeMix(width=8)(x, return_state=True)
    >>> torch.equal(state.last, x[:, 4])
    True
    """

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        part, one_to_almost_zero, zero_to_one = ratios(width, layer, num_layers)
        share = part**one_to_almost_zero
        self.mix_key = nn.Parameter(share)
        self.mix_value = nn.Parameter(share + 0.3 * zero_to_one)
        self.mix_receptance = nn.Parameter(part ** (0.5 * one_to_almost_zero))
        channel = torch.arange(width)
        speed = (channel / max(width - 1, 1)) ** (0.7 + 1.3 * zero_to_one)  # 0 ... 1
        self.log_rate = nn.Parameter(-5 + 8 * speed)
        self.bonus = nn.Parameter(math.log(0.3) + 0.5 * ((channel + 1) % 3 - 1))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        orthogonal(self.value.weight)
        for linear in (self.key, self.receptance, self.output):
            nn.init.zeros_(linear.weight)

    def mix(self, x: Tensor, state: RWKV4State | None) -> tuple[Tensor, RWKV4State]:
        check_state(state, RWKV4State, *[(len(x), self.width)] * 4)
        last, memory = (None, None) if state is None else (state.last, WKVState(*state[1:]))
        before, last = shift(x, last)
        mixes = self.mix_key, self.mix_value, self.mix_receptance
        x_k, x_v, x_r = (mix * x + (1 - mix) * before for mix in mixes)
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        r, k, v, log_rate, bonus = accumulate(r, k, v, self.log_rate, self.bonus)
        check_memory(memory, k)
        with full_precision(k):
            read, after = fading(None, k, v, log_rate.exp(), bonus, memory)
        y = self.output((r.sigmoid() * read).to(self.output.weight.dtype))
        return y, RWKV4State(last, *after)


class RWKV4ChannelMix(Mixer):
    r"""The channel mix of RWKV-4: a feed-forward sublayer that also sees the token before.

    Computes :eq:`eq-channel-mix`, with 4 F hidden channels and the square of the ReLU. The state is
    the last input (B, F).

    Parameters
    ----------
    layer, num_layers : int
        As in :class:`RWKV4TimeMix`.

    Notes
    -----
    ``mix_key`` and ``mix_receptance`` (F,) are the share of the current token; ``key``, F to 4 F,
    ``value``, 4 F to F, and ``receptance``, F to F, are ``nn.Linear``. They begin as in the code of
    RWKV-4, ``value`` and ``receptance`` at 0.

    References
    ----------
    Peng et al. (2023), channel mixing; initialization as in its code.

    Examples
    --------
    >>> RWKV4ChannelMix(width=8).initial_state(1).shape
    torch.Size([1, 8])
    """

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        part, one_to_almost_zero, _ = ratios(width, layer, num_layers)
        self.mix_key = nn.Parameter(part**one_to_almost_zero)
        self.mix_receptance = nn.Parameter(part**one_to_almost_zero)
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        orthogonal(self.key.weight, gain=2)  # the root of 4
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.receptance.weight)

    def mix(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        check_state(state, Tensor, (len(x), self.width))
        before, last = shift(x, state)
        x_k, x_r = (mix * x + (1 - mix) * before for mix in (self.mix_key, self.mix_receptance))
        hidden = self.key(x_k).relu().square()  # (B, N, 4 F)
        return self.receptance(x_r).sigmoid() * self.value(hidden), last


class RWKV4Block(Mixer):
    r"""A whole block of RWKV-4: time mix and channel mix, each after a norm and with a residual.

    .. math::

        u &= x + \mathrm{TimeMix}(\mathrm{norm}_1(x)) \\
        y &= u + \mathrm{ChannelMix}(\mathrm{norm}_2(u))

    In the first block x is normed once before (``norm_0``), as embeddings of RWKV begin close to 0.
    The state is an :class:`RWKV4BlockState`, with the *normed* last inputs of both sublayers.

    Parameters
    ----------
    layer, num_layers : int
        As in :class:`RWKV4TimeMix`.

    Notes
    -----
    ``norm_0`` (None but in block 0), ``norm_1`` and ``norm_2`` are ``nn.LayerNorm``. The sublayers
    ``time_mix`` and ``channel_mix`` give 0 at first, so a new block passes on its input, normed in
    block 0.

    References
    ----------
    Peng et al. (2023); initialization as in its code.

    Examples
    --------
    Two of them in a :class:`LanguageModel`, which tells each its place:

    >>> from lesson_code.torch.modules import LanguageModel
    >>> model = LanguageModel(10, 8, mixers=[RWKV4Block, RWKV4Block])
    >>> [block.norm_0 is not None for block in model.blocks]
    [True, False]
    """

    is_block = True

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        self.time_mix = RWKV4TimeMix(width, layer=layer, num_layers=num_layers)
        self.channel_mix = RWKV4ChannelMix(width, layer=layer, num_layers=num_layers)
        self.norm_0 = nn.LayerNorm(width) if layer == 0 else None
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)

    def mix(self, x: Tensor, state: RWKV4BlockState | None) -> tuple[Tensor, RWKV4BlockState]:
        time_state: RWKV4State | None = None
        channel_state: Tensor | None = None
        check_state(state, RWKV4BlockState, *[(len(x), self.width)] * 5)
        if state is not None:
            time_state, channel_state = RWKV4State(*state[:-1]), state.channel_last
        if self.norm_0 is not None:
            x = self.norm_0(x)
        y, time_state = self.time_mix.mix(self.norm_1(x), time_state)
        x = x + y
        y, channel_state = self.channel_mix.mix(self.norm_2(x), channel_state)
        return x + y, RWKV4BlockState(*time_state, channel_state)
