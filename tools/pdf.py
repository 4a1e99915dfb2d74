"""The whole book on paper: the pages of the built site one after another, printed by Chromium.

python -m tools.pdf            writes _build/html/linear-attention.pdf
python -m tools.pdf SITE       prints another built site, into its folder

The pages become one page. So their ids get the name of their page in front, and links between
pages become links inside of the document; those to pages that are not in it (sources and tests)
become text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from io import BytesIO
from pathlib import Path
from urllib.parse import urldefrag

import yaml
from bs4 import BeautifulSoup, SoupStrainer, Tag
from playwright.sync_api import Browser, Page, sync_playwright
from pypdf import PdfReader, PdfWriter
from pypdf.generic import NameObject, TextStringObject

from tools import book, browser

ROOT = Path(__file__).resolve().parent.parent
NAME = "linear-attention.pdf"
PLACE = "<!-- whole-book -->"
LINK = f'<p style="text-align: center"><a href="../{NAME}">The whole book as one PDF</a></p>'
Parts = list[tuple[str, list[str]]]  # captions, and the names of their pages
REFERS = ("for", "aria-labelledby", "aria-describedby", "headers")
FOOTER = """<div style="width: 100%; font: 8pt sans-serif; color: #555; text-align: center">
<span class="pageNumber"></span></div>"""
MARGIN = {"top": "16mm", "bottom": "18mm", "left": "18mm", "right": "18mm"}
# Headings are one level further down than on their pages, as parts stand above chapters.
STYLE = """
  html, body { font-size: 9.5pt; line-height: 1.45; }
  .cover { height: 225mm; display: flex; flex-direction: column; justify-content: center; }
  .cover img { width: 60mm; margin-bottom: 12mm; }
  .cover p { font-size: 14pt; }
  .cover .title { font-size: 36pt; font-weight: 600; }
  .pages, .part, article { break-before: page; }
  .part + article { break-before: auto; }
  .pages ul { list-style: none; padding: 0; }
  .pages li { display: flex; gap: 1em; }
  .pages li.of-part { font-weight: 600; margin-top: 0.8em; }
  .pages .page { margin-left: auto; visibility: hidden; }
  .numbers :is(.cover, h1, a) { visibility: hidden; }
  .numbers .page { visibility: visible; }
  .part { font-size: 26pt; }
  .bd-article h2.of-page { font-size: 20pt; margin-top: 0; }
  .bd-article h3 { font-size: 14pt; }
  .bd-article h4 { font-size: 11pt; }
"""
HEADINGS = "h1, h2, h3, h4, h5, h6"
NUMBER_CONTENTS = """numbers => {
    for (const other of document.querySelectorAll(".part, article")) other.remove();
    for (const line of document.querySelectorAll(".pages li"))
        line.lastElementChild.textContent = numbers[line.firstElementChild.hash.slice(1)];
    document.body.classList.add("numbers");
}"""


def pages(root: Path = ROOT) -> Parts:
    """The caption of each part with the names of its pages; the landing page has no part."""
    contents = yaml.safe_load((root / "_toc.yml").read_text("utf-8"))
    parts = [(part["caption"], [e["file"] for e in part["chapters"]]) for part in contents["parts"]]
    return [("", [contents["root"]]), *parts]


def anchor(page: str, fragment: str = "") -> str:
    """What a page, or a place on it, is called in the document."""
    name = re.sub(r"\W", "-", page)
    return f"{name}--{fragment}" if fragment else name


def to_paper(article: Tag, page: str, printed: set[str]) -> Tag:
    """The text of a page with its ids, links, pictures and headings as the document needs them."""
    article["id"] = anchor(page)
    seen = set()
    for node in article.find_all(id=True):
        # Every exercise of a page calls its text by the same name.
        if node["id"] in seen:
            del node["id"]
            continue
        seen.add(node["id"])
        node["id"] = anchor(page, node["id"])
    for name in REFERS:
        for node in article.find_all(attrs={name: True}):
            node[name] = " ".join(anchor(page, id_) for id_ in node[name].split())
    for link in article.find_all("a", href=True):
        address, fragment = urldefrag(link["href"])
        if re.match(r"[a-z]+:", address):
            continue
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), address))
        target = target.removesuffix(".html") if address else page
        if target in printed:
            link["href"] = f"#{anchor(target, fragment)}"
        else:
            del link["href"]
    for picture in article.find_all("img", src=True):
        if not re.match(r"[a-z]+:", picture["src"]):
            picture["src"] = posixpath.join(posixpath.dirname(page), picture["src"])
    for level in range(5, 0, -1):
        for heading in article.find_all(f"h{level}"):
            heading.name = f"h{level + 1}"
            if level == 1:
                heading["class"] = "of-page"
    return article


def document(site: Path, parts: Parts) -> str:
    """The book as one page, which stands beside the landing page of the site."""
    printed = {page for _, names in parts for page in names}
    first = BeautifulSoup((site / f"{parts[0][1][0]}.html").read_text("utf-8"), "html.parser")
    head = [
        node
        for node in first.head.find_all(["link", "script"])
        if node.get("rel") == ["stylesheet"]
        or "mathjax" in node.get("src", "")
        or "window.MathJax" in node.text
    ]
    for node in head:
        for name in ("href", "src"):
            if name in node.attrs:
                node[name] = posixpath.normpath(posixpath.join("book", node[name]))
    body, contents = [], []
    for caption, names in parts:
        if caption:
            id_ = anchor(f"part {caption}")
            body.append(f'<h1 class="part" id="{id_}">{caption}</h1>')
            contents.append((id_, "of-part", caption))
        for page in names:
            text = (site / f"{page}.html").read_text("utf-8")
            articles = BeautifulSoup(text, "html.parser", parse_only=SoupStrainer("article"))
            article = to_paper(articles.find(class_="bd-article"), page, printed)
            title = article.find("h2")
            for link in title.find_all("a", class_="headerlink"):
                link.decompose()
            contents.append((article["id"], "of-page", title.get_text()))
            body.append(str(article))
    lines = "".join(
        f'<li class="{kind}"><a href="#{id_}">{title}</a> <span class="page">000</span></li>'
        for id_, kind, title in contents
    )
    config = book.config()
    return f"""<!doctype html><html lang="en" data-mode="light" data-theme="light">
<head><meta charset="utf-8"><title>{config["title"]}</title>
{"".join(map(str, head))}<style>{STYLE}</style></head>
<body><div class="cover"><div><img src="_static/logo.svg" alt=""></div>
<p class="title">{config["title"]}</p><p>{config["author"]}, {config["copyright"]}</p></div>
<nav class="pages"><h1>Contents</h1><ul>{lines}</ul></nav>
{"".join(body)}</body></html>"""


def printed(page: Page, **options) -> PdfReader:
    return PdfReader(BytesIO(page.pdf(format="A4", margin=MARGIN, **options)))


def name_outline(pdf: PdfWriter, titles: list[str]) -> None:
    """Chromium says the titles of some headings twice, so they are taken from the page."""

    def entries(parent):
        entry = parent.get("/First")
        while entry is not None:
            entry = entry.get_object()
            yield entry
            yield from entries(entry)
            entry = entry.get("/Next")

    found = list(entries(pdf.root_object["/Outlines"]))
    for entry, title in zip(found, titles, strict=True):
        entry[NameObject("/Title")] = TextStringObject(" ".join(title.split()))


def make(site: Path, chromium: Browser, parts: Parts, output: Path) -> Path:
    """Print the site; then the numbers in its contents, which are known when it is printed."""
    source = site / "whole-book.html"
    source.write_text(document(site, parts), "utf-8")
    page = chromium.new_page()
    page.set_default_timeout(0)
    page.goto(source.as_uri())
    page.evaluate("async () => { await MathJax.startup.promise }")
    pdf = printed(
        page,
        outline=True,
        tagged=True,
        display_header_footer=True,
        header_template="<span></span>",
        footer_template=FOOTER,
    )
    numbers = {
        name.removeprefix("/"): pdf.get_destination_page_number(place) + 1
        for name, place in pdf.named_destinations.items()
    }
    titles = page.eval_on_selector_all(HEADINGS, "all => all.map(one => one.textContent)")
    page.evaluate(NUMBER_CONTENTS, numbers)
    contents = printed(page)
    page.close()
    source.unlink()
    writer = PdfWriter(clone_from=pdf)
    name_outline(writer, titles)
    for whole, layer in zip(writer.pages, contents.pages, strict=False):
        whole.merge_page(layer)
    writer.compress_identical_objects()
    writer.write(output)
    return output


def offer(site: Path) -> None:
    """Put a link to the PDF on the landing page, at the place that its source keeps for it."""
    landing = site / "book" / "index.html"
    text = landing.read_text("utf-8")
    landing.write_text(text.replace(PLACE, f"{PLACE}{LINK}") if LINK not in text else text, "utf-8")


def main() -> None:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "_build" / "html").resolve()
    if not (site / "index.html").exists():
        sys.exit(f"There is no book at {site} to print: type `make book` first.")
    path = browser.find()
    if path is None:
        sys.exit(browser.MISSING)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        output = make(site, chromium, pages(), site / NAME)
        offer(site)
        print(f"The book on paper: {output}")
        chromium.close()


if __name__ == "__main__":
    main()
