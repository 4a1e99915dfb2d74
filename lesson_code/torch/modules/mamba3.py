"""The block of Mamba-3: no convolution, a state that rotates, and the trapezoidal rule."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, silu, softplus

from lesson_code import _arguments
from lesson_code.torch.mamba3 import Mamba3State, mamba3
from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    initial_step_bias,
    merge_heads,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate


class Mamba3(Mixer):
    r"""The block of Mamba-3, with one input and one output for each channel (SISO).

    With E = `expand` F channels in H heads of width P = E/H, K numbers of state for each channel,
    and B and C that the heads share but for a bias,

    .. math::

        [z, u, B, C, \Delta, a, \lambda, \omega] &= x W \qquad
        \Delta = \mathrm{softplus}(\Delta + b) \qquad A = -f(a) \qquad
        \lambda = \sigma(\lambda) \\
        B &= \mathrm{norm}(B) + b_B \qquad C = \mathrm{norm}(C) + b_C \qquad
        \theta_t = \sum_{s \le t} \Delta_s \pi \tanh(\omega_s) \\
        y &= \left((\mathrm{mamba3}(u, \Delta, \Delta A, \lambda, \theta, B, C) + D u) \odot
             \mathrm{silu}(z)\right) W_O

    with :func:`lesson_code.torch.mamba3`, and with f(a) = 1 + a above 0 and 1/(1 - a) below, but
    for a rate of at least 0.0001. A second write of each token takes the place of the convolution.
    The state is a :class:`lesson_code.torch.Mamba3State`, (B, H, ...).

    Parameters
    ----------
    state_width : int
        Numbers K of state for each channel, a multiple of 4; the first half of them rotates.
    expand : int
        Channels E over the width F.

    Notes
    -----
    ``input`` (in_proj) is an ``nn.Linear`` of F to 2 E + 2 K + 3 H + K/4, in the order above;
    ``step_bias`` (dt_bias) and ``skip`` (D) are (H,); ``norm_B`` and ``norm_C`` the weights (K,) of
    root mean square norms, ``bias_B`` and ``bias_C`` (H, K); ``output`` (out_proj) E to F. Δ begins
    between 0.001 and 0.1, evenly on a logarithmic scale, and all weights of norms, biases of B and
    C and D at 1. The function f is that of the paper's code since June 2026; before, it was
    softplus, and the weights of either do not serve the other.

    References
    ----------
    Lahoti et al. (2026), section 3; initialization as in its code.

    Examples
    --------
    >>> state = Mamba3(width=8, num_heads=2, state_width=4).initial_state(1)
    >>> state.S.shape, state.angle.shape
    (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 2]))
    """

    def __init__(
        self, width: int, num_heads: int, *, state_width: int = 64, expand: int = 2
    ) -> None:
        super().__init__(width)
        self.num_heads = H = check_heads(width, num_heads)
        self.state_width = K = _arguments.check_integer("state_width", state_width, minimum=1)
        if K % 4:
            raise ValueError(f"state_width must be a multiple of 4, got {K}.")
        self.inner_width = E = width * _arguments.check_integer("expand", expand, minimum=1)
        self.input = nn.Linear(width, 2 * E + 2 * K + 3 * H + K // 4, bias=False)
        self.step_bias = nn.Parameter(initial_step_bias(H))
        self.norm_B, self.norm_C = (nn.Parameter(torch.ones(K)) for _ in range(2))
        self.bias_B, self.bias_C = (nn.Parameter(torch.ones(H, K)) for _ in range(2))
        self.skip = nn.Parameter(torch.ones(H))
        self.output = nn.Linear(E, width, bias=False)

    def mix(self, x: Tensor, state: Mamba3State | None) -> tuple[Tensor, Mamba3State]:
        H, E, K = self.num_heads, self.inner_width, self.state_width
        shapes = (K, E // H), (K,), (E // H,), (K // 2,)
        check_state(state, Mamba3State, *((len(x), H, *shape) for shape in shapes))
        z, *parts = self.input(x).split([E, E, K, K, H, H, H, K // 4], dim=-1)
        own = self.step_bias, self.norm_B, self.norm_C, self.bias_B, self.bias_C, self.skip
        u, B, C, delta, a, share, turn, b, *norms, bias_B, bias_C, D = accumulate(*parts, *own)
        u = split_heads(u, H)  # (B, H, N, P)
        delta, share = softplus(delta + b).mT, share.sigmoid().mT  # (B, H, N)
        rate = torch.where(a > 0, 1 + a, 1 / (1 - a.clamp(max=0))).clamp(min=1e-4).mT
        turn = delta[..., None] * math.pi * turn.tanh()[:, None]  # (B, H, N, K/4)
        B, C = (
            rms_norm(y, (K,), weight, eps=1e-5)[:, None] + bias[:, None]
            for y, weight, bias in zip((B, C), norms, (bias_B, bias_C), strict=True)
        )
        y, state = mamba3(
            u,
            delta,
            -rate * delta,
            share,
            pad(turn, (0, K // 4)),
            B,
            C,
            initial_state=state,
            return_state=True,
        )
        y = merge_heads(y + D[:, None, None] * u).to(z.dtype) * silu(z)
        return self.output(y), state
