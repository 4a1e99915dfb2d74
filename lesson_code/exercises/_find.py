"""Where an exercise is declared: one module for each chapter, loaded when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from pathlib import Path

from lesson_code.exercises._declare import Exercise

PACKAGE = __name__.rpartition(".")[0]
FOLDER = str(Path(__file__).parent)
MODULES = sorted(x.name for x in pkgutil.iter_modules([FOLDER]) if not x.name.startswith("_"))


def exercises_of(module: str) -> dict[str, Exercise]:
    """The exercises of a chapter, by label; ``module`` is the second word of its labels."""
    names = vars(importlib.import_module(f"{PACKAGE}.{module}"))
    return {x.label: x for x in names.values() if isinstance(x, Exercise)}


def find_exercise(name: str) -> Exercise:
    """The exercise of a label.

    Parameters
    ----------
    name : str

    Returns
    -------
    Exercise

    Raises
    ------
    ValueError
        If there is none; names those of similar names.
    """
    # The second word of most labels is the module's name: it is asked first.
    likely = str(name).split("-")[1:2]
    known: list[str] = []
    for module in sorted(MODULES, key=lambda module: module not in likely):
        try:
            found = exercises_of(module)
        except ImportError:  # a chapter on torch, where torch is missing
            continue
        if name in found:
            return found[name]
        known += found
    near = difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "labels look like ex-memory-code."
    raise ValueError(f"There is no exercise {name!r}: {hint}")
