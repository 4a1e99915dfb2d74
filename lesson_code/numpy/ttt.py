"""TTT-Linear: a memory that is fitted by gradient descent in small batches of tokens."""

from typing import Any, NamedTuple

import numpy as np

from lesson_code.numpy.operator import Array, operator


class TTTState(NamedTuple):
    """What TTT-Linear remembers: its memory, and the batch that has begun.

    Parameters
    ----------
    W : array, shape (..., D, D)
        The memory as it was at the start of the batch.
    b : array, shape (..., D)
        Its bias.
    dW : array, shape (..., D, D)
        Gradients of W that the batch has so far, each times its learning rate, summed.
    db : array, shape (..., D)
        The same of b.
    position : int, or array of integers that broadcasts to the leading dimensions
        How many tokens were read.
    """

    W: Array
    b: Array
    dW: Array
    db: Array
    position: Any  # an integer, or several


@operator(
    "N D, N D, N D, N, N, D, D -> N D",
    state=TTTState._make(("D D", "D", "D D", "D", "count")),
    reads="q",
    forms=("recurrent", "chunkwise"),
)
def ttt_linear(
    q: Array,
    k: Array,
    v: Array,
    eta: Array,
    share: Array,
    norm_weight: Array,
    norm_bias: Array,
    *,
    normalize: bool = True,
    form: str | None = None,
    batch_size: int = 16,
    initial_state: TTTState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, TTTState]:
    r"""TTT-Linear: a linear model that learns, while it reads, to make values of keys.

    The model is :math:`f(x) = w \odot \mathrm{norm}(W^\top x + b) + c`, where norm takes away the
    mean of the channels and divides by their standard deviation (1e-6 is added to the variance).
    Each token is a step of gradient descent on :math:`\ell_s = \frac12 |f(k_s) - (v_s - k_s)|^2`,
    but all gradients of a batch are taken at the W and b of its start, so that they can be computed
    together (Sun et al., 2024, sections 2.4 to 2.7). With :math:`g_s` the gradient of
    :math:`\ell_s` for :math:`W^\top k_s + b`, and sums over the tokens s of the batch up to t,

    .. math::

        W_t &= W - \gamma_t \sum_s \eta_s k_s g_s^\top \\
        b_t &= b - \gamma_t \sum_s \eta_s g_s \\
        o_t &= q_t + w \odot \mathrm{norm}(W_t^\top q_t + b_t) + c

    The :math:`W_t` and :math:`b_t` of the last token of a batch are W and b of the next one.

    Parameters
    ----------
    q, k, v : array, shape (..., N, D)
        Queries, keys and values, all of one width.
    eta : array, shape (..., N)
        Learning rates :math:`\eta` of the tokens that are written; any number.
    share : array, shape (..., N)
        What of the sum is taken where a token reads, :math:`\gamma`: 1/i for the token i of a batch
        makes it a mean, 1 leaves it a sum.
    norm_weight, norm_bias : array, shape (..., D)
        Weight w and bias c of the norm, such as (H, D) for H heads.
    normalize : bool
        With False norm is left out, and f is linear.
    form : str, optional
        "recurrent" (the default: token by token) or "chunkwise" (the products of a whole batch).
    batch_size : int
        Tokens in a batch. Batches are counted from the first token of all, that of the initial
        state, wherever a text is split.
    initial_state : TTTState, optional
        A layer learns the W and b to begin with. From 0 the first step is large, as norm divides by
        what hardly differs from 0.

    Examples
    --------
    A batch of two, without norm: both are written where W is 0, though they have the same key, and
    the second one finds the sum of both. The third corrects that; what it finds is v - k.

    >>> q, v = np.ones((3, 1)), np.array([[8.0], [20.0], [20.0]])
    >>> ones, one = np.ones(3), np.ones(1)
    >>> options = {"normalize": False, "batch_size": 2}
    >>> ttt_linear(q, q, v, ones / 2, ones, one, 0 * one, **options) - q
    array([[ 7.],
           [26.],
           [19.]])
    """
    W, b, dW, db, position = initial_state
    b, db, N, out = b[..., None, :], db[..., None, :], q.shape[-2], []
    rows = q, k, v, eta[..., None], share[..., None]
    w, c = norm_weight[..., None, :], norm_bias[..., None, :]
    if form == "chunkwise" and isinstance(position, int):
        start = 0
        while start < N:
            stop = min(N, start + batch_size - (position + start) % batch_size)  # of the batch
            Q, K, V, rate, gamma = (x[..., start:stop, :] for x in rows)
            G = rate * gradient(K @ W + b, V - K, w, c, normalize)
            A = np.tril(Q @ K.swapaxes(-1, -2))
            found = Q @ W + b - gamma * (Q @ dW + db + A @ G + np.cumsum(G, axis=-2))
            out.append(Q + w * normed(found, normalize)[0] + c)
            dW, db = dW + K.swapaxes(-1, -2) @ G, db + G.sum(axis=-2, keepdims=True)
            if (position + stop) % batch_size == 0:
                W, b = W - gamma[..., -1:, :] * dW, b - gamma[..., -1:, :] * db
                dW, db = 0 * dW, 0 * db
            start = stop
    else:
        for t in range(N):
            q_t, k_t, v_t, eta_t, gamma_t = (x[..., t : t + 1, :] for x in rows)  # (..., 1, ·)
            g_t = eta_t * gradient(k_t @ W + b, v_t - k_t, w, c, normalize)
            dW, db = dW + k_t.swapaxes(-1, -2) @ g_t, db + g_t
            W_t, b_t = W - gamma_t * dW, b - gamma_t * db
            out.append(q_t + w * normed(q_t @ W_t + b_t, normalize)[0] + c)
            ends = (np.asarray(position)[..., None, None] + t + 1) % batch_size == 0
            W, b = np.where(ends, W_t, W), np.where(ends, b_t, b)
            dW, db = np.where(ends, 0, dW), np.where(ends, 0, db)
    state = TTTState(W, b[..., 0, :], dW, db[..., 0, :], position + N)
    return np.concatenate(out, axis=-2), state


def normed(z: Array, normalize: bool) -> tuple[Array, Array | float]:
    """Rows without their mean, over their standard deviation; and what they were divided by."""
    if not normalize:
        return z, 1.0
    z = z - _mean(z)
    deviation = np.sqrt(_mean(z * z) + 1e-6)
    return z / deviation, deviation


def gradient(z: Array, target: Array, w: Array, c: Array, normalize: bool) -> Array:
    """The gradient of |w ⊙ norm(z) + c - target|² / 2 for z."""
    x, deviation = normed(z, normalize)
    g = w * (w * x + c - target)
    if normalize:  # neither the mean of z nor its length changes anything
        g = (g - _mean(g) - x * _mean(g * x)) / deviation
    return g


def _mean(x):
    return x.sum(axis=-1, keepdims=True) / max(x.shape[-1], 1)
