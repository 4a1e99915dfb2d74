"""What happens around each operator's mathematics.

The body of an operator gets arrays that fit together, in the dtype in which sums are kept, and the
memory before the first of at least one token. It returns its outputs, and the last memory with
them. Outside these arrive in the dtype of the input, the memory only where it was asked for.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lesson_code._contract import Contract

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
        contract = Contract(body, axes, state, empty, reads, forms, ranges)

        @functools.wraps(body)
        def run(*args, **kwargs):
            call = contract.hold(np.ndarray, args, kwargs)
            contract.check_values(call.arrays)
            values = call.values | {
                name: np.asarray(array, call.accumulation) for name, array in call.arrays.items()
            }
            memory = None
            if state is not None:
                memory = contract.first_memory(
                    call, lambda shape, x: np.array(np.broadcast_to(x, shape), call.accumulation)
                )
                values["initial_state"] = memory
            if memory is not None and contract.has_no_token(call):
                out = np.zeros(contract.output_shape(call), call.dtype)
            else:
                result = body(**values)
                out, memory = result if isinstance(result, tuple) else (result, None)
                out = out.astype(call.dtype, copy=False)
            return (out, memory) if call.values.get("return_state") else out

        run.__doc__ = contract.documented(body.__doc__, shapes=False)
        run.contract = contract  # type: ignore[attr-defined]
        return run

    return declare
