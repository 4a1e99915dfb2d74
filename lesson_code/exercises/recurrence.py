"""Exercises of the chapter on the recurrent and the parallel form."""

import numpy as np

from lesson_code.checks import check_causal, check_streaming
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V, outer, read, transpose
from lesson_code.numpy import elu_plus_one, identity, linear_attention

CHAPTER = "Recurrent = parallel"
GLOBAL = "The global bracket sees the future"
RECURRENCE = "One small step per token"
MASKED = "All positions at once"
MEAN = "Different functions, and forms of one function"
CHUNKS = "Between one token and all of them"
HINGE = "Train in parallel, run step by step"
UNROLLED = "Which recurrences can be cut?"
STEPS = "Linear steps make a linear step"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-recurrence-hand", CHAPTER)
ALL = K @ np.array([2.0, 1.0])  # the query's similarities to the three tokens
ROW, STRICT = ALL * [1, 1, 0], ALL * [1, 0, 0]

HAND.value("row", ROW, MASKED, "three numbers, row 2 of the masked matrix").mistakes(
    (ALL, "The row is not masked: token 2 must not see token 3."),
    (STRICT, "The own token is masked as well. The mask keeps the diagonal, j ≤ t."),
)
HAND.value("plain", ROW @ V, RECURRENCE, "two numbers, o_2 without the normalizer").mistakes(
    (
        ALL @ V,
        "This is read from the last state, or the unmasked row: token 3 is in it.",
        GLOBAL,
    ),
    (STRICT @ V, "This is read before token 2 is written to the state."),
)
HAND.value("normalized", ROW @ V / ROW.sum(), MEAN, "two numbers").mistakes(
    (
        ROW @ V / ALL.sum(),
        "The divisor counts token 3, which the sum above it does not: it must end at t, too.",
    ),
    (ROW @ V / 2, "Divided by the number of tokens. The divisor is the sum of the row."),
)

# --- How long a chunk? -------------------------------------------------------------------------

CHUNK = Exercise("ex-recurrence-chunk", CHAPTER)

CHUNK.value("double", 48, CHUNKS, "a number of tokens").mistakes(
    (24, "This is where one product, reading or writing, costs as much as the triangles."),
    (96, "The triangles are computed as whole squares, L by L, and masked afterwards."),
)
CHUNK.value("steps", 100, CHUNKS, "a number").mistakes(
    (4_800, "These are the steps of the recurrence. A chunk is one step."),
    (48, "This is the length of a chunk, and not the number of chunks."),
)
CHUNK.value("longest", 71, CHUNKS, "a whole number of tokens").mistakes(
    (90, "The state has to fit as well, beside the square."),
    (72, "This square and the state are a few numbers too many."),
)
CHUNK.value("fastest", 64, CHUNKS, "one of the three lengths").mistakes(
    (48, "This one has the fewest operations. Add what its 100 steps cost."),
    (71, "This one has the fewest steps. Add what its triangles cost."),
)

# --- The recurrent form ------------------------------------------------------------------------

CODE = Exercise("ex-recurrence-code", CHAPTER)


@CODE.function(RECURRENCE)
def my_attention(q, k, v, *, initial_state=None, return_state=False):
    state = {"initial_state": initial_state, "return_state": return_state}
    return linear_attention(q, k, v, causal=True, **state)


my_attention.passes(check_causal, GLOBAL)
my_attention.passes(check_streaming, HINGE, empty_pieces=False)


def attention(read=read, divisor=lambda q, k, z: (q * z).sum(axis=-1), map_q=elu_plus_one):
    """The recurrent form from its running sums, with parts to be replaced by wrong ones."""

    def wrong(q, k, v):
        q, k = map_q(q), elu_plus_one(k)
        S, z = np.cumsum(outer(k, v), axis=-3), np.cumsum(k, axis=-2)
        return read(S, q) / divisor(q, k, z)[..., None]

    return wrong


my_attention.mistakes(
    (
        attention(divisor=lambda q, k, z: np.ones(z.shape[:-1])),
        "The normalizer is missing: each output has to be divided by the product of its query and "
        "z.",
        MEAN,
    ),
    (
        attention(divisor=lambda q, k, z: (q * k).sum(axis=-1)),
        "The divisor has the own key alone. z is a running sum, as S is.",
    ),
    (
        attention(lambda S, q: (S @ q[..., :, None])[..., 0]),
        "The state is read from the wrong side, as S q: the query must mix the rows of S.",
    ),
    (
        linear_attention,
        "Every query reads the last state, in which its future is written already.",
        GLOBAL,
    ),
    (
        attention(map_q=identity),
        "The feature map is applied to the keys, but not to the queries.",
    ),
)


@my_attention.mistake(
    "The read comes before the write, so that no query sees its own token, and the first one "
    "divides 0 by 0."
)
def before_the_write(q, k, v):
    A = np.tril(elu_plus_one(q) @ transpose(elu_plus_one(k)), -1)
    return A @ v / A.sum(axis=-1, keepdims=True)


# --- One position off --------------------------------------------------------------------------

SHIFT = Exercise("ex-recurrence-shift", CHAPTER)

SHIFT.value("first_sees", [1, 2], RECURRENCE, "a list of tokens, counted from 1").mistakes(
    ([1, 2, 3], "This is what a token sees that is written before its query reads."),
    ([0, 1], "The tokens are counted from 1."),
)
SHIFT.value("second_sees", [1, 2, 3, 4], MASKED, "a list of tokens, counted from 1").mistakes(
    ([1, 2, 3], "This is what np.tril leaves without k. Where does k=1 put the diagonal?"),
    ([1, 2], "This is what np.tril leaves with k=-1."),
    ([1, 2, 3, 4, 5], "This row is not masked at all.", GLOBAL),
    ([0, 1, 2, 3], "The tokens are counted from 1."),
)

# --- Powers of a -------------------------------------------------------------------------------

DECAY = Exercise("ex-recurrence-decay", CHAPTER)


def distances(N):
    return np.arange(N)[:, None] - np.arange(N)


def decay_and_length(rng, N):
    return float(rng.uniform(0.5, 0.95)), N


@DECAY.function(UNROLLED, inputs=decay_and_length)
def decay_matrix(a, N):
    return np.tril(a ** np.abs(distances(N)))


decay_matrix.mistakes(
    (
        lambda a, N: a ** np.abs(distances(N)),
        "There are entries above the diagonal: position t would see later inputs.",
        MASKED,
    ),
    (
        lambda a, N: a ** np.tril(distances(N)),
        "The exponents above the diagonal are 0, so that the entries there are 1. They have to "
        "be 0.",
        MASKED,
    ),
    (
        lambda a, N: a * decay_matrix.reference(a, N),
        "The own input is decayed already, and every other one once too often: a multiplies the "
        "old state before the new input is added.",
    ),
    (
        lambda a, N: np.tril(a ** np.arange(N)[:, None]),
        "All entries of a row are alike. What counts is the distance t - j, not t.",
    ),
)

# --- Another arithmetic ------------------------------------------------------------------------

MAX = Exercise("ex-recurrence-max", CHAPTER)


def two_steps(rng, N):
    return tuple(rng.normal(size=4).tolist())


def of_numbers(then):
    return lambda a1, b1, a2, b2: then((a1, b1), (a2, b2))


@MAX.function(STEPS, inputs=two_steps, view=of_numbers, unit="")
def then_max(first, second):
    (a1, b1), (a2, b2) = first, second
    return a1 + a2, max(b1 + a2, b2)


then_max.mistakes(
    (
        lambda first, second: then_max.reference(second, first),
        "The order is reversed: the first pair acts on h first.",
    ),
    (
        lambda first, second: (first[0] + second[0], max(first[1], second[1])),
        "The result of the first step is what the second one starts from, so its b, too, has "
        "something to pass through.",
    ),
    (
        lambda first, second: (first[0] + second[0], max(first[1], second[1]) + second[0]),
        "The b of the second step comes last. Nothing is added to it any more.",
    ),
    (
        lambda first, second: (first[0] * second[0], second[0] * first[1] + second[1]),
        "This is the rule for linear steps. Insert this recurrence into itself instead.",
    ),
)
