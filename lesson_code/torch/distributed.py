r"""Linear attention over a sequence that is split over the ranks of a process group.

Each rank holds a part of the sequence, the first rank the first part. What an earlier part has to
say to a later one is its state, whatever the lengths of both. With the decay :math:`a_r` that part
r applies to what it finds (1 where there is none) and the state :math:`T_r` that it writes,

.. math::

    A_r = a_r \odot A_{r-1} + T_r \qquad B_r = A_{r-1} \qquad
    o_t = \mathrm{inside}_t + b_t \odot q_t \cdot B_r

where inside is attention within the part, and :math:`b_t` the decay since the part began. So a call
takes one exchange: every rank sends its T (and a), and folds all of them into its own B and into
the last state. While they travel, it computes what is inside. Backward, every rank sends the
gradient of its B (and of the last state), and folds them, in reverse, into that of its T:

.. math::

    dA_{r-1} = dB_r + a_r \odot dA_r \qquad dT_r = dA_r \qquad da_r = \sum_m dA_r \odot B_r

A normalizer z is one more column of the state, and a 1 at the end of each value writes it. A decay
is sent as one more column, too.

Two collectives, all-gathers both, make an exchange: a header of fixed size, in which the ranks
see that they agree, and the states, which are of one size then. A rank that does not fit is thus
an error on all ranks rather than a wrong sum, or a wait without end.
:func:`lesson_code.costs.state_exchange_bytes` counts what is sent.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lesson_code import _arguments
from lesson_code._custom_ops import once_differentiable
from lesson_code.torch import gated, linear
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines import chunks
from lesson_code.torch.engines import linear as engine
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.feature_maps import elu_plus_one, identity
from lesson_code.torch.linear import LinearAttentionState
from lesson_code.torch.operator import held
from lesson_code.torch.precision import accumulate, full_precision

__all__ = ["gated_linear_attention", "linear_attention"]


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
    group: "dist.ProcessGroup | None" = None,
) -> Tensor | tuple[Tensor, LinearAttentionState]:
    r"""Linear attention over a sequence that is split over ranks.

    Every rank of the group calls this with its part of the sequence, and is given the outputs of
    its part: together they are those of :func:`lesson_code.torch.linear_attention` for the whole
    sequence, the parts in the order of their ranks. Computes :eq:`eq-linear-attention`, or
    :eq:`eq-causal-linear-attention` with ``causal=True``.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries of this rank's part. N is this rank's own, and may be 0.
    k : tensor, shape (..., N, D)
        Keys of this rank's part.
    v : tensor, shape (..., N, M)
        Values of this rank's part.
    feature_map : callable
        The map phi, (..., D) -> (..., C), the same on every rank: of it only C is compared.
    causal : bool
        Let each query see the keys up to its own position only, those of all earlier ranks among
        them. Otherwise it sees the keys of all ranks.
    normalize : bool
        Divide by :math:`\phi(q)^\top z`; where that is exactly 0 the output is 0.
    form : str, optional
        With ``causal=True`` the form inside this rank's part, "masked", "recurrent", "cumsum",
        "scan" or "chunkwise"; None takes "masked" for a single chunk and "chunkwise" for several.
        Otherwise "linear": no rank has the keys that "quadratic" needs.
    backend : str, optional
        "torch", which None takes as well, or "cupy": the CUDA kernels of
        :func:`lesson_code.cupy.causal_scan`. They begin from the state before this rank's part, so
        they wait for it.
    chunk_size : int
        Tokens in a chunk of "chunkwise".
    initial_state : LinearAttentionState, optional
        State before the first token of the first rank, zero by default; only with ``causal=True``.
        The other ranks ignore theirs.
    return_state : bool
        Return the state after the last token of the last rank as well, on every rank; only with
        ``causal=True``.
    group : torch.distributed.ProcessGroup, optional
        The ranks, in the order of their parts; by default all ranks.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs of this rank's part, in the dtype of the input. Half precision is computed, and
        sent, in float32.
    LinearAttentionState
        With ``return_state=True``: S (..., C, M) and z (..., C) after the whole sequence, the same
        on every rank, in the accumulation dtype.

    Raises
    ------
    TypeError, ValueError
        On the rank whose arguments :func:`lesson_code.torch.linear_attention` would refuse; on
        every rank if the ranks differ in the dtype, in C, M, `causal`, `normalize`, `return_state`
        or the leading dimensions, if gradients are off (``torch.no_grad``) on one rank while
        another needs them, or if there are more than 8 leading dimensions.
    RuntimeError
        If there is no process group; on the other ranks, if one refuses its arguments; on every
        rank, if they make different calls, or run backward in different orders; within the group's
        timeout, if a rank dies or makes no call; under ``torch.func``.

    Notes
    -----
    A group of one rank calls the plain function.

    There is one exchange per call, and one in its backward pass; each is an all-gather of a header
    and one of states, C (M + 1) numbers for each sequence of the batch: S and z. With
    ``return_state=True`` the backward pass sends twice as many. The states travel while the rank
    computes what is inside its part, forward and backward.

    Gradients are those of the sum of the losses of all ranks, for inputs, the first rank's
    `initial_state` and parameters of `feature_map` alike; the latter are each rank's share, to be
    summed over the ranks as in data-parallel training. If any input of any rank needs gradients,
    the results of every rank do, and every rank must run backward through them, as many times and
    for calls in the same order: a rank without a loss of its own can take ``0 * out.sum()``. With
    ``torch.autograd.grad``, name k or v on every rank or on none. The exchange can be
    differentiated once, in reverse mode.

    On a GPU each exchange makes the host wait for its header. With NCCL a rank that died shows when
    the watchdog ends the others, after the group's timeout.

    NaN reaches the outputs that depend on it. `form`, `chunk_size` and `backend` may differ from
    rank to rank.

    References
    ----------
    Katharopoulos et al. (2020), equations 8 to 12; Sun et al. (2025), LASP-2, for the
    all-gather of states.

    Examples
    --------
    One process is a group of one rank; ``torchrun --nproc-per-node 4 program.py`` starts four.

    >>> import torch.distributed as dist
    >>> from lesson_code.torch import relu
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> linear_attention(q, k, v, feature_map=relu, causal=True)
    tensor([[10., 20.],
            [30., 40.],
            [35., 45.]])
    >>> dist.destroy_process_group()
    """
    if _ranks("linear_attention", group) == 1:
        return linear.linear_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            causal=causal,
            normalize=normalize,
            form=form,
            backend=backend,
            chunk_size=chunk_size,
            initial_state=initial_state,
            return_state=return_state,
        )
    exchange = _Exchange("linear_attention", group, q)
    initial_state = initial_state if exchange.rank == 0 else None
    with exchange.telling_of_errors():
        flags = {"causal": causal, "normalize": normalize, "return_state": return_state}
        options = {"chunk_size": chunk_size, "initial_state": initial_state}
        arguments = held(linear.linear_attention, q, k, v, **flags, **options)
        forms = linear.FORMS[True] if causal else ("linear",)
        _arguments.check_form(form, forms, f" across ranks when {causal=}")
        chunk_size = arguments["chunk_size"]
        if causal:
            _arguments.check_size("q", q.shape[-2], "the length of k when causal=True", k.shape[-2])
        elif initial_state is not None or return_state:
            name = "return_state" if initial_state is None else "initial_state"
            raise ValueError(f"{name} needs causal=True, got {causal=}.")
        on_kernels = linear._on_kernels(backend, causal, form)

        dtype, given_v = q.dtype, v
        with full_precision(q):
            q, k, v = accumulate(q, k, v)
            q, k = (linear._features(feature_map, x) for x in (q, k))
            if on_kernels:  # which read features in half precision
                q, k = q.to(dtype), k.to(dtype)
            width = "one width C for q and k"
            _arguments.check_size("feature_map", k.shape[-1], width, q.shape[-1])
            S, z = linear._first_state(k, v, arguments["initial_state"])
            S = torch.cat([S, z[..., None]], dim=-1)  # (..., C, M + 1)
        exchange.announce(
            (q, k, v, S),
            dtype=dtype,
            C=k.shape[-1],
            M=given_v.shape[-1],
            causal=causal,
            normalize=normalize,
            return_state=return_state,
            queries=q.shape[:-2],
            keys=torch.broadcast_shapes(k.shape[:-2], v.shape[:-2]),
            state=S.shape[:-2],
        )

    with full_precision(q):
        values = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)  # (..., N, M + 1)
        sent = exchange.send(S + k.to(S.dtype).mT @ values)
        if on_kernels:
            before, last = exchange.receive(sent)
            out = linear._by_kernels(q, k, given_v, identity, normalize, _state(S + before), False)
        else:
            inside = _inside(form, chunk_size, q, k, values, S) if causal else 0
            before, last = exchange.receive(sent)
            out = inside + q @ (before if causal else last)
            out = divide(out[..., :-1], out[..., -1:]) if normalize else out[..., :-1]
    out = out.to(dtype)
    return (out, _state(last)) if return_state else out


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    form: str | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    group: "dist.ProcessGroup | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Gated linear attention over a sequence that is split over ranks.

    Every rank of the group calls this with its part of the sequence, and is given the outputs of
    its part: together they are those of :func:`lesson_code.torch.gated_linear_attention` for the
    whole sequence, the parts in the order of their ranks. Computes :eq:`eq-gla`.

    Parameters
    ----------
    q : tensor, shape (..., N, D)
        Queries of this rank's part. N is this rank's own, and may be 0.
    k : tensor, shape (..., N, D)
        Keys of this rank's part.
    v : tensor, shape (..., N, M)
        Values of this rank's part.
    log_decay : tensor, shape (..., N, D)
        Logarithms of the gates of this rank's part, in [-inf, 0].
    form : str, optional
        The form inside this rank's part: "recurrent", "parallel" or "chunkwise". None takes
        "recurrent" for a single token, otherwise "chunkwise".
    chunk_size : int
        Tokens in a chunk of "chunkwise".
    initial_state : tensor, shape (..., D, M), optional
        Memory before the first token of the first rank, zero by default. The other ranks ignore
        theirs.
    return_state : bool
        Return the memory after the last token of the last rank as well, on every rank.
    group : torch.distributed.ProcessGroup, optional
        The ranks, in the order of their parts; by default all ranks.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs of this rank's part, in the dtype of the input. Half precision is computed, and
        sent, in float32.
    tensor, shape (..., D, M)
        With ``return_state=True``: the memory after the whole sequence, the same on every rank, in
        the accumulation dtype.

    Raises
    ------
    TypeError, ValueError
        On the rank whose arguments :func:`lesson_code.torch.gated_linear_attention` would refuse;
        on every rank if the ranks differ in the dtype, in D, M, `return_state` or the leading
        dimensions, if gradients are off (``torch.no_grad``) on one rank while another needs them,
        or if there are more than 8 leading dimensions.
    RuntimeError
        If there is no process group; on the other ranks, if one refuses its arguments; on every
        rank, if they make different calls, or run backward in different orders; within the group's
        timeout, if a rank dies or makes no call; under ``torch.func``.

    Notes
    -----
    A group of one rank calls the plain function.

    The exchange sends D (M + 1) numbers for each sequence of the batch: the memory that the part
    writes, and the product of its gates. The backward pass sends D M, twice as many with
    ``return_state=True``. All else is as in :func:`linear_attention`: what is sent when, gradients,
    NaN.

    References
    ----------
    Yang et al. (2024), equations 3 and 4 and section 4; Sun et al. (2025), LASP-2, for the
    all-gather of states.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> v = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    >>> gates = torch.tensor([[1.0, 1.0], [1.0, 0.5], [1.0, 0.0]])
    >>> gated_linear_attention(q, k, v, gates.log())
    tensor([[ 10.,  20.],
            [ 30.,  40.],
            [110., 140.]])
    >>> dist.destroy_process_group()
    """
    if _ranks("gated_linear_attention", group) == 1:
        return gated.gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            form=form,
            chunk_size=chunk_size,
            initial_state=initial_state,
            return_state=return_state,
        )
    exchange = _Exchange("gated_linear_attention", group, q)
    initial_state = initial_state if exchange.rank == 0 else None
    with exchange.telling_of_errors():
        dtype = q.dtype
        arguments = held(
            gated.gated_linear_attention,
            q,
            k,
            v,
            log_decay,
            form=form,
            chunk_size=chunk_size,
            initial_state=initial_state,
            return_state=return_state,
        )
        q, k, v, g = (arguments[name] for name in ("q", "k", "v", "log_decay"))
        S, chunk_size = arguments["initial_state"], arguments["chunk_size"]
        exchange.announce(
            (q, k, v, g, S),
            dtype=dtype,
            C=k.shape[-1],
            M=v.shape[-1],
            return_state=return_state,
            queries=q.shape[:-2],
            keys=torch.broadcast_shapes(k.shape[:-2], v.shape[:-2], g.shape[:-2]),
            state=S.shape[:-2],
        )

    with full_precision(q):
        decay = g.sum(dim=-2)[..., None].exp()  # (..., D, 1), of the whole part
        writes = (k * chunks.sums_after(g).exp()).mT @ v  # (..., D, M)
        sent = exchange.send(decay * S + writes, decay)
        inside, _ = additive(form, q, k, v, g, S, chunk_size=chunk_size)
        before, last = exchange.receive(sent)
        out = inside + (q * chunks.sums_through(g).exp()) @ before
    out = out.to(dtype)
    return (out, last) if return_state else out


def _inside(form, chunk_size, q, k, values, S):
    """What the queries read of their own part of the sequence, and of what it begins with."""
    if form is None:
        form = "masked" if k.shape[-2] <= chunk_size else "chunkwise"
    z = S.new_zeros(S.shape[:-1])  # a column of S is the normalizer
    if form == "chunkwise":
        return engine.chunkwise(q, k, values, S, z, "identity", False, chunk_size)[0]
    return linear.CAUSAL[form](q, k, values, S, z)[0]


def _state(S):
    """S and z, as copies, of a state whose last column is z."""
    return LinearAttentionState(S[..., :-1].clone(), S[..., -1].clone())


def _ranks(function, group):
    """How many ranks the group has; an error where there is none, or this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{function} across ranks needs a process group: call "
            "torch.distributed.init_process_group first, in a program that torchrun has started."
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must have this process among its ranks, got one without it.")
    if not isinstance(group, dist.ProcessGroup | None):
        raise TypeError(f"group must be a ProcessGroup or None, got {type(group).__name__}.")
    return dist.get_world_size(group)


# What the ranks tell each other before they exchange states.

_FUNCTIONS = ("linear_attention", "gated_linear_attention")
_OFF, _UNUSED, _NEEDED = range(3)  # gradients: not recorded, not needed, needed
_AXES = 8  # leading dimensions that a header has room for


class _Header(NamedTuple):
    """What must agree. Each field is an integer, or a shape of up to 8 axes."""

    refused: int = 0  # this rank's arguments
    function: int = 0
    backward: int = 0
    call: int = 0
    gradients: int = _OFF
    dtype: int = 0
    C: int = 0
    M: int = 0
    causal: int = 1
    normalize: int = 0
    return_state: int = 0
    queries: tuple[int, ...] = ()  # leading dimensions
    keys: tuple[int, ...] = ()
    state: tuple[int, ...] = ()

    def encode(self) -> list[int]:
        numbers = [int(x) for x in self[:-3]]
        for shape in self[-3:]:
            numbers += [*shape, *[-1] * (_AXES - len(shape))]
        return numbers

    @classmethod
    def decode(cls, numbers: list[int]) -> "_Header":
        plain = len(cls._fields) - 3
        ends = range(plain, plain + 3 * _AXES, _AXES)
        shapes = (tuple(x for x in numbers[i : i + _AXES] if x >= 0) for i in ends)
        fields: list[Any] = [*numbers[:plain], *shapes]
        return cls(*fields)

    @property
    def step(self) -> str:
        function = _FUNCTIONS[self.function]
        if self.backward:
            return f"the backward pass of {function}, call {self.call},"
        return f"a call of {function}"

    def show(self, field: str):
        value = getattr(self, field)
        if field == "dtype":
            return _arguments.FLOATS[value]
        return bool(value) if field in ("causal", "normalize", "return_state") else value


# The arguments that are compared, and what an error calls them.
_COMPARED = {
    "dtype": "the dtype",
    "causal": "causal",
    "normalize": "normalize",
    "return_state": "return_state",
    "C": "the width of the keys, after the feature map,",
    "M": "the width M of the values",
    "queries": "the leading dimensions of q",
    "keys": "the leading dimensions of k and v",
}


class _Exchange:
    """One call, which all ranks make: what they tell each other, forward and backward.

    `announce` sends this rank's header. `send` compares those of all ranks and sends the state that
    this part writes; `receive` waits for the others'. In the backward pass `receive` sends, and
    `send` waits: whatever is computed between the two runs while the states travel, both times.
    """

    calls = 0  # of this process; all ranks of a call agree on the largest of their numbers

    def __init__(self, function, group, q):
        self.name = function
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if isinstance(q, Tensor):
            self.device = q.device
        else:  # an error, of which the other ranks are told
            self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self.header = _Header(function=_FUNCTIONS.index(function))

    @contextlib.contextmanager
    def telling_of_errors(self):
        """A context in which an error here becomes one on the other ranks, who would else wait."""
        try:
            yield
        except Exception:
            with contextlib.suppress(Exception):  # the error at hand says more
                self._start(self._numbers(self.header._replace(refused=1)))()
            raise

    def announce(self, inputs, dtype, **fields):
        """Send this rank's header: the inputs that may need gradients, and what must agree."""
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(f"{self.name} across ranks does not run under torch.func.")
        for name, field in {"q": "queries", "k": "keys", "initial_state": "state"}.items():
            if len(fields[field]) > _AXES:
                raise ValueError(
                    f"{name} must have at most {_AXES} leading dimensions across ranks, "
                    f"got {len(fields[field])}."
                )
        gradients = _OFF
        if torch.is_grad_enabled():
            gradients = _NEEDED if any(x.requires_grad for x in inputs) else _UNUSED
        fields |= {"dtype": _arguments.FLOATS.index(str(dtype).removeprefix("torch."))}
        fields |= {"call": _Exchange.calls, "gradients": gradients}
        self.header = self.header._replace(**fields)
        self.headers = self._start(self._numbers(self.header))

    def send(self, state: Tensor, decay: Tensor | None = None) -> Tensor:
        """Send the state (..., C, M) that this part leaves, and its decay (..., C, 1).

        The result stands for what is on its way, in the graph of gradients.
        """
        headers = self._agree(self.headers)
        call = max(header.call for header in headers)
        _Exchange.calls = call + 1
        self.header = self.header._replace(call=call)
        self.has_decay = decay is not None

        shape = headers[0].state  # the first rank's initial state may have more leading dimensions
        columns = [x.expand(*shape, -1, -1) for x in (state, decay) if x is not None]
        needed = any(header.gradients == _NEEDED for header in headers)
        anchor = state.new_zeros((), requires_grad=needed and torch.is_grad_enabled())
        return _Send.apply(self, torch.cat(columns, dim=-1), anchor)

    def receive(self, sent: Tensor) -> tuple[Any, Any]:
        """The state before this part where causal, and the one after the last where it is used.

        None stands for the one that is not.
        """
        return _Receive.apply(self, sent)

    def _fold(self, gathered):
        """The state before this part, and the one after the last part."""
        writes, _ = self._split(gathered[0])
        state = before = torch.zeros_like(writes)
        for rank in range(self.ranks if self._wants_last else self.rank + 1):
            writes, decay = self._split(gathered[rank])
            if rank == self.rank:
                before = state
            # The first part begins with nothing, and a product with 0 may be NaN.
            state = self._decayed(state, decay) + writes if rank else writes.clone()
        return before, state

    def _fold_back(self, gathered, decays, before):
        """The gradient of what this rank sent, from those of what all ranks received."""
        states = gathered.unbind(1)  # (ranks, ..., C, M), one or two
        grad = states[-1].sum(0) if self._wants_last else torch.zeros_like(states[0][0])
        if self.header.causal:
            for rank in reversed(range(self.rank + 1, self.ranks)):
                decay = None if decays is None else decays[rank]
                grad = states[0][rank] + self._decayed(grad, decay)
        if decays is None:
            return grad
        return torch.cat([grad, (grad * before).sum(dim=-1, keepdim=True)], dim=-1)

    def _split(self, x):
        return (x[..., :-1], x[..., -1:]) if self.has_decay else (x, None)

    @staticmethod
    def _decayed(state, decay):
        return state if decay is None else decay * state

    @property
    def _wants_last(self):
        return self.header.return_state or not self.header.causal

    def _agree(self, gather) -> list[_Header]:
        """The headers of all ranks; the same error on every rank where they do not fit together."""
        headers = [_Header.decode(numbers) for numbers in gather().tolist()]
        refused = [rank for rank, header in enumerate(headers) if header.refused]
        if refused:
            raise RuntimeError(f"{self.name}: rank {refused[0]} has refused its arguments.")
        first = headers[0]
        for rank, header in enumerate(headers):
            both = first.function, first.backward, header.function, header.backward
            if both[:2] != both[2:] or (header.backward and header.call != first.call):
                raise RuntimeError(
                    "every rank must make the same calls in the same order, "
                    f"got {first.step} on rank 0 and {header.step} on rank {rank}."
                )
        for field, what in _COMPARED.items():
            for rank, header in enumerate(headers):
                if getattr(header, field) != getattr(first, field):
                    raise ValueError(
                        f"{what} must be the same on every rank, got {first.show(field)} on rank 0 "
                        f"and {header.show(field)} on rank {rank}."
                    )
        gradients = [header.gradients for header in headers]
        if _NEEDED in gradients and _OFF in gradients:
            raise ValueError(
                "gradients must be recorded on every rank when one needs them, got torch.no_grad "
                f"on rank {gradients.index(_OFF)} and inputs that need gradients on rank "
                f"{gradients.index(_NEEDED)}."
            )
        return headers

    def _numbers(self, header):
        return torch.tensor(header.encode(), dtype=torch.int64, device=self.device)

    def _start(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather x of every rank; the result waits for it: (ranks, *x.shape)."""
        x = x.detach().contiguous()
        gathered = x.new_empty(self.ranks * x.numel())
        # The newer of two names.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

        def reached(action):
            try:
                return action()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self.name}: the exchange with the other ranks has failed. A rank died, or "
                    "did not take part within the timeout of the group."
                ) from error

        work = None
        if x.numel():
            work = reached(
                lambda: all_gather(gathered, x.view(-1), group=self.group, async_op=True)
            )

        def finish():
            if work is not None:
                reached(work.wait)
            return gathered.view(self.ranks, *x.shape)

        return finish


class _Send(torch.autograd.Function):
    """Start to send a state; backward, wait for the gradients of what the ranks received."""

    @staticmethod
    def forward(ctx, exchange, state, anchor):
        ctx.exchange = exchange
        ctx.save_for_backward(state)
        exchange.arriving = exchange._start(state)
        return state.new_zeros(())

    @staticmethod
    def backward(ctx, received):
        gather, *saved = ctx.exchange.arriving_back
        ctx.exchange.arriving_back = None
        with torch.no_grad():
            grad = ctx.exchange._fold_back(gather(), *saved)
        return None, _once(grad, received, *ctx.saved_tensors), None


class _Receive(torch.autograd.Function):
    """Wait for the states; backward, start to send the gradients of those that are used here."""

    @staticmethod
    def forward(ctx, exchange, sent):
        ctx.exchange = exchange
        gathered = exchange.arriving()
        exchange.arriving = None
        before, last = exchange._fold(gathered)
        if exchange.has_decay:  # a copy, so that what was gathered can go
            ctx.save_for_backward(exchange._split(gathered)[1].clone(), before)
        else:
            ctx.save_for_backward(sent)  # so that a second backward pass is an error here
        return before if exchange.header.causal else None, last if exchange._wants_last else None

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # an error, before anything is sent, if they have been freed
        exchange = ctx.exchange
        exchange._agree(exchange._start(exchange._numbers(exchange.header._replace(backward=1))))
        used = [grad for grad in grads if grad is not None]
        states = torch.stack([grad.detach() for grad in used])
        decays = saved if exchange.has_decay else (None, None)
        exchange.arriving_back = exchange._start(states), *decays
        return None, _once(states.new_zeros(()), *used)


# The first argument, for a graph of gradients: it depends on all the others in ways that no rank
# could differentiate alone, so its derivative is an error.
_once = once_differentiable(
    lambda x, *_: x.clone(), "attention across ranks can be differentiated once, in reverse mode."
)
