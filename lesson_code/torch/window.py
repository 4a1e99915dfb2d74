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
    window = check_integer("window", window, minimum=1)
    return attend(q, k, v, window, resolve_scale(scale, q.shape[-1]))


def attend(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, hidden: Tensor | None = None
) -> Tensor:
    """Outputs (..., N, M); nobody sees the keys that are marked in `hidden` (..., 1, N)."""
    N = q.shape[-2]
    W = min(window, max(N, 1))
    q, k, v = (_blocks(x, W) for x in (q, k, v))  # (..., n, W, ·)
    k, v = (torch.cat([_before(x), x], dim=-2) for x in (k, v))  # (..., n, 2 W, ·)
    i, j = torch.arange(W, device=q.device)[:, None], torch.arange(2 * W, device=q.device)
    first = torch.arange(q.shape[-3], device=q.device)[:, None, None] == 0
    unseen = (j <= i) | (j > i + W) | (first & (j < W))  # nothing stands before the first block
    if hidden is not None:
        hidden = _blocks(hidden.mT, W)
        unseen = unseen | torch.cat([_before(hidden), hidden], dim=-2).mT
    scores = ((q * scale) @ k.mT).masked_fill(unseen, -math.inf)
    return (normalized(scores) @ v).flatten(-3, -2)[..., :N, :]


def _blocks(x, W):
    """Blocks of W tokens, the last one filled up with zeros: (..., N, D) -> (..., n, W, D)."""
    n = -(-x.shape[-2] // W)
    return pad(x, (0, 0, 0, n * W - x.shape[-2])).unflatten(-2, (n, W))


def _before(x):
    """The block before each block, zeros before the first."""
    return torch.cat([torch.zeros_like(x[..., :1, :, :]), x[..., :-1, :, :]], dim=-3)
