"""Decays between the tokens of a chunk: each sum of logarithms is made of its own terms."""

import numpy as np

from lesson_code.numpy.chunks import decays_between, decays_through, in_chunks


def test_decays_are_products_of_what_lies_between() -> None:
    a = np.random.default_rng(0).uniform(0.1, 1, size=(2, 5, 3))
    between, through = decays_between(np.log(a)), decays_through(np.log(a))
    for t in range(5):
        np.testing.assert_allclose(through[:, t], a[:, : t + 1].prod(axis=1))
        for j in range(5):
            expected = a[:, j + 1 : t + 1].prod(axis=1) if j <= t else np.zeros((2, 3))
            np.testing.assert_allclose(between[:, t, j], expected)


def test_known_bug_a_difference_of_cumulative_sums() -> None:
    """A closed gate makes -inf - -inf, and a long sum swallows a small term."""
    g = np.array([-1.0, -np.inf, -2.0])[:, None]
    expected = [[1, 0, 0], [0, 1, 0], [0, np.exp(-2), 1]]
    np.testing.assert_array_equal(decays_between(g)[..., 0], expected)
    g = np.full((400, 1), -50.0, "float32")
    g[-1] = -1e-3
    total = np.cumsum(g[:, 0])
    assert abs(total[-1] - total[-2] - g[-1]) > 1e-4
    assert decays_between(g)[-1, -2] == np.exp(g[-1])


def test_chunks_cover_a_sequence_once() -> None:
    x, y = np.arange(14.0).reshape(7, 2), np.arange(7.0)[:, None]
    pieces = list(in_chunks(3, x, y))
    assert [len(piece) for piece, _ in pieces] == [3, 3, 1]
    for i, array in enumerate((x, y)):
        np.testing.assert_array_equal(np.concatenate([piece[i] for piece in pieces]), array)
