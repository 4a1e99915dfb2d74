"""Softmax attention over a window of the last tokens."""

import numpy as np

from lesson_code._arguments import check_integer
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.softmax import softmax_attention


@operator("N D, N D, N M -> N M")
def sliding_window_attention(
    q: Array, k: Array, v: Array, *, window: int, scale: float | None = None
) -> Array:
    r"""Causal softmax attention that sees the last `window` keys only, the own one included.

    Computes :math:`o_t = \sum_j a_{tj} v_j` with the weights of softmax attention over
    :math:`t - \mathrm{window} < j \le t` (Beltagy et al., 2020, section 3.1). No N×N array is made,
    and a cache needs `window` keys and values, however long the text is.

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys, as many of one as of the other.
    v : array, shape (..., N, M)
        Values.
    window : int
        How many keys a query sees, at least 1.
    scale : float, optional
        Factor of the scores, finite; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., N, M)
        Outputs.

    Examples
    --------
    All scores are 0: the outputs are means of the last two values.

    >>> q, v = np.zeros((4, 1)), np.array([[2.0], [4.0], [8.0], [16.0]])
    >>> sliding_window_attention(q, q, v, window=2).ravel()
    array([ 2.,  3.,  6., 12.])
    """
    window = check_integer("window", window, minimum=1)
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    out = np.empty((*leading, *v.shape[-2:]), v.dtype)
    for t in range(q.shape[-2]):
        seen, own = slice(max(t + 1 - window, 0), t + 1), slice(t, t + 1)
        out[..., own, :] = softmax_attention(
            q[..., own, :], k[..., seen, :], v[..., seen, :], scale=scale
        )
    return out
