"""The blocks of Mamba and Mamba-2: a short convolution, a selective memory and a gate."""

import math
from typing import NamedTuple

import torch
from torch import nn

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate
from lesson_code.torch.mamba import selective_scan, state_space_dual
from lesson_code.torch.modules._parts import (
    ShortConvolution,
    check_heads,
    check_shapes,
    merge_heads,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer


class SelectiveSSMState(NamedTuple):
    """What a :class:`SelectiveSSM` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, E)
        The last three inputs of the convolution, in the dtype of the parameters.
    h : tensor, shape (B, E, K)
        Memory, in the accumulation dtype: float64 for float64, otherwise float32.
    """

    tail: torch.Tensor
    h: torch.Tensor


class StateSpaceDualState(NamedTuple):
    """What a :class:`StateSpaceDual` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, E + 2 K)
        The last three inputs of the convolution, in the dtype of the parameters.
    S : tensor, shape (B, H, K, P)
        Memory of each head, in the accumulation dtype: float64 for float64, otherwise float32.
    """

    tail: torch.Tensor
    S: torch.Tensor


class SelectiveSSM(Mixer):
    r"""The block of Mamba: what is written, read and forgotten is chosen by the token.

    With E = `expand` F channels, K numbers of state in each, and * for the causal convolution over
    four tokens (:eq:`eq-short-convolution`),

    .. math::

        u &= \mathrm{silu}(w * (x W_u)) \qquad z = x W_z \\
        \Delta_t &= \mathrm{softplus}(W_2^\top W_1^\top u_t + b) \qquad
        B_t = W_B^\top u_t \qquad C_t = W_C^\top u_t \\
        y &= \left(\mathrm{scan}(u, \Delta, A, B, C, D) \odot \mathrm{silu}(z)\right) W_O

    with the scan of :eq:`eq-selective-scan` and :math:`A = -\exp(\text{log\_rate})`. `forward` and
    `step` are those of :class:`Mixer`; the state is a :class:`SelectiveSSMState`.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    state_width : int
        Numbers K of state in each channel.
    expand : int
        Channels E over the width F.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If an argument is below 1.

    Notes
    -----
    The parameters, and their names in the paper's code: ``input`` (in_proj), F to 2 E, for u and z;
    ``convolution`` (conv1d); ``select`` (x_proj), E to R + 2 K, for a Δ of low rank R = F/16,
    rounded up, and for B and C; ``step_size`` (dt_proj), R to E with bias; ``log_rate`` (A_log),
    (E, K); ``skip`` (D), (E,); ``output`` (out_proj), E to F. Initialized as there: A is -1 ... -K
    in each channel, D is 1, the weights of ``step_size`` are uniform within :math:`\pm R^{-1/2}`
    and its bias is such that Δ begins between 0.001 and 0.1, evenly on a logarithmic scale; the
    rest as torch does. The paper's code trains A and D without weight decay.

    References
    ----------
    Gu and Dao (2024), sections 3.4 and 3.6, algorithm 2 and figure 3.

    Examples
    --------
    >>> module = SelectiveSSM(width=8)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> state.tail.shape, state.h.shape
    (torch.Size([1, 3, 16]), torch.Size([1, 16, 16]))
    """

    def __init__(self, width: int, *, state_width: int = 16, expand: int = 2) -> None:
        super().__init__(width)
        self.state_width = K = _arguments.check_integer("state_width", state_width, minimum=1)
        self.inner_width = E = width * _arguments.check_integer("expand", expand, minimum=1)
        self.rank = R = math.ceil(width / 16)
        self.input = nn.Linear(width, 2 * E, bias=False)
        self.convolution = ShortConvolution(E)
        self.select = nn.Linear(E, R + 2 * K, bias=False)
        self.step_size = nn.Linear(R, E)
        self.log_rate = nn.Parameter(torch.arange(1, K + 1.0).log().repeat(E, 1))
        self.skip = nn.Parameter(torch.ones(E))
        self.output = nn.Linear(E, width, bias=False)
        nn.init.uniform_(self.step_size.weight, -(R**-0.5), R**-0.5)
        with torch.no_grad():
            self.step_size.bias.copy_(_bias_of_steps(E))

    def mix(
        self, x: torch.Tensor, state: SelectiveSSMState | None
    ) -> tuple[torch.Tensor, SelectiveSSMState]:
        E, K = self.inner_width, self.state_width
        if state is not None:
            check_shapes(state, SelectiveSSMState, (len(x), 3, E), (len(x), E, K))
        tail, h = state or (None, None)
        u, z = self.input(x).chunk(2, dim=-1)  # (B, N, E)
        u, tail = self.convolution(u, tail)
        low, B, C = self.select(u).split([self.rank, K, K], dim=-1)
        delta, rate, *others = accumulate(self.step_size(low), self.log_rate, u, B, C, self.skip)
        delta, A = nn.functional.softplus(delta), -rate.exp()
        u, B, C, D = others
        y, h = selective_scan(u, delta, A, B, C, D, initial_state=h, return_state=True)
        return self.output(y.to(z.dtype) * nn.functional.silu(z)), SelectiveSSMState(tail, h)


class StateSpaceDual(Mixer):
    r"""The block of Mamba-2: one decay for each head and token, so that it trains by products.

    With E = `expand` F channels in H heads of width P = E/H, K numbers of state for each channel,
    which all heads read and write with the same C and B, and * for the causal convolution over four
    tokens (:eq:`eq-short-convolution`),

    .. math::

        z &= x W_z \qquad [u, B, C] = \mathrm{silu}(w * (x [W_u, W_B, W_C])) \qquad
        \Delta = \mathrm{softplus}(x W_\Delta + b) \\
        v &= \mathrm{dual}(\Delta u, \Delta A, B, C) + D u \\
        y &= \mathrm{norm}(v \odot \mathrm{silu}(z)) W_O

    where dual is :eq:`eq-state-space-dual` and Δ, :math:`A = -\exp(\text{log\_rate})` and D are
    numbers for each head. `forward` and `step` are those of :class:`Mixer`; the state is a
    :class:`StateSpaceDualState`.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    num_heads : int
        Number H of heads; it divides the width.
    state_width : int
        Numbers K of state for each channel: 64 or 128 in the paper's models.
    expand : int
        Channels E over the width F.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If an argument is below 1, or `num_heads` does not divide `width`.

    Notes
    -----
    The parameters, and their names in the paper's code: ``input`` (in_proj), F to 2 E + 2 K + H,
    for z, u, B, C and Δ; ``convolution`` (conv1d) over u, B and C; ``step_bias`` (dt_bias),
    ``log_rate`` (A_log) and ``skip`` (D), (H,) each; ``norm``, the weight of the root mean square
    norm over the E channels of one token; ``output`` (out_proj), E to F. Initialized as there: -A
    uniform between 1 and 16, D = 1, ``step_bias`` such that Δ begins between 0.001 and 0.1, evenly
    on a logarithmic scale; the rest as torch does. The paper's code trains A, D and the bias
    without weight decay. B and C are one group: the paper may divide the heads into several.

    References
    ----------
    Dao and Gu (2024), sections 5 to 7; initialization as in its code.

    Examples
    --------
    >>> module = StateSpaceDual(width=8, num_heads=2, state_width=4)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> state.tail.shape, state.S.shape
    (torch.Size([1, 3, 24]), torch.Size([1, 2, 4, 8]))
    """

    def __init__(
        self, width: int, num_heads: int, *, state_width: int = 64, expand: int = 2
    ) -> None:
        super().__init__(width)
        self.num_heads = H = check_heads(width, num_heads)
        self.state_width = K = _arguments.check_integer("state_width", state_width, minimum=1)
        self.inner_width = E = width * _arguments.check_integer("expand", expand, minimum=1)
        self.input = nn.Linear(width, 2 * E + 2 * K + H, bias=False)
        self.convolution = ShortConvolution(E + 2 * K)
        self.step_bias = nn.Parameter(_bias_of_steps(H))
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(H))
        self.norm = nn.Parameter(torch.ones(E))
        self.output = nn.Linear(E, width, bias=False)

    def mix(
        self, x: torch.Tensor, state: StateSpaceDualState | None
    ) -> tuple[torch.Tensor, StateSpaceDualState]:
        H, E, K = self.num_heads, self.inner_width, self.state_width
        if state is not None:
            tail_shape = len(x), 3, E + 2 * K
            check_shapes(state, StateSpaceDualState, tail_shape, (len(x), H, K, E // H))
        tail, S = state or (None, None)
        z, uBC, delta = self.input(x).split([E, E + 2 * K, H], dim=-1)
        uBC, tail = self.convolution(uBC, tail)
        u, B, C = uBC.split([E, K, K], dim=-1)
        delta, bias, rate, u, B, C, D, z = accumulate(
            delta, self.step_bias, self.log_rate, u, B, C, self.skip, z
        )
        delta = nn.functional.softplus(delta + bias).mT  # (B, H, N)
        log_decay = -rate.exp()[:, None] * delta
        u = split_heads(u, H)  # (B, H, N, P)
        B, C = B[:, None], C[:, None]  # (B, 1, N, K): the same for all heads
        v, S = state_space_dual(
            delta[..., None] * u, log_decay, B, C, initial_state=S, return_state=True
        )
        v = merge_heads(v + D[:, None, None] * u) * nn.functional.silu(z)  # (B, N, E)
        # What was read may be too large for half precision: it is rounded only after the norm.
        v = nn.functional.rms_norm(v, (E,), eps=1e-5).to(self.norm.dtype)
        return self.output(self.norm * v), StateSpaceDualState(tail, S)


def _bias_of_steps(size):
    """Numbers whose softplus is between 0.001 and 0.1, evenly on a logarithmic scale."""
    steps = torch.empty(size).uniform_(math.log(0.001), math.log(0.1)).exp()
    return steps + (-torch.expm1(-steps)).log()
