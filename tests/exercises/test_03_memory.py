"""Mistakes in the exercises of the chapter on the outer-product memory."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lesson_code.checks import check_exercise

READ = "Read: multiply by the query"
WRITE = "Write: add an outer product"
NORMALIZED = "The normalized read"
LOUD = "How loud is the crosstalk?"
CROSSTALK = "Signal and crosstalk"


# --- By hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("S_4", [[120, 140], [80, 100]], "Token 1 has been taken out", WRITE),
        ("S_4", [[130, 80], [160, 100]], "transpose", WRITE),
        ("S_4", [[70, 80], [0, 0]], "what token 4 alone writes", WRITE),
        ("S_4", [[130, 160], [150, 180]], "added to both rows", WRITE),
        ("S_4", [[130, 160], [80, 101]], "3 of 4 entries are right", WRITE),
        ("z_4", [2, 2], "Four keys are summed", NORMALIZED),
        ("z_4", [160, 200], "not the values", NORMALIZED),
        ("plain", [70, 80], "Every stored token whose key meets the query", CROSSTALK),
        ("plain", [120, 140], "a write only adds", WRITE),
        ("plain", [130, 80], "from the wrong side", READ),
        ("plain", (60.0, 80.0), "before token 4 is written", WRITE),
        ("normalized", [32.5, 40], "Divided by the number of tokens", NORMALIZED),
        ("normalized", [26, 32], "sum of all entries of the keys", NORMALIZED),
        ("normalized", [65, 80], "that of three tokens", NORMALIZED),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-memory-hand", words, section, **{part: answer})


def test_a_refusal_by_hand_does_not_give_the_answer_away(refused) -> None:
    message = refused("ex-memory-hand", "not right", WRITE, S_4=[[1, 2], [3, 4]])
    assert "130" not in message and "160" not in message


def test_right_by_hand(capsys) -> None:
    check_exercise(
        "ex-memory-hand", S_4=[[130, 160], [80, 100]], z_4=(3, 2), plain=[130, 160],
        normalized=[43.3, 53.3],
    )  # fmt: skip
    assert capsys.readouterr().out == (
        "ex-memory-hand: S_4, z_4, plain and normalized are right.\n"
    )


# --- Write and read ----------------------------------------------------------------------------


def forgets(S, k, v):
    return np.einsum("...d,...m->...dm", k, v)


def writes_transposed(S, k, v):
    return S + np.einsum("...m,...d->...md", v, k)


def multiplies_entries(S, k, v):
    return S + np.expand_dims(np.multiply(k, v), -2)


def replaces(S, k, v):
    old = np.einsum("...d,...dm->...m", k, S)
    return S + np.einsum("...d,...m->...dm", k, v - old)


def test_write(refused) -> None:
    label = "ex-memory-code"
    refused(label, "The old state is lost", WRITE, my_write=forgets)
    refused(label, "transposed", WRITE, my_write=writes_transposed)
    refused(label, "entry by entry", WRITE, my_write=multiplies_entries)
    refused(label, "taken out first", WRITE, my_write=replaces)


def test_read(refused) -> None:
    label = "ex-memory-code"
    refused(label, "wrong side", READ, my_read=lambda S, q: np.einsum("...dm,...m->...d", S, q))
    refused(label, "not added up", READ, my_read=lambda S, q: np.einsum("...d,...dm->...dm", q, S))


def loop(q, k, v, step):
    """step(S, q_t, k_t, v_t, t) returns the new state and the output, for one head."""
    heads = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    out = np.zeros_like(heads[2])
    for b, (qs, ks, vs) in enumerate(zip(*heads, strict=True)):
        S = np.zeros((ks.shape[-1], vs.shape[-1]))
        for t in range(len(ks)):
            S, out[b, t] = step(S, qs[t], ks[t], vs[t], t)
    return out.reshape(v.shape)


def reads_early(q, k, v):
    return loop(q, k, v, lambda S, q, k, v, t: (S + np.outer(k, v), S.T @ q))


def reads_wrong_side(q, k, v):
    def step(S, q, k, v, t):
        S = S + np.outer(k, v)
        return S, S.dot(q)

    return loop(q, k, v, step)


def reads_the_last(q, k, v):
    return np.einsum("...nd,...ld,...lm->...nm", q, k, v)


def carries_nothing(q, k, v):
    return loop(q, k, v, lambda S, q, k, v, t: (S, np.dot(q, k) * v))


def means(q, k, v):
    def step(S, q, k, v, t):
        S = S + np.outer(k, v)
        return S, q @ S / (t + 1)

    return loop(q, k, v, step)


def running_mean(q, k, v):
    return loop(q, k, v, lambda S, q, k, v, t: (S, 0 * v)) + means(q, k, v)


def normalizes(q, k, v):
    weights = np.tril(q @ np.swapaxes(k, -1, -2))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (reads_early, "before its own token is written", READ),
        (reads_wrong_side, "wrong side", READ),
        (reads_the_last, "Every query reads the last state", READ),
        (carries_nothing, "not carried", WRITE),
        (normalizes, "The output is normalized", NORMALIZED),
        (running_mean, "a running sum, not a running mean", NORMALIZED),
    ],
)
def test_memory(refused, fn, words, section) -> None:
    refused("ex-memory-code", words, section, my_memory=fn)


def test_a_mistake_of_no_kind_that_is_known_gets_a_place_and_a_section(refused) -> None:
    def fn(q, k, v):
        out = loop(q, k, v, lambda S, q, k, v, t: (S + np.outer(k, v), q @ (S + np.outer(k, v))))
        out[..., 3:, :] += 1.0
        return out

    message = refused("ex-memory-code", "position 3 is the first that is not", READ, my_memory=fn)
    assert "first at index (3, 0)" in message


def test_leading_dimensions(refused) -> None:
    def fn(q, k, v):
        S, out = np.zeros((k.shape[1], v.shape[1])), []
        for q_t, k_t, v_t in zip(q, k, v, strict=True):
            S = S + np.outer(k_t, v_t)
            out.append(q_t @ S)
        return np.array(out)

    refused("ex-memory-code", "One sequence alone came out right", READ, my_memory=fn)


# --- The others --------------------------------------------------------------------------------


def test_two_mistakes(refused) -> None:
    label = "ex-memory-mistakes"
    refused(label, "written before its query reads", READ, wrong_side=[30, 70])
    refused(label, "Token 3 is in this already", READ, too_early=[140, 180])
    refused(label, "too early and from the wrong side", WRITE, too_early=[30, 70])


def normal_tail(x):
    """Above x, by adding up the density."""
    grid = np.linspace(x, x + 12, 200_001)
    density = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi)
    return float((density.sum() - (density[0] + density[-1]) / 2) * (grid[1] - grid[0]))


def test_right_share() -> None:
    check_exercise(
        "ex-memory-binary", wrong_share=lambda n, D: normal_tail(1 / math.sqrt((n - 1) / D))
    )


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda n, D: normal_tail(math.sqrt(D / n)), "All n tokens"),
        (lambda n, D: 2 * normal_tail(math.sqrt(D / (n - 1))), "both sides"),
        (lambda n, D: normal_tail(D / (n - 1)), "it is the variance"),
        (lambda n, D: normal_tail(math.sqrt((n - 1) / D)), "upside down"),
        (lambda n, D: 1 - normal_tail(math.sqrt(D / (n - 1))), "right signs"),
        (lambda n, D: math.erf(math.sqrt(D / (2 * n - 2))) / 2, "What lies beyond"),
        (lambda n, D: normal_tail(math.sqrt(2 * D / (n - 1))), "A factor is missing"),
    ],
)
def test_wrong_share(refused, fn, words) -> None:
    refused("ex-memory-binary", words, LOUD, wrong_share=fn)


def test_pairs(refused) -> None:
    refused("ex-memory-binary", "a little more than 1 in 100", LOUD, pairs=13)
    refused("ex-memory-binary", "All n tokens", LOUD, pairs=11)


def erase(S, k, divide=lambda k: sum(k * k), sign=-1):
    new = S.copy()
    for a in range(len(k)):
        for b in range(S.shape[1]):
            new[a, b] += sign * k[a] * sum(k[c] * S[c, b] for c in range(len(k))) / divide(k)
    return new


def test_erase(refused) -> None:
    label = "ex-memory-erase"
    check_exercise(label, erase)
    wrong = {
        "squared length of the key is not divided out": (lambda k: 1.0, -1),
        "Divided by the length of the key once": (lambda k: np.linalg.norm(k), -1),
    }
    for words, (divide, sign) in wrong.items():
        refused(label, words, CROSSTALK, erase=lambda S, k, d=divide, s=sign: erase(S, k, d, s))
    refused(label, "added where it should", WRITE, erase=lambda S, k: erase(S, k, sign=1))

    def wrong_side(S, k):
        return S - np.einsum("a,bc,c->ab", k, S, k) / k.dot(k)

    def transposed(S, k):
        return S - np.einsum("b,ca,c->ab", k, S, k) / k.dot(k)

    refused(label, "wrong side", READ, erase=wrong_side)
    refused(label, "The outer product is transposed", WRITE, erase=transposed)
    refused(label, "This is the part that", WRITE, erase=lambda S, k: S - erase(S, k))
