"""Pages are light and do not jump: what a chapter transfers, when it stands, and what moves then.

Text is served with gzip, as by the host of the published site.
"""

from __future__ import annotations

import gzip
import http.server
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from tools import notebooks
from tools.light_pages import FORMULA

CHAPTERS = [f"book/{path.stem}.html" for path in notebooks.NOTEBOOKS]
TEXT = {".html", ".css", ".js", ".svg", ".json"}
WIDE, NARROW = 1280, 390
MOST_BYTES = 1_500_000
MOST_LATE = 1.2  # times what the page takes to load, which the machine makes long or short with it
MOST_SHIFT = 0.1

OBSERVE = """
const moved = [];
window.seen = {paint: 0, load: 0, shift: 0, moved};
new PerformanceObserver(list => {
  for (const entry of list.getEntries()) seen.paint = entry.startTime;
}).observe({type: "largest-contentful-paint", buffered: true});
new PerformanceObserver(list => {
  for (const entry of list.getEntries())
    if (!entry.hadRecentInput) {
      seen.shift += entry.value;
      for (const {node} of entry.sources)
        moved.push(`${entry.value.toFixed(3)} ${(node?.outerHTML ?? node?.data)?.slice(0, 99)}`);
    }
}).observe({type: "layout-shift", buffered: true});
"""
# Down the page a screen at a time, as a reader would, so that what loads late has loaded.
SCROLL = """async () => {
  await window.MathJax?.startup?.promise;
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 15)));
  for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight) {
    scrollTo({top: y, behavior: "instant"});
    await frame();
  }
  await Promise.all([...document.images].map(image => image.complete ||
    new Promise(done => image.onload = image.onerror = done)));
  await frame();
  const [loading] = performance.getEntriesByType("navigation");
  const [first] = performance.getEntriesByName("first-contentful-paint");
  seen.load = Math.max(loading.loadEventEnd, first?.startTime ?? 0);
  return seen;
}"""
# What stands at the beginning of a line, and belongs to the formula before it.
LOOSE = """async () => {
  await window.MathJax?.startup?.promise;
  const loose = [];
  for (const formula of document.querySelectorAll("span.math:has(mjx-container)")) {
    const text = formula.nextSibling;
    if (text?.nodeType !== Node.TEXT_NODE || !/^[,.;:!?)\\]]/.test(text.data)) continue;
    const range = document.createRange();
    range.setStart(text, 0);
    range.setEnd(text, 1);
    if (range.getBoundingClientRect().left < formula.getBoundingClientRect().right - 1)
      loose.push(formula.parentElement.closest("p, li, td, dd")?.textContent.slice(0, 80));
  }
  return loose;
}"""


class GzipHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files; text is packed, once for all requests."""

    packed: ClassVar[dict[Path, bytes]] = {}

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not (path.is_file() and path.suffix in TEXT):
            super().do_GET()
            return
        if path not in self.packed:
            self.packed[path] = gzip.compress(path.read_bytes(), 6)
        body = self.packed[path]
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def measure(browser, address: str, width: int) -> dict:
    """Bytes of a first visit, how late the largest paint came, and what shifted."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.add_init_script(OBSERVE)
    finished = []
    page.on("requestfinished", lambda request: finished.append(request))
    page.goto(address, wait_until="load")
    seen = page.evaluate(SCROLL)
    sizes = {r.url: r.sizes() for r in finished if r.url.startswith("http")}
    context.close()
    each = {url: s["responseBodySize"] + s["responseHeadersSize"] for url, s in sizes.items()}
    return {
        "bytes": sum(each.values()),
        "largest": sorted(((size, url) for url, size in each.items()), reverse=True)[:8],
        "late": seen["paint"] / seen["load"],
        "shift": seen["shift"],
        "moved": seen["moved"],
    }


def problems(found: dict) -> list[str]:
    """What a measurement has too much of."""
    said = []
    if found["bytes"] > MOST_BYTES:
        largest = ", ".join(f"{url} {size}" for size, url in found["largest"])
        said.append(f"{found['bytes']} bytes, the largest: {largest}")
    if found["late"] > MOST_LATE:
        said.append(f"the largest paint comes after {found['late']:.1f} times the time to load")
    if found["shift"] > MOST_SHIFT:
        said.append(f"the layout shifts by {found['shift']:.3f}: {found['moved'][:8]}")
    return said


def measure_calmly(browser, address: str, width: int) -> list[str]:
    """The problems that three visits share: a busy machine is late, but not each time."""
    for _ in range(3):
        said = problems(measure(browser, address, width))
        if not said:
            break
    return said


@pytest.fixture(scope="module")
def address(site: Path, serve: Callable) -> str:
    return serve(site, GzipHandler)


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_is_light_and_stands_still(address: str, browser, page: str) -> None:
    assert not measure_calmly(browser, f"{address}/{page}", WIDE)


@pytest.mark.parametrize("page", ["book/index.html", CHAPTERS[0], CHAPTERS[9]])
def test_it_stands_still_on_a_phone(address: str, browser, page: str) -> None:
    assert not measure_calmly(browser, f"{address}/{page}", NARROW)


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


def test_no_line_begins_with_punctuation(site: Path, browser) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    for path in notebooks.NOTEBOOKS[::4]:
        page.goto((site / "book" / f"{path.stem}.html").as_uri())
        page.wait_for_selector("span.together mjx-container", state="attached")
        assert page.evaluate(LOOSE) == [], path.stem
        assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


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
    said = problems(measure(browser, f"{serve(tmp_path, GzipHandler)}/index.html", WIDE))
    assert expected in " ".join(said) if expected else not said


def test_text_is_packed(tmp_path: Path, serve: Callable, browser) -> None:
    (tmp_path / "index.html").write_text(PAGE.replace("LINE", "<p>same</p>" * 20_000), "utf-8")
    assert measure(browser, f"{serve(tmp_path, GzipHandler)}/index.html", WIDE)["bytes"] < 5_000
