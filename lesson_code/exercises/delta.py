"""Exercises of the chapter on the delta rule."""

import numpy as np

from lesson_code.checks import random_qkv
from lesson_code.exercises import Exercise
from lesson_code.numpy import gated_linear_attention

CHAPTER = "The delta rule"
TWICE = "The same key, written twice"
STEP = "One step of least squares"
TOKENS = "Three tokens by hand"
SYSTEM = "Many tokens at once"
AXES = "When a gate can do the same"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-delta-hand", CHAPTER)
K = np.array([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
V = np.array([10.0, 20.0, 10.0])
CROSSING = np.linalg.solve(K[:2], V[:2])
NO_ERROR = (
    "The values were added as they are. The rule first asks what the key finds already, and writes "
    "only what is missing."
)


def corrected(s, k, v):
    return s + k * (v - k @ s)


S_1 = K[0] * V[0]
S_2 = corrected(S_1, K[1], V[1])
S_3 = corrected(S_2, K[2], V[2])

HAND.value("S_2", S_2, TWICE, "two numbers, the memory after token 2").mistakes(
    (V[:2] @ K[:2], NO_ERROR),
    (S_2 - S_1, "That is what token 2 writes. It is added to the memory after token 1."),
    (
        S_1 + (V[1] - K[1] @ S_1),
        "The error was added to both numbers alike. It is written under its key: each number takes "
        "it times its own entry of the key.",
        TOKENS,
    ),
)
HAND.value("S_3", S_3, TWICE, "two numbers, the memory after token 3").mistakes(
    (V @ K, NO_ERROR),
    (
        S_2,
        "The third token does change something. Its pair was stored once, but the second token has "
        "altered what its key finds.",
        TOKENS,
    ),
)
HAND.value("found", K[:2] @ S_3, TOKENS, "two numbers, what the two keys find in the end").mistakes(
    (
        V[:2],
        "These are the values that were written. The last write was exact for its own key only.",
    ),
    (S_3, "This is the memory itself. A key finds its product with it.", TWICE),
)
HAND.value(
    "both", CROSSING, TOKENS, "two numbers, a memory in which both keys find their values"
).mistakes(
    (
        S_3,
        "Here only the first key finds its value. Where do the lines of both tokens cross?",
    ),
    ([V[0], V[1] / K[1, 1]], "The second key also finds a part of the first number."),
)
HAND.value("factor", (K[0] @ K[1]) ** 2, TOKENS).mistakes(
    (K[0] @ K[1], "That is the factor of one write. A round writes with both keys."),
    (
        K[1, 1] ** 2,
        "That is the share of the squared distance that one write takes away. Which share of the "
        "distance stays?",
    ),
    (
        np.linalg.norm(S_3 - CROSSING) / np.linalg.norm(CROSSING),
        "This is what the first round does, which begins with an empty memory, on neither line. "
        "Take a round that begins where another one has ended.",
    ),
)

# --- A value with noise ------------------------------------------------------------------------

NOISE = Exercise("ex-delta-noise", CHAPTER)

NOISE.value(
    "weights",
    [1 / 2, 1 / 4, 1 / 8],
    STEP,
    "three numbers, the weights of the last value, the one before it and the one before that",
).mistakes(
    ([1 / 8, 1 / 4, 1 / 2], "The order is the other way round: the last value comes first."),
    ([1 / 2, 1 / 2, 1 / 2], "Each further write leaves only the share 1 − beta of what was there."),
    ([1, 1 / 2, 1 / 4], "Of the last value, too, only the share beta is written."),
)
NOISE.value("noise", 1 / 3, STEP, "a number, in units of sigma²").mistakes(
    (1, "These are the weights added up. Variances add up with the squares of the weights."),
    (1 / 4, "That is the last value alone. The earlier ones have noise, too."),
    (1 / 2, "That is the weight of the last value. Variances take the squares, of all weights."),
    (4 / 3, "The weights are squared rightly, but the sum begins with beta², not with 1."),
)
NOISE.value("beta", 2 / 11, STEP, "a number between 0 and 1").mistakes(
    (1 / 10, "A mean over 10 values would do that. This one weighs its values unequally."),
    (10 / 11, "The formula is turned around. A small beta averages over many values."),
    (20 / 11, "The formula is turned around. A small beta averages over many values."),
)
NOISE.value("writes", 12, STEP, "a whole number").mistakes(
    (11, "After 11 writes a little more than a tenth is left."),
    (10, "The old value does not fade evenly: each write leaves the same share of what is left."),
    (22, "The old value goes with 1 − beta; only its noise would go with the square."),
    (6, "The old value goes with 1 − beta; only a variance goes with its square."),
)

# --- The delta rule by gates ---------------------------------------------------------------------

AXIS = Exercise("ex-delta-axes", CHAPTER)


def one_hot(rng, N, leading=(), D=5, M=3):
    """Keys along the axes; beta is (..., N, 1)."""
    q, _, v = random_qkv(rng, N, leading=leading, D=D, M=M)
    return q, np.eye(D)[rng.integers(D, size=(*leading, N))], v, rng.random((*leading, N, 1))


@AXIS.function(AXES, inputs=one_hot)
def by_gate(q, k, v, beta):
    return gated_linear_attention(q, beta * k, v, np.log1p(-beta * k**2))


by_gate.mistakes(
    (
        lambda q, k, v, beta: gated_linear_attention(q, k, v, np.log1p(-beta * k**2)),
        "The gates are right. The delta rule writes only the share beta of the value.",
    ),
    (
        lambda q, k, v, beta: gated_linear_attention(
            q, beta * k, v, np.log1p(-beta) + np.zeros_like(k)
        ),
        "All channels forget alike here. Where the key is 0 nothing may be lost.",
    ),
    (
        lambda q, k, v, beta: gated_linear_attention(q, beta * k, v, -beta * k**2),
        "The function takes the logarithm of what is kept. 1 minus something is not yet a "
        "logarithm.",
    ),
    (
        lambda q, k, v, beta: gated_linear_attention(q, beta * k, v, np.where(k > 0, -np.inf, 0)),
        "The channel of the key is emptied here, whatever beta is. Which share of it is erased?",
    ),
)
AXIS.value("between", -0.48, AXES, "a number, the entry in row 1 and column 2").mistakes(
    (0.48, "The product of the two entries is subtracted."),
    (1 - 0.48, "The identity has no 1 there."),
    (0.64, "That is on the diagonal, which a gate can have."),
    (0.36, "That is on the diagonal, which a gate can have."),
)

# --- All errors at once ------------------------------------------------------------------------

NAIVE = Exercise("ex-delta-naive", CHAPTER)

NAIVE.truth(
    "same_objects",
    True,
    SYSTEM,
    "In a chunk that has one key twice, does the second write know of the first?",
)
NAIVE.truth(
    "causal_objects",
    False,
    SYSTEM,
    "The check changes later tokens and looks at earlier outputs. To be wrong is not to look "
    "ahead: which tokens enter the output at t?",
)
NAIVE.truth(
    "streaming_objects",
    True,
    SYSTEM,
    "A split begins a new chunk. Does it matter where a chunk begins?",
)

# --- An inverse by doubling --------------------------------------------------------------------

SERIES = Exercise("ex-delta-series", CHAPTER)


def unit(k):
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def strictly_lower(rng, N):
    """A of the next smaller power of two, as it comes from random unit keys and step sizes."""
    L = min(32, 2 ** (N.bit_length() - 1))
    k = unit(random_qkv(rng, L, D=8)[1])
    return np.tril(rng.uniform(0.2, 1.0, (L, 1)) * (k @ k.T), -1)


@SERIES.function(SYSTEM, inputs=strictly_lower, unit="")
def by_doubling(A):
    return np.linalg.inv(np.eye(len(A)) + A)


def product(A, exponents, power=np.linalg.matrix_power):
    out = np.eye(len(A)) - A
    for e in exponents:
        out = out @ (np.eye(len(A)) + power(A, e))
    return out


def doubled(last):
    return [2**i for i in range(1, 6) if 2**i < last]


by_doubling.mistakes(
    (
        lambda A: np.linalg.inv(np.eye(len(A)) - A),
        "This is the inverse of I − A. Check the sign in the first factor.",
    ),
    (
        lambda A: product(A, range(2, len(A))),
        "The exponents run through all numbers. Each is twice the one before.",
    ),
    (
        lambda A: product(A, doubled(len(A) / 2)),
        "The last factor is missing, that of the exponent L/2.",
    ),
    (
        lambda A: product(A, doubled(len(A)), power=np.power),
        "The powers were taken entry by entry, as `A**2` does. The formula has products of "
        "matrices.",
    ),
)
