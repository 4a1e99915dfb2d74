"""Runs the kernels of a .cu file without a GPU, counts what they do and finds their races.

A C++ compiler translates the file with cpu.h before it, which gives C++ the words of CUDA. The
threads of a block take turns on one core, so a kernel runs here thousands of times slower than on a
GPU; what it computes, and which memory it touches, is the same.
"""

from lesson_code.cupy.emulator._compiler import sanitized
from lesson_code.cupy.emulator._module import Module, load, order, trace
from lesson_code.cupy.emulator._trace import Access, Counts, Race, RaceError, Trace

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
