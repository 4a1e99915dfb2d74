"""Mistakes in the exercises of the chapter on gates, those on Mamba among them."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

GATE = "One gate for each channel"
PARALLEL = "The parallel form, and how it overflows"
CHUNKS = "Chunks, halved"
RWKV = "RWKV-5 and 6: read before write"
RATE = "Mamba: from a rate to a decay"
SCAN = "The selective scan"
CONVOLUTION = "A short convolution"
HEADS = "Mamba-2: one decay for each head"


# --- The gate on the own token -----------------------------------------------------------------


def memory(q, k, v, g, order):
    """`order` has the letters g (gate), w (write), r (read) and o (a write through the gate)."""
    S, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(q)):
        gate = np.diag(np.exp(g[t]))
        for letter in order:
            if letter == "g":
                S = gate @ S
            elif letter == "r":
                out.append(S.T @ q[t])
            else:
                key = gate @ k[t] if letter == "o" else k[t]
                S = S + key[:, None] @ v[t][None, :]
    return np.array(out)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("gwr", "the rule of the chapter"),
        ("wrg", "reads before the gate acts"),
        ("or", "The old memory does not fade"),
        ("gwgr", "acts twice on the old memory"),
    ],
)
def test_when_the_gate_acts(refused, order, words) -> None:
    refused(
        "ex-gates-own", words, GATE, gate_after_write=lambda q, k, v, g: memory(q, k, v, g, order)
    )


def test_what_the_gate_multiplies(refused) -> None:
    refused(
        "ex-gates-own",
        "The gate multiplies the query",
        GATE,
        gate_after_write=lambda q, k, v, g: memory(np.exp(g) * q, k, v, g, "gwr"),
    )


def test_the_gate_on_the_own_token(refused) -> None:
    label = "ex-gates-own"
    refused(label, "rule of the chapter", GATE, outputs=[[10, 20], [30, 40], [105, 130]])
    refused(label, "after the read", GATE, outputs=[[10, 20], [30, 40], [135, 170]])
    refused(label, "applied to the columns", GATE, outputs=[[10, 20], [15, 40], [120, 0]])
    check_exercise(
        label,
        outputs=[[10, 20], [30, 40], [55, 70]],
        gate_after_write=lambda q, k, v, g: memory(q, k, v, g, "wgr"),
    )


# --- Padding -----------------------------------------------------------------------------------


def rows(x, n, value):
    return np.vstack([x, *[np.full(x.shape[1], value)] * n])


@pytest.mark.parametrize(
    ("pad", "words"),
    [
        (
            lambda k, v, g, n: (rows(k, n, 0), rows(v, n, 0), rows(g, n, -np.inf)),
            "they empty the memory",
        ),
        (
            lambda k, v, g, n: (rows(k, n, 0), rows(v, n, 0), rows(g, n, 1)),
            "multiplies the memory by e",
        ),
        (
            lambda k, v, g, n: tuple(np.pad(x, [(0, n), (0, 0)], mode="edge") for x in (k, v, g)),
            "The last token is repeated",
        ),
        (
            lambda k, v, g, n: (
                rows(k, n, 0), rows(v, n, 0), np.pad(g, [(0, n), (0, 0)], mode="edge"),
            ),
            "goes on fading",
        ),
        (lambda k, v, g, n: (k, v, g), "must get n = 2 more rows each"),
    ],
)  # fmt: skip
def test_padding(refused, pad, words) -> None:
    refused("ex-gates-padding", words, GATE, pad=pad)


def test_padding_of_one_array(refused) -> None:
    refused("ex-gates-padding", "three arrays", GATE, pad=lambda k, v, g, n: rows(k, n, 0))


def test_right_padding() -> None:
    def pad(k, v, g, n):  # whatever the value is, a key of 0 does not write it
        return rows(k, n, 0), rows(v, n, 7), rows(g, n, 0)

    check_exercise("ex-gates-padding", pad)


# --- Chunkwise ---------------------------------------------------------------------------------


def between(g, first, last):
    """The decay of the gates first, ..., last - 1."""
    return np.exp(g[first:last].sum(axis=0))


def in_chunks(
    q, k, v, g, *, initial_state=None, return_state=False, L=16, own=1.0, inside=True,
    reading=(0, 1), writing=1, carry="all", in_place=False,
):  # fmt: skip
    """Token by token inside the chunks; each option is one place for a slip."""
    S = np.zeros((k.shape[1], v.shape[1])) if initial_state is None else initial_state
    out = []
    for i in range(0, len(k), L):
        c = [x[i : i + L] for x in (q, k, v, g)]
        n, new = len(c[0]), 0
        for t in range(n):
            start, end = reading
            faded = between(c[3], start * n, t + end)
            found = (c[0][t] * faded) @ S + own * (c[0][t] @ c[1][t]) * c[2][t]
            for j in range(t):
                decay = between(c[3], j + 1, t + 1) if inside else 1.0
                found = found + (c[0][t] * c[1][j] * decay).sum() * c[2][j]
            out.append(found)
            new = new + np.outer(c[1][t] * between(c[3], t + writing, n), c[2][t])
        first = {"all": 0, "last": n - 1, "none": n}[carry]
        if in_place:
            S *= between(c[3], first, n)[:, None]
            S += new
        else:
            S = between(c[3], first, n)[:, None] * S + new
    out = np.array(out).reshape(len(k), v.shape[1])
    return (out, S) if return_state else out


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"own": 0.0}, "no token sees itself", CHUNKS),
        ({"inside": False}, "Inside a chunk nothing fades", CHUNKS),
        ({"reading": (1, 0)}, "has not faded since the chunk began", CHUNKS),
        ({"reading": (0, 0)}, "the convention of RWKV", RWKV),
        ({"writing": 0}, "by the gate of their own token", GATE),
        ({"writing": 16}, "Keys go into the state as they are", CHUNKS),
        ({"carry": "last"}, "by the last gate of the chunk alone", CHUNKS),
        ({"carry": "none"}, "does not fade from chunk to chunk", CHUNKS),
        ({"in_place": True}, "changed in place the state", CHUNKS),
    ],
)
def test_chunks(refused, options, words, section) -> None:
    def fn(q, k, v, g, *, initial_state=None, return_state=False):
        return in_chunks(
            q, k, v, g, initial_state=initial_state, return_state=return_state, **options
        )

    refused("ex-gates-chunkwise", words, section, my_gla=fn)


def test_two_factors_overflow(refused) -> None:
    def fn(q, k, v, g):
        S, out = np.zeros((k.shape[1], v.shape[1])), []
        for i in range(0, len(k), 16):
            Q, K, V, G = q[i : i + 16], k[i : i + 16], v[i : i + 16], g[i : i + 16].cumsum(axis=0)
            out.append(np.tril(Q * np.exp(G) @ (K * np.exp(-G)).T) @ V + Q * np.exp(G) @ S)
            decays = [between(g[i : i + 16], t + 1, 16) for t in range(len(K))]
            S = np.exp(G[-1])[:, None] * S + (K * decays).T @ V
        return np.concatenate(out)

    refused("ex-gates-chunkwise", "a factor that overflows", PARALLEL, my_gla=fn)


def test_a_difference_of_sums(refused) -> None:
    def fn(q, k, v, g):
        S, out = np.zeros((k.shape[1], v.shape[1])), []
        for i in range(0, len(k), 16):
            c = slice(i, i + 16)
            out.append(in_chunks(q[c], k[c], v[c], g[c], initial_state=S))
            G = g[c].cumsum(axis=0)
            S = np.exp(G[-1])[:, None] * S + (k[c] * np.exp(G[-1] - G)).T @ v[c]
        return np.concatenate(out)

    refused("ex-gates-chunkwise", "a difference of two sums", PARALLEL, my_gla=fn)


def test_right_chunks() -> None:
    check_exercise("ex-gates-chunkwise", in_chunks)


# --- Mamba -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("h", [8, 6, 8], "written as they are", SCAN),
        ("h", [8, 12, 6], "has halved the memory", RATE),
        ("h", [5.77, 5.77, 5.77], "the exact writes", RATE),
        ("h", [8, 9.083, 9.083], "The rate is 1 here", RATE),
        ("h", [8, 40, 40], "The rate A is negative", RATE),
        ("h", [8, 10, 0], "what leaks out?", RATE),
        ("h", [8, 10, 2], "and what flows in", RATE),
        ("h", [8, 10, 12], "what flows in", RATE),
        ("h_late", 2, "the step multiplies it", SCAN),
        ("h_late", 70, "has not faded", RATE),
        ("h_late", 2.885, "the exact write", RATE),
    ],
)
def test_three_steps(refused, part, answer, words, section) -> None:
    refused("ex-mamba-hand", words, section, **{part: answer})


def test_right_steps() -> None:
    check_exercise("ex-mamba-hand", h=(8, 10, 10), h_late=60)


def taps(x, weights, shift=0):
    """weights[i] * x[t - 3 + i + shift], added up."""
    N = len(x)
    out = np.zeros((N, x.shape[1]))
    for t in range(N):
        for i, w in enumerate(weights):
            if 0 <= t - 3 + i + shift < N:
                out[t] += w * x[t - 3 + i + shift]
    return out


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: taps(x, (1, 2, 3, 4), shift=3), "the last outputs of the full convolution"),
        (lambda x: taps(x, (1, 2, 3, 4), shift=-1), "one position too late"),
        (lambda x: taps(x, (4, 3, 2, 1)), "The weights are in reverse"),
        (
            lambda x: np.transpose([np.convolve(c, [4, 3, 2, 1], "same")[: len(c)] for c in x.T]),
            "a later token",
        ),
        (
            lambda x: np.transpose([np.convolve(c, [1, 2, 3, 4], "same")[: len(c)] for c in x.T]),
            "and its weights are in reverse",
        ),
    ],
)
def test_convolution(refused, fn, words) -> None:
    refused("ex-mamba-same", words, CONVOLUTION, repaired=fn)


def test_right_convolution(refused) -> None:
    refused("ex-mamba-same", "how far it looks back", CONVOLUTION, ahead=2)
    check_exercise("ex-mamba-same", ahead=1, repaired=lambda x: taps(x, (1, 2, 3, 4)))


def emptied(*places, after=False):
    def apart(g, start):
        changed = g.copy()
        for t in range(len(g)):
            if t - start in places or (after and t > start):
                changed[t] = -np.inf
        return changed

    return apart


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (emptied(1), "one token too late"),
        (emptied(0, after=True), "each sees itself alone"),
        (lambda g, start: np.where(np.arange(len(g)) == start, 0, g), "a decay of 1"),
        (lambda g, start: g, "Nothing separates"),
        (
            lambda g, start: np.where(np.arange(len(g)) == max(start - 1, 0), -np.inf, g),
            "one token too early",
        ),
        (
            lambda g, start: np.where(np.arange(len(g)) < start, -np.inf, g),
            "The first text forgets itself",
        ),
    ],
)
def test_two_documents(refused, fn, words) -> None:
    refused("ex-mamba-documents", words, HEADS, apart=fn)


def test_nothing_is_returned(refused) -> None:
    def apart(g, start):
        np.where(np.arange(len(g)) == start, -np.inf, g)

    refused("ex-mamba-documents", "is its return missing?", HEADS, apart=apart)


def test_two_documents_apart() -> None:
    check_exercise("ex-mamba-documents", emptied(0))
