"""Causal linear attention on a GPU: five kernels for one scan, and its gradients.

The kernels are in ``linear.cu``, ``pipelined.cu`` and ``tiled.cu``, their launches in
``_launches.py``; here are the checks, the choice of a kernel, and the backward pass, which is three
more scans or one walk.
"""

from typing import Any

from lesson_code import _arguments
from lesson_code.cupy import _arrays, _kernels
from lesson_code.cupy._launches import CHUNK, LAUNCHES, scan, split_gradient, walk_backwards

MAX_WIDTH = 256  # of features and of values
MAX_STATE = 128  # features that the state of "pipelined" or "tiled" may have
MIN_TILED = 32  # features and values: tiles are 64 wide, and half of them would be empty
TENSOR_CORES = ("tensor_core", "pipelined")


def causal_scan(
    q: Any,
    k: Any,
    v: Any,
    *,
    normalize: bool = False,
    initial_state: Any = None,
    return_state: bool = False,
    kernel: str | None = None,
    device: str = "cuda",
) -> Any:
    r"""Causal linear attention of features by a CUDA kernel.

    The features of q and k come ready made (this function applies no feature map):

    .. math:: o_t^\top = q_t^\top S_t, \quad S_t = S_{t-1} + k_t v_t^\top,
              \qquad\text{normalized:}\quad o_t^\top = \frac{q_t^\top S_t}{q_t^\top z_t},
              \quad z_t = z_{t-1} + k_t.

    Parameters
    ----------
    q, k : arrays, shape (..., N, C)
        Features of queries and keys; C is at most 256.
    v : array, shape (..., N, M)
        Values; M is at most 256.
    normalize : bool
        Divide by :math:`q_t^\top z_t`. Nothing is added to it; where it is exactly 0 the output is
        0, and so is its gradient.
    initial_state : LinearAttentionState, optional
        State before the first token, zero by default.
    return_state : bool
        Return the state after the last token as well: S (..., C, M) and z (..., C) in float32, with
        the leading dimensions of k, v and the initial state. z is there without ``normalize``, too.
    kernel : str, optional
        "recurrent" (a thread for each column of the state, token by token), "chunked" (chunks of 64
        tokens in shared memory, float32 arithmetic), "tensor_core" (chunks on the tensor cores,
        float16 and bfloat16 only, the latter from compute capability 8.0 on), "pipelined" (the
        same, with the next chunks on their way meanwhile) or "tiled" (float32 only, larger tiles
        and chunks of 32, with the next ones on their way). None takes the one that `choose_kernel`
        names.
    device : str
        "cuda", or "cpu", which emulates the kernels.

    Notes
    -----
    "tensor_core" and "pipelined" round what they multiply to the dtype of q: products of queries
    and keys, and states between chunks. In float16 both are scaled by powers of two, so that no
    state is too large; as one power serves all features, those that are a million times smaller
    than others are lost. "chunked" needs memory for a state of every 64th token.

    "pipelined" hands over to "tensor_core", and "tiled" to "chunked", where a state of more than
    128 features, or their tiles, would not fit a multiprocessor.

    The gradients are three more scans (the book's chapter on the kernels derives them) by the same
    kernel, but for ``normalize=True`` in float16, where a gradient over its normalizer could
    vanish: there "tensor_core" and "pipelined" hand over to "chunked"; and "tiled" hands over scans
    of more than 128 features, which are M + 2 with ``normalize=True``. They need the inputs, the
    outputs and one number a token. "pipelined" makes all three in one walk backwards, for up to 128
    features and values; it runs the states backwards, too, each from the next, and starts anew
    every 2,048 tokens from one that the forward walk has saved. So a large number, infinity or NaN
    in k or v can reach the gradients of q of up to 2,048 tokens before it.

    NaN reaches the outputs that depend on it and no other sequence; in all but "recurrent"
    it may reach earlier positions of its chunk, as 0 * NaN is NaN. Infinity may become NaN.

    References
    ----------
    Katharopoulos et al. (2020), equations 16 to 20 and section 3.3.1; Sun et al. (2023), equation
    7, for the chunks.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
    >>> v = np.array([[10, 20], [30, 40], [50, 60]], np.float32)
    >>> causal_scan(q, k, v, device="cpu")
    array([[ 10.,  20.],
           [ 30.,  40.],
           [140., 180.]], dtype=float32)
    """
    check(q, k, v, device)
    _arguments.check_flags(normalize=normalize, return_state=return_state)
    kernel = _check_kernel(kernel, q, v)
    leading = _check_state(initial_state, k, v, device)
    _arguments.check_leading(q=q.shape[:-2], initial_state=leading)
    if return_state and 0 in q.shape[:-2] and 0 not in leading:  # no query, and yet a state
        options: dict[str, Any] = {"normalize": normalize, "kernel": kernel, "device": device}
        options["initial_state"] = initial_state
        out = causal_scan(q, k, v, **options)
        return out, causal_scan(k, k, v, return_state=True, **options)[1]

    ones = int(normalize or return_state)
    if _arrays.library(q) == "torch":
        from lesson_code.cupy import _torch_linear

        initial = _pack(initial_state, leading, ones)
        out, last = _torch_linear.causal_scan(q, k, v, initial, normalize, return_state, kernel)
    else:
        with _kernels.place(q):
            out, last, _ = scan(
                kernel, q, k, v, _pack(initial_state, leading, ones), ones=(0, 0, ones),
                dtype=_arguments.dtype_name(q), keep=return_state, normalize=normalize,
            )  # fmt: skip
    return (out, _unpack(last, leading)) if return_state else out


def choose_kernel(
    q: Any, k: Any, v: Any, *, device: str = "cuda", capability: tuple[int, int] | None = None
) -> str:
    """The kernel that `causal_scan` takes where it is told none.

    Up to 16 tokens "recurrent". Tensor cores multiply float16 from compute capability 7.5 on
    (Turing), bfloat16 from 8.0 on (Ampere). There it is "pipelined", by
    `benchmarks/kernel_times.py` the faster one, for up to 128 features from 8.0 on, when copies to
    shared memory first went on by themselves; else "tensor_core". Without tensor cores, and for
    float32, which they would round to 10 bits, it is "chunked"; but by the same script "tiled" is
    the faster one for float32 of 33 to 128 features and more than 32 values, from 8.0 on.

    Parameters
    ----------
    q, k, v, device
        As `causal_scan` takes them.
    capability : (int, int), optional
        Compute capability of the GPU to choose for; that of the arrays' GPU by default, and (8, 0)
        on the CPU.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros((2, 1024, 64), np.float16)
    >>> choose_kernel(x, x, x, device="cpu", capability=(7, 5))
    'tensor_core'
    >>> choose_kernel(x, x, x, device="cpu", capability=(9, 0))
    'pipelined'
    >>> x = x.astype(np.float32)
    >>> choose_kernel(x, x, x, device="cpu")
    'tiled'
    """
    check(q, k, v, device)
    if capability is not None:
        is_pair = isinstance(capability, tuple) and len(capability) == 2
        if not (is_pair and all(isinstance(x, int) and x >= 0 for x in capability)):
            raise ValueError(f"capability must be two integers like (7, 5), got {capability!r}.")
    return _choose(q, v, capability)


def _choose(q, v, capability=None) -> str:
    if q.shape[-2] <= CHUNK // 4:
        return "recurrent"
    copies_ahead = (capability or _kernels.gpu(q).capability) >= (8, 0)
    if _tensor_cores_lack(q, capability):
        wide = MIN_TILED < q.shape[-1] <= MAX_STATE and v.shape[-1] > MIN_TILED
        is_tiled = copies_ahead and wide and _arguments.dtype_name(q) == "float32"
        return "tiled" if is_tiled else "chunked"
    return "pipelined" if copies_ahead and q.shape[-1] <= MAX_STATE else "tensor_core"


def _tensor_cores_lack(q, capability=None) -> str:
    """What the kernel "tensor_core" needs and does not get; empty where it can run."""
    dtype, capability = _arguments.dtype_name(q), capability or _kernels.gpu(q).capability
    if dtype == "float32":
        return "float16 or bfloat16"
    if capability < (7, 5):
        return "a GPU of compute capability 7.5"
    if dtype == "bfloat16" and capability < (8, 0):
        return f"float16 on a GPU of compute capability {'.'.join(map(str, capability))}"
    return ""


def check(q, k, v, device) -> None:
    """What all kernels of queries, keys and values ask of them."""
    _arrays.check_arrays(device, q=q, k=k, v=v)
    _arguments.check_axes(q=(q, "N D"), k=(k, "N D"), v=(v, "N M"))
    for name, array in {"q": q, "v": v}.items():
        if array.shape[-1] > MAX_WIDTH:
            raise ValueError(f"{name} must be at most {MAX_WIDTH} wide, got {array.shape[-1]}.")


def _check_kernel(kernel, q, v) -> str:
    if kernel is None:
        return _choose(q, v)
    if kernel not in tuple(LAUNCHES):  # a tuple compares, where a dict would ask for a hash
        listed = ", ".join(map(repr, LAUNCHES))
        raise ValueError(f"kernel must be None or one of {listed}, got {kernel!r}.")
    if kernel == "tiled" and _arguments.dtype_name(q) != "float32":
        raise ValueError(f"kernel='tiled' needs float32, got {_arguments.dtype_name(q)}.")
    if kernel in TENSOR_CORES and (lack := _tensor_cores_lack(q)):
        raise ValueError(f"kernel={kernel!r} needs {lack}, got {_arguments.dtype_name(q)}.")
    return kernel


def _check_state(state, k, v, device) -> tuple:
    """The leading dimensions of the states, after checks of the first."""
    shapes = {"k": k.shape[:-2], "v": v.shape[:-2]}
    if state is not None:
        if not (hasattr(state, "S") and hasattr(state, "z")):
            raise TypeError(
                f"initial_state must be a LinearAttentionState, got {type(state).__name__}."
            )
        sizes = {"C": k.shape[-1], "M": v.shape[-1]}
        _arrays.check_state(device, "S of initial_state", state.S, "k", k, sizes)
        _arrays.check_state(device, "z of initial_state", state.z, "k", k, {"C": sizes["C"]})
        shapes |= {"S": state.S.shape[:-2], "z": state.z.shape[:-1]}
    return _arguments.check_leading(**shapes)


def _pack(state, leading, ones: int):
    """The state as the kernels take it: S and, as one more column behind it, z, in float32."""
    if state is None:
        return None
    columns = [state.S, state.z[..., None]][: 1 + ones]
    return _arrays.join([_arrays.broadcast(x, (*leading, *x.shape[-2:])) for x in columns])


def _unpack(last, leading):
    """The state as the caller knows it, without the repetitions along axes that only q has."""
    missing = (0,) * (last.ndim - 2 - len(leading))
    last = last[*missing, *(slice(size) for size in leading)]  # all, or the first of many alike
    return _arrays.states(last).LinearAttentionState(last[..., :-1], last[..., -1])


# ---- The gradients, on arrays and packed states. -------------------------------------------------


def backward(grad, grad_last, q, k, v, initial, out, normalizers, saved, normalize, kernel):
    """Gradients of q, k, v and the initial state, which is None without one: three scans.

    Or one walk, by "pipelined", which may need states that its scan has `saved`.

    With g for the gradient of the outputs out_t = S_t^T q_t, and G_t = sum of q_s g_s^T, s >= t,

        dq_t = S_t g_t        dk_t = G_t v_t        dv_t = G_t^T k_t

    so dq is the scan of g, v and k, and, backwards in time, dk is that of v, g and q, dv that of k,
    q and g. The initial state of one is the gradient of the last state, and its last state is the
    gradient of the initial one.
    """
    dtype, M = _arguments.dtype_name(q), v.shape[-1]
    # What stands against z in the rows of S^T and of G^T, as a multiple of it, for each column of
    # ones behind v.
    past_z: tuple[int, ...] = ()
    future_z: tuple[int, ...] = () if grad_last is None else (1,)
    if normalize:
        if kernel in TENSOR_CORES and dtype == "float16":
            kernel = "chunked"  # as a gradient that is divided by its normalizer might vanish
        precision = dtype if kernel in TENSOR_CORES else "float32"
        grad = split_gradient(grad, out, normalizers, precision)
        past_z, future_z = (1, 1), (1, 0)  # the gradient of a normalizer is the sum of two numbers

    if kernel == "pipelined":
        split, numerators = (grad[..., M:], grad[..., :M]) if normalize else (None, grad)
        found = walk_backwards(
            q, k, v, numerators, split, initial, saved, grad_last,
            ones=int(normalize or grad_last is not None), dtype=dtype,
        )  # fmt: skip
        if found is not None:
            *gradients, first = found
            if first is not None and first.shape != initial.shape:  # nothing depends on z
                first = _arrays.join([first, initial[..., M:] * 0])
            return *gradients, first

    def transposed(packed, z_rows):
        """From (..., C, M + 1) to (..., M + rows, C)."""
        *heads, C, _ = packed.shape
        rows = _arrays.empty((*heads, M + len(z_rows), C), "float32", q)
        rows[..., :M, :] = packed[..., :M].swapaxes(-1, -2)
        for i, factor in enumerate(z_rows):
            rows[..., M + i, :] = factor * packed[..., M]
        return rows

    past = None if initial is None else transposed(initial, past_z)
    future = None if grad_last is None else grad_last[..., :M]
    future_T = None if grad_last is None else transposed(grad_last, future_z)

    ones, keep = (len(future_z), 0, 0), initial is not None
    dq, _, _ = scan(kernel, grad, v, k, past, ones=(0, len(past_z), 0), dtype=dtype)
    dk, first_T, _ = scan(
        kernel, v, grad, q, future_T, ones=ones, dtype=dtype, keep=keep, reverse=True
    )
    dv, _, _ = scan(kernel, k, q, grad[..., :M], future, dtype=dtype, reverse=True)
    if initial is None:
        return dq, dk, dv, None
    d_initial = _arrays.empty(initial.shape, "float32", q)
    d_initial[..., :M] = first_T[..., :M, :].swapaxes(-1, -2)
    if initial.shape[-1] > M:
        d_initial[..., M] = first_T[..., M:, :].sum(-2)
    return dq, dk, dv, d_initial
