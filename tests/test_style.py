"""Style, types and the form of notebooks: what the hooks ask of a commit is asked of all files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from tools import notebooks

ROOT = Path(__file__).resolve().parent.parent


def run(*command: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def assert_silent(result: subprocess.CompletedProcess[str], remedy: str) -> None:
    if result.returncode:
        pytest.fail(f"{result.stdout}{result.stderr}\n{remedy}", pytrace=False)


# --- The tree ----------------------------------------------------------------------------------


def test_lint() -> None:
    assert_silent(run("ruff", "check", "--no-cache", "."), "What ruff can mend: make format")


def test_format() -> None:
    assert_silent(run("ruff", "format", "--check", "--no-cache", "."), "To mend it: make format")


def test_types(tmp_path: Path) -> None:
    assert_silent(run("mypy", "--cache-dir", tmp_path), "To see it again: make types")


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_the_committed_form(path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(path, tmp_path))
    assert not notebooks.tidy(copy), f"{path.name}: make tidy"


# --- Notebooks ---------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A chapter that stands in the committed form."""
    return Path(shutil.copy(notebooks.NOTEBOOKS[0], tmp_path / "page.ipynb"))


def change(path: Path, edit) -> bytes:
    """Spoil a notebook; the bytes of it that were good."""
    good = path.read_bytes()
    content = json.loads(good)
    edit(content)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return good


def code_cells(content: dict) -> list[dict]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def of_an_editor(content: dict) -> None:
    content["metadata"]["kernelspec"]["display_name"] = "my environment (3.12)"
    content["metadata"]["language_info"]["version"] = "3.12.1"
    for cell in content["cells"]:
        cell["metadata"] |= {"collapsed": False, "vscode": {"languageId": "python"}}
    for cell in code_cells(content):
        cell["metadata"]["execution"] = {"iopub.execute_input": "2026-01-01T10:00:00Z"}


def run_twice(content: dict) -> None:
    for count, cell in enumerate(code_cells(content), start=41):
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count


def ended_by_an_empty_cell(content: dict) -> None:
    content["cells"].append(nbformat.v4.new_code_cell("", execution_count=None))


def other_address(content: dict) -> None:
    content["cells"][0]["source"] = ["%pip install something"]


@pytest.mark.parametrize("edit", [of_an_editor, run_twice, ended_by_an_empty_cell, other_address])
def test_a_notebook_is_tidied_and_keeps_its_outputs(notebook: Path, edit) -> None:
    good = change(notebook, edit)
    assert notebooks.tidy(notebook)
    assert notebook.read_bytes() == good
    assert not notebooks.tidy(notebook)


def test_a_cell_that_was_not_run_is_not_given_a_number(notebook: Path) -> None:
    change(notebook, lambda content: code_cells(content)[2].update(execution_count=None))
    notebooks.tidy(notebook)
    assert code_cells(json.loads(notebook.read_bytes()))[2]["execution_count"] is None


def test_tidying_fails_when_there_was_something_to_do(notebook: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["notebooks.py", "tidy", str(notebook)])
    change(notebook, run_twice)
    for expected in (1, 0):
        with pytest.raises(SystemExit) as stopped:
            notebooks.main()
        assert int(stopped.value.code) == expected


# --- The hooks ---------------------------------------------------------------------------------


def test_hooks_download_nothing() -> None:
    """All come from .venv: they have the versions that the tests have, and need no network."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/python ")


def test_hooks_stop_a_commit(notebook: Path, tmp_path: Path, monkeypatch) -> None:
    """pre-commit itself, in a new repository with one spoilt file of each kind."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is missing: install it to try the hooks")
    tree = tmp_path / "tree"
    (tree / "book").mkdir(parents=True)
    (tree / "lesson_code").mkdir()
    for name in (".pre-commit-config.yaml", "pyproject.toml", "_config.yml", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(Path(sys.prefix))
    shutil.copy(notebook, tree / "book")
    module = tree / "lesson_code" / "__init__.py"
    module.write_text('"""An example."""\n\nx = 2\n', encoding="utf-8")
    subprocess.run([git, "init", "--quiet"], cwd=tree, check=True)
    monkeypatch.setenv("SKIP", "types")  # which test_types has tried, and which takes its time
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "home"))
    subprocess.run([git, "add", "book", "lesson_code"], cwd=tree, check=True)
    result = run("pre_commit", "run", cwd=tree)
    assert result.returncode == 0, result.stdout + result.stderr

    change(tree / "book" / "page.ipynb", run_twice)
    module.write_text('"""An example."""\n\nx=2\n', encoding="utf-8")
    subprocess.run([git, "add", "book", "lesson_code"], cwd=tree, check=True)
    result = run("pre_commit", "run", cwd=tree)
    assert result.returncode == 1
    failed = re.findall(r"^(.+?)\.*Failed$", result.stdout, re.MULTILINE)
    assert failed == ["ruff format", "notebooks in the committed form"]
