"""Pages are light and do not jump: what one transfers, when it stands, and what moves then.

test_site.py visits all pages on a wide screen; here are the checks, and some pages on a phone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.visits import NARROW, WIDE, Facts, GzipHandler, problems, visit
from tools import notebooks
from tools.light_pages import FORMULA

CHAPTERS = [f"book/{path.stem}.html" for path in notebooks.NOTEBOOKS]
MOST_BYTES = 1_500_000
MOST_LATE = 1.2  # times what the page takes to load, which the machine makes long or short with it
MOST_SHIFT = 0.1


def is_light(facts: Facts) -> list[str]:
    total = sum(facts.sizes.values())
    if total <= MOST_BYTES:
        return []
    largest = sorted(facts.sizes.items(), key=lambda item: -item[1])[:8]
    return [f"{total} bytes, the largest: {largest}"]


def is_early(facts: Facts) -> list[str]:
    late = facts.seen["paint"] / facts.seen["load"]
    if late <= MOST_LATE:
        return []
    return [f"the largest paint comes after {late:.1f} times the time to load"]


def stands_still(facts: Facts) -> list[str]:
    if facts.seen["shift"] <= MOST_SHIFT:
        return []
    return [f"the layout shifts by {facts.seen['shift']:.3f}: {facts.seen['moved'][:8]}"]


def begins_no_line_with_punctuation(facts: Facts) -> list[str]:
    return facts.loose


LIGHT = [is_light, is_early, stands_still, begins_no_line_with_punctuation]


def visit_calmly(context, root: str, name: str, screen=WIDE, **options: object) -> Facts:
    """Visit a page, and up to twice more if it is late or jumps: on a busy machine it may, once."""
    facts = visit(context, root, name, screen=screen, **options)
    for _ in range(2):
        if problems(facts, [is_early, stands_still]):
            facts.seen = visit(context, root, name, screen=screen).seen
    return facts


@pytest.mark.parametrize("page", ["book/index.html", CHAPTERS[0], CHAPTERS[9]])
def test_it_stands_still_on_a_phone(site: Path, serve: Callable, browser, page: str) -> None:
    facts = visit_calmly(browser, serve(site, GzipHandler), page, NARROW)
    assert not problems(facts, LIGHT)


def test_icons_are_loaded_once(site: Path) -> None:
    """As a font; the script with all of them once more is half a megabyte."""
    for page in site.rglob("[!_]*/*.html"):
        assert "fontawesome.js" not in page.read_text(encoding="utf-8"), page


def test_pictures_say_how_large_they_are(site: Path) -> None:
    for page in CHAPTERS:
        for image in re.findall(r"<img[^>]*_images/[^>]*>", (site / page).read_text("utf-8")):
            assert re.search(r' width="\d+" height="\d+"', image), f"{page}: {image}"
    # Of a drawing that does not say it, the first size inside would be taken.
    for path in site.glob("_images/*.svg"):
        assert {"width", "height"} <= ElementTree.parse(path).getroot().attrib.keys(), path


def test_what_is_kept_together() -> None:
    formula = '<span class="math notranslate nohighlight">\\(a &lt; b\\)</span>'
    found = FORMULA.sub(r"<i>\1\2</i>", f"<p>{formula}), {formula} and {formula}.</p>")
    assert found == f"<p><i>{formula}),</i> {formula} and <i>{formula}.</i></p>"


# --- The measurements themselves ---------------------------------------------------------------

PAGE = """<!doctype html><html lang="en"><title>A page</title><link rel="icon" href="data:,">
<h1>A page</h1><p>Some text that stands where it stands.</p>LINE</html>"""
LATE = """<script>setTimeout(() => document.body.SOMEWHERE(Object.assign(
  document.createElement("p"), {textContent: "late ".repeat(1500)})), WHEN)</script>"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("<p>Fine.</p>", ""),
        ('<script src="large.js"></script>', "bytes"),
        (LATE.replace("SOMEWHERE", "append").replace("WHEN", "2300"), "largest paint"),
        (LATE.replace("SOMEWHERE", "prepend").replace("WHEN", "1000"), "shifts"),
    ],
    ids=["fine", "heavy", "late", "jumping"],
)
def test_the_measurements_see_it(
    tmp_path: Path, serve: Callable, browser, line: str, expected: str
) -> None:
    wait = "<script>const end = new Promise(done => setTimeout(done, 2600));"
    wait += "window.MathJax = {startup: {promise: end}}</script>" if expected else "</script>"
    (tmp_path / "index.html").write_text(PAGE.replace("LINE", line + wait), encoding="utf-8")
    # Random digits pack badly.
    digits = random.Random(0).getrandbits(8 * MOST_BYTES)
    (tmp_path / "large.js").write_text(f"// {digits:x}", encoding="utf-8")
    said = problems(visit(browser, serve(tmp_path, GzipHandler), "index.html"), LIGHT)
    assert expected in " ".join(said) if expected else not said


def test_text_is_packed(tmp_path: Path, serve: Callable, browser) -> None:
    (tmp_path / "index.html").write_text(PAGE.replace("LINE", "<p>same</p>" * 20_000), "utf-8")
    facts = visit(browser, serve(tmp_path, GzipHandler), "index.html")
    assert sum(facts.sizes.values()) < 5_000
