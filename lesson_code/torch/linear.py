"""Linear attention in every form, and the state that they share."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch import chunkwise
from lesson_code.torch.callbacks import described
from lesson_code.torch.elementwise import divide
from lesson_code.torch.feature_maps import elu_plus_one
from lesson_code.torch.precision import accumulate, full_precision


class LinearAttentionState(NamedTuple):
    r"""What linear attention remembers: the memory S and the normalizer z.

    :math:`S_t = \sum_{j \le t} \phi(k_j) v_j^\top` and :math:`z_t = \sum_{j \le t} \phi(k_j)`. Both
    are kept in the accumulation dtype: float64 for float64 input, otherwise float32.

    Parameters
    ----------
    S : tensor, shape (..., C, M)
        Memory.
    z : tensor, shape (..., C)
        Normalizer.

    References
    ----------
    Katharopoulos et al. (2020), equations 16 to 20.

    Examples
    --------
    >>> state = LinearAttentionState.zeros(2, 2)
    >>> state = state.write(torch.tensor([1.0, 0.0]), torch.tensor([10.0, 20.0]))
    >>> state = state.write(torch.tensor([0.0, 1.0]), torch.tensor([30.0, 40.0]))
    >>> state.S
    tensor([[10., 20.],
            [30., 40.]])
    >>> state.read(torch.tensor([0.5, 0.5]))
    tensor([20., 30.])
    """

    S: Tensor
    z: Tensor

    @classmethod
    def zeros(
        cls,
        C: int,
        M: int,
        batch_shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearAttentionState":
        """The empty state, from which every sequence starts.

        Parameters
        ----------
        C : int
            Width of the features.
        M : int
            Width of the values.
        batch_shape : tuple of int
            Leading dimensions.
        dtype : torch.dtype
            A floating dtype: float32, or float64 for float64 input.
        device : torch.device, optional
            Torch's default device where it is None.

        Returns
        -------
        LinearAttentionState
            S of shape (..., C, M) and z of shape (..., C), all 0, where ... is `batch_shape`.

        Raises
        ------
        TypeError
            If C or M is no integer, `batch_shape` no tuple, or `dtype` not floating.
        ValueError
            If C or M is negative.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 3, batch_shape=(5,)).S.shape
        torch.Size([5, 2, 3])
        """
        C = _arguments.check_integer("C", C, minimum=0)
        M = _arguments.check_integer("M", M, minimum=0)
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"batch_shape must be a tuple of integers, got {batch_shape!r}.")
        S = torch.zeros((*batch_shape, C, M), dtype=dtype, device=device)
        z = torch.zeros((*batch_shape, C), dtype=dtype, device=device)
        _arguments.check_arrays(Tensor, dtype=z)
        return cls(S, z)

    def write(self, k: Tensor, v: Tensor) -> "LinearAttentionState":
        r"""Write one token: add :math:`\phi(k) v^\top` to S and :math:`\phi(k)` to z.

        Computes :eq:`eq-write`. This state stays as it is.

        Parameters
        ----------
        k : tensor, shape (..., C)
            Feature-mapped key.
        v : tensor, shape (..., M)
            Value.

        Returns
        -------
        LinearAttentionState
            The new state, in the accumulation dtype of `k`. Leading dimensions broadcast.

        Raises
        ------
        TypeError
            If `k` or `v` is no torch tensor of floats, their dtypes differ, or the state's is
            neither theirs nor their accumulation dtype.
        ValueError
            If the shapes or devices do not fit together.

        Notes
        -----
        NaN stays in S and z from then on.

        Examples
        --------
        >>> LinearAttentionState.zeros(2, 1).write(torch.tensor([1.0, 2.0]), torch.tensor([3.0])).S
        tensor([[3.],
                [6.]])
        """
        leading = self._check_write(k, v)
        k, v, S, z = accumulate(k, v, *self)
        S = S.expand(*leading, -1, -1) + k[..., :, None] * v[..., None, :]  # (..., C, M)
        z = z.expand(*leading, -1) + k  # (..., C)
        return LinearAttentionState(S, z)

    def write_(self, k: Tensor, v: Tensor) -> "LinearAttentionState":
        r"""Write one token into this state itself, which saves the memory of a new one.

        Computes :eq:`eq-write`. S and z are overwritten: whoever else holds them sees the change.

        Parameters
        ----------
        k : tensor, shape (..., C)
            Feature-mapped key.
        v : tensor, shape (..., M)
            Value.

        Returns
        -------
        LinearAttentionState
            This state.

        Raises
        ------
        TypeError
            As `write`, and if the state is not in the accumulation dtype of `k`.
        ValueError
            If the shapes or devices do not fit together; S and z must have the leading dimensions
            of `k` and `v` together.

        Examples
        --------
        >>> state = LinearAttentionState.zeros(2, 1)
        >>> _ = state.write_(torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
        >>> state.S
        tensor([[3.],
                [6.]])
        """
        leading = self._check_write(k, v)
        k, v = accumulate(k, v)
        for name, tensor, own in ("S", self.S, self.S.shape[:-2]), ("z", self.z, self.z.shape[:-1]):
            if tensor.dtype != k.dtype:
                raise TypeError(f"{name} must have dtype {k.dtype}, got {tensor.dtype}.")
            if own != leading:
                raise ValueError(
                    f"{name} must have the leading dimensions {tuple(leading)} of what is written, "
                    f"got {tuple(own)}."
                )
        self.S.addcmul_(k[..., :, None], v[..., None, :])
        self.z.add_(k)
        return self

    def read(self, q: Tensor, *, normalize: bool = True) -> Tensor:
        r"""Read with one query: :math:`\phi(q)^\top S`, over :math:`\phi(q)^\top z`.

        Computes :eq:`eq-normalized-read`, or :eq:`eq-read` with ``normalize=False``.

        Parameters
        ----------
        q : tensor, shape (..., C)
            Feature-mapped query.
        normalize : bool
            Divide by :math:`\phi(q)^\top z`; where that is exactly 0 the output is 0.

        Returns
        -------
        tensor, shape (..., M)
            Output in the dtype of `q`. Leading dimensions broadcast.

        Raises
        ------
        TypeError
            If `q` is no torch tensor of floats, or the state's dtype is neither that of `q` nor its
            accumulation dtype.
        ValueError
            If the shapes or devices do not fit together.

        Notes
        -----
        NaN in the query, or in what it reads, reaches the output.

        Examples
        --------
        >>> S = torch.tensor([[60.0, 80.0], [80.0, 100.0]])
        >>> state = LinearAttentionState(S, torch.tensor([2.0, 2.0]))
        >>> state.read(torch.tensor([1.0, 1.0]))
        tensor([35., 45.])
        >>> state.read(torch.tensor([1.0, 1.0]), normalize=False)
        tensor([140., 180.])
        """
        _arguments.check_arrays(Tensor, q=q)
        _arguments.check_flags(normalize=normalize)
        _arguments.check_rank("q", q, "C")
        _check_state("the state", self, "q", q, q.shape[-1], None)
        _arguments.check_leading(q=q.shape[:-1], S=self.S.shape[:-2], z=self.z.shape[:-1])
        dtype, (q, S, z) = q.dtype, accumulate(q, self.S, self.z)
        with full_precision(q):
            out = (q[..., None, :] @ S)[..., 0, :]  # (..., M)
            if normalize:
                out = divide(out, (q * z).sum(dim=-1, keepdim=True))
        return out.to(dtype)

    def _check_write(self, k, v):
        """The leading dimensions of all, after checks of a key and a value."""
        _arguments.check_arrays(Tensor, k=k, v=v)
        _arguments.check_rank("k", k, "C")
        _arguments.check_rank("v", v, "M")
        _check_state("the state", self, "k", k, k.shape[-1], v.shape[-1])
        return _arguments.check_leading(
            k=k.shape[:-1], v=v.shape[:-1], S=self.S.shape[:-2], z=self.z.shape[:-1]
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

    Over all positions it computes :eq:`eq-linear-attention`; with ``causal=True`` the sums end at
    the query's own position (:eq:`eq-causal-linear-attention`):

    .. math:: o_i^\top = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}
                            {\phi(q_i)^\top \sum_j \phi(k_j)}

    Every form computes the same outputs; they differ in what they store and in how many steps they
    take.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries. With ``causal=False`` their number may differ from that of the keys.
    k : tensor, shape (..., N, D)
        Keys.
    v : tensor, shape (..., N, M)
        Values, as many as keys.
    feature_map : callable
        The map phi, (..., D) -> (..., C), applied to q and to k. It may be an ``nn.Module`` with
        parameters to train, which is then given their dtype.
    causal : bool
        Let each query see the keys up to its own position only.
    normalize : bool
        Divide by :math:`\phi(q)^\top z`. Nothing is added to it; where it is exactly 0 the output
        is 0, and so is its gradient.
    form : str, optional
        With ``causal=False``: "quadratic", (φ(Q) φ(K)ᵀ) V, or "linear", φ(Q) (φ(K)ᵀ V)
        (:eq:`eq-bracket-trick`). With ``causal=True``: "masked" (:eq:`eq-masked-form`), "recurrent"
        (:eq:`eq-recurrence`), "cumsum" (:eq:`eq-cumsum-form`), "scan" (:eq:`eq-scan-operator`, an
        associative prefix scan in log2 N steps) or "chunkwise" (:eq:`eq-chunkwise`, masked inside a
        chunk, a state between chunks). None takes the fastest: "quadratic" or "linear", whichever
        multiplies less; "masked" in a single chunk, "chunkwise" in several.
    backend : str, optional
        "torch", which None takes as well, or "cupy": the CUDA kernels of
        :func:`lesson_code.cupy.causal_scan` (:ref:`their chapter <ch-cuda>`), for causal attention
        over CUDA tensors. They choose how to compute it by themselves, so `form` must be None.
    chunk_size : int
        Tokens in a chunk of "chunkwise". It need not divide N.
    initial_state : LinearAttentionState, optional
        State before the first token, zero by default; only with ``causal=True``. Its dtype is that
        of the input or the accumulation dtype.
    return_state : bool
        Return the state after the last token as well; only with ``causal=True``.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs in the dtype of the input, with the leading dimensions of q, k, v and the initial
        state, broadcast as in ``matmul``. Half precision is computed in float32, the feature map
        included, under ``torch.autocast`` too.
    LinearAttentionState
        With ``return_state=True``: S (..., C, M) and z (..., C), also with ``normalize=False``, in
        the accumulation dtype (float64 for float64, otherwise float32), with the leading dimensions
        of k, v and the initial state: queries are not remembered.

    Raises
    ------
    TypeError
        If q, k or v is no torch tensor of floats, their dtypes differ, `feature_map` is not
        callable, `chunk_size` is no integer, or `initial_state` is no LinearAttentionState of a
        fitting dtype.
    ValueError
        If the shapes or devices do not fit together, `feature_map` returns anything but a tensor of
        floats (..., C), `form` is unknown or does not go with `causal`, `chunk_size` is below 1, or
        a state is passed or asked for with ``causal=False``; if `backend` is unknown, or is "cupy"
        without ``causal=True``, with a `form`, or for tensors that are not on a GPU.
    ImportError
        If `backend` is "cupy" and CuPy is not installed.

    Notes
    -----
    Differentiable in q, k, v and `initial_state`, through both the outputs and the returned state.
    "chunkwise" has a backward pass of its own, which keeps the inputs and one number per position,
    and neither a state per position nor an N×N matrix; it can be differentiated once,
    in reverse mode. So can the default where it takes this form.
    The other forms are differentiated by autograd, any number of times.

    ``torch.compile`` of ``vmap(grad(...))`` needs another form: torch cannot trace that.

    The elementwise maps of this package run inside "chunkwise", a few chunks at a time; any other
    map is applied to q and k as a whole, and its features are kept for the backward pass.

    The output is 0 where the products phi(q)·phi(k) underflow, as for elu + 1 and entries around
    -50 in float32, and loses digits just above.

    NaN reaches the outputs that depend on it and no other sequence of the batch. With
    ``causal=True`` the forms "recurrent", "cumsum" and "scan" keep it from earlier positions; in
    "masked" and "chunkwise" it may reach the earlier positions of its sequence, as 0 * NaN is NaN.

    References
    ----------
    Katharopoulos et al. (2020), equations 4 to 6, 8 to 12 and 16 to 20, and section 3.3.1 for the
    gradients; Hillis and Steele (1986) for the scan; Sun et al. (2023), equation 7, for the chunks.

    Examples
    --------
    >>> from lesson_code.torch import relu
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> linear_attention(q, k, v, feature_map=relu, causal=True)
    tensor([[10., 20.],
            [30., 40.],
            [35., 45.]])
    >>> out, state = linear_attention(
    ...     q, k, v, feature_map=relu, causal=True, normalize=False, return_state=True
    ... )
    >>> out[-1]
    tensor([140., 180.])
    >>> state.S
    tensor([[ 60.,  80.],
            [ 80., 100.]])
    """
    _arguments.check_arrays(Tensor, q=q, k=k, v=v)
    _arguments.check_flags(causal=causal, normalize=normalize, return_state=return_state)
    _arguments.check_queries_keys_values(q, k, v)
    _arguments.check_form(form, _FORMS[causal], f" when {causal=}")
    chunk_size = _arguments.check_integer("chunk_size", chunk_size, minimum=1)
    if causal:
        _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
    elif initial_state is not None or return_state:
        name = "return_state" if initial_state is None else "initial_state"
        raise ValueError(f"{name} needs causal=True, got {causal=}.")
    if _on_kernels(backend, causal, form, q):
        return _by_kernels(q, k, v, feature_map, normalize, initial_state, return_state)
    if causal and form is None:
        form = "masked" if k.shape[-2] <= chunk_size else "chunkwise"

    dtype, given_v = q.dtype, v
    # "chunkwise" applies the elementwise maps itself, where q and k are in the cache.
    inside = chunkwise.name_of(feature_map) if form == "chunkwise" else None
    with full_precision(q):
        if inside is None:
            q, k, v = accumulate(q, k, v)
            q, k = _features(feature_map, q), _features(feature_map, k)
            width = "one width C for q and k"
            _arguments.check_size("feature_map", k.shape[-1], width, q.shape[-1])
        if causal:
            S, z = _broadcast_state(q, k, given_v, initial_state)
        if form == "chunkwise":
            inside = inside or "identity"
            out, S, z = chunkwise.chunkwise(q, k, v, S, z, inside, normalize, chunk_size)
        else:
            if causal:
                numerator, denominator, S, z = _CAUSAL[form](q, k, v, S, z)
            else:
                form = form or _fewest_operations(q, k, v)
                numerator, denominator = _GLOBAL[form](q, k, v)
            out = divide(numerator, denominator[..., None]) if normalize else numerator
    out = out.to(dtype)
    return (out, LinearAttentionState(S, z)) if return_state else out


def _on_kernels(backend, causal, form, q) -> bool:
    """Whether the CUDA kernels are asked for; an error where they cannot serve."""
    if backend not in (None, "torch", "cupy"):
        raise ValueError(f"backend must be None, 'torch' or 'cupy', got {backend!r}.")
    if backend == "cupy":
        if not causal:
            raise ValueError(f"backend='cupy' needs causal=True, got {causal=}.")
        if form is not None:
            raise ValueError(f"form must be None when backend='cupy', got {form!r}.")
        if q.device.type != "cuda":
            raise ValueError(f"backend='cupy' needs tensors on a GPU, got q on {q.device}.")
    return backend == "cupy"


def _by_kernels(q, k, v, feature_map, normalize, initial_state, return_state, device="cuda"):
    from lesson_code.cupy import causal_scan

    dtype = q.dtype
    with full_precision(q):
        q, k = (_features(feature_map, x).to(dtype) for x in accumulate(q, k))
    width = "one width C for q and k"
    _arguments.check_size("feature_map", k.shape[-1], width, q.shape[-1])
    return causal_scan(
        q,
        k,
        v,
        normalize=normalize,
        initial_state=initial_state,
        return_state=return_state,
        device=device,
    )


# The forms. Each takes feature-mapped q and k (..., N, C) and v (..., N, M), and returns numerators
# (..., N, M) and denominators (..., N). A causal form also takes S and z before the first token,
# and also returns S and z after the last one.


def _quadratic(q, k, v):
    A = q @ k.mT  # (..., N, N)
    return A @ v, A.sum(dim=-1)


def _linear(q, k, v):
    S = k.mT @ v  # (..., C, M)
    z = k.sum(dim=-2)  # (..., C)
    return q @ S, _dot(q, z)


def _masked(q, k, v, S, z):
    A = torch.tril(q @ k.mT)  # (..., N, N)
    numerator = A @ v + q @ S
    denominator = A.sum(dim=-1) + _dot(q, z)
    return numerator, denominator, S + k.mT @ v, z + k.sum(dim=-2)


def _recurrent(q, k, v, S, z):
    numerators, denominators = [], []
    # unbind, as the gradient of each slice would be as large as q, k or v
    for q_t, k_t, v_t in zip(*(x.unbind(dim=-2) for x in (q, k, v)), strict=True):
        S = S + k_t[..., :, None] * v_t[..., None, :]
        z = z + k_t
        numerators.append(q_t[..., None, :] @ S)  # (..., 1, M)
        denominators.append((q_t * z).sum(dim=-1, keepdim=True))
    if not numerators:
        return _masked(q, k, v, S, z)
    return torch.cat(numerators, dim=-2), torch.cat(denominators, dim=-1), S, z


def _cumsum(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, writes_S.cumsum(dim=-3), writes_z.cumsum(dim=-2))


def _scan(q, k, v, S, z):
    writes_S, writes_z = _writes(k, v, S, z)
    return _read_all(q, _prefix_sums(writes_S, dim=-3), _prefix_sums(writes_z, dim=-2))


_GLOBAL = {"quadratic": _quadratic, "linear": _linear}
_CAUSAL: dict = {
    "masked": _masked,
    "recurrent": _recurrent,
    "cumsum": _cumsum,
    "scan": _scan,
}
_FORMS = {False: tuple(_GLOBAL), True: (*_CAUSAL, "chunkwise")}


def _fewest_operations(q, k, v):
    """The form of the fewest multiplications when all positions see each other."""
    Nq, (Nk, C), M = q.shape[-2], k.shape[-2:], v.shape[-1]
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


def _features(feature_map, x):
    """feature_map(x), checked, in the dtype of x: a tensor (..., C)."""
    if not callable(feature_map):
        raise TypeError(f"feature_map must be callable, got {type(feature_map).__name__}.")
    parameters = feature_map.parameters() if isinstance(feature_map, torch.nn.Module) else ()
    own = next(iter(parameters), x)  # a map to train may have weights in half precision
    features = feature_map(x.to(own.dtype))
    if not (
        isinstance(features, Tensor)
        and features.is_floating_point()
        and features.ndim == x.ndim
        and features.shape[:-1] == x.shape[:-1]
    ):
        leading = ", ".join(str(size) for size in x.shape[:-1])
        raise ValueError(
            f"feature_map must return a torch tensor of floats of shape ({leading}, C) "
            f"for an input of shape {tuple(x.shape)}, got {described(features)}."
        )
    return features.to(x.dtype)


def _check_state(name, state, like_name, like, C, M):
    """Refuse all but S (..., C, M) and z (..., C) that fit a tensor; M may be None, for any."""
    if not isinstance(state, LinearAttentionState):
        raise TypeError(f"{name} must be a LinearAttentionState, got {type(state).__name__}.")
    _arguments.check_memory(Tensor, name, *state, C, M, _arguments.state_dtypes(like))
    _arguments.check_device(f"S of {name}", state.S, like_name, like)


def _broadcast_state(q, k, v, state):
    """S and z before the first token, with the leading dimensions that the state will have."""
    C, M = k.shape[-1], v.shape[-1]
    accumulation = getattr(torch, _arguments.accumulation_dtype(v))
    if state is None:
        state = LinearAttentionState.zeros(C, M, dtype=accumulation, device=v.device)
    _check_state("initial_state", state, "v", v, C, M)
    S, z = state.S.to(accumulation), state.z.to(accumulation)
    leading = _arguments.check_leading(
        k=k.shape[:-2], v=v.shape[:-2], S=S.shape[:-2], z=z.shape[:-1]
    )
    _arguments.check_leading(q=q.shape[:-2], initial_state=leading)
    return S.expand(*leading, C, M), z.expand(*leading, C)
