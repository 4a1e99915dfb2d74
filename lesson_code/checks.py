"""Checks for exercises: each takes your function, tries it on many inputs and explains a failure.

A check returns None when the function is right, and raises AssertionError with a sentence that says
what is wrong, where, and what is likely to be the cause:

``check_same``
    the same output as a reference function
``check_causal``
    no output depends on later positions
``check_streaming``
    a sequence that is split anywhere gives the same outputs, through the state
``check_linear_cost``
    peak memory grows with N, not with N²
``check_gradients``
    gradients agree with finite differences

All are called as ``check_x(fn, *, inputs=None, seed=0)``, and what runs is ``fn(*inputs(rng, N))``.
Here ``inputs`` is a function of a random generator and a length that returns the arguments; the
checks choose the lengths. Whatever axes get longer with N are taken for time. Without ``inputs``
the arguments are q, k and v from :func:`random_qkv` in float64, as one sequence and with leading
dimensions, for every function of the book takes ``(..., N, D)``. For a function of one sequence
alone write ``inputs=random_qkv``.

The functions may return NumPy arrays or torch tensors; for tensors, let ``inputs`` return tensors.
Two results agree when half the digits of their dtype do (1.5e-8 in float64, 3.5e-4 in float32,
relative to the value and to the largest one), so that rounding is never an error.

Every check also refuses a function that raises, returns None, or changes its inputs in place.
"""

import gc
import inspect
import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from lesson_code._arguments import dtype_name
from lesson_code._likely_causes import (
    EPSILONS,
    cause,
    cause_of_gradient,
    cause_of_shape,
    close,
    first,
    row_factors,
    same,
    tolerance_of,
)

__all__ = [
    "check_causal",
    "check_gradients",
    "check_linear_cost",
    "check_same",
    "check_streaming",
    "random_qkv",
]


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
    return tuple(rng.normal(size=(*leading, N, width)) for width in (D, D, M))


# The checks


def check_same(
    fn: Callable, reference: Callable, *, inputs: Callable | None = None, seed: int = 0
) -> None:
    """Refuse ``fn`` unless it returns what ``reference`` returns for the same inputs.

    Shape, dtype and values are compared, of an array or of each array in a tuple, at N = 7, 1, 2,
    13 and 131 (past two chunks of 64), and with leading dimensions.

    Parameters
    ----------
    fn, reference : callable
        Called as ``fn(*inputs)``.
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default.
    seed : int

    Raises
    ------
    AssertionError
        Names the first position that differs, both values, and a likely cause.

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
    sizes = (7, {}), (1, {}), (2, {}), (13, {"D": 3, "M": 6}), (131, {})
    for names, args in _cases(fn, inputs, seed, *sizes, (9, {"leading": (2, 4)})):
        expected = reference(*map(_copy, args))
        try:
            result = _run(fn, names, args)
            _compare(result, expected, reference, names, args)
        except AssertionError as error:
            if passed is None:
                raise
            raise AssertionError(f"{error} {_what_is_new(passed, args)}") from error
        passed = passed or args


def check_causal(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` if the output at any position depends on inputs at later positions.

    For a position t, everything after t is drawn again, in all inputs and in each alone; outputs up
    to t must stay as they were. Every t is tried at N = 7, and some at N = 131. With the
    default inputs the new values are also tried 1,000 times as large, which brings out maxima over
    the future; a function that overflows under this is not held to it.

    Parameters
    ----------
    fn : callable
        ``fn(*inputs)`` returns an array (..., N, M), or a tuple that begins with it.
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default.
    seed : int

    Raises
    ------
    AssertionError
        Names the first position that looks ahead, and at what.

    Examples
    --------
    >>> import numpy as np
    >>> check_causal(lambda q, k, v: np.cumsum(v, axis=-2))
    >>> check_causal(lambda q, k, v: v - v.mean(axis=-2, keepdims=True))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Position 0 looks ahead: ... a sum, mean, maximum or norm over the whole time...
    """
    for N, shape in (7, {}), (131, {}), (9, {"leading": (2, 4)}):
        for names, args in _cases(fn, inputs, seed, (N, shape)):
            others = _draw(inputs, [seed, 1], N, shape)
            changes = [(others, False)]
            if inputs in (None, random_qkv):
                changes.append(([1000 * x for x in others], True))
            axes = _time_axes(inputs, seed, N, shape)
            cuts = range(N - 1) if N < 100 else (0, 1, 31, 62, 63, 64, 127, N - 2)
            _check_no_leak(fn, names, args, changes, axes, cuts)


def check_streaming(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` unless a sequence in pieces gives the outputs of the whole sequence.

    The first piece runs with ``initial_state=None`` and each later one with the state that the one
    before it returned. Sequences of length 7, 131 and, with leading dimensions, 9 are split at many
    places, into single tokens, and into pieces of which some are empty. States are compared by the
    outputs that they lead to, so they may have any form.

    Parameters
    ----------
    fn : callable
        ``fn(*inputs, initial_state=..., return_state=True)`` returns ``(out, state)``.
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default. Arguments without a time
        axis, such as a decay, go to every piece whole.
    seed : int

    Raises
    ------
    AssertionError
        Names the split and the first position that differs; says if the state is ignored, counted
        twice, or changed in place.

    Examples
    --------
    >>> import numpy as np
    >>> def running_sum(q, k, v, *, initial_state=None, return_state=False):
    ...     out = np.cumsum(v, axis=-2)
    ...     if initial_state is not None:
    ...         out = out + initial_state[..., None, :]
    ...     return out, out[..., -1, :] if v.shape[-2] else initial_state
    >>> check_streaming(running_sum)
    >>> check_streaming(lambda q, k, v, **_: (np.cumsum(v, axis=-2), None))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Split at 3, position 3 is wrong: ... is initial_state used?
    """
    for N, shape in (7, {}), (131, {}), (9, {"leading": (2, 4)}):
        for names, args in _cases(fn, inputs, seed, (N, shape)):
            axes = _time_axes(inputs, seed, N, shape)
            cuts = (N // 2, 1, 2, N - 2, N - 1) if N < 100 else (63, 64, 65, 128)
            splits = [*((cut,) for cut in cuts), (2, 3, N - 3), tuple(range(1, N))]
            with_empty_pieces = [(0,), (N,), (N // 2, N // 2)]
            _check_splits(fn, names, args, axes, splits + with_empty_pieces)


def check_linear_cost(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` if its peak memory grows faster than its sequence.

    The peak of what ``fn`` allocates, its inputs not counted, is measured at N = 501, 1,002 and
    2,004. From step to step linear memory grows by a factor of 2 whatever its constant part is, the
    levels of a prefix scan (N log N) by 2.2, an N by N array by 4; above 2.5 it is refused. Bytes
    are measured, not seconds, so a quadratic loop that stores no matrix passes. Keep D and M small
    in ``inputs``: an N by N array can hide behind N·C·M numbers when C·M is far above 2,000.

    Parameters
    ----------
    fn : callable
        Called as ``fn(*inputs)``. NumPy reports its memory to ``tracemalloc``; for tensors torch
        is asked.
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default.
    seed : int

    Raises
    ------
    AssertionError
        Gives the measured peaks and their growth.

    Examples
    --------
    >>> check_linear_cost(lambda q, k, v: q @ (k.T @ v))
    >>> check_linear_cost(lambda q, k, v: (q @ k.T) @ v)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Memory grows with N²: ...
    """
    sizes = (501, 1002, 2004)
    peaks = []
    for N in sizes:
        ((names, args),) = _cases(fn, inputs, seed, (N, {}))
        if not peaks:
            _run(fn, names, args)  # whatever is imported or cached at first does not count
        peaks.append(_peak_bytes(fn, args))
    noise = 2**16
    if peaks[2] - peaks[1] > 2.5 * (peaks[1] - peaks[0]) + noise:
        measured = ", ".join(
            f"{peak:,} bytes at N = {N:,}" for N, peak in zip(sizes, peaks, strict=True)
        )
        raise AssertionError(
            f"Memory grows with N²: the peak was {measured}, {peaks[2] / peaks[1]:.2f} times as "
            "much for the last doubling (linear memory doubles, an N by N array takes 4 times as "
            f"much). At N = {sizes[2]:,} one N by N array of float64 has {8 * sizes[2] ** 2:,} "
            "bytes: is one formed, as scores, as a mask, or as an intermediate of einsum?"
        )


def check_gradients(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` unless its gradients agree with central differences.

    With NumPy ``fn(*inputs)`` returns ``(out, pullback)``; ``pullback(grad_out)`` takes an array of
    the shape of ``out``, the gradient of some loss with respect to it, and returns a tuple with the
    gradient of that loss with respect to each input. With torch ``fn(*inputs)`` returns a tensor
    (or a tuple that begins with one), and autograd supplies the pullback.

    At N = 6, 1 and, with leading dimensions, 3 every coordinate of every input is tried; at N = 131
    a few random directions. The inputs should be float64: then the differences are good to 5e-6.

    Parameters
    ----------
    fn : callable
    inputs : callable, optional
        ``inputs(rng, N)`` returns the arguments; q, k and v by default. Arguments that are not of
        floating point have no gradient; the pullback may return None in their places.
    seed : int

    Raises
    ------
    AssertionError
        Names the input whose gradient is wrong, its first wrong coordinate, and a likely cause.

    Examples
    --------
    >>> def product(q, k, v):
    ...     return q * k, lambda grad_out: (grad_out * k, grad_out * q, 0 * v)
    >>> check_gradients(product)
    >>> def wrong(q, k, v):
    ...     return q * k, lambda grad_out: (grad_out * k, grad_out * k, 0 * v)
    >>> check_gradients(wrong)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: With q (6, 5), ... the gradient of k is wrong, first at index (0, 0)...
    """
    for N, shape in (6, {}), (1, {}), (3, {"leading": (2, 4)}), (131, {}):
        for names, args in _cases(fn, inputs, seed, (N, shape)):
            _check_pullback(fn, names, args, np.random.default_rng([seed, 2]), every=N < 100)


# Arguments and calls: all that knows about NumPy and torch


def _to_numpy(x):
    if hasattr(x, "detach"):  # a torch tensor
        x = x.detach().cpu()
        x = x.float() if dtype_name(x) == "bfloat16" else x
    return np.asarray(x)


def _like(array, template):
    """A NumPy array as what ``template`` is, in its dtype."""
    if hasattr(template, "new_tensor"):
        return template.new_tensor(array)
    return np.asarray(array, dtype=template.dtype)


def _is_array(x):
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_float(x):
    return _is_array(x) and dtype_name(x) in EPSILONS


def _map(function, x):
    """Apply a function to an array, or to all that a tuple, list or dictionary holds."""
    if isinstance(x, dict):
        return {key: _map(function, item) for key, item in x.items()}
    if isinstance(x, tuple | list):
        items = [_map(function, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return function(x)


def _copy(x):
    def copy(item):
        if hasattr(item, "detach"):
            return item.detach().clone().requires_grad_(item.requires_grad)
        return item.copy() if _is_array(item) else item

    return _map(copy, x)


def _leaves(x, name):
    """Names and values of an array, or of all arrays in a tuple, list or dictionary."""
    if isinstance(x, dict):
        items = list(x.items())
    elif isinstance(x, tuple | list):
        items = list(zip(getattr(x, "_fields", range(len(x))), x, strict=True))
    else:
        return [] if x is None else [(name, x)]
    return [leaf for key, item in items for leaf in _leaves(item, f"{name}[{key}]")]


def _values(x):
    return [value for _, value in _leaves(x, "")]


def _draw(inputs, seed, N, shape):
    rng = np.random.default_rng(seed)
    args = random_qkv(rng, N, **shape) if inputs is None else inputs(rng, N)
    return (args,) if _is_array(args) else tuple(args)


def _cases(fn, inputs, seed, *sizes):
    """Yield names and values of the arguments; leading dimensions are for q, k, v alone."""
    for N, shape in sizes:
        if inputs is None or "leading" not in shape:
            args = _draw(inputs, seed, N, shape)
            yield "qkv" if inputs is None else _names(fn, len(args)), args


def _names(fn, count):
    """The names that the function itself gives to its arguments, if it has that many."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # built-in functions have no signature
        parameters = []
    names = [x.name for x in parameters if x.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return names[:count] if len(names) >= count else [f"input {i}" for i in range(count)]


def _time_axes(inputs, seed, N, shape):
    """For each argument, the axes that get longer with N."""
    pairs = zip(_draw(inputs, seed, N, shape), _draw(inputs, seed, N + 1, shape), strict=True)
    axes = [
        [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if a != b]
        if _is_array(x)
        else []
        for x, y in pairs
    ]
    if not any(axes):
        raise ValueError("inputs must return arrays that get longer with N, none does.")
    return axes


def _length(args, axes):
    """N, read from the first argument that has a time axis."""
    return next(x.shape[axis[0]] for x, axis in zip(args, axes, strict=True) if axis)


def _describe(names, args):
    return ", ".join(
        f"{name} {tuple(x.shape) if _is_array(x) else x!r}"
        for name, x in zip(names, args, strict=True)
    )


def _run(fn, names, args, *, overflow="ignore", **keywords):
    """Call ``fn`` on copies; refuse an exception, a missing return and a changed input."""
    copies = [_copy(x) for x in args]
    where = f"With {_describe(names, args)}"
    try:
        with np.errstate(all="ignore", over=overflow):
            result = fn(*copies, **keywords)
    except Exception as error:
        message = f"{where} your function raised {type(error).__name__}: {error}"
        raise AssertionError(message.rstrip(".") + ".") from error
    if result is None:
        raise AssertionError(f"{where} your function returned None: is its return missing?")
    for name, before, after in zip(names, args, copies, strict=True):
        if _is_array(before) and not _unchanged(before, after):
            raise AssertionError(
                f"{where} your function changed {name} in place; whoever called it still needs "
                "those values. Write x = x + y, which makes a new array, in place of x += y."
            )
    return result


def _unchanged(before, after):
    before, after = _to_numpy(before), _to_numpy(after)
    return np.array_equal(before, after, equal_nan=before.dtype.kind == "f")


def _output(result):
    """The output as a NumPy array: the result, or the first item of a tuple."""
    return _to_numpy(result[0] if isinstance(result, tuple) else result)


def _time_axis(out, N):
    """The axis of an output that is time: of length N, the second to last if it can be."""
    for axis in (-2, -1, *range(-out.ndim, -2)):
        if -out.ndim <= axis and out.shape[axis] == N:
            return axis
    raise AssertionError(f"Your output has shape {out.shape}, no axis of which has length N = {N}.")


# Comparing


def _compare(result, expected, reference, names, args):
    where = f"With {_describe(names, args)} your"
    kinds = [
        f"a {type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else "one array"
        for x in (result, expected)
    ]
    got, want = _leaves(result, "output"), _leaves(expected, "output")
    if len(got) != len(want) or "one array" in kinds and kinds[0] != kinds[1]:
        raise AssertionError(f"{where} function returns {kinds[0]} where {kinds[1]} is expected.")
    for (_, a), (name, b) in zip(got, want, strict=True):
        _compare_arrays(a, b, f"{where} {name}", reference, names, args)


def _compare_arrays(a, b, what, reference, names, args):
    a, b = (x if _is_array(x) else np.asarray(x) for x in (a, b))
    dtypes, tolerance = [dtype_name(x) for x in (a, b)], tolerance_of(a, b)
    a, b = _to_numpy(a), _to_numpy(b)
    if a.shape != b.shape:
        raise AssertionError(
            f"{what} has shape {a.shape}, {b.shape} is expected. {cause_of_shape(a, b, tolerance)}"
        )
    if dtypes[0] != dtypes[1] and b.dtype.kind == "f":
        raise AssertionError(
            f"{what} has dtype {dtypes[0]}, {dtypes[1]} is expected: the output keeps the dtype of "
            "the inputs. Does an array made inside need dtype=q.dtype?"
        )
    a, b = a.astype(np.float64), b.astype(np.float64)
    wrong = ~close(a, b, tolerance)
    if wrong.any():
        index = first(wrong)
        position = f" (position {index[-2]})" if a.ndim > 1 else ""
        with np.errstate(all="ignore"):
            why = _cause_by_reference(a, reference, names, args) or cause(a, b, tolerance)
        raise AssertionError(
            f"{what} is wrong, first at index {index}{position}: expected {b[index]:.5g}, got "
            f"{a[index]:.5g}. {why}".rstrip()
        )


def _cause_by_reference(a, reference, names, args):
    """Ask the reference what it would return after typical mistakes with its first two inputs."""
    if len(args) < 2 or not all(map(_is_float, args[:2])) or args[0].shape != args[1].shape:
        return ""
    (q, k, *rest), root = args, float(args[0].shape[-1]) ** 0.5
    mistakes = {
        f"as if {names[0]} were multiplied by √D: the scale 1/√D is missing": (q * root, k),
        f"as if {names[0]} were divided by √D: 1/√D is applied once too often": (q / root, k),
        f"as if {names[0]} and {names[1]} were exchanged": (k, q),
    }
    for mistake, changed in mistakes.items():
        try:
            other = _output(reference(*map(_copy, changed), *map(_copy, rest)))
        except Exception:  # exchanged inputs may be out of bounds
            continue
        if same(a, other, tolerance_of(*args[:2])):
            return f"Your output is {mistake}."
    return ""


def _what_is_new(passed, args):
    """Compare the case that failed with the first one, which passed."""
    before, now = ([x.shape for x in case if _is_array(x)] for case in (passed, args))
    if before and len(now[0]) > len(before[0]):
        return (
            "One sequence alone came out right. With leading dimensions count axes from the end: "
            "axis=-2 is time and np.swapaxes(k, -1, -2) transposes; axis=0, .T and .sum(0) reach "
            "into the heads."
        )
    return (
        f"The shapes {', '.join(map(str, before))} came out right: is a length or a chunk size "
        "fixed, or an axis of length 1 squeezed away?"
    )


# Looking ahead


def _check_no_leak(fn, names, args, changes, axes, cuts):
    base = _output(_run(fn, names, args))
    tolerance = tolerance_of(base, *filter(_is_float, args))
    if not same(_output(_run(fn, names, args)), base, tolerance):
        raise AssertionError(
            "Two calls with the same inputs give different outputs: a function that draws random "
            "numbers or keeps something between calls cannot be checked."
        )
    if not np.isfinite(base).all():
        raise AssertionError(
            f"With {_describe(names, args)} your output is not finite at index "
            f"{first(~np.isfinite(base))}, so that nothing can be said about what it depends on."
        )
    N = _length(args, axes)
    time = _time_axis(base, N)
    before = np.moveaxis(base, time, 0)

    def look(change, start, stop, which):
        """Draw some inputs again from start to stop; return the output and what of it changed."""
        others, loud = change
        changed = [
            _replace(x, other, axis, slice(start, stop)) if i in which else x
            for i, (x, other, axis) in enumerate(zip(args, others, axes, strict=True))
        ]
        try:
            out = _output(_run(fn, names, changed, overflow="raise" if loud else "ignore"))
        except AssertionError as error:
            if not (loud and isinstance(error.__cause__, FloatingPointError)):
                raise
            out = base  # an overflow says nothing about what the function looks at
        out = np.moveaxis(out, time, 0)
        wrong = ~close(out, before, tolerance)
        wrong[start:] = False  # only the past must not change
        return out, wrong

    alone = [[i] for i in range(len(args)) if axes[i]]
    for t in cuts:
        for change in changes:
            for which in (range(len(args)), *alone):
                out, wrong = look(change, t + 1, N, which)
                if not wrong.any():
                    continue
                index = tuple(int(i) for i in np.argwhere(wrong)[0])
                position = index[0]
                through = [names[i] for (i,) in alone if look(change, t + 1, N, [i])[1].any()]
                seen = [
                    j
                    for j in range(position + 1, N)
                    if any(look(each, j, j + 1, which)[1][position].any() for each in changes)
                ]
                raise AssertionError(
                    f"Position {position} looks ahead: with {_describe(names, args)}, other values"
                    f"{' (1,000 times as large)' if change[1] else ''} at positions after {t}"
                    f"{', which come in through ' * bool(through)}{' or '.join(through)}, change "
                    f"its output from {before[index]:.5g} to {out[index]:.5g}. "
                    + _cause_of_leak(
                        position, seen, N, change[1], out[position], before[position], tolerance
                    )
                )


def _replace(x, other, axes, positions):
    """x with the values of another array at some positions of its time axes."""
    if not axes:
        return x
    new, other = np.array(_to_numpy(x)), _to_numpy(other)
    for axis in axes:
        at = (slice(None),) * axis + (positions,)
        new[at] = other[at]
    return _like(new, x)


def _cause_of_leak(position, seen, N, loud, out, before, tolerance):
    if loud:
        return (
            "Ordinary values did not: does a maximum include later positions, or is the mask "
            "applied after the exponential?"
        )
    if seen == [position + 1] and position + 2 < N:
        return (
            "It sees the next position and nothing beyond: is the diagonal of the mask one too far "
            "(j <= t is np.tril(..., 0)), or the sequence shifted the wrong way?"
        )
    if len(seen) < N - 1 - position:
        return f"The later positions that it sees: {', '.join(map(str, seen)) or 'none alone'}."
    rows = np.float64(out)[..., None, :], np.float64(before)[..., None, :]
    if np.isfinite(rows[0]).all() and row_factors(*rows, tolerance) is not None:
        return (
            "It sees every later position, but only its size changes, not its direction: a "
            "normalizer or a norm sums over the future. Mask first, then normalize."
        )
    return (
        "It sees every later position: a sum, mean, maximum or norm over the whole time axis (a "
        "global K^T V is one) stands where only j <= t belongs."
    )


# Pieces


def _check_splits(fn, names, args, axes, splits):
    N = _length(args, axes)
    whole, _ = _step(fn, names, args, None)
    time = _time_axis(whole, N)
    whole = np.moveaxis(whole, time, 0)
    tolerance = tolerance_of(whole, *filter(_is_float, args))

    def step(start, stop, state):
        """Output of one piece, time first, and the state after it."""
        piece = [_slice(x, axis, start, stop) for x, axis in zip(args, axes, strict=True)]
        out, state = _step(fn, names, piece, state)
        if out.ndim != whole.ndim or out.shape[time] != stop - start:
            raise AssertionError(
                f"With {_describe(names, piece)} your output has shape {out.shape}."
            )
        return np.moveaxis(out, time, 0), state

    for cuts in splits:
        pieces, outputs, states = list(pairwise((0, *cuts, N))), [], [None]
        for start, stop in pieces:
            out, state = step(start, stop, states[-1])
            outputs.append(out)
            states.append(state)
        got = np.concatenate(outputs)
        wrong = ~close(got, whole, tolerance)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            number = next(i for i, (_, stop) in enumerate(pieces) if index[0] < stop)
            start, stop = pieces[number]
            raise AssertionError(
                f"Split at {', '.join(map(str, cuts)) if len(cuts) < 4 else 'every position'}, "
                f"position {index[0]} is wrong: the whole sequence gives {whole[index]:.5g} there, "
                f"the pieces give {got[index]:.5g}. "
                + _cause_of_split(
                    step,
                    start,
                    stop,
                    states[: number + 1],
                    outputs[number],
                    whole[start:stop],
                    tolerance,
                )
            )


def _step(fn, names, args, state):
    """Call ``fn`` for one piece; refuse what is not a pair, and a changed state."""
    given = _copy(state)
    try:
        result = _run(fn, names, args, initial_state=state, return_state=True)
    except AssertionError as error:
        if all(_to_numpy(x).size for x in args if _is_array(x)):
            raise
        raise AssertionError(
            f"{error} An empty piece has an empty output and leaves the state as it was."
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise AssertionError(
            "With return_state=True your function must return the pair (out, state), it returned "
            f"{type(result).__name__}."
        )
    before, after = _values(given), _values(state)
    if len(before) != len(after) or not all(map(_unchanged, before, after)):
        raise AssertionError(
            "Your function changed in place the state that it was given: whoever holds that state "
            "can no longer continue from it. Write S = S + ..., which makes a new array, in place "
            "of S += ...."
        )
    out, state = result
    return _to_numpy(out), state


def _slice(x, axes, start, stop):
    for axis in axes:
        x = x[(slice(None),) * axis + (slice(start, stop),)]
    return x


def _cause_of_split(step, start, stop, states, got, want, tolerance):
    """What may have become of the state, the last of ``states``, at the start of a piece."""
    state = states[-1]
    if start == 0:
        return (
            "This is in the first piece, so the output there depends on later positions: see "
            "check_causal."
        )
    if same(got, step(start, stop, None)[0], tolerance):
        values = list(map(_to_numpy, _values(state)))
        if values and not any(x.any() for x in values):
            return "The state that your function returned is all zeros."
        return "The piece comes out as if the sequence began there: is initial_state used?"
    # A state that is read twice is right at half its size; one that was kept twice is a sum.
    half = _map(lambda x: x / 2 if _is_float(x) else x, state)
    now, right, earlier = (
        list(map(_to_numpy, _values(x))) for x in (state, step(0, start, None)[1], states[-2])
    )
    kept_twice = any(
        a.shape == b.shape == c.shape and c.any() and same(a, b + c, tolerance)
        for a, b, c in zip(now, right, earlier, strict=False)
    )
    if kept_twice or same(step(start, stop, half)[0], want, tolerance):
        return "What came before the split is counted twice."
    if row_factors(got, want, tolerance) is not None:
        return (
            "Each output is a multiple of the right one: the sums are carried along, but not the "
            "normalizer z (or the other way round)."
        )
    if stop - start > 1 and same(got[1:], want[1:], tolerance):
        return (
            "Only the first position after the split is wrong: something that it needs from the "
            "position before it (the last input of a token shift or a convolution) is not carried."
        )
    return (
        "The state lacks something that later positions need: is it returned after the last "
        "write, and is everything that the recurrence carries in it?"
    )


# Memory


def _peak_bytes(fn, args):
    """The largest amount of memory that a call holds at once, its arguments not counted."""
    args = [_copy(x) for x in args]
    gc.collect()
    if any(hasattr(x, "detach") for x in args):
        return _peak_bytes_of_tensors(fn, args)
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with np.errstate(all="ignore"):
            result = fn(*args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    if any(hasattr(x, "detach") for x in _values(result)):
        raise AssertionError(
            "Your function returned tensors for NumPy inputs, and their memory cannot be seen: let "
            "inputs return tensors."
        )
    return peak - before


def _peak_bytes_of_tensors(fn, args):
    import torch

    if any(getattr(x, "is_cuda", False) for x in args):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn(*args)
        return torch.cuda.max_memory_allocated() - before
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        fn(*args)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(max(held, default=0))


# Gradients


def _check_pullback(fn, names, args, rng, every):
    where = f"With {_describe(names, args)}"
    out, pullback = _pullback(fn, names, args)
    grad_out = rng.normal(size=out.shape)
    gradients = _run(pullback, ["grad_out"], [grad_out])
    if not isinstance(gradients, tuple | list) or len(gradients) != len(args):
        raise AssertionError(
            f"{where} the pullback must return a tuple of {len(args)} gradients, one for each "
            "input."
        )
    floats = [i for i, x in enumerate(args) if _is_float(x)]
    epsilon = max(EPSILONS[dtype_name(args[i])] for i in floats)
    tolerance = epsilon ** (1 / 3)  # also the step at which central differences err least
    noise = 100 * epsilon / tolerance * np.abs(grad_out * out).sum()

    def slope(i, direction):
        """Derivative of the sum of grad_out * out when input i moves along a direction."""
        losses = []
        for step in (tolerance, -tolerance):
            moved = list(args)
            moved[i] = _like(_to_numpy(args[i]) + step * direction, args[i])
            losses.append((_output(_run(fn, names, moved)).astype(np.float64) * grad_out).sum())
        return (losses[0] - losses[1]) / (2 * tolerance)

    def problem(i):
        """What is wrong with the gradient of input i, or ''."""
        shape = tuple(args[i].shape)
        if gradients[i] is None:
            return "is None."
        gradient = _to_numpy(gradients[i]).astype(np.float64)
        if gradient.shape != shape:
            return (
                f"has shape {gradient.shape}, {names[i]} itself {shape}. Sum over the axes along "
                "which it was broadcast."
            )
        if every:
            slopes = np.array([slope(i, unit) for unit in _units(shape)]).reshape(shape)
            wrong = ~close(gradient, slopes, tolerance) & ~(np.abs(gradient - slopes) < noise)
            if not wrong.any():
                return ""
            index = first(wrong)
            with np.errstate(all="ignore"):
                why = cause_of_gradient(gradient, slopes, tolerance)
            return (
                f"is wrong, first at index {index}: finite differences give {slopes[index]:.5g}, "
                f"your function {gradient[index]:.5g}. {why}".rstrip()
            )
        for _ in range(3):
            direction = rng.normal(size=shape)
            a, b = (gradient * direction).sum(), slope(i, direction)
            if not abs(a - b) <= tolerance * np.linalg.norm(gradient) + noise:
                return (
                    f"is wrong: along a random direction finite differences give {b:.5g}, your "
                    f"function {a:.5g}. Shorter sequences came out right: is something wrong from "
                    "one chunk to the next?"
                )
        return ""

    problems = {names[i]: problem(i) for i in floats}
    wrong = [name for name in problems if problems[name]]
    right = [name for name in problems if not problems[name]]
    if wrong:
        raise AssertionError(
            f"{where} the gradient of {wrong[0]} {problems[wrong[0]]}"
            + (f" Wrong as well: {', '.join(wrong[1:])}." if wrong[1:] else "")
            + (f" The gradient of {' and of '.join(right)} agrees." if right else "")
            + (" Does k have a second path, through the normalizer?" if wrong == ["k"] else "")
        )


def _pullback(fn, names, args):
    """The output, and the function that takes its gradient to the gradients of the inputs."""
    result = _run(fn, names, args)
    if isinstance(result, tuple) and len(result) == 2 and callable(result[1]):
        out, pullback = result
        return _to_numpy(out), lambda grad_out: pullback(_like(grad_out, out))
    if not hasattr(result[0] if isinstance(result, tuple) else result, "detach"):
        raise AssertionError(
            "Your function must return the pair (out, pullback), where pullback(grad_out) returns "
            "one gradient for each input."
        )
    import torch

    args = [x.detach().clone().requires_grad_() if _is_float(x) else x for x in args]
    result = fn(*args)
    out = result[0] if isinstance(result, tuple) else result
    if not out.requires_grad:
        raise AssertionError(
            "Your output does not require a gradient: .detach(), .numpy(), .item() or "
            "torch.tensor(...) inside the function cuts it off."
        )

    def pullback(grad_out):
        floats = [x for x in args if _is_float(x)]
        found = torch.autograd.grad(out, floats, _like(grad_out, out), materialize_grads=True)
        found = iter(found)
        return [next(found) if _is_float(x) else None for x in args]

    return _to_numpy(out), pullback


def _units(shape):
    """Every unit vector of a shape, in order."""
    for i in range(np.prod(shape, dtype=int)):
        unit = np.zeros(shape)
        unit.flat[i] = 1
        yield unit
