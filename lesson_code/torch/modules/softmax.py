"""Softmax attention as a module, whose state is the KV cache."""

from typing import Any, NamedTuple

import torch
from torch import nn

from lesson_code import _arguments
from lesson_code.torch.precision import accumulate
from lesson_code.torch.modules._parts import check_heads, check_state, merge_heads, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.softmax import softmax_attention


class KVCache(NamedTuple):
    """What softmax attention remembers: the keys and values of all tokens so far.

    It is the one state that grows: by 2 F numbers with each token of a sequence.

    Parameters
    ----------
    k : tensor, shape (B, H, N, D)
        Keys, already rotated where the module rotates them.
    v : tensor, shape (B, H, N, D)
        Values.
    """

    k: torch.Tensor
    v: torch.Tensor


class SoftmaxAttention(Mixer):
    r"""Causal multi-head softmax attention.

    Computes :eq:`eq-softmax-attention` in each of H heads of width D = F/H, on queries, keys and
    values that are linear in x, and maps the outputs of all heads, side by side, to the width F.
    `forward` and `step` are those of :class:`Mixer`; the state is a :class:`KVCache`.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    num_heads : int
        Number H of heads; it divides the width.
    rotary : bool
        Rotate each query and key by its position (RoPE), so that a score depends on how far apart
        the two are. Without this, attention does not know in which order the earlier tokens came.

    Raises
    ------
    TypeError
        If `width` or `num_heads` is no integer, or `rotary` neither True nor False.
    ValueError
        If `width` or `num_heads` is below 1, or `num_heads` does not divide `width`.

    Notes
    -----
    The parameters are ``query``, ``key``, ``value`` and ``output``, four ``nn.Linear`` of F×F
    without bias, initialized as torch does.

    Positions continue from the length of the cache. A step copies the cache into a new one that is
    longer by a token: it costs O(N F), which is also what reading the cache costs.

    References
    ----------
    Vaswani et al. (2017), section 3.2.2; Su et al. (2021), section 3.2.2, for the rotation.

    Examples
    --------
    >>> module = SoftmaxAttention(width=8, num_heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, cache = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, cache = module.step(x[:, 4], cache)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-6)
    True
    >>> cache.k.shape
    torch.Size([1, 2, 5, 4])
    """

    def __init__(self, width: int, num_heads: int, *, rotary: bool = True) -> None:
        super().__init__(width)
        _arguments.check_flags(rotary=rotary)
        self.num_heads = check_heads(width, num_heads)
        self.rotary = rotary
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def mix(self, x: torch.Tensor, state: KVCache | None) -> tuple[torch.Tensor, KVCache]:
        q = split_heads(self.query(x), self.num_heads)  # (B, H, N, D)
        k = split_heads(self.key(x), self.num_heads)
        v = split_heads(self.value(x), self.num_heads)
        if state is not None:
            check_state(state, KVCache, len(x), self.num_heads)
            _arguments.check_size(
                "v of state", state.v.shape[2], "the length of k", state.k.shape[2]
            )
            state = KVCache(*(cached.to(k.dtype) for cached in state))  # autocast may have begun
        if self.rotary:
            start = 0 if state is None else state.k.shape[-2]
            q, k = _rotate(q, start), _rotate(k, start)
        if state is not None:
            k = torch.cat([state.k, k], dim=-2)
            v = torch.cat([state.v, v], dim=-2)
        out = softmax_attention(q, k, v, causal=True)
        return self.output(merge_heads(out)), KVCache(k, v)

    def mix_one_(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        q, k, v = (
            linear(x_t).unflatten(-1, (self.num_heads, 1, -1))  # (B, H, 1, D)
            for linear in (self.query, self.key, self.value)
        )
        if not isinstance(state, _RoomyCache):
            check_state(state, KVCache, len(x_t), self.num_heads)
            state = _RoomyCache(state, k.dtype)
        if self.rotary:
            q, k = _rotate(q, state.length), _rotate(k, state.length)
        out = softmax_attention(q, *state.append(k, v), causal=True)
        return self.output(out.flatten(1)), state


class _RoomyCache:
    """A KV cache with room for the next tokens, which are written into it."""

    def __init__(self, cache, dtype):
        self.length, self.buffers = cache.k.shape[-2], [x.to(dtype) for x in cache]

    def append(self, k, v):
        """Write one token (B, H, 1, ·) and return all keys and all values so far."""
        if self.length == self.buffers[0].shape[-2]:
            # A quarter as much room again: copying then costs little beside reading.
            room = max(self.length // 4, 64)
            self.buffers = [
                torch.cat([x, x.new_empty(*x.shape[:2], room, x.shape[-1])], dim=-2)
                for x in self.buffers
            ]
        views = []
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[:, :, self.length : self.length + 1] = new
            views.append(buffer[:, :, : self.length + 1])
        self.length += 1
        return views


def _rotate(x, start):
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
    a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat([a, b, rest], dim=-1).to(dtype)
