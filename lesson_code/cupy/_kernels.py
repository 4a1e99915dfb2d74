"""One way to run a kernel file: on the GPU by CuPy, on the CPU by the emulator."""

import contextlib
import functools
from importlib.resources import files

import numpy as np

from lesson_code.cupy import _arrays


def text(file: str) -> str:
    """One of the package's .cu and .h files."""
    return files(__package__).joinpath(file).read_text(encoding="utf-8")


def source(file: str) -> str:
    """A kernel file with what both backends put before it."""
    return f'#line 1 "rows.h"\n{text("rows.h")}#line 1 "{file}"\n{text(file)}'


def options(macros: dict) -> tuple:
    """What NVRTC is told, besides the architecture."""
    # A quotient may be wrong in its last bit: to round it exactly takes a branch, and no load is
    # moved across one.
    return (
        "--std=c++17",
        "--prec-div=false",
        *(f"-D{name}={value}" for name, value in macros.items()),
    )


def load(file: str, macros: dict, device: str):
    """The kernels of a file, compiled with these macros: an object with a method ``launch``."""
    return (_load_cpu if device == "cpu" else _load_cuda)(file, tuple(macros.items()))


def run(file, macros, name, grid, block, *arguments, shared_bytes=0) -> None:
    """Start one kernel where its arrays are.

    Arguments are arrays, `_arrays.Rows`, None for no array, or integers.
    """
    arrays = [
        getattr(x, "array", x) for x in arguments if not isinstance(x, int | np.integer | None)
    ]
    load(file, macros, _arrays.device(arrays[0])).launch(
        name,
        grid,
        block,
        [_argument(x) for x in arguments],
        shared_bytes,
        buffers=[_arrays.extent(array) for array in arrays],
    )


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
def _load_cpu(file: str, macros: tuple):
    from lesson_code.cupy import emulator

    return emulator.load(source(file), dict(macros), name=file)


@functools.cache
def _load_cuda(file: str, macros: tuple):
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


def capability(array) -> tuple[int, int]:
    """Compute capability of the GPU that holds the array; the emulator can do what (8, 0) can."""
    if _arrays.library(array) == "torch" and array.device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(array.device)
    if _arrays.library(array) == "cupy":
        version = array.device.compute_capability  # "75", or "100"
        return int(version[:-1]), int(version[-1])
    return 8, 0


def processors(array) -> int:
    """Multiprocessors of the GPU that holds the array; the emulator does as if it had a few."""
    if _arrays.library(array) == "torch" and array.device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(array.device).multi_processor_count
    if _arrays.library(array) == "cupy":
        return array.device.attributes["MultiProcessorCount"]
    return 4


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may ask for."""
    kilobytes = {
        (7, 5): 64,
        (8, 0): 163,
        (8, 7): 163,
        (9, 0): 227,
        (10, 0): 227,
        (10, 3): 227,
        (11, 0): 227,
    }
    return 1024 * kilobytes.get(capability, 99)
