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

(Yang et al., 2024 and 2025). The inverses of the systems, L by L, are made for all chunks at once.
Then chunk follows chunk, and no transition from one to the next, C by C, is ever formed. The code
has a single system: -A and K in place of A and B make the second that of u.

Here q, k, a, b are (..., N, C), v is (..., N, M), g is (..., N, C), or (..., N, 1) for one decay
for all channels, and S is (..., C, M), with the leading dimensions that all but q share. All have
the accumulation dtype.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from lesson_code._custom_ops import fold, once_differentiable
from lesson_code.torch.engines.decays import decays, diagonal_blocks
from lesson_code.torch.engines.segments import add_product, by_segments, in_chunks

BLOCK = 16  # rows of a triangular system that are solved at once


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
    rows = (q, k, v, a, log_decay.exp(), *([] if b is None else [b]))
    tokens = (x[..., None, :].unbind(-3) for x in rows)
    for q_t, k_t, v_t, a_t, w_t, *b_t in zip(*tokens, strict=True):  # (..., 1, .)
        if b is None:
            S = w_t.mT * S
            S = S + k_t.mT @ (v_t - a_t @ S)
        else:
            S = w_t.mT * S + b_t[0].mT @ (a_t @ S) + k_t.mT @ v_t
        outputs.append(q_t @ S)
    return torch.cat(outputs, dim=-2) if outputs else q @ S, S


@torch.library.custom_op("lesson_code::delta_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, S: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    T : tensor, shape (G, n, L, L)
        The inverse of each chunk's system.
    kept : tensor
        What the decays keep.
    AB, QB, AK, QK : tensor, shape (G, n, L, L)
        Products of rows and columns; the last two are empty without b.
    """
    q, k, v, a, b, g = (in_chunks(x, chunk_size) for x in (q, k, v, a, b, g))
    corrects = b.shape[-1] == 0
    rows, columns = ([(-a, False)], [k]) if corrects else ([(a, True)], [b, k])
    fading = decays(g)
    (AY, QY), (a, q), (b, *ks), total = fading.meet([*rows, (q, False)], columns)
    T, right = _inverse(AY[0]), v if corrects else AY[1] @ v

    starts, found = v.new_empty(*v.shape[:2], *S.shape[1:]), torch.empty_like(right)
    for i in range(v.shape[1]):
        starts[:, i] = S
        found[:, i] = torch.bmm(T[:, i], torch.baddbmm(right[:, i], a[:, i], S))
        S = (total[:, i].mT * S).baddbmm_(b[:, i].mT, found[:, i])
        for k in ks:
            S = S.baddbmm_(k[:, i].mT, v[:, i])
    out = q @ starts
    for QY_j, z in zip(QY, (found, v), strict=False):
        add_product(out, QY_j, z)
    AK, QK = (v.new_empty(0), v.new_empty(0)) if corrects else (AY[1], QY[1])
    return out.flatten(1, 2), S, starts, found, T, fading.kept, AY[0], QY[0], AK, QK


def _inverse(P):
    """(I - P)⁻¹ of strictly lower triangular P: that of blocks, which are joined in pairs.

    Blocks are solved for by columns, as LAPACK stores a matrix: of rows it would make copies.
    """
    L = P.shape[-1]
    size = block = min(BLOCK, L)
    while size < L:
        size *= 2
    P = pad(P, (0, size - L, 0, size - L)) if size > L else P
    T, blocks = torch.zeros_like(P), diagonal_blocks(P, block).mT
    one = torch.eye(block, dtype=P.dtype, device=P.device).expand_as(blocks)
    solved = torch.linalg.solve_triangular(-blocks, one, upper=True, left=False, unitriangular=True)
    diagonal_blocks(T, block).copy_(solved.mT)
    for half in (block << i for i in range((size // block).bit_length() - 1)):
        pairs, across = diagonal_blocks(T, 2 * half), diagonal_blocks(P, 2 * half)
        early, late = pairs[..., :half, :half], pairs[..., half:, half:]
        pairs[..., half:, :half] = late @ across[..., half:, :half] @ early
    return T[..., :L, :L]


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
    T: Tensor,
    kept: Tensor,
    AB: Tensor,
    QB: Tensor,
    AK: Tensor,
    QK: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_forward` with respect to q, k, v, a, b, g and S."""
    q, k, v, a, b, g, dO = (in_chunks(x, chunk_size) for x in (q, k, v, a, b, g, grad_out))
    corrects, fading = b.shape[-1] == 0, decays(g, kept)
    before, through, to_end, total = fading.factors()
    if corrects:
        a, a_fade, columns = -a, through, [(k, found, AB, QB)]
    else:
        a_fade, columns = before, [(b, found, AB, QB), (k, v, AK, QK)]
    q_faded, a_faded, *y_faded = q * through, a * a_fade, *(y * to_end for y, *_ in columns)

    dS, d_found = grad_S, QB.mT @ dO
    dS_ends, d_right = torch.empty_like(starts), torch.empty_like(d_found)
    for i in reversed(range(v.shape[1])):
        dS_ends[:, i] = dS
        d_right[:, i] = torch.bmm(T[:, i].mT, torch.baddbmm(d_found[:, i], y_faded[0][:, i], dS))
        dS = (total[:, i].mT * dS).baddbmm_(q_faded[:, i].mT, dO[:, i])
        dS = dS.baddbmm_(a_faded[:, i].mT, d_right[:, i])

    dv = d_right
    if not corrects:
        dv = add_product(add_product(y_faded[1] @ dS_ends, AK.mT, d_right), QK.mT, dO)
    dq_faded, da_faded = dO @ starts.mT, d_right @ starts.mT
    dq, da, dys, ends = through * dq_faded, a_fade * da_faded, [], []
    for (y, z, AY, QY), faded in zip(columns, y_faded, strict=True):
        dy_faded = z @ dS_ends.mT
        dy = to_end * dy_faded
        fading.add_gradients(dO @ z.mT, QY, q, y, False, dq, dy)
        fading.add_gradients((d_right @ z.mT).tril_(-1), AY, a, y, not corrects, da, dy)
        dys.append(dy)
        ends.append(faded.mul_(dy_faded))
    db, dk = (torch.zeros_like(b), dys[0]) if corrects else dys

    rows = [(q_faded.mul_(dq_faded), False), (a_faded.mul_(da_faded), not corrects)]
    passed = torch.linalg.vecdot(starts, dS_ends)[..., None, :] * total  # (G, n, 1, C)
    dg = fading.log_gradient(rows, functools.reduce(torch.add, ends), passed)
    da = da.neg_() if corrects else da
    dq, dk, dv, da, db, dg = (x.flatten(1, 2).contiguous() for x in (dq, dk, dv, da, db, dg))
    return dq, dk, dv, da, db, dg, dS


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
        v.new_empty((G, n, L, L) if g.shape[-1] == 1 else 0),
        *(v.new_empty(G, n, L, L) for _ in range(2)),
        *(v.new_empty(G, n, L, L) if both else v.new_empty(0) for _ in range(2)),
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
        ctx.set_materialize_grads(False)  # zeros for each of them
        ctx.save_for_backward(*tensors, *output[2:])

    @staticmethod
    def backward(ctx, grad_out, grad_S, *_):
        saved = ctx.saved_tensors
        v, starts = saved[2], saved[6]
        grad_out = torch.zeros_like(v) if grad_out is None else grad_out
        grad_S = torch.zeros_like(starts[:, 0]) if grad_S is None else grad_S
        return (*_backward_once(grad_out, grad_S, *saved, ctx.chunk_size), None)
