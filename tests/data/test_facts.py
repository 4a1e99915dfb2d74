"""Texts in which facts come back."""

import numpy as np

from lesson_code.data import facts

WORDS = facts.vocabulary()
TEXTS = facts.draw(batch=200, length=96, seed=0)


def test_a_thing_comes_back_with_its_name() -> None:
    for tokens, ages in zip(TEXTS.tokens, TEXTS.age, strict=True):
        owned: dict[str, tuple[str, int]] = {}
        for t, age in enumerate(ages):
            name, word = WORDS[tokens[t]], WORDS[tokens[t + 1]]
            if name not in facts.NAMES:
                assert age == 0
                continue
            thing, last = owned.get(name, (word, t))
            assert (word, t - last) == (thing, age)
            owned[name] = word, t


def test_what_is_known_costs_nothing_and_a_new_thing_a_guess() -> None:
    after_a_name = np.isin(TEXTS.tokens[:, :-1], [WORDS.index(name) for name in facts.NAMES])
    assert (TEXTS.surprise[TEXTS.age > 0] == 0).all()
    new = TEXTS.surprise[after_a_name & (TEXTS.age == 0)]
    assert np.allclose(new, np.log(len(facts.THINGS)))


def test_remarks_cost_what_their_frequencies_say() -> None:
    """The entropy of a word, given the one or two before it, is the mean surprise."""
    texts = facts.draw(batch=4000, length=60, seed=1)
    look = texts.tokens[:, :-1] == WORDS.index("old")
    things = np.bincount(texts.tokens[:, 1:][look], minlength=len(WORDS))
    shares = things[things > 0] / things.sum()
    assert np.isclose(-(shares * np.log(shares)).sum(), texts.surprise[look].mean(), atol=0.02)


def test_an_integer_gives_the_same_texts_and_a_generator_goes_on() -> None:
    assert np.array_equal(facts.draw(batch=200, length=96, seed=0).tokens, TEXTS.tokens)
    rng = np.random.default_rng(0)
    first, second = (facts.draw(batch=1, length=30, seed=rng).tokens for _ in range(2))
    assert (first != second).any()
