"""Linear attention in every form."""

from collections.abc import Callable

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch import backends
from lesson_code.torch.callbacks import described, is_float_tensor
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines import linear as engine
from lesson_code.torch.feature_maps import elu_plus_one
from lesson_code.torch.memory import LinearAttentionState
from lesson_code.torch.operator import operator
from lesson_code.torch.precision import accumulate


@operator(
    "Nq D, N D, N M -> Nq M",
    state=LinearAttentionState._make(("C M", "C")),
    reads="q",
    accumulate=False,
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Callable[[Tensor], Tensor] = elu_plus_one,
    causal: bool = False,
    normalize: bool = True,
    form: str | None = None,
    backend: str | None = None,
    chunk_size: int = 64,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    r"""Linear attention: the similarity of q and k is phi(q)·phi(k).

    Computes :eq:`eq-linear-attention`, or with ``causal=True`` :eq:`eq-causal-linear-attention`, as
    :func:`lesson_code.numpy.linear_attention` does. `feature_map` may be an ``nn.Module`` with
    parameters to train, which is then given their dtype. Where the normalizer is 0, so is the
    gradient.

    "chunkwise" has a backward pass of its own (Katharopoulos et al., 2020, section 3.3.1), which
    keeps the inputs and one number per position, and neither a state per position nor an N×N
    matrix. It can be differentiated once, in reverse mode; so can the default where it takes this
    form. The other forms are differentiated by autograd, any number of times. ``torch.compile`` of
    ``vmap(grad(...))`` needs one of them: torch cannot trace that of "chunkwise".

    The elementwise maps of this package run inside "chunkwise", a few chunks at a time; any other
    map is applied to q and k as a whole, and its features are kept for the backward pass.

    Parameters
    ----------
    backend : str, optional
        "torch", or "cupy": the CUDA kernels of :func:`lesson_code.cupy.causal_scan` (:ref:`their
        chapter <ch-cuda>`), for causal attention in float32 or half precision. They choose how to
        compute it by themselves, so `form` must be None. On CPU tensors the same kernels are
        emulated, exactly and thousands of times slower. None takes the faster of the two where
        :func:`compare_backends` has timed both, else torch.

    Raises
    ------
    ImportError, RuntimeError
        With ``backend="cupy"``, if CuPy is not installed, or on a CPU no C++ compiler.

    Examples
    --------
    >>> from lesson_code.torch import relu
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> out, state = linear_attention(q, k, v, feature_map=relu, causal=True, return_state=True)
    >>> out
    tensor([[10., 20.],
            [30., 40.],
            [35., 45.]])
    >>> state.S
    tensor([[ 60.,  80.],
            [ 80., 100.]])
    """
    check_causal(q, k, causal, form, initial_state, return_state)
    if on_kernels(backend, causal, form):
        return by_kernels(q, k, v, feature_map, normalize, initial_state, return_state)
    form = form or _fastest_form(q, k, v, causal, chunk_size)
    # "chunkwise" applies the elementwise maps itself, where q and k are in the cache.
    inside = engine.name_of(feature_map) if form == "chunkwise" else None
    if inside is None:
        q, k, v = accumulate(q, k, v)
        q, k = features(feature_map, q), features(feature_map, k)
        _arguments.check_size("feature_map", k.shape[-1], "one width C for q and k", q.shape[-1])
    if not causal:
        (numerator, denominator), state = GLOBAL[form](q, k, v), None
    else:
        S, z = first_state(k, v, initial_state)
        if form == "chunkwise":
            options = inside or "identity", normalize, chunk_size
            out, S, z = engine.chunkwise(q, k, v, S, z, *options)
            return out, LinearAttentionState(S, z)
        numerator, denominator, S, z = CAUSAL[form](q, k, v, S, z)
        state = LinearAttentionState(S, z)
    return (divide(numerator, denominator[..., None]) if normalize else numerator), state


def on_kernels(backend, causal, form) -> bool:
    """Whether the CUDA kernels are asked for; an error where they cannot serve."""
    chosen = backends.on_kernels(backend, form)
    if chosen and not causal:
        raise ValueError(f"backend='cupy' needs causal=True, got {causal=}.")
    return chosen


def by_kernels(q, k, v, feature_map, normalize, initial_state, return_state):
    from lesson_code.cupy import causal_scan

    dtype, (q, k) = q.dtype, accumulate(q, k)
    q, k = (features(feature_map, x).to(dtype) for x in (q, k))
    _arguments.check_size("feature_map", k.shape[-1], "one width C for q and k", q.shape[-1])
    return causal_scan(
        q,
        k,
        v,
        normalize=normalize,
        initial_state=initial_state,
        return_state=return_state,
        device=q.device.type,
    )


# The forms. Each takes feature-mapped q and k (..., N, C) and v (..., N, M), and returns numerators
# (..., N, M) and denominators (..., N). A causal form also takes S and z before the first token,
# and also returns S and z after the last one.


def quadratic(q, k, v):
    A = q @ k.mT  # (..., N, N)
    return A @ v, A.sum(dim=-1)


def linear(q, k, v):
    S = k.mT @ v  # (..., C, M)
    z = k.sum(dim=-2)  # (..., C)
    return q @ S, _dot(q, z)


def masked(q, k, v, S, z):
    A = torch.tril(q @ k.mT)  # (..., N, N)
    numerator = A @ v + q @ S
    denominator = A.sum(dim=-1) + _dot(q, z)
    return numerator, denominator, S + k.mT @ v, z + k.sum(dim=-2)


def recurrent(q, k, v, S, z):
    numerators, denominators = [], []
    # unbind, as the gradient of each slice would be as large as q, k or v
    for q_t, k_t, v_t in zip(*(x.unbind(dim=-2) for x in (q, k, v)), strict=True):
        S = S + k_t[..., :, None] * v_t[..., None, :]
        z = z + k_t
        numerators.append(q_t[..., None, :] @ S)  # (..., 1, M)
        denominators.append((q_t * z).sum(dim=-1, keepdim=True))
    if not numerators:
        return masked(q, k, v, S, z)
    return torch.cat(numerators, dim=-2), torch.cat(denominators, dim=-1), S, z


def cumsum(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, writes_S.cumsum(dim=-3), writes_z.cumsum(dim=-2))


def scan(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, _prefix_sums(writes_S, dim=-3), _prefix_sums(writes_z, dim=-2))


GLOBAL = {"quadratic": quadratic, "linear": linear}
CAUSAL: dict = {"masked": masked, "recurrent": recurrent, "cumsum": cumsum, "scan": scan}
FORMS = {False: tuple(GLOBAL), True: (*CAUSAL, "chunkwise")}


def _fastest_form(q, k, v, causal, chunk_size):
    """Forms of the fewest multiplications; in a single chunk, masked is what chunkwise does."""
    Nq, (Nk, C), M = q.shape[-2], k.shape[-2:], v.shape[-1]
    if causal:
        return "masked" if Nk <= chunk_size else "chunkwise"
    return "quadratic" if Nq * Nk * (C + M) <= (Nq + Nk) * C * M else "linear"


def _dot(q, z):
    """q·z at every position: (..., N, C) and (..., C) -> (..., N)."""
    return (q @ z[..., None])[..., 0]


def _writes(k, v, S, z):
    """The state before the first token, then what each token adds to it."""
    outer = k[..., :, None] * v[..., None, :]  # (..., N, C, M)
    outer = outer.expand(*S.shape[:-2], *outer.shape[-3:])
    k = k.expand(*z.shape[:-1], *k.shape[-2:])
    return torch.cat([S[..., None, :, :], outer], dim=-3), torch.cat([z[..., None, :], k], dim=-2)


def _read_all(q, S, z):
    """Read S_1 ... S_N, each with its own query, out of S_0 ... S_N."""
    numerator = (q[..., None, :] @ S[..., 1:, :, :])[..., 0, :]
    denominator = (q * z[..., 1:, :]).sum(dim=-1)
    return numerator, denominator, S[..., -1, :, :].clone(), z[..., -1, :].clone()


def _prefix_sums(x, dim):
    """x_0, x_0 + x_1, ... in log2 N steps, each of which doubles how many terms a sum holds."""
    x = x.movedim(dim, 0)
    distance = 1
    while distance < len(x):
        x = torch.cat([x[:distance], x[:-distance] + x[distance:]])
        distance *= 2
    return x.movedim(0, dim)


def features(feature_map, x):
    """feature_map(x), checked, in the dtype of x: a tensor (..., C)."""
    if not callable(feature_map):
        raise TypeError(f"feature_map must be callable, got {type(feature_map).__name__}.")
    parameters = feature_map.parameters() if isinstance(feature_map, torch.nn.Module) else ()
    own = next(iter(parameters), x)  # a map to train may have weights in half precision
    mapped = feature_map(x.to(own.dtype))
    if not (is_float_tensor(mapped) and mapped.ndim and mapped.shape[:-1] == x.shape[:-1]):
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            f"feature_map must return a torch tensor of floats of shape ({leading}, C) "
            f"for an input of shape {tuple(x.shape)}, got {described(mapped)}."
        )
    return mapped.to(x.dtype)


def first_state(k, v, given):
    """S and z before the first token, as wide as the features k."""
    if given is not None:
        _arguments.check_size("S of initial_state", given.S.shape[-2], "the width C", k.shape[-1])
        return given
    leading = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    dtype = getattr(torch, _arguments.accumulation_dtype(v))
    S = v.new_zeros((*leading, k.shape[-1], v.shape[-1]), dtype=dtype)
    return S, S.new_zeros(S.shape[:-1])


def check_causal(q, k, causal, form, initial_state, return_state):
    """Refuse what does not go with `causal`: a form, a number of queries, a state."""
    _arguments.check_form(form, FORMS[causal], f" when {causal=}")
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    elif initial_state is not None or return_state:
        name = "return_state" if initial_state is None else "initial_state"
        raise ValueError(f"{name} needs causal=True, got {causal=}.")
