"""Pages that stand nowhere in the list of contents share their sidebar.

Sphinx adds more than a hundred, such as those of source code. The theme makes the list of contents
for each page anew, which would take a sixth of the time of a build. From pages in equally deep
folders its links are the same, and no entry is that of the page. The theme's function keeps what it
has made, so that of the first page serves the others.
"""

from __future__ import annotations

from functools import partial

from sphinx.application import Sphinx


def share(
    made: dict, app: Sphinx, pagename: str, templatename: str, context: dict, doctree
) -> None:
    if doctree is None and (make := context.get("generate_toctree_html")):
        context["generate_toctree_html"] = made.setdefault(pagename.count("/"), make)


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", partial(share, {}), priority=900)  # after the theme's own
