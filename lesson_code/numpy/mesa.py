"""Mesa: a memory that is solved for, not stepped towards."""

from typing import NamedTuple

import numpy as np

from lesson_code._arguments import check_integer
from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


class MesaState(NamedTuple):
    """What Mesa remembers: both sides of its normal equations.

    Parameters
    ----------
    H : array, shape (..., D, D)
        Weighted sum of the outer products of the keys with themselves.
    G : array, shape (..., D, M)
        Weighted sum of the outer products of keys and values.
    """

    H: Array
    G: Array


@operator(
    "N D, N D, N M, N, N, D -> N M",
    state=MesaState._make(("D D", "D M")),
    reads="q ridge",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
    ridge="positive and finite",
)
def mesa(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array,
    ridge: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    iterations: int = 30,
    initial_state: MesaState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, MesaState]:
    r"""The Mesa layer: at each token the least-squares memory of all pairs so far.

    The memory :math:`S_t = (H_t + \Lambda)^{-1} G_t` minimizes the weighted squared errors of all
    pairs and :math:`\operatorname{tr} S^\top \Lambda S` (von Oswald et al., 2025, section 3), with
    :math:`\alpha_t = e^{g_t}` and :math:`\Lambda = \operatorname{diag}(\lambda)`:

    .. math::

        H_t &= \alpha_t H_{t-1} + \beta_t k_t k_t^\top \\
        G_t &= \alpha_t G_{t-1} + \beta_t k_t v_t^\top \\
        o_t &= G_t^\top (H_t + \Lambda)^{-1} q_t

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys.
    v : array, shape (..., N, M)
        Values.
    beta : array, shape (..., N)
        Weights of the pairs, at least 0 where the system is to have a solution for sure.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets everything, exactly.
    ridge : array, shape (..., D)
        The diagonal :math:`\lambda`, positive, such as (H, D) for H heads.
    form : str, optional
        "recurrent" (the default: each system is solved) or "chunkwise" (conjugate gradients, which
        need products with :math:`H_t` alone and so never form it inside a chunk; both agree to the
        residual that is left).
    iterations : int
        Steps of the conjugate gradients, at least 1, which begin at an x of 0. D of them are exact
        but for rounding; fewer do where the eigenvalues of :math:`H_t + \Lambda` are close.

    Examples
    --------
    Keys that overlap find their values, but for the ridge:

    >>> k, v = np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[10.0], [20.0]])
    >>> ones, ridge = np.ones(2), np.full(2, 1e-9)
    >>> out, state = mesa(k, k, v, ones, 0 * ones, ridge, return_state=True)
    >>> k @ np.linalg.solve(state.H + np.diag(ridge), state.G).round(6)
    array([[10.],
           [20.]])
    """
    iterations = check_integer("iterations", iterations, minimum=1)
    if form == "chunkwise":
        rows = q, k, v, beta[..., None], log_decay[..., None]
        return _chunkwise(*rows, ridge, initial_state, chunk_size, iterations)
    (H, G), out = initial_state, []
    diagonal = ridge[..., None] * np.eye(ridge.shape[-1], dtype=ridge.dtype)
    for q_t, k_t, v_t, beta_t, g_t in tokens(q, k, v, beta[..., None], log_decay[..., None]):
        alpha_t = np.exp(g_t)[..., None]
        H = alpha_t * H + outer(beta_t * k_t, k_t)
        G = alpha_t * G + outer(beta_t * k_t, v_t)
        x_t = np.linalg.solve(H + diagonal, q_t[..., None])[..., 0]
        out.append(read(G, x_t))
    return np.stack(out, axis=-2), MesaState(H, G)


def _chunkwise(q, k, v, beta, g, ridge, state, chunk_size, iterations):
    (H, G), out = state, []
    for Q, K, V, b, g_chunk in in_chunks(chunk_size, q, k, v, beta, g):
        through, between = decays_through(g_chunk), decays_between(g_chunk)[..., 0]
        weights = between * b.swapaxes(-1, -2)  # (..., L, L), what each pair weighs at each token

        def system(P, K=K, H=H, through=through, weights=weights):  # row t: (H_t + Λ) p_t
            inside = (P @ K.swapaxes(-1, -2) * weights) @ K
            return through * (P @ H) + inside + ridge[..., None, :] * P

        X = conjugate_gradients(system, Q, iterations)
        out.append(through * (X @ G) + (X @ K.swapaxes(-1, -2) * weights) @ V)
        kept, last = through[..., -1:, :], weights[..., -1, :, None]
        H = kept * H + (K * last).swapaxes(-1, -2) @ K
        G = kept * G + (K * last).swapaxes(-1, -2) @ V
    return np.concatenate(out, axis=-2), MesaState(H, G)


def conjugate_gradients(system, q, iterations):
    """The rows x of system(x) = q, for a product with a symmetric positive matrix for each row."""
    x, r = np.zeros_like(q), q
    p, size = r, (r * r).sum(axis=-1, keepdims=True)
    for _ in range(iterations):
        Hp = system(p)
        step = divide(size, (p * Hp).sum(axis=-1, keepdims=True))  # 0 where nothing is left
        x, r = x + step * p, r - step * Hp
        size, previous = (r * r).sum(axis=-1, keepdims=True), size
        p = r + divide(size, previous) * p
    return x
