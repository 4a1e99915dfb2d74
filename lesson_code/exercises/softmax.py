"""Exercises of the chapter on softmax attention."""

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
HEADS = "Two questions need two heads"

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


def weights(rng, N, leading=()):
    return attention_weights(*random_qkv(rng, N, leading=leading)[:2])


@WRONG_PLACE.function(MASK, inputs=weights)
def repair(a):
    return divided(np.tril(a))


repair.mistakes(
    (np.tril, "These are the weights to be repaired: their rows do not sum to one."),
    (lambda a: divided(np.tril(a), axis=-2), "The columns sum to one. The rows have to.", FORMULA),
    (
        lambda a: np.tril(a) / np.tril(a).sum(axis=-1),
        "Entries are divided by sums of other rows: sum over the last axis with keepdims=True, so "
        "that it stays a column.",
        FORMULA,
    ),
    (lambda a: divided(np.tril(a, k=-1)), STRICT),
)

# --- Does the gradient vanish? ------------------------------------------------------------------

GRADIENT = Exercise("ex-softmax-gradient", CHAPTER)


def some_rows(rng, N, leading=()):
    return softmax(rng.standard_normal((*leading, 5, N)))


def derivatives(a):
    return a[..., :, None] * (np.eye(a.shape[-1]) - a[..., None, :])


def size_of(J):
    return np.sqrt((J**2).sum(axis=(-1, -2)))


@GRADIENT.function(SCALE, inputs=some_rows)
def score_gradient(a):
    return size_of(derivatives(a))


score_gradient.mistakes(
    (lambda a: size_of(derivatives(a)) ** 2, "These are sums of squares, without the root."),
    (
        lambda a: np.sqrt(((a * (1 - a)) ** 2).sum(axis=-1)),
        "That is the diagonal alone. A weight changes with the other scores, too.",
    ),
    (
        lambda a: (a**2).sum(axis=-1),
        "Entries of the diagonal are a(1 − a), not those of the outer product.",
    ),
    (
        lambda a: np.sqrt((derivatives(a) ** 2).sum()),
        "That is one number for all rows together. Sum over the last two axes only.",
    ),
)

# --- The weaker noun ---------------------------------------------------------------------------

WEAKER = Exercise("ex-softmax-weaker", CHAPTER)


def numbers_and_shares(rng, N):
    """What values of nouns add to the numbers of words, and the two shares."""
    a, b = rng.uniform(0.5, 1), rng.uniform(0.1, 0.4)
    return rng.standard_normal((N + 3, N + 3)), a, b


def leads_of(f, a, b, pairs=None, others=None):
    """Both sums, with other factors where a mistake has them."""
    n, T = len(f), np.trace(f)
    R = f.sum() - T
    pairs = n - 1 if pairs is None else pairs
    others = n - 2 if others is None else others
    return np.array([(a - b) * (R - pairs * T), others * b * (pairs * T - R)])


@WEAKER.function(HEADS, inputs=numbers_and_shares, unit="")
def leads(f, a, b):
    return leads_of(f, a, b)


leads.mistakes(
    (lambda f, a, b: -leads_of(f, a, b), "These are the sums by which y falls behind."),
    (
        lambda f, a, b: leads_of(f, a, b, others=1),
        "The second sum has one w for each pair. Each pair leaves n − 2 of them.",
    ),
    (
        lambda f, a, b: leads_of(f, a, b, pairs=1),
        "A noun is meant in n − 1 pairs and not meant in n − 1: entries of the diagonal occur more "
        "than once.",
    ),
    (
        lambda f, a, b: leads_of(f, b, a),
        "The shares are exchanged: a belongs to the noun that was meant, x.",
    ),
)
