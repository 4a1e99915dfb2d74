"""Gated linear attention: each channel of the memory forgets at a rate that each token sets."""

from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch._memory import check_values, initial_memory
from lesson_code.torch._precision import accumulate, full_precision
from lesson_code.torch.engines.additive import additive


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Linear attention whose memory decays by a gate for each token and key channel.

    Computes :eq:`eq-gla`, with the gate :math:`\alpha_t = \exp(\mathrm{log\_decay}_t)`:

    .. math::

        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    The memory decays before it is written: a token's own write is read undecayed.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. They are not scaled.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values.
    log_decay : tensor, shape (..., N, D)
        Logarithms of the gates, in [-inf, 0]: 0 keeps a row of the memory as it is, -inf empties
        it, exactly.
    form : str, optional
        "recurrent" (:eq:`eq-gla`), "parallel" (:eq:`eq-gla-parallel`, a single chunk) or
        "chunkwise" (:eq:`eq-gla-chunkwise`, a state between chunks). None takes the fastest:
        "recurrent" for a single token, otherwise "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : tensor, shape (..., D, M), optional
        Memory before the first token, zero by default, in the dtype of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input, with the leading dimensions of all inputs, broadcast as
        in ``matmul``. Half precision is computed in float32, under ``torch.autocast`` too.
    tensor, shape (..., D, M)
        With ``return_state=True``: the memory after the last token, in the accumulation dtype
        (float64 for float64, otherwise float32), with the leading dimensions of k, v, log_decay and
        the initial state.

    Raises
    ------
    TypeError
        If an input is no torch tensor of floats, their dtypes differ, `chunk_size` is no integer,
        or the dtype of `initial_state` does not fit.
    ValueError
        If the shapes or devices do not fit together, a logarithm is above 0 (looked at in eager
        mode only, not under ``torch.compile`` or ``torch.func``), `form` is unknown, or
        `chunk_size` is below 1.

    Notes
    -----
    Differentiable in all inputs and `initial_state`, any number of times, through both the outputs
    and the returned state. Inside a chunk only exponents of at most 0 are formed, so no decay
    overflows, and where log_decay is -inf its gradient is 0. Positions with k = 0, v = 0 and
    log_decay = 0 leave the memory as it is: pad with them.

    NaN is not refused. It reaches the outputs that depend on it and no other sequence of the batch;
    in "parallel" and "chunkwise" it may reach earlier positions of its sequence, as 0 * NaN is NaN.

    References
    ----------
    Yang et al. (2024), "Gated linear attention transformers with hardware-efficient training",
    section 4.

    Examples
    --------
    The first channel keeps everything. The second keeps half, then nothing:

    >>> import torch
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> gates = torch.tensor([[1.0, 1.0], [1.0, 0.5], [1.0, 0.0]])
    >>> out, S = gated_linear_attention(q, k, v, gates.log(), return_state=True)
    >>> out
    tensor([[ 10.,  20.],
            [ 30.,  40.],
            [110., 140.]])
    >>> S
    tensor([[60., 80.],
            [50., 60.]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v, log_decay=log_decay)
    _arguments.check_flags(return_state=return_state)
    axes = {"q": (q, "N, D"), "k": (k, "N, D"), "v": (v, "N, M"), "log_decay": (log_decay, "N, D")}
    _arguments.check_axes(**axes)
    _arguments.check_form(form, ("recurrent", "parallel", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    check_values("log_decay", log_decay, "at most 0", lambda x: x > 0)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2], "log_decay": log_decay.shape[:-2]}
    sizes = {"D": k.shape[-1], "M": v.shape[-1]}
    S = initial_memory(initial_state, "v", v, sizes, **leading)
    _arguments.check_leading(q=q.shape[:-2], initial_state=tuple(S.shape[:-2]))

    dtype = q.dtype
    with full_precision(q):
        q, k, v, g = accumulate(q, k, v, log_decay)
        out, S = additive(form, q, k, v, g, S, chunk_size=chunk_size)
    out = out.to(dtype)
    return (out, S) if return_state else out
