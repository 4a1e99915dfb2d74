"""From an equation to the code that computes it and the test that checks it, and back.

Beside every numbered equation stand two small links, "code" and "test". Every entry of the
package's page says which equations and chapters it belongs to. The page book/equations lists all,
and the tests that are linked to become pages of their own, `_tests/...`, with what they use of
their files. What belongs to what is the business of equations.py.
"""

import hashlib
import re
from collections import defaultdict

from sphinx.util import logging

from tools import code_links, equations
from tools.book import ROOT, chapters
from tools.excerpts import excerpt

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
        self.of_function = self.turned(self.functions)
        self.of_test = self.turned(self.tests)
        self.first_used = first_used()

    def turned(self, names: dict[str, list[str]]) -> dict[str, list[str]]:
        """The equations by what belongs to them, in the order of the book."""
        found = defaultdict(list)
        for label in self.book:
            for name in names.get(label, []):
                found[name].append(label)
        return found


def first_used() -> dict[str, str]:
    """The chapter whose code uses a function of the package first, by the function's own name."""
    found = {}

    def entry(name: str) -> code_links.Entry | None:
        thing = code_links.import_name(name) if name.startswith("lesson_code.") else None
        return thing and code_links.Entry(name, thing)

    for chapter in chapters():
        known = {}
        for source in chapter.sources("code"):
            for _, _, used in code_links.places(source, entry, known):
                found.setdefault(code_links.own_name(used.object), chapter.labels[0])
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
    documented = app.env.get_domain("py").objects

    def address(page: str, anchor: str) -> str:
        return f"{app.builder.get_relative_uri(pagename, page)}#{anchor}"

    def beside(found: re.Match) -> str:
        number, label = found.groups()
        code, tests = defaultdict(list), defaultdict(list)
        for name in links.functions.get(label, []):
            if name in documented:
                place = address(API, documented[name].node_id)
                package = equations.PACKAGES.get(equations.package_of(name), "")
                code[equations.short_name(name)].append((place, package))
        for test in links.tests.get(label, []):
            page, name = test_place(test)
            tests[name].append((address(page, name), ""))
        parts = _link(f"code of equation {number}", "functions", code)
        parts += _link(f"test of equation {number}", "tests", tests)
        if not parts:
            words = f"no code of equation {number}: why"
            parts = f'<a href="{address(INDEX, f"row-{label}")}" aria-label="{words}">no code</a>'
        return f'<div class="eq-side">{found[0]}<div class="eq-links">{parts}</div></div>'

    context["body"] = NUMBER.sub(beside, context["body"])


def _link(label: str, kind: str, places: dict[str, list[tuple[str, str]]]) -> str:
    """One link, or a list that opens, where a name that several packages have is named once."""
    word = label[:4]
    count = sum(map(len, places.values()))
    if not count:
        return ""
    if count == 1:
        [(name, [(address, _)])] = places.items()
        return f'<a href="{address}" aria-label="{label}: {name}" title="{name}">{word}</a>'
    items = ""
    for name, [(address, note), *others] in places.items():
        also = "".join(f', <a href="{other}">{package}</a>' for other, package in others)
        items += f'<li><a href="{address}"><code>{name}</code></a> {note}{also}</li>'
    return (
        f'<details name="eq-links"><summary aria-label="{label}: {count} {kind}">{word}</summary>'
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
    own = {links.book[label]: 0 for label in links.book if label in [*cited, *added]}
    chapters = [chapter.labels[0] for chapter in own]
    chapters = [c for c in chapters if f"{c}>`" not in text and f"`{c}`" not in text]
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
    for chapter in dict.fromkeys(links.book.values()):
        app.env.note_dependency(str(chapter.path))
        heading = f"## [{chapter.number}. {chapter.title}]({chapter.path.name})"
        parts += ["", heading, "", "| Equation | Code | Test |", "|---|---|---|"]
        for label in chapter.equations:
            first = f'<span id="row-{label}"></span>{{eq}}`{label}` {equations.in_words(label)}'
            row = links.table.equations.get(label, equations.Row())
            code = _code_cell(links.functions.get(label, [])) or row.why
            tests = _test_cell(row.tests) or (row.why if label in links.functions else "")
            parts.append(f"| {first} | {code} | {tests} |")
    parts += ["", "## Functions without an equation", "", "| Function | Why |", "|---|---|"]
    parts += [f"| {_entry(name)} | {why} |" for name, why in links.table.functions.items()]
    source[0] = source[0].replace(MARKER, "\n".join(parts))


def _entry(name: str, title: str = "") -> str:
    return f"{{py:obj}}`{title or equations.short_name(name)} <{name}>`"


def _code_cell(functions: list[str]) -> str:
    """Functions; one that other packages have too, under the same name, is named once."""
    by_name = defaultdict(list)
    for name in functions:
        by_name[equations.short_name(name)].append(name)
    shown = []
    for short, (first, *others) in by_name.items():
        package = equations.package_of(first)
        title = short if package in ("", equations.PRIMARY) else f"{package[12:]}.{short}"
        also = [_entry(name, equations.package_of(name)[12:]) for name in others]
        shown.append(" ".join([_entry(first, title), *also]))
    return "<br>".join(shown)


def _test_cell(tests: tuple[str, ...]) -> str:
    shown = []
    for page, name in map(test_place, tests):
        words = name.removeprefix("test_").replace("_", " ")
        shown.append(f'<a href="../{page}.html#{name}">{words}</a>')
    return "<br>".join(shown)


# --- The sources of the tests ------------------------------------------------------------------


def test_pages(app):
    """A page for each file of which a test is linked: these tests and what they use."""
    links = app.equation_links
    if not {INDEX, *(chapter.docname for chapter in links.book.values())} <= app.env.found_docs:
        return  # a draft of a few pages
    files = defaultdict(set)
    for test in links.of_test:
        file, _, name = test.partition("::")
        files[file].add(name)
    highlight = app.builder.highlighter.highlight_block
    for file, names in sorted(files.items()):
        page, _ = test_place(file)
        tests, used = excerpt(ROOT / file, names)
        body = (
            f'<div class="test-source"><h1><code>{file}</code></h1>'
            "<p>The tests of this file that check an equation of the book, and what they use."
            f" Run them with <code>python -m pytest {file}</code>.</p>"
        )
        for name, source in tests.items():
            checked = [
                f'<a href="{app.builder.get_relative_uri(page, links.book[label].docname)}'
                f'#equation-{label}">{_number(app, label)} {equations.in_words(label)}</a>'
                for label in links.of_test[f"{file}::{name}"]
            ]
            body += (
                f'<section id="{name}"><h2><code>{name}</code></h2>'
                f"<p>Checks {', '.join(checked)}.</p>{highlight(source, 'python')}</section>"
            )
        if used:
            code = highlight(used, "python")
            body += f'<section id="used"><h2>What they use</h2>{code}</section>'
        parents = [{"link": app.builder.get_relative_uri(page, INDEX), "title": "Equations"}]
        yield page, {"parents": parents, "title": file, "body": f"{body}</div>"}, "page.html"


def _number(app, label: str) -> str:
    """The number of an equation, as its page has it."""
    docname, number = app.env.get_domain("math").equations[label]
    numbers = app.env.toc_fignumbers.get(docname, {}).get("displaymath", {})
    return ".".join(map(str, numbers.get(f"equation-{label}", (number,))))


# --- Sphinx ------------------------------------------------------------------------------------


def start(app, config) -> None:
    app.equation_links = Links()
    # Changes when anything changes that is written on the chapters' pages.
    written = repr([app.equation_links.functions, app.equation_links.tests])
    config.equation_links_digest = hashlib.sha256(written.encode()).hexdigest()


def check(app, env) -> None:
    """A table that does not fit the book is a warning, and so an error of a strict build."""
    links = app.equation_links
    for problem in equations.problems(links.table, links.book):
        logger.warning("%s: %s", equations.TABLE.relative_to(ROOT), problem)
    if API in env.found_docs:
        objects = env.get_domain("py").objects
        for name in sorted(links.of_function.keys() - objects.keys()):
            logger.warning("%s computes an equation, but is not on the page %s", name, API)


def setup(app) -> None:
    if not equations.TABLE.exists():  # another book, such as those of the tests
        return
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
