"""States that may be overwritten, as nobody else holds them: what `generate` steps with.

A step then writes one token into the memory that is there, where it would else make a new one.
"""

from typing import Any

import torch
from torch import Tensor

from lesson_code.torch.memory import LinearAttentionState
from lesson_code.torch.modules.softmax import KVCache


def own(states: tuple) -> tuple:
    """The states of a stack of blocks, which the caller gives away, as ones that overwrite."""
    return tuple(_own(state) for state in states)


def _own(state: Any) -> Any:
    for kind, owned in (KVCache, RoomyCache), (LinearAttentionState, OwnMemory):
        if type(state) is kind:
            return owned(*state)
    return state  # of a kind for which a new one costs little beside the step


class OwnMemory(LinearAttentionState):
    """S and z, into which the next tokens are written."""

    def write(self, k: Tensor, v: Tensor) -> "OwnMemory":
        self.S.addcmul_(k[..., :, None], v[..., None, :])
        self.z.add_(k)
        return self


class RoomyCache(KVCache):
    """Keys and values at the beginning of larger buffers, into which the next are written."""

    buffers: tuple[Tensor, ...] | None = None

    def append(self, k: Tensor, v: Tensor) -> "RoomyCache":
        N, end = self.k.shape[-2], self.k.shape[-2] + k.shape[-2]
        buffers = self.buffers or self
        if end > buffers[0].shape[-2]:
            # A quarter as much room again: copying then costs little beside reading.
            room = max(N // 4, 64) + k.shape[-2]
            buffers = tuple(
                torch.cat([x, x.new_empty(*x.shape[:2], room, x.shape[-1])], dim=-2) for x in self
            )
        for buffer, new in zip(buffers, (k, v), strict=True):
            buffer[:, :, N:end] = new
        cache = RoomyCache(*(buffer[:, :, :end] for buffer in buffers))
        cache.buffers = buffers
        return cache
