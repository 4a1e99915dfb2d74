r"""A mean in which the past fades, channel by channel, in recurrent and in parallel form.

    a_t = exp(-w) a_{t-1} + exp(k_t) v_t        b_t = exp(-w) b_{t-1} + exp(k_t)

    o_t = (a_{t-1} + exp(u + k_t) v_t) / (b_{t-1} + exp(u + k_t))

Both sums are kept divided by exp(m), where m is the largest exponent, so that no exponential
overflows: a state is (a, b, m). Two neighbors join to one state, the early one decayed by w until
the end of the late one; so the parallel form is a scan, in about 2 log2 N steps and O(N D) memory.

Here k and v are (..., N, D), w and u are (D,) or numbers, w may be 0, and each part of a state is
(..., D), with the leading dimensions that k and v share. All have the accumulation dtype; a state
is brought to it.
"""

import torch
from torch import Tensor

from lesson_code.torch.elementwise import divide

EMPTY = -1e38  # the maximum of nothing: below any key, and finite, as -inf - -inf would be NaN


def fading(
    form: str | None,
    k: Tensor,
    v: Tensor,
    w: Tensor | float,
    u: Tensor | float,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Means (..., N, D) and the last state, by "recurrent" or "parallel"; None begins with nothing.

    A form of None takes "recurrent" for a single token, else "parallel".
    """
    state = _nothing(k, v) if state is None else _finite(*(x.to(k.dtype) for x in state))
    one_by_one = form == "recurrent" or (form is None and k.shape[-2] == 1)
    return (_recurrent if one_by_one else _parallel)(k, v, w, u, state)


def _nothing(k, v):
    zeros = torch.broadcast_tensors(k[..., :0, :].sum(-2), v[..., :0, :].sum(-2))[0]
    return zeros, zeros, torch.full_like(zeros, EMPTY)


def _finite(a, b, maximum):
    """The state with a maximum of at least EMPTY: float16 has made -inf of it."""
    kept = maximum.detach().clamp(min=EMPTY)
    past = (maximum - kept).exp()  # 1, but for the gradient
    return past * a, past * b, kept


def _recurrent(k, v, w, u, state):
    outputs = []
    for k_t, v_t in zip(k.unbind(dim=-2), v.unbind(dim=-2), strict=True):
        a, b, _ = _join(state, _token(u + k_t, v_t), 0)  # read: with the bonus, and no decay yet
        outputs.append(divide(a, b))
        state = _join(state, _token(k_t, v_t), w)  # write: the past decays
    return torch.stack(outputs, dim=-2), state


def _parallel(k, v, w, u, state):
    shape = (*state[0].shape[:-1], *k.shape[-2:])
    k, v = k.expand(shape), v.expand(shape)
    tokens = _token(k, v)
    # Row t is the state before token t, as if it were a token before the first.
    pieces = [torch.cat([s[..., None, :], x], dim=-2) for s, x in zip(state, tokens, strict=True)]
    states = _scan(pieces, w)
    before, last = zip(*((x[..., :-1, :], x[..., -1, :].clone()) for x in states), strict=True)
    a, b, _ = _join(before, _token(u + k, v), 0)
    return divide(a, b), last


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
