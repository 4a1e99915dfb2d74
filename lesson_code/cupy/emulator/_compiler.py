"""Makes libraries of kernels with whatever C++ compiler there is, each once."""

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
from collections.abc import Sequence
from pathlib import Path

from lesson_code import __version__

HEADERS = Path(__file__).parent
FLAGS = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fvisibility=hidden", "-w"]  # libraries with the same names must not meet
FLAGS += ["-U_FORTIFY_SOURCE"]  # Ubuntu sets it; it takes a jump from stack to stack for an attack
VARIANTS = {
    "plain": ["-O2"],
    # The calls that the thread sanitizer asks for are in cpu_trace.h. An access stays one
    # instruction: not several joined into a vector, not one repeated behind each of two branches.
    "traced": ["-O1", "-DTRACED", "-g", "-fsanitize=thread"]
    + ["-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
    # Nothing that is wrong is optimized away, and it takes a third of the time to compile.
    "sanitized": ["-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
GCC = {
    "traced": ["-fno-thread-jumps", "-fno-tree-sra"],
    "sanitized": ["-fsanitize-sections=shared_memory"],  # leaves space between shared arrays, too
}
CLANG = {  # by default it passes over loads before a store to the same place
    "traced": ["-mllvm", "-tsan-instrument-read-before-write=1"]
    + ["-mllvm", "-jump-threading-threshold=0"],
}
SANITIZE = "LESSON_CODE_SANITIZE"  # set in the processes that `sanitized` starts
MAC = platform.system() == "Darwin"


def library(source: str, macros: dict[str, str], name: str, variant: str) -> Path:
    """The library that a source is compiled to; what was compiled before is not compiled again."""
    if platform.system() == "Windows":
        raise RuntimeError("kernels run without a GPU on Linux and macOS; on Windows use WSL.")
    command = compiler()
    flags = [*FLAGS, *VARIANTS[variant]]
    if MAC:
        flags += ["-D_XOPEN_SOURCE", "-D_DARWIN_C_SOURCE"]
    headers = [path.read_text(encoding="utf-8") for path in sorted(HEADERS.glob("*.h"))]
    parts = [source, name, str(macros), *headers, __version__, *command, *flags]
    parts.append(platform.platform())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME")
    home = home or os.path.expanduser("~/Library/Caches" if MAC else "~/.cache")
    path = _cache_folder(home) / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _compile(command, flags, source, macros, name, variant, Path(folder))
            os.replace(Path(folder, "kernels.so"), path)  # at once: others see all of it or none
    return path


def compiler() -> tuple[str, ...]:
    """The command that compiles C++."""
    if os.environ.get("CXX"):
        return tuple(shlex.split(os.environ["CXX"]))
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"
    system = {
        "Darwin": "the command line tools (xcode-select --install)",
        "Linux": "g++ (on Debian and Ubuntu: apt install g++)",
    }.get(platform.system(), "WSL, the Linux of Windows, and g++ there")
    raise RuntimeError(
        "running kernels without a GPU needs a C++ compiler, and none was found. "
        f"Install {system}, or a compiler as a Python package: pip install ziglang."
    )


@functools.cache
def is_clang(command: tuple[str, ...]) -> bool:
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


def _compile(command, flags, source, macros, name, variant, folder) -> None:
    """Write kernels.so into a folder."""
    clang = is_clang(command)
    flags = [*flags, *(CLANG if clang else GCC).get(variant, [])]
    # Without the sanitizer's library, and without any: Python has what the kernels need of C.
    link = ["-shared", *(VARIANTS[variant] if variant == "sanitized" else ["-nostdlib"])]
    if variant == "sanitized" and clang:
        link += ["-shared-libsan"]
    if MAC:
        link += ["-undefined", "dynamic_lookup"]

    def run(*options: str) -> str:
        result = _run(command, *options, folder=folder)
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
    run(*flags, f"-I{HEADERS}", "-c", "kernels.cpp", "-o", "kernels.o")
    run(*link, "kernels.o", "-o", "kernels.so")


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
    command = compiler()
    clang = [f"libclang_rt.asan-{platform.machine()}.so", "libclang_rt.asan.so"]
    for name in clang if is_clang(command) else ["libasan.so"]:
        runtime = Path(_run(command, f"-print-file-name={name}").stdout.strip())
        if runtime.is_absolute() and runtime.exists():
            break
    else:
        raise RuntimeError(f"the compiler {shlex.join(command)} has no AddressSanitizer to load.")
    environment = os.environ | {
        SANITIZE: "1",
        "LD_PRELOAD": str(runtime.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
