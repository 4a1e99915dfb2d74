"""The delta rules: memories that write only what they do not know yet."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch._memory import check_values, initial_memory
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.engines.delta import delta


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule: write the difference between a value and what its key finds already.

    Computes :eq:`eq-delta-rule`:

    .. math::

        u_t &= \beta_t \left(v_t - S_{t-1}^\top k_t\right) \\
        S_t &= S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    which is :math:`S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top`, one step of
    gradient descent on :math:`\frac12 |v_t - S^\top k_t|^2` with the step size :math:`\beta_t`
    (:eq:`eq-delta-least-squares`). For a key of length 1 and :math:`\beta_t = 1` the memory then
    returns exactly :math:`v_t` at :math:`k_t`.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. They are not scaled.
    k : tensor, shape (..., N, D)
        Keys. They are not normalized: that the memory stays bounded needs
        :math:`0 \le \beta_t |k_t|^2 \le 2`.
    v : tensor, shape (..., N, M)
        Values.
    beta : tensor, shape (..., N)
        Step sizes, not checked.
    form : str, optional
        "recurrent", token by token, or "chunkwise" (:eq:`eq-delta-chunkwise`), which finds all
        :math:`u_t` of a chunk from a unit lower triangular system. None takes the fastest:
        "recurrent" for a single token, else "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : tensor, shape (..., D, M), optional
        Memory before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Half
        precision is computed in float32, under ``torch.autocast`` too.
    tensor, shape (..., D, M)
        With ``return_state=True``: the memory, in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of k, v, beta and the initial state.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, or `chunk_size` is no
        integer.
    ValueError
        If the shapes or devices do not fit together, `form` is unknown, or `chunk_size` is below 1.

    Notes
    -----
    Differentiable in every argument, any number of times, through the outputs and the returned
    memory.

    A token with k = 0 and beta = 0 leaves the memory as it is, so that a sequence can be padded.

    NaN stays in the memory from its token on, and reaches no other sequence of the batch. In
    "chunkwise" it may reach earlier positions of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Widrow and Hoff (1960) for the rule; Schlag et al. (2021), section 4.2, for its use as a memory;
    Yang et al. (2024), "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length", section 3, for the chunks.

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
    S = _check(q, k, v, form, chunk_size, initial_state, return_state, beta=beta)
    dtype = q.dtype
    with full_precision(q):
        q, k, v, beta = accumulate(q, k, v, beta[..., None])
        no_decay = torch.zeros_like(beta)
        out, S = delta(form, q, k, v, beta, no_decay, S, chunk_size=chunk_size)
    out = out.to(dtype)
    return (out, S) if return_state else out


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The gated delta rule: forget first, then correct what is left.

    Computes :eq:`eq-gated-delta-rule`, with the decay :math:`\alpha_t = e^{g_t}`:

    .. math::

        u_t &= \beta_t \left(v_t - (\alpha_t S_{t-1})^\top k_t\right) \\
        S_t &= \alpha_t S_{t-1} + k_t u_t^\top \\
        o_t &= S_t^\top q_t

    which is :math:`S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top`.
    The error is that of the memory *after* its decay, so that a key of length 1 with
    :math:`\beta_t = 1` finds exactly its value, whatever the decay.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. They are not scaled.
    k : tensor, shape (..., N, D)
        Keys. They are not normalized: that the memory stays bounded needs
        :math:`0 \le \beta_t |k_t|^2 \le 2`.
    v : tensor, shape (..., N, M)
        Values.
    beta : tensor, shape (..., N)
        Step sizes, not checked.
    log_decay : tensor, shape (..., N)
        Logarithms :math:`g_t` of the decays, at most 0; -inf forgets everything, exactly.
    form : str, optional
        "recurrent", token by token, or "chunkwise" (:eq:`eq-gated-delta-chunkwise`). None takes the
        fastest: "recurrent" for a single token, else "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : tensor, shape (..., D, M), optional
        Memory before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the memory after the last token as well.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input. Leading dimensions broadcast as in ``matmul``. Half
        precision is computed in float32, under ``torch.autocast`` too.
    tensor, shape (..., D, M)
        With ``return_state=True``: the memory, in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of k, v, beta, log_decay and the initial
        state.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, or `chunk_size` is no
        integer.
    ValueError
        If the shapes or devices do not fit together, `log_decay` is above 0 somewhere, `form` is
        unknown, or `chunk_size` is below 1.

    Notes
    -----
    Differentiable in every argument, any number of times, through the outputs and the returned
    memory. That `log_decay` is at most 0 is checked in eager mode only, not under ``torch.compile``
    or ``torch.func``.

    With a decay log of 0 this is `delta_rule`. A token with k = 0, beta = 0 and a decay log of 0
    leaves the memory as it is, so that a sequence can be padded.

    NaN stays in the memory from its token on, and reaches no other sequence of the batch. In
    "chunkwise" it may reach earlier positions of its chunk, as 0 * NaN is NaN.

    References
    ----------
    Yang et al. (2025), "Gated Delta Networks", section 3.

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
    by_token = {"beta": beta, "log_decay": log_decay}
    S = _check(q, k, v, form, chunk_size, initial_state, return_state, **by_token)
    check_values("log_decay", log_decay, "at most 0", lambda x: x > 0)
    dtype = q.dtype
    with full_precision(q):
        q, k, v, beta, g = accumulate(q, k, v, beta[..., None], log_decay[..., None])
        out, S = delta(form, q, k, v, beta, g, S, chunk_size=chunk_size)
    out = out.to(dtype)
    return (out, S) if return_state else out


def _check(q, k, v, form, chunk_size, initial_state, return_state, **by_token):
    """Refuse what does not fit together; return the memory before the first token."""
    _arguments.check_arrays(Tensor, q=q, k=k, v=v, **by_token)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_form(form, ("recurrent", "chunkwise"))
    _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _arguments.check_queries_keys_values(q, k, v)
    (N, D), M = k.shape[-2:], v.shape[-1]
    _arguments.check_size("q", q.shape[-2], "the length of k", N)
    leading = {"k": k.shape[:-2], "v": v.shape[:-2]}
    for name, tensor in by_token.items():
        _arguments.check_rank(name, tensor, "N")
        _arguments.check_size(name, tensor.shape[-1], "the length of k", N)
        leading[name] = tensor.shape[:-1]
    S = initial_memory(initial_state, "k", k, {"D": D, "M": M}, **leading)
    _arguments.check_leading(q=q.shape[:-2], **leading, initial_state=S.shape[:-2])
    return S
