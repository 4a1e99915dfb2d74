"""Exercises of the chapter on generating images."""

import math

import numpy as np

from lesson_code import costs
from lesson_code.checks import check_streaming, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.numpy import identity, linear_attention

CHAPTER = "Generating images as an RNN"
SEQUENCE = "An image is a sequence"
PIXEL = "A distribution for one pixel"
HALF = "Completing a half"
COUNTING = "Counting what generation costs"

# --- Three levels ------------------------------------------------------------------------------

HAND = Exercise("ex-images-hand", CHAPTER)


def sigma(y):
    return 1 / (1 + np.exp(-np.asarray(y, dtype=float)))


SHARES = np.diff([0, *sigma([-0.5, 0.5]), 1])
BITS = -np.log2(SHARES[[0, 1, 2, 1]])

HAND.value("p", SHARES, PIXEL, "three numbers, of the levels 0, 1 and 2").mistakes(
    (
        np.diff(sigma([-1.5, -0.5, 0.5, 1.5])),
        "They do not sum to one. The first bin and the last one do not end half a level outside.",
    ),
    (
        sigma([-1, 0, 1]) * sigma([1, 0, -1]),
        "This is the height of the bell at each level. A level gets the area over its bin.",
    ),
)
HAND.value("widest", 1 / (2 * math.log(2)), PIXEL, "a number, to three digits").mistakes(
    (
        1 / math.log(2),
        "The middle bin ends half a level from the center, not a whole one.",
    ),
    (
        1 / (2 * math.log(3)),
        "Below this width the middle has more than a half. To be ahead of each neighbor takes "
        "less.",
    ),
)
HAND.value("bits", BITS.mean(), SEQUENCE, "bits per pixel, to three digits").mistakes(
    (BITS.mean() * math.log(2), "The logarithm is the natural one. Bits take that of base 2."),
    (
        SHARES @ -np.log2(SHARES),
        "This is what a pixel costs on average if the levels are drawn from p. In this image they "
        "are as frequent as they are.",
    ),
)

# --- One bin -----------------------------------------------------------------------------------

BIN = Exercise("ex-images-bin", CHAPTER)


def levels(rng, N):
    return rng.integers(17, size=(N, 1)), rng.uniform(0, 16, (N, 1)), rng.uniform(1, 4, (N, 1))


def every_level(mean, scale):
    def draw(rng):
        x = np.arange(17)[:, None]
        return x, np.full(x.shape, mean), np.full(x.shape, scale)

    return draw


def edges_of(x, mean, scale):
    return (x - 0.5 - mean) / scale, (x + 0.5 - mean) / scale


def log_sigma(y):
    return -np.logaddexp(0, -y)


def log_bins(log_sigma=log_sigma, log_gap=lambda width: np.log(-np.expm1(-width))):
    """The logarithms of the bins, with parts to be replaced by wrong ones."""

    def log_bin(x, mean, scale):
        a, b = edges_of(x, mean, scale)
        inside = log_sigma(b) + log_sigma(-a) + log_gap(b - a)
        return np.where(x == 0, log_sigma(b), np.where(x == 16, log_sigma(-a), inside))

    return log_bin


SPECIAL = (
    every_level(7.3, 2.0),
    every_level(16.0, 0.01),
    every_level(0.0, 0.1),
    every_level(3.0, 1e12),
)


@BIN.function(PIXEL, inputs=levels, special=SPECIAL, unit="")
def log_bin(x, mean, scale):
    return log_bins()(x, mean, scale)


log_bin.mistakes(
    (
        log_bins(lambda y: np.log(sigma(y))),
        "Far from the bell a sigmoid rounds to 0 before its logarithm is taken. This logarithm has "
        "to be computed in one piece.",
    ),
    (
        log_bins(log_gap=lambda width: np.log(1 - np.exp(-width))),
        "For a wide bell 1 - exp(a - b) loses its digits: the exponential is close to 1.",
    ),
)


@log_bin.mistake(
    "The sigmoids are subtracted. Far from the bell both round to the same number, and the "
    "logarithm of their difference is minus infinity."
)
def naive_bin(x, mean, scale):
    a, b = map(sigma, edges_of(x, mean, scale))
    return np.log(np.where(x == 16, 1, b) - np.where(x == 0, 0, a))


@log_bin.mistake(
    "The first level and the last one get a bin with two ends. Theirs reach to infinity."
)
def two_ends(x, mean, scale):
    a, b = edges_of(x, mean, scale)
    return log_sigma(b) + log_sigma(-a) + np.log(-np.expm1(a - b))


BIN.value("far", log_sigma((0.5 - 16) / 0.01), PIXEL).mistakes(
    (
        -math.inf,
        "That is the logarithm of what mixture says. The probability is tiny, but not 0.",
    ),
    (
        log_sigma((0 - 16) / 0.01),
        "This is measured at level 0 itself. Where does its bin end?",
    ),
)

# --- In place ----------------------------------------------------------------------------------

IN_PLACE = Exercise("ex-images-in-place", CHAPTER)


def right_completions(copied):
    """How many of five completions begin with the state after the upper half."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(3, 2))
    after_the_half, right = state.copy(), 0
    for _ in range(5):
        right += int(np.array_equal(state, after_the_half))
        current = state.copy() if copied else state
        current += np.outer(rng.normal(size=3), rng.normal(size=2))
    return right


IN_PLACE.value("right_ones", right_completions(False), HALF, "how many of the five").mistakes(
    (
        right_completions(True),
        "Each completion is handed the same array. What is in it when the second one begins?",
    ),
    (0, "Nothing has been overwritten yet when the first one begins."),
)


def one_head(rng, N, D=5, M=3):
    return random_qkv(rng, N, D=D, M=M)


@IN_PLACE.function(HALF, inputs=one_head)
def repaired(q, k, v, *, initial_state=None, return_state=False):
    state = {"initial_state": initial_state, "return_state": return_state}
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False, **state)


repaired.passes(check_streaming, HALF, empty_pieces=False)
repaired.mistakes(
    (
        lambda q, k, v: np.tril(q @ k.T, -1) @ v,
        "Each query is answered before its own token is written.",
    ),
    (
        lambda q, k, v: q @ (k.T @ v),
        "Every query reads the last state, in which its future is written already.",
    ),
    (
        lambda q, k, v: linear_attention(q, k, v, feature_map=identity, causal=True),
        "The output is normalized. Here it is asked for without the normalizer.",
    ),
)

# --- How many at once --------------------------------------------------------------------------

MEMORY = Exercise("ex-images-memory", CHAPTER)
GB, PIXELS, LAYERS, HEADS = 10**9, 32 * 32 * 3, 16, 8
STATES = LAYERS * HEADS * costs.state_entries(32, 32, normalizer=True) * 4
ONE_HEAD = LAYERS * costs.state_entries(256, 256, normalizer=True) * 4
CACHES = LAYERS * costs.kv_cache_bytes(PIXELS, 256, bytes_per_number=4)
SCORES = HEADS * costs.attention_matrix_entries(PIXELS) * 4 / 1e6
IMAGES = "a number of images"

MEMORY.value("linear", 24 * GB // STATES, COUNTING, IMAGES, tolerance=2e-3).mistakes(
    (24 * GB * 33 // (STATES * 32), "There is S, but no z, a column of 33.", HALF),
    (24 * GB // ONE_HEAD, "The state is that of one wide head. Eight heads share the width."),
    (24 * GB * LAYERS // STATES, "This is a model of one layer. Each layer keeps a state.", HALF),
)
MEMORY.value("cached", 24 * GB // CACHES, COUNTING, IMAGES, tolerance=2e-3).mistakes(
    (
        48 * GB // CACHES,
        "Twice as many as fit. Are keys and values both counted, for all pixels, and in float32?",
    ),
    (
        72 * GB // CACHES,
        "Each pixel is a sequence of three numbers here, one for each color.",
    ),
)
MEMORY.value("scores", SCORES, COUNTING, "megabytes, of 10⁶ bytes").mistakes(
    (SCORES / HEADS, "This is one head. Each has a matrix of its own."),
    (SCORES / 2, "Half of what is stored. A matrix has its masked half, too, and float32."),
)
