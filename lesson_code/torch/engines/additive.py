r"""A memory that decays and adds, in recurrent and in chunkwise form.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

With a bonus u it is read before it is written, and the current token counts u times:

    o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t

Here q and k are (..., N, C), v is (..., N, M), the logarithm g of the decay is (..., N, C), or
(..., N, 1) for one decay for all channels; u is (..., C) and S (..., C, M), with the leading
dimensions that k, v, g and S share. All have the accumulation dtype. N zeros of k, v and g leave S
as it is.
"""

import torch
from torch import Tensor

from lesson_code._custom_ops import fold, once_differentiable
from lesson_code.torch.engines.decays import decays
from lesson_code.torch.engines.segments import add_product, by_segments, in_chunks


def additive(
    form: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    S: Tensor,
    bonus: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, M) and the last state (..., C, M).

    The form is "recurrent", "chunkwise", or "parallel", which is a single chunk. None takes
    "recurrent" for a single token, else "chunkwise".
    """
    N = k.shape[-2]
    if form == "recurrent" or N == 0 or (form is None and N == 1):
        return _recurrent(q, k, v, log_decay, S, bonus)
    chunk_size = N if form == "parallel" else min(chunk_size, N)
    if bonus is None:
        return by_segments(_apply_late, (q, k, v, log_decay), S, chunk_size)
    # A query sees the memory before its own token, which counts by the bonus.
    own = (q * bonus[..., None, :] * k).sum(dim=-1, keepdim=True) * v
    out, S = by_segments(_apply_early, (q, k, v, log_decay), S, chunk_size)
    return out + own, S


def _recurrent(q, k, v, log_decay, S, bonus):
    outputs = []
    # Unbound at once: the gradient of a slice is as long as the sequence, for each of N tokens.
    tokens = (x.unbind(-2) for x in (q, k, v, log_decay.exp()))
    for q_t, k_t, v_t, decay_t in zip(*tokens, strict=True):
        before, write = S, k_t[..., :, None] * v_t[..., None, :]  # (..., C, M)
        S = decay_t[..., :, None] * S + write
        read = S if bonus is None else before + bonus[..., :, None] * write
        outputs.append(q_t[..., None, :] @ read)
    if not outputs:
        nothing = q if bonus is None else q * bonus[..., None, :]  # with all leading dimensions
        return nothing @ S, S
    return torch.cat(outputs, dim=-2), S


def _apply_late(*args):
    return _Additive.apply(*args, False)[:2]


def _apply_early(*args):
    return _Additive.apply(*args, True)[:2]


@torch.library.custom_op("lesson_code::additive_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor, chunk_size: int, early: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A segment of G sequences, as one operator for autograd, compile and vmap.

    Parameters
    ----------
    q, k : tensor, shape (G, N, C)
    v : tensor, shape (G, N, M)
    g : tensor, shape (G, N, C) or (G, N, 1)
    S : tensor, shape (G, C, M)
    chunk_size : int
        A divisor L of N = n L.
    early : bool
        Read before the own token decays and writes.

    Returns
    -------
    out : tensor, shape (G, N, M)
    S : tensor, shape (G, C, M)
    starts : tensor, shape (G, n, C, M)
        The state before each chunk.
    QK : tensor, shape (G, n, L, L)
        What each query sees of each key of its chunk.
    kept : tensor
        What the decays keep.
    """
    q, k, v, g = (in_chunks(x, chunk_size) for x in (q, k, v, g))
    fading = decays(g)
    [[QK]], [q], [k], total = fading.meet([(q, early)], [k])
    starts, S = _walk(S, total.mT, k.mT @ v, range(v.shape[1]))
    return add_product(q @ starts, QK, v).flatten(1, 2), S, starts, QK, fading.kept


def _walk(S, total, writes, chunks):
    """The states (G, n, C, M) before all chunks, which come in this order, and the last one."""
    starts = torch.empty_like(writes)
    for i in chunks:
        starts[:, i] = S
        S = torch.addcmul(writes[:, i], total[:, i], S)
    return starts, S


@torch.library.custom_op("lesson_code::additive_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    starts: Tensor,
    QK: Tensor,
    kept: Tensor,
    chunk_size: int,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_forward` with respect to q, k, v, g and S."""
    q, k, v, g, dO = (in_chunks(x, chunk_size) for x in (q, k, v, g, grad_out))
    fading = decays(g, kept)
    before, through, to_end, total = fading.factors()
    row_fade = before if early else through
    q_faded, k_faded = q * row_fade, k * to_end
    chunks = reversed(range(v.shape[1]))
    dS_ends, dS = _walk(grad_S, total.mT, q_faded.mT @ dO, chunks)

    dv = add_product(k_faded @ dS_ends, QK.mT, dO)
    dq_faded, dk_faded = dO @ starts.mT, v @ dS_ends.mT
    dq, dk = row_fade * dq_faded, to_end * dk_faded
    fading.add_gradients(dO @ v.mT, QK, q, k, early, dq, dk)
    rows = [(q_faded.mul_(dq_faded), early)]
    passed = torch.linalg.vecdot(starts, dS_ends)[..., None, :] * total  # (G, n, 1, C)
    dg = fading.log_gradient(rows, k_faded.mul_(dk_faded), passed)
    dq, dk, dv, dg = (x.flatten(1, 2).contiguous() for x in (dq, dk, dv, dg))
    return dq, dk, dv, dg, dS


@_forward.register_fake
def _(q, k, v, g, S, chunk_size, early):
    (G, N, M), C, L = v.shape, k.shape[-1], chunk_size
    n = N // L
    kept = (G, n, L, L) if g.shape[-1] == 1 else (0,)
    sizes = (G, N, M), S.shape, (G, n, C, M), (G, n, L, L), kept
    return tuple(v.new_empty(size) for size in sizes)


@_backward.register_fake
def _(grad_out, grad_S, q, k, v, g, *rest):
    return (*(x.new_empty(x.shape) for x in (q, k, v, g)), grad_S.new_empty(grad_S.shape))


_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


_backward_once = once_differentiable(
    _backward,
    'Chunks can be differentiated once, in reverse mode: for more take form "recurrent".',
)


class _Additive(torch.autograd.Function):
    """`_forward` with `_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, g, S, chunk_size, early):
        return _forward(q, k, v, g, S, chunk_size, early)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, _, ctx.chunk_size, ctx.early = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # zeros for each of them
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx, grad_out, grad_S, *_):
        saved = ctx.saved_tensors
        v, starts = saved[2], saved[4]
        grad_out = torch.zeros_like(v) if grad_out is None else grad_out
        grad_S = torch.zeros_like(starts[:, 0]) if grad_S is None else grad_S
        options = ctx.chunk_size, ctx.early
        return (*_backward_once(grad_out, grad_S, *saved, *options), None, None)
