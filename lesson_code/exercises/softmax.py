"""Exercises of the chapter on softmax attention."""

import math

import numpy as np

from lesson_code.checks import check_causal, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, transpose
from lesson_code.numpy import attention_weights, softmax_attention

CHAPTER = "Softmax attention and the N×N matrix"
HAND_SECTION = "Three tokens by hand"
FORMULA = "The formula"
SCALE = "Why the scores are divided by √D"
LARGEST = "Why the largest score is subtracted"
MASK = "Looking back only: the causal mask"
TILES = "Never holding the matrix: tiles"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-softmax-hand", CHAPTER)
QUERY = np.array([2.0, 0.0])
SCORES = K @ QUERY


def weights_of(scale):
    return attention_weights(QUERY[None], K, scale=scale)[0]


def factor_of(scale):
    return weights_of(scale).max() / weights_of(scale).min()


HAND.value("scores_4", SCORES, HAND_SECTION, "three numbers").mistakes(
    (SCORES / np.sqrt(2), "These are divided by √D already. Here the scale is 1."),
    (np.exp(SCORES), "These are exponentials of the scores."),
)
HAND.value("weights_4", weights_of(1.0), HAND_SECTION, "three numbers, to three digits").mistakes(
    (
        SCORES / SCORES.sum(),
        "A score of 0 does not make a weight of 0. Exponentiate before you divide.",
    ),
    (np.exp(SCORES), "They do not sum to one: divide by the sum of the row."),
)
HAND.value("factor", factor_of(1.0), HAND_SECTION, "a number, to three digits").mistakes(
    (
        2.0,
        "That is the difference of the scores. A difference of scores is not a quotient of "
        "weights.",
        FORMULA,
    ),
    (1 / factor_of(1.0), "That is the smallest over the largest.", FORMULA),
)
HAND.value("scaled_factor", factor_of(None), HAND_SECTION, "the same with the scale 1/√2").mistakes(
    (
        factor_of(1.0) / np.sqrt(2),
        "The factor itself was divided by √2. The scale divides the scores, before the "
        "exponential.",
    ),
    (factor_of(0.5), "The scores were divided by D. The scale is 1/√D.", SCALE),
)

# --- Attention in code -------------------------------------------------------------------------

CODE = Exercise("ex-softmax-code", CHAPTER)


def long_queries_and_none(rng):
    """The last query is 0: each of its scores is, and none of them is masked."""
    q, k, v = 1e3 * rng.normal(size=(6, 5)), *random_qkv(rng, 6)[1:]
    q[-1] = 0
    return q, k, v


def long_query_against_its_key(rng):
    """The only score that the first token has is far below what may stand for minus infinity."""
    q, k, v = random_qkv(rng, 9, D=4, M=2)
    q *= 1e3
    q[0] = -1e3 * k[0]
    return q, k, v


@CODE.function(MASK, special=(long_queries_and_none, long_query_against_its_key))
def my_attention(q, k, v):
    return softmax_attention(q, k, v, causal=True)


my_attention.passes(check_causal, MASK)


def scores_of(q, k):
    return q @ transpose(k) / np.sqrt(q.shape[-1])


def masked(scores, instead=-np.inf, diagonal=0):
    return np.where(np.tri(scores.shape[-1], k=diagonal, dtype=bool), scores, instead)


def divided(a, axis=-1):
    return a / a.sum(axis=axis, keepdims=True)


def softmax(scores, axis=-1):
    return divided(np.exp(scores - scores.max(axis=-1, keepdims=True)), axis)


STRICT = "No token sees itself: the diagonal belongs to the past, j ≤ i."

my_attention.mistakes(
    (
        lambda q, k, v: softmax_attention(q, k, v, causal=True, scale=1.0),
        "The scale is missing: without it the scores grow with the width.",
        SCALE,
    ),
    (
        softmax_attention,
        "There is no mask: every token looks at all tokens, the later ones too.",
    ),
    (
        lambda q, k, v: np.tril(attention_weights(q, k)) @ v,
        "The mask comes after the division, so that the rows no longer sum to one.",
    ),
    (
        lambda q, k, v: softmax(masked(scores_of(q, k), 0.0)) @ v,
        "The masked scores are 0, and a score of 0 has the exponential 1. Which score has the "
        "exponential 0?",
    ),
    (lambda q, k, v: softmax(masked(scores_of(q, k), diagonal=-1)) @ v, STRICT),
    (
        lambda q, k, v: softmax(masked(scores_of(q, k)), axis=-2) @ v,
        "The columns sum to one. Each output is a mean over keys: the rows have to.",
        FORMULA,
    ),
    (
        lambda q, k, v: divided(np.exp(masked(scores_of(q, k)))) @ v,
        "Scores of 1,000 are not survived. Their exponential is infinite: which number can be "
        "subtracted from a row without changing its weights?",
        LARGEST,
    ),
)

# --- The mask in the wrong place ---------------------------------------------------------------

WRONG_PLACE = Exercise("ex-softmax-mask", CHAPTER)
MASKED_LATE = np.tril(attention_weights(K, K))

WRONG_PLACE.value(
    "row_sums", MASKED_LATE.sum(axis=1), MASK, "three numbers, to three digits"
).mistakes(
    (
        np.ones(3),
        "So it would be if the mask came before the division. Here the division is over, and then "
        "entries are removed.",
    ),
    (MASKED_LATE.sum(axis=0), "These are the sums of the columns.", FORMULA),
)
WRONG_PLACE.truth(
    "causal",
    False,
    MASK,
    "No later value comes in. But write down the denominator of a row: whose keys are in it?",
)


def weights(rng, N, leading=()):
    return attention_weights(*random_qkv(rng, N, leading=leading)[:2])


@WRONG_PLACE.function(MASK, inputs=weights)
def repair(a):
    return divided(np.tril(a))


repair.mistakes(
    (np.tril, "This is what the colleague has: the rows do not sum to one."),
    (lambda a: divided(np.tril(a), axis=-2), "The columns sum to one. The rows have to.", FORMULA),
    (
        lambda a: np.tril(a) / np.tril(a).sum(axis=-1),
        "Entries are divided by sums of other rows: sum over the last axis with keepdims=True, so "
        "that it stays a column.",
        FORMULA,
    ),
    (lambda a: divided(np.tril(a, k=-1)), STRICT),
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
