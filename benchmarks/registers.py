"""What the kernels take of GPUs that need not be there: registers, shared memory, spills.

python benchmarks/registers.py                  writes lesson_code/results/registers.json
python benchmarks/registers.py --output FILE    writes another file

The functions are called, forward and backward, in many sizes; what they would launch on each GPU is
noted down and compiled for it by NVRTC. A row has the largest numbers of one CUDA function for one
kernel, dtype and width D = M, over all calls: with the normalizer and without, many heads and few.
"configurations" says how many different compilations that were. "dynamic_bytes" is shared memory
that the launch asks for beside what the function declares. "sources" is a number that changes with
the kernel files, but for their comments, and with what is launched.
"""

import argparse
import hashlib
import inspect
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from lesson_code import results
from lesson_code.cupy import _kernels, nvrtc
from lesson_code.cupy.decay import decaying_scan
from lesson_code.cupy.delta import delta_scan
from lesson_code.cupy.linear import causal_scan
from lesson_code.cupy.wkv import wkv

GPUS = {  # the multiprocessors of one GPU of each architecture
    "sm_75": ("T4", 40),
    "sm_80": ("A100", 108),
    "sm_90": ("H200", 132),
    "sm_100": ("B200", 148),
}
DTYPES = {
    "recurrent": (torch.float32, torch.bfloat16),
    "chunked": (torch.float32, torch.bfloat16),
    "tensor_core": (torch.float16, torch.bfloat16),
    "pipelined": (torch.float16, torch.bfloat16),
    "tiled": (torch.float32,),
    "wkv": (torch.float32, torch.float16, torch.bfloat16),
    "decay": (torch.float32, torch.bfloat16),
    "decay_pipelined": (torch.float16, torch.bfloat16),
    "decay_channels": (torch.float16, torch.bfloat16),
    "delta": (torch.float32, torch.bfloat16),
}
WIDTHS = {
    "recurrent": (64, 128, 256),
    "chunked": (64, 128, 256),
    "tensor_core": (64, 65, 128, 256),  # rows of 65 numbers begin anywhere, not at 16 bytes
    "pipelined": (64, 65, 128),  # wider ones are those of "tensor_core"
    "tiled": (64, 65, 128),  # and of "chunked"
    "wkv": (64,),  # a thread has one channel, however many there are
    "decay": (64, 128, 256),
    "decay_pipelined": (64, 128),
    "decay_channels": (64, 128),
    "delta": (64, 128),
}
HEADS_AND_LENGTHS = ((8, 512), (256, 64))


class Launch(NamedTuple):
    """A CUDA function, how it is compiled, and what its launch asks for."""

    file: str
    macros: tuple
    function: str
    threads: int
    dynamic_bytes: int


def capability(architecture):
    number = int(architecture.removeprefix("sm_"))
    return number // 10, number % 10


def calls(kernel, dtype, width):
    """Functions without arguments: all kinds of calls of one kernel, each forward and backward."""
    if kernel == "wkv":
        k = torch.zeros(2, 64, width, dtype=dtype, requires_grad=True)
        rates = torch.ones(2, width, requires_grad=True)
        return [lambda: wkv(k, k, *rates, device="cpu")]
    if kernel == "delta":  # with a decay for each channel, and with one
        x = torch.zeros(2, 64, width, dtype=dtype, requires_grad=True)
        g = torch.zeros(2, 64, width, requires_grad=True)
        return [
            lambda g=g: delta_scan(x, x, x, g[..., 0], g, device="cpu") for g in (g, g[..., :1])
        ]

    def scan(H, N, decays, bonus, kernel):
        x = torch.zeros(H, N, width, dtype=dtype, requires_grad=True)
        return decaying_scan(x, x, x, x[..., :decays], bonus, kernel=kernel, device="cpu")

    if kernel in ("decay_pipelined", "decay_channels"):
        decays = 1 if kernel == "decay_pipelined" else width
        return [
            lambda H=H, N=N: scan(H, N, decays, None, "pipelined") for H, N in HEADS_AND_LENGTHS
        ]
    if kernel == "decay":
        return [
            lambda H=H, N=N, decays=decays, bonus=bonus: scan(H, N, decays, bonus, "chunked")
            for H, N in HEADS_AND_LENGTHS
            for decays in (1, width)
            for bonus in (None, torch.zeros(width))
        ]

    def call(H, N, normalize):
        x = torch.zeros(H, N, width, dtype=dtype, requires_grad=True)
        return causal_scan(x, x, x, normalize=normalize, kernel=kernel, device="cpu")

    return [
        lambda H=H, N=N, normalize=normalize: call(H, N, normalize)
        for H, N in HEADS_AND_LENGTHS
        for normalize in (False, True)
    ]


def launches(architecture, kernel, dtype, width):
    """What one kernel would launch on a GPU; nothing where it refuses the dtype there."""
    seen, signature = {}, inspect.signature(_kernels.run)

    def note(*args, **options):
        call = signature.bind(*args, **options)
        call.apply_defaults()
        file, macros, name, block, shared_bytes = (
            call.arguments[which] for which in ("file", "macros", "name", "block", "shared_bytes")
        )
        seen[Launch(file, tuple(macros.items()), name, block, shared_bytes)] = None

    gpu = _kernels.Gpu(capability(architecture), GPUS[architecture][1])
    with mock.patch.multiple(_kernels, run=note, gpu=lambda array: gpu):
        for call in calls(kernel, dtype, width):
            with torch.no_grad():  # keeps less than a forward pass before a backward pass
                _unless_refused(call)
            _unless_refused(lambda call=call: call().sum().backward())
    return list(seen)


def _unless_refused(call):
    try:
        call()
    except ValueError as error:
        if not re.search("kernel='(tensor_core|pipelined)' needs", str(error)):
            raise


def all_launches(architectures, kernels, widths=None):
    """Launches by (architecture, kernel, dtype, width)."""
    found = {}
    for architecture, kernel in itertools.product(architectures, kernels):
        for dtype, width in itertools.product(DTYPES[kernel], widths or WIDTHS[kernel]):
            key = architecture, kernel, str(dtype).removeprefix("torch."), width
            found[key] = launches(architecture, kernel, dtype, width)
    return {key: value for key, value in found.items() if value}


def fingerprint():
    """A number of the kernel files without comments and spaces, and of all launches."""
    headers = ("gpu.h", "rows.h", "tiles.h", "walk.h", "segments.h", "fading.h", "parts.h")
    kernels = ("linear.cu", "pipelined.cu", "tiled.cu", "wkv.cu", "decay.cu", "delta.cu")
    kernels += ("decay_pipelined.cu", "decay_channels.cu")
    texts = [re.sub(r"//.*|\s+", " ", _kernels.text(file)).split() for file in headers + kernels]
    launched = all_launches(GPUS, DTYPES)
    return hashlib.sha256(repr((texts, launched, nvrtc.OPTIONS)).encode()).hexdigest()


def measure(architectures, kernels, widths=None):
    """Rows of the result."""
    found = all_launches(architectures, kernels, widths)
    wanted = dict.fromkeys(
        (key[0], launch.file, launch.macros) for key in found for launch in found[key]
    )
    with ThreadPoolExecutor() as pool:  # NVRTC lets other threads run
        usages = pool.map(lambda one: nvrtc.compile_for(*one[:2], dict(one[2])), wanted)
        compiled = dict(zip(wanted, usages, strict=True))
    rows = []
    for (architecture, kernel, dtype, width), several in found.items():
        for function in dict.fromkeys(launch.function for launch in several):
            chosen = [launch for launch in several if launch.function == function]
            numbers = [
                {"threads": launch.threads, "dynamic_bytes": launch.dynamic_bytes}
                | compiled[architecture, launch.file, launch.macros][function]._asdict()
                for launch in chosen
            ]
            row = {"architecture": architecture, "kernel": kernel, "dtype": dtype, "D": width}
            row |= {"function": function, "configurations": len(chosen)}
            row |= {name: max(one[name] for one in numbers) for name in numbers[0]}
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--kernels", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = measure(options.architectures, options.kernels, options.widths)
    for row in rows:
        print(
            "{architecture:6s} {kernel:11s} {dtype:8s} D {D:3d} {function:15s} "
            "{registers:3d} registers, {threads:3d} threads, shared bytes {shared_bytes:5d} + "
            "{dynamic_bytes:6d}, stack {stack_bytes}, spilled {spill_bytes}".format(**row)
        )
    result = {
        "what": "registers, shared memory and spills of the kernels, compiled for four GPUs",
        "nvrtc": nvrtc.version(),
        "gpus": {architecture: name for architecture, (name, _) in GPUS.items()},
        "sources": fingerprint(),
        "rows": rows,
    }
    results.save("registers", result, output=options.output)


if __name__ == "__main__":
    main()
