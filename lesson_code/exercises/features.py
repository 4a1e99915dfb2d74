"""Exercises of the chapter on feature maps."""

from __future__ import annotations

import math

import numpy as np

from lesson_code.checks._calling import random_qkv
from lesson_code.exercises._old import Function, Mistake, Value, chapter, truth
from lesson_code.numpy import polynomial, taylor

POLYNOMIALS = "Polynomials: products between entries"
TAYLOR = "Taylor: three terms of the exponential"
OFF = "How far a single draw is off"
MAXIMUM = "A maximum that looks ahead"

# --- Monomials by hand -------------------------------------------------------------------------

Q, K = np.array([1.0, 2.0]), np.array([2.0, -1.0])
ROOT = math.sqrt(2)


def monomials(x, linear=ROOT, cross=ROOT):
    a, b = x
    return np.array([1.0, linear * a, linear * b, a * a, cross * a * b, b * b])


def features_mistakes(x):
    return (
        Mistake(
            lambda: monomials(x, 1.0, 1.0),
            "The factors are missing: a 2 in the expansion is shared by query and key.",
            POLYNOMIALS,
        ),
        Mistake(
            lambda: monomials(x, 2.0, 2.0),
            "The whole factor 2 is in the features. Query and key have it both, so that the "
            "product gets 4.",
            POLYNOMIALS,
        ),
        Mistake(
            lambda: monomials(x, cross=1.0),
            "The product of the two entries has a factor, too: how often does it come up in the "
            "square?",
            POLYNOMIALS,
        ),
        Mistake(
            lambda: monomials(x, linear=1.0),
            "The single entries have a factor, too: how often do they come up in the square?",
            POLYNOMIALS,
        ),
        Mistake(
            lambda: monomials(x) / np.where(np.arange(6) < 1, 1.0, ROOT),
            "This is the map of 1 + s + s²/2. Here the similarity is (1 + q · k)².",
            TAYLOR,
        ),
    )


HAND = (
    *(
        Value(
            name=name,
            reference=lambda x=x: monomials(x),
            section=POLYNOMIALS,
            form="six numbers, to three digits",
            mistakes=features_mistakes(x),
        )
        for name, x in (("features_q", Q), ("features_k", K))
    ),
    Value(
        name="similarity",
        reference=lambda: round(float(polynomial(2, 2)(Q) @ polynomial(2, 2)(K)), 9),
        section=POLYNOMIALS,
        form="a number",
        mistakes=(
            Mistake(
                lambda: (Q @ K) ** 2,
                "This is (q · k)². What do the other three features add?",
                POLYNOMIALS,
            ),
            Mistake(
                lambda: monomials(Q, 1.0, 1.0) @ monomials(K, 1.0, 1.0),
                "These are the products without the factors √2.",
                POLYNOMIALS,
            ),
            Mistake(
                lambda: monomials(Q, 2.0, 2.0) @ monomials(K, 2.0, 2.0),
                "These are the products with factors 2 in place of √2.",
                POLYNOMIALS,
            ),
        ),
    ),
)

# --- A Taylor map ------------------------------------------------------------------------------


def my_taylor(x, power=-0.25, factor=1 / ROOT, kept=lambda D: np.ones((D, D)), parts=(0, 1, 2)):
    scaled = x * x.shape[-1] ** power
    products = factor * scaled[..., :, None] * scaled[..., None, :] * kept(x.shape[-1])
    every = (np.ones_like(x[..., :1]), scaled, products.reshape(*x.shape[:-1], -1))
    return np.concatenate([every[i] for i in parts], axis=-1)


def scaled_in_part(x):
    products = (x[..., :, None] * x[..., None, :] / ROOT).reshape(*x.shape[:-1], -1)
    ones = np.ones_like(x[..., :1])
    return np.concatenate([ones, x * x.shape[-1] ** -0.25, products], axis=-1)


def scaled_by_tokens(x):
    return my_taylor(x * x.shape[0] ** -0.25, power=0.0)


def with_options(**options):
    return lambda x: my_taylor(x, **options)


def similarities(phi):
    return lambda q, k: phi(q) @ np.swapaxes(phi(k), -1, -2)


FACTOR = (
    "The products of pairs need a factor: what do they add up to without one, and what is asked?"
)

TAYLOR_MAP = (
    Function(
        signature="my_taylor(x)",
        reference=lambda x: taylor(x.shape[-1])(x),
        section=TAYLOR,
        inputs=lambda rng, N, leading=(), D=5: random_qkv(rng, N, leading=leading, D=D)[:2],
        view=similarities,
        mistakes=(
            Mistake(
                with_options(power=-0.5),
                "Query and key are divided by √D each, so that s is divided twice. Both together "
                "should bring 1/√D.",
                TAYLOR,
            ),
            Mistake(
                with_options(power=0.0),
                "There is no scale: the similarity should be that of s = q · k / √D.",
                TAYLOR,
            ),
            Mistake(
                with_options(power=0.25),
                "x is multiplied by the fourth root of D where it should be divided.",
                TAYLOR,
            ),
            Mistake(
                scaled_by_tokens,
                "The scale is made of the number of tokens. D is the length of the last axis.",
                TAYLOR,
            ),
            Mistake(
                scaled_in_part,
                "The products of pairs are made of x, not of x': s² needs the scale twice.",
                TAYLOR,
            ),
            Mistake(with_options(factor=1.0), FACTOR, TAYLOR),
            Mistake(
                with_options(factor=ROOT),
                "The factor makes the products larger. What do they add up to without one, and "
                "what is asked?",
                TAYLOR,
            ),
            Mistake(
                with_options(factor=0.5),
                "Query and key both have the factor 1/2, so that s² gets 1/4.",
                TAYLOR,
            ),
            Mistake(
                with_options(kept=lambda D: np.triu(np.ones((D, D)))),
                "Each pair i < j comes once, but needs to count twice: s² has it in both orders.",
                TAYLOR,
            ),
            Mistake(
                with_options(kept=lambda D: np.triu(np.ones((D, D)), k=1)),
                "The squares of the entries are missing, and pairs come in one order only.",
                TAYLOR,
            ),
            Mistake(
                with_options(kept=np.eye),
                "Only the squares of the entries are there. s² also has the products of different "
                "ones.",
                TAYLOR,
            ),
            Mistake(
                with_options(parts=(1, 2)),
                "The constant feature is missing: the series begins with 1.",
                TAYLOR,
            ),
            Mistake(
                with_options(parts=(0, 2)),
                "The entries themselves are missing: they make the term s.",
                TAYLOR,
            ),
        ),
    ),
)

# --- An epsilon and a maximum ------------------------------------------------------------------

LEAK = (
    truth(
        "epsilon_causal",
        False,
        section=MAXIMUM,
        message="The maximum is a factor of all exponentials, and cancels. Is it a factor of ε?",
    ),
    truth(
        "per_key_causal",
        True,
        section=MAXIMUM,
        message="Which keys does the maximum of one key depend on?",
    ),
    truth(
        "per_key_same",
        False,
        section=MAXIMUM,
        message=(
            "What cancels from the quotient is a factor that all keys share. Do they share "
            "this one?"
        ),
    ),
)

# --- How many random features ------------------------------------------------------------------


def needed(length, D=4, error=0.1):
    return math.expm1((2 * length) ** 2 / math.sqrt(D)) / error**2


HOW_MANY = (
    Function(
        signature="needed(length)",
        reference=needed,
        section=OFF,
        inputs=lambda rng, N: (float(rng.uniform(0.5, 2.5)),),
        unit="",
        mistakes=(
            Mistake(
                lambda length: needed(length) + 100,
                "The 1 under the root is missing. Without it even q = k = 0 would have an error.",
                OFF,
            ),
            Mistake(
                lambda length: needed(length) / 10,
                "The error goes with the root of m: ten times as exact takes a hundred times as "
                "many.",
                OFF,
            ),
            Mistake(
                lambda length: needed(length, D=1),
                "The scale is missing: y is (q + k) divided by the fourth root of D.",
                OFF,
            ),
            Mistake(
                lambda length: needed(length, D=16),
                "The exponent |y|² is half the right one: |q + k|² has no cross term, or D "
                "has the wrong power.",
                OFF,
            ),
            Mistake(
                lambda length: needed(length / 2),
                "This takes |q| for |q + k|. Here k = q.",
                OFF,
            ),
            Mistake(
                lambda length: math.expm1(2 * length / math.sqrt(2)) * 100,
                "The exponent is |y|². This one has |y|.",
                OFF,
            ),
            Mistake(
                lambda length: math.expm1(2 * length) * 100,
                "The length is not squared: the exponent is |y|².",
                OFF,
            ),
            *(
                Mistake(
                    lambda length, rounded=rounded: float(rounded(needed(length))),
                    "It is rounded. Return the number as it comes from the formula.",
                    OFF,
                )
                for rounded in (math.ceil, math.floor, round)
            ),
        ),
    ),
    Value(
        name="opposite",
        reference=lambda: math.sqrt(math.expm1(abs(1.0 - 1.0) ** 2 / 2) / 16),
        section=OFF,
        form="the relative error for m = 16, |q| = 1 and k = -q",
        mistakes=(
            Mistake(
                lambda: math.sqrt(math.expm1(2**2 / 2) / 16),
                "This is the error for k = q. What is q + k now?",
                OFF,
            ),
            Mistake(
                lambda: math.sqrt(math.exp(0) / 16),
                "The 1 under the root is missing.",
                OFF,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Feature maps",
    ("ex-features-hand", *HAND),
    ("ex-features-taylor", *TAYLOR_MAP),
    ("ex-features-leak", *LEAK),
    ("ex-features-how-many", *HOW_MANY),
)
