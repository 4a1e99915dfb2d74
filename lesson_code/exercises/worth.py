"""Exercises of the chapter on what a state is worth."""

import numpy as np

from lesson_code.exercises import Exercise

CHAPTER = "What a state is worth"
RIVAL = "The honest rival"
PRICE = "What it costs"
SHIP = "What the models that ship do"

# --- By hand: the bill for a million tokens ----------------------------------------------------

BILL = Exercise("ex-worth-bill", CHAPTER)
BILL.value("equal", 128, RIVAL, "a number of tokens").mistakes(
    (64, "A number of the state has four bytes, one of the cache two."),
    (384, "A token has a key and a value: 288 numbers."),
    (32, "A number of the state has four bytes, one of the cache two, not the reverse."),
)
TOKEN, STATE, N = 576, 73_728, 1_000_000
STATES, CACHES = 36 * STATE, 12 * TOKEN * N
BILL.value("share", STATES / (STATES + CACHES), SHIP, tolerance=0.05).mistakes(
    (36 / 48, "That is their share of the layers. By now a cache is much larger than a state."),
    (STATES / (STATES + 4 * CACHES), "Only twelve of the 48 layers have a cache."),
    (STATE / (STATE + CACHES), "That is one state. The model has 36."),
    (STATES / 2 / (STATES / 2 + CACHES), "A number of a state has four bytes, not two."),
)
BILL.value("shared", 512, RIVAL, "a number of tokens").mistakes(
    (128, "That is one head with a cache of its own. Here four states stand beside one cache."),
    (32, "Four heads share one cache, so it grows four times more slowly, not faster."),
)

# --- In code: the least error of any pattern ---------------------------------------------------

PATTERN = Exercise("ex-worth-pattern", CHAPTER)


def pattern_inputs(rng, N):
    return rng.normal(size=(N + 2, N)), max(1, N // 3)


def powers(A):
    return np.linalg.svd(A, compute_uv=False) ** 2


@PATTERN.function(PRICE, inputs=pattern_inputs)
def least_error_of(A, C):
    return powers(A)[C:].sum() / powers(A).sum()


least_error_of.mistakes(
    (
        lambda A, C: powers(A)[:C].sum() / powers(A).sum(),
        "That is the share that the state keeps. The error is the rest.",
    ),
    (
        lambda A, C: np.sqrt(powers(A)[C:]).sum() / np.sqrt(powers(A)).sum(),
        "Power goes with the squares of the singular values.",
    ),
    (
        lambda A, C: powers(A)[C:].sum(),
        "The error is relative: divide by the power of the whole block.",
    ),
    (
        lambda A, C: 1 - C / len(A),
        "This is the error of looking up every token. A may be another pattern.",
    ),
)
