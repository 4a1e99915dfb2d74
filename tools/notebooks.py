"""What is done to the book's notebooks outside Jupyter.

python tools/notebooks.py execute [NOTEBOOK ...]   run them and store their outputs
python tools/notebooks.py tidy [NOTEBOOK ...]      put them into the committed form, with the
                                                   outputs they have; fail if one was not in it
python tools/notebooks.py address URL              set the repository's address, in _config.yml
                                                   and in the first cell of every notebook
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = {"tags", "mystnb"}  # what the book reads; the rest is how an editor showed the cell

FIRST_CELL = """\
from importlib.metadata import distributions  # installs lesson_code in Colab
SOURCE, NEEDED = "{source}", "{version}"
numbers = [d.version.split(".") for d in distributions(name="linear-attention-book")]
if SOURCE and not any([int(n) for n in v] >= [int(n) for n in NEEDED.split(".")] for v in numbers):
    %pip install --quiet --no-deps {{SOURCE}}"""


def repository_url(root: Path = ROOT) -> str:
    """The repository's address as `_config.yml` has it, "" where the owner has not set it."""
    return yaml.safe_load((root / "_config.yml").read_text())["repository"]["url"]


def first_cell(url: str, root: Path = ROOT) -> str:
    """The cell with which every notebook begins."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return FIRST_CELL.format(source=url and f"git+{url}", version=project["version"])


def set_address(url: str, root: Path = ROOT) -> None:
    """Write the repository's address into `_config.yml` and the notebooks of the tree at `root`."""
    config = root / "_config.yml"
    colab = "https://colab.research.google.com" if url else ""
    text = re.sub(r"(?m)^(  url:).*$", rf'\1 "{url}"', config.read_text(), count=1)
    text = re.sub(r"(?m)^(  colab_url:).*$", rf'\1 "{colab}"', text, count=1)
    config.write_text(text)
    for path in sorted((root / "book").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = first_cell(url, root)
        nbformat.write(notebook, path)


def execute(path: Path) -> None:
    """Run a notebook in its own folder and store its outputs, but neither hours nor versions."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = first_cell(repository_url())
    NotebookClient(
        notebook,
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    ).execute()
    nbformat.write(_in_form(notebook), path)


def tidy(path: Path) -> bool:
    """Put a notebook into the form in which it is committed; whether anything was to do.

    Outputs stay: the book shows them, and the tests compare them. What goes is what an editor or a
    second run leaves behind. Cells that have all been run are counted from 1 again.
    """
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=4)
    notebook.cells[0].source = first_cell(repository_url())
    nbformat.write(_in_form(notebook), path)
    return path.read_text(encoding="utf-8") != before


def _in_form(notebook: NotebookNode) -> NotebookNode:
    notebook.metadata = METADATA
    first, *others = notebook.cells
    notebook.cells = [first, *(cell for cell in others if cell.source.strip())]
    for cell in notebook.cells:
        cell.source = cell.source.strip("\n")
        for key in cell.metadata.keys() - CELL_METADATA:
            del cell.metadata[key]
    run = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if all(cell.execution_count for cell in run):
        for count, cell in enumerate(run, start=1):
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
    return notebook


def main() -> None:
    match sys.argv[1:]:
        case ["address", url]:
            set_address(url.rstrip("/"))
        case ["execute", *names]:
            for path in [Path(name).resolve() for name in names] or NOTEBOOKS:
                print(f"executing {path.name}", flush=True)
                execute(path)
        case ["tidy", *names]:
            changed = [path for path in map(Path, names or NOTEBOOKS) if tidy(path)]
            for path in changed:
                print(f"tidied {path.name}")
            sys.exit(bool(changed))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
