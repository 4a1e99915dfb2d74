"""WKV, the memory of RWKV-4: a mean of the values in which the past fades, channel by channel."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lesson_code import _arguments
from lesson_code.numpy.elementwise import divide
from lesson_code.numpy.precision import accumulate

Array = NDArray[np.floating]

EMPTY = -1e38  # the maximum of nothing: below any key, and finite, as -inf - -inf would be NaN


class WKVState(NamedTuple):
    r"""What WKV remembers: two sums over the past, and the exponent that they are divided by.

    Before token t it stands for :math:`\sum_{i<t} e^{k_i - (t-1-i) w} v_i`, which is `numerator`
    times :math:`e^\mu`, and for the same sum without the values, `denominator` times
    :math:`e^\mu`, where :math:`\mu` is `maximum`, the largest of the exponents
    (:eq:`eq-wkv-safe`). All are kept in the accumulation dtype: float64 for float64 input,
    otherwise float32. Before the first token they are 0, 0 and -1e38.

    Parameters
    ----------
    numerator : array, shape (..., D)
        Weighted sum of the values.
    denominator : array, shape (..., D)
        Sum of the weights.
    maximum : array, shape (..., D)
        Largest exponent of the weights.

    References
    ----------
    Peng et al. (2023), the appendix on numerical stability.

    Examples
    --------
    >>> k, v = np.zeros((1, 1)), np.array([[10.0]])
    >>> _, state = wkv(k, v, np.array([1.0]), np.array([0.0]), return_state=True)
    >>> state
    WKVState(numerator=array([10.]), denominator=array([1.]), maximum=array([0.]))
    """

    numerator: Array
    denominator: Array
    maximum: Array


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

    With the decay :math:`w > 0` and the bonus :math:`u`, in every channel (:eq:`eq-wkv`),

    .. math:: o_t = \frac{\sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t}
                       {\sum_{i<t} e^{k_i - (t-1-i) w} + e^{k_t + u}}

    The token before the current one carries no decay. The bonus is for the current token alone: it
    enters the state as :math:`e^{k_t}`, without u (:eq:`eq-wkv-recurrence`).

    Parameters
    ----------
    k : array, shape (..., N, D)
        Keys, the logarithms of the weights. -inf has weight 0.
    v : array, shape (..., N, D)
        Values.
    decay : array, shape (D,)
        What a weight's logarithm loses per token, w > 0. It is the factor :math:`e^{-w}` that a
        forget gate would have.
    bonus : array, shape (D,)
        What is added to the key of the current token, u.
    form : str, optional
        "recurrent", a loop over the tokens with a running maximum (:eq:`eq-wkv-safe`), or
        "parallel", all N² weights of each channel at once (:eq:`eq-wkv`). None takes "recurrent".
    initial_state : WKVState, optional
        State before the first token. Its dtype is that of the input or the accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    array, shape (..., N, D)
        Outputs in the dtype of the input, with the leading dimensions of k, v and the initial
        state, broadcast. Where no token has a weight the output is 0. float16 is computed in
        float32.
    WKVState
        With ``return_state=True``: three arrays (..., D) in the accumulation dtype (float64 for
        float64, otherwise float32).

    Raises
    ------
    TypeError
        If an argument is no NumPy array of floats, their dtypes differ, or `initial_state` is no
        WKVState of a fitting dtype.
    ValueError
        If the shapes do not fit together, `decay` is not positive and finite, or `form` is unknown.

    Notes
    -----
    No exponential overflows: each is of a difference to the largest exponent (keys below -1e38
    count as -inf). NaN reaches the outputs that depend on it, later ones of its own channel and
    sequence; in "parallel", one in a value reaches earlier ones as well, as 0 * NaN is NaN. A zero
    key has weight: pad with keys of -inf, and at the front, as each token fades what came before.

    References
    ----------
    Peng et al. (2023), the WKV operator and the appendix on numerical stability.

    Examples
    --------
    With w = ln 2 each step halves a weight:

    >>> k, v = np.zeros((3, 1)), np.array([[10.0], [30.0], [50.0]])
    >>> decay, bonus = np.array([np.log(2)]), np.array([0.0])
    >>> wkv(k, v, decay, bonus).round(9)
    array([[10.],
           [20.],
           [34.]])
    """
    _arguments.check_arrays(np.ndarray, k=k, v=v, decay=decay, bonus=bonus)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_form(form, tuple(_FORMS))
    _arguments.check_axes(k=(k, "N, D"), v=(v, "N, D"), decay=(decay, "D"), bonus=(bonus, "D"))
    _arguments.check_alone("decay", decay, "D")
    _arguments.check_alone("bonus", bonus, "D")
    expected, wrong = "positive and finite", (decay <= 0) | np.isinf(decay)
    _arguments.check_values("decay", decay, expected, wrong)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2]}
    state = _begin(initial_state, "k", k, k.shape[-1], **leading)
    dtype, (k, v, w, u) = k.dtype, accumulate(k, v, decay, bonus)
    k, v = (np.broadcast_to(x, (*state.maximum.shape[:-1], *x.shape[-2:])) for x in (k, v))
    out, state = _FORMS[form or "recurrent"](k, v, w, u, state)
    out = out.astype(dtype, copy=False)
    return (out, state) if return_state else out


def _recurrent(k, v, w, u, state):
    a, b, maximum = state  # numerator, denominator and what they are divided by, e^maximum
    out = np.empty(k.shape, k.dtype)
    for t in range(k.shape[-2]):
        k_t, v_t = k[..., t, :], v[..., t, :]
        top = np.maximum(maximum, u + k_t)  # read: the past, and the current token with its bonus
        past, own = np.exp(maximum - top), np.exp(u + k_t - top)
        out[..., t, :] = divide(past * a + own * v_t, past * b + own)
        top = np.maximum(maximum - w, k_t)  # write: the past decays, the token enters as it is
        past, own = np.exp(maximum - top - w), np.exp(k_t - top)
        a, b, maximum = past * a + own * v_t, past * b + own, top
    return out, WKVState(a, b, maximum)


def _parallel(k, v, w, u, state):
    N = k.shape[-2]
    # Row N is what a token after the last would find: the state.
    t, i = np.arange(N + 1, dtype=k.dtype)[:, None], np.arange(N, dtype=k.dtype)
    distance = (t - 1 - i)[..., None]  # (N + 1, N, 1)
    bias = np.where(distance >= 0, -distance * w, np.where(distance == -1, u, -np.inf))
    exponents = k[..., None, :, :] + bias  # (..., N + 1, N, D)
    before = state.maximum[..., None, :] - t * w  # (..., N + 1, D), of the initial state
    top = np.maximum(exponents.max(axis=-2, initial=-np.inf), before)
    weights, before = np.exp(exponents - top[..., None, :]), np.exp(before - top)
    a = (weights * v[..., None, :, :]).sum(axis=-2) + before * state.numerator[..., None, :]
    b = weights.sum(axis=-2) + before * state.denominator[..., None, :]
    last = WKVState(*(x[..., N, :].copy() for x in (a, b, top)))
    return divide(a, b)[..., :N, :], last


_FORMS = {"recurrent": _recurrent, "parallel": _parallel}


def _begin(state, like_name, like, D, **leading):
    """The state before the first token, with the leading dimensions that it shares with others."""
    dtype = _arguments.accumulation_dtype(like)
    if state is None:
        state = WKVState(np.zeros(D, dtype), np.zeros(D, dtype), np.full(D, EMPTY, dtype))
    if not isinstance(state, WKVState):
        raise TypeError(f"initial_state must be a WKVState, got {type(state).__name__}.")
    parts = {f"{name} of initial_state": x for name, x in state._asdict().items()}
    for name, x in parts.items():
        _arguments.check_initial_state(np.ndarray, x, like_name, like, name, D=D)
        leading[name] = x.shape[:-1]
    shape = (*_arguments.check_leading(**leading), D)
    a, b, maximum = (np.array(np.broadcast_to(x, shape), dtype) for x in state)
    return WKVState(a, b, np.maximum(maximum, EMPTY))  # float16 has made -inf of it
