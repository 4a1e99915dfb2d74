"""RWKV-6: a gated memory that is read before it is written, with a bonus for the current token."""

from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch._memory import check_values, initial_memory
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.engines.additive import additive


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The memory of RWKV-6 (Finch), and of RWKV-5 (Eagle) where the decay is constant.

    Computes :eq:`eq-rwkv6`, with the decay :math:`\alpha_t = \exp(\mathrm{log\_decay}_t)` and the
    bonus u:

    .. math::

        o_t &= (S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top r_t \\
        S_t &= \operatorname{diag}(\alpha_t) S_{t-1} + k_t v_t^\top

    The memory is read before it is written: a token's write decays for the first time when the next
    token has been read. The current token counts u times, and is stored once.

    Parameters
    ----------
    r : tensor, shape (..., N, D)
        Receptances: the queries.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values.
    log_decay : tensor, shape (..., N, D)
        Logarithms of the decays, in [-inf, 0]. The same at every position, they make RWKV-5.
    bonus : tensor, shape (..., D)
        Weight u of the current token in each channel, the same at every position. Its leading
        dimensions broadcast with those of the outputs, such as (H, D) for H heads.
    form : str, optional
        "recurrent" (:eq:`eq-rwkv6`) or "chunkwise" (:eq:`eq-rwkv6-decay`, a state between chunks).
        None takes the fastest: "recurrent" for a single token, otherwise "chunkwise".
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
    in "chunkwise" it may reach earlier positions of its sequence, as 0 * NaN is NaN.

    References
    ----------
    Peng et al. (2024), "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence",
    section 4.

    Examples
    --------
    Everything is forgotten but what came last, and a token counts twice when it is the current one:

    >>> import torch
    >>> r = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> log_decay, bonus = torch.full((3, 2), -torch.inf), torch.tensor([2.0, 2.0])
    >>> out, S = rwkv6(r, k, v, log_decay, bonus, return_state=True)
    >>> out
    tensor([[ 20.,  40.],
            [ 60.,  80.],
            [230., 280.]])
    >>> S
    tensor([[50., 60.],
            [50., 60.]])
    """
    _arguments.check_arrays(Tensor, r=r, k=k, v=v, log_decay=log_decay, bonus=bonus)
    _arguments.check_flags(return_state=return_state)
    axes = {"r": (r, "N, D"), "k": (k, "N, D"), "v": (v, "N, M"), "log_decay": (log_decay, "N, D")}
    _arguments.check_axes(**axes, bonus=(bonus, "D"))
    _arguments.check_form(form, ("recurrent", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    check_values("log_decay", log_decay, "at most 0", lambda x: x > 0)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2], "log_decay": log_decay.shape[:-2]}
    sizes = {"D": k.shape[-1], "M": v.shape[-1]}
    S = initial_memory(initial_state, "v", v, sizes, **leading)
    _arguments.check_leading(
        r=r.shape[:-2], bonus=bonus.shape[:-1], initial_state=tuple(S.shape[:-2])
    )

    dtype = r.dtype
    with full_precision(r):
        r, k, v, g, u = accumulate(r, k, v, log_decay, bonus)
        out, S = additive(form, r, k, v, g, S, u, chunk_size=chunk_size)
    out = out.to(dtype)
    return (out, S) if return_state else out
