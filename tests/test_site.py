"""The built site as a reader meets it: served or opened as files, wide or narrow, light or dark.

Every page is visited once, as visits.py says, and one of each kind as a file on a phone, too; what
a check needs to know about it is gathered then.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml

from tests.conftest import small_book, soup
from tests.test_light_pages import LIGHT, begins_no_line_with_punctuation, visit_calmly
from tests.test_print import complete_on_paper
from tests.visits import MARK_LOOKS, NARROW, Facts, GzipHandler, problems, visit
from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
CANARIES = ROOT / "tests" / "canaries"
SCHEMES = ("http", "file")
CHAPTER = "book/01_softmax_attention.html"
AS_FILES = ["book/index.html", CHAPTER, "genindex.html"]
AS_FILES += [f"book/{name}.html" for name in ("api", "equations", "glossary", "notation")]


def pages_in_contents() -> list[str]:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))

    def files(entry: object) -> Iterator[str]:
        if isinstance(entry, list):
            for part in entry:
                yield from files(part)
        elif isinstance(entry, dict):
            yield from (entry[key] for key in ("root", "file") if key in entry)
            for part in entry.values():
                yield from files(part)

    return [f"{name}.html" for name in files(contents)]


PAGES = [*pages_in_contents(), "search.html", "genindex.html"]
OF_NOTEBOOKS = {f"book/{path.stem}.html" for path in notebooks.NOTEBOOKS}
NOTEBOOK_PAGES = [page for page in PAGES if page in OF_NOTEBOOKS]


@pytest.fixture(scope="module")
def roots(site: Path, serve) -> dict[str, str]:
    return {"http": serve(site, GzipHandler), "file": site.as_uri()}


# --- The checks: each returns the problems that it finds ---------------------------------------


def only_this_host(facts: Facts) -> list[str]:
    inside = (facts.address, "data:", "blob:", "about:")
    return [url for url in facts.requests if not url.startswith(inside)]


def nothing_fails_to_load(facts: Facts) -> list[str]:
    return facts.failures


def no_errors_on_the_console(facts: Facts) -> list[str]:
    return facts.errors


def formulas_are_typeset(facts: Facts) -> list[str]:
    content = facts.content
    problems = [f"MathJax could not read: {text}" for text in content["broken_formulas"]]
    problems += [f"left as it was: {html}" for html in content["unset"]]
    if content["formulas"] != content["typeset"]:
        problems.append(f"{content['formulas']} formulas, {content['typeset']} of them typeset")
    return problems


LEFTOVERS = re.compile(
    r"""  \$\$ | \$[^$\n]+\$           # dollars
        | \\[a-zA-Z]+ | \\[()\[\]]     # LaTeX
        | \{[\w:-]+\}`                 # roles and directives
        | ` | ::: | \*\*\S | \]\( | \[\^ | \{\{ | \}\} | \{%   # other markup
        | \?\?                         # references that lead nowhere
    """,
    re.VERBOSE,
)


def no_markup_is_left(facts: Facts) -> list[str]:
    return [text[:200] for text in facts.content["texts"] if LEFTOVERS.search(text)]


def images_have_words(facts: Facts) -> list[str]:
    problems = []
    for source, words, width in facts.content["images"]:
        if not width:
            problems.append(f"{source} has not loaded")
        # Sphinx gives an image without words its path.
        if not words.strip() or re.search(r"\.(png|svg|jpe?g|gif|webp)$", words):
            problems.append(f"{source} has no alternative text but {words!r}")
    for html, role, words in facts.content["drawings"]:
        if role != "img" or not words.strip():
            problems.append(f"a drawing without role and title or label: {html}")
    return problems


def nothing_sticks_out(facts: Facts) -> list[str]:
    problems = []
    for width, scroll, client, culprit, formulas in facts.widths:
        problems += [f"at {width} px a formula is cut off: {text}" for text in formulas]
        if scroll > client + 1:
            problems.append(f"at {width} px the page is {scroll} px wide: {culprit}")
    return problems


def accessible(facts: Facts) -> list[str]:
    return [x for x in facts.violations if x.startswith(("serious", "critical"))]


CHECKS = [
    only_this_host,
    nothing_fails_to_load,
    no_errors_on_the_console,
    formulas_are_typeset,
    no_markup_is_left,
    images_have_words,
    nothing_sticks_out,
    accessible,
    complete_on_paper,
    *LIGHT,
]


def refuse(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_the_book_builds(site_build: tuple[Path, str]) -> None:
    _, trouble = site_build
    if trouble:
        pytest.fail(trouble, pytrace=False)


# --- Every page --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems_of(browser, roots: dict[str, str]) -> Iterator[Callable[[str], list[str]]]:
    """A function that visits a page and tells all that is wrong.

    The visits share a browser's cache, as a reader's do; the sizes are those that servers tell.
    """
    tried: dict[str, int] = {}
    context = browser.new_context()
    yield lambda name: problems(visit_calmly(context, roots["http"], name, tried=tried), CHECKS)
    context.close()


@pytest.mark.parametrize("page", PAGES)
def test_page(problems_of, page: str) -> None:
    refuse(problems_of(page))


@pytest.mark.parametrize("page", AS_FILES)
def test_page_as_a_file_on_a_phone(browser, roots: dict[str, str], page: str) -> None:
    """Explorables, which load scripts of their own, are opened so by tests/explorables."""
    refuse(problems(visit_calmly(browser, roots["file"], page, NARROW), CHECKS))


def other_pages(site: Path) -> list[str]:
    """The pages that Sphinx adds: indexes, and those that show source code."""
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    return sorted(p for p in built - {*PAGES, "index.html"} if not p.startswith("_static/"))


def test_pages_that_sphinx_adds(problems_of, site: Path) -> None:
    """The largest of each kind and depth.

    Pages of a kind have one template, and their depth decides on the way to the files that they
    load; else they differ in the code that they show. That no link leads elsewhere is tried on all
    of them below.
    """
    by_size = sorted(other_pages(site), key=lambda page: (site / page).stat().st_size)
    largest = {
        (posixpath.dirname(page).partition("/")[0], page.count("/")): page for page in by_size
    }
    refuse([f"{page}: {problem}" for page in largest.values() for problem in problems_of(page)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_start_page_leads_to_the_book(roots, browser, scheme: str) -> None:
    page = browser.new_page()
    page.goto(f"{roots[scheme]}/index.html")
    page.wait_for_url(f"{roots[scheme]}/{PAGES[0]}", timeout=10_000)
    page.close()


# --- Links -------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    """All tags of a page with their attributes, in a fraction of the time that its tree takes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


@cache
def tags(path: Path) -> list[tuple[str, dict[str, str | None]]]:
    return _Tags(path.read_text("utf-8")).found


@cache
def anchors(path: Path) -> set[str | None]:
    return {attributes.get(key) for _, attributes in tags(path) for key in ("id", "name")}


def broken_links(site: Path, name: str) -> list[str]:
    problems = []
    links = [
        (tag, link)
        for tag, attributes in tags(site / name)
        for key in ("href", "src", "action", "data", "poster")
        if (link := attributes.get(key)) and not link.startswith(("data:", "mailto:"))
    ]
    for tag, link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            if tag != "a":
                problems.append(f"<{tag}> uses another host: {link}")
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
        target = site / (path if parts.path else name)
        if path.startswith(("..", "/")) or not target.is_file():
            problems.append(f"{link} leads to no file")
        elif parts.fragment and unquote(parts.fragment) not in anchors(target):
            problems.append(f"{link} leads to no place in its page")
    return problems


def test_links(site: Path) -> None:
    pages = [*PAGES, *other_pages(site)]
    refuse([f"{page}: {problem}" for page in pages for problem in broken_links(site, page)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_search(roots, site: Path, browser, scheme: str) -> None:
    page = browser.new_page()
    errors = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{roots[scheme]}/search.html?q=softmax")
    page.wait_for_selector("#search-results li a", timeout=10_000)
    page.wait_for_load_state("networkidle")
    link = page.locator("#search-results li a").first.get_attribute("href")
    page.close()
    assert (site / urlsplit(link).path).is_file()
    assert not errors


# --- Buttons -----------------------------------------------------------------------------------


def test_every_notebook_is_a_page() -> None:
    assert OF_NOTEBOOKS <= set(PAGES)


def test_download_buttons(site: Path) -> None:
    for page in NOTEBOOK_PAGES:
        [button] = soup(site / page).select("a.btn-download-source-button")
        offered = (site / page).parent / button["href"]
        source = ROOT / Path(page).with_suffix(".ipynb")
        assert json.loads(offered.read_text("utf-8")) == json.loads(source.read_text("utf-8"))


def test_the_keyboard_shows_where_it_is(site: Path, browser) -> None:
    page = browser.new_page()
    page.goto((site / CHAPTER).as_uri())
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    for selector in (".primary-toggle", ".header-article-items .btn", ".toggle-button"):
        page.locator(selector).first.focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        assert page.evaluate("s => document.activeElement.matches(s)", selector)
        assert page.evaluate(outline) == "solid", selector
    page.close()


def test_paper_is_light(site: Path, browser) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto((site / CHAPTER).as_uri())
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.emulate_media(media="print")
    page.wait_for_function(f"{theme} === 'light'")
    page.emulate_media(media="screen")
    page.wait_for_function(f"{theme} === 'dark'")
    page.close()


def launch_links(site: Path, page: str) -> list[str]:
    """Where a page's buttons lead that open it somewhere else."""
    hosts = re.compile("colab|binder|jupyterhub|deepnote|lite", re.IGNORECASE)
    buttons = soup(site / page).select(".header-article-items a[href]")
    return [button["href"] for button in buttons if hosts.search(str(button))]


def colab_address(url: str, page: str) -> str:
    place = url.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"{place}/blob/gh-pages/_sources/{Path(page).with_suffix('.ipynb').as_posix()}"


def test_colab_is_offered_once_there_is_an_address(site: Path) -> None:
    url = notebooks.repository_url()
    for page in PAGES:
        expected = [colab_address(url, page)] if url and page in NOTEBOOK_PAGES else []
        assert launch_links(site, page) == expected


def test_a_book_that_knows_its_address(build_book, tmp_path: Path) -> None:
    """Colab opens the published notebook; pages name where they, their card and the map are."""
    url, root = "https://github.com/someone/some-book", "https://someone.github.io/some-book/"
    book = small_book(tmp_path, CANARIES / "good_reference.md", CANARIES / "good.ipynb")
    notebook = nbformat.read(book / "book/good.ipynb", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell())
    nbformat.write(notebook, book / "book/good.ipynb")
    notebooks.set_address(url, book)
    result = build_book(book, tmp_path, execute_notebooks="off")
    assert result.returncode == 0, result.stdout

    site = tmp_path / "_build" / "html"
    assert launch_links(site, "book/good_reference.html") == []
    [link] = launch_links(site, "book/good.html")
    assert link == colab_address(url, "book/good.html")
    published = json.loads((site / link.partition("/blob/gh-pages/")[2]).read_text("utf-8"))
    assert f"git+{url}" in "".join(published["cells"][0]["source"])
    pages = ["book/good.html", "book/good_reference.html", "book/bibliography.html"]
    for page in pages:
        head = soup(site / page).head
        [canonical] = head.select('link[rel="canonical"]')
        meta = {tag.get("property"): tag["content"] for tag in head.select("meta[property]")}
        assert canonical["href"] == meta["og:url"] == root + page
        assert (site / meta["og:image"].removeprefix(root)).is_file()
    listed = re.findall("<loc>(.*)</loc>", (site / "sitemap.xml").read_text("utf-8"))
    assert sorted(listed) == sorted(root + page for page in pages)


# --- The checks themselves ---------------------------------------------------------------------

GOOD_PAGE = """<!doctype html><html lang="en" data-theme="light"><head><title>Good</title>
<link rel="icon" href="data:,"></head>
<body><main><article><h1>Good</h1>
<p>A weight is <code>$x$ {eq}`y`</code>. <a href="#end">End</a></p>
<p id="end"><img alt="A red square" width="9" height="9" src="square.svg"></p>
SCRIPT</article></main></body></html>"""

# Each check of this file and a line that it must refuse.
BAD_LINES = {
    only_this_host: '<img alt="A square" src="http://somewhere.example/square.svg">',
    nothing_fails_to_load: '<script src="missing.js"></script>',
    no_errors_on_the_console: "<script>console.error('trouble')</script>",
    formulas_are_typeset: '<span class="math">x</span>',
    no_markup_is_left: "<p>See {eq}`eq-x`.</p>",
    images_have_words: '<img src="square.svg" alt="square.svg">',
    nothing_sticks_out: '<p style="width: 500px">Wide</p>',
    accessible: '<p style="color: #999; background: #aaa">Pale</p>',
    complete_on_paper: '<p style="visibility: hidden">Hidden</p>',
    begins_no_line_with_punctuation: '<p style="width: 60px"><span class="math">'
    '<mjx-container style="display: inline-block; width: 60px">x</mjx-container></span>, y</p>',
}


@pytest.fixture(scope="module")
def facts_of_line(tmp_path_factory: pytest.TempPathFactory, serve, browser):
    folder = tmp_path_factory.mktemp("lines")
    root = serve(folder)
    square = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect/></svg>'
    (folder / "square.svg").write_text(square)
    follow_theme = """<script>matchMedia("(prefers-color-scheme: dark)").onchange = event =>
      document.documentElement.dataset.theme = event.matches ? "dark" : "light"</script>"""

    def facts_of_line(line: str) -> Facts:
        page = GOOD_PAGE.replace("SCRIPT", follow_theme + line)
        (folder / "index.html").write_text(page)
        return visit(browser, root, "index.html", tried={})

    return facts_of_line


def test_the_checks_accept_a_good_page(facts_of_line) -> None:
    facts = facts_of_line("")
    assert problems(facts, CHECKS) == []
    assert set(CHECKS) == {*BAD_LINES, *LIGHT}


PALE_LOOKS = {
    "its own color": '<p style="color: #aaa">{}</p>',
    "the ground below": '<div style="background: #222"><p>{}</p></div>',
    "opacity": '<div style="opacity: 0.3"><p>{}</p></div>',
    "a hidden one before it": '<p style="color: #abb; visibility: hidden">Pale</p>'
    '<p style="color: #abb">{}</p>',
    "a word in code": 4 * "<pre>code</pre>" + '<pre>code <b style="color: #bbb">{}</b></pre>',
    "the dark theme": '<p class="x">{}</p><style>[data-theme="dark"] .x {{color: #aaa}}</style>',
    "a link like the words around it": "<p>Many words stand before this place, "
    '<a href="#end" style="color: #222; text-decoration: none">{}</a>, and some behind it.</p>',
}


def test_a_look_that_is_pale_is_seen_after_many_that_are_not(facts_of_line) -> None:
    good = 9 * '<p>A good <a href="#end">link</a></p>'
    bad = [line.format(f"For {name}") for name, line in PALE_LOOKS.items()]
    problems = "\n".join(accessible(facts_of_line(good + "".join(bad))))
    assert [name for name in PALE_LOOKS if f"For {name}" not in problems] == []


def test_a_look_is_tried_on_the_first_pages_that_have_it(facts_of_line, browser) -> None:
    page = browser.new_page()
    page.set_content(GOOD_PAGE)
    once = page.evaluate(MARK_LOOKS, [{}, "data-light"])
    assert page.locator("[data-light]").count()
    page.evaluate(MARK_LOOKS, [{look: 3 for look in once}, "data-dark"])
    assert not page.locator("[data-dark]").count()
    page.close()


@pytest.mark.parametrize("check", BAD_LINES, ids=lambda check: check.__name__)
def test_the_check_refuses_a_bad_page(facts_of_line, check) -> None:
    assert check(facts_of_line(BAD_LINES[check]))


def test_a_formula_that_is_cut_off_is_seen(facts_of_line) -> None:
    formula = '<mjx-container style="display: inline-block; width: 300px">x</mjx-container>'
    line = f'<p style="width: 200px; overflow: hidden"><span class="math">{formula}</span></p>'
    assert "a formula is cut off" in nothing_sticks_out(facts_of_line(line))[0]


@pytest.mark.parametrize(
    "text",
    ["$$", "where $x$ is", r"\frac", r"\(x\)", r"\begin{", "{eq}`eq-x`", "{cite}`a`", "```", ":::"]
    + ["**bold**", "[a](b)", "see [^1]", "{{ x }}", "Equation ??", ":math:`x`"],
)
def test_leftover_markup_is_seen(text: str) -> None:
    assert LEFTOVERS.search(f"before {text} after")


@pytest.mark.parametrize(
    "text", ["It costs $5.", "Q(KᵀV)", "S {t}", "a * b ** 2", "(1.1)", "What?", "[5, 6]", "f: x"]
)
def test_prose_is_no_leftover_markup(text: str) -> None:
    assert not LEFTOVERS.search(text)


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"></p>')
    links = ["a.html", "a.html#x", "#y", "https://somewhere.example", "missing.html", "a.html#y"]
    anchor = "".join(f'<a href="{link}"></a>' for link in links)
    (tmp_path / "b.html").write_text(f'<p id="y"></p>{anchor}')
    assert broken_links(tmp_path, "b.html") == [
        "missing.html leads to no file",
        "a.html#y leads to no place in its page",
    ]
