"""The notebooks of exercises: one for each chapter, without solutions, made from the chapter.

They are written into the site's folder `exercises` and offered at the heading "Exercises" of each
chapter. Below each exercise stands the line that checks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

import nbformat
from docutils import nodes
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pybtex.database import parse_file

from lesson_code.exercises import Exercise, find_exercise
from tools import notebooks
from tools.book import ROOT, Chapter, chapters, config

SETUP = "exercise-setup"
DIRECTIVE = re.compile(
    r"^(?P<fence>(?P<mark>[`:])(?P=mark){2,})\{(?P<kind>[\w:-]+)\} *(?P<argument>.*)\n"
    r"(?P<options>(?::[\w-]+:.*\n)*)(?P<content>(?:.*\n)*?)(?P=fence)(?P=mark)*\s*$",
    re.MULTILINE,
)


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
    begin = 0
    for found in [*DIRECTIVE.finditer(text), None]:
        if plain := text[begin : found.start() if found else None].strip():
            yield Block("text", plain)
        if found:
            options = dict(re.findall(r":([\w-]+): *(.*)", found["options"]))
            argument, content = found["argument"].strip(), found["content"].strip()
            yield Block(found["kind"], content, argument, options)
            begin = found.end()


def chapter_blocks(chapter: Chapter) -> Iterator[Block]:
    for cell in chapter.cells:
        if cell.cell_type == "markdown":
            yield from blocks_of(cell.source)
        else:
            yield Block("code", cell.source)


def exercise_parts(chapter: Chapter) -> Iterator[Block]:
    """What a chapter has from its first exercise on, without the solutions.

    Code that belongs to an exercise is a block of kind "code", the place of an answer one of kind
    "solution-start".
    """
    solving = False
    for block in dropwhile(lambda block: block.kind != "exercise", chapter_blocks(chapter)):
        if block.kind == "solution-end":
            solving = False
        elif not solving:
            heading = (
                re.search(r"(?m)^(\([\w-]+\)=\n)?##? ", block.text)
                if block.kind == "text"
                else None
            )
            if heading:  # another section begins
                block.text = block.text[: heading.start()].strip()
            if block.kind != "text" or block.text:
                yield block
            if heading:
                return
            solving = block.kind == "solution-start"


# --- MyST as plain Markdown --------------------------------------------------------------------


@dataclass
class Names:
    """Knows what labels stand for, and so turns MyST into Markdown that any notebook shows."""

    words: dict[str, str]  # chapters, sections, exercises, figures
    equations: dict[str, tuple[str, str]]  # number and formula
    sources: dict[str, tuple[str, str]]  # authors and year
    macros: dict[str, str]  # of TeX
    repository: dict[str, str]

    @classmethod
    def of(cls, root: Path) -> Names:
        words, equations = {}, {}
        for chapter in chapters(root):
            for cell in chapter.cells:
                if figure := cell.metadata.get("mystnb", {}).get("figure"):
                    words[figure["name"]] = f"the figure “{figure['caption'].rstrip('.')}”"
            headings = re.findall(r"(?m)^\(([\w-]+)\)=\n(#+) +(.*)$", chapter.text)
            for label, mark, title in headings:
                words[label] = f"{'chapter' if mark == '#' else 'the section'} “{title}”"
            for n, (label, formula) in enumerate(chapter.equations.items(), start=1):
                equations[label] = f"{chapter.number}.{n}", formula
            exercises = [block for block in blocks_of(chapter.text) if block.kind == "exercise"]
            for n, exercise in enumerate(exercises, start=1):
                words[exercise.options["label"]] = f"exercise {chapter.number}.{n}"
        settings = config(root)
        macros = settings["sphinx"]["config"]["mathjax3_config"]["tex"]["macros"]
        sources = sources_of(root / "book" / "references.bib")
        return cls(words, equations, sources, macros, settings["repository"])

    def markdown(self, text: str) -> str:
        """A text, and below it the equations that it refers to."""
        body = self.body(text)
        labels = dict.fromkeys(re.findall(r"\{eq\}`([\w-]+)`", text))
        quoted = [
            f"{number}: $\\displaystyle {' '.join(self.tex(formula).split())}$"
            for number, formula in (self.equations[label] for label in labels)
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
            return f"Eq. {self.equations[content][0]}"
        if role in ("ref", "numref"):
            return self.words[content]
        if role.startswith("cite"):
            entries = [self.sources[key.strip()] for key in content.split(",")]
            if role == "cite:t":
                return ", ".join(f"{who} ({year})" for who, year in entries)
            return "(" + "; ".join(f"{who}, {year}" for who, year in entries) + ")"
        if role == "math":
            return f"${content}$"
        if role.startswith("py:"):
            name = content.rpartition(".")[2] if content.startswith("~") else content
            return f"`{name}`"
        return content


def sources_of(path: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for key, entry in parse_file(str(path)).entries.items():
        authors = [
            " ".join(map(str, person.rich_prelast_names + person.rich_last_names))
            for person in entry.persons.get("author", [])
        ]
        authors = " and ".join(authors if len(authors) < 3 else [f"{authors[0]} et al."])
        found[key] = authors, entry.fields.get("year", "")
    return found


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
    chapter: Chapter, names: Names, *, root: Path = ROOT, address: str = ""
) -> NotebookNode:
    """The notebook of exercises of a chapter; `address` is that of the site, if it has one."""
    path = chapter.path
    url, branch = names.repository["url"], names.repository["branch"]
    title = chapter.title
    link = title
    if address:
        link = f"[{title}]({address}book/{path.stem}.html)"
    elif url:
        link = f"[{title}]({url}/blob/{branch}/_sources/book/{path.name})"
    cells = [
        new_code_cell(notebooks.first_cell(url, root)),
        new_markdown_cell(
            f"# Exercises: {title}\n\n"
            f"These are the exercises of chapter {chapter.number}, {link}, without their "
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
            head = f"## {number}. {names.body(block.argument)}"
            cells.append(new_markdown_cell(f"{head}\n\n{names.markdown(block.text)}"))
        elif block.kind == "hint":
            hint = (
                f"<details>\n<summary>Hint</summary>\n\n{names.markdown(block.text)}\n\n</details>"
            )
            if cells[-1].cell_type == "markdown":
                cells[-1].source += f"\n\n{hint}"
            else:  # it stands below code that belongs to the exercise
                cells.append(new_markdown_cell(hint))
        elif block.kind == "code":
            cells.append(new_code_cell(block.text))
        elif block.kind == "solution-start":
            cells.append(new_code_cell(answer_cell(known_exercise(block.argument))))
        elif block.kind == "text":
            cells.append(new_markdown_cell(names.markdown(block.text)))
        else:
            raise ValueError(f"{path.name}: a {block.kind} directive between exercises")
    for i, cell in enumerate(cells):
        cell["id"] = f"exercises-{i}"
    notebook = new_notebook(cells=cells, metadata=notebooks.METADATA)
    nbformat.validate(notebook)
    return notebook


def write_notebooks(folder: Path, *, root: Path = ROOT, address: str = "") -> list[Path]:
    """Write the notebooks of exercises of all chapters into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names, written = Names.of(root), []
    for chapter in chapters(root):
        written.append(folder / chapter.path.name)
        notebook = exercise_notebook(chapter, names, root=root, address=address)
        nbformat.write(notebook, written[-1])
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
    docname, root = app.env.docname, Path(app.srcdir)
    if docname not in [chapter.docname for chapter in chapters(root)]:
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
        name = f"{Path(docname).name}.ipynb"
        address = f"{'../' * docname.count('/')}exercises/{name}"
        links = f'<a class="reference download" download href="{address}">download the notebook</a>'
        if colab := colab_link(config(root)["repository"], name):
            links += f', or <a class="reference external" href="{colab}">open it in Colab</a>'
        offer = (
            '<p class="exercise-notebook">Just the exercises, with a cell for each answer: '
            f"{links}. The call below an exercise checks your answer to it, and says what is wrong "
            "and where to look.</p>\n"
        )
        section.insert(1, nodes.raw("", offer, format="html"))


def write_into_site(app, trouble: Exception | None) -> None:
    if trouble is None and app.builder.format == "html":
        write_notebooks(
            Path(app.outdir) / "exercises",
            root=Path(app.srcdir),
            address=app.config.html_baseurl,
        )


def setup(app) -> None:
    app.connect("doctree-read", offer_notebook)
    app.connect("build-finished", write_into_site)
