"""Softmax attention as a module, whose state is the KV cache."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lesson_code import _arguments
from lesson_code.torch.elementwise import turn
from lesson_code.torch.modules._parts import (
    check_heads,
    check_state,
    merge_heads,
    split_heads,
)
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.softmax import (
    keys_seen,
    normalized,
    scaled_scores,
    softmax_attention,
    weighted_sum,
)


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

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row has, (B,)."""
        B, _, N, _ = self.k.shape
        return torch.full((B,), N, device=self.k.device)

    def append(self, k: Tensor, v: Tensor) -> "KVCache":
        """A new cache, of these tokens and the next ones, in the dtype of the latter."""
        return KVCache(*(_joined(*pair) for pair in zip(self, (k, v), strict=True)))

    def aligned(self, N: int) -> "RaggedCache":
        """The same tokens as the last ones of N."""
        return RaggedCache(*self, self.lengths).aligned(N)


class RaggedCache(NamedTuple):
    """A :class:`KVCache` of a batch whose rows have different lengths.

    Parameters
    ----------
    k, v : tensor, shape (B, H, N, D)
        Keys and values, those of each row at the end.
    lengths : tensor of integers, shape (B,)
        How many there are of each row.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor

    def append(self, k: Tensor, v: Tensor) -> "RaggedCache":
        """A new cache, of these tokens and as many further ones of each row."""
        return RaggedCache(_joined(self.k, k), _joined(self.v, v), self.lengths + k.shape[-2])

    def aligned(self, N: int) -> "RaggedCache":
        """The same tokens as the last ones of N."""
        k, v = (pad(x, (0, 0, N - x.shape[-2], 0)) for x in (self.k, self.v))
        return RaggedCache(k, v, self.lengths)

    def hidden(self) -> Tensor:
        """True (B, 1, 1, N) where a row has no token."""
        N = self.k.shape[-2]
        first = torch.arange(N, device=self.k.device) < N - self.lengths[:, None]
        return first[:, None, None]


Cache = KVCache | RaggedCache


def _joined(old, new):
    return torch.cat([old.to(new.dtype), new], dim=-2)  # autocast may have begun since


class SoftmaxAttention(Mixer):
    r"""Causal multi-head softmax attention.

    Computes :eq:`eq-softmax-attention` in each head of width D = F/H, with q, k and v linear in x,
    and

    .. math:: y_t = W_O^\top o_t

    for the outputs of all heads, side by side. The state is a :class:`KVCache`, or a
    :class:`RaggedCache` where rows differ in length.

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

    def mix(self, x: Tensor, state: Cache | None) -> tuple[Tensor, Cache]:
        H = self.num_heads
        check_cache(state, len(x), H, self.width // H)
        q, k, v = (split_heads(f(x), H) for f in (self.query, self.key, self.value))
        if state is None:
            state = KVCache(k[:, :, :0], v[:, :, :0])
        ragged = isinstance(state, RaggedCache)
        if self.rotary:
            start = state.lengths[:, None, None] if ragged else state.k.shape[-2]
            q, k = rotate(q, start), rotate(k, start)
        state = state.append(k, v)
        if ragged:
            out = _attend(q, state)
        else:
            out = softmax_attention(q, state.k, state.v, causal=True)
        return self.output(merge_heads(out)), state


def check_cache(cache: Any, B: int, H: int, D: int) -> None:
    """Refuse a state that is no cache of B rows and H heads of width D."""
    kind, lengths = (RaggedCache, [(B,)]) if isinstance(cache, RaggedCache) else (KVCache, [])
    check_state(cache, kind, *[(B, H, "N", D)] * 2, *lengths)
    if cache is not None:
        N = cache.k.shape[-2]
        _arguments.check_size("v of state", cache.v.shape[-2], "the length of k", N)


def _attend(q, cache):
    """Causal softmax attention to a cache whose rows differ in length."""
    dtype, (q, k, v) = q.dtype, accumulate(q, cache.k, cache.v)
    seen = keys_seen(q, k, causal=True)
    with full_precision(q):
        scores = scaled_scores(q, k, q.shape[-1] ** -0.5, seen)
        weights = normalized(torch.where(cache.hidden(), -math.inf, scores))
        return weighted_sum(weights, v, seen).to(dtype)


def rotate(x: Tensor, start: int | Tensor) -> Tensor:
    """Turn x (..., N, D), whose first position is `start`, by angles that grow with the position.

    Channel i and channel i + D/2 are a plane, which turns by 10000^(-2i/D) for each position. With
    an odd D the last channel stays as it is.
    """
    N, D = x.shape[-2:]
    dtype, (x,) = x.dtype, accumulate(x)
    position = start + torch.arange(N, device=x.device, dtype=x.dtype)
    plane = torch.arange(D // 2, device=x.device, dtype=x.dtype)
    angle = position[..., None] * 10000 ** (-2 * plane / D)  # (..., N, D/2)
    a, b, rest = x.split([D // 2, D // 2, D % 2], dim=-1)
    return torch.cat([*turn(a, b, angle), rest], dim=-1).to(dtype)
