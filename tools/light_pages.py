"""A Sphinx extension: pages load less, and keep their place while they do.

The theme's icons come as a font; the script that holds all of them once more is left out. Pictures
say how large they are, so that the text below them does not move when they arrive, and text waits a
moment for its formulas (`formulas.js`).
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import imagesize
from markupsafe import Markup
from sphinx.application import Sphinx
from sphinx.config import Config

TEMPLATES = Path(__file__).parent / "templates"
ICON_SCRIPT = re.compile(r"<script[^>]*/fontawesome\.js[^>]*></script>")
PIXELS = {"": 1.0, "px": 1.0, "pt": 4 / 3, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}


def without_icon_script(head: str) -> Markup:
    """The head of a page without the script; the theme's next version may need another pattern."""
    text, count = ICON_SCRIPT.subn("", head)
    if count != 1:
        raise ValueError(f"the page's head must load fontawesome.js once, found {count}")
    return Markup(text)


def size(path: Path) -> tuple[int, int] | None:
    """Width and height of a picture in CSS pixels, if it says so."""
    if path.suffix != ".svg":
        found = imagesize.get(path)
        return found if min(found) > 0 else None
    root = ElementTree.parse(path).getroot()
    lengths = [
        re.fullmatch(r"([\d.]+)(px|pt|in|cm|mm|)", root.get(k, "")) for k in ("width", "height")
    ]
    if all(lengths):
        return tuple(round(float(found[1]) * PIXELS[found[2]]) for found in lengths)
    box = root.get("viewBox", "").split()
    return (round(float(box[2])), round(float(box[3]))) if len(box) == 4 else None


def add_sizes(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    if not context.get("body"):
        return
    sources = {name: Path(app.srcdir, path) for path, name in app.builder.images.items()}

    def sized(image: re.Match[str]) -> str:
        tag = image[0]
        name = re.search(r'\bsrc="(?:[^"]*/)?_images/([^"]+)"', tag)
        if not name or re.search(r"\s(width|height|style)=", tag) or name[1] not in sources:
            return tag
        found = size(sources[name[1]])
        return tag.replace("<img", f'<img width="{found[0]}" height="{found[1]}"') if found else tag

    context["body"] = re.sub(r"<img\s[^>]*>", sized, context["body"])


def use_templates(app: Sphinx, config: Config) -> None:
    config.templates_path.insert(0, str(TEMPLATES))


def offer_filter(app: Sphinx, pagename: str, templatename: str, context: dict, doctree) -> None:
    context["without_icon_script"] = without_icon_script


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_js_file("formulas.js", priority=850)  # after the script that announces MathJax
    app.connect("config-inited", use_templates)
    app.connect("html-page-context", offer_filter)
    app.connect("html-page-context", add_sizes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
