"""The generalized delta rule: a token fades the memory, moves what it finds there, and writes."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks, solve
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N D, N D, N M, N D, N D, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def generalized_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    log_decay: Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""A memory whose transition is a diagonal matrix and one of rank one.

    Computes :eq:`eq-diagonal-plus-rank-one`, with :math:`w_t = e^{g_t}`,

    .. math::

        S_t &= \left(\operatorname{diag}(w_t) + b_t a_t^\top\right) S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    What a finds in the memory, before it fades, is written at b. All delta rules are of this form:

    ========================  ============  =========  ==========
    function                  k             a          b
    ========================  ============  =========  ==========
    `delta_rule`              βk            k          -βk
    `gated_delta_rule`        βk            αk         -βk
    `kimi_delta_attention`    βk            α∘k        -βk
    `rwkv7`                   k             κ          -η∘κ
    ========================  ============  =========  ==========

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries, not scaled, and the keys at which values are written.
    v : array, shape (..., N, M)
        Values.
    a, b : array, shape (..., N, D)
        Where the old memory is read, and where what was found is written; any numbers.
    log_decay : array, shape (..., N, D)
        Logarithms g of the decays, in [-inf, 0]; -inf keeps nothing of a row but what a read there.
    form : str, optional
        "recurrent", the default, or "chunkwise": inside a chunk what the tokens find, r, depends on
        what was written before, and solves a unit lower triangular system.

    References
    ----------
    Peng et al. (2025), section 3, for this transition; Yang et al. (2024), "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", for the system of a chunk.

    Examples
    --------
    The second token moves what the first one stored from the first channel to the second:

    >>> k = np.array([[1.0, 0.0], [0.0, 0.0]])
    >>> v = np.array([[8.0], [0.0]])
    >>> a, b = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.0, 0.0], [-1.0, 1.0]])
    >>> out, S = generalized_delta_rule(k, k, v, a, b, np.zeros((2, 2)), return_state=True)
    >>> S
    array([[0.],
           [8.]])
    """
    if form == "chunkwise":
        return chunkwise(q, k, v, a, b, log_decay, initial_state, chunk_size)
    S, out = initial_state, []
    for q_t, k_t, v_t, a_t, b_t, g_t in tokens(q, k, v, a, b, log_decay):
        r_t = read(S, a_t)
        S = np.exp(g_t)[..., :, None] * S + outer(b_t, r_t) + outer(k_t, v_t)
        out.append(read(S, q_t))
    return np.stack(out, axis=-2), S


def chunkwise(q, k, v, a, b, g, S, chunk_size):
    """Outputs, and the last memory, by chunks of tokens."""
    out = []
    for Q, K, V, A, B, G in in_chunks(chunk_size, q, k, v, a, b, g):
        through, between = decays_through(G), decays_between(G)  # (..., L, D), (..., L, L, D)
        # a reads before its own token's decay: row t has the decays of row t - 1.
        through_a = np.concatenate([np.ones_like(through[..., :1, :]), through[..., :-1, :]], -2)
        between_a = np.concatenate(
            [np.zeros_like(between[..., :1, :, :]), between[..., :-1, :, :]], -3
        )
        found = (A * through_a) @ S + _products(A, between_a, K) @ V
        R = solve(-_products(A, between_a, B), found)  # (..., L, M), what each a finds
        out.append((Q * through) @ S + _products(Q, between, K) @ V + _products(Q, between, B) @ R)
        to_end = between[..., -1, :, :]  # (..., L, D)
        S = through[..., -1, :, None] * S
        S = S + (K * to_end).swapaxes(-1, -2) @ V + (B * to_end).swapaxes(-1, -2) @ R
    return np.concatenate(out, axis=-2), S


def _products(x, between, y):
    """Entry [t, j] is the product of x_t and y_j, as y_j has faded from j to t."""
    return (x[..., :, None, :] * between * y[..., None, :, :]).sum(axis=-1)
