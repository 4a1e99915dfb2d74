"""The book as its files have it: the parts in `_toc.yml`, and what stands in the chapters."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import nbformat
import yaml
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
LABEL = r"^\(([\w-]+)\)="
FORMULA = re.compile(r"\$\$\n?(.*?)\$\$(?: *\(([\w-]+)\))?", re.DOTALL)
REF = r"\{ref\}`[^`]*<([\w-]+)>`"
HEAD = re.compile(
    r"^You need (?P<needs>.+?)\. Reading takes about (?P<reading>[^,.]+), "
    r"with the exercises about (?P<exercises>[^,.]+)\.$",
    re.MULTILINE,
)
WORDS = {"an": 1, "a": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}


@dataclass(frozen=True)
class Chapter:
    """A notebook of the book, `book/NN_name.ipynb`, and its number on the site.

    The number in the name of its file says where it will stand when all chapters are there.
    """

    path: Path
    number: int

    @property
    def docname(self) -> str:
        """The page, as Sphinx calls it."""
        return f"book/{self.path.stem}"

    @cached_property
    def cells(self) -> list[NotebookNode]:
        """Its cells, to look into: who asks next gets the same ones."""
        return _cells(self.path, self.path.stat().st_mtime_ns)

    def sources(self, kind: str) -> list[str]:
        """What stands in the cells of one kind, "code" or "markdown"."""
        return [cell.source for cell in self.cells if cell.cell_type == kind]

    @cached_property
    def text(self) -> str:
        return "\n\n".join(self.sources("markdown"))

    @property
    def labels(self) -> list[str]:
        """The labels of its sections; the first is its own."""
        return re.findall(LABEL, self.text, re.MULTILINE)

    @property
    def title(self) -> str:
        return re.search(r"^# +(.*)$", self.text, re.MULTILINE)[1]

    @property
    def equations(self) -> dict[str, str]:
        """The formulas that have a number, by label."""
        return {label: tex.strip() for tex, label in FORMULA.findall(self.text) if label}

    @cached_property
    def head(self) -> re.Match[str]:
        """The paragraph in which it says what it needs and how long it takes."""
        return head(self.sources("markdown")[0])

    @property
    def minutes(self) -> int:
        return minutes(self.head["reading"])

    @property
    def minutes_with_exercises(self) -> int:
        return minutes(self.head["exercises"])


@lru_cache(maxsize=64)
def _cells(path: Path, _written: int) -> list[NotebookNode]:
    """Half a dozen parts of a build ask for the cells of each chapter."""
    return nbformat.read(path, as_version=4).cells


def head(text: str) -> re.Match[str]:
    found = list(HEAD.finditer(text))
    if len(found) != 1:
        raise ValueError(
            "a chapter must begin with one paragraph 'You need .... Reading takes about ..., with "
            f"the exercises about ....', got {len(found)} in {text[:60]!r}"
        )
    return found[0]


def minutes(text: str) -> int:
    """`40 minutes`, `an hour`, `two and a half hours`, or `three` (of hours), in minutes."""
    found = re.fullmatch(r"(\d+) minutes|(\w+)( and a half)?( hours?)?", text)
    if not found or not (found[1] or found[2] in WORDS):
        raise ValueError(f"a time must read like '40 minutes' or 'two hours', got {text!r}")
    return int(found[1]) if found[1] else 60 * WORDS[found[2]] + (30 if found[3] else 0)


def config(root: Path = ROOT) -> dict:
    return yaml.safe_load((root / "_config.yml").read_text("utf-8"))


def parts(root: Path = ROOT) -> dict[str, list[Chapter]]:
    """The chapters of each part that has any, by its name."""
    contents = yaml.safe_load((root / "_toc.yml").read_text("utf-8"))
    numbers = itertools.count(1)
    found = {
        part["caption"]: [
            Chapter(root / f"{entry['file']}.ipynb", next(numbers))
            for entry in part["chapters"]
            if re.match(r"book/\d\d_", entry["file"])
        ]
        for part in contents.get("parts", [])
    }
    return {caption: chapters for caption, chapters in found.items() if chapters}


def chapters(root: Path = ROOT) -> list[Chapter]:
    return [chapter for part in parts(root).values() for chapter in part]


def needs(chapters: list[Chapter]) -> dict[int, set[int]]:
    """The numbers of the chapters that each needs, as its head says it."""
    number = {label: chapter.number for chapter in chapters for label in chapter.labels}
    found = {}
    for chapter in chapters:
        text = chapter.head["needs"]
        found[chapter.number] = {number[label] for label in re.findall(REF, text)}
        for begin, end in re.findall(f"from {REF} to {REF}", text):
            found[chapter.number] |= set(range(number[begin], number[end] + 1))
    return found
