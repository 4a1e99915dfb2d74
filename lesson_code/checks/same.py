"""The same output as a reference function."""

from collections.abc import Callable
from functools import partial
from numbers import Number

import numpy as np

from lesson_code._arguments import dtype_name
from lesson_code.checks._agreement import close, first, same, tolerance_of
from lesson_code.checks._calling import (
    cases,
    copy_of,
    describe,
    is_array,
    is_float,
    leaves_of,
    output_of,
    run,
    shown,
    to_numpy,
)
from lesson_code.checks._causes import cause, cause_of_shape


def check_same(
    fn: Callable, reference: Callable, *, inputs: Callable | None = None, seed: int = 0
) -> None:
    """Refuse ``fn`` unless it returns what ``reference`` returns for the same inputs.

    Shape, dtype and values are compared, of an array or of each array in a tuple, at N = 7, 1, 2,
    13 and 131 (past two chunks of 64), and with leading dimensions. The error names the first
    position that differs, both values, and a likely cause.

    Examples
    --------
    >>> import numpy as np
    >>> def scores(q, k, v):
    ...     return q @ np.swapaxes(k, -1, -2)
    >>> def halved(q, k, v):
    ...     return scores(q, k, v) / 2
    >>> check_same(scores, scores)
    >>> check_same(halved, scores)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: With q (7, 5), ... is 0.5 times the reference everywhere: is a scale missing...
    """
    passed = None
    sizes: tuple = (7, {}), (1, {}), (2, {}), (13, {"D": 3, "M": 6}), (131, {})
    for names, args in cases(fn, inputs, seed, *sizes, (9, {"leading": (2, 4)})):
        expected = reference(*map(copy_of, args))
        try:
            result = run(fn, names, args)
            compare(result, expected, reference, names, args)
        except AssertionError as error:
            if passed is None:
                raise
            raise AssertionError(f"{error} {what_is_new(passed, args)}") from error
        passed = passed or args


def compare(result, expected, reference, names, args, why=None, in_time=True):
    """Refuse a result that is not the expected one; ``why`` is the cause where it is known.

    Without ``in_time`` the axis -2 of an output is not taken for time.
    """
    where = f"With {describe(names, args)} your"
    got, want = leaves_of(result, "output"), leaves_of(expected, "output")
    if len(got) != len(want) or _holds(result) != _holds(expected):
        raise AssertionError(f"{where} function {_difference(result, expected)}")
    explain = partial(_cause, reference, names, args, in_time) if why is None else lambda *_: why
    floats = [n for n, x in zip(names, args, strict=True) if is_float(x) and n.isidentifier()]
    for (_, a), (name, b) in zip(got, want, strict=True):
        _compare_arrays(a, b, f"{where} {name}", explain, in_time, floats)


def _holds(x):
    return isinstance(x, tuple | list | dict)


def kind_of(x):
    """What something is, in words."""
    if _holds(x):
        return f"a {type(x).__name__} of {len(x)}"
    if is_array(x) and x.shape:
        return "one array"
    return "one number" if is_array(x) or isinstance(x, Number) else f"a {type(x).__name__}"


def _difference(result, expected):
    """What a function returns in place of what is expected, where they hold arrays differently."""
    kinds, where = (kind_of(result), kind_of(expected)), ""
    if kinds[0] == kinds[1] and not isinstance(result, dict):  # as (out, S) and (out, (S, z)) are
        counts = ([len(leaves_of(item, "")) for item in x] for x in (result, expected))
        i = [a == b for a, b in zip(*counts, strict=True)].index(False)
        kinds, where = (kind_of(result[i]), kind_of(expected[i])), f" as output[{i}]"
    hint = " Stack what it holds." * (kinds[0].startswith("a list") and kinds[1] == "one array")
    return f"returns {kinds[0]}{where} where {kinds[1]} is expected.{hint}"


def _as_array(x, what):
    if is_array(x):
        return x
    array = np.asarray(x)
    try:  # fractions and the like are numbers, a generator or a function is none
        return np.asarray(float(x)) if array.dtype.kind == "O" else array
    except (TypeError, ValueError):
        raise AssertionError(
            f"{what} is of type {type(x).__name__}, where numbers are expected."
        ) from None


def _compare_arrays(a, b, what, explain, in_time, floats):
    a, b = _as_array(a, what), np.asarray(b) if not is_array(b) else b
    dtypes, tolerance = [dtype_name(x) for x in (a, b)], tolerance_of(a, b)
    a, b = to_numpy(a), to_numpy(b)
    if a.dtype.kind in "SU" and b.dtype.kind in "biufc":
        text = str(next(a.flat, ""))
        raise AssertionError(f"{what} is text, {text!r:.40}, where numbers are expected.")
    if a.shape != b.shape:
        why = explain(a, b, tolerance)
        message = f"{what} has shape {a.shape}, {b.shape} is expected. {why}"
        raise AssertionError(message.rstrip())
    whole = a.dtype.kind in "biu" and not b.shape  # a number, as Python counts
    other = b.dtype.kind == "f" and not whole or a.dtype.kind not in "biuf"
    if other and dtypes[0] != dtypes[1]:
        why = "."
        if floats:
            why = (
                ": the output keeps the dtype of the inputs. Does an array made inside need "
                f"dtype={floats[0]}.dtype?"
            )
        raise AssertionError(f"{what} has dtype {dtypes[0]}, {dtypes[1]} is expected{why}")
    a, b = a.astype(np.float64), b.astype(np.float64)
    wrong = ~close(a, b, tolerance)
    if wrong.any():
        index = first(wrong)
        at = f" at index {index}" if index else ""
        at += f" (position {index[-2]})" if in_time and a.ndim > 1 else ""
        digits = 5 if f"{a[index]:.5g}" != f"{b[index]:.5g}" else 12
        raise AssertionError(
            f"{what} is wrong{', first' * bool(at)}{at}: expected {b[index]:.{digits}g}, "
            f"got {a[index]:.{digits}g}. {explain(a, b, tolerance)}".rstrip()
        )


def _cause(reference, names, args, in_time, a, b, tolerance):
    if a.shape != b.shape:
        return cause_of_shape(a, b, tolerance)
    with np.errstate(all="ignore"):
        return _cause_by_reference(a, reference, names, args) or cause(a, b, tolerance, in_time)


def _cause_by_reference(a, reference, names, args):
    """Ask the reference what it would return after typical mistakes with its first two inputs."""
    if len(args) < 2 or not all(map(is_float, args[:2])) or args[0].shape != args[1].shape:
        return ""
    if not args[0].shape:  # numbers have no D
        return ""
    (q, k, *rest), root = args, float(args[0].shape[-1]) ** 0.5
    mistakes = {
        f"as if {names[0]} were multiplied by √D: the scale 1/√D is missing": (q * root, k),
        f"as if {names[0]} were divided by √D: 1/√D is applied once too often": (q / root, k),
        f"as if {names[0]} and {names[1]} were exchanged": (k, q),
    }
    for mistake, changed in mistakes.items():
        try:
            other = output_of(reference(*map(copy_of, changed), *map(copy_of, rest)))
        except Exception:  # exchanged inputs may be out of bounds
            continue
        # What is no array of numbers, such as a dictionary, cannot be what came out.
        if other.dtype.kind in "biuf" and same(a, other, tolerance_of(*args[:2])):
            return f"Your output is {mistake}."
    return ""


def what_is_new(passed, args):
    """Compare the case that failed with the first one, which passed."""
    before, now = ([tuple(x.shape) for x in case if is_array(x)] for case in (passed, args))
    if not before:
        return f"With {', '.join(map(shown, passed))} it came out right."
    if len(now[0]) > len(before[0]):
        return (
            "One sequence alone came out right. With leading dimensions count axes from the end: "
            "axis=-2 is time and np.swapaxes(k, -1, -2) transposes; axis=0, .T and .sum(0) reach "
            "into the heads."
        )
    return (
        f"The shapes {', '.join(map(str, before))} came out right: is a length or a chunk size "
        "fixed, or an axis of length 1 squeezed away?"
    )
