"""Which function computes an equation of the book, and which test checks it.

The functions are found where they say it themselves: in docstrings that cite the equation. What
cannot be found there stands in book/equations.yml. `problems` compares both with the book.
"""

from __future__ import annotations

import ast
import dis
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


@dataclass(frozen=True)
class Equation:
    """A numbered equation."""

    label: str
    chapter: Chapter

    @property
    def name(self) -> str:
        """The label in words."""
        return self.label.removeprefix("eq-").replace("-", " ")


def equations(root: Path = ROOT) -> dict[str, Equation]:
    """The numbered equations of the chapters, in their order."""
    return {
        label: Equation(label, chapter) for chapter in chapters(root) for label in chapter.equations
    }


@dataclass(frozen=True)
class Row:
    """What the table says of an equation: functions and tests, or why there are none."""

    functions: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Table:
    """The content of book/equations.yml.

    Parameters
    ----------
    equations : dict
        A `Row` for each label.
    functions : dict
        Why a public function of the primary package has no equation, by its name.
    """

    equations: dict[str, Row]
    functions: dict[str, str]


def read_table(path: Path = TABLE) -> Table:
    """Read the table. What stands alone may be written without brackets."""
    content = yaml.safe_load(path.read_text("utf-8"))

    rows = {}
    for label, fields in content["equations"].items():
        if unknown := fields.keys() - Row.__dataclass_fields__.keys():
            raise ValueError(f"{label}: expected functions, tests or why, not {sorted(unknown)}")
        rows[label] = Row(
            _several(fields.get("functions")), _several(fields.get("tests")), fields.get("why", "")
        )
    return Table(rows, content["functions"])


def _several(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


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
    """The equations that a docstring cites, each once."""
    own = thing.__doc__ if inspect.isclass(thing) else inspect.getdoc(thing)  # not its base's
    return list(dict.fromkeys(CITED.findall(own or "")))


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


# --- Tests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excerpt:
    """Tests of a file with what they use of it.

    Parameters
    ----------
    tests : dict
        The source of each test, by name, in the order of the file.
    used : str
        The imports, constants, functions and fixtures that these need, in the order of the file.
    """

    tests: dict[str, str]
    used: str


@cache
def test_names(path: Path) -> set[str]:
    """The tests of a file."""
    if not path.is_file():
        return set()
    body = ast.parse(path.read_text("utf-8")).body
    return {n.name for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}


def excerpt(path: Path, names: set[str]) -> Excerpt:
    """Some tests of a file, and nothing of it that they do not use."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    statements = [(statement, _binds(statement)) for statement in ast.parse(text).body]
    wanted, tests, used = set(names), {}, []
    # What is used is mostly defined before, but a function may use one that follows.
    for statement, bound in 2 * statements[::-1]:
        if bound & wanted or _is_for_all(statement):
            wanted |= _uses(statement)
    for statement, bound in statements:
        if not (bound & wanted or _is_for_all(statement)):
            continue
        first = min([statement.lineno, *(d.lineno for d in _decorators(statement))])
        while first > 1 and lines[first - 2].startswith("#") and "---" not in lines[first - 2]:
            first -= 1  # a comment stands above what it is about
        source = "\n".join(lines[first - 1 : statement.end_lineno])
        if bound & names:
            tests[statement.name] = source
        else:
            apart = isinstance(statement, ast.FunctionDef | ast.ClassDef)
            used.append(f"\n\n{source}\n\n" if apart else source)
    return Excerpt(tests, re.sub(r"\n{4,}", "\n\n\n", "\n".join(used)).strip("\n"))


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return getattr(statement, "decorator_list", [])


def _is_for_all(statement: ast.stmt) -> bool:
    """Whether a fixture or a mark applies to every test of its file."""
    marks = "pytestmark" in _binds(statement)
    return marks or any("autouse" in ast.dump(d) for d in _decorators(statement))


def _binds(statement: ast.stmt) -> set[str]:
    """The names that a statement defines, fixtures by the name that they are given."""
    code = dis.get_instructions(compile(ast.Module([statement], []), "", "exec"))
    keywords = [key for d in _decorators(statement) for key in getattr(d, "keywords", [])]
    given = {getattr(key.value, "value", None) for key in keywords if key.arg == "name"}
    return {step.argval for step in code if step.opname == "STORE_NAME"} | given


def _uses(statement: ast.stmt) -> set[str]:
    """The names that a statement needs; arguments may be fixtures."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name | ast.arg)]
    return {node.id if isinstance(node, ast.Name) else node.arg for node in nodes}


# --- The check ---------------------------------------------------------------------------------


def problems(
    table: Table, book: Mapping[str, Equation] | None = None, root: Path = ROOT
) -> list[str]:
    """What is wrong with the table, each in a sentence."""
    book = equations() if book is None else book
    functions = functions_of(table)
    citations = {name: cited_by(thing) for package in PACKAGES for name, thing in public(package)}
    named = dict.fromkeys([*table.equations, *functions])
    found = [f"{label}: no such equation" for label in named if label not in book]
    for label in book:
        row = table.equations.get(label, Row())
        found += [f"{label}: {fault}" for fault in _faults(row, functions.get(label, []), root)]
        derived = [name for name in row.functions if label in citations.get(name, [])]
        found += [f"{label}: the docstring of {name} says so already" for name in derived]

    known = {name for names in functions.values() for name in names}
    offered = [
        f"{PRIMARY}.{name}" for name in getattr(importlib.import_module(PRIMARY), "__all__", ())
    ]
    for name in offered:
        has_equation = any(f"{other}.".startswith(f"{name}.") for other in known)
        if not has_equation and not table.functions.get(name, "").strip():
            found.append(f"{name}: neither an equation nor a reason why not")
        if has_equation and name in table.functions:
            found.append(f"{name}: says why it has no equation, but has one")
    found += [f"{name}: no such function" for name in table.functions if name not in offered]
    return found


def _faults(row: Row, functions: list[str], root: Path) -> Iterator[str]:
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
        if name not in test_names(root / file):
            yield f"no such test: {test}"
