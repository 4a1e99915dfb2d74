"""The delta rules: memories that write only what they do not know yet."""

import torch
from torch import Tensor

from lesson_code.torch.engines.delta import delta
from lesson_code.torch.operator import operator


@operator("N D, N D, N M, N -> N M", state="D M", reads="q", forms=("recurrent", "chunkwise"))
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule: write the difference between a value and what its key finds already.

    Computes :eq:`eq-delta-rule`, as :func:`lesson_code.numpy.delta_rule` does.

    Examples
    --------
    The same key is written twice. What it finds is the second value, not the sum:

    >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, S = delta_rule(k, k, v, torch.ones(3), return_state=True)
    >>> S
    tensor([[50., 60.],
            [30., 40.]])
    """
    beta = beta[..., None]
    no_decay = torch.zeros_like(beta)
    return delta(form, q, k, v, beta, no_decay, initial_state, chunk_size=chunk_size)


@operator(
    "N D, N D, N M, N, N -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The gated delta rule: forget first, then correct what is left.

    Computes :eq:`eq-gated-delta-rule`, as :func:`lesson_code.numpy.gated_delta_rule` does.

    Examples
    --------
    The second token halves what is stored before it looks for its error:

    >>> k = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> v = torch.tensor([[8.0], [10.0]])
    >>> beta, log_decay = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5]).log()
    >>> out, S = gated_delta_rule(k, k, v, beta, log_decay, return_state=True)
    >>> S
    tensor([[7.],
            [3.]])
    """
    beta, g = beta[..., None], log_decay[..., None]
    return delta(form, q, k, v, beta, g, initial_state, chunk_size=chunk_size)
