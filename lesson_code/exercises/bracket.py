"""Exercises of the chapter on the bracket trick."""

import math

import numpy as np

from lesson_code import costs
from lesson_code.checks import check_linear_cost
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V, transpose
from lesson_code.numpy import elu_plus_one, identity, linear_attention, softmax_attention

CHAPTER = "The bracket trick"
PRODUCT = "A similarity that is a product"
SOFTMAX = "Why softmax holds on to its matrix"
LINEAR = "Linear attention"
OPERATIONS = "Counting operations"
CROSSING = "Where the lines cross"
MEMORY = "Counting memory"
LIMITS = "Where the trick does not help"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-bracket-hand", CHAPTER)
QUERY = np.array([2.0, 1.0])
SIMILARITIES = K @ QUERY

HAND.value("similarities", SIMILARITIES, PRODUCT, "three numbers").mistakes(
    (
        elu_plus_one(K) @ elu_plus_one(QUERY),
        "These are similarities under elu + 1. Here the features are the tokens themselves.",
    ),
    (SIMILARITIES / np.sqrt(2), "A similarity is the product of the features, without a scale."),
)
HAND.value("output_4", SIMILARITIES @ V / SIMILARITIES.sum(), LINEAR, "two numbers").mistakes(
    (SIMILARITIES @ V, "This is not divided by anything yet."),
    (
        SIMILARITIES @ V / 3,
        "Divided by the number of tokens, or the sum of the query: both are 3. It is the sum of "
        "the similarities.",
    ),
    (np.exp(SIMILARITIES) @ V / np.exp(SIMILARITIES).sum(), "These are the weights of softmax."),
)

# One query against three tokens of width 2, whose writes are done once for all.
QUADRATIC, LINEAR_COST = costs.quadratic_operations(3, 2, 2), costs.linear_operations(3, 2, 2)
SCORES, SUMS = QUADRATIC.scores // 3, QUADRATIC.weighted_sum // 3
READ_S, READ_Z = LINEAR_COST.read_state // 3, LINEAR_COST.read_normalizer // 3

HAND.value(
    "with_scores", SCORES + SUMS, OPERATIONS, "how many operations from the similarities"
).mistakes(
    (SCORES, "The scores and the weighted sums take as many each. One of the two is missing."),
    (2 * (SCORES + SUMS), "A multiplication with the addition that follows it is one operation."),
)
HAND.value("with_state", READ_S + READ_Z, OPERATIONS, "how many operations from S and z").mistakes(
    (READ_S, "The product of the query and z is missing."),
    (
        READ_S + READ_Z + LINEAR_COST.write_state + LINEAR_COST.write_normalizer,
        "The writes are counted. They are done once, for all queries.",
    ),
)

# --- Linear attention in code ------------------------------------------------------------------

CODE = Exercise("ex-bracket-code", CHAPTER)


@CODE.function(LINEAR)
def my_attention(q, k, v):
    return linear_attention(q, k, v)


my_attention.passes(check_linear_cost, MEMORY)


def divided_by(divisor):
    """What the query reads from S, divided by something of the features q and k."""

    def wrong(q, k, v):
        q, k = elu_plus_one(q), elu_plus_one(k)
        return q @ (transpose(k) @ v) / divisor(q, k)

    return wrong


def divided_before(q, k, v):
    return q @ (transpose(k) @ v / k.sum(axis=-2)[..., None])


my_attention.mistakes(
    (
        divided_by(lambda q, k: 1.0),
        "The normalizer is missing: each output has to be divided by the product of its query and "
        "z.",
    ),
    (
        divided_by(lambda q, k: k.sum(axis=-1, keepdims=True)),
        "z sums over the features of each key. It is the sum of the keys, over positions.",
    ),
    (
        lambda q, k, v: divided_before(elu_plus_one(q), elu_plus_one(k), v),
        "S is divided by z before the query is there. First the query reads both, then divide.",
    ),
    (
        lambda q, k, v: linear_attention(q, k, v, feature_map=identity),
        "The feature map is missing: similarities may be negative, and the output is no mean.",
        PRODUCT,
    ),
    (softmax_attention, "This is softmax attention, with its matrix.", SOFTMAX),
    (
        lambda q, k, v: linear_attention(q, k, v, causal=True),
        "This one is causal. Here every query sees all positions.",
        LIMITS,
    ),
)


def length_and_widths(rng, N):
    return N, *rng.integers(2, 40, size=2).tolist()


@CODE.function(OPERATIONS, inputs=length_and_widths, unit="")
def einsum_operations(N, C, M):
    return N * N * C * M


einsum_operations.mistakes(
    (
        lambda N, C, M: N * N * (C + M),
        "That is the quadratic order, in two products. A single loop over everything has no "
        "product in between to store.",
    ),
    (
        lambda N, C, M: 2 * N * C * M,
        "That is the linear order. It writes S first; the single sum has no S.",
    ),
    (lambda N, C, M: N * C * M, "There are two indices that run over tokens."),
)

# --- Two wrong normalizers ---------------------------------------------------------------------

NORMALIZER = Exercise("ex-bracket-normalizer", CHAPTER)
S, Z = K.T @ V, K.sum(axis=0)
FIRST, SECOND, RIGHT = (
    K @ S / K.sum(axis=1)[:, None],
    divided_before(K, K, V),
    K @ S / (K @ Z)[:, None],
)

NORMALIZER.value("first_output", FIRST, LINEAR, "three rows of two numbers").mistakes(
    (RIGHT, "That is the right normalizer. The first function does not sum over the keys."),
    (SECOND, "That is what the second function computes."),
    (K @ S, "This is not divided by anything yet."),
)
NORMALIZER.value("second_output", SECOND, LINEAR, "three rows of two numbers").mistakes(
    (
        RIGHT,
        "That is the right normalizer. Divide the rows of S first, and then let each query add "
        "them up.",
    ),
    (FIRST, "That is what the first function computes."),
    (K @ S, "This is not divided by anything yet."),
)

# --- When a layer gains ------------------------------------------------------------------------

GAIN = Exercise("ex-bracket-gain", CHAPTER)
NARROW, TAYLOR, BOTH_ORDERS = 128, 1 + 128 + 128 * 129 // 2, 1 + 128 + 128**2
COUNTED_TWICE = (
    "The products of two different entries are counted twice: entry 1 times 2 is 2 times 1."
)


def gains(C):
    return costs.crossover(128, 128, C=C)


def cache_like(C):
    return costs.cache_passes_state(128, 128, C=C)


def gain(name, C, form):
    return GAIN.value(name, gains(C), CROSSING, f"the first N that gains, {form}").mistakes(
        (
            gains(C) - 1,
            "At this N the quadratic order still needs as few operations, or fewer. (z is counted, "
            "too.)",
        ),
        (
            2 * C * 129 // 128 + 1,
            "Softmax has two products with N² in them, the scores and the weighted sums. Only one "
            "is counted.",
            OPERATIONS,
        ),
        (
            C * 129 // 256 + 1,
            "The state is written and read. Only one of the two is counted.",
            OPERATIONS,
        ),
    )


def cache(name, C, form):
    return GAIN.value(name, cache_like(C), MEMORY, f"the first number of tokens, {form}").mistakes(
        (C, "The cache has keys and values. Only one of the two is counted."),
        (
            math.ceil(C * 129 / 256),
            "z is counted as a part of the state. Here it is left out.",
        ),
        (gains(C), "That is where the operations cross. Here count numbers that are kept."),
    )


gain("narrow_gain", NARROW, "C = 128")
gain("taylor_gain", TAYLOR, "with the Taylor map").mistakes((gains(BOTH_ORDERS), COUNTED_TWICE))
cache("narrow_cache", NARROW, "C = 128")
cache("taylor_cache", TAYLOR, "with the Taylor map").mistakes(
    (cache_like(BOTH_ORDERS), COUNTED_TWICE, CROSSING)
)
