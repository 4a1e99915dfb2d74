"""Broken pages and notebooks: each must fail the run that is there to catch it.

A control beside them passes, so that they do not fail for another reason.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.connect import LocalPortCache

from tests.conftest import keep_ports_apart, small_book

ROOT = Path(__file__).resolve().parent.parent
CANARIES = ROOT / "tests" / "canaries"


# --- pytest ------------------------------------------------------------------------------------


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the project's own options."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_bad_notebook_fails_and_a_good_one_does_not() -> None:
    names = {"good": "PASSED", "wrong_output": "FAILED", "raises": "FAILED"}
    result = run_pytest(*(f"tests/canaries/{name}.ipynb" for name in names))
    assert result.returncode == 1, result.stdout
    for name, outcome in names.items():
        assert f"PASSED tests/canaries/{name}.ipynb::Cell 0" in result.stdout
        assert f"{outcome} tests/canaries/{name}.ipynb::Cell 1" in result.stdout


def test_no_skips() -> None:
    lenient = run_pytest("tests/canaries/skips.py")
    strict = run_pytest("tests/canaries/skips.py", "--no-skips")
    in_workers = run_pytest("tests/canaries/skips.py", "--no-skips", "-n", "2")  # as `make test`
    nothing_skipped = run_pytest("tests/canaries/skips.py::test_passes", "--no-skips")
    runs = (lenient, strict, in_workers, nothing_skipped)
    assert [run.returncode for run in runs] == [0, 1, 1, 0]
    for run in (lenient, strict, in_workers):
        assert "a canary: it must be reported" in run.stdout


@pytest.mark.parametrize("first", [40_000, 40_001])
def test_two_processes_hand_out_ports_of_their_own(monkeypatch, first: int) -> None:
    def share(worker: int) -> set[int]:
        free = itertools.count(first, 2)  # odd ports alone, or even ones alone
        monkeypatch.setattr(LocalPortCache, "find_available_port", lambda cache, ip: next(free))
        keep_ports_apart(worker, 2)
        return {LocalPortCache().find_available_port("127.0.0.1") for _ in range(20)}

    assert share(0).isdisjoint(share(1))


# --- The book ----------------------------------------------------------------------------------


def make_twice(book: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run the Makefile's own recipe, with the environment that runs this test.

    Sphinx warns only of the pages that it reads anew, so a second run could pass where the first
    one did not.
    """
    if shutil.which("make") is None:
        pytest.skip("make is missing: install it (Debian, Ubuntu: apt install make)")
    (book / "lesson_code").mkdir()
    programs = Path(sys.executable).parent
    command = ["make", "book", f"BIN={programs}", "--assume-old=.venv/ready"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.run(command, cwd=book, check=False, **options) for _ in range(2)]


def test_make_builds_a_good_book(tmp_path: Path) -> None:
    book = small_book(tmp_path, CANARIES / "good_reference.md", CANARIES / "good.ipynb")
    for result in make_twice(book):
        assert result.returncode == 0, result.stdout
    assert (book / "_build" / "html" / "book" / "good.html").is_file()


def test_make_fails_each_time_on_a_broken_book(tmp_path: Path) -> None:
    """Each mistake is a warning, of which one is enough."""
    book = small_book(tmp_path, CANARIES / "broken_reference.md", CANARIES / "raises.ipynb")
    for result in make_twice(book):
        assert result.returncode != 0
        found = re.findall(r"WARNING: (.*)", result.stdout)
        for mistake in (
            "eq-missing",
            "section-missing",
            "nobody2099",
            "nowhere",
            "notebook failed",
        ):
            assert any(mistake in warning for warning in found), result.stdout
        assert "ZeroDivisionError" in result.stdout
