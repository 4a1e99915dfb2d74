"""Gated linear attention as a module: each token says how fast each channel forgets."""

from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from lesson_code.torch.gated import gated_linear_attention
from lesson_code.torch.modules._parts import HeadNorm, check_heads, check_state, split_heads
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.precision import accumulate

GATE_RANK = 16
GATE_ROOT = 16  # the gate is this root of a sigmoid


class GatedLinearAttention(Mixer):
    r"""Causal multi-head gated linear attention, with a norm and a gate after the read.

    Computes :eq:`eq-gla` in each head, with a gate for each token and key channel, the sixteenth
    root of a sigmoid that looks at x through 16 numbers (:eq:`eq-gla-gate`):

    .. math::

        \alpha_t &= \sigma(W_2^\top W_1^\top x_t + b)^{1/16} \\
        y_t &= W_O^\top \left(\mathrm{silu}(W_G^\top x_t + b_G) \odot \mathrm{norm}(o_t)\right)

    Keys and queries have half the width of the values, D = F/(2H) beside M = F/H, rounded down to
    at least 1, and queries are scaled by :math:`1 / \sqrt D`. The state is the memory S, a tensor
    (B, H, D, M).

    Notes
    -----
    ``query`` and ``key`` are ``nn.Linear`` of F×HD, ``value`` and ``output`` of F×F; ``gate`` is of
    F×F with bias; ``forget`` are the two maps F×16×HD of the gate :math:`\alpha`, the second with
    bias; ``norm`` is a root mean square norm with a weight for each of the M channels. Weights are
    drawn as Xavier does, with a gain of :math:`2^{-2.5}`, and biases begin at 0, so that at first
    all gates are near :math:`2^{-1/16} \approx 0.96`: half of the memory is kept for 16 tokens.

    References
    ----------
    Yang et al. (2024), "Gated linear attention transformers with hardware-efficient training",
    section 4; initialization as in its code.

    Examples
    --------
    >>> GatedLinearAttention(width=8, num_heads=2).initial_state(1).shape
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

    def mix(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        H, D = self.num_heads, self.head_width
        check_state(state, Tensor, (len(x), H, D, self.width // H))
        maps = self.query, self.key, self.value, self.forget
        q, k, v, logits = accumulate(*(split_heads(f(x), H) for f in maps))  # (B, H, N, D or M)
        log_decay = logsigmoid(logits) / GATE_ROOT
        read, state = gated_linear_attention(
            q * D**-0.5, k, v, log_decay, initial_state=state, return_state=True
        )
        return self.output(silu(self.gate(x)) * self.norm(read.transpose(1, 2))), state
