"""One way to run a kernel file: on the GPU by CuPy, on the CPU by the emulator."""

import contextlib
import functools
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from lesson_code.cupy import _arrays


def text(file: str) -> str:
    """One of the package's .cu and .h files."""
    return files(__package__).joinpath(file).read_text(encoding="utf-8")


def source(file: str) -> str:
    """A kernel file with what both backends put before it, and the headers that it includes."""
    parts = ['#line 1 "rows.h"\n', text("rows.h"), f'#line 1 "{file}"\n']
    for number, line in enumerate(text(file).splitlines(keepends=True), 1):
        if line.startswith('#include "'):
            header = line.split('"')[1]
            line = f'#line 1 "{header}"\n{text(header)}#line {number + 1} "{file}"\n'
        parts.append(line)
    return "".join(parts)


def options(macros: dict) -> tuple:
    """What NVRTC is told, besides the architecture."""
    # A quotient may be wrong in its last bit: to round it exactly takes a branch, and no load is
    # moved across one.
    return (
        "--std=c++17",
        "--prec-div=false",
        *(f"-D{name}={value}" for name, value in macros.items()),
    )


def run(file, macros, name, grid, block, *arguments, shared_bytes=0) -> None:
    """Start one kernel of a file, compiled with these macros, where its arrays are.

    Arguments are arrays, `_arrays.Rows`, None for no array, or integers.
    """
    arrays = [
        getattr(x, "array", x) for x in arguments if not isinstance(x, int | np.integer | None)
    ]
    values, buffers = [_argument(x) for x in arguments], [_arrays.extent(x) for x in arrays]
    with place(arrays[0]):
        module = load(file, tuple(macros.items()), _arrays.device(arrays[0]))
        module.launch(name, grid, block, values, shared_bytes, buffers=buffers)


def _argument(x):
    if isinstance(x, _arrays.Rows):
        return x.struct
    if isinstance(x, np.integer):
        return x
    return np.int32(x) if isinstance(x, int) else np.uintp(0 if x is None else _arrays.address(x))


def cupy():
    """The package CuPy; where it is missing, an error that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "the kernels need CuPy on a GPU: pip install 'linear-attention-book[cuda12]' "
            "(or [cuda13], by the CUDA version that nvidia-smi shows); "
            "device='cpu' runs them on NumPy arrays without it."
        ) from error
    return cupy


@functools.cache
def load(file: str, macros: tuple, device: str):
    """The kernels of a file, compiled: an object with a method ``launch``."""
    if device == "cpu":
        from lesson_code.cupy import emulator

        return emulator.load(source(file), dict(macros), name=file)
    code = text("gpu.h") + source(file)
    return _CudaModule(cupy().RawModule(code=code, options=options(dict(macros))))


class _CudaModule:
    def __init__(self, module):
        self.function = functools.cache(module.get_function)

    def launch(self, name, grid, block, arguments, shared_bytes=0, buffers=None):
        """Start a kernel on CuPy's current device and stream."""
        grid, block = (size if isinstance(size, tuple) else (size,) for size in (grid, block))
        kernel = self.function(name)
        if shared_bytes > 48 * 1024:  # more must be asked for
            kernel.max_dynamic_shared_size_bytes = shared_bytes
        # CuPy passes an array of one item by value, whatever its dtype.
        arguments = tuple(np.asarray(argument) for argument in arguments)
        kernel(grid, block, arguments, shared_mem=shared_bytes)


@contextlib.contextmanager
def place(array):
    """Run what is inside on the array's device, and on the stream that its library uses now."""
    if _arrays.library(array) == "torch" and array.device.type == "cuda":
        import torch

        stream = torch.cuda.current_stream(array.device)
        cuda = cupy().cuda
        if hasattr(cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
            stream = cuda.Stream.from_external(stream)
        else:  # CuPy before 14, or torch before it knew the protocol
            stream = cuda.ExternalStream(stream.cuda_stream)
        with cuda.Device(array.device.index), stream:
            yield
    elif _arrays.library(array) == "cupy":
        with array.device:
            yield
    else:
        yield


class Gpu(NamedTuple):
    """What the launches ask of a GPU. The emulator poses as a small one that can do all."""

    capability: tuple[int, int] = (8, 0)
    processors: int = 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block may ask for."""
        kilobytes = {(7, 5): 64, (8, 0): 163, (8, 7): 163}
        kilobytes |= dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 227)
        return 1024 * kilobytes.get(self.capability, 99)


def gpu(array) -> Gpu:
    """The GPU that holds the array."""
    if _arrays.device(array) == "cpu":
        return Gpu()
    if _arrays.library(array) == "torch":
        import torch

        it = torch.cuda.get_device_properties(array.device)
        return Gpu((it.major, it.minor), it.multi_processor_count)
    version = array.device.compute_capability  # "75", or "100"
    capability = int(version[:-1]), int(version[-1])
    return Gpu(capability, array.device.attributes["MultiProcessorCount"])
