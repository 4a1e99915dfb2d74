"""What the operators with a backward pass of their own share: a rule for vmap, and an end."""

import torch
from torch import Tensor


def fold(operator):
    """The rule by which vmap calls an operator: the mapped axis becomes part of the axis G."""

    def rule(info, in_dims, *args):
        def flat(x, dim):
            if not isinstance(x, Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        out = operator(*map(flat, args, in_dims))
        out = tuple(
            x.unflatten(0, (info.batch_size, len(x) // max(info.batch_size, 1))) for x in out
        )
        return out, (0,) * len(out)

    return rule


def lead(operator):
    """The rule by which vmap calls an operator: the mapped axis is one more leading dimension.

    All its tensors must have the same leading dimensions.
    """

    def rule(info, in_dims, *args):
        def first(x, dim):
            if not isinstance(x, Tensor):
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        out = operator(*map(first, args, in_dims))
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
