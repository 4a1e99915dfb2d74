"""The notation is at hand on every page: in a panel, and by the search."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from tools import legend, symbol_search

ROOT = Path(__file__).resolve().parent.parent
CHAPTER, PLAIN = "book/03_outer_product_memory.html", "genindex.html"  # PLAIN has no formulas
SCHEMES = ["http", "file"]


@pytest.fixture(scope="module")
def roots(site: Path, serve) -> dict[str, str]:
    return {"http": serve(site), "file": site.as_uri()}


@pytest.fixture(scope="module")
def notation(site: Path) -> BeautifulSoup:
    return BeautifulSoup((site / "book" / "notation.html").read_text("utf-8"), "html.parser")


def rows(section: BeautifulSoup) -> list[str]:
    return [" ".join(row.get_text().split()) for row in section.select("tbody tr")]


# --- The panel ---------------------------------------------------------------------------------


def test_every_page_has_the_button(site: Path) -> None:
    for page in [*site.glob("book/*.html"), *site.glob("*.html")]:
        if page.name != "index.html" or page.parent != site:  # that one leads on to the book
            text = page.read_text("utf-8")
            [link] = re.findall(r"<a(?=[^>]*btn-legend-button).*?</a>", text, re.DOTALL)
            [address] = re.findall(r'href="([^"]*)"', link)
            assert address.split("/")[-1] in ("notation.html", "#")
            assert BeautifulSoup(link, "html.parser").get_text().strip() == "Notation"


# Each pair of a page, a screen and a way to open it.
@pytest.mark.parametrize(
    ("where", "width", "theme", "scheme"),
    [
        (CHAPTER, 1280, "light", "http"),
        (CHAPTER, 390, "dark", "file"),
        (PLAIN, 1280, "light", "file"),
        (PLAIN, 390, "dark", "http"),
    ],
)
def test_the_panel(
    roots: dict, notation: BeautifulSoup, browser, where: str, width: int, theme: str, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=theme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.goto(f"{roots[scheme]}/{where}")
    address = page.url
    button = page.locator(".btn-legend-button").first
    assert button.get_attribute("aria-expanded") == "false"
    button.focus()
    page.keyboard.press("Enter")
    panel = page.locator("dialog.legend-panel")
    panel.locator("mjx-container").first.wait_for()
    assert page.url == address, "it leaves the page"
    assert button.get_attribute("aria-expanded") == "true"
    sections = {
        title.find(string=True): title.parent for title in notation.select("article section > h2")
    }
    # What it shows are the notation page's rows, formulas set, and no wider than the panel.
    expected = [row for heading in legend.SHOWN for row in rows(sections[heading])]
    assert panel.locator("tbody tr").count() == len(expected) > 25
    assert panel.locator(".math").count() == panel.locator("mjx-container").count()
    assert panel.evaluate("node => node.scrollWidth <= node.clientWidth + 1")
    assert panel.evaluate("node => parseFloat(getComputedStyle(node).fontSize)") >= 12
    for link in panel.locator("a[href]").all():
        assert re.search(r"/book/\w+\.html(#|$)", link.get_attribute("href"))
    page.keyboard.press("Escape")
    assert not panel.is_visible()
    assert button.evaluate("node => node === document.activeElement")
    page.keyboard.press("Space")
    assert panel.is_visible()
    panel.get_by_role("button", name="Close").click()
    assert not panel.is_visible()
    page.close()
    assert not errors


def test_without_scripts_the_button_leads_to_the_page(roots: dict, browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{roots['file']}/{CHAPTER}")
    link = page.locator(".btn-legend-button").first
    page.goto(f"{roots['file']}/book/{link.get_attribute('href')}")
    assert page.locator("article h1").inner_text().startswith("Notation")
    context.close()


def test_a_section_that_is_missing_is_seen() -> None:
    from docutils.core import publish_doctree

    page = publish_doctree("Sizes\n=====\n\nText.\n\nArrays\n======\n\nText.\n")
    assert len(legend.tables(page, ["Sizes"])) == 1
    with pytest.raises(ValueError, match="must have the sections"):
        legend.tables(page, ["Sizes", "Shapes"])


# --- The search --------------------------------------------------------------------------------

# What a reader types, and a part of what the first result says and where it leads.
QUERIES = {
    "S": ("memory state", "notation.html#symbol"),
    "phi": ("feature map", "notation.html#symbol"),
    "φ": ("feature map", "notation.html#symbol"),
    "gamma": ("retention", "notation.html#symbol"),
    "γ": ("retention", "notation.html#symbol"),
    "alpha": ("gated_linear_attention", "notation.html#symbol"),
    "z_t": ("normalizer state", "notation.html#symbol"),
    "N": ("length of the sequence", "notation.html#symbol"),
    "beta": ("error is corrected", "notation.html#symbol"),
    "feature_map": ("feature map", "notation.html#symbol"),
    "decay": ("Glossary", "glossary.html#term-decay"),
    "crosstalk": ("Glossary", "glossary.html#term-crosstalk"),
    "elu_plus_one": ("lesson_code.numpy.elu_plus_one", "api.html#"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_search_finds_symbols_by_name(roots: dict, site: Path, browser, scheme: str) -> None:
    page = browser.new_page()
    missed = []
    for query, (words, place) in QUERIES.items():
        page.goto(f"{roots[scheme]}/search.html?q={query}")
        page.wait_for_selector("#search-results li a", timeout=10_000)
        # The first three: of the same letter in several tables, each is a result.
        found = [
            (item.inner_text(), item.locator("a").first.get_attribute("href"))
            for item in page.locator("#search-results li").all()[:3]
        ]
        if not any(words in text and place in link for text, link in found):
            missed.append(f"{query}: {found}")
        for _, link in found:
            file, _, anchor = link.partition("#")
            text = (site / file).read_text("utf-8")
            assert not anchor or f'id="{anchor}"' in text, f"{link} leads nowhere"
    page.close()
    assert not missed


@pytest.mark.parametrize(
    ("formula", "names"),
    [
        (r"\phi", ["phi", "φ"]),
        ("S_t", ["S_t", "S"]),
        (r"\ln \alpha_t", ["alpha_t", "α_t", "alpha", "α"]),
        ("H_{kv}", ["H_kv", "H"]),
        (r"\operatorname{sim}(q, k)", ["sim"]),
        (r"\phi(k) v^\top", []),
        ("D \\times M", []),
    ],
)
def test_names_of_symbols(formula: str, names: list[str]) -> None:
    assert symbol_search.names_of(formula) == names
