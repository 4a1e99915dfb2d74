"""Mesa as a module: what is read is the least-squares answer to all pairs so far."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from lesson_code.torch.mesa import MesaState, mesa
from lesson_code.torch.modules._parts import (
    HeadNorm,
    ShortConvolution,
    check_heads,
    check_state,
    of_length_one,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate


class MesaLayerState(NamedTuple):
    """What a :class:`MesaLayer` remembers.

    Parameters
    ----------
    tail : tensor, shape (B, 3, 2 F)
        The last three inputs of the convolution, in the dtype of the parameters.
    H : tensor, shape (B, H, D, D)
        Products of keys with themselves, in float32 at least.
    G : tensor, shape (B, H, D, D)
        Products of keys and values.
    """

    tail: Tensor
    H: Tensor
    G: Tensor


class MesaLayer(Mixer):
    r"""The Mesa layer: each token reads the memory that fits all pairs so far best.

    In each head, with * for the causal convolution over four tokens and keys and queries of length
    1,

    .. math::

        q_t, k_t &= \mathrm{silu}(w * (x [W_Q, W_K]))_t \qquad v_t = W_V^\top x_t \\
        \beta_t &= \sigma(w_\beta \cdot x_t) \qquad \alpha_t = \sigma(w_\alpha \cdot x_t) \qquad
        \lambda = \mathrm{softplus}(l) + \tfrac14 \\
        y_t &= W_O^\top \mathrm{norm}(o_t)

    where o is that of :func:`lesson_code.torch.mesa`: solved exactly for one token, by 30
    iterations of conjugate gradients for a sequence. The state is a :class:`MesaLayerState`.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F, ``beta`` and ``decay`` of
    F×H with bias; ``convolution`` has four weights for each of 2 F channels; ``ridge`` (H, D) is l,
    such that λ begins at 1; ``norm`` is a root mean square norm with a weight for each of the D
    channels of a head. The attribute ``iterations`` is the number 30; D of them are exact but for
    rounding.

    References
    ----------
    von Oswald et al. (2025), section 3; the layer as in flash-linear-attention.

    Examples
    --------
    >>> state = MesaLayer(width=8, num_heads=2).initial_state(1)
    >>> state.H.shape, state.G.shape
    (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 4, 4]))
    """

    iterations = 30

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        D = width // self.num_heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.beta, self.decay = (nn.Linear(width, self.num_heads) for _ in range(2))
        self.convolution = ShortConvolution(2 * width, bias=False)
        self.ridge = nn.Parameter(torch.full((self.num_heads, D), math.log(math.expm1(0.75))))
        self.norm = HeadNorm(D)

    def mix(self, x: Tensor, state: MesaLayerState | None) -> tuple[Tensor, MesaLayerState]:
        (B, N, F), heads = x.shape, self.num_heads
        D = F // heads
        check_state(state, MesaLayerState, (B, 3, 2 * F), *[(B, heads, D, D)] * 2)
        tail, memory = (state.tail, MesaState(*state[1:])) if state else (None, None)
        convolved, tail = self.convolution(torch.cat([self.query(x), self.key(x)], dim=-1), tail)
        maps = *convolved.chunk(2, dim=-1), self.value(x), self.beta(x), self.decay(x)
        q, k, v, beta, decay = accumulate(*(split_heads(y, heads) for y in maps))
        ridge = softplus(self.ridge.to(q.dtype)) + 0.25
        read, memory = mesa(
            of_length_one(q),
            of_length_one(k),
            v,
            beta[..., 0].sigmoid(),
            logsigmoid(decay[..., 0]),
            ridge,
            form="chunkwise" if N > 1 else "recurrent",
            iterations=self.iterations,
            initial_state=memory,
            return_state=True,
        )
        y = self.output(self.norm(read.transpose(1, 2)))
        return y, MesaLayerState(tail, *memory)
