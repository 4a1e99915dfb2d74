"""The delta rules as modules: short convolutions, keys of length 1, and a rate for each write."""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu, softplus

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate
from lesson_code.torch.delta import delta_rule, gated_delta_rule
from lesson_code.torch.modules._parts import (
    HeadNorm,
    ShortConvolution,
    check_heads,
    check_shapes,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer


class DeltaNetState(NamedTuple):
    """What a delta layer remembers: the last inputs of its convolution, and the memory.

    Parameters
    ----------
    tail : tensor, shape (B, 3, 3 F)
        Queries, keys and values, side by side, of the last three tokens, before the convolution.
    S : tensor, shape (B, H, D, M)
        Memory, in float32 at least.
    """

    tail: torch.Tensor
    S: torch.Tensor


class _DeltaMemory(Mixer):
    """Queries, keys, values and beta of H heads, and what they read; subclasses say the rest."""

    def __init__(self, width, num_heads, allow_negative_eigenvalues):
        super().__init__(width)
        _arguments.check_flags(allow_negative_eigenvalues=allow_negative_eigenvalues)
        self.num_heads = check_heads(width, num_heads)
        self.largest_beta = 2 if allow_negative_eigenvalues else 1
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.convolution = ShortConvolution(3 * width, bias=False)
        self.beta = nn.Linear(width, self.num_heads, bias=False)
        self.norm = HeadNorm(width // self.num_heads)
        self.output = nn.Linear(width, width, bias=False)

    def mix(
        self, x: torch.Tensor, state: DeltaNetState | None
    ) -> tuple[torch.Tensor, DeltaNetState]:
        B, H, D = len(x), self.num_heads, self.width // self.num_heads
        if state is not None:
            tail_shape = B, self.convolution.size - 1, 3 * self.width
            check_shapes(state, DeltaNetState, tail_shape, (B, H, D, D))
        tail, S = state or (None, None)
        projected = torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)
        convolved, tail = self.convolution(projected, tail)
        q, k, v = (split_heads(y, self.num_heads) for y in convolved.chunk(3, dim=-1))
        q, k, v, beta = accumulate(q, k, v, self.beta(x).mT)  # (B, H, N, D), beta (B, H, N)
        q, k = _of_length_one(q) * q.shape[-1] ** -0.5, _of_length_one(k)
        beta = self.largest_beta * beta.sigmoid()
        read, S = self._remember(q, k, v, beta, x, S)
        return self._after_read(read.transpose(1, 2), x), DeltaNetState(tail, S)

    def _remember(self, q, k, v, beta, x, S):
        """What is read (B, H, N, M), and the memory after the last token."""
        raise NotImplementedError

    def _after_read(self, read, x):
        """The output for x (B, N, F) and what its heads have read (B, N, H, M), not yet rounded."""
        raise NotImplementedError


class DeltaNet(_DeltaMemory):
    r"""The delta rule as a layer: each head corrects what it remembers.

    Computes :eq:`eq-deltanet-layer`. Queries, keys and values are linear in x, then convolved with
    those of the last three tokens, channel by channel, and passed through SiLU. In each of H heads
    of width D = M = F/H, queries and keys are divided by their length (the square root of the sum
    of squares and 1e-6), queries by :math:`\sqrt D` as well, and :math:`\beta_t = \sigma(w_\beta
    \cdot x_t)`. The memory follows :eq:`eq-delta-rule`; what is read passes a norm for each token
    and head and an output projection. `forward` and `step` are those of :class:`Mixer`; the state
    is a :class:`DeltaNetState`.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    num_heads : int
        Number H of heads; it divides the width.
    allow_negative_eigenvalues : bool
        Let beta go up to 2, so that a token can turn what is stored at its key into its negative.

    Raises
    ------
    TypeError
        If `width` or `num_heads` is no integer, or `allow_negative_eigenvalues` neither True nor
        False.
    ValueError
        If `width` or `num_heads` is below 1, or `num_heads` does not divide `width`.

    Notes
    -----
    The parameters are ``query``, ``key``, ``value`` and ``output``, four ``nn.Linear`` of F×F
    without bias; ``beta``, one of F×H; ``convolution``, with four weights for each of the 3 F
    channels; and ``norm``, a root mean square norm with one weight for each of the M channels. All
    are initialized as torch does. The norm undoes the factor :math:`1/\sqrt D` but for its epsilon
    of 1e-5.

    References
    ----------
    Schlag et al. (2021), section 4.2; Yang et al. (2024), "Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length", section 3.3, for the layer; Grazzi et al. (2025) for a
    beta up to 2.

    Examples
    --------
    >>> module = DeltaNet(width=8, num_heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> state.S.shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(
        self, width: int, num_heads: int, *, allow_negative_eigenvalues: bool = False
    ) -> None:
        super().__init__(width, num_heads, allow_negative_eigenvalues)

    def _remember(self, q, k, v, beta, x, S):
        return delta_rule(q, k, v, beta, initial_state=S, return_state=True)

    def _after_read(self, read, x):
        return self.output(self.norm(read))


class GatedDeltaNet(_DeltaMemory):
    r"""The gated delta rule as a layer: each head forgets, then corrects what it remembers.

    All is as in :class:`DeltaNet`, but that the memory follows :eq:`eq-gated-delta-rule` with the
    decay log

    .. math:: g_t = -e^{a} \operatorname{softplus}(w_g \cdot x_t + b)

    of each head, and that what is read and normalized is multiplied by a gate,
    :math:`\mathrm{SiLU}(W_G^\top x_t)`, before the output projection.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    num_heads : int
        Number H of heads; it divides the width.
    allow_negative_eigenvalues : bool
        Let beta go up to 2, so that a token can turn what is stored at its key into its negative.

    Raises
    ------
    TypeError
        If `width` or `num_heads` is no integer, or `allow_negative_eigenvalues` neither True nor
        False.
    ValueError
        If `width` or `num_heads` is below 1, or `num_heads` does not divide `width`.

    Notes
    -----
    The parameters are those of :class:`DeltaNet`, and ``gate``, an ``nn.Linear`` of F×F; ``decay``,
    one of F×H; ``log_rate`` (H), the a above; and ``decay_bias`` (H), the b. The rate :math:`e^a`
    is drawn uniformly from [0.001, 16], and b such that softplus(b) is drawn log-uniformly from
    [0.001, 0.1], as in Mamba-2; the rest is initialized as torch does. In the paper values are
    twice as wide as keys; here they are as wide, so that the state has the size of the others'.

    References
    ----------
    Yang et al. (2025), "Gated Delta Networks", section 3.

    Examples
    --------
    >>> module = GatedDeltaNet(width=8, num_heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    """

    def __init__(
        self, width: int, num_heads: int, *, allow_negative_eigenvalues: bool = False
    ) -> None:
        super().__init__(width, num_heads, allow_negative_eigenvalues)
        self.gate = nn.Linear(width, width, bias=False)
        self.decay = nn.Linear(width, self.num_heads, bias=False)
        # The logarithm of a rate drawn from [0, 16] might be -inf, and stay so for ever.
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1e-3, 16).log())
        size = torch.empty(self.num_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.decay_bias = nn.Parameter(size + torch.log(-torch.expm1(-size)))  # softplus⁻¹(size)

    def _remember(self, q, k, v, beta, x, S):
        a, b = self.log_rate.to(q.dtype), self.decay_bias.to(q.dtype)
        log_decay = -a.exp() * softplus(self.decay(x).to(q.dtype) + b)  # (B, N, H)
        return gated_delta_rule(q, k, v, beta, log_decay.mT, initial_state=S, return_state=True)

    def _after_read(self, read, x):
        return self.output(self.norm(read) * silu(self.gate(x)))


def _of_length_one(x):
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()
