"""The package and the repository around it."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
from packaging.specifiers import SpecifierSet

import lesson_code

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = {found.metadata["Name"]: found for found in importlib.metadata.distributions()}
MODULES = [
    *("lesson_code", "lesson_code.numpy", "lesson_code.cupy", "lesson_code.cupy.emulator"),
    *(
        "lesson_code.checks",
        "lesson_code.costs",
        "lesson_code.data.digits",
        "lesson_code.data.tasks",
        "lesson_code.gpu",
    ),
]


# --- NumPy is all it needs ---------------------------------------------------------------------


def modules_after(path: Path, *names: str) -> set[str]:
    """What is loaded once `names` are imported where nothing but `path` can be imported from."""
    script = f"import json, sys; sys.path.append({str(path)!r}); "
    script += "".join(f"import {name}; " for name in names)
    script += "print(json.dumps([*sys.modules]))"
    # -S leaves site-packages out, -I the environment's variables and the current folder.
    command = [sys.executable, "-I", "-S", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def only_numpy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("only_numpy")
    package = Path(numpy.__file__).parent
    for source in (package, package.with_name("numpy.libs"), ROOT / "lesson_code"):
        if source.exists():
            (folder / source.name).symlink_to(source)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_imports_numpy_alone(only_numpy: Path, name: str) -> None:
    allowed = modules_after(only_numpy, "numpy.random") | sys.stdlib_module_names | {"lesson_code"}
    assert modules_after(only_numpy, name) <= allowed


def test_nothing_else_can_be_imported_there(only_numpy: Path) -> None:
    with pytest.raises(AssertionError, match="No module named 'pytest'"):
        modules_after(only_numpy, "pytest")


# --- Versions ----------------------------------------------------------------------------------


def test_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert lesson_code.__version__ == project["version"]
    # The notebooks' first cell compares versions number by number.
    assert re.fullmatch(r"\d+(\.\d+)*", project["version"])


def test_requirements_are_pinned() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    assert lines
    pin = re.compile(r"[\w.-]+==[\w.]+(; .+)?")
    assert [line for line in lines if not pin.fullmatch(line)] == []


# --- Nothing of one machine --------------------------------------------------------------------

# Put together from parts, as the examples below are: then this file may be searched too.
INDEXES = [
    *("py" + "pi.", "python" + "hosted.org", "download.py" + "torch.org"),
    *("ana" + "conda.org", "ana" + "conda.com", "index" + "-url"),
]
HOSTS = re.compile("|".join(rf"\b{re.escape(name)}" for name in INDEXES))
PATHS = re.compile(r"(?<![\w.:/$})*])/(?:Users|home|mnt|opt|private|root|tmp|work)/\w[^\s\"']*")
STORED_IMAGES = re.compile(r'"image/(png|jpeg)": "[^"]*"')


def test_no_file_names_a_package_index_or_a_place_on_one_machine(tree: Path) -> None:
    found = []
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_file() and not name.startswith("book/_static/mathjax/"):
            text = STORED_IMAGES.sub("", path.read_text(encoding="utf-8", errors="ignore"))
            for pattern in (HOSTS, PATHS):
                found += [f"{name}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize("name", INDEXES)
def test_a_package_index_is_seen(name: str) -> None:
    assert HOSTS.search(f"https://files.{name}/simple") and HOSTS.search(f"--extra-{name} x")


@pytest.mark.parametrize("text", ["cd {}home/reader/book", 'open("{}tmp/a")', "({}work/book)"])
def test_a_place_on_one_machine_is_seen(text: str) -> None:
    assert PATHS.search(text.format("/"))


@pytest.mark.parametrize(
    "text", ["https://example.org/home/a", "_build/tmp/a", "$OUT/tmp/a", "1/tmp"]
)
def test_a_place_elsewhere_is_no_place_on_one_machine(text: str) -> None:
    assert not PATHS.search(text)


# --- What is promised about Python and files -----------------------------------------------------


def test_pins_admit_every_python_that_the_readme_names() -> None:
    refused = {}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        name = line.partition("==")[0]
        if not line or line.startswith("#") or name not in INSTALLED:
            continue  # not installed on this system, by its marker
        needs = INSTALLED[name].metadata["Requires-Python"] or ""
        if not all(SpecifierSet(needs).contains(v) for v in ("3.11.0", "3.12.0", "3.13.0")):
            refused[name] = needs
    assert refused == {}


def test_files_that_the_readme_names_exist() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1]
    table = table.split("\n## ")[0]
    folder = "lesson_code"
    for name in re.findall(r"`([\w./]+[./]\w*)`", table):
        assert (ROOT / name).exists() or (ROOT / folder / name).exists(), name
