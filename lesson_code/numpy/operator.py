"""The contract of the operators, kept in one place: what happens around each one's mathematics.

The body of an operator gets arrays that fit together, in the dtype in which sums are kept, and the
memory before the first of at least one token. It returns its outputs, and the last memory with
them. Outside these arrive in the dtype of the input, the memory only where it was asked for.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lesson_code._contract import Call, Contract

Array = NDArray[np.floating]
Operator = TypeVar("Operator", bound=Callable[..., Any])


def operator(
    axes: str,
    *,
    state: Any = None,
    empty: Any = 0,
    reads: str = "",
    forms: tuple = (),
    **ranges: str,
) -> Callable[[Operator], Operator]:
    """Declare an operator.

    Parameters
    ----------
    axes : str
        Axes of its arrays and of its output, ``"N D, N D, N M -> N M"`` (`lesson_code._contract`).
    state : str or NamedTuple of str, optional
        Axes of its memory, ``"D M"``, or of each part of it, ``State("D M", "D")``.
    empty : number or NamedTuple of numbers
        What fills each part before the first token.
    reads : str
        The arrays that read the memory and do not write: it does not take their leading axes.
    forms : tuple of str
        What `form` may be, beside None.
    ranges : str
        What the values of an array must be, as in ``log_decay="at most 0"``.
    """

    def declare(body):
        contract = Contract(body, axes, state, reads, forms, ranges)

        @functools.wraps(body)
        def run(*args, **kwargs):
            call = contract.hold(np.ndarray, args, kwargs)
            contract.check_values(call.arrays)
            values = call.values | {
                name: np.asarray(array, call.accumulation) for name, array in call.arrays.items()
            }
            memory = None
            if state is not None:
                memory = values["initial_state"] = _first_memory(contract, call, empty)
            if memory is not None and contract.has_no_token(call.sizes):
                out = np.zeros((*call.leading, *contract.sizes_of(contract.output, call.sizes)))
                out = out.astype(call.dtype)
            else:
                result = body(**values)
                out, memory = result if isinstance(result, tuple) else (result, None)
                out = out.astype(call.dtype, copy=False)
            return (out, memory) if call.values.get("return_state") else out

        run.contract = contract
        return run

    return declare


def _first_memory(contract: Contract, call: Call, empty: Any) -> Any:
    """The memory before the first token, a fresh one; None while its size is not known."""
    given = call.values["initial_state"]

    def part(axes, filled):
        sizes = contract.sizes_of(axes, call.sizes)
        if sizes is None:
            return None
        shape = (*call.memory_leading, *sizes)
        return np.array(np.broadcast_to(filled, shape), call.accumulation)

    filled = empty if given is None else given
    if isinstance(contract.state, str):
        return part(contract.state, filled)
    kind = type(contract.state)
    if given is None and not isinstance(empty, tuple):
        filled = [empty] * len(contract.state)
    parts = [part(axes, x) for axes, x in zip(contract.state, filled, strict=True)]
    return None if any(x is None for x in parts) else kind(*parts)
