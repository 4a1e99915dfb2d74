"""Retention, the memory of RetNet: all that it holds fades at one rate."""

import numpy as np

from lesson_code import _arguments
from lesson_code.numpy.chunks import in_chunks
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import outer, read, tokens


@operator(
    "N D, N D, N M, ... -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "parallel", "chunkwise"),
    decay="in (0, 1]",
)
def retention(
    q: Array,
    k: Array,
    v: Array,
    decay: float | Array,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Array | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, Array]:
    r"""Retention: a memory that fades by the same factor with each token.

    Computes :eq:`eq-retention` (Sun et al., 2023, equations 5 to 7, there with rotated queries and
    keys), with the decay :math:`\gamma`. It has no normalizer and no scale:

    .. math::

        S_t &= \gamma S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys.
    v : array, shape (..., N, M)
        Values.
    decay : number or array, shape (...)
        The factor :math:`\gamma`, in (0, 1]; an array has one for each sequence of the leading
        dimensions, shape (H,) for heads, in the dtype of the input or the accumulation dtype.
    form : str, optional
        "recurrent", "parallel" (:eq:`eq-retention-parallel`, all positions at once) or "chunkwise"
        (the default, :eq:`eq-retention-chunkwise`).

    Examples
    --------
    >>> q = k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> retention(q, k, v, 0.5)
    array([[ 10. ,  20. ],
           [ 30. ,  40. ],
           [117.5, 145. ]])
    """
    S, out, gamma = initial_state, [], np.asarray(decay)[..., None, None]
    if form == "recurrent":
        for q_t, k_t, v_t in tokens(q, k, v):
            S = gamma * S + outer(k_t, v_t)
            out.append(read(S, q_t))
        return np.stack(out, axis=-2), S
    L = k.shape[-2] if form == "parallel" else chunk_size
    for Q, K, V in in_chunks(L, q, k, v):
        L = K.shape[-2]
        t = np.arange(1, L + 1, dtype=q.dtype)[:, None]
        fading = np.where(t >= t.T, gamma ** np.maximum(t - t.T, 0), 0)  # (..., L, L)
        out.append((Q @ K.swapaxes(-1, -2) * fading) @ V + gamma**t * (Q @ S))
        S = gamma**L * S + (K * gamma ** (L - t)).swapaxes(-1, -2) @ V
    return np.concatenate(out, axis=-2), S


def retention_decays(num_heads: int) -> Array:
    r"""The decays of RetNet's heads: :math:`\gamma_h = 1 - 2^{-5-h}` for h = 0 ... H - 1.

    Computes :eq:`eq-retention-decays` (Sun et al., 2023, equation 8). Head h remembers about
    :math:`1/(1-\gamma_h) = 2^{5+h}` tokens. In float16 the eighth head would have a decay of 1,
    which forgets nothing: :func:`retention` takes decays in float32 for float16 input.

    Parameters
    ----------
    num_heads : int
        Number H of heads, at least 1.

    Returns
    -------
    array, shape (H,)
        Decays in float64.

    Examples
    --------
    >>> retention_decays(3)
    array([0.96875  , 0.984375 , 0.9921875])
    """
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    return 1 - 2.0 ** (-5 - np.arange(num_heads))
