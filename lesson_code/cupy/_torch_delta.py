"""The delta rule by its kernels as an operator of torch, for autograd, compile and vmap."""

import torch
from torch import Tensor

from lesson_code._custom_ops import check_values, lead, once_differentiable
from lesson_code.cupy.delta import backward, forward


def delta_scan(q, k, v, beta, log_decay, state):
    """(outputs, last state), both differentiable."""
    check_values("log_decay", log_decay, "at most 0")
    arrays = q, k, v, beta, log_decay, state.float()
    leading = torch.broadcast_shapes(*(x.shape[:-2] for x in arrays))
    return _DeltaScan.apply(*(x.expand(*leading, *x.shape[-2:]) for x in arrays))


@torch.library.custom_op("lesson_code::delta_scan", mutates_args=())
def _scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`forward` of delta.py, of tensors that all have the same leading dimensions."""
    return forward(q, k, v, beta, log_decay, state)


@torch.library.custom_op("lesson_code::delta_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` of delta.py, in the dtypes and shapes of what the gradients belong to."""
    dq, dk, dv, d_beta, d_log, d_state = backward(grad, grad_last, q, k, v, beta, log_decay, state)
    d_beta = d_beta.sum(dim=-1, keepdim=True).to(beta.dtype)
    if log_decay.shape[-1] == 1:
        d_log = d_log.sum(dim=-1, keepdim=True)
    return dq, dk, dv.to(v.dtype), d_beta, d_log.to(log_decay.dtype), d_state


@_scan.register_fake
def _(q, k, v, beta, log_decay, state):
    return v.new_empty(v.shape), state.new_empty(state.shape)


@_scan_backward.register_fake
def _(grad, grad_last, *arrays):
    return tuple(x.new_empty(x.shape) for x in arrays)


_scan.register_vmap(lead(_scan))
_scan_backward.register_vmap(lead(_scan_backward))

_backward_once = once_differentiable(
    _scan_backward,
    "the kernels of delta_scan can be differentiated once, in reverse mode: for more take "
    'backend=None and form="recurrent" of the functions of lesson_code.torch.',
)


class _DeltaScan(torch.autograd.Function):
    """`_scan` with `_scan_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, beta, log_decay, state):
        return _scan(q, k, v, beta, log_decay, state)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, grad_last):
        return _backward_once(grad, grad_last, *ctx.saved_tensors)
