"""Pages that stand nowhere in the list of contents share their sidebar.

Sphinx adds more than a hundred, such as those of source code. The theme makes the list of contents
for each page anew, which would take a sixth of the time of a build. From pages in equally deep
folders its links are the same, and no entry is that of the page.
"""

from __future__ import annotations

from functools import partial

from sphinx.application import Sphinx


def share(
    made: dict, app: Sphinx, pagename: str, templatename: str, context: dict, doctree
) -> None:
    make = context.get("generate_toctree_html")
    if doctree is not None or make is None:
        return

    def find(*args, **options):
        key = pagename.count("/"), args, tuple(sorted(options.items()))
        if key not in made:
            made[key] = make(*args, **options)
        return made[key]

    context["generate_toctree_html"] = find


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", partial(share, {}), priority=900)  # after the theme's own
