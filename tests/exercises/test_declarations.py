"""What is declared of every exercise: right answers pass, each mistake is recognized as itself."""

from __future__ import annotations

import functools
import re

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
PARTS = [
    pytest.param(exercise, part, id=f"{exercise.label}-{part.name}")
    for exercise in EXERCISES
    for part in exercise.parts
]


# What is checked are three verdicts, and there is a mistake for each of them.
WITHOUT_STRANGERS = {"low"}


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


@pytest.mark.parametrize(("exercise", "part"), PARTS)
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


@pytest.mark.parametrize(("exercise", "part"), PARTS)
def test_the_right_answer_passes(exercise, part, capsys) -> None:
    if isinstance(part, Function):
        answers = [part.reference]
    else:
        right = to_numpy(computed(part.reference))
        answers = [computed(part.reference), right.tolist()]
        if right.dtype.kind in "iuf":
            answers.append(right.astype(np.float32))
        if right.dtype.kind == "f" and part.tolerance is None:
            answers.append([float(f"{x:.3g}") for x in right.flat] if (right % 1).any() else right)
            answers[-1] = np.reshape(answers[-1], right.shape)
    for answer in answers:
        check_exercise(exercise, **{part.name: answer})
        assert re.search(rf"{part.name} is right|: right", capsys.readouterr().out)


@pytest.mark.parametrize(("exercise", "part"), PARTS)
def test_what_is_nobody_s_mistake_is_refused_and_the_answer_kept(exercise, part) -> None:
    if part.name in WITHOUT_STRANGERS:
        return
    if isinstance(part, Function):

        @functools.wraps(part.reference)
        def stranger(*args, **options):
            return map_arrays(strange, part.reference(*args, **options))

        said = refusal_of(exercise, part.name, stranger)
        assert not any(mistake.sentence in said for mistake in part.known)
        assert exercise.look_at(part.section) in said
    elif to_numpy(computed(part.reference)).dtype.kind != "b":
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
