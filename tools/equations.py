"""Which function computes an equation of the book, and which test checks it.

The functions are found where they say it themselves: in docstrings that cite the equation. What
cannot be found there stands in book/equations.yml. `problems` compares both with the book.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tools.book import ROOT, Chapter, chapters
from tools.code_links import import_name

TABLE = ROOT / "book" / "equations.yml"

# Where functions compute what they cite, in the order in which they are shown. (Those of
# lesson_code.costs count what an equation costs, which is not the same.)
PACKAGES = {
    "lesson_code.numpy": "NumPy",
    "lesson_code.torch": "PyTorch",
    "lesson_code.torch.distributed": "PyTorch, across processes",
    "lesson_code.cupy": "CUDA",
}
PRIMARY = next(iter(PACKAGES))
CITED = re.compile(r":eq:`([\w-]+)`")
LIKE = re.compile(r"\bas\s+:\w+:`lesson_code\.numpy\.([\w.]+)`")


def equations() -> dict[str, Chapter]:
    """The chapters of the numbered equations, in the order of the book."""
    return {label: chapter for chapter in chapters() for label in chapter.equations}


def in_words(label: str) -> str:
    return label.removeprefix("eq-").replace("-", " ")


@dataclass(frozen=True)
class Row:
    """What the table says of an equation: functions and tests, or why there are none."""

    functions: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Table:
    """What book/equations.yml says of labels, and why public functions have no equation."""

    equations: dict[str, Row]
    functions: dict[str, str]


def read_table(path: Path = TABLE) -> Table:
    """Read the table. What stands alone may be written without brackets."""
    content = yaml.safe_load(path.read_text("utf-8"))
    rows = {}
    for label, fields in content["equations"].items():
        if unknown := fields.keys() - {"functions", "tests", "why"}:
            raise ValueError(f"{label}: expected functions, tests or why, not {sorted(unknown)}")
        functions, tests = (fields.get(name, ()) for name in ("functions", "tests"))
        functions = (functions,) if isinstance(functions, str) else tuple(functions)
        tests = (tests,) if isinstance(tests, str) else tuple(tests)
        rows[label] = Row(functions, tests, fields.get("why", ""))
    return Table(rows, content["functions"])


# --- Functions ---------------------------------------------------------------------------------


def public(package: str) -> Iterator[tuple[str, object]]:
    """What a package offers: functions, classes and their methods, also of modules in it."""
    module = importlib.import_module(package)
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            yield from public(thing.__name__)
        elif inspect.isclass(thing):
            yield f"{package}.{name}", thing
            for method in vars(thing):
                if not method.startswith("_") and inspect.isroutine(getattr(thing, method)):
                    yield f"{package}.{name}.{method}", getattr(thing, method)
        elif callable(thing):
            yield f"{package}.{name}", thing


def cited_by(thing: object) -> list[str]:
    """The equations that a docstring cites, and those of the function that it says it is as."""
    own = thing.__doc__ if inspect.isclass(thing) else inspect.getdoc(thing)  # not its base's
    found = CITED.findall(own or "")
    for name in LIKE.findall(own or ""):
        found += cited_by(
            functools.reduce(getattr, name.split("."), importlib.import_module(PRIMARY))
        )
    return list(dict.fromkeys(found))


def package_of(function: str) -> str:
    """The package in which a function is public: the longest that its name begins with."""
    found = [package for package in PACKAGES if function.startswith(f"{package}.")]
    return max(found, key=len, default="")


def short_name(function: str) -> str:
    """The name within its package, or within `lesson_code`."""
    return function.removeprefix(f"{package_of(function) or 'lesson_code'}.")


def functions_of(table: Table) -> dict[str, list[str]]:
    """The functions of each equation, those of the primary package first."""
    found = {label: list(row.functions) for label, row in table.equations.items()}
    for package in PACKAGES:
        for name, thing in public(package):
            for label in cited_by(thing):
                if name not in found.setdefault(label, []):
                    found[label].append(name)
    order = [*PACKAGES, ""]
    for names in found.values():
        names.sort(key=lambda name: (order.index(package_of(name)), short_name(name)[0].isupper()))
    return {label: names for label, names in found.items() if names}


# --- The check ---------------------------------------------------------------------------------


def problems(table: Table, book: Mapping[str, Chapter]) -> list[str]:
    """What is wrong with the table, each in a sentence."""
    functions = functions_of(table)
    citations = {name: cited_by(thing) for package in PACKAGES for name, thing in public(package)}
    named = dict.fromkeys([*table.equations, *functions])
    found = [f"{label}: no such equation" for label in named if label not in book]
    for label in book:
        row = table.equations.get(label, Row())
        found += [f"{label}: {fault}" for fault in _faults(row, functions.get(label, []))]
        derived = [name for name in row.functions if label in citations.get(name, [])]
        found += [f"{label}: the docstring of {name} says so already" for name in derived]

    known = {name for names in functions.values() for name in names}
    offered = [f"{PRIMARY}.{name}" for name in importlib.import_module(PRIMARY).__all__]
    for name in offered:
        has_equation = any(f"{other}.".startswith(f"{name}.") for other in known)
        if not has_equation and not table.functions.get(name, "").strip():
            found.append(f"{name}: neither an equation nor a reason why not")
        if has_equation and name in table.functions:
            found.append(f"{name}: says why it has no equation, but has one")
    found += [f"{name}: no such function" for name in table.functions if name not in offered]
    return found


@cache
def test_names(path: Path) -> set[str]:
    """The tests of a file."""
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text("utf-8")).body
    return {n.name for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def _faults(row: Row, functions: list[str]) -> Iterator[str]:
    if not functions and not row.why.strip():
        yield "neither a function nor a reason why not"
    if functions and not row.tests and not row.why.strip():
        yield "neither a test nor a reason why not"
    if functions and row.tests and row.why:
        yield "says why something is missing, but has a function and a test"
    for name in row.functions:
        if import_name(name) is None:
            yield f"no such function: {name}"
    for test in row.tests:
        file, _, name = test.partition("::")
        if name not in test_names(ROOT / file):
            yield f"no such test: {test}"
