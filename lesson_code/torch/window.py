"""Softmax attention over a window of the last tokens."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lesson_code._arguments import check_integer, resolve_scale
from lesson_code.torch.operator import operator
from lesson_code.torch.softmax import normalized


@operator("N D, N D, N M -> N M")
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float | None = None
) -> Tensor:
    r"""Causal softmax attention that sees the last `window` keys only, the own one included.

    As :func:`lesson_code.numpy.sliding_window_attention`. The text is cut into blocks as long as
    the window, each of which sees itself and the one before: 2 N `window` scores are stored, not
    N². A NaN reaches the rest of its block and the next one.

    Examples
    --------
    All scores are 0: the outputs are means of the last two values.

    >>> q, v = torch.zeros(4, 1), torch.tensor([[2.0], [4.0], [8.0], [16.0]])
    >>> sliding_window_attention(q, q, v, window=2).flatten()
    tensor([ 2.,  3.,  6., 12.])
    """
    N = q.shape[-2]
    W = min(check_integer("window", window, minimum=1), max(N, 1))
    q, k, v = (_blocks(x, W) for x in (q, k, v))  # (..., n, W, ·)
    k, v = (torch.cat([_before(x), x], dim=-2) for x in (k, v))  # (..., n, 2 W, ·)
    i, j = torch.arange(W, device=q.device)[:, None], torch.arange(2 * W, device=q.device)
    seen = (j > i) & (j <= i + W)
    first = torch.zeros(q.shape[-3], 1, 1, dtype=torch.bool, device=q.device)
    first[:1] = True  # nothing stands before the first block
    seen = seen & ~(first & (j < W))
    scores = (q * resolve_scale(scale, q.shape[-1])) @ k.mT
    weights = normalized(torch.where(seen, scores, -math.inf))
    return (weights @ v).flatten(-3, -2)[..., :N, :]


def _blocks(x, W):
    """Blocks of W tokens, the last one filled up with zeros: (..., N, D) -> (..., n, W, D)."""
    n = -(-x.shape[-2] // W)
    return pad(x, (0, 0, 0, n * W - x.shape[-2])).unflatten(-2, (n, W))


def _before(x):
    """The block before each block, zeros before the first."""
    return torch.cat([torch.zeros_like(x[..., :1, :, :]), x[..., :-1, :, :]], dim=-3)
