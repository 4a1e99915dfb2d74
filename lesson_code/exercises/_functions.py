"""Trying a function that a reader wrote, and recognizing the mistake that it makes."""

from __future__ import annotations

import dis
import functools
import inspect

import numpy as np

from lesson_code.checks._agreement import same, tolerance_of
from lesson_code.checks._calling import (
    Unusable,
    copy_of,
    describe,
    is_array,
    is_float,
    leaves_of,
    names_of,
    random_qkv,
    refuse_none,
    run,
    to_numpy,
    told,
)
from lesson_code.checks.same import compare, kind_of, what_is_new

# Equal lengths and widths among them: there an axis that is mistaken for another one fits.
SIZES: tuple[tuple[int, dict], ...] = (
    (7, {}),
    (1, {}),
    (2, {}),
    (4, {"D": 4, "M": 4}),
    (13, {"D": 3, "M": 6}),
    (131, {}),
    (9, {"leading": (2, 4)}),
)


def is_stub(fn):
    """Whether nothing is written yet: only ``...``, ``pass`` or a docstring."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return False
    ignored = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "MAKE_CELL"}
    steps = [x for x in dis.get_instructions(code) if x.opname not in ignored]
    names = [x.opname for x in steps]
    if names not in (["RETURN_CONST"], ["LOAD_CONST", "RETURN_VALUE"]):
        return False
    return steps[0].argval is None and fn.__name__ != "<lambda>"


def cases_of(part):
    """The arguments of each case: many sizes, then those that are special to the exercise."""
    inputs = part.inputs or random_qkv
    parameters = inspect.signature(inputs).parameters
    cases = []
    for i, (N, shape) in enumerate(SIZES):
        if "leading" in shape and "leading" not in parameters:
            continue
        known = {key: value for key, value in shape.items() if key in parameters}
        cases.append(inputs(np.random.default_rng([i, 0]), N, **known))
    for i, special in enumerate(part.special):
        cases.append(special(np.random.default_rng([i, 1])))
    return [(x,) if is_array(x) else tuple(x) for x in cases]


def check_function(part, fn, exercise):
    """Refuse a function unless it does what the part asks for; return a line on what was tried."""
    if not callable(fn):
        raise AssertionError(
            f"{exercise.label}: {part.name} must be a function, it is of type {type(fn).__name__}. "
            f"Pass {part.name} itself, without calling it."
        )
    order = _check_arguments(part, fn, exercise)
    view = functools.partial(seen_through, part.view) if part.view else (lambda f: f)
    trials = Trials(part, view(fn), view(part.reference))
    error = trials.first_error()
    if error:
        if order:
            said = f"{order} {error}"
        elif mistake := trials.recognize([(x, view(x.wrong)) for x in part.known]):
            place = exercise.look_at(mistake.section)
            said = f"{mistake.sentence} {place} {trials.first_error(why='')}"
        else:
            said = f"{error} {exercise.look_at(part.section)}"
        raise AssertionError(f"{exercise.label}: {said}") from error
    for further in part.further:
        try:
            further.check(view(fn), **further.options)
        except AssertionError as error:
            raise AssertionError(
                f"{exercise.label}: {error} {exercise.look_at(further.section)}"
            ) from error
    return _what_was_tried(part, trials)


def _check_arguments(part, fn, exercise):
    """Refuse a function that cannot be called as the part's is; say if only the order differs."""
    parameters = inspect.signature(part.reference).parameters.values()
    names = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        raise AssertionError(
            f"{exercise.label}: {part.name} is called as {part.signature}, yours is not made for "
            f"that: {error}."
        ) from error
    except ValueError:  # built-in functions have no signature
        return ""
    own = names_of(fn, len(names))
    if own == names or sorted(own) != sorted(names):
        return ""
    return f"{part.name} gets {', '.join(names)} in this order, yours takes {', '.join(own)}."


def seen_through(view, fn):
    """The view of a function, which tells an exception of the function from one of the view."""
    returned: list = []

    @functools.wraps(fn)
    def watched(*args, **options):
        returned.clear()
        result = fn(*args, **options)
        refuse_none(result)
        returned.append(result)
        return result

    viewed = view(watched)

    @functools.wraps(viewed)
    def call(*args, **options):
        returned.clear()
        try:
            return viewed(*args, **options)
        except Unusable:
            raise
        except Exception as error:
            if not returned:
                raise
            raise Unusable(
                f"returned {kind_of(*returned)}, from which the check cannot go on: {told(error)}"
            ) from error

    return call


def _what_was_tried(part, trials):
    inputs = part.inputs or random_qkv
    line = f"{len(trials.cases)} inputs"
    if part.unit:
        line += f" of 1 to {max(N for N, _ in SIZES)} {part.unit}"
    if "leading" in inspect.signature(inputs).parameters:
        line += ", with leading dimensions too"
    names = [further.check.__name__ for further in part.further]
    return line + ("; it passes " + " and ".join(names) if names else "")


WHAT_IS_SPECIAL = (
    "Ordinary inputs came out right. In these something is special, such as very large, 0 or equal."
)


class Raised:
    """Stands for the result of a call that failed."""


class Trials:
    """What a function and its reference return in every case."""

    def __init__(self, part, fn, reference):
        self.fn, self.reference, self.in_time = fn, reference, bool(part.unit)
        self.cases = cases_of(part)
        self.special = len(self.cases) - len(part.special)  # where those begin
        self.expected = [reference(*map(copy_of, args)) for args in self.cases]
        self.names = [names_of(fn, len(args)) for args in self.cases]

    def first_error(self, why=None):
        """What is wrong in the first case that goes wrong, or None."""
        passed = None
        known = zip(self.names, self.cases, self.expected, strict=True)
        for i, (names, args, expected) in enumerate(known):
            try:
                result = run(self.fn, names, args)
                check_library(result, expected, names, args)
                compare(result, expected, self.reference, names, args, why, self.in_time)
            except AssertionError as error:
                if passed is None or why is not None:
                    return error
                new = what_is_new(passed, args) if i < self.special else WHAT_IS_SPECIAL
                return AssertionError(f"{error} {new}")
            passed = passed or args
        return None

    def recognize(self, mistakes):
        """The mistake that gives what the function gives, wherever either is wrong; or None."""
        results = [self._attempt(self.fn, i) for i in range(len(self.cases))]
        best, most = None, 0
        for mistake, wrong in mistakes:
            score = 0
            for i, (got, right) in enumerate(zip(results, self.expected, strict=True)):
                other = self._attempt(wrong, i)
                if got is Raised and other is Raised:
                    continue
                if not agree(got, other):
                    score -= 1
                elif not agree(got, right):
                    score += 1
            if score > most:
                best, most = mistake, score
        return best

    def _attempt(self, fn, i):
        try:
            return run(fn, self.names[i], self.cases[i])
        except AssertionError:
            return Raised


def check_library(result, expected, names, args):
    """Refuse NumPy arrays where torch tensors are expected, and the other way round."""
    pairs = zip(leaves_of(result, "output"), leaves_of(expected, "output"), strict=False)
    for (name, a), (_, b) in pairs:
        if is_array(a) and is_array(b) and library(a) != library(b):
            raise AssertionError(
                f"With {describe(names, args)} your {name} is a {library(a)}, a {library(b)} is "
                "expected."
            )


def library(x):
    if hasattr(x, "detach"):
        return "torch tensor"
    # What is more than an array, such as one that is masked, is called by its own name.
    return "NumPy array" if type(x) is np.ndarray or np.isscalar(x) else type(x).__name__


def agree(a, b):
    """Whether two results, arrays or tuples of arrays, are the same."""
    if a is Raised or b is Raised:
        return a is b
    a, b = leaves_of(a, ""), leaves_of(b, "")
    if len(a) != len(b):
        return False
    for (_, x), (_, y) in zip(a, b, strict=True):
        x, y = (item if is_array(item) else np.asarray(item) for item in (x, y))
        tolerance = tolerance_of(*filter(is_float, (x, y))) if is_float(x) else 1e-8
        x, y = to_numpy(x), to_numpy(y)
        if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
            return False
        with np.errstate(all="ignore"):
            if not same(x.astype(np.float64), y.astype(np.float64), tolerance):
                return False
    return True
