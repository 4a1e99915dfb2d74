"""Predicted times of kernels, held against times that others have published.

python benchmarks/predictions.py                  writes lesson_code/results/predictions.json
python benchmarks/predictions.py --groups NAMES   only some of the groups
python benchmarks/predictions.py --output FILE    writes another file

No GPU is needed, and none of these times was measured by us: "source" of a row names an entry of
"sources", where it can be read. A row has the published seconds and those of `lesson_code.gpu`:
"bound", the longest reason to wait, and "estimate", the root of the sum of their squares, with
errors as predicted over published time less 1. A bound should be below 0. "longest" is the reason.
An operation that makes several launches has their sums.

Three things were decided after errors had been looked at: that terms are combined as the root of a
sum of squares, because of the group "streams"; that a block takes 350 cycles to begin and end,
because of the kernel "read" on the V100 in blocks of 32 threads; and that warps do not wait for
each other's passes where no barrier lets them meet, because of the first product. All other rows
test them.

"trips" says how long one trip takes on the V100, from the kernel "sum1" of "streams", which has one
load of each thread on its way: the more of the bandwidth is used, the longer.

The kernels are written down here, in our words, from what is published of them; what a compiled
loop has comes from NVRTC, and the lines that a warp touches from the emulator. "ours" are the
package's own kernels on an H200, D = 64, which nobody has timed.
"""

import argparse
import statistics
import struct
from pathlib import Path

import numpy as np
import stalls

from lesson_code import results
from lesson_code.cupy import causal_scan, emulator, nvrtc
from lesson_code.gpu import GPUS, Launch, launch_of, predict

SOURCES = {
    "gpu-benches": "github.com/te42kyfo/gpu-benches, README at 01d2bb5, and gpu-stream",
    "cccl": "github.com/NVIDIA/cccl, pull request 7391, from two arrays",
    "sgemm": "github.com/siboehm/SGEMM_CUDA, README at 06d2cf5",
    "wkv5": "github.com/BlinkDL/RWKV-CUDA, pull requests 12 (float32) and 14 (bfloat16)",
    "helion": "github.com/pytorch/helion, examples/fla/BENCHMARKS.md at fea89d2",
    "fla": "github.com/fla-org/flash-linear-attention, README, benchmark_retention.py",
}

# --- Streams: bandwidth against blocks ------------------------------------------------------------

STREAMS = {  # loads on their way, arrays that are read and written
    **{f"sum{n}": (n, 1) for n in (1, 2, 4, 8)},
    **{"dot": (2, 2), "tdot": (3, 3), "scale": (1, 2), "triad": (2, 3)},
}
V100_GB = """
1     3.0   5.8   10.1  15.0  5.6   8.3   5.7   8.1
2     6.0   11.3  19.8  29.6  11.1  15.9  11.5  15.9
4     11.9  23.2  39.5  60.2  22.0  31.4  22.4  31.3
8     23.8  45.7  84.8  118.3 43.8  62.4  44.1  60.9
16    46.8  89.1  158.6 233.1 87.5  126.8 84.1  115.1
32    93.3  171.0 295.5 453.1 170.8 243.3 158.5 212.7
64    182.5 333.3 546.9 774.2 325.1 451.4 286.1 386.5
80    227.6 404.7 629.1 800.1 402.6 543.7 339.1 436.8
160   418.6 663.8 823.7 874.8 665.5 775.8 550.8 682.0
240   571.0 788.1 859.5 881.9 788.8 831.7 681.3 760.3
320   680.6 834.8 871.9 885.9 837.1 856.2 719.2 783.4
400   749.7 855.5 875.4 887.4 857.4 863.1 737.4 794.5
480   791.8 868.8 880.3 888.0 869.5 870.0 751.3 804.2
640   833.5 879.5 883.9 890.2 879.7 879.1 765.6 817.5
960   868.3 886.8 889.6 888.5 888.0 891.4 785.8 832.7
1280  878.9 888.4 891.0 884.5 891.0 894.5 787.8 829.1
"""  # gigabytes a second; blocks, then the kernels in the order of STREAMS


def streams():
    """Blocks of 128 threads that go through arrays of 2^25 doubles, some loads at a time."""
    numbers = 2**25
    for line in V100_GB.strip().splitlines():
        blocks, *rates = line.split()
        for (kernel, (loads, arrays)), rate in zip(STREAMS.items(), rates, strict=True):
            of_a_trip = loads // (arrays - kernel.startswith(("scale", "triad")))
            trips = numbers / (int(blocks) * 128 * of_a_trip)
            launch = Launch(int(blocks), 128, bytes=8 * arrays * numbers, trips=trips)
            seconds = launch.bytes / (float(rate) * 1e9)
            yield "gpu-benches", "V100", f"{kernel}, {blocks} blocks", seconds, [launch]


ADDED = {  # bytes of a number, logarithm of how many
    (4, 24): 37.644e-6,
    (4, 28): 454.534e-6,
    (2, 24): 23.033e-6,
    (2, 28): 239.643e-6,
}


# Threads of a block; gigabytes a second of read, scale and triad on a V100, an A100 with 40 GB, an
# H100 PCIe and an H200.
SHORT_GB = """
32    72  128 180   81   151  210    96   183  254    123  240  334
64    139 244 323   158  291  403    189  341  459    244  463  638
128   262 423 545   304  548  743    368  607  821    485  852  1129
256   490 673 765   579  954  1231   702  1037 1399   935  1395 1905
512   746 784 800   1042 1338 1359   1261 1583 1675   1707 2263 2919
768   822 798 807   1341 1364 1367   1680 1666 1755   2297 2844 3333
1024  866 802 814   1490 1381 1360   1942 1704 1832   2756 3165 3534
"""


def short_blocks():
    """A thread for each of 2^27 doubles: a block is one trip. Two blocks fit at a time."""
    gpus, arrays = ("V100", "A100", "H100 PCIe", "H200"), {"read": 1, "scale": 2, "triad": 3}
    for line in SHORT_GB.strip().splitlines():
        threads, *rates = map(int, line.split())
        kernels = [(gpu, kernel) for gpu in gpus for kernel in arrays]
        for (gpu, kernel), rate in zip(kernels, rates, strict=True):
            half = GPUS[gpu].shared_bytes // 2 - GPUS[gpu].reserved_bytes
            size = 8 * arrays[kernel] * 2**27
            launch = Launch(2**27 // threads, threads, size, shared_bytes=half)
            label = f"{kernel}, {threads} threads"
            yield "gpu-benches", gpu, label, size / (rate * 1e9), [launch]


def sums_of_arrays():
    """An array from two others, such as their sum: every thread has 16 bytes of each."""
    for (size, logarithm), seconds in ADDED.items():
        blocks = 2**logarithm * size // (16 * 256)
        instructions = blocks * 8 * (8 + 16 // size)
        launch = Launch(blocks, 256, 3 * size * 2**logarithm, instructions=instructions)
        yield "cccl", "B200", f"2^{logarithm} numbers of {size} bytes", seconds, [launch]


# --- Products of matrices -------------------------------------------------------------------------

DIRECT = r"""
extern "C" __global__ void product(const float* a, const float* b, float* c, int N) {
    int row = blockIdx.y * 32 + ROW, column = blockIdx.x * 32 + COLUMN;
    float sum = 0.0f;
    for (int k = 0; k < N; k++) sum += a[row * N + k] * b[k * N + column];
    c[row * N + column] = sum;
}
"""
TILED = r"""
extern "C" __global__ void __launch_bounds__(THREADS) product(
        const float* a, const float* b, float* c, int N) {
    __shared__ float rows[ROWS][SLICE], columns[SLICE][COLUMNS];
    int y = threadIdx.x / (COLUMNS / WIDE) * HIGH, x = threadIdx.x % (COLUMNS / WIDE) * WIDE;
    float sum[HIGH][WIDE] = {};
    for (int start = 0; start < N; start += SLICE) {
#pragma unroll
        for (int n = 0; n < ROWS * SLICE / THREADS; n++) {
            int i = n * THREADS + threadIdx.x;
            rows[i / SLICE][i % SLICE] = a[(blockIdx.y * ROWS + i / SLICE) * N + start + i % SLICE];
        }
#pragma unroll
        for (int n = 0; n < SLICE * COLUMNS / THREADS; n++) {
            int i = n * THREADS + threadIdx.x, column = blockIdx.x * COLUMNS + i % COLUMNS;
            columns[i / COLUMNS][i % COLUMNS] = b[(start + i / COLUMNS) * N + column];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SLICE; k++)
#pragma unroll
            for (int i = 0; i < HIGH; i++)
#pragma unroll
                for (int j = 0; j < WIDE; j++) sum[i][j] += rows[y + i][k] * columns[k][x + j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < HIGH; i++)
#pragma unroll
        for (int j = 0; j < WIDE; j++)
            c[(blockIdx.y * ROWS + y + i) * N + blockIdx.x * COLUMNS + x + j] = sum[i][j];
}
"""
PLACES = ("threadIdx.x % 32", "threadIdx.x / 32")
SHAPES = ("ROWS", "COLUMNS", "SLICE", "HIGH", "WIDE", "THREADS")
PRODUCTS = {  # GFLOP/s; source, macros, passes for each read of shared memory in the loop
    "neighbors in rows": (309.0, DIRECT, dict(zip(("ROW", "COLUMN"), PLACES, strict=True)), 0),
    "neighbors in columns": (1986.5, DIRECT, dict(zip(("COLUMN", "ROW"), PLACES, strict=True)), 0),
    "shared tiles": (2980.3, TILED, dict(zip(SHAPES, (32, 32, 32, 1, 1, 1024), strict=True)), 1),
    "8 x 1 of a thread": (8474.7, TILED, dict(zip(SHAPES, (64, 64, 8, 8, 1, 512), strict=True)), 1),
    # A read of 16 bytes: four passes in the columns, where lanes are 32 bytes apart, two in rows.
    "8 x 8 of a thread": (
        *(15971.7, TILED),
        *(dict(zip(SHAPES, (128, 128, 8, 8, 8, 256), strict=True)), 3),
    ),
}


def compiled_loop(architecture, source, macros, name):
    """Registers, shared bytes, and what the longest loop has: passes of unrolled loops aside."""
    compiled = nvrtc.compile_source(architecture, source, macros)
    words = list(struct.iter_unpack("<QQ", stalls.section(compiled.binary, f".text.{name}")))
    program = stalls.Program(compiled.binary, name)
    ways = []
    for i, (low, _) in enumerate(words):  # before sm_90 a jump's distance lies in one piece
        units = (low >> 34) - (1 << 30 if low >> 63 else 0)
        start = i + 1 + units // 4
        if program.kinds[i] == stalls.JUMP and 0 <= start < i:
            ways.append(range(start, i + 1))
    way = max(ways, key=len)
    kinds = [program.kinds[i] for i in way]
    return compiled.kernels[name], {
        "instructions": len(way),
        "multiply_adds": kinds.count(0x23),
        "reads": kinds.count(0x84),
        "stores": kinds.count(stalls.STORE),
        "cycles": sum(program.cycles[i] for i in way),
    }


def lines_of(source, macros, tile, threads, N):
    """Lines in global memory of one block, by the emulator: N is small."""
    a, b, c = np.ones((3, N, N), np.float32)
    grid = (N // tile[1], N // tile[0])
    addresses = [np.uintp(x.ctypes.data) for x in (a, b, c)]
    with emulator.trace() as trace:
        emulator.load(source, macros).launch(
            "product", grid, threads, [*addresses, np.int32(N)], buffers=[a, b, c]
        )
    assert np.array_equal(c, np.full((N, N), N, np.float32))
    return trace.kernels["product"]


def products():
    """c = a b in float32, 4,096 wide, by five kernels that each repair the one before."""
    N = 4096
    for kernel, (rate, source, macros, conflicts) in PRODUCTS.items():
        tile = macros.get("ROWS", 32), macros.get("COLUMNS", 32)
        threads, blocks = macros.get("THREADS", 1024), N * N // (tile[0] * tile[1])
        usage, loop = compiled_loop("sm_86", source, macros, "product")
        small = 128
        counts = lines_of(source, macros, tile, threads, small)
        steps = loop["multiply_adds"] // (macros.get("HIGH", 1) * macros.get("WIDE", 1))
        turns, warps = N / steps, threads // 32
        shared = turns * warps * (loop["reads"] * conflicts + loop["stores"])
        lines = counts.global_lines / counts.blocks * N / small
        # Between two trips: a warp with its pauses; where warps meet, what all of them begin.
        together = (loop["instructions"] * warps / 4, (shared + lines) / turns)
        busy = max([loop["cycles"], *(together if source is TILED else ())])
        launch = launch_of(
            counts,
            *(blocks, threads),
            bytes=3 * 4 * N * N,
            multiply_adds=N**3,
            instructions=blocks * warps * turns * loop["instructions"],
            passes=blocks * (shared + lines),
            trips=turns,
            cycles=turns * busy,
            registers=usage.registers,
            shared_bytes=usage.shared_bytes,
        )
        yield "sgemm", "A6000", kernel, 2 * N**3 / (rate * 1e9), [launch]


# --- Walks ----------------------------------------------------------------------------------------

WALK = r"""
extern "C" __global__ void walk(const TYPE* r, const TYPE* k, const TYPE* v, const float* w,
                                const float* u, TYPE* out, int N, int step) {
    __shared__ float rs[64], ks[64], us[64], ws[64];
    int i = threadIdx.x, head = blockIdx.x % (step / 64) * 64;
    long long at = (long long)(blockIdx.x / (step / 64)) * N * step + head + i;
    us[i] = u[head + i];
    ws[i] = w[head + i];
    float state[64] = {};
    for (int t = 0; t < N; t++, at += step) {
        __syncthreads();
        rs[i] = to_float(r[at]);
        ks[i] = to_float(k[at]);
        __syncthreads();
        float value = to_float(v[at]), sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 64; j++) {
            float x = ks[j] * value;
            sum += rs[j] * (us[j] * x + state[j]);
            state[j] = state[j] * ws[j] + x;
        }
        out[at] = from_float<TYPE>(sum);
    }
}
"""


def walks():
    """RWKV-5 token by token: 8 sequences of 4,096 tokens, 64 heads of width 64, a block for each.

    A token is two trips: r and k before a barrier, v behind it. The A800 is an A100 with 80 GB but
    for the links between GPUs.
    """
    blocks, N = 8 * 64, 4096
    for kind, size, seconds in (("float", 4, 10.14e-3), ("bfloat16", 2, 9.2e-3)):
        usage, loop = compiled_loop("sm_80", WALK, {"TYPE": kind}, "walk")
        launch = Launch(
            *(blocks, 64),
            bytes=blocks * N * 4 * 64 * size,
            multiply_adds=blocks * N * 64 * 4 * 64,
            instructions=blocks * 2 * N * loop["instructions"],
            passes=blocks * 2 * N * (loop["reads"] + loop["stores"] + 4),
            trips=2 * N,
            cycles=N * loop["cycles"],
            registers=usage.registers,
            shared_bytes=usage.shared_bytes,
        )
        yield "wkv5", "A100 80GB", f"WKV-5, {kind}", seconds, [launch]


# --- Linear and softmax attention on tensor cores -------------------------------------------------

CHUNKED = {  # B, T, H, D: milliseconds of fla and Helion on an H100, then on a B200
    (1, 8192, 96, 128): (0.726, 0.682, 0.433, 0.319),
    (2, 16384, 16, 128): (0.609, 0.457, 0.320, 0.250),
    (4, 2048, 16, 128): (0.148, 0.149, 0.090, 0.089),
    (4, 4096, 64, 128): (0.950, 0.900, 0.579, 0.451),
    (8, 2048, 32, 256): (1.338, 1.271, 0.800, 0.703),
    (8, 1024, 8, 64): (0.137, 0.143, 0.088, 0.081),
}


def chunked():
    """Causal linear attention in bfloat16, two launches: states of all chunks, then the outputs.

    Chunks of 64 tokens, tiles of 64 by 64, 128 threads; a repeated load is answered by the cache.
    A block makes the products of a tile between two trips, at the rate of its tensor cores.
    """
    for (B, T, H, D), (fla_h, helion_h, fla_b, helion_b) in CHUNKED.items():
        tokens, tiles = B * T * H, D // 64
        for gpu, measured in (("H100", (fla_h, helion_h)), ("B200", (fla_b, helion_b))):
            per_cycle = GPUS[gpu].tensor / (GPUS[gpu].processors * GPUS[gpu].clock)
            states = Launch(
                *(B * H * tiles**2, 128),
                bytes=tokens * (2 * 2 * D + 2 * D * D / 64),
                tensor=tokens * D * D,
                trips=T / 64,
                cycles=T / 64 * 64**3 / per_cycle,
                registers=128,
            )
            outputs = Launch(
                *(B * H * T // 64 * tiles, 128),
                bytes=tokens * (4 * 2 * D + 2 * D * D / 64),
                tensor=tokens * (D * D + 64 * D * tiles + 64 * D),
                trips=tiles + 1,
                cycles=(2 * tiles + 1) * 64**3 / per_cycle,
                registers=128,
            )
            for who, milliseconds in zip(("fla", "Helion"), measured, strict=True):
                shape = f"{who}, B{B} T{T} H{H} D{D}"
                yield "helion", gpu, shape, milliseconds / 1e3, [states, outputs]


FLASH = {1024: 0.467968, 2048: 1.6128, 4096: 5.997568, 8192: 22.682114, 16384: 91.346947}


def flash():
    """FlashAttention-2, causal, bfloat16: 8 sequences, 32 heads of width 128, blocks of 128 rows.

    Keys and values are asked for ahead, so trips count once.
    """
    for N, milliseconds in FLASH.items():
        pairs = 256 * (N * N / 2 + 64 * N)  # tiles on the diagonal are computed whole
        launch = Launch(
            *(256 * N // 128, 128),
            bytes=256 * N * 4 * 128 * 2,
            tensor=pairs * 2 * 128,
            special=pairs,
            registers=255,
            shared_bytes=(128 + 4 * 64) * 128 * 2,
        )
        yield "fla", "A100 80GB", f"flash, {N} tokens", milliseconds / 1e3, [launch]


GROUPS = {  # what yields the rows, and what they are
    "streams": (streams, "arrays, long loops: V100"),
    "short blocks": (short_blocks, "arrays, short blocks: V100 to H200"),
    "sums of arrays": (sums_of_arrays, "sums of arrays: B200"),
    "products": (products, "products of matrices: A6000"),
    "walks": (walks, "RWKV-5, token by token: A100"),
    "chunked": (chunked, "linear attention: H100, B200"),
    "flash": (flash, "FlashAttention-2: A100"),
}

# --- The package's own kernels --------------------------------------------------------------------


def ours():
    """Launches of the package's kernels on an H200, from the counts of `stalls.json`."""
    loops = {
        (row["function"], row["loop"], row.get("slab")): row
        for row in results.load("stalls")["rows"]
    }

    def total(function, passes, what="instructions", slab=None):
        return sum(loops[function, loop, slab][what] * n for loop, n in passes.items())

    every = {2: 64, 1: 4, 3: 4, 0: 1}  # of a chunk's outputs
    for heads, N in ((128, 4096), (8, 65_536)):
        tokens, chunks = heads * N, heads * N // 64
        recurrent = Launch(
            *(heads, 64),
            bytes=1024 * tokens,
            multiply_adds=2 * 64 * 64 * tokens,
            instructions=2 * total("recurrent", {1: 1 / 8}) * tokens,
            passes=(64 + 8) * tokens,
            trips=N / 8,
            cycles=total("recurrent", {1: N / 8}, "cycles"),
            registers=242,
        )
        states = Launch(
            *(heads, 256),
            bytes=768 * tokens,
            multiply_adds=64 * 64 * tokens,
            instructions=8 * total("chunk_states", {2: 4, 1: 1}) * chunks,
            passes=40 * tokens,
            trips=N / 16,
            cycles=total("chunk_states", {2: N / 16, 1: N / 64}, "cycles"),
            registers=80,
        )
        outputs = Launch(
            *(chunks, 256),
            bytes=1280 * tokens,
            multiply_adds=3 * 64 * 64 * tokens,
            instructions=8 * total("chunk_outputs", every) * chunks,
            passes=136 * tokens,
            trips=8,
            cycles=total("chunk_outputs", every, "cycles"),
            registers=108,
        )
        yield heads, N, "(a)", [recurrent]
        yield heads, N, "(b)", [states, outputs]
        package = (2, 2 if heads == 128 else 17)
        for name, (slabs, segments) in (("(c)", package), ("(c), cut only", (1, 264 // heads))):
            yield heads, N, name, in_segments(heads, N, slabs, segments, total)


def in_segments(heads, N, slabs, segments, total):
    """Launches of kernel (c): sums of the segments, the states before them, the outputs."""
    tokens, blocks, slab = heads * N, heads * slabs * segments, 64 // slabs
    chunks, state = -(-N // segments // 64), 4 * 64 * 64
    counted = passes_of_segments(slabs)

    def walk(function, size, tensor, keys, registers):
        loops = {"segment_sums": {1: 1, 2: 1}, "segment_outputs": {1: 1, 2: 1, 4: slab / 16}}
        each, longest = (loops[function] | ({3: n} if n else {}) for n in keys)
        return Launch(
            *(blocks, 128),
            bytes=size * tokens + heads * segments * state,
            tensor=tensor * tokens,
            instructions=4 * total(function, each, slab=slab) * chunks * blocks,
            passes=counted[function] * tokens,
            trips=chunks,
            cycles=total(function, longest, "cycles", slab) * chunks,
            registers=registers,
            shared_bytes=41 * 1024,
        )

    return [
        walk("segment_sums", 256, 64 * 64, (0, 0), 128),
        Launch(16 * heads, 256, bytes=2 * heads * segments * state, trips=segments),
        walk("segment_outputs", 512, 13_312, (2.5, 4), 168),  # tiles of keys: mean, last warp
    ]


def passes_of_segments(slabs):
    """Passes through shared memory for a token, by function: the emulator has 4 multiprocessors."""
    heads = {1: 4, 2: 1}[slabs]  # with which its GPU gets as many slabs, and two segments
    x = np.ones((heads, 512, 64), np.float16)
    with emulator.trace() as trace:
        causal_scan(x, x, x, kernel="tensor_core", device="cpu")
    return {name: one.shared_passes / (heads * 512) for name, one in trace.kernels.items()}


# --- The whole ------------------------------------------------------------------------------------


def predicted(launches, gpu):
    """Bound, estimate and the longest reason of launches that follow one another."""
    found = [predict(launch, GPUS[gpu]) for launch in launches]
    terms = {name: sum(one.terms[name] for one in found) for name in found[0].terms}
    return {
        "bound": sum(one.seconds for one in found),
        "estimate": sum(one.estimate for one in found),
        "longest": max(terms, key=terms.__getitem__),
    }


def rows_of(groups):
    for group in groups:
        for source, gpu, kernel, seconds, launches in GROUPS[group][0]():
            row = {"group": group, "source": source, "gpu": gpu, "kernel": kernel}
            row |= {"published": seconds} | predicted(launches, gpu)
            yield row | {
                "error_of_bound": row["bound"] / seconds - 1,
                "error": row["estimate"] / seconds - 1,
            }


def summary_of(rows):
    """Errors of each group: of the estimates, and how many were faster than their bound."""
    for group in dict.fromkeys(row["group"] for row in rows):
        errors = [row["error"] for row in rows if row["group"] == group]
        bounds = [row["error_of_bound"] for row in rows if row["group"] == group]
        yield {
            "group": group,
            "what": GROUPS[group][1],
            "rows": len(errors),
            "median": statistics.median(errors),
            "least": min(errors),
            "most": max(errors),
            "median_of_bounds": statistics.median(bounds),
            "faster_than_bound": sum(error > 0 for error in bounds),
            "most_faster": max(bounds),
        }


def trips_of(rows):
    """Seconds of a trip to the memory of a V100, and the share of its bandwidth that is used."""
    numbers = 2**25
    for row in rows:
        if row["kernel"].startswith("sum1,"):
            blocks = int(row["kernel"].split()[1])
            yield {
                "blocks": blocks,
                "seconds": row["published"] * blocks * 128 / numbers,
                "share": 8 * numbers / row["published"] / GPUS["V100"].bandwidth,
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = list(rows_of(options.groups))
    summary = list(summary_of(rows))
    versions = [
        {"heads": heads, "N": N, "kernel": name, "launches": len(launches)}
        | predicted(launches, "H200")
        for heads, N, name, launches in ours()
    ]
    for row in (*rows, *summary, *versions):
        print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row.values()), sep="  ")
    result = {
        "what": "predicted times of kernels beside published ones, and those of the package's own",
        "nvrtc": nvrtc.version(),
        "sources": SOURCES,
        "rows": rows,
        "summary": summary,
        "trips": list(trips_of(rows)),
        "ours": versions,
    }
    results.save("predictions", result, output=options.output)


if __name__ == "__main__":
    main()
