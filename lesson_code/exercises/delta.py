"""Exercises of the chapter on the delta rule."""

from __future__ import annotations

import numpy as np

from lesson_code.checks._calling import random_qkv
from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter, truth
from lesson_code.numpy import delta_rule, gated_delta_rule

TWICE = "The same key, written twice"
STEP = "One step of least squares"
TOKENS = "Three tokens by hand"
PARALLEL = "Linear in $S$, but not a sum"
SYSTEM = "A chunk is a triangular system"
GATED = "Forget first, then correct"
LAYER = "The layer"

# --- By hand -----------------------------------------------------------------------------------

K = np.array([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
V = np.array([10.0, 20.0, 10.0])


def memory(n, *, error=lambda s, k, v: v - k @ s, write=lambda k, u: k * u, start=0):
    """Two numbers, after the tokens up to n."""
    s = np.zeros(2)
    for k, v in list(zip(K, V, strict=True))[start:n]:
        s = s + write(k, error(s, k, v))
    return s


def added(n):
    return memory(n, error=lambda s, k, v: v)


def crossing():
    return np.linalg.solve(K[:2], V[:2])


NO_ERROR = (
    "The values were added as they are. The rule first asks what the key finds already, and "
    "writes only what is missing."
)
BOTH_ENTRIES = (
    "The error was added to both numbers alike. It is written under its key: each number takes it "
    "times its own entry of the key."
)
TURNED = (
    "The sign of the error is turned: it is the value minus what is found, so that the write moves "
    "toward the value."
)

HAND = (
    Value(
        name="S_2",
        reference=lambda: memory(2),
        section=TWICE,
        form="two numbers, the memory after token 2",
        mistakes=(
            Mistake(lambda: added(2), NO_ERROR, TWICE),
            Mistake(
                lambda: memory(1) + (V[1] - K[1] @ memory(1)),
                BOTH_ENTRIES,
                TOKENS,
            ),
            Mistake(
                lambda: memory(2) - memory(1),
                "That is what token 2 writes. It is added to the memory after token 1.",
                TWICE,
            ),
            Mistake(
                lambda: memory(1) - K[1] * (V[1] - K[1] @ memory(1)),
                TURNED,
                TWICE,
            ),
            Mistake(
                lambda: memory(1) + K[1] * (V[1] - V[0]),
                "The second key does not find the whole value of the first: what it finds is its "
                "product with the memory.",
                TOKENS,
            ),
        ),
    ),
    Value(
        name="S_3",
        reference=lambda: memory(3),
        section=TWICE,
        form="two numbers, the memory after token 3",
        mistakes=(
            Mistake(lambda: added(3), NO_ERROR, TWICE),
            Mistake(
                lambda: memory(2) + K[2] * V[2],
                "The third value was added as it is. What does its key find after token 2?",
                TWICE,
            ),
            Mistake(
                lambda: memory(2),
                "The third token does change something. Its pair was stored once, but the second "
                "token has altered what its key finds.",
                TOKENS,
            ),
            Mistake(
                lambda: memory(2) - K[2] * (V[2] - K[2] @ memory(2)),
                TURNED,
                TWICE,
            ),
            Mistake(
                lambda: memory(2) + (V[2] - K[2] @ memory(2)),
                BOTH_ENTRIES,
                TOKENS,
            ),
            Mistake(
                lambda: memory(1),
                "This is the memory after token 1. A write along the first key leaves the other "
                "direction as it is, and token 2 has stored something there.",
                STEP,
            ),
        ),
    ),
    Value(
        name="found",
        reference=lambda: K[:2] @ memory(3),
        section=TOKENS,
        form="two numbers, what the two keys find in the end",
        mistakes=(
            Mistake(
                lambda: V[:2],
                "These are the values that were written. The last write was exact for its own key "
                "only.",
                TOKENS,
            ),
            Mistake(
                lambda: K[:2] @ memory(2),
                "These are found after token 2; token 3 is still to be written.",
                TOKENS,
            ),
            Mistake(
                lambda: memory(3),
                "This is the memory itself. A key finds its product with it.",
                TWICE,
            ),
        ),
    ),
    Value(
        name="both",
        reference=crossing,
        section=TOKENS,
        form="two numbers, a memory in which both keys find their values",
        mistakes=(
            Mistake(
                lambda: V[:2],
                "These are the values. The second key would find 0.6 times one plus 0.8 times the "
                "other.",
                TOKENS,
            ),
            Mistake(
                lambda: memory(3),
                "Here only the first key finds its value. Where do the lines of both tokens cross?",
                TOKENS,
            ),
            Mistake(
                lambda: memory(2),
                "Here only the second key finds its value. Where do the lines of both tokens "
                "cross?",
                TOKENS,
            ),
            Mistake(
                lambda: np.array([V[0], V[1] / K[1, 1]]),
                "The second key also finds a part of the first number.",
                TOKENS,
            ),
        ),
    ),
    Value(
        name="factor",
        reference=lambda: (K[0] @ K[1]) ** 2,
        section=TOKENS,
        mistakes=(
            Mistake(
                lambda: K[0] @ K[1],
                "That is the factor of one write. A round writes with both keys.",
                TOKENS,
            ),
            Mistake(
                lambda: K[1, 1] ** 2,
                "That is the share of the squared distance that one write takes away. Which share "
                "of the distance stays?",
                TOKENS,
            ),
            Mistake(
                lambda: np.linalg.norm(memory(3) - crossing()) / np.linalg.norm(crossing()),
                "This is what the first round does, which begins with an empty memory, on neither "
                "line. Take a round that begins where another one has ended.",
                TOKENS,
            ),
            Mistake(
                lambda: K[1, 1],
                "A projection on a line keeps the part along it: compare the directions of the two "
                "lines, which are at right angles to the keys.",
                TOKENS,
            ),
        ),
    ),
)

# --- The gated rule as a recurrence ------------------------------------------------------------


def gated_inputs(rng, N, leading=(), D=5, M=3):
    """Keys of length 1/2 to 1; beta and g have the shape (..., N, 1)."""
    q, k, v = random_qkv(rng, N, leading=leading, D=D, M=M)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    beta, g = rng.uniform(0, 2, (*leading, N, 1)), -rng.exponential(size=(*leading, N, 1))
    return q, k * rng.uniform(0.5, 1, (*leading, N, 1)), v, beta, g


def unit(k):
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def loop(q, k, v, beta, g, step):
    """step(S, q, k, v, b, a) returns the new memory and the output; rows (..., 1, ·)."""
    S, out = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])), np.empty_like(v)
    for t in range(k.shape[-2]):
        at = (..., slice(t, t + 1), slice(None))
        S, out[at] = step(S, q[at], k[at], v[at], beta[at], g[at])
    return out


def gated(error=None, read=None, decay=np.exp, order="decay, error, write"):
    """The rule with one part changed."""
    error = error or (lambda S, q, k, v, b: b * (v - k @ S))
    read = read or (lambda before, S, q: q @ S)

    def step(S, q, k, v, b, g):
        before, a = S, decay(g)
        if order == "decay, error, write":
            S = a * S
            S = S + k.swapaxes(-1, -2) @ error(S, q, k, v, b)
        elif order == "error, decay, write":
            S = a * S + k.swapaxes(-1, -2) @ error(S, q, k, v, b)
        else:
            S = a * (S + k.swapaxes(-1, -2) @ error(S, q, k, v, b))
        return S, read(before, S, q)

    return lambda q, k, v, beta, g: loop(q, k, v, beta, g, step)


CODE = (
    Function(
        signature="my_delta(q, k, v, beta, g, *, initial_state=None, return_state=False)",
        reference=lambda q, k, v, beta, g: gated_delta_rule(q, k, v, beta[..., 0], g[..., 0]),
        section=GATED,
        inputs=gated_inputs,
        mistakes=(
            Mistake(
                gated(order="error, decay, write"),
                "The error is that of the memory before its decay. Compare the value with what is "
                "left afterward.",
                GATED,
            ),
            Mistake(
                gated(order="error, write, decay"),
                "The decay comes last and weakens the new write, too. Only the old memory decays.",
                GATED,
            ),
            Mistake(
                gated(decay=lambda g: g),
                "The memory is multiplied by g itself. g is the logarithm of the decay.",
                GATED,
            ),
            Mistake(
                gated(decay=np.ones_like),
                "The decay is missing: this is the delta rule without a gate.",
                GATED,
            ),
            Mistake(
                gated(read=lambda before, S, q: q @ before),
                "The memory is read before the token is written to it.",
                TWICE,
            ),
            Mistake(
                gated(error=lambda S, q, k, v, b: v - k @ S),
                "The step size is missing: only the share beta of the error is written.",
                TWICE,
            ),
            Mistake(
                gated(error=lambda S, q, k, v, b: b * v),
                "The value itself is written. The rule writes the difference to what the key finds "
                "already.",
                TWICE,
            ),
            Mistake(
                gated(error=lambda S, q, k, v, b: b * v - k @ S),
                "beta multiplies the value only. It is the share of the whole error.",
                TWICE,
            ),
            Mistake(
                gated(error=lambda S, q, k, v, b: b * (v - q @ S)),
                "The memory is asked with the query before the write. The error belongs to what "
                "the key finds.",
                TWICE,
            ),
            Mistake(
                gated(error=lambda S, q, k, v, b: b * (v + k @ S)),
                "What the key finds is added to the value. The error is the difference.",
                TWICE,
            ),
            Mistake(
                gated(decay=lambda g: np.exp(-g)),
                "The memory grows: g is the logarithm of the decay already, and negative.",
                GATED,
            ),
            Mistake(
                lambda q, k, v, beta, g: gated()(q, unit(k), v, beta, g),
                "The keys are brought to length 1 here. The layer does that before; the rule takes "
                "the keys as they are.",
                LAYER,
            ),
        ),
        further=(
            Further(check_causal, SYSTEM),
            Further(check_streaming, GATED, options={"empty_pieces": False}),
        ),
    ),
)

# --- All errors at once ------------------------------------------------------------------------

NAIVE = (
    truth(
        "same_objects",
        True,
        section=PARALLEL,
        message="In a chunk that has one key twice, does the second write know of the first?",
    ),
    truth(
        "causal_objects",
        False,
        section=PARALLEL,
        message=(
            "The check changes later tokens and looks at earlier outputs. To be wrong is not "
            "to look ahead: which tokens enter the output at t?"
        ),
    ),
    truth(
        "streaming_objects",
        True,
        section=PARALLEL,
        message="A split begins a new chunk. Does it matter where a chunk begins?",
    ),
)

# --- Parity ------------------------------------------------------------------------------------


def outputs(choose):
    """What delta_rule returns with the reader's choice, for queries of 1."""

    def run(bits):
        chosen = choose(bits)
        if not isinstance(chosen, tuple | list) or len(chosen) != 4:
            raise TypeError("choose must return four arrays: k, v, beta and initial_state")
        k, v, beta, start = chosen
        q = np.ones((len(bits), 1))
        out = delta_rule(q, k, v, beta, initial_state=start)
        for t in range(len(bits)):  # who counts the ones beforehand needs no memory
            alone = choose(bits[t : t + 1])
            for name, x, row in zip(("k", "v", "beta"), chosen[:3], alone[:3], strict=True):
                if not np.array_equal(x[t], row[0]):
                    raise ValueError(f"{name}[{t}] is not made from bits[{t}] alone")
        return out

    return run


def chosen(*, beta=lambda bits: 2.0 * bits, v=0.0, start=1.0):
    def choose(bits):
        ones = np.ones((len(bits), 1))
        return ones, v * ones, beta(bits), np.full((1, 1), start)

    return choose


PARITY = (
    Function(
        signature="choose(bits)",
        reference=chosen(),
        section=STEP,
        inputs=lambda rng, N: (rng.integers(2, size=N),),
        special=(lambda rng: (np.ones(9, int),), lambda rng: (np.zeros(9, int),)),
        view=outputs,
        unit="bits",
        mistakes=(
            Mistake(
                chosen(beta=lambda bits: 1.0 * bits),
                "At the first one the memory becomes 0, and 0 has no sign to turn. Which step size "
                "reflects?",
                STEP,
            ),
            Mistake(
                chosen(beta=lambda bits: 2.0 * (1 - bits)),
                "The sign turns at each zero, and stays at each one.",
                STEP,
            ),
            Mistake(
                chosen(beta=lambda bits: np.full(len(bits), 2.0)),
                "The sign turns at every bit. At a zero the memory has to stay as it is.",
                STEP,
            ),
            Mistake(
                chosen(start=0.0),
                "The memory begins with 0, and 0 has no sign to turn.",
                STEP,
            ),
            Mistake(
                chosen(start=-1.0),
                "All signs are turned. Before the first bit the number of ones is 0, which is "
                "even.",
                STEP,
            ),
            Mistake(
                chosen(v=1.0),
                "The key finds the value 1 from the beginning, so that the error is 0 and nothing "
                "ever happens. Which value makes the error the memory itself, but for the sign?",
                STEP,
            ),
            Mistake(
                chosen(beta=lambda bits: 1.0 * bits, v=-1.0),
                "The first one writes −1, and further ones write it again. Can any value that is "
                "written turn the sign back?",
                STEP,
            ),
        ),
    ),
    Value(
        name="option",
        reference=lambda: "allow_negative_eigenvalues",
        section=STEP,
        form='a word, the name of the option in quotes: "..."',
        mistakes=(
            Mistake(
                "num_heads",
                "More heads are more memories, each with the same limit.",
                LAYER,
            ),
            Mistake(
                "width",
                "A wider memory has more directions. Along each of them the sign stays.",
                STEP,
            ),
            Mistake(
                "allow_negative_eigenvalues=True",
                "Give the name alone, without a value.",
                LAYER,
            ),
            Mistake(
                "allow_neg_eigval",
                "That is the name in another library. `help` lists those of this one.",
                LAYER,
            ),
        ),
    ),
)

# --- An inverse by doubling --------------------------------------------------------------------


def strictly_lower(rng, N):
    """A of the next smaller power of two, as it comes from random unit keys and step sizes."""
    L = min(32, 2 ** (N.bit_length() - 1))
    k = random_qkv(rng, L, D=8)[1]
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return (np.tril(rng.uniform(0.2, 1.0, (L, 1)) * (k @ k.T), -1),)


def product(A, first, exponents, sign=1):
    """(I + first A)(I + sign A^e)... for the exponents after the first."""
    eye = np.eye(len(A))
    out = eye + first * A
    for e in exponents:
        out = out @ (eye + sign * np.linalg.matrix_power(A, e))
    return out


def powers_of_two(A, below):
    return [2**i for i in range(1, 12) if 2**i < below]


def by_entries(A):
    out = np.eye(len(A)) - A
    for e in powers_of_two(A, len(A)):
        out = out @ (np.eye(len(A)) + A**e)
    return out


SERIES = (
    Function(
        signature="by_doubling(A)",
        reference=lambda A: np.linalg.inv(np.eye(len(A)) + A),
        section=SYSTEM,
        inputs=strictly_lower,
        unit="",
        mistakes=(
            Mistake(
                lambda A: np.linalg.inv(np.eye(len(A)) - A),
                "This is the inverse of I − A. Check the sign in the first factor.",
                SYSTEM,
            ),
            Mistake(
                lambda A: product(A, -1, powers_of_two(A, len(A)), sign=-1),
                "All factors have a minus. Multiply the first two by I + A and look at the sign of "
                "what is left.",
                SYSTEM,
            ),
            Mistake(
                lambda A: product(A, -1, range(2, len(A))),
                "The exponents run through all numbers. Each is twice the one before.",
                SYSTEM,
            ),
            Mistake(
                lambda A: np.eye(len(A)) - A,
                "This is the first factor alone; it is right only where A² = 0.",
                SYSTEM,
            ),
            Mistake(
                lambda A: product(A, -1, powers_of_two(A, len(A) / 2)),
                "The last factor is missing, that of the exponent L/2.",
                SYSTEM,
            ),
            Mistake(
                by_entries,
                "The powers were taken entry by entry, as `A**2` does. The formula has products of "
                "matrices.",
                SYSTEM,
            ),
            Mistake(
                lambda A: np.linalg.inv(np.eye(len(A)) + A.T),
                "This is the transpose.",
                SYSTEM,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "The delta rule",
    ("ex-delta-hand", *HAND),
    ("ex-delta-code", *CODE),
    ("ex-delta-naive", *NAIVE),
    ("ex-delta-parity", *PARITY),
    ("ex-delta-series", *SERIES),
)
