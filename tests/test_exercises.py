"""Exercises: what `check_exercise` says, what is declared of them, and their notebooks."""

from __future__ import annotations

import builtins
import dis
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import CodeType

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from lesson_code import checks
from lesson_code.checks import check_exercise
from lesson_code.checks.exercises import (
    Exercise,
    Function,
    Further,
    Mistake,
    Value,
    exercises_of,
    truth,
)
from lesson_code.checks.exercises._find import MODULES
from lesson_code.checks.exercises._functions import is_stub
from tests.conftest import soup
from tools import book, exercises, notebooks

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = [chapter.path for chapter in book.chapters()]
LEVELS = ("By hand", "In code", "Open")


@pytest.fixture(scope="module")
def names() -> exercises.Names:
    return exercises.Names.of(ROOT)


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request: pytest.FixtureRequest) -> Path:
    return request.param


def parts_of(path: Path) -> list[exercises.Block]:
    return list(exercises.exercise_parts(book.Chapter(path)))


def declared(path: Path) -> dict[str, Exercise]:
    """What the registry has for a chapter."""
    labels = [block.options["label"] for block in parts_of(path) if block.kind == "exercise"]
    found = {}
    for module in MODULES:
        known = exercises_of(module)
        if set(known) & set(labels):
            found |= known
    return found


def solutions(path: Path) -> Iterator[tuple[str, str, str]]:
    """Label, kind and source of every cell or piece of text inside a solution."""
    label = None
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            if label:
                yield label, "code", cell.source
            continue
        for block in exercises.blocks_of(cell.source):
            if block.kind == "solution-start":
                label = block.argument
            elif block.kind == "solution-end":
                label = None
            elif label:
                yield label, "text", block.text


# --- Exercises as the chapters have them -------------------------------------------------------


def test_a_chapter_has_all_levels_and_hints(chapter: Path) -> None:
    blocks = parts_of(chapter)
    titles = [block.argument for block in blocks if block.kind == "exercise"]
    for title in titles:
        assert title.partition(": ")[0] in LEVELS, title
    assert {title.partition(": ")[0] for title in titles} == set(LEVELS)
    kinds = [block.kind for block in blocks]
    for i, block in enumerate(blocks):
        if block.kind == "exercise":
            until = kinds.index("solution-start", i)
            hints = [x for x in blocks[i:until] if x.kind == "hint"]
            assert hints, f"{block.argument} has no hint before its solution"
            assert all(hint.options.get("class") == "dropdown" for hint in hints)


def test_what_is_declared_is_in_the_chapter_and_the_other_way_round(chapter: Path) -> None:
    labels = {
        block.options["label"]: block.argument.partition(": ")[0]
        for block in parts_of(chapter)
        if block.kind == "exercise"
    }
    known = declared(chapter)
    assert set(known) <= set(labels)
    assert {label for label, level in labels.items() if level != "Open"} <= set(known)


def test_every_section_that_a_message_names_exists(chapter: Path) -> None:
    text = "\n".join(
        cell.source
        for cell in nbformat.read(chapter, as_version=4).cells
        if cell.cell_type == "markdown"
    )
    headings = set(re.findall(r"(?m)^#{2,4} +(.*)$", text))
    [title] = re.findall(r"(?m)^# +(.*)$", text)
    for exercise in declared(chapter).values():
        assert exercise.chapter == title
        for part in exercise.parts:
            named = [part.section, *(mistake.section for mistake in part.mistakes)]
            named += [further.section for further in getattr(part, "further", ())]
            assert set(named) <= headings, exercise.label


def test_a_chapter_knows_mistakes(chapter: Path) -> None:
    parts = [part for exercise in declared(chapter).values() for part in exercise.parts]
    assert sum(len(part.mistakes) for part in parts if isinstance(part, Function)) >= 5
    assert all(len(part.mistakes) >= 1 for part in parts)


def test_solutions_end_with_the_check(chapter: Path) -> None:
    code = {}
    for label, kind, source in solutions(chapter):
        if kind == "code":
            code[label] = code.get(label, "") + source + "\n"
    for label in declared(chapter):
        assert f'checks.check_exercise("{label}"' in code[label], label


@pytest.mark.parametrize("module", MODULES)
def test_every_declared_mistake_is_told_from_the_others(module: str) -> None:
    for exercise in exercises_of(module).values():
        for part in exercise.parts:
            for mistake in part.mistakes:
                wrong = mistake.what
                if isinstance(part, Value) and callable(wrong):
                    wrong = wrong()
                with pytest.raises(AssertionError) as refusal:
                    check_exercise(exercise, **{part.name: wrong})
                assert mistake.message in str(refusal.value)
                assert exercise.look_at(mistake.section) in str(refusal.value)


@pytest.mark.parametrize("module", MODULES)
def test_references_pass_and_stubs_are_asked_for(module: str, capsys) -> None:
    for exercise in exercises_of(module).values():
        for part in exercise.parts:
            if isinstance(part, Value):
                check_exercise(exercise, **{part.name: part.reference()})
            elif not part.further:  # those also need what the reference does not have
                check_exercise(exercise, **{part.name: part.reference})
        capsys.readouterr()
        scope = {"checks": checks}
        if any("torch" in part.stub for part in exercise.parts):
            scope["torch"] = pytest.importorskip("torch")
        exec(exercises.answer_cell(exercise), scope)
        said = capsys.readouterr().out
        assert said.startswith(f"{exercise.label}: write {exercise.parts[0].name}")
        assert said.endswith(", then run this cell again.\n")


# --- check_exercise ----------------------------------------------------------------------------


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("ex-memory-cod", len)
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("memory-code", len)
    with pytest.raises(ValueError, match="did you mean .*ex-memory-code"):
        check_exercise("Ex_Memory_Code", len)
    with pytest.raises(ValueError, match="labels look like"):
        check_exercise("zzz", len)


def test_several_parts_go_by_name() -> None:
    with pytest.raises(ValueError, match="my_write=..., my_read=..., my_memory=..."):
        check_exercise("ex-memory-code", len)
    with pytest.raises(ValueError, match="asks for erase: call .*erase\\)"):
        check_exercise("ex-memory-erase", eraser=len)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(AssertionError, match="erase must be a function, it is of type ndarray"):
        check_exercise("ex-memory-erase", np.zeros(3))


@pytest.mark.parametrize("answer", ["a lot", [[1, 2], [3]], object(), True, len])
def test_what_is_no_number_is_refused(answer) -> None:
    with pytest.raises(AssertionError, match="S_4 must be two rows of two numbers"):
        check_exercise("ex-memory-hand", S_4=answer)


def test_the_form_of_numbers_is_free() -> None:
    """A column for a list, and what float32 leaves beside a whole number."""
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [30.0, 0.0], section="Sums"),))
    for answer in [[30], [0]], [[30, 0]], np.float32([30.000002, 1e-6]):
        check_exercise(own, answer)
    for wrong in [30.001, 0], [30, 0.001], [31, 0], [[30, 0], [30, 0]], []:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(own, wrong)
    large = Exercise("ex-own", (Value(name="x", reference=lambda: 1e9, section="Sums"),))
    for wrong in 1e9 + 1, 1e9 + 0.5, []:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(large, wrong)


def test_a_list_is_described_by_what_it_holds() -> None:
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [True, False], section="Sums"),))
    with pytest.raises(AssertionError, match="it is of type list of str"):
        check_exercise(own, ["True", "False"])


def test_two_digits_are_too_few() -> None:
    """Three are asked for; a right answer with two is not called wrong."""
    own = Exercise("ex-own", (Value(name="x", reference=lambda: [-0.3863, 1.5], section="Sums"),))
    for right in [-0.386, 1.5], [-0.3863, 1.5]:
        check_exercise(own, right)
    with pytest.raises(AssertionError, match="x is right as far as it goes: give three digits[.]"):
        check_exercise(own, [-0.39, 1.5])
    for wrong in [-0.38, 1.5], [0.39, 1.5], [-0.39, 1.6]:
        with pytest.raises(AssertionError, match="x is not right"):
            check_exercise(own, wrong)
    whole = Exercise("ex-own", (Value(name="x", reference=lambda: 8451, section="Sums"),))
    with pytest.raises(AssertionError, match="x is not right"):
        check_exercise(whole, 8500)


def test_infinite_mistakes_are_recognized() -> None:
    value = Value(
        name="scores",
        reference=lambda: [0.25, -np.inf],
        section="Sums",
        mistakes=(
            Mistake([-np.inf, 0.25], "The other way round.", "Order"),
            Mistake(lambda: [np.inf, np.inf], "Too large.", "Size"),
        ),
    )
    own = Exercise("ex-own", (value,))
    check_exercise(own, [0.2501, -np.inf])
    for wrong, words in ([-np.inf, 0.25], "other way round"), ([np.inf] * 2, "Too large"):
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)
    with pytest.raises(AssertionError, match="first at index 1; 1 of 2 entries are right"):
        check_exercise(own, [0.25, 1e9])


@pytest.mark.parametrize(
    "answer, kind",
    [
        (1 + 0j, "complex"),
        (b"1", "bytes"),
        ("1", "str"),
        ({1}, "set"),
        (np.ma.masked_array([1.0], mask=[True]), "MaskedArray"),
        ([1, "1"], "list of int and str"),
    ],
)
def test_what_only_looks_like_a_number(answer, kind) -> None:
    own = Exercise("ex-own", (Value(name="x", reference=lambda: 1.0, section="Sums"),))
    with pytest.raises(AssertionError, match=f"x must be a number, it is of type {kind}[.]"):
        check_exercise(own, answer)
    for right in 1, Fraction(1), np.float32(1), np.ma.masked_array([1.0], mask=[False]):
        check_exercise(own, right)


def test_true_or_false() -> None:
    own = Exercise(
        "ex-own", (truth("causal", False, section="Masks", message="What enters the sum?"),)
    )
    assert own.parts[0].stub == "causal = None  # yours: True or False"
    for right in False, np.False_, [False]:
        check_exercise(own, right)
    with pytest.raises(AssertionError, match='right. What enters the sum[?] Look at "Masks"'):
        check_exercise(own, True)
    with pytest.raises(AssertionError, match="must be True or False, it is of type int"):
        check_exercise(own, 0)


def test_parts_may_come_one_by_one(capsys) -> None:
    check_exercise("ex-memory-hand", S_4=[[130, 160], [80, 100]], z_4=None)
    assert capsys.readouterr().out == (
        "ex-memory-hand: S_4 is right; still to come: z_4, plain and normalized.\n"
    )


def dots(q, k): ...


def passing(q, k):
    pass


def documented(q, k):
    """What it will do."""


def documented_dots(q, *, k=None):
    """What it will do."""
    ...


def closed(x=1):
    def inner(q):
        return x if False else None

    def stub(q): ...

    return inner, stub


class Unwritten:
    def __init__(self, width):
        self.width = width

    def forward(self, x): ...


class Written(Unwritten):
    def forward(self, x):
        return x


@pytest.mark.parametrize("fn", [dots, passing, documented, documented_dots, closed()[1], Unwritten])
def test_stubs(fn) -> None:
    assert is_stub(fn)


@pytest.mark.parametrize("fn", [closed, len, np.add, lambda q: q, lambda q: None, Written])
def test_what_is_no_stub(fn) -> None:
    assert not is_stub(fn)


def test_a_function_that_returns_nothing_is_refused() -> None:
    def fn(S, k):
        S - np.outer(k, k @ S)

    with pytest.raises(AssertionError, match="returned None: is its return missing"):
        check_exercise("ex-memory-erase", fn)


def double(x):
    return 2 * x


OWN = Exercise(
    "ex-own-double",
    (
        Function(
            signature="my_double(x)",
            reference=double,
            section="Twice",
            inputs=lambda rng, N: rng.normal(size=N),
            special=(lambda rng: np.full(3, 1e3),),
            mistakes=(
                Mistake(lambda x: x**2, "Squared.", "Powers"),
                Mistake(lambda x: np.where(x > 100, x, 2 * x), "Large ones stay.", "Size"),
            ),
        ),
    ),
)


def test_an_exercise_of_ones_own(capsys) -> None:
    check_exercise(OWN, double)
    assert capsys.readouterr().out == "ex-own-double: right, on 7 inputs of 1 to 131 tokens.\n"
    with pytest.raises(AssertionError, match='^ex-own-double: Squared. Look at "Powers"'):
        check_exercise(OWN, lambda x: x * x)
    with pytest.raises(AssertionError, match='Large ones stay. Look at "Size"'):
        check_exercise(OWN, lambda x: double(x) if x.max() < 100 else x)


def test_what_is_special_is_said() -> None:
    with pytest.raises(AssertionError, match="Ordinary inputs came out right. In these something"):
        check_exercise(OWN, lambda x: np.minimum(2 * x, 100))
    with pytest.raises(AssertionError, match="is a length or a chunk size fixed"):
        check_exercise(OWN, lambda x: 2 * x[:7])


def test_the_library_is_that_of_the_exercise() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(AssertionError, match="output is a torch tensor, a NumPy array is expected"):
        check_exercise(OWN, lambda x: torch.tensor(2 * x))
    with pytest.raises(AssertionError, match='Squared. Look at "Powers".* is a torch tensor'):
        check_exercise(OWN, lambda x: torch.tensor(x * x))
    with pytest.raises(AssertionError, match="output is a MaskedArray, a NumPy array is expected"):
        check_exercise(OWN, lambda x: np.ma.masked_less(2 * x, 0))
    part = Function(
        signature="halves(x)",
        reference=lambda x: (x / 2, x.sum()),
        section="Halves",
        inputs=lambda rng, N: torch.tensor(rng.normal(size=N)),
    )
    own = Exercise("ex-own", (part,))
    check_exercise(own, lambda x: (0.5 * x, float(x.sum())))
    words = r"output\[0\] is a NumPy array, a torch tensor is expected"
    with pytest.raises(AssertionError, match=words):
        check_exercise(own, lambda x: (x.numpy() / 2, x.sum()))


def test_a_function_of_other_arguments_is_refused() -> None:
    def power(x, n):
        return x**n

    part = Function(
        signature="power(x, n, *, chunk=2)",
        reference=power,
        section="Powers",
        inputs=lambda rng, N: (rng.normal(size=N), 2),
    )
    own = Exercise("ex-own", (part,))
    for wrong, why in (
        (lambda x: x**2, "too many positional arguments"),
        (lambda x, n, m: x**n, "missing a required argument: 'm'"),
        (lambda *, x, n: x**n, "too many positional arguments"),
    ):
        words = rf"power is called as power\(x, n, \*, chunk=2\), yours .*: {why}[.]"
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)
    with pytest.raises(AssertionError, match="gets x, n in this order, yours takes n, x. With n"):
        check_exercise(own, lambda n, x: x**n)
    for right in power, lambda *args: power(*args), partial(power), np.power:
        check_exercise(own, right)
    check_exercise(own, lambda n, x: n**x)  # called otherwise, and right all the same


def test_what_a_view_cannot_use_is_not_the_function_s_own_error() -> None:
    def view(fn):
        return lambda q, k: fn(q) @ fn(k).T

    def own_error(x):
        raise NotImplementedError

    def generator(x):
        yield x

    part = Function(
        signature="features(x)",
        reference=lambda x: x,
        section="Features",
        inputs=lambda rng, N: tuple(rng.normal(size=(2, N, 3))),
        view=view,
    )
    own = Exercise("ex-own", (part,))
    check_exercise(own, lambda x: -x)
    cannot = "from which the check cannot go on: "
    for wrong, words in (
        (lambda x: None, "returned None: is its return missing"),
        (own_error, "your function raised NotImplementedError[.]"),
        (lambda x: list(x), f"returned a list of [0-9]+, {cannot}AttributeError"),
        (generator, f"returned a generator, {cannot}AttributeError"),
        (lambda x: x[..., None], f"returned one array, {cannot}ValueError"),
    ):
        with pytest.raises(AssertionError, match=f'{words}.*Look at "Features"'):
            check_exercise(own, wrong)


def test_a_mistake_that_does_not_explain_all_is_not_named() -> None:
    """Squared where it is short, and something else where it is long."""
    with pytest.raises(AssertionError) as refusal:
        check_exercise(OWN, lambda x: x**2 if len(x) == 1 else x + 1)
    assert "Squared" not in str(refusal.value)
    assert 'Look at "Twice"' in str(refusal.value)


def test_further_checks_name_their_section() -> None:
    part = Function(
        signature="attend(q, k, v)",
        reference=lambda q, k, v: np.cumsum(v, axis=-2),
        section="Sums",
        further=(Further(checks.check_streaming, "Pieces"),),
    )
    with pytest.raises(AssertionError, match='TypeError.* Look at "Pieces"'):
        check_exercise(Exercise("ex-own", (part,)), lambda q, k, v: np.cumsum(v, axis=-2))


def test_further_checks_have_options() -> None:
    def stacked(q, k, v, *, initial_state=None, return_state=False):
        out, total = [], 0 if initial_state is None else initial_state
        for t in range(v.shape[-2]):
            total = total + v[..., t, :]
            out.append(total)
        return (np.stack(out, axis=-2), total) if return_state else np.stack(out, axis=-2)

    for options in {"empty_pieces": False}, {}:
        part = Function(
            signature="attend(q, k, v, *, initial_state=None, return_state=False)",
            reference=lambda q, k, v: np.cumsum(v, axis=-2),
            section="Sums",
            further=(Further(checks.check_streaming, "Pieces", options=options),),
        )
        own = Exercise("ex-own", (part,))
        if options:
            check_exercise(own, stacked)
        else:
            with pytest.raises(AssertionError, match='An empty piece .* Look at "Pieces"'):
                check_exercise(own, stacked)


def test_a_number_is_not_a_multiple_and_text_is_no_number() -> None:
    part = Function(
        signature="count(x)",
        reference=lambda x: float(x),
        section="Counts",
        inputs=lambda rng, N: (N,),
        unit="",
    )
    own = Exercise("ex-own", (part,))
    with pytest.raises(AssertionError) as refusal:
        check_exercise(own, lambda x: x**2 + 1.0)
    assert "everywhere" not in str(refusal.value)
    with pytest.raises(AssertionError, match="is text, '7', where numbers are expected"):
        check_exercise(own, lambda x: f"{x}")
    for right in int, np.float64, np.asarray, Fraction:  # numbers, whatever they are called
        check_exercise(own, lambda x, right=right: right(x))
    for wrong, words in (
        (lambda x: [x], "returns a list of 1 where one number is expected"),
        (lambda x: (y for y in [x]), "is of type generator, where numbers are expected"),
        (lambda x: {x}, "is of type set, where numbers are expected"),
        (lambda x: lambda: x, "is of type function, where numbers are expected"),
        (lambda x: complex(x), "has dtype complex128, float64 is expected[.]"),
        (lambda x: x if x == 7 else 0.5, "With 7 it came out right[.]"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_exercise(own, wrong)


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    script = """
import sys
from lesson_code import checks
before = set(sys.modules)
assert not [x for x in before if x.startswith("lesson_code.checks.exercises.") and "._" not in x]
checks.check_exercise("ex-memory-erase", None)
assert "lesson_code.checks.exercises.memory" in sys.modules
assert "lesson_code.checks.exercises.recurrence" not in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- The notebooks of exercises ----------------------------------------------------------------


def made(path: Path, names: exercises.Names, **options) -> NotebookNode:
    return exercises.exercise_notebook(path, names, **options)


def text_of(notebook: NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


def test_a_notebook_has_all_exercises_and_no_solution(chapter: Path, names) -> None:
    notebook = made(chapter, names)
    nbformat.validate(notebook)
    text = text_of(notebook)
    blocks = [block for block in parts_of(chapter) if block.kind == "exercise"]
    assert len(re.findall(r"(?m)^## Exercise \d+\.\d+\. ", text)) == len(blocks)
    for label in declared(chapter):
        assert f'"{label}"' in text
    outside = "\n".join(block.text for block in parts_of(chapter)) + "\n".join(
        cell.source
        for cell in nbformat.read(chapter, as_version=4).cells
        if exercises.SETUP in cell.metadata.get("tags", [])
    )
    for label, kind, source in solutions(chapter):
        lines = source.splitlines() if kind == "code" else source.split("\n\n")
        for line in lines:
            line = line.strip()
            given = "checks.check" in line or line.startswith(("def ", "class "))
            if len(line) >= 40 and line not in outside and not given:
                assert line not in text, label


def test_a_notebook_is_plain_markdown(chapter: Path, names) -> None:
    markup = r"(?m)\{[a-z:-]+\}`|^[`:]{3,}\{|^\([\w-]+\)=$|\\simil|\\softmax"
    for cell in made(chapter, names).cells:
        if cell.cell_type == "markdown":
            assert not re.search(markup, cell.source), cell.source


def test_the_set_up_defines_what_the_solutions_use(chapter: Path, names) -> None:
    """Without running anything: every name is from the set-up, the exercises or a solution."""
    notebook = made(chapter, names)
    cells = [c.source for c in notebook.cells[1:] if c.cell_type == "code"]
    solved = [source for _, kind, source in solutions(chapter) if kind == "code"]
    for sources in (cells, [x for x in cells if "# yours" not in x] + solved):
        code = compile("\n".join(sources), chapter.name, "exec")
        missing = loaded(code) - stored(code) - set(dir(builtins)) - {"get_ipython"}
        assert not missing, f"tag the cells that define {missing} as {exercises.SETUP}"


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def loaded(code: CodeType) -> set[str]:
    return {
        step.argval
        for inner in codes(code)
        for step in dis.get_instructions(inner)
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")
    } - {"__name__", "__module__", "__qualname__"}


def stored(code: CodeType) -> set[str]:
    """All that any level stores: class bodies, too, store names."""
    return {
        step.argval
        for inner in codes(code)
        for step in dis.get_instructions(inner)
        if step.opname in ("STORE_NAME", "STORE_GLOBAL")
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run_chapter" in metafunc.fixturenames:
        every = metafunc.config.option.all_notebooks
        chosen = CHAPTERS if every else [x for x in CHAPTERS if x.name.startswith("03")]
        metafunc.parametrize("run_chapter", chosen, ids=lambda path: path.stem)


def test_a_notebook_runs_as_it_is(run_chapter: Path, names, tmp_path: Path) -> None:
    notebook = made(run_chapter, names)
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=120, resources=place).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    for label in declared(run_chapter):
        assert re.search(rf"{label}: write .*, then run", said), label


def test_a_notebook_accepts_the_solutions(run_chapter: Path, names, capsys) -> None:
    """In this process, as a kernel takes seconds to start."""
    solution = {}
    for label, kind, source in solutions(run_chapter):
        if kind == "code":
            solution[label] = solution.get(label, "") + source + "\n"
    scope = {}
    for cell in made(run_chapter, names).cells[1:]:
        if cell.cell_type == "code":
            label = re.search(r'check_exercise\(\s*"([\w-]+)"', cell.source)
            exec(solution[label[1]] if label else cell.source, scope)
    said = capsys.readouterr().out
    for label in declared(run_chapter):
        assert re.search(rf"{label}: .*right", said), label


def test_a_hint_below_code_is_a_text(names, tmp_path: Path) -> None:
    given = nbformat.v4.new_code_cell("faulty = 1 / 3")
    texts = (
        "# A memory made of outer products\n\n## Exercises",
        ":::{exercise} In code: a half\n:label: ex-memory-code\n\nWhat is wrong?\n:::",
        ":::{hint}\n:class: dropdown\n\nDivide by **two**.\n:::",
        "````{solution-start} ex-memory-code\n````",
    )
    cells = list(map(nbformat.v4.new_markdown_cell, texts))
    path = tmp_path / "03_memory.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[*cells[:2], given, *cells[2:]]), path)
    exercise, code, hint, answer = made(path, names).cells[2:]
    assert "What is wrong?" in exercise.source
    assert code.cell_type == answer.cell_type == "code"
    assert code.source == given.source
    assert hint.cell_type == "markdown"
    assert "<summary>Hint</summary>\n\nDivide by **two**." in hint.source


def test_links_and_words(names, tmp_path: Path) -> None:
    assert names.inline("{ref}`chapter 2 <ch-bracket>`") == "chapter 2"
    assert names.inline("{ref}`ch-bracket`") == "chapter “The bracket trick”"
    assert names.inline("{ref}`ex-memory-code`") == "exercise 3.2"
    assert names.inline("{cite:p}`schlag2021`") == "(Schlag et al., 2021)"
    assert names.inline("{cite:t}`hopfield1982`") == "Hopfield (1982)"
    formula = names.inline(r"$\simil(q)$ and $\similar$")
    assert formula == r"$\operatorname{sim}(q)$ and $\similar$"
    assert names.inline("{py:func}`~lesson_code.numpy.identity`") == "`identity`"
    assert "frac{n - 1}{D}" in names.markdown("See {eq}`eq-capacity`.")
    with pytest.raises(KeyError):
        names.markdown("See {eq}`eq-nowhere`.")
    notebook = made(CHAPTERS[2], names, address="https://example.org/")
    link = "https://example.org/book/03_outer_product_memory.html"
    assert f"[A memory made of outer products]({link})" in notebook.cells[1].source


def test_the_first_cell_knows_the_address(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    notebooks.set_address("https://github.com/someone/some-book", tmp_path / "tree")
    written = exercises.write_notebooks(tmp_path / "out", root=tmp_path / "tree")
    assert [path.name for path in written] == [path.name for path in CHAPTERS]
    cells = json.loads(written[2].read_text("utf-8"))["cells"]
    assert "git+https://github.com/someone/some-book" in "".join(cells[0]["source"])
    assert exercises.colab_link(
        {"url": "https://github.com/someone/some-book", "branch": "gh-pages"}, written[2].name
    ) == (
        "https://colab.research.google.com/github/someone/some-book/blob/gh-pages/exercises/"
        "03_outer_product_memory.ipynb"
    )


# --- The site ----------------------------------------------------------------------------------


def test_the_site_offers_the_notebook_and_the_check(site: Path, chapter: Path, names) -> None:
    page = soup(site / "book" / f"{chapter.stem}.html")
    [offer] = page.select("#exercises > .exercise-notebook")
    target = (site / "book" / offer.a["href"]).resolve()
    assert json.loads(target.read_text("utf-8"))["nbformat"] == 4
    for block in parts_of(chapter):
        if block.kind == "exercise":
            shown = page.select_one(f"#{block.options['label']}")
            number = names.words[block.options["label"]].removeprefix("exercise ")
            assert shown.select_one(".caption-number").text.strip() == f"Exercise {number}"
    for exercise in declared(chapter).values():
        assert page.select_one(f"#{exercise.label} .exercise-check").text.strip() == exercise.call
    for label, (number, _) in names.equations.items():
        equation = page.select_one(f"#equation-{label} .eqno")
        if equation is not None:
            assert f"({number})" in equation.text
