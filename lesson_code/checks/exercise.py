"""Checking the answer to an exercise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lesson_code.exercises import Exercise


def check_exercise(name: str | Exercise, answer: object = None, /, **parts: object) -> None:
    """Check the answer to an exercise of the book, and say what is wrong and where to look.

    A function is tried on many inputs, as :func:`check_same` does, against what the exercise asks
    for, and must return arrays of the same library, NumPy or torch. If it fails as a typical
    mistake does, the message names that mistake and the section of the chapter that clears it up.
    Numbers and arrays that were worked out by hand are checked in the same way; whole numbers must
    be exact, others right to half a percent.

    Parameters
    ----------
    name : str
        The exercise's label, such as ``"ex-memory-code"``; or an
        :class:`~lesson_code.exercises.Exercise` of your own.
    answer : object, optional
        The function, number or array, where the exercise asks for one thing. What is not written
        yet, None or a function without a body, is asked for and not refused.
    parts : object
        The same by name, where the exercise asks for several things.

    Examples
    --------
    >>> def my_memory(q, k, v):
    ...     ...
    >>> check_exercise("ex-memory-code", my_memory=my_memory)
    ex-memory-code: write my_write, my_read and my_memory, then run this cell again.
    """
    # What the exercises need is loaded only now: lesson_code.exercises imports the other checks.
    from lesson_code.exercises import Exercise, Function, find_exercise
    from lesson_code.exercises._functions import check_function, is_stub
    from lesson_code.exercises._values import check_value

    exercise = name if isinstance(name, Exercise) else find_exercise(name)
    given = _assign(exercise, answer, parts)
    right, missing, said = [], [], []
    for part in exercise.parts:
        x = given.get(part.name)
        if x is None or is_stub(x):
            missing.append(part.name)
            continue
        if isinstance(part, Function):
            said.append(check_function(part, x, exercise))
        else:
            check_value(part, x, exercise)
        right.append(part.name)
    print(f"{exercise.label}: {_summary(right, missing, said)}")


def _summary(right, missing, said):
    if not right:
        return f"write {_list(missing)}, then run this cell again."
    if missing:
        verb = "is" if len(right) == 1 else "are"
        return f"{_list(right)} {verb} right; still to come: {_list(missing)}."
    if said:
        return f"right, on {max(said, key=len)}."
    return "right." if len(right) == 1 else f"{_list(right)} are right."


def _list(names):
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _assign(exercise, answer, parts):
    names = [part.name for part in exercise.parts]
    unknown = [name for name in parts if name not in names]
    if unknown or answer is not None and (len(names) > 1 or parts):
        wanted = ", ".join(f"{name}=..." for name in names) if len(names) > 1 else names[0]
        raise ValueError(
            f"{exercise.label} asks for {_list(names)}: call "
            f'check_exercise("{exercise.label}", {wanted}).'
        )
    return {names[0]: answer} if answer is not None else parts
