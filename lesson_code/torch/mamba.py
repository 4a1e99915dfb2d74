"""Mamba's selective scan and Mamba-2's state-space dual, in the letters of their papers."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch import _memory
from lesson_code.torch.precision import accumulate, full_precision
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.engines.scan import scan


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

    Computes :eq:`eq-selective-scan`. In the paper's letters, for each of E channels of x with K
    numbers of state, so that h is (E, K),

    .. math::

        h_t &= \exp(\Delta_t A) \odot h_{t-1} + (\Delta_t \odot x_t) B_t^\top \\
        y_t &= h_t C_t + D \odot x_t

    where :math:`\Delta_t` multiplies the rows of A: entry (e, k) of the decay is
    :math:`\exp(\Delta_{te} A_{ek})`. The state is read after it is written.

    Parameters
    ----------
    x : tensor, shape (..., N, E)
        Inputs.
    delta : tensor, shape (..., N, E)
        Step sizes, after their softplus: at least 0. A step of 0 leaves the state as it is.
    A : tensor, shape (E, K)
        Rates, negative.
    B : tensor, shape (..., N, K)
        What x writes with.
    C : tensor, shape (..., N, K)
        What reads.
    D : tensor, shape (E,), optional
        Weight with which x goes past the memory; 0 where it is None.
    form : str, optional
        "recurrent", one token after the other, or "scan", the form to train with, which makes the
        states some positions at a time. None takes "recurrent" for a single token, else "scan".
    initial_state : tensor, shape (..., E, K), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    tensor, shape (..., N, E)
        Outputs in the dtype of the input, with the leading dimensions of x, delta, B, C and the
        initial state, broadcast as in ``matmul``. Half precision is computed in float32, under
        ``torch.autocast`` too.
    tensor, shape (..., E, K)
        With ``return_state=True``: the state in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of x, delta, B and the initial state: what
        reads is not remembered.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, `initial_state` has another
        dtype, or `return_state` is neither True nor False.
    ValueError
        If the shapes or devices do not fit together, `form` is unknown, an entry of `A` is not
        negative, or one of `delta` is (in eager mode only: under ``torch.compile`` and
        ``torch.func`` a tensor's values are not looked at).

    Notes
    -----
    A is discretized exactly (zero-order hold) and B as :math:`\Delta_t B_t`
    (:eq:`eq-discretization`), as in the paper's code.

    Differentiable in every argument, through both the outputs and the returned state. "scan" has a
    backward pass of its own, which keeps the inputs and one state for each segment of at least 16
    positions, and makes the others again; it can be differentiated once, in reverse mode. So can
    the default where it takes this form. "recurrent" is differentiated by autograd, any number of
    times, and keeps N states.

    ``torch.compile`` of ``vmap(grad(...))`` needs "recurrent": torch cannot trace that of "scan".

    NaN reaches the outputs of its own position and of later ones, and no other sequence of the
    batch. Positions with delta = 0 may be appended: they change nothing that is remembered.

    References
    ----------
    Gu and Dao (2024), equations 2 to 4 and algorithm 2, and section 3.3.2 for states that are made
    again instead of kept.

    Examples
    --------
    With a decay of 1/2, :math:`h = 8`, :math:`8/2 + 4 = 8` and :math:`8/2 + 2 = 6`:

    >>> x = torch.tensor([[8.0], [4.0], [2.0]])
    >>> ones = torch.ones(3, 1)
    >>> selective_scan(x, ones, torch.tensor([[0.5]]).log(), ones, ones)
    tensor([[8.],
            [8.],
            [6.]])
    """
    arrays = {"x": x, "delta": delta, "A": A, "B": B, "C": C} | ({} if D is None else {"D": D})
    _arguments.check_arrays(Tensor, **arrays)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(
        x=(x, "N, E"), delta=(delta, "N, E"), A=(A, "E, K"), B=(B, "N, K"), C=(C, "N, K")
    )
    _arguments.check_alone("A", A, "E, K")
    E, K = A.shape
    if D is not None:
        _arguments.check_alone("D", D, "E")
        _arguments.check_size("D", len(D), "the width of x", E)
    _arguments.check_form(form, ("recurrent", "scan"))
    _memory.check_values("A", A, "negative", lambda A: A >= 0)
    _memory.check_values("delta", delta, "at least 0", lambda delta: delta < 0)
    sizes, leading = {"E": E, "K": K}, {"delta": delta.shape[:-2], "B": B.shape[:-2]}
    h = _memory.initial_memory(initial_state, "x", x, sizes, x=x.shape[:-2], **leading)
    _arguments.check_leading(C=C.shape[:-2], initial_state=h.shape[:-2])

    dtype, (x, delta, A, B, C) = x.dtype, accumulate(x, delta, A, B, C)
    N = x.shape[-2]
    one_by_one = form == "recurrent" or N == 0 or (form is None and N == 1)
    with full_precision(x):
        y, h = (_recurrent if one_by_one else scan)(x, delta, A, B, C, h)
        if D is not None:
            y = y + D.to(x.dtype) * x
    y = y.to(dtype)
    return (y, h) if return_state else y


def _recurrent(x, delta, A, B, C, h):
    outputs = []
    for x_t, delta_t, B_t, C_t in zip(*(z.unbind(-2) for z in (x, delta, B, C)), strict=True):
        decay = (delta_t[..., :, None] * A).exp()  # (..., E, K)
        h = decay * h + (delta_t * x_t)[..., :, None] * B_t[..., None, :]
        outputs.append(h @ C_t[..., :, None])  # (..., E, 1)
    return (torch.cat(outputs, dim=-1).mT if outputs else C @ h.mT), h


def state_space_dual(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The state space of Mamba-2: one decay for the whole state, and so a masked product.

    Computes :eq:`eq-state-space-dual` for one head: with :math:`a_t = e^{g_t}`, g the `log_decay`,

    .. math::

        S_t &= a_t S_{t-1} + B_t x_t^\top, \qquad y_t = S_t^\top C_t \\
        Y &= \left(C B^\top \odot \Gamma\right) X \\
        \Gamma_{tj} &= a_t a_{t-1} \cdots a_{j+1} \text{ for } j \le t, \text{ else } 0

    B is the key, C the query and x the value of linear attention.

    Parameters
    ----------
    x : tensor, shape (..., N, P)
        Inputs, already times their step size Δ.
    log_decay : tensor, shape (..., N)
        Logarithm of the decay, Δ A: at most 0. -inf forgets everything, exactly.
    B : tensor, shape (..., N, K)
        Keys.
    C : tensor, shape (..., N, K)
        Queries.
    form : str, optional
        "recurrent", "parallel" (the masked product, a single chunk), or "chunkwise" (the masked
        product inside a chunk, a state between chunks). None takes "recurrent" for a single token,
        else "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : tensor, shape (..., K, P), optional
        State before the first token, zero by default. Its dtype is that of the input or the
        accumulation dtype.
    return_state : bool
        Return the state after the last token as well.

    Returns
    -------
    tensor, shape (..., N, P)
        Outputs in the dtype of the input, with the leading dimensions of all arguments, broadcast
        as in ``matmul``. Half precision is computed in float32, under ``torch.autocast`` too.
    tensor, shape (..., K, P)
        With ``return_state=True``: the state in the accumulation dtype (float64 for float64,
        otherwise float32), with the leading dimensions of x, log_decay, B and the initial state.

    Raises
    ------
    TypeError
        If an argument is no torch tensor of floats, the dtypes differ, `chunk_size` is no integer,
        `initial_state` has another dtype, or `return_state` is neither True nor False.
    ValueError
        If the shapes or devices do not fit together, `form` is unknown, `chunk_size` is below 1, or
        an entry of `log_decay` is above 0 (in eager mode only: under ``torch.compile`` and
        ``torch.func`` a tensor's values are not looked at).

    Notes
    -----
    Differentiable any number of times in every argument, through both the outputs and the returned
    state. The gradient of an entry of `log_decay` that is -inf is 0. A weight of x that goes past
    the memory, the D of Mamba, belongs to the module.

    NaN reaches the outputs that depend on it and no other sequence of the batch. "recurrent" keeps
    it from earlier positions; in the other forms it may reach those of its chunk, as 0 * NaN is
    NaN. Positions with x = B = 0 and log_decay = 0 may be appended: they change nothing that is
    remembered.

    References
    ----------
    Dao and Gu (2024), sections 3 and 5, and listing 1 for the chunks.

    Examples
    --------
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
    _arguments.check_arrays(Tensor, x=x, log_decay=log_decay, B=B, C=C)
    _arguments.check_flags(return_state=return_state)
    _arguments.check_axes(x=(x, "N, P"), log_decay=(log_decay, "N"), B=(B, "N, K"), C=(C, "N, K"))
    _arguments.check_form(form, ("recurrent", "parallel", "chunkwise"))
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    _memory.check_values("log_decay", log_decay, "at most 0", lambda g: g > 0)
    sizes = {"K": B.shape[-1], "P": x.shape[-1]}
    leading = {"log_decay": log_decay.shape[:-1], "B": B.shape[:-2]}
    S = _memory.initial_memory(initial_state, "x", x, sizes, x=x.shape[:-2], **leading)
    _arguments.check_leading(C=C.shape[:-2], initial_state=S.shape[:-2])

    dtype, (x, log_decay, B, C) = x.dtype, accumulate(x, log_decay, B, C)
    with full_precision(x):
        y, S = additive(form, C, B, x, log_decay[..., None], S, chunk_size=chunk_size)
    y = y.to(dtype)
    return (y, S) if return_state else y
