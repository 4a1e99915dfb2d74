"""Linear attention whose memory fades, on a GPU: RetNet, Mamba-2, GLA and RWKV-6 by one kernel.

The kernels are in ``decay.cu``; here is what surrounds them: checks, memory and launches.
"""

import math
from typing import Any

import numpy as np

from lesson_code import _arguments
from lesson_code._contract import OUTSIDE
from lesson_code.cupy import _arrays, _kernels
from lesson_code.cupy._launches import blocks, round_up
from lesson_code.cupy.linear import MAX_WIDTH

LENGTH = 16  # tokens of a chunk, as in decay.cu
THREADS = LENGTH * LENGTH
CHANNELS = 16  # of a block, backward
AT_MOST_0 = "at most 0"


def decaying_scan(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    bonus: Any = None,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    device: str = "cuda",
) -> Any:
    r"""Linear attention whose memory decays, per head or per channel, by a CUDA kernel.

    Computes :eq:`eq-gla`, with :math:`g_t` the logarithm of the decay; with one decay for all
    channels it is :eq:`eq-retention` and :eq:`eq-state-space-dual`, with a bonus u :eq:`eq-rwkv6`:

    .. math::

        S_t &= \operatorname{diag}(e^{g_t}) S_{t-1} + k_t v_t^\top \\
        o_t &= S_t^\top q_t, \qquad\text{with a bonus:}\quad
               o_t = (S_{t-1} + \operatorname{diag}(u) k_t v_t^\top)^\top q_t

    Parameters
    ----------
    q, k : arrays, shape (..., N, D)
        Queries and keys; D is at most 256.
    v : array, shape (..., N, M)
        Values; M is at most 256.
    log_decay : array, shape (..., N, D) or (..., N, 1)
        Logarithms g of the decays of each channel, or of all channels alike, in the dtype of q or
        float32. They are in [-inf, 0]; -inf empties the memory, exactly. That they are at most 0 is
        checked in eager mode only, not under ``torch.compile``, ``torch.func`` or while a CUDA
        graph is captured, and the check waits for the GPU.
    bonus : array, shape (..., D), optional
        Weight u of the current token, in the dtype of q or float32. With it a token reads before
        the memory decays.
    initial_state : array, shape (..., D, M), optional
        State before the first token, zero by default, in the dtype of q or float32.
    return_state : bool
        Return the state after the last token as well, (..., D, M) in float32, with the leading
        dimensions of k, v, log_decay and the initial state.
    device : str
        "cuda", or "cpu", which emulates the kernels.

    Notes
    -----
    A block takes 16 tokens at a time: a masked product among them, and a state for what was before,
    in float32. Decays are e to sums of logarithms, none of them above 0.

    The backward pass computes the state before every 16th token again, and keeps them while it
    runs: D M / 16 numbers a token. It can be differentiated once, in reverse mode; where log_decay
    is -inf its gradient is 0. NaN reaches the outputs that depend on it and no others.

    References
    ----------
    Yang et al. (2024), section 4, for the chunks; Sun et al. (2023), equation 7; Dao and Gu (2024),
    section 6; Peng et al. (2024), section 4.

    Examples
    --------
    The first channel keeps everything. The second keeps half, then nothing:

    >>> import numpy as np
    >>> q = k = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    >>> v = np.array([[10, 20], [30, 40], [50, 60]], np.float32)
    >>> log_decay = np.array([[0, 0], [0, np.log(0.5)], [0, -np.inf]], np.float32)
    >>> decaying_scan(q, k, v, log_decay, device="cpu")
    array([[ 10.,  20.],
           [ 30.,  40.],
           [110., 140.]], dtype=float32)
    """
    leading = _check(q, k, v, log_decay, bonus, initial_state, device)
    _arguments.check_flags(return_state=return_state)
    if return_state and 0 in q.shape[:-2] and 0 not in leading:  # no query, and yet a state
        options: dict[str, Any] = {"initial_state": initial_state, "device": device}
        out = decaying_scan(q, k, v, log_decay, bonus, **options)
        return out, decaying_scan(k, k, v, log_decay, return_state=True, **options)[1]

    state = initial_state
    if state is None:
        state = _arrays.empty((k.shape[-1], v.shape[-1]), "float32", k)
        state[:] = 0
    if _arrays.library(q) == "torch":
        from lesson_code.cupy import _torch_decay

        out, last = _torch_decay.decaying_scan(q, k, v, log_decay, bonus, state)
    else:
        with _kernels.place(q):
            wrong = OUTSIDE[AT_MOST_0](log_decay)
            _arguments.check_values("log_decay", log_decay, AT_MOST_0, wrong)
            out, last = forward(q, k, v, log_decay, bonus, state)
    if not return_state:
        return out
    missing = (0,) * (last.ndim - 2 - len(leading))  # axes that only q or the bonus has
    return out, last[*missing, *(slice(size) for size in leading)]


def _check(q, k, v, log_decay, bonus, initial_state, device) -> tuple:
    """The leading dimensions of the state, after checks of all arrays."""
    _arrays.check_arrays(device, q=q, k=k, v=v)
    _arguments.check_axes(q=(q, "N D"), k=(k, "N D"), v=(v, "N M"))
    (N, D), M = k.shape[-2:], v.shape[-1]
    for name, array in {"q": q, "v": v}.items():
        if array.shape[-1] > MAX_WIDTH:
            raise ValueError(f"{name} must be at most {MAX_WIDTH} wide, got {array.shape[-1]}.")
    is_shared = tuple(getattr(log_decay, "shape", ()))[-1:] == (1,)
    sizes = {"N": N, "1": 1} if is_shared else {"N": N, "D": D}
    _arrays.check_state(device, "log_decay", log_decay, "q", q, sizes)
    shapes = {"k": k.shape[:-2], "v": v.shape[:-2], "log_decay": log_decay.shape[:-2]}
    reads = {"q": q.shape[:-2]}
    if bonus is not None:
        _arrays.check_state(device, "bonus", bonus, "q", q, {"D": D})
        reads["bonus"] = bonus.shape[:-1]
    if initial_state is not None:
        _arrays.check_state(device, "initial_state", initial_state, "q", q, {"D": D, "M": M})
        shapes["initial_state"] = initial_state.shape[:-2]
    _arguments.check_leading(**shapes, **reads)
    return _arguments.check_leading(**shapes)


# ---- Launches. -----------------------------------------------------------------------------------


def forward(q, k, v, log_decay, bonus, initial, reverse: bool = False):
    """Outputs (..., N, M) in the dtype of q, and the last state (..., D, M) in float32.

    `reverse` lets time run backwards, where a decay stands between a token and the one before it,
    and with a bonus between a token and the next.
    """
    parts = [q.shape[:-2], k.shape[:-2], v.shape[:-2], log_decay.shape[:-2], initial.shape[:-2]]
    leading = np.broadcast_shapes(*parts, () if bonus is None else bonus.shape[:-1])
    (N, D), M = k.shape[-2:], v.shape[-1]
    out = _arrays.empty((*leading, N, M), _arguments.dtype_name(q), q)
    last = _arrays.empty((*leading, D, M), "float32", q)
    if 0 in leading:
        return out, last
    macros = _macros(q, log_decay, bonus, D, M)
    rows = [_arrays.rows(x, leading, reverse=reverse) for x in (q, k, v, log_decay, out)]
    bonus, initial = _floats(bonus, (*leading, D)), _floats(initial, (*leading, D, M))
    grid = (math.prod(leading), blocks(M, macros["COLUMNS"]))
    arguments = (*rows, bonus, initial, last, N, int(reverse and bonus is None))
    shared = {"shared_bytes": _shared_bytes(macros)}
    _kernels.run("decay.cu", macros, "forward", grid, THREADS, *arguments, **shared)
    return out, last


def backward(grad, grad_last, q, k, v, log_decay, bonus, initial):
    """Gradients of q, k, v, log_decay, bonus (None without one) and the initial state.

    All have the same leading dimensions. Where one decay serves all channels, its gradient comes as
    (..., N, blocks), to be summed.
    """
    *heads, N, D = k.shape
    leading, M = tuple(heads), v.shape[-1]
    dtype, is_shared = _arguments.dtype_name(q), log_decay.shape[-1] == 1
    dv, _ = forward(k, q, grad, log_decay, bonus, grad_last, reverse=True)
    tiles = blocks(D, CHANNELS)
    dq, dk = (_arrays.empty(k.shape, dtype, k) for _ in range(2))
    if is_shared:
        d_log = _arrays.empty((*leading, N, tiles), "float32", k)
    else:
        d_log = _arrays.empty(k.shape, _arguments.dtype_name(log_decay), k)
    d_bonus = None if bonus is None else _arrays.empty((*leading, D), "float32", k)
    d_initial = _arrays.empty((*leading, D, M), "float32", k)
    if 0 not in leading:
        macros = _macros(q, log_decay, bonus, D, M)
        chunks = -(-N // LENGTH)
        starts = _arrays.empty((*leading, chunks, D, M), "float32", k)
        inputs = [_arrays.rows(x, leading) for x in (grad, q, k, v, log_decay)]
        bonus, initial = _floats(bonus, (*leading, D)), _floats(initial, (*leading, D, M))
        grid = (math.prod(leading), tiles)
        arguments = (*inputs[2:], initial, starts, N)
        _kernels.run("decay.cu", macros, "chunk_starts", grid, THREADS, *arguments)
        grad_last = _floats(grad_last, (*leading, D, M))
        gradients = (dq, dk, d_log, d_bonus, d_initial)
        arguments = (*inputs, bonus, starts, grad_last, *gradients, N)
        _kernels.run("decay.cu", macros, "backward", grid, THREADS, *arguments)
    return dq, dk, dv, d_log, d_bonus, d_initial


def _floats(array, shape):
    """In float32, one number after the other, for every head; None for no array."""
    if array is None:
        return None
    return _arrays.contiguous(_arrays.broadcast(_arrays.floats(array), shape))


def _macros(q, log_decay, bonus, D, M) -> dict:
    features, values = (max(16, round_up(size, 16)) for size in (D, M))
    is_shared = log_decay.shape[-1] == 1
    return {
        "SCALAR": _arrays.c_type(q),
        "LOG": _arrays.c_type(log_decay),
        "GRAD_LOG": "float" if is_shared else _arrays.c_type(log_decay),
        "PER_CHANNEL": int(not is_shared),
        "BONUS": int(bonus is not None),
        "FEATURES": features,
        "VALUES": values,
        "COLUMNS": min(values, 64 if features <= 128 else 32),  # of a state in the registers
    }


def _shared_bytes(macros) -> int:
    """Of ForwardTiles in decay.cu."""
    features, columns = macros["FEATURES"], macros["COLUMNS"]
    pitch = features if features % 32 else features + 16
    rows = 2 * pitch + (features if macros["PER_CHANNEL"] else 1) + 2 * (columns + 2) + LENGTH + 2
    return 4 * (LENGTH * rows + 2 * features)
