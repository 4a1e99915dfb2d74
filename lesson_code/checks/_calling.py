"""Drawing arguments and calling functions: all that knows about NumPy and torch."""

import inspect
from collections.abc import Iterable

import numpy as np

from lesson_code._arguments import dtype_name
from lesson_code.checks._agreement import EPSILONS


def random_qkv(
    rng: np.random.Generator, N: int, *, leading: tuple[int, ...] = (), D: int = 5, M: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw q, k (..., N, D) and v (..., N, M) from a normal law; ... is ``leading``.

    Parameters
    ----------
    rng : numpy.random.Generator
    N : int
    leading : tuple of int
    D, M : int

    Returns
    -------
    q, k, v : arrays, float64

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = random_qkv(np.random.default_rng(0), 7)
    >>> q.shape, k.shape, v.shape
    ((7, 5), (7, 5), (7, 3))
    """
    q, k, v = (rng.normal(size=(*leading, N, width)) for width in (D, D, M))
    return q, k, v


def to_numpy(x):
    if hasattr(x, "detach"):  # a torch tensor
        x = x.detach().cpu()
        x = x.float() if dtype_name(x) == "bfloat16" else x
    return np.asarray(x)


def like(array, template):
    """A NumPy array as what ``template`` is, in its dtype."""
    if hasattr(template, "new_tensor"):
        return template.new_tensor(array)
    return np.asarray(array, dtype=template.dtype)


def is_array(x):
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype")


def is_float(x):
    return is_array(x) and dtype_name(x) in EPSILONS


class Unusable(Exception):
    """What a function returned is of no use; the text goes after "your function"."""


def map_arrays(function, x):
    """Apply a function to an array, or to all that a tuple, list or dictionary holds."""
    if isinstance(x, dict):
        return {key: map_arrays(function, item) for key, item in x.items()}
    if isinstance(x, tuple | list):
        items = [map_arrays(function, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return function(x)


def copy_of(x):
    def copy(item):
        if hasattr(item, "detach"):
            return item.detach().clone().requires_grad_(item.requires_grad)
        return item.copy() if is_array(item) else item

    return map_arrays(copy, x)


def leaves_of(x, name):
    """Names and values of an array, or of all arrays in a tuple, list or dictionary."""
    if isinstance(x, dict):
        items = list(x.items())
    elif isinstance(x, tuple | list):
        items = list(zip(getattr(x, "_fields", range(len(x))), x, strict=True))
    else:
        return [] if x is None else [(name, x)]
    return [leaf for key, item in items for leaf in leaves_of(item, f"{name}[{key}]")]


def values_of(x):
    return [value for _, value in leaves_of(x, "")]


def draw(inputs, seed, N, shape):
    rng = np.random.default_rng(seed)
    if not (inputs is None or callable(inputs)):
        raise TypeError(
            f"inputs must be a function (rng, N) -> arguments, got {type(inputs).__name__}."
        )
    args = random_qkv(rng, N, **shape) if inputs is None else inputs(rng, N)
    if not (is_array(args) or hasattr(args, "__iter__")):
        raise TypeError(
            f"inputs must return an array or a tuple of arguments, got {type(args).__name__}."
        )
    return (args,) if is_array(args) else tuple(args)


def cases(fn, inputs, seed, *sizes):
    """Yield names and values of the arguments; leading dimensions are for q, k, v alone."""
    for N, shape in sizes:
        if inputs is None or "leading" not in shape:
            args = draw(inputs, seed, N, shape)
            yield "qkv" if inputs is None else names_of(fn, len(args)), args


def names_of(fn, count):
    """The names that the function itself gives to its arguments, if it has that many."""
    parameters: Iterable[inspect.Parameter] = []  # built-in functions have no signature
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        pass
    names = [x.name for x in parameters if x.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names[:count] if len(names) >= count else [f"input {i}" for i in range(count)]


def time_axes_of(inputs, seed, N, shape):
    """For each argument, the axes that get longer with N."""
    pairs = zip(draw(inputs, seed, N, shape), draw(inputs, seed, N + 1, shape), strict=True)
    axes = [
        [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
        if is_array(x)
        else []
        for x, y in pairs
    ]
    if not any(axes):
        raise ValueError("inputs must return arrays that get longer with N, none does.")
    return axes


def length_of(args, axes):
    """N, read from the first argument that has a time axis."""
    return next(x.shape[axis[0]] for x, axis in zip(args, axes, strict=True) if axis)


def describe(names, args):
    return ", ".join(f"{name} {shown(x)}" for name, x in zip(names, args, strict=True))


def shown(x):
    """The shape of an array; a number to five digits; anything else as Python writes it."""
    if is_array(x):
        if x.shape:
            return str(tuple(x.shape))
        x = x.item()
    return repr(float(f"{x:.5g}")) if isinstance(x, float) else repr(x)


def run(fn, names, args, *, overflow="ignore", **keywords):
    """Call ``fn`` on copies; refuse an exception, a missing return and a changed input."""
    copies = [copy_of(x) for x in args]
    where = f"With {describe(names, args)}"
    try:
        with np.errstate(all="ignore", over=overflow):
            result = fn(*copies, **keywords)
        refuse_none(result)
    except Unusable as error:
        raise AssertionError(f"{where} your function {error}") from error
    except Exception as error:
        raise AssertionError(f"{where} your function raised {told(error)}") from error
    for name, before, after in zip(names, args, copies, strict=True):
        if is_array(before) and not unchanged(before, after):
            raise AssertionError(
                f"{where} your function changed {name} in place; whoever called it still needs "
                "those values. Write x = x + y, which makes a new array, in place of x += y."
            )
    return result


def refuse_none(result):
    if result is None:
        raise Unusable("returned None: is its return missing?")


def refuse_no_pair(result):
    if not isinstance(result, tuple) or len(result) != 2:
        raise AssertionError(
            "With return_state=True your function must return the pair (out, state), it returned "
            f"{type(result).__name__}."
        )


def told(error):
    """An exception in a sentence."""
    return ": ".join(filter(None, [type(error).__name__, str(error).rstrip(". ")])) + "."


def unchanged(before, after):
    before, after = to_numpy(before), to_numpy(after)
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")


def output_of(result):
    """The output as a NumPy array: the result, or the first item of a tuple."""
    out = result[0] if isinstance(result, tuple) else result
    try:
        return to_numpy(out)
    except (TypeError, ValueError) as error:  # such as a tuple of arrays of several shapes
        raise AssertionError(
            f"Your output must be one array, it is of type {type(out).__name__}."
        ) from error


def time_axis_of(out, args, axes):
    """The axis of an output that is time: of length N, where an input has its own if it can be."""
    N = length_of(args, axes)
    likely = [i[0] - x.ndim for x, i in zip(args, axes, strict=True) if i and x.ndim == out.ndim]
    for axis in (*likely, -2, -1, *range(-out.ndim, -2)):
        if -out.ndim <= axis and out.shape[axis] == N:
            return axis
    raise AssertionError(f"Your output has shape {out.shape}, no axis of which has length N = {N}.")
