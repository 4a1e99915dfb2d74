"""Compiles kernels for any GPU, without having one: registers, shared memory, spills, PTX.

NVRTC, NVIDIA's compiler for programs that are compiled when they run, needs no GPU. CuPy calls it
to compile the kernels; here it is asked for its report as well.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from lesson_code.cupy import _kernels

__all__ = ["Compiled", "Usage", "compile_for", "compile_source", "version"]

# What CuPy's RawModule adds to the options of a kernel.
OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


class Usage(NamedTuple):
    """What one kernel takes of a GPU.

    Attributes
    ----------
    registers : int
        Of each thread; a multiprocessor has 65,536 for all its threads.
    shared_bytes : int
        Of each block, declared in the kernel. Dynamic shared memory is named by the launch and not
        counted.
    stack_bytes : int
        Of each thread, in the GPU's slow memory: arrays whose index is known only at run time.
    spill_bytes : int
        That instructions of the kernel store and load there because registers did not suffice.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


class Compiled(NamedTuple):
    """What the compiler made of a source: kernels by name, PTX, warnings, and the GPU's program."""

    kernels: dict[str, Usage]
    ptx: str
    warnings: str
    binary: bytes


def version() -> str:
    """NVRTC's version, such as "12.9"; an ImportError says what to install where it is missing."""
    return ".".join(map(str, _library().getVersion()))


def compile_for(architecture: str, file: str, macros: Mapping[str, object]) -> dict[str, Usage]:
    """What the kernels of one of the package's files take, by name: see `compile_source`."""
    return compile_source(architecture, _kernels.source(file), macros, name=file).kernels


def compile_source(
    architecture: str,
    source: str,
    macros: Mapping[str, object] | None = None,
    *,
    name: str = "kernel.cu",
) -> Compiled:
    """Compile CUDA C++ with gpu.h before it, as the package's own files are.

    Parameters
    ----------
    architecture : str
        Of the GPU: "sm_75" (T4), "sm_80" (A100), "sm_90" (H100, H200), "sm_100" (B200), ...
    source : str
        The text.
    macros : dict
        Names and values that are fixed when it is compiled.
    name : str
        What messages call it.

    Raises
    ------
    ValueError
        If NVRTC does not know the architecture; the message lists those that it knows.
    RuntimeError
        If the source does not compile; the message is the compiler's.
    ImportError
        If CuPy or NVRTC is missing; the message says what to install.
    """
    library = _library()
    known = [f"sm_{number}" for number in library.getSupportedArchs()]
    if architecture not in known:
        raise ValueError(f"architecture must be one of {', '.join(known)}, got {architecture!r}.")
    text = f'#line 1 "gpu.h"\n{_kernels.text("gpu.h")}#line 1 "{name}"\n{source}'
    options = (*_kernels.options(dict(macros or {})), *OPTIONS, f"-arch={architecture}")
    program = library.createProgram(text, name, (), ())
    try:
        library.compileProgram(program, (*options, "--ptxas-options=-v"))
        ptx, log = library.getPTX(program), library.getProgramLog(program)
        binary = library.getCUBIN(program)
    except library.NVRTCError as error:
        message = library.getProgramLog(program).strip() or str(error)
        raise RuntimeError(f"{name} does not compile for {architecture}:\n{message}") from error
    finally:
        library.destroyProgram(program)
    ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
    warnings = _REPORT.sub("", log).strip(" \n\0")
    return Compiled(_usage(log), ptx.rstrip("\0"), warnings, binary)


def _library():
    """CuPy's bindings of NVRTC."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()  # CuPy looks for the library itself when it is first called
    except (ImportError, RuntimeError, OSError) as error:
        what = "CuPy" if isinstance(error, ImportError) else "NVIDIA's compiler NVRTC"
        raise ImportError(
            f"{what} is missing, with which kernels are compiled for a GPU: pip install "
            "'linear-attention-book[cuda12]' (or [cuda13], by the CUDA version that nvidia-smi "
            f"shows; either, where there is no GPU). {error}"
        ) from error
    return nvrtc


_REPORT = re.compile(r"^ptxas (info +:|  +\.).*\n?", re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for")


def _usage(log: str) -> dict[str, Usage]:
    """Read the assembler's report: about each kernel, then about functions that only it calls."""
    _, *parts = _ENTRY.split(log)
    return {
        kernel: Usage(
            _sum(r"Used (\d+) registers", report),
            _sum(r"(\d+) bytes smem", report),
            _sum(r"(\d+) bytes stack frame", report),
            _sum(r"(\d+) bytes spill (?:stores|loads)", report),
        )
        for kernel, report in zip(parts[::2], parts[1::2], strict=True)
    }


def _sum(pattern: str, report: str) -> int:
    return sum(map(int, re.findall(pattern, report)))
