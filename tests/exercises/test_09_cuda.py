"""Mistakes in the exercises of the chapter on the kernels, made in kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lesson_code.checks import check_exercise
from lesson_code.cupy import emulator

MODEL = "A kernel of four lines"
LINES = "Lines"
COLUMN = "(a) One thread, one column"
CHUNKS = "(b) Chunks, in two passes"
BANKS = "Sixteen bytes that nobody reads"
SEGMENTS = "Segments"
TOGETHER = "The three side by side"


def run(source, name, block, *arguments, grid=1):
    values, arrays = [], []
    for x in arguments:
        if isinstance(x, np.ndarray):
            arrays.append(x)
            values.append(np.uintp(x.ctypes.data))
        else:
            values.append(np.float32(x) if isinstance(x, float) else np.int32(x))
    emulator.load(source).launch(name, grid, block, values, buffers=arrays)


# --- Numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "part", "answer", "words", "section"),
    [
        ("ex-cuda-bytes", "equal", 16, "stored by the first pass and loaded", CHUNKS),
        ("ex-cuda-bytes", "equal", 64, "four rows for each token", CHUNKS),
        ("ex-cuda-bytes", "segments", 132, "made of whole chunks", SEGMENTS),
        ("ex-cuda-bytes", "segments", 256, "takes two blocks", SEGMENTS),
        ("ex-cuda-bytes", "segments", 147, "rounded down", SEGMENTS),
        ("ex-cuda-bytes", "moved", 2_097_152, "travels four times", SEGMENTS),
        ("ex-cuda-bytes", "moved", 4_194_304, "Half of it is missing", SEGMENTS),
        ("ex-cuda-bytes", "share", 25, "from 0 to 1", SEGMENTS),
        ("ex-cuda-bytes", "share", 0.2, "the share of all bytes", SEGMENTS),
        ("ex-cuda-barrier", "idle", 0.836, "the mean over the six rounds", TOGETHER),
        ("ex-cuda-barrier", "idle", 0.373, "busy threads", TOGETHER),
        ("ex-cuda-coalesced", "lines", [2, 1], "another row", LINES),
        ("ex-cuda-coalesced", "lines", [1, 1], "How many bytes", LINES),
        ("ex-cuda-index", "first_wrong", 0, "Put t = 0", COLUMN),
        ("ex-cuda-index", "wrong_columns", 2, "all four features", COLUMN),
        ("ex-cuda-index", "finders", [2, 0, 2], "Does it leave the array?", COLUMN),
        ("ex-cuda-index", "finders", [2, 1, 1], "For M = D", COLUMN),
        ("ex-cuda-banks", "conflicts", [31, 0, 1], "for one column", BANKS),
        ("ex-cuda-banks", "conflicts", [1024, 32, 64], "all passes", BANKS),
        ("ex-cuda-banks", "conflicts", [992, 0, 0], "steps of two", BANKS),
    ],
)
def test_numbers(refused, label, part, answer, words, section) -> None:
    refused(label, words, section, **{part: answer})


def test_right_numbers() -> None:
    check_exercise("ex-cuda-bytes", equal=32, segments=128, moved=8_388_608, share=0.25)
    check_exercise("ex-cuda-barrier", idle=0.627)
    check_exercise("ex-cuda-coalesced", lines=(32, 1))
    check_exercise("ex-cuda-index", first_wrong=1, wrong_columns=6, finders=[2, 0, 1])
    check_exercise("ex-cuda-banks", conflicts=[992, 0, 32])


# --- Kernels -----------------------------------------------------------------------------------


def total(last: str, rounds: str = "half > 0", barrier: str = "first") -> Callable:
    before, after = ("__syncthreads();", "") if barrier == "first" else ("", "__syncthreads();")
    source = (
        'extern "C" __global__ void add(const float* keys, float* z) {\n'
        "    __shared__ float sums[64];\n"
        "    const int me = threadIdx.x;\n"
        "    sums[me] = keys[me];\n"
        f"    for (int half = 32; {rounds}; half >>= 1) {{\n"
        f"        {before}\n"
        "        if (me < half) sums[me] = sums[me] + sums[me + half];\n"
        f"        {after}\n"
        "    }\n"
        f"    {last}\n"
        "}\n"
    )

    def my_total(k):
        z = np.zeros(64, np.float32)
        run(source, "add", 64, k, z)
        return z

    return my_total


@pytest.mark.parametrize(
    ("last", "words", "section"),
    [
        ("z[me] = sums[0];", "The race is still there", COLUMN),
        ("z[me] = sums[0]; __syncthreads();", "The race is still there", COLUMN),
        ("__syncwarp(); z[me] = sums[0];", "waits for the threads of one warp", COLUMN),
        ("if (me == 0) z[0] = sums[0];", "Only the first thread stores", MODEL),
    ],
)
def test_barrier(refused, last, words, section) -> None:
    refused("ex-cuda-barrier", words, section, my_total=total(last))


def test_other_totals(refused) -> None:
    label, right = "ex-cuda-barrier", "__syncthreads(); z[me] = sums[0];"
    check_exercise(label, my_total=total(right))
    refused(label, "The last round is missing", COLUMN, my_total=total(right, rounds="half > 1"))
    refused(label, "before the first round", COLUMN, my_total=total(right, barrier="moved"))
    refused(
        label, "no kernel has run", MODEL, my_total=lambda k: np.repeat(k.sum(keepdims=True), 64)
    )


def divide(low: str, high: str, lanes: int = 32, sums: str = "a + b", store: bool = True):
    source = f"""
extern "C" __global__ void rows(const float* x, float* out) {{
    const float* mine = x + blockIdx.x * 64;
    float a = mine[{low}], b = mine[{high}], sum = {sums};
    for (int bit = 1; bit < {lanes}; bit <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    out[blockIdx.x * 64 + {low}] = a / sum;
    {"out[blockIdx.x * 64 + " + high + "] = b / sum;" if store else ""}
}}
"""

    def normalize(x):
        out = np.zeros_like(x)
        run(source, "rows", 32, x, out, grid=len(x))
        return out

    return normalize


LANE = "threadIdx.x"


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (divide(f"2 * {LANE}", f"2 * {LANE} + 1"), "takes two neighbors", LINES),
        (divide(LANE, f"{LANE} + 32", lanes=1), "are not exchanged", COLUMN),
        (divide(LANE, f"{LANE} + 32", lanes=16), "The last exchange is missing", COLUMN),
        (divide(LANE, f"{LANE} + 32", sums="a"), "the first 32 features alone", LINES),
        (divide(LANE, f"{LANE} + 32", store=False), "are not stored", LINES),
        (lambda x: x / np.sum(x, axis=-1)[:, None], "no kernel has run", MODEL),
    ],
)
def test_coalesced(refused, fn, words, section) -> None:
    refused("ex-cuda-coalesced", words, section, normalize=fn)


def test_one_thread_a_row(refused) -> None:
    source = """
extern "C" __global__ void each(const float* x, float* out, int rows) {
    int r = blockIdx.x * 32 + threadIdx.x;
    if (r < rows) {
        float s = 0;
        for (int j = 0; j < 64; ++j) s = s + x[64 * r + j];
        for (int j = 0; j < 64; ++j) out[64 * r + j] = x[64 * r + j] / s;
    }
}
"""

    def normalize(x):
        out = np.zeros_like(x)
        run(source, "each", 32, x, out, len(x), grid=(len(x) + 31) // 32)
        return out

    refused("ex-cuda-coalesced", "in a row of its own", LINES, normalize=normalize)


def test_right_rows() -> None:
    check_exercise("ex-cuda-coalesced", normalize=divide(LANE, f"{LANE} + 32"))


def columns(key: str = "t * 4 + c", update: str = "s[c] + write", before: bool = False) -> str:
    write = f"const float write = k[{key}] * v[t * M + m]; s[c] = {update};"
    read = "sum += q[t * 4 + c] * s[c];"
    return f"""
extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out,
                                  int N, float gamma) {{
    const int m = threadIdx.x, M = blockDim.x;
    float s[4] = {{0, 0, 0, 0}};
    for (int t = 0; t < N; t++) {{
        float sum = 0;
        for (int c = 0; c < 4; c++) {{ {read + write if before else write + read} }}
        out[t * M + m] = sum;
    }}
}}
"""


def attention(source: str) -> Callable:
    def fn(q, k, v, gamma=1.0):
        out = np.empty_like(v)
        run(source, "attend", v.shape[1], q, k, v, out, len(v), gamma)
        return out

    return fn


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (columns("t * M + c"), "the kernel as it was given"),
        (columns("c"), "The first key is read for every token"),
        (columns("t * 4 + m"), "the number of its own column"),
        (columns(before=True), "read before the token is written"),
    ],
)
def test_index(refused, source, words) -> None:
    refused("ex-cuda-index", words, COLUMN, my_scan=lambda q, k, v: attention(source)(q, k, v))


def test_other_scans(refused) -> None:
    check_exercise("ex-cuda-index", my_scan=lambda q, k, v: attention(columns())(q, k, v))

    def without_a_kernel(q, k, v):
        return np.tril(q @ k.T) @ v

    refused("ex-cuda-index", "no kernel has run", MODEL, my_scan=without_a_kernel)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ("s[c] + write", "Nothing decays"),
        ("gamma * (s[c] + write)", "is decayed at once"),
        ("s[c] + gamma * write", "The new part is multiplied"),
        ("gamma * gamma * s[c] + write", "decays twice"),
        ("write", "The old state is lost"),
    ],
)
def test_decay(refused, update, words) -> None:
    fn = attention(columns(update=update))
    refused("ex-cuda-decay", words, COLUMN, my_retention=lambda q, k, v, g: fn(q, k, v, g))


def test_right_decay() -> None:
    fn = attention(columns(update="fmaf(gamma, s[c], write)"))
    check_exercise("ex-cuda-decay", lambda q, k, v, gamma: fn(q, k, v, gamma))
