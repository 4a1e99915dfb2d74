"""What comes before all tests, those in docstrings and notebooks among them."""

import importlib
import os
from pathlib import Path

ROOT = Path(__file__).parent

# The processes of `pytest -n 2` share two cores: threads of one would wait for those of the other.
# Kernels and programs that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collect_file(file_path: Path) -> None:
    """Import whole packages before pytest takes single modules of them for their doctests.

    Taken alone, as in `pytest lesson_code/numpy/retention.py tests/numpy`, a module would stand in
    its package in the place of the function that has its name.
    """
    package = file_path.relative_to(ROOT).parent if file_path.is_relative_to(ROOT) else Path()
    if package.parts[:1] == ("lesson_code",) and (file_path.parent / "__init__.py").exists():
        importlib.import_module(".".join(package.parts))
