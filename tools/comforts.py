"""A Sphinx extension: what makes pages comfortable to read. Each part is a file beside this one."""

from sphinx.application import Sphinx

PARTS = [
    "glossary_links",
    "legend",
    "light_pages",
    "page_heads",
    "punctuation",
    "reading_map",
    "status_page",
    "symbol_search",
]


def setup(app: Sphinx) -> dict[str, bool]:
    for part in PARTS:
        app.setup_extension(part)
    for name in ("comforts.css", "print.css"):
        app.add_css_file(name, priority=850)  # after the theme's styles and the book's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
