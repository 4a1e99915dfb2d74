r"""Linear attention over a sequence that is split over the ranks of a process group.

Each rank holds a part of the sequence, the first rank the first part, and all run at once, each
from a state of 0. What an earlier part has to say to a later one is its state, whatever the lengths
of both. With the decay :math:`a_r` that part r applies to what it finds (1 where there is none) and
the state :math:`T_r` that it writes (:eq:`eq-split-fold` and :eq:`eq-split-read`),

.. math::

    A_r = a_r \odot A_{r-1} + T_r \qquad B_r = A_{r-1} \qquad
    o_t = \mathrm{inside}_t + b_t \odot q_t \cdot B_r

where inside is attention within the part, and :math:`b_t` the decay since the part began. So a call
takes one exchange: every rank sends its T (and a), and folds all of them into its own B and into
the last state. While they travel, it computes what is inside. Backward, every rank sends the
gradient of its B (and of the last state), and folds them, in reverse, into that of its T
(:eq:`eq-split-gradient`).

A normalizer z is one more column of the state, and a 1 at the end of each value writes it. A decay
is sent as one more column, too. A delta rule mixes the rows of what it finds: its transition is a
matrix, D more columns.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lesson_code import _arguments
from lesson_code.torch import delta, gated, linear
from lesson_code.torch._exchange import Exchange, number_of_ranks
from lesson_code.torch.elementwise import divide
from lesson_code.torch.engines import linear as engine
from lesson_code.torch.engines.additive import additive
from lesson_code.torch.engines.decays import sums_before, sums_through
from lesson_code.torch.engines.delta import delta as delta_engine
from lesson_code.torch.feature_maps import elu_plus_one, identity
from lesson_code.torch.memory import LinearAttentionState
from lesson_code.torch.operator import held
from lesson_code.torch.precision import accumulate, full_precision

__all__ = ["gated_delta_rule", "gated_linear_attention", "linear_attention"]


class _Exchange(Exchange):
    """How the states of the parts follow from each other, and their gradients."""

    def fold(self, a, T):
        """The state before each part, and after the last (:eq:`eq-split-fold`)."""
        A = torch.zeros_like(T[0])
        yield A
        for rank in range(len(T)):
            A = a[rank] * A + T[rank]
            yield A

    def fold_back(self, a, dB, dA):
        """The gradient of the state after each part, the last first (:eq:`eq-split-gradient`)."""
        for rank in reversed(range(len(dB))):
            yield dA
            dA = dB[rank] + a[rank] * dA

    def transition_gradient(self, dA, B):
        return (dA * B).sum(dim=-1, keepdim=True)


class _MatrixExchange(Exchange):
    """The same where a part's transition is a matrix (..., D, D)."""

    def fold(self, P, T):
        A = torch.zeros_like(T[0])
        yield A
        for rank in range(len(T)):
            A = P[rank] @ A + T[rank]
            yield A

    def fold_back(self, P, dB, dA):
        for rank in reversed(range(len(dB))):
            yield dA
            dA = dB[rank] + P[rank].mT @ dA

    def transition_gradient(self, dA, B):
        return dA @ B.mT


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
    :eq:`eq-causal-linear-attention` with ``causal=True``. Arguments mean what they mean there, and:

    Parameters
    ----------
    q, k, v : tensors
        Those of this rank's part. Its length N is its own, and may be 0.
    feature_map : callable
        The same map on every rank: of it only its width C is compared.
    causal : bool
        Let each query see the keys up to its own position only, those of all earlier ranks among
        them. Otherwise it sees the keys of all ranks.
    form : str, optional
        With ``causal=True`` the form inside this rank's part, otherwise "linear": no rank has the
        keys that "quadratic" needs.
    backend : str, optional
        The kernels of "cupy" begin from the state before this rank's part, so they wait
        for it.
    initial_state : LinearAttentionState, optional
        State before the first token of the first rank; the other ranks ignore theirs.
    return_state : bool
        Return the state after the last token of the last rank as well, on every rank.
    group : torch.distributed.ProcessGroup, optional
        The ranks, in the order of their parts; by default all ranks.

    Returns
    -------
    tensor, shape (..., N, M)
        Outputs of this rank's part. Half precision is computed, and sent, in float32.
    LinearAttentionState
        With ``return_state=True``, the same on every rank.

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
    A group of one rank calls the plain function. `form`, `chunk_size` and `backend` may differ from
    rank to rank. An exchange is an all-gather of a header and one of states, C (M + 1) numbers for
    each sequence of the batch; with ``return_state=True`` the backward pass sends twice as many.

    Gradients are those of the sum of the losses of all ranks; those of the parameters of
    `feature_map` are each rank's share, to be summed over the ranks as in data-parallel training.
    If any input of any rank needs gradients, the results of every rank do, and every rank must run
    backward through them, as many times and for calls in the same order: a rank without a loss of
    its own can take ``0 * out.sum()``. With ``torch.autograd.grad``, name k or v on every rank or
    on none. The exchange can be differentiated once, in reverse mode.

    On a GPU each exchange makes the host wait for its header. With NCCL a rank that died shows when
    the watchdog ends the others, after the group's timeout.

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
    flags = {"causal": causal, "normalize": normalize, "return_state": return_state}
    options: dict[str, Any] = {"chunk_size": chunk_size, "initial_state": initial_state, **flags}
    if number_of_ranks("linear_attention", group) == 1:
        return linear.linear_attention(
            q, k, v, feature_map=feature_map, form=form, backend=backend, **options
        )
    exchange = _Exchange("linear_attention", group, q)
    if exchange.rank > 0:
        options["initial_state"] = None
    with exchange.telling_of_errors():
        arguments = held(linear.linear_attention, q, k, v, **options)
        if not causal:
            _arguments.check_form(form, ("linear",), f" across ranks when {causal=}")
        linear.check_causal(q, k, causal, form, options["initial_state"], return_state)
        chunk_size = arguments["chunk_size"]
        on_kernels = linear.on_kernels(backend, causal, form)
        dtype, given_v = q.dtype, v
        with full_precision(q):
            q, k, v = accumulate(q, k, v)
            q, k = (linear.features(feature_map, x) for x in (q, k))
            if on_kernels:  # which read features in half precision
                q, k = q.to(dtype), k.to(dtype)
            width = "one width C for q and k"
            _arguments.check_size("feature_map", k.shape[-1], width, q.shape[-1])
            S, z = linear.first_state(k, v, arguments["initial_state"])
            S = torch.cat([S, z[..., None]], dim=-1)  # (..., C, M + 1)
        exchange.announce((q, k, v), S, dtype=dtype, M=v.shape[-1], **flags)

    with full_precision(q):
        values = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], dim=-1)  # (..., N, M + 1)
        sent = exchange.send(S + k.to(S.dtype).mT @ values)
        if on_kernels:
            before, last = exchange.receive(sent)
            out = linear.by_kernels(q, k, given_v, identity, normalize, _state(S + before), False)
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

    Computes :eq:`eq-gla`, as :func:`lesson_code.torch.gated_linear_attention` does for the whole
    sequence. Ranks, parts, errors and gradients are as in :func:`linear_attention`. The exchange
    sends the memory that the part writes and the product of its gates, D (M + 1) numbers for each
    sequence of the batch; the backward pass D M, twice as many with ``return_state=True``.

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
    options: dict[str, Any] = {"form": form, "chunk_size": chunk_size, "return_state": return_state}
    options["initial_state"] = initial_state
    if number_of_ranks("gated_linear_attention", group) == 1:
        return gated.gated_linear_attention(q, k, v, log_decay, **options)
    exchange = _Exchange("gated_linear_attention", group, q)
    if exchange.rank > 0:
        options["initial_state"] = None
    with exchange.telling_of_errors():
        dtype = q.dtype
        arguments = held(gated.gated_linear_attention, q, k, v, log_decay, **options)
        q, k, v, g = (arguments[name] for name in ("q", "k", "v", "log_decay"))
        S, chunk_size = arguments["initial_state"], arguments["chunk_size"]
        exchange.announce((q, k, v, g), S, dtype=dtype, M=v.shape[-1], return_state=return_state)

    with full_precision(q):
        decay = g.sum(dim=-2)[..., None].exp()  # (..., D, 1), of the whole part
        after = sums_before(g.flip(-2)).flip(-2)  # row j is g_{j+1} + ... + g_N
        writes = (k * after.exp()).mT @ v  # (..., D, M)
        sent = exchange.send(decay * S + writes, decay)
        inside, _ = additive(form, q, k, v, g, S, chunk_size=chunk_size)
        before, last = exchange.receive(sent)
        out = inside + (q * sums_through(g).exp()) @ before
    out = out.to(dtype)
    return (out, last) if return_state else out


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
    group: "dist.ProcessGroup | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The gated delta rule over a sequence that is split over ranks.

    Computes :eq:`eq-gated-delta-rule`, as :func:`lesson_code.torch.gated_delta_rule` does for the
    whole sequence. Ranks, parts, errors and gradients are as in :func:`linear_attention`. A part
    makes :math:`P_r B_r + T_r` of the memory :math:`B_r` that it finds, where the transition

    .. math::

        P_r = \prod_t \alpha_t \left(I - \beta_t k_t k_t^\top\right)

    has the last token of the part on the left. It is what the rule makes of the identity when all
    values are 0, so both come from one pass, with D more columns of memory and of values. The
    exchange sends D (M + D) numbers for each sequence of the batch; the backward pass D M, twice as
    many with ``return_state=True``.

    References
    ----------
    Yang et al. (2025), section 3, for the rule; Sun et al. (2025), LASP-2, for the all-gather of
    states.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> k = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    >>> v = torch.tensor([[8.0], [10.0]])
    >>> beta, log_decay = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.5]).log()
    >>> gated_delta_rule(k, k, v, beta, log_decay)
    tensor([[ 8.],
            [10.]])
    >>> dist.destroy_process_group()
    """
    options: dict[str, Any] = {"form": form, "chunk_size": chunk_size, "return_state": return_state}
    options["initial_state"] = initial_state
    if number_of_ranks("gated_delta_rule", group) == 1:
        return delta.gated_delta_rule(q, k, v, beta, log_decay, **options)
    exchange = _MatrixExchange("gated_delta_rule", group, q)
    if exchange.rank > 0:
        options["initial_state"] = None
    with exchange.telling_of_errors():
        dtype = q.dtype
        arguments = held(delta.gated_delta_rule, q, k, v, beta, log_decay, **options)
        q, k, v, beta, g, S, chunk_size = (
            arguments[name]
            for name in ("q", "k", "v", "beta", "log_decay", "initial_state", "chunk_size")
        )
        beta, g = beta[..., None], g[..., None]
        inputs = q, k, v, beta, g
        exchange.announce(inputs, S, dtype=dtype, M=v.shape[-1], return_state=return_state)

    with full_precision(q):
        D, M = S.shape[-2:]
        values = torch.nn.functional.pad(v, (0, D))  # (..., N, M + D)
        memory = torch.cat(
            [S, torch.eye(D, dtype=S.dtype, device=S.device).expand(*S.shape[:-1], D)], dim=-1
        )
        rows = q, k, values, beta, g
        out, last = delta_engine(form, delta.correction, rows, memory, chunk_size=chunk_size)
        sent = exchange.send(*last.split([M, D], dim=-1))
        inside, seen = out.split([M, D], dim=-1)
        before, last = exchange.receive(sent)
        out = inside + seen @ before
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
