"""The page for teachers, followed word by word in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "book" / "teachers.md"
BLOCK = re.compile(r"^```(\S+)?(?: python)?\n(?::caption: (\S+)\n\n)?(.*?)^```$", re.M | re.S)


@dataclass
class Step:
    """Python that a teacher types, and what the page says that it prints."""

    code: str
    printed: str = ""


def read(text: str) -> tuple[dict[str, str], list[Step]]:
    """The files that the page has written, by name, and the steps in their order."""
    files, steps = {}, []
    for kind, caption, content in BLOCK.findall(text):
        if kind == "{code-block}":
            files[caption] = content
        elif kind == "python":
            steps.append(Step(content))
        elif kind == "text":
            steps[-1].printed = content
    return files, steps


def follow(text: str, folder: Path) -> list[str]:
    """Write the files, run the steps in one process, and return what each of them prints."""
    files, steps = read(text)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    mark = "\n--- next step ---\n"
    program = f"print({mark!r}, end='')\n".join(step.code for step in steps)
    (folder / "steps.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-W", "error", "steps.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split(mark)


def words(text: str) -> str:
    """Without line breaks, which the page has where a line would be too long."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_prints_what_it_says(page: str, tmp_path: Path) -> None:
    _, steps = read(page)
    printed = [words(text) for text in follow(page, tmp_path)]
    assert printed == [words(step.printed) for step in steps]


def test_all_of_its_code_was_found(page: str) -> None:
    files, steps = read(page)
    assert list(files) == [
        "window.py",
        "answer.py",
        "exercise.py",
        "answers/ada.py",
        "answers/ben.py",
    ]
    assert len(steps) == page.count("\n```python\n") == 5
    assert page.count("```") == 2 * len(BLOCK.findall(page))


def test_lines_fit_the_page(page: str) -> None:
    lines = [line for _, _, content in BLOCK.findall(page) for line in content.splitlines()]
    assert [line for line in lines if len(line) > 78] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("got -2.0289", "got -2.0288"),  # the page says something else
        ("band(3)", "band(4)"),  # the mistake is not the one that it is said to be
        ("np.tril(A, -4)", "np.tril(A, -3)"),  # the wrong answer is right
    ],
)
def test_a_page_that_is_wrong_is_refused(page: str, tmp_path: Path, before, after) -> None:
    assert before in page
    with pytest.raises(AssertionError):
        test_the_page_prints_what_it_says(page.replace(before, after), tmp_path)
