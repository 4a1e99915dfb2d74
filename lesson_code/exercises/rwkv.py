"""Exercises of the chapter on AFT and RWKV-4."""

import math

import numpy as np

from lesson_code.exercises import Exercise
from lesson_code.numpy import aft_full, aft_simple, wkv

CHAPTER = "AFT and RWKV-4"
WEIGHTS = "Weights without queries"
BIAS = "A bias for each pair of tokens"
WKV = "WKV: the past fades"
RANGE = "Keeping the exponentials in range"
KERNEL = "A kernel: one thread, one channel"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# --- The slip, by hand -------------------------------------------------------------------------

SLIP = Exercise("ex-rwkv-slip", CHAPTER)


def three_reads(left, read, stored=1.0):
    """For k = u = 0 the outputs when a step leaves ``left``; reads and writes fade once more."""
    a, b, out = 0.0, 0.0, []
    for v in (10.0, 30.0, 50.0):
        out.append((read * a + v) / (read * b + 1))
        a, b = stored * left * a + v, stored * left * b + 1
    return out


SLIP.value("slipped", three_reads(1 / 4, 1 / 4), WKV, "three numbers").mistakes(
    (
        three_reads(1 / 4, 1.0),
        "These are the right outputs. The slip reads the sums after they have decayed.",
    ),
    (
        three_reads(1 / 4, 1 / 4, stored=1 / 4),
        "The sums have faded twice from one token to the next: once for the read and once more for "
        "the write. What is stored fades once.",
    ),
)
SLIP.value("bonus", math.log(4), WKV).mistakes(
    (4.0, "That is the weight which the current token then has. Its bonus is the logarithm."),
    (
        -math.log(4),
        "The sign is wrong. Next to a past that has faded, does the current token count more or "
        "less?",
    ),
)
SLIP.value("loaded", 1 - math.log(4), WKV).mistakes(
    (
        1 + math.log(4),
        "That makes it worse: the code already acts as if the bonus were larger than the one it is "
        "given.",
    ),
    (-math.log(4), "It is what has to be added to the bonus. The loaded one is u = 1."),
)

# --- A mean that is none -----------------------------------------------------------------------

INSIDE = Exercise("ex-rwkv-inside", CHAPTER)

INSIDE.value("outputs", [10.0, 25.0, 50.0], WEIGHTS, "three numbers").mistakes(
    (
        [10.0, 20.0, 35.0],
        "These are the means. The library divides each term before it is added, by the total that "
        "there is then.",
    ),
    ([10.0, 15.0, 25.0], "These are the terms. The library adds up those so far."),
)
INSIDE.value("hundred", sum(1 / i for i in range(1, 101)), WEIGHTS).mistakes(
    (1.0, "That is the mean. Which number does the library divide the i-th term by?"),
    (100.0, "Nothing was divided. The i-th term is divided by the total up to itself."),
    (0.01, "That is the last term alone."),
)


def three(rng, N, leading=(), D=5):
    return tuple(rng.normal(size=(*leading, N, D)) for _ in range(3))


@INSIDE.function(WEIGHTS, inputs=three)
def mended(q, k, v):
    return aft_simple(q, k, v, causal=True)


def running(x):
    return np.cumsum(x, axis=-2)


mended.mistakes(
    (
        lambda q, k, v: sigmoid(q) * running(np.exp(k) * v / running(np.exp(k))),
        "Each term is still divided inside the sum, by the total up to itself.",
    ),
    (
        lambda q, k, v: sigmoid(q) * running(np.exp(k) * v) / np.exp(k).sum(axis=-2, keepdims=True),
        "The divisor is the total of all tokens, later ones too. Each position has a total of its "
        "own.",
    ),
    (
        lambda q, k, v: running(np.exp(k) * v) / running(np.exp(k)),
        "The gate is missing: the sigmoid of the query comes after the mean.",
    ),
    (
        lambda q, k, v: sigmoid(q) * running(k * v) / running(k),
        "The keys themselves are taken as weights. A key is the logarithm of a weight.",
    ),
)

# --- One maximum for both ----------------------------------------------------------------------

MAXIMUM = Exercise("ex-rwkv-maximum", CHAPTER)


def wkv_inputs(rng, N, D=5):
    k, v = rng.normal(size=(2, N, D))
    return k, v, rng.uniform(0.1, 2.0, D), rng.normal(size=D)


@MAXIMUM.function(RANGE, inputs=wkv_inputs)
def one_maximum(k, v, w, u):
    return wkv(k, v, w, u)


def with_maximum(read=lambda fade, past: past, write=lambda past: past, bonus_stored=0):
    """The recurrence with one maximum; what is stored is multiplied by functions of the factor."""

    def wrong(k, v, w, u):
        a = b = np.zeros_like(k[0])
        mu, out, fade = np.full_like(k[0], -1e38), np.empty_like(v), np.exp(-w)
        for t in range(len(k)):
            m = np.maximum(mu, u + k[t])
            past, own = np.exp(mu - m), np.exp(u + k[t] - m)
            seen, new = read(fade, past), np.exp(bonus_stored * u + k[t] - m)
            out[t] = (seen * a + own * v[t]) / (seen * b + own)
            kept = fade * write(past)
            a, b, mu = kept * a + new * v[t], kept * b + new, m
        return out

    return wrong


one_maximum.mistakes(
    (
        with_maximum(bonus_stored=1),
        "The bonus has no effect: it is missing in the read, or it is written into the sums as "
        "well, and cancels. A token is read with it and written without.",
        WKV,
    ),
    (
        with_maximum(read=lambda fade, past: fade * past),
        "The sums are read decayed. The token just before the current one carries no decay yet.",
        WKV,
    ),
    (
        lambda k, v, w, u: wkv(k, v, 0 * w + 1e-300, u),
        "Nothing fades: the write forgets the decay w.",
        WKV,
    ),
    (
        with_maximum(write=np.ones_like),
        "When the maximum grows, what is stored is divided by the old one still. Multiply it by e "
        "to the power of the difference as well as by the decay.",
    ),
)
MAXIMUM.value("lowest", -88.72, RANGE, tolerance=0.01).mistakes(
    (88.72, "The sign is wrong. Subtract this maximum from the key of the first token."),
    (-104.0, "Below this exponent an exponential is 0. Which end does the write reach here?"),
)
MAXIMUM.value("highest", 103.97, RANGE, tolerance=0.01).mistakes(
    (-103.97, "The sign is wrong. Subtract this maximum from the key of the first token."),
    (88.72, "The exponent of the write is minus the bonus, so a large bonus makes it vanish."),
)

# --- Two decays in one channel -----------------------------------------------------------------

RANK = Exercise("ex-rwkv-rank", CHAPTER)

SLOW, FAST = 0.05, 1.0
LATER, EARLIER = np.mgrid[3:6, :3]
BLOCK = sum(np.exp(-w * (LATER - EARLIER)) for w in (SLOW, FAST))

RANK.value("rank", np.linalg.matrix_rank(BLOCK), BIAS).mistakes(
    (1, "That is the rank with one decay. The sum of two is not a product."),
    (
        3,
        "Each of the two exponentials is a number of t times a number of i. How many such products "
        "are added?",
    ),
)
RANK.value("carried", 4, BIAS).mistakes(
    (2, "The mean has a numerator and a denominator, and both fade."),
)


def one_channel(rng, N):
    return tuple(rng.normal(size=(3, N, 1)))


def decayed(weight=lambda n: np.exp(-SLOW * n) + np.exp(-FAST * n), own=1.0):
    """Causal AFT-full with the weight of what is n tokens before the last, and of the own one."""

    def attention(q, k, v):
        t = np.arange(len(q))[:, None]
        weights = np.where(t == t.T, own, weight(np.maximum(t - 1 - t.T, 0)))
        return aft_full(q, k, v, np.log(weights), causal=True)

    return attention


@RANK.function(BIAS, inputs=one_channel)
def two_decays(q, k, v):
    return decayed()(q, k, v)


two_decays.mistakes(
    (
        decayed(lambda n: np.exp(-SLOW * (n + 1)) + np.exp(-FAST * (n + 1))),
        "The sums are read after they have faded once more. The token just before the current one "
        "has not faded yet.",
        WKV,
    ),
    (
        lambda q, k, v: (
            sum(decayed(lambda n, w=w: np.exp(-w * n))(q, k, v) for w in (SLOW, FAST)) / 2
        ),
        "This is the mean of two means, each with a divisor of its own. The two weights of a token "
        "are added in one mean, above and below.",
    ),
    (
        decayed(own=2.0),
        "Next to the past, the current token counts twice. Its bias is 0, so its weight is that of "
        "its key, once; the weight of the past is a sum of two exponentials, not their mean.",
    ),
    (
        decayed(lambda n: np.exp(-(SLOW + FAST) * n)),
        "One sum has faded by both decays. The weights of the two are added, so each needs a sum "
        "of its own.",
    ),
)

# --- How far ahead -----------------------------------------------------------------------------

AHEAD = Exercise("ex-rwkv-ahead", CHAPTER)
NEEDED = 4.8e12 * 0.6e-6  # bytes on their way

AHEAD.value("ahead", math.ceil(NEEDED / (8192 * 2 * 4)), KERNEL, "a whole number").mistakes(
    (math.ceil(NEEDED / (8192 * 4)), "Each token brings a key and a value, of four bytes each."),
    (math.ceil(NEEDED / (8192 * 3 * 4)), "Outputs are stored, and nobody waits for them."),
)
AHEAD.value("threads", NEEDED / (8 * 2 * 2), KERNEL, "a number of threads").mistakes(
    (NEEDED / (8 * 2 * 4), "A number of 16 bits has two bytes."),
    (NEEDED / (2 * 2), "Each thread has eight tokens on their way."),
    (NEEDED / (8 * 2), "Each token brings two numbers, a key and a value."),
)
