"""Exercises of the chapter on the outer-product memory."""

from __future__ import annotations

import math

import numpy as np

from lesson_code.checks.exercises._declare import Function, Mistake, Value, chapter
from lesson_code.numpy import LinearAttentionState, identity, linear_attention

WRITE = "Write: add an outer product"
READ = "Read: multiply by the query"
CROSSTALK = "Signal and crosstalk"
LOUD = "How loud is the crosstalk?"
NORMALIZED = "The normalized read"

# --- The three tokens of the chapter, and a fourth ---------------------------------------------

K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0], [70.0, 80.0]])
QUERY = K[3]


def state_of(keys, values):
    state = LinearAttentionState.zeros(2, 2)
    for k, v in zip(keys, values, strict=True):
        state = state.write(k, v)
    return state


def replaced():
    """The state if the fourth token had taken the place of the first."""
    return state_of(K[1:], V[1:])


HAND = (
    Value(
        name="S_4",
        reference=lambda: state_of(K, V).S,
        section=WRITE,
        form="two rows of two numbers",
        mistakes=(
            Mistake(
                lambda: replaced().S,
                "Token 1 has been taken out. A write only adds: the same key does not replace "
                "what was stored under it.",
                WRITE,
            ),
            Mistake(
                lambda: state_of(K, V).S.T,
                "It is the transpose: the key chooses the rows, the value runs along them.",
                WRITE,
            ),
            Mistake(
                lambda: np.outer(K[3], V[3]),
                "That is what token 4 alone writes; the three tokens before it are missing.",
                WRITE,
            ),
            Mistake(
                lambda: state_of(K[:3], V[:3]).S + V[3],
                "The value was added to both rows: each row takes it times its own number of the "
                "key.",
                WRITE,
            ),
        ),
    ),
    Value(
        name="z_4",
        reference=lambda: state_of(K, V).z,
        section=NORMALIZED,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: replaced().z,
                "Four keys are summed, that of token 1 twice.",
                NORMALIZED,
            ),
            Mistake(lambda: V.sum(axis=0), "z is the sum of the keys, not the values.", NORMALIZED),
            Mistake(lambda: K.mean(axis=0), "z is the sum of the keys, not the mean.", NORMALIZED),
        ),
    ),
    Value(
        name="plain",
        reference=lambda: state_of(K, V).read(QUERY, normalize=False),
        section=READ,
        form="two numbers, what [1, 0] reads without the normalizer",
        mistakes=(
            Mistake(
                lambda: V[3],
                "That is the value of token 4 alone. Every stored token whose key meets the query "
                "answers too.",
                CROSSTALK,
            ),
            Mistake(
                lambda: replaced().read(QUERY, normalize=False),
                "Token 1 does not answer, although its key is the query: a write only adds.",
                WRITE,
            ),
            Mistake(
                lambda: state_of(K, V).S @ QUERY,
                "The state was read from the wrong side: the query mixes the rows of S.",
                READ,
            ),
            Mistake(
                lambda: state_of(K[:3], V[:3]).read(QUERY, normalize=False),
                "This is read before token 4 is written.",
                WRITE,
            ),
        ),
    ),
    Value(
        name="normalized",
        reference=lambda: state_of(K, V).read(QUERY),
        section=NORMALIZED,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: state_of(K, V).read(QUERY, normalize=False) / 4,
                "Divided by the number of tokens. The divisor is the sum of the weights, and the "
                "weight of token 2 is 0.",
                NORMALIZED,
            ),
            Mistake(
                lambda: state_of(K, V).read(QUERY, normalize=False),
                "This is not divided by anything yet.",
                NORMALIZED,
            ),
            Mistake(
                lambda: state_of(K, V).S[0] / state_of(K[:3], V[:3]).z[0],
                "The divisor is that of three tokens. z grows with every write, as S does.",
                NORMALIZED,
            ),
            Mistake(
                lambda: state_of(K, V).read(QUERY, normalize=False) / K.sum(),
                "Divided by the sum of all entries of the keys. The divisor is the product of the "
                "query and z.",
                NORMALIZED,
            ),
        ),
    ),
)

# --- Write and read in code --------------------------------------------------------------------


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    return (q[..., None, :] @ S)[..., 0, :]


def states(k, v):
    """S_1 to S_N, (..., N, D, M)."""
    return np.cumsum(outer(k, v), axis=-3)


def memory(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


def write_inputs(rng, N, leading=(), D=5, M=3):
    return rng.normal(size=(*leading, D, M)), *(rng.normal(size=(*leading, n)) for n in (D, M))


def read_inputs(rng, N, leading=(), D=5, M=3):
    return rng.normal(size=(*leading, D, M)), rng.normal(size=(*leading, D))


WRONG_SIDE = "The state is read from the wrong side, as S q: the query must mix the rows of S."
TRANSPOSED = (
    "The outer product is transposed, v kᵀ: in this book the key chooses the row, so that the "
    "state has shape (..., D, M)."
)

CODE = (
    Function(
        signature="my_write(S, k, v)",
        reference=lambda S, k, v: S + outer(k, v),
        section=WRITE,
        inputs=write_inputs,
        unit="",
        mistakes=(
            Mistake(
                lambda S, k, v: outer(k, v),
                "The old state is lost: what the token writes is added to it.",
                WRITE,
            ),
            Mistake(lambda S, k, v: S + outer(v, k), TRANSPOSED, WRITE),
            Mistake(
                lambda S, k, v: S + (k * v)[..., None, :],
                "k * v multiplies entry by entry. The outer product has every product of an entry "
                "of k with an entry of v.",
                WRITE,
            ),
            Mistake(
                lambda S, k, v: S - read_back(S, k) + outer(k, v),
                "What the key read before is taken out first. A write only adds.",
                WRITE,
            ),
        ),
    ),
    Function(
        signature="my_read(S, q)",
        reference=read,
        section=READ,
        inputs=read_inputs,
        unit="",
        mistakes=(
            Mistake(lambda S, q: (S @ q[..., :, None])[..., 0], WRONG_SIDE, READ),
            Mistake(
                lambda S, q: q[..., :, None] * S,
                "The rows of S are weighed by the query, but not added up.",
                READ,
            ),
            Mistake(
                lambda S, q: read(S, q) / q.sum(axis=-1, keepdims=True),
                "The read is divided by the sum of the query. The plain read divides by nothing, "
                "the normalized one by the product of the query and z.",
                NORMALIZED,
            ),
        ),
    ),
    Function(
        signature="my_memory(q, k, v)",
        reference=memory,
        section=READ,
        mistakes=(
            Mistake(
                lambda q, k, v: read(states(k, v) - outer(k, v), q),
                "Each query is answered before its own token is written. Write first, then read.",
                READ,
            ),
            Mistake(
                lambda q, k, v: (states(k, v) @ q[..., :, None])[..., 0],
                f"{WRONG_SIDE} (A state that is written transposed, v kᵀ, comes to the same.)",
                READ,
            ),
            Mistake(
                lambda q, k, v: q @ (np.swapaxes(k, -1, -2) @ v),
                "Every query reads the last state, in which its future is written already. Read "
                "right after each write.",
                READ,
            ),
            Mistake(
                lambda q, k, v: read(outer(k, v), q),
                "Every query sees its own token alone: the state is not carried from one token to "
                "the next.",
                WRITE,
            ),
            Mistake(
                lambda q, k, v: linear_attention(q, k, v, feature_map=identity, causal=True),
                "The output is normalized, divided by the product of the query and z. This "
                "exercise asks for the plain read.",
                NORMALIZED,
            ),
            Mistake(
                lambda q, k, v: (
                    read(states(k, v), q) / np.arange(1, k.shape[-2] + 1, dtype=k.dtype)[:, None]
                ),
                "The output is divided by the number of tokens. The state is a running sum, not a "
                "running mean.",
                NORMALIZED,
            ),
            Mistake(
                lambda q, k, v: read(states(k, v), k),
                "The state is read with the key of each token in place of its query.",
                READ,
            ),
        ),
    ),
)


def read_back(S, k):
    return outer(k, read(S, k))


# --- Two mistakes, predicted -------------------------------------------------------------------

MISTAKES = (
    Value(
        name="wrong_side",
        reference=lambda: (np.cumsum(outer(K, V), axis=0)[2]) @ K[2],
        section=WRITE,
        form="two numbers, the last output with S q",
        mistakes=(
            Mistake(
                lambda: state_of(K[:2], V[:2]).S @ K[2],
                "This is read from the second state: token 3 is written before its query reads.",
                READ,
            ),
        ),
    ),
    Value(
        name="too_early",
        reference=lambda: K[2] @ state_of(K[:2], V[:2]).S,
        section=READ,
        form="two numbers, the last output when the read comes first",
        mistakes=(
            Mistake(
                lambda: K[2] @ state_of(K[:3], V[:3]).S,
                "Token 3 is in this already: read too early, its query meets tokens 1 and 2 only.",
                READ,
            ),
            Mistake(
                lambda: state_of(K[:2], V[:2]).S @ K[2],
                "Now it is both, too early and from the wrong side. The second state is not "
                "symmetric, so that the two sides differ.",
                WRITE,
            ),
        ),
    ),
)

# --- Binary values -----------------------------------------------------------------------------


def tail(variance):
    """How often a normal variable of this variance is above 1."""
    return math.erfc(1 / math.sqrt(2 * variance)) / 2


def wrong_share(n, D):
    return tail((n - 1) / D)


def pairs_at(share, one_percent=0.01):
    return max(n for n in range(2, 65) if share(n, 64) <= one_percent)


BINARY = (
    Function(
        signature="wrong_share(n, D)",
        reference=wrong_share,
        section=LOUD,
        inputs=lambda rng, N: (
            int(rng.integers(N + 1, 4 * N + 2)),
            int(rng.integers(2 * N, 6 * N)),
        ),
        unit="",
        mistakes=(
            Mistake(
                lambda n, D: tail(n / D),
                "All n tokens are counted as crosstalk. One of them is the signal.",
                LOUD,
            ),
            Mistake(
                lambda n, D: 2 * tail((n - 1) / D),
                "Noise on both sides is counted. Only one direction changes the sign.",
                LOUD,
            ),
            Mistake(
                lambda n, D: math.erfc(D / (n - 1) / math.sqrt(2)) / 2,
                "The power (n - 1)/D is taken for the standard deviation; it is the variance.",
                LOUD,
            ),
            Mistake(
                lambda n, D: 0.5 - tail((n - 1) / D),
                "erf counts what lies between 0 and the bound. What lies beyond it is erfc.",
                LOUD,
            ),
            Mistake(
                lambda n, D: 1 - tail((n - 1) / D),
                "This is the share of right signs.",
                LOUD,
            ),
            Mistake(
                lambda n, D: tail(D / (n - 1)),
                "The ratio is upside down: more tokens make more noise, a wider key less.",
                LOUD,
            ),
            Mistake(
                lambda n, D: math.erfc(1 / math.sqrt((n - 1) / D)) / 2,
                "A factor is missing inside: a normal variable of standard deviation σ is above 1 "
                "with probability erfc(1 / (σ √2)) / 2.",
                LOUD,
            ),
        ),
    ),
    Value(
        name="pairs",
        reference=lambda: pairs_at(wrong_share),
        section=LOUD,
        form="how many pairs, at most 1 wrong sign in 100, D = 64",
        mistakes=(
            Mistake(
                lambda: pairs_at(wrong_share) + 1,
                "With so many it is already a little more than 1 in 100.",
                LOUD,
            ),
            Mistake(
                lambda: pairs_at(lambda n, D: tail(n / D)),
                "All n tokens are counted as crosstalk. One of them is the signal.",
                LOUD,
            ),
            Mistake(
                lambda: pairs_at(lambda n, D: 2 * tail((n - 1) / D)),
                "Noise on both sides is counted. Only one direction changes the sign.",
                LOUD,
            ),
        ),
    ),
)

# --- Taking a note off the board ---------------------------------------------------------------


def erase(S, k):
    return S - np.outer(k, k @ S) / (k @ k)


ERASE = (
    Function(
        signature="erase(S, k)",
        reference=erase,
        section=CROSSTALK,
        inputs=lambda rng, N, D=5, M=3: (rng.normal(size=(D, M)), rng.normal(size=D)),
        unit="",
        mistakes=(
            Mistake(
                lambda S, k: S - np.outer(k, k @ S),
                "The squared length of the key is not divided out: writing and reading with k "
                "multiplies by k · k.",
                CROSSTALK,
            ),
            Mistake(
                lambda S, k: S - np.outer(k, k @ S) / np.sqrt(k @ k),
                "Divided by the length of the key once. The key comes in twice, so that it is the "
                "squared length.",
                CROSSTALK,
            ),
            Mistake(
                lambda S, k: S - k @ S / (k @ k),
                "What was read is subtracted from every row alike. It has to be written under the "
                "key, by an outer product, before it is subtracted.",
                WRITE,
            ),
            Mistake(
                lambda S, k: S + np.outer(k, k @ S) / (k @ k),
                "It is added where it should be subtracted.",
                WRITE,
            ),
            Mistake(
                lambda S, k: S - np.outer(S @ k, k) / (k @ k),
                WRONG_SIDE,
                READ,
            ),
            Mistake(
                lambda S, k: S - np.outer(k, S @ k) / (k @ k),
                WRONG_SIDE,
                READ,
            ),
            Mistake(
                lambda S, k: S - np.outer(k @ S, k) / (k @ k),
                "The outer product is transposed: the key chooses the row, as in a write.",
                WRITE,
            ),
            Mistake(
                lambda S, k: np.outer(k, k @ S) / (k @ k),
                "This is the part that should go. Subtract it from the state.",
                WRITE,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "A memory made of outer products",
    ("ex-memory-hand", *HAND),
    ("ex-memory-code", *CODE),
    ("ex-memory-mistakes", *MISTAKES),
    ("ex-memory-binary", *BINARY),
    ("ex-memory-erase", *ERASE),
)
