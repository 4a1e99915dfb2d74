"""Mistakes in the exercises of the chapter on what a fixed state can hold."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

NO_STATE = "What no state can do"
WELL = "What a fixed state does well"
LEARNING = "Learning from examples"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("ranks", [5, 3, 3, 6, 1], "of the whole matrices", NO_STATE),
        ("ranks", [1, 3, 3, 3, 3], "rows that are not zero were counted", NO_STATE),
        ("ranks", (1, 3, 3, 3, 1), "columns that are not zero were counted", NO_STATE),
        ("ranks", [0, 3, 3, 1, 1], "still reads one before it", NO_STATE),
        ("ranks", [3, 3, 3, 1, 1], "these are not in the block", NO_STATE),
        ("ranks", [1, 3, 1, 1, 1], "in reversed order", NO_STATE),
        ("rows", [2, 4, 1, 1], "own token needs no row", NO_STATE),
        ("rows", [1, 1, 1, 1], "several old ones", NO_STATE),
        ("rows", [1, 3, 2, 1], "the count is a normalizer", WELL),
        ("rows", [1, 3, 3, 1], "may be added up", WELL),
        ("some_number", True, "after a cut at m = 5", NO_STATE),
    ],
)
def test_ranks(refused, part, answer, words, section) -> None:
    refused("ex-recall-ranks", words, section, **{part: answer})


def test_right_ranks() -> None:
    check_exercise(
        "ex-recall-ranks", ranks=(1, 3, 3, 1, 1), rows=(1, 3, 1, 1), some_number=np.False_
    )


# --- A delay line ------------------------------------------------------------------------------


def line(T, read_first=True, row=-1, rows=4):
    """The recurrence with a matrix, for any leading dimensions."""

    def fn(v, *, initial_state=None, return_state=False):
        S = initial_state
        if S is None:
            S = np.zeros((*v.shape[:-2], rows, v.shape[-1]))
        enters, out = np.identity(rows)[:, :1], np.zeros_like(v)
        for t in range(v.shape[-2]):
            before = S
            S = T @ S + enters * v[..., t : t + 1, :]
            read = before if read_first else S
            out[..., t, :] = read[..., row, :] if row is not None else read.sum(axis=-2)
        return (out, S) if return_state else out

    return fn


DOWN = np.diag(np.ones(3), -1)


def keeps_the_first(v, **_):
    T = DOWN.copy()
    T[0, 0] = 1
    return line(T)(v)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (line(DOWN, read_first=False), "one position early"),
        (line(np.diag(np.ones(4), -1), rows=5), "one position late"),
        (line(DOWN, row=0), "This is the token before"),
        (line(DOWN, row=None), "All four rows are added up"),
        (line(np.roll(np.eye(4), 1, axis=0)), "comes back every four positions"),
        (keeps_the_first, "keeps its old content"),
        (lambda v: np.concatenate([v[..., -4:, :], v[..., :-4, :]], axis=-2), "turned round"),
    ],
)
def test_delay(refused, fn, words) -> None:
    refused("ex-recall-delay", words, NO_STATE, delay=fn)


def test_right_delay(refused) -> None:
    check_exercise("ex-recall-delay", delay=line(DOWN), T=DOWN)

    def slices(v, **_):
        out = np.zeros_like(v)
        out[..., 4:, :] = v[..., :-4, :]
        return out

    refused("ex-recall-delay", "must return the pair (out, state)", NO_STATE, delay=slices)


def test_the_matrix_of_the_delay(refused) -> None:
    label = "ex-recall-delay"
    refused(label, "the transpose", NO_STATE, T=np.diag(np.ones(3), 1))
    refused(
        label, "comes back at the top", NO_STATE,
        T=[[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    )  # fmt: skip
    refused(label, "leaves each row where it is", NO_STATE, T=np.identity(4))


# --- Too good a learner ------------------------------------------------------------------------


def learner(order, share=lambda x: 1 / (x @ x), at=0):
    """One sequence after the other: letters of the loop, a to answer and w to write."""

    def fn(inputs):
        out = np.zeros(inputs.shape[:2])
        for b, sequence in enumerate(inputs):
            guess = np.zeros(sequence.shape[1] - 1)
            for n in range(0, len(sequence), 2):
                x, y = sequence[n, :-1], sequence[n + 1, -1]
                for step in order:
                    if step == "a":
                        out[b, n + at] = guess @ x
                    else:
                        guess = guess + share(x) * (y - guess @ x) * x
        return out

    return fn


def uncorrected(inputs):
    out = np.zeros(inputs.shape[:2])
    for b, sequence in enumerate(inputs):
        guess = np.zeros(sequence.shape[1] - 1)
        for n in range(0, len(sequence), 2):
            x, y = sequence[n, :-1], sequence[n + 1, -1]
            out[b, n] = guess @ x
            guess = guess + y * x / (x @ x)
    return out


def never_cleared(inputs):
    one = learner("aw")(inputs.reshape(1, -1, inputs.shape[-1]))
    return one.reshape(inputs.shape[:2])


def one_step(inputs):
    out = np.zeros(inputs.shape[:2])
    x, y = inputs[:, ::2, :-1], inputs[:, 1::2, -1]
    for i in range(x.shape[1]):
        moved = np.einsum("bnd,bn->bd", x[:, :i], y[:, :i])
        out[:, 2 * i] = np.einsum("bd,bd->b", x[:, i], moved) / (i + x.shape[2] + 1)
    return out


def fits(inputs):
    out = np.zeros(inputs.shape[:2])
    for b, sequence in enumerate(inputs):
        x, y = sequence[::2, :-1], sequence[1::2, -1]
        for i in range(1, len(x)):
            out[b, 2 * i] = np.linalg.lstsq(x[:i], y[:i], rcond=None)[0] @ x[i]
    return out


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (learner("wa"), "The answer is in the memory before the question"),
        (learner("aw", share=lambda x: 1), "The step size is 1"),
        (learner("aw", share=lambda x: 1 / np.linalg.norm(x)), "divided by the length"),
        (learner("aw", at=1), "one position late"),
        (uncorrected, "Each y is written whole"),
        (never_cleared, "begins with the memory of the first"),
        (one_step, "one step of gradient descent for all examples"),
        (fits, "This is least squares"),
    ],
)
def test_an_honest_learner(refused, fn, words) -> None:
    refused("ex-recall-leak", words, LEARNING, honest=fn)


def test_right_learners(refused) -> None:
    check_exercise("ex-recall-leak", honest=learner("aw"), leaking=learner("wa"))
    refused("ex-recall-leak", "does not leak", LEARNING, leaking=learner("aw"))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda i, D: (D - i) / D, "relative to the signal"),
        (lambda i, D: D * np.exp(i * np.log1p(-1 / D)), "what the delta rule leaves"),
        (lambda i, D: D - D * i / (i + D + 1), "one step of gradient descent leaves"),
        (lambda i, D: float(D), "always answers 0"),
        (lambda i, D: 0.0, "orthogonal to all of them"),
    ],
)
def test_the_least_error(refused, fn, words) -> None:
    refused("ex-recall-leak", words, LEARNING, least_error=fn)


# --- The best step -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "answer", "words"),
    [
        ("left", 0.6, "what the best step leaves"),
        ("left", 12, "Divide it by the signal"),
        ("left", 0, "square of the mean"),
        ("left", 1.333, "a little larger than D I"),
        ("left", 0.667, "two different examples are missing"),
        ("left", 2.5, "power of the answer itself"),
        ("worse", 9, "equally good"),
        ("worse", 7, "One more is worse"),
    ],
)
def test_the_best_step(refused, part, answer, words) -> None:
    refused("ex-recall-step", words, LEARNING, **{part: answer})


def test_right_step() -> None:
    check_exercise("ex-recall-step", left=1.5, worse=8)
