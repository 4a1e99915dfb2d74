"""The delta rules: memories that write only what they do not know yet."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from lesson_code.torch.backends import delta_scan, on_kernels
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
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule: write the difference between a value and what its key finds already.

    Computes :eq:`eq-delta-rule`, as :func:`lesson_code.numpy.delta_rule` does.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.delta_scan`, in float32 or
        half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

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
    if on_kernels(backend, form):
        return delta_scan(q, k, v, beta, None, initial_state)
    rows = q, k, v, beta[..., None], torch.zeros_like(beta)[..., None]
    return delta(form, correction, rows, initial_state, chunk_size=chunk_size)


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
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The gated delta rule: forget first, then correct what is left.

    Computes :eq:`eq-gated-delta-rule`, as :func:`lesson_code.numpy.gated_delta_rule` does.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.delta_scan`, in float32 or
        half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

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
    if on_kernels(backend, form):
        return delta_scan(q, k, v, beta, log_decay[..., None], initial_state)
    rows = q, k, v, beta[..., None], log_decay[..., None]
    return delta(form, correction, rows, initial_state, chunk_size=chunk_size)


@operator(
    "N D, N D, N M, N, N D -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Kimi delta attention: each channel forgets at its own rate, then the memory is corrected.

    Computes :eq:`eq-kimi-delta`, as :func:`lesson_code.numpy.kimi_delta_attention` does;
    "chunkwise" is the default for more than one token.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.delta_scan`, in float32 or
        half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    The second token keeps the first channel and halves the other before it looks for its error:

    >>> k = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    >>> v = torch.tensor([[8.0], [10.0]])
    >>> beta, log_decay = torch.tensor([1.0, 0.5]), torch.tensor([[1.0, 1.0], [1.0, 0.5]]).log()
    >>> out, S = kimi_delta_attention(k, k, v, beta, log_decay, return_state=True)
    >>> S
    tensor([[8.],
            [7.]])
    """
    if on_kernels(backend, form):
        return delta_scan(q, k, v, beta, log_decay, initial_state)
    rows = q, k, v, beta[..., None], log_decay
    return delta(form, correction, rows, initial_state, chunk_size=chunk_size)


@operator(
    "N D, N J D, N J M, N J, N -> N M",
    state="D M",
    reads="q",
    forms=("recurrent", "chunkwise"),
    log_decay="at most 0",
)
def gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Gated DeltaProduct: a token forgets once, then corrects the memory J times, then reads.

    Computes :eq:`eq-delta-product`, as :func:`lesson_code.numpy.gated_delta_product` does: the
    gated delta rule of N J corrections, of which the last one of each token is followed by a read.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.delta_scan`, in float32 or
        half precision and without a `form`, emulated on CPU tensors. None takes the faster where
        :func:`compare_backends` has timed both, else torch.

    Examples
    --------
    Two reflections of one token turn what is stored by a quarter:

    >>> k = torch.tensor([[[1.0, 0.0], [0.5**0.5, 0.5**0.5]]])
    >>> v, beta, log_decay = torch.zeros(1, 2, 1), torch.full((1, 2), 2.0), torch.zeros(1)
    >>> S = torch.tensor([[0.0], [1.0]])
    >>> gated_delta_product(k[:, 0], k, v, beta, log_decay, initial_state=S).round(decimals=6)
    tensor([[-1.]])
    """
    J = beta.shape[-1]
    k, v, beta = (x.flatten(-3, -2) for x in (k, v, beta[..., None]))  # (..., N J, .)
    g = pad(log_decay[..., None], (0, J - 1)).flatten(-2, -1)[..., None]
    q = q.repeat_interleave(J, dim=-2)
    if on_kernels(backend, form):
        out, S = delta_scan(q, k, v, beta[..., 0], g, initial_state)
    else:
        out, S = delta(form, correction, (q, k, v, beta, g), initial_state, chunk_size=chunk_size)
    return out[..., J - 1 :: J, :], S


def correction(q, k, v, beta, g):
    """What the engine takes: values are written at βk, and what k finds is their error."""
    return q, beta * k, v, k, None, g
