"""In each chapter the first use of a term leads to the glossary, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import glossary_links as links
import pytest
from bs4 import BeautifulSoup, Tag

from tools import notebooks

NAMES = [path.stem for path in notebooks.NOTEBOOKS]
NEVER_IN = """h1, h2, h3, h4, h5, h6, figcaption, pre, code, table, .math, .chapter-needs,
    .admonition-title, .prev-next-area, .toggle-button"""


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, BeautifulSoup]:
    found = {
        name: BeautifulSoup((site / "book" / f"{name}.html").read_text("utf-8"), "html.parser")
        for name in [*NAMES, "glossary"]
    }
    for page in found.values():
        for anchor in page.select("a.headerlink"):
            anchor.decompose()
    return found


def linked(page: BeautifulSoup) -> list[Tag]:
    return [word.parent for word in page.select("article a > .glossed")]


@pytest.mark.parametrize("name", NAMES)
def test_each_term_is_linked_once(pages: dict[str, BeautifulSoup], name: str) -> None:
    targets = [link["href"] for link in linked(pages[name])]
    assert 8 <= len(targets) == len(set(targets))


@pytest.mark.parametrize("name", NAMES)
def test_a_link_shows_what_the_glossary_says(pages: dict[str, BeautifulSoup], name: str) -> None:
    for link in linked(pages[name]):
        file, anchor = link["href"].split("#")
        assert file == "glossary.html"
        term = pages["glossary"].find(id=anchor)
        word = re.sub(r" \(.*\)| of a process", "", term.get_text()).strip()
        assert link.get_text()[:3].lower() == word[:3].lower()
        definition = " ".join(term.find_next_sibling("dd").get_text().split())
        begins = definition.startswith(link["title"].split()[0])
        assert begins or "\\(" in definition[:3], "a formula is written otherwise here"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_first_use_in_running_text(pages: dict[str, BeautifulSoup], name: str) -> None:
    """Links are in running text alone, and before a link its word is not there without one."""
    words = {id(link): link.get_text() for link in linked(pages[name])}
    terms = sorted((term.get_text() for term in pages["glossary"].select("dt")), key=len)[::-1]
    not_running = {id(tag) for tag in pages[name].select(NEVER_IN)}
    running, places = "", {}
    for text in pages[name].article.find_all(string=True):
        around = [id(tag) for tag in text.parents]
        link = next((tag for tag in around if tag in words), None)
        assert not link or not_running.isdisjoint(around), f"{text} is no running text"
        if link:
            places[link] = len(running)
        elif not text.find_parent(["p"]) or text.find_parent("a"):
            continue
        if not_running.isdisjoint(around):
            running += str(text) if not link else f"|{text}|"
    for link, word in words.items():
        before = running[: places[link]]
        for longer in terms:  # "linear attention" is no use of "attention"
            before = before.replace(longer, "") if word in longer and word != longer else before
        used = re.search(rf"(?<![\w\-/|]){re.escape(word)}(?![\w\-/|])", before)
        assert not used, f"{word} is used before: {before[used.start() - 40 : used.end() + 40]}"


# --- The finding itself ------------------------------------------------------------------------


def found(texts: list[str], *terms: str) -> list[tuple[str, str]]:
    words = {term: term for term in terms}
    return [(m[0], term) for uses in links.first_uses(texts, words) for m, term in uses]


@pytest.mark.parametrize(
    ("text", "term", "expected"),
    [
        ("A query asks.", "query", "query"),
        ("Queries ask.", "query", "Queries"),
        ("Two caches.", "cache", "caches"),
        ("Gram matrices are", "Gram matrix", "Gram matrices"),
        ("gram matrices", "Gram matrix", None),
        ("with ReLU:", "ReLU", "ReLU"),
        ("with relu:", "ReLU", None),
        ("the delta\nrule", "delta rule", "delta\nrule"),
        ("headers", "head", None),
        ("a key-value store", "key", None),
        ("monkeys", "key", None),
        ("elu + 1, then", "elu + 1", "elu + 1"),
    ],
)
def test_forms(text: str, term: str, expected: str | None) -> None:
    assert found([text], term) == ([(expected, term)] if expected else [])


def test_the_first_use_alone() -> None:
    assert found(["keys, a key", "the key"], "key") == [("keys", "key")]


def test_the_longest_term_wins() -> None:
    texts = ["linear attention, attention, linear attention"]
    assert found(texts, "attention", "linear attention") == [
        ("linear attention", "linear attention"),
        ("attention", "attention"),
    ]


def test_a_word_has_one_meaning_in_a_chapter() -> None:
    terms = ["kernel", "kernel (of a GPU)", "rank", "rank of a process", "normalizer"]
    assert links.words_in("05", terms)["kernel"] == "kernel"
    assert links.words_in("09", terms) == {
        "kernel": "kernel (of a GPU)",
        "normalizer": "normalizer",
    }
    assert links.words_in("18", terms)["rank"] == "rank of a process"


def test_basic_words_are_linked_in_the_first_part() -> None:
    terms = ["token", "linear attention", "delta rule"]
    assert list(links.words_in("01", terms)) == list(links.words_in("05", terms)) == terms
    assert list(links.words_in("06", terms)) == list(links.words_in("18", terms)) == terms[2:]


def test_exceptions_are_terms_and_chapters(pages: dict[str, BeautifulSoup]) -> None:
    terms = [term.get_text().strip() for term in pages["glossary"].select("dt")]
    chapters = {name[:2] for name in NAMES}
    for term, where in links.ONLY_IN.items():
        assert term in terms
        assert set(where.split()) < chapters
