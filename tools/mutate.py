"""How strong are the tests? Change the code at random, in one place, and see if a test fails.

    python -m tools.mutate 100 lesson_code/numpy --log before.jsonl --seed 0

draws 100 changes (changes.py) of the Python files that are named; a folder stands for all below it.
Each is made in a copy of the tree in which this is run, and the tests that pass through the changed
line run until one fails: those of the file itself first, its doctests and its mirror in `tests`. At
the end stands what survived. Some changes must: that of a size which only saves time.

The log gets a line for each change; the same command goes on where it was stopped. Beside it
stands which test passes through which line, LOG.coverage: remove both when code or tests change.

There are libraries, but mutmut leaves out decorated functions and wraps all others, in ways that
torch.compile does not trace, and cosmic-ray starts a Python for each change, which imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tools.changes import Change, draw

# What all models have in common.
GENERAL = [
    "signatures",
    "operators",
    "definitions",
    "attention_arguments",
    "identities",
    "arguments",
]
SIGNATURES = "tests/test_signatures.py"
SLOW = "modules"  # they compile, which is slow while lines are noted: for changes there alone
PRELOAD = ["hypothesis.extra.numpy", "torch._dynamo", "torch.func"]  # what takes seconds to import
QUICK = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
IGNORED = shutil.ignore_patterns(".*", "_build", "__pycache__")
LIMIT = 120  # seconds for one test: a change may make a loop endless


def tests_of(file: str) -> tuple[list[str], list[str]]:
    """The tests that a change is tried with: those of the file itself, and those around it."""
    path = Path(file)
    folders = [Path("tests", *path.parts[1:depth]) for depth in range(len(path.parts) - 1, 1, -1)]
    own = [path, Path("tests", *path.parts[1:-1], f"test_{path.stem.strip('_')}.py")]
    around = [Path("tests", f"test_{name}.py") for name in GENERAL]
    for folder in folders:
        found = sorted(folder.rglob("test_*.py"))
        around += [p for p in found if SLOW not in p.relative_to(folder).parts]
    own = [str(p) for p in own if p.exists()]
    return own, [f for f in dict.fromkeys(map(str, around)) if Path(f).exists() and f not in own]


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Watch:
    """A plugin of pytest: runs the `chosen` tests, all by default, and notes which of them fail."""

    def __init__(self, chosen: set[str] | None = None, coverage: Coverage | None = None) -> None:
        self.chosen, self.coverage, self.failed = chosen, coverage, []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen is not None:
            items[:] = [i for i in items if {i.nodeid, file_of(i.nodeid)} & self.chosen]

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
        if not watch.coverage:
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


def record(data_file: Path, changes: list[Change]) -> None:
    """Note which test passes through which line. All of them must pass."""
    unfinished = data_file.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    files = dict.fromkeys(f for change in changes for part in tests_of(change.file) for f in part)
    package = Path(changes[0].file).parts[0]
    coverage = Coverage(data_file=unfinished, source=[package], config_file=False)
    coverage.set_option("run:relative_files", True)
    if failed := run_pytest(Watch(coverage=coverage), *files):
        sys.exit("\n".join(["These tests fail without any change:", *failed]))
    unfinished.rename(data_file)


def passing_through(change: Change, data: CoverageData) -> set[str]:
    """The tests that run the changed line; if an import runs it, those that use the file."""
    tests = data.contexts_by_lineno(change.file)
    found = set(tests.get(change.line, []))
    if "" in found:
        found = {SIGNATURES}.union(*tests.values())  # looks at defaults, runs nothing
    return found - {""}


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
            files = [f for f in files if f in map(file_of, chosen)]
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
        if not (recorded := log.with_suffix(".coverage")).exists():
            record(recorded, changes)
        data = CoverageData(str(recorded))
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
