"""Softmax attention over a window as a module, whose cache stops growing."""

import torch
from torch import Tensor, nn

from lesson_code import _arguments
from lesson_code.torch.modules._parts import check_heads, merge_heads, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.softmax import (
    Cache,
    KVCache,
    RaggedCache,
    check_cache,
    rotate,
)
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.window import attend


class SlidingWindowAttention(Mixer):
    r"""Causal multi-head softmax attention over the last tokens only.

    As :class:`SoftmaxAttention`, but that a query sees the last `window` keys, its own one
    included (:func:`lesson_code.torch.sliding_window_attention`). Queries and keys are rotated by
    their positions. The state is a :class:`KVCache` of the last `window` - 1 tokens, whose keys are
    not rotated yet: only distances count, so its first token may have any position.

    Parameters
    ----------
    window : int
        How many keys a query sees.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F.

    References
    ----------
    Beltagy et al. (2020), section 3.1; Su et al. (2021), section 3.2.2, for the rotation.

    Examples
    --------
    >>> module = SlidingWindowAttention(width=8, num_heads=2, window=4)
    >>> _, cache = module(torch.randn(1, 100, 8), return_state=True)
    >>> cache.k.shape
    torch.Size([1, 2, 3, 4])
    """

    def __init__(self, width: int, num_heads: int, window: int = 64) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        self.window = _arguments.check_integer("window", window, minimum=1)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def mix(self, x: Tensor, state: Cache | None) -> tuple[Tensor, Cache]:
        H = self.num_heads
        check_cache(state, len(x), H, self.width // H)
        q, k, v = (split_heads(f(x), H) for f in (self.query, self.key, self.value))
        state = (state or KVCache(k[:, :, :0], v[:, :, :0])).append(k, v)
        before = state.k.shape[-2] - k.shape[-2]
        # As many queries as keys: those of the tokens before are not asked again.
        q = torch.cat([torch.zeros_like(state.k[:, :, :before]), q], dim=-2)
        hidden = state.hidden() if isinstance(state, RaggedCache) else None
        q, k, v = accumulate(rotate(q, 0), rotate(state.k, 0), state.v)
        with full_precision(q):
            out = attend(q, k, v, self.window, q.shape[-1] ** -0.5, hidden).to(state.v.dtype)
        kept = min(state.k.shape[-2], self.window - 1)
        k, v = (y[:, :, y.shape[-2] - kept :].clone() for y in state[:2])
        y = self.output(merge_heads(out[:, :, before:]))
        if isinstance(state, RaggedCache):
            return y, RaggedCache(k, v, state.lengths.clamp(max=kept))
        return y, KVCache(k, v)
