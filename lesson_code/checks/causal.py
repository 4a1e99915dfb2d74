"""No output depends on later positions."""

from collections.abc import Callable

import numpy as np

from lesson_code.checks._agreement import close, first, row_factors, same, tolerance_of
from lesson_code.checks._calling import (
    cases,
    describe,
    draw,
    is_float,
    length_of,
    like,
    output_of,
    random_qkv,
    run,
    time_axes_of,
    time_axis_of,
    to_numpy,
)


def check_causal(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` if the output at any position depends on inputs at later positions.

    For a position t, everything after t is drawn again, in all inputs and in each alone; outputs up
    to t must stay as they were. Every t is tried at N = 7, and some at N = 131. With the
    default inputs the new values are also tried 1,000 times as large, which brings out maxima over
    the future; a function that overflows under this is not held to it. ``fn`` returns an array
    (..., N, M), or a tuple that begins with it.

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
        for names, args in cases(fn, inputs, seed, (N, shape)):
            others = draw(inputs, [seed, 1], N, shape)
            changes = [(others, False)]
            if inputs in (None, random_qkv):
                changes.append(([1000 * x for x in others], True))
            axes = time_axes_of(inputs, seed, N, shape)
            cuts = range(N - 1) if N < 100 else (0, 1, 31, 62, 63, 64, 127, N - 2)
            _check_no_leak(fn, names, args, changes, axes, cuts)


def _check_no_leak(fn, names, args, changes, axes, cuts):
    base = output_of(run(fn, names, args))
    tolerance = tolerance_of(base, *filter(is_float, args))
    if not same(output_of(run(fn, names, args)), base, tolerance):
        raise AssertionError(
            "Two calls with the same inputs give different outputs: a function that draws random "
            "numbers or keeps something between calls cannot be checked."
        )
    if not np.isfinite(base).all():
        raise AssertionError(
            f"With {describe(names, args)} your output is not finite at index "
            f"{first(~np.isfinite(base))}, so that nothing can be said about what it depends on."
        )
    N = length_of(args, axes)
    time = time_axis_of(base, args, axes)
    before = np.moveaxis(base, time, 0)

    def look(change, start, stop, which):
        """Draw some inputs again from start to stop; return the output and what of it changed."""
        others, loud = change
        changed = [
            _replace(x, other, axis, slice(start, stop)) if i in which else x
            for i, (x, other, axis) in enumerate(zip(args, others, axes, strict=True))
        ]
        try:
            out = output_of(run(fn, names, changed, overflow="raise" if loud else "ignore"))
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
                    f"Position {position} looks ahead: with {describe(names, args)}, other values"
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
    new, other = np.array(to_numpy(x)), to_numpy(other)
    for axis in axes:
        at = (slice(None),) * axis + (positions,)
        new[at] = other[at]
    return like(new, x)


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
    rows = np.asarray(out, float)[..., None, :], np.asarray(before, float)[..., None, :]
    if np.isfinite(rows[0]).all() and row_factors(*rows, tolerance) is not None:
        return (
            "It sees every later position, but only its size changes, not its direction: a "
            "normalizer or a norm sums over the future. Mask first, then normalize."
        )
    return (
        "It sees every later position: a sum, mean, maximum or norm over the whole time axis (a "
        "global K^T V is one) stands where only j <= t belongs."
    )
