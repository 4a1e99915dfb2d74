"""Names in code cells lead to what the package's page says of them.

A page's cells are read in order, as a kernel would: what one cell imports the next may use, and a
name that is bound anew is no longer the package's. Nothing is run. (sphinx-codeautolink, which
follows names in the same way, stops at the text of an exercise and at cells that begin with %%, and
takes as long as the rest of the build, as it reads every page anew.)
"""

import ast
import html
import importlib
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field

# Pygments writes a token as one element, and elements are not nested.
BLOCK = re.compile(r'(<div class="highlight-(?:ipython3|python) .*?<pre>)(.*?)(</pre>)', re.DOTALL)
UNIT = re.compile(r"<span[^>]*>([^<]*)</span>|([^<]+)")
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)


@dataclass
class Entry:
    """What a name stands for, and its place on the package's page if it has one."""

    name: str
    object: object
    docname: str = ""
    anchor: str = ""

    @property
    def title(self) -> str:
        """The first line of its docstring, which shows while the mouse rests on the link."""
        summary = (inspect.getdoc(self.object) or "").partition("\n")[0]
        return f"{self.name}: {summary}" if summary else self.name


Find = Callable[[str], Entry | None]


def import_name(name: str) -> object | None:
    """The object of a dotted name, or None if there is none."""
    before, _, last = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ImportError:
        return getattr(import_name(before), last, None) if before else None


def own_name(thing: object) -> str | None:
    """The name under which a class or function was defined, whatever imports it."""
    if inspect.ismodule(thing):
        return thing.__name__
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return None


class Entries:
    """All that is documented, by each of its names."""

    def __init__(self, objects: dict) -> None:
        self.by_name: dict[str, Entry | None] = {}
        self.by_own_name: dict[str | None, Entry] = {}
        for name, place in objects.items():
            entry = Entry(name, import_name(name), place.docname, place.node_id)
            self.by_name[name] = entry
            if not place.aliased:
                self.by_own_name.setdefault(own_name(entry.object), entry)
        self.by_own_name.pop(None, None)
        self.packages = {name.partition(".")[0] for name in self.by_name}

    def find(self, name: str) -> Entry | None:
        if name not in self.by_name:
            # Only what is documented is imported here; nothing else that a cell uses has an entry.
            inside = name.partition(".")[0] in self.packages
            self.by_name[name] = self.by_own_name.get(
                own_name(import_name(name) if inside else None)
            )
        return self.by_name[name]


class Instance(str):
    """The name of a class, for what is an instance of it."""


def made_by(entry: Entry) -> Instance | None:
    """The class of which a call makes an instance, where annotations say it."""
    if inspect.isclass(entry.object):
        return Instance(entry.name)
    kind = getattr(entry.object, "__annotations__", {}).get("return")
    if isinstance(kind, str):  # an annotation that is read later
        kind = getattr(inspect.getmodule(entry.object), kind, None)
    if kind is typing.Self:
        return Instance(entry.name.rpartition(".")[0])
    return Instance(own_name(kind)) if inspect.isclass(kind) else None


@dataclass
class Names(ast.NodeVisitor):
    """Finds the names of a cell that have an entry.

    Parameters
    ----------
    find : callable
        Gives the entry of a dotted name, or None.
    known : dict
        What each name of the notebook stands for, as a dotted name; changed by what the cell binds.
    """

    find: Find
    known: dict[str, str | None]
    found: list[tuple[ast.AST, Entry]] = field(default_factory=list)

    def dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return None

    def entry(self, node: ast.AST) -> Entry | None:
        name = self.dotted(node)
        return self.find(name) if name and not isinstance(name, Instance) else None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.known[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self.known[alias.asname or alias.name] = name
            if entry := self.find(name):
                alias.end_col_offset = alias.col_offset + len(alias.name)  # without "as ..."
                self.found.append((alias, entry))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.known[node.id] = None
        elif entry := self.entry(node):
            self.found.append((node, entry))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if entry := self.entry(node):
            self.found.append((node, entry))
        else:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        entry = self.entry(node.value.func) if isinstance(node.value, ast.Call) else None
        for target in node.targets:
            self.visit(target)
        if entry and isinstance(node.targets[0], ast.Name):
            self.known[node.targets[0].id] = made_by(entry)

    def visit_scope(self, node: ast.AST) -> None:
        """What a function, a class or a comprehension binds is bound inside it alone."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.known[node.name] = None
        outside, parts = self.known, list(ast.walk(node))
        bound = {x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        bound |= {x.arg for x in parts if isinstance(x, ast.arg)}
        self.known = outside | dict.fromkeys(bound)
        self.generic_visit(node)
        self.known = outside

    visit_FunctionDef = visit_ClassDef = visit_Lambda = visit_scope
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_scope


def places(text: str, find: Find, known: dict) -> list[tuple[int, int, Entry]]:
    """Where the links of a cell begin and end, in characters of its text."""
    if text.lstrip().startswith("%%"):  # a program of its own
        known = {}
    try:
        tree = ast.parse(MAGIC.sub("", text))
    except SyntaxError:  # no Python
        return []
    names = Names(find, known)
    names.visit(tree)
    lines = text.splitlines(keepends=True)

    def position(line: int, column: int) -> int:
        before = lines[line - 1].encode()[:column].decode()  # ast counts bytes
        return sum(map(len, lines[: line - 1])) + len(before)

    found = [
        (position(node.lineno, node.col_offset), position(node.end_lineno, node.end_col_offset), e)
        for node, e in names.found
    ]
    return sorted(found, key=lambda place: place[:2])


def link(code: str, find: Find, known: dict, address: Callable[[Entry], str]) -> str:
    """Highlighted code with links."""
    units = list(UNIT.finditer(code.removeprefix("<span></span>")))
    texts = [html.unescape(unit[1] or unit[2] or "") for unit in units]
    begins, ends, position = {}, {}, 0
    for index, text in enumerate(texts):
        begins[position] = index
        position += len(text)
        ends[position] = index
    pieces = [unit[0] for unit in units]
    seen = set()
    for begin, end, entry in places("".join(texts), find, known):
        if begin not in begins or end not in ends:  # inside a token, such as that of a decorator
            continue
        # The keyboard stops at a name once in each cell.
        again = ' tabindex="-1"' if entry.name in seen else ""
        seen.add(entry.name)
        title = html.escape(entry.title)
        opening = f'<a class="code-link" href="{address(entry)}" title="{title}"{again}>'
        pieces[begins[begin]] = opening + pieces[begins[begin]]
        pieces[ends[end]] += "</a>"
    return "<span></span>" + "".join(pieces)


def link_page(app, pagename, templatename, context, doctree) -> None:
    """Put the links into a page that is about to be written."""
    if doctree is None or "body" not in context:
        return
    if not hasattr(app, "code_entries"):
        app.code_entries = Entries(app.env.get_domain("py").objects)
    known = {}

    def address(entry: Entry) -> str:
        return f"{app.builder.get_relative_uri(pagename, entry.docname)}#{entry.anchor}"

    def linked(block: re.Match) -> str:
        return block[1] + link(block[2], app.code_entries.find, known, address) + block[3]

    context["body"] = BLOCK.sub(linked, context["body"])


def setup(app) -> None:
    app.connect("html-page-context", link_page)
