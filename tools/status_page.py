"""A Sphinx extension: the tables of the status page, made from the committed results.

`status-chapters` says how long each chapter runs, where that was measured, and with which versions;
`status-results` lists all files of results; `status-gpu` says when kernels were last measured on a
GPU, or that they have not been.
"""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RESULTS = "lesson_code/results"


def read_results(root: Path) -> dict[str, dict]:
    """All committed results, by the names of their files."""
    files = sorted((root / RESULTS).glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}


def on_a_gpu(results: dict[str, dict]) -> dict[str, dict]:
    """Those that a GPU has measured."""
    return {name: result for name, result in results.items() if name.endswith("_cuda.json")}


def where(result: dict) -> str:
    """The machine of a result in a few words."""
    machine = result["machine"]
    threads = machine["threads"]
    return f"{machine['device']}, {threads} thread{'s' if threads != 1 else ''}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def chapters(results: dict[str, dict]) -> list[str]:
    result = results["chapters.json"]
    machine = result["machine"]
    versions = {"Python": machine["python"], **result["versions"], "torch": machine["torch"]}
    total = sum(row["seconds"] for row in result["rows"])
    rows = [[f"{{doc}}`{row['chapter']}`", f"{row['seconds']:.0f}"] for row in result["rows"]]
    return [
        f"Measured on {result['date']}, {where(result)}, with "
        f"{', '.join(f'{name} {number}' for name, number in versions.items())}.",
        "",
        *table(["chapter", "seconds"], [*rows, ["all", f"{total:.0f}"]]),
    ]


def files(results: dict[str, dict]) -> list[str]:
    rows = [
        [f"`{name}`", result["what"], result["date"], where(result), result["machine"]["torch"]]
        for name, result in results.items()
    ]
    return table(["file", "what", "date", "machine", "torch"], rows)


def gpu(results: dict[str, dict]) -> list[str]:
    found = on_a_gpu(results)
    if not found:
        return [
            "No results from a GPU are committed yet. The kernels run on a CPU, by the emulator, "
            "which counts what they do; what this book says about their speed on a GPU are bounds. "
            "`make bench-gpu` measures it where there is one."
        ]
    last = max(found.values(), key=lambda result: result["date"])
    return [f"Last measured on {last['date']}, {where(last)}.", "", *files(found)]


class StatusTable(SphinxDirective):
    """What one of the functions above writes, read as Markdown."""

    write = staticmethod(files)

    def run(self) -> list[nodes.Node]:
        root = Path(self.env.srcdir)
        for path in (root / RESULTS).glob("*.json"):
            self.env.note_dependency(str(path.relative_to(root)))
        lines = self.write(read_results(root))
        container = nodes.container()
        self.state.nested_parse(StringList(lines, RESULTS), self.content_offset, container)
        return container.children


def setup(app: Sphinx) -> dict[str, bool]:
    for name, write in {"chapters": chapters, "results": files, "gpu": gpu}.items():
        directive = type(f"Status{name.title()}", (StatusTable,), {"write": staticmethod(write)})
        app.add_directive(f"status-{name}", directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
