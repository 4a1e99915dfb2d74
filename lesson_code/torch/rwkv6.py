"""RWKV-6: a gated memory that is read before it is written, with a bonus for the current token."""

from torch import Tensor

from lesson_code.torch.backends import decaying_scan, on_kernels
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator


@operator(
    "N D, N D, N M, N D, D -> N M",
    state="D M",
    reads="r bonus",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The memory of RWKV-6 (Finch), and of RWKV-5 (Eagle) where the decay is constant.

    Computes :eq:`eq-rwkv6`, as :func:`lesson_code.numpy.rwkv6` does. "chunkwise" is the default for
    more than one token. Where log_decay is -inf its gradient is 0.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.decaying_scan`, in float32
        or half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    Everything is forgotten but what came last, and a token counts twice when it is the current one:

    >>> import torch
    >>> r = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> rwkv6(r, k, v, torch.full((3, 2), -torch.inf), torch.tensor([2.0, 2.0]))
    tensor([[ 20.,  40.],
            [ 60.,  80.],
            [230., 280.]])
    """
    if on_kernels(backend, form):
        return decaying_scan(r, k, v, log_decay, initial_state, bonus)
    return additive(form, r, k, v, log_decay, initial_state, bonus, chunk_size=chunk_size)
