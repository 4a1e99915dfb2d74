"""One visit of a built page, and all that it shows: each page is loaded once for all checks.

It is loaded as a reader's first: served, on a wide screen, and scrolled to its end. Then it is made
as narrow as a phone's, and put on paper; last, axe looks at it in both themes.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from axe_playwright_python.base import AXE_SCRIPT

from tests.conftest import QuietHandler

WIDE, NARROW = (1280, 900), (390, 844)
PAPER = (718, 1000)  # the width of an A4 page between its margins, in CSS pixels

# --- Loading -----------------------------------------------------------------------------------

TEXT = {".html", ".css", ".js", ".svg", ".json"}


class GzipHandler(QuietHandler):
    """Serves files as the published site's host does: text is packed, once for all requests."""

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
        self.send_header("Cache-Control", "max-age=600")
        self.end_headers()
        self.wfile.write(body)


OBSERVE = """
const moved = [];
window.seen = {paint: 0, shift: 0, moved};
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
# Down to the end, as a reader would, so that what loads late has loaded; a browser loads what is a
# screen away. On the longest pages, which have no pictures, in larger steps.
SCROLL = """async () => {
  await window.MathJax?.startup?.promise;
  const wait = time => new Promise(done => setTimeout(done, time));
  const frame = () => new Promise(done => requestAnimationFrame(() => wait(15).then(done)));
  await frame();
  const {paint} = seen;  // what is scrolled to is painted later, and may be larger
  const height = document.documentElement.scrollHeight;
  const step = Math.max(2 * innerHeight, height / 30);
  for (let y = 0; y < height + step; y += step) {
    scrollTo({top: y, behavior: "instant"});
    await frame();
  }
  const loaded = [...document.images].map(image => image.complete ||
    new Promise(done => image.onload = image.onerror = done));
  await Promise.race([Promise.all(loaded), wait(10_000)]);
  await frame();
  const [loading] = performance.getEntriesByType("navigation");
  const [first] = performance.getEntriesByName("first-contentful-paint");
  return {...seen, paint, load: Math.max(loading.loadEventEnd, first?.startTime ?? 0)};
}"""


# --- What stands on the page --------------------------------------------------------------------

# Text in elements that show source code, and what MathJax has drawn, is no prose.
GATHER = r"""async () => {
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
# What stands at the beginning of a line, and belongs to the formula before it.
LOOSE = """() => {
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
# What is on the page and cannot be read on paper. Titles of folded notes stay; controls go.
LOST = r"""() => {
  const lost = [], article = document.querySelector("article");
  if (!article) return document.querySelector("#search-results") ? [] : ["no article"];
  const say = (what, node) => lost.push(`${what}: ${(node.outerHTML ?? node.data).slice(0, 120)}`);
  const width = innerWidth;
  // The title is printed above the list of contents, outside of the article.
  const controls = `h1, button, summary, script, style, svg, mjx-assistive-mml, .headerlink,
    .copybtn, .explorable, .prev-next-area, .unseen, .bd-header-article, .eq-links`;
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement;
    if (!text.data.trim() || parent.closest(controls)) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const boxes = [...range.getClientRects()].filter(box => box.width && box.height);
    const style = getComputedStyle(parent);
    const seen = style.visibility === "visible" && parent.checkVisibility({opacityProperty: true});
    if (!boxes.length || !seen) say("hidden", parent);
    else if (Math.max(...boxes.map(box => box.right)) > width + 1) say("beside the paper", parent);
  }
  for (const node of article.querySelectorAll("pre, .cell_output, div.math, table, figure")) {
    if (node.closest(controls)) continue;
    const {overflowX} = getComputedStyle(node);
    if (overflowX !== "visible" && node.scrollWidth > node.clientWidth + 1) say("cut off", node);
    if (node.getBoundingClientRect().right > width + 1) say("too wide", node);
  }
  for (const formula of article.querySelectorAll("mjx-container > svg"))
    if (formula.getBoundingClientRect().right > width + 1) say("a formula too wide", formula);
  for (const picture of article.querySelectorAll(".cell_output img, figure img"))
    if (!picture.getBoundingClientRect().width) say("no picture", picture);
  const noUse = document.querySelectorAll(`.bd-sidebar-primary, .bd-sidebar-secondary, .explorable,
    .bd-header-article, .toggle-button, .btn-legend-button, footer`);
  for (const node of noUse)
    if (node.checkVisibility() && node.getBoundingClientRect().height > 1) say("no use", node);
  return lost;
}"""


# --- What axe is asked --------------------------------------------------------------------------

IN_THEME = "theme => document.documentElement.dataset.theme === theme"
RUN_AXE = """([context, options]) =>
  axe.run(context ?? document, {resultTypes: ["violations"], preload: false, ...options})
    .then(results => results.violations)"""
# The colors that a rule compares follow from an element's own style, that of the text around it,
# and what is painted below. The site has tens of thousands of texts and some hundred such looks:
# three texts of each are tried. Words that cannot be seen do not stand for words that can.
OF_LOOKS = ["color-contrast", "link-in-text-block"]
MARK_LOOKS = r"""([tried, mark]) => {
  const below = new Map(), nothing = "rgba(0, 0, 0, 0),none,1,none,normal,static,auto";
  const ground = node => {
    if (!node) return "";
    if (!below.has(node)) {
      const s = getComputedStyle(node);
      const own = [s.backgroundColor, s.backgroundImage, s.opacity, s.filter, s.mixBlendMode,
        s.position, s.zIndex].join();
      below.set(node, ground(node.parentElement) + (own === nothing ? "" : `${own};`));
    }
    return below.get(node);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.parentElement, link = text.closest("a[href]");
    if (!walker.currentNode.data.trim() || !text.checkVisibility({visibilityProperty: true}))
      continue;
    const {width, height} = text.getBoundingClientRect(), s = getComputedStyle(text);
    const look = [ground(text), s.color, s.fontSize, s.fontWeight, s.textShadow,
      s.webkitTextFillColor, width > 1 && height > 1];
    if (link) {
      const parent = link.parentElement, around = getComputedStyle(parent);
      const l = getComputedStyle(link);
      const words = [...parent.childNodes].map(node => node.data?.trim() ?? "").join("");
      look.push(l.color, l.textDecorationLine, l.borderBottomStyle, around.color, around.fontWeight,
        words.length > link.textContent.length);  // else it is no link in a text
    }
    const times = tried[look] ?? 0;
    if (times < 3) (link ?? text).setAttribute(mark, "");
    tried[look] = times + 1;
  }
  return tried;
}"""
# What remains is tried on every page. No mistake in regions is serious.
OF_PAGES = {"rules": {"region": {"enabled": False}}}
# Of the rules above, axe tries only what is marked for a theme.
ONLY_MARKED = """mark => axe.configure({rules: [
  {id: "color-contrast", selector: `:is([${mark}], [${mark}] *)`},
  {id: "link-in-text-block", selector: `a[href]:is([${mark}], [${mark}] *)`},
]})"""
# MathJax draws all formulas in one way, of so many elements that they are most of a page; Sphinx
# describes all functions in one way.
FEW_ALIKE = """() => {
  const beyond = (few, selector) => [...document.querySelectorAll(selector)].slice(few);
  beyond(3, "mjx-container").forEach(formula => formula.replaceWith("x"));
  beyond(30, "dl.py").forEach(description => description.remove());
}"""
# Code has an element for each word. Words whose looks are still to be tried stay.
PLAIN_CODE = """() => [...document.querySelectorAll("pre")].slice(3)
  .filter(code => !code.querySelector("[data-light], [data-dark]"))
  .forEach(code => code.textContent = code.textContent)"""
# The looks of words follow from what they stand in, and axe reads all that there is. Explorables
# stay whole, as they draw themselves anew.
MARKED_ALONE = """mark => {
  const around = new Set();
  for (let node of document.querySelectorAll(`[${mark}]`))
    for (; node; node = node.parentElement) around.add(node);
  const strip = node => {
    if (node.matches(`[${mark}], .explorable`)) return;
    for (const child of [...node.children])
      if (around.has(child)) strip(child);
      else if (!child.matches("link, style, script, .explorable")) child.remove();
  };
  strip(document.body);
}"""


# --- The visit ---------------------------------------------------------------------------------


@dataclass
class Facts:
    """What one visit of a page has shown."""

    address: str
    requests: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes, of what a server has sent
    seen: dict = field(default_factory=dict)  # while it was loaded
    content: dict = field(default_factory=dict)
    widths: list[tuple] = field(default_factory=list)  # of a screen, and what MEASURE tells there
    loose: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def problems(facts: Facts, checks: Iterable[Callable[[Facts], list[str]]]) -> list[str]:
    return [f"{check.__name__}: {problem}" for check in checks for problem in check(facts)]


def visit(
    context,
    root: str,
    name: str,
    *,
    screen: tuple[int, int] = WIDE,
    tried: dict[str, int] | None = None,
) -> Facts:
    """Load a page and look at it; on paper and by axe where the looks are told that axe has tried.

    ``context`` is a browser, for which the visit is the first, or a context of one.
    """
    facts = Facts(root)
    page = context.new_page()
    resize(page, screen)
    page.add_init_script(OBSERVE)
    listen(page, facts)
    try:
        page.goto(f"{root}/{name}", wait_until="load")
        facts.seen = page.evaluate(SCROLL)
        page.emulate_media(reduced_motion="reduce")
        facts.content = page.evaluate(GATHER)
        facts.widths.append((screen[0], *page.evaluate(MEASURE)))
        if screen == WIDE:
            resize(page, NARROW)
            facts.widths.append((NARROW[0], *page.evaluate(MEASURE)))
        facts.loose = page.evaluate(LOOSE)
        if tried is not None:
            resize(page, PAPER)
            page.emulate_media(media="print")
            facts.lost = page.evaluate(LOST)
            page.evaluate(FEW_ALIKE)
            page.emulate_media(media="screen")
            resize(page, WIDE)
            facts.violations = look_at(page, tried)
    finally:
        page.close()
    return facts


def resize(page, screen: tuple[int, int]) -> None:
    page.set_viewport_size(dict(zip(("width", "height"), screen, strict=True)))


def listen(page, facts: Facts) -> None:
    def note_response(response) -> None:
        facts.sizes[response.url] = int(response.headers.get("content-length", 0))
        if response.status >= 400:
            facts.failures.append(f"{response.url}: status {response.status}")

    def note_message(message) -> None:
        if message.type == "error":
            facts.errors.append(message.text)

    page.on("request", lambda request: facts.requests.append(request.url))
    page.on("websocket", lambda socket: facts.requests.append(socket.url))
    page.on(
        "requestfailed", lambda request: facts.failures.append(f"{request.url}: {request.failure}")
    )
    page.on("response", note_response)
    page.on("pageerror", lambda error: facts.errors.append(str(error)))
    page.on("console", note_message)


def look_at(page, tried: dict[str, int]) -> list[str]:
    """What axe finds: in looks not tried before, in both themes, and in the whole page."""
    page.evaluate(AXE_SCRIPT)
    page.add_style_tag(content="* { transition: none !important }")

    def turn(theme: str) -> None:
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(IN_THEME, arg=theme, timeout=10_000)

    for theme in ("light", "dark"):
        turn(theme)
        tried |= page.evaluate(MARK_LOOKS, [tried, f"data-{theme}"])
    page.evaluate(PLAIN_CODE)
    turn("light")
    page.evaluate(ONLY_MARKED, "data-light")
    found = page.evaluate(RUN_AXE, [None, OF_PAGES])
    if page.locator("[data-dark]").count():
        page.evaluate(MARKED_ALONE, "data-dark")
        turn("dark")
        page.evaluate(ONLY_MARKED, "data-dark")
        found += page.evaluate(RUN_AXE, ["[data-dark]", {"runOnly": OF_LOOKS}])
    return [describe(violation) for violation in found]


def describe(violation: dict) -> str:
    nodes = violation["nodes"]
    lines = [f"{violation['impact']}: {violation['id']}, {violation['help']} ({len(nodes)} places)"]
    for node in nodes[:9]:
        reasons = [check["message"] for check in node["any"] + node["all"] + node["none"]]
        lines.append(f"    {node['html'][:160]}\n      {'; '.join(reasons)[:300]}")
    return "\n".join(lines)
