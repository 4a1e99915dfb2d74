"""Exercises of the chapter on what a fixed state can hold."""

from __future__ import annotations

import numpy as np

from lesson_code import tasks
from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter, truth
from lesson_code.numpy import delta_rule, identity, linear_attention

NO_STATE = "What no state can do"
CLOSE = "How close a state can come"
WELL = "What a fixed state does well"
LEARNING = "Learning from examples"

# --- Ranks by hand -----------------------------------------------------------------------------


def patterns(N=6):
    """Who reads whom, five times, (N, N)."""
    i, j = np.mgrid[1 : N + 1, 1 : N + 1]
    return [
        1.0 * x
        for x in (
            i - j == 1,
            i - j == 3,
            (i + j == N + 1) & (i > N / 2),
            (j <= i) / i,
            j == 1,
        )
    ]


def block_ranks(m=3, N=6):
    return np.array([np.linalg.matrix_rank(A[m:, :m]) for A in patterns(N)])


def largest_ranks():
    """Of the patterns that go on in the same way, over the cuts of a longer sequence."""
    return np.max([block_ranks(m, 16) for m in range(1, 16)], axis=0)[[0, 1, 3, 4]]


def changed(array, **entries):
    array = array.copy()
    for place, value in entries.items():
        array[int(place[1:])] = value
    return array


RANKS = (
    Value(
        name="ranks",
        reference=block_ranks,
        section=NO_STATE,
        form="five whole numbers",
        mistakes=(
            Mistake(
                lambda: np.array([np.linalg.matrix_rank(A) for A in patterns()]),
                "These are the ranks of the whole matrices. The bound is about the block of later "
                "rows and earlier columns alone.",
                NO_STATE,
            ),
            Mistake(
                lambda: np.array([A[3:, :3].any(axis=1).sum() for A in patterns()]),
                "The rows that are not zero were counted. Rows that are multiples of each other "
                "count once.",
                NO_STATE,
            ),
            Mistake(
                lambda: np.array([A[3:, :3].any(axis=0).sum() for A in patterns()]),
                "The columns that are not zero were counted. Columns that are multiples of each "
                "other count once.",
                NO_STATE,
            ),
            Mistake(
                lambda: changed(block_ranks(), _0=0),
                "In the first pattern one token after the cut still reads one before it.",
                NO_STATE,
            ),
            Mistake(
                lambda: changed(block_ranks(), _0=3),
                "In the first pattern tokens 5 and 6 read tokens after the cut: these are not in "
                "the block.",
                NO_STATE,
            ),
            Mistake(
                lambda: changed(block_ranks(), _2=1),
                "The third block is the identity with its columns in reversed order.",
                NO_STATE,
            ),
        ),
    ),
    Value(
        name="rows",
        reference=largest_ranks,
        section=NO_STATE,
        form="four whole numbers, for patterns 1, 2, 4 and 5",
        mistakes=(
            Mistake(
                lambda: changed(largest_ranks(), _0=2, _1=4),
                "The own token needs no row: a state may be read before it is written.",
                NO_STATE,
            ),
            Mistake(
                lambda: np.ones(4),
                "Each token after a cut reads one token, but which? In the second pattern several "
                "old ones are still to be told apart.",
                NO_STATE,
            ),
            Mistake(
                lambda: changed(largest_ranks(), _2=2),
                "The mean needs a sum and a count, but the count is a normalizer: one number for "
                "each row of the state, and no row more.",
                WELL,
            ),
            Mistake(
                lambda: np.array([1, 3, 3, 1]),
                "For the mean, all old tokens may be added up as soon as they come: nobody will "
                "tell them apart.",
                WELL,
            ),
        ),
    ),
    truth(
        "some_number",
        False,
        section=NO_STATE,
        form="True or False, for pattern 3",
        message=(
            "Write down the block after a cut at m = 5. Which tokens are still to be told apart?"
        ),
    ),
)

# --- A delay line ------------------------------------------------------------------------------


def late(v, p):
    """v by p positions later, zeros before."""
    pad = np.zeros((*v.shape[:-2], p, v.shape[-1]))
    return np.concatenate([pad, v], axis=-2)[..., : v.shape[-2], :]


def one_array(rng, N, leading=(), M=3):
    return (rng.normal(size=(*leading, N, M)),)


DOWN = np.eye(4, k=-1)

DELAY = (
    Function(
        signature="delay(v, *, initial_state=None, return_state=False)",
        reference=lambda v: late(v, 4),
        section=NO_STATE,
        inputs=one_array,
        mistakes=(
            Mistake(
                lambda v: late(v, 3),
                "The output is one position early. Four rows hold the last four tokens: what is in "
                "the last row before the own token is written, and what after it?",
                NO_STATE,
            ),
            Mistake(
                lambda v: late(v, 5),
                "The output is one position late. Which row holds the token of four positions ago "
                "when the own token comes?",
                NO_STATE,
            ),
            Mistake(
                lambda v: late(v, 1),
                "This is the token before. It is in the first row; the oldest is in another one.",
                NO_STATE,
            ),
            Mistake(
                lambda v: late(np.cumsum(v, axis=-2), 4),
                "What leaves is a sum of all tokens: a row keeps its old content when a new token "
                "comes in.",
                NO_STATE,
            ),
            Mistake(
                lambda v: np.roll(v, 4, axis=-2),
                "The sequence is turned round, and its last tokens come first. Before four tokens "
                "have been seen the output is zero.",
                NO_STATE,
            ),
            Mistake(
                lambda v: sum(late(v, p) for p in range(1, 5)),
                "All four rows are added up. Only the oldest one is read.",
                NO_STATE,
            ),
            Mistake(
                lambda v: sum(late(v, 4 * p) for p in range(1, v.shape[-2] // 4 + 1)) + 0 * v,
                "A token comes back every four positions: the last row has to be dropped, not "
                "moved to the top.",
                NO_STATE,
            ),
        ),
        further=(
            Further(check_causal, NO_STATE),
            Further(check_streaming, NO_STATE, options={"empty_pieces": False}),
        ),
    ),
    Value(
        name="T",
        reference=lambda: DOWN,
        section=NO_STATE,
        form="four rows of four numbers",
        mistakes=(
            Mistake(
                lambda: DOWN.T,
                "It is the transpose: this one moves every row up, and the new token would be "
                "dropped at once.",
                NO_STATE,
            ),
            Mistake(
                lambda: np.roll(np.eye(4), 1, axis=0),
                "The last row comes back at the top, where the new token is added to it.",
                NO_STATE,
            ),
            Mistake(
                lambda: np.eye(4),
                "The identity leaves each row where it is.",
                NO_STATE,
            ),
        ),
    ),
)

# --- Too good a learner ------------------------------------------------------------------------


def sequences(rng, N):
    return tasks.in_context_regression(dim=3, pairs=N, batch=2, seed=rng)[:1]


def pairs_of(inputs):
    return inputs[:, ::2, :-1], inputs[:, 1::2, -1:]


def answered(inputs, answers, start=0):
    out = np.zeros(inputs.shape[:2])
    out[:, start::2] = answers[..., 0]
    return out


def size(k, power=2):
    return np.maximum(np.sum(k**2, axis=-1), 1e-9) ** (power / 2)


def regress(inputs, *, seen=1, step=lambda k: 1 / size(k), start=0):
    """The delta rule; the question sees the pairs up to ``seen`` before its own."""
    x, y = pairs_of(inputs)
    k, v = (late(a, seen) for a in (x, y))
    return answered(inputs, delta_rule(x, k, v, step(k)), start)


def plain(inputs):
    """One step of gradient descent from 0, of the best size."""
    x, y = pairs_of(inputs)
    read = linear_attention(
        x, late(x, 1), late(y, 1), feature_map=identity, normalize=False, causal=True
    )
    i = np.arange(x.shape[1])[:, None]
    return answered(inputs, read / (i + x.shape[-1] + 1))


def uncorrected(inputs):
    """Each y is written whole, with the step size of the delta rule."""
    x, y = pairs_of(inputs)
    k, v = late(x, 1), late(y / size(x)[..., None], 1)
    read = linear_attention(x, k, v, feature_map=identity, normalize=False, causal=True)
    return answered(inputs, read)


def never_cleared(inputs):
    """One memory for all sequences of the batch, one after the other."""
    x, y = (a.reshape(1, -1, a.shape[-1]) for a in pairs_of(inputs))
    k, v = late(x, 1), late(y, 1)
    out = np.zeros(inputs.shape[:2])
    out[:, ::2] = np.reshape(delta_rule(x, k, v, 1 / size(k)), (len(inputs), -1))
    return out


def fitted(inputs):
    return answered(inputs, tasks.least_squares(inputs)[:, ::2, None])


def numbers(rng, N):
    D = int(rng.integers(3, 20))
    return int(rng.integers(1, D)), D


LEAK = (
    Function(
        signature="leaking(inputs)",
        reference=lambda inputs: regress(inputs, seen=0),
        section=LEARNING,
        inputs=sequences,
        unit="",
        mistakes=(
            Mistake(
                regress,
                "This one does not leak. His writes a pair before the question about it is "
                "answered.",
                LEARNING,
            ),
            Mistake(
                lambda inputs: regress(inputs, seen=0, start=1),
                "The answers stand one position late, where y is. They belong to the place of the "
                "question, x.",
                LEARNING,
            ),
        ),
    ),
    Function(
        signature="honest(inputs)",
        reference=regress,
        section=LEARNING,
        inputs=sequences,
        unit="",
        mistakes=(
            Mistake(
                lambda inputs: regress(inputs, seen=0),
                "The answer is in the memory before the question is asked: the own pair is "
                "written first.",
                LEARNING,
            ),
            Mistake(
                lambda inputs: regress(inputs, seen=2),
                "The last example is missing. A question may use the pair right before it.",
                LEARNING,
            ),
            Mistake(
                lambda inputs: regress(inputs, step=lambda k: np.ones(k.shape[:-1])),
                "The step size is 1. These keys are not of length 1: with which step is one "
                "example fitted exactly?",
                LEARNING,
            ),
            Mistake(
                lambda inputs: regress(inputs, step=lambda k: 1 / size(k, 1)),
                "The step is divided by the length of the key. It is the squared length.",
                LEARNING,
            ),
            Mistake(
                lambda inputs: regress(inputs, start=1),
                "The answers stand one position late, where y is. They belong to the place of the "
                "question, x.",
                LEARNING,
            ),
            Mistake(
                plain,
                "This is one step of gradient descent for all examples together, the plain sum. "
                "The delta rule takes a step for each.",
                LEARNING,
            ),
            Mistake(
                uncorrected,
                "Each y is written whole. The delta rule writes what is missing: y without what "
                "x finds in the memory already.",
                LEARNING,
            ),
            Mistake(
                never_cleared,
                "The second sequence begins with the memory of the first. Each has a w of its own.",
                LEARNING,
            ),
            Mistake(
                fitted,
                "This is least squares. The exercise is about the delta rule.",
                LEARNING,
            ),
        ),
        further=(Further(check_causal, LEARNING),),
    ),
    Function(
        signature="least_error(i, D)",
        reference=lambda i, D: D - i,
        section=LEARNING,
        inputs=numbers,
        unit="",
        mistakes=(
            Mistake(
                lambda i, D: 1 - i / D,
                "This is relative to the signal. The mean of y² is not 1.",
                LEARNING,
            ),
            Mistake(
                lambda i, D: D * (1 - 1 / D) ** i,
                "This is what the delta rule leaves. Another method does better.",
                LEARNING,
            ),
            Mistake(
                lambda i, D: D * (D + 1) / (i + D + 1),
                "This is what one step of gradient descent leaves. Another method does better.",
                LEARNING,
            ),
            Mistake(
                lambda i, D: D,
                "This is the error of someone who always answers 0. What do the examples tell?",
                LEARNING,
            ),
            Mistake(
                lambda i, D: 0,
                "Fewer than D examples do not determine w. What do they say about a direction that "
                "is orthogonal to all of them?",
                LEARNING,
            ),
        ),
    ),
)

# --- The best step -----------------------------------------------------------------------------

EXAMPLES, WIDTH = 6, 8


def left(i=EXAMPLES, D=WIDTH, *, step=None, square=None):
    """Error over signal for a step size and the factor of I in the mean of G²."""
    step = 1 / i if step is None else step
    square = i * (i + D + 1) if square is None else square
    return 1 - 2 * step * i + step**2 * square


def last_worse(D=WIDTH):
    return max(i for i in range(1, 10 * D) if left(i, D) > 1 + 1e-9)


BEST = (
    Value(
        name="left",
        reference=left,
        section=LEARNING,
        form="error over signal for D = 8 and i = 6",
        mistakes=(
            Mistake(
                lambda: left(step=1 / (EXAMPLES + WIDTH + 1)),
                "That is what the best step leaves. Here it is 1/i.",
                LEARNING,
            ),
            Mistake(
                lambda: WIDTH * left(),
                "That is the error. Divide it by the signal, the mean of y².",
                LEARNING,
            ),
            Mistake(
                lambda: left(square=EXAMPLES**2),
                "The mean of G² was taken for the square of the mean of G.",
                LEARNING,
            ),
            Mistake(
                lambda: left(square=EXAMPLES * (EXAMPLES + WIDTH)),
                "The mean of |x|² x xᵀ is a little larger than D I, by more than one I.",
                LEARNING,
            ),
            Mistake(
                lambda: left(square=EXAMPLES * (WIDTH + 2)),
                "In G² the products of two different examples are missing.",
                LEARNING,
            ),
            Mistake(
                lambda: (EXAMPLES + WIDTH + 1) / EXAMPLES,
                "That is the power of the answer itself. What is left is the difference to y.",
                LEARNING,
            ),
        ),
    ),
    Value(
        name="worse",
        reference=last_worse,
        section=LEARNING,
        form="the largest i with a larger error than saying 0, for D = 8",
        mistakes=(
            Mistake(
                lambda: last_worse() + 1,
                "There both are equally good. The last one that is worse comes before.",
                LEARNING,
            ),
            Mistake(
                lambda: last_worse() - 1,
                "One more is worse, too.",
                LEARNING,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "What a fixed state can hold",
    ("ex-recall-ranks", *RANKS),
    ("ex-recall-delay", *DELAY),
    ("ex-recall-leak", *LEAK),
    ("ex-recall-step", *BEST),
)
