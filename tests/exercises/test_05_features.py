"""Mistakes in the exercises of the chapter on feature maps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lesson_code.checks import check_exercise

POLYNOMIALS = "Polynomials: products between entries"
TAYLOR = "Taylor: three terms of the exponential"
OFF = "How far a single draw is off"
MAXIMUM = "A maximum that looks ahead"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("features_q", [1, 1, 2, 1, 2, 4], "The factors are missing", POLYNOMIALS),
        ("features_q", [1, 2, 4, 1, 4, 4], "The whole factor 2", POLYNOMIALS),
        ("features_q", [1, 1.414, 2.828, 1, 2, 4], "product of the two entries", POLYNOMIALS),
        ("features_k", [1, 2, -1, 4, -2.83, 1], "The single entries", POLYNOMIALS),
        ("features_k", [1, 2, -1, 2.83, -2, 0.707], "the map of 1 + s + s²/2", TAYLOR),
        ("similarity", 0, "This is (q · k)²", POLYNOMIALS),
        ("similarity", -7, "factors 2 in place", POLYNOMIALS),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-features-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise(
        "ex-features-hand",
        features_q=[1, 1.41, 2.83, 1, 2.83, 4],
        features_k=[1, 2.83, -1.41, 4, -2.83, 1],
        similarity=1,
    )


# --- A Taylor map ------------------------------------------------------------------------------


def pairs(x, keep=lambda i, j: True, factor=0.5**0.5, root=4, constant=True, linear=True):
    """One feature after the other, as a list."""
    D = x.shape[-1]
    x = x / D ** (1 / root) if root else x
    features = [np.ones(x.shape[:-1])] if constant else []
    if linear:
        features += [x[..., i] for i in range(D)]
    for i in range(D):
        for j in range(D):
            if keep(i, j):
                features.append(x[..., i] * x[..., j] * factor)
    return np.stack(features, axis=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"root": 2}, "s is divided twice"),
        ({"root": None}, "There is no scale"),
        ({"factor": 1.0}, "need a factor"),
        ({"factor": 0.5}, "s² gets 1/4"),
        ({"factor": 2**0.5}, "makes the products larger"),
        ({"keep": lambda i, j: i <= j}, "needs to count twice"),
        ({"keep": lambda i, j: i > j}, "The squares of the entries are missing"),
        ({"keep": lambda i, j: i == j}, "Only the squares"),
        ({"constant": False}, "begins with 1"),
        ({"linear": False}, "they make the term s"),
    ],
)
def test_taylor(refused, options, words) -> None:
    refused("ex-features-taylor", words, TAYLOR, my_taylor=lambda x: pairs(x, **options))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: pairs(x * x.shape[-1] ** 0.5), "should be divided"),
        (lambda x: pairs(x / len(x) ** 0.25, root=None), "the number of tokens"),
    ],
)
def test_other_scales(refused, fn, words) -> None:
    refused("ex-features-taylor", words, TAYLOR, my_taylor=fn)


def test_right_maps() -> None:
    """In any order, and with each pair once if it counts for two."""
    check_exercise("ex-features-taylor", lambda x: pairs(x)[..., ::-1])

    def once(x):
        D = x.shape[-1]
        i, j = np.triu_indices(D)
        x = x / math.sqrt(math.sqrt(D))
        products = x[..., i] * x[..., j] * np.where(i == j, math.sqrt(0.5), 1.0)
        return np.concatenate([x[..., :1] ** 0, x, products], axis=-1)

    check_exercise("ex-features-taylor", once)


def test_leading_dimensions(refused) -> None:
    def fn(x):
        x = x / x.shape[-1] ** 0.25
        products = np.array([np.outer(row, row).ravel() for row in x]) / math.sqrt(2)
        return np.hstack([np.ones((len(x), 1)), x, products])

    refused("ex-features-taylor", "", TAYLOR, my_taylor=fn)


# --- The others --------------------------------------------------------------------------------


def test_leaks(refused) -> None:
    label = "ex-features-leak"
    refused(label, "Is it a factor of ε", MAXIMUM, epsilon_causal=True)
    refused(label, "Which keys does the maximum", MAXIMUM, per_key_causal=False)
    refused(label, "Do they share", MAXIMUM, per_key_same=np.True_)
    check_exercise(label, epsilon_causal=False, per_key_causal=True, per_key_same=False)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: 100 * math.exp(2 * x * x), "The 1 under the root is missing"),
        (lambda x: 10 * (math.exp(2 * x * x) - 1), "a hundred times as many"),
        (lambda x: 100 * (math.exp(4 * x * x) - 1), "The scale is missing"),
        (lambda x: 100 * (math.exp(x * x) - 1), "half the right one"),
        (lambda x: 100 * (math.exp(x * x / 2) - 1), "takes |q| for |q + k|"),
        (lambda x: 100 * (math.exp(math.sqrt(2) * x) - 1), "This one has |y|"),
        (lambda x: 100 * (math.exp(2 * x) - 1), "The length is not squared"),
        (lambda x: -(-100 * (math.exp(2 * x * x) - 1) // 1), "It is rounded"),
        (lambda x: int(100 * (math.exp(2 * x * x) - 1)), "It is rounded"),
    ],
)
def test_how_many(refused, fn, words) -> None:
    refused("ex-features-how-many", words, OFF, needed=fn)


def test_right_number(refused) -> None:
    label = "ex-features-how-many"
    check_exercise(label, needed=lambda x: 100 * (math.exp(2 * x * x) - 1), opposite=0.0)
    refused(label, "What is q + k now", OFF, opposite=0.632)
    refused(label, "The 1 under the root", OFF, opposite=0.25)
