"""Gated linear attention: each channel of the memory forgets at a rate that each token sets."""

from torch import Tensor

from lesson_code.torch.backends import decaying_scan, on_kernels
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.operator import operator


@operator(
    "N D, N D, N M, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "parallel", "chunkwise"),
    log_decay="at most 0",
)
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Linear attention whose memory decays by a gate for each token and key channel.

    Computes :eq:`eq-gla`, as :func:`lesson_code.numpy.gated_linear_attention` does. "chunkwise" is
    the default for more than one token; "parallel" is a single chunk. Where log_decay is -inf its
    gradient is 0.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.decaying_scan`, in float32
        or half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    The first channel keeps everything. The second keeps half, then nothing:

    >>> import torch
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> gates = torch.tensor([[1.0, 1.0], [1.0, 0.5], [1.0, 0.0]])
    >>> gated_linear_attention(q, k, v, gates.log())
    tensor([[ 10.,  20.],
            [ 30.,  40.],
            [110., 140.]])
    """
    if on_kernels(backend, form):
        return decaying_scan(q, k, v, log_decay, initial_state)
    return additive(form, q, k, v, log_decay, initial_state, chunk_size=chunk_size)
