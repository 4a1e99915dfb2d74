"""Exercises of the chapter on measuring: tiles, crossings, and how far to trust a time."""

import math

import numpy as np

from lesson_code import results
from lesson_code.costs import chunkwise_cost
from lesson_code.exercises import Exercise

CHAPTER = "Which is faster on your machine?"
TILES = "Softmax without the matrix"
HABITS = "Six habits"
CROSSING = "Where the lines cross"
DOUBLING = "The slopes"
RATES = "Operations per second"

# --- A crossing --------------------------------------------------------------------------------

HAND = Exercise("ex-torch-hand", CHAPTER)
SHORT, LONG = 1000, 4000
SOFTMAX, LINEAR = 10.0, 20.0  # milliseconds at the shorter length

HAND.value(
    "times",
    [SOFTMAX * 4**2, LINEAR * 4],
    DOUBLING,
    "two numbers, the milliseconds of softmax and of linear attention at N = 4,000",
).mistakes(
    (
        [SOFTMAX * 4, LINEAR * 4],
        "Here both grow in proportion to N. How often does N double on the way, and what does "
        "softmax do each time?",
    ),
    ([SOFTMAX * 2**2, LINEAR * 2], "This is for twice the tokens; N is four times as large."),
)


def meeting(g0, g1):
    """Where a line through two gaps is zero, as a part of the way from the first to the second."""
    return g0 / (g0 - g1)


GAPS = SOFTMAX / LINEAR, SOFTMAX * 4**2 / (LINEAR * 4)
MEET = SHORT * 4 ** meeting(*map(math.log, GAPS))

HAND.value("meet", MEET, CROSSING, "the N at which the lines cross").mistakes(
    (
        SHORT + (LONG - SHORT) * meeting(SOFTMAX - LINEAR, SOFTMAX * 4**2 - LINEAR * 4),
        "These are straight lines on ordinary axes. The g of the formula is the logarithm of a "
        "quotient.",
    ),
    (
        SHORT**2 / MEET,
        "The exponent has the wrong sign: softmax is the faster one at the shorter length.",
    ),
)


def equal_rates(width, skipped=1 / 2):
    """Where the counts are equal; softmax skips a part of its work."""
    per_token = chunkwise_cost(64, width, width, L=64).work / 64
    return per_token / (2 * width * (1 - skipped))


FASTER = 300 / 25

HAND.value("on_gpu", FASTER * equal_rates(64), RATES, "the N at which the lines cross").mistakes(
    (equal_rates(64), "This is the crossing at equal rates. Softmax has the higher one here."),
    (equal_rates(64) / FASTER, "The quotient is upside down: a faster softmax wins for longer."),
    (FASTER * equal_rates(64, skipped=0), "A causal kernel for softmax skips half of its work."),
    (FASTER * 2 * (64 + 1), "The products inside the chunks are missing."),
)

HAND.value("encoder", FASTER * (64 + 1), RATES, "the N of the crossing without a mask").mistakes(
    (FASTER * 2 * (64 + 1), "Without a mask softmax computes the whole matrix."),
    (FASTER * equal_rates(64), "Without a mask nothing is skipped, and no chunks are needed."),
    (64 + 1, "This is the crossing at equal rates. Softmax has the higher one here."),
)

# --- Which habit ---------------------------------------------------------------------------------

SKIPPED = Exercise("ex-torch-habits", CHAPTER)

SKIPPED.value("habits", [4, 1, 5, 2, 6, 3], HABITS, "six numbers from 1 to 6").mistakes(
    (
        [1, 4, 5, 2, 6, 3],
        "A first call is slow, and a clock that does not wait is fast. Which is which?",
    ),
    (
        [4, 1, 5, 3, 6, 2],
        "Turns do not help a mean. And in the last result the best is taken already: what is it "
        "that follows the order?",
    ),
    (
        [4, 1, 6, 2, 5, 3],
        "One of the two does not say what ran. The other says it, for a single length.",
    ),
)

# --- Merging two parts -------------------------------------------------------------------------

MERGE = Exercise("ex-softmax-merge", CHAPTER)


def gather(q, k, v):
    s = k @ q / np.sqrt(len(q))
    e = np.exp(s - s.max())
    return float(s.max()), float(e.sum()), e @ v


def triples(rng, N, D=4, M=3):
    """The triples of N and of N + 2 keys for one query, one after the other."""
    q, k, v = rng.normal(size=D), *(rng.normal(size=(2 * N + 2, n)) for n in (D, M))
    return *gather(q, k[:N], v[:N]), *gather(q, k[N:], v[N:])


def far_apart(rng):
    _, total, mixed, *other = triples(rng, 3)
    return -900.0, total, mixed, 900.0, *other[1:]


def one_is_empty(rng):
    return -math.inf, 0.0, np.zeros(3), *triples(rng, 3)[3:]


def of_numbers(merge):
    return lambda mu_a, l_a, u_a, mu_b, l_b, u_b: merge((mu_a, l_a, u_a), (mu_b, l_b, u_b))


def merged(a, b, factor):
    """The triples scaled by a function of their maximum and of the new one, and added."""
    mu = max(a[0], b[0])
    x, y = factor(a[0], mu), factor(b[0], mu)
    return mu, x * a[1] + y * b[1], x * a[2] + y * b[2]


@MERGE.function(TILES, inputs=triples, special=(far_apart, one_is_empty), view=of_numbers, unit="")
def merge(a, b):
    return merged(a, b, lambda mu, new: np.exp(mu - new))


merge.mistakes(
    (
        lambda a, b: merged(a, b, lambda mu, new: 1.0),
        "Sums are added that were scaled differently: each part is relative to the largest score "
        "of its own.",
    ),
    (
        lambda a, b: merged(a, b, lambda mu, new: np.exp(new - mu)),
        "The factor is upside down: the part with the smaller maximum must be scaled down.",
    ),
    (
        lambda a, b: merged(a, b, lambda mu, new: np.exp(mu)),
        "The factors are exponentials of the maxima themselves, which overflow. Only differences "
        "to the new maximum are safe.",
    ),
)


@merge.mistake(
    "The second part is scaled to the first, whichever is larger. Both have to be scaled to the "
    "new maximum."
)
def second_scaled_to_first(a, b):
    x = np.exp(b[0] - a[0])
    return max(a[0], b[0]), a[1] + x * b[1], a[2] + x * b[2]


@merge.mistake(
    "u is divided already. A triple keeps u and ℓ apart, so that it can be merged again."
)
def outputs_mixed(a, b):
    mu, total, mixed = merge.reference(a, b)
    return mu, total, mixed / total


MERGE.truth(
    "order_matters",
    False,
    TILES,
    "Exchange a and b in your formulas. Which of them changes?",
)

# --- How far to trust a quotient ---------------------------------------------------------------

SPREAD = Exercise("ex-torch-spread", CHAPTER)


def rounds(rng, R):
    return (1 + rng.exponential(size=(R + 1, 2)),)


def compared(times, place):
    """The quotient of a place in the two columns, and its range when one round is left out."""
    quotients = [
        place(kept[:, 0]) / place(kept[:, 1])
        for kept in (times, *(np.delete(times, r, axis=0) for r in range(len(times))))
    ]
    return quotients[0], min(quotients[1:]), max(quotients[1:])


@SPREAD.function(HABITS, inputs=rounds, unit="rounds")
def compare(times):
    return compared(times, np.min)


compare.mistakes(
    (lambda times: compared(times, np.mean), "These are quotients of means. Keep the best."),
    (
        lambda times: compared(times[:, ::-1], np.min),
        "The quotient is upside down: a is the first column.",
    ),
    (
        lambda times: (
            compared(times, np.min)[0],
            (times[:, 0] / times[:, 1]).min(),
            (times[:, 0] / times[:, 1]).max(),
        ),
        "The first number is right. The others are quotients within single rounds. Leave one round "
        "out, and take the best of those that are left.",
    ),
    (
        lambda times: (compared(times, np.min)[0], *compared(times, np.min)[:0:-1]),
        "The smallest comes before the largest.",
    ),
)


def long_trials():
    """Times of `a` and `b` that took turns in the long trials, where both are one function."""
    rows = [row for row in results.load("habits")["rows"] if row["call"] == "long"]
    return [np.reshape(row["seconds"], (-1, 2)) for row in rows]


def containing_one():
    intervals = [compared(times, np.min)[1:] for times in long_trials()]
    return sum(low <= 1 <= high for low, high in intervals)


SPREAD.value(
    "contain_one", containing_one, HABITS, "how many of the twenty intervals contain 1"
).mistakes(
    (lambda: len(long_trials()) - containing_one(), "So many miss 1. How many contain it?"),
)

# --- Your device -------------------------------------------------------------------------------

DEVICE = Exercise("ex-torch-device", CHAPTER)
WIDTHS = (32, 64, 128)

DEVICE.value(
    "equal_rates",
    [equal_rates(width, skipped=0) for width in WIDTHS],
    RATES,
    "three numbers, the N of the crossing at equal rates for the widths 32, 64 and 128",
).mistakes(
    (
        [equal_rates(width) for width in WIDTHS],
        "This softmax skips half of its work. With f = 1 it computes the whole square.",
    ),
    ([width + 1 for width in WIDTHS], "The products inside the chunks are missing."),
)
