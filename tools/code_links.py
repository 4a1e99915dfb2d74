"""A Sphinx extension: names in code cells lead to what the package's page says of them.

It reads a page's cells in order, as a kernel would: what one cell imports the next may use, and a
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
from dataclasses import dataclass, field

# Pygments writes a token as one element, and elements are not nested.
BLOCK = re.compile(r'(<div class="highlight-(?:ipython3|python) .*?<pre>)(.*?)(</pre>)', re.DOTALL)
UNIT = re.compile(r"<span[^>]*>([^<]*)</span>|([^<]+)")
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)


@dataclass
class Entry:
    """What has a place on the package's page."""

    name: str
    docname: str
    anchor: str
    object: object

    @property
    def title(self) -> str:
        """The first line of its docstring, which shows while the mouse rests on the link."""
        summary = (inspect.getdoc(self.object) or "").partition("\n")[0]
        return f"{self.name}: {summary}" if summary else self.name


def import_name(name: str) -> object | None:
    """The object of a dotted name, or None if there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            return None
        return found
    return None


def own_name(thing: object) -> str | None:
    """The name under which a class or function was defined, whatever imports it."""
    if inspect.ismodule(thing):
        return thing.__name__
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return None


class Package:
    """All that a package has, documented or not: what to look names up in before a page is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find(self, name: str) -> Entry | None:
        thing = import_name(name) if name.startswith(f"{self.name}.") else None
        return thing and Entry(name, "", "", thing)

    def result(self, entry: Entry) -> "Instance | None":
        return Instance(entry.name) if inspect.isclass(entry.object) else None


class Instance(str):
    """The name of a class, for what is an instance of it."""


class Entries:
    """All that is documented, by each of its names."""

    def __init__(self, objects: dict) -> None:
        self.by_name = {}
        self.by_own_name = {}
        for name, place in objects.items():
            entry = Entry(name, place.docname, place.node_id, import_name(name))
            self.by_name[name] = entry
            if not place.aliased:
                self.by_own_name.setdefault(own_name(entry.object), entry)
        self.by_own_name.pop(None, None)

        self.packages = {name.partition(".")[0] for name in self.by_name}

    def find(self, name: str) -> Entry | None:
        if name not in self.by_name:
            # Only what is documented is imported here; nothing else that a cell uses has an entry.
            inside = name.partition(".")[0] in self.packages
            thing = import_name(name) if inside else None
            self.by_name[name] = self.by_own_name.get(own_name(thing))
        return self.by_name[name]

    def result(self, entry: Entry) -> Instance | None:
        """The class of which a call makes an instance, where annotations say it."""
        if inspect.isclass(entry.object):
            return Instance(entry.name)
        kind = getattr(entry.object, "__annotations__", {}).get("return")
        if isinstance(kind, str):  # an annotation that is read later
            kind = getattr(inspect.getmodule(entry.object), kind, None)
        if kind is typing.Self:
            return Instance(entry.name.rpartition(".")[0])
        found = self.by_own_name.get(own_name(kind))
        return Instance(found.name) if found else None


@dataclass
class Names(ast.NodeVisitor):
    """Finds the names of a cell that have an entry.

    Parameters
    ----------
    entries : Entries or Package
        What is looked for.
    known : dict
        What each name of the notebook stands for, as a dotted name; changed by what the cell binds.
    """

    entries: Entries | Package
    known: dict[str, str | None]
    found: list[tuple[ast.AST, int, Entry]] = field(default_factory=list)

    def dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.known[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self.known[alias.asname or alias.name] = name
            if entry := self.entries.find(name):
                self.found.append((alias, len(alias.name), entry))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.known[node.id] = None
            return
        name = self.known.get(node.id)
        if name and not isinstance(name, Instance) and (entry := self.entries.find(name)):
            self.found.append((node, 0, entry))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.dotted(node)
        if name and (entry := self.entries.find(name)):
            self.found.append((node, 0, entry))
        else:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        made = self.made_by(node.value)  # before the name may stand for something else
        for target in node.targets:
            self.visit(target)
        if made and isinstance(node.targets[0], ast.Name):
            self.known[node.targets[0].id] = made

    def made_by(self, value: ast.AST) -> Instance | None:
        name = self.dotted(value.func) if isinstance(value, ast.Call) else None
        if name is None or isinstance(name, Instance):
            return None
        entry = self.entries.find(name)
        return entry and self.entries.result(entry)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in node.decorator_list:
            self.visit(part)
        self.known[node.name] = None
        self.visit_Lambda(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.bases, *node.keywords, *node.decorator_list):
            self.visit(part)
        self.known[node.name] = None
        self.inside(node.body)

    def visit_Lambda(self, node: ast.Lambda | ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        arguments = {part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)}
        self.inside(node.body if isinstance(node.body, list) else [node.body], arguments)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        loops = [part for loop in node.generators for part in (loop.iter, loop.target, *loop.ifs)]
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self.inside([*loops, *values])

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def inside(self, parts: list[ast.AST], arguments: set[str] = frozenset()) -> None:
        """Visit what has names of its own."""
        outside = self.known
        self.known = outside | dict.fromkeys(arguments)
        for part in parts:
            self.visit(part)
        self.known = outside


def places(text: str, entries: Entries | Package, known: dict) -> list[tuple[int, int, Entry]]:
    """Where the links of a cell begin and end, in characters of its text."""
    if text.lstrip().startswith("%%"):  # a program of its own
        known = {}
    try:
        tree = ast.parse(MAGIC.sub("", text))
    except SyntaxError:  # no Python
        return []
    names = Names(entries, known)
    names.visit(tree)
    lines = text.splitlines(keepends=True)

    def position(line: int, column: int) -> int:
        before = lines[line - 1].encode()[:column].decode()  # ast counts bytes
        return sum(map(len, lines[: line - 1])) + len(before)

    return sorted(
        (
            (begin, begin + length if length else position(node.end_lineno, node.end_col_offset))
            + (entry,)
            for node, length, entry in names.found
            for begin in [position(node.lineno, node.col_offset)]
        ),
        key=lambda place: place[:2],
    )


def link(code: str, entries: Entries, known: dict, address) -> str:
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
    for begin, end, entry in places("".join(texts), entries, known):
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
        return block[1] + link(block[2], app.code_entries, known, address) + block[3]

    context["body"] = BLOCK.sub(linked, context["body"])


def setup(app):
    app.connect("html-page-context", link_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
