"""AFT-simple as a module."""

from torch import Tensor, nn

from lesson_code.torch.engines.fading import fading
from lesson_code.torch.modules._parts import check_memory, check_state
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.wkv import WKVState


class AFTSimple(Mixer):
    r"""Causal AFT-simple: each channel keeps a weighted mean of the past, which the query gates.

    Computes :eq:`eq-aft-simple` over the positions up to t, with q, k and v linear in x, and

    .. math:: y_t = W_O^\top o_t

    There are no heads, as every channel has its own weights. ``query``, ``key``, ``value`` and
    ``output`` are ``nn.Linear`` of F×F. The state is a :class:`WKVState` of three tensors (B, F).

    References
    ----------
    Zhai et al. (2021), AFT-simple.

    Examples
    --------
    >>> AFTSimple(width=8).initial_state(1).numerator.shape
    torch.Size([1, 8])
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def mix(self, x: Tensor, state: WKVState | None) -> tuple[Tensor, WKVState]:
        check_state(state, WKVState, *[(len(x), self.width)] * 3)
        q, k, v = accumulate(self.query(x), self.key(x), self.value(x))
        check_memory(state, k)
        with full_precision(k):
            mean, last = fading(None, k, v, 0, 0, state)  # neither decay nor bonus
        return self.output((q.sigmoid() * mean).to(self.output.weight.dtype)), WKVState(*last)
