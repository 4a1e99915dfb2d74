"""Exercises of the chapter on the kernels. Kernels run in the emulator, also where a GPU is."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial, wraps
from typing import NamedTuple

import numpy as np

from lesson_code.cupy import emulator
from lesson_code.exercises._old import Function, Mistake, Value, chapter
from lesson_code.numpy import identity, linear_attention, retention

MODEL = "A kernel of four lines"
LINES = "Lines"
COLUMN = "(a) One thread, one column"
CHUNKS = "(b) Chunks, in two passes"
BANKS = "Sixteen bytes that nobody reads"
SEGMENTS = "Segments"

# --- Bytes, with a pencil ----------------------------------------------------------------------


def equal_length(C, directions=2):
    """The L at which states of C C numbers are as many bytes as four rows of C."""
    return directions * C * C / (4 * C)


def segments(tokens=65_536, blocks=264, blocks_per_segment=2, rounding=math.ceil):
    length = 64 * rounding(tokens / (blocks / blocks_per_segment) / 64)
    return math.ceil(tokens / length)


def moved(number=4, times=4, count=segments):
    return times * count() * number * 64 * 64


ALL_COLUMNS = (
    "A segment takes two blocks, as a block holds 32 of the 64 columns. How many segments keep all "
    "multiprocessors busy?"
)

BYTES = (
    Value(
        name="equal",
        reference=lambda: equal_length(64),
        section=CHUNKS,
        form="the L at which both are equal, for C = M = 64",
        mistakes=(
            Mistake(
                lambda: equal_length(64, directions=1),
                "A state is stored by the first pass and loaded by the second.",
                CHUNKS,
            ),
            Mistake(
                lambda: 2 * equal_length(64),
                "Queries, keys, values and outputs are four rows for each token, not two.",
                CHUNKS,
            ),
            Mistake(
                lambda: 4 * equal_length(64),
                "This compares the states with one row for each token; there are four.",
                CHUNKS,
            ),
        ),
    ),
    Value(
        name="segments",
        reference=segments,
        section=SEGMENTS,
        form="a whole number",
        mistakes=(
            Mistake(
                lambda: segments(blocks_per_segment=1),
                ALL_COLUMNS,
                SEGMENTS,
            ),
            Mistake(
                lambda: 132,
                "So many segments would have 496.5 tokens each. They are made of whole chunks.",
                SEGMENTS,
            ),
            Mistake(
                lambda: segments(rounding=math.floor),
                "The length of a segment was rounded down. Then there are more segments than "
                "blocks are wanted for.",
                SEGMENTS,
            ),
            Mistake(
                lambda: segments(blocks=132),
                "Two blocks on each multiprocessor are wanted.",
                SEGMENTS,
            ),
        ),
    ),
    Value(
        name="moved",
        reference=moved,
        section=SEGMENTS,
        form="a number of bytes",
        mistakes=(
            Mistake(
                lambda: moved() // 4,
                "Each state travels four times: stored, loaded, stored and loaded again. (Or did "
                "you count numbers? Each has four bytes.)",
                SEGMENTS,
            ),
            Mistake(
                lambda: moved(number=2),
                "Half of it is missing: states are float32, whatever the inputs are, and they "
                "travel four times.",
                SEGMENTS,
            ),
            Mistake(
                lambda: moved(count=lambda: segments(blocks_per_segment=1)),
                "A segment has one state, though two blocks share its columns.",
                SEGMENTS,
            ),
        ),
    ),
    Value(
        name="share",
        reference=lambda: moved() / (65_536 * 512),
        section=SEGMENTS,
        form="what part of the bytes of the tokens that is, from 0 to 1",
        mistakes=(
            Mistake(lambda: 100 * moved() / (65_536 * 512), "As a number from 0 to 1.", SEGMENTS),
            Mistake(
                lambda: moved(number=2) / (65_536 * 512),
                "Half of it is missing: states are float32, and they travel four times.",
                SEGMENTS,
            ),
            Mistake(
                lambda: moved() / (65_536 * 512 + moved()),
                "This is the share of all bytes. The question is for the share of the tokens' own.",
                SEGMENTS,
            ),
        ),
    ),
)

# --- Running the reader's kernels --------------------------------------------------------------


def launch(source, name, block, *arguments, grid=1):
    """Run a kernel on arrays, ints and floats."""
    kinds: dict = {np.ndarray: lambda x: np.uintp(x.ctypes.data), int: np.int32, float: np.float32}
    emulator.load(source).launch(
        name,
        grid,
        block,
        [kinds[type(x)](x) for x in arguments],
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


def idle(first_and_last=2):
    """Of 64 threads in six rounds; nobody idles before and after them."""
    rounds = [64 - half for half in (32, 16, 8, 4, 2, 1)]
    return sum(rounds) / 64 / (len(rounds) + first_and_last)


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


@in_numpy
def first_thread_alone(k):
    return np.where(np.arange(64) == 0, k.sum(), 0).astype(np.float32)


@in_numpy
def five_rounds(k):
    return np.full(64, k[::2].sum(), np.float32)


BARRIER = (
    Function(
        signature="my_total(k)",
        reference=total_by(SUM.replace("z[i] =", "__syncthreads();\n    z[i] =")),
        section=COLUMN,
        inputs=lambda rng, N: rng.normal(size=64).astype(np.float32),
        view=both_orders,
        unit="",
        mistakes=(
            Mistake(
                total_by(SUM),
                "The race is still there: what a thread reads at the end was stored by another one "
                "after the last barrier.",
                COLUMN,
            ),
            Mistake(
                total_by(SUM.replace("z[i] =", "__syncwarp();\n    z[i] =")),
                "`__syncwarp` waits for the threads of one warp. The sum is made in the first, and "
                "the second reads it as well.",
                COLUMN,
            ),
            Mistake(
                total_by(
                    SUM.replace("        __syncthreads();\n", "").replace(
                        "part[i + half];", "part[i + half];\n        __syncthreads();"
                    )
                ),
                "Now a barrier is missing before the first round: a thread adds what another one "
                "may not have stored yet.",
                COLUMN,
            ),
            Mistake(
                first_thread_alone,
                "Only the first thread stores the sum. Each of the 64 has to.",
                MODEL,
            ),
            Mistake(
                five_rounds,
                "The last round is missing: the odd keys are not added.",
                COLUMN,
            ),
            Mistake(lambda k: np.full(64, k.sum(), np.float32), NO_KERNEL, MODEL),
        ),
    ),
    Value(
        name="idle",
        reference=idle,
        section="The three side by side",
        form="the share of idle threads, from 0 to 1",
        mistakes=(
            Mistake(
                lambda: idle(first_and_last=0),
                "This is the mean over the six rounds. Before the first and after the last there "
                "is work for all.",
                "The three side by side",
            ),
            Mistake(
                lambda: 1 - idle(), "That is the share of busy threads.", "The three side by side"
            ),
            Mistake(lambda: 0.5, "So many idle in the first round alone.", COLUMN),
            Mistake(
                lambda: idle(first_and_last=1),
                "Between the last barrier and the end of the kernel all threads store.",
                COLUMN,
            ),
        ),
    ),
)

# --- Uncoalesced -------------------------------------------------------------------------------

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
        grid = -(-len(x) // rows_per_block)
        launch(source, "normalize", 32, x, out, len(x), grid=grid)
        return out

    return normalize


def normalized_by(sums):
    """Rows divided by what the sum came out to be, as ``sums(x)`` of 64 or of 1 columns."""
    return in_numpy(lambda x: x / sums(x))


def groups_of_16(x):
    """Each lane the sum of 16 lanes, if the last exchange is missing."""
    pairs = x[:, :32] + x[:, 32:]
    sums = pairs.reshape(-1, 2, 16).sum(axis=2)
    return np.tile(np.repeat(sums, 16, axis=1), 2)


@in_numpy
def half_written(x):
    return np.where(np.arange(64) < 32, x / x.sum(axis=1, keepdims=True), 0).astype(x.dtype)


COALESCED = (
    Value(
        name="lines",
        reference=lambda: [len({row * 64 * 4 // 128 for row in range(32)}), 32 * 4 // 128],
        section=LINES,
        form="two numbers: lines that a warp touches in an access, lines that would do",
        mistakes=(
            Mistake(
                [2, 1],
                "Two lines hold one row. In one access each lane is in another row.",
                LINES,
            ),
            Mistake(
                [64, 2],
                "In one access each lane loads one number of its row.",
                LINES,
            ),
            Mistake([1, 1], "How many bytes are two neighboring lanes apart?", LINES),
            Mistake([1, 32], "The two are exchanged: first those that are touched.", LINES),
            Mistake(
                [8, 1],
                "That would be with 8 numbers from lane to lane. It is a whole row.",
                LINES,
            ),
        ),
    ),
    Function(
        signature="normalize(x)",
        reference=by_rows(WARPS, 1),
        section=LINES,
        inputs=lambda rng, N: rng.random((N, 64), dtype=np.float32),
        view=partial(traced, by_lines=True),
        unit="",
        mistakes=(
            Mistake(
                by_rows(ROWS, 32),
                "The numbers are right, but each lane of a warp is still in a row of its own.",
                LINES,
            ),
            Mistake(
                by_rows(PAIRS, 1),
                "The numbers are right. But when each lane takes two neighbors, one after the "
                "other, every access skips every other number of its lines.",
                LINES,
            ),
            Mistake(
                normalized_by(lambda x: np.tile(x[:, :32] + x[:, 32:], 2)),
                "Each lane divides by its own part of the sum: the parts are not exchanged.",
                COLUMN,
            ),
            Mistake(
                normalized_by(groups_of_16),
                "The last exchange is missing: each lane has the sum of 16 lanes.",
                COLUMN,
            ),
            Mistake(
                normalized_by(lambda x: x[:, :32].sum(axis=1, keepdims=True)),
                "The sum has the first 32 features alone.",
                LINES,
            ),
            Mistake(half_written, "The last 32 features are not stored.", LINES),
            Mistake(lambda x: x / x.sum(axis=1, keepdims=True), NO_KERNEL, MODEL),
        ),
    ),
)

# --- One wrong index ---------------------------------------------------------------------------

N_TOKENS, FEATURES = 9, 4


def finders(M):
    """Of a comparison and the emulator, how many find `k[t * M + c]` for `k[t * D + c]`."""
    wrong_number = M != FEATURES
    outside = (N_TOKENS - 1) * M + FEATURES - 1 >= N_TOKENS * FEATURES
    return int(wrong_number) + int(outside)


def key_at(index):
    """The scan with keys at other places; an IndexError where it leaves the array."""

    def scan(q, k, v):
        N, M = v.shape
        flat, out = k.ravel(), np.zeros_like(v)
        for m in range(M):
            state = np.zeros(FEATURES, k.dtype)
            for t in range(N):
                key = np.array([flat[index(t, c, m, M)] for c in range(FEATURES)])
                state = state + key * v[t, m]
                out[t, m] = q[t] @ state
        return out

    return in_numpy(scan)


def plain(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


@in_numpy
def scan(q, k, v):
    return plain(q, k, v)


def as_given(q, k, v):
    """The kernel with the wrong index, with zeros behind the keys."""
    behind = np.zeros((16, FEATURES))
    behind[: len(k)] = k
    return key_at(lambda t, c, m, M: t * M + c)(q, behind, v)


def first_and_columns():
    q, k, v = four_features(np.random.default_rng(0), N_TOKENS, 6)
    wrong = ~np.isclose(as_given(q, k, v), plain(q, k, v))
    return int(wrong.any(axis=1).argmax()), int(wrong.any(axis=0).sum())


@in_numpy
def reads_first(q, k, v):
    return plain(q, k, v) - (q * k).sum(axis=-1, keepdims=True) * v


def four_features(rng, N, M=3):
    return tuple(rng.normal(size=(N, width)).astype(np.float32) for width in (4, 4, M))


INDEX = (
    Value(
        name="first_wrong",
        reference=lambda: first_and_columns()[0],
        section=COLUMN,
        form="the first token that is wrong, counted from 0",
        mistakes=(
            Mistake(0, "Put t = 0 into the wrong index and into the right one.", COLUMN),
            Mistake(2, "Count tokens from 0.", COLUMN),
            Mistake(
                4,
                "Not only what lies beyond the fourth number is wrong. Where does the wrong index "
                "begin for the second token?",
                COLUMN,
            ),
        ),
    ),
    Value(
        name="wrong_columns",
        reference=lambda: first_and_columns()[1],
        section=COLUMN,
        form="how many of the six columns are wrong",
        mistakes=(
            Mistake(
                2,
                "Each column reads all four features of the key. Does the wrong index depend on "
                "the column?",
                COLUMN,
            ),
            Mistake(1, "Does the wrong index depend on the column?", COLUMN),
        ),
    ),
    Value(
        name="finders",
        reference=lambda: [finders(M) for M in (6, 4, 3)],
        section=COLUMN,
        form="how many of the two find it for M = 6, for M = 4 and for M = 3",
        mistakes=(
            Mistake(
                [2, 0, 2],
                "For M < D the wrong index stays behind the right one. Does it leave the array?",
                COLUMN,
            ),
            Mistake([1, 0, 1], "For M > D: where does the wrong index end?", COLUMN),
            Mistake(
                [2, 2, 2], "For M = D, how do the wrong index and the right one differ?", COLUMN
            ),
            Mistake(
                [2, 1, 1], "For M = D, how do the wrong index and the right one differ?", COLUMN
            ),
        ),
    ),
    Function(
        signature="my_scan(q, k, v)",
        reference=scan,
        section=COLUMN,
        inputs=four_features,
        view=traced,
        mistakes=(
            Mistake(
                key_at(lambda t, c, m, M: t * M + c),
                "This is the kernel as it was given: the way from one key to the next is not the "
                "number of columns.",
                COLUMN,
            ),
            Mistake(
                key_at(lambda t, c, m, M: c),
                "The first key is read for every token.",
                COLUMN,
            ),
            Mistake(
                key_at(lambda t, c, m, M: t * 4 + m),
                "Each thread reads the number of its own column from the key. All threads need all "
                "features.",
                COLUMN,
            ),
            Mistake(
                key_at(lambda t, c, m, M: c * FEATURES + t),
                "Token and feature are exchanged: the features of a token are neighbors.",
                COLUMN,
            ),
            Mistake(
                reads_first,
                "The state is read before the token is written to it.",
                COLUMN,
            ),
            Mistake(lambda q, k, v: plain(q, k, v), NO_KERNEL, MODEL),
        ),
    ),
)

# --- Bank conflicts ----------------------------------------------------------------------------


def extra_passes(pitch, loads=32):
    """A column of a tile: how often a bank is asked again."""
    banks = Counter(row * pitch % 32 for row in range(32))
    return loads * (max(banks.values()) - 1)


PITCHES = (32, 33, 34)
CONFLICTS = (
    Value(
        name="conflicts",
        reference=lambda: [extra_passes(pitch) for pitch in PITCHES],
        section=BANKS,
        form="three numbers, for PITCH 32, 33 and 34",
        mistakes=(
            Mistake(
                lambda: [extra_passes(pitch, loads=1) for pitch in PITCHES],
                "That is for one column. The warp loads 32 of them.",
                BANKS,
            ),
            Mistake(
                lambda: [extra_passes(pitch) + 32 for pitch in PITCHES],
                "These are all passes. A conflict is one more than the one that is needed.",
                BANKS,
            ),
            Mistake(
                lambda: [extra_passes(32), 0, 0],
                "With 34 the banks go up in steps of two: how many different ones are there?",
                BANKS,
            ),
            Mistake(
                lambda: [0, extra_passes(32), extra_passes(32)],
                "The other way round: in which bank does each row of a column lie with 32?",
                BANKS,
            ),
            Mistake(
                lambda: [2 * extra_passes(pitch) for pitch in PITCHES],
                "Only the loads go along a column; the stores go along a row.",
                BANKS,
            ),
        ),
    ),
)

# --- A decay -----------------------------------------------------------------------------------


def decayed(step):
    """step(S, write, gamma) -> the state to keep, the state to read."""

    def my_retention(q, k, v, gamma):
        S, out = np.zeros((4, v.shape[1])), np.empty_like(v)
        for t in range(len(v)):
            S, read = step(S, np.outer(k[t], v[t]), gamma)
            out[t] = q[t] @ read
        return out

    return in_numpy(my_retention)


@in_numpy
def right_retention(q, k, v, gamma):
    return retention(q, k, v, gamma)


DECAY = (
    Function(
        signature="my_retention(q, k, v, gamma)",
        reference=right_retention,
        section=COLUMN,
        inputs=lambda rng, N, M=3: (
            *four_features(rng, N, M),
            round(float(rng.uniform(0.5, 0.95)), 2),
        ),
        view=traced,
        mistakes=(
            Mistake(
                decayed(lambda S, new, gamma: (S + new, S + new)),
                "Nothing decays.",
                COLUMN,
            ),
            Mistake(
                decayed(lambda S, new, gamma: (gamma * (S + new), gamma * (S + new))),
                "What the token writes is decayed at once. Only the old state is multiplied.",
                COLUMN,
            ),
            Mistake(
                decayed(lambda S, new, gamma: (S + gamma * new, S + gamma * new)),
                "The new part is multiplied in place of the old state.",
                COLUMN,
            ),
            Mistake(
                decayed(lambda S, new, gamma: (gamma * S + new, gamma * S)),
                "The state is read before the token is written to it.",
                COLUMN,
            ),
            Mistake(
                decayed(lambda S, new, gamma: (gamma**2 * S + new, gamma**2 * S + new)),
                "The state decays twice for each token.",
                COLUMN,
            ),
            Mistake(
                decayed(lambda S, new, gamma: (new, new)),
                "The old state is lost.",
                COLUMN,
            ),
            Mistake(lambda q, k, v, gamma: retention(q, k, v, gamma), NO_KERNEL, MODEL),
        ),
    ),
)

EXERCISES = chapter(
    "A CUDA kernel, read line by line",
    ("ex-cuda-bytes", *BYTES),
    ("ex-cuda-barrier", *BARRIER),
    ("ex-cuda-coalesced", *COALESCED),
    ("ex-cuda-index", *INDEX),
    ("ex-cuda-banks", *CONFLICTS),
    ("ex-cuda-decay", *DECAY),
)
