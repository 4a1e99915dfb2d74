"""The delta rules as modules: short convolutions, keys of length 1, and a rate for each write."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from lesson_code import _arguments
from lesson_code.torch.delta import (
    delta_rule,
    gated_delta_product,
    gated_delta_rule,
    kimi_delta_attention,
)
from lesson_code.torch.modules._parts import (
    HeadNorm,
    ShortConvolution,
    check_heads,
    check_state,
    initial_step_bias,
    of_length_one,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate


class DeltaNetState(NamedTuple):
    """What a delta layer remembers: the last inputs of its convolution, and the memory.

    Parameters
    ----------
    tail : tensor, shape (B, 3, 3 F)
        Queries, keys and values, side by side, of the last three tokens, before the convolution;
        (1 + 2 J) F numbers of each token where it has J keys and values.
    S : tensor, shape (B, H, D, M)
        Memory, in float32 at least.
    """

    tail: Tensor
    S: Tensor


class DeltaNet(Mixer):
    r"""The delta rule as a layer: each head corrects what it remembers.

    Computes :eq:`eq-deltanet-layer`. Queries, keys and values are linear in x, then convolved with
    those of the last three tokens, channel by channel, and passed through SiLU. In each head of
    width D = M = F/H, with the length :math:`|k| = \sqrt{\sum_i k_i^2 + 10^{-6}}`,

    .. math::

        q_t \leftarrow \frac{q_t}{|q_t| \sqrt D} \qquad k_t \leftarrow \frac{k_t}{|k_t|} \qquad
        \beta_t = \sigma(w_\beta \cdot x_t) \qquad y_t = W_O^\top \mathrm{norm}(o_t)

    where the memory follows :eq:`eq-delta-rule`. The state is a :class:`DeltaNetState`.

    Parameters
    ----------
    allow_negative_eigenvalues : bool
        Let beta go up to 2, so that a token can turn what is stored at its key into its negative.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F, ``beta`` is one of F×H;
    ``convolution`` has four weights for each of the 3 F channels; ``norm`` is a root mean square
    norm with a weight for each of the M channels. It undoes the factor :math:`1/\sqrt D` but for
    its epsilon of 1e-5.

    References
    ----------
    Schlag et al. (2021), section 4.2; Yang et al. (2024), "Parallelizing Linear Transformers with
    the Delta Rule over Sequence Length", section 3.3, for the layer; Grazzi et al. (2025) for a
    beta up to 2.

    Examples
    --------
    >>> DeltaNet(width=8, num_heads=2).initial_state(1).S.shape
    torch.Size([1, 2, 4, 4])
    """

    num_steps = 1  # how often a token corrects the memory

    def __init__(
        self, width: int, num_heads: int, *, allow_negative_eigenvalues: bool = False
    ) -> None:
        super().__init__(width)
        _arguments.check_flags(allow_negative_eigenvalues=allow_negative_eigenvalues)
        self.num_heads = check_heads(width, num_heads)
        self.largest_beta = 2 if allow_negative_eigenvalues else 1
        J = self.num_steps
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, J * width, bias=False) for _ in range(2))
        self.convolution = ShortConvolution((1 + 2 * J) * width, bias=False)
        self.beta = nn.Linear(width, J * self.num_heads, bias=False)
        self.norm = HeadNorm(width // self.num_heads)
        self.output = nn.Linear(width, width, bias=False)

    def mix(self, x: Tensor, state: DeltaNetState | None) -> tuple[Tensor, DeltaNetState]:
        (B, _, F), H = x.shape, self.num_heads
        D, sizes = F // H, [F, self.num_steps * F, self.num_steps * F]
        check_state(state, DeltaNetState, (B, self.convolution.size - 1, sum(sizes)), (B, H, D, D))
        tail, S = state or (None, None)
        projected = torch.cat([self.query(x), self.key(x), self.value(x)], dim=-1)
        convolved, tail = self.convolution(projected, tail)
        q, k, v = convolved.split(sizes, dim=-1)
        written = (self._split(y) for y in (k, v, self.beta(x)))
        q, k, v, beta = accumulate(split_heads(q, H), *written)  # (B, H, N, D), beta (B, H, N, 1)
        q, k, beta = of_length_one(q) * D**-0.5, of_length_one(k), beta[..., 0].sigmoid()
        read, S = self._remember(q, k, v, self.largest_beta * beta, x, S)
        return self.output(self._gated(self.norm(read.transpose(1, 2)), x)), DeltaNetState(tail, S)

    def _split(self, y):
        """What is written, keys, values or rates, in heads: (B, H, N, .)."""
        return split_heads(y, self.num_heads)

    def _remember(self, q, k, v, beta, x, S):
        """What is read (B, H, N, M), and the memory after the last token."""
        return delta_rule(q, k, v, beta, initial_state=S, return_state=True)

    def _gated(self, read, x):
        return read


class GatedDeltaNet(DeltaNet):
    r"""The gated delta rule as a layer: each head forgets, then corrects what it remembers.

    All is as in :class:`DeltaNet`, but that the memory follows :eq:`eq-gated-delta-rule`, with the
    decay log :math:`g_t` of each head, and that what is read passes a gate:

    .. math::

        g_t = -e^{a} \operatorname{softplus}(w_g \cdot x_t + b) \qquad
        y_t = W_O^\top \left(\mathrm{norm}(o_t) \odot \mathrm{silu}(W_G^\top x_t)\right)

    Notes
    -----
    Besides the parameters of :class:`DeltaNet`, ``gate`` is an ``nn.Linear`` of F×F, ``decay`` one
    of F×H, ``log_rate`` (H) the a above, and ``decay_bias`` (H) the b. The rate :math:`e^a`
    is drawn uniformly from [0.001, 16], and b such that softplus(b) is drawn log-uniformly from
    [0.001, 0.1], as in Mamba-2. In the paper values are twice as wide as keys; here they are as
    wide, so that the state has the size of the others'.

    References
    ----------
    Yang et al. (2025), "Gated Delta Networks", section 3.

    Examples
    --------
    >>> GatedDeltaNet(width=8, num_heads=2).initial_state(1).S.shape
    torch.Size([1, 2, 4, 4])
    """

    _rule = staticmethod(gated_delta_rule)

    def __init__(
        self, width: int, num_heads: int, *, allow_negative_eigenvalues: bool = False
    ) -> None:
        super().__init__(width, num_heads, allow_negative_eigenvalues=allow_negative_eigenvalues)
        self.gate = nn.Linear(width, width, bias=False)
        self.decay = nn.Linear(width, self.num_heads, bias=False)
        # The logarithm of a rate drawn from [0, 16] might be -inf, and stay so for ever.
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1e-3, 16).log())
        self.decay_bias = nn.Parameter(initial_step_bias(self.num_heads))

    def _remember(self, q, k, v, beta, x, S):
        a, b = self.log_rate.to(q.dtype), self.decay_bias.to(q.dtype)
        log_decay = -a.exp() * softplus(self.decay(x).to(q.dtype) + b)  # (B, N, H)
        return self._rule(q, k, v, beta, log_decay.mT, initial_state=S, return_state=True)

    def _gated(self, read, x):
        return read * silu(self.gate(x))


class GatedDeltaProduct(GatedDeltaNet):
    r"""Gated DeltaProduct as a layer: each token corrects the memory of a head several times.

    All is as in :class:`GatedDeltaNet`, but that a token has J keys, values and rates. The memory
    forgets once, then is corrected with one after the other, and read after the last
    (:func:`lesson_code.torch.gated_delta_product`). What was stored passes through a product of J
    matrices, each a reflection where beta is 2.

    Parameters
    ----------
    num_steps : int
        Number J of corrections; with 1 the layer is :class:`GatedDeltaNet`.
    allow_negative_eigenvalues : bool
        Let beta go up to 2, the default here: of the corrections only reflections, multiplied,
        permute and turn what is stored.

    Notes
    -----
    ``key`` and ``value`` are ``nn.Linear`` of F×JF and ``beta`` one of F×JH, the first correction's
    outputs before the second's, in each those of the first head before the second's;
    ``convolution`` has four weights for each of the (1 + 2 J) F channels.

    References
    ----------
    Siems et al. (2025), section 3; Grazzi et al. (2025) for a beta up to 2.

    Examples
    --------
    >>> state = GatedDeltaProduct(width=8, num_heads=2, num_steps=3).initial_state(1)
    >>> state.tail.shape, state.S.shape
    (torch.Size([1, 3, 56]), torch.Size([1, 2, 4, 4]))
    """

    _rule = staticmethod(gated_delta_product)

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_steps: int = 2,
        *,
        allow_negative_eigenvalues: bool = True,
    ) -> None:
        # First, as the sizes of the maps follow from it.
        self.num_steps = _arguments.check_integer("num_steps", num_steps, minimum=1)
        super().__init__(width, num_heads, allow_negative_eigenvalues=allow_negative_eigenvalues)

    def _split(self, y):
        """(B, N, J H D) -> (B, H, N, J, D)"""
        return y.unflatten(-1, (self.num_steps, self.num_heads, -1)).permute(0, 3, 1, 2, 4)


class KimiDeltaAttention(DeltaNet):
    r"""Kimi delta attention as a layer: each channel of a head forgets at a rate of its own.

    All is as in :class:`DeltaNet`, but that the memory is that of
    :func:`lesson_code.torch.kimi_delta_attention`, with a decay for each token, head and channel of
    the keys, and that what is read passes a gate. Both look at x through D numbers:

    .. math::

        g_t = -e^{a} \operatorname{softplus}(W_2^\top W_1^\top x_t + b) \qquad
        y_t = W_O^\top \left(\mathrm{norm}(o_t) \odot \sigma(V_2^\top V_1^\top x_t + c)\right)

    Notes
    -----
    Besides the parameters of :class:`DeltaNet`, ``decay`` are the two maps F×D×F of the decay,
    ``log_rate`` (H) is the a above, one for each head, and ``decay_bias`` (F) the b, one for each
    channel; ``gate`` are the two maps F×D×F of the gate, the second with the bias c. The rate
    :math:`e^a` is drawn uniformly from [1, 16], and b such that softplus(b) is drawn log-uniformly
    from [0.001, 0.1].

    References
    ----------
    Kimi Team (2025), section 3, for the layer; Grazzi et al. (2025) for a beta up to 2.

    Examples
    --------
    >>> KimiDeltaAttention(width=8, num_heads=2).initial_state(1).S.shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(
        self, width: int, num_heads: int, *, allow_negative_eigenvalues: bool = False
    ) -> None:
        super().__init__(width, num_heads, allow_negative_eigenvalues=allow_negative_eigenvalues)
        D = width // self.num_heads
        self.decay = _through_few(width, D, bias=False)
        self.gate = _through_few(width, D, bias=True)
        self.log_rate = nn.Parameter(torch.empty(self.num_heads).uniform_(1, 16).log())
        self.decay_bias = nn.Parameter(initial_step_bias(width))

    def _remember(self, q, k, v, beta, x, S):
        a, b = self.log_rate.to(q.dtype), self.decay_bias.to(q.dtype)
        steps = split_heads(softplus(self.decay(x).to(q.dtype) + b), self.num_heads)
        log_decay = -a.exp()[:, None, None] * steps  # (B, H, N, D)
        return kimi_delta_attention(q, k, v, beta, log_decay, initial_state=S, return_state=True)

    def _gated(self, read, x):
        return read * self.gate(x).sigmoid()


def _through_few(width, rank, *, bias):
    """A linear map of rank at most `rank`."""
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=bias))
