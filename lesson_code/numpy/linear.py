"""Linear attention in every form, and the state that they share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from lesson_code import _arguments
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.feature_maps import elu_plus_one
from lesson_code.numpy.precision import accumulate
from lesson_code.numpy.softmax import _describe, _read_only

Array = NDArray[np.floating]


class LinearAttentionState(NamedTuple):
    r"""What linear attention remembers: the memory S and the normalizer z.

    :math:`S_t = \sum_{j \le t} \phi(k_j) v_j^\top` and :math:`z_t = \sum_{j \le t} \phi(k_j)`. Both
    are kept in the accumulation dtype: float64 for float64 input, otherwise float32.

    Parameters
    ----------
    S : array, shape (..., C, M)
        Memory.
    z : array, shape (..., C)
        Normalizer.

    References
    ----------
    Katharopoulos et al. (2020), equations 16 to 20.

    Examples
    --------
    >>> state = LinearAttentionState.zeros(2, 2)
    >>> state = state.write(np.array([1.0, 0.0]), np.array([10.0, 20.0]))
    >>> state = state.write(np.array([0.0, 1.0]), np.array([30.0, 40.0]))
    >>> state.S
    array([[10., 20.],
           [30., 40.]])
    >>> state.read(np.array([0.5, 0.5]))
    array([20., 30.])
    """

    S: Array
    z: Array

    @classmethod
    def zeros(
        cls, C: int, M: int, batch_shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64
    ) -> "LinearAttentionState":
        """The empty state, from which every sequence starts.

        Parameters
        ----------
        C : int
            Width of the features.
        M : int
            Width of the values.
        batch_shape : tuple of int
            Leading dimensions.
        dtype : dtype
            A floating dtype, float64 by default; float32 is what float32 and float16 input needs.

        Returns
        -------
        LinearAttentionState
            S of shape (..., C, M) and z of shape (..., C), all 0, where ... is `batch_shape`.

        Raises
        ------
        TypeError
            If C or M is no integer, `batch_shape` no tuple, or `dtype` not floating.
        ValueError
            If C or M is negative.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 3, batch_shape=(5,)).S.shape
        (5, 2, 3)
        """
        C = _arguments.check_integer("C", C, minimum=0)
        M = _arguments.check_integer("M", M, minimum=0)
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"batch_shape must be a tuple of integers, got {batch_shape!r}.")
        S = np.zeros((*batch_shape, C, M), dtype)
        z = np.zeros((*batch_shape, C), dtype)
        _arguments.check_arrays(np.ndarray, dtype=z)
        return cls(S, z)

    def write(self, k: Array, v: Array) -> "LinearAttentionState":
        r"""Write one token: add :math:`\phi(k) v^\top` to S and :math:`\phi(k)` to z.

        Computes :eq:`eq-write`. This state stays as it is.

        Parameters
        ----------
        k : array, shape (..., C)
            Feature-mapped key.
        v : array, shape (..., M)
            Value.

        Returns
        -------
        LinearAttentionState
            The new state, in the accumulation dtype of `k`. Leading dimensions broadcast.

        Raises
        ------
        TypeError
            If `k` or `v` is no NumPy array of floats, their dtypes differ, or the state's is
            neither theirs nor their accumulation dtype.
        ValueError
            If the shapes do not fit together.

        Notes
        -----
        NaN stays in S and z from then on.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 1).write(np.array([1.0, 2.0]), np.array([3.0])).S
        array([[3.],
               [6.]])
        """
        _arguments.check_arrays(np.ndarray, k=k, v=v)
        _arguments.check_rank("k", k, "C")
        _arguments.check_rank("v", v, "M")
        dtypes = _arguments.state_dtypes(k)
        _check_state("the state", self, k.shape[-1], v.shape[-1], dtypes)
        leading = _arguments.check_leading(
            k=k.shape[:-1], v=v.shape[:-1], S=self.S.shape[:-2], z=self.z.shape[:-1]
        )
        k, v, S, z = accumulate(k, v, *self)
        S = S + k[..., :, None] * v[..., None, :]  # (..., C, M)
        z = z + k  # (..., C)
        return LinearAttentionState(
            np.array(np.broadcast_to(S, (*leading, *S.shape[-2:]))),
            np.array(np.broadcast_to(z, (*leading, *z.shape[-1:]))),
        )

    def read(self, q: Array, *, normalize: bool = True) -> Array:
        r"""Read with one query: :math:`\phi(q)^\top S`, over :math:`\phi(q)^\top z`.

        Computes :eq:`eq-normalized-read`, or :eq:`eq-read` with ``normalize=False``.

        Parameters
        ----------
        q : array, shape (..., C)
            Feature-mapped query.
        normalize : bool
            Divide by :math:`\phi(q)^\top z`; where that is exactly 0 the output is 0.

        Returns
        -------
        array, shape (..., M)
            Output in the dtype of `q`. Leading dimensions broadcast.

        Raises
        ------
        TypeError
            If `q` is no NumPy array of floats, or the state's dtype is neither that of `q` nor its
            accumulation dtype.
        ValueError
            If the shapes do not fit together.

        Notes
        -----
        NaN in the query, or in what it reads, reaches the output.

        Examples
        --------
        >>> S = np.array([[60.0, 80.0], [80.0, 100.0]])
        >>> state = LinearAttentionState(S, np.array([2.0, 2.0]))
        >>> state.read(np.array([1.0, 1.0]))
        array([35., 45.])
        >>> state.read(np.array([1.0, 1.0]), normalize=False)
        array([140., 180.])
        """
        _arguments.check_arrays(np.ndarray, q=q)
        _arguments.check_flags(normalize=normalize)
        _arguments.check_rank("q", q, "C")
        _check_state("the state", self, q.shape[-1], None, _arguments.state_dtypes(q))
        _arguments.check_leading(q=q.shape[:-1], S=self.S.shape[:-2], z=self.z.shape[:-1])
        dtype, (q, S, z) = q.dtype, accumulate(q, self.S, self.z)
        out = (q[..., None, :] @ S)[..., 0, :]  # (..., M)
        if normalize:
            out = divide(out, (q * z).sum(axis=-1, keepdims=True))
        return out.astype(dtype, copy=False)


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

    Over all positions it computes :eq:`eq-linear-attention`; with ``causal=True`` the sums end at
    the query's own position (:eq:`eq-causal-linear-attention`):

    .. math:: o_i^\top = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}
                            {\phi(q_i)^\top \sum_j \phi(k_j)}

    Every form computes the same outputs; they differ in what they store and in how many steps they
    take.

    Parameters
    ----------
    q : array, shape (..., N, D)
        Queries. With ``causal=False`` their number may differ from that of the keys.
    k : array, shape (..., N, D)
        Keys.
    v : array, shape (..., N, M)
        Values, as many as keys.
    feature_map : callable
        The map phi, (..., D) -> (..., C), applied to q and to k.
    causal : bool
        Let each query see the keys up to its own position only.
    normalize : bool
        Divide by :math:`\phi(q)^\top z`. Nothing is added to it; where it is exactly 0 the output
        is 0.
    form : str, optional
        With ``causal=False``: "quadratic", (φ(Q) φ(K)ᵀ) V, or "linear", φ(Q) (φ(K)ᵀ V)
        (:eq:`eq-bracket-trick`). With ``causal=True``: "masked" (:eq:`eq-masked-form`), "recurrent"
        (:eq:`eq-recurrence`), "cumsum" (:eq:`eq-cumsum-form`), "scan" (:eq:`eq-scan-operator`, an
        associative prefix scan in log2 N steps) or "chunkwise" (:eq:`eq-chunkwise`, masked inside a
        chunk, a state between chunks). None takes the fastest: "quadratic" or "linear", whichever
        multiplies less; "masked" in a single chunk, "chunkwise" in several.
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : LinearAttentionState, optional
        State before the first token, zero by default; only with ``causal=True``. Its dtype is that
        of the input or the accumulation dtype.
    return_state : bool
        Return the state after the last token as well; only with ``causal=True``.

    Returns
    -------
    array, shape (..., N, M)
        Outputs in the dtype of the input, with the leading dimensions of q, k, v and the initial
        state, broadcast as in ``matmul``. float16 is computed in float32, the feature map included.
    LinearAttentionState
        With ``return_state=True``: S (..., C, M) and z (..., C), also with ``normalize=False``, in
        the accumulation dtype (float64 for float64, otherwise float32), with the leading dimensions
        of k, v and the initial state: queries are not remembered.

    Raises
    ------
    TypeError
        If q, k or v is no NumPy array of floats, their dtypes differ, `feature_map` is not
        callable, `chunk_size` is no integer, or `initial_state` is no LinearAttentionState of a
        fitting dtype.
    ValueError
        If the shapes do not fit together, `feature_map` returns anything but an array of floats
        (..., C), `form` is unknown or does not go with `causal`, `chunk_size` is
        below 1, or a state is passed or asked for with ``causal=False``.

    Notes
    -----
    NaN reaches the outputs that depend on it and no other sequence of the batch. With
    ``causal=True`` the forms "recurrent", "cumsum" and "scan" keep it from earlier positions; in
    "masked" a NaN in a value reaches the earlier positions of its sequence and in "chunkwise" those
    of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Katharopoulos et al. (2020), equations 4 to 6, 8 to 12 and 16 to 20; Hillis and Steele (1986)
    for the scan; Sun et al. (2023), equation 7, for the chunks.

    Examples
    --------
    >>> from lesson_code.numpy import relu
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> linear_attention(q, k, v, feature_map=relu, causal=True)
    array([[10., 20.],
           [30., 40.],
           [35., 45.]])
    >>> out, state = linear_attention(
    ...     q, k, v, feature_map=relu, causal=True, normalize=False, return_state=True
    ... )
    >>> out[-1]
    array([140., 180.])
    >>> state.S
    array([[ 60.,  80.],
           [ 80., 100.]])
    """
    _arguments.check_arrays(np.ndarray, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal, normalize=normalize, return_state=return_state)
    _arguments.check_queries_keys_values(q, k, v)
    _arguments.check_form(form, tuple(_CAUSAL if causal else _GLOBAL), f" when {causal=}")
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    elif initial_state is not None or return_state:
        name = "return_state" if initial_state is None else "initial_state"
        raise ValueError(f"{name} needs causal=True, got {causal=}.")
    dtype, state_dtypes = q.dtype, _arguments.state_dtypes(q)
    q, k, v = accumulate(q, k, v)
    q, k = _features(feature_map, q), _features(feature_map, k)
    _arguments.check_size("feature_map", k.shape[-1], "one width C for q and k", q.shape[-1])

    form = form or _fastest_form(q, k, v, causal, chunk_size)
    if causal:
        k, v, S, z = _broadcast_state(q, k, v, initial_state, state_dtypes)
        options = {"chunk_size": chunk_size} if form == "chunkwise" else {}
        numerator, denominator, S, z = _CAUSAL[form](q, k, v, S, z, **options)
    else:
        numerator, denominator = _GLOBAL[form](q, k, v)
    out = divide(numerator, denominator[..., None]) if normalize else numerator
    out = out.astype(dtype, copy=False)
    return (out, LinearAttentionState(S, z)) if return_state else out


# The forms. Each takes feature-mapped q and k (..., N, C) and v (..., N, M), and returns numerators
# (..., N, M) and denominators (..., N). A causal form also takes S and z before the first token,
# and also returns S and z after the last one.


def _quadratic(q, k, v):
    A = q @ k.swapaxes(-1, -2)  # (..., N, N)
    return A @ v, A.sum(axis=-1)


def _linear(q, k, v):
    S = k.swapaxes(-1, -2) @ v  # (..., C, M)
    z = k.sum(axis=-2)  # (..., C)
    return q @ S, _dot(q, z)


def _masked(q, k, v, S, z):
    A = np.tril(q @ k.swapaxes(-1, -2))  # (..., N, N)
    numerator = A @ v + q @ S
    denominator = A.sum(axis=-1) + _dot(q, z)
    return numerator, denominator, S + k.swapaxes(-1, -2) @ v, z + k.sum(axis=-2)


def _recurrent(q, k, v, S, z):
    numerator, denominator = _empty_outputs(q, S)
    for t in range(k.shape[-2]):
        S = S + k[..., t, :, None] * v[..., t, None, :]
        z = z + k[..., t, :]
        numerator[..., t, :] = (q[..., t, None, :] @ S)[..., 0, :]
        denominator[..., t] = (q[..., t, :] * z).sum(axis=-1)
    return numerator, denominator, S, z


def _cumsum(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, np.cumsum(writes_S, axis=-3), np.cumsum(writes_z, axis=-2))


def _scan(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, _prefix_sums(writes_S, axis=-3), _prefix_sums(writes_z, axis=-2))


def _chunkwise(q, k, v, S, z, chunk_size):
    numerator, denominator = _empty_outputs(q, S)
    for start in range(0, k.shape[-2], chunk_size):
        chunk = slice(start, start + chunk_size)
        numerator[..., chunk, :], denominator[..., chunk], S, z = _masked(
            q[..., chunk, :], k[..., chunk, :], v[..., chunk, :], S, z
        )
    return numerator, denominator, S, z


_GLOBAL = {"quadratic": _quadratic, "linear": _linear}
_CAUSAL: dict = {
    "masked": _masked,
    "recurrent": _recurrent,
    "cumsum": _cumsum,
    "scan": _scan,
    "chunkwise": _chunkwise,
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


def _empty_outputs(q, S):
    leading = np.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    N, M = q.shape[-2], S.shape[-1]
    return np.empty((*leading, N, M), q.dtype), np.empty((*leading, N), q.dtype)


def _writes(k, v, S, z):
    """The state before the first token, then what each token adds to it."""
    outer = k[..., :, None] * v[..., None, :]  # (..., N, C, M)
    return (
        np.concatenate([S[..., None, :, :], outer], axis=-3),
        np.concatenate([z[..., None, :], k], axis=-2),
    )


def _read_all(q, S, z):
    """Read S_1 ... S_N, each with its own query, out of S_0 ... S_N."""
    numerator = (q[..., None, :] @ S[..., 1:, :, :])[..., 0, :]
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
    features = feature_map(_read_only(x))
    if not (
        isinstance(features, np.ndarray)
        and np.issubdtype(features.dtype, np.floating)
        and features.ndim == x.ndim
        and features.shape[:-1] == x.shape[:-1]
    ):
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            f"feature_map must return a NumPy array of floats of shape ({leading}, C) "
            f"for an input of shape {x.shape}, got {_describe(features)}."
        )
    return features.astype(x.dtype, copy=False)


def _check_state(name, state, C, M, dtypes):
    """Refuse all but S (..., C, M) and z (..., C) of one of the dtypes; M may be None, for any."""
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"{name} must be a LinearAttentionState, got {type(state).__name__}.")
    _arguments.check_memory(np.ndarray, name, *state, C, M, dtypes)


def _broadcast_state(q, k, v, state, dtypes):
    """k, v and a fresh state, all with the leading dimensions that the state will have."""
    C, M = k.shape[-1], v.shape[-1]
    if state is None:
        state = LinearAttentionState.zeros(C, M, dtype=k.dtype)
    _check_state("initial_state", state, C, M, dtypes)
    S, z = state
    leading = _arguments.check_leading(
        k=k.shape[:-2], v=v.shape[:-2], S=S.shape[:-2], z=z.shape[:-1]
    )
    _arguments.check_leading(q=q.shape[:-2], initial_state=leading)
    return (
        np.broadcast_to(k, (*leading, *k.shape[-2:])),
        np.broadcast_to(v, (*leading, *v.shape[-2:])),
        np.array(np.broadcast_to(S, (*leading, C, M)), k.dtype),
        np.array(np.broadcast_to(z, (*leading, C)), k.dtype),
    )
