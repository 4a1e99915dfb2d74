"""What is declared of every exercise: right answers pass, each mistake is recognized as itself."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
import pytest

from lesson_code import checks
from lesson_code.checks import check_exercise
from lesson_code.checks._calling import is_array, map_arrays, to_numpy
from lesson_code.exercises import Exercise, Function, Value, exercises_of
from lesson_code.exercises._find import MODULES
from lesson_code.exercises._values import computed
from tools.exercises import answer_cell

EXERCISES = [x for module in MODULES for x in exercises_of(module).values()]
PARTS = [(exercise, part) for exercise in EXERCISES for part in exercise.parts]


def each(pairs):
    ids = [f"{exercise.label}-{part.name}" for exercise, part in pairs]
    return pytest.mark.parametrize(("exercise", "part"), pairs, ids=ids)


def has_strangers(part: Function | Value) -> bool:
    """Whether an answer can be wrong in a way that is nobody's mistake."""
    if part.name == "low":  # what is checked are three verdicts, each with its own mistake
        return False
    return isinstance(part, Function) or to_numpy(computed(part.reference)).dtype.kind != "b"


def refusal_of(exercise: Exercise, name: str, answer: object) -> str:
    with pytest.raises(AssertionError) as refusal:
        check_exercise(exercise, **{name: answer})
    return str(refusal.value)


def strange(x):
    """Something of the same kind that nobody's mistake gives."""
    if is_array(x) and to_numpy(x).dtype.kind == "b" or isinstance(x, bool):
        return x ^ True
    if is_array(x) and to_numpy(x).dtype.kind in "iu" or isinstance(x, int):
        return 3 * x + 17
    return "no such word" if isinstance(x, str) else 1.37 * x + 0.21


@each(PARTS)
def test_each_mistake_is_recognized_as_itself(exercise, part) -> None:
    assert part.known
    for mistake in part.known:
        if isinstance(part, Value):
            wrong, words = computed(mistake.wrong), f"{part.name} is not right. "
        else:
            wrong, words = mistake.wrong, ""
        said = refusal_of(exercise, part.name, wrong)
        words += f"{mistake.sentence} {exercise.look_at(mistake.section)}"
        assert said.startswith(f"{exercise.label}: {words}")


def right_answers(part: Function | Value) -> Iterator[object]:
    """The reference; of a value also what a reader may type, as a list and to three digits."""
    right = computed(part.reference) if isinstance(part, Value) else part.reference
    yield right
    if isinstance(part, Value):
        array = to_numpy(right)
        yield array.tolist()
        if array.dtype.kind in "iuf":
            yield array.astype(np.float32)
        if array.dtype.kind == "f" and (array % 1).any() and part.tolerance is None:
            yield np.reshape([float(f"{x:.3g}") for x in array.flat], array.shape)


@each(PARTS)
def test_the_right_answer_passes(exercise, part, capsys) -> None:
    for answer in right_answers(part):
        check_exercise(exercise, **{part.name: answer})
        assert re.search(rf"{part.name} is right|: right", capsys.readouterr().out)


@each([pair for pair in PARTS if has_strangers(pair[1])])
def test_what_is_nobody_s_mistake_is_refused_and_the_answer_kept(exercise, part) -> None:
    if isinstance(part, Function):

        @functools.wraps(part.reference)
        def stranger(*args, **options):
            return map_arrays(strange, part.reference(*args, **options))

        said = refusal_of(exercise, part.name, stranger)
        assert not any(mistake.sentence in said for mistake in part.known)
        assert exercise.look_at(part.section) in said
    else:
        said = refusal_of(exercise, part.name, map_arrays(strange, computed(part.reference)))
        where = r"( in any entry|, first at index \S+; \d+ of \d+ entries are right)?"
        words = rf"{exercise.label}: {part.name} is not right{where}[.] "
        assert re.fullmatch(words + re.escape(exercise.look_at(part.section)), said)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.label)
def test_what_is_not_written_is_asked_for(exercise, capsys) -> None:
    exec(answer_cell(exercise), {"checks": checks})
    said = capsys.readouterr().out
    assert said.startswith(f"{exercise.label}: write {exercise.parts[0].name}")
    assert said.endswith(", then run this cell again.\n")
