"""RWKV-7: a memory that forgets by channel, and removes at one key what it writes at another."""

from torch import Tensor

from lesson_code.torch.engines.delta import delta
from lesson_code.torch.operator import operator


@operator(
    "N D, N D, N M, N D, N D, N D -> N M",
    state="D M",
    reads="r",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def rwkv7(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    removal_key: Tensor,
    learning_rate: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The memory of RWKV-7: forget, remove, and write.

    Computes :eq:`eq-rwkv7`, as :func:`lesson_code.numpy.rwkv7` does; "chunkwise" is the default for
    more than one token.

    Examples
    --------
    The second token removes all that the first key holds, and writes at the other:

    >>> import torch
    >>> k, v = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[8.0], [5.0]])
    >>> removal = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    >>> rwkv7(k, k, v, torch.zeros(2, 2), removal, torch.ones(2, 2), return_state=True)[1]
    tensor([[0.],
            [5.]])
    """
    rows = r, k, v, log_decay, removal_key, learning_rate
    return delta(form, _removal, rows, initial_state, chunk_size=chunk_size)


def _removal(r, k, v, g, kappa, a):
    """What the engine takes: what κ finds is removed at a∘κ."""
    return r, k, v, kappa, -a * kappa, g
