r"""The search finds symbols by name.

The index of words leaves out formulas. So each row of the notation page becomes an object that the
search knows by every name that a reader may type: `$\phi$`, `feature_map` is found as "φ", "phi"
and "feature_map", and the result says what it means. Entries of the glossary become objects too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains import Domain, ObjType
from sphinx.domains.std import StandardDomain

from tools.plain_tex import LETTERS, text_of

PAGE = "book/notation"
# A letter or a function with an index at most; what is more is a formula and no symbol.
SYMBOL = re.compile(r"(?:\\ln )?(\\?[A-Za-z]+)(?:_\{?(\w+)\}?)?")
FIRST = ["Sizes", "Arrays and functions"]  # those that hold in the whole book
NOT_HERE = "How other texts write it"  # those are other texts' names


def names_of(tex: str) -> list[str]:
    r"""What a reader may type for a symbol: `\alpha_t` is alpha_t, α_t, alpha and α."""
    tex = re.sub(r"\\operatorname\{(\w+)\}(\(.*\))?", r"\1", tex)
    found = SYMBOL.fullmatch(tex.strip())
    if not found:
        return []
    name, index = found[1].removeprefix("\\"), found[2]
    letters = [name] + ([LETTERS[name]] if name in LETTERS else [])
    return [f"{letter}_{index}" for letter in letters if index] + letters


def rows(doctree: nodes.document) -> Iterator[tuple[str, nodes.row]]:
    """The rows of all tables below their headings, with the headings."""
    for table in doctree.findall(nodes.table):
        heading = table.parent.next_node(nodes.title).astext()
        for body in table.findall(nodes.tbody):
            for row in body.findall(nodes.row):
                yield heading, row


def names_in(row: nodes.row) -> list[str]:
    """All names of what a row explains; the last cell says what it means."""
    *before, meaning = row.children
    names = []
    formulas = [math for cell in before for math in cell.findall(nodes.math)]
    for math in formulas or meaning.findall(nodes.math):
        names += names_of(math.astext())
    # Of two cells of code the first says which functions have the argument.
    codes = [cell for cell in before if any(cell.findall(nodes.literal))][:2]
    functions = len(codes) > 1 and not any(row.children[0].findall(nodes.math))
    for code in codes[functions : functions + 1]:
        texts = [literal.astext() for literal in code.findall(nodes.literal)]
        names += [text for text in texts if re.fullmatch(r"\w+", text)]
    return list(dict.fromkeys(names))


class Notation(Domain):
    """The symbols of the notation page."""

    name = "notation"
    label = "Notation"
    initial_data = {"symbols": {}}
    object_types: dict[str, ObjType] = {}

    def read(self, doctree: nodes.document) -> None:
        """Remember what the page explains, and give its rows anchors."""
        for number, (heading, row) in enumerate(rows(doctree)):
            if heading == NOT_HERE or not (names := names_in(row)):
                continue
            anchor = f"symbol-{number}"
            row["ids"].append(anchor)
            meaning = text_of(row.children[-1]).strip()
            functions = row.children[0].astext() if heading.startswith("Arguments") else ""
            meaning = f"{functions}: {meaning}" if functions else meaning
            for name in names:
                self.data["symbols"][name, anchor] = meaning, 0 if heading in FIRST else 1

    def clear_doc(self, docname: str) -> None:
        if docname == PAGE:
            self.data["symbols"].clear()

    def merge_domaindata(self, docnames: set[str], otherdata: dict) -> None:
        if PAGE in docnames:
            self.data["symbols"].update(otherdata["symbols"])

    def get_objects(self) -> Iterator[tuple[str, str, str, str, str, int]]:
        # The search shows the name of an object's type, so each meaning is a type.
        for (name, anchor), (meaning, priority) in self.data["symbols"].items():
            self.object_types[anchor] = ObjType(meaning)
            yield name, name, anchor, PAGE, anchor, priority

    def get_type_name(self, type: ObjType, primary: bool = False) -> str:
        return str(type.lname)


def read_page(app: Sphinx, doctree: nodes.document) -> None:
    if app.env.docname == PAGE:
        app.env.get_domain("notation").read(doctree)


def setup(app: Sphinx) -> None:
    app.add_domain(Notation)
    app.connect("doctree-read", read_page)
    StandardDomain.object_types["term"].attrs["searchprio"] = 1
