"""Pages that stand nowhere in the list of contents share it.

Sphinx adds more than a hundred, such as those of source code, and would make the list for each page
anew, which takes a sixth of the time of a build. From pages in equally deep folders its links are
the same, and no entry is that of the page.
"""

from __future__ import annotations

from functools import cache, partial

from sphinx.application import Sphinx


def share(
    made: dict, app: Sphinx, pagename: str, templatename: str, context: dict, doctree
) -> None:
    if doctree is None:
        context["toctree"] = made.setdefault(pagename.count("/"), cache(context["toctree"]))


def setup(app: Sphinx) -> None:
    # Before the theme, which makes its sidebar as soon as it is told of a page.
    app.connect("html-page-context", partial(share, {}), priority=100)
