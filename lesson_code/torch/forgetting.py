"""Softmax attention that forgets: a bias that fades keys, one gate for each token."""

import torch
from torch import Tensor

from lesson_code._arguments import resolve_scale
from lesson_code.torch.operator import operator
from lesson_code.torch.softmax import keys_seen, normalized, scaled_scores, weighted_sum


@operator("N D, N D, N M, N -> N M", log_decay="at most 0")
def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, scale: float | None = None
) -> Tensor:
    r"""Forgetting attention (FoX): softmax attention whose tokens fade the ones before.

    As :func:`lesson_code.numpy.forgetting_attention`. Where log_decay is -inf its gradient is 0.

    Examples
    --------
    All products are 0. The second gate halves the weight of the first token:

    >>> q, v = torch.zeros(2, 1), torch.tensor([[3.0], [6.0]])
    >>> forgetting_attention(q, q, v, torch.tensor([1.0, 0.5]).log())
    tensor([[3.],
            [5.]])
    """
    return attend(q, k, v, log_decay, log_decay[..., :0], resolve_scale(scale, q.shape[-1]))[0]


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, fade: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs of the last N tokens, and how far each of all T + N keys has faded after them.

    q is (..., N, D) and log_decay (..., N); k and v are (..., T + N, ·), and fade (..., T) says how
    far the first T keys have faded before these tokens.
    """
    N, T = q.shape[-2], fade.shape[-1]
    later = torch.ones(N, N, dtype=torch.bool, device=q.device).tril(-1)
    # Each sum is made of its own terms: -inf - -inf would be NaN.
    between = torch.where(later, log_decay[..., :, None], 0).cumsum(dim=-2)  # (..., N, N)
    through = log_decay.cumsum(dim=-1)[..., :, None]  # (..., N, 1)
    leading = torch.broadcast_shapes(fade.shape[:-1], log_decay.shape[:-1])
    before = (fade[..., None, :] + through).expand(*leading, N, T)
    bias = torch.cat([before, between.expand(*leading, N, N)], dim=-1)
    seen = keys_seen(q, k, causal=True)
    scores = scaled_scores(q, k, scale, seen)
    out = weighted_sum(normalized(scores + bias), v, seen)
    return out, bias[..., -1, :] if N else fade
