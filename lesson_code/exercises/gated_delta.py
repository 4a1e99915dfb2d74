"""Exercises of the chapter on the rules that forget, then correct."""

import math

import numpy as np

from lesson_code.checks import check_causal, check_streaming, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import transpose
from lesson_code.numpy import gated_delta_rule, kimi_delta_attention, rwkv7

CHAPTER = "Forget, then correct"
MEMORIES = "One call, four memories"
FIRST = "Forget first, then correct"
APART = "RWKV-7: erase and write apart"
ONE = "One transition"
CHUNK = "One chunk for all of them"
SAVED = "Half of the products saved"
LAYERS = "Where the gates come from"
MEASURED = "Are both needed? A measurement"

# --- Three orders ------------------------------------------------------------------------------

ORDER = Exercise("ex-gated-order", CHAPTER)
OLD, NEW, HALF = 12.0, 10.0, 0.5
ERROR_FIRST = HALF * OLD + HALF * (NEW - OLD)
DECAY_LAST = HALF * (OLD + HALF * (NEW - OLD))
GATED = HALF * OLD + HALF * (NEW - HALF * OLD)

ORDER.value("gated", GATED, FIRST).mistakes(
    (ERROR_FIRST, "The error is that of the memory before it fades. Let it fade first."),
    (NEW, "The whole error is written here. Which share of it is beta?"),
    (
        HALF * OLD + HALF * NEW,
        "Half of the value was added, without a look at what the key finds already.",
        MEMORIES,
    ),
)
ORDER.value("error_first", ERROR_FIRST, FIRST).mistakes(
    (GATED, "That is the gated delta rule. Here the value is compared with 12."),
    (DECAY_LAST, "Here the write has faded, too. Only the old memory does."),
)
ORDER.value("decay_last", DECAY_LAST, FIRST).mistakes(
    (ERROR_FIRST, "Here the write is as it was. A decay that comes last fades it, too."),
)
ORDER.value("rate", HALF * HALF, APART).mistakes(
    (HALF, "RWKV-7 finds 12, not 6. Half of 12 is more than half of what is left."),
    (1.0, "This rate takes 12 from the 6 that are left."),
)

# --- Half-lives --------------------------------------------------------------------------------

LIFE = Exercise("ex-gated-half-life", CHAPTER)

LIFE.value("half_life", math.log(2) / -math.log(0.9), LAYERS).mistakes(
    (5.0, "Each token takes a tenth of what is left, not of what there was at first."),
    (1 / -math.log(0.9), "After so many tokens 1/e is left, 37%. How many for a half?"),
    (10.0, "After so many tokens about 35% is left. How many for a half?"),
)
LIFE.value("decay", 2 ** (-1 / 1000), LAYERS, tolerance=1e-5).mistakes(
    (0.999, "After 1,000 tokens this leaves 37%, 1/e, and not a half."),
    (0.9995, "This takes away half of the fact, if each token took the same amount."),
    (-math.log(2) / 1000, "That is the logarithm g. Which decay is it?"),
)
FEW = math.log(100) / math.exp(-0.5)
LIFE.value("tokens", math.ceil(FEW), LAYERS).mistakes(
    (FEW, "Tokens are whole. At which is it less than 1% for the first time?"),
    (math.floor(FEW), "A little more than 1% is left there."),
    (2, "Is each decay 0.607? That is its logarithm, without the sign."),
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


@CODE.function(FIRST, inputs=gated_inputs)
def my_delta(q, k, v, beta, g, *, initial_state=None, return_state=False):
    state = {"initial_state": initial_state, "return_state": return_state}
    return gated_delta_rule(q, k, v, beta[..., 0], g[..., 0], **state)


my_delta.passes(check_causal, CHUNK).passes(check_streaming, FIRST, empty_pieces=False)


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
        FIRST,
    ),
    (
        loop(lambda S, k, v, b, a: a * S + transpose(k) @ (b * v - k @ (a * S))),
        "beta multiplies the value only. It is the share of the whole error.",
        FIRST,
    ),
    (
        lambda q, k, v, beta, g: my_delta.reference(q, unit(k), v, beta, g),
        "The keys are brought to length 1 here. The layer does that before; the rule takes the "
        "keys as they are.",
        LAYERS,
    ),
)

# --- Kimi delta attention out of RWKV-7 --------------------------------------------------------

TRANSITION = Exercise("ex-gated-transition", CHAPTER)


def kimi_inputs(rng, N, D=5, M=3):
    q, k, v, beta, _ = gated_inputs(rng, N, D=D, M=M)
    return q, k, v, beta / 2, -rng.exponential(size=(N, D))


@TRANSITION.function(ONE, inputs=kimi_inputs)
def my_kda(q, k, v, beta, g):
    return kimi_delta_attention(q, k, v, beta[..., 0], g)


my_kda.mistakes(
    (
        lambda q, k, v, beta, g: rwkv7(q, beta * k, v, g, k, beta + 0 * g),
        "What is erased is what the key finds before the decay. In KDA it looks at what is left.",
        APART,
    ),
    (
        lambda q, k, v, beta, g: rwkv7(q, k, v, g, np.exp(g) * k, beta / np.exp(g)),
        "The value is written whole. KDA writes the share beta of it.",
    ),
    (
        lambda q, k, v, beta, g: rwkv7(q, beta * k, v, g, np.exp(g) * k, beta + 0 * g),
        "The removal key has the decay, as it should, and so has the place at which is erased: "
        "it is the rate times the removal key. KDA erases at its key as it is.",
    ),
)

# --- What the merged products save -------------------------------------------------------------

PRODUCTS = Exercise("ex-gated-products", CHAPTER)


def share(x):
    return (3.5 * x + 3) / (7.5 * x + 4)


PRODUCTS.value("equal", share(1), SAVED).mistakes(
    (0.5, "Matrices are halved. What else is there to do, inside a chunk and with the state?"),
    (1 / share(1), "This is how many times as many the general rule needs."),
    (3.5 / 7.5, "This is the work inside the chunk alone. Reads and writes of the state come in."),
)
PRODUCTS.value("short", share(0), SAVED).mistakes(
    (1.0, "The state costs both rules something, but not the same: count the writes."),
    (0.5, "Both rules read twice. How often does each write?"),
)
PRODUCTS.value("long", 3.5 / 7.5, SAVED).mistakes(
    (0.5, "Matrices are halved, and products with values fall from three to one. The solution?"),
    (3 / 7, "The triangular system costs both of them half a product with the values."),
)

# --- Clearing without a decay ------------------------------------------------------------------

MARK = Exercise("ex-gated-mark", CHAPTER)
KEY, SHARED = np.array([0.6, 0.8, 0.0]), np.array([1.0, 0.0, 0.0])


def written(s, k, v):
    return s + k * (v - k @ s)


NOTED = written(np.zeros(3), KEY, 10.0)
MARKED = written(NOTED, SHARED, 50.0)
AGAIN = written(MARKED, KEY, 9.0)

MARK.value("found", KEY @ MARKED, MEASURED).mistakes(
    (
        KEY @ (NOTED + 50.0 * SHARED),
        "The mark was added. The rule writes the difference from what its key finds, which is 6.",
        FIRST,
    ),
    (10.0, "That is what it found before the text ended. The mark has changed the first number."),
    (KEY[0] * 50.0, "That is the mark's share. The second number of the memory answers, too."),
)
MARK.value("mark", AGAIN[0], MEASURED).mistakes(
    (50.0, "The correction goes along the whole key, and its first entry is 0.6."),
    (MARKED[0] + (9.0 - KEY @ MARKED), "The error is written under the key: times 0.6 here."),
)
