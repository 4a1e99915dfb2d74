"""Sentences in which *it* means one of two nouns, and only the last word says which.

"The trophy did not fit in the suitcase because it was too big": the trophy. With "small" in the
place of "big" it is the suitcase. Such pairs are known as Winograd schemas (Levesque, Davis and
Morgenstern, 2012, "The Winograd Schema Challenge", whose best-known example this one is).
"""

from itertools import product
from typing import NamedTuple

import numpy as np

__all__ = ["Sentence", "load", "vocabulary"]


class Sentence(NamedTuple):
    """A sentence, and what its pronoun means.

    Parameters
    ----------
    words : tuple of str
        The words in order, in lower case.
    meant : str
        The noun that *it* stands for.
    other : str
        The noun that it does not stand for.
    """

    words: tuple[str, ...]
    meant: str
    other: str


HOLDERS = (
    "suitcase box bag drawer trunk crate basket backpack chest bucket barrel cabinet case locker"
).split()
THINGS = (
    "trophy sculpture violin guitar lamp clock vase statue globe helmet toolbox book printer camera"
    " telescope cake teapot radio mirror kettle"
).split()
# The beginning, and the last words that mean the first noun and the second one.
TEMPLATES = [
    ("the {} did not fit in the {}", "big large wide", "small tiny narrow"),
    ("the {} fell through the {}", "heavy", "thin"),
    ("the {} could not be lifted out of the {}", "heavy", "deep"),
]
ALWAYS_HELD_OUT = {"trophy", "suitcase"}


def load() -> tuple[list[Sentence], list[Sentence]]:
    """All sentences of the grammar: those to train on, and those held out.

    The nouns of a sentence held out stand together in no sentence to train on, in neither order.
    One pair in five is held out, among them the trophy and the suitcase.

    Returns
    -------
    training, held_out : lists of Sentence

    Examples
    --------
    >>> training, held_out = load()
    >>> len(training), len(held_out)
    (3680, 940)
    >>> print(*held_out[0].words)
    the trophy did not fit in the suitcase because it was too big
    >>> held_out[0].meant
    'trophy'
    """
    pairs = [(x, y) for x, y in product(THINGS + HOLDERS, HOLDERS) if x != y]
    unordered = sorted({tuple(sorted(pair)) for pair in pairs})
    drawn = np.random.default_rng(0).permutation(len(unordered))[: len(unordered) // 5]
    apart = [set(unordered[i]) for i in drawn] + [ALWAYS_HELD_OUT]
    training: list[Sentence] = []
    held_out: list[Sentence] = []
    for (beginning, *endings), (x, y) in product(TEMPLATES, pairs):
        part = held_out if {x, y} in apart else training
        for ending, (meant, other) in zip(endings, [(x, y), (y, x)], strict=True):
            for last in ending.split():
                words = f"{beginning.format(x, y)} because it was too {last}".split()
                part.append(Sentence(tuple(words), meant, other))
    return training, held_out


def vocabulary() -> list[str]:
    """The words of all sentences, in alphabetical order. A token is the number of its word.

    Examples
    --------
    >>> vocabulary().index("backpack")
    0
    """
    return sorted({word for part in load() for sentence in part for word in sentence.words})
