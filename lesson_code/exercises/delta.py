"""Exercises of the chapter on the delta rule."""

import numpy as np

from lesson_code.checks import check_causal, check_streaming, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import transpose
from lesson_code.numpy import delta_rule, gated_delta_rule, gated_linear_attention

CHAPTER = "The delta rule"
TWICE = "The same key, written twice"
STEP = "One step of least squares"
TOKENS = "Three tokens by hand"
SYSTEM = "Many tokens at once"
GATED = "Forget first, then correct"
LAYER = "The layer"
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

# --- The gated rule as a recurrence ------------------------------------------------------------

CODE = Exercise("ex-delta-code", CHAPTER)


def unit(k):
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def gated_inputs(rng, N, leading=(), D=5, M=3):
    """Keys of length 1/2 to 1; beta and g have the shape (..., N, 1)."""
    q, k, v = random_qkv(rng, N, leading=leading, D=D, M=M)
    beta, g = rng.uniform(0, 2, (*leading, N, 1)), -rng.exponential(size=(*leading, N, 1))
    return q, unit(k) * rng.uniform(0.5, 1, (*leading, N, 1)), v, beta, g


@CODE.function(GATED, inputs=gated_inputs)
def my_delta(q, k, v, beta, g, *, initial_state=None, return_state=False):
    state = {"initial_state": initial_state, "return_state": return_state}
    return gated_delta_rule(q, k, v, beta[..., 0], g[..., 0], **state)


my_delta.passes(check_causal, SYSTEM).passes(check_streaming, GATED, empty_pieces=False)


def loop(step):
    """``step(S, k, v, b, a)`` returns the new memory; all rows are (..., 1, ·)."""

    def wrong(q, k, v, beta, g):
        S, out = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])), np.empty_like(v)
        for t in range(k.shape[-2]):
            at = (..., slice(t, t + 1), slice(None))
            S = step(S, k[at], v[at], beta[at], np.exp(g[at]))
            out[at] = q[at] @ S
        return out

    return wrong


my_delta.mistakes(
    (
        loop(lambda S, k, v, b, a: a * S + transpose(k) @ (b * (v - k @ S))),
        "The error is that of the memory before its decay. Compare the value with what is left "
        "afterward.",
    ),
    (
        loop(lambda S, k, v, b, a: a * (S + transpose(k) @ (b * (v - k @ S)))),
        "The decay comes last and weakens the new write, too. Only the old memory decays.",
    ),
    (
        loop(lambda S, k, v, b, a: a * S + transpose(k) @ (v - k @ (a * S))),
        "The step size is missing: only the share beta of the error is written.",
        TWICE,
    ),
    (
        loop(lambda S, k, v, b, a: a * S + transpose(k) @ (b * v - k @ (a * S))),
        "beta multiplies the value only. It is the share of the whole error.",
        TWICE,
    ),
    (
        lambda q, k, v, beta, g: my_delta.reference(q, unit(k), v, beta, g),
        "The keys are brought to length 1 here. The layer does that before; the rule takes the "
        "keys as they are.",
        LAYER,
    ),
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

# --- Parity ------------------------------------------------------------------------------------

PARITY = Exercise("ex-delta-parity", CHAPTER)


def bits(rng, N):
    return rng.integers(2, size=N)


def outputs(choose):
    """What delta_rule returns with the reader's choice, for queries of 1."""

    def run(bits):
        chosen = choose(bits)
        if not isinstance(chosen, tuple | list) or len(chosen) != 4:
            raise TypeError("choose must return four arrays: k, v, beta and initial_state")
        k, v, beta, start = chosen
        out = delta_rule(np.ones((len(bits), 1)), k, v, beta, initial_state=start)
        for t in range(len(bits)):  # who counts the ones beforehand needs no memory
            alone = choose(bits[t : t + 1])
            for name, x, row in zip(("k", "v", "beta"), chosen[:3], alone[:3], strict=True):
                if not np.array_equal(x[t], row[0]):
                    raise ValueError(f"{name}[{t}] is not made from bits[{t}] alone")
        return out

    return run


def all_alike(bit):
    return lambda rng: np.full(9, bit)


@PARITY.function(STEP, inputs=bits, special=(all_alike(1), all_alike(0)), view=outputs, unit="bits")
def choose(bits):
    ones = np.ones((len(bits), 1))
    return ones, 0 * ones, 2.0 * bits, np.ones((1, 1))


def chosen(beta=lambda bits: 2.0 * bits, v=0.0, start=1.0):
    def wrong(bits):
        ones = np.ones((len(bits), 1))
        return ones, v * ones, beta(bits), np.full((1, 1), start)

    return wrong


choose.mistakes(
    (
        chosen(beta=lambda bits: 1.0 * bits),
        "At the first one the memory becomes 0, and 0 has no sign to turn. Which step size "
        "reflects?",
    ),
    (
        chosen(beta=lambda bits: np.full(len(bits), 2.0)),
        "The sign turns at every bit. At a zero the memory has to stay as it is.",
    ),
    (chosen(start=0.0), "The memory begins with 0, and 0 has no sign to turn."),
    (
        chosen(v=1.0),
        "The key finds the value 1 from the beginning, so that the error is 0 and nothing ever "
        "happens. Which value makes the error the memory itself, but for the sign?",
    ),
)
PARITY.value(
    "option",
    "allow_negative_eigenvalues",
    STEP,
    'a word, the name of the option in quotes: "..."',
).mistakes(
    ("num_heads", "More heads are more memories, each with the same limit.", LAYER),
    ("width", "A wider memory has more directions. Along each of them the sign stays."),
)

# --- An inverse by doubling --------------------------------------------------------------------

SERIES = Exercise("ex-delta-series", CHAPTER)


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
