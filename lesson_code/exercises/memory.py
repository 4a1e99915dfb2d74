"""Exercises of the chapter on the outer-product memory."""

import numpy as np

from lesson_code.exercises import Exercise, _arrays
from lesson_code.exercises._arrays import outer, read, transpose
from lesson_code.numpy import identity, linear_attention

CHAPTER = "A memory made of outer products"
WRITE = "Write: add an outer product"
READ = "Read: multiply by the query"
CROSSTALK = "Signal and crosstalk"
LOUD = "How loud is the crosstalk?"
NORMALIZED = "The normalized read"

# --- The three tokens of the chapter, and a fourth ---------------------------------------------

K, V = np.vstack([_arrays.K, [1, 0]]), np.vstack([_arrays.V, [70, 80]])
QUERY = K[3]
S, Z = K.T @ V, K.sum(axis=0)
S_OF_2, S_OF_3 = K[:2].T @ V[:2], K[:3].T @ V[:3]
S_REPLACED = K[1:].T @ V[1:]  # as if the fourth token had taken the place of the first

HAND = Exercise("ex-memory-hand", CHAPTER)

HAND.value("S_4", S, WRITE, "two rows of two numbers").mistakes(
    (
        S_REPLACED,
        "Token 1 has been taken out. A write only adds: the same key does not replace what was "
        "stored under it.",
    ),
    (S.T, "It is the transpose: the key chooses the rows, the value runs along them."),
)
HAND.value("z_4", Z, NORMALIZED, "two numbers").mistakes(
    (K[1:].sum(axis=0), "Four keys are summed, that of token 1 twice."),
    (V.sum(axis=0), "z is the sum of the keys, not the values."),
)
HAND.value(
    "plain", QUERY @ S, READ, "two numbers, what [1, 0] reads without the normalizer"
).mistakes(
    (
        V[3],
        "That is the value of token 4 alone. Every stored token whose key meets the query answers "
        "too.",
        CROSSTALK,
    ),
    (S @ QUERY, "The state was read from the wrong side: the query mixes the rows of S."),
    (QUERY @ S_OF_3, "This is read before token 4 is written.", WRITE),
)
HAND.value("normalized", QUERY @ S / (QUERY @ Z), NORMALIZED, "two numbers").mistakes(
    (
        QUERY @ S / 4,
        "Divided by the number of tokens. The divisor is the sum of the weights, and the weight of "
        "token 2 is 0.",
    ),
    (QUERY @ S, "This is not divided by anything yet."),
    (QUERY @ S / Z.sum(), "The divisor is the product of the query and z, not the sum of z."),
)

# --- Write and read in code --------------------------------------------------------------------

CODE = Exercise("ex-memory-code", CHAPTER)
WRONG_SIDE = "The state is read from the wrong side, as S q: the query must mix the rows of S."


def state_and_row(rng, N, leading=(), D=5, M=3):
    return rng.normal(size=(*leading, D, M)), rng.normal(size=(*leading, D))


def state_and_token(rng, N, leading=(), D=5, M=3):
    return *state_and_row(rng, N, leading, D, M), rng.normal(size=(*leading, M))


@CODE.function(WRITE, inputs=state_and_token, unit="")
def my_write(S, k, v):
    return S + outer(k, v)


my_write.mistakes(
    (lambda S, k, v: outer(k, v), "The old state is lost: what the token writes is added to it."),
    (
        lambda S, k, v: S + outer(v, k),
        "The outer product is transposed, v kᵀ: in this book the key chooses the row, so that the "
        "state has shape (..., D, M).",
    ),
    (
        lambda S, k, v: S + (k * v)[..., None, :],
        "k * v multiplies entry by entry. The outer product has every product of an entry of k "
        "with an entry of v.",
    ),
)


@CODE.function(READ, inputs=state_and_row, unit="")
def my_read(S, q):
    return read(S, q)


my_read.mistakes(
    (lambda S, q: (S @ q[..., :, None])[..., 0], WRONG_SIDE),
    (lambda S, q: q[..., None] * S, "The rows of S are weighed by the query, but not added up."),
)


@CODE.function(READ)
def my_memory(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


def states(k, v):
    """S_1 to S_N, (..., N, D, M)."""
    return np.cumsum(outer(k, v), axis=-3)


my_memory.mistakes(
    (
        lambda q, k, v: read(states(k, v) - outer(k, v), q),
        "Each query is answered before its own token is written. Write first, then read.",
    ),
    (
        lambda q, k, v: (states(k, v) @ q[..., :, None])[..., 0],
        f"{WRONG_SIDE} (A state that is written transposed, v kᵀ, comes to the same.)",
    ),
    (
        lambda q, k, v: q @ (transpose(k) @ v),
        "Every query reads the last state, in which its future is written already. Read right "
        "after each write.",
    ),
    (
        lambda q, k, v: read(outer(k, v), q),
        "Every query sees its own token alone: the state is not carried on to the next token.",
        WRITE,
    ),
    (
        lambda q, k, v: linear_attention(q, k, v, feature_map=identity, causal=True),
        "The output is normalized, divided by the product of the query and z. This exercise asks "
        "for the plain read.",
        NORMALIZED,
    ),
)

# --- Two mistakes, predicted -------------------------------------------------------------------

MISTAKES = Exercise("ex-memory-mistakes", CHAPTER)

MISTAKES.value(
    "wrong_side", S_OF_3 @ K[2], WRITE, "two numbers, the last output with S q"
).mistakes(
    (
        S_OF_2 @ K[2],
        "This is read from the second state: token 3 is written before its query reads.",
        READ,
    ),
)
MISTAKES.value(
    "too_early", K[2] @ S_OF_2, READ, "two numbers, the last output when the read comes first"
).mistakes(
    (
        K[2] @ S_OF_3,
        "Token 3 is in this already: read too early, its query meets tokens 1 and 2 only.",
    ),
    (
        S_OF_2 @ K[2],
        "Now it is both, too early and from the wrong side. The second state is not symmetric, so "
        "that the two sides differ.",
        WRITE,
    ),
)

# --- A memory that fades -----------------------------------------------------------------------

FADE = Exercise("ex-memory-fade", CHAPTER)


def age_width_and_decay(rng, N):
    return int(rng.integers(0, N + 1)), int(rng.integers(2, 3 * N + 2)), rng.uniform(0.9, 0.99)


@FADE.function(LOUD, inputs=age_width_and_decay, unit="")
def noise_at(a, D, gamma):
    return (gamma ** (-2 * a) / (1 - gamma**2) - 1) / D


noise_at.mistakes(
    (
        lambda a, D, gamma: gamma ** (-2 * a) / (1 - gamma**2) / D,
        "The fact itself is counted as crosstalk. Its own power is missing from the sum of the "
        "others.",
    ),
    (
        lambda a, D, gamma: (gamma**-a / (1 - gamma) - 1) / D,
        "A factor of the state acts on the power by its square, in the signal and in the noise.",
    ),
    (
        lambda a, D, gamma: (1 / (1 - gamma**2) - gamma ** (2 * a)) / D,
        "This is the crosstalk over the power of a fact that has not faded. The signal fades, too.",
    ),
)

AGE = max(a for a in range(100) if noise_at.reference(a, 64, 31 / 32) <= 1)

FADE.value("age", AGE, LOUD, "a whole number of tokens, D = 64 and γ = 31/32").mistakes(
    (AGE + 1, "At this age the noise is already a little stronger than the signal."),
)

# --- Taking a fact out again ------------------------------------------------------------------

ERASE = Exercise("ex-memory-erase", CHAPTER)


def one_state_and_row(rng, N, D=5, M=3):
    return state_and_row(rng, N, D=D, M=M)


@ERASE.function(CROSSTALK, inputs=one_state_and_row, unit="")
def erase(S, k):
    return S - np.outer(k, k @ S) / (k @ k)


erase.mistakes(
    (
        lambda S, k: S - np.outer(k, k @ S),
        "The squared length of the key is not divided out: writing and reading with k multiplies "
        "by k · k.",
    ),
    (
        lambda S, k: S - np.outer(k, k @ S) / np.sqrt(k @ k),
        "Divided by the length of the key once. The key comes in twice: it is the squared length.",
    ),
    (lambda S, k: S - np.outer(k, S @ k) / (k @ k), WRONG_SIDE, READ),
    (
        lambda S, k: np.outer(k, k @ S) / (k @ k),
        "This is the part that should go. Subtract it from the state.",
        WRITE,
    ),
)
