"""The scan as an operator of torch: it has gradients, and torch.compile takes it as it is."""

import torch
from torch import Tensor

from lesson_code.cupy.causal_scan import backward, forward
from lesson_code.torch._operators import once_differentiable


def causal_scan(q, k, v, initial, normalize, keep, kernel):
    """(outputs, last state), both differentiable."""
    out, last, _ = _scan(q, k, v, initial, normalize, keep, kernel)
    return out, last


@torch.library.custom_op("lesson_code::causal_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    normalize: bool,
    keep: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    results = forward(q, k, v, initial, normalize, keep, kernel)
    return tuple(_nothing(q) if x is None else x for x in results)


@_scan.register_fake
def _(q, k, v, initial, normalize, keep, kernel):
    states = () if initial is None else initial.shape[:-2]
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], states)
    N, C, M = *k.shape[-2:], v.shape[-1]
    last = q.new_empty((*leading, C, M + 1), dtype=torch.float32) if keep else _nothing(q)
    normalizers = q.new_empty((*leading, N), dtype=torch.float32) if normalize else _nothing(q)
    return q.new_empty((*leading, N, M)), last, normalizers


@torch.library.custom_op("lesson_code::causal_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor,
    grad_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial: Tensor | None,
    out: Tensor,
    normalizers: Tensor,
    normalize: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *inputs, first = backward(
        grad, grad_last, q, k, v, initial, out, normalizers, normalize, kernel
    )
    return *inputs, _nothing(q) if first is None else first


@_scan_backward.register_fake
def _(grad, grad_last, q, k, v, initial, *_):
    leading = grad.shape[:-2]
    inputs = (x.new_empty((*leading, *x.shape[-2:])) for x in (q, k, v))
    first = _nothing(q) if initial is None else initial.new_empty((*leading, *initial.shape[-2:]))
    return *inputs, first


def _nothing(like):
    return like.new_empty(0, dtype=torch.float32)


def _save(ctx, inputs, output):
    q, k, v, initial, ctx.normalize, ctx.keep, ctx.kernel = inputs
    out, _, normalizers = output
    ctx.save_for_backward(q, k, v, initial, out if ctx.normalize else None, normalizers)


def _differentiate(ctx, grad, grad_last, _):
    q, k, v, initial, out, normalizers = ctx.saved_tensors
    *gradients, first = _once(
        grad,
        grad_last if ctx.keep else None,
        q,
        k,
        v,
        initial,
        grad if out is None else out,
        normalizers,
        ctx.normalize,
        ctx.kernel,
    )
    # What was broadcast over leading dimensions receives the sum over them.
    gradients = [g.sum_to_size(x.shape) for g, x in zip(gradients, (q, k, v), strict=True)]
    first = None if initial is None else first.sum_to_size(initial.shape)
    return *gradients, first, None, None, None


_once = once_differentiable(
    _scan_backward,
    "causal_scan can be differentiated once; for higher derivatives use "
    "lesson_code.torch.linear_attention with form='masked'.",
)

_scan.register_autograd(_differentiate, setup_context=_save)
