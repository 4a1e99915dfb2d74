"""Exercises of the chapter on the bracket trick."""

import numpy as np

from lesson_code import costs
from lesson_code.checks import check_linear_cost
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, transpose
from lesson_code.numpy import elu_plus_one, identity, linear_attention, relu, softmax_attention

CHAPTER = "The bracket trick"
SOFTMAX = "Why softmax needs its matrix"
PRODUCT = "A similarity that is a product"
LINEAR = "Linear attention"
OPERATIONS = "Counting operations"
CROSSING = "Where the lines cross"
MEMORY = "Counting memory"
SHARPNESS = "What is lost: sharpness"
MEASURED = "One measurement"

# The values of red, round and cherry. Later chapters have others.
V = np.array([[10.0, 0.0], [0.0, 20.0], [30.0, 50.0]])

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-bracket-hand", CHAPTER)
QUERY = np.array([2.0, 1.0])
SCORES_OF_QUERY = K @ QUERY
SIMILARITIES = elu_plus_one(K) @ elu_plus_one(QUERY)

HAND.value("similarities", SIMILARITIES, PRODUCT, "three numbers").mistakes(
    (
        SCORES_OF_QUERY,
        "These are the scores of the bare vectors. Take the features of query and keys first.",
    ),
    (elu_plus_one(K) @ QUERY, "The keys have their features, the query has not."),
    (K @ elu_plus_one(QUERY), "The query has its features, the keys have not."),
    (SIMILARITIES / np.sqrt(2), "A similarity is the product of the features, without a scale."),
)
HAND.value("output_4", SIMILARITIES @ V / SIMILARITIES.sum(), LINEAR, "two numbers").mistakes(
    (SIMILARITIES @ V, "This is not divided by anything yet."),
    (
        SIMILARITIES @ V / 3,
        "Divided by the number of tokens. It is the sum of the similarities.",
    ),
    (
        SIMILARITIES @ V / 5,
        "Divided by the sum of the query's features. It is their product with z.",
    ),
    (
        SCORES_OF_QUERY @ V / SCORES_OF_QUERY.sum(),
        "These are the scores of the bare vectors. Take the features of query and keys first.",
        PRODUCT,
    ),
    (np.exp(SCORES_OF_QUERY) @ V / np.exp(SCORES_OF_QUERY).sum(), "These are softmax's weights."),
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

SUMS_OF_VALUES = elu_plus_one(K).T @ V
ENDS = SUMS_OF_VALUES / elu_plus_one(K).sum(axis=0)[:, None]

HAND.value("ends", ENDS, SHARPNESS, "two rows of two numbers").mistakes(
    (SUMS_OF_VALUES, "These are the rows of S. Divide each by its entry of z."),
    (
        SUMS_OF_VALUES / 3,
        "Divided by the number of tokens. Divide each row of S by its entry of z.",
    ),
    (ENDS[::-1], "The two points are right. The first row is that of the first feature."),
    (
        K.T @ V / K.sum(axis=0)[:, None],
        "This is made of the bare keys. Take their features first.",
        PRODUCT,
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
        MEASURED,
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

# --- A budget for features ---------------------------------------------------------------------

BUDGET = Exercise("ex-bracket-gain", CHAPTER)


def taylor_width(D):
    return 1 + D + D * (D + 1) // 2


def widest(operations):
    """The largest C for which so many operations per C and token are below 4,096 (D + M)."""
    return (4_096 * 256 - 1) // operations


BUDGET.value("widest", widest(2 * 129), CROSSING, "a number of features").mistakes(
    (
        widest(2 * 128),
        "The normalizer is missing: z is written and read as well, so it is M + 1 and not M.",
        OPERATIONS,
    ),
    (
        widest(129),
        "The state is written and read. Only one of the two is counted.",
        OPERATIONS,
    ),
    (
        widest(2 * 129) + 1,
        "With so many features the crossing lies above 4,096.",
    ),
    (
        widest(4 * 129),
        "The matrix takes two products with N² in them, the scores and the sums. Only one is "
        "counted.",
        OPERATIONS,
    ),
)
BUDGET.value(
    "gain", costs.crossover(64, 64, C=taylor_width(64)), CROSSING, "the first N that gains"
).mistakes(
    (
        costs.crossover(64, 64, C=taylor_width(64)) - 1,
        "At this N the matrix still needs fewer operations.",
    ),
    (
        costs.crossover(128, 128, C=taylor_width(128)),
        "That is for heads of width 128.",
    ),
    (
        costs.crossover(64, 64, C=1 + 64 + 64**2),
        "The products of two different entries are counted twice: entry 1 times 2 is 2 times 1.",
    ),
)
BUDGET.value(
    "states", 16 * taylor_width(64) * 64, MEMORY, "how many numbers in 16 states"
).mistakes(
    (taylor_width(64) * 64, "That is one head. There are sixteen."),
    (8 * taylor_width(128) * 128, "That is for the 8 heads of width 128."),
    (16 * taylor_width(64) * 65, "z is counted as a part of the state. Here it is left out."),
    (16 * 64 * 64, "S has a row for each feature, not for each entry of a key."),
)

# --- Entries of other tables -------------------------------------------------------------------

TABLE = Exercise("ex-bracket-table", CHAPTER)
LONG, WIDE = 10_000, 64
QUADRATIC_STEP = LONG * (WIDE + WIDE)
LINEAR_STEP = costs.linear_operations(1, WIDE, WIDE).total

TABLE.value("time_factor", 2, OPERATIONS, "a number").mistakes(
    (WIDE, "One score takes D operations, and one sum takes M for each value. Compare the two."),
)
TABLE.value("softmax_step", QUADRATIC_STEP, OPERATIONS, "how many operations").mistakes(
    (LONG * WIDE, "The scores and the weighted sums take as many each. One of the two is missing."),
    (LONG * QUADRATIC_STEP, "That is the whole text. One token has one query."),
)
TABLE.value("linear_step", LINEAR_STEP, OPERATIONS, "how many operations").mistakes(
    (2 * WIDE * WIDE, "Writing and reading z are missing."),
    (LINEAR_STEP // 2, "A step writes and reads. One of the two is missing."),
)
TABLE.value("memory_factor", WIDE, MEMORY, "a number").mistakes(
    (2 * WIDE, "N²D counts the products of the scores alone; the matrix has N² numbers."),
)

# --- How sharp it can be -----------------------------------------------------------------------

CEILING = Exercise("ex-bracket-ceiling", CHAPTER)


def features(rng, N, *, C=4):
    return (rng.uniform(0.1, 3.0, size=(N, C)),)


@CEILING.function(SHARPNESS, inputs=features, unit="")
def ceilings(features):
    return (features / features.sum(axis=0)).max(axis=1)


ceilings.mistakes(
    (
        lambda features: (features / features.sum(axis=1, keepdims=True)).max(axis=1),
        "Divided by the sum of each key's features. z sums over the keys.",
    ),
    (
        lambda features: features.max(axis=1) / features.sum(),
        "Each feature has its own sum over the keys.",
    ),
    (
        lambda features: (features / features.sum(axis=0)).mean(axis=1),
        "A query need not mix the rows evenly. Which share of them is best for this key?",
    ),
    (
        lambda features: (features / features.sum(axis=0)).sum(axis=1),
        "The shares of the rows sum to one, so no query takes all of every row.",
    ),
)

RELU = relu(K)

CEILING.value(
    "relu_ceilings", (RELU / RELU.sum(axis=0)).max(axis=1), SHARPNESS, "three numbers"
).mistakes(
    (
        (elu_plus_one(K) / elu_plus_one(K).sum(axis=0)).max(axis=1),
        "These are the ceilings with elu + 1.",
    ),
    (
        (RELU / RELU.sum(axis=1, keepdims=True)).max(axis=1),
        "Divided by the sum of each key's features. z sums over the keys.",
    ),
)
