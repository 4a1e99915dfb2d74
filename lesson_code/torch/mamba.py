"""Mamba's selective scan and Mamba-2's state-space dual, in the letters of their papers."""

from torch import Tensor

from lesson_code.torch.backends import decaying_scan, on_kernels
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.engines.selective import selective
from lesson_code.torch.operator import operator


@operator(
    "N E, N E, (E K), N K, N K, (E) -> N E",
    state="E K",
    reads="C D",
    forms=("recurrent", "scan"),
    delta="at least 0",
    A="negative",
)
def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    form: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The selective state space of Mamba: each entry of the state has a decay of its own.

    Computes :eq:`eq-selective-scan`, as :func:`lesson_code.numpy.selective_scan` does. "scan" is
    the default for more than one token: it makes the states some positions at a time, and its
    backward pass keeps the inputs and one state for each segment of at least 16 positions. It can
    be differentiated once, in reverse mode; "recurrent" any number of times, and keeps N states.
    ``torch.compile`` of ``vmap(grad(...))`` needs "recurrent": torch cannot trace that of "scan".

    Examples
    --------
    With a decay of 1/2, :math:`h = 8`, :math:`8/2 + 4 = 8` and :math:`8/2 + 2 = 6`:

    >>> import torch
    >>> x = torch.tensor([[8.0], [4.0], [2.0]])
    >>> ones = torch.ones(3, 1)
    >>> selective_scan(x, ones, torch.tensor([[0.5]]).log(), ones, ones)
    tensor([[8.],
            [8.],
            [6.]])
    """
    y, h = selective(form, x, delta, A, B, C, initial_state)
    return (y if D is None else y + D * x), h


@operator(
    "N P, N, N K, N K -> N P",
    state="K P",
    reads="C",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
def state_space_dual(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The state space of Mamba-2: one decay for the whole state, and so a masked product.

    Computes :eq:`eq-state-space-dual`, as :func:`lesson_code.numpy.state_space_dual` does. Without
    `form`, "recurrent" is taken for a single token. Where log_decay is -inf its gradient is 0.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.decaying_scan`, in float32
        or half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[8.0], [4.0], [2.0]])
    >>> ones, log_decay = torch.ones(3, 1), torch.full((3,), 0.5).log()
    >>> y, state = state_space_dual(x, log_decay, ones, ones, return_state=True)
    >>> y
    tensor([[8.],
            [8.],
            [6.]])
    >>> state
    tensor([[6.]])
    """
    if on_kernels(backend, form):
        return decaying_scan(C, B, x, log_decay[..., None], initial_state)
    return additive(form, C, B, x, log_decay[..., None], initial_state, chunk_size=chunk_size)
