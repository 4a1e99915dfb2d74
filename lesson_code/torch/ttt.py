"""TTT-Linear: a memory that is fitted by gradient descent in small batches of tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lesson_code.torch.operator import operator


class TTTState(NamedTuple):
    """What TTT-Linear remembers: its memory, and the batch that has begun.

    As :class:`lesson_code.numpy.TTTState`.

    Parameters
    ----------
    W : tensor, shape (..., D, D)
        The memory as it was at the start of the batch.
    b : tensor, shape (..., D)
        Its bias.
    dW : tensor, shape (..., D, D)
        Gradients of W that the batch has so far, each times its learning rate, summed.
    db : tensor, shape (..., D)
        The same of b.
    position : int, or tensor of integers that broadcasts to the leading dimensions
        How many tokens were read.
    """

    W: Tensor
    b: Tensor
    dW: Tensor
    db: Tensor
    position: Any  # an integer, or several


@operator(
    "N D, N D, N D, N, N, D, D -> N D",
    state=TTTState._make(("D D", "D", "D D", "D", "count")),
    reads="q",
    forms=("recurrent", "chunkwise"),
)
def ttt_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    share: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *,
    normalize: bool = True,
    form: str | None = None,
    batch_size: int = 16,
    initial_state: TTTState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, TTTState]:
    r"""TTT-Linear: a linear model that learns, while it reads, to make values of keys.

    As :func:`lesson_code.numpy.ttt_linear`. "chunkwise" is the default for more than one token; it
    goes token by token where sequences have positions of their own, and so batches that begin in
    different places.

    Examples
    --------
    A batch of two, without norm: both are written where W is 0, and the second one finds the sum.

    >>> q, v = torch.ones(3, 1), torch.tensor([[8.0], [20.0], [20.0]])
    >>> ones, one = torch.ones(3), torch.ones(1)
    >>> options = {"normalize": False, "batch_size": 2}
    >>> ttt_linear(q, q, v, ones / 2, ones, one, 0 * one, **options) - q
    tensor([[ 7.],
            [26.],
            [19.]])
    """
    W, b, dW, db, position = initial_state
    b, db, N, out = b[..., None, :], db[..., None, :], q.shape[-2], []
    rows = q, k, v, eta[..., None], share[..., None]
    w, c = norm_weight[..., None, :], norm_bias[..., None, :]
    if form != "recurrent" and isinstance(position, int) and N > 1:
        start = 0
        while start < N:
            stop = min(N, start + batch_size - (position + start) % batch_size)  # of the batch
            Q, K, V, rate, gamma = (x[..., start:stop, :] for x in rows)
            G = rate * gradient(K @ W + b, V - K, w, c, normalize)
            A = (Q @ K.mT).tril()
            found = Q @ W + b - gamma * (Q @ dW + db + A @ G + G.cumsum(dim=-2))
            out.append(Q + w * normed(found, normalize)[0] + c)
            dW, db = dW + K.mT @ G, db + G.sum(dim=-2, keepdim=True)
            if (position + stop) % batch_size == 0:
                W, b = W - gamma[..., -1:, :] * dW, b - gamma[..., -1:, :] * db
                dW, db = 0 * dW, 0 * db
            start = stop
    else:
        for t in range(N):
            q_t, k_t, v_t, eta_t, gamma_t = (x[..., t : t + 1, :] for x in rows)  # (..., 1, ·)
            g_t = eta_t * gradient(k_t @ W + b, v_t - k_t, w, c, normalize)
            dW, db = dW + k_t.mT @ g_t, db + g_t
            W_t, b_t = W - gamma_t * dW, b - gamma_t * db
            out.append(q_t + w * normed(q_t @ W_t + b_t, normalize)[0] + c)
            ends = (
                torch.as_tensor(position, device=q.device)[..., None, None] + t + 1
            ) % batch_size == 0
            W, b = torch.where(ends, W_t, W), torch.where(ends, b_t, b)
            dW, db = torch.where(ends, 0, dW), torch.where(ends, 0, db)
    state = TTTState(W, b[..., 0, :], dW, db[..., 0, :], position + N)
    return torch.cat(out, dim=-2), state


def normed(z: Tensor, normalize: bool) -> tuple[Tensor, Tensor | float]:
    """Rows without their mean, over their standard deviation; and what they were divided by."""
    if not normalize:
        return z, 1.0
    z = z - _mean(z)
    deviation = (_mean(z * z) + 1e-6).sqrt()
    return z / deviation, deviation


def gradient(z: Tensor, target: Tensor, w: Tensor, c: Tensor, normalize: bool) -> Tensor:
    """The gradient of |w ⊙ norm(z) + c - target|² / 2 for z."""
    x, deviation = normed(z, normalize)
    g = w * (w * x + c - target)
    if normalize:  # neither the mean of z nor its length changes anything
        g = (g - _mean(g) - x * _mean(g * x)) / deviation
    return g


def _mean(x):
    return x.sum(dim=-1, keepdim=True) / max(x.shape[-1], 1)
