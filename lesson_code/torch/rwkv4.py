"""The two sublayers of RWKV-4, and the token shift that both begin with."""

import torch
from torch import Tensor

from lesson_code.torch.engines.fading import EMPTY, fading
from lesson_code.torch.operator import operator
from lesson_code.torch.wkv import WKVState


@operator("N F, (F), F -> N F")
def token_shift(x: Tensor, mix: Tensor, last: Tensor | None = None) -> Tensor:
    r"""Mix each token with the one before, channel by channel.

    Computes :eq:`eq-token-shift`, as :func:`lesson_code.numpy.token_shift` does.

    Examples
    --------
    >>> x = torch.tensor([[8.0], [4.0], [2.0]])
    >>> token_shift(x, torch.tensor([0.75]))
    tensor([[6.0000],
            [5.0000],
            [2.5000]])
    """
    return shifted(x, last, mix)


@operator("N F, (F), (F), (F C), (C F), (F F), F -> N F")
def channel_mix(
    x: Tensor,
    mix_k: Tensor,
    mix_r: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    W_r: Tensor,
    *,
    last: Tensor | None = None,
) -> Tensor:
    r"""The channel mix of RWKV-4: a feed-forward sublayer with a gate.

    Computes :eq:`eq-channel-mix`, as :func:`lesson_code.numpy.channel_mix` does.

    Examples
    --------
    >>> x, one = torch.tensor([[1.0], [-2.0], [3.0]]), torch.tensor([1.0])
    >>> # a gate of 1/2
    >>> channel_mix(x, one, one, torch.eye(1), torch.eye(1), torch.zeros(1, 1))
    tensor([[0.5000],
            [0.0000],
            [4.5000]])
    """
    hidden = (shifted(x, last, mix_k) @ W_k).relu().square()  # (..., N, C)
    return (shifted(x, last, mix_r) @ W_r).sigmoid() * (hidden @ W_v)


@operator(
    "N F, (F), (F), (F), (F D), (F D), (F D), (D F), (D), (D), F -> N F",
    state=WKVState._make(("D", "D", "D")),
    empty=WKVState._make((0, 0, EMPTY)),
    decay="positive and finite",
)
def time_mix(
    x: Tensor,
    mix_k: Tensor,
    mix_v: Tensor,
    mix_r: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    W_r: Tensor,
    W_o: Tensor,
    decay: Tensor,
    bonus: Tensor,
    *,
    last: Tensor | None = None,
    initial_state: WKVState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, WKVState]:
    r"""The time mix of RWKV-4: WKV with a gate, the sublayer in the place of attention.

    Computes :eq:`eq-time-mix`, as :func:`lesson_code.numpy.time_mix` does.

    Examples
    --------
    >>> x, one, unit = torch.tensor([[10.0], [30.0], [50.0]]), torch.tensor([1.0]), torch.eye(1)
    >>> decay, bonus = torch.tensor([2.0]).log(), torch.tensor([0.0])
    >>> # half of what WKV gives, as the gate is 1/2
    >>> time_mix(x, one, one, one, 0 * unit, unit, 0 * unit, unit, decay, bonus)
    tensor([[ 5.],
            [10.],
            [17.]])
    """
    x_k, x_v, x_r = (shifted(x, last, mix) for mix in (mix_k, mix_v, mix_r))
    read, state = fading(None, x_k @ W_k, x_v @ W_v, decay, bonus, initial_state)
    return ((x_r @ W_r).sigmoid() * read) @ W_o, WKVState(*state)


def shifted(x, last, mix):
    """mix * x_t + (1 - mix) * x_{t-1}, where x_{-1} is last, or 0."""
    last = x.new_zeros(x.shape[-1]) if last is None else last.to(x.dtype)
    leading = torch.broadcast_shapes(x.shape[:-2], last.shape[:-1])
    x = x.expand(*leading, *x.shape[-2:])
    previous = torch.cat([last.expand(*leading, -1)[..., None, :], x[..., :-1, :]], dim=-2)
    return mix * x + (1 - mix) * previous[..., : x.shape[-2], :]  # without last where N is 0
