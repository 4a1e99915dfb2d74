"""Exercises of the chapter on what a fixed state can hold."""

import numpy as np

from lesson_code.checks import check_causal, check_streaming
from lesson_code.data import tasks
from lesson_code.exercises import Exercise
from lesson_code.numpy import delta_rule, identity, linear_attention

CHAPTER = "What a fixed state can hold"
NO_STATE = "What no state can do"
WELL = "What a fixed state does well"
LEARNING = "Learning from examples"

# --- Ranks by hand -----------------------------------------------------------------------------

RANKS = Exercise("ex-recall-ranks", CHAPTER)


def patterns(N=6):
    """Who reads whom, five times, (N, N)."""
    i, j = np.mgrid[1 : N + 1, 1 : N + 1]
    mirrored = (i + j == N + 1) & (i > N / 2)
    return [1.0 * x for x in (i - j == 1, i - j == 3, mirrored, (j <= i) / i, j == 1)]


def block_ranks(cut=3, N=6):
    return np.array([np.linalg.matrix_rank(A[cut:, :cut]) for A in patterns(N)])


# Of the patterns that go on in the same way, over the cuts of a longer sequence.
ROWS = np.max([block_ranks(cut, 16) for cut in range(1, 16)], axis=0)[[0, 1, 3, 4]]

RANKS.value("ranks", block_ranks(), NO_STATE, "five whole numbers").mistakes(
    (
        [np.linalg.matrix_rank(A) for A in patterns()],
        "These are the ranks of the whole matrices. The bound is about the block of later rows and "
        "earlier columns alone.",
    ),
    (
        [A[3:, :3].any(axis=1).sum() for A in patterns()],
        "The rows that are not zero were counted. Rows that are multiples of each other count "
        "once.",
    ),
)
RANKS.value("rows", ROWS, NO_STATE, "four whole numbers, for patterns 1, 2, 4 and 5").mistakes(
    (
        ROWS + [1, 1, 0, 0],
        "The own token needs no row: a state may be read before it is written.",
    ),
    (
        ROWS + [0, 0, 1, 0],
        "The mean needs a sum and a count, but the count is a normalizer: one number for each row "
        "of the state, and no row more.",
        WELL,
    ),
    (
        np.ones(4),
        "Each token after a cut reads one token, but which? In the second pattern several old ones "
        "are still to be told apart.",
    ),
)
RANKS.truth(
    "some_number",
    False,
    NO_STATE,
    "Write down the block after a cut at m = 5. Which tokens are still to be told apart?",
    "True or False, for pattern 3",
)

# --- A delay line ------------------------------------------------------------------------------

DELAY = Exercise("ex-recall-delay", CHAPTER)


def values(rng, N, leading=(), M=3):
    return rng.normal(size=(*leading, N, M))


@DELAY.function(NO_STATE, inputs=values)
def delay(v, *, initial_state=None, return_state=False):
    empty = np.zeros((*v.shape[:-2], 4, v.shape[-1]))
    line = np.concatenate([empty if initial_state is None else initial_state, v], axis=-2)
    out, state = line[..., :-4, :], line[..., -4:, :]
    return (out, state) if return_state else out


delay.passes(check_causal, NO_STATE).passes(check_streaming, NO_STATE, empty_pieces=False)


def late(v, p):
    """v by p positions later, zeros before."""
    pad = np.zeros((*v.shape[:-2], p, v.shape[-1]))
    return np.concatenate([pad, v], axis=-2)[..., : v.shape[-2], :]


delay.mistakes(
    (
        lambda v: late(v, 3),
        "The output is one position early. Four rows hold the last four tokens: what is in the "
        "last row before the own token is written, and what after it?",
    ),
    (
        lambda v: late(v, 1),
        "This is the token before. It is in the first row; the oldest is in another one.",
    ),
    (
        lambda v: late(np.cumsum(v, axis=-2), 4),
        "What leaves is a sum of all tokens: a row keeps its old content when a new token comes "
        "in.",
    ),
)

DOWN = np.eye(4, k=-1)

DELAY.value("T", DOWN, NO_STATE, "four rows of four numbers").mistakes(
    (
        DOWN.T,
        "It is the transpose: this one moves every row up, and the new token would be dropped at "
        "once.",
    ),
    (
        np.roll(np.eye(4), 1, axis=0),
        "The last row comes back at the top, where the new token is added to it.",
    ),
)

# --- Too good a learner ------------------------------------------------------------------------

LEAK = Exercise("ex-recall-leak", CHAPTER)


def sequences(rng, N):
    return tasks.in_context_regression(dim=3, pairs=N, batch=2, seed=rng)[:1]


def by_delta_rule(inputs, seen=1, step=lambda square: 1 / square):
    """The question sees the pairs up to ``seen`` before its own."""
    x, y = inputs[:, ::2, :-1], inputs[:, 1::2, -1:]
    k, out = late(x, seen), np.zeros(inputs.shape[:2])
    square = np.maximum((k**2).sum(axis=-1), 1e-9)
    out[:, ::2] = np.squeeze(delta_rule(x, k, late(y, seen), step(square)), axis=-1)
    return out


@LEAK.function(LEARNING, inputs=sequences, unit="")
def leaking(inputs):
    return by_delta_rule(inputs, seen=0)


@LEAK.function(LEARNING, inputs=sequences, unit="")
def honest(inputs):
    return by_delta_rule(inputs)


leaking.mistakes(
    (
        by_delta_rule,
        "This one does not leak. His writes a pair before the question about it is answered.",
    ),
)
honest.passes(check_causal, LEARNING).mistakes(
    (
        leaking.reference,
        "The answer is in the memory before the question is asked: the own pair is written first.",
    ),
    (
        lambda inputs: by_delta_rule(inputs, step=np.ones_like),
        "The step size is 1. These keys are not of length 1: with which step is one example fitted "
        "exactly?",
    ),
    (
        lambda inputs: by_delta_rule(inputs, step=lambda square: square**-0.5),
        "The step is divided by the length of the key. It is the squared length.",
    ),
)


@honest.mistake(
    "This is one step of gradient descent for all examples together, the plain sum. The delta rule "
    "takes a step for each."
)
def plain_sum(inputs):
    x, y = inputs[:, ::2, :-1], inputs[:, 1::2, -1:]
    read = linear_attention(
        x, late(x, 1), late(y, 1), feature_map=identity, normalize=False, causal=True
    )
    out = np.zeros(inputs.shape[:2])
    out[:, ::2] = np.squeeze(read, axis=-1) / (np.arange(x.shape[1]) + x.shape[-1] + 1)
    return out


def examples_and_width(rng, N):
    D = int(rng.integers(3, 20))
    return int(rng.integers(1, D)), D


@LEAK.function(LEARNING, inputs=examples_and_width, unit="")
def least_error(i, D):
    return D - i


least_error.mistakes(
    (lambda i, D: 1 - i / D, "This is relative to the signal. The mean of y² is not 1."),
    (
        lambda i, D: D * (1 - 1 / D) ** i,
        "This is what the delta rule leaves. Another method does better.",
    ),
    (
        lambda i, D: D,
        "This is the error of someone who always answers 0. What do the examples tell?",
    ),
    (
        lambda i, D: 0,
        "Fewer than D examples do not determine w. What do they say about a direction that is "
        "orthogonal to all of them?",
    ),
)

# --- The best step -----------------------------------------------------------------------------

STEP = Exercise("ex-recall-step", CHAPTER)


def left(i, D, step, square=None):
    """Error over signal for a step size and the factor of I in the mean of G²."""
    square = i * (i + D + 1) if square is None else square
    return 1 - 2 * step * i + step**2 * square


STEP.value("left", left(6, 8, 1 / 6), LEARNING, "error over signal for D = 8 and i = 6").mistakes(
    (left(6, 8, 1 / 15), "That is what the best step leaves. Here it is 1/i."),
    (
        left(6, 8, 1 / 6, square=6**2),
        "The mean of G² was taken for the square of the mean of G.",
    ),
)

WORSE = max(i for i in range(1, 80) if left(i, 8, 1 / i) > 1 + 1e-9)

STEP.value(
    "worse", WORSE, LEARNING, "the largest i with a larger error than saying 0, for D = 8"
).mistakes(
    (WORSE + 1, "There both are equally good. The last one that is worse comes before."),
)
