"""A sequence in segments of a few chunks, each one operator with a derivative of its own.

A segment is long enough that a call costs little beside what it computes, and short enough that its
arrays stay in a processor's last cache. Of long sequences only what enters a segment is kept for
the backward pass, which computes the segment again.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SEGMENT = {"cpu": 2**14, "cuda": 2**16}  # positions of all sequences that are computed at once
LONG = 8192  # positions from which memory matters more than a second forward pass


def by_segments(
    operator: Callable, rows: tuple[Tensor, ...], S: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, M) and the last state (..., C, M), from those of each segment.

    The first of the rows (..., N, .) are queries, which may have more leading dimensions than the
    state. ``operator(*rows, S, chunk_size)`` takes rows (G, n L, .), where L is the chunk size, and
    a state (G, C, M).
    """
    q, *rest = rows
    leading = torch.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    if leading != S.shape[:-2]:  # of each memory only one is wanted
        silent = q.new_zeros(1, 1).expand(*q.shape[-2:])
        _, last = by_segments(operator, (silent, *rest), S, chunk_size)
        out, _ = by_segments(operator, rows, S.expand(*leading, *S.shape[-2:]), chunk_size)
        return out, last
    G, N = math.prod(leading), q.shape[-2]
    flat = [x.expand(*leading, *x.shape[-2:]).reshape(G, *x.shape[-2:]) for x in rows]
    state, outputs = S.reshape(G, *S.shape[-2:]), []
    run = _again if N > LONG and _is_recorded() else lambda operator, *args: operator(*args)
    sizes = _sizes(G, N, chunk_size, SEGMENT["cuda" if q.is_cuda else "cpu"])
    for pieces in zip(*(x.split(sizes, dim=1) for x in flat), strict=True):
        out, state = run(operator, *pieces, state, min(chunk_size, pieces[0].shape[1]))
        outputs.append(out)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)  # without a copy
    return out.reshape(*leading, N, out.shape[-1]), state.reshape(S.shape)


def in_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """(G, n L, C) -> (G, n, L, C)."""
    return x.unflatten(1, (x.shape[1] // chunk_size, chunk_size))


def add_product(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Out += x @ y, (..., n, L, M), without an array for the product."""
    flat, x, y = (z.flatten(0, -3) for z in (out, x, y))
    flat.baddbmm_(x, y)
    return out


def _sizes(G, N, chunk_size, positions):
    """Lengths of segments: of whole chunks, but for what is left at the end."""
    size = max(1, positions // max(G * chunk_size, 1)) * chunk_size
    whole = N - N % chunk_size
    return [*[size] * (whole // size), *filter(None, [whole % size, N - whole])]


def _is_recorded():
    """Whether autograd takes notes; ``torch.func`` has its own, and no hooks for `checkpoint`."""
    return torch.is_grad_enabled() and torch._C._functorch.maybe_current_level() is None


def _again(operator, *args):
    return checkpoint(operator, *args, use_reentrant=False, preserve_rng_state=False)
