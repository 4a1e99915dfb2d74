"""The memory of linear attention: what one token writes, and what one query reads."""

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from lesson_code import _arguments
from lesson_code.numpy import recurrence
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.operator import Array
from lesson_code.numpy.precision import accumulate
from lesson_code.numpy.recurrence import outer


class LinearAttentionState(NamedTuple):
    r"""What linear attention remembers: the memory S and the normalizer z.

    :math:`S_t = \sum_{j \le t} \phi(k_j) v_j^\top` and :math:`z_t = \sum_{j \le t} \phi(k_j)`
    (Katharopoulos et al., 2020, equations 16 to 20), in the accumulation dtype.

    Parameters
    ----------
    S : array, shape (..., C, M)
        Memory.
    z : array, shape (..., C)
        Normalizer.

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
        C, M : int
            Widths of the features and of the values.
        batch_shape : tuple of int
            Leading dimensions.
        dtype : dtype
            A floating dtype, float64 by default; float32 is what float32 and float16 input needs.

        Returns
        -------
        LinearAttentionState
            S of shape (..., C, M) and z of shape (..., C), all 0, where ... is `batch_shape`.

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

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 1).write(np.array([1.0, 2.0]), np.array([3.0])).S
        array([[3.],
               [6.]])
        """
        leading = _check_one_token(self, k=(k, "C"), v=(v, "M"))
        k, v, S, z = accumulate(k, v, *self)
        S = S + outer(k, v)  # (..., C, M)
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

        Examples
        --------
        >>> S = np.array([[60.0, 80.0], [80.0, 100.0]])
        >>> state = LinearAttentionState(S, np.array([2.0, 2.0]))
        >>> state.read(np.array([1.0, 1.0]))
        array([35., 45.])
        >>> state.read(np.array([1.0, 1.0]), normalize=False)
        array([140., 180.])
        """
        _check_one_token(self, q=(q, "C"))
        _arguments.check_flags(normalize=normalize)
        dtype, (q, S, z) = q.dtype, accumulate(q, *self)
        out = recurrence.read(S, q)  # (..., M)
        if normalize:
            out = divide(out, (q * z).sum(axis=-1, keepdims=True))
        return out.astype(dtype, copy=False)


def _check_one_token(state, **arrays):
    """Refuse arrays that a state cannot be written with or read by; all leading dimensions."""
    _arguments.check_arrays(np.ndarray, **{name: array for name, (array, _) in arrays.items()})
    like_name, (like, _) = next(iter(arrays.items()))
    parts = {"S of the state": (state.S, "C M"), "z of the state": (state.z, "C")}
    for name, (part, _) in parts.items():
        _arguments.check_arrays(np.ndarray, **{name: part})
        _arguments.check_beside(name, part, like_name, like)
    return _arguments.check_axes(**arrays, **parts)
