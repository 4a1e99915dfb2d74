"""The causal scan by its kernels as an operator of torch, for autograd, compile and vmap."""

import torch
from torch import Tensor

from lesson_code import _arguments
from lesson_code._custom_ops import lead, once_differentiable
from lesson_code.cupy._launches import saved_interval, scan
from lesson_code.cupy.linear import backward


def causal_scan(q, k, v, initial, normalize, keep, kernel):
    """(outputs, last state, which is empty unless kept), both differentiable."""
    states = () if initial is None else initial.shape[:-2]
    leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], states)
    q, k, v = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, v))
    if initial is not None:
        initial = initial.expand(*leading, *initial.shape[-2:])
    out, last, *_ = _Scan.apply(q, k, v, initial, normalize, keep, kernel)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`scan` of _launches.py, of tensors that all have the same leading dimensions.

    The last result are the states that the gradients need.
    """
    interval = saved_interval(q, k, v) if kernel == "pipelined" else 0
    out, last, normalizers = scan(
        kernel, q, k, v, initial, ones=(0, 0, int(normalize or keep)),
        dtype=_arguments.dtype_name(q), keep=keep or interval > 0, normalize=normalize,
        interval=interval,
    )  # fmt: skip
    saved = last if interval else None
    if interval:
        last = last[..., -1, :, :].clone() if keep else None
    return tuple(_nothing(q) if x is None else x for x in (out, last, normalizers, saved))


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
    saved: Tensor,
    normalize: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward` of linear.py."""
    states = saved if saved.ndim > q.ndim else None
    arguments = grad, grad_last, q, k, v, initial, out, normalizers, states, normalize, kernel
    *gradients, d_initial = backward(*arguments)
    return *gradients, _nothing(q) if d_initial is None else d_initial


@_scan.register_fake
def _(q, k, v, initial, normalize, keep, kernel):
    state, floats = (*v.shape[:-2], k.shape[-1], v.shape[-1] + 1), {"dtype": torch.float32}
    last = q.new_empty(state, **floats) if keep else _nothing(q)
    normalizers = q.new_empty(v.shape[:-1], **floats) if normalize else _nothing(q)
    interval = saved_interval(q, k, v) if kernel == "pipelined" else 0
    count = -(-v.shape[-2] // interval) if interval else 0
    columns = v.shape[-1] + int(normalize or keep)
    saved = (*v.shape[:-2], count, q.shape[-1], columns) if interval else _nothing(q).shape
    return q.new_empty(v.shape), last, normalizers, q.new_empty(saved, **floats)


@_scan_backward.register_fake
def _(grad, grad_last, q, k, v, initial, *_):
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    return *gradients, _nothing(q) if initial is None else initial.new_empty(initial.shape)


def _nothing(like):
    """Operators return tensors alone: this one stands for None, wherever vmap is."""
    return like.new_empty((*like.shape[:-2], 0), dtype=torch.float32)


_scan.register_vmap(lead(_scan))
_scan_backward.register_vmap(lead(_scan_backward))

_backward_once = once_differentiable(
    _scan_backward,
    "the kernels of causal_scan can be differentiated once, in reverse mode: for more take "
    "lesson_code.torch.linear_attention with form='masked'.",
)


class _Scan(torch.autograd.Function):
    """`_scan` with `_scan_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, initial, normalize, keep, kernel):
        return _scan(q, k, v, initial, normalize, keep, kernel)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, initial, ctx.normalize, ctx.keep, ctx.kernel = inputs
        out, _, normalizers, saved = output
        ctx.mark_non_differentiable(normalizers, saved)
        if not ctx.normalize:  # the gradients need no outputs then
            out = normalizers
        ctx.save_for_backward(q, k, v, initial, out, normalizers, saved)

    @staticmethod
    def backward(ctx, grad, grad_last, *_):
        saved = ctx.saved_tensors  # once, as activation checkpointing demands
        grad_last, initial = grad_last if ctx.keep else None, saved[3]
        arguments = grad, grad_last, *saved, ctx.normalize, ctx.kernel
        *gradients, d_initial = _backward_once(*arguments)
        return *gradients, None if initial is None else d_initial, None, None, None
