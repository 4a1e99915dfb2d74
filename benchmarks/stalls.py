"""How long the compiled kernels keep a group of arithmetic units, by the compiler's own notes.

python benchmarks/stalls.py                  writes lesson_code/results/stalls.json
python benchmarks/stalls.py --output FILE    writes another file

The float32 kernels are compiled by NVRTC, for D = M = 64 without the normalizer; no GPU is needed.
From Volta on, an instruction has 16 bytes. Four of their bits say how many cycles at least must
pass before the same warp may start its next instruction (Jia et al. 2018). A row is a stretch of
the program without a barrier or a jump. From its first multiply-add or read of shared memory to its
last, how many instructions there are, how many of each of the two, and the sum of the cycles.
Waiting for memory, global or shared, is not in this sum.
"""

import argparse
import struct
from pathlib import Path
from unittest import mock

import numpy as np

from lesson_code import results
from lesson_code.cupy import _kernels, nvrtc
from lesson_code.cupy.linear import causal_scan

GPU = _kernels.Gpu((9, 0), 132)  # an H200
OPERATIONS = {0x23: "multiply_adds", 0x84: "reads"}  # FFMA, LDS: the last 8 of 12 bits
ENDS = {0x1D, 0x47, 0x4D}  # BAR, BRA, EXIT


def launched(kernel):
    """File, macros and name of each function that a kernel launches."""
    found, x = [], np.zeros((132, 128, 64), np.float32)

    def note(file, macros, name, *arguments, **options):
        found.append((file, macros, name))

    with mock.patch.multiple(_kernels, run=note, gpu=lambda array: GPU):
        causal_scan(x, x, x, kernel=kernel, device="cpu")
    return found


def section(binary, name):
    """The bytes of a section of an ELF file."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<3H", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + i * size) for i in range(count)]
    for header in headers:
        at = headers[names][4] + header[0]
        if binary[at : binary.index(b"\0", at)].decode() == name:
            return binary[header[4] : header[4] + header[5]]
    raise ValueError(f"there is no section {name}")


def stretches(code):
    """What lies between barriers and jumps, from the first multiply-add or read to the last."""
    parts = [[]]
    for low, high in struct.iter_unpack("<QQ", code):
        kind = low & 0xFF
        parts[-1].append((OPERATIONS.get(kind), high >> 41 & 15))
        if kind in ENDS:
            parts.append([])
    for part in parts:
        where = [i for i, (kind, _) in enumerate(part) if kind]
        if any(part[i][0] == "multiply_adds" for i in where):
            yield part[where[0] : where[-1] + 1]


def measure(kernels):
    rows = []
    for kernel in kernels:
        for file, macros, name in launched(kernel):
            compiled = nvrtc.compile_source("sm_90", _kernels.source(file), macros)
            for part in stretches(section(compiled.binary, f".text.{name}")):
                kinds = [kind for kind, _ in part]
                row = {"kernel": kernel, "function": name, "instructions": len(part)}
                row |= {kind: kinds.count(kind) for kind in OPERATIONS.values()}
                rows.append(row | {"cycles": sum(cycles for _, cycles in part)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = ["recurrent", "chunked"]
    parser.add_argument("--kernels", nargs="+", default=choices, choices=choices)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = measure(options.kernels)
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()))
    result = {
        "what": "instructions of the float32 kernels and the cycles between them, on an H200",
        "nvrtc": nvrtc.version(),
        "rows": rows,
    }
    results.save("stalls", result, output=options.output)


if __name__ == "__main__":
    main()
