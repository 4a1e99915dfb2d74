r"""Causal linear attention, chunk by chunk: the fast form, forward and backward.

A chunk is L positions. Inside it the masked L by L matrix is multiplied out; everything before it
is in the state S (C by M) and the normalizer z (C). With features q, k, a chunk computes

    A = tril(q kᵀ)          numerator = A v + q S          S += kᵀ v
                            denominator = A 1 + q z        z += kᵀ 1

and its gradients, with do for the gradient of the output, dn = do / denominator for that of the
numerator and dd = -(do · out) / denominator for that of the denominator,

    dA = tril(dn vᵀ + dd 1ᵀ)    dq = dA k + dn Sᵀ + dd zᵀ    dS += qᵀ dn
                                dk = dAᵀ q + v dSᵀ + dz      dz += qᵀ dd
                                dv = Aᵀ dn + k dS

where dS and dz run backward in time (Katharopoulos et al., 2020, section 3.3.1; the book derives
both in its chapter on causal scans). No state of a single position is ever kept, and nothing of
size N but inputs, outputs, their gradients and the denominators.

Chunks are taken a *segment* at a time, as many as stay in the processor's cache. One batched
product serves all chunks of a segment, and elementwise feature maps are applied inside, so that
every number of q, k and v is read from memory once. The backward pass goes over the segments once
to note the state at the start of each, and then takes them from last to first.
"""

import math

import torch
from torch import Tensor

from lesson_code._custom_ops import fold, once_differentiable
from lesson_code.torch import feature_maps
from lesson_code.torch.precision import full_precision


def _relu(x, y, scratch):
    torch.clamp(x, min=0, out=y)


def _exponential(x, y, scratch):
    y.copy_(x).exp_()


def _elu_plus_one(x, y, scratch):
    torch.clamp(x, max=0, out=y).exp_()
    y.add_(torch.clamp(x, min=0, out=scratch))


# Elementwise feature maps that run inside: each writes its value at x to y, of the same shape, and
# has its slope in terms of that value.
FEATURE_MAPS = {
    "identity": (None, None),
    "relu": (_relu, lambda y: y > 0),
    "exponential": (_exponential, lambda y: y),
    "elu_plus_one": (_elu_plus_one, lambda y: y.clamp(max=1)),
}

# Positions in a segment. On a CPU its matrices stay in the cache; a GPU wants all the work at once.
SEGMENT = {"cpu": 2048, "cuda": 2**18}


def name_of(feature_map) -> str | None:
    """The name in `FEATURE_MAPS` of one of the package's elementwise maps, None for others."""
    for name in FEATURE_MAPS:
        if feature_map is getattr(feature_maps, name):
            return name
    return None


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    feature_map: str,
    normalize: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal linear attention of any leading dimensions: outputs, and the state after the last.

    q and k are (..., N, D), v is (..., N, M); S (..., C, M) and z (..., C) have the accumulation
    dtype and the leading dimensions of the state, to which those of q may add.
    """
    leading = torch.broadcast_shapes(q.shape[:-2], S.shape[:-2])
    G = math.prod(leading)
    flat = [x.expand(*leading, *x.shape[-2:]).reshape(G, *x.shape[-2:]) for x in (q, k, v, S)]
    flat_z = z.expand(*leading, -1).reshape(G, z.shape[-1])
    out, _, S_end, z_end = _Linear.apply(*flat, flat_z, feature_map, normalize, chunk_size)
    out = out.reshape(*leading, *out.shape[-2:])
    if leading != S.shape[:-2]:  # more queries than memories, of which each is wanted once
        k = getattr(feature_maps, feature_map)(k.to(S.dtype))
        return out, S + k.mT @ v.to(S.dtype), z + k.sum(-2)
    return out, S_end.reshape(S.shape), z_end.reshape(z.shape)


@torch.library.custom_op("lesson_code::linear_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    feature_map: str,
    normalize: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal linear attention of G sequences, as one operator for autograd, compile and vmap.

    Parameters
    ----------
    q, k : tensor, shape (G, N, D)
    v : tensor, shape (G, N, M)
    S : tensor, shape (G, C, M), in the accumulation dtype
    z : tensor, shape (G, C), in the accumulation dtype
    feature_map : str
        A name in `FEATURE_MAPS`; then C = D.
    normalize : bool
    chunk_size : int

    Returns
    -------
    out : tensor, shape (G, N, M), in the dtype of v
    denominator : tensor, shape (G, N)
        Infinite where the normalizer is 0, which makes the output 0; (G, 0) if not `normalize`.
    S : tensor, shape (G, C, M)
    z : tensor, shape (G, C)
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = S.new_empty(q.shape[:2] if normalize else (len(q), 0))
    S_end, z_end = S.clone(), z.clone()
    scratch = _Scratch(S)
    with full_precision(q):
        for heads, sizes, chunks in _segments(q, chunk_size):
            S_now, z_now = S_end[heads], z_end[heads]
            pieces = zip(chunks, *_split(heads, sizes, q, k, v, out, denominator), strict=True)
            for n, q_rows, k_rows, v_rows, out_rows, d_rows in pieces:
                fq = _features(feature_map, q_rows, n, scratch, "q")  # (g n, L, C)
                fk = _features(feature_map, k_rows, n, scratch, "k")
                fv = _chunks(v_rows, n, S.dtype)  # (g n, L, M)
                writes = torch.bmm(fk.mT, fv, out=scratch("writes", len(fk), *S.shape[1:]))
                S_starts = scratch.running("S", S_now, writes)
                z_starts = scratch.running("z", z_now, fk.sum(-2))

                A = torch.bmm(fq, fk.mT, out=scratch("A", *fq.shape[:2], fq.shape[1])).tril_()
                numerator = torch.bmm(A, fv, out=scratch("numerator", *fv.shape))
                numerator = numerator.baddbmm_(fq, S_starts).view(out_rows.shape)
                if normalize:
                    qz = torch.mul(fq, z_starts[:, None], out=scratch("product", *fq.shape))
                    d = A.sum(-1).add_(qz.sum(-1)).view(d_rows.shape)
                    d_rows.copy_(d.masked_fill_(d == 0, torch.inf))
                    torch.div(numerator, d[..., None], out=out_rows)
                else:
                    out_rows.copy_(numerator)
    return out, denominator, S_end, z_end


@torch.library.custom_op("lesson_code::linear_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    grad_S: Tensor,
    grad_z: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    z: Tensor,
    denominator: Tensor,
    feature_map: str,
    normalize: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_forward` with respect to q, k, v, S and z."""
    _, slope = FEATURE_MAPS[feature_map]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dS, dz = grad_S.clone(), grad_z.clone()
    scratch = _Scratch(S)
    with full_precision(q):
        for heads, sizes, chunks in _segments(q, chunk_size):
            S_at, z_at = [S[heads].clone()], [z[heads].clone()]  # at the start of each segment
            for k_rows, v_rows in list(zip(*_split(heads, sizes, k, v), strict=True))[:-1]:
                fk = _features(feature_map, k_rows, 1, scratch, "k")
                S_at.append(torch.baddbmm(S_at[-1], fk.mT, v_rows.to(S.dtype)))
                z_at.append(z_at[-1] + fk.sum(-2))

            dS_now, dz_now = dS[heads], dz[heads]
            tensors = q, k, v, denominator, grad_out, dq, dk, dv
            pieces = zip(chunks, S_at, z_at, *_split(heads, sizes, *tensors), strict=True)
            for n, S_now, z_now, *rows in reversed(list(pieces)):
                q_rows, k_rows, v_rows, d_rows, do_rows, *gradient_rows = rows
                fq = _features(feature_map, q_rows, n, scratch, "q")  # (g n, L, C)
                fk = _features(feature_map, k_rows, n, scratch, "k")
                fv = _chunks(v_rows, n, S.dtype)  # (g n, L, M)
                dn = _chunks(do_rows, n, S.dtype)
                if normalize:
                    d = d_rows.reshape(*dn.shape[:2], 1)
                    dn = torch.div(dn, d, out=scratch("dn", *dn.shape))

                A = torch.bmm(fq, fk.mT, out=scratch("A", *fq.shape[:2], fq.shape[1])).tril_()
                dA = torch.bmm(dn, fv.mT, out=scratch("dA", *A.shape))
                writes = torch.bmm(fk.mT, fv, out=scratch("writes", len(fk), *S.shape[1:]))
                S_starts = scratch.running("S", S_now, writes)
                writes = torch.bmm(fq.mT, dn, out=writes)
                dS_ends = scratch.running("dS", dS_now, writes, reverse=True)
                dfq = torch.bmm(dn, S_starts.mT, out=scratch("dq", *fq.shape))
                if normalize:  # dn · out, but from terms that are not rounded to half precision
                    inside = torch.mul(A, dA, out=scratch("inside", *A.shape)).sum(-1)
                    before = torch.mul(fq, dfq, out=scratch("product", *fq.shape)).sum(-1)
                    dd = inside.add_(before).neg_()[..., None].div_(d)  # (g n, L, 1)
                    dA.add_(dd)
                dfq.baddbmm_(dA.tril_(), fk)
                dfk = torch.bmm(dA.mT, fq, out=scratch("dk", *fk.shape)).baddbmm_(fv, dS_ends.mT)
                dfv = torch.bmm(A.mT, dn, out=scratch("dv", *fv.shape)).baddbmm_(fk, dS_ends)
                if normalize:
                    z_starts = scratch.running("z", z_now, fk.sum(-2))
                    dfq.addcmul_(dd, z_starts[:, None])
                    writes = torch.bmm(fq.mT, dd)[..., 0]
                    dz_ends = scratch.running("dz", dz_now, writes, reverse=True)
                    dfk.add_(dz_ends[:, None])
                else:  # z is written, and not read
                    dfk.unflatten(0, (-1, n)).add_(dz_now[:, None, None])

                if slope is not None:
                    dfq.mul_(slope(fq))
                    dfk.mul_(slope(fk))
                for target, gradient in zip(gradient_rows, (dfq, dfk, dfv), strict=True):
                    target.copy_(gradient.view(target.shape))
    return dq, dk, dv, dS, dz


@_forward.register_fake
def _(q, k, v, S, z, feature_map, normalize, chunk_size):
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = q.new_empty((len(q), q.shape[1] if normalize else 0), dtype=S.dtype)
    return out, denominator, torch.empty_like(S), torch.empty_like(z)


@_backward.register_fake
def _(grad_out, grad_S, grad_z, q, k, v, S, z, *rest):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, S, z)
    )


_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


_backward_once = once_differentiable(
    _backward,
    'form "chunkwise" can be differentiated once, in reverse mode: for more take "masked".',
)


class _Linear(torch.autograd.Function):
    """`_forward` with `_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, S, z, feature_map, normalize, chunk_size):
        return _forward(q, k, v, S, z, feature_map, normalize, chunk_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, S, z, *ctx.options = inputs
        _, denominator, _, _ = output
        ctx.mark_non_differentiable(denominator)
        ctx.save_for_backward(q, k, v, S, z, denominator)

    @staticmethod
    def backward(ctx, grad_out, _, grad_S, grad_z):
        arguments = (grad_out, grad_S, grad_z, *ctx.saved_tensors, *ctx.options)
        return (*_backward_once(*arguments), None, None, None)


def _segments(q, chunk_size):
    """Yield slices of sequences, the sizes of their segments, and the chunks in each segment.

    A segment is a part of one sequence or, where sequences are short, several of them entire. Its
    chunks are of equal size: what is left at the end of a sequence is a segment of its own.
    """
    G, N, _ = q.shape
    size = SEGMENT["cuda" if q.is_cuda else "cpu"]
    per_segment = max(1, min(size, N) // chunk_size)
    whole, left = divmod(N, chunk_size)
    chunks = [per_segment] * (whole // per_segment)
    if whole % per_segment:
        chunks.append(whole % per_segment)
    sizes = [n * chunk_size for n in chunks]
    if left:
        chunks, sizes = [*chunks, 1], [*sizes, left]
    g = max(1, size // max(N, 1))
    for start in range(0, G if N else 0, g):
        yield slice(start, start + g), sizes, chunks


def _split(heads, sizes, *tensors):
    """For each tensor (G, N, ...) the rows (g, size, ...) of each segment of some sequences."""
    # Without normalizer the denominators are (G, 0): an empty piece for each segment.
    return [
        x[heads].split(sizes, dim=1) if x.shape[1] else [x[heads]] * len(sizes) for x in tensors
    ]


def _chunks(x, n, dtype):
    """Rows (g, n L, C) as chunks (g n, L, C)."""
    return x.to(dtype).reshape(len(x) * n, x.shape[1] // n, x.shape[2])


def _features(feature_map, x, n, scratch, name):
    """The features of rows (g, n L, C), as chunks (g n, L, C)."""
    write, _ = FEATURE_MAPS[feature_map]
    if write is None:
        return _chunks(x, n, scratch.like.dtype)
    y = scratch(name, *x.shape)
    write(x.to(y.dtype), y, scratch("product", *x.shape))
    return _chunks(y, n, y.dtype)


class _Scratch:
    """Memory that is used again under the same name, as new memory takes long to touch."""

    def __init__(self, like):
        self.like = like
        self.held = {}
        # Row i of the first adds up what comes before chunk i, row i + 1 of the second what comes
        # after it; row n of the first and row 0 of the second add up everything.
        ones = like.new_ones(33, 32)
        self.before, self.after = ones.tril(-1), ones.triu()

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(shape)

    def running(self, name, state, writes, reverse=False):
        """The state (g, ...) before each chunk (g n, ...), which its writes update in place.

        With `reverse` chunks come in reverse order: it is the state after each of them.
        """
        g, shape = len(state), writes.shape
        n = len(writes) // g
        first, writes = state.reshape(g, 1, -1), writes.view(g, n, -1)
        if n <= 32:  # a product with a triangle of ones is faster than a sum in order
            triangle = (self.after if reverse else self.before)[: n + 1, :n].expand(g, -1, -1)
            out = self(name, g, n + 1, first.shape[-1])
            states = torch.baddbmm(first, triangle, writes, out=out)
        else:
            writes = writes.flip(1) if reverse else writes
            states = torch.cat([first, writes], dim=1).cumsum(dim=1)
            states = states.flip(1) if reverse else states
        each, last = (states[:, 1:], states[:, 0]) if reverse else (states[:, :-1], states[:, -1])
        state.copy_(last.view(state.shape))
        return each.reshape(shape)
