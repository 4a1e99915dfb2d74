"""A Sphinx extension: what other programs read at the head of a page.

Every page has a description, its first sentences, and the tags from which chats and networks draw a
card. The address of the site follows from that of the repository (or is `html_baseurl`): where
there is one, pages also name their own address and the card's picture, and the site has a
`sitemap.xml`.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from docutils import nodes
from plain_tex import text_of
from sphinx.application import Sphinx
from sphinx.config import Config

CARD = "_static/card.png"
CARD_WORDS = (
    "Linear attention: from the softmax matrix to a state. A square of weights, and a small state."
)
LONGEST = 200
PAGES_OF_SPHINX = {
    "genindex": "All functions, classes and terms of the book, by name.",
    "search": "Search the book for a word, a function or a symbol.",
    "py-modindex": "The modules of the package lesson_code.",
    "_modules/index": "The source code of the package lesson_code.",
}


def site_address(repository: str) -> str:
    """Where GitHub Pages serves a repository, "" for no address or another host."""
    parts = urlsplit(repository)
    names = parts.path.strip("/").removesuffix(".git").split("/")
    if parts.hostname != "github.com" or len(names) != 2:
        return ""
    owner, name = names
    host = f"https://{owner.lower()}.github.io/"
    return host if name.lower() == f"{owner.lower()}.github.io" else f"{host}{name}/"


def set_address(app: Sphinx, config: Config) -> None:
    """Sphinx writes `<link rel="canonical">` where it knows the address."""
    repository = config.html_theme_options.get("repository_url", "")
    config.html_baseurl = config.html_baseurl or site_address(repository)


def shorten(text: str, longest: int = LONGEST) -> str:
    """The first sentences that fit, or the first words with an ellipsis."""
    text = " ".join(text.split())
    if text.endswith(":") and ". " in text:  # what it announces is no longer there
        text = text[: text.rindex(". ") + 1]
    if len(text) <= longest:
        return text
    ends = [m.end(1) for m in re.finditer(r"([.?!])(?= )", text[: longest + 1])]
    if ends and ends[-1] >= longest / 3:
        return text[: ends[-1]]
    return text[: longest - 1].rsplit(" ", 1)[0].rstrip(",;:") + "…"


def describe(pagename: str, title: str, doctree: nodes.document | None) -> str:
    """The description of a page: its first paragraph of text."""
    if pagename in PAGES_OF_SPHINX:
        return PAGES_OF_SPHINX[pagename]
    if doctree is None:  # a page of source code
        return f"The source code of {title}."
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | nodes.document):
            text = text_of(paragraph)
            if len(text) > 40:
                return shorten(text)
    return f"{title}: a page of the book on linear attention."


def add_tags(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title") or app.config.html_title))
    description = describe(pagename, title, doctree)
    tags = [
        ("name", "description", description),
        ("property", "og:title", title),
        ("property", "og:description", description),
        ("property", "og:site_name", app.config.html_title),
        ("property", "og:type", "website" if pagename == app.config.root_doc else "article"),
        ("name", "twitter:card", "summary"),
    ]
    if app.config.html_baseurl:
        tags[-1] = ("name", "twitter:card", "summary_large_image")
        tags += [
            ("property", "og:url", context["pageurl"]),
            ("property", "og:image", app.config.html_baseurl + CARD),
            ("property", "og:image:alt", CARD_WORDS),
            ("property", "og:image:width", "1200"),
            ("property", "og:image:height", "630"),
        ]
    context["metatags"] = context.get("metatags", "") + "".join(
        f'\n    <meta {kind}="{name}" content="{html.escape(content)}" />'
        for kind, name, content in tags
    )


def write_sitemap(app: Sphinx, trouble: Exception | None) -> None:
    if trouble or app.builder.format != "html" or not app.config.html_baseurl:
        return
    addresses = [
        app.config.html_baseurl + app.builder.get_target_uri(name)
        for name in sorted(app.env.found_docs)
    ]
    urls = "".join(f"  <url><loc>{escape(address)}</loc></url>\n" for address in addresses)
    Path(app.outdir, "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n',
        encoding="utf-8",
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", set_address)
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", write_sitemap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
