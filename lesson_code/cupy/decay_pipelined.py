"""How decay_pipelined.cu and decay_channels.cu are launched: macros, grids, and memory.

The former has one decay for all channels of a head, the latter one for each.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from lesson_code import _arguments
from lesson_code.cupy import _arrays, _fading, _kernels
from lesson_code.cupy._launches import CHUNK, THREADS, blocks, is_aligned, segments_of

FILE, CHANNELS_FILE = "decay_pipelined.cu", "decay_channels.cu"
MAX_WIDTH = 128  # of queries and values: wider states would not fit the registers
HALF = 64  # features whose gradients fit the registers, where each has a decay of its own
FORWARD, STATES, BACKWARD = "FORWARD", "STATES", "BACKWARD"


def forward(q, k, v, log_decay, initial):
    """Outputs (..., N, M) in the dtype of q, and the last state (..., D, M) in float32."""
    parts = (x.shape[:-2] for x in (q, k, v, log_decay, initial))
    one = _Scan.of(np.broadcast_shapes(*parts), k, v, log_decay)
    plan = one.plan(FORWARD)
    out = _arrays.empty((*one.leading, one.N, one.M), _arguments.dtype_name(q), q)
    last = _arrays.empty((*one.leading, one.D, one.M), "float32", q)
    states = one.states_of_segments(plan, k, v, initial)
    one.run(plan, "walk", (q, k, v, log_decay, out), (states, last))
    return out, last


def backward(grad, grad_last, q, k, v, log_decay, initial):
    """Gradients of q, k, v, log_decay (..., N, D or 1) and the initial state.

    All have the same leading dimensions. None where the walk does not fit a multiprocessor.
    """
    if log_decay.shape[-1] > HALF:
        return _backward_by_halves(grad, grad_last, q, k, v, log_decay, initial)
    one = _Scan.of(k.shape[:-2], k, v, log_decay)
    plan = one.plan(BACKWARD)
    if plan is None:
        return None
    gradients = [_arrays.empty(x.shape, _arguments.dtype_name(q), q) for x in (q, k, v)]
    dtype = _arguments.dtype_name(log_decay) if plan.per_channel else "float32"
    d_log = _arrays.empty(log_decay.shape, dtype, q)
    d_initial = _arrays.empty(initial.shape, "float32", q)
    before = one.states_of_segments(plan, k, v, initial)
    behind = one.states_of_segments(plan, q, grad, grad_last, backwards=True)
    count = one.heads * -(-one.N // plan.chunk)
    size = plan.features * plan.columns
    images = _arrays.empty((count, size), _arguments.dtype_name(q), q)
    exponents = _arrays.empty((count,), "int32", q)
    one.states_walk(plan, k, v, before, None, None, images, exponents)
    arguments = (*gradients, d_log, images, exponents, behind, d_initial)
    one.run(plan, "backward", (q, k, v, grad, log_decay), arguments)
    return *gradients, d_log, d_initial


def _backward_by_halves(grad, grad_last, q, k, v, log_decay, initial):
    """`backward` of channels that fade apart, half of them at a time.

    What channels add to the outputs is a sum. So the gradients of a channel do not depend on the
    others, and that of v is the sum of two.
    """
    wide = q, k, log_decay
    d_wide = [_arrays.empty(x.shape, _arguments.dtype_name(x), x) for x in wide]
    d_initial, parts = _arrays.empty(initial.shape, "float32", q), []
    for own in (slice(None, HALF), slice(HALF, None)):
        q, k, log_decay = (x[..., own] for x in wide)
        states = grad_last[..., own, :], initial[..., own, :]
        found = backward(grad, states[0], q, k, v, log_decay, states[1])
        if found is None:
            return None
        dq, dk, dv, d_log, d_initial[..., own, :] = found
        for whole, part in zip(d_wide, (dq, dk, d_log), strict=True):
            whole[..., own] = part
        parts.append(dv)
    dq, dk, d_log = d_wide
    return dq, dk, parts[0] + parts[1], d_log, d_initial


class _Plan(NamedTuple):
    """How a walk fits shared memory."""

    kind: str
    per_channel: bool
    features: int
    columns: int
    chunk: int  # tokens
    stages: int

    @property
    def file(self) -> str:
        return CHANNELS_FILE if self.per_channel else FILE

    @property
    def shared_bytes(self) -> int:
        bands, wide, high = self.chunk // 16, self.features + 8, self.columns + 8
        tiles = {FORWARD: 2 * wide + high, STATES: wide + high, BACKWARD: 2 * wide + 2 * high}
        weights = {FORWARD: 1, STATES: 0, BACKWARD: 2}[self.kind]
        numbers = self.stages * self.chunk * tiles[self.kind]
        numbers += weights * self.chunk * (self.chunk + 8)
        numbers += self.features * high if weights else 0
        more, floats = self._of_channels if self.per_channel else (0, self._of_one_decay)
        return 2 * (numbers + more) + 4 * (floats + 8 + weights * bands**2)

    @property
    def _of_one_decay(self) -> int:
        """Floats that decay_pipelined.cu shares."""
        bands = self.chunk // 16
        floats = 2 * (3 * self.chunk + 4 + bands * (16 * 24 + 16))  # Decays
        if self.kind == BACKWARD:  # Readings, Crossings
            floats += 2 * 33 * bands**2 + 8 * self.chunk + 8
        return floats

    @property
    def _of_channels(self) -> tuple[int, int]:
        """Numbers of 16 bits, and floats, that decay_channels.cu shares."""
        eights, levels = self.chunk // 8, self.chunk.bit_length() - 1
        tiles = {FORWARD: levels, STATES: 0, BACKWARD: levels + 2}[self.kind]
        floats = self.features * (eights + 3)  # Decays
        if self.kind != STATES:
            floats += self.features // 64 * self.chunk
        if self.kind == BACKWARD:
            floats += self.features * ((levels - 2) * eights + 2)
            floats += (levels + 2) * self.chunk // 16 * (self.features // 32)
        return tiles * self.chunk * (self.features + 8), floats

    @property
    def of_states(self) -> "_Plan":
        """The plan of "fading_states" with the same chunks: there is room for three stages."""
        return self._replace(kind=STATES, stages=3)


class _Scan(NamedTuple):
    """A scan of heads, and what its launches have in common."""

    leading: tuple
    N: int
    D: int
    M: int
    log_decay: Any
    like: object

    @classmethod
    def of(cls, leading, k, v, log_decay) -> "_Scan":
        N, D = k.shape[-2:]
        return cls(tuple(leading), N, D, v.shape[-1], log_decay, k)

    @property
    def heads(self) -> int:
        return math.prod(self.leading)

    def plan(self, kind: str) -> _Plan | None:
        """None where the walk does not fit a multiprocessor."""
        dtype = _arguments.dtype_name(self.like)
        per_channel = self.log_decay.shape[-1] > 1
        return plan(kind, self.D, self.M, dtype, _kernels.gpu(self.like), per_channel)

    @property
    def cuts(self) -> tuple[int, int]:
        """Segments, and tokens of each."""
        return segments_of(self.N, _kernels.gpu(self.like).processors // max(1, self.heads))

    def macros(self, plan, *, aligned: bool) -> dict:
        return {
            plan.kind: 1,
            "TYPE": _arrays.c_type(self.like),
            "LOG": _arrays.c_type(self.log_decay),
            "FEATURES": plan.features,
            "COLUMNS": plan.columns,
            "ONES": 0,
            "CHUNK": plan.chunk,
            "STAGES": plan.stages,
            "ALIGNED": int(aligned),
        }

    def run(self, plan, name, arrays, arguments, *more):
        """One block for each segment."""
        if not self.heads:
            return
        rows = [_arrays.rows(x, self.leading) for x in arrays]
        segments, length = self.cuts
        aligned = all(is_aligned(x) for x in rows if x.struct["width"] > 1)
        aligned &= plan.kind != BACKWARD or self.D % 8 == self.M % 8 == 0  # gradients have no gaps
        macros = self.macros(plan, aligned=aligned)
        sizes = (self.N, self.D, segments, length, *more)
        grid, shared = self.heads * segments, {"shared_bytes": plan.shared_bytes}
        file, name = plan.file, f"{'channel' if plan.per_channel else 'fading'}_{name}"
        _kernels.run(file, macros, name, grid, THREADS, *rows, *arguments, *sizes, **shared)

    def states_walk(self, plan, k, v, before, sums, totals, images, exponents, backwards=False):
        arguments = (before, sums, totals, images, exponents)
        plan, more = plan.of_states, int(backwards)
        self.run(plan, "states", (k, v, self.log_decay), arguments, more)

    def states_of_segments(self, plan, k, v, initial, backwards=False):
        """The states before all segments; backwards, those behind them."""
        segments, _ = self.cuts
        initial = _fading.floats(initial, (*self.leading, self.D, self.M))
        if segments == 1 or not self.heads:
            return initial
        states = _arrays.empty((self.heads, segments, self.D, self.M), "float32", k)
        width = self.log_decay.shape[-1]
        totals = _arrays.empty((self.heads, segments, width), "float32", k)
        self.states_walk(plan, k, v, None, states, totals, None, None, backwards)
        size = self.D * self.M
        count, together = self.heads * size, size // max(1, width)
        sizes = (segments, size, together, int(backwards), np.int64(count))
        macros, file = self.macros(plan.of_states, aligned=True), plan.file
        arguments = (states, totals, initial, *sizes)
        _kernels.run(file, macros, "fading_segments", blocks(count, 256), 256, *arguments)
        return states


def plan(kind: str, D: int, M: int, dtype: str, gpu, per_channel: bool = False) -> _Plan | None:
    features, columns = (64 if width <= 64 else 128 for width in (D, M))
    for chunk, stages in ((CHUNK, 3), (CHUNK, 2), (CHUNK // 2, 3), (CHUNK // 2, 2)):
        if per_channel and chunk * features > CHUNK * 64:
            continue  # a thread would have more than eight tokens of two channels
        tight = per_channel or dtype == "float16"  # and so are those of long chunks
        if chunk == CHUNK and kind == BACKWARD and tight and max(D, M) > 64:
            continue
        found = _Plan(kind, per_channel, features, columns, chunk, stages)
        if found.shared_bytes <= gpu.shared_bytes:
            return found
    return None
