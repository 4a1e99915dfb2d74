"""The decaying scan by its kernels as an operator of torch, for autograd, compile and vmap."""

import torch
from torch import Tensor

from lesson_code._custom_ops import lead, once_differentiable
from lesson_code.cupy.decay import backward, forward


def decaying_scan(q, k, v, log_decay, bonus, state, kernel):
    """(outputs, last state), both differentiable."""
    heads = () if bonus is None else bonus.shape[:-1]
    arrays = q, k, v, log_decay, state
    leading = torch.broadcast_shapes(heads, *(x.shape[:-2] for x in arrays))
    q, k, v, log_decay, state = (x.expand(*leading, *x.shape[-2:]) for x in arrays)
    if bonus is not None:
        bonus = bonus.float().expand(*leading, -1)
    return _DecayingScan.apply(q, k, v, log_decay, bonus, state.float(), kernel)


@torch.library.custom_op("lesson_code::decaying_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    state: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """`forward` of decay.py, of tensors that all have the same leading dimensions."""
    return forward(q, k, v, log_decay, bonus, state, kernel)


@torch.library.custom_op("lesson_code::decaying_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor | None,
    state: Tensor,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` of decay.py."""
    *gradients, d_log, d_bonus, d_state = backward(
        grad, grad_last, q, k, v, log_decay, bonus, state, kernel
    )
    if log_decay.shape[-1] == 1:
        d_log = d_log.sum(dim=-1, keepdim=True).to(log_decay.dtype)
    d_bonus = _nothing(state) if d_bonus is None else d_bonus.sum(dim=-2)
    return *gradients, d_log, d_bonus, d_state


@_scan.register_fake
def _(q, k, v, log_decay, bonus, state, kernel):
    return v.new_empty(v.shape), state.new_empty(state.shape)


@_scan_backward.register_fake
def _(grad, grad_last, q, k, v, log_decay, bonus, state, kernel):
    gradients = [x.new_empty(x.shape) for x in (q, k, v, log_decay)]
    d_bonus = _nothing(state) if bonus is None else bonus.new_empty(bonus.shape)
    return *gradients, d_bonus, state.new_empty(state.shape)


def _nothing(like):
    """Operators return tensors alone: this one stands for None, wherever vmap is."""
    return like.new_empty((*like.shape[:-2], 0))


_scan.register_vmap(lead(_scan))
_scan_backward.register_vmap(lead(_scan_backward))

_backward_once = once_differentiable(
    _scan_backward,
    "the kernels of decaying_scan can be differentiated once, in reverse mode: for more take "
    'backend=None and form="recurrent" of the functions of lesson_code.torch.',
)


class _DecayingScan(torch.autograd.Function):
    """`_scan` with `_scan_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, log_decay, bonus, state, kernel):
        return _scan(q, k, v, log_decay, bonus, state, kernel)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *saved, ctx.kernel = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, grad, grad_last):
        saved = ctx.saved_tensors  # once, as activation checkpointing demands
        *gradients, d_bonus, d_state = _backward_once(grad, grad_last, *saved, ctx.kernel)
        return *gradients, None if saved[4] is None else d_bonus, d_state, None
