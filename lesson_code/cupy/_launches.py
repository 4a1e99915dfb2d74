"""How the kernels of linear.cu are launched: their macros, grids, and the memory they need."""

import math
from typing import NamedTuple

import numpy as np

from lesson_code.cupy import _arrays, _kernels

CHUNK = 64
MIN_SEGMENT = 4 * CHUNK  # tokens: a shorter segment would not be worth its state
BLOCKS_PER_PROCESSOR = 2  # fewer would leave a multiprocessor waiting for memory


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
):
    """One scan by one kernel: (outputs, last state or None, normalizers or None).

    `ones` are columns of ones behind q, k and v; one behind v makes z the last column of a state.
    States are arrays (..., features, columns) of float32. The outputs have the dtype `dtype`.
    `reverse` lets time run backwards.
    """
    states = () if initial is None else initial.shape[:-2]
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], states)
    N, values = v.shape[-2:]
    features = max(q.shape[-1] + ones[0], k.shape[-1] + ones[1])
    shape = Shape(math.prod(leading), N, features, values, ones[2])
    state = (*leading, features, shape.columns)
    out = _arrays.empty((*leading, N, values), dtype, q)
    last = _arrays.empty(state, "float32", q) if keep else None
    normalizers = _arrays.empty((*leading, N), "float32", q) if normalize else None
    if shape.heads:
        if initial is not None:
            initial = _arrays.contiguous(_arrays.broadcast(initial, state))
        rows = [
            _arrays.rows(x, leading, ones=columns, reverse=reverse)
            for x, columns in zip((q, k, v, out), (*ones, 0), strict=True)
        ]
        LAUNCHES[kernel](shape, rows, initial, last, normalizers)
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
        "ALIGNED": int(all(map(_is_aligned, rows))),
    }
    slabs = blocks(shape.values, slab)
    segments, length = cut(shape.heads * slabs, shape.N, gpu)
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


LAUNCHES = {"recurrent": recurrent, "chunked": chunked, "tensor_core": tensor_core}


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


def cut(count: int, N: int, gpu) -> tuple[int, int]:
    """(segments of a sequence, tokens of each, a multiple of the chunk) where it takes `count` blocks:

    as many as fill the GPU.
    """
    wanted = -(-BLOCKS_PER_PROCESSOR * gpu.processors // max(1, count))
    segments = max(1, min(wanted, N // MIN_SEGMENT))
    length = max(CHUNK, round_up(-(-N // segments), CHUNK))
    return blocks(N, length), length


def _is_aligned(rows) -> bool:
    """Whether a kernel may read eight 16-bit numbers at a time."""
    struct = rows.struct
    steps = (struct[name] % 8 for name in ("outer", "inner", "token"))
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
