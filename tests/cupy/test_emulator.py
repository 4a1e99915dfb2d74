"""The emulator: CUDA's words in C++, its counts, its races, and what it says of mistakes."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lesson_code.cupy import emulator
from lesson_code.cupy.emulator import _compiler, _records
from lesson_code.gpu import GPUS, Launch, launch_of, predict

ORDERS = ["forward", "reverse", 0, 1]
every_order = pytest.mark.parametrize("which", ORDERS)
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

SOURCE = r"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

extern "C" __global__ void where(uint4* out) {  // every built-in variable
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[block * blockDim.x + threadIdx.x] = uint4{threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z};
}

extern "C" __global__ void __launch_bounds__(256, 2) block_sum(const float* x, float* sums) {
    __shared__ float part[256];
    part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    BARRIER;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        BARRIER;
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
extern "C" __global__ void shuffles(const float* x, float* out, unsigned* numbers) {
    out[threadIdx.x] = warp_sum(x[threadIdx.x]);
    int mine = threadIdx.x;
    numbers[threadIdx.x] = __shfl_sync(~0u, mine, 5) + 1000u * warp_sum(unsigned(mine % 32));
}

struct Pair { const float* data; long long step; };
extern "C" __global__ void gather(Pair it, float* out) {
    out[threadIdx.x] = it.data[threadIdx.x * it.step];
}

#ifdef NOT_GIVEN
extern "C" __global__ void absent(Unknown x) {}
#endif

extern "C" __global__ void transpose(const float* from, float* to) {  // 32x32, a row a warp
    __shared__ float tile[32][WIDTH];
    int row = threadIdx.x / 32, column = threadIdx.x % 32;
    for (int i = row; i < 32; i += 8) tile[i][column] = from[i * 32 + column];
    __syncthreads();
    for (int i = row; i < 32; i += 8) to[i * 32 + column] = tile[column][i];
}

extern "C" __global__ void rotate(float* x) {  // 16 bytes a lane, through dynamic shared memory
    dynamic_shared_memory(space);
    space[threadIdx.x] = ((uint4*)x)[threadIdx.x];
    __syncthreads();
    ((uint4*)x)[threadIdx.x] = space[(threadIdx.x + 1) % blockDim.x];
}

extern "C" __global__ void share(float* x, int away, int count) {  // `away` from each other
    dynamic_shared_memory(space);
    space[threadIdx.x] = ((uint4*)x)[threadIdx.x];
    __syncthreads();
    int place = threadIdx.x % away + threadIdx.x / (2 * away) * away;
    ((uint4*)x)[threadIdx.x] = space[place % count];
}

extern "C" __global__ void neighbors(float* x) {  // within one warp
    __shared__ float part[32];
    part[threadIdx.x] = x[threadIdx.x];
    SYNCWARP;
    x[threadIdx.x] = part[threadIdx.x ^ 1];
}

extern "C" __global__ void unwritten(float* x) {
    __shared__ float part[64];
    part[threadIdx.x] = 0.0f;
    __syncthreads();
    x[threadIdx.x] = part[threadIdx.x + 1];
}

extern "C" __global__ void all_add(float* x) { x[0] += 1.0f; }

extern "C" __global__ void some_wait(int* x) {
    if (threadIdx.x < x[0]) __syncthreads();
}
extern "C" __global__ void two_barriers(int* x) {
    if (threadIdx.x < x[0]) __syncthreads();
    else __syncthreads();
}
extern "C" __global__ void some_shuffle(int* x) {
    if (threadIdx.x < x[0]) x[1] = __shfl_xor_sync(0xffffffffu, x[2], 1);
    __syncthreads();
}
extern "C" __global__ void two_operations(int* x) {
    if (threadIdx.x < x[0]) __syncwarp();
    else x[1] = __shfl_xor_sync(0xffffffffu, x[2], 1);
}
extern "C" __global__ void masked(int* x) { x[1] = __shfl_xor_sync(0xffffu, x[2], 1); }

extern "C" __global__ void far(int* x, long long distance) { x[distance] = 1; }
extern "C" __global__ void deep(int* x) {
    int big[20000];
    for (int i = 0; i < 20000; i++) big[i] = x[i % 3] + i;
    for (int i = 0; i < 20000; i++) x[i % 3] += big[i];
}
extern "C" __global__ void divide(int* x) { x[0] = x[1] / x[2]; }
extern "C" __global__ void endless(volatile int* x) { while (x[0] == 0) {} }
extern "C" __global__ void wide(const char* x, uint4* out) { *out = *(const uint4*)(x + 4); }
"""
TILES = r"""
extern "C" __global__ void product(const TYPE* a, const TYPE* b, float* c) {  // c += a b
    __shared__ uint4 space[48];
    TYPE *a_rows = (TYPE*)space, *b_rows = a_rows + 256;
    int lane = threadIdx.x, group = lane / 4, pair = lane % 4 * 2;
    for (int i = lane; i < 256; i += 32) a_rows[i] = a[i];
    for (int i = lane; i < 128; i += 32) b_rows[i] = b[i];
    __syncthreads();
    unsigned x[4], y[4];
    load_matrices(x, a_rows + lane % 16 * 16 + lane / 16 * 8);
    load_matrices_transposed(y, b_rows + lane % 16 * 8);
    float z[4];
    for (int i = 0; i < 4; i++) z[i] = c[(group + i / 2 * 8) * 8 + pair + i % 2];
    multiply_tiles<TYPE>(z, x, y[0], y[1]);
    for (int i = 0; i < 4; i++) c[(group + i / 2 * 8) * 8 + pair + i % 2] = z[i];
}
extern "C" __global__ void load(const uint4* from, unsigned* to, unsigned* transposed, int shift) {
    __shared__ uint4 rows[33];
    rows[threadIdx.x] = from[threadIdx.x];
    __syncthreads();
    unsigned r[4];
    load_matrices(r, (char*)(rows + threadIdx.x) + shift);
    for (int i = 0; i < 4; i++) to[32 * i + threadIdx.x] = r[i];
    load_matrices_transposed(r, rows + threadIdx.x);
    for (int i = 0; i < 4; i++) transposed[32 * i + threadIdx.x] = r[i];
}
extern "C" __global__ void load_global(const uint4* from) {
    unsigned r[4];
    load_matrices(r, from + threadIdx.x);
}
extern "C" __global__ void widen(const TYPE* from, float* to) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = to_float(from[i]);
}
extern "C" __global__ void narrow(const float* from, TYPE* to, unsigned* pairs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from_float<TYPE>(from[i]);
    pairs[i] = pack<TYPE>(from[i], to_float(TYPE{0x3c00}));
}
"""


def compiled(**macros: object) -> emulator.Module:
    defaults = {"BARRIER": "__syncthreads()", "SYNCWARP": "__syncwarp()", "WIDTH": 33}
    return emulator.load(SOURCE, defaults | macros, name="test.cu")


@pytest.fixture(scope="module")
def module() -> emulator.Module:
    return compiled()


@pytest.fixture(scope="module", params=DTYPES)
def tiles(request: pytest.FixtureRequest) -> tuple[emulator.Module, np.dtype]:
    return emulator.load(TILES, {"TYPE": request.param}), DTYPES[request.param]


def at(array: np.ndarray) -> np.uintp:
    return np.uintp(array.ctypes.data)


def run(module, name, grid, block, *arguments, **options) -> None:
    """Launch with arrays as pointers, and told as buffers."""
    arrays = [one for one in arguments if isinstance(one, np.ndarray) and one.shape]
    values = [at(one) if isinstance(one, np.ndarray) and one.shape else one for one in arguments]
    module.launch(name, grid, block, values, buffers=arrays, **options)


def traced(module, name, grid, block, *arguments, **options) -> emulator.Trace:
    with emulator.trace() as trace:
        run(module, name, grid, block, *arguments, **options)
    return trace


def line(text: str, source: str = SOURCE) -> int:
    return source[: source.index(text)].count("\n") + 1


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# ---- The language. -------------------------------------------------------------------------------


@every_order
@pytest.mark.parametrize("block", [1, 32, 48, 1000])
def test_add(module, block, which):
    a, b, c = numbers(1003), numbers(1003, 1), np.zeros(1003, np.float32)
    with emulator.order(which):
        run(module, "add", -(-1000 // block), block, a, b, c, np.int32(1000))
    assert np.array_equal(c[:1000], a[:1000] + b[:1000])
    assert not c[1000:].any()


@every_order
def test_built_in_variables(module, which):
    out = np.full((4, 3, 2, 40, 4), 99, np.uint32)
    with emulator.order(which):
        run(module, "where", (2, 3, 4), (40,), out)
    z, y, x, thread = np.indices(out.shape[:-1])
    assert np.array_equal(out, np.stack([thread, x, y, z], -1))


@every_order
@pytest.mark.parametrize("block", [256, 64, 8])
def test_block_sum(module, block, which):
    x, sums = numbers(4 * block), np.zeros(4, np.float32)
    with emulator.order(which):
        run(module, "block_sum", 4, block, x, sums)
    assert np.allclose(sums, x.reshape(4, block).sum(1), atol=1e-4)


@every_order
def test_shuffles(module, which):
    x, out, whole = numbers(96), np.zeros(96, np.float32), np.zeros(96, np.uint32)
    with emulator.order(which):
        run(module, "shuffles", 1, 96, x, out, whole)
    assert np.allclose(out, np.repeat(x.reshape(3, 32).sum(1), 32), atol=1e-5)
    assert np.array_equal(whole, 1000 * 496 + np.repeat([5, 37, 69], 32))


def test_struct_argument(module):
    x, out = numbers(100), np.zeros(10, np.float32)
    pair = np.array([(x.ctypes.data, 10)], [("data", np.uintp), ("step", np.int64)])
    module.launch("gather", 1, 10, [pair, at(out)])
    assert np.array_equal(out, x[::10])


@every_order
def test_dynamic_shared_memory(module, which):
    x = numbers(4 * 40)
    expected = np.roll(x.reshape(40, 4), -1, axis=0)
    with emulator.order(which):
        run(module, "rotate", 1, 40, x, shared_bytes=640)
    assert np.array_equal(x.reshape(40, 4), expected)


def test_shared_memory_begins_as_nan(module):
    x = np.zeros(32, np.float32)
    for _ in range(2):
        run(module, "unwritten", 1, 32, x)
        assert np.isnan(x[31]) and not x[:31].any()


def test_kernels(module):
    assert "block_sum" in module.kernels and "absent" not in module.kernels


# ---- Numbers and tiles. --------------------------------------------------------------------------


def test_widen_every_number(tiles):
    module, dtype = tiles
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = np.zeros(1 << 16, np.float32)
    run(module, "widen", 64, 1024, every, wide)
    with np.errstate(invalid="ignore"):
        expected = every.view(dtype).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(wide), nan)
    assert np.array_equal(wide[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def floats(dtype: np.dtype) -> np.ndarray:
    """Every number of the type, the middle between each two, their neighbors, and random bits."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middle = ((every[1:].astype(float) + every[:-1]) / 2).astype(np.float32)
    limit = float(ml_dtypes.finfo(dtype).max) * (1 + 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 2))
    special = np.array([np.inf, -np.inf, np.nan, limit, -limit], np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    middles = np.concatenate([middle, special])
    up, down = (np.nextafter(middles, np.float32(way)) for way in (np.inf, -np.inf))
    parts = np.concatenate([every, middles, up, down, random.view(np.float32)])
    return np.resize(parts, -(-len(parts) // 1024) * 1024)


def test_narrow(tiles):
    module, dtype = tiles
    with np.errstate(all="ignore"):
        wide = floats(dtype)
        expected = wide.astype(dtype)
    narrow, pairs = np.zeros(len(wide), np.uint16), np.zeros(len(wide), np.uint32)
    run(module, "narrow", len(wide) // 1024, 1024, wide, narrow, pairs)
    nan = np.isnan(wide)
    assert np.array_equal(narrow[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(narrow[nan].view(dtype).astype(np.float32)).all()
    assert np.array_equal(pairs, narrow.astype(np.uint32) | 0x3C00 << 16)


@every_order
def test_load_matrices(tiles, which):
    module, _ = tiles
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    plain, transposed = (np.zeros((4, 8, 4, 2), np.uint16) for _ in range(2))
    with emulator.order(which):
        run(module, "load", 1, 32, matrices, plain, transposed, np.int32(0))
    assert np.array_equal(plain, matrices.reshape(4, 8, 4, 2))
    assert np.array_equal(transposed, matrices.transpose(0, 2, 1).reshape(4, 8, 4, 2))


@every_order
def test_product(tiles, which):
    """Exact for small whole numbers, and for others rounded as sums of float32 are."""
    module, dtype = tiles
    rng = np.random.default_rng(0)
    for draw, tolerance in ((rng.standard_normal, 1e-5), (lambda x: rng.integers(-8, 9, x), 0)):
        a, b = (draw(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
        c = draw((16, 8)).astype(np.float32)
        expected = c + a.astype(np.float64) @ b.astype(np.float64)
        with emulator.order(which):
            run(module, "product", 1, 32, a, b, c)
        assert np.allclose(c, expected, rtol=0, atol=tolerance)


def test_rows_of_matrices_are_checked(tiles):
    module, _ = tiles
    out = np.zeros(256, np.uint16)
    with pytest.raises(
        RuntimeError, match=f"line {line('load_matrices(r, (char', TILES)}: .* not aligned to 16"
    ):
        run(module, "load", 1, 32, out, out, out, np.int32(4))
    with pytest.raises(RuntimeError, match="not in shared memory"):
        run(module, "load_global", 1, 32, out)
    with pytest.raises(RuntimeError, match="a warp of 16 threads cannot load matrices"):
        run(module, "load", 1, 16, out, out, out, np.int32(0))


# ---- Counts. -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, lines, sectors", [(1, 1, 4), (2, 2, 8), (8, 8, 32), (32, 32, 32), (0, 1, 1)]
)
def test_lines_of_a_strided_load(module, step, lines, sectors):
    x, out = numbers(1024), np.zeros(64, np.float32)
    pair = np.array([(x.ctypes.data, step)], [("data", np.uintp), ("step", np.int64)])
    with emulator.trace() as trace:
        module.launch("gather", 1, 32, [pair, at(out)], buffers=[x, out])
    counts = trace.kernels["gather"]
    assert (counts.global_load_bytes, counts.global_store_bytes) == (128, 128)
    assert counts.distinct_load_bytes == (128 if step else 4)
    assert counts.global_accesses == 2
    assert (counts.global_lines, counts.ideal_lines) == (lines + 1, 2)
    assert (counts.global_sectors, counts.ideal_sectors) == (sectors + 4, 8 if step else 5)
    assert np.array_equal(
        trace.lanes("gather", line("it.data["), space="global", kind="load"),
        4 * step * np.arange(32),
    )
    load, store = trace.accesses
    assert (load.line, load.kind, load.bytes, load.passes) == (line("it.data["), "load", 4, lines)
    assert (store.line, store.kind, store.lanes, store.passes) == (line("it.data["), "store", 32, 1)


def test_counts_make_a_launch(module):
    """Two blocks of a sum stand for a million: three lines of 128 bytes each."""
    a, b, c = np.zeros((3, 64), np.float32)
    counts = traced(module, "add", 2, 32, a, b, c, np.int32(64)).kernels["add"]
    launch = launch_of(counts, 10**6, 32, registers=16)
    assert launch == Launch(10**6, 32, 384e6, passes=3e6, registers=16)
    found = predict(launch, GPUS["H200"])
    assert found.bytes == pytest.approx(384e6 / 4.8e12)
    assert found.resident == 32


def test_lines_count_from_the_start_of_the_array(module):
    """A slice is not aligned on a GPU either; where NumPy puts an array does not matter."""
    whole = np.zeros(100, np.float32)
    for start, lines in ((0, 1), (1, 2)):
        part, out = whole[start : start + 32], np.zeros(32, np.float32)
        with emulator.trace() as trace:
            run(module, "add", 1, 32, part, part, out, np.int32(32))
        assert trace.kernels["add"].global_lines == 2 * lines + 1


@pytest.mark.parametrize("width, passes", [(32, 32), (33, 1), (34, 2), (36, 4)])
def test_bank_conflicts_of_a_transposition(width, passes):
    x = numbers(1024).reshape(32, 32)
    y = np.zeros_like(x)
    trace = traced(compiled(WIDTH=width), "transpose", 1, 256, x, y)
    assert np.array_equal(y, x.T)
    counts = trace.kernels["transpose"]
    assert counts.shared_accesses == 64  # 32 rows stored, 32 columns loaded
    assert counts.shared_passes == 32 + 32 * passes
    assert counts.bank_conflicts == 32 * (passes - 1)
    (load,) = [one for one in trace.accesses if (one.space, one.kind) == ("shared", "load")]
    assert (load.line, load.accesses, load.passes) == (line("tile[column][i]"), 32, 32 * passes)
    lanes = trace.lanes("transpose", load.line, space="shared", execution=1)
    assert np.array_equal(lanes - lanes[0], 4 * width * np.arange(32))
    assert counts.line_efficiency == counts.sector_efficiency == 1
    trace.check()


def test_wide_accesses_go_in_quarter_warps(module):
    x = numbers(128)
    trace = traced(module, "rotate", 1, 32, x, shared_bytes=512)
    counts = trace.kernels["rotate"]
    assert (counts.shared_accesses, counts.shared_passes, counts.ideal_passes) == (2, 8, 8)
    assert (counts.global_accesses, counts.global_lines, counts.ideal_lines) == (2, 8, 8)


@pytest.mark.parametrize(
    ("away", "count", "passes"), [(1, 16, 2), (2, 16, 2), (4, 16, 4), (16, 4, 4), (16, 1, 2)]
)
def test_wide_loads_of_pairs_go_in_half_warps(module, away, count, passes):
    """Lanes that are next to each other or two apart; the fourth case is that of the source."""
    options = np.int32(away), np.int32(count)
    trace = traced(module, "share", 1, 32, numbers(128), *options, shared_bytes=512)
    store, load = sorted(
        (x for x in trace.accesses if x.space == "shared"), key=lambda x: x.kind, reverse=True
    )
    assert (store.kind, store.passes, load.kind, load.passes) == ("store", 4, "load", passes)


def test_barriers_and_idle_threads(module):
    x, sums = numbers(512), np.zeros(2, np.float32)
    with emulator.trace() as trace:
        for _ in range(3):
            run(module, "block_sum", 2, 256, x, sums)
    counts = trace.kernels["block_sum"]
    assert (counts.launches, counts.blocks, counts.barriers) == (3, 6, 6 * 9)
    active = [256, 128, 64, 32, 16, 8, 4, 2, 1, 1]
    assert counts.thread_phases == 6 * 10 * 256
    assert counts.idle_threads == 6 * sum(256 - n for n in active)
    assert trace.idle["block_sum"] == [1 - n / 256 for n in active]
    assert counts.global_load_bytes == 3 * 2048
    assert counts.distinct_load_bytes == 3 * 2048


def test_tile_products(tiles):
    module, dtype = tiles
    a, b, c = np.zeros(256, dtype), np.zeros(128, dtype), np.zeros(128, np.float32)
    trace = traced(module, "product", 5, 32, a, b, c)
    counts = trace.kernels["product"]
    assert (counts.tile_products, counts.multiply_adds) == (5, 5 * 16 * 16 * 8)
    loads = [one for one in trace.accesses if one.space == "shared" and one.kind == "load"]
    # Rows of 16 numbers: those of a matrix lie in 4 of 8 places of a line, two in each.
    assert [(one.bytes, one.accesses, one.passes) for one in loads] == [(16, 5, 40), (16, 5, 20)]


def test_only_what_runs_inside_is_traced(module):
    x = numbers(64)
    with emulator.trace() as trace:
        pass
    run(module, "all_add", 1, 1, x)
    assert not trace.kernels and not trace.accesses
    with pytest.raises(ValueError, match="no kernel 'all_add' was traced"):
        trace.lanes("all_add", 1)


def test_lanes_that_are_not_there(module):
    x, out = numbers(64), np.zeros(64, np.float32)
    trace = traced(module, "add", 1, 32, x, x, out, np.int32(30))
    at_line = line("c[i] = ")
    assert trace.lanes("add", at_line, kind="store").tolist() == [*range(0, 120, 4), -1, -1]
    with pytest.raises(
        ValueError, match=f"1 such accesses in line {at_line}, there is no number 1"
    ):
        trace.lanes("add", at_line, kind="store", execution=1)


def test_lines_are_unknown_without_addr2line(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert _records.line_numbers(Path("none.so"), "test.cu", [1, 2]) == {1: None, 2: None}


def test_counts_of_nothing():
    counts = emulator.Counts()
    assert counts.line_efficiency == counts.sector_efficiency == 1
    assert counts.idle_share == counts.bank_conflicts == counts.multiply_adds == 0


def test_wrong_buffers(module):
    with emulator.trace(), pytest.raises(TypeError, match="buffers must be NumPy arrays or"):
        module.launch("divide", 1, 1, [np.intp()], buffers=["x"])


# ---- Races. --------------------------------------------------------------------------------------


def test_a_missing_barrier_changes_the_result_with_the_order(module):
    def results(module):
        for which in [*ORDERS, 2, 3]:
            sums = np.zeros(1, np.float32)
            with emulator.order(which):
                run(module, "block_sum", 1, 256, numbers(256), sums)
            yield sums.item()

    assert len({*results(module)}) == 1
    assert len({*results(compiled(BARRIER=""))}) > 1


def test_a_missing_barrier_is_a_race(module):
    x, sums = numbers(256), np.zeros(1, np.float32)
    trace = traced(module, "block_sum", 1, 256, x, sums)
    trace.check()
    trace = traced(compiled(BARRIER=""), "block_sum", 1, 256, x, sums)
    assert {race.space for race in trace.races} == {"shared"}
    first, second = line("part[threadIdx.x] = x["), line("part[threadIdx.x] += ")
    assert (first, second) in {race.lines for race in trace.races}
    with pytest.raises(
        emulator.RaceError,
        match=r"^kernel block_sum: thread \d+ stores in line 1\d and thread \d+ \w+s in line 1\d, "
        r"the same shared memory; no __sync(threads|warp)\(\) orders the two\.$",
    ):
        trace.check()


@pytest.mark.parametrize(
    ("between", "is_race"),
    [
        ("__syncwarp()", False),
        ("__syncthreads()", False),
        ("", True),
        ("__shfl_xor_sync(0xffffffffu, 0, 1)", True),  # lanes wait, but no memory is ordered
    ],
)
def test_races_in_a_warp(between, is_race):
    trace = traced(compiled(SYNCWARP=between), "neighbors", 1, 32, numbers(32))
    assert bool(trace.races) == is_race
    for race in trace.races:
        assert "no __syncwarp() orders the two" in str(race)


def test_a_race_between_blocks(module):
    x = np.zeros(4, np.float32)
    with emulator.trace() as trace:
        for _ in range(2):  # one launch after the other is in order
            run(module, "all_add", 1, 1, x)
    trace.check()
    trace = traced(module, "all_add", 2, 1, x)
    with pytest.raises(emulator.RaceError, match="thread 0 of block 0 .* blocks of one launch"):
        trace.check()


def test_unwritten_shared_memory(module):
    trace = traced(module, "unwritten", 1, 32, np.zeros(32, np.float32))
    assert trace.unwritten == [("unwritten", line("part[threadIdx.x + 1]"), 31)]
    with pytest.raises(emulator.RaceError, match=r"thread 31 loads in line \d+ from shared"):
        trace.check()


def draw_events(rng, count):
    """Accesses of two warps to 32 places of 16 bytes, in two phases."""
    events = np.zeros(count, _records.EVENT)
    events["phase"] = np.sort(rng.integers(0, 2, count))
    events["thread"], events["place"] = rng.integers(0, 64, count), rng.integers(0, 3, count)
    events["kind"] = rng.random(count) < 0.3
    size = rng.choice([4, 8, 16], count)
    events["bytes"], events["address"] = size, rng.integers(0, 512, count) // size * size
    return events


def test_a_race_is_found_where_any_two_events_make_one():
    def is_race(a, b):
        start, size, thread = (np.array([a[x], b[x]]).astype(int) for x in of)
        meet = max(start) < min(start + size) and a["phase"] == b["phase"]
        return meet and thread[0] != thread[1] and bool((a["kind"] | b["kind"]) & 1)

    of, rng, seen = ("address", "bytes", "thread"), np.random.default_rng(0), []
    for _ in range(100):
        events = draw_events(rng, 12)
        pairs = _records.races(events)
        assert all(is_race(*pair) and pair["kind"][0] == 1 for pair in pairs)
        seen.append(any(is_race(a, b) for a, b in itertools.combinations(events, 2)))
        assert bool(pairs) == seen[-1]
    assert 20 < sum(seen) < 80


def test_an_access_is_the_same_turn_of_an_instruction_by_every_lane_of_a_warp():
    events = draw_events(np.random.default_rng(0), 2_000)
    turns, groups = collections.Counter(), {}
    for i, event in enumerate(events.tolist()):
        row = dict(zip(events.dtype.names, event, strict=True))
        instruction = row["phase"], row["place"], row["kind"], row["bytes"]
        n = turns[instruction, row["thread"]]
        turns[instruction, row["thread"]] += 1
        groups.setdefault((instruction, row["thread"] // 32, n), []).append(i)
    _, access, first = _records.accesses(events)
    assert sorted(first) == sorted(group[0] for group in groups.values())
    assert all(first[access[i]] == group[0] for group in groups.values() for i in group)


# ---- What goes wrong in a kernel. ----------------------------------------------------------------


IN_VAIN = {
    "some_wait": rf"line {line('< x[0]')}: 20 threads wait .*, but 44 of the block's 64 have ended",
    "two_barriers": rf"different barriers, here and in line {line('else __sync') - 1}",
    "some_shuffle": f"line {line('x[1] = ')}: only 20 of the 32 threads of warp 0 reach this warp",
    "two_operations": "threads of warp 0 wait at different operations",
    "masked": "the mask of lanes must be 0xffffffff, all, got 0x0000ffff",
}


@every_order
@pytest.mark.parametrize("name", IN_VAIN)
def test_threads_that_wait_in_vain(module, name, which):
    x = np.array([20, 0, 0, 0], np.int32)
    with emulator.order(which):
        with pytest.raises(RuntimeError, match=rf"^kernel {name}, block \(.*{IN_VAIN[name]}"):
            run(module, name, (2, 1, 1), 64, x)
        x[0] = 64  # and afterwards everything works
        if name != "masked":
            run(module, name, 2, 64, x)


def test_an_address_in_no_array(module):
    x = np.zeros(8, np.int32)
    with pytest.raises(RuntimeError, match="reaches for the address 0x.*, where no array lies"):
        run(module, "far", 1, 1, x, np.int64(1 << 40))
    with (
        emulator.trace(),
        pytest.raises(RuntimeError, match=rf"{line('far')}: thread 0 stores 4 bytes out"),
    ):
        run(module, "far", 1, 1, x, np.int64(8))
    trace = traced(module, "far", 1, 1, x, np.int64(7))
    assert trace.kernels["far"].global_store_bytes == 4


def test_a_misaligned_address(module):
    if _compiler.is_clang(_compiler.compiler()):
        pytest.skip("clang copies 16 bytes by memcpy, which asks for no alignment")
    x, out = np.zeros(32, np.uint8), np.zeros(16, np.uint8)
    with (
        emulator.trace(),
        pytest.raises(RuntimeError, match=rf"line {line('wide')}: .* 16 does not"),
    ):
        run(module, "wide", 1, 1, x, out)


@pytest.mark.parametrize("context", [contextlib.nullcontext, emulator.trace])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("deep", "thread 0 needs more than 65536 bytes for its local arrays"),
        ("divide", "thread 0 divides an integer by zero"),
    ],
)
def test_faults_are_exceptions(module, name, sentence, context):
    with context(), pytest.raises(RuntimeError, match=sentence):
        run(module, name, 1, 32, np.zeros(3, np.int32))


def test_an_endless_kernel_can_be_interrupted(module):
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(module, "endless", 1, 32, np.zeros(1, np.int32))
    timer.join()
    run(module, "endless", 1, 32, np.ones(1, np.int32))


# ---- What goes wrong before. ---------------------------------------------------------------------


NONE = [np.intp()]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("sub", 1, 1, []), ValueError, "no kernel 'sub'; there are add, where"),
        (("divide", 1, 1, []), TypeError, "kernel divide takes 1 arguments, got 0"),
        (("divide", 1, 1, [np.int32(1)]), TypeError, r"argument 0 .* has 8 bytes, got 4 \(int32\)"),
        (("divide", 1, 1, [1]), TypeError, "argument 0 .* must be a NumPy scalar .* got 1"),
        (("divide", 1, 1, [np.zeros(2)]), TypeError, "an array of size one"),
        (("divide", (1, 1, 65536), 1, NONE), ValueError, "grid must .* 65535 in y and z"),
        (("divide", (1, 1, 1, 1), 1, NONE), ValueError, "grid must be one to three sizes"),
        (("divide", 1, 2.0, NONE), ValueError, "block must be one to three sizes"),
        (("divide", 1, (2, 2), NONE), ValueError, "block must be at most 1024 .* one in y and z"),
        (("block_sum", 1, 512, NONE * 2), ValueError, "at most 256 threads"),
        (("divide", 1, 1, NONE, 1 << 20), ValueError, "shared_bytes must be 0 to 232448"),
    ],
)
def test_wrong_arguments(module, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        module.launch(*arguments)


@pytest.mark.parametrize("which", ["backward", -1, True, 1.5, None])
def test_wrong_order(which):
    with pytest.raises(ValueError, match="which must be 'forward', 'reverse' or a seed"):
        with emulator.order(which):
            pass


def test_an_error_of_the_compiler_names_the_line():
    source = 'extern "C" __global__ void wrong(float* x) {\n    x[0] = nothing;\n}\n'
    with pytest.raises(
        RuntimeError, match=r"(?s)wrong.cu cannot be compiled:.*wrong\.cu:2:.*nothing"
    ):
        emulator.load(source, name="wrong.cu")


def test_a_source_without_kernels():
    with pytest.raises(ValueError, match='no extern "C" __global__ void .* in kernel.cu'):
        emulator.load("int x;\n")


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*pip install ziglang"):
        emulator.load(SOURCE)


def test_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(RuntimeError, match="the compiler no-such-compiler -O3 cannot be run"):
        emulator.load(SOURCE)


# ---- Compiling. ----------------------------------------------------------------------------------

SMALL = 'extern "C" __global__ void one(int* x) { x[threadIdx.x] = 1; }\n'


def test_what_was_compiled_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    emulator.load(SMALL)
    (library,) = tmp_path.rglob("*.so")
    with monkeypatch.context() as patch:
        patch.setattr(_compiler, "_compile", lambda *_: pytest.fail("compiled again"))
        run(emulator.load(SMALL), "one", 1, 4, x := np.zeros(4, np.int32))
    assert x.tolist() == [1] * 4
    emulator.load(SMALL, {"OTHER": 1})
    assert len(list(tmp_path.rglob("*.so"))) == 2
    assert library.parent == tmp_path / "lesson_code_kernels"
    assert sorted(library.parent.iterdir()) == sorted(tmp_path.rglob("*.so"))  # nothing else stays


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    run(emulator.load(SMALL), "one", 1, 4, x := np.zeros(4, np.int32))
    assert x.tolist() == [1] * 4


def test_two_processes_compile_at_once(tmp_path):
    code = (
        "import numpy as np\nfrom lesson_code.cupy import emulator\n"
        f"module = emulator.load({SMALL!r})\nx = np.zeros(4, np.int32)\n"
        "module.launch('one', 1, 4, [np.uintp(x.ctypes.data)])\nprint(x)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in started] == ["[1 1 1 1]\n"] * 2
    assert len(list(tmp_path.rglob("*.so"))) == 1


def test_modules_with_kernels_of_one_name():
    modules = [
        emulator.load(f'extern "C" __global__ void set({kind}* x, {kind} y) {{ x[0] = y; }}\n')
        for kind in ("int", "long long", "float")
    ]
    for module, dtype in list(zip(modules, (np.int32, np.int64, np.float32), strict=True)) * 2:
        run(module, "set", 1, 1, x := np.zeros(1, dtype), dtype(7))
        assert x[0] == 7


def test_a_kernel_may_have_any_name():
    names = ["read", "write", "index", "sum", "wait", "launch_kernel"]
    module = emulator.load("".join(SMALL.replace("one", name) for name in names))
    for name in names:
        run(module, name, 1, 4, x := np.zeros(4, np.int32))
        assert x.tolist() == [1] * 4


def test_threads_take_turns(module):
    def work(seed: int) -> bool:
        x, sums = numbers(1024, seed), np.zeros(4, np.float32)
        with emulator.order(seed):
            run(module, "block_sum", 4, 256, x, sums)
        return np.allclose(sums, x.reshape(4, 256).sum(1), atol=1e-4)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


COMPILERS = [path for name in ("g++", "clang++") if (path := shutil.which(name))]
if importlib.util.find_spec("ziglang"):
    COMPILERS.append(f"{sys.executable} -m ziglang c++")


@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda path: Path(path).name)
def test_every_compiler(monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    x, y = numbers(1024).reshape(32, 32), np.zeros((32, 32), np.float32)
    with emulator.trace() as trace:
        run(compiled(WIDTH=32), "transpose", 1, 256, x, y)
        run(compiled(WIDTH=32), "block_sum", 1, 256, x, y)
    assert trace.kernels["transpose"].bank_conflicts == 32 * 31
    assert trace.kernels["transpose"].global_lines == 64
    # Both addends are loaded, though one of them is the place of the sum.
    loads = [one for one in trace.accesses if (one.space, one.kind) == ("shared", "load")]
    assert sum(one.lanes for one in loads if one.kernel == "block_sum") == 2 * 255 + 1
    trace.check()


# ---- Sanitizers. ---------------------------------------------------------------------------------

WRONG = r"""
extern "C" __global__ void in_global(float* x, int step) { x[threadIdx.x + step] = 1.0f; }
extern "C" __global__ void in_shared(float* x, int step) {
    __shared__ float a[32], b[32];
    float *p = a, *q = b;
    p[threadIdx.x] = q[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = p[threadIdx.x + step] + q[threadIdx.x + step];
}
extern "C" __global__ void in_dynamic(float* x, int step) {
    dynamic_shared_memory(space);
    float* a = (float*)space;
    a[threadIdx.x + step] = 1.0f;
}
extern "C" __global__ void misaligned(float* x, int step) { *(uint4*)x = *(uint4*)(x + step); }
extern "C" __global__ void overflow(int* x, int step) { x[0] = 2147483647 + step; }
"""
LAUNCH = """
import numpy as np
from lesson_code.cupy import emulator
x = np.arange(32, dtype=np.float32)
arguments = [np.uintp(x.ctypes.data), np.int32(1)]
emulator.load({source!r}).launch({name!r}, 1, 32, arguments, 128)
"""
CAUGHT = {
    "in_global": "heap-buffer-overflow",
    "in_shared": "insufficient space|global-buffer-overflow",
    "in_dynamic": "AddressSanitizer: SEGV",
    "misaligned": "misaligned address",
    "overflow": "signed integer overflow",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_sanitizers_catch(name):
    """And nothing else: tests/cupy/test_operators.py runs the package's kernels."""
    try:
        done = emulator.sanitized(LAUNCH.format(source=WRONG, name=name))
    except RuntimeError as error:
        pytest.skip(str(error))
    assert done.returncode != 0
    assert re.search(CAUGHT[name], done.stderr) and "kernel.cu" in done.stderr


def test_flags_that_ubuntu_gives_its_compiler():
    """There each compilation is fortified, unless told otherwise; a fibre's jump would abort."""
    code = (
        "import numpy as np; from lesson_code.cupy import emulator; "
        "module = emulator.load('extern \"C\" __global__ void both() { __syncthreads(); }'); "
        "module.launch('both', 1, 64, [])"
    )
    compiler = shlex.join([*_compiler.compiler(), "-D_FORTIFY_SOURCE=2"])
    environment = os.environ | {"CXX": compiler}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_macros_may_have_names_of_the_header():
    names = ["T", "N", "A", "I", "f", "count", "order", "LANES", "TRACED"]
    source = f'extern "C" __global__ void write(float* x) {{ x[0] = {" + ".join(names)}; }}'
    module = emulator.load(source, dict.fromkeys(names, 64))
    for context in (contextlib.nullcontext, emulator.trace):
        with context():
            run(module, "write", 1, 1, x := np.zeros(1, np.float32))
        assert x[0] == 64 * len(names)


def test_sixteen_bytes_by_way_of_a_variable():
    source = """
        extern "C" __global__ void copy(const float4* from, float4* to) {
            float4 number = from[threadIdx.x];
            to[threadIdx.x] = number;
        }
    """
    trace = traced(emulator.load(source), "copy", 1, 32, *np.ones((2, 32, 4), np.float32))
    counts = trace.kernels["copy"]
    assert (counts.global_accesses, counts.global_lines) == (2, 8)


# ---- Copies that land later. ---------------------------------------------------------------------

COPY = """
extern "C" __global__ void turned(const float* x, float* y) {
    __shared__ __align__(16) float row[2][128];
    copy_async(&row[0][threadIdx.x * 4], x + threadIdx.x * 4);
    end_group();
    copy_async(&row[1][threadIdx.x * 4], x + 128 + threadIdx.x * 4);
    end_group();
    WAIT
    __syncthreads();
    for (int i = 0; i < 4; i++) y[threadIdx.x * 4 + i] = row[ROW][127 - threadIdx.x * 4 - i];
    __syncthreads();
    wait_for_groups<0>();
}
"""


@pytest.mark.parametrize(
    ("wait", "row", "is_there"),
    [
        ("wait_for_groups<0>();", 0, True),
        ("wait_for_groups<0>();", 1, True),
        ("wait_for_groups<1>();", 0, True),
        ("wait_for_groups<1>();", 1, False),
        ("", 0, False),
    ],
)
def test_a_copy_lands_at_its_wait(wait, row, is_there):
    module = emulator.load(COPY, {"WAIT": wait, "ROW": row})
    x, y = np.arange(256, dtype=np.float32), np.zeros(128, np.float32)
    module.launch("turned", 1, 32, [at(x), at(y)])
    assert (y == x[128 * row :][:128][::-1]).all() == is_there
    assert np.isnan(y).all() == (not is_there)
    with emulator.trace() as counted:
        if not is_there:
            with pytest.raises(RuntimeError, match="loads 4 bytes to which a copy is on its way"):
                module.launch("turned", 1, 32, [at(x), at(y)], buffers=[x, y])
            return
        module.launch("turned", 1, 32, [at(x), at(y)], buffers=[x, y])
    counted.check()
    counts = counted.kernels["turned"]
    assert counts.global_load_bytes == 1024 and counts.global_lines == 8 + 4 * 4
    assert counts.shared_accesses == 4  # the loads: a copy passes once, with its lines


def test_a_barrier_is_needed_behind_the_wait():
    source = COPY.replace("__syncthreads();", "", 1)
    module = emulator.load(source, {"WAIT": "wait_for_groups<0>();", "ROW": 0})
    x, y = np.zeros(256, np.float32), np.zeros(128, np.float32)
    with pytest.raises((emulator.RaceError, RuntimeError)), emulator.trace() as counted:
        module.launch("turned", 1, 32, [at(x), at(y)], buffers=[x, y])
        counted.check()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("copy_async(row, x + 1); wait_for_groups<0>();", "an address that 16 does not divide"),
        ("copy_async(x, x); wait_for_groups<0>();", "a place that is not in shared memory"),
        ("copy_async(row, x); end_group();", "ends while 1 of its copies are on their way"),
        ("for (int i = 0; i < 200; i++) copy_async(row, x);", "and waits for none"),
    ],
)
def test_wrong_copies(source, sentence):
    text = f'extern "C" __global__ void k(float* x) {{ __shared__ float4 row[1]; {source} }}'
    x = np.zeros(64, np.float32)
    start = x.ctypes.data + -x.ctypes.data % 16
    with pytest.raises(RuntimeError, match=sentence):
        emulator.load(text).launch("k", 1, 1, [np.uintp(start)])
