"""Retention, the memory of RetNet: all that it holds fades at one rate."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch import _memory
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.engines.additive import additive


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: float | Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Retention: a memory that fades by the same factor with each token.

    Computes :eq:`eq-retention`, with the decay :math:`\gamma`:

    .. math::

        S_t &= \gamma S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t

    The memory fades before token t is written, so a query weighs its own token by 1. There is no
    normalizer and no scale. Every form computes the same outputs.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values.
    decay : number or tensor, shape (...)
        The factor :math:`\gamma`, in (0, 1]. A tensor has one for each sequence of the leading
        dimensions, with which it broadcasts: shape (H,) for heads. Its dtype is that of the input
        or the accumulation dtype.
    form : str, optional
        "recurrent" (:eq:`eq-retention`), "parallel" (:eq:`eq-retention-parallel`, all positions at
        once) or "chunkwise" (:eq:`eq-retention-chunkwise`, parallel inside a chunk, a state between
        chunks). None takes "recurrent" for a single token, else "chunkwise", the fastest.
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : tensor, shape (..., D, M), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input, with all leading dimensions, broadcast as in ``matmul``.
        Half precision is computed in float32, under ``torch.autocast`` too.
    tensor, shape (..., D, M)
        With ``return_state=True``: S after the last token, in the accumulation dtype (float64 for
        float64, otherwise float32), with the leading dimensions of k, v, decay and the initial
        state: queries are not remembered.

    Raises
    ------
    TypeError
        If q, k or v is no torch tensor of floats, their dtypes differ, `decay` is neither a number
        nor a tensor of a fitting dtype, `chunk_size` is no integer, or `initial_state` is no tensor
        of a fitting dtype.
    ValueError
        If the shapes or devices do not fit together, a decay is not in (0, 1] (in eager mode only:
        under ``torch.compile`` and ``torch.func`` a tensor's values are not looked at), `form` is
        unknown, or `chunk_size` is below 1.

    Notes
    -----
    Differentiable any number of times, in a decay that is a tensor and in `initial_state` too,
    through both the outputs and the returned state.

    NaN, in `decay` too, reaches the outputs that depend on it and no other sequence. "recurrent"
    keeps it from earlier positions; in the other forms it may reach the earlier positions of its
    sequence or chunk, as 0 * NaN is NaN.

    Tokens whose keys are 0 fade the memory like any other: to pad a batch, pad at the front.

    References
    ----------
    Sun et al. (2023), equations 5 to 7: there with rotated queries and keys, which a caller may
    rotate, as the module ``Retention`` does.

    Examples
    --------
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, state = retention(q, k, v, 0.5, return_state=True)
    >>> out
    tensor([[ 10.0000,  20.0000],
            [ 30.0000,  40.0000],
            [117.5000, 145.0000]])
    >>> state
    tensor([[52.5000, 65.0000],
            [65.0000, 80.0000]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(q=(q, "N, D"), k=(k, "N, D"), v=(v, "N, M"))
    _arguments.check_form(form, ("recurrent", "parallel", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    decays = _decays(decay, q)
    S = _memory.initial_memory(
        initial_state,
        "v",
        v,
        {"D": k.shape[-1], "M": v.shape[-1]},
        k=k.shape[:-2],
        v=v.shape[:-2],
        decay=decays.shape,
    )
    _arguments.check_leading(q=q.shape[:-2], initial_state=S.shape[:-2])

    dtype, (q, k, v) = q.dtype, accumulate(q, k, v)
    log_decay = decays.log()[..., None, None].expand(*decays.shape, k.shape[-2], 1)
    with full_precision(q):
        out, S = additive(form, q, k, v, log_decay, S, chunk_size=chunk_size)
    out = out.to(dtype)
    return (out, S) if return_state else out


def retention_decays(num_heads: int) -> Tensor:
    r"""The decays of RetNet's heads: :math:`\gamma_h = 1 - 2^{-5-h}` for h = 0 ... H - 1.

    Computes :eq:`eq-retention-decays`. Head h remembers about :math:`1/(1-\gamma_h) = 2^{5+h}`
    tokens.

    Parameters
    ----------
    num_heads : int
        Number H of heads.

    Returns
    -------
    tensor, shape (H,)
        Decays in torch's default dtype, on its default device.

    Raises
    ------
    TypeError
        If `num_heads` is no integer.
    ValueError
        If `num_heads` is below 1.

    Notes
    -----
    Rounded to bfloat16, the decay is 1 from the fifth head on, which forgets nothing: `retention`
    takes decays in float32 for half precision.

    References
    ----------
    Sun et al. (2023), equation 8.

    Examples
    --------
    >>> retention_decays(3)
    tensor([0.9688, 0.9844, 0.9922])
    """
    num_heads = _arguments.check_integer("num_heads", num_heads, minimum=1)
    return 1 - 2.0 ** (-5 - torch.arange(num_heads))


def _decays(decay, like):
    """The decay as a tensor (...) of the accumulation dtype, checked."""
    dtypes = _arguments.state_dtypes(like)
    accumulation = getattr(torch, dtypes[1])
    if isinstance(decay, Tensor):
        _arguments.check_arrays(Tensor, decay=decay)
        if _arguments.dtype_name(decay) not in dtypes:
            expected = " or ".join(dict.fromkeys(dtypes))
            raise TypeError(f"decay must have dtype {expected}, got {decay.dtype}.")
        _arguments.check_device("decay", decay, "q", like)
        _memory.check_values("decay", decay, "in (0, 1]", lambda x: (x <= 0) | (x > 1))
        return decay.to(accumulation)
    decay = _arguments.check_number("decay", decay)
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}.")
    return torch.full((), decay, dtype=accumulation, device=like.device)
