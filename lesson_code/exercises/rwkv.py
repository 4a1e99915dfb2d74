"""Exercises of the chapter on AFT and RWKV-4."""

from __future__ import annotations

import math

import numpy as np

from lesson_code.exercises._old import Function, Mistake, Value, chapter, truth
from lesson_code.numpy import aft_full, aft_simple, wkv

WEIGHTS = "Weights without queries"
BIAS = "A bias for each pair of tokens"
WKV = "WKV: the past fades"
RANGE = "Keeping the exponentials in range"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# --- The slip, by hand -------------------------------------------------------------------------

VALUES = (10.0, 30.0, 50.0)


def three_reads(w, forget, stored=1.0):
    """The outputs for k = u = 0 when the sums are multiplied by `forget` for the read, and once
    more by `stored` for the write."""
    a, b, out = 0.0, 0.0, []
    for v in VALUES:
        out.append((forget * a + v) / (forget * b + 1))
        a, b = stored * math.exp(-w) * a + v, stored * math.exp(-w) * b + 1
    return out


SLIP = (
    Value(
        name="slipped",
        reference=lambda: three_reads(math.log(4), 1 / 4),
        section=WKV,
        form="three numbers",
        mistakes=(
            Mistake(
                lambda: three_reads(math.log(4), 1.0),
                "These are the right outputs. The slip reads the sums after they have decayed.",
                WKV,
            ),
            Mistake(
                lambda: three_reads(math.log(2), 1 / 2),
                "These are the outputs of the slip for a decay of ln 2. Here a step leaves a "
                "quarter.",
                WKV,
            ),
            Mistake(
                lambda: three_reads(math.log(4), 1 / 4, stored=1 / 4),
                "The sums have faded twice from one token to the next: once for the read and once "
                "more for the write. What is stored fades once.",
                WKV,
            ),
        ),
    ),
    Value(
        name="bonus",
        reference=lambda: math.log(4),
        section=WKV,
        mistakes=(
            Mistake(
                4.0,
                "That is the weight which the current token then has. Its bonus is the logarithm.",
                WKV,
            ),
            Mistake(
                lambda: -math.log(4),
                "The sign is wrong. Next to a past that has faded, does the current token count "
                "more or less?",
                WKV,
            ),
            Mistake(0.0, "With this bonus the right recurrence gives the right outputs.", WKV),
        ),
    ),
    Value(
        name="loaded",
        reference=lambda: 1 - math.log(4),
        section=WKV,
        mistakes=(
            Mistake(
                lambda: 1 + math.log(4),
                "That makes it worse: the code already acts as if the bonus were larger than the "
                "one it is given.",
                WKV,
            ),
            Mistake(1.0, "With this bonus the outputs of that code are wrong.", WKV),
            Mistake(
                lambda: -math.log(4),
                "It is what has to be added to the bonus. The loaded one is u = 1.",
                WKV,
            ),
        ),
    ),
)

# --- A mean that is none -----------------------------------------------------------------------


def running(x):
    return np.cumsum(x, axis=-2)


def library(q, k, v):
    weights = np.exp(k)
    return sigmoid(q) * running(weights * v / running(weights))


def three(rng, N, leading=(), D=5):
    return tuple(rng.normal(size=(*leading, N, D)) for _ in range(3))


INSIDE = (
    Value(
        name="found_by",
        reference=lambda: "check_same",
        section=WEIGHTS,
        form='"check_causal" or "check_same"',
        mistakes=(
            Mistake(
                "check_causal",
                "That check changes later tokens and looks for changes before them. Does any "
                "divisor here contain a later key?",
                WEIGHTS,
            ),
        ),
    ),
    Function(
        signature="mended(q, k, v)",
        reference=lambda q, k, v: aft_simple(q, k, v, causal=True),
        section=WEIGHTS,
        inputs=three,
        mistakes=(
            Mistake(
                library,
                "Each term is still divided inside the sum, by the total up to itself.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: aft_simple(q, k, v),
                "The sums run over all tokens. This is the form that is not causal.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: (
                    sigmoid(q) * running(np.exp(k) * v) / np.exp(k).sum(axis=-2, keepdims=True)
                ),
                "The divisor is the total of all tokens, later ones too. Each position has a total "
                "of its own.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: aft_simple(np.full_like(q, 50.0), k, v, causal=True),
                "The gate is missing: the sigmoid of the query comes after the mean.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: q * running(np.exp(k) * v) / running(np.exp(k)),
                "The mean is multiplied by the query itself. The gate is its sigmoid.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: sigmoid(q) * running(np.exp(k) * v),
                "The weighted sum is not divided by the sum of the weights.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: (
                    sigmoid(q) * np.cumsum(np.exp(k) * v, axis=-1) / np.cumsum(np.exp(k), axis=-1)
                ),
                "The sums run over the channels. Time is the axis -2.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: running(sigmoid(q) * np.exp(k) * v) / running(np.exp(k)),
                "Every value has gone through the gate of its own token. The gate belongs to the "
                "token that reads: it multiplies the mean.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: sigmoid(q) * running(k * v) / running(k),
                "The keys themselves are taken as weights. A key is the logarithm of a weight.",
                WEIGHTS,
            ),
            Mistake(
                lambda q, k, v: (
                    sigmoid(q)
                    * running(np.exp(k) * v)
                    / np.arange(1.0, k.shape[-2] + 1)[:, np.newaxis]
                ),
                "The divisor is the number of tokens. A weighted mean is divided by the sum of its "
                "weights.",
                WEIGHTS,
            ),
        ),
    ),
)

# --- One maximum for both ----------------------------------------------------------------------


def recurrence(k, v, w, u, *, fade_to_read=False, fade=True, store_bonus=False, read_after=False):
    """WKV without a maximum, and with what may be wrong in it."""
    a, b, out = np.zeros_like(k[0]), np.zeros_like(k[0]), np.empty_like(v)
    factor = np.exp(-w)
    for t in range(len(k)):
        own, new = np.exp(k[t] + u), np.exp(k[t] + (u if store_bonus else 0))
        later = (factor if fade else 1) * a + new * v[t], (factor if fade else 1) * b + new
        if read_after:
            out[t] = later[0] / later[1]
        else:
            past = factor if fade_to_read else 1
            out[t] = (past * a + own * v[t]) / (past * b + own)
        a, b = later
    return out


def not_rescaled(k, v, w, u):
    """One maximum, but the stored sums keep the old one when it grows."""
    a = b = np.zeros_like(k[0])
    mu, out = np.full_like(k[0], -1e38), np.empty_like(v)
    for t in range(len(k)):
        m = np.maximum(mu, u + k[t])
        past, own, new = np.exp(mu - m), np.exp(u + k[t] - m), np.exp(k[t] - m)
        out[t] = (past * a + own * v[t]) / (past * b + own)
        a, b, mu = np.exp(-w) * a + new * v[t], np.exp(-w) * b + new, m
    return out


def never_raised(k, v, w, u):
    """The same, when the write multiplies by the right factor but the maximum is not kept."""
    a = b = np.zeros_like(k[0])
    mu, out = np.full_like(k[0], -1e38), np.empty_like(v)
    for t in range(len(k)):
        m = np.maximum(mu, u + k[t])
        past, own, new = np.exp(mu - m), np.exp(u + k[t] - m), np.exp(k[t] - m)
        out[t] = (past * a + own * v[t]) / (past * b + own)
        a, b = np.exp(-w) * past * a + new * v[t], np.exp(-w) * past * b + new
    return out


def wkv_inputs(rng, N, D=5):
    k, v = rng.normal(size=(2, N, D))
    return k, v, rng.uniform(0.1, 2.0, D), rng.normal(size=D)


MAXIMUM = (
    truth(
        "wrong",
        False,
        section=RANGE,
        message=(
            "What is taken off every exponent, above and below the fraction bar, multiplies "
            "both by the same number."
        ),
    ),
    Function(
        signature="one_maximum(k, v, w, u)",
        reference=lambda k, v, w, u: wkv(k, v, w, u),
        section=RANGE,
        inputs=wkv_inputs,
        mistakes=(
            Mistake(
                lambda k, v, w, u: recurrence(k, v, w, u, store_bonus=True),
                "The bonus has no effect: it is missing in the read, or it is written into the "
                "sums as well, and cancels. A token is read with it and written without.",
                WKV,
            ),
            Mistake(
                lambda k, v, w, u: recurrence(k, v, w, u, fade_to_read=True),
                "The sums are read decayed. The token just before the current one carries no decay "
                "yet.",
                WKV,
            ),
            Mistake(
                lambda k, v, w, u: recurrence(k, v, -w, u),
                "The past grows instead of fading: the decay has the wrong sign.",
                WKV,
            ),
            Mistake(
                lambda k, v, w, u: recurrence(k, v, w, u, fade=False),
                "Nothing fades: the write forgets the decay w.",
                WKV,
            ),
            Mistake(
                lambda k, v, w, u: recurrence(k, v, w, u, read_after=True),
                "The sums are read after the token has been written, and so without the bonus and "
                "with a past that has faded.",
                WKV,
            ),
            Mistake(
                not_rescaled,
                "When the maximum grows, what is stored is divided by the old one still. Multiply "
                "it by e to the power of the difference as well as by the decay.",
                RANGE,
            ),
            Mistake(
                never_raised,
                "The new maximum is not kept for the next token.",
                RANGE,
            ),
        ),
    ),
    truth(
        "harm",
        True,
        section=RANGE,
        message="Look at the write of the very first token: how far is its key above this maximum?",
    ),
)

# --- Two decays in one channel -----------------------------------------------------------------

DECAYS = (0.05, 1.0)


def with_bias(q, k, v, decay=lambda n: np.exp(-DECAYS[0] * n) + np.exp(-DECAYS[1] * n), own=0.0):
    """Causal AFT-full whose weight at t - 1 - i = n is decay(n), and e^own on the diagonal."""
    t = np.arange(len(q))[:, None]
    n = np.maximum(t - 1 - t.T, 0)
    bias = np.where(t == t.T, own, np.log(decay(n)))
    return aft_full(q, k, v, bias, causal=True)


def mean_of_means(q, k, v):
    means = [with_bias(q, k, v, lambda n, w=w: np.exp(-w * n)) for w in DECAYS]
    return np.mean(means, axis=0)


def one_channel(rng, N):
    return tuple(rng.normal(size=(3, N, 1)))


RANK = (
    Value(
        name="rank",
        reference=lambda: np.linalg.matrix_rank(
            sum(np.exp(-w * np.subtract.outer(np.arange(3, 6), np.arange(3))) for w in DECAYS)
        ),
        section=BIAS,
        mistakes=(
            Mistake(1, "That is the rank with one decay. The sum of two is not a product.", BIAS),
            Mistake(
                3,
                "Each of the two exponentials is a number of t times a number of i. How many such "
                "products are added?",
                BIAS,
            ),
            Mistake(
                4,
                "That would be the number of things carried for the mean. A block is a matrix for "
                "one of its two sums.",
                BIAS,
            ),
        ),
    ),
    Value(
        name="carried",
        reference=lambda: 2 * len(DECAYS),
        section=BIAS,
        mistakes=(
            Mistake(2, "The mean has a numerator and a denominator, and both fade.", BIAS),
            Mistake(
                3,
                "The denominator fades as the numerator does, so it takes as many numbers.",
                BIAS,
            ),
        ),
    ),
    Function(
        signature="two_decays(q, k, v)",
        reference=with_bias,
        section=BIAS,
        inputs=one_channel,
        mistakes=(
            Mistake(
                lambda q, k, v: with_bias(
                    q,
                    k,
                    v,
                    lambda n: np.exp(-DECAYS[0] * (n + 1)) + np.exp(-DECAYS[1] * (n + 1)),
                ),
                "The sums are read after they have faded once more. The token just before the "
                "current one has not faded yet.",
                WKV,
            ),
            Mistake(
                lambda q, k, v: with_bias(
                    q,
                    k,
                    v,
                    lambda n: np.exp(-DECAYS[0] * (n + 1)) + np.exp(-DECAYS[1] * (n + 1)),
                    own=math.log(2),
                ),
                "The sums are read after the token has been written, into both of them, and after "
                "the past has faded. Read first, then write.",
                WKV,
            ),
            Mistake(
                mean_of_means,
                "This is the mean of two means, each with a divisor of its own. The two weights of "
                "a token are added in one mean, above and below.",
                BIAS,
            ),
            Mistake(
                lambda q, k, v: with_bias(q, k, v, own=math.log(2)),
                "Next to the past, the current token counts twice. Its bias is 0, so its weight is "
                "that of its key, once; the weight of the past is a sum of two exponentials, not "
                "their mean.",
                BIAS,
            ),
            Mistake(
                lambda q, k, v: with_bias(q, k, v, lambda n: np.exp(-sum(DECAYS) * n)),
                "One sum has faded by both decays. The weights of the two are added, so each needs "
                "a sum of its own.",
                BIAS,
            ),
            Mistake(
                lambda q, k, v: with_bias(q, k, v, lambda n: np.exp(-sum(DECAYS) / 2 * n)),
                "One sum has faded with the mean of the decays. It cannot fade fast at first and "
                "slowly later.",
                BIAS,
            ),
            Mistake(
                lambda q, k, v: with_bias(np.full_like(q, 50.0), k, v),
                "The gate is missing: the sigmoid of the query comes after the mean.",
                WEIGHTS,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "AFT and RWKV-4",
    ("ex-rwkv-slip", *SLIP),
    ("ex-rwkv-inside", *INSIDE),
    ("ex-rwkv-maximum", *MAXIMUM),
    ("ex-rwkv-rank", *RANK),
)
