"""WKV, the memory of RWKV-4: a mean of the values in which the past fades, channel by channel."""

from typing import NamedTuple

import numpy as np

from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.operator import Array, operator
from lesson_code.numpy.recurrence import tokens

EMPTY = -1e38  # the maximum of nothing: below any key, and finite, as -inf - -inf would be NaN


class WKVState(NamedTuple):
    r"""What WKV remembers: two sums over the past, and the exponent that they are divided by.

    Before token t it stands for :math:`\sum_{i<t} e^{k_i - (t-1-i) w} v_i`, which is `numerator`
    times :math:`e^\mu`, and for the same sum without the values, `denominator` times
    :math:`e^\mu`, where :math:`\mu` is `maximum`, the largest of the exponents
    (:eq:`eq-wkv-safe`; Peng et al., 2023, the appendix on numerical stability). Before the first
    token they are 0, 0 and -1e38.

    Parameters
    ----------
    numerator : array, shape (..., D)
        Weighted sum of the values.
    denominator : array, shape (..., D)
        Sum of the weights.
    maximum : array, shape (..., D)
        Largest exponent of the weights.
    """

    numerator: Array
    denominator: Array
    maximum: Array


@operator(
    "N D, N D, (D), (D) -> N D",
    state=WKVState._make(("D", "D", "D")),
    empty=WKVState._make((0, 0, EMPTY)),
    forms=("recurrent", "parallel"),
    decay="positive and finite",
)
def wkv(
    k: Array,
    v: Array,
    decay: Array,
    bonus: Array,
    *,
    form: str | None = None,
    initial_state: WKVState | None = None,
    return_state: bool = False,
) -> Array | tuple[Array, WKVState]:
    r"""WKV of RWKV-4: a causal mean of the values, with weights that decay in each channel.

    Computes :eq:`eq-wkv` (Peng et al., 2023), with the decay :math:`w > 0` and the bonus :math:`u`
    of the current token, which enters the state without it (:eq:`eq-wkv-recurrence`). The token
    before it carries no decay yet:

    .. math:: o_t = \frac{\sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t}
                       {\sum_{i<t} e^{k_i - (t-1-i) w} + e^{k_t + u}}

    Parameters
    ----------
    k, v : array, shape (..., N, D)
        Keys, the logarithms of the weights, of which -inf is weight 0, and values.
    decay, bonus : array, shape (D,)
        What a weight's logarithm loses per token, w, and what is added to the current key, u.
    form : str, optional
        "recurrent" (the default, with a running maximum, :eq:`eq-wkv-safe`) or "parallel" (all N²
        weights of each channel). Where no token has a weight the output is 0. Each token fades what
        came before: pad at the front, with keys of -inf.

    Examples
    --------
    With w = ln 2 each step halves a weight:

    >>> k, v = np.zeros((3, 1)), np.array([[10.0], [30.0], [50.0]])
    >>> wkv(k, v, np.array([np.log(2)]), np.array([0.0])).round(9)
    array([[10.],
           [20.],
           [34.]])
    """
    state = initial_state._replace(maximum=np.maximum(initial_state.maximum, EMPTY))
    if form == "parallel":
        return _parallel(k, v, decay, bonus, state)
    out = []
    for k_t, v_t in tokens(k, v):
        a, b, _ = add_token(state, 0, bonus + k_t, v_t)  # read: with the bonus, no decay yet
        out.append(divide(a, b))
        state = add_token(state, decay, k_t, v_t)  # write: the past decays
    return np.stack(out, axis=-2), state


def add_token(state, w, k, v):
    """The sums with a token of weight e^k, after what they held has decayed by w."""
    a, b, maximum = state
    top = np.maximum(maximum - w, k)
    # In this order, what the rounding of the new maximum has added to it is taken from the sums.
    past, own = np.exp(maximum - top - w), np.exp(k - top)
    return WKVState(past * a + own * v, past * b + own, top)


def _parallel(k, v, w, u, state):
    N = k.shape[-2]
    # Row N is what a token after the last would find: the state.
    t, i = np.arange(N + 1, dtype=k.dtype)[:, None], np.arange(N, dtype=k.dtype)
    distance = (t - 1 - i)[..., None]  # (N + 1, N, 1)
    bias = np.where(distance >= 0, -distance * w, np.where(distance == -1, u, -np.inf))
    exponents = k[..., None, :, :] + bias  # (..., N + 1, N, D)
    before = state.maximum[..., None, :] - t * w  # (..., N + 1, D), of the initial state
    top = np.maximum(exponents.max(axis=-2), before)
    weights, before = np.exp(exponents - top[..., None, :]), np.exp(before - top)
    a = (weights * v[..., None, :, :]).sum(axis=-2) + before * state.numerator[..., None, :]
    b = weights.sum(axis=-2) + before * state.denominator[..., None, :]
    last = WKVState(*(x[..., N, :].copy() for x in np.broadcast_arrays(a, b, top)))
    return divide(a, b)[..., :N, :], last
