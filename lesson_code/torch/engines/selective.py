r"""A memory in which each entry decays by itself, as in Mamba: no matrix product does its work.

    a_t = exp(Δ_t A)    w_t = Δ_t x_t        h_t = a_t ∘ h_{t-1} + B_t w_tᵀ        y_t = h_tᵀ C_t

with h (K, E) here, so that the many channels E lie side by side in memory. Its gradients run
backward in time, with dy for the gradient of the output and g for that of the logarithm of a,

    dh_t = C_t dy_tᵀ + a_{t+1} ∘ dh_{t+1}        g_t = dh_t ∘ a_t ∘ h_{t-1}

    dC_t = h_t dy_t    dB_t = dh_t w_t    dw_t = dh_tᵀ B_t        dA = Σ_t g_t ∘ Δ_t
    dΔ_t = Σ_k g_t ∘ A (and what w_t = Δ_t x_t passes on)

There are N E K numbers h, many more than inputs or outputs, so that time goes where they go. They
are made a *segment* of positions at a time, in memory that stays in the processor's cache and is
used again; only the state at the start of each segment is kept, from which the backward pass makes
them again. exp, products and sums see a whole segment, and one step from t - 1 to t is a single
operation on the entries of h.
"""

import math

import torch
from torch import Tensor

from lesson_code._custom_ops import fold, once_differentiable
from lesson_code.torch.precision import full_precision

# Numbers h in a segment, and the fewest positions: it bounds how many states are kept.
SEGMENT, FEWEST = 2**19, 16


def selective(
    form: str | None, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs (..., N, E) and the last state (..., E, K), by "recurrent" or "scan".

    x and delta are (..., N, E), of at least one token, A is (E, K), B and C are (..., N, K); h
    (..., E, K) has the leading dimensions that x, delta and B share, to which those of C may add.
    All have one dtype. None takes "recurrent" for a single token, else "scan".
    """
    if form == "recurrent" or (form is None and x.shape[-2] == 1):
        return _recurrent(x, delta, A, B, C, h)
    return _scan(x, delta, A, B, C, h)


def _recurrent(x, delta, A, B, C, h):
    outputs = []
    for x_t, delta_t, B_t, C_t in zip(*(z.unbind(-2) for z in (x, delta, B, C)), strict=True):
        decay = (delta_t[..., :, None] * A).exp()  # (..., E, K)
        h = decay * h + (delta_t * x_t)[..., :, None] * B_t[..., None, :]
        outputs.append(h @ C_t[..., :, None])  # (..., E, 1)
    return torch.cat(outputs, dim=-1).mT, h


def _scan(x, delta, A, B, C, h):
    shared = h.shape[:-2]
    leading = torch.broadcast_shapes(shared, C.shape[:-2])
    G = math.prod(leading)
    flat = [
        x.expand(*leading, *x.shape[-2:]).reshape(G, *x.shape[-2:])
        for x in (delta * x, delta, A.mT, B, C, h.mT)
    ]
    length = min(x.shape[-2], max(FEWEST, SEGMENT // max(1, flat[-1].numel())))
    y, _, h_end = _Selective.apply(*flat, length)
    y = y.reshape(*leading, *y.shape[-2:])
    if leading != shared:  # more that read than memories, of which each is wanted once
        _, h_end = _scan(x, delta, A, B, B, h)
        return y, h_end
    return y, h_end.mT.reshape(h.shape)


@torch.library.custom_op("lesson_code::selective_forward", mutates_args=())
def _forward(
    w: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan of G sequences in segments of some length: one operator for autograd, compile, vmap.

    w and delta are (G, N, E), A is (G, K, E), B and C are (G, N, K), h is (G, K, E). Returns y
    (G, N, E), the states at the starts of the segments (G, n, K, E) and the last state (G, K, E).
    """
    y, starts = torch.empty_like(w, memory_format=torch.contiguous_format), []
    a, b, h_all = _scratch(h, length, length, length + 1)
    h_all[:, 0] = h
    with full_precision(w):
        for rows, L in _segments(w, length):
            starts.append(h_all[:, 0].clone())
            _decays(delta[:, rows], A, out=a[:, :L])
            _states(a[:, :L], B[:, rows], w[:, rows], b[:, :L], h_all[:, : L + 1])
            y[:, rows] = (C[:, rows, None] @ h_all[:, 1 : L + 1])[:, :, 0]
            h_all[:, 0] = h_all[:, L]
    return y, torch.stack(starts, dim=1), h_all[:, 0].clone()


@torch.library.custom_op("lesson_code::selective_backward", mutates_args=())
def _backward(
    dy: Tensor,
    dh_end: Tensor,
    w: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    starts: Tensor,
    length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `_forward` with respect to w, delta, A, B, C and h."""
    dw, ddelta, dA, dB, dC = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w, delta, A, B, C)
    )
    dA.zero_()
    a, b, dh_all, h_all = _scratch(dh_end, length, length, length, length + 1)
    carried = dh_end
    with full_precision(w):
        for (rows, L), h in reversed([*zip(_segments(w, length), starts.unbind(1), strict=True)]):
            w_rows, delta_rows, B_rows, C_rows, dy_rows = (x[:, rows] for x in (w, delta, B, C, dy))
            a_rows, dh = a[:, :L], dh_all[:, :L]
            h_all[:, 0] = h
            _decays(delta_rows, A, out=a_rows)
            _states(a_rows, B_rows, w_rows, b[:, :L], h_all[:, : L + 1])
            dC[:, rows] = (dy_rows[:, :, None] @ h_all[:, 1 : L + 1].mT)[:, :, 0]

            torch.mul(C_rows[..., None], dy_rows[:, :, None], out=dh)
            decays, each = a_rows.unbind(1), dh.unbind(1)
            each[-1].add_(carried)
            for t in reversed(range(1, L)):
                each[t - 1].addcmul_(decays[t], each[t])
            carried = decays[0] * each[0]

            dB[:, rows] = (w_rows[:, :, None] @ dh.mT)[:, :, 0]
            dw[:, rows] = (B_rows[:, :, None] @ dh)[:, :, 0]
            g = dh.mul_(a_rows).mul_(h_all[:, :L])
            ddelta[:, rows] = torch.mul(g, A[:, None], out=b[:, :L]).sum(2)
            dA += torch.mul(g, delta_rows[:, :, None], out=b[:, :L]).sum(1)
    return dw, ddelta, dA, dB, dC, carried


@_forward.register_fake
def _(w, delta, A, B, C, h, length):
    y = torch.empty_like(w, memory_format=torch.contiguous_format)
    starts = h.new_empty(len(h), -(-w.shape[1] // length), *h.shape[1:])
    return y, starts, torch.empty_like(h, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(dy, dh_end, w, delta, A, B, C, starts, length):
    return tuple(
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (w, delta, A, B, C, dh_end)
    )


_forward.register_vmap(fold(_forward))
_backward.register_vmap(fold(_backward))


_backward_once = once_differentiable(
    _backward,
    'form "scan" can be differentiated once, in reverse mode: for more take "recurrent".',
)


class _Selective(torch.autograd.Function):
    """`_forward` with `_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w, delta, A, B, C, h, length):
        return _forward(w, delta, A, B, C, h, length)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, _, ctx.length = inputs
        _, starts, _ = output
        ctx.mark_non_differentiable(starts)
        ctx.save_for_backward(*tensors, starts)

    @staticmethod
    def backward(ctx, dy, _, dh_end):
        arguments = (dy, dh_end, *ctx.saved_tensors, ctx.length)
        return (*_backward_once(*arguments), None)


def _segments(x, length):
    """Slices of positions, and how many they are."""
    N = x.shape[1]
    return [(slice(i, i + length), min(length, N - i)) for i in range(0, N, length)]


def _scratch(like, *lengths):
    """Memory for one array (G, L, K, E) of each length."""
    G, K, E = like.shape
    return [like.new_empty(G, L, K, E) for L in lengths]


def _decays(delta, A, out):
    """exp(Δ A) at each position: (G, L, E) and (G, K, E) -> (G, L, K, E)."""
    torch.mul(delta[:, :, None], A[:, None], out=out).exp_()


def _states(a, B, w, writes, h):
    """Fill h (G, 1 + L, K, E), whose first row is the state before; `writes` is scratch."""
    torch.mul(B[..., None], w[:, :, None], out=writes)
    each = h.unbind(1)
    for t, (a_t, write) in enumerate(zip(a.unbind(1), writes.unbind(1), strict=True)):
        torch.addcmul(write, a_t, each[t], out=each[t + 1])
