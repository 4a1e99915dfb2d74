"""How long each kernel should take on a GPU that is not here, and why.

python benchmarks/kernel_times.py                  writes lesson_code/results/kernel_times.json
python benchmarks/kernel_times.py --output FILE    writes another file

A row is one kernel, forward or backward, in one shape on one GPU. causal_scan, decaying_scan or
delta_scan is called with arrays of the full size, in bfloat16 but for "chunked_float32" and
"tiled", and what it would launch is noted down instead of run. Of each launch the first block is
run in the emulator, over the first tokens of its walk, and its counts (bytes in sectors of
32, as if no cache had any of them, passes through cache and shared memory, products of tiles) are
scaled to the whole launch.
Registers and shared memory are NVRTC's. Instructions and cycles come from the compiled program:
each of its loops is replayed by one warp, which starts an instruction when the pause that the
compiler wrote into the one before is over, and waits for what it needs of shared memory and of the
special units for as long as LATENCY says. A block has these cycles one after the other even if all
else is hidden. STEPS says how often a loop runs in 64 tokens, and how many trips to the memory, one
after the other, the walk makes meanwhile.

lesson_code.gpu makes terms of these numbers. "bound" is the longest term of each launch, and
"estimate" the root of the sum of their squares; launches follow each other and are added up. The
time in which a launch begins is not in either. "floor" is the time in which the bytes that must be
moved, every array once, pass at the bandwidth of the data sheet, or in float32 that of the
multiply-adds of the recurrence, if it is longer.
"""

import argparse
import functools
import inspect
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from stalls import OPERATIONS, Program, section, ways_of

from lesson_code import results
from lesson_code.cupy import _arrays, _kernels, emulator, nvrtc
from lesson_code.cupy.decay import decaying_scan
from lesson_code.cupy.delta import delta_scan
from lesson_code.cupy.linear import causal_scan
from lesson_code.gpu import GPU, GPUS, launch_of, predict

ON = {"H100": "sm_90", "H200": "sm_90"}
SHAPES = ((8, 16, 4096, 64), (8, 16, 4096, 128), (1, 16, 512, 64))  # B, H, N, D
COUNTED = 512  # tokens of a walk that the emulator runs
CHUNK = 64

# Cycles from the start of an instruction to its result, by the last 8 of its 12 bits. The 29 of
# shared memory are measured on Hopper (Luo et al., 2024, arXiv 2402.13499); those of matrices,
# shuffles, special units and a barrier that nobody else is late for are assumed. Trips to memory
# are counted as such.
LATENCY = {0x84: 29, 0x3B: 33, 0x89: 24, 0xF3: 24, 0x08: 20, 0x1D: 20}
SPECIAL = 0x308  # MUFU, all 12 bits: exponentials and quotients
AT_ONCE = 10  # cycles after which an instruction has read its operands


class Steps(NamedTuple):
    """What a function does in 64 tokens: runs of its loops, by their numbers, and trips.

    `longest` are the runs of its slowest warp, where warps differ.
    """

    loops: dict[int, float]
    trips: float
    longest: dict[int, float] | None = None


# By function and D; for delta.cu see `steps_of`.
STEPS = {
    ("recurrent", 64): Steps({1: 8}, 8),
    ("recurrent", 128): Steps({1: 32}, 32),
    ("chunk_states", 64): Steps({1: 1, 2: 4}, 4),
    ("chunk_states", 128): Steps({1: 1, 2: 4, 3: 12}, 4),
    ("chunk_outputs", 64): Steps({1: 4, 2: 64, 3: 4}, 8),
    ("chunk_outputs", 128): Steps({1: 8, 2: 128, 3: 4}, 12),
    ("segment_sums", 64): Steps({1: 1, 2: 1}, 1),
    ("segment_sums", 128): Steps({1: 1, 2: 2}, 2),
    # Warp w has w + 1 tiles of keys, 2.5 on average.
    ("segment_outputs", 64): Steps({1: 1, 2: 1, 3: 2.5, 4: 2}, 1, {1: 1, 2: 1, 3: 4, 4: 2}),
    ("segment_outputs", 128): Steps(
        {1: 1, 2: 2, 3: 2.5, 4: 5, 5: 4}, 2, {1: 1, 2: 2, 3: 4, 4: 8, 5: 4}
    ),
    # Loads are hidden: see `walk_of`. Backward, half of the warps make two parts of the weights.
    ("forward_walk", 64): Steps({2: 1}, 0),
    ("forward_walk", 128): Steps({2: 1, 3: 2}, 0),
    ("backward_walk", 64): Steps({2: 1, 3: 1.5}, 0, {2: 1, 3: 2}),
    ("backward_walk", 128): Steps(
        {1: 1, 2: 1.5, 3: 2, 4: 2, 5: 2}, 0, {1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
    ),
    # Chunks of 32 tokens; of the weights the upper half of a tile has half as many.
    ("tiled_walk", 64): Steps({1: 2, 2: 3, 3: 4}, 0, {1: 2, 2: 4, 3: 4}),
    ("tiled_walk", 128): Steps({1: 2, 2: 4, 3: 4, 4: 3, 5: 4}, 0, {1: 2, 2: 4, 3: 4, 4: 4, 5: 4}),
    ("tiled_sums", 64): Steps({1: 2, 2: 4}, 0),
    ("tiled_sums", 128): Steps({1: 2, 2: 4}, 0),
    ("sums_of_segments", 64): Steps({2: 1}, 0),
    ("sums_of_segments", 128): Steps({2: 1}, 0),
    ("fading_walk", 64): Steps({2: 1}, 0),
    ("fading_walk", 128): Steps({2: 1, 3: 2}, 0),
    ("fading_states", 64): Steps({2: 1}, 0),
    ("fading_states", 128): Steps({2: 1}, 0),
    # At D = 128 chunks have 32 tokens.
    ("channel_walk", 64): Steps({2: 1}, 0),
    ("channel_walk", 128): Steps({2: 2, 3: 4}, 0),
    ("channel_states", 64): Steps({2: 1}, 0),
    ("channel_backward", 64): Steps({2: 1}, 0),
    ("channel_states", 128): Steps({2: 2}, 0),
    # Two walks, each of 64 channels: half of the warps read from the states.
    ("channel_backward", 128): Steps({2: 2, 3: 2, 4: 2}, 0, {2: 2, 3: 4, 4: 4}),
    ("fading_backward", 64): Steps({2: 1}, 0),
    ("fading_backward", 128): Steps({1: 1, 2: 2, 3: 2, 4: 2}, 0),
}

# The kernels of memories that fade, in 4 chunks of 16 tokens. Loops run over chunks, channels, and
# tokens whose decays are added up: 7.5 of them on average, mostly in fours.
for D, c in ((64, 4), (128, 8)):
    STEPS["forward", D] = Steps(
        {1: 0, 2: 0, 3: 4, 4: 4 * c, 5: 4 * c, 6: 8 * c, 7: 6 * c, 8: 64}, 4
    )
    STEPS["walk", D] = Steps({1: 4, 2: 16, 3: 0, 4: 64}, 4)
    STEPS["backward", D] = Steps(
        {1: 0, 2: 1, 3: 4, 4: 12, 5: 0, 6: 48, 7: 4, 8: 4 * c, 9: 16, 10: 0, 11: 16, 12: 32}
        | {13: 24, 14: 16, 15: 64},
        9,
    )
FADING = ("forward", "walk", "backward", "chunk_starts", "values_backward")
# Where one decay serves all channels, this is left of the loops of `forward` after the first one.
ONCE = {4: 0.25, 5: 0.1, 6: 0, 7: 0}


class Noted(NamedTuple):
    """A launch that was noted down."""

    file: str
    macros: tuple
    function: str
    grid: tuple
    threads: int
    arguments: tuple
    shared_bytes: int

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def walks_by(self) -> int | None:
        """Which argument is the length of a block's walk; None where there is no walk."""
        return -1 if self.file == "delta.cu" else LENGTH.get(self.function)


# Arguments by their place: which of them is the length of a block's walk. In delta.cu all walk by
# the last one.
LENGTH = {"recurrent": -2, "chunk_states": -2, "segment_sums": -1, "segment_outputs": -1}
LENGTH |= dict.fromkeys(("forward_walk", "backward_walk", "sums_of_segments"), -1)
LENGTH |= {"tiled_walk": -1, "tiled_sums": -1}
LENGTH |= {"forward": -2, "walk": -2, "backward": -1}
LENGTH |= {"fading_walk": -1, "fading_states": -2, "fading_backward": -1}
LENGTH |= {"channel_walk": -1, "channel_states": -2, "channel_backward": -1}
FADING_WALKS = ("fading_walk", "fading_states", "fading_backward")  # of decay_pipelined.cu
FADING_WALKS += ("channel_walk", "channel_states", "channel_backward")  # of decay_channels.cu
TILED = ("tiled_walk", "tiled_sums")
WALKS = ("forward_walk", "backward_walk", "sums_of_segments", *TILED, *FADING_WALKS)
# Bytes in a cycle that the second cache sends to one multiprocessor at most, and to all (NVIDIA's
# white paper on the A100; of later GPUs it is not published).
FROM_CACHE, FROM_CACHE_TO_ALL = 64, 5120
# A thread for each number of a state: which argument says how many segments it walks through.
THROUGH = {"segment_states": -2, "states_of_segments": -3, "segment_starts": 3}
THROUGH |= {"fading_segments": 3}


def noted(call: Callable[[], object], processors: int) -> list[Noted]:
    """What a call would launch on a GPU."""
    found, signature = [], inspect.signature(_kernels.run)

    def note(*args, **options):
        one = signature.bind(*args, **options)
        one.apply_defaults()
        file, macros, name, grid, block, arguments, shared_bytes = one.arguments.values()
        grid = (*grid, 1)[:2] if isinstance(grid, tuple) else (grid, 1)
        found.append(Noted(file, tuple(macros.items()), name, grid, block, arguments, shared_bytes))

    gpu = _kernels.Gpu((9, 0), processors)
    with mock.patch.multiple(_kernels, run=note, gpu=lambda array: gpu):
        call()
    return found


def counts_of(one: Noted) -> tuple[emulator.Counts, float]:
    """The emulator's counts of the first block, and how many times as long its whole walk is."""
    scalars = [str(x) if isinstance(x, int) else x is None for x in one.arguments]
    key = one._replace(grid=(), arguments=tuple(scalars))
    if key not in _counts:
        _counts[key] = _count(one)
    return _counts[key]


_counts: dict[Noted, tuple[emulator.Counts, float]] = {}


def _count(one):
    if one.walks_by is None:
        return _run(one), 1.0
    length = one.arguments[one.walks_by]
    if one.function not in FADING + FADING_WALKS or length <= 2 * CHUNK:
        short = min(length, COUNTED)
        return _run(one, short), length / short
    # A walk has a state at both ends: what 64 tokens more add is known by the difference.
    short, longer = _run(one, CHUNK), _run(one, 2 * CHUNK)
    for name in ("global_lines", "global_sectors", "shared_passes", "tile_products"):
        step = getattr(longer, name) - getattr(short, name)
        setattr(short, name, getattr(short, name) + round(step * (length / CHUNK - 1)))
    return short, 1.0


def _run(one, length=None):
    arguments = list(one.arguments)
    if length is not None:
        arguments[one.walks_by] = length
    values = [_kernels._argument(x) for x in arguments]
    arrays = [getattr(x, "array", x) for x in arguments if not isinstance(x, int)]
    extents = [_arrays.extent(x) for x in arrays if hasattr(x, "shape") and x.shape]
    module = _kernels.load(one.file, one.macros, "cpu")
    blocks = segments_of(one) if is_alone(one) else 1
    with emulator.trace() as trace:
        module.launch(one.function, blocks, one.threads, values, one.shared_bytes, buffers=extents)
    return trace.kernels[one.function]


@functools.cache
def compiled(architecture: str, file: str, macros: tuple) -> nvrtc.Compiled:
    return nvrtc.compile_source(architecture, _kernels.source(file), dict(macros), name=file)


@functools.cache
def loops_of(architecture: str, file: str, macros: tuple, function: str) -> dict[int, dict]:
    """Instructions and cycles of each loop of a function, 0 for what is outside of them."""
    binary = compiled(architecture, file, macros).binary
    program = Program(binary, function)
    words = list(struct.iter_unpack("<QQ", section(binary, f".text.{function}")))
    wide = function not in ("recurrent", "chunk_states", "chunk_outputs", *FADING)
    ways = ways_of(program, wide)
    if function in FADING_WALKS:  # some warps make exponentials instead: which are slower?
        program.special = 10
        ways = [
            max(both, key=lambda own: replayed(program, own))
            for both in zip(ways, ways_of(program, wide), strict=True)
        ]
    return {
        number: {
            "instructions": len(own),
            **{
                name: sum(program.kinds[i] == code for i in own)
                for code, name in OPERATIONS.items()
            },
            "special": sum(words[i][0] & 0xFFF == SPECIAL for i in own),
            "cycles": replayed(program, own),
        }
        for number, own in enumerate(ways)
    }


def replayed(program: Program, instructions: list[int]) -> int:
    """Cycles in which one warp runs these instructions, alone."""
    now, ready = 0, [0] * 6
    for i in instructions:
        needs = [ready[b] for b in range(6) if program.waits[i] >> b & 1]
        now = max([now, *needs])
        if program.gives[i] < 6:
            latency = LATENCY.get(program.kinds[i], 0)
            ready[program.gives[i]] = max(ready[program.gives[i]], now + latency)
        if program.frees[i] < 6:
            ready[program.frees[i]] = max(ready[program.frees[i]], now + AT_ONCE)
        now += max(1, program.cycles[i])
    return now


def is_alone(one: Noted) -> bool:
    """Whether the blocks of a walk make the states before their segments themselves."""
    return one.function in ("forward_walk", "backward_walk") and bool(one.arguments[-3])


def segments_of(one: Noted) -> int:
    return one.arguments[-4]


def bytes_of(arrays) -> int:
    return sum(_arrays.extent(getattr(x, "array", x))[1] for x in arrays)


def walk_of(one: Noted, gpu: str, D: int, counts, times: float, loops: dict) -> dict:
    """What a walk does, for the whole launch, where its loads are hidden.

    It is one of pipelined.cu, tiled.cu, decay_pipelined.cu or decay_channels.cu. A step of it takes
    its cycles, or those of a trip over the steps for which a copy is on its way. Where segments
    make their states themselves, the steps for it are those of "sums_of_segments", and what they
    read once more comes from the cache: the walk takes as long as that needs, if it is longer.
    """
    machine, macros, steps = GPUS[gpu], dict(one.macros), STEPS[one.function, D]
    trip = machine.latency * machine.clock / (macros["STAGES"] - 1)
    chunks = -(-length_of(one) // CHUNK)

    def total(what, runs):
        return sum(loops[n][what] * runs[n] for n in runs)

    own = chunks * max(trip, total("cycles", steps.longest or steps.loops))
    issued = loops[0]["instructions"] + chunks * total("instructions", steps.loops)
    moved = 32 * counts.global_sectors * one.blocks / counts.blocks * times
    if one.function not in FADING_WALKS:  # else they are counted
        moved += bytes_of([x for x in one.arguments if getattr(x, "dtype", None) is torch.float32])
    trips = 1.0 + (
        one.function == "backward_walk" or one.function in FADING_WALKS
    )  # tiles; a state
    if is_alone(one):
        sums = _sums(one, gpu)
        before = segments_of(one) - 1  # at most; forward, half of it on average
        mean = before if one.function == "backward_walk" else before / 2
        issued += mean * chunks * sums["instructions"]
        vectors = {"forward_walk": 2 * before + 3, "backward_walk": 2 * before + 4}[one.function]
        cached = vectors * chunks * CHUNK * D * 2 / FROM_CACHE
        own = max(own + before * chunks * max(trip, sums["cycles"]), cached)
        own = max(own, moved / FROM_CACHE_TO_ALL)
        arrays = [x for x in one.arguments if not isinstance(x, int | None)]
        moved = bytes_of({_arrays.address(getattr(x, "array", x)): x for x in arrays}.values())
    warps = one.threads // 32
    return {
        "bytes": moved,
        "instructions": one.blocks * warps * issued,
        "cycles": loops[0]["cycles"] + own,
        "trips": trips,
    }


def _sums(one: Noted, gpu: str) -> dict:
    """The loop of "sums_of_segments" with the macros of another walk."""
    kept = {name: value for name, value in one.macros if name not in ("FORWARD", "BACKWARD")}
    macros = tuple({"SUMS": 1, "TOTALS": 0, **kept}.items())
    found = loops_of(ON[gpu], one.file, macros, "sums_of_segments")
    return found[max(found)]


def length_of(one: Noted) -> float:
    """Tokens of a block's walk, which are a chunk's where there is no walk."""
    return CHUNK if one.walks_by is None else one.arguments[one.walks_by]


def steps_of(one: Noted, D: int) -> Steps:
    """What a launch's function does in 64 tokens."""
    if one.file == "delta.cu":
        return steps_of_delta(one.function, D, dict(one.macros)["PER_CHANNEL"])
    steps = STEPS[one.function, D]
    if one.function == "forward" and not dict(one.macros)["PER_CHANNEL"]:
        first = {n: steps.loops[n] * 16 / D for n in ONCE}
        shared = {n: first[n] + ONCE[n] * (steps.loops[n] - first[n]) for n in ONCE}
        return steps._replace(loops=steps.loops | shared)
    return steps


def steps_of_delta(function: str, D: int, per_channel: int) -> Steps:
    """The same for delta.cu, in 4 chunks of 16 tokens; D is 64 or 128.

    The decay from the start of a chunk to each of its tokens is a sum, whose terms one loop adds up
    by sixteens and another by fours. The last of the eight warps, with tokens 15 and 16, runs once
    through both; on average 1/8 of them run through the first and 6/8 through the second. Eights,
    and what fours leave over, have no loop. Where all channels decay alike this is done once, else
    for each channel of a thread; then, as in decay.cu, the way of each warp is longer by 5 or 6%
    than it is, because it has the decay of the whole chunk, which the first warp alone adds up.
    """
    c, decays = D // 16, [(1 / 8, 1), (6 / 8, 1)]
    runs = [(1, 1)]  # in a chunk, on average and by the last warp: of the loop over chunks itself
    if function == "backward":
        # Columns of the errors; decays; sixteens behind a token, of which there are 15 at most; and
        # what tokens read of the memory, 256 / D at once.
        runs += [(c, c), *decays, (0, 0), (c, c)]
    else:
        runs += decays * (c if per_channel else 1)
        # Results are put away by fours, and a thread has two of them. What is written into the
        # memory, backward twice, has a loop, 256 / D tokens at once, but for the first of D = 64.
        runs += [(0, 0)] + [(c, c)] * ((function == "values_backward") + (D == 128))
    loops, longest = ({n: 4 * run[i] for n, run in enumerate(runs, 1)} for i in range(2))
    # A trip for what is asked for, and backward one for the memory before the chunk.
    return Steps(loops, 8 if function == "backward" else 4, longest)


def launch(one: Noted, gpu: str, D: int):
    """A launch as `lesson_code.gpu` takes it."""
    counts, times = counts_of(one)
    usage = compiled(ON[gpu], one.file, one.macros).kernels[one.function]
    more = {
        "registers": usage.registers,
        "shared_bytes": usage.shared_bytes + one.shared_bytes,
    }
    warps = -(-one.threads // 32)
    loops = loops_of(ON[gpu], one.file, one.macros, one.function)
    if one.function in WALKS:
        if not {0, *STEPS[one.function, D].loops} <= set(loops):
            raise ValueError(f"{one.function} at D = {D} has loops {sorted(loops)}")
        more |= walk_of(one, gpu, D, counts, times, loops)
    elif one.function in THROUGH:
        segments = one.arguments[THROUGH[one.function]]
        more |= {"instructions": one.blocks * warps * loops[0]["instructions"], "trips": segments}
    else:
        steps, chunks = steps_of(one, D), length_of(one) / CHUNK

        def total(what, runs):
            return loops[0][what] + chunks * sum(loops[n][what] * runs[n] for n in runs)

        assert {0, *steps.loops} == set(loops), (one.function, D, sorted(loops))
        more["instructions"] = one.blocks * warps * total("instructions", steps.loops)
        more["cycles"] = total("cycles", steps.longest or steps.loops)
        more["trips"] = max(1, steps.trips * chunks)
    scaled = launch_of(counts, one.blocks, one.threads, **more)
    fields = {name: getattr(scaled, name) * times for name in ("passes", "tensor")}
    if one.function not in WALKS:
        fields["bytes"] = scaled.bytes * times
    if one.function in TILED:
        runs = STEPS[one.function, D].loops
        adds = length_of(one) / CHUNK * sum(loops[n]["multiply_adds"] * runs[n] for n in runs)
        fields["multiply_adds"] = 32 * one.blocks * warps * adds
    if one.function in ("recurrent", "chunk_states", "chunk_outputs", *FADING):
        fields["multiply_adds"] = 32 * one.blocks * warps * total("multiply_adds", steps.loops)
        # The compiler makes one read of several that the source has, and the emulator counts.
        reads = one.blocks * warps * total("reads", steps.loops)
        fields["passes"] = counts.global_lines * one.blocks / counts.blocks * times + reads
        fields["special"] = 32 * one.blocks * warps * total("special", steps.loops)
    return scaled.__class__(**{**vars(scaled), **fields})


def scan(
    kernel: str, shape: tuple[int, ...], backward: bool, dtype: torch.dtype = torch.bfloat16
) -> list[Callable[[], object]]:
    """Calls: the one to be left out, and the one to be counted."""
    x = torch.zeros(shape, dtype=dtype, requires_grad=backward)
    q, k, v = (x.detach().clone().requires_grad_(backward) for _ in range(3))
    if not backward:
        return [lambda: causal_scan(q, k, v, kernel=kernel, device="cpu")]
    out = causal_scan(q, k, v, kernel=kernel, device="cpu")
    return [lambda: out.backward(torch.zeros_like(out))]


def fading(kernel: str, per_channel: bool, shape: tuple[int, ...], backward: bool):
    """Calls of decaying_scan, with a decay for each channel or one for all."""
    x = torch.zeros(shape, dtype=torch.bfloat16)
    g = x if per_channel else x[..., :1].contiguous()
    q, k, v, g = (x.detach().clone().requires_grad_(backward) for x in (x, x, x, g))
    if not backward:
        return [lambda: decaying_scan(q, k, v, g, kernel=kernel, device="cpu")]
    out = decaying_scan(q, k, v, g, kernel=kernel, device="cpu")
    return [lambda: out.backward(torch.zeros_like(out))]


def delta(per_channel: bool, shape: tuple[int, ...], backward: bool):
    """Calls of delta_scan, with a decay for each channel or one for all."""
    x = torch.zeros(shape, dtype=torch.bfloat16)
    g = x if per_channel else x[..., :1].contiguous()
    arrays = (x, x, x, x[..., 0].contiguous(), g)  # q, k, v, beta, log_decay
    arrays = [x.detach().clone().requires_grad_(backward) for x in arrays]
    if not backward:
        return [lambda: delta_scan(*arrays, device="cpu")]
    out = delta_scan(*arrays, device="cpu")
    return [lambda: out.backward(torch.zeros_like(out))]


# What others may add to: by name the launches of a kernel in a shape, and the vectors of D numbers
# for each token that must be moved at least.
class Kernel(NamedTuple):
    call: Callable
    forward_vectors: int = 4  # q, k, v, out
    backward_vectors: int = 7  # q, k, v, grad, dq, dk, dv
    bytes: int = 2  # of a number

    def floor(self, machine: GPU, shape: tuple[int, ...], backward: bool) -> tuple[float, int]:
        """Seconds in which nothing can be faster, and the bytes that must be moved.

        In float32 it may be multiply-adds that take longer: for each token those of the recurrence,
        two products of D x D forward (write and read) and five backward (two states, three reads).
        """
        B, H, N, D = shape
        vectors, products = (self.backward_vectors, 5) if backward else (self.forward_vectors, 2)
        moved = self.bytes * vectors * B * H * N * D
        seconds = moved / machine.bandwidth
        if self.bytes == 4:
            seconds = max(seconds, products * B * H * N * D * D / machine.multiply_adds)
        return seconds, moved


KERNELS = {
    name: Kernel(functools.partial(scan, name))
    for name in ("recurrent", "chunked", "tensor_core", "pipelined")
}
for name, kernel in (("chunked_float32", "chunked"), ("tiled", "tiled")):
    KERNELS[name] = Kernel(functools.partial(scan, kernel, dtype=torch.float32), bytes=4)
KERNELS["decay_head"] = Kernel(functools.partial(fading, "chunked", False))
KERNELS["decay_channel"] = Kernel(functools.partial(fading, "chunked", True), 5, 9)
KERNELS["decay_pipelined"] = Kernel(functools.partial(fading, "pipelined", False))
KERNELS["decay_channel_pipelined"] = Kernel(functools.partial(fading, "pipelined", True), 5, 9)
KERNELS["delta_head"] = Kernel(functools.partial(delta, False))
KERNELS["delta_channel"] = Kernel(functools.partial(delta, True), 5, 9)


def row_of(name: str, shape: tuple[int, ...], backward: bool, gpu: str) -> dict:
    kernel, machine = KERNELS[name], GPUS[gpu]
    D = shape[-1]
    found = launches_of(name, shape, backward, machine.processors)
    launches = [launch(one, gpu, D) for one in found]
    predictions = [predict(one, machine) for one in launches]
    floor, moved = kernel.floor(machine, shape, backward)
    row = {"kernel": name, "direction": "backward" if backward else "forward", "gpu": gpu}
    row |= dict(zip("BHND", shape, strict=True))
    row |= {"floor": floor, "floor_bytes": moved}
    row |= {"bytes": sum(one.bytes for one in launches)}
    row |= {
        "bound": sum(one.seconds for one in predictions),
        "estimate": sum(one.estimate for one in predictions),
    }
    row |= {"ratio": row["bound"] / row["floor"], "estimate_ratio": row["estimate"] / row["floor"]}
    row["launches"] = [
        {
            "function": one.function,
            "blocks": one.blocks,
            "threads": one.threads,
            "registers": made.registers,
            "shared_bytes": made.shared_bytes,
            "trips": made.trips,
            "cycles": made.cycles,
            "resident": it.resident,
            "waves": it.waves,
            "terms": it.terms,
        }
        for one, made, it in zip(found, launches, predictions, strict=True)
    ]
    return row


@functools.lru_cache(maxsize=1)  # the arrays of more would not fit the memory
def launches_of(name: str, shape: tuple[int, ...], backward: bool, processors: int) -> list[Noted]:
    nothing = mock.patch.object(_kernels, "run", lambda *args, **options: None)
    gpu = _kernels.Gpu((9, 0), processors)
    with nothing, mock.patch.object(_kernels, "gpu", lambda array: gpu):
        (call,) = KERNELS[name].call(shape, backward)
    return noted(call, processors)


def shape_of(text: str) -> tuple[int, ...]:
    """B,H,N,D"""
    B, H, N, D = map(int, text.split(","))
    return B, H, N, D


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--gpus", nargs="+", default=list(ON), choices=list(ON))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=shape_of)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.kernels:
        for shape in options.shapes:
            for backward in (False, True):
                for gpu in options.gpus:
                    rows.append(row := row_of(name, shape, backward, gpu))
                    print(
                        "{kernel:13s} {direction:8s} {gpu} B{B} H{H} N{N} D{D}: ".format(**row)
                        + f"floor {1e6 * row['floor']:6.1f} us, bound {1e6 * row['bound']:7.1f}"
                        f" ({row['ratio']:.2f}), estimate {1e6 * row['estimate']:7.1f}"
                        f" ({row['estimate_ratio']:.2f})",
                        flush=True,
                    )
                    for one in row["launches"]:
                        terms = " ".join(f"{k} {1e6 * v:.1f}" for k, v in one["terms"].items())
                        print(
                            f"    {one['function']}: {one['blocks']} x {one['threads']},"
                            f" {one['registers']} registers, {terms}"
                        )
    result = {
        "what": "predicted times of the kernels, and what they follow from",
        "nvrtc": nvrtc.version(),
        "gpus": ON,
        "rows": rows,
    }
    results.save("kernel_times", result, output=options.output)


if __name__ == "__main__":
    main()
