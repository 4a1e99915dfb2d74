"""Mamba's selective scan and Mamba-2's state-space dual, in the letters of their papers."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N E, N E, (E K), N K, N K, (E) -> N E",
    state="E K",
    reads="C D",
    forms=("recurrent", "scan"),
    delta="at least 0",
    A="negative",
)
def selective_scan(
    x: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    *,
    form: str | None = None,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The selective state space of Mamba: each entry of the state has a decay of its own.

    Computes :eq:`eq-selective-scan` (Gu and Dao, 2024, equations 2 to 4 and algorithm 2). Each of E
    channels of x has K numbers of state, so that h is (E, K):

    .. math::

        h_t &= \exp(\Delta_t A) \odot h_{t-1} + (\Delta_t \odot x_t) B_t^\top \\
        y_t &= h_t C_t + D \odot x_t

    Parameters
    ----------
    x, delta : array, shape (..., N, E)
        Inputs, and step sizes after their softplus: at least 0. A step of 0 changes nothing.
    A : array, shape (E, K)
        Rates, negative. They are discretized exactly, and B as Δ B (:eq:`eq-discretization`).
    B, C : array, shape (..., N, K)
        What x writes with, and what reads.
    D : array, shape (E,), optional
        Weight with which x goes past the memory; 0 where it is None.
    form : str, optional
        "recurrent" (the default) or "scan", a prefix scan in log2 N steps (:eq:`eq-scan-operator`;
        Blelloch, 1990), which stores N states.

    Examples
    --------
    With a decay of 1/2, :math:`h = 8`, :math:`8/2 + 4 = 8` and :math:`8/2 + 2 = 6`:

    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> ones = np.ones((3, 1))
    >>> selective_scan(x, ones, np.array([[-np.log(2.0)]]), ones, ones)
    array([[8.],
           [8.],
           [6.]])
    """
    if form == "scan":
        y, h = _selective_scan(x, delta, A, B, C, initial_state)
    else:
        h, y = initial_state, []
        for x_t, delta_t, B_t, C_t in tokens(x, delta, B, C):
            h = np.exp(delta_t[..., :, None] * A) * h + outer(delta_t * x_t, B_t)
            y.append((h @ C_t[..., :, None])[..., 0])
        y = np.stack(y, axis=-2)
    return (y if D is None else y + D * x), h


def _selective_scan(x, delta, A, B, C, h):
    decays = np.exp(delta[..., None] * A)  # (..., N, E, K)
    writes = outer(delta * x, B)
    # The state before the first token is what the first pair writes.
    shape = (*h.shape[:-2], 1 + x.shape[-2], *h.shape[-2:])
    a, b = np.zeros(shape, x.dtype), np.empty(shape, x.dtype)
    a[..., 1:, :, :], b[..., 1:, :, :], b[..., 0, :, :] = decays, writes, h
    h = _prefix_scan(a, b)  # (..., 1 + N, E, K)
    y = (h[..., 1:, :, :] @ C[..., None])[..., 0]
    return y, h[..., -1, :, :].copy()


def _prefix_scan(a, b):
    """h_t = a_t h_{t-1} + b_t for all t at once, from pairs that are joined in log2 N steps.

    First (a, b), then (a', b'): together h -> a' (a h + b) + b', the pair (a' a, a' b + b').
    """
    a, b = np.moveaxis(a, -3, 0), np.moveaxis(b, -3, 0)
    d = 1
    while d < len(b):
        b = np.concatenate([b[:d], a[d:] * b[:-d] + b[d:]])
        a = np.concatenate([a[:d], a[d:] * a[:-d]])
        d *= 2
    return np.moveaxis(b, 0, -3)


@operator(
    "N P, N, N K, N K -> N P",
    state="K P",
    reads="C",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
def state_space_dual(
    x: Array,
    log_decay: Array,
    B: Array,
    C: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The state space of Mamba-2: one decay for the whole state, and so a masked product.

    Computes :eq:`eq-state-space-dual` for one head (Dao and Gu, 2024, sections 3 and 5, and listing
    1 for the chunks). With :math:`\alpha_t = e^{g_t}` and the products of decays
    :math:`\Gamma_{tj} = \alpha_t \cdots \alpha_{j+1}`, 0 for j > t,

    .. math::

        S_t &= \alpha_t S_{t-1} + B_t x_t^\top, \qquad y_t = S_t^\top C_t \\
        Y &= \left(C B^\top \odot \Gamma\right) X

    Parameters
    ----------
    x : array, shape (..., N, P)
        Inputs, already times their step size Δ: the values of linear attention.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, Δ A: at most 0. -inf forgets everything, exactly.
    B, C : array, shape (..., N, K)
        Keys and queries.
    form : str, optional
        "recurrent", "parallel" (the masked product) or "chunkwise" (the default: the same inside a
        chunk, a state between chunks).

    Examples
    --------
    >>> x = np.array([[8.0], [4.0], [2.0]])
    >>> ones = np.ones((3, 1))
    >>> state_space_dual(x, np.log(0.5) * np.ones(3), ones, ones)
    array([[8.],
           [8.],
           [6.]])
    """
    S, y = initial_state, []
    if form == "recurrent":
        for x_t, g_t, B_t, C_t in tokens(x, log_decay[..., None], B, C):
            S = np.exp(g_t)[..., None] * S + outer(B_t, x_t)
            y.append(read(S, C_t))
        return np.stack(y, axis=-2), S
    L = x.shape[-2] if form == "parallel" else chunk_size
    for X, g, K, Q in in_chunks(L, x, log_decay[..., None], B, C):
        through, gamma = decays_through(g), decays_between(g)[..., 0]  # (..., L, 1), (..., L, L)
        y.append((Q @ K.swapaxes(-1, -2) * gamma) @ X + through * (Q @ S))
        to_end = gamma[..., -1, :, None]  # (..., L, 1)
        S = through[..., -1:, :] * S + (K * to_end).swapaxes(-1, -2) @ X
    return np.concatenate(y, axis=-2), S
