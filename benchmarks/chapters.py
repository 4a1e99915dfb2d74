"""How long the chapters run: every notebook from its first cell to its last, in a fresh kernel.

python benchmarks/chapters.py                    writes lesson_code/results/chapters.json
python benchmarks/chapters.py --output FILE      writes another file
python benchmarks/chapters.py --chapters 02 08   runs a few

The seconds include starting the kernel and importing. The notebooks are read, not written.
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from lesson_code import results

BOOK = Path(__file__).resolve().parent.parent / "book"
NAMED = ["numpy", "torch", "matplotlib", "scikit-learn", "ipykernel", "jupyter-book"]


def run(path):
    """The seconds that a notebook takes."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": BOOK}}).execute()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chapters", nargs="+", default=[""])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb")):
        if path.name.startswith(tuple(options.chapters)):
            rows.append({"chapter": path.stem, "seconds": round(run(path), 1)})
            print(f"{path.stem}: {rows[-1]['seconds']} s", flush=True)
    result = {
        "what": "seconds that each chapter's notebook runs, with the start of its kernel",
        "versions": {name: version(name) for name in NAMED},
        "rows": rows,
    }
    results.save("chapters", result, output=options.output)


if __name__ == "__main__":
    main()
