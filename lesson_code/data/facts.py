"""Texts in which facts come back: a small grammar whose entropy is known for every word.

A sentence is a fact, "anna lamp .", which says who has what, or a remark, "the old clock stopped."
Remarks need a memory of two words. A fact is new when its name comes for the first time in a text,
and any of the things may follow. When the name comes again, so does its thing: who remembers the
first time needs not to guess.
"""

from typing import NamedTuple

import numpy as np

from lesson_code import _arguments

__all__ = ["Facts", "draw", "vocabulary"]

NAMES = "anna ben clara david emma felix greta hugo ida jonas karl lena max nora otto pia".split()
THINGS = ("lamp clock key cup coin map pen ring book bell drum kite rope shoe vase mask").split()
LOOKS = "old big red small blue new heavy good".split()
ENDS = "stopped fallen broken vanished moved turned gone arrived".split()
WORDS = [".", "the", *NAMES, *THINGS, *LOOKS, *ENDS]
FACT = 3 / 4  # probability that a sentence is a fact
THING_SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 8)  # of the things that a look goes with
END_SHARES = (3 / 4, 1 / 4)  # of the ends that a thing goes with


class Facts(NamedTuple):
    """Texts, what they would cost whoever knows the grammar, and how old each fact is.

    Parameters
    ----------
    tokens : array of integers, shape (B, N + 1)
        The texts. Each begins with the full stop of a sentence before it.
    surprise : array, shape (B, N)
        −log of the probability of each token but the first, given all tokens before it. The mean is
        the smallest loss that a model can have.
    age : array of integers, shape (B, N)
        Where a token but the first is the thing of a name that has come before: how many tokens ago
        it came for the last time with this name. 0 everywhere else.
    """

    tokens: np.ndarray
    surprise: np.ndarray
    age: np.ndarray


def vocabulary() -> list[str]:
    """The words. A token is the number of its word.

    Examples
    --------
    >>> vocabulary()[:4]
    ['.', 'the', 'anna', 'ben']
    """
    return list(WORDS)


def draw(*, batch: int, length: int, seed: int | np.random.Generator = 0) -> Facts:
    """Draw texts.

    Parameters
    ----------
    batch : int
        Number B of texts.
    length : int
        Number N of tokens to predict; the last sentence may be cut.
    seed : int or numpy.random.Generator
        An integer gives the same texts at every call, a generator goes on from where it is.

    Returns
    -------
    Facts

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, or below 1.

    Examples
    --------
    >>> text = draw(batch=1, length=10, seed=3)
    >>> print(*(vocabulary()[token] for token in text.tokens[0]))
    . anna kite . ben kite . the red bell fallen
    """
    B = _arguments.check_integer("batch", batch, minimum=1)
    N = _arguments.check_integer("length", length, minimum=1)
    rng = np.random.default_rng(seed)
    S = -(-N // 3)  # sentences, the shortest of three words
    fact = rng.random((B, S)) < FACT
    name, look = rng.integers(len(NAMES), size=(B, S)), rng.integers(len(LOOKS), size=(B, S))
    owned = rng.integers(len(THINGS), size=(B, len(NAMES)))  # what each name has, text by text
    has = np.take_along_axis(owned, name, axis=1)
    which, end = (rng.choice(len(p), size=(B, S), p=p) for p in (THING_SHARES, END_SHARES))
    seen = (2 * look + 5 * which) % len(THINGS)  # no look goes twice with a thing
    ended = (seen + 3 * end) % len(ENDS)

    number = {word: i for i, word in enumerate(WORDS)}
    names, things, looks, ends = (number[x[0]] for x in (NAMES, THINGS, LOOKS, ENDS))
    stop, the = (np.full((B, S), number[word]) for word in (".", "the"))
    zero, none = np.zeros((B, S)), np.full((B, S), -1)
    facts = [names + name, things + has, stop, none, none]
    remarks = [the, looks + look, things + seen, ends + ended, stop]

    known = np.zeros((B, S), bool)  # whether the name has come before
    for s in range(1, S):
        known[:, s] = ((name[:, :s] == name[:, s, None]) & fact[:, :s]).any(axis=1)
    new = np.where(known, 0, np.log(len(THINGS)))
    facts_cost = [zero + np.log(len(NAMES) / FACT), new, zero, zero, zero]
    remarks_cost = [zero - np.log(1 - FACT), zero + np.log(len(LOOKS))]
    remarks_cost += [-np.log(THING_SHARES)[which], -np.log(END_SHARES)[end], zero]

    def sentences(one, other):  # (B, S, 5)
        return np.where(fact[..., None], np.stack(one, -1), np.stack(other, -1))

    words, costs = sentences(facts, remarks), sentences(facts_cost, remarks_cost)
    named = sentences([none, name, none, none, none], [none] * 5)
    tokens, surprise = np.empty((B, N + 1), np.int64), np.empty((B, N))
    age = np.zeros((B, N), np.int64)
    tokens[:, 0] = number["."]
    for b in range(B):
        real = words[b] >= 0
        tokens[b, 1:], surprise[b] = words[b][real][:N], costs[b][real][:N]
        last: dict[int, int] = {}
        for t, who in enumerate(named[b][real][:N]):
            if who >= 0:
                age[b, t] = t - last.get(who, t)
                last[who] = t
    return Facts(tokens, surprise, age)
