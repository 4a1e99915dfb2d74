"""Exercises of the chapter on softmax attention."""

from __future__ import annotations

import math

import numpy as np

from lesson_code.checks._calling import random_qkv
from lesson_code.checks.causal import check_causal
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter, truth
from lesson_code.numpy import attention_weights, softmax_attention

HAND_SECTION = "Three tokens by hand"
FORMULA = "The formula"
SCALE = "Why the scores are divided by √D"
LARGEST = "Why the largest score is subtracted"
MASK = "Looking back only: the causal mask"
TILES = "Never holding the matrix: tiles"

# --- By hand -----------------------------------------------------------------------------------

Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
QUERY = np.array([2.0, 0.0])


def weights_of(scale):
    return attention_weights(QUERY[None], K, scale=scale)[0]


def factor_of(scale):
    weights = weights_of(scale)
    return float(weights.max() / weights.min())


HAND = (
    Value(
        name="scores_4",
        reference=lambda: K @ QUERY,
        section=HAND_SECTION,
        form="three numbers",
        mistakes=(
            Mistake(
                lambda: K @ QUERY / np.sqrt(2),
                "These are divided by √D already. Here the scale is 1.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: np.exp(K @ QUERY),
                "These are exponentials of the scores.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: (K + QUERY).sum(axis=1),
                "Query and key were added. A score is the sum of the products of their entries.",
                HAND_SECTION,
            ),
        ),
    ),
    Value(
        name="weights_4",
        reference=lambda: weights_of(1.0),
        section=HAND_SECTION,
        form="three numbers, to three digits",
        mistakes=(
            Mistake(
                lambda: K @ QUERY / (K @ QUERY).sum(),
                "A score of 0 does not make a weight of 0. Exponentiate before you divide.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: np.exp(K @ QUERY),
                "They do not sum to one: divide by the sum of the row.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: weights_of(None),
                "These have the scale 1/√2. Here the scale is 1.",
                HAND_SECTION,
            ),
        ),
    ),
    Value(
        name="factor",
        reference=lambda: factor_of(1.0),
        section=HAND_SECTION,
        form="a number, to three digits",
        mistakes=(
            Mistake(
                2.0,
                "That is the difference of the scores. A difference of scores is not a quotient "
                "of weights.",
                FORMULA,
            ),
            Mistake(lambda: 1 / factor_of(1.0), "That is the smallest over the largest.", FORMULA),
        ),
    ),
    Value(
        name="scaled_factor",
        reference=lambda: factor_of(None),
        section=HAND_SECTION,
        form="the same with the scale 1/√2",
        mistakes=(
            Mistake(
                lambda: factor_of(1.0) / np.sqrt(2),
                "The factor itself was divided by √2. The scale divides the scores, before the "
                "exponential.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: factor_of(0.5),
                "The scores were divided by D. The scale is 1/√D.",
                SCALE,
            ),
            Mistake(lambda: factor_of(1.0), "This is without the scale.", HAND_SECTION),
        ),
    ),
)

# --- Attention in code -------------------------------------------------------------------------


def transpose(x):
    return np.swapaxes(x, -1, -2)


def scores_of(q, k):
    return q @ transpose(k) / np.sqrt(q.shape[-1])


def past(scores, k=0):
    """Which keys a query may look at; the own one too, unless ``k`` is -1."""
    return np.tril(np.ones(scores.shape[-2:], bool), k=k)


def softmax(scores, axis=-1):
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def masked(scores, instead=-np.inf, k=0):
    return np.where(past(scores, k), scores, instead)


def largest_of_all(q, k, v):
    s = masked(scores_of(q, k))
    e = np.exp(s - s.max())
    return e / e.sum(axis=-1, keepdims=True) @ v


def largest_before_the_mask(q, k, v):
    s = scores_of(q, k)
    e = np.exp(masked(s) - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v


def no_largest(q, k, v):
    e = np.exp(masked(scores_of(q, k)))
    return e / e.sum(axis=-1, keepdims=True) @ v


def not_divided(q, k, v):
    s = masked(scores_of(q, k))
    return np.exp(s - s.max(axis=-1, keepdims=True)) @ v


def divided_across(q, k, v, shift_too=False):
    s = masked(scores_of(q, k))
    e = np.exp(s - s.max(axis=-1, keepdims=not shift_too))
    return e / e.sum(axis=-1) @ v


def columns_divided(q, k, v):
    """The largest score of each row is subtracted, as in the text, and then columns are summed."""
    s = masked(scores_of(q, k))
    return divided(np.exp(s - s.max(axis=-1, keepdims=True)), axis=-2) @ v


def scaled_by(factor):
    """Causal attention with the scores multiplied by a function of q and k."""
    return lambda q, k, v: softmax_attention(q * factor(q, k), k, v, causal=True, scale=1.0)


ACROSS = (
    "Entries are divided by sums of other rows: sum over the last axis with keepdims=True, so "
    "that it stays a column."
)
COLUMNS = "The columns sum to one. Each output is a mean over keys: the rows have to."
STRICT = "No token sees itself: the diagonal belongs to the past, j ≤ i."
LARGE = "Scores of 1,000 are not survived."


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


def zeros_masked(q, k, v):
    scores = np.tril(scores_of(q, k))
    return softmax(np.where(scores == 0, -np.inf, scores)) @ v


CODE = (
    Function(
        signature="my_attention(q, k, v)",
        reference=lambda q, k, v: softmax_attention(q, k, v, causal=True),
        section=MASK,
        special=(long_queries_and_none, long_query_against_its_key),
        further=(Further(check_causal, MASK),),
        mistakes=(
            Mistake(
                scaled_by(lambda q, k: 1.0),
                "The scale is missing: without it the scores grow with the width.",
                SCALE,
            ),
            Mistake(
                scaled_by(lambda q, k: 1 / q.shape[-1]),
                "The scores are divided by D. Their typical size is √D.",
                SCALE,
            ),
            Mistake(
                scaled_by(lambda q, k: k.shape[-2] ** -0.5),
                "The scores are divided by the root of the number of keys. What counts is how many "
                "products one score sums up.",
                SCALE,
            ),
            Mistake(
                lambda q, k, v: softmax_attention(q, k, v),
                "There is no mask: every token looks at all tokens, the later ones too.",
                MASK,
            ),
            Mistake(
                lambda q, k, v: np.tril(attention_weights(q, k)) @ v,
                "The mask comes after the division, so that the rows no longer sum to one.",
                MASK,
            ),
            Mistake(
                lambda q, k, v: softmax(masked(scores_of(q, k), 0.0)) @ v,
                "The masked scores are 0, and a score of 0 has the exponential 1. Which score has "
                "the exponential 0?",
                MASK,
            ),
            Mistake(lambda q, k, v: softmax(masked(scores_of(q, k), k=-1)) @ v, STRICT, MASK),
            Mistake(lambda q, k, v: softmax(masked(scores_of(q, k), -1e9, k=-1)) @ v, STRICT, MASK),
            Mistake(
                lambda q, k, v: softmax(masked(scores_of(q, k), k=1)) @ v,
                "Every token also sees the next one: the mask is one diagonal off.",
                MASK,
            ),
            Mistake(
                lambda q, k, v: softmax(transpose(masked(transpose(scores_of(q, k))))) @ v,
                "The wrong half is masked: each token sees itself and what comes later.",
                MASK,
            ),
            Mistake(
                lambda q, k, v: softmax(masked(scores_of(q, k)), axis=-2) @ v,
                COLUMNS,
                FORMULA,
            ),
            Mistake(columns_divided, COLUMNS, FORMULA),
            Mistake(divided_across, ACROSS, FORMULA),
            Mistake(
                lambda q, k, v: divided_across(q, k, v, shift_too=True),
                ACROSS,
                FORMULA,
            ),
            Mistake(
                not_divided,
                "The division by the sum of the row is missing.",
                FORMULA,
            ),
            Mistake(
                lambda q, k, v: softmax_attention(k, q, v, causal=True),
                "Queries and keys are exchanged: row i belongs to query i, column j to key j.",
                FORMULA,
            ),
            Mistake(
                zeros_masked,
                "A score that is 0 by itself is masked, too. Let positions say what is masked, not "
                "values.",
                MASK,
            ),
            Mistake(
                no_largest,
                f"{LARGE} Their exponential is infinite: which number can be subtracted from a row "
                "without changing its weights?",
                LARGEST,
            ),
            Mistake(
                largest_of_all,
                f"{LARGE} The largest score of all is subtracted, and a row far below it becomes "
                "0/0. Each row needs its own.",
                LARGEST,
            ),
            Mistake(
                largest_before_the_mask,
                f"{LARGE} The largest score is taken before the mask, and may be of a later token: "
                "then nothing is left of the row.",
                MASK,
            ),
        ),
    ),
)

# --- The mask in the wrong place ---------------------------------------------------------------


def divided(a, axis=-1):
    return a / a.sum(axis=axis, keepdims=True)


WRONG_PLACE = (
    Value(
        name="row_sums",
        reference=lambda: np.tril(attention_weights(Q, K)).sum(axis=1),
        section=MASK,
        form="three numbers, to three digits",
        mistakes=(
            Mistake(
                lambda: np.ones(3),
                "So it would be if the mask came before the division. Here the division is over, "
                "and then entries are removed.",
                MASK,
            ),
            Mistake(
                lambda: np.tril(attention_weights(Q, K)).sum(axis=0),
                "These are the sums of the columns.",
                FORMULA,
            ),
            Mistake(
                lambda: np.tril(attention_weights(Q, K, scale=1.0)).sum(axis=1),
                "These are the sums without the scale.",
                HAND_SECTION,
            ),
            Mistake(
                lambda: np.triu(attention_weights(Q, K)).sum(axis=1),
                "The wrong half was kept.",
                MASK,
            ),
        ),
    ),
    truth(
        "causal",
        False,
        section=MASK,
        message=(
            "No later value comes in. But write down the denominator of a row: whose keys are "
            "in it?"
        ),
    ),
    Function(
        signature="repair(a)",
        reference=lambda a: divided(np.tril(a)),
        section=MASK,
        inputs=lambda rng, N, leading=(): attention_weights(
            *random_qkv(rng, N, leading=leading)[:2]
        ),
        mistakes=(
            Mistake(
                np.tril,
                "This is what the colleague has: the rows do not sum to one.",
                MASK,
            ),
            Mistake(
                lambda a: divided(np.triu(a)),
                "The wrong half is kept: each token sees itself and what comes later.",
                MASK,
            ),
            Mistake(
                lambda a: divided(np.tril(a), axis=-2),
                "Each column was divided by its sum. The rows have to sum to one.",
                FORMULA,
            ),
            Mistake(
                lambda a: softmax(masked(a)),
                "The exponential was taken a second time: a holds weights, not scores.",
                FORMULA,
            ),
            Mistake(
                lambda a: softmax(np.tril(a)),
                "The exponential was taken a second time: a holds weights, not scores.",
                FORMULA,
            ),
            Mistake(lambda a: np.tril(a) / np.tril(a).sum(axis=-1), ACROSS, FORMULA),
            Mistake(lambda a: divided(np.tril(a, k=-1)), STRICT, MASK),
        ),
    ),
)

# --- Merging two parts -------------------------------------------------------------------------


def gather(q, k, v):
    s = k @ q / np.sqrt(len(q))
    e = np.exp(s - s.max())
    return float(s.max()), float(e.sum()), e @ v


def parts(rng, N, D=4, M=3):
    """The triples of N and of N + 2 keys for one query, one after the other."""
    q, k, v = rng.normal(size=D), *(rng.normal(size=(2 * N + 2, n)) for n in (D, M))
    return *gather(q, k[:N], v[:N]), *gather(q, k[N:], v[N:])


def far_apart(rng):
    mu, total, mixed, *other = parts(rng, 3)
    return -900.0, total, mixed, 900.0, *other[1:]


def one_is_empty(rng):
    return -math.inf, 0.0, np.zeros(3), *parts(rng, 3)[3:]


def merge(a, b, factor=lambda mu, new: np.exp(mu - new), new=max):
    mu = new(a[0], b[0])
    x, y = factor(a[0], mu), factor(b[0], mu)
    return mu, x * a[1] + y * b[1], x * a[2] + y * b[2]


def only_sums_scaled(a, b):
    mu, total, _ = merge(a, b)
    return mu, total, a[2] + b[2]


def only_mixed_scaled(a, b):
    mu, _, mixed = merge(a, b)
    return mu, a[1] + b[1], mixed


def outputs_mixed(a, b):
    mu, total, mixed = merge(a, b)
    return mu, total, mixed / total


def second_scaled_to_first(a, b):
    x = np.exp(b[0] - a[0])
    return max(a[0], b[0]), a[1] + x * b[1], a[2] + x * b[2]


def one_part_scaled(a, b, first):
    mu = max(a[0], b[0])
    x, y = np.exp(a[0] - mu), np.exp(b[0] - mu)
    if first:
        return mu, x * a[1] + b[1], x * a[2] + b[2]
    return mu, a[1] + y * b[1], a[2] + y * b[2]


def second_is_one_key(a, b):
    mu, total, mixed = merge(a, b)
    return mu, total - np.exp(b[0] - mu) * (b[1] - 1), mixed


ONE_PART = (
    "Only one of the parts is scaled to the new maximum. Either of them may have the smaller one."
)

MERGE = (
    Function(
        signature="merge(a, b)",
        reference=merge,
        section=TILES,
        inputs=parts,
        special=(far_apart, one_is_empty),
        view=lambda f: lambda mu_a, l_a, u_a, mu_b, l_b, u_b: f((mu_a, l_a, u_a), (mu_b, l_b, u_b)),
        unit="",
        mistakes=(
            Mistake(
                lambda a, b: merge(a, b, factor=lambda mu, new: 1.0),
                "Sums are added that were scaled differently: each part is relative to the largest "
                "score of its own.",
                TILES,
            ),
            Mistake(
                lambda a, b: merge(a, b, factor=lambda mu, new: np.exp(new - mu)),
                "The factor is upside down: the part with the smaller maximum must be scaled down.",
                TILES,
            ),
            Mistake(
                lambda a, b: merge(a, b, new=min),
                "The smaller maximum is taken. Then the other part is scaled up, and overflows.",
                TILES,
            ),
            Mistake(
                lambda a, b: merge(a, b, factor=lambda mu, new: np.exp(mu)),
                "The factors are exponentials of the maxima themselves, which overflow. Only "
                "differences to the new maximum are safe.",
                TILES,
            ),
            Mistake(
                only_sums_scaled,
                "The sums ℓ are scaled to the new maximum, the mixed values u are not.",
                TILES,
            ),
            Mistake(
                only_mixed_scaled,
                "The mixed values u are scaled to the new maximum, the sums ℓ are not.",
                TILES,
            ),
            Mistake(
                second_scaled_to_first,
                "The second part is scaled to the first, whichever is larger. Both have to be "
                "scaled to the new maximum.",
                TILES,
            ),
            Mistake(lambda a, b: one_part_scaled(a, b, first=True), ONE_PART, TILES),
            Mistake(lambda a, b: one_part_scaled(a, b, first=False), ONE_PART, TILES),
            Mistake(
                second_is_one_key,
                "The second part is treated as one key, whose sum is 1. It has a sum ℓ of its own.",
                TILES,
            ),
            Mistake(
                outputs_mixed,
                "u is divided already. A triple keeps u and ℓ apart, so that it can be merged "
                "again.",
                TILES,
            ),
        ),
    ),
    truth(
        "order_matters",
        False,
        section=TILES,
        message="Exchange a and b in your formulas. Which of them changes?",
    ),
)

EXERCISES = chapter(
    "Softmax attention and the N×N matrix",
    ("ex-softmax-hand", *HAND),
    ("ex-softmax-code", *CODE),
    ("ex-softmax-mask", *WRONG_PLACE),
    ("ex-softmax-merge", *MERGE),
)
