"""The sentences of the first chapter."""

from lesson_code.data import sentences

TRAINING, HELD_OUT = sentences.load()
FIRST = ("big", "large", "wide", "heavy")


def test_pairs_held_out_stand_together_in_no_other_sentence() -> None:
    def pairs(part):
        return {frozenset(sentence[1:]) for sentence in part}

    assert not pairs(TRAINING) & pairs(HELD_OUT)
    assert {"trophy", "suitcase"} in pairs(HELD_OUT)
    assert 0.15 < len(HELD_OUT) / (len(TRAINING) + len(HELD_OUT)) < 0.25


def test_the_last_word_decides() -> None:
    for words, meant, other in TRAINING + HELD_OUT:
        before = words.index(meant) < words.index(other)
        assert before == (words[-1] in FIRST)


def test_every_sentence_has_its_twins() -> None:
    """The same beginning with other last words, for half of which the other noun is meant."""
    meant: dict[tuple[str, ...], list[bool]] = {}
    for words, noun, _ in TRAINING + HELD_OUT:
        meant.setdefault(words[:-1], []).append(noun == words[1])
    assert all(2 * sum(first) == len(first) for first in meant.values())
    assert len(TRAINING + HELD_OUT) == len({sentence.words for sentence in TRAINING + HELD_OUT})


def test_every_word_occurs_in_training() -> None:
    words = sentences.vocabulary()
    assert words == sorted(words)
    assert set(words) == {word for sentence in TRAINING for word in sentence.words}


def test_nouns_that_hold_something_stand_in_both_places() -> None:
    places = {(words.index(noun) == 1, noun) for words, *nouns in TRAINING for noun in nouns}
    assert {(first, noun) for first in (True, False) for noun in sentences.HOLDERS} <= places
