"""Retention: worked numbers, decays of any strength, and bugs of known libraries.

That every form is the sum over tokens is tested in test_definitions.py.
"""

import numpy as np
import pytest

from lesson_code.numpy import identity, linear_attention, retention, retention_decays
from tests.arrays import KEYS, assert_close, normal
from tests.oracles import retention as loop

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
VALUES = np.array([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0]])
NOTHING = np.zeros((3, 4))


def draw(N=7, leading=()):
    return normal((*leading, N, 3), (*leading, N, 3), (*leading, N, 4))


@every_form
def test_worked_numbers(form):
    """The example of the chapter on RetNet, with a decay of 1/2: whole numbers after each token."""
    states = []
    for t in (1, 2, 3):
        out, S = retention(
            *(x[:t] for x in (KEYS, KEYS, VALUES)), 0.5, form=form, chunk_size=2, return_state=True
        )
        states.append(S.tolist())
    assert states == [
        [[16, 8], [0, 0]],
        [[8, 4], [4, 12]],
        [[6, 8], [4, 12]],
    ]
    assert out.tolist() == [[16, 8], [4, 12], [10, 20]]


@every_form
def test_the_own_token_is_not_decayed(form):
    """The memory fades before a token is written: D_nn = 1, and the token before has one decay."""
    q = k = v = np.ones((3, 1))
    assert retention(q, k, v, 0.5, form=form).tolist() == [[1], [1.5], [1.75]]


@every_form
def test_a_decay_of_one_is_linear_attention(form):
    q, k, v = draw(20)
    expected = linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)
    assert_close(retention(q, k, v, 1, form=form, chunk_size=6), expected)
    assert_close(retention(q, k, v, np.ones(()), form=form, chunk_size=6), expected)


@every_form
def test_there_is_neither_scale_nor_normalizer(form):
    """Libraries multiply q by 1/sqrt(D), divide rows, or clamp: S is the plain sum here."""
    q, k, v = draw(9)
    out, S = retention(q, k, v, 0.9, form=form, return_state=True)
    twice, same = retention(2 * q, k, v, 0.9, form=form, return_state=True)
    assert_close(twice, 2 * out)
    assert_close(same, S)
    _, S = retention(q, k, 2 * v, 0.9, form=form, return_state=True)
    assert_close(S, 2 * same)


def test_the_decays_of_the_paper():
    """Not the spacing by exponentials that depends on the number of heads."""
    assert retention_decays(8).tolist() == [
        31 / 32,
        63 / 64,
        127 / 128,
        255 / 256,
        511 / 512,
        1023 / 1024,
        2047 / 2048,
        4095 / 4096,
    ]
    assert retention_decays(1).shape == (1,) and retention_decays(2).dtype == "float64"
    assert (1 / (1 - retention_decays(4))).tolist() == [32, 64, 128, 256]


def test_one_decay_for_each_head():
    q, k, v = draw(9, (2, 3))
    decays = retention_decays(3)
    out = retention(q, k, v, decays)
    for h in range(3):
        assert_close(out[:, h], retention(q[:, h], k[:, h], v[:, h], decays[h]))
        assert_close(out[:, h], retention(q[:, h], k[:, h], v[:, h], float(decays[h])))


@every_form
def test_strong_decays(form):
    """0.01^n underflows, and what remains is what the last few tokens wrote."""
    q, k, v = draw(400)
    for decay in (1e-2, 1e-30, 5e-324):
        out, S = retention(q, k, v, decay, form=form, return_state=True)
        assert np.isfinite(out).all() and np.isfinite(S).all()
        expected = (q * k).sum(axis=-1, keepdims=True) * v
        expected[1:] += decay * (q[1:] * k[:-1]).sum(axis=-1, keepdims=True) * v[:-1]
        assert_close(out, expected, tolerance=100 * decay**2 + 1e-11)


def test_no_cumulative_product_is_divided_by_another():
    """Cumulative products 0.5^n, one divided by the other, would be 0/0 after 1,100 tokens."""
    q, k, v = draw(1300)
    for form in FORMS:
        out = retention(q, k, v, 0.5, form=form, chunk_size=1300)
        assert_close(out[-1:], loop(q[-60:], k[-60:], v[-60:], 0.5, NOTHING)[0][-1:])


def test_padding_at_the_front_changes_nothing_and_at_the_end_fades_the_memory():
    q, k, v = draw()
    out, S = retention(q, k, v, 0.5, return_state=True)
    front = [np.pad(x, ((3, 0), (0, 0))) for x in (q, k, v)]
    padded, same = retention(*front, 0.5, return_state=True)
    assert_close(padded[3:], out)
    assert_close(same, S)
    end = [np.pad(x, ((0, 3), (0, 0))) for x in (q, k, v)]
    padded, faded = retention(*end, 0.5, return_state=True)
    assert_close(padded[:7], out)
    assert_close(faded, S / 8)


def test_known_bug_the_decay_before_the_own_token():
    """S = decay * (S + k vᵀ) decays the own token as well."""
    q, k, v = draw()
    wrong = 0.9 * retention(q, k, v, 0.9)
    right, _ = loop(q, k, v, 0.9, NOTHING)
    assert np.abs(wrong - right).max() > 0.05 * np.abs(right).max()
    for form in FORMS:
        assert_close(retention(q, k, v, 0.9, form=form), right)


def test_known_bug_rows_of_the_mask_are_divided_by_the_root_of_their_sum():
    """It cancels in the norm of each head and nowhere else; the state is another one too."""
    q, k, v = draw(20)
    n = np.arange(20)
    mask = np.tril(0.9 ** np.abs(n[:, None] - n))
    scaled = (q @ k.T * mask / np.sqrt(mask.sum(axis=-1, keepdims=True))) @ v
    out = retention(q, k, v, 0.9)
    assert np.abs(scaled - out).max() > 0.5 * np.abs(out).max()

    def norm(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True))

    assert_close(norm(scaled), norm(out))


def test_known_bug_the_length_must_be_a_multiple_of_the_chunk():
    q, k, v = draw(130)
    right, S = loop(q, k, v, 0.9, NOTHING)
    for chunk_size in (1, 7, 64, 129, 130, 1000):
        out, state = retention(
            q, k, v, 0.9, form="chunkwise", chunk_size=chunk_size, return_state=True
        )
        assert_close(out, right)
        assert_close(state, S)


@pytest.mark.parametrize(
    ("decay", "error", "message"),
    [
        (0, ValueError, r"decay must be in \(0, 1\], got 0\.0\."),
        (1.5, ValueError, r"decay must be in \(0, 1\], got 1\.5\."),
        (-0.5, ValueError, r"decay must be in \(0, 1\], got -0\.5\."),
        (np.array([0.5, 1.25]), ValueError, r"decay must be in \(0, 1\], got 1\.25\."),
        (float("nan"), ValueError, "decay must be finite, got nan"),
        (True, TypeError, "decay must be a real number, got True"),
        ("half", TypeError, "decay must be a real number, got 'half'"),
        ([0.5], TypeError, r"decay must be a real number, got \[0.5\]"),
        (None, TypeError, "decay must be a real number, got None"),
        (np.array(1), TypeError, "decay must have a floating dtype"),
        (np.array(0.5, "float32"), TypeError, "decay must have dtype float64, got float32"),
    ],
)
def test_decays_that_do_not_fit(decay, error, message):
    with pytest.raises(error, match="^" + message):
        retention(*draw(), decay)


def test_numbers_of_heads_that_are_none():
    with pytest.raises(ValueError, match="^num_heads must be at least 1, got 0"):
        retention_decays(0)
    with pytest.raises(TypeError, match="^num_heads must be an integer, got 2.0"):
        retention_decays(2.0)
