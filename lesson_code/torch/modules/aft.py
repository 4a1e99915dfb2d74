"""AFT-simple as a module."""

import torch
from torch import nn

from lesson_code.torch.engines.fading import fading
from lesson_code.torch.modules._parts import check_shapes
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.wkv import WKVState, begin


class AFTSimple(Mixer):
    r"""Causal AFT-simple: each channel keeps a weighted mean of the past, which the query gates.

    Computes :eq:`eq-aft-simple` over the positions up to t, on queries, keys and values that are
    linear in x, and maps the outputs to the width F. There are no heads, as every channel has its
    own weights. `forward` and `step` are those of :class:`Mixer`; the state is a :class:`WKVState`
    with three tensors (B, F), in float32 at least.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.

    Raises
    ------
    TypeError
        If `width` is no integer.
    ValueError
        If `width` is below 1.

    Notes
    -----
    The parameters are ``query``, ``key``, ``value`` and ``output``, four ``nn.Linear`` of F×F
    without bias, initialized as torch does.

    References
    ----------
    Zhai et al. (2021), AFT-simple.

    Examples
    --------
    >>> import torch
    >>> module = AFTSimple(width=8)
    >>> x = torch.randn(1, 5, 8)
    >>> y, state = module(x[:, :4], return_state=True)      # the first four tokens in parallel
    >>> y_t, state = module.step(x[:, 4], state)            # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> state.numerator.shape
    torch.Size([1, 8])
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def mix(self, x: torch.Tensor, state: WKVState | None) -> tuple[torch.Tensor, WKVState]:
        if state is not None:
            check_shapes(state, WKVState, *[(len(x), self.width)] * 3)
        q, k, v = accumulate(self.query(x), self.key(x), self.value(x))
        state = begin(state, "x", k, self.width, x=x.shape[:1])
        with full_precision(k):
            mean, last = fading(None, k, v, 0, 0, state)  # neither decay nor bonus
        return self.output((q.sigmoid() * mean).to(self.output.weight.dtype)), WKVState(*last)
