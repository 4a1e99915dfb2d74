"""Exercises of the chapter on generating images."""

from __future__ import annotations

import math

import numpy as np
import torch

import lesson_code.torch as lt
from lesson_code import costs
from lesson_code.checks._calling import random_qkv
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.numpy import identity, linear_attention

SEQUENCE = "An image is a sequence"
PIXEL = "A distribution for one pixel"
HALF = "Completing a half"
COUNTING = "Counting what generation costs"
CONTEXTS = "Decoding after a long context"

# --- Three levels ------------------------------------------------------------------------------


def sigma(y):
    return 1 / (1 + np.exp(-np.asarray(y, dtype=float)))


def shares(edges=(0.5, 1.5), scale=1.0, low=0.0, high=1.0):
    """Of three levels under a bell in the middle; the inner edges of the bins are ``edges``."""
    return np.diff([low, *sigma((np.array(edges) - 1) / scale), high])


IMAGE = [0, 1, 2, 1]


def pixel_bits():
    return -np.log2(shares()[IMAGE])


HAND = (
    Value(
        name="p",
        reference=shares,
        section=PIXEL,
        form="three numbers, of the levels 0, 1 and 2",
        mistakes=(
            Mistake(
                lambda: shares(low=sigma(-1.5), high=sigma(1.5)),
                "They do not sum to one. The first bin and the last one do not end half a level "
                "outside.",
                PIXEL,
            ),
            Mistake(
                lambda: sigma([-1, 0, 1]) * sigma([1, 0, -1]),
                "This is the height of the bell at each level. A level gets the area over its bin.",
                PIXEL,
            ),
            Mistake(
                lambda: shares(edges=(1.0, 2.0)),
                "The bins are moved: the one of level x reaches half a level to either side of it.",
                PIXEL,
            ),
            Mistake(
                lambda: 1 - shares() * [1, 0, 1] - [0, 1 - shares()[1], 0],
                "They do not sum to one. Which side of the edge belongs to level 0?",
                PIXEL,
            ),
        ),
    ),
    Value(
        name="widest",
        reference=lambda: 1 / (2 * math.log(2)),
        section=PIXEL,
        form="a number, to three digits",
        mistakes=(
            Mistake(
                lambda: 1 / math.log(2),
                "The middle bin ends half a level from the center, not a whole one.",
                PIXEL,
            ),
            Mistake(
                lambda: 1 / (2 * math.log(3)),
                "Below this width the middle has more than a half. To be ahead of each neighbor "
                "takes less.",
                PIXEL,
            ),
            Mistake(
                lambda: 2 * math.log(2),
                "Upside down: the distance to the edge is divided by s.",
                PIXEL,
            ),
        ),
    ),
    Value(
        name="bits",
        reference=lambda: pixel_bits().mean(),
        section=SEQUENCE,
        form="bits per pixel, to three digits",
        mistakes=(
            Mistake(
                lambda: pixel_bits().mean() * math.log(2),
                "The logarithm is the natural one. Bits take that of base 2.",
                SEQUENCE,
            ),
            Mistake(
                lambda: -pixel_bits().mean(),
                "The sign is wrong: a cost is the negative logarithm of a probability.",
                SEQUENCE,
            ),
            Mistake(
                lambda: pixel_bits().sum(),
                "This is the whole image, not a pixel of it.",
                SEQUENCE,
            ),
            Mistake(
                lambda: -(shares() * np.log2(shares())).sum(),
                "This is what a pixel costs on average if the levels are drawn from p. In this "
                "image they are as frequent as they are.",
                SEQUENCE,
            ),
            Mistake(
                lambda: -np.log2(shares()).mean(),
                "This is the mean over the three levels. The mean is over the four pixels.",
                SEQUENCE,
            ),
            Mistake(
                lambda: -np.log2(shares()[IMAGE].mean()),
                "The probabilities were averaged first. It is their logarithms that add up.",
                SEQUENCE,
            ),
        ),
    ),
)

# --- One bin -----------------------------------------------------------------------------------


def log_sigma(y):
    return -np.logaddexp(0, -y)


def naive_log_sigma(y):
    return np.log(sigma(y))


def naive_gap(width):
    return np.log(1 - np.exp(-width))


def gap(width):
    return np.log(-np.expm1(-width))


def edges_of(x, mean, scale):
    return (x - 0.5 - mean) / scale, (x + 0.5 - mean) / scale


def inner(x, mean, scale):
    """The logarithm for levels that have two edges."""
    a, b = edges_of(x, mean, scale)
    return log_sigma(b) + log_sigma(-a) + gap(b - a)


def log_bin(x, mean, scale, *, log_sigma=log_sigma, gap=gap, first=0, last=16):
    a, b = edges_of(x, mean, scale)
    with np.errstate(all="ignore"):
        inside = log_sigma(b) + log_sigma(-a) + gap(b - a)
        return np.where(x == first, log_sigma(b), np.where(x == last, log_sigma(-a), inside))


def naive_bin(x, mean, scale):
    a, b = edges_of(x, mean, scale)
    with np.errstate(all="ignore"):
        F = np.where(x == 16, 1, sigma(b)) - np.where(x == 0, 0, sigma(a))
        return np.log(F)


def log_height(x, mean, scale):
    y = (x - mean) / scale
    return log_sigma(y) + log_sigma(-y) - np.log(scale)


def no_gap(x, mean, scale):
    return log_bin(x, mean, scale, gap=np.zeros_like)


def levels(rng, N):
    return rng.integers(17, size=(N, 1)), rng.uniform(0, 16, (N, 1)), rng.uniform(1, 4, (N, 1))


def every_level(mean, scale):
    def draw(rng):
        x = np.arange(17)[:, None]
        return x, np.full(x.shape, mean), np.full(x.shape, scale)

    return draw


def far(log_bin=log_bin, scale=0.01):
    return float(log_bin(np.zeros((1, 1)), np.full((1, 1), 16.0), np.full((1, 1), scale))[0, 0])


BIN = (
    Function(
        signature="log_bin(x, mean, scale)",
        reference=log_bin,
        section=PIXEL,
        inputs=levels,
        special=(
            every_level(7.3, 2.0),
            every_level(16.0, 0.01),
            every_level(0.0, 0.1),
            every_level(3.0, 1e12),
        ),
        unit="",
        mistakes=(
            Mistake(
                inner,
                "The first level and the last one get a bin with two ends. Theirs reach to "
                "infinity.",
                PIXEL,
            ),
            Mistake(
                naive_bin,
                "The sigmoids are subtracted. Far from the bell both round to the same number, and "
                "the logarithm of their difference is minus infinity.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: log_bin(x, mean, scale, log_sigma=naive_log_sigma),
                "Far from the bell a sigmoid rounds to 0 before its logarithm is taken. This "
                "logarithm has to be computed in one piece.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: log_bin(x, mean, scale, gap=naive_gap),
                "For a wide bell 1 - exp(a - b) loses its digits: the exponential is close to 1.",
                PIXEL,
            ),
            Mistake(
                no_gap,
                "The third term is missing, the logarithm of 1 - exp(a - b).",
                PIXEL,
            ),
            Mistake(
                log_height,
                "This is the logarithm of the bell's height at x. A level gets the area over its "
                "bin.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: np.where(
                    x == 0,
                    log_sigma(-edges_of(x, mean, scale)[0]),
                    np.where(
                        x == 16,
                        log_sigma(edges_of(x, mean, scale)[1]),
                        inner(x, mean, scale),
                    ),
                ),
                "At the edges the wrong sigmoid was dropped: the first bin has no end on the left, "
                "the last one none on the right.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: log_bin(x + 0.5, mean, scale, first=0.5, last=16.5),
                "The bin begins at x. It reaches half a level to either side of it.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: -log_bin(x, mean, scale),
                "The sign is wrong: the logarithm of a probability is not above 0.",
                PIXEL,
            ),
            Mistake(
                lambda x, mean, scale: log_bin(x, mean, scale) / np.log(2),
                "This is the logarithm of base 2. Here the natural one is asked for.",
                PIXEL,
            ),
        ),
    ),
    Value(
        name="far",
        reference=far,
        section=PIXEL,
        form="a number",
        mistakes=(
            Mistake(
                -math.inf,
                "That is the logarithm of what mixture says. The probability is tiny, but not 0.",
                PIXEL,
            ),
            Mistake(
                lambda: -far(),
                "The sign is wrong: the logarithm of a probability is not above 0.",
                PIXEL,
            ),
            Mistake(
                lambda: far(scale=1.0),
                "This is what a bell of width 1 gives. Its edges are divided by s.",
                PIXEL,
            ),
            Mistake(
                lambda: far(lambda x, mean, scale: log_sigma((x - mean) / scale)),
                "This is measured at level 0 itself. Where does its bin end?",
                PIXEL,
            ),
            Mistake(
                lambda: far(lambda x, mean, scale: log_sigma(edges_of(x, mean, scale)[0])),
                "This is the edge half a level below 0. Where does the bin of level 0 end?",
                PIXEL,
            ),
        ),
    ),
)

# --- In place ----------------------------------------------------------------------------------


def one_head(rng, N, D=5, M=3):
    return random_qkv(rng, N, D=D, M=M)


def sums(k, v):
    return np.cumsum(k[..., :, None] * v[..., None, :], axis=-3)


def plain(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


def completions_right(copied):
    """How many of five completions begin with the state after the upper half."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(3, 2))
    after_the_half, right = state.copy(), 0
    for _ in range(5):
        right += int(np.array_equal(state, after_the_half))
        current = state.copy() if copied else state
        current += np.outer(rng.normal(size=3), rng.normal(size=2))
    return right


IN_PLACE = (
    Value(
        name="right_ones",
        reference=lambda: completions_right(copied=False),
        section=HALF,
        form="how many of the five",
        mistakes=(
            Mistake(
                lambda: completions_right(copied=True),
                "Each completion is handed the same array. What is in it when the second one "
                "begins?",
                HALF,
            ),
            Mistake(0, "Nothing has been overwritten yet when the first one begins.", HALF),
            Mistake(4, "The state is never restored once it has been overwritten.", HALF),
        ),
    ),
    Function(
        signature="repaired(q, k, v, *, initial_state=None, return_state=False)",
        reference=plain,
        section=HALF,
        inputs=one_head,
        further=(Further(check_streaming, HALF, inputs=one_head, options={"empty_pieces": False}),),
        mistakes=(
            Mistake(
                lambda q, k, v: plain(q, k, v) - (q * k).sum(axis=-1, keepdims=True) * v,
                "Each query is answered before its own token is written.",
                HALF,
            ),
            Mistake(
                lambda q, k, v: (sums(k, v) @ q[..., :, None])[..., 0],
                "The state is read from the wrong side: the query mixes the rows of S.",
                HALF,
            ),
            Mistake(
                lambda q, k, v: q @ (k.T @ v),
                "Every query reads the last state, in which its future is written already.",
                HALF,
            ),
            Mistake(
                lambda q, k, v: (q * k).sum(axis=-1, keepdims=True) * v,
                "The state is not carried from one token to the next.",
                HALF,
            ),
            Mistake(
                lambda q, k, v: linear_attention(q, k, v, feature_map=identity, causal=True),
                "The output is normalized. Here it is asked for without the normalizer.",
                HALF,
            ),
            Mistake(
                lambda q, k, v: linear_attention(q, k, v, causal=True, normalize=False),
                "There is a feature map. Here it is the identity: the keys are written as they "
                "are.",
                HALF,
            ),
        ),
    ),
)

# --- A cache in a buffer -----------------------------------------------------------------------


def grouped(rng, N, D=5, M=3):
    q = rng.normal(size=(6, N, D))
    _, k, v = random_qkv(rng, N, leading=(2,), D=D, M=M)
    return tuple(map(torch.tensor, (q, k, v)))


def attend(q, k, v, *, order=None, scale=None, seen=0, whole_buffer=False):
    """All positions at once: head h reads head ``order[h]``, its first t + 1 + ``seen`` tokens."""
    N, D = k.shape[-2:]
    order = torch.arange(len(q)) // (len(q) // len(k)) if order is None else order
    k, v = k[order], v[order]
    scores = q @ k.mT * (D**-0.5 if scale is None else scale)
    future = torch.ones(N, N, dtype=torch.bool).triu(1 + seen)
    if whole_buffer:  # in which the places of later tokens hold zeros
        return scores.masked_fill(future, 0).softmax(dim=-1).masked_fill(future, 0) @ v
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return weights.nan_to_num(0) @ v


def strided(q, k, v):
    """Groups of every H'-th head, in whose order the outputs are left."""
    order = torch.arange(len(q)).unflatten(0, (-1, len(k))).T.flatten()
    return attend(q[order], k, v)


def whole(q, k, v):
    return lt.grouped_query_attention(q, k, v, causal=True)


def copies(reads=3):
    """Bytes with ``reads`` touches of each earlier token, against those without a copy."""
    moved = costs.cached_generation_bytes(1_000, 512, layers=1).memory
    once = sum(costs.kv_cache_bytes(t - 1, 512, bytes_per_number=4) for t in range(1, 1_001))
    return (moved + (reads - 1) * once) / moved


BUFFER = (
    Function(
        signature="decode(q, k, v)",
        reference=whole,
        section=CONTEXTS,
        inputs=grouped,
        mistakes=(
            Mistake(
                lambda q, k, v: attend(q, k, v, order=torch.arange(len(q)) % len(k)),
                "The queries of a group are not neighbors here: head h reads head h mod H'. It is "
                "the first H/H' heads that share the first head of the cache.",
                CONTEXTS,
            ),
            Mistake(
                strided,
                "The groups are made of every H'-th head, and the outputs are left in this order. "
                "Which axis comes first when one axis is made into two?",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, order=torch.zeros(len(q), dtype=torch.int64)),
                "All queries read the first head of the cache. Each group has a head of its own.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, scale=1.0),
                "The scores are not divided by the root of the width of the keys.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, scale=1 / k.shape[-1]),
                "The scores are divided by the width of the keys. It is the root of it.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, scale=v.shape[-1] ** -0.5),
                "The scores are divided by the root of the width of the values. It is the width of "
                "the keys that counts.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, seen=-1),
                "The own token is left out: write it into its place before the queries read, and "
                "read that place, too.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, whole_buffer=True),
                "The whole buffer is read. Places that are not written yet hold zeros, and a score "
                "of 0 has a weight.",
                CONTEXTS,
            ),
            Mistake(
                lambda q, k, v: attend(q, k, v, seen=len(k[0])),
                "Every query reads all tokens, those to come as well.",
                SEQUENCE,
            ),
        ),
    ),
    Value(
        name="ratio",
        reference=copies,
        section=COUNTING,
        form="a number, to three digits",
        mistakes=(
            Mistake(
                lambda: copies(2),
                "Something is left out. A copy is a read and a write, and the queries read the "
                "cache as they did before.",
                COUNTING,
            ),
            Mistake(
                lambda: copies(4),
                "A cache is read once by its queries, and once for the copy. Written it is only "
                "by the copy.",
                COUNTING,
            ),
        ),
    ),
)

# --- How many at once --------------------------------------------------------------------------

MEMORY_BYTES, PIXELS, LAYERS, WIDTH, HEADS = 24 * 10**9, 32 * 32 * 3, 16, 256, 8


def state_bytes(*, layers=LAYERS, heads=HEADS, normalizer=True, size=4):
    D = WIDTH // heads
    return layers * heads * costs.state_entries(D, D, normalizer=normalizer) * size


def cache_bytes(*, layers=LAYERS, pixels=PIXELS):
    return layers * costs.kv_cache_bytes(pixels, WIDTH, bytes_per_number=4)


def score_megabytes(*, heads=HEADS, size=4, pixels=PIXELS):
    return heads * costs.attention_matrix_entries(pixels) * size / 1e6


MEMORY = (
    Value(
        name="linear",
        reference=lambda: MEMORY_BYTES // state_bytes(),
        section=COUNTING,
        form="a number of images",
        tolerance=2e-3,
        mistakes=(
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(normalizer=False),
                "There is S, but no z.",
                HALF,
            ),
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(layers=1),
                "This is a model of one layer. Each layer keeps a state.",
                HALF,
            ),
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(heads=1),
                "The state is that of one wide head. Eight heads share the width.",
                COUNTING,
            ),
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(heads=1, normalizer=False),
                "The state is that of one wide head, and has no z. Eight heads share the width.",
                COUNTING,
            ),
            Mistake(
                lambda: MEMORY_BYTES // (state_bytes() // HEADS),
                "This is the state of one head in each layer.",
                HALF,
            ),
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(size=2),
                "This is 16 bit. The states are kept in float32.",
                COUNTING,
            ),
            Mistake(
                lambda: MEMORY_BYTES // state_bytes(size=1),
                "Numbers were counted, not their bytes.",
                COUNTING,
            ),
            Mistake(
                lambda: 24 * 2**30 // state_bytes(),
                "A GB has 10⁹ bytes here, not 2³⁰.",
                COUNTING,
            ),
        ),
    ),
    Value(
        name="cached",
        reference=lambda: MEMORY_BYTES // cache_bytes(),
        section=COUNTING,
        form="a number of images",
        tolerance=2e-3,
        mistakes=(
            Mistake(
                lambda: 2 * MEMORY_BYTES // cache_bytes(),
                "Twice as many as fit. Are keys and values both counted, for all pixels, and in "
                "float32?",
                COUNTING,
            ),
            Mistake(
                lambda: MEMORY_BYTES // cache_bytes(layers=1),
                "This is a model of one layer. Each layer keeps a cache.",
                COUNTING,
            ),
            Mistake(
                lambda: MEMORY_BYTES // cache_bytes(pixels=32 * 32),
                "Each pixel is a sequence of three numbers here, one for each color.",
                COUNTING,
            ),
            Mistake(
                lambda: 24 * 2**30 // cache_bytes(),
                "A GB has 10⁹ bytes here, not 2³⁰.",
                COUNTING,
            ),
        ),
    ),
    Value(
        name="scores",
        reference=score_megabytes,
        section=COUNTING,
        form="megabytes, of 10⁶ bytes",
        mistakes=(
            Mistake(
                lambda: score_megabytes(heads=1),
                "This is one head. Each has a matrix of its own.",
                COUNTING,
            ),
            Mistake(
                lambda: score_megabytes(size=1),
                "Numbers were counted, not their bytes.",
                COUNTING,
            ),
            Mistake(
                lambda: score_megabytes(size=2),
                "Half of what is stored. A matrix has its masked half, too, and float32.",
                COUNTING,
            ),
            Mistake(
                lambda: score_megabytes() * LAYERS,
                "These are all the layers. One was asked for.",
                COUNTING,
            ),
            Mistake(
                lambda: score_megabytes() * 1e6 / 2**20,
                "An MB has 10⁶ bytes here, not 2²⁰.",
                COUNTING,
            ),
            Mistake(
                lambda: score_megabytes(pixels=32 * 32),
                "Each pixel is a sequence of three numbers here, one for each color.",
                COUNTING,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Generating images as an RNN",
    ("ex-images-hand", *HAND),
    ("ex-images-bin", *BIN),
    ("ex-images-in-place", *IN_PLACE),
    ("ex-images-buffer", *BUFFER),
    ("ex-images-memory", *MEMORY),
)
