"""The notebooks as Colab opens them: one file, alone, where lesson_code is not installed yet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lesson_code
from tools import book, exercises, notebooks

ROOT = Path(__file__).resolve().parent.parent
NAME = "linear-attention-book"
COLAB = ["ipykernel", "numpy", "scipy", "torch", "matplotlib", "scikit-learn", "tqdm"]
COLAB += ["transformers"]  # in Colab it may be older; the chapter that needs it says what to do
PIP = ["-m", "pip", "install", "--quiet", "--retries=1"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, every, one in (
        ("notebook", notebooks.NOTEBOOKS, "01"),
        (
            "chapter",
            [chapter.path for chapter in book.chapters()],
            "03",
        ),  # what it imports is loaded in no time
    ):
        if fixture in metafunc.fixturenames:
            if not metafunc.config.option.all_notebooks:
                every = [path for path in every if path.name.startswith(one)]
            metafunc.parametrize(fixture, every, ids=lambda path: path.stem)


# --- The whole notebook, in an environment of its own ------------------------------------------


def with_dependencies(names: list[str]) -> dict[str, Distribution]:
    """The installed packages of these names, and all that they need."""
    found: dict[str, Distribution] = {}
    missing = [Requirement(name) for name in names]
    while missing:
        needed = missing.pop()
        if canonicalize_name(needed.name) in found:
            continue
        own = found[canonicalize_name(needed.name)] = distribution(needed.name)
        every = [Requirement(line) for line in own.requires or []]
        missing += [x for x in every if x.marker is None or x.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of a fresh environment that holds only what Colab brings.

    Its packages are those of this environment, pip too, by links: to install them again takes a
    minute. A package without a RECORD is one that pip refuses to change.
    """
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    variables = {"base": folder, "platbase": folder}
    packages = Path(sysconfig.get_path("purelib", "venv", variables))
    for own in with_dependencies([*COLAB, "pip"]).values():
        for top in {file.parts[0] for file in own.files} - {"..", "__pycache__"}:
            place, found = packages / top, own.locate_file(top)
            if top.endswith(".dist-info"):
                shutil.copytree(found, place, ignore=shutil.ignore_patterns("RECORD"))
            elif not place.exists():
                place.symlink_to(found)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    if "(from versions: none)" in run(python, *PIP, "--dry-run", "--upgrade", *build).stderr:
        pytest.skip("pip reaches no package index: check the network connection")
    yield python
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def published(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository of the working tree, with its own address set."""
    folder = tmp_path_factory.mktemp("published") / "book"
    shutil.copytree(tree, folder)
    notebooks.set_address(folder.as_uri(), folder)
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "All"]):
        subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def published_exercises(
    published: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The notebooks of exercises as the published tree makes them, by their names."""
    folder = tmp_path_factory.mktemp("exercises")
    return {path.name: path for path in exercises.write_notebooks(folder, root=published)}


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *arguments], capture_output=True, text=True, check=False)


def installed(python: Path) -> dict[str, str]:
    """The versions of all packages, and for lesson_code when it was written."""
    script = f"""
import json
from importlib.metadata import distributions
found = {{d.name: d.version for d in distributions()}}
for d in distributions(name="{NAME}"):
    found["written"] = str(d.locate_file(d._path / "RECORD").stat().st_mtime_ns)
print(json.dumps(found))
"""
    result = run(python, "-I", "-c", script)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def run_alone(
    python: Path, path: Path, published: Path, folder: Path, *, fresh: bool = True
) -> list[nbformat.NotebookNode]:
    """Run a notebook in an empty folder, and see that its first cell brings `lesson_code` only.

    Where it need not be `fresh`, an earlier notebook may have installed it. Returns the cells with
    their outputs.
    """
    if fresh:
        run(python, "-m", "pip", "uninstall", "--yes", NAME)
    before = installed(python)
    assert not (fresh and NAME in before)

    kernel = folder / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Colab", "language": "python", "env": {"PYTHONPATH": ""}}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    empty = folder / "content"
    empty.mkdir()

    content = nbformat.read(path, as_version=4)
    assert published.as_uri() in content.cells[0].source
    assert content.cells[0].source == notebooks.first_cell(published.as_uri(), published)
    again = nbformat.v4.new_code_cell(content.cells[0].source)
    content.cells.insert(1, again)  # readers run the first cell twice
    after = []
    client = NotebookClient(
        content,
        kernel_name="colab",
        timeout=600,
        resources={"metadata": {"path": empty}},
        on_cell_executed=lambda cell_index, **_: cell_index < 2 and after.append(installed(python)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        client.execute()

    first, second = after
    assert first[NAME] == lesson_code.__version__
    assert second == first  # the second time, nothing was installed
    assert {name: first[name] for name in before} == before  # NumPy and torch among them
    assert set(first) == set(before) | {NAME, "written"}
    return content.cells


def said(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_notebook_runs_alone(
    colab: Path, published: Path, notebook: Path, tmp_path: Path
) -> None:
    run_alone(colab, published / "book" / notebook.name, published, tmp_path)


def test_a_notebook_of_exercises_runs_alone(
    colab: Path,
    published: Path,
    published_exercises: dict[str, Path],
    chapter: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    """As a reader finds it: nothing is written yet, and each check asks for what is missing.

    That the checks accept the solutions is tried in tests/test_exercises.py.
    """
    path = published_exercises[chapter.name]
    fresh = pytestconfig.option.all_notebooks  # to install it once more would take longer than all
    asked = 0
    for cell in run_alone(colab, path, published, tmp_path, fresh=fresh):
        if cell.cell_type == "code" and (
            call := re.search(r'check_exercise\(\s*"([\w-]+)"', cell.source)
        ):
            assert re.search(rf"(?m)^{call[1]}: write .*, then run", said(cell)), cell
            asked += 1
    assert asked >= 2  # by hand, and in code


def test_a_chapter_that_uses_a_gpu_says_what_it_does_without_one() -> None:
    """Its cell that looks for a GPU says so, on the page and in Colab."""
    found = []
    for chapter in book.chapters():
        cells = [cell for cell in chapter.cells if cell.cell_type == "code"]
        looking = [cell for cell in cells if "cuda.is_available" in cell.source]
        if any('"cuda"' in cell.source for cell in cells):
            assert looking, chapter
        for cell in looking:
            assert re.search(r"(?m)^[A-Z].*, as there is no GPU\.$", said(cell)), chapter
        found += looking
    assert found


# --- The first cell by itself ------------------------------------------------------------------


class Shell:
    """Stands for IPython and notes the magics that a cell calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run_line_magic(self, name: str, line: str) -> None:
        self.lines.append(f"%{name} {line}")


def magics(
    url: str, versions: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The magics that the first cell of version 0.1.0 calls where `versions` are installed."""
    for version in versions:
        info = folder / version / f"linear_attention_book-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    places = [str(folder / version) for version in versions]
    monkeypatch.setattr(sys, "path", [*places, sysconfig.get_path("stdlib")])
    monkeypatch.setattr(notebooks.tomllib, "loads", lambda _: {"project": {"version": "0.1.0"}})
    shell = Shell()
    variables = {"get_ipython": lambda: shell}
    exec(TransformerManager().transform_cell(notebooks.first_cell(url)), variables)
    return [line.format(**variables) for line in shell.lines]


@pytest.mark.parametrize("versions", [[], ["0.0.9"], ["0.0.10"], ["0.0.1", "0.0.2"]], ids=str)
def test_the_first_cell_installs_what_is_missing_or_old(versions, tmp_path, monkeypatch) -> None:
    lines = magics("https://example.org/book", versions, tmp_path, monkeypatch)
    assert lines == ["%pip install --quiet --no-deps git+https://example.org/book"]


@pytest.mark.parametrize(
    "versions", [["0.1.0"], ["0.1.1"], ["0.2.0"], ["0.10.0"], ["1.0"], ["0.0.1", "0.1.0"]], ids=str
)
def test_the_first_cell_keeps_what_is_new_enough(versions, tmp_path, monkeypatch) -> None:
    assert magics("https://example.org/book", versions, tmp_path, monkeypatch) == []


@pytest.mark.parametrize("versions", [[], ["0.0.9"]], ids=str)
def test_the_first_cell_installs_nothing_without_an_address(
    versions, tmp_path, monkeypatch
) -> None:
    assert magics("", versions, tmp_path, monkeypatch) == []
