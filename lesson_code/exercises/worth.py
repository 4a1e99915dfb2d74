"""Exercises of the chapter on what a state is worth."""

import numpy as np

from lesson_code import results
from lesson_code.exercises import Exercise

CHAPTER = "What a state is worth"
RIVAL = "The honest rival"
BUYS = "What it buys"
PRICE = "What it costs"
KINDS = "Three kinds of questions"
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

# --- By hand: the smallest state for each question ---------------------------------------------

ROWS = Exercise("ex-worth-rows", CHAPTER)
MESSAGES, PEOPLE = 10_000, 50
LEAST = np.array([1, PEOPLE, PEOPLE, 1, MESSAGES])
ROWS.value("rows", LEAST, KINDS, "five whole numbers").mistakes(
    (
        [1, 1, PEOPLE, 1, MESSAGES],
        "In the second, whose messages count is only known when all have been read.",
    ),
    (
        [1, PEOPLE, MESSAGES, 1, MESSAGES],
        "In the third, an older message of the same person is never asked for: forget it.",
    ),
    (
        [1, PEOPLE, PEOPLE, MESSAGES, MESSAGES],
        "In the fourth the number is known beforehand, so a gate can wait for it.",
    ),
    (
        [PEOPLE, PEOPLE, PEOPLE, 1, MESSAGES],
        "In the first, nobody but Ada will be asked about.",
    ),
    (
        [1, PEOPLE, PEOPLE, 1, 1],
        "In the fifth, any of the messages may be asked for at the end.",
        PRICE,
    ),
)
ROWS.value("late", 4 * MESSAGES * 64 / (2 * 128 * MESSAGES), RIVAL).mistakes(
    (0.5, "A number of the state has four bytes, one of the cache two."),
    (2.0, "A token has a key and a value in the cache, so 128 numbers."),
)
ROWS.value("early", 4 * MESSAGES * 64 / (2 * 128 * 100), RIVAL).mistakes(
    (1.0, "The state has its rows from the first token on. The cache has 100 tokens by then."),
    (50.0, "A number of the state has four bytes, one of the cache two."),
)

# --- By hand: thirty-two readers ---------------------------------------------------------------

READERS = Exercise("ex-worth-readers", CHAPTER)
BATCH, LENGTH, WIDTH = 32, 4096, 1024
READERS.value("half", 6 * WIDTH // BATCH, BUYS, "a number of tokens").mistakes(
    (6 * WIDTH, "That is for one reader. Here 32 caches stand beside the weights of one layer."),
    (6 * WIDTH * BATCH, "More readers share the weights, so caches weigh more, not less."),
)
READERS.value("predicted", 1 + BATCH * LENGTH / (6 * WIDTH), BUYS).mistakes(
    (1 + LENGTH / (6 * WIDTH), "That is for one reader."),
    (BATCH * (1 + LENGTH / (6 * WIDTH)), "The readers share the weights: they are read once."),
    (BATCH * LENGTH / (6 * WIDTH), "The weights are read beside the caches."),
)


def steps(memory):
    """Seconds of a step of one reader and of all 32."""
    rows = {row["B"]: row["seconds"][memory] for row in results.load("readers")["rows"]}
    return rows[1], rows[BATCH]


READERS.value("weights", lambda: steps("none")[1] / steps("none")[0], BUYS).mistakes(
    (lambda: steps("state")[1] / steps("state")[0], "That is the layer with a state."),
    (lambda: steps("KV cache")[1] / steps("KV cache")[0], "That is the layer with a cache."),
    (lambda: steps("KV cache")[1] / steps("none")[1], "Compare 32 readers with one, of one kind."),
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

# --- In code: ask before you read --------------------------------------------------------------

ASKED = Exercise("ex-worth-asked", CHAPTER)


def asked_inputs(rng, N, *, D=5, M=3):
    return rng.normal(size=D), rng.normal(size=(N, D)), rng.normal(size=(N, M))


def large_scores(rng):
    q, k, v = asked_inputs(rng, 20)
    return 60 * q, 60 * k, v


def rising_scores(rng):
    q, k, v = asked_inputs(rng, 20)
    return q, k[np.argsort(k @ q)], v


@ASKED.function(KINDS, inputs=asked_inputs, special=(large_scores, rising_scores))
def asked_before(q, k, v):
    scores = k @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


@asked_before.mistake("When a larger score comes, the sums so far have to shrink with it.", RIVAL)
def never_rescaled(q, k, v):
    largest, total, read = -np.inf, 0.0, np.zeros(v.shape[1])
    for key, value in zip(k, v, strict=True):
        score = key @ q / np.sqrt(len(q))
        largest = max(largest, score)
        weight = np.exp(score - largest)
        total, read = total + weight, read + weight * value
    return read / total


asked_before.mistakes(
    (
        lambda q, k, v: np.exp(k @ q / np.sqrt(len(q))) @ v,
        "Softmax divides by the sum of the weights.",
    ),
    (
        lambda q, k, v: asked_before.reference(q * np.sqrt(len(q)), k, v),
        "The scores are divided by the root of D.",
    ),
    (
        lambda q, k, v: k @ q / np.sqrt(len(q)) @ v,
        "That is linear attention: the score itself is the weight, without an exponential.",
    ),
)
ASKED.value("most", MESSAGES * 128 // 66, RIVAL, "a number of questions").mistakes(
    (MESSAGES * 128 // 64, "Beside the sum of 64 values, two more numbers are kept."),
    (MESSAGES * 128 // 65, "The largest score so far has to be kept as well."),
    (MESSAGES * 64 // 66, "The cache has a key and a value for each token."),
)

# --- In code: one number of numbers, three shapes ----------------------------------------------

SHAPES = Exercise("ex-worth-shapes", CHAPTER)
SHAPES.value("bounds", 1 - np.array([64, 16, 16]) / 256, PRICE, "three numbers").mistakes(
    (
        1 - np.array([64, 256, 16]) / 256,
        "The rows of all heads would count if all heads stored the same values. Here each stores "
        "a part of its own.",
    ),
    (np.array([64, 16, 16]) / 256, "That is the share that is kept. The rest is lost."),
)


def shapes_inputs(rng, N, *, D=5, M=3):
    k = rng.normal(size=(2, N, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return k, rng.normal(size=(2, 12, M)), rng.integers(12, size=N)


def distances(k, values, stored):
    """From each read to each value, up to the square of the read, (H, n, choices)."""
    read = k @ (k.swapaxes(1, 2) @ values[:, stored])
    return (values**2).sum(axis=-1)[:, None] - 2 * read @ values.swapaxes(1, 2)


@SHAPES.function(PRICE, inputs=shapes_inputs)
def nearest(k, values, stored):
    return distances(k, values, stored).sum(axis=0).argmin(axis=-1)


nearest.mistakes(
    (
        lambda k, values, stored: distances(k, values, stored)[0].argmin(axis=-1),
        "That is the answer of the first head. Each head has a part of the value: add up.",
    ),
    (
        lambda k, values, stored: distances(k, values, stored).argmin(axis=-1),
        "Each head answers for itself. They are to answer together, with one sum of distances.",
    ),
    (
        lambda k, values, stored: np.einsum(
            "hnd,hjd,hjm,hcm->nc", k, k, values[:, stored], values
        ).argmax(axis=-1),
        "The largest product is not the smallest distance: long values win too often.",
    ),
    (
        lambda k, values, stored: stored,
        "That is what was stored. Answer with the value that is nearest to the read.",
    ),
)
