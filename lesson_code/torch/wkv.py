"""WKV, the memory of RWKV-4: a mean of the values in which the past fades, channel by channel."""

from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch._memory import check_values
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.softmax import _divide

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
    numerator : tensor, shape (..., D)
        Weighted sum of the values.
    denominator : tensor, shape (..., D)
        Sum of the weights.
    maximum : tensor, shape (..., D)
        Largest exponent of the weights.

    Notes
    -----
    Gradients of what the state stands for go through `numerator` and `denominator` alone; a
    `maximum` that :func:`wkv` returns has none.

    References
    ----------
    Peng et al. (2023), the appendix on numerical stability.

    Examples
    --------
    >>> k, v = torch.zeros(1, 1), torch.tensor([[10.0]])
    >>> _, state = wkv(k, v, torch.tensor([1.0]), torch.tensor([0.0]), return_state=True)
    >>> state
    WKVState(numerator=tensor([10.]), denominator=tensor([1.]), maximum=tensor([0.]))
    """

    numerator: Tensor
    denominator: Tensor
    maximum: Tensor


def wkv(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    bonus: Tensor,
    *,
    form: str | None = None,
    initial_state: WKVState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, WKVState]:
    r"""WKV of RWKV-4: a causal mean of the values, with weights that decay in each channel.

    With the decay :math:`w > 0` and the bonus :math:`u`, in every channel (:eq:`eq-wkv`),

    .. math:: o_t = \frac{\sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{k_t + u} v_t}
                       {\sum_{i<t} e^{k_i - (t-1-i) w} + e^{k_t + u}}

    The token before the current one carries no decay. The bonus is for the current token alone: it
    enters the state as :math:`e^{k_t}`, without u (:eq:`eq-wkv-recurrence`).

    Parameters
    ----------
    k : tensor, shape (..., N, D)
        Keys, the logarithms of the weights. -inf has weight 0.
    v : tensor, shape (..., N, D)
        Values.
    decay : tensor, shape (D,)
        What a weight's logarithm loses per token, w > 0. It is the factor :math:`e^{-w}` that a
        forget gate would have.
    bonus : tensor, shape (D,)
        What is added to the key of the current token, u.
    form : str, optional
        "recurrent", a loop over the tokens with a running maximum (:eq:`eq-wkv-safe`), or
        "parallel", a scan that joins neighbors, then pairs of pairs (:eq:`eq-wkv-join`), in about
        2 log2 N steps and O(N D) memory. None takes "recurrent" for a single token, else
        "parallel".
    initial_state : WKVState, optional
        State before the first token. Its dtype is that of the input or the accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    tensor, shape (..., N, D)
        Outputs in the dtype of the input, with the leading dimensions of k, v and the initial
        state, broadcast. Where no token has a weight the output is 0. Half precision is computed
        in float32.
    WKVState
        With ``return_state=True``: three tensors (..., D) in the accumulation dtype (float64 for
        float64, otherwise float32).

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, their dtypes differ, or `initial_state` is no
        WKVState of a fitting dtype.
    ValueError
        If the shapes or devices do not fit together, `decay` is not positive and finite, or `form`
        is unknown.

    Notes
    -----
    Differentiable in all arguments, any number of times, through the outputs and through the
    numerator and denominator of the returned state. The values of `decay` are checked in eager mode
    only, not under ``torch.compile`` or ``torch.func``.

    No exponential overflows: each is of a difference to the largest exponent (keys below -1e38
    count as -inf). NaN reaches the outputs that depend on it, later ones of its own channel and
    sequence. A zero key has weight: pad with keys of -inf, and at the front, as each token fades
    what came before.

    References
    ----------
    Peng et al. (2023), the WKV operator and the appendix on numerical stability; Blelloch (1990)
    for the scan.

    Examples
    --------
    With w = ln 2 each step halves a weight:

    >>> k, v = torch.zeros(3, 1), torch.tensor([[10.0], [30.0], [50.0]])
    >>> decay, bonus = torch.tensor([2.0]).log(), torch.tensor([0.0])
    >>> wkv(k, v, decay, bonus)
    tensor([[10.],
            [20.],
            [34.]])
    """
    _arguments.check_arrays(Tensor, k=k, v=v, decay=decay, bonus=bonus)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_form(form, tuple(_FORMS))
    _arguments.check_axes(k=(k, "N, D"), v=(v, "N, D"), decay=(decay, "D"), bonus=(bonus, "D"))
    _arguments.check_alone("decay", decay, "D")
    _arguments.check_alone("bonus", bonus, "D")
    check_values("decay", decay, "positive and finite", lambda w: (w <= 0) | w.isinf())
    leading = {"k": k.shape[:-2], "v": v.shape[:-2]}
    state = begin(initial_state, "k", k, k.shape[-1], **leading)
    dtype, (k, v, decay, bonus) = k.dtype, accumulate(k, v, decay, bonus)
    with full_precision(k):
        out, state = fading_mean(form, k, v, decay, bonus, state)
    out = out.to(dtype)
    return (out, state) if return_state else out


def fading_mean(form, k, v, w, u, state):
    """WKV of k and v (..., N, D) in the accumulation dtype, and its state; w may be 0."""
    form = form or ("recurrent" if k.shape[-2] == 1 else "parallel")
    return _FORMS[form](k, v, w, u, state)


def _recurrent(k, v, w, u, state):
    outputs = []
    for k_t, v_t in zip(k.unbind(dim=-2), v.unbind(dim=-2), strict=True):
        a, b, _ = _join(state, _token(u + k_t, v_t), 0)  # read: with the bonus, and no decay yet
        outputs.append(_divide(a, b))
        state = _join(state, _token(k_t, v_t), w)  # write: the past decays
    out = torch.stack(outputs, dim=-2) if outputs else v.expand(*state[0].shape[:-1], 0, -1)
    return out, WKVState(*state)


def _parallel(k, v, w, u, state):
    shape = (*state.maximum.shape[:-1], *k.shape[-2:])
    k, v = k.expand(shape), v.expand(shape)
    tokens = _token(k, v)
    # Row t is the state before token t, as if it were a token before the first.
    pieces = [torch.cat([s[..., None, :], x], dim=-2) for s, x in zip(state, tokens, strict=True)]
    states = _scan(pieces, w)
    before, last = zip(*((x[..., :-1, :], x[..., -1, :].clone()) for x in states), strict=True)
    a, b, _ = _join(before, _token(u + k, v), 0)
    return _divide(a, b), WKVState(*last)


_FORMS = {"recurrent": _recurrent, "parallel": _parallel}


def _token(k, v):
    """A token by itself as a state: (v, 1, k), or (0, 0, EMPTY) where it has no weight."""
    maximum = k.detach().clamp(min=EMPTY)
    weight = (k - maximum).exp()
    return weight * v, weight, maximum


def _join(early, late, w):
    """Two neighboring states as one, where the early one decays by w until the end of the late one.

    The maximum is only a shift, which the quotient does not see: no gradient goes through it.
    """
    (a, b, maximum), (late_a, late_b, late_maximum) = early, late
    top = torch.maximum(maximum - w, late_maximum).detach()
    # In this order, what the rounding of the new maximum has added to it is taken from the sums.
    past, own = (maximum - top - w).exp(), (late_maximum - top).exp()
    return past * a + own * late_a, past * b + own * late_b, top


def _scan(states, w):
    """Row t joins rows 0 to t of states (..., n, D), each of which is w after the one before.

    Pairs of neighbors are joined, and the pairs scanned, each 2 w after the one before. That gives
    every second row; the rows between are one join away.
    """
    n = states[0].shape[-2]
    if n == 1:
        return states
    even, odd = ([x[..., start::2, :] for x in states] for start in (0, 1))
    pairs = _join([x[..., : n // 2, :] for x in even], odd, w)
    through = _scan(pairs, 2 * w)  # rows 1, 3, 5, ...
    between = _join(
        [x[..., : (n - 1) // 2, :] for x in through], [x[..., 1:, :] for x in even], w
    )  # rows 2, 4, 6, ...
    return [
        _interleave(torch.cat([x[..., :1, :], y], dim=-2), z)
        for x, y, z in zip(states, between, through, strict=True)
    ]


def _interleave(even, odd):
    """Rows 0, 2, ... and rows 1, 3, ... in their order; there may be one more of the first."""
    n = odd.shape[-2]
    rows = torch.stack([even[..., :n, :], odd], dim=-2).flatten(-3, -2)
    return torch.cat([rows, even[..., n:, :]], dim=-2)


def begin(state, like_name, like, D, **leading):
    """The state before the first token, with the leading dimensions that it shares with others."""
    dtype = getattr(torch, _arguments.accumulation_dtype(like))
    if state is None:
        zeros = torch.zeros(D, dtype=dtype, device=like.device)
        state = WKVState(zeros, zeros, zeros + EMPTY)
    if not isinstance(state, WKVState):
        raise TypeError(f"initial_state must be a WKVState, got {type(state).__name__}.")
    parts = {f"{name} of initial_state": x for name, x in state._asdict().items()}
    for name, x in parts.items():
        _arguments.check_initial_state(Tensor, x, like_name, like, name, D=D)
        leading[name] = x.shape[:-1]
    shape = (*_arguments.check_leading(**leading), D)
    a, b, maximum = (x.to(dtype).expand(shape) for x in state)
    kept = maximum.detach().clamp(min=EMPTY)  # float16 has made -inf of it
    past = (maximum - kept).exp()  # 1, but for the gradient
    return WKVState(past * a, past * b, kept)
