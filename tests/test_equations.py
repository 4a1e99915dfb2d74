"""From an equation to its code and its test, and back: the table, and the links on the pages."""

from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import soup
from tools import code_links, equations, excerpts
from tools.excerpts import excerpt

ROOT = Path(__file__).resolve().parent.parent
BOOK = equations.equations()
TABLE = equations.read_table()
FUNCTIONS = equations.functions_of(TABLE)
PAGES = sorted({chapter.docname for chapter in BOOK.values()})


# --- The table ---------------------------------------------------------------------------------


def test_the_table_fits_the_book() -> None:
    found = equations.problems(TABLE, BOOK)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_equations_are_found() -> None:
    """Every label of an equation that the chapters refer to, and more."""
    cited = set()
    for path in (ROOT / "book").glob("[0-9]*.ipynb"):
        cited |= set(re.findall(r"\{eq\}`([\w-]+)`", path.read_text("utf-8")))
    assert len(cited) > 60
    assert cited <= BOOK.keys()
    assert BOOK["eq-write"].labels[0] == "ch-memory"
    assert BOOK["eq-write"].docname == "book/03_outer_product_memory"


def with_row(label: str, **changes) -> equations.Table:
    rows = TABLE.equations | {
        label: replace(TABLE.equations.get(label, equations.Row()), **changes)
    }
    return replace(TABLE, equations=rows)


def without(label: str) -> equations.Table:
    return replace(TABLE, equations={k: v for k, v in TABLE.equations.items() if k != label})


REASONS = {k: v for k, v in TABLE.functions.items() if not k.endswith("identity")}

WRITE = "tests/numpy/test_linear.py::test_worked_numbers_written_and_read"
WRONG = {
    "an equation of the table alone": (
        with_row("eq-of-nothing", why="There is none."),
        "eq-of-nothing: no such equation",
    ),
    "no function": (without("eq-crosstalk"), "eq-crosstalk: neither a function nor a reason"),
    "an empty reason": (with_row("eq-crosstalk", why=" "), "eq-crosstalk: neither a function"),
    "no test": (with_row("eq-write", tests=()), "eq-write: neither a test nor a reason"),
    "a test that is none": (
        with_row("eq-write", tests=(f"{WRITE}_",)),
        f"eq-write: no such test: {WRITE}_",
    ),
    "a file that is none": (
        with_row("eq-write", tests=("tests/numpy/test_nothing.py::test_write",)),
        "eq-write: no such test: tests/numpy/test_nothing.py::test_write",
    ),
    "a helper of a test": (
        with_row("eq-write", tests=("tests/numpy/test_linear.py::draw",)),
        "eq-write: no such test: tests/numpy/test_linear.py::draw",
    ),
    "a function that is none": (
        with_row("eq-cost-linear", functions=("lesson_code.costs.operations_of_nothing",)),
        "eq-cost-linear: no such function: lesson_code.costs.operations_of_nothing",
    ),
    "a module that is none": (
        with_row("eq-cost-linear", functions=("lesson_code.nothing.at_all",)),
        "eq-cost-linear: no such function: lesson_code.nothing.at_all",
    ),
    "a reason for what is there": (
        with_row("eq-write", why="It is too short."),
        "eq-write: says why something is missing",
    ),
    "what a docstring says": (
        with_row("eq-write", functions=("lesson_code.numpy.LinearAttentionState.write",)),
        "the docstring of lesson_code.numpy.LinearAttentionState.write says so already",
    ),
    "a function without equation": (
        replace(TABLE, functions=REASONS),
        "lesson_code.numpy.identity: neither an equation nor a reason",
    ),
    "a function with a needless reason": (
        replace(TABLE, functions=TABLE.functions | {"lesson_code.numpy.wkv": "It is long."}),
        "lesson_code.numpy.wkv: says why it has no equation, but has one",
    ),
    "a reason for no function": (
        replace(TABLE, functions=TABLE.functions | {"lesson_code.numpy.nothing": "None."}),
        "lesson_code.numpy.nothing: no such function",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_refused(case: str) -> None:
    table, words = WRONG[case]
    found = equations.problems(table, BOOK)
    assert any(words in problem for problem in found), found
    assert len(found) <= 3  # and nothing else is refused


def test_a_field_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "equations.yml"
    path.write_text("equations:\n  eq-write: {test: a}\nfunctions: {}\n")
    with pytest.raises(ValueError, match="^eq-write: expected functions, tests or why, not"):
        equations.read_table(path)


def test_docstrings_cite_only_equations_of_the_book() -> None:
    sources = [path for path in (ROOT / "lesson_code").rglob("*.py")]
    cited = {
        label for path in sources for label in equations.CITED.findall(path.read_text("utf-8"))
    }
    assert len(cited) > 50
    assert cited <= BOOK.keys()


# --- Excerpts of tests -------------------------------------------------------------------------


def linked_tests() -> list[tuple[str, frozenset[str]]]:
    files: dict[str, set[str]] = {}
    for row in TABLE.equations.values():
        for test in row.tests:
            file, _, name = test.partition("::")
            files.setdefault(file, set()).add(name)
    return [(file, frozenset(names)) for file, names in sorted(files.items())]


@pytest.mark.parametrize(("file", "names"), linked_tests())
def test_an_excerpt_has_all_that_it_uses(file: str, names: frozenset[str]) -> None:
    """No name of the file is used without being there; no test is there that was not asked for."""
    tests, used = excerpt(ROOT / file, set(names))
    assert tests.keys() == names
    shown = "\n\n".join([used, *tests.values()])
    tree = ast.parse(shown)
    whole = ast.parse((ROOT / file).read_text("utf-8"))
    of_file = set().union(*map(excerpts._binds, whole.body))
    there = set().union(*map(excerpts._binds, tree.body))
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used & of_file <= there
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in tests if name.startswith("test_")} == names


def test_an_excerpt_follows_fixtures_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        '''"""Tests."""

import math
import os

import pytest

# What is left
UNUSED = 1


def deep():
    return math.pi


# A comment of the helper
def helper():
    return deep()


@pytest.fixture(name="given")
def fixture_of_it():
    return helper()


@pytest.fixture(autouse=True)
def always():
    yield


def test_other():
    assert os.sep


@pytest.mark.parametrize("x", [1])
def test_this(given, x):
    assert given > x
'''
    )
    tests, used = excerpt(path, {"test_this"})
    assert list(tests) == ["test_this"]
    assert tests["test_this"].startswith("@pytest.mark.parametrize")
    for there in ("import math", "import pytest", "def deep", "# A comment of", "fixture_of_it"):
        assert there in used
    assert "def always" in used
    for left in ("import os", "UNUSED", "test_other", "What is left"):
        assert left not in used


# --- The pages ---------------------------------------------------------------------------------


@cache
def places_of(path: Path) -> dict:
    """The elements of a page that have an id."""
    return {tag["id"]: tag for tag in soup(path).find_all(id=True)}


def target(site: Path, page: str, link: str):
    """The file that a link leads to, and its place there."""
    parts = urlsplit(link)
    file = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path))
    return file, places_of(site / file).get(parts.fragment)


@pytest.mark.parametrize("page", PAGES)
def test_every_equation_has_its_links(site: Path, page: str) -> None:
    name = f"{page}.html"
    labels = [label for label in BOOK if BOOK[label].docname == page]
    boxes = soup(site / name).select("div.math > .eq-side")
    assert len(boxes) == len(labels)
    for label, box in zip(labels, boxes, strict=True):
        number = box.select_one(".eqno").get_text().strip("()#")
        leads = {"code": [], "test": [], "no code": []}
        for part in box.select(".eq-links > *"):
            opener = part.summary or part
            words = opener.get_text()
            assert opener["aria-label"].startswith(f"{words} of equation {number}: ")
            leads[words] = [part["href"]] if part.name == "a" else [a["href"] for a in part("a")]
        places = [
            (file, place["id"]) for file, place in (target(site, name, x) for x in leads["code"])
        ]
        functions = FUNCTIONS.get(label, [])
        assert sorted(places) == sorted(("book/api.html", function) for function in functions)
        for link, test in zip(leads["test"], TABLE.equations[label].tests, strict=True):
            file, place = target(site, name, link)
            assert file == test.partition("::")[0].replace("tests/", "_tests/").replace(
                ".py", ".html"
            )
            assert f"def {test.partition('::')[2]}(" in place.get_text()
            back = [target(site, file, a["href"]) for a in place.select("p a")]
            assert (name, f"equation-{label}") in [(f, p["id"]) for f, p in back]
        for link in leads["no code"]:
            file, place = target(site, name, link)
            assert file == "book/equations.html" and place.find_parent("tr")
        assert any(leads.values())


def test_every_function_leads_to_its_equations(site: Path) -> None:
    api = places_of(site / "book/api.html")
    functions = {name for names in FUNCTIONS.values() for name in names}
    assert len(functions) > 80
    for function in functions:
        entry = api[function].find_parent("dl")
        links = [a["href"] for a in entry.select("a.internal")]
        for label in (label for label in FUNCTIONS if function in FUNCTIONS[label]):
            chapter = BOOK[label]
            page = f"{chapter.path.stem}.html"
            assert f"{page}#equation-{label}" in links, (function, label)
            assert f"{page}#{chapter.labels[0]}" in links, (function, label)


def test_what_has_no_equation_has_the_chapter_that_uses_it_first(site: Path) -> None:
    api = places_of(site / "book/api.html")
    for function, chapter in (
        ("lesson_code.checks.check_causal", "01_softmax_attention.html#ch-softmax"),
        ("lesson_code.measure.seconds", "08_causal_scans.html#ch-scans"),
        ("lesson_code.data.tasks.in_context_regression", "27_recall.html#ch-recall"),
        ("lesson_code.numpy.identity", "06_random_features.html#ch-random-features"),
    ):
        box = api[function].find_parent("dl").select_one(".in-the-book")
        assert [a["href"] for a in box("a")] == [chapter]


def test_nothing_is_said_twice_on_the_package_page(site: Path) -> None:
    for box in soup(site / "book/api.html").select(".in-the-book"):
        links = [a["href"] for a in box("a")]
        entry = box.find_parent("dl")
        own = [a for a in entry.select("a.internal") if a.find_parent("dl", "py") is entry]
        rest = [a["href"] for a in own]
        assert all(rest.count(link) == 1 for link in links), box


def test_the_index_has_every_equation(site: Path) -> None:
    page = soup(site / "book/equations.html")
    rows = {row.span["id"]: row for row in page.select("tr:has(span[id^=row-])")}
    assert list(rows) == [f"row-{label}" for label in BOOK]
    for label, chapter in BOOK.items():
        first, code, test = rows[f"row-{label}"]("td")
        assert first.a["href"] == f"{chapter.path.stem}.html#equation-{label}"
        table = TABLE.equations.get(label, equations.Row())
        shown = [a["href"].partition("#")[2] for a in code("a")]
        if label in FUNCTIONS:
            assert sorted(shown) == sorted(FUNCTIONS[label])
        else:
            assert len(code.get_text()) > 20  # says why
        names = [a["href"].partition("#")[2] for a in test("a")]
        assert names == [name.partition("::")[2] for name in table.tests]
    for name in TABLE.functions:
        assert page.find("a", href=f"api.html#{name}")


def test_only_tests_that_are_linked_are_in_the_site(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in (site / "_tests").rglob("*.html")}
    linked = {
        file.replace("tests/", "_tests/").replace(".py", ".html") for file, _ in linked_tests()
    }
    assert built == linked
    for file, names in linked_tests():
        page = soup(site / file.replace("tests/", "_tests/").replace(".py", ".html"))
        assert set(re.findall(r"def (test_\w+)\(", page.get_text())) == names


def test_the_table_is_searched_and_lists_of_links_close(site: Path, browser) -> None:
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "book/equations.html").as_uri())
    rows = page.locator(".equation-index tbody tr:visible")
    everything = rows.count()
    assert everything == len(BOOK) + len(TABLE.functions)
    page.fill("#equation-filter", "Chunkwise DELTA")
    found = rows.all_text_contents()
    assert 0 < len(found) < 10
    assert any("gated delta chunkwise" in text for text in found)
    page.fill("#equation-filter", "no such words")
    assert rows.count() == 0
    page.fill("#equation-filter", "")
    assert rows.count() == everything

    page.goto((site / "book/03_outer_product_memory.html").as_uri())
    page.evaluate(
        "async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }"
    )
    summary = page.locator("#equation-eq-write summary").first
    height = page.evaluate("document.documentElement.scrollHeight")
    summary.focus()
    page.keyboard.press("Enter")
    opened = page.locator(".eq-links details[open]")
    assert opened.count() == 1 and opened.locator("a").first.is_visible()
    assert page.evaluate("document.documentElement.scrollHeight") == height
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    assert opened.count() == 0
    assert page.evaluate("document.activeElement.matches('summary')")
    summary.click()
    page.locator(".bd-article h1").click()
    assert opened.count() == 0
    page.emulate_media(media="print")
    assert not summary.is_visible()
    page.close()
    assert not errors


# --- Names in code -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_names_in_code_lead_to_the_package(site: Path, page: str) -> None:
    links = soup(site / f"{page}.html").select(".cell_input a.code-link")
    assert len(links) > 8
    for link in links:
        file, place = target(site, f"{page}.html", link["href"])
        assert file == "book/api.html" and place is not None
        # The link is the end of the name that it leads to, or another name for all of it.
        name = urlsplit(link["href"]).fragment.removeprefix("module-")
        assert link["title"].startswith(name)


def test_code_reads_as_before(site: Path) -> None:
    """Without its links a cell is the cell of the notebook."""
    import nbformat

    notebook = nbformat.read(ROOT / "book/08_causal_scans.ipynb", as_version=4)
    sources = [cell.source.strip() for cell in notebook.cells if cell.cell_type == "code"]
    blocks = soup(site / "book/08_causal_scans.html").select(".cell_input pre")
    shown = [block.get_text().strip() for block in blocks]
    assert len(shown) > 10
    assert set(shown) <= set(sources)


class Places(dict):
    """What a domain of Sphinx knows, for names that are really there."""

    @staticmethod
    def of(*names: str) -> dict:
        from types import SimpleNamespace

        return {name: SimpleNamespace(docname="api", node_id=name, aliased=False) for name in names}


ENTRIES = code_links.Entries(
    Places.of(
        "lesson_code.checks",
        "lesson_code.checks.check_same",
        "lesson_code.numpy.identity",
        "lesson_code.numpy.linear_attention",
        "lesson_code.numpy.LinearAttentionState",
        "lesson_code.numpy.LinearAttentionState.zeros",
        "lesson_code.numpy.LinearAttentionState.write",
        "lesson_code.numpy.LinearAttentionState.read",
        "lesson_code.torch.logistic_mixture",
    )
)


def linked(*cells: str) -> list[list[tuple[str, str]]]:
    """The links of each cell: what they stand on, and where they lead."""
    known: dict = {}
    return [
        [
            (cell[begin:end], entry.name.removeprefix("lesson_code."))
            for begin, end, entry in code_links.places(cell, ENTRIES.find, known)
        ]
        for cell in cells
    ]


STATE = "numpy.LinearAttentionState"


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # Imported in an earlier cell, also under another name.
        (
            ["import lesson_code.numpy as ln", "ln.identity(1)"],
            [[], [("ln.identity", "numpy.identity")]],
        ),
        (
            ["from lesson_code import checks, plots", "plots.x(); checks.check_same(f, g)"],
            [[("checks", "checks")], [("checks.check_same", "checks.check_same")]],
        ),
        (
            ["from lesson_code.numpy import identity as phi\nphi"],
            [[("identity", "numpy.identity"), ("phi", "numpy.identity")]],
        ),
        # Where it was defined, and not where it is documented.
        (
            ["from lesson_code.torch.logistics import logistic_mixture"],
            [[("logistic_mixture", "torch.logistic_mixture")]],
        ),
        # A name that is bound anew is another thing; inside a function only there.
        (
            ["from lesson_code.numpy import identity", "identity = 3", "identity(2)"],
            [[("identity", "numpy.identity")], [], []],
        ),
        (
            ["from lesson_code.numpy import identity", "def f(identity): identity", "identity"],
            [[("identity", "numpy.identity")], [], [("identity", "numpy.identity")]],
        ),
        (
            ["from lesson_code.numpy import identity", "[identity for identity in x]", "identity"],
            [[("identity", "numpy.identity")], [], [("identity", "numpy.identity")]],
        ),
        # Methods of what a call returns, where annotations tell.
        (
            [
                "from lesson_code.numpy import LinearAttentionState",
                "s = LinearAttentionState.zeros(2, 2)\ns = s.write(k, v)\ns.read(q); s",
            ],
            [
                [("LinearAttentionState", STATE)],
                [
                    ("LinearAttentionState.zeros", f"{STATE}.zeros"),
                    ("s.write", f"{STATE}.write"),
                    ("s.read", f"{STATE}.read"),
                ],
            ],
        ),
        # Columns are counted in bytes; magics are no Python, and %% begins a program of its own.
        (
            ["from lesson_code import checks", 'f("N²"); checks.check_same', "%time\nchecks"],
            [[("checks", "checks")], [("checks.check_same", "checks.check_same")]]
            + [[("checks", "checks")]],
        ),
        (
            ["from lesson_code import checks", "%%writefile a.py\nchecks"],
            [[("checks", "checks")], []],
        ),
        (["this is no Python", "import numpy as np\nnp.linalg.norm(x)"], [[], []]),
    ],
)
def test_what_names_stand_for(cells: list[str], expected: list) -> None:
    assert linked(*cells) == expected


def test_links_are_put_around_whole_tokens() -> None:
    code = (
        '<span></span><span class="kn">import</span><span class="w"> </span>'
        '<span class="nn">lesson_code.numpy</span><span class="w"> </span><span class="k">as</span>'
        '<span class="w"> </span><span class="nn">ln</span>\n'
        '<span class="n">ln</span><span class="o">.</span><span class="n">identity</span>'
        '<span class="p">(</span><span class="n">a</span><span class="o">&lt;</span>'
        '<span class="n">ln</span><span class="o">.</span><span class="n">identity</span>'
        '<span class="p">)</span>\n'
    )
    found = code_links.link(code, ENTRIES.find, {}, lambda entry: f"{entry.docname}#{entry.name}")
    assert re.sub("</?a[^>]*>", "", found) == code
    links = re.findall("<a ([^>]*)>(.*?)</a>", found)
    assert len(links) == 2
    assert all(re.sub("<[^>]*>", "", text) == "ln.identity" for _, text in links)
    assert all('href="api#lesson_code.numpy.identity"' in attributes for attributes, _ in links)
    # The keyboard stops at a name once in each cell.
    assert ["tabindex" in attributes for attributes, _ in links] == [False, True]
