"""A Sphinx extension: from an equation to the code that computes it and the test that checks it,
and back.

Beside every numbered equation stand two small links, "code" and "test". Every entry of the
package's page says which equations and chapters it belongs to. The page book/equations lists all,
and the tests that are linked to become pages of their own, `_tests/...`, with what they use of
their files. What belongs to what is the business of equations.py.
"""

import hashlib
import html
import posixpath
import re
from collections import defaultdict

import code_links
import equations
import notebooks
from sphinx.util import logging

logger = logging.getLogger(__name__)

API = "book/api"
INDEX = "book/equations"
MARKER = "% (the table)"  # where the page of the equations has its table
NUMBER = re.compile(
    r'<span class="eqno">\(([^)]+)\)<a class="headerlink" href="#equation-([\w-]+)".*?</a></span>'
)


class Links:
    """What belongs to an equation or to a function, read once for a build."""

    def __init__(self) -> None:
        self.table = equations.read_table()
        self.book = equations.equations()
        self.functions = equations.functions_of(self.table)
        self.tests = {label: row.tests for label, row in self.table.equations.items()}
        self.of_function = defaultdict(list)
        for label in self.book:
            for name in self.functions.get(label, []):
                self.of_function[name].append(label)
        self.of_test = defaultdict(list)
        for label in self.book:
            for test in self.tests.get(label, []):
                self.of_test[test].append(label)
        self.first_used = first_used({e.page: e.chapter for e in self.book.values()})

    def digest(self) -> str:
        """Changes when anything changes that is written on the chapters' pages."""
        return hashlib.sha256(repr([self.functions, self.tests]).encode()).hexdigest()


def first_used(chapters: dict[str, str]) -> dict[str, str]:
    """The chapter whose code uses a function of the package first, by the function's own name."""
    package = code_links.Package("lesson_code")
    found = {}
    for page, chapter in chapters.items():
        path = equations.TABLE.with_name(f"{page}.ipynb")
        known = {}
        for source in notebooks.sources(path, "code"):
            for _, _, entry in code_links.places(source, package, known):
                found.setdefault(code_links.own_name(entry.object), chapter)
    found.pop(None, None)  # what has no name of its own, such as a number
    return found


def test_place(test: str) -> tuple[str, str]:
    """The page of a test and its anchor there."""
    file, _, name = test.partition("::")
    return "_tests/" + file.removeprefix("tests/").removesuffix(".py"), name


# --- Beside an equation ------------------------------------------------------------------------


def add_links(app, pagename, templatename, context, doctree) -> None:
    """Put the links beside the numbers of a page that is about to be written."""
    if pagename == INDEX:
        context["body"] = f'<div class="equation-index">{context["body"]}</div>'
    complete = {API, INDEX} <= app.env.found_docs  # and not a draft of a few pages
    if doctree is None or not complete or "eqno" not in context.get("body", ""):
        return
    links = app.equation_links
    objects = app.env.get_domain("py").objects

    def code(name: str) -> tuple[str, str, str]:
        address = f"{app.builder.get_relative_uri(pagename, API)}#{objects[name].node_id}"
        package = equations.PACKAGES.get(equations.package_of(name), "")
        return equations.short_name(name), address, package

    def test(place: str) -> tuple[str, str, str]:
        page, name = test_place(place)
        return name, f"{app.builder.get_relative_uri(pagename, page)}#{name}", ""

    def beside(found: re.Match) -> str:
        number, label = found.groups()
        both = [
            ("code", [code(name) for name in links.functions.get(label, []) if name in objects]),
            ("test", [test(place) for place in links.tests.get(label, [])]),
        ]
        parts = "".join(_link(word, number, targets) for word, targets in both if targets)
        if not parts:
            address = f"{app.builder.get_relative_uri(pagename, INDEX)}#row-{label}"
            words = f"no code of equation {number}: why"
            parts = f'<a href="{address}" aria-label="{words}">no code</a>'
        return f'<div class="eq-side">{found[0]}<div class="eq-links">{parts}</div></div>'

    context["body"] = NUMBER.sub(beside, context["body"])


def _link(word: str, number: str, targets: list[tuple[str, str, str]]) -> str:
    """One link, or a list of links that opens."""
    label = f"{word} of equation {number}: "
    if len(targets) == 1:
        [(name, address, _)] = targets
        name = html.escape(name)
        return f'<a href="{address}" aria-label="{label}{name}" title="{name}">{word}</a>'
    places = defaultdict(list)  # a function that several packages have is named once
    for name, address, note in targets:
        places[name].append((address, html.escape(note)))
    items = ""
    for name, [(address, note), *others] in places.items():
        others = "".join(f', <a href="{other}">{package}</a>' for other, package in others)
        items += f'<li><a href="{address}"><code>{html.escape(name)}</code></a> {note}{others}</li>'
    label += f"{len(targets)} {'functions' if word == 'code' else 'tests'}"
    return (
        f'<details name="eq-links"><summary aria-label="{label}">{word}</summary>'
        f"<ul>{items}</ul></details>"
    )


# --- On the package's page ---------------------------------------------------------------------


def add_equations(app, what, name, obj, options, lines) -> None:
    """Say in an entry where the book has its equations, as far as the docstring does not.

    What computes no equation has the chapter that uses it first.
    """
    app.env.note_dependency(str(equations.TABLE))
    if what == "module":
        return
    links = app.equation_links
    text = "\n".join(lines)
    cited = [label for label in equations.CITED.findall(text) if label in links.book]
    added = [label for label in links.of_function.get(name, []) if label not in cited]
    chapters = {links.book[label].chapter for label in [*cited, *added]}
    chapters = [e.chapter for e in links.book.values() if e.chapter in chapters]
    chapters = [c for c in dict.fromkeys(chapters) if f"{c}>`" not in text and f"`{c}`" not in text]
    words = "In the book"
    if not cited and not added and code_links.own_name(obj) in links.first_used:
        words, chapters = "First used in", [links.first_used[code_links.own_name(obj)]]
    parts = [f":eq:`{label}`" for label in added] + [f":ref:`{chapter}`" for chapter in chapters]
    if parts:
        end = lines.index("") if "" in lines else len(lines)  # of the summary
        sentence = f"   {words}: {', '.join(parts)}"
        lines[end:end] = ["", ".. container:: in-the-book", "", sentence]


# --- The page of the equations -----------------------------------------------------------------


def write_index(app, docname, source) -> None:
    """Put the table into its page before it is read."""
    if docname != INDEX:
        return
    app.env.note_dependency(str(equations.TABLE))
    links = app.equation_links
    parts = []
    page = None
    for label, equation in links.book.items():
        if equation.page != page:
            page = equation.page
            app.env.note_dependency(f"{app.srcdir}/book/{page}.ipynb")
            number = int(page.partition("_")[0])
            parts += ["", f"## [{number}. {equation.title}]({page}.ipynb)", ""]
            parts += ["| Equation | Code | Test |", "|---|---|---|"]
        first = f'<span id="row-{label}"></span>{{eq}}`{label}` {equation.name}'
        cells = [first, _code_cell(links, label)]
        parts.append(f"| {' | '.join([*cells, _test_cell(links, label)])} |")
    parts += ["", "## Functions without an equation", "", "| Function | Why |", "|---|---|"]
    parts += [f"| {_entry(name)} | {why} |" for name, why in links.table.functions.items()]
    source[0] = source[0].replace(MARKER, "\n".join(parts))


def _entry(name: str, title: str = "") -> str:
    return f"{{py:obj}}`{title or equations.short_name(name)} <{name}>`"


def _code_cell(links: Links, label: str) -> str:
    """Functions; one that other packages have too, under the same name, is named once."""
    by_name = defaultdict(list)
    for name in links.functions.get(label, []):
        by_name[equations.short_name(name)].append(name)
    shown = []
    for short, (first, *others) in by_name.items():
        package = equations.package_of(first)
        title = short if package in ("", equations.PRIMARY) else f"{package[12:]}.{short}"
        also = [_entry(name, equations.package_of(name)[12:]) for name in others]
        shown.append(f"{_entry(first, title)} {' '.join(also)}".strip())
    if not shown:
        return links.table.equations[label].why if label in links.table.equations else ""
    return "<br>".join(shown)


def _test_cell(links: Links, label: str) -> str:
    tests = links.tests.get(label, [])
    if not tests:
        row = links.table.equations.get(label)
        return row.why if row and links.functions.get(label) else ""
    shown = []
    for test in tests:
        page, name = test_place(test)
        address = f"{posixpath.relpath(page, posixpath.dirname(INDEX))}.html#{name}"
        words = name.removeprefix("test_").replace("_", " ")
        shown.append(f'<a href="{address}">{html.escape(words)}</a>')
    return "<br>".join(shown)


# --- The sources of the tests ------------------------------------------------------------------


def test_pages(app):
    """A page for each file of which a test is linked: these tests and what they use."""
    links = app.equation_links
    pages = {f"book/{equation.page}" for equation in links.book.values()}
    if not {INDEX, *pages} <= app.env.found_docs:  # a draft of a few pages
        return
    files = defaultdict(set)
    for test in links.of_test:
        file, _, name = test.partition("::")
        files[file].add(name)
    highlight = app.builder.highlighter.highlight_block
    for file, names in sorted(files.items()):
        page, _ = test_place(file)

        def address(target: str, anchor: str, page: str = page) -> str:
            return f"{app.builder.get_relative_uri(page, target)}#{anchor}"

        excerpt = equations.excerpt(equations.ROOT / file, names)
        parts = [
            f"<h1><code>{file}</code></h1>",
            "<p>The tests of this file that check an equation of the book, and what they use."
            f" Run them with <code>python -m pytest {file}</code>.</p>",
        ]
        for name, source in excerpt.tests.items():
            checked = ", ".join(
                f'<a href="{address("book/" + links.book[label].page, f"equation-{label}")}">'
                f"{_number(app, label)} {html.escape(links.book[label].name)}</a>"
                for label in links.of_test[f"{file}::{name}"]
            )
            parts += [
                f'<section id="{name}"><h2><code>{name}</code></h2>',
                f"<p>Checks {checked}.</p>",
                highlight(source, "python"),
                "</section>",
            ]
        if excerpt.used:
            parts += [
                '<section id="used"><h2>What they use</h2>',
                highlight(excerpt.used, "python"),
                "</section>",
            ]
        parents = [{"link": app.builder.get_relative_uri(page, INDEX), "title": "Equations"}]
        body = f'<div class="test-source">{"".join(parts)}</div>'
        context = {"parents": parents, "title": file, "body": body}
        yield page, context, "page.html"


def _number(app, label: str) -> str:
    """The number of an equation, as its page has it."""
    docname, number = app.env.get_domain("math").equations[label]
    numbers = app.env.toc_fignumbers.get(docname, {}).get("displaymath", {})
    return ".".join(map(str, numbers.get(f"equation-{label}", (number,))))


# --- Sphinx ------------------------------------------------------------------------------------


def start(app, config) -> None:
    app.equation_links = Links()
    config.equation_links_digest = app.equation_links.digest()


def check(app, env) -> None:
    """A table that does not fit the book is a warning, and so an error of a strict build."""
    links = app.equation_links
    for problem in equations.problems(links.table, links.book):
        logger.warning("%s: %s", equations.TABLE.relative_to(equations.ROOT), problem)
    if API in env.found_docs:
        objects = env.get_domain("py").objects
        for name in sorted(links.of_function.keys() - objects.keys()):
            logger.warning("%s computes an equation, but is not on the page %s", name, API)


def setup(app):
    if not equations.TABLE.exists():  # another book, such as those of the tests
        return {"parallel_read_safe": True, "parallel_write_safe": True}
    app.add_css_file("equations.css", priority=850)  # after the theme's
    app.add_js_file("equations.js", loading_method="defer")
    app.add_config_value("equation_links_digest", "", "html")
    app.connect("config-inited", start)
    app.connect("source-read", write_index)
    # After napoleon, which expects no line that it does not know.
    app.connect("autodoc-process-docstring", add_equations, priority=600)
    app.connect("env-check-consistency", check)
    app.connect("html-page-context", add_links)
    app.connect("html-collect-pages", test_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
