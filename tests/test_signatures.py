"""The public names and how they are called, held against the list in signatures.txt.

Notebooks, exercises and other people's programs rely on them, so a change has to be meant. When it
is, `python tests/test_signatures.py` writes the list anew, and CHANGELOG.md tells of it. The list
has names, order, kinds and defaults of all parameters; their types are left to the type checker
(test_style.py), and here it is only asked that there is one everywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

LIST = Path(__file__).with_name("signatures.txt")
MODULES = [
    "lesson_code.numpy",
    "lesson_code.numpy.family",
    "lesson_code.torch",
    "lesson_code.torch.distributed",
    "lesson_code.cupy",
    "lesson_code.cupy.emulator",
    "lesson_code.checks",
    "lesson_code.exercises",
    "lesson_code.costs",
    "lesson_code.gpu",
    "lesson_code.data.tasks",
    "lesson_code.data.digits",
    "lesson_code.measure",
    "lesson_code.results",
    "lesson_code.data.texts",
]
BY_VALUE = (bool, int, float, complex, str, bytes, tuple, frozenset, types.NoneType)


def show(value: object) -> str:
    """A default, written alike by every version of Python, NumPy and torch."""
    if type(value) is tuple:
        return f"({', '.join(map(show, value))}{',' * (len(value) == 1)})"
    if isinstance(value, BY_VALUE):
        return repr(value)
    return getattr(value, "__name__", None) or str(value)


def call(function: Callable, *, bound: bool = False) -> str:
    """The parameters of a function; without the first, for a method that has it filled in."""
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    bare = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Shown(p))
        for p in parameters
    ]
    return str(inspect.Signature(bare))


class Shown:
    """Stands for a default of a parameter, and looks as `show` writes it."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.text = show(parameter.default)

    def __repr__(self) -> str:
        return self.text


def methods(cls: type) -> Iterator[tuple[str, object]]:
    """What a class and the private classes behind it define under public names."""
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base is cls or (base.__name__.startswith("_") and base.__module__[:11] == "lesson_code"):
            found |= vars(base)
    fields = getattr(cls, "_fields", ())
    for name, member in sorted(found.items()):
        function = isinstance(member, types.FunctionType | classmethod | staticmethod | property)
        if function and not name.startswith("_") and name not in fields:
            yield name, member


def public(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if not isinstance(value, types.ModuleType):
            yield name, value


def describe(module: types.ModuleType) -> Iterator[str]:
    """A line for each public name, and one for each public method."""
    yield module.__name__
    for name, value in public(module):
        if isinstance(value, type):
            made = "" if issubclass(value, BaseException) else call(value)
            yield f"    class {name}{made}"
            for method, member in methods(value):
                if isinstance(member, property):
                    yield f"        {method}"
                else:
                    bound = not isinstance(member, staticmethod)
                    function = getattr(member, "__func__", member)
                    yield f"        {method}{call(function, bound=bound)}"
        elif callable(value):
            yield f"    {name}{call(value)}"
        else:
            yield f"    {name}: {type(value).__name__}"


def current() -> str:
    lines = (line for name in MODULES for line in [*describe(importlib.import_module(name)), ""])
    return "\n".join(lines)


def typed_by_hand(module: types.ModuleType) -> Iterator[tuple[str, Callable]]:
    """Every function of which the types are written, with a name to find it by."""
    for name, value in public(module):
        if isinstance(value, types.FunctionType):
            yield name, inspect.unwrap(value)
        elif isinstance(value, type):
            made = vars(value).get("__init__")
            if inspect.isfunction(made) and not dataclasses.is_dataclass(value):
                yield f"{name}.__init__", made
            for method, member in methods(value):
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                yield f"{name}.{method}", function


def without_types(function: Callable) -> list[str]:
    signature = inspect.signature(function)
    first = "." in function.__qualname__.split("<locals>.")[-1]  # self or cls
    parameters = [*signature.parameters.values()]
    parameters = parameters[first and parameters[0].name in ("self", "cls") :]
    missing = [p.name for p in parameters if p.annotation is p.empty]
    return missing + ["the result"] * (signature.return_annotation is signature.empty)


# --- The package -------------------------------------------------------------------------------


def test_public_names_are_called_as_listed() -> None:
    listed = LIST.read_text(encoding="utf-8")
    if current() != listed:
        difference = difflib.unified_diff(
            listed.splitlines(), current().splitlines(), "as listed", "as it is", n=0, lineterm=""
        )
        pytest.fail(
            "Public names differ from tests/signatures.txt:\n"
            + "\n".join(difference)
            + "\nIf that is meant, write the list anew and say so in CHANGELOG.md:\n"
            "    .venv/bin/python tests/test_signatures.py",
            pytrace=False,
        )


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_have_all_their_types(name: str) -> None:
    functions = typed_by_hand(importlib.import_module(name))
    missing = {where: without_types(function) for where, function in functions}
    assert {where: names for where, names in missing.items() if names} == {}


# --- The list itself ---------------------------------------------------------------------------


def example(x: int, /, size=(4,), *rest, key: str = "a", how=len, **others): ...


class Pair(NamedTuple):
    first: int
    second: int = 2

    def total(self, times: float = 1.0) -> float: ...

    @classmethod
    def of(cls, value): ...

    @property
    def ratio(self): ...

    def _private(self): ...


def module_of(**names: object) -> types.ModuleType:
    module = types.ModuleType("example")
    vars(module).update(names, __all__=list(names))
    return module


def test_a_signature_is_written_out() -> None:
    assert [*describe(module_of(example=example, Pair=Pair, limit=3, math=types))] == [
        "example",
        "    class Pair(first, second=2)",
        "        of(value)",
        "        ratio",
        "        total(times=1.0)",
        "    example(x, /, size=(4,), *rest, key='a', how=len, **others)",
        "    limit: int",
    ]


def test_a_missing_type_is_found() -> None:
    assert without_types(example) == ["size", "rest", "how", "others", "the result"]
    found = dict(typed_by_hand(module_of(Pair=Pair)))
    assert {name: without_types(function) for name, function in found.items()} == {
        "Pair.of": ["value", "the result"],
        "Pair.ratio": ["the result"],
        "Pair.total": [],
    }


if __name__ == "__main__":
    LIST.write_text(current(), encoding="utf-8")
    print(f"wrote {LIST}")
