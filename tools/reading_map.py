"""What needs what, drawn from the sentences that head the chapters.

Each chapter says at its head what it needs and how long it takes, in one sentence each:

    You need {ref}`chapter 1 <ch-softmax>`. Reading takes about 35 minutes, with the exercises about
    two hours.

The page shows this paragraph as a quiet box. The directive `reading-map` lists the chapters, and
draws an arc from each to those that need it. An arc that follows from others is left out.
"""

from __future__ import annotations

import html
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from tools import book

ROW, SIDE = 46, 76  # CSS pixels: from one chapter to the next, and the room for arcs beside them


def arrows(needs: dict[int, set[int]]) -> list[tuple[int, int]]:
    """What needs what, without the arrows that follow from others."""
    before = {}  # all that a chapter needs, directly or not
    for number in sorted(needs):
        before[number] = needs[number].union(*(before[other] for other in needs[number]))
    return [
        (begin, end)
        for end in needs
        for begin in sorted(needs[end])
        if not any(begin in before[other] for other in needs[end])
    ]


def draw(needs: dict[int, set[int]]) -> str:
    """The arcs; the longer one is, the further it reaches to the side."""
    paths = ""
    longest = max((end - begin for begin, end in arrows(needs)), default=1)
    for begin, end in arrows(needs):
        reach = SIDE - 4 / 3 * (10 + (SIDE - 14) * (end - begin - 1) / max(longest - 1, 1))
        y0, y1 = (begin - 0.4) * ROW, (end - 0.75) * ROW
        paths += (
            f'<path d="M{SIDE} {y0:g}C{reach:.0f} {y0:g} {reach:.0f} {y1:g} {SIDE - 2} {y1:g}"/>'
        )
    return (
        f'<svg aria-hidden="true" width="{SIDE}" height="{ROW * len(needs)}">'
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/></marker>'
        f"{paths}</svg>"
    )


def listing(numbers: set[int]) -> str:
    """`1, 2 and 3`."""
    *most, last = map(str, sorted(numbers))
    return f"{', '.join(most)} and {last}" if most else last


class ReadingMap(SphinxDirective):
    """All chapters as links, and beside them the arcs."""

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        needs = book.needs(book.chapters(root))
        self.env.note_dependency("_toc.yml")
        items = colors = ""
        for part, (caption, chapters) in enumerate(book.parts(root).items(), start=1):
            colors += f'<li class="part-{part}">{html.escape(caption)}</li>'
            for chapter in chapters:
                self.env.note_dependency(f"{chapter.docname}.ipynb")
                link = self.env.app.builder.get_relative_uri(self.env.docname, chapter.docname)
                needed = needs[chapter.number]
                needed = f". It needs {listing(needed)}." if needed else "."
                items += (
                    f'<li class="part-{part}"><a href="{link}"><b>{chapter.number}</b> '
                    f"{html.escape(chapter.title)} <small>{chapter.minutes}&nbsp;min</small>"
                    f'<span class="unseen">{needed}</span></a></li>'
                )
        text = (
            '<nav class="reading-map" aria-label="Reading map" '
            f'style="--row:{ROW}px;--side:{SIDE}px">{draw(needs)}<ol>{items}</ol></nav>'
            f'<ul class="map-parts">{colors}</ul>'
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


def setup(app: Sphinx) -> None:
    app.add_directive("reading-map", ReadingMap)
    app.add_transform(MarkHead)
