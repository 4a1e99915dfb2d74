"""Exercises as the chapters have them, and their notebooks."""

from __future__ import annotations

import builtins
import dis
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from lesson_code.exercises import Exercise, exercises_of
from lesson_code.exercises._find import MODULES
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


def read(path: Path) -> book.Chapter:
    """A chapter, as the tools read it: its notebook once for all tests, which do not change it."""
    return book.Chapter(path, 1)


def parts_of(path: Path) -> list[exercises.Block]:
    return list(exercises.exercise_parts(read(path)))


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
    for cell in read(path).cells:
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
    text = "\n".join(read(chapter).sources("markdown"))
    headings = set(re.findall(r"(?m)^#{2,4} +(.*)$", text))
    [title] = re.findall(r"(?m)^# +(.*)$", text)
    for exercise in declared(chapter).values():
        assert exercise.chapter == title
        for part in exercise.parts:
            named = [part.section, *(mistake.section for mistake in part.known)]
            named += [further.section for further in getattr(part, "further", ())]
            assert set(named) <= headings, exercise.label


def test_solutions_end_with_the_check(chapter: Path) -> None:
    code = {}
    for label, kind, source in solutions(chapter):
        if kind == "code":
            code[label] = code.get(label, "") + source + "\n"
    for label in declared(chapter):
        assert f'checks.check_exercise("{label}"' in code[label], label


# --- The notebooks of exercises ----------------------------------------------------------------


def made(path: Path, names: exercises.Names, **options) -> NotebookNode:
    return exercises.exercise_notebook(read(path), names, **options)


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
        for cell in read(chapter).cells
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
    places = {tag["id"]: tag for tag in page.find_all(id=True)}
    [offer] = places["exercises"].find_all(class_="exercise-notebook", recursive=False)
    target = (site / "book" / offer.a["href"]).resolve()
    assert json.loads(target.read_text("utf-8"))["nbformat"] == 4
    for block in parts_of(chapter):
        if block.kind == "exercise":
            shown = places[block.options["label"]]
            number = names.words[block.options["label"]].removeprefix("exercise ")
            assert shown.select_one(".caption-number").text.strip() == f"Exercise {number}"
    for exercise in declared(chapter).values():
        assert places[exercise.label].select_one(".exercise-check").text.strip() == exercise.call
    for label, (number, _) in names.equations.items():
        if equation := places.get(f"equation-{label}"):
            assert f"({number})" in equation.select_one(".eqno").text
