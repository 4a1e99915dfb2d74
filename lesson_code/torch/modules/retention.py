"""Retention as a module: rotated queries and keys, a decay for each head, a norm and a gate."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lesson_code.torch.elementwise import turn
from lesson_code.torch.modules._parts import check_heads, check_state, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate
from lesson_code.torch.retention import retention


class RetentionState(NamedTuple):
    """What :class:`Retention` remembers, in float32 at least.

    Parameters
    ----------
    S : tensor, shape (B, H, D, M)
        Memory, of rotated keys.
    position : tensor, shape (B,)
        Number of tokens so far, by which the next query and key are rotated.
    """

    S: Tensor
    position: Tensor


class Retention(Mixer):
    r"""Causal multi-scale retention, the mixer of RetNet.

    Computes :eq:`eq-retnet-layer`: queries and keys that are linear in x, each rotated by its
    position, keys divided by :math:`\sqrt D`; in each head of width D = M = F/H the recurrence
    :eq:`eq-retention` with a decay of its own, :math:`\gamma_h = 1 - 2^{-5-h}`
    (:eq:`eq-retention-decays`); then

    .. math:: y_t = W_O^\top \left(\mathrm{silu}(W_G^\top x_t) \odot \mathrm{norm}(o_t)\right)

    The state is a :class:`RetentionState`.

    Notes
    -----
    ``query``, ``key``, ``value``, ``gate`` and ``output`` are ``nn.Linear`` of F×F, with Xavier's
    uniform initialization and the gains :math:`2^{-2.5}` and, for the output, 1/2. The buffer
    ``forgetting`` holds :math:`1 - \gamma_h`, powers of two, which every dtype can hold where
    :math:`\gamma_h` would be rounded to 1. The norm is a root mean square norm over the M channels
    of a head, with an epsilon of 1e-6 and without a weight, which ``output`` can take over.

    Channels 2i and 2i + 1 of queries and keys are a plane. The planes turn by angles from 1 down to
    1/10000 for each position, in geometric progression; with an odd D the last channel stays as it
    is. Beyond some 100,000 tokens the angles lose digits in float32, as everywhere where positions
    are rotated. In the paper's larger models values and gates are twice as wide.

    References
    ----------
    Sun et al. (2023), equations 5 to 8; initialization and the norm's form as in its code.

    Examples
    --------
    >>> module = Retention(width=8, num_heads=2)
    >>> _, state = module(torch.randn(1, 5, 8), return_state=True)
    >>> state.S.shape, state.position.tolist()
    (torch.Size([1, 2, 4, 4]), [5.0])
    """

    forgetting: Tensor

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        self.query, self.key, self.value, self.gate, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        self.register_buffer("forgetting", 2.0 ** (-5 - torch.arange(self.num_heads)))
        for linear in (self.query, self.key, self.value, self.gate):
            nn.init.xavier_uniform_(linear.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.output.weight, gain=2**-1)

    def mix(self, x: Tensor, state: RetentionState | None) -> tuple[Tensor, RetentionState]:
        (B, N, F), H = x.shape, self.num_heads
        D = F // H
        check_state(state, RetentionState, (B, H, D, D), (B,))
        maps = self.query, self.key, self.value
        q, k, v = accumulate(*(split_heads(f(x), H) for f in maps))  # (B, H, N, D)
        S, start = state or (None, q.new_zeros(B))
        start = start.to(q.dtype)
        position = start[:, None] + torch.arange(N, dtype=q.dtype, device=x.device)  # (B, N)
        q, k = _rotate(q, position), _rotate(k * D**-0.5, position)
        decay = 1 - self.forgetting.to(q.dtype)
        read, S = retention(q, k, v, decay, initial_state=S, return_state=True)
        read = nn.functional.rms_norm(read.transpose(1, 2), (D,), eps=1e-6).flatten(-2)
        y = self.output(nn.functional.silu(self.gate(x)) * read.to(x.dtype))
        return y, RetentionState(S, start + N)


def _rotate(x, position):
    """Turn x (B, H, N, D) at positions (B, N), plane by plane of channels (0, 1), (2, 3), ..."""
    planes = x.shape[-1] // 2
    slowness = torch.linspace(0, 1, planes, dtype=x.dtype, device=x.device)
    angle = position[:, None, :, None] * 10000.0**-slowness  # (B, 1, N, D/2)
    turned = turn(x[..., 0 : 2 * planes : 2], x[..., 1 : 2 * planes : 2], angle)
    return torch.cat([torch.stack(turned, dim=-1).flatten(-2), x[..., 2 * planes :]], dim=-1)
