"""A Sphinx extension: no line begins with the comma that belongs to the formula before it.

A browser may break a line after a formula, as after a picture.
"""

import re

from sphinx.application import Sphinx

# A formula, and the punctuation that touches it. The TeX in the page is escaped: it has no "<".
FORMULA = re.compile(r'(<span class="math notranslate nohighlight">[^<]*</span>)([,.;:!?)\]’”]+)')


def keep_together(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    if body := context.get("body"):
        context["body"] = FORMULA.sub(r'<span class="together">\1\2</span>', body)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", keep_together)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
