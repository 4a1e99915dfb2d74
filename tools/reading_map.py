"""A Sphinx extension: what needs what, drawn from the sentences that head the chapters.

Each chapter says at its head what it needs and how long it takes, in one sentence each:

    You need {ref}`chapter 1 <ch-softmax>`. Reading takes about 35 minutes, with the exercises about
    two hours.

The page shows this paragraph as a quiet box. The directive `reading-map` draws all of them as boxes
with arrows: a list of links for everyone, with one drawing of the arrows behind it for wide screens
and one for phones. An arrow that follows from others is left out.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import notebooks
import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

SENTENCES = re.compile(
    r"^(You need (?P<needs>.+?)\. Reading takes about (?P<reading>[^,.]+), "
    r"with the exercises about (?P<exercises>[^,.]+)\.)$",
    re.MULTILINE,
)
REF = r"\{ref\}`[^`]*<([\w-]+)>`"
WORDS = {"an": 1, "a": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}

# Column and row of each chapter, on wide screens and on phones. An arrow must lead to the right in
# its row or to a lower row.
WIDE = {
    **{1: (0, 0), 2: (1, 0), 3: (2, 0), 4: (3, 0)},
    **{6: (1, 1), 7: (2, 1), 5: (3, 1)},
    **{17: (0, 2), 8: (1, 2), 9: (2, 2), 10: (3, 2)},
    **{11: (2, 3), 12: (3, 3)},
    **{14: (2, 4), 13: (3, 4)},
    **{15: (1, 5), 16: (2, 5), 18: (3, 5)},
}
NARROW = {
    **{1: (0, 0), 2: (1, 0), 3: (2, 0)},
    **{4: (2, 1)},
    **{6: (0, 2), 7: (1, 2), 5: (2, 2)},
    **{8: (0, 3), 9: (1, 3), 10: (2, 3)},
    **{17: (0, 4), 11: (1, 4), 12: (2, 4)},
    **{14: (1, 5), 13: (2, 5)},
    **{15: (0, 6), 16: (1, 6), 18: (2, 6)},
}


@dataclass(frozen=True)
class Layout:
    """Places on a grid, and the size of what stands there in CSS pixels at the usual width."""

    name: str
    places: dict[int, tuple[int, int]]
    width: int
    row: int
    box: tuple[int, int]

    @cached_property
    def columns(self) -> int:
        return 1 + max(column for column, _ in self.places.values())

    @cached_property
    def height(self) -> int:
        rows = 1 + max(row for _, row in self.places.values())
        return (rows - 1) * self.row + self.box[1]

    def left(self, number: int) -> float:
        """Where a chapter's box begins."""
        return self.places[number][0] * (self.width - self.box[0]) / (self.columns - 1)

    def top(self, number: int) -> float:
        return self.places[number][1] * self.row


LAYOUTS = [
    Layout("wide", WIDE, width=720, row=106, box=(156, 76)),
    Layout("narrow", NARROW, width=346, row=124, box=(104, 94)),
]


@dataclass(frozen=True)
class Chapter:
    """What the head of a chapter says."""

    number: int
    docname: str
    label: str
    title: str
    needs: frozenset[int]
    minutes: int
    minutes_with_exercises: int


def minutes(text: str) -> int:
    """`40 minutes`, `an hour`, `two and a half hours`, or `three` (of hours), in minutes."""
    found = re.fullmatch(r"(\d+) minutes|(\w+)( and a half)?( hours?)?", text)
    if not found or not (found[1] or found[2] in WORDS):
        raise ValueError(f"a time must read like '40 minutes' or 'two hours', got {text!r}")
    return int(found[1]) if found[1] else 60 * WORDS[found[2]] + (30 if found[3] else 0)


def head(text: str) -> re.Match[str]:
    """The paragraph in which a chapter says what it needs and how long it takes."""
    found = list(SENTENCES.finditer(text))
    if len(found) != 1:
        raise ValueError(
            "a chapter must begin with one paragraph 'You need .... Reading takes about ..., with "
            f"the exercises about ....', got {len(found)} in {text[:60]!r}"
        )
    return found[0]


def read_chapters(root: Path) -> list[Chapter]:
    """The chapters of the book at `root`, in order."""
    paths = sorted((root / "book").glob("[0-9][0-9]_*.ipynb"))
    texts = {int(path.name[:2]): notebooks.sources(path, "markdown") for path in paths}
    places = {
        label: number
        for number, cells in texts.items()
        for cell in cells
        for label in re.findall(r"^\(([\w-]+)\)=$", cell, re.MULTILINE)
    }
    chapters = []
    for path in paths:
        number = int(path.name[:2])
        first = texts[number][0]
        found = head(first)
        needs = {places[label] for label in re.findall(REF, found["needs"])}
        for begin, end in re.findall(f"from {REF} to {REF}", found["needs"]):
            needs |= set(range(places[begin], places[end] + 1))
        chapters.append(
            Chapter(
                number,
                f"book/{path.stem}",
                re.match(r"\(([\w-]+)\)=", first)[1],
                re.search(r"^# (.+)$", first, re.MULTILINE)[1],
                frozenset(needs),
                minutes(found["reading"]),
                minutes(found["exercises"]),
            )
        )
    return chapters


def arrows(chapters: list[Chapter]) -> list[tuple[int, int]]:
    """What needs what, without the arrows that follow from others."""
    needs = {chapter.number: chapter.needs for chapter in chapters}

    def leads(begin: int, end: int) -> bool:
        return begin == end or any(leads(begin, before) for before in needs[end])

    return [
        (begin, end)
        for end in needs
        for begin in sorted(needs[end])
        if not any(leads(begin, other) for other in needs[end] - {begin})
    ]


def curve(layout: Layout, begin: int, end: int, shift: float) -> str:
    """The path of an arrow; where it passes a row it keeps to the gap between two columns."""
    width, height = layout.box
    x0, y0 = layout.left(begin) + width / 2, layout.top(begin) + height
    x1, y1 = layout.left(end) + width / 2 + shift, layout.top(end) - 2
    if layout.places[begin][1] == layout.places[end][1]:
        y = y0 - height / 2
        return f"M{x0 + width / 2:g} {y:g}H{layout.left(end) - 2:g}"
    bend = (layout.row - height) / 2
    rows_between = layout.places[end][1] - layout.places[begin][1] - 1
    if not rows_between:
        return f"M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"
    step = (layout.width - width) / (layout.columns - 1)
    gaps = [width / 2 + step * (k + 0.5) for k in range(layout.columns - 1)]
    gap = min(gaps, key=lambda x: (abs(x - x0) + abs(x - x1), x))
    above = y0 + 2 * bend
    below = y1 + 2 - 2 * bend
    return (
        f"M{x0:g} {y0:g}C{x0:g} {y0 + bend:g} {gap:g} {above - bend:g} {gap:g} {above:g}V{below:g}"
        f"C{gap:g} {below + bend:g} {x1:g} {y1 - bend:g} {x1:g} {y1:g}"
    )


def draw_arrows(layout: Layout, chapters: list[Chapter]) -> str:
    """All arrows as one drawing, as large as the map."""
    into: dict[int, list[int]] = {}
    for begin, end in arrows(chapters):
        into.setdefault(end, []).append(begin)
    paths = []
    for end, begins in into.items():
        begins.sort(key=lambda number: layout.left(number))
        for i, begin in enumerate(begins):
            shift = 24 * (i - (len(begins) - 1) / 2)
            path = curve(layout, begin, end, shift)
            paths.append(f'<path d="{path}" marker-end="url(#tip-{layout.name})"/>')
    return (
        f'<svg class="arrows {layout.name}" role="img" preserveAspectRatio="none" '
        f'viewBox="0 0 {layout.width} {layout.height}">'
        "<title>Arrows from each chapter to those that need it</title>"
        f"<desc>{html.escape(describe(chapters))}</desc>"
        f'<marker id="tip-{layout.name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/>'
        f"</marker>{''.join(paths)}</svg>"
    )


def listing(numbers: frozenset[int]) -> str:
    """`1, 2 and 3`."""
    *most, last = [str(number) for number in sorted(numbers)]
    return f"{', '.join(most)} and {last}" if most else last


def describe(chapters: list[Chapter]) -> str:
    """The arrows in words."""
    return " ".join(
        f"Chapter {chapter.number} needs {listing(chapter.needs)}."
        for chapter in chapters
        if chapter.needs
    )


def parts(root: Path) -> list[tuple[str, list[str]]]:
    """The parts of the book: their names, and the pages in each."""
    contents = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    return [
        (part["caption"], [entry["file"] for entry in part["chapters"]])
        for part in contents["parts"]
    ]


class ReadingMap(SphinxDirective):
    """All chapters as links, and behind them the arrows from what is needed to what needs it."""

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        chapters = read_chapters(root)
        of_chapters = [
            (caption, files)
            for caption, files in parts(root)
            if any(chapter.docname in files for chapter in chapters)
        ]
        part_of = {
            file: number for number, (_, files) in enumerate(of_chapters, start=1) for file in files
        }
        for chapter in chapters:
            self.env.note_dependency(f"{chapter.docname}.ipynb")
        self.env.note_dependency("_toc.yml")
        boxes = []
        for chapter in chapters:
            style = ";".join(
                f"--{layout.name}-left:{layout.left(chapter.number) / layout.width:.4%};"
                f"--{layout.name}-top:{layout.top(chapter.number):g}px"
                for layout in LAYOUTS
            )
            link = self.env.app.builder.get_relative_uri(self.env.docname, chapter.docname)
            needs = f" It needs {listing(chapter.needs)}." if chapter.needs else ""
            boxes.append(
                f'<li class="part-{part_of.get(chapter.docname, 0)}" style="{style}">'
                f'<a href="{link}"><b>{chapter.number}</b> {html.escape(chapter.title)} '
                f'<small>{chapter.minutes}&nbsp;min</small><span class="unseen">.{needs}</span>'
                "</a></li>"
            )
        sizes = ";".join(
            f"--{layout.name}-height:{layout.height}px;--{layout.name}-box-height:{layout.box[1]}px;"
            f"--{layout.name}-box-width:{layout.box[0] / layout.width:.4%}"
            for layout in LAYOUTS
        )
        colors = [
            f'<li class="part-{number}">{html.escape(caption)}</li>'
            for number, (caption, _) in enumerate(of_chapters, start=1)
        ]
        drawings = "".join(draw_arrows(layout, chapters) for layout in LAYOUTS)
        text = (
            f'<nav class="reading-map" aria-label="Reading map" style="{sizes}">{drawings}'
            f"<ol>{''.join(boxes)}</ol></nav>"
            f'<ul class="map-parts">{"".join(colors)}</ul>'
        )
        return [nodes.raw("", text, format="html")]


class MarkHead(SphinxTransform):
    """Gives the paragraph that says what a chapter needs a class of its own."""

    default_priority = 400

    def apply(self) -> None:
        for paragraph in self.document.findall(nodes.paragraph):
            text = paragraph.astext()
            if text.startswith("You need ") and " Reading takes about " in text:
                paragraph["classes"].append("chapter-needs")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("reading-map", ReadingMap)
    app.add_transform(MarkHead)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
