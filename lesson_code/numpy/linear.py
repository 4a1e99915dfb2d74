"""Linear attention in every form."""

from collections.abc import Callable

import numpy as np

from lesson_code import _arguments
from lesson_code.numpy import recurrence
from lesson_code.numpy.callbacks import described, is_float_array, read_only
from lesson_code.numpy.chunks import in_chunks
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.feature_maps import elu_plus_one
from lesson_code.numpy.memory import LinearAttentionState
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, tokens


@operator("Nq D, N D, N M -> Nq M", state=LinearAttentionState._make(("C M", "C")), reads="q")
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: Callable[[Array], Array] = elu_plus_one,
    causal: bool = False,
    normalize: bool = True,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, LinearAttentionState]:
    r"""Linear attention: the similarity of q and k is phi(q)·phi(k).

    Computes :eq:`eq-linear-attention` (Katharopoulos et al., 2020, equations 4 to 6), or with
    ``causal=True`` :eq:`eq-causal-linear-attention` (equations 8 to 12), where both sums end at the
    query's own position:

    .. math:: o_i^\top = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}
                            {\phi(q_i)^\top \sum_j \phi(k_j)}

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys. With ``causal=False`` their numbers may differ.
    v : array, shape (..., N, M)
        Values, as many as keys.
    feature_map : callable
        The map phi, (..., D) -> (..., C), applied to q and to k in the accumulation dtype.
    causal : bool
        Let each query see the keys up to its own position only. States need it.
    normalize : bool
        Divide by :math:`\phi(q)^\top z`. Nothing is added to it; where it is exactly 0 the output
        is 0.
    form : str, optional
        With ``causal=False``: "quadratic", (φ(Q) φ(K)ᵀ) V, or "linear", φ(Q) (φ(K)ᵀ V)
        (:eq:`eq-bracket-trick`). With ``causal=True``: "masked" (:eq:`eq-masked-form`), "recurrent"
        (:eq:`eq-recurrence`), "cumsum" (:eq:`eq-cumsum-form`), "scan" (:eq:`eq-scan-operator`;
        Hillis and Steele, 1986) or "chunkwise" (:eq:`eq-chunkwise`; Sun et al., 2023, equation 7).
        None takes the one of the fewest multiplications.

    Examples
    --------
    >>> from lesson_code.numpy import relu
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, state = linear_attention(
    ...     q, k, v, feature_map=relu, causal=True, return_state=True
    ... )
    >>> out
    array([[10., 20.],
           [30., 40.],
           [35., 45.]])
    >>> state.S
    array([[ 60.,  80.],
           [ 80., 100.]])
    """
    _check_causal(q, k, causal, form, initial_state, return_state)
    q, k = _features(feature_map, q), _features(feature_map, k)
    _arguments.check_size("feature_map", k.shape[-1], "one width C for q and k", q.shape[-1])
    form = form or _fastest_form(q, k, v, causal, chunk_size)
    if causal:
        S, z = initial_state or _zeros(k, v)
        _arguments.check_size("S of initial_state", S.shape[-2], "the width C", k.shape[-1])
        options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
        numerator, denominator, S, z = CAUSAL[form](q, k, v, S, z, **options)
        state = LinearAttentionState(S, z)
    else:
        (numerator, denominator), state = GLOBAL[form](q, k, v), None
    return (divide(numerator, denominator[..., None]) if normalize else numerator), state


# The forms. Each takes feature-mapped q and k (..., N, C) and v (..., N, M), and returns numerators
# (..., N, M) and denominators (..., N). A causal form also takes S and z before the first token,
# and also returns S and z after the last one.


def recurrent(q, k, v, S, z):
    leading = np.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    numerator = np.empty((*leading, *v.shape[-2:]), v.dtype)
    denominator = np.empty((*leading, v.shape[-2]), v.dtype)
    for t, (q_t, k_t, v_t) in enumerate(tokens(q, k, v)):
        S = S + outer(k_t, v_t)
        z = z + k_t
        numerator[..., t, :] = recurrence.read(S, q_t)
        denominator[..., t] = (q_t * z).sum(axis=-1)
    return numerator, denominator, S, z


def masked(q, k, v, S, z):
    A = np.tril(q @ k.swapaxes(-1, -2))  # (..., N, N)
    numerator = A @ v + q @ S
    denominator = A.sum(axis=-1) + _dot(q, z)
    return numerator, denominator, S + k.swapaxes(-1, -2) @ v, z + k.sum(axis=-2)


def cumsum(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, np.cumsum(writes_S, axis=-3), np.cumsum(writes_z, axis=-2))


def scan(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, _prefix_sums(writes_S, axis=-3), _prefix_sums(writes_z, axis=-2))


def chunkwise(q, k, v, S, z, chunk_size):
    numerators, denominators = [], []
    for Q, K, V in in_chunks(chunk_size, q, k, v):
        numerator, denominator, S, z = masked(Q, K, V, S, z)
        numerators.append(numerator)
        denominators.append(denominator)
    if not numerators:
        return masked(q, k, v, S, z)
    return np.concatenate(numerators, axis=-2), np.concatenate(denominators, axis=-1), S, z


def quadratic(q, k, v):
    A = q @ k.swapaxes(-1, -2)  # (..., N, N)
    return A @ v, A.sum(axis=-1)


def linear(q, k, v):
    S = k.swapaxes(-1, -2) @ v  # (..., C, M)
    z = k.sum(axis=-2)  # (..., C)
    return q @ S, _dot(q, z)


GLOBAL = {"quadratic": quadratic, "linear": linear}
CAUSAL: dict = {
    "masked": masked,
    "recurrent": recurrent,
    "cumsum": cumsum,
    "scan": scan,
    "chunkwise": chunkwise,
}


def _fastest_form(q, k, v, causal, chunk_size):
    """Forms of the fewest multiplications; in a single chunk, masked is what chunkwise does."""
    Nq, (Nk, C), M = q.shape[-2], k.shape[-2:], v.shape[-1]
    if causal:
        return "masked" if Nk <= chunk_size else "chunkwise"
    return "quadratic" if Nq * Nk * (C + M) <= (Nq + Nk) * C * M else "linear"


def _dot(q, z):
    """q·z at every position: (..., N, C) and (..., C) -> (..., N)."""
    return (q @ z[..., None])[..., 0]


def _writes(k, v, S, z):
    """The state before the first token, then what each token adds to it."""
    writes = outer(k, v)  # (..., N, C, M)
    writes = np.broadcast_to(writes, (*S.shape[:-2], *writes.shape[-3:]))
    k = np.broadcast_to(k, (*z.shape[:-1], *k.shape[-2:]))
    return (
        np.concatenate([S[..., None, :, :], writes], axis=-3),
        np.concatenate([z[..., None, :], k], axis=-2),
    )


def _read_all(q, S, z):
    """Read S_1 ... S_N, each with its own query, out of S_0 ... S_N."""
    numerator = recurrence.read(S[..., 1:, :, :], q)
    denominator = (q * z[..., 1:, :]).sum(axis=-1)
    return numerator, denominator, S[..., -1, :, :].copy(), z[..., -1, :].copy()


def _prefix_sums(x, axis):
    """x_0, x_0 + x_1, ... in log2 N steps, each of which doubles how many terms a sum holds."""
    x = np.moveaxis(x, axis, 0)
    distance = 1
    while distance < len(x):
        x = np.concatenate([x[:distance], x[:-distance] + x[distance:]])
        distance *= 2
    return np.moveaxis(x, 0, axis)


def _features(feature_map, x):
    """feature_map(x), checked, in the dtype of x: an array (..., C)."""
    if not callable(feature_map):
        raise TypeError(f"feature_map must be callable, got {type(feature_map).__name__}.")
    features = feature_map(read_only(x))
    if not (is_float_array(features) and features.shape[:-1] == x.shape[:-1] and features.ndim):
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            f"feature_map must return a NumPy array of floats of shape ({leading}, C) "
            f"for an input of shape {x.shape}, got {described(features)}."
        )
    return features.astype(x.dtype, copy=False)


def _zeros(k, v):
    """The empty state of the sequences that k and v write."""
    leading = np.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    return LinearAttentionState.zeros(k.shape[-1], v.shape[-1], leading, k.dtype)


def _check_causal(q, k, causal, form, initial_state, return_state):
    """Refuse what does not go with `causal`: a form, a number of queries, a state."""
    _arguments.check_form(form, tuple(CAUSAL if causal else GLOBAL), f" when {causal=}")
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    elif initial_state is not None or return_state:
        name = "return_state" if initial_state is None else "initial_state"
        raise ValueError(f"{name} needs causal=True, got {causal=}.")
