"""The book's own Sphinx extension. Each part is a file beside this one, and has a function `setup`.

What authors run is no part of it: `notebooks.py`, `mutate.py` and `pdf.py`.
"""

from functools import partial
from importlib import import_module

PARTS = [
    "code_links",
    "glossary",
    "legend",
    "light_pages",
    "page_heads",
    "reading_map",
    "sidebars",
    "status_page",
    "symbol_search",
    "equation_links",
    "exercises",
]


def keep_lines_whole() -> None:
    """A kernel sends what a cell prints in pieces, which may end in the middle of a line.

    nbclient joins them if it is told to; jupyter-cache, which runs the notebooks, cannot be told.
    """
    from jupyter_cache.executors import utils

    utils.executenb = partial(utils.executenb, coalesce_streams=True)


def setup(app):
    keep_lines_whole()
    for name in ("comforts.css", "print.css"):
        app.add_css_file(name, priority=850)  # after the theme's styles and the book's
    for part in PARTS:
        import_module(f"tools.{part}").setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
