"""Exercises of the chapter on random features."""

import math

import numpy as np

from lesson_code.checks import check_causal
from lesson_code.exercises import Exercise

CHAPTER = "Random features"
AVERAGE = "An average that factors"
OFF = "How wrong is one draw?"
MAXIMUM = "Out of range, and a maximum that looks ahead"

# --- Every roll twice --------------------------------------------------------------------------

MIRRORED = Exercise("ex-random-mirrored", CHAPTER)


def length_and_features(rng, N):
    return float(rng.uniform(0.2, 2.0)), 2 * int(rng.integers(1, 20))


@MIRRORED.function(OFF, inputs=length_and_features, unit="")
def mirrored(y, m):
    return 2 * math.sinh(y * y / 2) / math.sqrt(m)


mirrored.mistakes(
    (
        lambda y, m: math.sqrt(math.expm1(y * y) / m),
        "This is the error of m independent rolls. A roll and its mirror image err together.",
    ),
    (
        lambda y, m: math.sqrt((math.cosh(y * y) - 1) / m),
        "There are m features but only m/2 independent pairs, and the variance of a mean is "
        "divided by the number of what is independent.",
    ),
    (
        lambda y, m: 2 * (math.cosh(y * y) - 1) / m,
        "This is the variance. The error is its root.",
    ),
    (
        lambda y, m: 2 * math.sinh(y / 2) / math.sqrt(m),
        "The square is missing: s is |y|², not |y|.",
    ),
)
MIRRORED.value("short", math.sqrt(-math.expm1(-0.25)), OFF, "a number, to three digits").mistakes(
    (-math.expm1(-0.25), "This is the quotient of the variances. The error is the root."),
    (math.sqrt(-math.expm1(-0.5)), "This takes |y| for |y|²."),
    (1 / math.sqrt(-math.expm1(-0.25)), "Turn the quotient around: the pairs are better."),
)
MIRRORED.value("match", 1.0, OFF, "a number, to three digits").mistakes(
    (0.0, "e^(-42) is almost 0. What is left under the root?"),
)

# --- A coin ------------------------------------------------------------------------------------

COIN = Exercise("ex-random-coin", CHAPTER)

COIN.value("same", (math.e + math.exp(-3)) / 2, AVERAGE, "a number, to three digits").mistakes(
    (math.e, "This is the exact similarity. What does the coin make of it?"),
    (math.cosh(2), "The squares in the exponents are missing: each room divides by its own."),
    (math.e + math.exp(-3), "Both lists are divided by √2, so that the sum is halved."),
)
COIN.value("opposite", 1 / math.e, AVERAGE, "a number, to three digits").mistakes(
    (1.0, "The squares in the exponents are missing: each room divides by its own."),
    (2 / math.e, "Both lists are divided by √2, so that the sum is halved."),
)
COIN.value("coin_coefficient", 1 / 24, AVERAGE, "the coefficient of a power of y").mistakes(
    (1 / 2, "This one the two series share. Go on to the next power."),
    (1 / 8, "This is the Gaussian's."),
)
COIN.value("gaussian_coefficient", 1 / 8, AVERAGE, "the coefficient of the same power").mistakes(
    (1 / 2, "This one the two series share. Go on to the next power."),
    (1 / 24, "This is the coin's."),
    (1 / 4, "The square of y²/2 is divided by 2!."),
)

# --- How many random features ------------------------------------------------------------------

HOW_MANY = Exercise("ex-features-how-many", CHAPTER)


def features_for(y_squared, error=0.1):
    return math.expm1(y_squared) / error**2


def one_length(rng, N):
    return (float(rng.uniform(0.5, 2.5)),)


@HOW_MANY.function(OFF, inputs=one_length, unit="")
def needed(length):
    return features_for((2 * length) ** 2 / math.sqrt(4))


needed.mistakes(
    (
        lambda length: needed.reference(length) + 100,
        "The 1 under the root is missing. Without it even q = k = 0 would have an error.",
    ),
    (
        lambda length: needed.reference(length) / 10,
        "The error goes with the root of m: ten times as exact takes a hundred times as many.",
    ),
    (
        lambda length: features_for((2 * length) ** 2),
        "The scale is missing: y is (q + k) divided by the fourth root of D.",
    ),
    (
        lambda length: features_for(length**2 / math.sqrt(4)),
        "This takes |q| for |q + k|. Here k = q.",
    ),
)
HOW_MANY.value("opposite", 0.0, OFF, "the relative error for m = 16, |q| = 1 and k = -q").mistakes(
    (math.sqrt(math.expm1(2) / 16), "This is the error for k = q. What is q + k now?"),
    (math.sqrt(1 / 16), "The 1 under the root is missing."),
)

# --- Waves -------------------------------------------------------------------------------------

WAVES = Exercise("ex-random-waves", CHAPTER)


def tokens_and_rows(rng, N):
    return rng.normal(size=(N, 5)), rng.normal(size=(7, 5))


def features(x, W, *, power=-0.25, sign=1, factor=1.0, both=True):
    x = x * x.shape[-1] ** power
    grow = factor * np.exp(sign * (x * x).sum(axis=-1, keepdims=True) / 2) / math.sqrt(len(W))
    angles = x @ W.T
    return grow * np.concatenate([np.cos(angles)] + both * [np.sin(angles)], axis=-1)


@WAVES.function(AVERAGE, inputs=tokens_and_rows)
def waves(x, W):
    return features(x, W)


waves.mistakes(
    (lambda x, W: features(x, W, sign=-1), "The square belongs in the exponent with a plus."),
    (lambda x, W: features(x, W, power=0.0), "x' is x divided by the fourth root of D."),
    (
        lambda x, W: features(x, W, power=-0.5),
        "x' is x divided by the fourth root of D, not by √D.",
    ),
    (
        lambda x, W: features(x, W, factor=1 / math.sqrt(2)),
        "There are 2m features, but a cosine and its sine are one draw: divide by √m.",
    ),
)

# --- A maximum that does not look ahead --------------------------------------------------------

LEAK = Exercise("ex-features-leak", CHAPTER)


def exponents(rng, N):
    return tuple(size * rng.normal(size=(N, 4)) for size in (300, 300, 1))


def read_over_time(a, b, v, *, rescale=True):
    """One query after the other; `rescale`: what was written follows the maximum."""
    mu = np.full(a.shape[1], -np.inf)
    S, z = np.zeros((a.shape[1], v.shape[1])), np.zeros(a.shape[1])
    out = np.empty_like(v)
    for t in range(len(a)):
        new = np.maximum(mu, b[t])
        old = np.exp(mu - new) if rescale else np.ones_like(mu)
        write = np.exp(b[t] - new)
        S = old[:, None] * S + write[:, None] * v[t]
        z = old * z + write
        mu = new
        read = np.exp(a[t] + mu - np.max(a[t] + mu))
        out[t] = read @ S / (read @ z)
    return out


@LEAK.function(MAXIMUM, inputs=exponents)
def my_stable(a, b, v):
    return read_over_time(a, b, v)


my_stable.passes(check_causal, MAXIMUM)


@my_stable.mistake("When the maximum rises, what was written before has to shrink with it.")
def never_rescaled(a, b, v):
    return read_over_time(a, b, v, rescale=False)


@my_stable.mistake("A maximum for each key alone takes from each key a factor of its own.")
def one_for_each_key(a, b, v):
    return read_over_time(a, b - b.max(axis=1, keepdims=True), v)


@my_stable.mistake("The state is kept divided by e^μ: the read has to bring the factor back.")
def never_multiplied(a, b, v):
    out = np.empty_like(v)
    for t in range(len(a)):
        scaled = np.exp(b[: t + 1] - b[: t + 1].max(axis=0))
        weights = scaled @ np.exp(a[t] - a[t].max())
        out[t] = weights @ v[: t + 1] / weights.sum()
    return out
