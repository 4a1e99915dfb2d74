"""Broken pages and notebooks: each must fail the run that is there to catch it.

A control beside them passes, so that they do not fail for another reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CANARIES = ROOT / "tests" / "canaries"


# --- pytest ------------------------------------------------------------------------------------


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the project's own options."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_good_notebook_passes() -> None:
    result = run_pytest("tests/canaries/good.ipynb")
    assert result.returncode == 0, result.stdout
    assert "PASSED tests/canaries/good.ipynb::Cell 1" in result.stdout


@pytest.mark.parametrize("name", ["wrong_output", "raises"])
def test_a_bad_notebook_fails(name: str) -> None:
    result = run_pytest(f"tests/canaries/{name}.ipynb")
    assert result.returncode == 1, result.stdout
    assert f"PASSED tests/canaries/{name}.ipynb::Cell 0" in result.stdout
    assert f"FAILED tests/canaries/{name}.ipynb::Cell 1" in result.stdout


def test_no_skips() -> None:
    lenient = run_pytest("tests/canaries/skips.py")
    strict = run_pytest("tests/canaries/skips.py", "--no-skips")
    in_workers = run_pytest("tests/canaries/skips.py", "--no-skips", "-n", "2")  # as `make test`
    nothing_skipped = run_pytest("tests/canaries/skips.py::test_passes", "--no-skips")
    runs = (lenient, strict, in_workers, nothing_skipped)
    assert [run.returncode for run in runs] == [0, 1, 1, 0]
    for run in (lenient, strict, in_workers):
        assert "a canary: it must be reported" in run.stdout


# --- The book ----------------------------------------------------------------------------------


@pytest.fixture
def small_book(tmp_path: Path) -> Callable[[str], Path]:
    """A function that makes a book of one canary, with the project's own configuration."""

    def make(name: str) -> Path:
        folder = tmp_path / "tree"
        shutil.copytree(ROOT / "book" / "_static", folder / "book" / "_static")
        shutil.copy(ROOT / "book" / "references.bib", folder / "book")
        shutil.copy(CANARIES / name, folder / "book")
        shutil.copy(ROOT / "_config.yml", folder)
        shutil.copytree(ROOT / "tools", folder / "tools")
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "book" / "bibliography.md").write_text(
            "# Bibliography\n\n```{bibliography}\n```\n"
        )
        page = f"book/{Path(name).stem}"
        (folder / "_toc.yml").write_text(
            f"format: jb-book\nroot: {page}\nchapters:\n  - file: book/bibliography\n"
        )
        return folder

    return make


@pytest.mark.parametrize("name", ["good.md", "good.ipynb"])
def test_a_good_book_builds(small_book, build_book, tmp_path: Path, name: str) -> None:
    result = build_book(small_book(name), tmp_path / "output")
    assert result.returncode == 0, result.stdout


def test_a_cell_that_raises_fails_the_build(small_book, build_book, tmp_path: Path) -> None:
    result = build_book(small_book("raises.ipynb"), tmp_path / "output")
    assert result.returncode != 0
    assert "raises.ipynb" in result.stdout and "ZeroDivisionError" in result.stdout


@pytest.mark.parametrize("target", ["eq-missing", "section-missing", "nobody2099", "nowhere"])
def test_a_broken_reference_fails_the_build(small_book, build_book, tmp_path, target) -> None:
    book = small_book("broken_reference.md")
    page = book / "book" / "broken_reference.md"
    title, _, references = page.read_text(encoding="utf-8").partition("\n")
    [reference] = [word for word in references.split(",") if target in word]
    page.write_text(f"{title}\n\n{reference.strip()}\n", encoding="utf-8")
    result = build_book(book, tmp_path / "output")
    assert result.returncode != 0
    assert target in result.stdout


def make_book(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the Makefile's own recipe, with the environment that runs this test."""
    if shutil.which("make") is None:
        pytest.skip("make is missing: install it (Debian, Ubuntu: apt install make)")
    (folder / "lesson_code").mkdir(exist_ok=True)
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    programs = Path(sys.executable).parent
    command = ["make", "book", f"BIN={programs}", "--assume-old=.venv/ready"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_make_builds_a_good_book(small_book) -> None:
    book = small_book("good.md")
    for _ in range(2):
        result = make_book(book)
        assert result.returncode == 0, result.stdout + result.stderr
    assert (book / "_build" / "html" / "book" / "good.html").is_file()


def test_make_fails_each_time_on_a_broken_book(small_book) -> None:
    # Sphinx warns only of the pages that it reads anew, so a second run could pass.
    book = small_book("broken_reference.md")
    for _ in range(2):
        result = make_book(book)
        assert result.returncode != 0
        assert "eq-missing" in result.stdout + result.stderr
