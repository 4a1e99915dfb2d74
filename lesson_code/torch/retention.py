"""Retention, the memory of RetNet: all that it holds fades at one rate."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch.backends import decaying_scan, on_kernels
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator


@operator(
    "N D, N D, N M, ... -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "parallel", "chunkwise"),
    decay="in (0, 1]",
)
def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: float | Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Retention: a memory that fades by the same factor with each token.

    Computes :eq:`eq-retention`, as :func:`lesson_code.numpy.retention` does. Without `form`,
    "recurrent" is taken for a single token. A decay that is a tensor has a gradient.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.decaying_scan`, in float32
        or half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> retention(q, k, v, 0.5)
    tensor([[ 10.0000,  20.0000],
            [ 30.0000,  40.0000],
            [117.5000, 145.0000]])
    """
    kernels, decay = on_kernels(backend, form), torch.as_tensor(decay, device=q.device)
    log_decay = (decay.float() if kernels else decay).log()[..., None, None]
    log_decay = log_decay.expand(*log_decay.shape[:-2], k.shape[-2], 1)
    if kernels:
        return decaying_scan(q, k, v, log_decay, initial_state)
    return additive(form, q, k, v, log_decay, initial_state, chunk_size=chunk_size)


def retention_decays(num_heads: int) -> Tensor:
    r"""The decays of RetNet's heads: :math:`\gamma_h = 1 - 2^{-5-h}` for h = 0 ... H - 1.

    Computes :eq:`eq-retention-decays`, as :func:`lesson_code.numpy.retention_decays` does, in
    torch's default dtype and on its default device. Rounded to bfloat16, the decay is 1 from the
    fifth head on: :func:`retention` takes decays in float32 for half precision.

    Examples
    --------
    >>> retention_decays(3)
    tensor([0.9688, 0.9844, 0.9922])
    """
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    return 1 - 2.0 ** (-5 - torch.arange(num_heads))
