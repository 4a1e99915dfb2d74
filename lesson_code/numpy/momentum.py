"""The delta rule with momentum: a correction goes on for some tokens after its own."""

from typing import NamedTuple

import numpy as np

from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


class MomentumState(NamedTuple):
    """What the delta rule with momentum remembers.

    Parameters
    ----------
    S : array, shape (..., D, M)
        The memory.
    M : array, shape (..., D, M)
        What was written last, and will be written again with the next token's momentum.
    """

    S: Array
    M: Array


@operator(
    "N D, N D, N M, N, N, N -> N M",
    state=MomentumState._make(("D M", "D M")),
    reads="q",
    log_decay="at most 0",
)
def momentum_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array,
    momentum: Array,
    *,
    initial_state: MomentumState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, MomentumState]:
    r"""The delta rule with momentum, which is the memory of Titans where that is linear.

    One step of gradient descent with momentum :math:`\mu_t` and weight decay on
    :math:`\frac12 |v_t - S^\top k_t|^2` for each token (Behrouz et al., 2025, section 3.1), with
    :math:`\alpha_t = e^{g_t}`:

    .. math::

        M_t &= \mu_t M_{t-1} + \beta_t k_t \left(v_t - S_{t-1}^\top k_t\right)^\top \\
        S_t &= \alpha_t S_{t-1} + M_t \\
        o_t &= S_t^\top q_t

    The error is that of the memory *before* its decay. With :math:`\mu = 0` and :math:`\alpha = 1`
    it is :func:`delta_rule`.

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys; keys are not normalized.
    v : array, shape (..., N, M)
        Values.
    beta : array, shape (..., N)
        Step sizes; any number.
    log_decay : array, shape (..., N)
        Logarithms g of the decays, at most 0; -inf forgets the memory, but not M.
    momentum : array, shape (..., N)
        How much of the last write is written again, in [0, 1) for a bounded memory.

    Examples
    --------
    The first write goes on for a token that writes nothing, with half its size:

    >>> k, v = np.array([[1.0], [0.0]]), np.array([[8.0], [0.0]])
    >>> ones, zeros = np.ones(2), np.zeros(2)
    >>> momentum_delta_rule(np.ones((2, 1)), k, v, ones, zeros, ones / 2)
    array([[ 8.],
           [12.]])
    """
    S, M = initial_state
    out = []
    gates = beta[..., None], log_decay[..., None], momentum[..., None]
    for q_t, k_t, v_t, beta_t, g_t, mu_t in tokens(q, k, v, *gates):
        error = v_t - read(S, k_t)
        M = mu_t[..., None] * M + outer(k_t, beta_t * error)
        S = np.exp(g_t)[..., None] * S + M
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), MomentumState(S, M)
