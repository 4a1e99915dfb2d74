"""How the kernels of linear.cu, pipelined.cu and tiled.cu are launched: macros, grids, memory."""

import math
from typing import NamedTuple

import numpy as np

from lesson_code.cupy import _arrays, _kernels

CHUNK = 64
MIN_SEGMENT = 4 * CHUNK  # tokens: a shorter segment would not be worth its state
BLOCKS_PER_PROCESSOR = 2  # fewer would leave a multiprocessor waiting for memory
THREADS = 256  # of a block of pipelined.cu or tiled.cu
ALONE = 1024  # tokens of a sequence whose segments make their states themselves: see `walk_plan`
MOST_STAGES = 8
INTERVAL = 2048  # tokens between the states that a walk forwards leaves for the one backwards


class Shape(NamedTuple):
    """What a scan computes: for every head N outputs from a state (features, values + ones)."""

    heads: int
    N: int
    features: int
    values: int
    ones: int

    @property
    def columns(self) -> int:
        return self.values + self.ones

    @property
    def padded_features(self) -> int:
        return max(16, round_up(self.features, 16))


def scan(
    kernel: str,
    q,
    k,
    v,
    initial=None,
    *,
    ones: tuple[int, int, int] = (0, 0, 0),
    dtype: str,
    keep: bool = False,
    normalize: bool = False,
    reverse: bool = False,
    interval: int = 0,
):
    """One scan by one kernel: (outputs, last state or None, normalizers or None).

    `ones` are columns of ones behind q, k and v; one behind v makes z the last column of a state.
    States are arrays (..., features, columns) of float32. The outputs have the dtype `dtype`.
    `reverse` lets time run backwards. With an `interval`, which "pipelined" knows alone, there is
    a state after each so many tokens in place of the last: (..., states, features, columns).
    """
    states = () if initial is None else initial.shape[:-2]
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], states)
    N, values = v.shape[-2:]
    features = max(q.shape[-1] + ones[0], k.shape[-1] + ones[1])
    shape = Shape(math.prod(leading), N, features, values, ones[2])
    state = (*leading, features, shape.columns)
    out = _arrays.empty((*leading, N, values), dtype, q)
    kept = (*leading, -(-N // interval), *state[-2:]) if interval else state
    last = _arrays.empty(kept, "float32", q) if keep else None
    normalizers = _arrays.empty((*leading, N), "float32", q) if normalize else None
    if shape.heads:
        if initial is not None:
            initial = _arrays.contiguous(_arrays.broadcast(initial, state))
        rows = [
            _arrays.rows(x, leading, ones=columns, reverse=reverse)
            for x, columns in zip((q, k, v, out), (*ones, 0), strict=True)
        ]
        options = {"interval": interval} if interval else {}
        LAUNCHES[kernel](shape, rows, initial, last, normalizers, **options)
    return out, last, normalizers


def recurrent(shape, rows, initial, last, normalizers):
    parts = 1 if shape.features <= 64 else 2 if shape.features <= 128 else 4
    columns = 64 // parts
    macros = {"RECURRENT": 1, "PARTS": parts, "COLUMNS": columns}
    macros |= _types(rows) | _sizes(shape, normalizers)
    grid = (shape.heads, blocks(shape.values, columns))
    block = round_up((columns + shape.ones) * parts, 32)
    arguments = (*rows, initial, last, normalizers, shape.N, shape.features)
    _kernels.run("linear.cu", macros, "recurrent", grid, block, *arguments)


def chunked(shape, rows, initial, last, normalizers):
    q, k, v, out = rows
    state_columns = 64 if shape.features <= 64 else 32 if shape.features <= 128 else 16
    macros = {"CHUNKED": 1, "STATE_COLUMNS": state_columns}
    macros |= _types(rows) | _sizes(shape, normalizers)
    chunks = -(-shape.N // CHUNK)
    states = (shape.heads, chunks, shape.features, shape.columns)
    states = _arrays.empty(states, "float32", out.array)

    grid = (shape.heads, blocks(shape.columns, state_columns))
    block = shape.padded_features * state_columns // 16
    arguments = (k, v, initial, states, last, shape.N, shape.features)
    _kernels.run("linear.cu", macros, "chunk_states", grid, block, *arguments)
    if chunks:
        grid = (shape.heads * chunks, blocks(shape.values, 64))
        arguments = (*rows, states, normalizers, shape.N, shape.features)
        _kernels.run("linear.cu", macros, "chunk_outputs", grid, 256, *arguments)


def tensor_core(shape, rows, initial, last, normalizers):
    q, k, v, out = rows
    gpu = _kernels.gpu(out.array)
    chunk, slab, shared_bytes = _tiles(shape, gpu)
    macros = {
        "TENSOR_CORE": 1,
        "TYPE": _arrays.c_type(out.array),
        **_sizes(shape, normalizers),
        "CHUNK": chunk,
        "SLAB": slab,
        "ALIGNED": int(all(map(is_aligned, rows))),
    }
    slabs = blocks(shape.values, slab)
    wanted = -(-BLOCKS_PER_PROCESSOR * gpu.processors // (shape.heads * slabs))
    segments, length = segments_of(shape.N, wanted)
    grid, block = (shape.heads * segments, slabs), 2 * chunk
    cut = (shape.N, shape.features, segments, length)
    shared = {"shared_bytes": shared_bytes}
    states = initial
    if segments > 1:
        size = shape.features * shape.columns
        total = shape.heads * size
        states = _arrays.empty((shape.heads, segments, size), "float32", out.array)
        sums = (k, v, states, *cut)
        _kernels.run("linear.cu", macros, "segment_sums", grid, block, *sums, **shared)
        before = (states, initial, last, size, segments, np.int64(total))
        _kernels.run("linear.cu", macros, "segment_states", blocks(total, 256), 256, *before)
        last = None  # is written
    arguments = (*rows, states, last, normalizers, *cut)
    _kernels.run("linear.cu", macros, "segment_outputs", grid, block, *arguments, **shared)


def pipelined(shape, rows, initial, last, normalizers, interval=0):
    q, k, v, out = rows
    plan = walk_plan(shape, _kernels.gpu(out.array))
    if plan is None or not shape.N:
        return tensor_core(shape, rows, initial, last, normalizers)
    states = initial
    if plan.segments > 1 and not plan.alone:
        states = _states_of_segments(shape, plan, (k, v), None, initial)
    cut = (shape.N, shape.features, plan.segments, plan.alone, interval or shape.N, plan.length)
    arguments = (*rows, states, last, normalizers, *cut)
    macros = plan.macros("FORWARD", shape, rows, normalize=normalizers is not None)
    plan.run(macros, "forward_walk", shape, arguments)


def saved_interval(q, k, v) -> int:
    """After how many tokens `scan` by "pipelined" has to save a state for `walk_backwards`.

    0 where that reads no states, or where the gradients are three scans.
    """
    shape, gpu = _shape_of(q, k, v), _kernels.gpu(q)
    forward, backward = (walk_plan(shape, gpu, backward=way) for way in (False, True))
    if forward is None or backward is None or not shape.heads * shape.N or forward.alone:
        return 0
    return forward.length if forward.segments > 1 else INTERVAL


def walk_backwards(q, k, v, grad, split, initial, saved, future, *, ones: int, dtype: str):
    """Gradients of q, k, v and of the initial state by one walk; None where it does not fit.

    `split` is the gradient of the normalizers, as a sum of two numbers, or None; `saved` are states
    after every `saved_interval` tokens, and `future` is the gradient of the last state.
    """
    shape = _shape_of(q, k, v, ones)
    tight = ones > 0 or dtype == "float16"
    plan = walk_plan(shape, _kernels.gpu(q), backward=True, tight=tight)
    if plan is None or not shape.heads * shape.N:
        return None
    leading = tuple(q.shape[:-2])
    rows = [_arrays.rows(x, leading) for x in (q, k, v, grad)]
    pair = None if split is None else _arrays.rows(split, leading)
    initial, future = (None if x is None else _arrays.contiguous(x) for x in (initial, future))
    behind = future
    if plan.segments > 1 and not plan.alone:
        behind = _states_of_segments(shape, plan, (rows[0], rows[3]), pair, future, True)
    gradients = [_arrays.empty(x.shape, dtype, q) for x in (q, k, v)]
    first = None
    if initial is not None:
        first = _arrays.empty((*leading, shape.features, shape.columns), "float32", q)
    interval = saved_interval(q, k, v) or shape.N
    columns = shape.values if initial is None else initial.shape[-1]
    columns = columns if saved is None else saved.shape[-1]
    cut = (shape.N, shape.features, columns, plan.segments, plan.alone, interval, plan.length)
    arguments = (*rows, pair or rows[3], *gradients, initial, saved, behind, first, *cut)
    macros = plan.macros("BACKWARD", shape, rows, normalize=split is not None)
    plan.run(macros, "backward_walk", shape, arguments)
    return *gradients, first


def _shape_of(q, k, v, ones=0) -> Shape:
    leading = np.broadcast_shapes(*(tuple(x.shape[:-2]) for x in (q, k, v)))
    return Shape(math.prod(leading), v.shape[-2], q.shape[-1], v.shape[-1], ones)


def _states_of_segments(shape, plan, rows, split, initial, backwards=False):
    """The states before all segments, or with time running backwards those behind them."""
    size = shape.features * shape.columns
    total = shape.heads * size
    states = _arrays.empty((shape.heads, plan.segments, size), "float32", rows[0].array)
    macros = plan.macros("SUMS", shape, rows, normalize=split is not None)
    macros["TOTALS"] = int(shape.ones and not backwards)
    cut = (shape.N, shape.features, plan.segments, plan.length)
    plan.run(macros, "sums_of_segments", shape, (*rows, split or rows[1], states, *cut))
    arguments = (states, initial, size, plan.segments, int(backwards), np.int64(total))
    grid = blocks(total, 256)
    _kernels.run("pipelined.cu", macros, "states_of_segments", grid, 256, *arguments)
    return states


class Plan(NamedTuple):
    """How a walk of pipelined.cu is cut and fits shared memory."""

    columns: int  # of the values, a block
    chunk: int
    stages: int
    shared_bytes: int
    slabs: int
    segments: int
    length: int  # tokens of a segment
    alone: bool  # whether each segment makes the state before it from all tokens before it

    def macros(self, name, shape, rows, *, normalize: bool) -> dict:
        return {
            name: 1,
            "TYPE": _arrays.c_type(rows[0].array),
            "FEATURES": round_up(max(1, shape.features), 64),
            "COLUMNS": self.columns,
            "ONES": shape.ones,
            "NORMALIZE": int(normalize),
            "CHUNK": self.chunk,
            "STAGES": self.stages,
            "ALIGNED": int(all(map(is_aligned, rows))),
        }

    def run(self, macros, name, shape, arguments) -> None:
        grid = (shape.heads * self.segments, self.slabs)
        shared = {"shared_bytes": self.shared_bytes}
        _kernels.run("pipelined.cu", macros, name, grid, THREADS, *arguments, **shared)


def walk_plan(shape, gpu, *, backward: bool = False, tight: bool = False) -> Plan | None:
    """The plan of a walk; None where its state or its tiles do not fit a multiprocessor.

    A `tight` one needs some registers more, and has them where wide chunks are half as long.
    """
    features = round_up(max(1, shape.features), 64)
    columns = 64 if shape.values <= 64 else 128
    slabs = blocks(shape.values, columns)
    if features > 128 or backward and slabs > 1:
        return None
    fill = gpu.processors // (shape.heads * slabs)  # segments that run at the same time
    for chunk, most in ((CHUNK, 3), (CHUNK, 2), (CHUNK // 2, 3), (CHUNK // 2, 2)):
        if tight and chunk == CHUNK and max(features, columns) > 64:
            continue
        length = max(CHUNK, round_up(-(-shape.N // max(1, fill)), CHUNK))
        alone = length < shape.N <= ALONE
        stages = min(MOST_STAGES, -(-shape.N // chunk) + 1) if alone else most
        while stages >= most and (size := _walk_bytes(features, columns, chunk, stages, backward)):
            if size <= gpu.shared_bytes:
                segments = blocks(shape.N, length)
                return Plan(columns, chunk, stages, size, slabs, segments, length, alone)
            stages -= 1
    return None


def _walk_bytes(features, columns, chunk, stages, backward) -> int:
    """Shared memory of a walk: its tiles, the weights in a chunk, the states, and small things."""
    wide, high = features + 8, columns + 8
    tiles = chunk * 2 * (wide + high) if backward else chunk * (2 * wide + high)
    both = 1 + backward  # of weights, and of states
    numbers = stages * tiles + both * (chunk * (chunk + 8) + features * high)
    return 2 * numbers + 4 * both * (2 * features + 8 + (chunk // 16) ** 2 + chunk)


def tiled(shape, rows, initial, last, normalizers):
    q, k, v, out = rows
    gpu = _kernels.gpu(out.array)
    features = round_up(max(1, shape.features), 64)
    columns = 64 if shape.values <= 64 else 128
    shared_bytes = _tiled_bytes(features, columns)
    if features > 128 or shared_bytes > gpu.shared_bytes or not shape.N:
        return chunked(shape, rows, initial, last, normalizers)
    macros = {
        "FEATURES": features,
        "COLUMNS": columns,
        "ONES": shape.ones,
        "NORMALIZE": int(normalizers is not None),
        "CHUNK": TILED_CHUNK,
        "STAGES": TILED_STAGES,
        "ALIGNED": int(all(map(is_aligned, rows))),
    }
    slabs = blocks(shape.values, columns)
    segments, length = segments_of(shape.N, gpu.processors // (shape.heads * slabs))
    grid, cut = (shape.heads * segments, slabs), (shape.N, shape.features, segments, length)
    states = initial
    if segments > 1:
        size = shape.features * shape.columns
        total = shape.heads * size
        states = _arrays.empty((shape.heads, segments, size), "float32", out.array)
        sums = macros | {"SUMS": 1}
        arguments = (k, v, states, *cut)
        shared = {"shared_bytes": shared_bytes}
        _kernels.run("tiled.cu", sums, "tiled_sums", grid, THREADS, *arguments, **shared)
        before = (states, initial, size, segments, 0, np.int64(total))
        _kernels.run("tiled.cu", sums, "states_of_segments", blocks(total, 256), 256, *before)
    arguments = (*rows, states, last, normalizers, *cut)
    macros["FORWARD"] = 1
    _kernels.run(
        "tiled.cu", macros, "tiled_walk", grid, THREADS, *arguments, shared_bytes=shared_bytes
    )


TILED_CHUNK, TILED_STAGES = 32, 2


def _tiled_bytes(features, columns) -> int:
    """Shared memory of tiled.cu: queries, keys and values, the state, z and the normalizers."""
    tiles = TILED_STAGES * TILED_CHUNK * (2 * (features + 4) + columns)
    return 4 * (tiles + features * columns + features + TILED_CHUNK)


LAUNCHES = {
    "recurrent": recurrent,
    "chunked": chunked,
    "tensor_core": tensor_core,
    "pipelined": pipelined,
    "tiled": tiled,
}


def _types(rows) -> dict:
    names = ("Q_TYPE", "K_TYPE", "V_TYPE", "OUT_TYPE")
    return {name: _arrays.c_type(x.array) for name, x in zip(names, rows, strict=True)}


def _sizes(shape, normalizers) -> dict:
    normalize = int(normalizers is not None)
    return {"FEATURES": shape.padded_features, "ONES": shape.ones, "NORMALIZE": normalize}


def _tiles(shape, gpu) -> tuple[int, int, int]:
    """(tokens of a chunk, columns of a block, bytes of shared memory): the largest that fit."""
    wide = 64 if shape.padded_features <= 144 else 32  # wider states would not fit the registers
    if shape.values <= 32 or shape.heads * blocks(shape.values, wide) < gpu.processors:
        wide = 32
    for chunk, slab in ((CHUNK, wide), (CHUNK // 2, 32), (CHUNK // 2, 16)):
        columns = slab + 16 * shape.ones
        numbers = 2 * chunk * (max(shape.padded_features, slab) + 8)  # queries and keys
        numbers += (chunk + shape.padded_features) * (columns + 8)  # values and state
        shared_bytes = 2 * numbers + 4 * (chunk // 16)
        if shared_bytes <= gpu.shared_bytes:
            break
    return chunk, slab, shared_bytes


def segments_of(N: int, wanted: int) -> tuple[int, int]:
    """(how many, tokens of each, a multiple of the chunk): as many as wanted, if long enough."""
    segments = max(1, min(wanted, N // MIN_SEGMENT))
    length = max(CHUNK, round_up(-(-N // segments), CHUNK))
    return blocks(N, length), length


def is_aligned(rows) -> bool:
    """Whether a kernel may read 16 bytes at a time."""
    struct, numbers = rows.struct, 16 // _arrays.itemsize(rows.array)
    steps = (struct[name] % numbers for name in ("outer", "inner", "token"))
    return struct["data"] % 16 == 0 and not any(steps)


def split_gradient(grad, out, normalizers, dtype):
    """Gradients of numerator and normalizer, (..., N, M + 2), the latter as a sum of two."""
    *leading, N, M = out.shape
    both = _arrays.empty((*leading, N, round_up(M + 2, 8)), dtype, out)  # rows begin at 16 bytes
    both = both[..., : M + 2]
    tokens = math.prod(leading) * N
    if tokens:
        g, o, b = (_arrays.rows(x, tuple(leading)) for x in (grad, out, both))
        macros = {"GRADIENT": 1, "OUT_TYPE": _arrays.c_type(out), "BOTH_TYPE": _arrays.c_type(both)}
        arguments = (g, o, normalizers, b, N, np.int64(tokens))
        _kernels.run("linear.cu", macros, "split_gradient", blocks(tokens, 4), 128, *arguments)
    return both


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size` things; one at least, as there is no launch of none."""
    return max(1, -(-size // block))


def round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
