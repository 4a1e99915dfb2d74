"""The delta rules on a GPU: memories that write only what they do not know yet, by one kernel.

The kernels are in ``delta.cu``; here is what surrounds them: checks, memory and launches.
"""

import math
from typing import Any

import numpy as np

from lesson_code import _arguments
from lesson_code.cupy import _arrays, _fading, _kernels
from lesson_code.cupy._fading import LENGTH, THREADS, pitch
from lesson_code.cupy._launches import blocks, round_up
from lesson_code.cupy.linear import check

CHANNELS = 16  # of a block that has all columns


def delta_scan(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    log_decay: Any = None,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    device: str = "cuda",
) -> Any:
    r"""The delta rule, with a decay per head or per channel or with none, by a CUDA kernel.

    Computes :eq:`eq-kimi-delta`, with :math:`g_t` the logarithm of the decay; with one decay for
    all channels it is :eq:`eq-gated-delta-rule`, without a decay :eq:`eq-delta-rule`:

    .. math::

        S'_t &= \operatorname{diag}(e^{g_t}) S_{t-1} \\
        S_t &= S'_t + \beta_t k_t \left(v_t - S_t'^\top k_t\right)^\top \\
        o_t &= S_t^\top q_t

    Parameters
    ----------
    q, k : arrays, shape (..., N, D)
        Queries and keys; D is at most 256. For a bounded memory β|k|² is at most 2.
    v : array, shape (..., N, M)
        Values; M is at most 256.
    beta : array, shape (..., N)
        Step sizes, any number, in the dtype of q or float32.
    log_decay : array, shape (..., N, D) or (..., N, 1), optional
        Logarithms g of the decays of each channel, or of all channels alike, in the dtype of q or
        float32; without them nothing fades. They are in [-inf, 0]; -inf empties the memory,
        exactly. That they are at most 0 is checked as by
        :func:`~lesson_code.cupy.decaying_scan`.
    initial_state : array, shape (..., D, M), optional
        State before the first token, zero by default, in the dtype of q or float32.
    return_state : bool
        Return the state after the last token as well, (..., D, M) in float32, with the leading
        dimensions of all but q.
    device : str
        "cuda", or "cpu", which emulates the kernels.

    Notes
    -----
    A block takes 16 tokens at a time: what their keys find of each other is a unit lower triangular
    system for their errors, and a state is for what was before, in float32. Decays are e to sums
    of logarithms, none of them above 0.

    The backward pass computes the state before every 16th token again, and keeps them while it
    runs: D M / 16 numbers a token, and 2 M for the errors and their gradients. It can be
    differentiated once, in reverse mode; where log_decay is -inf its gradient is 0. NaN reaches the
    outputs that depend on it and no others.

    References
    ----------
    Yang et al. (2024), section 3, for the chunks; Yang et al. (2025), section 3; Kimi Team (2025),
    section 3.

    Examples
    --------
    The same key is written twice. What it finds is the second value, not the sum:

    >>> import numpy as np
    >>> k = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    >>> v = np.array([[10, 20], [30, 40], [50, 60]], np.float32)
    >>> delta_scan(k, k, v, np.ones(3, np.float32), device="cpu")
    array([[10., 20.],
           [30., 40.],
           [50., 60.]], dtype=float32)
    """
    leading = _check(q, k, v, beta, log_decay, initial_state, device)
    _arguments.check_flags(return_state=return_state)
    if return_state and 0 in q.shape[:-2] and 0 not in leading:  # no query, and yet a state
        options: dict[str, Any] = {"initial_state": initial_state, "device": device}
        out = delta_scan(q, k, v, beta, log_decay, **options)
        return out, delta_scan(k, k, v, beta, log_decay, return_state=True, **options)[1]

    state = initial_state
    if state is None:
        state = _fading.zeros((k.shape[-1], v.shape[-1]), k)
    if log_decay is None:
        log_decay = _arrays.broadcast(_fading.zeros((1, 1), k), (k.shape[-2], 1))
    if _arrays.library(q) == "torch":
        from lesson_code.cupy import _torch_delta

        out, last = _torch_delta.delta_scan(q, k, v, beta[..., None], log_decay, state)
    else:
        with _kernels.place(q):
            _arguments.check_values("log_decay", log_decay, "at most 0")
            out, last = forward(q, k, v, beta[..., None], log_decay, state)
    if not return_state:
        return out
    return out, _fading.own_state(last, leading)


def _check(q, k, v, beta, log_decay, initial_state, device) -> tuple:
    """The leading dimensions of the state, after checks of all arrays."""
    check(q, k, v, device)
    (N, D), M = k.shape[-2:], v.shape[-1]
    _arrays.check_state(device, "beta", beta, "q", q, {"N": N})
    shapes = {"k": k.shape[:-2], "v": v.shape[:-2], "beta": beta.shape[:-1]}
    if log_decay is not None:
        _fading.check_shape(device, log_decay, q, N, D)
        shapes["log_decay"] = log_decay.shape[:-2]
    if initial_state is not None:
        _arrays.check_state(device, "initial_state", initial_state, "q", q, {"D": D, "M": M})
        shapes["initial_state"] = initial_state.shape[:-2]
    _arguments.check_leading(**shapes, q=q.shape[:-2])
    return _arguments.check_leading(**shapes)


# ---- Launches. -----------------------------------------------------------------------------------


def forward(q, k, v, beta, log_decay, initial):
    """Outputs (..., N, M) in the dtype of q, and the last state (..., D, M) in float32.

    Here and in `backward` beta is (..., N, 1).
    """
    leading = np.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v, beta, log_decay, initial)))
    (N, D), M = k.shape[-2:], v.shape[-1]
    out = _arrays.empty((*leading, N, M), _arguments.dtype_name(q), q)
    last = _arrays.empty((*leading, D, M), "float32", q)
    if 0 not in leading:
        macros = _macros(q, beta, log_decay, D, M)
        *rows, to = (_arrays.rows(x, leading) for x in (q, k, v, beta, log_decay, out))
        arguments = (*rows, _fading.floats(initial, (*leading, D, M)), to, last, N)
        _over_columns("forward", macros, leading, *arguments)
    return out, last


def backward(grad, grad_last, q, k, v, beta, log_decay, initial):
    """Gradients of q, k, v, beta, log_decay and the initial state, the last four in float32.

    All arrays have the same leading dimensions. The gradient of beta, and that of one decay for all
    channels, come as (..., N, blocks), to be summed.
    """
    *heads, N, D = k.shape
    leading, M = tuple(heads), v.shape[-1]
    tiles, is_shared = blocks(D, CHANNELS), log_decay.shape[-1] == 1
    dq, dk = (_arrays.empty(k.shape, _arguments.dtype_name(q), k) for _ in range(2))
    errors, dv = (_arrays.empty(v.shape, "float32", v) for _ in range(2))
    d_beta = _arrays.empty((*leading, N, tiles), "float32", k)
    d_log = _arrays.empty((*leading, N, tiles if is_shared else D), "float32", k)
    d_initial = _arrays.empty((*leading, D, M), "float32", k)
    if 0 not in leading:
        macros = _macros(q, beta, log_decay, D, M)
        starts = _arrays.empty((*leading, -(-N // LENGTH), M, D), "float32", k)
        grad, q, k, v, beta, log_decay, errors, d_errors = (
            _arrays.rows(x, leading) for x in (grad, q, k, v, beta, log_decay, errors, dv)
        )
        initial, grad_last = (_fading.floats(x, (*leading, D, M)) for x in (initial, grad_last))

        first = (k, v, beta, log_decay, initial, errors, starts, N)
        _over_columns("chunk_starts", macros, leading, *first)
        second = (grad, q, k, beta, log_decay, grad_last, d_errors, N)
        _over_columns("values_backward", macros, leading, *second)
        read = (grad, q, k, beta, log_decay, errors, d_errors, starts, grad_last)
        third = (*read, dq, dk, d_beta, d_log, d_initial, N)
        grid, shared = (math.prod(leading), tiles), _backward_bytes(macros)
        _kernels.run("delta.cu", macros, "backward", grid, THREADS, *third, shared_bytes=shared)
    return dq, dk, dv, d_beta, d_log, d_initial


def _over_columns(name, macros, leading, *arguments):
    """Start a kernel whose blocks have a head and some columns of the values each."""
    grid = (math.prod(leading), blocks(macros["VALUES"], macros["COLUMNS"]))
    shared = _shared_bytes(macros)
    _kernels.run("delta.cu", macros, name, grid, THREADS, *arguments, shared_bytes=shared)


def _macros(q, beta, log_decay, D, M) -> dict:
    features, values = (max(16, round_up(size, 16)) for size in (D, M))
    return {
        "SCALAR": _arrays.c_type(q),
        "BETA": _arrays.c_type(beta),
        "LOG": _arrays.c_type(log_decay),
        "PER_CHANNEL": int(log_decay.shape[-1] != 1),
        "FEATURES": features,
        "VALUES": values,
        "COLUMNS": min(values, 32),  # of a state in the registers
    }


def _shared_bytes(macros) -> int:
    """Of Tiles in delta.cu."""
    features, columns = macros["FEATURES"], macros["COLUMNS"]
    decays = features if macros["PER_CHANNEL"] else 1
    rows = 2 * pitch(features) + decays + 2 * (columns + 2) + 1 + 2 * (LENGTH + 2)
    return 4 * (LENGTH * rows + features)


def _backward_bytes(macros) -> int:
    """Of BackwardTiles in delta.cu."""
    channels, decays = CHANNELS + 2, CHANNELS if macros["PER_CHANNEL"] else 1
    rows = 8 * channels + decays + 1 + 3 * pitch(macros["VALUES"]) + 2 * (LENGTH + 2)
    return 4 * LENGTH * rows
