"""The blocks of Mamba and Mamba-2: a short convolution, a selective memory and a gate."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from lesson_code import _arguments
from lesson_code.torch.mamba import selective_scan, state_space_dual
from lesson_code.torch.modules._parts import (
    ShortConvolution,
    check_heads,
    check_state,
    initial_step_bias,
    merge_heads,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate


class SelectiveSSMState(NamedTuple):
    """What a :class:`SelectiveSSM` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, E)
        The last three inputs of the convolution, in the dtype of the parameters.
    h : tensor, shape (B, E, K)
        Memory, in float32 at least.
    """

    tail: Tensor
    h: Tensor


class StateSpaceDualState(NamedTuple):
    """What a :class:`StateSpaceDual` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, E + 2 K)
        The last three inputs of the convolution, in the dtype of the parameters.
    S : tensor, shape (B, H, K, P)
        Memory of each head, in float32 at least.
    """

    tail: Tensor
    S: Tensor


class SelectiveSSM(Mixer):
    r"""The block of Mamba: what is written, read and forgotten is chosen by the token.

    With E = `expand` F channels, K numbers of state in each, and * for the causal convolution over
    four tokens (:eq:`eq-short-convolution`),

    .. math::

        u &= \mathrm{silu}(w * (x W_u)) \qquad z = x W_z \\
        \Delta_t &= \mathrm{softplus}(W_2^\top W_1^\top u_t + b) \qquad
        B_t = W_B^\top u_t \qquad C_t = W_C^\top u_t \\
        y &= \left(\mathrm{scan}(u, \Delta, A, B, C, D) \odot \mathrm{silu}(z)\right) W_O

    with the scan of :eq:`eq-selective-scan` and :math:`A = -\exp(\text{log\_rate})`. The state is a
    :class:`SelectiveSSMState`.

    Parameters
    ----------
    state_width : int
        Numbers K of state in each channel.
    expand : int
        Channels E over the width F.

    Notes
    -----
    The parameters, and their names in the paper's code: ``input`` (in_proj), F to 2 E, for u and z;
    ``convolution`` (conv1d); ``select`` (x_proj), E to R + 2 K, for a Δ of low rank R = F/16,
    rounded up, and for B and C; ``step_size`` (dt_proj), R to E with bias; ``log_rate`` (A_log),
    (E, K); ``skip`` (D), (E,); ``output`` (out_proj), E to F. Initialized as there: A is -1 ... -K
    in each channel, D is 1, the weights of ``step_size`` are uniform within :math:`\pm R^{-1/2}`
    and its bias is such that Δ begins between 0.001 and 0.1, evenly on a logarithmic scale. The
    paper's code trains A and D without weight decay.

    References
    ----------
    Gu and Dao (2024), sections 3.4 and 3.6, algorithm 2 and figure 3.

    Examples
    --------
    >>> state = SelectiveSSM(width=8).initial_state(1)
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
            self.step_size.bias.copy_(initial_step_bias(E))

    def mix(self, x: Tensor, state: SelectiveSSMState | None) -> tuple[Tensor, SelectiveSSMState]:
        E, K = self.inner_width, self.state_width
        check_state(state, SelectiveSSMState, (len(x), 3, E), (len(x), E, K))
        tail, h = state or (None, None)
        u, z = self.input(x).chunk(2, dim=-1)  # (B, N, E)
        u, tail = self.convolution(u, tail)
        low, B, C = self.select(u).split([self.rank, K, K], dim=-1)
        delta, rate, u, B, C, D = accumulate(self.step_size(low), self.log_rate, u, B, C, self.skip)
        y, h = selective_scan(
            u, softplus(delta), -rate.exp(), B, C, D, initial_state=h, return_state=True
        )
        return self.output(y.to(z.dtype) * silu(z)), SelectiveSSMState(tail, h)


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
    numbers for each head. The state is a :class:`StateSpaceDualState`.

    Parameters
    ----------
    state_width : int
        Numbers K of state for each channel: 64 or 128 in the paper's models.
    expand : int
        Channels E over the width F.

    Notes
    -----
    The parameters, and their names in the paper's code: ``input`` (in_proj), F to 2 E + 2 K + H,
    for z, u, B, C and Δ; ``convolution`` (conv1d) over u, B and C; ``step_bias`` (dt_bias),
    ``log_rate`` (A_log) and ``skip`` (D), (H,) each; ``norm``, the weight of the root mean square
    norm over the E channels of one token; ``output`` (out_proj), E to F. Initialized as there: -A
    uniform between 1 and 16, D = 1, ``step_bias`` such that Δ begins between 0.001 and 0.1, evenly
    on a logarithmic scale. The paper's code trains A, D and the bias without weight decay. B and C
    are one group: the paper may divide the heads into several.

    References
    ----------
    Dao and Gu (2024), sections 5 to 7; initialization as in its code.

    Examples
    --------
    >>> state = StateSpaceDual(width=8, num_heads=2, state_width=4).initial_state(1)
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
        self.step_bias = nn.Parameter(initial_step_bias(H))
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(H))
        self.norm = nn.Parameter(torch.ones(E))
        self.output = nn.Linear(E, width, bias=False)

    def mix(
        self, x: Tensor, state: StateSpaceDualState | None
    ) -> tuple[Tensor, StateSpaceDualState]:
        H, E, K = self.num_heads, self.inner_width, self.state_width
        check_state(state, StateSpaceDualState, (len(x), 3, E + 2 * K), (len(x), H, K, E // H))
        tail, S = state or (None, None)
        z, uBC, delta = self.input(x).split([E, E + 2 * K, H], dim=-1)
        uBC, tail = self.convolution(uBC, tail)
        u, B, C = uBC.split([E, K, K], dim=-1)
        delta, bias, rate, u, B, C, D, z = accumulate(
            delta, self.step_bias, self.log_rate, u, B, C, self.skip, z
        )
        delta = softplus(delta + bias).mT  # (B, H, N)
        log_decay = -rate.exp()[:, None] * delta
        u = split_heads(u, H)  # (B, H, N, P)
        B, C = B[:, None], C[:, None]  # (B, 1, N, K): the same for all heads
        v, S = state_space_dual(
            delta[..., None] * u, log_decay, B, C, initial_state=S, return_state=True
        )
        v = merge_heads(v + D[:, None, None] * u) * silu(z)  # (B, N, E)
        v = rms_norm(v, (E,), eps=1e-5).to(self.norm.dtype)
        return self.output(self.norm * v), StateSpaceDualState(tail, S)
