"""The notebooks as Colab opens them: one file, alone, where lesson_code is not installed yet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

import lesson_code
from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent
NAME = "linear-attention-book"
COLAB = ["ipykernel", "numpy", "scipy", "torch", "matplotlib", "scikit-learn", "tqdm"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "notebook" in metafunc.fixturenames:
        chosen = notebooks.NOTEBOOKS
        if not metafunc.config.option.all_notebooks:
            chosen = chosen[:1]
        metafunc.parametrize("notebook", chosen, ids=lambda path: path.stem)


# --- The whole notebook, in an environment of its own ------------------------------------------


@pytest.fixture(scope="module")
def colab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of a fresh environment that holds only what Colab brings."""
    folder = tmp_path_factory.mktemp("colab")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    torch = re.search(r"(?m)^torch==[\w.]+", pins)[0]
    packages = [torch if name == "torch" else name for name in COLAB]
    try:
        install = ["-m", "pip", "install", "--quiet", "--no-compile", "--retries=1"]
        result = run(python, *install, *packages)
        if "(from versions: none)" in result.stderr:
            pytest.skip("pip reaches no package index: check the network connection")
        assert result.returncode == 0, result.stderr
        yield python
    finally:
        shutil.rmtree(folder)  # it is large, and pytest would keep it for three runs


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


def test_a_notebook_runs_alone(
    colab: Path, published: Path, notebook: Path, tmp_path: Path
) -> None:
    run(colab, "-m", "pip", "uninstall", "--yes", NAME)
    before = installed(colab)
    assert NAME not in before

    kernel = tmp_path / "jupyter" / "kernels" / "colab"
    kernel.mkdir(parents=True)
    argv = [str(colab), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Colab", "language": "python", "env": {"PYTHONPATH": ""}}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    empty = tmp_path / "content"
    empty.mkdir()

    content = nbformat.read(published / "book" / notebook.name, as_version=4)
    assert published.as_uri() in content.cells[0].source
    again = nbformat.v4.new_code_cell(content.cells[0].source)
    content.cells.insert(1, again)  # readers run the first cell twice
    after = []
    client = NotebookClient(
        content,
        kernel_name="colab",
        timeout=600,
        resources={"metadata": {"path": empty}},
        on_cell_executed=lambda cell_index, **_: cell_index < 2 and after.append(installed(colab)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
        client.execute()

    first, second = after
    assert first[NAME] == lesson_code.__version__
    assert second == first  # the second time, nothing was installed
    assert {name: first[name] for name in before} == before  # NumPy and torch among them
    assert set(first) - set(before) == {NAME, "written"}


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
