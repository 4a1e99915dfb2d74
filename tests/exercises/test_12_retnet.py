"""Mistakes in the exercises of the chapter on decay and RetNet."""

from __future__ import annotations

import numpy as np
import pytest

from lesson_code.checks import check_exercise

torch = pytest.importorskip("torch")

FADES = "A memory that fades"
ALL = "All positions at once"
LONG = "How long is the memory?"
CHUNKS = "Chunks: three factors"
TURNING = "Turning by position"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("S_4", [[3.5, 5.5], [2, 6]], "The new token has faded too", FADES),
        ("S_4", [[7, 11], [4, 12]], "has not faded before this write", FADES),
        ("S_4", [[1, 3], [2, 6]], "Decay does not replace", FADES),
        ("S_4", [[4, 7], [3, 9]], "added to both rows", FADES),
        ("S_4", [[4, 2], [7, 6]], "the transpose", FADES),
        ("o_4", [3, 4], "before token 4 writes", FADES),
        ("o_4", [6, 8], "read from S_3", FADES),
        ("o_4", [7, 11], "has not faded since token 3", FADES),
        ("o_4", [1, 3], "token 4 alone", FADES),
        ("o_4", [4, 2], "wrong side", FADES),
        ("a", [1, 0.5], "the first token of the chunk", CHUNKS),
        ("a", [0.25, 0.5], "The other way round", CHUNKS),
        ("b", [0.25, 0.5], "is at its end already", CHUNKS),
        ("b", [1, 0.5], "The other way round", CHUNKS),
        ("tokens", 6.13, "How many whole tokens", FADES),
        ("tokens", 6, "a little above 0.1", FADES),
        ("tokens", 5, "the smallest entry", FADES),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-retnet-hand", words, section, **{part: answer})


def test_right_by_hand(capsys) -> None:
    check_exercise(
        "ex-retnet-hand", S_4=[[4, 7], [2, 6]], o_4=[4, 7], a=(0.5, 0.25), b=(0.5, 1), tokens=7
    )
    assert "S_4, o_4, a, b and tokens are right" in capsys.readouterr().out


# --- Retention in chunks -----------------------------------------------------------------------

GAMMAS = (31 / 32, 63 / 64, 127 / 128)


def in_chunks(
    q, k, v, *, initial_state=None, return_state=False, inside=lambda g, age: g**age,
    reading=lambda g, r, n: g**r, writing=lambda g, r, n: g ** (n - r),
    carrying=lambda g, n: g**n, gammas=GAMMAS, in_place=False, length=None,
):  # fmt: skip
    """Head by head, chunk by chunk; each option is one place for a slip. r counts from 1."""
    shape = (*k.shape[:-2], k.shape[-1], v.shape[-1])
    S = np.zeros(shape) if initial_state is None else initial_state
    S = S if in_place else S.copy()
    out = np.zeros_like(v)
    for h, g in enumerate(gammas):
        for i in range(0, k.shape[-2], 16):
            Q, K, V = (x[..., h, i : i + 16, :] for x in (q, k, v))
            n = K.shape[-2]
            r = np.arange(1, n + 1)
            age = np.subtract.outer(r, r)
            weights = np.einsum("...rd,...sd->...rs", Q, K)
            weights = np.where(age >= 0, weights * inside(g, np.maximum(age, 0)), 0)
            state = S[..., h, :, :]
            out[..., h, i : i + 16, :] = weights @ V + np.einsum(
                "...rd,...dm,r->...rm", Q, state, np.ones(n) * reading(g, r, n)
            )
            m = length or n
            new = np.einsum("...sd,s,...sm->...dm", K, np.ones(n) * writing(g, r, m), V)
            S[..., h, :, :] = carrying(g, m) * state + new
    return (out, S) if return_state else out


@pytest.mark.parametrize(
    ("options", "words", "section"),
    [
        ({"inside": lambda g, age: 1.0}, "Inside a chunk nothing fades", CHUNKS),
        ({"inside": lambda g, age: (age > 0) * g**age}, "The diagonal is missing", ALL),
        ({"reading": lambda g, r, n: g ** (r - 1)}, "once too little", CHUNKS),
        ({"reading": lambda g, r, n: 1.0}, "the factor a is missing", CHUNKS),
        ({"reading": lambda g, r, n: 0.0}, "Nothing is read from earlier chunks", CHUNKS),
        ({"writing": lambda g, r, n: g ** (n - r + 1)}, "once too often", CHUNKS),
        ({"writing": lambda g, r, n: 1.0}, "is missing", CHUNKS),
        ({"writing": lambda g, r, n: g**r}, "fade least", CHUNKS),
        ({"carrying": lambda g, n: g}, "by one step for a whole chunk", CHUNKS),
        ({"carrying": lambda g, n: 1.0}, "does not fade from chunk to chunk", CHUNKS),
        ({"gammas": (31 / 32,) * 3}, "All heads fade like head 0", LONG),
        ({"in_place": True}, "changed in place the state", CHUNKS),
        ({"length": 16}, "Split at", CHUNKS),
    ],
)
def test_chunks(refused, options, words, section) -> None:
    def fn(q, k, v, *, initial_state=None, return_state=False):
        return in_chunks(q, k, v, initial_state=initial_state, return_state=return_state, **options)

    refused("ex-retnet-chunkwise", words, section, my_retention=fn)


def test_right_chunks() -> None:
    check_exercise("ex-retnet-chunkwise", my_retention=in_chunks)


def test_all_positions_at_once_are_too_much_memory(refused) -> None:
    def fn(q, k, v, *, initial_state=None, return_state=False):
        g = np.array(GAMMAS)[:, None, None]
        N = k.shape[-2]
        age = np.subtract.outer(np.arange(N), np.arange(N))
        mask = np.where(age >= 0, g ** np.maximum(age, 0), 0)
        S = 0 if initial_state is None else initial_state
        r = np.arange(1, N + 1)[:, None]
        out = (q @ k.swapaxes(-1, -2) * mask) @ v + g**r * (q @ (S + np.zeros((k.shape[-1], 1))))
        S = g**N * S + (g ** (N - r) * k).swapaxes(-1, -2) @ v
        return (out, S) if return_state else out

    refused("ex-retnet-chunkwise", "Memory grows with N²", CHUNKS, my_retention=fn)


# --- Off by one --------------------------------------------------------------------------------


def test_off_by_one(refused) -> None:
    label = "ex-retnet-mistakes"
    refused(label, "Write down the first output", FADES, first=0)
    refused(label, "compares a function with itself", FADES, first=2)
    refused(label, "How often has token 1 faded", FADES, second=1)
    refused(label, "where the chunks begin", CHUNKS, third=1)
    check_exercise(label, first=1, second=0, third=2)


# --- A memory that turns -----------------------------------------------------------------------


def turns(q, k, v, factor=lambda angle: 0.9 * torch.exp(1j * -angle)):
    """With complex numbers: each plane of a key is one, and its decay too."""
    angle = 10_000 ** -torch.linspace(0, 1, 4, dtype=q.dtype)
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    T, out = torch.zeros(4, v.shape[1], dtype=k.dtype), []
    step = factor(angle)[:, None]
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        T = step * T + torch.outer(k_t, v_t.to(k_t.dtype))
        out.append((q_t.conj() @ T).real)
    return torch.stack(out)


@pytest.mark.parametrize(
    ("factor", "words", "section"),
    [
        (lambda angle: 0.9 + 0j * angle, "it does not turn", TURNING),
        (lambda angle: 0.9 * torch.exp(1j * angle), "the wrong way", TURNING),
        (lambda angle: torch.exp(-1j * angle), "it does not fade", FADES),
        (lambda angle: 0.9 * torch.exp(-2j * angle), "Everything turns twice", TURNING),
    ],
)
def test_a_memory_that_turns(refused, factor, words, section) -> None:
    def fn(q, k, v):
        return turns(q, k, v, factor)

    refused("ex-retnet-turn", words, section, memory_that_turns=fn)


def along(rows, first):
    """Row i as planes, turned by first + i steps."""
    angle = 10_000 ** -torch.linspace(0, 1, rows.shape[1] // 2, dtype=rows.dtype)
    steps = first + torch.arange(len(rows), dtype=rows.dtype)
    planes = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(planes * torch.exp(1j * steps[:, None] * angle)).flatten(-2)


@pytest.mark.parametrize(
    ("back", "words"),
    [
        (lambda T: along(T.T, 0).T, "turns by m steps"),
        (lambda T: along(T.T, -1).T, "turns by m - 1 steps"),
        (lambda T: along(T, -1), "which are values"),
    ],
)
def test_what_turns(refused, back, words) -> None:
    def fn(q, k, v):
        T, out = torch.zeros(8, v.shape[1], dtype=q.dtype), []
        for t in range(len(q)):
            T = 0.9 * back(T) + torch.outer(k[t], v[t])
            out.append(T.T @ q[t])
        return torch.stack(out)

    refused("ex-retnet-turn", words, TURNING, memory_that_turns=fn)


def test_the_own_token_does_not_turn(refused) -> None:
    def fn(q, k, v):
        angle = 10_000 ** -torch.linspace(0, 1, 4, dtype=q.dtype)
        back = torch.block_diag(
            *(torch.tensor([[a.cos(), a.sin()], [-a.sin(), a.cos()]], dtype=q.dtype) for a in angle)
        )
        T, out = torch.zeros(8, v.shape[1], dtype=q.dtype), []
        for t in range(len(q)):
            T = 0.9 * back @ (T + torch.outer(k[t], v[t]))
            out.append(T.T @ q[t])
        return torch.stack(out)

    refused("ex-retnet-turn", "fades and turns before its query reads", FADES, memory_that_turns=fn)


def test_right_turns() -> None:
    check_exercise("ex-retnet-turn", turns)
