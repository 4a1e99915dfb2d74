"""Mamba-3: a state that rotates, and writes each token twice."""

from typing import NamedTuple

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


class Mamba3State(NamedTuple):
    """What Mamba-3 remembers: its memory, and of the last token what the next one writes again.

    Between two tokens of :eq:`eq-mamba3`.

    Parameters
    ----------
    S : array, shape (..., 2R, P)
        The memory.
    k : array, shape (..., 2R)
        The last key, rotated.
    x : array, shape (..., P)
        The last input.
    angle : array, shape (..., R)
        The angles by which it was rotated, modulo 2π.
    """

    S: Array
    k: Array
    x: Array
    angle: Array


@operator(
    "N P, N, N, N, N R, N 2R, N 2R -> N P",
    state=Mamba3State._make(("2R P", "2R", "P", "R")),
    reads="C",
    forms=("recurrent", "parallel", "chunkwise"),
    delta="at least 0",
    log_decay="at most 0",
    trapezoid="in [0, 1]",
)
def mamba3(
    x: Array,
    delta: Array,
    log_decay: Array,
    trapezoid: Array,
    angle: Array,
    B: Array,
    C: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Mamba3State | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Mamba3State]:
    r"""The state space of Mamba-3, one head: written by the trapezoidal rule, and rotating.

    Computes :eq:`eq-mamba3` with the keys and queries of :eq:`eq-mamba3-rotation`. The angles add
    up, :math:`\theta_t = \sum_{s \le t} a_s`, and turn the pairs of channels of B and C,
    :math:`k_t = R(\theta_t) B_t` and :math:`q_t = R(\theta_t) C_t`. Then,
    with :math:`\alpha_t = e^{g_t}` and the share :math:`\lambda_t` of the new token
    (Lahoti et al., 2026, section 3),

    .. math::

        S_t &= \alpha_t S_{t-1} + (1 - \lambda_t) \Delta_t \alpha_t k_{t-1} x_{t-1}^\top
               + \lambda_t \Delta_t k_t x_t^\top \\
        y_t &= S_t^\top q_t

    Only angles between queries and keys matter, so this is a memory that is turned back by
    :math:`a_t` at each step, and B and C are not rotated: a state space with complex eigenvalues.

    Parameters
    ----------
    x : array, shape (..., N, P)
        Inputs, the values of linear attention.
    delta : array, shape (..., N)
        Step sizes Δ, at least 0.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets everything before the token.
    trapezoid : array, shape (..., N)
        The share λ of a step that is taken from its end, in [0, 1]: 1 is Mamba-2's rule of Euler,
        1/2 the trapezoidal rule.
    angle : array, shape (..., N, R)
        By how much each of R pairs of channels turns at each token, in radians.
    B, C : array, shape (..., N, 2R)
        Keys and queries before they are rotated; channels 2i and 2i + 1 are a pair.
    form : str, optional
        "recurrent", "parallel" (the masked product) or "chunkwise" (the default). In the last two a
        token's two writes are one for all later tokens, as in :func:`state_space_dual`.

    Examples
    --------
    A quarter turn at each token: what is stored on one channel is found on the other one.

    >>> x, ones = np.array([[8.0], [0.0]]), np.ones(2)
    >>> B, angle = np.array([[1.0, 0.0], [0.0, 0.0]]), np.full((2, 1), np.pi / 2)
    >>> C = np.array([[1.0, 0.0], [0.0, -1.0]])
    >>> mamba3(x, ones, 0 * ones, ones, angle, B, C).round(9)
    array([[8.],
           [8.]])
    """
    S, k_last, x_last, theta = initial_state
    theta = theta[..., None, :] + np.cumsum(angle, axis=-2)
    k, q = rotated(B, theta), rotated(C, theta)
    g, late, own = (y[..., None] for y in (log_decay, (1 - trapezoid) * delta, trapezoid * delta))
    outputs = []
    if form == "recurrent":
        for x_t, k_t, q_t, g_t, late_t, own_t in tokens(x, k, q, g, late, own):
            S = np.exp(g_t)[..., None] * (S + outer(late_t * k_last, x_last))
            S = S + outer(own_t * k_t, x_t)
            outputs.append(read(S, q_t))
            k_last, x_last = k_t, x_t
        return np.stack(outputs, axis=-2), _state(S, k_last, x_last, theta[..., -1, :])
    S = S + outer(late[..., 0, :] * k_last, x_last)
    # What a later token finds of a token: its own write, and what the next one has written of it.
    both = own + np.concatenate([late[..., 1:, :], 0 * late[..., :1, :]], axis=-2)
    L = x.shape[-2] if form == "parallel" else chunk_size
    for X, K, Q, G, w, w_own in in_chunks(L, x, k, q, g, both, own):
        through, gamma = decays_through(G), decays_between(G)[..., 0]  # (..., L, 1), (..., L, L)
        A = np.tril(Q @ K.swapaxes(-1, -2) * gamma, -1)
        itself = w_own * (Q * K).sum(axis=-1, keepdims=True) * X
        outputs.append(through * (Q @ S) + A @ (w * X) + itself)
        to_end = gamma[..., -1, :, None]  # (..., L, 1)
        S = through[..., -1:, :] * S + (K * to_end).swapaxes(-1, -2) @ (w * X)
    last = (part[..., -1, :] for part in (k, x, theta))
    return np.concatenate(outputs, axis=-2), _state(S, *last)


def rotated(x: Array, theta: Array) -> Array:
    """The pairs of channels (2i, 2i + 1) turned by the angle i: (..., 2R) and (..., R)."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(theta), np.sin(theta)
    pairs = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return pairs.reshape(*pairs.shape[:-2], 2 * a.shape[-1])


def _state(S, k, x, theta):
    leading = S.shape[:-2]
    parts = (
        np.broadcast_to(part, leading + part.shape[-1:]) for part in (k, x, theta % (2 * np.pi))
    )
    return Mamba3State(S, *(part.copy() for part in parts))
