"""WKV by its kernels as an operator of torch, for autograd, compile and vmap."""

import torch
from torch import Tensor

from lesson_code._custom_ops import check_values, lead, once_differentiable
from lesson_code.cupy.wkv import backward, forward
from lesson_code.numpy.wkv import EMPTY


def wkv(k, v, decay, bonus, state):
    """Outputs, and the three parts of the last state; all but the maximum differentiable."""
    check_values("decay", decay, "positive and finite")
    numerator, denominator, maximum = state
    kept = maximum.detach().clamp(min=EMPTY)  # float16 has made -inf of it
    past = (maximum - kept).exp()  # 1, but for the gradient
    state = torch.stack([past * numerator, past * denominator, kept], dim=-2)
    heads = state.shape[:-2]
    k, v = (x.expand(*heads, *x.shape[-2:]) for x in (k, v))
    w, u = (x.float().expand(*heads, -1) for x in (decay, bonus))
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, w, u, state))
    out, last, _, _ = _WKV.apply(k, v, w, u, state, keep)
    numerator, denominator, maximum = last.unbind(dim=-2)
    return out, numerator, denominator, maximum.detach()


@torch.library.custom_op("lesson_code::wkv", mutates_args=())
def _wkv(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward` of wkv.py, of tensors that all have the same leading dimensions."""
    return forward(k, v, w, u, state, keep)


@torch.library.custom_op("lesson_code::wkv_backward", mutates_args=())
def _wkv_backward(
    grad_out: Tensor,
    grad_last: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    state: Tensor,
    last: Tensor,
    mean: Tensor,
    log_denominator: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`backward` of wkv.py."""
    return backward(grad_out, grad_last, k, v, w, u, state, last, mean, log_denominator)


@_wkv.register_fake
def _(k, v, w, u, state, keep):
    nothing = (*state.shape[:-2], 0)
    mean = state.new_empty(k.shape if keep and k.dtype != torch.float32 else nothing)
    log_denominator = state.new_empty(k.shape if keep else nothing)
    return k.new_empty(k.shape), state.new_empty(state.shape), mean, log_denominator


@_wkv_backward.register_fake
def _(grad_out, grad_last, k, v, w, u, state, *_):
    return tuple(x.new_empty(x.shape) for x in (k, v, w, u, state))


_wkv.register_vmap(lead(_wkv))
_wkv_backward.register_vmap(lead(_wkv_backward))

_backward_once = once_differentiable(
    _wkv_backward,
    "the kernel of wkv can be differentiated once, in reverse mode: for more take "
    "lesson_code.torch.wkv.",
)


class _WKV(torch.autograd.Function):
    """`_wkv` with `_wkv_backward` as its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(k, v, w, u, state, keep):
        return _wkv(k, v, w, u, state, keep)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *inputs, ctx.keep = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs, *_kept(output))

    @staticmethod
    def backward(ctx, grad_out, grad_last, *_):
        saved = ctx.saved_tensors
        inputs, kept = saved[:5], saved[5:]
        if not ctx.keep:  # vmap hides from `wkv` that a gradient will be asked for
            kept = _kept(_wkv(*inputs, True))
        arguments = grad_out, grad_last, *inputs, *kept
        return *_backward_once(*arguments), None


def _kept(output):
    """What `_wkv_backward` wants of what `_wkv` returns."""
    out, last, mean, log_denominator = output
    return last, out if out.dtype == torch.float32 else mean, log_denominator
