"""What other programs read at the head of a page.

Every page has a description, its first sentences, and the tags from which chats and networks draw a
card. The address of the site follows from that of the repository (or is `html_baseurl`): where
there is one, pages also name their own address and the card's picture, and the site has a
`sitemap.xml`. (sphinxext-opengraph would write formulas into the descriptions as TeX and break them
off inside a word; sphinx-sitemap lists only the pages that a build has written anew.)
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config

from tools.plain_tex import text_of

LONGEST = 200
CARD = {
    "og:image": "_static/card.png",
    "og:image:alt": "Linear attention: from the softmax matrix to a state. "
    "A square of weights, and a small state.",
    "og:image:width": "1200",
    "og:image:height": "630",
}
PAGES_OF_SPHINX = {
    "genindex": "All functions, classes and terms of the book, by name.",
    "search": "Search the book for a word, a function or a symbol.",
    "py-modindex": "The modules of the package lesson_code.",
    "_modules/index": "The source code of the package lesson_code.",
}


def site_address(repository: str) -> str:
    """Where GitHub Pages serves a repository, "" for no address or another host."""
    found = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+?)(\.git)?/?", repository)
    if not found:
        return ""
    host = f"{found[1].lower()}.github.io"
    return f"https://{host}/" if found[2].lower() == host else f"https://{host}/{found[2]}/"


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
    address, site = app.config.html_baseurl, app.config.html_title
    title = html.unescape(re.sub(r"<[^>]+>", "", context.get("title") or site))
    description = describe(pagename, title, doctree)
    tags = {
        "description": description,
        "og:title": title,
        "og:description": description,
        "og:site_name": site,
        "og:type": "website" if pagename == app.config.root_doc else "article",
        "twitter:card": "summary_large_image" if address else "summary",
    }
    if address:
        tags |= CARD | {"og:url": context["pageurl"], "og:image": address + CARD["og:image"]}
    for name, content in tags.items():
        kind = "property" if name.startswith("og:") else "name"
        tag = f'\n    <meta {kind}="{name}" content="{html.escape(content)}" />'
        context["metatags"] = context.get("metatags", "") + tag


def write_sitemap(app: Sphinx, trouble: Exception | None) -> None:
    if trouble or app.builder.format != "html" or not app.config.html_baseurl:
        return
    names = map(app.builder.get_target_uri, sorted(app.env.found_docs))
    urls = "".join(f"  <url><loc>{app.config.html_baseurl}{name}</loc></url>\n" for name in names)
    Path(app.outdir, "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n',
        encoding="utf-8",
    )


def setup(app: Sphinx) -> None:
    app.connect("config-inited", set_address)
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", write_sitemap)
