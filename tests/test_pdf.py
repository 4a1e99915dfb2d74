"""The whole book in one PDF: nothing of a page is missing, and links lead to where they led."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tools import book, pdf

# All pages take minutes to print; these have formulas, figures, and links to each other.
FEW = [
    ("", ["book/index"]),
    ("From softmax to a state", ["book/02_bracket_trick"]),
    ("Reference", ["book/glossary", "book/bibliography"]),
]


@pytest.fixture(scope="module")
def whole(site: Path) -> str:
    return pdf.document(site, pdf.pages())


def test_every_page_of_the_book_is_in_the_document(whole: str) -> None:
    assert whole.count("<article") == sum(len(names) for _, names in pdf.pages())
    numbers = re.findall(r'<h2 class="of-page"><span class="section-number">(\d+)\. ', whole)
    assert [int(n) for n in numbers] == [chapter.number for chapter in book.chapters()]


def test_every_reference_leads_to_one_place(whole: str) -> None:
    places = Counter(re.findall(r'<[^<>]*\sid="([^"]*)"', whole))
    assert [place for place, times in places.items() if times > 1] == []
    links = set(re.findall(r'<a [^<>]*href="#([^"]*)"', whole))
    assert len(links) > 1000
    assert links - places.keys() == set()


def test_every_figure_is_in_the_document(whole: str, site: Path) -> None:
    articles = whole.split("<article")[1:]
    names = [name for _, names in pdf.pages() for name in names]
    for name, article in zip(names, articles, strict=True):
        page = (site / f"{name}.html").read_text("utf-8")
        page = page[page.index("<article") : page.index("</article")]
        assert article.count("<img ") == page.count("<img "), name
    for picture in re.findall(r'<img [^<>]*src="([^"]*)"', whole):
        if not picture.startswith("data:"):
            assert (site / picture).exists(), picture


def test_the_printed_book_has_an_outline_numbers_and_links(
    site: Path, browser, tmp_path: Path
) -> None:
    from pypdf import PdfReader

    output = pdf.make(site, browser, FEW, tmp_path / "book.pdf")
    printed = PdfReader(output)
    outline = [entry.title for entry in printed.outline if not isinstance(entry, list)]
    assert outline == ["Contents", "From softmax to a state", "Reference"]
    (chapter, sections) = printed.outline[3]
    assert chapter.title == "2. The bracket trick"
    assert len(sections) > 5
    # The contents say on which page a chapter begins, and the page says so, too.
    begins = printed.get_destination_page_number(chapter)
    assert chapter.title in printed.pages[begins].extract_text()
    assert f"{chapter.title}\n" in printed.pages[1].extract_text()
    assert f"\n{begins + 1}\n" in printed.pages[1].extract_text()
    assert printed.pages[begins].extract_text().rstrip().endswith(str(begins + 1))
    # Links inside of the document lead to places that it has.
    places = {name.removeprefix("/") for name in printed.named_destinations}
    inside = [
        note.get_object()["/Dest"].removeprefix("/")
        for sheet in printed.pages
        for note in sheet.get("/Annots", ())
        if "/Dest" in note.get_object()
    ]
    assert len(inside) > 50
    assert set(inside) <= places


def test_the_landing_page_offers_the_pdf_once(site: Path, tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    landing = tmp_path / "book" / "index.html"
    landing.write_bytes((site / "book" / "index.html").read_bytes())
    assert pdf.NAME not in landing.read_text("utf-8")
    for _ in range(2):
        pdf.offer(tmp_path)
        assert landing.read_text("utf-8").count(pdf.NAME) == 1
