"""Words in the chapters lead to the glossary, and show what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import soup
from tools import book
from tools.glossary import definitions

NO_PLACE = "h1, h2, h3, h4, figcaption, pre, code, table, .chapter-needs, .admonition-title"


@pytest.mark.parametrize("chapter", book.chapters(), ids=lambda chapter: chapter.path.stem)
def test_each_term_is_linked_once_and_explained(chapter: book.Chapter, site: Path) -> None:
    page, glossary = soup(site / f"{chapter.docname}.html"), soup(site / "book" / "glossary.html")
    links = [word.parent for word in page.select("article a > .std-term")]
    assert 8 <= len(links) == len({link["href"] for link in links})
    for link in links:
        assert not link.find_parent(NO_PLACE.split(", "))
        file, anchor = link["href"].split("#")
        assert file == "glossary.html"
        definition = " ".join(glossary.find(id=anchor).find_next_sibling("dd").get_text().split())
        begins = definition.startswith(link["title"].split()[0])
        assert begins or "\\(" in definition[:3], "a formula is written otherwise here"


def test_a_definition_is_the_first_sentence() -> None:
    from docutils.core import publish_doctree

    glossary = publish_doctree("""
word
  What is said, e.g. aloud. See elsewhere.
sign
  A mark\n  without end
""")
    for number, term in enumerate(glossary.findall(lambda node: node.tagname == "term")):
        term["ids"] = [f"term-{number}"]
    assert list(definitions(glossary).values()) == [
        "What is said, e.g. aloud.",
        "A mark without end",
    ]
