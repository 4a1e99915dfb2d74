"""Where the kernels' tests run: in the emulator, and on a GPU too where there is one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lesson_code.cupy import _kernels
from lesson_code.cupy.emulator import _compiler


class Place(NamedTuple):
    """A library of arrays, and the device that its arrays are on."""

    library: str
    device: str

    def put(self, *arrays: np.ndarray) -> list:
        """NumPy arrays as the library's, on the device; bfloat16 is that of ml_dtypes."""
        return [self._put(array) for array in arrays]

    def get(self, array) -> np.ndarray:
        """The library's array as NumPy's, 16-bit numbers as float32."""
        if self.library == "torch":
            array = array.detach().cpu()
            return (array.float() if array.element_size() == 2 else array).numpy()
        array = array if self.library == "numpy" else array.get()
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array

    def _put(self, array):
        if self.library == "numpy":
            return array
        if self.library == "cupy":
            import cupy

            return cupy.asarray(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(self.device)
        return torch.from_numpy(array).to(self.device)


def _on_a_gpu() -> list[Place]:
    found = []
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount():
            found.append(Place("cupy", "cuda"))
    except (ImportError, RuntimeError):  # CuPy is missing, or there is no driver
        pass
    return found + [Place("torch", "cuda")] * torch.cuda.is_available()


@pytest.fixture(scope="package", autouse=True)
def compile_fast() -> Iterator[None]:
    """What is small is compiled longer than it runs: four times as long as without optimization.

    Optimized kernels run in the chapters, and for the benchmarks' tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_compiler.VARIANTS, "plain", ["-O0"])
        yield


# Without a GPU there are fewer tests, and none is skipped.
ON_A_GPU = _on_a_gpu()


@pytest.fixture(params=[Place("numpy", "cpu"), Place("torch", "cpu"), *ON_A_GPU], ids="-".join)
def place(request: pytest.FixtureRequest) -> Place:
    """Every library, on every device that there is."""
    return request.param


@pytest.fixture(params=[Place("numpy", "cpu"), *ON_A_GPU[:1]], ids=lambda place: place.device)
def device(request: pytest.FixtureRequest) -> Place:
    """Every device that there is, with the arrays of one library."""
    return request.param


BARRIER = re.compile(r"__syncthreads\(\);")


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """A function that takes one wait out of a kernel file: the `number`th, or none where None.

    All are compiled once, and the kernels leave out the one that WITHOUT says.
    """
    text = _kernels.text

    def leave_out(file: str, number: int | None, waits: re.Pattern = BARRIER) -> None:
        places = itertools.count()
        switched = "#include <stdlib.h>\n" + waits.sub(
            lambda it: f'if (atoi(getenv("WITHOUT")) != {next(places)}) {it[0]}', text(file)
        )
        monkeypatch.setattr(_kernels, "text", lambda f: switched if f == file else text(f))
        monkeypatch.setenv("WITHOUT", "-1" if number is None else str(number))
        _kernels.load.cache_clear()

    yield leave_out
    _kernels.load.cache_clear()
