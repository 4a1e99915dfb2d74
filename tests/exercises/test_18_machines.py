"""Mistakes in the exercises of the chapter on splitting a sequence over machines."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

NEEDS = "What a later part needs"
DECAY = "The same with a decay"
EXCHANGE = "One exchange"
BACK = "One exchange back"
BYTES = "Bytes"
BESIDE = "Beside it"

STATE, HEADER = 16 * 64 * 65 * 4, 280


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("forward", 8 * (STATE + HEADER), "One message too many", BYTES),
        ("forward", STATE + HEADER, "This is one message", BYTES),
        ("forward", 7 * STATE, "headers are missing", BYTES),
        ("forward", 7 * (16 * 64 * 64 * 4 + HEADER), "one more column", EXCHANGE),
        ("forward", 7 * (64 * 65 * 4 + HEADER), "a single head", BYTES),
        ("forward", 7 * (STATE // 2 + HEADER), "16 bit", BYTES),
        ("backward", 7 * (16 * 64 * 64 * 4 + HEADER), "one more column", BACK),
        ("backward", 7 * (2 * STATE + HEADER), "Two states travel back", BACK),
        ("backward", 2 * 7 * (STATE + HEADER), "both directions together", BACK),
        ("backward", 0, "were read by later ranks", BACK),
        ("tokens", 65.07, "There both send the same", BYTES),
        ("tokens", 65, "still sends a little less", BYTES),
        ("tokens", 528, "whole sequence", BYTES),
        ("tokens", 131, "not only one of them", BYTES),
        ("tokens", 33, "in 16 bit, the state in float32", BYTES),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-machines-bytes", words, section, **{part: answer})


def test_right_by_hand(capsys) -> None:
    total = 7 * (STATE + HEADER)
    check_exercise("ex-machines-bytes", forward=total, backward=total, tokens=66)
    assert "forward, backward and tokens are right" in capsys.readouterr().out


# --- A gate that is split ----------------------------------------------------------------------


class Split:
    """One pass over the tokens with two memories, of the own part and of all before it."""

    def fold(self, before, own, decay):
        return np.einsum("c,cm->cm", decay, before) + own

    def read(self, q, k, v, before, own, faded, a):
        return q @ own + (q * faded) @ before

    def first_memory(self, before, own, decay):
        return before

    def __call__(self, q, k, v, g):
        N = len(q)
        sizes = [N // 3 + (r < N % 3) for r in range(3)]
        before = np.zeros((k.shape[1], v.shape[1]))
        out, begin = np.empty((N, v.shape[1])), 0
        for size in sizes:
            tokens = range(begin, begin + size)
            memories, own, faded = [], np.zeros_like(before), np.ones(k.shape[1])
            for t in tokens:
                a = np.exp(g[t])
                own = a[:, None] * own + np.outer(k[t], v[t])
                faded = faded * a
                memories.append((own, faded, a))
            after = self.fold(before, own, faded)
            found = self.first_memory(before, own, faded)
            for t, (part, seen, a) in zip(tokens, memories, strict=True):
                out[t] = self.read(q[t], k[t], v[t], found, part, seen, a)
            before, begin = after, begin + size
        return out


def changed(name, method):
    return type("Changed", (Split,), {name: lambda self, *args: method(*args)})()


def test_right_split(capsys) -> None:
    check_exercise("ex-machines-fold", Split())
    assert "it passes check_causal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "method", "words", "section"),
    [
        ("fold", lambda before, own, decay: before + own, "nothing fades", DECAY),
        ("fold", lambda before, own, decay: own, "what came before it is lost", DECAY),
        (
            "fold",
            lambda before, own, decay: np.diag(decay) @ (before + own),
            "decayed by the whole part",
            DECAY,
        ),
        (
            "fold",
            lambda before, own, decay: before * decay + own,
            "multiply the columns",
            DECAY,
        ),
        (
            "first_memory",
            lambda before, own, decay: np.diag(decay) @ before + own,
            "its own tokens are in already",
            DECAY,
        ),
        ("first_memory", lambda before, own, decay: 0 * before, "Nothing crosses the cuts", NEEDS),
        (
            "read",
            lambda q, k, v, before, own, faded, a: q @ own + q @ before,
            "goes on fading",
            DECAY,
        ),
        (
            "read",
            lambda q, k, v, before, own, faded, a: q @ own + (q * faded / a) @ before,
            "one decay too early",
            DECAY,
        ),
        (
            "read",
            lambda q, k, v, before, own, faded, a: (
                q @ (own - np.outer(k, v)) + (q * faded) @ before
            ),
            "before its own token is written",
            NEEDS,
        ),
    ],
)
def test_split(refused, name, method, words, section) -> None:
    refused("ex-machines-fold", words, section, my_split=changed(name, method))


def of_a_token(order):
    """What a token does, in letters: d decays the memory, w writes, r reads, g multiplies by g."""

    def fn(q, k, v, g):
        S, out = np.zeros((k.shape[1], v.shape[1])), []
        for t in range(len(q)):
            for step in order:
                if step == "w":
                    S = S + np.outer(k[t], v[t])
                elif step == "r":
                    out.append(q[t] @ S)
                else:
                    S = (np.exp(g[t]) if step == "d" else g[t])[:, None] * S
        return np.array(out)

    return fn


@pytest.mark.parametrize(
    ("order", "words"),
    [("gwr", "logarithms"), ("wrd", "just written itself"), ("wdr", "just written itself")],
)
def test_what_a_token_does(refused, order, words) -> None:
    check_exercise("ex-machines-fold", of_a_token("dwr"))
    refused("ex-machines-fold", words, DECAY, my_split=of_a_token(order))


def test_gates_that_are_not_used(refused) -> None:
    refused(
        "ex-machines-fold",
        "the gates are not used",
        DECAY,
        my_split=lambda q, k, v, g: np.tril(q @ k.T) @ v,
    )


def test_a_state_written_without_decay(refused) -> None:
    def fn(q, k, v, g):
        out, S = [], np.zeros((k.shape[1], v.shape[1]))
        for rows in np.array_split(np.arange(len(q)), 3):
            reads = S
            for t in rows:
                reads = np.exp(g[t])[:, None] * reads + np.outer(k[t], v[t])
                out.append(reads.T @ q[t])
            S = np.exp(g[rows].sum(axis=0))[:, None] * S + k[rows].T @ v[rows]
        return np.array(out)

    refused("ex-machines-fold", "without the decays inside the part", DECAY, my_split=fn)


# --- The others --------------------------------------------------------------------------------


def test_two_mistakes(refused) -> None:
    label = "ex-machines-mistakes"
    refused(label, "what has long faded", DECAY, same_objects=[False, True])
    refused(label, "its own part twice", DECAY, same_objects=(True, False))
    refused(label, "wrong without looking ahead", DECAY, causal_objects=[True, True])
    refused(label, "The first token of a part reads, too", DECAY, causal_objects=[False, False])
    check_exercise(label, same_objects=[True, True], causal_objects=(False, True))


def transitions(k, v, beta, order=1, rates=None):
    """P and T by the products themselves."""
    P = np.eye(k.shape[1])
    T = np.zeros((k.shape[1], v.shape[1]))
    for k_t, v_t, b in zip(k, v, beta, strict=True):
        step = np.eye(len(k_t)) - (b if rates is None else rates) * np.outer(k_t, k_t)
        P = step @ P if order == 1 else P @ step
        T = T - b * np.outer(k_t, k_t @ T) + b * np.outer(k_t, v_t)
    return P, T


def written_whole(k, v, beta):
    P, T = np.eye(k.shape[1]), np.zeros((k.shape[1], v.shape[1]))
    for k_t, v_t, b in zip(k, v, beta, strict=True):
        step = np.eye(len(k_t)) - b * np.outer(k_t, k_t)
        P, T = step @ P, step @ T + np.outer(k_t, v_t)
    return P, T


def sums(k, v, beta):
    P = np.eye(k.shape[1]) - np.einsum("n,nc,nd->cd", beta, k, k)
    return P, transitions(k, v, beta)[1]


def plain_sum(k, v, beta):
    return transitions(k, v, beta)[0], np.einsum("n,nc,nm->cm", beta, k, v)


def last_one(k, v, beta):
    P = np.eye(k.shape[1]) - beta[-1] * np.outer(k[-1], k[-1])
    return P, transitions(k, v, beta)[1]


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (lambda k, v, beta: transitions(k, v, beta, order=-1), "opposite order", BESIDE),
        (lambda k, v, beta: transitions(k, v, beta, rates=1.0), "P does not know beta", BESIDE),
        (lambda k, v, beta: transitions(k, v, beta**0), "Neither P nor T knows beta", BESIDE),
        (written_whole, "values that were written whole", BESIDE),
        (sums, "corrections of all tokens are added up", BESIDE),
        (last_one, "the last token alone", BESIDE),
        (plain_sum, "a plain sum of writes", BESIDE),
        (lambda k, v, beta: transitions(k, v, beta)[::-1], "Return P first", DECAY),
    ],
)
def test_the_message_of_the_delta_rule(refused, fn, words, section) -> None:
    refused("ex-machines-delta", words, section, message=fn)


def test_how_large_the_message_is(refused) -> None:
    check_exercise("ex-machines-delta", message=transitions, ratio=1.98)
    refused("ex-machines-delta", "one more column", DECAY, ratio=2)
    refused("ex-machines-delta", "T is sent as well", BESIDE, ratio=0.992)
    refused("ex-machines-delta", "upside down", BESIDE, ratio=0.504)
