"""Pages load less, and keep their place while they do.

The theme's icons come as a font; the script that holds all of them once more is left out. Pictures
say how large they are, so that the text below them does not move when they arrive, and text waits a
moment for its formulas (`formulas.js`). No line begins with the comma that belongs to the formula
before it: a browser may break a line after a formula, as after a picture.
"""

from __future__ import annotations

import re
from pathlib import Path

import imagesize
from markupsafe import Markup
from sphinx.application import Sphinx
from sphinx.config import Config

ICON_SCRIPT = re.compile(r"<script[^>]*/fontawesome\.js[^>]*></script>")
# A formula, and the punctuation that touches it. The TeX in the page is escaped: it has no "<".
FORMULA = re.compile(r'(<span class="math notranslate nohighlight">[^<]*</span>)([,.;:!?)\]’”]+)')


def without_icon_script(head: str) -> Markup:
    """The head of a page without the script; the theme's next version may need another pattern."""
    text, count = ICON_SCRIPT.subn("", head)
    if count != 1:
        raise ValueError(f"the page's head must load fontawesome.js once, found {count}")
    return Markup(text)


def settle(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    context["without_icon_script"] = without_icon_script  # for the template
    sources = {name: Path(app.srcdir, path) for path, name in app.builder.images.items()}

    def sized(image: re.Match[str]) -> str:
        tag = image[0]
        name = re.search(r'\bsrc="(?:[^"]*/)?_images/([^"]+)"', tag)
        if not name or re.search(r"\s(width|height|style)=", tag) or name[1] not in sources:
            return tag
        width, height = map(round, imagesize.get(sources[name[1]]))  # -1 where it does not say
        return tag.replace("<img", f'<img width="{width}" height="{height}"') if width > 0 else tag

    if body := context.get("body"):
        body = re.sub(r"<img\s[^>]*>", sized, body)
        context["body"] = FORMULA.sub(r'<span class="together">\1\2</span>', body)


def use_templates(app: Sphinx, config: Config) -> None:
    config.templates_path.insert(0, str(Path(__file__).parent / "templates"))


def setup(app: Sphinx) -> None:
    app.add_js_file("formulas.js", priority=850)  # after the script that announces MathJax
    app.connect("config-inited", use_templates)
    app.connect("html-page-context", settle)
