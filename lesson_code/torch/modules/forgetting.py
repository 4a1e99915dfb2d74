"""Forgetting attention as a module: a cache whose keys fade."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from lesson_code import _arguments
from lesson_code.torch.forgetting import attend
from lesson_code.torch.modules._parts import check_heads, check_state, merge_heads, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate, full_precision


class FadingCache(NamedTuple):
    """What :class:`ForgettingAttention` remembers: it grows with each token.

    Parameters
    ----------
    k, v : tensor, shape (B, H, N, D)
        Keys and values of all tokens so far, in the dtype of the parameters.
    fade : tensor, shape (B, H, N)
        The sum of the logarithms of the gates after each of them, in float32 at least.
    """

    k: Tensor
    v: Tensor
    fade: Tensor

    def aligned(self, N: int) -> "FadingCache":
        """The same tokens as the last ones of N; those before have faded altogether."""
        before = N - self.k.shape[-2]
        k, v = (pad(x, (0, 0, before, 0)) for x in (self.k, self.v))
        return FadingCache(k, v, pad(self.fade, (before, 0), value=-math.inf))


class ForgettingAttention(Mixer):
    r"""Softmax attention whose tokens fade the ones before (FoX).

    Each head has a gate :math:`f_t = \sigma(w_f \cdot x_t + b)` for each token, whose logarithm is
    the log_decay of :func:`lesson_code.torch.forgetting_attention`; nothing is rotated, as gates
    tell near from far. The outputs of the heads, side by side, are mapped by :math:`W_O`. The state
    is a :class:`FadingCache`.

    Notes
    -----
    ``query``, ``key``, ``value`` and ``output`` are ``nn.Linear`` of F×F; ``forget`` is one of F×H
    with a bias, which begins at 0.

    References
    ----------
    Lin et al. (2025), section 3: the plain layer, not the one that is called Pro.

    Examples
    --------
    >>> _, cache = ForgettingAttention(8, 2)(torch.randn(1, 5, 8), return_state=True)
    >>> cache.fade.shape
    torch.Size([1, 2, 5])
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.forget = nn.Linear(width, self.num_heads)
        nn.init.zeros_(self.forget.bias)

    def mix(self, x: Tensor, state: FadingCache | None) -> tuple[Tensor, FadingCache]:
        H, D = self.num_heads, self.width // self.num_heads
        check_state(state, FadingCache, *[(len(x), H, "N", D)] * 2, (len(x), H, "N"))
        q, k, v = (split_heads(f(x), H) for f in (self.query, self.key, self.value))
        (logits,) = accumulate(self.forget(x).mT)  # (B, H, N)
        log_decay = logsigmoid(logits)
        fade = log_decay[..., :0] if state is None else state.fade
        if state is not None:
            T = state.k.shape[-2]
            _arguments.check_size("v of state", state.v.shape[-2], "the length of k", T)
            _arguments.check_size("fade of state", fade.shape[-1], "the length of k", T)
            k, v = (torch.cat([a.to(b.dtype), b], -2) for a, b in ((state.k, k), (state.v, v)))
        wide_q, wide_k, wide_v = accumulate(q, k, v)
        with full_precision(wide_q):
            out, fade = attend(wide_q, wide_k, wide_v, log_decay, fade, D**-0.5)
        return self.output(merge_heads(out.to(q.dtype))), FadingCache(k, v, fade)
