"""Exercises of the chapter on Mamba."""

import math

import numpy as np

from lesson_code.checks import check_causal
from lesson_code.exercises import Exercise
from lesson_code.numpy import mamba3, state_space_dual

CHAPTER = "Mamba: each token sets the clock"
RATE = "A bucket with a hole"
SCAN = "The selective scan"
CONVOLUTION = "A short convolution"
HEADS = "Mamba-2: one decay for each head"
TWICE = "Mamba-3 writes twice"
TURN = "Mamba-3 turns its state"

# --- Three steps of Mamba ----------------------------------------------------------------------

HAND = Exercise("ex-mamba-hand", CHAPTER)


def states(steps, decay=lambda d: 2.0**-d, write=lambda d: d):
    h, found = 0.0, []
    for x, d in zip((8.0, 4.0, 2.0), steps, strict=True):
        h = decay(d) * h + write(d) * x
        found.append(h)
    return found


STEPS, LATE = (1.0, 2.0, 0.0), (1.0, 2.0, 30.0)
H = states(STEPS)

HAND.value("h", H, SCAN, "three numbers").mistakes(
    (
        states(STEPS, write=lambda d: 1.0),
        "The inputs are written as they are. The step multiplies what is written, too.",
    ),
    (
        states(STEPS, write=lambda d: (1 - 2.0**-d) / math.log(2)),
        "These are the exact writes. Mamba takes the approximation.",
        RATE,
    ),
    (
        [*H[:2], 0.0],
        "The memory is empty at the end. When no time passes, what leaks out?",
        RATE,
    ),
)
HAND.value("h_late", states(LATE)[-1], SCAN).mistakes(
    (
        2.0,
        "The past is gone, but the third input is not written as it is: the step multiplies it.",
    ),
    (
        H[1] + 30 * 2.0,
        "The past has not faded. How much of it is left after so long a step?",
        RATE,
    ),
)

# --- A convolution that looks ahead ------------------------------------------------------------

SAME = Exercise("ex-mamba-same", CHAPTER)
W = np.array([1.0, 2.0, 3.0, 4.0])

SAME.value("ahead", 1, CONVOLUTION, "how many positions").mistakes(
    (
        2,
        "That is how far it looks back. Four weights cover the token itself and three others.",
    ),
    (0, "Put in an impulse and look at the first output that is not 0: where is it?"),
)


def channels(rng, N, D=2):
    return rng.normal(size=(N, D))


def convolved(x, weights=W, later=0):
    """Outputs of the full convolution from the one on that sees ``later`` tokens ahead."""
    columns = [np.convolve(c, weights[::-1])[later:][: len(x)] for c in x.T]
    return np.stack(columns, axis=1)


@SAME.function(CONVOLUTION, inputs=channels)
def repaired(x):
    return convolved(x)


repaired.passes(check_causal, CONVOLUTION).mistakes(
    (
        lambda x: convolved(x, later=1),
        "It is the middle of the full convolution still, so each output sees a later token. Which "
        "outputs of the full one see no later token?",
    ),
    (
        lambda x: convolved(x, W[::-1]),
        "The weights are in reverse: the last one belongs to the token itself.",
    ),
    (
        lambda x: convolved(x) / (1 + np.exp(-convolved(x))),
        "The silu is in it. This exercise asks for the sum alone.",
    ),
)

# --- Two writes --------------------------------------------------------------------------------

TRAPEZOID = Exercise("ex-mamba-trapezoid", CHAPTER)


def written_twice(share, late_decays=True):
    """The states of three tokens, whose second write may miss its decay."""
    S, last, found = 0.0, 0.0, []
    for x in (8.0, 4.0, 2.0):
        late = (1 - share) * last
        S = 0.5 * (S + late) if late_decays else 0.5 * S + late
        S, last = S + share * x, x
        found.append(S)
    return found


TRAPEZOID.value("S", written_twice(0.25), TWICE, "three numbers").mistakes(
    (
        written_twice(0.75),
        "The shares are exchanged: λ is that of the new token, 1 - λ that of the one before it.",
    ),
    (
        written_twice(0.25, late_decays=False),
        "The token before is written a second time as it was. It has leaked for a step since.",
    ),
    (written_twice(1.0), "That is the rule of Euler, with λ = 1: each token is written once."),
)
TRAPEZOID.value("weights", [0.25, 0.5, 0.25], TWICE, "three numbers").mistakes(
    (
        [0.25, 0.5, 1.0],
        "The last token has been written once so far: its second write comes with the next token.",
    ),
    (
        [0.0625, 0.125, 0.25],
        "Only the first writes are counted. By the third token the first two have been written "
        "twice.",
    ),
)

# --- A state that counts -----------------------------------------------------------------------

COUNTER = Exercise("ex-mamba-turn", CHAPTER)

COUNTER.value("reads", [8.0, 0.0, 0.0, 8.0], TURN, "four numbers").mistakes(
    (
        [8.0, 0.0, -8.0, 0.0],
        "Each token reads as if its own angle were the only one. The angles add up.",
    ),
)
COUNTER.value("query", [0.0, 1.0], TURN, "two numbers").mistakes(
    (
        [0.0, -1.0],
        "The state is turned back, clockwise. Keys and queries are what turns forward.",
    ),
    (
        [1.0, 0.0],
        "That query reads 0: after three quarters the point stands at a right angle to it.",
    ),
)
COUNTER.value("counted", [8.0, -4.0, -4.0], TURN, "three numbers").mistakes(
    (
        [8.0, 4.0, -4.0],
        "A third of a circle is 120 degrees, not 60.",
    ),
    (
        [8.0, -4.0, 4.0],
        "After two moves the sum is 240 degrees. What is its cosine?",
    ),
)

# --- The masked product ------------------------------------------------------------------------

MASKED = Exercise("ex-mamba-masked", CHAPTER)


def mamba3_inputs(rng, N, D=4, M=3):
    """Inputs, steps, decays, shares, angles, keys and queries of one head."""
    delta, share, g = rng.random((3, N))
    B, C = rng.normal(size=(2, N, 4))
    return rng.normal(size=(N, M)), delta, -g, share, rng.normal(size=(N, 2)), B, C


@MASKED.function(TURN, inputs=mamba3_inputs)
def masked(x, delta, g, share, angle, B, C):
    return mamba3(x, delta, g, share, angle, B, C)


def without_angles(x, delta, g, share, angle, B, C):
    return mamba3(x, delta, g, share, 0 * angle, B, C)


def without_sums(x, delta, g, share, angle, B, C):
    steps = np.diff(angle, axis=0, prepend=0 * angle[:1])
    return mamba3(x, delta, g, share, steps, B, C)


def with_both_on_the_diagonal(x, delta, g, share, angle, B, C):
    theta = np.cumsum(angle, axis=0)
    z = (B[:, 0::2] + 1j * B[:, 1::2]) * np.exp(1j * theta)
    c = (C[:, 0::2] + 1j * C[:, 1::2]) * np.exp(1j * theta)
    both = share * delta + np.append(((1 - share) * delta)[1:], 0.0)
    gamma = np.exp(np.tril(np.tril(np.repeat(g[:, None], len(g), axis=1), -1).cumsum(axis=0)))
    return np.tril((c @ z.conj().T).real * gamma * both) @ x


masked.passes(check_causal, TWICE).mistakes(
    (without_angles, "Nothing is rotated.", TURN),
    (
        without_sums,
        "Keys and queries are turned by the angles of their own token. They turn by the sum of all "
        "angles so far.",
        TURN,
    ),
    (
        lambda x, delta, g, share, angle, B, C: mamba3(x, delta, g, 0 * share + 1, angle, B, C),
        "Each token is written once, with λ = 1.",
        TWICE,
    ),
    (
        with_both_on_the_diagonal,
        "A token sees both of its own writes. The second one is made by the next token, and its "
        "own query must not see it.",
        TWICE,
    ),
)

# --- Two documents -----------------------------------------------------------------------------

DOCUMENTS = Exercise("ex-mamba-documents", CHAPTER)


def documents(rng, N, D=5, M=3):
    B, C = rng.normal(size=(2, N, D))
    return rng.normal(size=(N, M)), -rng.random(N), B, C, int(rng.integers(N // 3, N))


def by_ssd(apart):
    return lambda x, g, B, C, start: state_space_dual(x, apart(g, start), B, C)


def with_rows(rows, value=-np.inf):
    """A function that sets log decays of the rows that rows(start) selects."""

    def apart(g, start):
        g = g.copy()
        g[rows(start)] = value
        return g

    return apart


@DOCUMENTS.function(HEADS, inputs=documents, view=by_ssd)
def apart(g, start):
    return with_rows(lambda start: start)(g, start)


apart.mistakes(
    (
        with_rows(lambda start: slice(start + 1, start + 2)),
        "The memory is emptied one token too late: the first token of the second text reads the "
        "first text, and is forgotten with it.",
    ),
    (
        with_rows(lambda start: slice(start, None)),
        "Every token of the second text empties the memory, so each sees itself alone.",
    ),
    (
        with_rows(lambda start: start, 0.0),
        "A log decay of 0 is a decay of 1: it keeps everything.",
    ),
)
