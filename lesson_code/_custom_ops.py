"""What operators on tensors share: rules for vmap, an end to derivatives, checks of values."""

import torch
from torch import Tensor

from lesson_code import _arguments


def lead(operator):
    """The rule by which vmap calls an operator: the mapped axis is one more leading dimension.

    All its tensors must have the same leading dimensions.
    """
    return _rule(operator, lambda x: x, lambda x, size: x)


def fold(operator):
    """The rule by which vmap calls an operator: the mapped axis becomes part of the axis G."""
    return _rule(
        operator,
        lambda x: x.flatten(0, 1),
        lambda x, size: x.unflatten(0, (size, len(x) // max(size, 1))),
    )


def _rule(operator, enter, leave):
    """Call an operator with the mapped axis in front, as `enter` makes it fit."""

    def rule(info, in_dims, *args):
        size = info.batch_size

        def first(x, dim):
            if not isinstance(x, Tensor):
                return x
            return enter(x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0))

        out = tuple(leave(x, size) for x in operator(*map(first, args, in_dims)))
        return out, (0,) * len(out)

    return rule


def once_differentiable(backward, message):
    """The operator `backward`, with an error as its derivative.

    Without this ``torch.func`` takes it for a constant, and its derivative for 0.
    """

    class OnceDifferentiable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args):
            return backward(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError(message)

    def run(*args):
        if torch.compiler.is_compiling():  # which traces no Function inside a Function
            return backward(*args)
        return OnceDifferentiable.apply(*args)

    return run


def has_values(tensor):
    """Whether the values of a tensor can be looked at.

    Under ``torch.compile`` and ``torch.func`` a tensor stands for values that are not known yet;
    while a CUDA graph is captured nothing may wait for them.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
        or isinstance(tensor, torch._subclasses.FakeTensor)
        or tensor.is_meta
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def check_values(name, tensor, kind):
    """Refuse a tensor with a value out of its range, where values can be looked at.

    Right values are an interval: so the least and the largest speak for all of them, unless one is
    NaN, and take a tenth of the time.
    """
    if has_values(tensor) and tensor.numel():
        tensor = tensor.detach()
        least, largest = (end.item() for end in tensor.aminmax())
        is_wrong = _arguments.OUTSIDE[kind]
        if is_wrong(least) or is_wrong(largest) or least != least:
            _arguments.check_values(name, tensor, kind)
