"""What every notebook of the book keeps to.

A rule is a function that takes a notebook and returns what it finds wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import notebooks

CANARIES = Path(__file__).parent / "canaries"


def code_cells(notebook: NotebookNode) -> list[tuple[int, NotebookNode]]:
    return [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def output_data(notebook: NotebookNode) -> Iterator[tuple[int, str, str]]:
    """Every stored output: the cell's number, the MIME type, the content."""
    for i, cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield i, "text/plain", output.text
            for kind, content in output.get("data", {}).items():
                yield i, kind, content if isinstance(content, str) else json.dumps(content)


# --- The rules ---------------------------------------------------------------------------------


def begins_with_the_first_cell(notebook: NotebookNode) -> list[str]:
    cell = notebook.cells[0]
    problems = []
    if cell.source != notebooks.first_cell(notebooks.repository_url()):
        problems.append("the first cell is not that of tools/notebooks.py")
    if len(cell.source.splitlines()) > 6:
        problems.append("the first cell has more than six lines")
    if "remove-cell" not in cell.metadata.get("tags", []):
        problems.append("the first cell has no tag remove-cell: readers of the site would see it")
    return problems


def was_executed_in_order(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {i} has execution count {cell.execution_count}, not {count}"
        for count, (i, cell) in enumerate(code_cells(notebook), start=1)
        if cell.execution_count != count
    ]


def raised_and_warned_of_nothing(notebook: NotebookNode) -> list[str]:
    return [
        f"cell {i} has an error or a warning among its outputs: {str(output)[:200]}"
        for i, cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def stores_nothing_of_the_machine(notebook: NotebookNode) -> list[str]:
    """Neither times nor paths nor addresses, which differ from one execution to the next."""
    timed = [i for i, cell in code_cells(notebook) if "execution" in cell.metadata]
    problems = [f"cell {i} stores times" for i in timed]
    if notebook.metadata != notebooks.METADATA:
        problems.append(f"the notebook's metadata are not {notebooks.METADATA}")
    place = re.compile(
        r"\b0x[0-9a-f]{9,}|[A-Z]:\\\w|<dc:date>"
        r"|(?<![\w.:/])/(?:Users|content|home|mnt|opt|private|root|tmp|usr|var|work)/\w"
    )
    for i, kind, content in output_data(notebook):
        if not kind.startswith("image/") or kind == "image/svg+xml":
            problems += [f"cell {i} prints {found[0]!r}" for found in place.finditer(content)]
    return problems


def prints_few_digits(notebook: NotebookNode) -> list[str]:
    """0.00123456 is printed with care, 0.14285714 is not."""
    return [
        f"cell {i} prints {found[0]}: five or six digits are enough"
        for i, kind, content in output_data(notebook)
        if kind in ("text/plain", "text/html", "text/markdown", "text/latex")
        for found in re.finditer(r"\d*\.\d{7,}", content)
        if len(found[0].replace(".", "").lstrip("0")) > 6
    ]


def figures_have_words(notebook: NotebookNode) -> list[str]:
    """Every figure has an alternative text that says what it shows, and a cell has one figure."""
    problems = []
    for i, cell in code_cells(notebook):
        images = [kind for j, kind, _ in output_data(notebook) if j == i and kind[:6] == "image/"]
        words = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if images and len(words.strip()) < 40:
            problems.append(f"cell {i}: mystnb.image.alt has {len(words)} characters, 40 are few")
        if len(images) > 1:
            problems.append(f"cell {i} shows {len(images)} images with one alternative text")
    return problems


def cells_are_short(notebook: NotebookNode) -> list[str]:
    lengths = [(i, len(cell.source.splitlines())) for i, cell in code_cells(notebook)]
    problems = [f"cell {i} has {count} lines, more than 25" for i, count in lengths if count > 25]
    return problems + [f"cell {i} is empty" for i, count in lengths if not count]


def lines_fit_the_page(notebook: NotebookNode) -> list[str]:
    """A longer line would scroll. Nobody sees the first cell."""
    return [
        f"cell {i} has a line of {len(line)} characters, more than 78: {line.strip()[:40]}..."
        for i, cell in code_cells(notebook)[1:]
        for line in cell.source.splitlines()
        if len(line) > 78
    ]


def outputs_are_small(notebook: NotebookNode) -> list[str]:
    problems = []
    for i, kind, content in output_data(notebook):
        encoded = kind.startswith("image/") and kind != "image/svg+xml"
        size = len(content) * 3 // 4 if encoded else len(content.encode())
        if size > (400_000 if kind.startswith("image/") else 100_000):
            problems.append(f"cell {i} has an output of {size} bytes ({kind})")
    return problems


def exercises_have_solutions(notebook: NotebookNode) -> list[str]:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    exercise = r"(?m)^[`:]{3,}\{(?:exercise|exercise-start)\}.*\n"
    exercises = re.findall(exercise + r"(?::[a-z]+:.*\n)*?:label: *(\S+)", text)
    solutions = re.findall(r"(?m)^[`:]{3,}\{(?:solution|solution-start)\} *(\S+)", text)
    problems = []
    count = len(re.findall(exercise, text))
    if count != len(exercises):
        problems.append(f"{count} exercises, {len(exercises)} of them with a label")
    if count < 3:
        problems.append(f"{count} exercises, three at least are wanted")
    if sorted(exercises) != sorted(solutions):
        problems.append(f"exercises {sorted(exercises)}, but solutions to {sorted(solutions)}")
    return problems


RULES = [
    begins_with_the_first_cell,
    was_executed_in_order,
    raised_and_warned_of_nothing,
    stores_nothing_of_the_machine,
    prints_few_digits,
    figures_have_words,
    cells_are_short,
    lines_fit_the_page,
    outputs_are_small,
]
CHAPTER_RULES = [exercises_have_solutions]


def name(item: object) -> str:
    return item.stem if isinstance(item, Path) else getattr(item, "__name__", str(item))


# --- The notebooks -----------------------------------------------------------------------------


def test_there_are_notebooks() -> None:
    assert notebooks.NOTEBOOKS


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=name)
def test_notebook(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(json.loads(path.read_text(encoding="utf-8")))
    rules = RULES + CHAPTER_RULES * bool(re.match(r"\d\d_", path.name))
    problems = [f"{rule.__name__}: {problem}" for rule in rules for problem in rule(notebook)]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# --- The rules themselves ----------------------------------------------------------------------


def good_notebook() -> NotebookNode:
    first = notebooks.first_cell(notebooks.repository_url())
    exercise = "```{{exercise}} Try\n:label: ex-{0}\n\nDo it.\n```\n\n"
    solution = "````{{solution-start}} ex-{0}\n:class: dropdown\n````\n"
    texts = [(exercise + solution).format(letter) for letter in "abc"]
    alt = "A line that rises from one to four in two steps, the second of them steeper."
    cells = [
        new_code_cell(first, metadata={"tags": ["remove-cell"]}),
        new_markdown_cell("\n".join(texts)),
        new_code_cell(
            "print(x)", outputs=[new_output("stream", text="0.123456, 0.00012345 in a/b")]
        ),
        new_code_cell(
            "draw()",
            metadata={"mystnb": {"image": {"alt": alt}}},
            outputs=[new_output("display_data", {"image/png": "iVBO", "text/plain": "<Figure>"})],
        ),
    ]
    for count, cell in enumerate((c for c in cells if c.cell_type == "code"), start=1):
        cell.execution_count = count
    return new_notebook(cells=cells, metadata=notebooks.METADATA)


def printing(text: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        notebook.cells[2].outputs[0].text = text

    return change


def showing(kind: str, content: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        notebook.cells[3].outputs[0].data[kind] = content

    return change


def cell(index: int, **values: object) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        notebook.cells[index].update(values)

    return change


EXERCISE = "```{exercise} Try\n:label: ex-a\n```\n"
BAD = [
    (begins_with_the_first_cell, cell(0, source="%pip install something")),
    (begins_with_the_first_cell, cell(0, metadata=NotebookNode())),
    (was_executed_in_order, cell(2, execution_count=None)),
    (was_executed_in_order, cell(2, execution_count=3)),
    (raised_and_warned_of_nothing, cell(2, outputs=[new_output("error", ename="E", evalue="")])),
    (raised_and_warned_of_nothing, cell(2, outputs=[new_output("stream", name="stderr")])),
    (stores_nothing_of_the_machine, cell(2, metadata=NotebookNode(execution={}))),
    (stores_nothing_of_the_machine, lambda notebook: notebook.metadata.update(widgets={})),
    (stores_nothing_of_the_machine, printing("<object at 0x7f12ab34cd56>")),
    (stores_nothing_of_the_machine, printing('File "/content/a.py"')),
    (stores_nothing_of_the_machine, showing("image/svg+xml", "<svg><dc:date>2026</dc:date></svg>")),
    (prints_few_digits, printing("0.1428571428")),
    (prints_few_digits, showing("text/html", "<td>12.34567891</td>")),
    (figures_have_words, cell(3, metadata=NotebookNode())),
    (figures_have_words, cell(3, metadata={"mystnb": {"image": {"alt": "A figure."}}})),
    (figures_have_words, showing("image/svg+xml", "<svg/>")),
    (cells_are_short, cell(2, source="x = 1\n" * 26)),
    (cells_are_short, cell(2, source="")),
    (lines_fit_the_page, cell(2, source="x = " + "1" * 75)),
    (outputs_are_small, printing("x" * 100_001)),
    (outputs_are_small, showing("image/png", "x" * 540_000)),
    (exercises_have_solutions, cell(1, source="")),
    (exercises_have_solutions, cell(1, source=EXERCISE * 3)),
    (exercises_have_solutions, cell(1, source=EXERCISE + "```{solution} ex-a\n```\n")),
]


def test_the_rules_accept_a_good_notebook() -> None:
    assert [rule(good_notebook()) for rule in RULES + CHAPTER_RULES if rule(good_notebook())] == []


@pytest.mark.parametrize(("rule", "change"), BAD, ids=name)
def test_the_rule_refuses_a_bad_notebook(rule, change) -> None:
    notebook = good_notebook()
    change(notebook)
    assert rule(notebook)


def test_every_rule_is_tried() -> None:
    assert {rule for rule, _ in BAD} == {*RULES, *CHAPTER_RULES}


def test_the_canary_without_words_is_refused() -> None:
    notebook = nbformat.read(CANARIES / "no_alt.ipynb", as_version=4)
    assert figures_have_words(notebook)
