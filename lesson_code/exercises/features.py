"""Exercises of the chapter on feature maps."""

import math

import numpy as np

from lesson_code.checks import random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import outer, transpose
from lesson_code.numpy import taylor

CHAPTER = "Feature maps"
POLYNOMIALS = "Polynomials: products between entries"
TAYLOR = "Taylor: three terms of the exponential"
HEDGEHOG = "A map that learns: Hedgehog"

# --- Monomials by hand -------------------------------------------------------------------------

HAND = Exercise("ex-features-hand", CHAPTER)
Q, K = np.array([1.0, 2.0]), np.array([2.0, -1.0])
ROOT = math.sqrt(2)


def monomials(x, linear=ROOT, cross=ROOT):
    a, b = x
    return np.array([1.0, linear * a, linear * b, a * a, cross * a * b, b * b])


for name, x in ("features_q", Q), ("features_k", K):
    HAND.value(name, monomials(x), POLYNOMIALS, "six numbers, to three digits").mistakes(
        (
            monomials(x, 1.0, 1.0),
            "The factors are missing: a 2 in the expansion is shared by query and key.",
        ),
        (
            monomials(x, 2.0, 2.0),
            "The whole factor 2 is in the features. Query and key have it both, so that the "
            "product gets 4.",
        ),
        (
            monomials(x, cross=1.0),
            "The product of the two entries has a factor, too: how often does it come up in the "
            "square?",
        ),
    )

HAND.value("similarity", (1 + Q @ K) ** 2, POLYNOMIALS).mistakes(
    ((Q @ K) ** 2, "This is (q · k)². What do the other three features add?"),
    (
        monomials(Q, 1.0, 1.0) @ monomials(K, 1.0, 1.0),
        "These are the products without the factors √2.",
    ),
)

# --- A Taylor map ------------------------------------------------------------------------------

TAYLOR_MAP = Exercise("ex-features-taylor", CHAPTER)


def queries_and_keys(rng, N, leading=(), D=5):
    return random_qkv(rng, N, leading=leading, D=D)[:2]


def similarities(phi):
    return lambda q, k: phi(q) @ transpose(phi(k))


@TAYLOR_MAP.function(TAYLOR, inputs=queries_and_keys, view=similarities)
def my_taylor(x):
    return taylor(x.shape[-1])(x)


def features(*, power=-0.25, factor=1 / ROOT, kept=lambda D: np.ones((D, D)), first=0):
    def phi(x):
        D = x.shape[-1]
        x = x * D**power
        products = (factor * outer(x, x) * kept(D)).reshape(*x.shape[:-1], D * D)
        return np.concatenate([np.ones_like(x[..., :1]), x, products], axis=-1)[..., first:]

    return phi


my_taylor.mistakes(
    (
        features(power=-0.5),
        "Query and key are divided by √D each, so that s is divided twice. Both together should "
        "bring 1/√D.",
    ),
    (
        features(power=0.0),
        "There is no scale: the similarity should be that of s = q · k / √D.",
    ),
    (
        features(factor=1.0),
        "The products of pairs need a factor: what do they add up to without one, and what is "
        "asked?",
    ),
    (
        features(factor=0.5),
        "Query and key both have the factor 1/2, so that s² gets 1/4.",
    ),
    (
        features(kept=lambda D: np.triu(np.ones((D, D)))),
        "Each pair i < j comes once, but needs to count twice: s² has it in both orders.",
    ),
    (
        features(first=1),
        "The constant feature is missing: the series begins with 1.",
    ),
)

# --- The mirror and the bias -------------------------------------------------------------------

MIRROR = Exercise("ex-features-mirror", CHAPTER)


def similarity_to_one(key, bias=0.0):
    """Of the query 1 under Hedgehog with D = 1 and W = 1."""
    return 2 * math.cosh(1 + key + 2 * bias)


MIRROR.value("other_key", -4.0, HEDGEHOG).mistakes(
    (-2.0, "This is the mirror image of the key alone. What is mirrored is q + k."),
    (4.0, "Then q + k is 5, and the key 2 has 3. Which other sum has the same cosh?"),
    (-3.0, "This is the other value of q + k. Which key belongs to it?"),
)
MIRROR.value("ratio", similarity_to_one(2) / similarity_to_one(-2), HEDGEHOG).mistakes(
    (math.exp(4), "This is the ratio of softmax. The similarity of Hedgehog is a cosh."),
    (similarity_to_one(-2) / similarity_to_one(2), "This is the other way round."),
    (1.0, "The two are mirror images for the query 0. Here the query is 1."),
)
MIRROR.value("ratio_biased", similarity_to_one(2, 5) / similarity_to_one(-2, 5), HEDGEHOG).mistakes(
    (similarity_to_one(2) / similarity_to_one(-2), "This is the ratio without a bias."),
    (similarity_to_one(-2, 5) / similarity_to_one(2, 5), "This is the other way round."),
)

# --- Weight on opposite keys -------------------------------------------------------------------

OPPOSITE = Exercise("ex-features-opposite", CHAPTER)


def similarities_and_scores(rng, N, leading=()):
    return rng.exponential(size=(*leading, N, N)), 3 * rng.standard_normal((*leading, N, N))


def share_on(chosen, A):
    """Of each row's weight, among the keys up to the query."""
    A = np.tril(A)
    return (A * chosen).sum(axis=-1) / A.sum(axis=-1)


@OPPOSITE.function(TAYLOR, inputs=similarities_and_scores)
def opposite(A, s):
    return share_on(s < -1, A)


opposite.mistakes(
    (
        lambda A, s: (A * (s < -1)).sum(axis=-1) / A.sum(axis=-1),
        "This counts later keys, too. A letter sees itself and the letters before it.",
    ),
    (
        lambda A, s: (np.tril(A) * (s < -1)).sum(axis=-1),
        "These are similarities. Divide them by the sum of the row.",
    ),
    (
        lambda A, s: share_on(s < 0, A),
        "This takes all negative scores. The parabola turns at −1.",
    ),
    (
        lambda A, s: share_on(s < -1, np.ones_like(A)),
        "This is the share of the keys. Asked is the share of the weight.",
    ),
)
