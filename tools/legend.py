"""The notation is one click away on every page.

The button in the header is a link to the notation page. Where scripts run, `legend.js` opens the
page's tables in a panel instead, and reads them from a script: a page that was opened as a file may
load scripts, but not read other pages.
"""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

PAGE = "book/notation"
SHOWN = ["Sizes", "Arrays and functions", "Letters of single chapters"]


def tables(doctree: nodes.document, headings: list[str]) -> list[nodes.section]:
    """The sections of the page under some headings, in their order there."""
    sections = doctree.findall(nodes.section)
    found = [section for section in sections if section[0].astext() in headings]
    if len(found) != len(headings):
        raise ValueError(f"{PAGE} must have the sections {headings}, got {len(found)} of them")
    return found


def write_legend(app: Sphinx, trouble: Exception | None) -> None:
    """The tables as a script, beside the other files of the site."""
    if trouble or app.builder.format != "html" or PAGE not in app.env.found_docs:
        return
    app.builder.current_docname = PAGE
    doctree = app.env.get_and_resolve_doctree(PAGE, app.builder)
    parts = []
    for section in tables(doctree, SHOWN):
        parts.append(f"<h3>{section[0].astext()}</h3>")
        for table in section.findall(nodes.table):
            for row in table.findall(nodes.row):
                row["ids"] = []  # the page's own rows have them
            parts.append(app.builder.render_partial(table)["fragment"])
    data = json.dumps({"page": app.builder.get_target_uri(PAGE), "tables": "".join(parts)})
    Path(app.outdir, "_static", "legend-tables.js").write_text(
        f"legendTables = {data};\n", encoding="utf-8"
    )


def add_button(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    if PAGE in app.env.found_docs and "header_buttons" in context:
        button = {
            "type": "link",
            "url": context["pathto"](PAGE),
            "text": "Notation",
            "icon": "fas fa-square-root-variable",
            "tooltip": "What the letters mean",
            "label": "legend-button",
        }
        context["header_buttons"].insert(0, button)


def setup(app: Sphinx) -> None:
    app.add_js_file("legend.js")
    app.connect("html-page-context", add_button, priority=502)  # after the theme's own buttons
    app.connect("build-finished", write_legend)
