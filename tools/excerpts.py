"""Some tests of a file, with the imports, constants, functions and fixtures that they use of it."""

from __future__ import annotations

import ast
import dis
import re
from pathlib import Path


def excerpt(path: Path, names: set[str]) -> tuple[dict[str, str], str]:
    """The source of some tests of a file, by name, and what of the file they use."""
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
    return tests, re.sub(r"\n{4,}", "\n\n\n", "\n".join(used)).strip("\n")


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
