"""Gated linear attention as a module: each token says how fast each channel forgets."""

import torch
from torch import nn

from lesson_code.torch.precision import accumulate
from lesson_code.torch.gated import gated_linear_attention
from lesson_code.torch.modules._parts import HeadNorm, check_heads, split_heads
from lesson_code.torch.modules.mixer import Mixer

GATE_RANK = 16
GATE_ROOT = 16  # the gate is this root of a sigmoid


class GatedLinearAttention(Mixer):
    r"""Causal multi-head gated linear attention, with a norm and a gate after the read.

    Computes :eq:`eq-gla` in each of H heads, with a gate for each token and key channel, the
    sixteenth root of a sigmoid that looks at x through 16 numbers (:eq:`eq-gla-gate`):

    .. math:: \alpha_t = \sigma(W_2^\top W_1^\top x_t + b)^{1/16}

    Keys and queries have half the width of the values, D = F/(2H) beside M = F/H, and queries are
    scaled by :math:`1 / \sqrt D`. What each head has read is normalized, multiplied by a swish of x
    and mapped to width F. `forward` and `step` are those of :class:`Mixer`; the state is the
    memory S, a tensor (B, H, D, M) in float32 at least.

    Parameters
    ----------
    width : int
        Width F of the inputs and of the outputs.
    num_heads : int
        Number H of heads; it divides the width. Where F/H is odd, D is rounded down, to at least 1.

    Raises
    ------
    TypeError
        If `width` or `num_heads` is no integer.
    ValueError
        If `width` or `num_heads` is below 1, or `num_heads` does not divide `width`.

    Notes
    -----
    The parameters are ``query`` and ``key``, ``nn.Linear`` of F×HD, ``value`` and ``output``, of
    F×F, all without bias; ``gate``, of F×F with bias, whose SiLU multiplies what was read;
    ``forget``, the two maps F×16×HD of the gate :math:`\alpha`, the second with bias; and ``norm``,
    which divides the M channels of one token and head by their root mean square and has a weight
    for each. Weights are drawn as Xavier does, with a gain of :math:`2^{-2.5}`, and biases begin at
    0, so that at first all gates are near :math:`2^{-1/16} \approx 0.96`: half of the memory is
    kept for 16 tokens.

    References
    ----------
    Yang et al. (2024), "Gated linear attention transformers with hardware-efficient training",
    section 4; initialization as in its code.

    Examples
    --------
    >>> module = GatedLinearAttention(width=8, num_heads=2)
    >>> x = torch.randn(1, 5, 8)
    >>> y, S = module(x[:, :4], return_state=True)          # the first four tokens in parallel
    >>> y_t, S = module.step(x[:, 4], S)                    # and one more
    >>> torch.allclose(y_t, module(x)[:, 4], atol=1e-5)
    True
    >>> S.shape
    torch.Size([1, 2, 2, 4])
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width)
        self.num_heads = check_heads(width, num_heads)
        self.head_width = max(width // self.num_heads // 2, 1)
        keys = self.num_heads * self.head_width
        self.query = nn.Linear(width, keys, bias=False)
        self.key = nn.Linear(width, keys, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.forget = nn.Sequential(
            nn.Linear(width, GATE_RANK, bias=False), nn.Linear(GATE_RANK, keys)
        )
        self.gate = nn.Linear(width, width)
        self.norm = HeadNorm(width // self.num_heads)
        self.output = nn.Linear(width, width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=2**-2.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def mix(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if state is not None:
            self._check_state(state, len(x))
        q, k, v, logits = accumulate(
            *(
                split_heads(linear(x), self.num_heads)  # (B, H, N, D or M)
                for linear in (self.query, self.key, self.value, self.forget)
            )
        )
        read, state = gated_linear_attention(
            q * self.head_width**-0.5,
            k,
            v,
            nn.functional.logsigmoid(logits) / GATE_ROOT,
            initial_state=state,
            return_state=True,
        )
        read = self.norm(read.transpose(1, 2))  # (B, N, F)
        return self.output(nn.functional.silu(self.gate(x)) * read), state

    def _check_state(self, state, B):
        if not isinstance(state, torch.Tensor):
            raise TypeError(f"state must be a torch tensor, got {type(state).__name__}.")
        expected = (B, self.num_heads, self.head_width, self.width // self.num_heads)
        if state.shape != expected:
            raise ValueError(f"state must have shape {expected}, got {tuple(state.shape)}.")
