"""Checking a number, an array or a word that a reader worked out by hand."""

from __future__ import annotations

import numpy as np

from lesson_code.checks._calling import is_array, to_numpy


def check_value(part, answer, exercise):
    """Refuse an answer that is wrong, without giving the right one away."""
    right = _read(computed(part.reference))
    try:
        given = _read(answer)
    except (TypeError, ValueError):
        given = None
    if given is None or given.dtype.kind != right.dtype.kind:
        raise AssertionError(
            f"{exercise.label}: {part.name} must be {part.form}, it is of type {_type_of(answer)}."
        )
    if _without_ones(given) == _without_ones(right):  # a column or a row where a list is asked for
        given = given.reshape(right.shape)
    if _equal(given, right, part.tolerance):
        return
    for mistake in part.known:
        if _equal(given, _read(computed(mistake.wrong)), part.tolerance):
            raise AssertionError(
                f"{exercise.label}: {part.name} is not right. {mistake.sentence} "
                f"{exercise.look_at(mistake.section)}"
            )
    if _rounded_off(given, right, part.tolerance):
        raise AssertionError(
            f"{exercise.label}: {part.name} is right as far as it goes: give three digits."
        )
    raise AssertionError(
        f"{exercise.label}: {part.name} is not right{_where(given, right, part)}. "
        f"{exercise.look_at(part.section)}"
    )


def computed(x):
    """A declared value, which may be a function without arguments that returns it."""
    return x() if callable(x) else x


def _type_of(x):
    if isinstance(x, tuple | list) and x:
        kinds = dict.fromkeys(map(_type_of, x))
        return f"{type(x).__name__} of {' and '.join(kinds)}"
    return type(x).__name__


def _without_ones(x):
    return [n for n in x.shape if n != 1]


def _read(x):
    """Numbers as an array of float64, True and False as bool, words in lower case."""
    if isinstance(x, str):
        return np.asarray(" ".join(x.lower().split()))
    if isinstance(x, tuple | list):
        x = [to_numpy(item) if is_array(item) else item for item in x]
    if np.ma.is_masked(x):
        raise TypeError("a masked entry is no number")
    array = to_numpy(x)
    if array.dtype.kind in "bUSc":  # of these, bytes and complex numbers would convert
        return array
    return array.astype(np.float64)


def _equal(a, b, tolerance):
    return (
        a.shape == b.shape and a.dtype.kind == b.dtype.kind and bool(_close(a, b, tolerance).all())
    )


def _close(a, b, tolerance):
    if b.dtype.kind != "f":
        return np.asarray(a == b)
    largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    if tolerance is None and (b == np.round(b)).all():
        # Exact, but for what rounding leaves beside a whole number, in float32 too.
        near = np.isclose(a, b, rtol=1e-6, atol=1e-6 * largest + 1e-12)
        return near & np.isclose(a, b, rtol=1e-12, atol=0.01)
    tolerance = 5e-3 if tolerance is None else tolerance
    return np.isclose(a, b, rtol=tolerance, atol=0.1 * tolerance * largest)


def _rounded_off(a, b, tolerance):
    """Whether it would be right, were it not for entries that are given to two digits only."""
    if a.shape != b.shape or b.dtype.kind != "f" or (b == np.round(b)).all():
        return False
    two_digits = np.reshape([float(f"{x:.1e}") for x in b.flat], b.shape)
    return bool((_close(a, b, tolerance) | _close(a, two_digits, 1e-9)).all())


def _where(given, right, part):
    if given.shape != right.shape:
        return f": it has shape {given.shape}, {right.shape} is expected"
    if right.dtype.kind != "f" or right.ndim == 0:
        return ""
    wrong = ~_close(given, right, part.tolerance)
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    which = index[0] if len(index) == 1 else index
    if wrong.all():
        return " in any entry"
    return f", first at index {which}; {(~wrong).sum()} of {wrong.size} entries are right"
