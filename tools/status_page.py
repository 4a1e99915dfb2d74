"""The status page: its tables are made from the committed results.

They say how long each chapter runs, where that was measured, and with which versions; when kernels
were last measured on a GPU, or that they have not been; and all files of results.
"""

from __future__ import annotations

import json
from pathlib import Path

from sphinx.application import Sphinx

PAGE = "book/status"
RESULTS = "lesson_code/results"


def read_results(root: Path) -> dict[str, dict]:
    """All committed results, by the names of their files."""
    files = sorted((root / RESULTS).glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in files}


def on_a_gpu(results: dict[str, dict]) -> dict[str, dict]:
    """Those that a GPU has measured."""
    return {name: result for name, result in results.items() if name.endswith("_cuda.json")}


def machines(result: dict) -> list[dict]:
    """Those that a result comes from; runs that are trained may come from several."""
    found = result["machine"]
    return found if isinstance(found, list) else [found]


def where(result: dict) -> str:
    """The machines of a result in a few words."""
    devices = " and ".join(dict.fromkeys(machine["device"] for machine in machines(result)))
    threads = machines(result)[0]["threads"]
    return f"{devices}, {threads} thread{'s' if threads != 1 else ''}"


def torch_of(result: dict) -> str:
    """The versions of torch that a result comes from."""
    return ", ".join(dict.fromkeys(machine["torch"] for machine in machines(result)))


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
        [f"`{name}`", result["what"], result["date"], where(result), torch_of(result)]
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


def write_tables(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the tables into their page before it is read."""
    if docname != PAGE:
        return
    results = read_results(Path(app.srcdir))
    for name in results:
        app.env.note_dependency(f"{RESULTS}/{name}")
    for write in (chapters, gpu, files):
        source[0] = source[0].replace(f"% ({write.__name__})", "\n".join(write(results)))


def setup(app: Sphinx) -> None:
    app.connect("source-read", write_tables)
