"""Linear attention whose memory fades, on a GPU: RetNet, Mamba-2, GLA and RWKV-6.

The kernels are in ``decay.cu``; here is what surrounds them: checks, memory and launches. For
numbers of 16 bits those of ``decay_pipelined.cu`` may take their place, where one number is the
decay of all channels, and else those of ``decay_channels.cu``.
"""

import math
from typing import Any

import numpy as np

from lesson_code import _arguments
from lesson_code.cupy import _arrays, _fading, _kernels, decay_pipelined
from lesson_code.cupy._fading import LENGTH, THREADS, pitch
from lesson_code.cupy._launches import blocks, round_up, segments_of
from lesson_code.cupy.linear import check

KERNELS = ("chunked", "pipelined")


def decaying_scan(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    bonus: Any = None,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    kernel: str | None = None,
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
    kernel : str, optional
        "chunked" (chunks of 16 tokens, float32 arithmetic) or "pipelined" (chunks of 64 on the
        tensor cores, with the next ones on their way meanwhile; of 32 where shared memory or
        registers do not suffice). The latter needs float16 or bfloat16, a GPU of compute capability
        8.0, and D and M of at most 128; with a decay for each channel and D above 64, a GPU with
        more than 99 KiB of shared memory for a block. None takes it where it can run and
        there are more than 16 tokens; by `benchmarks/kernel_times.py` it is the faster one.
    device : str
        "cuda", or "cpu", which emulates the kernels.

    Notes
    -----
    In a chunk there is a masked product among its tokens, and a state for what was before, in
    float32. Decays are e to sums of logarithms, none of them above 0. Where heads are few the
    sequence is cut into segments, which are computed at the same time.

    "pipelined" rounds what it multiplies to the dtype of q, decays and all: weights of pairs, keys
    on their way into the state, and states between chunks; with a decay for each channel, queries
    and keys of all pairs too. In float16, weights and states are scaled by powers of two, so that
    no state is too large. A bonus is not for its tensor cores: what the first token reads, and what
    each has from itself, the array library adds in float32. That is some 80 bytes a token and
    channel where the kernel moves 10, and with them a third of the time of "chunked", by the bytes.

    The backward pass computes the state before every 64th token again (on small GPUs, every 32nd or
    16th), and keeps them while it runs: D M / 64 numbers a token, of 16 bits in "pipelined". That
    hands over to "chunked" where its tiles would not fit a multiprocessor, and where each of more
    than 64 channels has its decay. It can be differentiated once, in reverse mode; where log_decay
    is -inf its gradient is 0. NaN reaches the outputs that depend on it and no other sequence; in
    "pipelined" it may reach earlier positions of its chunk, and infinity may become NaN.

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
    kernel = _check_kernel(kernel, q, v, log_decay)
    if return_state and 0 in q.shape[:-2] and 0 not in leading:  # no query, and yet a state
        options: dict[str, Any] = {"kernel": kernel, "device": device}
        options["initial_state"] = initial_state
        out = decaying_scan(q, k, v, log_decay, bonus, **options)
        return out, decaying_scan(k, k, v, log_decay, return_state=True, **options)[1]

    state = initial_state
    if state is None:
        state = _fading.zeros((k.shape[-1], v.shape[-1]), k)
    if _arrays.library(q) == "torch":
        from lesson_code import _custom_ops
        from lesson_code.cupy import _torch_decay

        _custom_ops.check_values("log_decay", log_decay, "at most 0")
        out, last = _scan(_torch_decay.decaying_scan, q, k, v, log_decay, bonus, state, kernel)
    else:
        with _kernels.place(q):
            _arguments.check_values("log_decay", log_decay, "at most 0")
            out, last = _scan(forward, q, k, v, log_decay, bonus, state, kernel)
    if not return_state:
        return out
    return out, _fading.own_state(last, leading)


def _check(q, k, v, log_decay, bonus, initial_state, device) -> tuple:
    """The leading dimensions of the state, after checks of all arrays."""
    check(q, k, v, device)
    (N, D), M = k.shape[-2:], v.shape[-1]
    _fading.check_shape(device, log_decay, q, N, D)
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


def _scan(scan, q, k, v, log_decay, bonus, state, kernel):
    """What `scan` finds, with a bonus also by the kernel "pipelined", which knows of none.

    With a bonus a token reads the memory that the token before it left. So queries are moved to the
    token before; what the first one reads, and what each token has from itself, is added here.
    """
    N = q.shape[-2]
    if N == 0:
        kernel = "chunked"  # which knows what the gradient of a bonus looks like
    if bonus is None or kernel == "chunked":
        return scan(q, k, v, log_decay, bonus, state, kernel)
    but_last = (x[..., : N - 1, :] for x in (k, v, log_decay))
    out, before = scan(q[..., 1:, :], *but_last, None, state, kernel)

    floats, new = _arrays.floats, (..., None)
    first = (floats(q[..., 0, :])[new] * floats(state)).sum(-2)[..., None, :]
    first = _arrays.broadcast(first, (*out.shape[:-2], *first.shape[-2:]))
    k, v = floats(k), floats(v)
    own = (floats(q) * k * floats(bonus)[..., None, :]).sum(-1)[new] * v
    out = _arrays.join([first, out], axis=-2) + own
    fade = _arrays.exp(floats(log_decay[..., N - 1, :]))
    last = fade[new] * before + k[..., N - 1, :, None] * v[..., N - 1, None, :]
    return _arrays.cast(out, q), last


def _check_kernel(kernel, q, v, log_decay) -> str:
    if kernel is not None and kernel not in KERNELS:
        listed = ", ".join(map(repr, KERNELS))
        raise ValueError(f"kernel must be None or one of {listed}, got {kernel!r}.")
    lack = _pipelined_lacks(q, v, log_decay)
    if kernel == "pipelined" and lack:
        raise ValueError(f"kernel='pipelined' needs {lack}.")
    if kernel is None:
        return "chunked" if lack or q.shape[-2] <= LENGTH else "pipelined"
    return kernel


def _pipelined_lacks(q, v, log_decay) -> str:
    """What the kernel "pipelined" needs and does not get; empty where it can run."""
    gpu, D, M = _kernels.gpu(q), q.shape[-1], v.shape[-1]
    if (dtype := _arguments.dtype_name(q)) == "float32":
        return f"float16 or bfloat16, got {dtype}"
    if gpu.capability < (8, 0):
        return f"a GPU of compute capability 8.0, got {'.'.join(map(str, gpu.capability))}"
    if max(D, M) > decay_pipelined.MAX_WIDTH:
        return f"queries and values at most {decay_pipelined.MAX_WIDTH} wide, got {D} and {M}"
    per_channel = log_decay.shape[-1] > 1
    if decay_pipelined.plan(decay_pipelined.FORWARD, D, M, dtype, gpu, per_channel) is None:
        return f"more shared memory than the {gpu.shared_bytes} bytes of this GPU for D = {D}"
    return ""


# ---- Launches. -----------------------------------------------------------------------------------


def forward(q, k, v, log_decay, bonus, initial, kernel):
    """Outputs (..., N, M) in the dtype of q, and the last state (..., D, M) in float32."""
    if kernel == "pipelined":
        return decay_pipelined.forward(q, k, v, log_decay, initial)
    parts = [q.shape[:-2], k.shape[:-2], v.shape[:-2], log_decay.shape[:-2], initial.shape[:-2]]
    leading = np.broadcast_shapes(*parts, () if bonus is None else bonus.shape[:-1])
    macros = _macros(q, log_decay, bonus, k, v)
    cuts = _cuts(k, math.prod(leading) * blocks(v.shape[-1], macros["COLUMNS"]))
    states = _segment_starts(macros, leading, cuts, k, v, log_decay, initial)
    return _outputs(macros, leading, cuts, q, k, v, log_decay, bonus, states)


def backward(grad, grad_last, q, k, v, log_decay, bonus, initial, kernel):
    """Gradients of q, k, v, log_decay, bonus (None without one) and the initial state.

    All have the same leading dimensions. Two gradients come in parts, to be summed: that of one
    decay for all channels as (..., N, blocks), that of a bonus as (..., segments, D).
    """
    if kernel == "pipelined":
        found = decay_pipelined.backward(grad, grad_last, q, k, v, log_decay, initial)
        if found is not None:
            *gradients, d_initial = found
            return *gradients, None, d_initial
    *heads, N, D = k.shape
    leading, M = tuple(heads), v.shape[-1]
    dtype, is_shared = _arguments.dtype_name(q), log_decay.shape[-1] == 1
    macros = _macros(q, log_decay, bonus, k, v)
    tiles = blocks(D, macros["CHANNELS"])
    segments, length = cuts = _cuts(k, math.prod(leading) * tiles)
    dq, dk = (_arrays.empty(k.shape, dtype, k) for _ in range(2))
    if is_shared:
        d_log = _arrays.empty((*leading, N, tiles), "float32", k)
    else:
        d_log = _arrays.empty(k.shape, _arguments.dtype_name(log_decay), k)
    d_bonus = None if bonus is None else _arrays.empty((*leading, segments, D), "float32", k)
    d_initial = _arrays.empty((*leading, D, M), "float32", k)

    reverse = {"reverse": True}
    before = _segment_starts(macros, leading, cuts, k, v, log_decay, initial)
    behind = _segment_starts(macros, leading, cuts, q, grad, log_decay, grad_last, **reverse)
    dv, _ = _outputs(macros, leading, cuts, k, q, grad, log_decay, bonus, behind, **reverse)
    if 0 not in leading:
        spans = -(-N // macros["SPAN"])
        starts = _arrays.empty((*leading, spans, D, M), "float32", k)
        _walk(macros, leading, cuts, k, v, log_decay, before, starts, None, None)
        inputs = [_arrays.rows(x, leading) for x in (grad, q, k, v, log_decay)]
        bonus = _fading.floats(bonus, (*leading, D))
        gradients = (dq, dk, d_log, d_bonus, d_initial)
        arguments = (*inputs, bonus, starts, behind, *gradients, N, segments, length)
        grid = (math.prod(leading) * segments, tiles)
        shared = {"shared_bytes": _backward_bytes(macros)}
        _kernels.run("decay.cu", macros, "backward", grid, THREADS, *arguments, **shared)
    return dq, dk, dv, d_log, d_bonus, d_initial


def _outputs(macros, leading, cuts, q, k, v, log_decay, bonus, states, reverse=False):
    """Outputs and the last state, from the states before all segments.

    `reverse` lets time run backwards, where a decay stands between a token and the one before it,
    and with a bonus between a token and the next.
    """
    (N, D), M = k.shape[-2:], v.shape[-1]
    out = _arrays.empty((*leading, N, M), _arguments.dtype_name(q), q)
    last = _arrays.empty((*leading, D, M), "float32", q)
    if 0 not in leading:
        rows = [_arrays.rows(x, leading, reverse=reverse) for x in (q, k, v, log_decay, out)]
        arguments = (*rows, _fading.floats(bonus, (*leading, D)), states, last)
        grid = (math.prod(leading) * cuts[0], blocks(M, macros["COLUMNS"]))
        shared = {"shared_bytes": _forward_bytes(macros)}
        places = _places(macros, cuts, N, reverse)
        _kernels.run("decay.cu", macros, "forward", grid, THREADS, *arguments, *places, **shared)
    return out, last


def _cuts(k, count: int) -> tuple[int, int]:
    """Segments, and tokens of each: more than one where `count` blocks leave the GPU half empty.

    A cut costs a walk through keys and values. Bytes are not what these kernels wait for, so more
    blocks than there are multiprocessors would not pay for it.
    """
    return segments_of(k.shape[-2], _kernels.gpu(k).processors // max(1, count))


def _segment_starts(macros, leading, cuts, k, v, log_decay, initial, reverse=False):
    """The states before all segments, (..., segments, D, M)."""
    D, M, segments = k.shape[-1], v.shape[-1], cuts[0]
    initial = _fading.floats(initial, (*leading, D, M))
    if segments == 1 or 0 in leading:
        return initial
    states = _arrays.empty((*leading, segments, D, M), "float32", k)
    totals = _arrays.empty((*leading, segments, D), "float32", k)
    _walk(macros, leading, cuts, k, v, log_decay, None, None, states, totals, reverse)
    count = math.prod(leading) * D * M
    arguments = (states, totals, initial, segments, D, M, np.int64(count))
    grid = blocks(count, THREADS)
    _kernels.run("decay.cu", macros, "segment_starts", grid, THREADS, *arguments)
    return states


def _walk(macros, leading, cuts, k, v, log_decay, initial, starts, sums, totals, reverse=False):
    rows = [_arrays.rows(x, leading, reverse=reverse) for x in (k, v, log_decay)]
    arguments = (*rows, initial, starts, sums, totals, *_places(macros, cuts, k.shape[-2], reverse))
    grid = (math.prod(leading) * cuts[0], blocks(k.shape[-1], macros["CHANNELS"]))
    _kernels.run("decay.cu", macros, "walk", grid, THREADS, *arguments)


def _places(macros, cuts, N, reverse) -> tuple:
    """N, lag, segments, length and pad, as decay.cu explains them."""
    segments, length = cuts
    lag = int(reverse and not macros["BONUS"])
    return N, lag, segments, length, segments * length - N if reverse else 0


def _macros(q, log_decay, bonus, k, v) -> dict:
    features, values = (max(16, round_up(x.shape[-1], 16)) for x in (k, v))
    is_shared = log_decay.shape[-1] == 1
    macros = {
        "SCALAR": _arrays.c_type(q),
        "LOG": _arrays.c_type(log_decay),
        "GRAD_LOG": "float" if is_shared else _arrays.c_type(log_decay),
        "PER_CHANNEL": int(not is_shared),
        "BONUS": int(bonus is not None),
        "FEATURES": features,
        "VALUES": values,
        "COLUMNS": min(values, 128 if features <= 128 else 64),  # of a state in the registers
        "CHANNELS": min(features, 64 if values <= 128 else 32),  # of another one
    }
    for span in (64, 32, 16):
        macros["SPAN"] = span
        if _backward_bytes(macros) <= _kernels.gpu(q).shared_bytes:
            break
    return macros


def _forward_bytes(macros) -> int:
    """Of ForwardTiles in decay.cu."""
    features, columns = macros["FEATURES"], macros["COLUMNS"]
    decays = features if macros["PER_CHANNEL"] else 1
    rows = 2 * pitch(features) + decays + 2 * (columns + 2) + LENGTH + 2
    return 4 * (LENGTH * rows + 2 * features)


def _backward_bytes(macros) -> int:
    """Of BackwardTiles in decay.cu."""
    channels, values, span = macros["CHANNELS"], macros["VALUES"], macros["SPAN"]
    decays = channels if macros["PER_CHANNEL"] else 1
    kept = (span // LENGTH - 1) * channels * values  # none where a span is one chunk
    of_span = span * (channels + 2 + decays + pitch(values))
    of_chunk = LENGTH * (7 * (channels + 2) + pitch(values) + LENGTH + 2) + channels
    return 4 * (kept + of_span + of_chunk)
