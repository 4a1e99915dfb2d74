"""The contract of the operators, kept in one place: what happens around each one's mathematics.

As `lesson_code.numpy.operator`, and besides: sums are kept in float32 at least under autocast too,
and values are looked at in eager mode only, as under ``torch.compile`` and ``torch.func`` a tensor
stands for values that are not known yet.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lesson_code._contract import Call, Contract
from lesson_code._custom_ops import has_values
from lesson_code.torch.precision import full_precision

Operator = TypeVar("Operator", bound=Callable[..., Any])


def operator(
    axes: str,
    *,
    state: Any = None,
    empty: Any = 0,
    reads: str = "",
    forms: tuple[str, ...] = (),
    accumulate: bool = True,
    **ranges: str,
) -> Callable[[Operator], Operator]:
    """Declare an operator, as `lesson_code.numpy.operator.operator` does.

    With ``accumulate=False`` its body gets the tensors in their own dtype.
    """

    def declare(body):
        contract = Contract(body, axes, state, reads, forms, ranges)

        @functools.wraps(body)
        def run(*args, **kwargs):
            call = contract.hold(Tensor, args, kwargs)
            tensors = [x for x in call.arrays.values() if isinstance(x, Tensor)]
            if all(map(has_values, tensors)):
                contract.check_values({name: _seen(x) for name, x in call.arrays.items()})
            dtype, device = getattr(torch, call.accumulation), tensors[0].device
            values = dict(call.values)
            if accumulate:
                for name, x in call.arrays.items():
                    values[name] = torch.as_tensor(x, dtype=dtype, device=device)
            memory = None
            if state is not None:
                memory = values["initial_state"] = _first_memory(contract, call, empty, tensors[0])
            if memory is not None and contract.has_no_token(call.sizes):
                shape = (*call.leading, *contract.sizes_of(contract.output, call.sizes))
                # An empty sum, by which gradients find their way to every argument.
                out = sum((x.sum() for x in tensors), torch.zeros(shape, device=device))
            else:
                with full_precision(tensors[0]):
                    result = body(**values)
                out, memory = result if isinstance(result, tuple) else (result, None)
            out = out.to(call.dtype)
            return (out, memory) if call.values.get("return_state") else out

        run.contract = contract
        return run

    return declare


def _first_memory(contract: Contract, call: Call, empty: Any, like: Tensor) -> Any:
    """The memory before the first token, a fresh one; None while its size is not known."""
    given = call.values["initial_state"]
    dtype = getattr(torch, call.accumulation)

    def part(axes, filled):
        sizes = contract.sizes_of(axes, call.sizes)
        if sizes is None:
            return None
        shape = (*call.memory_leading, *sizes)
        return torch.as_tensor(filled, dtype=dtype, device=like.device).expand(shape).clone()

    filled = empty if given is None else given
    if isinstance(contract.state, str):
        return part(contract.state, filled)
    if given is None and not isinstance(empty, tuple):
        filled = [empty] * len(contract.state)
    parts = [part(axes, x) for axes, x in zip(contract.state, filled, strict=True)]
    return None if any(x is None for x in parts) else type(contract.state)(*parts)


def _seen(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
