"""A Sphinx extension: a chapter's first use of a term in running text leads to the glossary.

The most frequent words are linked in the first part only. The notebooks stay as they are, without a
role at each term. Headings, captions, links, code and formulas are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from docutils import nodes
from plain_tex import text_of
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

GLOSSARY = "book/glossary"
LEFT_ALONE = (
    nodes.title,
    nodes.caption,
    nodes.reference,
    nodes.literal,
    nodes.literal_block,
    nodes.math,
    nodes.math_block,
    nodes.raw,
    nodes.table,
    nodes.rubric,
    nodes.citation,
    addnodes.pending_xref,
    addnodes.toctree,
)
# Words that stand everywhere are linked in the first part, which introduces them.
BASIC = """
attention,causal,head,key,linear attention,query,score,similarity,softmax,state,token,value
"""
# Terms that are linked only in some chapters, by the chapters' numbers: those above, and words that
# are elsewhere everyday ones (to read), or other terms (the rank of a matrix, of a process).
ONLY_IN = {
    **dict.fromkeys(BASIC.strip().split(","), "01 02 03 04 05"),
    "block": "09",
    "cache": "07 08 13",
    "cell": "06",
    "collective": "18",
    "depth": "07",
    "floor": "08 09",
    "kernel": "02 05",
    "kernel (of a GPU)": "08 09",
    "line": "09",
    "load": "03 16",
    "rank": "01 02 03 04 05 11 13 15 16",
    "rank of a process": "18",
    "read": "03",
    "rotation (of queries and keys)": "12 15",
    "segment": "07 09 18",
    "step size": "13",
    "thread": "09",  # in others it is one of a processor
    "work": "",  # chapter 7 says what it is, but does some work before
    "write": "03",
}


def forms(term: str) -> list[str]:
    """A term and its plural, each as it is and with a capital."""
    plural = term
    if term.endswith("matrix"):
        plural = f"{term[:-2]}ices"
    elif re.search(r"[^aeiou]y$", term):
        plural = f"{term[:-1]}ies"
    elif re.search(r"(s|x|z|ch|sh)$", term):
        plural = f"{term}es"
    elif term[-1].isalpha():
        plural = f"{term}s"
    return list(dict.fromkeys(f for w in (term, plural) for f in (w, w[0].upper() + w[1:])))


def words_in(chapter: str, terms: Iterable[str]) -> dict[str, str]:
    """What to look for in a chapter, and the terms: `kernel (of a GPU)` is found by kernel."""
    here = [term for term in terms if chapter in ONLY_IN.get(term, chapter).split()]
    return {re.sub(r" (\(.*\)|of a process)$", "", term): term for term in here}


def running_text(document: nodes.document) -> Iterator[nodes.Text]:
    """The texts in which terms may be linked, in the order of the page."""
    for paragraph in list(document.findall(nodes.paragraph)):
        if "chapter-needs" in paragraph["classes"]:
            continue
        for text in list(paragraph.findall(nodes.Text)):
            node = text.parent
            while node is not None and not isinstance(node, LEFT_ALONE):
                node = node.parent
            if node is None:
                yield text


def first_uses(texts: list[str], words: dict[str, str]) -> Iterator[list[tuple[re.Match, str]]]:
    """For each text the places where a term is used for the first time, and the terms."""
    owner = {form: term for word, term in words.items() for form in forms(word)}
    longest_first = sorted(owner, key=len, reverse=True)
    choice = "|".join(re.escape(form).replace(r"\ ", r"\s+") for form in longest_first)
    finder = re.compile(rf"(?<![\w\-/])(?:{choice})(?![\w\-/])")
    seen: set[str] = set()
    for text in texts:
        found = []
        for match in finder.finditer(text):
            term = owner[" ".join(match[0].split())]
            if term not in seen:
                seen.add(term)
                found.append((match, term))
        yield found


class LinkFirstUses(SphinxPostTransform):
    """Makes the first use of each term a link that shows the definition when it is pointed at."""

    default_priority = 5  # before references are resolved
    formats = ("html",)

    def run(self, **kwargs: object) -> None:
        docname = self.env.docname
        chapter = re.match(r"book/(\d\d)_", docname)
        if not chapter or GLOSSARY not in self.env.found_docs:
            return
        entries = glossary(self.app)
        texts = list(running_text(self.document))
        found = first_uses([text.astext() for text in texts], words_in(chapter[1], entries))
        for text, uses in zip(texts, found, strict=True):
            pieces: list[nodes.Node] = []
            done = 0
            for match, term in uses:
                anchor, definition = entries[term]
                word = nodes.inline("", match[0], classes=["glossed"])
                pieces.append(nodes.Text(text[done : match.start()]))
                pieces.append(
                    make_refnode(self.app.builder, docname, GLOSSARY, anchor, word, definition)
                )
                done = match.end()
            if uses:
                pieces.append(nodes.Text(text[done:]))
                text.parent.replace(text, [piece for piece in pieces if piece.astext()])


def glossary(app: Sphinx) -> dict[str, tuple[str, str]]:
    """The anchor of each entry, and its first sentence."""
    if not hasattr(app, "glossary_entries"):  # read once a build
        app.glossary_entries = {}
        for item in app.env.get_doctree(GLOSSARY).findall(nodes.definition_list_item):
            definition = " ".join(text_of(item.next_node(nodes.paragraph)).split())
            first = re.split(r"(?<=[.]) (?=[A-Z])", definition, maxsplit=1)[0]
            for term in item.findall(nodes.term):
                name = term.children[0].astext().strip()
                app.glossary_entries[name] = (term["ids"][0], first)
    return app.glossary_entries


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(LinkFirstUses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
