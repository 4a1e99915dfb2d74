"""Changes of the code at random: what is changed, what is not, and what tests make of it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.changes import Places, draw

ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, "-c", "from tools import mutate; mutate.PRELOAD = []; mutate.main()"]
CODE = '''\
def larger(a, b):
    """
    >>> larger(2, 3)
    3
    """
    return a if a > b else b


def area(w, h):
    return w * h
'''
TESTS = """\
from small.shapes import area


def test_area():
    assert area({}, 2) == 6
"""


def changed(tmp_path: Path, source: str) -> set[str]:
    """The lines that a line can become."""
    file = tmp_path / "code.py"
    file.write_text(source, encoding="utf-8")
    changes = sum(Places(str(file)).found, [])
    return {change.apply(source.encode()).decode() for change in changes}


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("c = a @ b", {"c = a * b"}),
        ("c = (é  # or\n - b)", {"c = (é  # or\n + b)"}),
        ("c += a", {"c -= a", "pass"}),
        ("c = a is not b < d", {"c = a is b < d", "c = a is not b <= d"}),
        ("c = a and b or d", {"c = a or b or d", "c = a and b and d"}),
        ("c = x.sum(axis=-1)", {"c = x.sum(axis=1)", "c = x.sum(axis=-0)", "c = x.sum(axis=-2)"}),
        ("c = x[i:]", {"c = x[(i) - 1:]", "c = x[(i) + 1:]"}),
        ("c = not 0.5", {"c =  0.5", "c = not 1.0", "c = not 0.25"}),
        ("c = a if f(b) else d", {"c = a if not f(b) else d"}),
        ("c = np.tril(x)", {"c = np.tril(x, -1)", "c = np.tril(x, 1)"}),
        ("c = x.triu()", {"c = x.triu(-1)", "c = x.triu(1)"}),
        ("f(a, b=True)", {"pass", "f(a, b=False)"}),
    ],
)
def test_what_a_line_becomes(tmp_path: Path, line: str, others: set[str]) -> None:
    assert changed(tmp_path, line) == others


def test_what_stays(tmp_path: Path) -> None:
    lines = [
        '"""2 + 2."""',
        "x: Literal[1] | None = a",
        "raise E(f'{n - 1}')",
        "x = a.astype(b, copy=False)",
    ]
    assert changed(tmp_path, "\n".join(lines)) == set()


def test_every_change_of_the_package_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    programs = {}
    for change in draw(["lesson_code"], 200, seed=0):
        source = Path(change.file).read_bytes()
        if change.file not in programs:
            programs[change.file] = ast.dump(ast.parse(source))
        assert ast.dump(ast.parse(change.apply(source))) != programs[change.file]


def test_a_smaller_count_gives_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    some, more = (draw(["lesson_code/numpy"], n, seed=3) for n in (5, 9))
    assert some == more[:5] != draw(["lesson_code/numpy"], 5, seed=4)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tree whose tests notice three changes of four: `area` is tested and `larger` nearly."""
    for name, text in {"small/shapes.py": CODE, "tests/test_shapes.py": TESTS.format(3)}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "small/__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--doctest-modules"\n'
    )
    return tmp_path


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [*RUN, "10", "small", "--log", "log.jsonl"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


def test_what_is_caught_and_what_survives(small: Path) -> None:
    done = run(small)
    assert done.returncode == 0, done.stderr
    caught = {r["change"]: r["caught by"] for r in map(json.loads, open(small / "log.jsonl"))}
    assert caught == {
        "small/shapes.py:6: return a if a [->-]{+>=+} b else b": [],
        "small/shapes.py:10: return w [-*-]{+/+} h": ["tests/test_shapes.py::test_area"],
    }
    assert "all                                             2        1        1" in done.stdout
    (small / "log.jsonl").write_text((small / "log.jsonl").read_text().splitlines()[0] + "\n")
    again = run(small)  # goes on
    assert again.stdout.startswith("2 ") and again.stdout.endswith(done.stdout.partition("\n\n")[2])


def test_tests_that_fail_anyway_are_not_used(small: Path) -> None:
    (small / "tests/test_shapes.py").write_text(TESTS.format(4))
    done = run(small)
    assert done.returncode == 1 and "tests/test_shapes.py::test_area" in done.stderr
    assert not (small / "log.jsonl").exists()
