"""Exercises of the chapter on the kernels. Kernels run in the emulator, also where a GPU is."""

import math
from functools import partial, wraps
from typing import NamedTuple

import numpy as np

from lesson_code.cupy import emulator
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import over_tokens
from lesson_code.numpy import retention

CHAPTER = "A CUDA kernel, read line by line"
MODEL = "A kernel of four lines"
LINES = "Lines"
COLUMN = "(a) One thread, one column"
WAIT = "Four reasons to wait"
COUNTED = "Which of the two waits less?"

# --- Bytes in flight ------------------------------------------------------------------------

FLIGHT = Exercise("ex-cuda-flight", CHAPTER)
NEEDED = 2e12 * 0.5e-6
TOKEN = 3 * 64 * 4  # bytes: q, k and v

FLIGHT.value("needed", NEEDED, WAIT, "a number of bytes").mistakes(
    (2e12 / 0.5e-6, "Multiply by the latency: bytes per second times seconds are bytes."),
)
FLIGHT.value("heads", math.ceil(NEEDED / (8 * TOKEN)), COLUMN, "a whole number").mistakes(
    (math.ceil(NEEDED / TOKEN), "A trip brings eight tokens of each head."),
    (math.ceil(NEEDED / (8 * TOKEN / 3)), "Each token has three vectors: q, k and v."),
    (math.ceil(NEEDED / (8 * TOKEN / 4)), "Each number has four bytes."),
    (math.floor(NEEDED / (8 * TOKEN)), "With so many heads a little is missing. Round up."),
)
FLIGHT.value("tokens", 128, WAIT, "a power of two").mistakes(
    (
        64,
        "Twelve heads with 64 tokens each are 589,824 bytes, some 60% of what is needed.",
    ),
    (8, "Twelve heads with eight tokens have 73,728 bytes in flight."),
)

WORK, TRIPS = 4_096 * 436 / (19.5e12 / 2 / (64 * 108)), 4_096 / 8 * 0.6e-6  # seconds

FLIGHT.value("a100", 1e3 * (WORK + TRIPS), COUNTED, "milliseconds").mistakes(
    (1e3 * WORK, "The trips are missing: in a walk they add to the work."),
    (1e3 * TRIPS, "That is the trips alone. The work of 436 cycles for each token comes on top."),
    (1e3 * (WORK + 8 * TRIPS), "A trip brings eight tokens, so there are 512 of them."),
    (1e3 * (2 * WORK + TRIPS), "64 multiply-adds in a cycle, not 128: what is the clock then?"),
    (WORK + TRIPS, "In milliseconds, not in seconds."),
)

# --- Running the reader's kernels --------------------------------------------------------------


def launch(source, name, block, *arguments, grid=1):
    """Run a kernel on arrays and whole numbers."""
    emulator.load(source).launch(
        name,
        grid,
        block,
        [np.int32(x) if isinstance(x, int) else np.uintp(x.ctypes.data) for x in arguments],
        buffers=[x for x in arguments if isinstance(x, np.ndarray)],
    )


def in_numpy(fn):
    """Mark what stands for a kernel that gives the same numbers."""
    fn.stands_for_a_kernel = True
    return fn


class Output(NamedTuple):
    """What a reader's function returned, and 1.0 for each thing that holds."""

    out: object
    by_a_kernel: float
    coalesced: float = 1.0


def traced(fn, by_lines=False):
    """The output, and what made it; nothing may touch what is not its own."""

    @wraps(fn)  # so that messages have the reader's names
    def output(*arguments):
        with emulator.trace() as trace:
            out = fn(*arguments)
        stands = getattr(fn, "stands_for_a_kernel", False)
        together = all(c.line_efficiency > 0.9 for c in trace.kernels.values())
        return Output(out, float(stands or bool(trace.kernels)), float(together or not by_lines))

    return output


NO_KERNEL = "The numbers are right, but no kernel has run: call `run` in your function."

# --- A missing barrier -------------------------------------------------------------------------

BARRIER = Exercise("ex-cuda-barrier", CHAPTER)
SUM = r"""
extern "C" __global__ void total(const float* k, float* z) {
    __shared__ float part[64];
    int i = threadIdx.x;
    part[i] = k[i];
    for (int half = 32; half > 0; half /= 2) {
        __syncthreads();
        if (i < half) part[i] += part[i + half];
    }
    z[i] = part[0];
}
"""


def total_by(source):
    def my_total(k):
        z = np.zeros(64, np.float32)
        launch(source, "total", 64, k, z)
        return z

    return my_total


class Orders(NamedTuple):
    """What comes out if the first thread goes first, and if the last one does."""

    forward: object
    reverse: object
    by_a_kernel: float


def both_orders(fn):
    def output(k):
        results = []
        for which in ("forward", "reverse"):
            with emulator.order(which):
                results.append(traced(fn)(k))
        return Orders(results[0].out, results[1].out, results[0].by_a_kernel)

    return output


def numbers(rng, N):
    return rng.normal(size=64).astype(np.float32)


@BARRIER.function(COLUMN, inputs=numbers, view=both_orders, unit="")
def my_total(k):
    return total_by(SUM.replace("z[i] =", "__syncthreads();\n    z[i] ="))(k)


my_total.mistakes(
    (
        total_by(SUM),
        "The race is still there: what a thread reads at the end was stored by another one after "
        "the last barrier.",
    ),
    (
        total_by(SUM.replace("z[i] =", "__syncwarp();\n    z[i] =")),
        "`__syncwarp` waits for the threads of one warp. The sum is made in the first, and the "
        "second reads it as well.",
    ),
    (
        in_numpy(lambda k: np.where(np.arange(64) == 0, k.sum(), 0).astype(np.float32)),
        "Only the first thread stores the sum. Each of the 64 has to.",
        MODEL,
    ),
    (lambda k: np.full(64, k.sum(), np.float32), NO_KERNEL, MODEL),
)

# Idle threads of 64 in the six rounds; nobody idles before and after them.
IDLE = sum(64 - half for half in (32, 16, 8, 4, 2, 1)) / 64

BARRIER.value("idle", IDLE / 8, COUNTED, "the share of idle threads, from 0 to 1").mistakes(
    (
        IDLE / 6,
        "This is the mean over the six rounds. Before the first and after the last there is work "
        "for all.",
    ),
    (1 - IDLE / 8, "That is the share of busy threads."),
)

# --- Uncoalesced -------------------------------------------------------------------------------

COALESCED = Exercise("ex-cuda-coalesced", CHAPTER)

COALESCED.value(
    "lines",
    [len({row * 64 * 4 // 128 for row in range(32)}), 32 * 4 // 128],
    LINES,
    "two numbers: lines that a warp touches in an access, lines that would do",
).mistakes(
    ([2, 1], "Two lines hold one row. In one access each lane is in another row."),
    ([64, 2], "In one access each lane loads one number of its row."),
)

ROWS = r"""
extern "C" __global__ void normalize(const float* x, float* out, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    float sum = 0.0f;
    for (int c = 0; c < 64; c++) sum += x[row * 64 + c];
    for (int c = 0; c < 64; c++) out[row * 64 + c] = x[row * 64 + c] / sum;
}
"""
WARPS = r"""
extern "C" __global__ void normalize(const float* x, float* out, int n) {
    int row = blockIdx.x, lane = threadIdx.x;
    float low = x[row * 64 + lane], high = x[row * 64 + lane + 32];
    float sum = low + high;
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    out[row * 64 + lane] = low / sum;
    out[row * 64 + lane + 32] = high / sum;
}
"""
PAIRS = WARPS.replace("+ lane", "+ 2 * lane").replace("2 * lane + 32", "2 * lane + 1")


def by_rows(source, rows_per_block):
    def normalize(x):
        out = np.zeros_like(x)
        launch(source, "normalize", 32, x, out, len(x), grid=math.ceil(len(x) / rows_per_block))
        return out

    return normalize


def positive_rows(rng, N):
    return rng.random((N, 64), dtype=np.float32)


@COALESCED.function(LINES, inputs=positive_rows, view=partial(traced, by_lines=True), unit="")
def normalize(x):
    return by_rows(WARPS, 1)(x)


normalize.mistakes(
    (
        by_rows(ROWS, 32),
        "The numbers are right, but each lane of a warp is still in a row of its own.",
    ),
    (
        by_rows(PAIRS, 1),
        "The numbers are right. But when each lane takes two neighbors, one after the other, every "
        "access skips every other number of its lines.",
    ),
    (
        in_numpy(lambda x: x / np.tile(x[:, :32] + x[:, 32:], 2)),
        "Each lane divides by its own part of the sum: the parts are not exchanged.",
        COLUMN,
    ),
    (lambda x: x / x.sum(axis=1, keepdims=True), NO_KERNEL, MODEL),
)

# --- One wrong index ---------------------------------------------------------------------------

INDEX = Exercise("ex-cuda-index", CHAPTER)


def four_features(rng, N, M=3):
    return tuple(rng.normal(size=(N, width)).astype(np.float32) for width in (4, 4, M))


def by_columns(index):
    """The scan with ``index(t, c, m, M)`` as the place of a key; with zeros behind the keys."""

    @in_numpy
    def scan(q, k, v):
        (N, M), flat = v.shape, np.zeros(8 * k.size, k.dtype)
        flat[: k.size] = k.ravel()
        state, out = np.zeros((4, M), k.dtype), np.empty_like(v)
        t, c, m = np.ogrid[:N, :4, :M]
        keys = flat[np.broadcast_to(index(t, c, m, M), (N, 4, M))]
        for n in range(N):
            state = state + keys[n] * v[n]
            out[n] = q[n] @ state
        return out

    return scan


right_scan = by_columns(lambda t, c, m, M: 4 * t + c)
given_scan = by_columns(lambda t, c, m, M: M * t + c)
SIX_COLUMNS = four_features(np.random.default_rng(0), 9, M=6)
WRONG = ~np.isclose(given_scan(*SIX_COLUMNS), right_scan(*SIX_COLUMNS))


def finders(M):
    """Of a comparison and the emulator, how many find `k[t * M + c]` for nine tokens."""
    return int(M != 4) + int(8 * M + 3 >= 9 * 4)


INDEX.value(
    "first_wrong",
    int(WRONG.any(axis=1).argmax()),
    COLUMN,
    "the first token that is wrong, counted from 0",
).mistakes(
    (0, "Put t = 0 into the wrong index and into the right one."),
    (2, "Count tokens from 0."),
)
INDEX.value(
    "wrong_columns", int(WRONG.any(axis=0).sum()), COLUMN, "how many of the six columns are wrong"
).mistakes(
    (
        2,
        "Each column reads all four features of the key. Does the wrong index depend on the "
        "column?",
    ),
)
INDEX.value(
    "finders",
    [finders(M) for M in (6, 4, 3)],
    COLUMN,
    "how many of the two find it for M = 6, for M = 4 and for M = 3",
).mistakes(
    ([2, 0, 2], "For M < C the wrong index stays behind the right one. Does it leave the array?"),
    ([2, 2, 2], "For M = C, how do the wrong index and the right one differ?"),
)


@INDEX.function(COLUMN, inputs=four_features, view=traced)
@in_numpy
def my_scan(q, k, v):
    return right_scan(q, k, v)


my_scan.mistakes(
    (
        given_scan,
        "This is the kernel as it was given: the way from one key to the next is not the number of "
        "columns.",
    ),
    (
        by_columns(lambda t, c, m, M: 4 * t + m),
        "Each thread reads the number of its own column from the key. All threads need all "
        "features.",
    ),
    (
        in_numpy(lambda q, k, v: right_scan(q, k, v) - (q * k).sum(axis=-1, keepdims=True) * v),
        "The state is read before the token is written to it.",
    ),
    (lambda q, k, v: right_scan(q, k, v), NO_KERNEL, MODEL),
)

# --- A decay -----------------------------------------------------------------------------------

DECAY = Exercise("ex-cuda-decay", CHAPTER)


def with_decay(rng, N, M=3):
    return *four_features(rng, N, M), round(float(rng.uniform(0.5, 0.95)), 2)


@DECAY.function(COLUMN, inputs=with_decay, view=traced)
@in_numpy
def my_retention(q, k, v, gamma):
    return retention(q, k, v, gamma)


def decayed(step):
    """``step(S, write, gamma)`` returns the state to keep."""

    @in_numpy
    def wrong(q, k, v, gamma):
        def token(S, q, k, v):
            S = step(S, np.outer(k, v), gamma)
            return S, q @ S

        return over_tokens(token, q, k, v)

    return wrong


my_retention.mistakes(
    (decayed(lambda S, new, gamma: S + new), "Nothing decays."),
    (
        decayed(lambda S, new, gamma: gamma * (S + new)),
        "What the token writes is decayed at once. Only the old state is multiplied.",
    ),
    (
        decayed(lambda S, new, gamma: S + gamma * new),
        "The new part is multiplied in place of the old state.",
    ),
    (lambda q, k, v, gamma: retention(q, k, v, gamma), NO_KERNEL, MODEL),
)
