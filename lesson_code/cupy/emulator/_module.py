"""Kernels compiled for the CPU, and their launches."""

import contextlib
import contextvars
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1.26
    from numpy import byte_bounds  # type: ignore[attr-defined, no-redef]

from lesson_code.cupy.emulator import _compiler, _records, _trace
from lesson_code.cupy.emulator._trace import Trace

_order = contextvars.ContextVar("order", default=0)
_tracing: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("tracing", default=None)
_one_at_a_time = threading.Lock()  # a library keeps the state of its launch in global variables


def load(
    source: str, macros: Mapping[str, object] | None = None, *, name: str = "kernel.cu"
) -> "Module":
    r"""Compile the text of a .cu file for the CPU.

    What is compiled is kept in the user's cache folder, and found there the next time.

    Parameters
    ----------
    source : str
        The text. Kernels are found by ``extern "C" __global__ void name(``.
    macros : mapping, optional
        What names in the source stand for, such as sizes that are fixed when it is compiled.
    name : str
        What errors call the file.

    Returns
    -------
    Module
        Its method ``launch`` runs a kernel.

    Raises
    ------
    RuntimeError
        If there is no C++ compiler, or if the source is no C++: with the compiler's own message.

    Examples
    --------
    >>> module = load('''
    ... extern "C" __global__ void add(float* x, float amount) {
    ...     x[threadIdx.x] += amount;
    ... }
    ... ''')
    >>> x = np.zeros(4, np.float32)
    >>> module.launch("add", 1, 3, [np.uintp(x.ctypes.data), np.float32(7)])
    >>> x
    array([7., 7., 7., 0.], dtype=float32)
    """
    return Module(source, dict(macros or {}), name)


@contextlib.contextmanager
def order(which: str | int) -> Iterator[None]:
    """Choose which blocks, warps and threads run first in what is launched inside.

    A GPU promises no order. A kernel whose result changes with it is wrong.

    Parameters
    ----------
    which : str or int
        "forward", "reverse", or the seed of a shuffle.
    """
    numbers = {"forward": 0, "reverse": 1}
    if which not in numbers and not (type(which) is int and which >= 0):
        raise ValueError(f"which must be 'forward', 'reverse' or a seed >= 0, got {which!r}.")
    with _set(_order, which + 2 if isinstance(which, int) else numbers[which]):
        yield


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Count what the kernels that this thread launches inside do, and look for races.

    Yields
    ------
    Trace
        It fills as kernels end.

    Notes
    -----
    The kernels are compiled a second time, so that each access to memory calls a function that
    writes it down. Loads that the compiler has found superfluous are not counted, on a GPU neither.
    The n-th access of an instruction by each thread of a warp, counted from the last barrier, is
    taken as one access of the warp.

    Two accesses race if one stores and no ``__syncthreads()``, or inside a warp no
    ``__syncwarp()``, lies between them. A shuffle orders nothing, says the CUDA manual.

    Examples
    --------
    >>> module = load('''
    ... extern "C" __global__ void copy(const float* from, float* to, int step) {
    ...     to[threadIdx.x] = from[threadIdx.x * step];
    ... }
    ... ''')
    >>> x, y = np.zeros(1024, np.float32), np.zeros(32, np.float32)
    >>> with trace() as counted:
    ...     addresses = [np.uintp(a.ctypes.data) for a in (x, y)]
    ...     module.launch("copy", 1, 32, [*addresses, np.int32(32)], buffers=[x, y])
    >>> counted.kernels["copy"].global_load_bytes, counted.kernels["copy"].global_lines
    (128, 33)
    """
    it = Trace()
    with _set(_tracing, it):
        yield it


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _Kernel(ctypes.Structure):
    """struct Kernel of cpu.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("count", ctypes.c_int),
        ("max_threads", ctypes.c_int),
    ]


class _Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class _Failure(ctypes.Structure):
    """struct Failure of cpu.h."""

    _fields_ = [
        ("sentence", ctypes.c_char * 400),
        ("block", _Dim3),
        ("line", ctypes.c_int),
        ("place", ctypes.c_uint),
    ]


class Module:
    """The kernels of a .cu file, compiled for the CPU: what `load` returns.

    Attributes
    ----------
    kernels : list of str
        Their names.
    """

    def __init__(self, source: str, macros: dict, name: str) -> None:
        self._name = name
        macros = {str(key): str(value) for key, value in macros.items()}
        # The library is compiled when it is first wanted, plain or so that it can be traced.
        self._library = functools.cache(
            lambda variant: _Library(_compiler.library(source, macros, name, variant))
        )
        self.kernels = list(self._library(_variant()).kernels)

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[np.ndarray | np.generic],
        shared_bytes: int = 0,
        buffers: Sequence[np.ndarray | tuple[int, int]] | None = None,
    ) -> None:
        """Run a kernel, and wait for its end.

        Parameters
        ----------
        name : str
            Name of the kernel.
        grid : int or sequence of up to three int
            Number of blocks in x, y and z.
        block : int or sequence of one int
            Number of threads of a block.
        arguments : sequence
            A NumPy scalar, or a NumPy array of size one, for each argument: addresses as
            ``np.uintp``.
        shared_bytes : int
            Dynamic shared memory of each block.
        buffers : sequence, optional
            The arrays that the kernel may touch, or (address, bytes) of each. While a `trace`
            counts, any access outside of them is an error.

        Raises
        ------
        ValueError, TypeError
            If there is no such kernel, or arguments, grid, block or shared memory do not fit it.
        RuntimeError
            If threads wait for others that never come, or touch memory that is not theirs.
        """
        if name not in self.kernels:
            raise ValueError(f"there is no kernel {name!r}; there are {', '.join(self.kernels)}.")
        library = self._library(_variant())
        kernel = library.kernels[name]
        grid, (threads, *others) = _three("grid", grid), _three("block", block)
        most = min(kernel.max_threads, 1024)
        if threads > most or others != [1, 1]:
            raise ValueError(
                f"block must be at most {most} threads in x and one in y and z for kernel {name}, "
                f"got {block}."
            )
        if not (isinstance(shared_bytes, int | np.integer) and 0 <= shared_bytes <= 227 * 1024):
            raise ValueError(f"shared_bytes must be 0 to 232448, 227 KiB, got {shared_bytes!r}.")
        ready = _arguments(name, arguments, kernel.sizes[: kernel.count])
        values = (ctypes.c_void_p * len(ready))(*(one.ctypes.data for one in ready))
        it = _tracing.get()
        with _one_at_a_time:
            if it is not None:
                record = _trace.Launch(it, name, [_extent(buffer) for buffer in buffers or []])
                library.c.trace_into(record.callback, record.ranges, len(record.ranges))
            failure = library.c.launch_kernel(
                kernel, values, _Dim3(*grid), threads, int(shared_bytes), _order.get(),
                _launch_memory(library.c),
            )  # fmt: skip
            lines = functools.partial(_records.line_numbers, library.path, self._name)
            if failure:
                raise RuntimeError(_sentence(name, failure.contents, lines))
            if it is not None:
                record.finish(library.c.trace_counters().contents, lines)


class _Library:
    """A library and its kernels by name."""

    def __init__(self, path: Path) -> None:
        self.path, self.c = path, ctypes.CDLL(str(path))
        self.c.new_launch_memory.restype = ctypes.c_void_p
        self.c.launch_kernel.restype = ctypes.POINTER(_Failure)
        self.c.launch_kernel.argtypes = [
            ctypes.POINTER(_Kernel), ctypes.c_void_p, _Dim3, ctypes.c_int, ctypes.c_size_t,
            ctypes.c_longlong, ctypes.c_void_p,
        ]  # fmt: skip
        if hasattr(self.c, "trace_counters"):
            self.c.trace_counters.restype = ctypes.POINTER(_trace.Counters)
        count = ctypes.c_int.in_dll(self.c, "emulated_kernel_count").value
        kernels = (_Kernel * count).in_dll(self.c, "emulated_kernels")
        self.kernels = {one.name.decode(): one for one in kernels}


def _variant() -> str:
    if _tracing.get() is not None:
        return "traced"
    return "sanitized" if _compiler.SANITIZE in os.environ else "plain"


def _sentence(kernel: str, failure: _Failure, line_numbers) -> str:
    block = tuple(getattr(failure.block, axis) for axis in "xyz")
    line = failure.line
    if not line and failure.place:
        line = line_numbers([failure.place])[failure.place]
    where = f"kernel {kernel}, block {block}" + (f", line {line}" if line else "")
    return f"{where}: {failure.sentence.decode()}."


_memory: list[int] = []


def _launch_memory(c: ctypes.CDLL) -> int:
    """Stacks and shared memory, used by all libraries, one after the other."""
    if not _memory:
        _memory.append(c.new_launch_memory())
    return _memory[0]


def _extent(buffer: np.ndarray | tuple[int, int]) -> tuple[int, int, int]:
    """First byte, the one after the last, and where the memory begins that this is a part of."""
    if isinstance(buffer, tuple):
        return buffer[0], sum(buffer), buffer[0]
    if not isinstance(buffer, np.ndarray):
        raise TypeError(f"buffers must be NumPy arrays or (address, bytes), got {type(buffer)}.")
    whole = buffer
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return *byte_bounds(buffer), byte_bounds(whole)[0]


def _three(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Sizes in x, y and z."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    limits = (2**31 - 1, 65535, 65535)
    if not 1 <= len(sizes) <= 3 or not all(
        isinstance(size, int | np.integer) and 1 <= size <= limit
        for size, limit in zip(sizes, limits, strict=False)
    ):
        raise ValueError(
            f"{name} must be one to three sizes, each at least 1 and at most 65535 in y and z, "
            f"got {value!r}."
        )
    return (*map(int, sizes), 1, 1)[:3]


def _arguments(kernel: str, arguments: Sequence, sizes: Sequence[int]) -> list[np.ndarray]:
    """The arguments, if each is as many bytes as the kernel takes."""
    if len(arguments) != len(sizes):
        raise TypeError(f"kernel {kernel} takes {len(sizes)} arguments, got {len(arguments)}.")
    for i, (argument, size) in enumerate(zip(arguments, sizes, strict=True)):
        if not isinstance(argument, np.ndarray | np.generic) or argument.size != 1:
            raise TypeError(
                f"argument {i} of kernel {kernel} must be a NumPy scalar or an array of size one, "
                f"got {argument!r}."
            )
        if argument.nbytes != size:
            raise TypeError(
                f"argument {i} of kernel {kernel} has {size} bytes, got {argument.nbytes} "
                f"({argument.dtype})."
            )
    return [np.ascontiguousarray(argument) for argument in arguments]
