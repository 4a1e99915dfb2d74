"""How strong are the tests? Change the code at random, in one place, and see if a test fails.

    python tools/mutate.py 100 lesson_code/numpy --log before.jsonl --seed 0

draws 100 changes of the Python files named (a folder stands for all below it): another operator or
comparison, a number one off, a slice or a triangle shifted, a condition negated, a statement left
out. Each is made in a copy of the tree in which this is run, and the tests that pass through the
changed line run until one fails: those of the file itself first, its doctests and its mirror in
`tests`. At the end stands what survived. Some changes must: that of a size which only saves time.

The log gets a line for each change; the same command goes on where it was stopped. Beside it
stands which test passes through which line, LOG.coverage: remove both when code or tests change.

There are libraries, but mutmut leaves out decorated functions and wraps all others, in ways that
torch.compile does not trace, and cosmic-ray starts a Python for each change, which imports torch.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

GENERAL = ["operators", "identities", "arguments", "signatures"]  # what all models have in common
PRELOAD = ["hypothesis.extra.numpy", "torch._dynamo", "torch.func"]  # what takes seconds to import
QUICK = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
IGNORED = shutil.ignore_patterns(".*", "_build", "__pycache__")
LIMIT = 120  # seconds for one test: a change may make a loop endless

SWAPS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "@": "*"}
SWAPS |= {"&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<", "and": "or", "or": "and"}
SWAPS |= {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SWAPS |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
OPERATOR = re.compile("|".join(re.escape(s) for s in sorted(SWAPS, key=len, reverse=True)))


@dataclass(frozen=True)
class Change:
    """In a file, in a line, the bytes from `start` to `end` become `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def show(self, source: bytes) -> str:
        """The lines that change, as one, with the old in [- -] and the new in {+ +}."""
        before = source[: self.start].decode().rpartition("\n")[2]
        after = source[self.end :].decode().partition("\n")[0]
        old = source[self.start : self.end].decode()
        marked = f"{before}[-{old}-]{{+{self.new}+}}{after}"
        return f"{self.file}:{self.line}: {' '.join(marked.split())}"


class Places:
    """The places of a file that can be changed, each as the list of its changes."""

    def __init__(self, file: str) -> None:
        self.file, self.source = file, Path(file).read_bytes()
        self.lines = [0, *(m.end() for m in re.finditer(b"\n", self.source))]
        self.found: list[list[Change]] = []
        self._visit(ast.parse(self.source))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr):  # what an error says
            return
        if isinstance(node, ast.keyword) and node.arg == "copy":  # copy=False saves time, no more
            return
        if changes := [Change(self.file, node.lineno, *change) for change in self._changes(node)]:
            self.found.append(changes)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    self._visit(child)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.BinOp(left=left, right=right):
                yield self._swapped(left, right)
            case ast.AugAssign(target=left, value=right):
                yield self._swapped(left, right)
                yield *self._span(node), "pass"
            case ast.Compare(left=left, comparators=rest):
                yield from (self._swapped(*pair) for pair in pairwise([left, *rest]))
            case ast.BoolOp(values=values):
                yield from (self._swapped(*pair) for pair in pairwise(values))
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, _ = self._span(node)
                yield start, start + len("not" if isinstance(node.op, ast.Not) else "-"), ""
            case ast.Constant(value=bool(value)):
                yield *self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield from ((*self._span(node), str(n)) for n in (value - 1, value + 1))
            case ast.Constant(value=float(value)):
                others = (2 * value or 1.0, value / 2 or -1.0)
                yield from ((*self._span(node), str(x)) for x in others)
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), "pass"
            case ast.Slice(lower=lower, upper=upper):
                for bound in filter(None, (lower, upper)):
                    if not isinstance(bound, ast.Constant | ast.UnaryOp):
                        yield from (self._around(bound, f"({{}}) {n}") for n in ("- 1", "+ 1"))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                    yield self._around(test, "not {}")
            case ast.Call(func=ast.Attribute(attr="tril" | "triu") as func, keywords=[]):
                if not node.args:  # x.tril()
                    yield from ((*self._span(node), f"{ast.unparse(func)}({n})") for n in (-1, 1))
                elif len(node.args) == 1 and ast.unparse(func.value) in ("np", "torch"):
                    yield from (self._around(node.args[0], f"{{}}, {n}") for n in (-1, 1))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start, end = self.lines[node.lineno - 1], self.lines[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def _swapped(self, left: ast.expr, right: ast.expr) -> tuple[int, int, str]:
        """Another operator between two operands."""
        (_, start), (end, _) = self._span(left), self._span(right)
        between = self.source[start:end].decode("latin-1")  # a character for each byte
        between = re.sub("#.*", lambda comment: " " * len(comment[0]), between)
        operator = OPERATOR.search(between)
        return start + operator.start(), start + operator.end(), SWAPS[operator[0]]

    def _around(self, node: ast.expr, pattern: str) -> tuple[int, int, str]:
        start, end = self._span(node)
        return start, end, pattern.format(self.source[start:end].decode())


def draw(paths: list[str], count: int, seed: int) -> list[Change]:
    """Changes at places drawn at random; a smaller count gives the first of the same ones."""
    files = set()
    for path in map(Path, paths):
        files |= {path} if path.is_file() else {*path.rglob("*.py")}
    places = [place for file in sorted(files) for place in Places(file.as_posix()).found]
    rng = random.Random(seed)
    rng.shuffle(places)
    return [rng.choice(place) for place in places[:count]]


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """The tests that a change is tried with: those of the file itself, and those around it."""
    path = Path(file)
    folders = [Path("tests", *path.parts[1:depth]) for depth in range(len(path.parts) - 1, 1, -1)]
    own = [path, Path("tests", *path.parts[1:-1], f"test_{path.stem.strip('_')}.py")]
    around = [Path("tests", f"test_{name}.py") for name in GENERAL]
    around += [found for folder in folders for found in sorted(folder.glob("test_*.py"))]
    around += [found for folder in folders for found in sorted(folder.rglob("test_*.py"))]
    own = [str(p) for p in own if p.exists()]
    return own, [f for f in dict.fromkeys(map(str, around)) if Path(f).exists() and f not in own]


class Watch:
    """A plugin of pytest: runs the `chosen` tests, all by default, and notes which of them fail."""

    def __init__(self, chosen: set[str] | None = None, coverage: Coverage | None = None) -> None:
        self.chosen, self.coverage, self.failed = chosen, coverage, []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [i for i in items if self.chosen is None or i.nodeid in self.chosen]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(LIMIT)  # nobody handles it, so that it ends the process
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += [report.nodeid] * report.failed

    pytest_collectreport = pytest_runtest_logreport


def run_pytest(watch: Watch, *arguments: str) -> list[str]:
    """Run pytest in a child of this process; the tests that failed, or how the child ended."""
    receive, send = get_context("fork").Pipe(duplex=False)

    def child() -> None:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with watch.coverage.collect() if watch.coverage else contextlib.nullcontext():
            code = pytest.main([*QUICK, *arguments], plugins=[watch])
        if watch.coverage:
            watch.coverage.save()
        passed = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        send.send(watch.failed or ([] if passed else [str(code)]))

    process = get_context("fork").Process(target=child)
    process.start()
    send.close()
    try:
        return receive.recv()
    except EOFError:
        process.join()
        return [f"ended with {process.exitcode}"]
    finally:
        process.kill()
        process.join()


def record(data_file: str, changes: list[Change]) -> None:
    """Note which test passes through which line. All of them must pass."""
    files = dict.fromkeys(f for change in changes for part in tests_of(change.file) for f in part)
    package = Path(changes[0].file).parts[0]
    coverage = Coverage(data_file=data_file, source=[package], config_file=False)
    coverage.set_option("run:relative_files", True)
    if failed := run_pytest(Watch(coverage=coverage), *files):
        Path(data_file).unlink(missing_ok=True)
        sys.exit("\n".join(["These tests fail without any change:", *failed]))


def passing_through(change: Change, data: CoverageData) -> set[str]:
    """The tests that run the changed line; those of the whole file if it runs in an import."""
    tests = data.contexts_by_lineno(change.file)
    found = set(tests.get(change.line, []))
    return (set().union(*tests.values()) if found == {""} else found) - {""}


def try_out(change: Change, data: CoverageData, when: int) -> list[str]:
    """The tests that notice a change, none or one."""
    path = Path(change.file)
    source, stat = path.read_bytes(), path.stat()
    path.write_bytes(change.apply(source))
    os.utime(path, (when, when))  # by its time Python tells which of the files it has compiled
    chosen = passing_through(change, data)
    own, around = tests_of(change.file)
    try:
        if not chosen:  # perhaps another process runs it, or a compiler
            return run_pytest(Watch(), "-x", *own)
        for files in (own, around):
            files = [f for f in files if any(test.startswith(f"{f}::") for test in chosen)]
            if files and (failed := run_pytest(Watch(chosen), "-x", *files)):
                return failed
        return []
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def table(results: list[dict]) -> str:
    """How many changes of each file were caught, and those that were not."""
    caught = Counter(result["file"] for result in results if result["caught by"])
    drawn = Counter(result["file"] for result in results)
    rows = [("file", "changes", "caught", "survived")]
    rows += [(f, n, caught[f], n - caught[f]) for f, n in sorted(drawn.items())]
    rows += [("all", drawn.total(), caught.total(), drawn.total() - caught.total())]
    lines = ["{:<40}{:>9}{:>9}{:>9}".format(*row) for row in rows]
    return "\n".join([*lines, "", *(r["change"] for r in results if not r["caught by"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int, help="how many changes")
    parser.add_argument("paths", nargs="+", help="files and folders of code, below this folder")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines, and where to go on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    changes = draw(options.paths, options.count, options.seed)
    shown = [change.show(Path(change.file).read_bytes()) for change in changes]
    log = options.log.resolve()
    results = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if [result["change"] for result in results[: len(changes)]] != shown[: len(results)]:
        sys.exit(f"{log} is the log of other changes.")

    tree = Path.cwd()
    with tempfile.TemporaryDirectory() as copy, contextlib.chdir(copy):
        shutil.copytree(tree, copy, ignore=IGNORED, dirs_exist_ok=True)
        os.environ |= {"PYTHONPATH": copy, "OMP_NUM_THREADS": "1"}
        os.environ["CI"] = "1"  # so that hypothesis draws the same each time, and keeps nothing
        for module in PRELOAD:
            with contextlib.suppress(ImportError):
                import_module(module)
        data = CoverageData(str(log.with_suffix(".coverage")))
        if not Path(data.data_filename()).exists():
            record(data.data_filename(), changes)
        data.read()
        for number in range(len(results), len(changes)):
            failed = try_out(changes[number], data, when=number)
            result = {"file": changes[number].file, "change": shown[number], "caught by": failed}
            results.append(result)
            with log.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            print(number + 1, "caught" if failed else "SURVIVED", shown[number], flush=True)
    print("", table(results[: len(changes)]), sep="\n")


if __name__ == "__main__":
    main()
