"""Links to the glossary show what the term means while the mouse rests on them."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

from tools.plain_tex import text_of

PAGE = "book/glossary"


def definitions(glossary: nodes.document) -> dict[str, str]:
    """The first sentence of each entry, by the anchor of its term."""
    found = {}
    for item in glossary.findall(nodes.definition_list_item):
        text = " ".join(text_of(item.next_node(nodes.paragraph)).split())
        first = re.split(r"(?<=[.]) (?=[A-Z])", text, maxsplit=1)[0]
        found |= {term["ids"][0]: first for term in item.findall(nodes.term)}
    return found


def explain(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    words = [word for word in doctree.findall(nodes.inline) if "std-term" in word["classes"]]
    if not words or docname == PAGE:
        return
    if not hasattr(app, "definitions"):  # read once a build
        app.definitions = definitions(app.env.get_doctree(PAGE))
    for word in words:
        if isinstance(word.parent, nodes.reference):  # and no term that is not there
            word.parent["reftitle"] = app.definitions[word.parent["refuri"].partition("#")[2]]


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", explain)
