"""What other programs read of a page: its description, its card, its address."""

from __future__ import annotations

import re
from pathlib import Path

import imagesize
import pytest
import yaml
from bs4 import BeautifulSoup

from tools import notebooks, page_heads
from tools.plain_tex import plain

ROOT = Path(__file__).resolve().parent.parent


def pages_of_the_book() -> list[str]:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    files = [entry["file"] for part in contents["parts"] for entry in part["chapters"]]
    return [f"{name}.html" for name in [contents["root"], *files]]


PAGES = [*pages_of_the_book(), "genindex.html", "search.html"]


@pytest.fixture(scope="module")
def tags(site: Path) -> dict[str, dict[str, str]]:
    """The meta tags of each page."""
    found = {}
    for page in PAGES:
        head = (site / page).read_text("utf-8").split("</head>")[0]
        metas = BeautifulSoup(head, "html.parser").find_all("meta", content=True)
        names = [meta.get("name") or meta.get("property") for meta in metas]
        ours = [name for name in names if name and re.match("description|og:|twitter:", name)]
        assert len(ours) == len(set(ours)), f"{page} says something twice: {ours}"
        found[page] = dict(zip(names, [meta["content"] for meta in metas], strict=True))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_description_of_its_own(tags: dict, page: str) -> None:
    text = tags[page]["description"]
    assert 30 <= len(text) <= page_heads.LONGEST
    assert not re.search(r"[\\$`{}]|\s\s", text), "no markup"
    assert re.match("[A-Z]|lesson_code", text) and re.search(r"[.?!…]$", text)
    assert [name for name in PAGES if tags[name]["description"] == text] == [page]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_what_a_card_needs(tags: dict, page: str) -> None:
    assert tags[page]["og:title"]
    assert tags[page]["og:description"] == tags[page]["description"]
    assert tags[page]["og:site_name"] == "Linear attention"
    assert tags[page]["twitter:card"] == (
        "summary_large_image" if notebooks.repository_url() else "summary"
    )


@pytest.mark.skipif(bool(notebooks.repository_url()), reason="the address is set")
def test_without_an_address_there_is_none_in_the_pages(site: Path, tags: dict) -> None:
    assert not (site / "sitemap.xml").exists()
    for page in PAGES:
        assert not {"og:image", "og:url"} & set(tags[page])
        assert 'rel="canonical"' not in (site / page).read_text("utf-8")


@pytest.mark.parametrize(
    ("repository", "address"),
    [
        ("https://github.com/Someone/some-book", "https://someone.github.io/some-book/"),
        ("https://github.com/someone/some-book.git", "https://someone.github.io/some-book/"),
        ("https://github.com/someone/someone.github.io", "https://someone.github.io/"),
        ("https://elsewhere.example/someone/some-book", ""),
        ("https://github.com/someone", ""),
        ("", ""),
    ],
)
def test_the_address_follows_from_the_repository(repository: str, address: str) -> None:
    assert page_heads.site_address(repository) == address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Short.", "Short."),
        ("Short. As follows:", "Short."),
        ("One two three. Four five six seven.", "One two three."),
        ("A. " + "word " * 9, "A. word word word word…"),
        ("word, " * 9, "word, word, word, word…"),
    ],
)
def test_descriptions_end_with_a_sentence_or_a_word(text: str, expected: str) -> None:
    assert page_heads.shorten(text, longest=26) == expected


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (r"N \times N", "N × N"),
        (r"\gamma \le 1", "γ ≤ 1"),
        (r"S_t = S_{t-1} + \phi(k_t) v_t^\top", "S_t = S_t-1 + φ(k_t) v_tᵀ"),
        (r"\operatorname{sim}(q, k)", "sim(q, k)"),
        (r"\tfrac12 \cdot \frac{a}{b}", "1/2 · (a)/(b)"),
        (r"\left[0, \infty\right)", "[0, ∞)"),
    ],
)
def test_formulas_as_text(formula: str, expected: str) -> None:
    assert plain(formula) == expected


def test_the_card() -> None:
    """The picture is small, as large as networks want, and as large as the pages say."""
    card = page_heads.CARD
    committed = ROOT / "book" / card["og:image"]
    size = int(card["og:image:width"]), int(card["og:image:height"])
    assert imagesize.get(committed) == size == (1200, 630)
    assert committed.stat().st_size < 100_000
