"""Small changes of Python code, as a slip of the fingers makes them.

Another operator or comparison, a number one off, a slice or a triangle shifted, a condition turned
round, a statement left out. What only types and messages say stays as it is.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SWAPS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*", "@": "*"}
SWAPS |= {"&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<", "and": "or", "or": "and"}
SWAPS |= {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
SWAPS |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
OPERATOR = re.compile("|".join(re.escape(s) for s in sorted(SWAPS, key=len, reverse=True)))


@dataclass(frozen=True)
class Change:
    """In a file, in a line, the bytes from `start` to `end` become `new`."""

    file: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def show(self, source: bytes) -> str:
        """The lines that change, as one, with the old in [- -] and the new in {+ +}."""
        before = source[: self.start].decode().rpartition("\n")[2]
        after = source[self.end :].decode().partition("\n")[0]
        old = source[self.start : self.end].decode()
        marked = f"{before}[-{old}-]{{+{self.new}+}}{after}"
        return f"{self.file}:{self.line}: {' '.join(marked.split())}"


class Places:
    """The places of a file that can be changed, each as the list of its changes."""

    def __init__(self, file: str) -> None:
        self.file, self.source = file, Path(file).read_bytes()
        self.lines = [0, *(m.end() for m in re.finditer(b"\n", self.source))]
        self.found: list[list[Change]] = []
        self._visit(ast.parse(self.source))

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr):  # what an error says
            return
        if isinstance(node, ast.keyword) and node.arg == "copy":  # copy=False saves time, no more
            return
        if changes := [Change(self.file, node.lineno, *change) for change in self._changes(node)]:
            self.found.append(changes)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    self._visit(child)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.BinOp(left=left, right=right):
                yield self._swapped(left, right)
            case ast.AugAssign(target=left, value=right):
                yield self._swapped(left, right)
                yield *self._span(node), "pass"
            case ast.Compare(left=left, comparators=rest):
                yield from (self._swapped(*pair) for pair in pairwise([left, *rest]))
            case ast.BoolOp(values=values):
                yield from (self._swapped(*pair) for pair in pairwise(values))
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                start, _ = self._span(node)
                yield start, start + len("not" if isinstance(node.op, ast.Not) else "-"), ""
            case ast.Constant(value=bool(value)):
                yield *self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield from ((*self._span(node), str(n)) for n in (value - 1, value + 1))
            case ast.Constant(value=float(value)):
                others = (2 * value or 1.0, value / 2 or -1.0)
                yield from ((*self._span(node), str(x)) for x in others)
            case ast.Expr(value=ast.Call()):
                yield *self._span(node), "pass"
            case ast.Slice(lower=lower, upper=upper):
                for bound in filter(None, (lower, upper)):
                    if not isinstance(bound, ast.Constant | ast.UnaryOp):
                        yield from (self._around(bound, f"({{}}) {n}") for n in ("- 1", "+ 1"))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                    yield self._around(test, "not {}")
            case ast.Call(func=ast.Attribute(attr="tril" | "triu") as func, keywords=[]):
                if not node.args:  # x.tril()
                    yield from ((*self._span(node), f"{ast.unparse(func)}({n})") for n in (-1, 1))
                elif len(node.args) == 1 and ast.unparse(func.value) in ("np", "torch"):
                    yield from (self._around(node.args[0], f"{{}}, {n}") for n in (-1, 1))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start, end = self.lines[node.lineno - 1], self.lines[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def _swapped(self, left: ast.expr, right: ast.expr) -> tuple[int, int, str]:
        """Another operator between two operands."""
        (_, start), (end, _) = self._span(left), self._span(right)
        between = self.source[start:end].decode("latin-1")  # a character for each byte
        between = re.sub("#.*", lambda comment: " " * len(comment[0]), between)
        operator = OPERATOR.search(between)
        return start + operator.start(), start + operator.end(), SWAPS[operator[0]]

    def _around(self, node: ast.expr, pattern: str) -> tuple[int, int, str]:
        start, end = self._span(node)
        return start, end, pattern.format(self.source[start:end].decode())


def draw(paths: list[str], count: int, seed: int) -> list[Change]:
    """Changes at places drawn at random; a smaller count gives the first of the same ones."""
    files = set()
    for path in map(Path, paths):
        files |= {path} if path.is_file() else {*path.rglob("*.py")}
    places = [place for file in sorted(files) for place in Places(file.as_posix()).found]
    rng = random.Random(seed)
    rng.shuffle(places)
    return [rng.choice(place) for place in places[:count]]
