"""Exercises of the chapter on generating images."""

import math

import numpy as np

from lesson_code import costs
from lesson_code.exercises import Exercise

CHAPTER = "Generating images as an RNN"
SEQUENCE = "An image is a sequence"
PIXEL = "A distribution for one pixel"
COPIES = "Are they copies?"
HALF = "Half an image, held in a state"
COUNTING = "Counting what an image costs"

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

# --- A copy that has moved ---------------------------------------------------------------------

COPY = Exercise("ex-images-copies", CHAPTER)

COPY.value("plain", math.sqrt(2) * 8, COPIES, "to three digits").mistakes(
    (8, "Two pixels differ: where the ink was, and where it is."),
    (128, "This is the sum of squares. A distance is its root."),
    (0, "That is the distance after the copy has been moved back."),
)

EIGHT = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


def move(images, down, right):
    """Images (n, 64) moved by at most a pixel each way, with blank paper coming in."""
    wide = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    return wide[:, 1 - down : 9 - down, 1 - right : 9 - right].reshape(-1, 64)


def roll(images, down, right):
    return np.roll(images.reshape(-1, 8, 8), (down, right), axis=(1, 2)).reshape(-1, 64)


def moved_a_little(rng, N):
    """Known images, and copies of them with noise that have moved in any of nine ways."""
    known = rng.integers(17, size=(7, 64))
    moves = [move(known, *step) for step in [(0, 0), *EIGHT]]
    images = np.stack(moves)[rng.integers(9, size=N), rng.integers(7, size=N)]
    return images + rng.integers(3, size=images.shape), known


def each_way(rng):
    images, known = moved_a_little(rng, 7)
    return np.concatenate([move(known, *step) for step in EIGHT] + [images]), known


def distances(moves, move=move):
    """The distance to the nearest known image moved in these ways."""

    def slid(images, known):
        known = np.concatenate([move(known, *step) for step in moves])
        squares = ((images[:, None] - known) ** 2).sum(axis=2)
        return np.sqrt(squares.min(axis=1))

    return slid


@COPY.function(COPIES, inputs=moved_a_little, special=(each_way,), unit="")
def slid(images, known):
    return distances([(0, 0), *EIGHT])(images, known)


slid.mistakes(
    (
        distances([(0, 0)]),
        "Nothing moves: this is the distance to the nearest known image as it is.",
    ),
    (
        distances([(0, 0), *EIGHT], roll),
        "What leaves the image at one edge comes in at the other. It should be lost.",
    ),
    (
        distances(EIGHT),
        "A known image may also stay where it is.",
    ),
    (
        distances([(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]),
        "The diagonal moves are missing: there are eight directions.",
    ),
    (
        lambda images, known: slid.reference(images, known) ** 2,
        "These are sums of squares. A distance is the root.",
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
