"""RWKV-4: its time mix, its channel mix, and the block of both."""

import math
from typing import NamedTuple

import torch
from torch import nn

from lesson_code import _arguments
from lesson_code.torch.engines.fading import fading
from lesson_code.torch.modules._parts import check_shapes
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.rwkv4 import shifted
from lesson_code.torch.wkv import WKVState, begin


class RWKV4State(NamedTuple):
    """What the time mix of RWKV-4 remembers.

    Parameters
    ----------
    last : tensor, shape (B, F)
        The last input, in the dtype of the inputs.
    numerator, denominator, maximum : tensor, shape (B, F)
        The memory, a :class:`WKVState`, in float32 at least.
    """

    last: torch.Tensor
    numerator: torch.Tensor
    denominator: torch.Tensor
    maximum: torch.Tensor


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

    time_last: torch.Tensor
    numerator: torch.Tensor
    denominator: torch.Tensor
    maximum: torch.Tensor
    channel_last: torch.Tensor


class RWKV4TimeMix(Mixer):
    r"""The time mix of RWKV-4: WKV of shifted tokens, with a gate.

    Computes :eq:`eq-time-mix`. Key, value and receptance each look at a mixture of x_t and x_{t-1}
    of their own, with fixed shares (:eq:`eq-token-shift`). There are no heads, as every channel has
    its own weights. `forward` and `step` are those of :class:`Mixer`; the state is an
    :class:`RWKV4State`.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    layer : int
        Which of the layers this is, from 0: the initial decays and shares depend on it.
    num_layers : int
        Number of layers.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `width` or `num_layers` is below 1, or `layer` is negative or not below `num_layers`.

    Notes
    -----
    The parameters: ``mix_key``, ``mix_value`` and ``mix_receptance`` (F,), the share of the current
    token; ``log_rate`` (F,), the logarithm of the decay, :math:`w = e^{\mathrm{log\_rate}} > 0`;
    ``bonus`` (F,); and ``key``, ``value``, ``receptance`` and ``output``, four ``nn.Linear`` of F×F
    without bias.

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
    >>> module = RWKV4TimeMix(width=8)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> torch.equal(state.last, x[:, 4])
    True
    """

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        part, one_to_almost_zero, zero_to_one = _ratios(width, layer, num_layers)
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
        nn.init.orthogonal_(self.value.weight)
        for linear in (self.key, self.receptance, self.output):
            nn.init.zeros_(linear.weight)

    def mix(self, x: torch.Tensor, state: RWKV4State | None) -> tuple[torch.Tensor, RWKV4State]:
        if state is not None:
            check_shapes(state, RWKV4State, *[(len(x), self.width)] * 4)
        last, memory = (_zeros_before(x), None) if state is None else _split(state)
        k = self.key(shifted(x, last, self.mix_key))
        v = self.value(shifted(x, last, self.mix_value))
        r = self.receptance(shifted(x, last, self.mix_receptance))

        r, k, v, log_rate, bonus = accumulate(r, k, v, self.log_rate, self.bonus)
        memory = begin(memory, "x", k, self.width, x=x.shape[:1])
        with full_precision(k):
            read, after = fading(None, k, v, log_rate.exp(), bonus, memory)
        y = self.output((r.sigmoid() * read).to(self.output.weight.dtype))
        return y, RWKV4State(_last(x, last), *after)


class RWKV4ChannelMix(Mixer):
    r"""The channel mix of RWKV-4: a feed-forward sublayer that also sees the token before.

    Computes :eq:`eq-channel-mix`, with 4 F hidden channels and the square of the ReLU. `forward`
    and `step` are those of :class:`Mixer`; the state is the last input (B, F).

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    layer : int
        Which of the layers this is, from 0: the initial shares depend on it.
    num_layers : int
        Number of layers.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `width` or `num_layers` is below 1, or `layer` is negative or not below `num_layers`.

    Notes
    -----
    The parameters: ``mix_key`` and ``mix_receptance`` (F,), the share of the current token; and
    ``key``, F to 4 F, ``value``, 4 F to F, and ``receptance``, F to F, three ``nn.Linear`` without
    bias. They begin as in the code of RWKV-4, ``value`` and ``receptance`` at 0.

    References
    ----------
    Peng et al. (2023), channel mixing; initialization as in its code.

    Examples
    --------
    >>> module = RWKV4ChannelMix(width=8)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x, return_state=True)
    >>> torch.equal(state, x[:, 4])
    True
    """

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        part, one_to_almost_zero, _ = _ratios(width, layer, num_layers)
        self.mix_key = nn.Parameter(part**one_to_almost_zero)
        self.mix_receptance = nn.Parameter(part**one_to_almost_zero)
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.key.weight, gain=2)  # the root of 4
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.receptance.weight)

    def mix(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None:
            _arguments.check_arrays(torch.Tensor, state=state)
            if state.shape != (len(x), self.width):
                raise ValueError(
                    f"state must have shape ({len(x)}, {self.width}), got {tuple(state.shape)}."
                )
        last = _zeros_before(x) if state is None else state
        hidden = self.key(shifted(x, last, self.mix_key)).relu().square()  # (B, N, 4 F)
        gate = self.receptance(shifted(x, last, self.mix_receptance)).sigmoid()
        return gate * self.value(hidden), _last(x, last)


class RWKV4Block(Mixer):
    r"""A whole block of RWKV-4: time mix and channel mix, each after a norm and with a residual.

    .. math::

        u &= x + \mathrm{TimeMix}(\mathrm{norm}_1(x)) \\
        y &= u + \mathrm{ChannelMix}(\mathrm{norm}_2(u))

    In the first block x is normed once before (``norm_0``), as embeddings of RWKV begin close to 0.
    `forward` and `step` are those of :class:`Mixer`; the state is an :class:`RWKV4BlockState`, with
    the *normed* last inputs of both sublayers.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    layer : int
        Which of the blocks this is, from 0. The initial decays and shares depend on it; block 0 has
        the additional norm.
    num_layers : int
        Number of blocks.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `width` or `num_layers` is below 1, or `layer` is negative or not below `num_layers`.

    Notes
    -----
    The parts are ``norm_0`` (None but in block 0), ``norm_1`` and ``norm_2``, ``nn.LayerNorm``;
    ``time_mix``, an :class:`RWKV4TimeMix`; and ``channel_mix``, an :class:`RWKV4ChannelMix`. Both
    give 0 at first, so a new block passes on its input, normed in block 0.

    References
    ----------
    Peng et al. (2023); initialization as in its code.

    Examples
    --------
    Two of them in a :class:`LanguageModel`, which tells each its place:

    >>> from lesson_code.torch.modules import LanguageModel
    >>> model = LanguageModel(10, 8, mixers=[RWKV4Block, RWKV4Block])
    >>> block = model.blocks[0]
    >>> x = torch.randn(1, 5, 8)
    >>> state = block.initial_state(1)
    >>> for x_t in x.unbind(dim=1):
    ...     y_t, state = block.step(x_t, state)             # as an RNN
    >>> torch.allclose(y_t, block(x)[:, 4], atol=1e-5)      # in parallel
    True
    """

    is_block = True

    def __init__(self, width: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__(width)
        self.time_mix = RWKV4TimeMix(width, layer=layer, num_layers=num_layers)
        self.channel_mix = RWKV4ChannelMix(width, layer=layer, num_layers=num_layers)
        self.norm_0 = nn.LayerNorm(width) if layer == 0 else None
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)

    def mix(
        self, x: torch.Tensor, state: RWKV4BlockState | None
    ) -> tuple[torch.Tensor, RWKV4BlockState]:
        time_state: RWKV4State | None = None
        channel_state: torch.Tensor | None = None
        if state is not None:
            check_shapes(state, RWKV4BlockState, *[(len(x), self.width)] * 5)
            time_state, channel_state = RWKV4State(*state[:-1]), state.channel_last
        if self.norm_0 is not None:
            x = self.norm_0(x)
        y, time_state = self.time_mix.mix(self.norm_1(x), time_state)
        x = x + y
        y, channel_state = self.channel_mix.mix(self.norm_2(x), channel_state)
        return x + y, RWKV4BlockState(*time_state, channel_state)


def _ratios(width, layer, num_layers):
    """What initial values depend on: i/F for channel i, 1 - layer/L, and layer/(L-1)."""
    num_layers = _arguments.check_integer("num_layers", num_layers, minimum=1)
    layer = _arguments.check_integer("layer", layer, minimum=0)
    if layer >= num_layers:
        raise ValueError(f"layer must be below num_layers, {num_layers}, got {layer}.")
    part = torch.arange(width) / width
    return part, 1 - layer / num_layers, layer / max(num_layers - 1, 1)


def _zeros_before(x):
    """The input before the first."""
    return x.new_zeros(len(x), x.shape[-1])


def _last(x, last):
    """The last input, which is the one before where there is none."""
    return torch.cat([last[:, None].to(x.dtype), x], dim=1)[:, -1].clone()


def _split(state):
    """The last input and the memory."""
    return state.last, WKVState(*state[1:])
