"""The built site as a reader meets it: served or opened as files, wide or narrow, light or dark.

Every page is loaded once over each scheme; what a check needs to know about it is gathered then.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.conftest import soup
from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
WIDE, NARROW = 1280, 390
CHAPTER = "book/01_softmax_attention.html"
SCHEMES = ["http", "file"]


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


# --- What is known about a page ----------------------------------------------------------------

# Text in elements that show source code, and what MathJax has drawn, is no prose.
GATHER = r"""async () => {
  await window.MathJax?.startup?.promise;
  const images = [...document.images];
  images.forEach(image => image.loading = "eager");
  await Promise.all(images.map(image => image.decode().catch(() => {})));
  const name = node => node.outerHTML.slice(0, 120);
  const texts = [document.title];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const notProse = "script, style, noscript, template, pre, code, mjx-container";
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest(notProse)) texts.push(walker.currentNode.data);
  return {
    texts: texts.map(text => text.trim()).filter(text => text),
    formulas: document.querySelectorAll(".math").length,
    typeset: document.querySelectorAll("mjx-container").length,
    unset: [...document.querySelectorAll(".math")]
      .filter(node => !node.querySelector("mjx-container")).map(name),
    broken_formulas: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")]
      .map(node => node.dataset.mjxError || node.textContent),
    images: images.map(image => [image.getAttribute("src"), image.alt, image.naturalWidth]),
    drawings: [...document.querySelectorAll("svg:not([aria-hidden=true])")]
      .filter(node => !node.closest("mjx-container, button, [aria-hidden=true]"))
      .map(node => [name(node), node.getAttribute("role"), node.getAttribute("aria-label") ||
        node.querySelector(":scope > title")?.textContent ||
        document.getElementById(node.getAttribute("aria-labelledby"))?.textContent || ""]),
  };
}"""

# The width of the page and, where it is too wide, the innermost element without which it is not.
MEASURE = r"""async () => {
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const root = document.documentElement, width = root.scrollWidth;
  const narrowsThePage = node => {
    const {display} = node.style;
    node.style.setProperty("display", "none", "important");
    const narrower = root.scrollWidth < width;
    node.style.display = display;
    return narrower;
  };
  let culprit = document.body;
  for (let next = culprit; width > root.clientWidth + 1 && next; culprit = next || culprit)
    next = [...culprit.children].find(narrowsThePage);
  // Formulas in running text cannot be scrolled; those in solutions are seen once these are open.
  const folded = [...document.querySelectorAll(".toggle-hidden")];
  for (const node of folded) node.classList.remove("toggle-hidden");
  const cut = [...document.querySelectorAll("span.math mjx-container")].filter(formula => {
    const text = formula.closest("p, li, dd, figcaption");
    return text && formula.getBoundingClientRect().right > text.getBoundingClientRect().right + 2;
  });
  for (const node of folded) node.classList.add("toggle-hidden");
  const formulas = cut.map(node => node.closest("p, li, dd, figcaption").textContent.slice(0, 80));
  return [width, root.clientWidth, culprit.outerHTML.slice(0, 200), formulas];
}"""

IN_THEME = "theme => document.documentElement.dataset.theme === theme"
AXE_OPTIONS = {"resultTypes": ["violations"], "preload": False}
# The second theme changes colors alone; trying the other rules again would take minutes.
AXE_RULES = {
    "light": {"rules": {"color-contrast": {"enabled": False}}},
    "dark": {"runOnly": ["link-in-text-block"]},
}

# The contrast of a text follows from its own style and from what is painted below it. A page has
# thousands of texts and some hundred such looks: three texts of each are tried, in each theme.
# Words that cannot be seen do not stand for words that can.
MARK_LOOKS = r"""() => {
  for (const node of document.querySelectorAll("[data-look]")) node.removeAttribute("data-look");
  const below = new Map(), numbers = new Map(), tried = new Map();
  const number = text => numbers.get(text) ?? numbers.set(text, numbers.size).get(text);
  const ground = node => {
    if (!node) return 0;
    if (!below.has(node)) {
      const s = getComputedStyle(node);
      below.set(node, number([ground(node.parentElement), s.backgroundColor, s.backgroundImage,
        s.opacity, s.filter, s.mixBlendMode, s.position, s.zIndex].join()));
    }
    return below.get(node);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility({visibilityProperty: true}))
      continue;
    const {width, height} = node.getBoundingClientRect();
    const s = getComputedStyle(node);
    const look = [ground(node), s.color, s.fontSize, s.fontWeight, s.textShadow,
      s.webkitTextFillColor, width > 1 && height > 1].join();
    const times = tried.get(look) ?? 0;
    if (times < 3) node.setAttribute("data-look", "");
    tried.set(look, times + 1);
  }
}"""


@dataclass
class Facts:
    """What one visit of a page has shown."""

    address: str
    requests: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    content: dict = field(default_factory=dict)
    widths: dict[int, tuple] = field(default_factory=dict)
    violations: dict[str, list[str]] = field(default_factory=dict)


def visit(browser, root: str, name: str, axe: bool = True) -> Facts:
    from axe_playwright_python.sync_playwright import Axe

    facts = Facts(root)
    page = browser.new_page(viewport={"width": WIDE, "height": 900}, reduced_motion="reduce")
    page.on("request", lambda request: facts.requests.append(request.url))
    page.on("websocket", lambda socket: facts.requests.append(socket.url))
    page.on(
        "requestfailed", lambda request: facts.failures.append(f"{request.url}: {request.failure}")
    )
    page.on(
        "response",
        lambda response: (
            response.status >= 400
            and facts.failures.append(f"{response.url}: status {response.status}")
        ),
    )
    page.on("pageerror", lambda error: facts.errors.append(str(error)))
    page.on(
        "console",
        lambda message: message.type == "error" and facts.errors.append(message.text),
    )
    try:
        page.goto(f"{root}/{name}", wait_until="load")
        facts.content = page.evaluate(GATHER)
        facts.widths[WIDE] = page.evaluate(MEASURE)
        if axe and root.startswith("http:"):  # from a file the page is the same
            page.add_style_tag(content="* { transition: none !important }")
            for theme, rules in AXE_RULES.items():
                page.emulate_media(color_scheme=theme)
                page.wait_for_function(IN_THEME, arg=theme, timeout=10_000)
                page.evaluate(MARK_LOOKS)
                runs = [(None, rules), ("[data-look]", {"runOnly": ["color-contrast"]})]
                facts.violations[theme] = [
                    describe(violation)
                    for part, rules in runs
                    for violation in Axe()
                    .run(page, part, AXE_OPTIONS | rules)
                    .response["violations"]
                ]
        page.set_viewport_size({"width": NARROW, "height": 844})
        facts.widths[NARROW] = page.evaluate(MEASURE)
    finally:
        page.close()
    return facts


def describe(violation: dict) -> str:
    nodes = violation["nodes"]
    lines = [f"{violation['impact']}: {violation['id']}, {violation['help']} ({len(nodes)} places)"]
    for node in nodes[:5]:
        reasons = [check["message"] for check in node["any"] + node["all"] + node["none"]]
        lines.append(f"    {node['html'][:160]}\n      {'; '.join(reasons)[:300]}")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def facts_of(site: Path, serve, browser) -> Callable[[str, str], Facts]:
    roots = {"http": serve(site), "file": site.as_uri()}

    @cache
    def facts_of(scheme: str, name: str, axe: bool = True) -> Facts:
        return visit(browser, roots[scheme], name, axe)

    return facts_of


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
    return [
        f"at {width} px the page is {scroll} px wide: {culprit}"
        for width, (scroll, client, culprit, _) in facts.widths.items()
        if scroll > client + 1
    ] + [
        f"at {width} px a formula is cut off: {text}"
        for width, (*_, formulas) in facts.widths.items()
        for text in formulas
    ]


def accessible(facts: Facts) -> list[str]:
    return [
        f"{theme}: {violation}"
        for theme, violations in facts.violations.items()
        for violation in violations
        if violation.startswith(("serious", "critical"))
    ]


CHECKS = [
    only_this_host,
    nothing_fails_to_load,
    no_errors_on_the_console,
    formulas_are_typeset,
    no_markup_is_left,
    images_have_words,
    nothing_sticks_out,
    accessible,
]


def refuse(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_the_book_builds(site_build: tuple[Path, str]) -> None:
    _, trouble = site_build
    if trouble:
        pytest.fail(trouble, pytrace=False)


# --- Every page --------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("page", PAGES)
def test_page(facts_of, page: str, scheme: str, check) -> None:
    refuse(check(facts_of(scheme, page)))


def other_pages(site: Path) -> list[str]:
    """The pages that Sphinx adds: indexes, and those that show source code."""
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    return sorted(p for p in built - {*PAGES, "index.html"} if not p.startswith("_static/"))


def one_of_each_folder(pages: list[str]) -> list[str]:
    return list({posixpath.dirname(page): page for page in reversed(pages)}.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pages_that_sphinx_adds(facts_of, site: Path, scheme: str) -> None:
    """Every page once; one of each folder over both schemes and with all checks.

    The pages of a folder have one template and one way to the files that they load, and differ in
    the code that they show. That no link leads elsewhere is tried on all of them below.
    """
    pages = other_pages(site)
    whole = one_of_each_folder(pages)
    refuse(
        [
            f"{page}: {problem}"
            for page in (pages if scheme == "http" else whole)
            for check in CHECKS
            for problem in check(facts_of(scheme, page, page in whole))
        ]
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_start_page_leads_to_the_book(site: Path, serve, browser, scheme: str) -> None:
    root = serve(site) if scheme == "http" else site.as_uri()
    page = browser.new_page()
    page.goto(f"{root}/index.html")
    page.wait_for_url(f"{root}/{PAGES[0]}", timeout=10_000)
    page.close()


# --- Links -------------------------------------------------------------------------------------


@cache
def anchors(path: Path) -> set[str]:
    found = soup(path).find_all(lambda tag: tag.has_attr("id") or tag.has_attr("name"))
    return {tag.get(key) for tag in found for key in ("id", "name")}


def broken_links(site: Path, name: str) -> list[str]:
    problems = []
    for tag in soup(site / name).find_all(True):
        for key in ("href", "src", "action", "data", "poster"):
            link = tag.get(key)
            if link is None or link.startswith(("data:", "mailto:")):
                continue
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if tag.name != "a":
                    problems.append(f"<{tag.name}> uses another host: {link}")
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path)))
            target = site / (path if parts.path else name)
            if path.startswith(("..", "/")) or not target.is_file():
                problems.append(f"{link} leads to no file")
            elif parts.fragment and unquote(parts.fragment) not in anchors(target):
                problems.append(f"{link} leads to no place in its page")
    return problems


@pytest.mark.parametrize("page", PAGES)
def test_links(site: Path, page: str) -> None:
    refuse(broken_links(site, page))


def test_links_of_pages_that_sphinx_adds(site: Path) -> None:
    pages = other_pages(site)
    refuse([f"{page}: {problem}" for page in pages for problem in broken_links(site, page)])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_search(site: Path, serve, browser, scheme: str) -> None:
    root = serve(site) if scheme == "http" else site.as_uri()
    page = browser.new_page()
    errors = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{root}/search.html?q=softmax")
    page.wait_for_selector("#search-results li a", timeout=10_000)
    page.wait_for_load_state("networkidle")
    link = page.locator("#search-results li a").first.get_attribute("href")
    page.close()
    assert (site / urlsplit(link).path).is_file()
    assert not errors


# --- Buttons -----------------------------------------------------------------------------------


def test_every_notebook_is_a_page() -> None:
    assert OF_NOTEBOOKS <= set(PAGES)


@pytest.mark.parametrize("page", NOTEBOOK_PAGES)
def test_download_button(site: Path, page: str) -> None:
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


@pytest.mark.parametrize("page", PAGES)
def test_colab_is_offered_once_there_is_an_address(site: Path, page: str) -> None:
    url = notebooks.repository_url()
    expected = [colab_address(url, page)] if url and page in NOTEBOOK_PAGES else []
    assert launch_links(site, page) == expected


@pytest.fixture(scope="module")
def site_with_address(tree: Path, build_book, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with_address")
    shutil.copytree(tree, folder / "tree")
    notebooks.set_address("https://github.com/someone/some-book", folder / "tree")
    result = build_book(folder / "tree", folder / "output", execute_notebooks="off")
    assert result.returncode == 0, result.stdout
    return folder / "output" / "_build" / "html"


@pytest.mark.parametrize("page", NOTEBOOK_PAGES)
def test_colab_opens_the_published_notebook(site_with_address: Path, page: str) -> None:
    [link] = launch_links(site_with_address, page)
    assert link == colab_address("https://github.com/someone/some-book", page)
    published = site_with_address / link.partition("/blob/gh-pages/")[2]
    first = json.loads(published.read_text("utf-8"))["cells"][0]["source"]
    assert "git+https://github.com/someone/some-book" in "".join(first)


def test_pages_know_their_address(site_with_address: Path) -> None:
    """The canonical address, the picture of the card, and the sitemap, all at the same place."""
    root = "https://someone.github.io/some-book/"
    for page in [*pages_in_contents(), "genindex.html"]:
        head = soup(site_with_address / page).head
        [canonical] = head.select('link[rel="canonical"]')
        meta = {tag.get("property"): tag["content"] for tag in head.select("meta[property]")}
        assert canonical["href"] == meta["og:url"] == root + page
        assert (site_with_address / meta["og:image"].removeprefix(root)).is_file()
    listed = re.findall("<loc>(.*)</loc>", (site_with_address / "sitemap.xml").read_text("utf-8"))
    assert sorted(listed) == sorted(root + page for page in pages_in_contents())


# --- The checks themselves ---------------------------------------------------------------------

GOOD_PAGE = """<!doctype html><html lang="en" data-theme="light"><head><title>Good</title>
<link rel="icon" href="data:,"></head>
<body><main><h1>Good</h1><p>A weight is <code>$x$ {eq}`y`</code>. <a href="#end">End</a></p>
<p id="end"><img alt="A red square" width="9" height="9" src="square.svg"></p>
SCRIPT</main></body></html>"""

# Each check and a line that it must refuse.
BAD_LINES = {
    only_this_host: '<img alt="A square" src="http://somewhere.example/square.svg">',
    nothing_fails_to_load: '<script src="missing.js"></script>',
    no_errors_on_the_console: "<script>console.error('trouble')</script>",
    formulas_are_typeset: '<span class="math">x</span>',
    no_markup_is_left: "<p>See {eq}`eq-x`.</p>",
    images_have_words: '<img src="square.svg" alt="square.svg">',
    nothing_sticks_out: '<p style="width: 500px">Wide</p>',
    accessible: '<p style="color: #999; background: #aaa">Pale</p>',
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
        return visit(browser, root, "index.html")

    return facts_of_line


def test_the_checks_accept_a_good_page(facts_of_line) -> None:
    facts = facts_of_line("")
    assert {check.__name__: check(facts) for check in CHECKS if check(facts)} == {}


PALE_LOOKS = {
    "its own color": '<p style="color: #aaa">Pale</p>',
    "the ground below": '<div style="background: #222"><p>Dark on dark</p></div>',
    "opacity": '<div style="opacity: 0.3"><p>Faint</p></div>',
    "a hidden one before it": '<p style="color: #aaa; visibility: hidden">Pale</p>'
    '<p style="color: #aaa">Pale</p>',
    "the dark theme": '<p class="x">Pale</p><style>[data-theme="dark"] .x {color: #aaa}</style>',
}


@pytest.mark.parametrize("line", PALE_LOOKS.values(), ids=PALE_LOOKS)
def test_a_look_that_is_pale_is_seen_after_many_that_are_not(facts_of_line, line: str) -> None:
    assert any(
        "color-contrast" in problem for problem in accessible(facts_of_line(9 * "<p>A</p>" + line))
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
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
