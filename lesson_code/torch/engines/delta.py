r"""A memory that fades, moves what it finds, and writes, in recurrent and in chunkwise form.

    r_t = S_{t-1}ᵀ a_t      S_t = diag(exp(g_t)) S_{t-1} + b_t r_tᵀ + k_t v_tᵀ      o_t = S_tᵀ q_t

Without b it *corrects*: what is found, then in the memory that has faded already, is the error of
the value that is written,

    u_t = v_t - (diag(exp(g_t)) S_{t-1})ᵀ a_t        S_t = diag(exp(g_t)) S_{t-1} + k_t u_tᵀ

Inside a chunk that begins with S, with the decays between its tokens in the products of rows and
columns (`decays`), what is found depends on what was found before, through a unit lower triangular
system:

    (I + tril(A Kᵀ, -1)) u = V - A S        (I - tril(A Bᵀ, -1)) r = A S + tril(A Kᵀ, -1) V

and with columns Y and rows Z of all that is written, [K] and [u] or [K; B] and [V; r],

    O = Q S + tril(Q Yᵀ) Z        S += Yᵀ Z

(Yang et al., 2024 and 2025). The system is solved for the M columns of what the chunk's own state
gives, chunk after chunk: no transition between chunks, C by C, is ever formed.

Here q, k, a, b are (..., N, C), v is (..., N, M), g is (..., N, C), or (..., N, 1) for one decay
for all channels, and S is (..., C, M), with the leading dimensions that all but q share. All have
the accumulation dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lesson_code._custom_ops import fold, once_differentiable
from lesson_code.torch.engines.decays import decays
from lesson_code.torch.engines.segments import by_segments, in_chunks


def delta(
    form: str | None,
    terms: Callable[..., tuple],
    rows: tuple[Tensor, ...],
    S: Tensor,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, M) and the last state (..., C, M), by "recurrent" or "chunkwise".

    ``terms(*rows)`` are q, k, v, a, b or None, and g of some rows (..., N, .), of which the first
    are queries: what a model makes of its arguments is made of a segment at a time. A form of None
    takes "recurrent" for a single token, else "chunkwise".
    """
    N = rows[0].shape[-2]
    if form == "recurrent" or N == 0 or (form is None and N == 1):
        q, k, v, a, b, g = terms(*rows)
        return _recurrent(q, k, v, a, b, g, S)

    def segment(*args):
        *rows, S, chunk_size = args
        q, k, v, a, b, g = terms(*rows)
        b = k[..., :0] if b is None else b
        return _Delta.apply(q, k, v, a, b, g, S, chunk_size)[:2]

    return by_segments(segment, rows, S, min(chunk_size, N))


def _recurrent(q, k, v, a, b, log_decay, S):
    outputs = []
    # Unbound at once: the gradient of a slice is as long as the sequence, for each of N tokens.
    rows = (q, k, v, a, k if b is None else b, log_decay.exp())
    tokens = (x[..., None, :].unbind(-3) for x in rows)
    for q_t, k_t, v_t, a_t, b_t, w_t in zip(*tokens, strict=True):  # (..., 1, .)
        if b is None:
            S = w_t.mT * S
            S = S + k_t.mT @ (v_t - a_t @ S)
        else:
            S = w_t.mT * S + b_t.mT @ (a_t @ S) + k_t.mT @ v_t
        outputs.append(q_t @ S)
    return torch.cat(outputs, dim=-2) if outputs else q @ S, S


@torch.library.custom_op("lesson_code::delta_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, S: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A segment of G sequences, as one operator for autograd, compile and vmap.

    Parameters
    ----------
    q, k, a : tensor, shape (G, N, C)
    v : tensor, shape (G, N, M)
    b : tensor, shape (G, N, C), or (G, N, 0) where there is none
    g : tensor, shape (G, N, C) or (G, N, 1)
    S : tensor, shape (G, C, M)
    chunk_size : int
        A divisor L of N = n L.

    Returns
    -------
    out : tensor, shape (G, N, M)
    S : tensor, shape (G, C, M)
    starts : tensor, shape (G, n, C, M)
        The state before each chunk.
    found : tensor, shape (G, n, L, M)
        The errors u, or the readings r.
    AK, AB, QY : tensor, shape (G, n, L, L), the last (G, n, L, 2 L) with b
        Products of rows and columns; without b the second is empty.
    """
    q, k, v, a, b, g = (in_chunks(x, chunk_size) for x in (q, k, v, a, b, g))
    corrects = b.shape[-1] == 0
    columns = [k] if corrects else [k, b]
    P, (a, q), faded, total = decays(g).meet([(a, not corrects), (q, False)], columns)
    AK, AB = P[0][0].tril(-1), v.new_empty(0) if corrects else P[0][1].tril(-1)
    QY, Y = torch.cat([x.tril() for x in P[1]], dim=-1), torch.cat(faded, dim=-2)

    out, found, starts = torch.empty_like(v), torch.empty_like(v), []
    system = AK if corrects else -AB
    for i in range(v.shape[1]):
        starts.append(S)
        reading = a[:, i] @ S
        right = v[:, i] - reading if corrects else reading + AK[:, i] @ v[:, i]
        found_i = torch.linalg.solve_triangular(
            system[:, i], right, upper=False, unitriangular=True
        )
        found[:, i] = found_i
        Z = _written(v[:, i], found_i, corrects)
        out[:, i] = torch.baddbmm(q[:, i] @ S, QY[:, i], Z)
        S = torch.baddbmm(total[:, i].mT * S, Y[:, i].mT, Z)
    return out.flatten(1, 2), S, torch.stack(starts, dim=1), found, AK, AB, QY


@torch.library.custom_op("lesson_code::delta_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_S: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    starts: Tensor,
    found: Tensor,
    AK: Tensor,
    AB: Tensor,
    QY: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_forward` with respect to q, k, v, a, b, g and S."""
    q, k, v, a, b, g, dO = (in_chunks(x, chunk_size) for x in (q, k, v, a, b, g, grad_out))
    L, corrects, fading = chunk_size, b.shape[-1] == 0, decays(g)
    before, through, to_end, total = fading.factors()
    a_fade = through if corrects else before
    a_faded, q_faded = a * a_fade, q * through
    Y = torch.cat([y * to_end for y in ([k] if corrects else [k, b])], dim=-2)
    Z = _written(v, found, corrects)

    dZ, d_right, dS_ends = QY.mT @ dO, torch.empty_like(v), torch.empty_like(starts)
    dS, system = grad_S, (AK if corrects else -AB).mT
    for i in reversed(range(v.shape[1])):
        dS_ends[:, i] = dS
        dZ_i = torch.baddbmm(dZ[:, i], Y[:, i], dS)
        d_i = torch.linalg.solve_triangular(
            system[:, i], dZ_i[:, -L:], upper=True, unitriangular=True
        )
        if not corrects:
            dZ[:, i] = dZ_i
        d_right[:, i] = d_i
        dS = torch.baddbmm(total[:, i].mT * dS, q_faded[:, i].mT, dO[:, i])
        dS = dS.baddbmm_(a_faded[:, i].mT, d_i, alpha=-1 if corrects else 1)

    dAK = (d_right @ (found if corrects else v).mT).tril_(-1)
    d_reading = d_right
    if corrects:
        dv, d_reading = d_right, -d_right
        dAK.neg_()
    else:
        dv = dZ[..., :L, :] + AK.mT @ d_right
    d_faded = dO @ starts.mT, d_reading @ starts.mT, Z @ dS_ends.mT  # of q, of a, of Y
    d_logs = [x * dx for x, dx in zip((q_faded, a_faded, Y), d_faded, strict=True)]

    dQY = dO @ Z.mT
    dq, dk = fading.gradients(dQY[..., :L].tril(), QY[..., :L], q, k, early=False)
    da, dk_again = fading.gradients(dAK, AK, a, k, early=not corrects)
    dq = dq.addcmul_(through, d_faded[0])
    da = da.addcmul_(a_fade, d_faded[1])
    dk = (dk + dk_again).addcmul_(to_end, d_faded[2][..., :L, :])
    db, d_to_end = torch.zeros_like(b), d_logs[2]
    if not corrects:
        dAB = (d_right @ found.mT).tril_(-1)
        dq_again, db = fading.gradients(dQY[..., L:].tril(), QY[..., L:], q, b, early=False)
        da_again, db_again = fading.gradients(dAB, AB, a, b, early=True)
        dq, da = dq + dq_again, da + da_again
        db = (db + db_again).addcmul_(to_end, d_faded[2][..., L:, :])
        d_to_end = d_to_end[..., :L, :] + d_to_end[..., L:, :]
    nothing = torch.zeros_like(d_logs[0])
    early, late = (nothing, d_logs[0] + d_logs[1]) if corrects else (d_logs[1], d_logs[0])
    kept = (starts * dS_ends).sum(dim=-1)[..., None, :] * total  # (G, n, 1, C)
    dg = fading.log_gradient(early, late, d_to_end, kept)
    dq, dk, dv, da, db, dg = (x.flatten(1, 2).contiguous() for x in (dq, dk, dv, da, db, dg))
    return dq, dk, dv, da, db, dg, dS.clone()


def _written(v, found, corrects):
    return found if corrects else torch.cat([v, found], dim=-2)


@_forward.register_fake
def _(q, k, v, a, b, g, S, chunk_size):
    (G, N, M), C, L = v.shape, k.shape[-1], chunk_size
    n, both = N // L, b.shape[-1] > 0
    return (
        v.new_empty(G, N, M),
        torch.empty_like(S),
        v.new_empty(G, n, C, M),
        v.new_empty(G, n, L, M),
        v.new_empty(G, n, L, L),
        v.new_empty(G, n, L, L) if both else v.new_empty(0),
        v.new_empty(G, n, L, 2 * L if both else L),
    )


@_backward.register_fake
def _(grad_out, grad_S, q, k, v, a, b, g, *rest):
    return (*(x.new_empty(x.shape) for x in (q, k, v, a, b, g)), grad_S.new_empty(grad_S.shape))


_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


_backward_once = once_differentiable(
    _backward,
    'Chunks can be differentiated once, in reverse mode: for more take form "recurrent".',
)


class _Delta(torch.autograd.Function):
    """`_forward` with `_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, a, b, g, S, chunk_size):
        return _forward(q, k, v, a, b, g, S, chunk_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, _, ctx.chunk_size = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx, grad_out, grad_S, *_):
        return (*_backward_once(grad_out, grad_S, *ctx.saved_tensors, ctx.chunk_size), None)
