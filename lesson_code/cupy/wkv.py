"""WKV of RWKV-4 on a GPU: one kernel, and one for its gradients.

The kernels are in ``wkv.cu``; here is what surrounds them: checks, memory and launches.
"""

import math
from typing import Any

from lesson_code import _arguments
from lesson_code.cupy import _arrays, _kernels
from lesson_code.numpy.wkv import EMPTY

THREADS = 32  # of a block, as in wkv.cu


def wkv(
    k: Any,
    v: Any,
    decay: Any,
    bonus: Any,
    *,
    initial_state: Any = None,
    return_state: bool = False,
    device: str = "cuda",
) -> Any:
    r"""WKV of RWKV-4 by a CUDA kernel: a causal mean of the values, with weights that decay.

    Computes :eq:`eq-wkv`, as :func:`lesson_code.numpy.wkv` does. One thread takes one channel of
    one sequence through all tokens with a running maximum (:eq:`eq-wkv-safe`), however many tokens
    there are; so the GPU is busy when there are many channels and sequences.

    Parameters
    ----------
    k, v : arrays, shape (..., N, D)
        Keys and values.
    decay, bonus : arrays, shape (D,)
        In the dtype of k or float32. That `decay` is positive and finite is checked in eager mode
        only, not under ``torch.compile``, ``torch.func`` or while a CUDA graph is captured, and the
        check waits for the GPU.
    initial_state : WKVState, optional
        State before the first token, in the dtype of k or float32.
    return_state : bool
        Return the state after the last token as well.
    device : str
        "cuda", or "cpu", which emulates the kernels.

    Notes
    -----
    The backward pass is a second kernel, which goes from the last token to the first; for it the
    first one keeps a float32 number for each token and channel, and one more if k is of half
    precision. Of a returned state it goes through numerator and denominator.

    Examples
    --------
    With w = ln 2 each step halves a weight:

    >>> import numpy as np
    >>> k, v = np.zeros((3, 1), "float32"), np.array([[10], [30], [50]], "float32")
    >>> decay, bonus = np.array([np.log(2)], "float32"), np.array([0], "float32")
    >>> wkv(k, v, decay, bonus, device="cpu")
    array([[10.],
           [20.],
           [34.]], dtype=float32)
    """
    _arrays.check_arrays(device, k=k, v=v)
    _arguments.check_axes(k=(k, "N D"), v=(v, "N D"))
    for name, x in {"decay": decay, "bonus": bonus}.items():
        _arrays.check_state(device, name, x, "k", k, {"D": k.shape[-1]})
        _arguments.check_axes(**{name: (x, "(D)")})
    _arguments.check_flags(return_state=return_state)
    if _arrays.library(k) == "torch":
        from lesson_code.cupy import _torch_wkv

        out, *state = _torch_wkv.wkv(k, v, decay, bonus, _begin(initial_state, k, v, device))
    else:
        with _kernels.place(k):
            w, u = _arrays.floats(decay), _arrays.floats(bonus)
            _arguments.check_values("decay", w, "positive and finite")
            parts = _begin(initial_state, k, v, device)
            begin = _arrays.join([x[..., None, :] for x in parts], axis=-2)
            maximum = begin[..., 2, :]
            maximum[maximum < EMPTY] = EMPTY  # float16 has made -inf of it
            out, last, _, _ = forward(k, v, w, u, begin, keep=False)
        state = [last[..., row, :] for row in range(3)]
    return (out, _arrays.states(k).WKVState(*state)) if return_state else out


def _begin(state, k, v, device) -> list:
    """Numerator, denominator and maximum before the first token, each (..., D) in float32."""
    leading = {"k": k.shape[:-2], "v": v.shape[:-2]}
    if state is None:
        zeros = _arrays.empty(k.shape[-1:], "float32", k)
        zeros[:] = 0
        state = zeros, zeros, zeros + EMPTY
    elif isinstance(state, _arrays.states(k).WKVState):
        for name, x in state._asdict().items():
            name = f"{name} of initial_state"
            _arrays.check_state(device, name, x, "k", k, {"D": k.shape[-1]})
            leading[name] = x.shape[:-1]
    else:
        raise TypeError(f"initial_state must be a WKVState, got {type(state).__name__}.")
    shape = (*_arguments.check_leading(**leading), k.shape[-1])
    return [_arrays.broadcast(_arrays.floats(x), shape) for x in state]


def forward(k, v, w, u, state, keep):
    """(outputs, last state, outputs before they were rounded, logarithms of the denominators).

    k and v are (..., N, D), w and u (..., D) in float32, and the state (..., 3, D) in float32 has
    all leading dimensions. The last two are for `backward`: (..., 0) without `keep`, the third
    also where nothing is rounded.
    """
    dtype, leading = _arguments.dtype_name(k), state.shape[:-2]
    shape, nothing = (*leading, *k.shape[-2:]), (*leading, 0)
    out, last = _arrays.empty(shape, dtype, k), _arrays.empty(state.shape, "float32", k)
    mean = _arrays.empty(shape if keep and dtype != "float32" else nothing, "float32", k)
    log_denominator = _arrays.empty(shape if keep else nothing, "float32", k)
    arrays = _arrays.contiguous(state), last, out, mean, log_denominator
    _run("forward", keep, shape, (k, v), w, u, *arrays)
    return out, last, mean, log_denominator


def backward(grad_out, grad_last, k, v, w, u, state, last, mean, log_denominator):
    """Gradients of k and v (..., N, D), w and u (..., D), and the state (..., 3, D).

    `mean` are the outputs in float32, and `last` is the state after the last token.
    """
    dk, dv = (_arrays.empty(grad_out.shape, _arguments.dtype_name(k), k) for _ in range(2))
    grad_state = _arrays.empty(state.shape, "float32", k)
    dw, du = (_arrays.empty(state[..., 0, :].shape, "float32", k) for _ in range(2))
    inputs = grad_out, k, v, mean, log_denominator
    states = (_arrays.contiguous(x) for x in (state, last, grad_last))
    _run("backward", True, grad_out.shape, inputs, w, u, *states, grad_state, dk, dv, dw, du)
    return dk, dv, dw, du, grad_state


def _run(name, keep, shape, inputs, w, u, *arrays):
    """Start a kernel, one thread for each channel of each sequence.

    The inputs (..., N, D) may lie anywhere, and come last token first to the kernel "backward".
    """
    *leading, N, D = shape
    leading, channels, like = tuple(leading), math.prod(leading) * D, inputs[0]
    if channels == 0:
        return
    macros = {"SCALAR": _arrays.c_type(like), "KEEP": int(keep)}
    rows = [_arrays.rows(x, leading, reverse=name == "backward") for x in inputs]
    rows += [_arrays.rows(x[..., None, :], leading) for x in (w, u)]
    grid = (math.ceil(channels / THREADS),)
    _kernels.run("wkv.cu", macros, name, grid, THREADS, *rows, *arrays, N, channels)
