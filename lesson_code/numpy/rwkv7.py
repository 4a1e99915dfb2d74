"""RWKV-7: a memory that forgets by channel, and removes at one key what it writes at another."""

import numpy as np

from lesson_code.numpy import generalized_delta
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N D, N D, N M, N D, N D, N D -> N M",
    state="D M",
    reads="r",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def rwkv7(
    r: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    removal_key: Array,
    learning_rate: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""The memory of RWKV-7: forget, remove, and write.

    Computes :eq:`eq-rwkv7`, with :math:`w_t = e^{g_t}`, the removal key κ and the learning rate η
    of each channel (Peng et al., 2025, section 3),

    .. math::

        S_t &= \operatorname{diag}(w_t) S_{t-1} - (\eta_t \odot \kappa_t)
        \left(S_{t-1}^\top \kappa_t\right)^\top + k_t v_t^\top \\
        o_t &= S_t^\top r_t

    What κ finds is read before the memory fades, unlike in :func:`kimi_delta_attention`.

    Parameters
    ----------
    r : array, shape (..., N, D)
        Receptances, which are the queries; not scaled.
    k : array, shape (..., N, D)
        Replacement keys, at which values are written.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N, D)
        Logarithms g of the decays, in [-inf, 0].
    removal_key : array, shape (..., N, D)
        κ, taken as it is; the layer makes its length 1.
    learning_rate : array, shape (..., N, D)
        η, which the layer keeps in (0, 1); any number.
    form : str, optional
        "recurrent", the default, or "chunkwise", which :func:`generalized_delta_rule` explains.

    Examples
    --------
    The second token removes all that the first key holds, and writes at the other:

    >>> k, v = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[8.0], [5.0]])
    >>> removal = np.array([[0.0, 0.0], [1.0, 0.0]])
    >>> g, a = np.zeros((2, 2)), np.ones((2, 2))
    >>> rwkv7(k, k, v, g, removal, a, return_state=True)[1]
    array([[0.],
           [5.]])
    """
    if form == "chunkwise":
        moved = -learning_rate * removal_key
        return generalized_delta.chunkwise(
            r, k, v, removal_key, moved, log_decay, initial_state, chunk_size
        )
    S, out = initial_state, []
    each = tokens(r, k, v, log_decay, removal_key, learning_rate)
    for r_t, k_t, v_t, g_t, kappa_t, a_t in each:
        found = read(S, kappa_t)
        S = np.exp(g_t)[..., :, None] * S - outer(a_t * kappa_t, found) + outer(k_t, v_t)
        out.append(read(S, r_t))
    return np.stack(out, axis=-2), S
