"""Runs the kernels of a .cu file without a GPU, counts what they do and finds their races.

A C++ compiler translates the file with cpu.h before it, which gives C++ the words of CUDA. The
threads of a block take turns on one core, so a kernel runs here thousands of times slower than on a
GPU; what it computes, and which memory it touches, is the same.
"""

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

try:
    from numpy.lib.array_utils import byte_bounds
except ImportError:  # NumPy 1.26
    from numpy import byte_bounds  # type: ignore[attr-defined, no-redef]

from lesson_code import __version__
from lesson_code.cupy import _trace
from lesson_code.cupy._trace import Access, Counts, Race, RaceError, Trace

__all__ = [
    "Access",
    "Counts",
    "Module",
    "Race",
    "RaceError",
    "Trace",
    "load",
    "order",
    "sanitized",
    "trace",
]

_HEADERS = Path(__file__).parent
_HEADER_NAMES = ["cpu.h", "cpu_trace.h"]
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti"]
_FLAGS += ["-fvisibility=hidden", "-w"]  # libraries with the same names must not meet
_FLAGS += ["-U_FORTIFY_SOURCE"]  # Ubuntu sets it; it takes a jump from stack to stack for an attack
_VARIANTS = {
    "plain": [],
    # The calls that the thread sanitizer asks for are in cpu_trace.h. An access stays one
    # instruction: not several joined into a vector, not one repeated behind each of two branches.
    "traced": ["-DTRACED", "-g", "-fsanitize=thread"]
    + ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
    "sanitized": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
_GCC = {
    "traced": ["-fno-thread-jumps", "-fno-tree-sra"],
    "sanitized": ["-fsanitize-sections=shared_memory"],  # leaves space between shared arrays, too
}
_CLANG = {  # by default it passes over loads before a store to the same place
    "traced": ["-mllvm", "-tsan-instrument-read-before-write=1"]
    + ["-mllvm", "-jump-threading-threshold=0"],
}
_SANITIZE = "LESSON_CODE_SANITIZE"  # set in the processes that `sanitized` starts

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

    Raises
    ------
    ValueError
        If it is something else.
    """
    numbers = {"forward": 0, "reverse": 1}
    if which not in numbers and not (type(which) is int and which >= 0):
        raise ValueError(f"which must be 'forward', 'reverse' or a seed >= 0, got {which!r}.")
    token = _order.set(which + 2 if isinstance(which, int) else numbers[which])
    try:
        yield
    finally:
        _order.reset(token)


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
    token = _tracing.set(it)
    try:
        yield it
    finally:
        _tracing.reset(token)


def sanitized(code: str, *, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own in which wrong addresses in kernels are caught.

    Kernels are compiled with AddressSanitizer and UndefinedBehaviorSanitizer, which stop the
    process and print what went wrong where.

    Parameters
    ----------
    code : str
        What ``python -c`` runs.
    timeout : float
        Seconds that it may take.

    Returns
    -------
    subprocess.CompletedProcess
        With ``returncode``, ``stdout`` and ``stderr``.

    Raises
    ------
    RuntimeError
        If the compiler has no AddressSanitizer that another program can load.
    """
    command = tuple(_compiler())
    clang = [f"libclang_rt.asan-{platform.machine()}.so", "libclang_rt.asan.so"]
    names = clang if _is_clang(command) else ["libasan.so"]
    runtime = next(filter(None, (_runtime(command, name) for name in names)), None)
    if runtime is None:
        raise RuntimeError(f"the compiler {shlex.join(command)} has no AddressSanitizer to load.")
    environment = os.environ | {
        _SANITIZE: "1",
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


@functools.cache
def _runtime(command: tuple, name: str) -> str | None:
    """Path of a library of the compiler's."""
    path = Path(_run(command, f"-print-file-name={name}").stdout.strip())
    return str(path.resolve()) if path.is_absolute() and path.exists() else None


# ---- Modules. ------------------------------------------------------------------------------------


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
        self._source, self._macros, self._name = source, macros, name
        self._libraries: dict[str, tuple[Path, ctypes.CDLL, dict[str, _Kernel]]] = {}
        self.kernels = list(self._library()[2])

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
        path, library, kernels = self._library()
        kernel = kernels[name]
        grid, block = _three("grid", grid), _three("block", block)
        if block[0] > min(kernel.max_threads, 1024) or block[1:] != (1, 1):
            raise ValueError(
                f"block must be at most {min(kernel.max_threads, 1024)} threads in x and one in y "
                f"and z for kernel {name}, got {block}."
            )
        if not (isinstance(shared_bytes, int | np.integer) and 0 <= shared_bytes <= 227 * 1024):
            raise ValueError(f"shared_bytes must be 0 to 232448, 227 KiB, got {shared_bytes!r}.")
        ready = [_argument(name, i, argument) for i, argument in enumerate(arguments)]
        sizes = kernel.sizes[: kernel.count]
        if len(ready) != len(sizes):
            raise TypeError(f"kernel {name} takes {len(sizes)} arguments, got {len(ready)}.")
        for i, (argument, size) in enumerate(zip(ready, sizes, strict=True)):
            if argument.nbytes != size:
                raise TypeError(
                    f"argument {i} of kernel {name} has {size} bytes, got {argument.nbytes} "
                    f"({argument.dtype})."
                )
        values = (ctypes.c_void_p * len(ready))(*(one.ctypes.data for one in ready))
        it = _tracing.get()
        with _one_at_a_time:
            if it is not None:
                launched = _trace.Launch(it, name, [_extent(buffer) for buffer in buffers or []])
                library.trace_into(launched.callback, launched.ranges, len(launched.ranges))
            failure = library.launch_kernel(
                kernel, values, _Dim3(*grid), block[0], int(shared_bytes), _order.get(),
                _launch_memory(library),
            )  # fmt: skip
            if failure:
                raise RuntimeError(self._sentence(name, path, failure.contents))
            if it is not None:
                launched.finish(
                    library.trace_counters().contents,
                    functools.partial(_trace.line_numbers, path, self._name),
                )

    def _library(self) -> tuple[Path, ctypes.CDLL, dict[str, _Kernel]]:
        variant = (
            "traced" if _tracing.get() is not None
            else "sanitized" if _SANITIZE in os.environ
            else "plain"
        )  # fmt: skip
        if variant not in self._libraries:
            path = _built(self._source, self._macros, self._name, variant)
            library = ctypes.CDLL(str(path))
            library.new_launch_memory.restype = ctypes.c_void_p
            library.launch_kernel.restype = ctypes.POINTER(_Failure)
            library.launch_kernel.argtypes = [
                ctypes.POINTER(_Kernel), ctypes.c_void_p, _Dim3, ctypes.c_int, ctypes.c_size_t,
                ctypes.c_longlong, ctypes.c_void_p,
            ]  # fmt: skip
            if variant == "traced":
                library.trace_counters.restype = ctypes.POINTER(_trace.Counters)
            count = ctypes.c_int.in_dll(library, "emulated_kernel_count").value
            kernels = (_Kernel * count).in_dll(library, "emulated_kernels")
            self._libraries[variant] = path, library, {one.name.decode(): one for one in kernels}
        return self._libraries[variant]

    def _sentence(self, name: str, path: Path, failure: _Failure) -> str:
        block = tuple(getattr(failure.block, axis) for axis in "xyz")
        line = failure.line
        if not line and failure.place:
            line = _trace.line_numbers(path, self._name, [failure.place])[failure.place]
        where = f"kernel {name}, block {block}" + (f", line {line}" if line else "")
        return f"{where}: {failure.sentence.decode()}."


_memory: list[int] = []


def _launch_memory(library: ctypes.CDLL) -> int:
    """Stacks and shared memory, used by all libraries, one after the other."""
    if not _memory:
        _memory.append(library.new_launch_memory())
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


def _three(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    if not isinstance(value, int | np.integer | Sequence):
        raise TypeError(f"{name} must be an int or a sequence of them, got {value!r}.")
    sizes = (value,) if isinstance(value, int | np.integer) else tuple(value)
    limits = (2**31 - 1, 65535, 65535)
    if (
        not 1 <= len(sizes) <= 3
        or not all(isinstance(size, int | np.integer) for size in sizes)
        or any(not 1 <= size <= limit for size, limit in zip(sizes, limits, strict=False))
    ):
        raise ValueError(
            f"{name} must be one to three sizes, each at least 1 and at most 65535 in y and z, "
            f"got {value!r}."
        )
    x, y, z = *map(int, sizes), *(1,) * (3 - len(sizes))
    return x, y, z


def _argument(kernel: str, index: int, argument) -> np.ndarray:
    if not isinstance(argument, np.ndarray | np.generic) or argument.size != 1:
        raise TypeError(
            f"argument {index} of kernel {kernel} must be a NumPy scalar or an array of size one, "
            f"got {argument!r}."
        )
    return np.ascontiguousarray(argument)


# ---- Compilers. ----------------------------------------------------------------------------------


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    system = {
        "Darwin": "the command line tools (xcode-select --install)",
        "Linux": "g++ (on Debian and Ubuntu: apt install g++)",
    }.get(platform.system(), "WSL, the Linux of Windows, and g++ there")
    raise RuntimeError(
        "running kernels without a GPU needs a C++ compiler, and none was found. "
        f"Install {system}, or a compiler as a Python package: pip install ziglang."
    )


@functools.cache
def _is_clang(command: tuple) -> bool:
    return "clang" in _run(command, "--version").stdout


def _run(command: Sequence[str], *options: str, folder: Path | None = None):
    try:
        return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"the compiler {shlex.join(command)} cannot be run: {error}.") from error


@functools.cache
def _cache_folder(home: str) -> Path:
    folder = Path(home, "lesson_code_kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # not ours to write: a folder for this process alone
        return Path(tempfile.mkdtemp(prefix="lesson_code_kernels_"))


_BOUNDS = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"  # brackets, and what stands in them
_KERNEL = re.compile(
    rf'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*{_BOUNDS}\s*)?(\w+)\s*\('
)


def _built(source: str, macros: dict, name: str, variant: str) -> Path:
    """The library that a source is compiled to; what was compiled before is not compiled again."""
    if platform.system() == "Windows":
        raise RuntimeError("kernels run without a GPU on Linux and macOS; on Windows use WSL.")
    compiler = _compiler()
    flags = [*_FLAGS, *_VARIANTS[variant]]
    if platform.system() == "Darwin":
        flags += ["-D_XOPEN_SOURCE", "-D_DARWIN_C_SOURCE"]
    headers = [(_HEADERS / header).read_text(encoding="utf-8") for header in _HEADER_NAMES]
    macros = {str(key): str(value) for key, value in macros.items()}
    parts = [source, name, str(macros), *headers, __version__, *compiler, *flags]
    parts.append(platform.platform())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    default = "~/Library/Caches" if platform.system() == "Darwin" else "~/.cache"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(default)
    library = _cache_folder(home) / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            _compile(compiler, flags, source, macros, name, variant, Path(folder))
            os.replace(Path(folder, "kernels.so"), library)  # at once: others see all of it or none
    return library


def _compile(
    compiler: list[str],
    flags: list[str],
    source: str,
    macros: dict[str, str],
    name: str,
    variant: str,
    folder: Path,
) -> None:
    flags = [*flags, *(_CLANG if _is_clang(tuple(compiler)) else _GCC).get(variant, [])]
    # Without the sanitizer's library, and without any: Python has what the kernels need of C.
    link = ["-shared", *(_VARIANTS[variant] if variant == "sanitized" else ["-nostdlib"])]
    if variant == "sanitized" and _is_clang(tuple(compiler)):
        link += ["-shared-libsan"]
    if platform.system() == "Darwin":
        link += ["-undefined", "dynamic_lookup"]

    def run(*options: str) -> str:
        result = _run(compiler, *options, folder=folder)
        if result.returncode:
            raise RuntimeError(f"{name} cannot be compiled:\n{result.stderr}")
        return result.stdout

    # They hold in the source alone: cpu.h has names of its own.
    defined = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    text = f'{defined}#line 1 "{name}"\n{source}\n' + "".join(f"#undef {key}\n" for key in macros)
    Path(folder, "source.cpp").write_text(text, encoding="utf-8")
    kernels = _KERNEL.findall(run(*flags, "-E", "-P", "source.cpp"))  # those that macros leave
    if not kernels:
        raise ValueError(f'there is no extern "C" __global__ void ...( in {name}.')
    table = ", ".join(f"EMULATED_KERNEL({kernel}, {bound})" for bound, kernel in kernels)
    # The C library may have a function of the name of a kernel.
    names = "".join(f"#define {kernel} kernel_{kernel}\n" for _, kernel in kernels)
    text = f'#include "cpu.h"\n{names}{text}#line 1 "kernels"\nEMULATED_KERNELS({table})\n'
    Path(folder, "kernels.cpp").write_text(text, encoding="utf-8")
    run(*flags, f"-I{_HEADERS}", "-c", "kernels.cpp", "-o", "kernels.o")
    run(*link, "kernels.o", "-o", "kernels.so")
