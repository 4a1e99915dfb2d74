"""WKV, the memory of RWKV-4: a mean of the values in which the past fades, channel by channel."""

from typing import NamedTuple

from torch import Tensor

from lesson_code.torch.engines.fading import EMPTY, fading
from lesson_code.torch.operator import operator


class WKVState(NamedTuple):
    r"""What WKV remembers: two sums over the past, and the exponent that they are divided by.

    As :class:`lesson_code.numpy.WKVState`. Gradients of what the state stands for go through
    `numerator` and `denominator` alone; a `maximum` that :func:`wkv` returns has none.

    Parameters
    ----------
    numerator : tensor, shape (..., D)
        Weighted sum of the values.
    denominator : tensor, shape (..., D)
        Sum of the weights.
    maximum : tensor, shape (..., D)
        Largest exponent of the weights.
    """

    numerator: Tensor
    denominator: Tensor
    maximum: Tensor


@operator(
    "N D, N D, (D), (D) -> N D",
    state=WKVState._make(("D", "D", "D")),
    empty=WKVState._make((0, 0, EMPTY)),
    forms=("recurrent", "parallel"),
    decay="positive and finite",
)
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

    Computes :eq:`eq-wkv`, as :func:`lesson_code.numpy.wkv` does. "parallel" is a scan that joins
    neighbors, then pairs of pairs (:eq:`eq-wkv-join`; Blelloch, 1990), in about 2 log2 N steps and
    O(N D) memory, and the default for more than one token.

    Examples
    --------
    With w = ln 2 each step halves a weight:

    >>> import torch
    >>> k, v = torch.zeros(3, 1), torch.tensor([[10.0], [30.0], [50.0]])
    >>> wkv(k, v, torch.tensor([2.0]).log(), torch.tensor([0.0]))
    tensor([[10.],
            [20.],
            [34.]])
    """
    out, state = fading(form, k, v, decay, bonus, initial_state)
    return out, WKVState(*state)
