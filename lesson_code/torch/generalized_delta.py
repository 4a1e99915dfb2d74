"""The generalized delta rule: a token fades the memory, moves what it finds there, and writes."""

from torch import Tensor

from lesson_code.torch.engines.delta import delta
from lesson_code.torch.operator import operator


@operator(
    "N D, N D, N M, N D, N D, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def generalized_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""A memory whose transition is a diagonal matrix and one of rank one.

    Computes :eq:`eq-diagonal-plus-rank-one`, as
    :func:`lesson_code.numpy.generalized_delta_rule` does; "chunkwise" is the default
    for more than one token.

    Examples
    --------
    The second token moves what the first one stored from the first channel to the second:

    >>> import torch
    >>> k, v = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[8.0], [0.0]])
    >>> a, b = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [-1.0, 1.0]])
    >>> out, S = generalized_delta_rule(k, k, v, a, b, torch.zeros(2, 2), return_state=True)
    >>> S
    tensor([[0.],
            [8.]])
    """
    rows = q, k, v, a, b, log_decay
    return delta(form, lambda *rows: rows, rows, initial_state, chunk_size=chunk_size)
