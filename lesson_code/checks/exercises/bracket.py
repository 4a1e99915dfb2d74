"""Exercises of the chapter on the bracket trick."""

from __future__ import annotations

import math

import numpy as np

from lesson_code import costs
from lesson_code.checks.exercises._declare import Function, Further, Mistake, Value, chapter
from lesson_code.checks.linear_cost import check_linear_cost
from lesson_code.numpy import elu_plus_one, identity, linear_attention, softmax_attention

PRODUCT = "A similarity that is a product"
SOFTMAX = "Why softmax holds on to its matrix"
LINEAR = "Linear attention"
OPERATIONS = "Counting operations"
CROSSING = "Where the lines cross"
MEMORY = "Counting memory"
LIMITS = "Where the trick does not help"

# --- By hand -----------------------------------------------------------------------------------

Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
QUERY = np.array([2.0, 1.0])


def output_of(similarities):
    return similarities @ V / similarities.sum()


def operations(count):
    """One query against three tokens of width 2, in the terms of a count function."""
    terms = count(3, 2, 2)._asdict()
    return {name: terms[name] / 3 for name in terms}


PER_QUERY = operations(costs.quadratic_operations) | operations(costs.linear_operations)


def per_query(*terms):
    return sum(PER_QUERY[term] for term in terms)


HAND = (
    Value(
        name="similarities",
        reference=lambda: K @ QUERY,
        section=PRODUCT,
        form="three numbers",
        mistakes=(
            Mistake(
                lambda: elu_plus_one(K) @ elu_plus_one(QUERY),
                "These are similarities under elu + 1. Here the features are the tokens "
                "themselves.",
                PRODUCT,
            ),
            Mistake(
                lambda: K @ QUERY / np.sqrt(2),
                "There is no scale here: a similarity is the product of the features.",
                PRODUCT,
            ),
            Mistake(
                lambda: np.exp(K @ QUERY),
                "There is no exponential here: a similarity is the product of the features.",
                PRODUCT,
            ),
        ),
    ),
    Value(
        name="output_4",
        reference=lambda: output_of(K @ QUERY),
        section=LINEAR,
        form="two numbers",
        mistakes=(
            Mistake(lambda: K @ QUERY @ V, "This is not divided by anything yet.", LINEAR),
            Mistake(
                lambda: K @ QUERY @ V / 3,
                "Divided by the number of tokens, or the sum of the query: both are 3. It is "
                "the sum of the similarities.",
                LINEAR,
            ),
            Mistake(
                lambda: K @ QUERY @ V / K.sum(),
                "Divided by the sum of z. The divisor is the product of the query and z.",
                LINEAR,
            ),
            Mistake(
                lambda: output_of(np.exp(K @ QUERY)),
                "These are the weights of softmax.",
                LINEAR,
            ),
        ),
    ),
    Value(
        name="with_scores",
        reference=lambda: per_query("scores", "weighted_sum"),
        section=OPERATIONS,
        form="how many operations from the similarities",
        mistakes=(
            Mistake(
                lambda: per_query("scores"),
                "The scores and the weighted sums take as many each. Only one of the two is "
                "counted.",
                OPERATIONS,
            ),
            Mistake(
                lambda: 3 * per_query("scores", "weighted_sum"),
                "These are all three queries.",
                OPERATIONS,
            ),
            Mistake(
                lambda: 2 * per_query("scores", "weighted_sum"),
                "A multiplication with the addition that follows it is one operation.",
                OPERATIONS,
            ),
            Mistake(
                lambda: per_query("scores", "weighted_sum") + 3,
                "The sum of the row is left out of this count.",
                OPERATIONS,
            ),
        ),
    ),
    Value(
        name="with_state",
        reference=lambda: per_query("read_state", "read_normalizer"),
        section=OPERATIONS,
        form="how many operations from S and z",
        mistakes=(
            Mistake(
                lambda: per_query("read_state"),
                "The product of the query and z is missing.",
                OPERATIONS,
            ),
            Mistake(
                lambda: (
                    per_query("read_state", "read_normalizer")
                    + 3 * per_query("write_state", "write_normalizer")
                ),
                "The writes are counted. They are done once, for all queries.",
                OPERATIONS,
            ),
            Mistake(
                lambda: 2 * per_query("read_state", "read_normalizer"),
                "That is twice too much: count reads only, and a multiplication with its addition "
                "as one.",
                OPERATIONS,
            ),
        ),
    ),
)

# --- Linear attention in code ------------------------------------------------------------------


def transpose(x):
    return np.swapaxes(x, -1, -2)


def attention(q, k, v, map_q=elu_plus_one, map_k=elu_plus_one):
    q, k = map_q(q), map_k(k)
    return q @ (transpose(k) @ v) / (q @ k.sum(axis=-2)[..., None])


def attention_parts(q, k, v):
    """Numerators (..., N, M) and divisors (..., N)."""
    q, k = elu_plus_one(q), elu_plus_one(k)
    return q @ (transpose(k) @ v), (q @ k.sum(axis=-2)[..., None])[..., 0]


def divided_by(divisor):
    """What the query reads from S, divided by something of the features q and k."""

    def wrong(q, k, v):
        q, k = elu_plus_one(q), elu_plus_one(k)
        return q @ (transpose(k) @ v) / divisor(q, k)

    return wrong


def divided_before(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    return q @ (transpose(k) @ v / k.sum(axis=-2)[..., None])


def read_transposed(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    return q @ (transpose(v) @ k) / (q @ k.sum(axis=-2)[..., None])


CODE = (
    Function(
        signature="my_attention(q, k, v)",
        reference=lambda q, k, v: linear_attention(q, k, v),
        section=LINEAR,
        further=(Further(check_linear_cost, MEMORY),),
        mistakes=(
            Mistake(
                divided_by(lambda q, k: 1.0),
                "The normalizer is missing: each output has to be divided by the product of its "
                "query and z.",
                LINEAR,
            ),
            Mistake(
                divided_by(lambda q, k: k.sum(axis=-1, keepdims=True)),
                "z sums over the features of each key. It is the sum of the keys, over positions.",
                LINEAR,
            ),
            Mistake(
                lambda q, k, v: attention_parts(q, k, v)[0] / attention_parts(q, k, v)[1],
                "The divisors are a row where a column is needed: each output has one of its own.",
                LINEAR,
            ),
            Mistake(
                divided_before,
                "S is divided by z before the query is there. First the query reads both, then "
                "divide.",
                LINEAR,
            ),
            Mistake(
                divided_by(lambda q, k: k.sum(axis=(-1, -2), keepdims=True)),
                "The divisor is the sum of z, the same for all queries. It is the product of the "
                "query and z.",
                LINEAR,
            ),
            Mistake(
                divided_by(lambda q, k: q.sum(axis=-1, keepdims=True)),
                "The divisor is the sum of the query's features. z has to be in it.",
                LINEAR,
            ),
            Mistake(
                divided_by(lambda q, k: float(k.shape[-2])),
                "The output is divided by the number of tokens. The divisor is the sum of the "
                "similarities, the product of the query and z.",
                LINEAR,
            ),
            Mistake(
                lambda q, k, v: attention(q, k, v, identity, identity),
                "The feature map is missing: similarities may be negative, and the output is no "
                "mean.",
                PRODUCT,
            ),
            Mistake(
                lambda q, k, v: attention(q, k, v, map_q=identity),
                "The feature map is applied to the keys, but not to the queries.",
                PRODUCT,
            ),
            Mistake(
                lambda q, k, v: attention(q, k, v, map_k=identity),
                "The feature map is applied to the queries, but not to the keys.",
                PRODUCT,
            ),
            Mistake(
                lambda q, k, v: attention(q, k, v, *2 * (lambda x: elu_plus_one(x) - 1,)),
                "This is elu without the 1: features and similarities can be negative.",
                PRODUCT,
            ),
            Mistake(
                lambda q, k, v: softmax_attention(q, k, v),
                "This is softmax attention, with its matrix.",
                SOFTMAX,
            ),
            Mistake(
                lambda q, k, v: linear_attention(q, k, v, causal=True),
                "This one is causal. Here every query sees all positions.",
                LIMITS,
            ),
            Mistake(
                read_transposed,
                "S is transposed: it has a row for each feature and a column for each entry of a "
                "value.",
                LINEAR,
            ),
        ),
    ),
    Function(
        signature="einsum_operations(N, C, M)",
        reference=lambda N, C, M: N * N * C * M,
        section=OPERATIONS,
        inputs=lambda rng, N: (N, *rng.integers(2, 40, size=2).tolist()),
        unit="",
        mistakes=(
            Mistake(
                lambda N, C, M: N * N * (C + M),
                "That is the quadratic order, in two products. A single loop over everything has "
                "no product in between to store.",
                OPERATIONS,
            ),
            Mistake(
                lambda N, C, M: 2 * N * C * M,
                "That is the linear order. It writes S first; the single sum has no S.",
                OPERATIONS,
            ),
            Mistake(
                lambda N, C, M: N * C * M,
                "There are two indices that run over tokens.",
                OPERATIONS,
            ),
            Mistake(
                lambda N, C, M: N * N * C,
                "This leaves out the entries of the values.",
                OPERATIONS,
            ),
            Mistake(
                lambda N, C, M: N * N * M,
                "This leaves out the features.",
                OPERATIONS,
            ),
            Mistake(
                lambda N, C, M: 2 * N * N * C * M,
                "A multiplication with the addition that follows it is one operation.",
                OPERATIONS,
            ),
        ),
    ),
)

# --- Two wrong normalizers ---------------------------------------------------------------------

S, Z = K.T @ V, K.sum(axis=0)
WITH_ELU = "elu + 1 is still applied. Here the features are the tokens themselves."


def row_sums(q, k):
    return k.sum(axis=-1)[..., None]


NORMALIZER = (
    Value(
        name="first_output",
        reference=lambda: Q @ S / K.sum(axis=1)[:, None],
        section=LINEAR,
        form="three rows of two numbers",
        mistakes=(
            Mistake(
                lambda: Q @ S / (Q @ Z)[:, None],
                "That is the right normalizer. The first function does not sum over the keys.",
                LINEAR,
            ),
            Mistake(
                lambda: Q @ (S / Z[:, None]),
                "That is what the second function computes.",
                LINEAR,
            ),
            Mistake(lambda: Q @ S, "This is not divided by anything yet.", LINEAR),
            Mistake(lambda: divided_by(row_sums)(Q, K, V), WITH_ELU, LINEAR),
        ),
    ),
    Value(
        name="second_output",
        reference=lambda: Q @ (S / Z[:, None]),
        section=LINEAR,
        form="three rows of two numbers",
        mistakes=(
            Mistake(
                lambda: Q @ S / (Q @ Z)[:, None],
                "That is the right normalizer. Divide the rows of S first, and then let each query "
                "add them up.",
                LINEAR,
            ),
            Mistake(
                lambda: Q @ S / K.sum(axis=1)[:, None],
                "That is what the first function computes.",
                LINEAR,
            ),
            Mistake(lambda: Q @ S, "This is not divided by anything yet.", LINEAR),
            Mistake(lambda: divided_before(Q, K, V), WITH_ELU, LINEAR),
        ),
    ),
)

# --- When a layer gains ------------------------------------------------------------------------

NARROW = 128
TAYLOR = 1 + 128 + 128 * 129 // 2
EQUAL = (
    "At this N the quadratic order still needs as few operations, or fewer. (z is counted, too.)"
)
Z_LEFT_OUT = "z is counted as a part of the state. Here it is left out."


def gains(C):
    return costs.crossover(128, 128, C=C)


def cache_like(C):
    return costs.cache_passes_state(128, 128, C=C)


def gains_mistakes(C):
    return (
        Mistake(lambda: gains(C) - 1, EQUAL, CROSSING),
        Mistake(
            lambda: math.floor(2 * C * 129 / 128) + 1,
            "Softmax has two products with N² in them, the scores and the weighted sums. Only one "
            "is counted.",
            OPERATIONS,
        ),
        Mistake(
            lambda: math.floor(C * 129 / 256) + 1,
            "The state is written and read. Only one of the two is counted.",
            OPERATIONS,
        ),
    )


def cache_mistakes(C):
    return (
        Mistake(
            lambda: math.ceil(C * 128 / 128),
            "The cache has keys and values. Only one of the two is counted.",
            MEMORY,
        ),
        Mistake(lambda: math.ceil(C * 129 / 256), Z_LEFT_OUT, MEMORY),
        Mistake(
            lambda: gains(C),
            "That is where the operations cross. Here count numbers that are kept.",
            MEMORY,
        ),
    )


def all_products(what):
    """What comes out with every product of two entries as a feature, in both orders."""
    return Mistake(
        lambda: what(1 + 128 + 128**2),
        "The products of two different entries are counted twice: entry 1 times 2 is 2 times 1.",
        CROSSING,
    )


GAIN = (
    Value(
        name="narrow_gain",
        reference=lambda: gains(NARROW),
        section=CROSSING,
        form="the first N that gains, C = 128",
        mistakes=gains_mistakes(NARROW),
    ),
    Value(
        name="taylor_gain",
        reference=lambda: gains(TAYLOR),
        section=CROSSING,
        form="the first N that gains, with the Taylor map",
        mistakes=(
            *gains_mistakes(TAYLOR),
            all_products(gains),
            Mistake(
                lambda: math.floor(2 * TAYLOR * 128 / 256) + 1,
                "The normalizer is missing: z is written and read, too.",
                OPERATIONS,
            ),
        ),
    ),
    Value(
        name="narrow_cache",
        reference=lambda: cache_like(NARROW),
        section=MEMORY,
        form="the first number of tokens, C = 128",
        mistakes=cache_mistakes(NARROW),
    ),
    Value(
        name="taylor_cache",
        reference=lambda: cache_like(TAYLOR),
        section=MEMORY,
        form="the first number of tokens, with the Taylor map",
        mistakes=(
            *cache_mistakes(TAYLOR),
            all_products(cache_like),
            Mistake(
                lambda: cache_like(TAYLOR) - 1,
                "So many tokens take a little less room than the state.",
                MEMORY,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "The bracket trick",
    ("ex-bracket-hand", *HAND),
    ("ex-bracket-code", *CODE),
    ("ex-bracket-normalizer", *NORMALIZER),
    ("ex-bracket-gain", *GAIN),
)
