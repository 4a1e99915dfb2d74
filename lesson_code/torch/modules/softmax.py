"""Softmax attention as a module, whose state is the KV cache."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    merge_heads,
    split_heads,
    turn,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate
from lesson_code.torch.softmax import softmax_attention


class KVCache(NamedTuple):
    """What :class:`SoftmaxAttention` remembers: the keys and values of all tokens so far.

    It is the one state that grows: by 2 F numbers with each token of a sequence.

    Parameters
    ----------
    k : tensor, shape (B, H, N, D)
        Keys, already rotated where the module rotates them.
    v : tensor, shape (B, H, N, D)
        Values.
    """

    k: Tensor
    v: Tensor

    def append(self, k: Tensor, v: Tensor) -> "KVCache":
        """A new cache, of these tokens and the next ones, in the dtype of the latter."""
        pairs = zip(self, (k, v), strict=True)  # autocast may have begun since
        return KVCache(*(torch.cat([old.to(new.dtype), new], dim=-2) for old, new in pairs))


class SoftmaxAttention(Mixer):
    r"""Causal multi-head softmax attention.

    Computes :eq:`eq-softmax-attention` in each head of width D = F/H, with q, k and v linear in x,
    and

    .. math:: y_t = W_O^\top o_t

    for the outputs of all heads, side by side. The state is a :class:`KVCache`.

    Parameters
    ----------
    rotary : bool
        Rotate each query and key by its position (RoPE), so that a score depends on how far apart
        the two are. Without this, attention does not know in which order the earlier tokens came.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F. Positions continue from
    the length of the cache. A step copies the cache into a new one that is longer by a token: it
    costs O(N F), which is also what reading the cache costs.

    References
    ----------
    Vaswani et al. (2017), section 3.2.2; Su et al. (2021), section 3.2.2, for the rotation.

    Examples
    --------
    >>> module = SoftmaxAttention(width=8, num_heads=2)
    >>> _, cache = module(torch.randn(1, 5, 8), return_state=True)
    >>> cache.k.shape
    torch.Size([1, 2, 5, 4])
    """

    def __init__(self, width: int, num_heads: int, *, rotary: bool = True) -> None:
        super().__init__(width)
        _arguments.check_flags(rotary=rotary)
        self.num_heads = check_heads(width, num_heads)
        self.rotary = rotary
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def mix(self, x: Tensor, state: KVCache | None) -> tuple[Tensor, KVCache]:
        H = self.num_heads
        check_state(state, KVCache, *[(len(x), H, "N", self.width // H)] * 2)
        q, k, v = (split_heads(f(x), H) for f in (self.query, self.key, self.value))
        if state is None:
            state = KVCache(k[:, :, :0], v[:, :, :0])
        start = state.k.shape[-2]
        _arguments.check_size("v of state", state.v.shape[-2], "the length of k", start)
        if self.rotary:
            q, k = rotate(q, start), rotate(k, start)
        state = state.append(k, v)
        out = softmax_attention(q, state.k, state.v, causal=True)
        return self.output(merge_heads(out)), state


def rotate(x: Tensor, start: int) -> Tensor:
    """Turn x (..., N, D), whose first position is `start`, by angles that grow with the position.

    Channel i and channel i + D/2 are a plane, which turns by 10000^(-2i/D) for each position. With
    an odd D the last channel stays as it is.
    """
    N, D = x.shape[-2:]
    dtype, (x,) = x.dtype, accumulate(x)
    position = torch.arange(start, start + N, device=x.device, dtype=x.dtype)
    plane = torch.arange(D // 2, device=x.device, dtype=x.dtype)
    angle = position[:, None] * 10000 ** (-2 * plane / D)  # (N, D/2)
    a, b, rest = x.split([D // 2, D // 2, D % 2], dim=-1)
    return torch.cat([*turn(a, b, angle), rest], dim=-1).to(dtype)
