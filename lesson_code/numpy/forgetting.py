"""Softmax attention that forgets: a bias that fades keys, one gate for each token."""

from lesson_code.numpy.chunks import sums_between
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.softmax import keys_seen, normalized, scaled_scores, weighted_sum


@operator("N D, N D, N M, N -> N M", log_decay="at most 0")
def forgetting_attention(
    q: Array, k: Array, v: Array, log_decay: Array, *, scale: float | None = None
) -> Array:
    r"""Forgetting attention (FoX): softmax attention whose tokens fade the ones before.

    The scores are those of softmax attention and the sum of the gates in between (Lin et al., 2025,
    equation 6):

    .. math::

        o_t = \frac{\sum_{j \le t} e^{s_{tj}} v_j}{\sum_{j \le t} e^{s_{tj}}}
        \qquad s_{tj} = \mathrm{scale} \cdot q_t \cdot k_j + \sum_{i=j+1}^{t} g_i

    Parameters
    ----------
    q, k : array, shape (..., N, D)
        Queries and keys, as many of one as of the other; no rotation is needed, as the gates tell
        near from far.
    v : array, shape (..., N, M)
        Values.
    log_decay : array, shape (..., N)
        Logarithms g of the gates, in [-inf, 0]. With 0 it is softmax attention; with -inf a token
        hides all that came before it, exactly.
    scale : float, optional
        Factor of the products, finite, not of the gates; :math:`1/\sqrt{D}` by default.

    Returns
    -------
    array, shape (..., N, M)
        Outputs.

    Examples
    --------
    All products are 0. The second gate halves the weight of the first token:

    >>> import numpy as np
    >>> q, v = np.zeros((2, 1)), np.array([[3.0], [6.0]])
    >>> forgetting_attention(q, q, v, np.log([1.0, 0.5])).round(9)
    array([[3.],
           [5.]])
    """
    seen = keys_seen(q, k)
    bias = sums_between(log_decay[..., None])[..., 0]  # -inf where j > t
    return weighted_sum(normalized(scaled_scores(q, k, scale, seen) + bias), v, seen)
