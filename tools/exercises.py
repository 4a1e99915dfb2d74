"""The notebooks of exercises: one for each chapter, without solutions, made from the chapter.

python tools/exercises.py [FOLDER]   write them all, into _build/exercises by default

As a Sphinx extension it writes them into the site's folder `exercises`, offers them at the heading
"Exercises" of each chapter, and puts below each exercise the line that checks it.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import latexcodec  # noqa: F401  gives codecs.decode(..., "ulatex")
import nbformat
import notebooks
import yaml
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pybtex.database import parse_file

from lesson_code.exercises import Exercise, find_exercise

ROOT = Path(__file__).resolve().parent.parent
SETUP = "exercise-setup"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


# --- Reading a chapter -------------------------------------------------------------------------


@dataclass
class Block:
    """A piece of MyST: text, or a directive with its argument, options and content."""

    kind: str
    text: str = ""
    argument: str = ""
    options: dict[str, str] = field(default_factory=dict)


def blocks_of(text: str) -> Iterator[Block]:
    """Split MyST into text and directives; what a directive contains is not split further."""
    lines, plain = iter(text.splitlines()), []
    for line in lines:
        opening = re.match(r"(`{3,}|:{3,})\{([\w:-]+)\} *(.*)$", line)
        if not opening:
            plain.append(line)
            continue
        if "".join(plain).strip():
            yield Block("text", "\n".join(plain).strip())
        plain = []
        fence, kind, argument = opening.groups()
        end = re.compile(re.escape(fence) + re.escape(fence[0]) + r"*\s*$")
        content = []
        for line in lines:
            if end.match(line):
                break
            content.append(line)
        options = {}
        while content and (option := re.match(r":([\w-]+): *(.*)$", content[0])):
            options[option[1]] = option[2]
            content.pop(0)
        yield Block(kind, "\n".join(content).strip(), argument.strip(), options)
    if "".join(plain).strip():
        yield Block("text", "\n".join(plain).strip())


def exercise_parts(notebook: NotebookNode) -> Iterator[Block]:
    """What a chapter has from its first exercise on, without the solutions.

    Code that belongs to an exercise is a block of kind "code", the place of an answer one of kind
    "solution-start".
    """
    started = solving = False
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            if started and not solving:
                yield Block("code", cell.source)
            continue
        for block in blocks_of(cell.source):
            started = started or block.kind == "exercise"
            if block.kind == "solution-end":
                solving = False
                continue
            if not started or solving:
                continue
            heading = re.search(r"(?m)^##? ", block.text) if block.kind == "text" else None
            if heading:  # another section begins
                block.text = block.text[: heading.start()].strip()
            if block.kind != "text" or block.text:
                yield block
            if heading:
                return
            solving = block.kind == "solution-start"


@dataclass
class Names:
    """What is the same for all chapters: what labels stand for, in words, and the settings."""

    words: dict[str, str]  # chapters, sections, exercises, figures
    equations: dict[str, tuple[str, str]]  # number and formula
    sources: dict[str, tuple[str, str]]  # authors and year
    macros: dict[str, str]  # of TeX
    repository: dict[str, str]

    @classmethod
    def of(cls, root: Path) -> Names:
        config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
        macros = config["sphinx"]["config"]["mathjax3_config"]["tex"]["macros"]
        words, equations = {}, {}
        for path in chapters(root):
            number, count = int(path.name[:2]), 0
            notebook = nbformat.read(path, as_version=4)
            for cell in notebook.cells:
                figure = cell.metadata.get("mystnb", {}).get("figure", {})
                if "name" in figure:
                    words[figure["name"]] = f"the figure “{figure['caption'].rstrip('.')}”"
                if cell.cell_type != "markdown":
                    continue
                for label, mark, title in re.findall(
                    r"(?m)^\(([\w-]+)\)=\n(#+) +(.*)$", cell.source
                ):
                    kind = "chapter" if mark == "#" else "the section"
                    words[label] = f"{kind} “{title}”"
                formulas = re.findall(r"(?s)\$\$\n?(.*?)\$\$(?: *\(([\w-]+)\))?", cell.source)
                for formula, label in formulas:
                    if label:
                        n = sum(known.startswith(f"{number}.") for known, _ in equations.values())
                        equations[label] = f"{number}.{n + 1}", formula.strip()
                for block in blocks_of(cell.source):
                    if block.kind == "exercise":
                        count += 1
                        words[block.options["label"]] = f"exercise {number}.{count}"
        sources = sources_of(root / "book" / "references.bib")
        return cls(words, equations, sources, macros, config["repository"])


def sources_of(path: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for key, entry in parse_file(str(path)).entries.items():
        names = [
            " ".join([*x.prelast_names, *x.last_names]) for x in entry.persons.get("author", [])
        ]
        if len(names) > 2:
            names = [f"{names[0]} et al."]
        authors = codecs.decode(" and ".join(names), "ulatex").replace("{", "").replace("}", "")
        found[key] = authors, entry.fields.get("year", "")
    return found


def chapters(root: Path = ROOT) -> list[Path]:
    return sorted(path for path in (root / "book").glob("*.ipynb") if path.name[:2].isdigit())


def title_of(notebook: NotebookNode) -> str:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.search(r"(?m)^# +(.*)$", text)[1]


# --- MyST as plain Markdown --------------------------------------------------------------------


class Converter:
    """Turns MyST into Markdown that any notebook shows."""

    def __init__(self, names: Names, macros: dict[str, str]):
        self.names, self.macros = names, macros

    def __call__(self, text: str) -> str:
        """The text, and below it the equations that it refers to."""
        body = self.body(text)
        labels = dict.fromkeys(re.findall(r"\{eq\}`([\w-]+)`", text))
        quoted = [
            f"{number}: $\\displaystyle {' '.join(self.tex(formula).split())}$"
            for number, formula in (self.names.equations[label] for label in labels)
        ]
        lines = "".join(f"\n\nEq. {line}" for line in quoted)
        return body + lines

    def body(self, text: str) -> str:
        pieces = []
        for block in blocks_of(text):
            if block.kind == "text":
                pieces.append(self.inline(block.text))
            elif block.kind == "math":
                pieces.append(f"$$\n{self.tex(block.text)}\n$$")
            else:  # an admonition of any kind
                title = self.inline(block.argument) or block.kind.capitalize()
                quoted = f"**{title}**\n\n{self.body(block.text)}"
                pieces.append(re.sub(r"(?m)^", "> ", quoted))
        return "\n\n".join(pieces)

    def inline(self, text: str) -> str:
        text = re.sub(r"(?m)^\([\w-]+\)=\n", "", text)
        text = re.sub(r"(?m)^(.*\$\$) *\([\w-]+\)$", r"\1", text)
        text = re.sub(r"\{([\w:+-]+)\}`([^`]+)`", lambda m: self.role(m[1], m[2]), text)
        return self.tex(text)

    def tex(self, text: str) -> str:
        for name, meaning in self.macros.items():
            text = re.sub(rf"\\{name}(?![a-zA-Z])", lambda _, m=meaning: m, text)
        return text

    def role(self, role: str, content: str) -> str:
        written = re.fullmatch(r"(?s)(.*?)\s*<([^<>]+)>", content)
        if written and role != "math":
            return written[1]
        if role == "eq":
            return f"Eq. {self.names.equations[content][0]}"
        if role in ("ref", "numref"):
            return self.names.words[content]
        if role.startswith("cite"):
            entries = [self.names.sources[key.strip()] for key in content.split(",")]
            if role == "cite:t":
                return ", ".join(f"{who} ({year})" for who, year in entries)
            return "(" + "; ".join(f"{who}, {year}" for who, year in entries) + ")"
        if role == "math":
            return f"${content}$"
        if role.startswith("py:"):
            name = content.rpartition(".")[2] if content.startswith("~") else content
            return f"`{name}`"
        return content


# --- Writing a notebook ------------------------------------------------------------------------


def answer_cell(exercise: Exercise | None) -> str:
    """The cell for an answer: what is to be written, and the line that checks it."""
    if exercise is None:
        return "# yours"
    stubs = [part.stub for part in exercise.parts]
    gap = "\n\n" if any(stub.startswith(("def", "class")) for stub in stubs) else "\n"
    return gap.join(stubs) + "\n\n" + exercise.call


def known_exercise(label: str) -> Exercise | None:
    """What `check_exercise` knows of an exercise; open ones may have nothing to check."""
    try:
        return find_exercise(label)
    except ValueError:
        return None


def exercise_notebook(
    path: Path, names: Names, *, root: Path = ROOT, address: str = ""
) -> NotebookNode:
    """The notebook of exercises of a chapter; `address` is that of the site, if it has one."""
    chapter = nbformat.read(path, as_version=4)
    convert = Converter(names, names.macros)
    url, branch = names.repository["url"], names.repository["branch"]
    title = title_of(chapter)
    link = title
    if address:
        link = f"[{title}]({address}book/{path.stem}.html)"
    elif url:
        link = f"[{title}]({url}/blob/{branch}/_sources/book/{path.name})"
    cells = [
        new_code_cell(notebooks.first_cell(url, root)),
        new_markdown_cell(
            f"# Exercises: {title}\n\n"
            f"These are the exercises of chapter {int(path.name[:2])}, {link}, without their "
            "solutions. Replace what is marked *yours* and run the cell. The check says whether an "
            "answer is right and, if not, what is wrong and which section of the chapter clears it "
            "up."
        ),
    ]
    for cell in chapter.cells:
        if cell.cell_type == "code" and SETUP in cell.metadata.get("tags", []):
            cells.append(new_code_cell(cell.source))
    for block in exercise_parts(chapter):
        if block.kind == "exercise":
            number = names.words[block.options["label"]].capitalize()
            head = f"## {number}. {convert.body(block.argument)}"
            cells.append(new_markdown_cell(f"{head}\n\n{convert(block.text)}"))
        elif block.kind == "hint":
            hint = f"<details>\n<summary>Hint</summary>\n\n{convert(block.text)}\n\n</details>"
            if cells[-1].cell_type == "markdown":
                cells[-1].source += f"\n\n{hint}"
            else:  # it stands below code that belongs to the exercise
                cells.append(new_markdown_cell(hint))
        elif block.kind == "code":
            cells.append(new_code_cell(block.text))
        elif block.kind == "solution-start":
            cells.append(new_code_cell(answer_cell(known_exercise(block.argument))))
        elif block.kind == "text":
            cells.append(new_markdown_cell(convert(block.text)))
        else:
            raise ValueError(f"{path.name}: a {block.kind} directive between exercises")
    for i, cell in enumerate(cells):
        cell["id"] = f"exercises-{i}"
    notebook = new_notebook(cells=cells, metadata=METADATA)
    nbformat.validate(notebook)
    return notebook


def write_notebooks(folder: Path, *, root: Path = ROOT, address: str = "") -> list[Path]:
    """Write the notebooks of exercises of all chapters into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names, written = Names.of(root), []
    for path in chapters(root):
        notebook = exercise_notebook(path, names, root=root, address=address)
        nbformat.write(notebook, folder / path.name)
        written.append(folder / path.name)
    return written


# --- The Sphinx extension ----------------------------------------------------------------------


def colab_link(repository: dict[str, str], name: str) -> str:
    """Where Colab opens a published notebook of exercises, "" without an address on GitHub."""
    url = repository["url"]
    if not url.startswith("https://github.com/"):
        return ""
    place = url.replace("https://github.com/", "https://colab.research.google.com/github/")
    return f"{place}/blob/{repository['branch']}/exercises/{name}"


def offer_notebook(app, doctree) -> None:
    """Below the heading "Exercises" of a chapter: its notebook; below each exercise: its check."""
    from docutils import nodes

    docname = app.env.docname
    root = Path(app.srcdir)
    if root / f"{docname}.ipynb" not in chapters(root):
        return
    for exercise in doctree.findall(lambda node: node.tagname.startswith("exercise_")):
        known = known_exercise(exercise.get("label", ""))
        if known is not None and exercise.children:
            call = nodes.literal_block(known.call, known.call, language="python")
            call["classes"].append("exercise-check")
            exercise.children[-1].append(call)
    for section in doctree.findall(nodes.section):
        if section[0].astext() != "Exercises":
            continue
        config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
        name = f"{Path(docname).name}.ipynb"
        up = "../" * docname.count("/")
        # A plain reference would show the file in place of keeping it.
        link = f'<a class="reference download" download href="{up}exercises/{name}">'
        offer = nodes.paragraph(classes=["exercise-notebook"])
        offer += nodes.Text("Just the exercises, with a cell for each answer: ")
        offer += nodes.raw("", f"{link}download the notebook</a>", format="html")
        if colab := colab_link(config["repository"], name):
            offer += nodes.Text(", or ")
            offer += nodes.reference("", "open it in Colab", refuri=colab)
        offer += nodes.Text(
            ". The call below an exercise checks your answer to it, and says what is wrong and "
            "where to look."
        )
        section.insert(1, offer)


def write_into_site(app, trouble: Exception | None) -> None:
    if trouble is None and app.builder.format == "html":
        write_notebooks(
            Path(app.outdir) / "exercises",
            root=Path(app.srcdir),
            address=app.config.html_baseurl,
        )


def setup(app):
    app.connect("doctree-read", offer_notebook)
    app.connect("build-finished", write_into_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]) if len(sys.argv) == 2 else ROOT / "_build" / "exercises"
    for path in write_notebooks(folder):
        print(path)
