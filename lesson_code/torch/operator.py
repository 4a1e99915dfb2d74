"""What happens around each operator's mathematics.

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
from lesson_code._custom_ops import check_values
from lesson_code.torch import backends
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
        contract = Contract(body, axes, state, empty, reads, forms, ranges)

        def hold(args, kwargs):
            call = contract.hold(Tensor, args, kwargs)
            for name, kind in ranges.items():
                if isinstance(call.arrays[name], Tensor):  # a number was looked at when it came
                    check_values(name, call.arrays[name], kind)
            dtype, device = getattr(torch, call.accumulation), _first_tensor(call).device
            values = dict(call.values)
            if accumulate and values.get("backend") != "cupy":  # kernels read what they are given
                values |= {name: _tensor((), x, dtype, device) for name, x in call.arrays.items()}
            if state is not None:
                values["initial_state"] = contract.first_memory(
                    call, lambda shape, x: _tensor(shape, x, dtype, device).expand(shape)
                )
            return call, values

        @functools.wraps(body)
        def run(*args, **kwargs):
            call, values = hold(args, backends.faster(contract, args, kwargs))
            memory = values.get("initial_state")
            if memory is not None and contract.has_no_token(call):
                out = _nothing(call, contract.output_shape(call))
                memory = _copied(memory)
            else:
                with full_precision(_first_tensor(call)):
                    result = body(**values)
                out, memory = result if isinstance(result, tuple) else (result, None)
            out = out.to(call.dtype)
            return (out, memory) if values.get("return_state") else out

        run.__doc__ = contract.documented(body.__doc__, shapes=True)
        run.contract = contract  # type: ignore[attr-defined]
        run.hold = hold  # type: ignore[attr-defined]
        return run

    return declare


def held(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator by name, checked, as its body gets them."""
    return function.hold(args, kwargs)[1]  # type: ignore[attr-defined]


def _first_tensor(call: Call) -> Tensor:
    return next(iter(call.arrays.values()))


def _tensor(shape: tuple, x: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor in some dtype, or one of this shape made of a number."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    return torch.full(shape, x, dtype=dtype, device=device)


def _nothing(call: Call, shape: tuple) -> Tensor:
    """An empty sum over all tensors, by which gradients find their way to each of them."""
    sums = [x.sum() for x in call.arrays.values() if isinstance(x, Tensor)]
    return sum(sums[1:], sums[0]).expand(shape)


def _copied(memory: Any) -> Any:
    if isinstance(memory, Tensor):
        return memory.clone()
    return type(memory)(*(part.clone() if isinstance(part, Tensor) else part for part in memory))
