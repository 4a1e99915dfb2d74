"""WKV: worked numbers, what people get wrong, its relatives, and keys of any size.

That both forms are the sum of the paper is tested in test_definitions.py.
"""

import numpy as np
import pytest

from lesson_code.numpy import WKVState, aft_full, aft_simple, wkv
from tests.arrays import assert_close, in_dtype, normal
from tests.oracles import wkv as loop

FORMS = ["recurrent", "parallel"]
every_form = pytest.mark.parametrize("form", FORMS)
VALUES = np.array([[10.0], [30.0], [50.0]])
HALF = np.array([np.log(2)])


def draw(N=7, leading=(), dtype="float64"):
    k, v, w, u = normal((*leading, N, 3), (*leading, N, 3), (3,), (3,))
    return [in_dtype(x, dtype) for x in (k, v, abs(w) + 0.05, u)]


@every_form
def test_worked_numbers(form):
    """10, then (10 + 30) / 2, then (5 + 30 + 50) / 2.5."""
    out, state = wkv(0 * VALUES, VALUES, HALF, 0 * HALF, form=form, return_state=True)
    assert_close(out, np.array([[10.0], [20.0], [34.0]]))
    assert_close(state.numerator, np.array([2.5 + 15 + 50]))
    assert_close(state.denominator, np.array([0.25 + 0.5 + 1]))
    assert state.maximum == 0


@every_form
def test_the_previous_token_carries_no_decay(form):
    """It would if e^-w of the state were read: (5 + 30) / 1.5 = 23.33 and 38.57 instead."""
    out = wkv(0 * VALUES, VALUES, HALF, 0 * HALF, form=form)
    assert abs(out[1, 0] - 20) < 1e-12 and abs(out[2, 0] - 34) < 1e-12
    decayed = [(5 + 30) / 1.5, (2.5 + 15 + 50) / 1.75]
    assert np.allclose(decayed, [23.333, 38.571], atol=1e-3)  # what the slip gives
    # However fast the past fades: the token before weighs as much as the current one.
    out = wkv(0 * VALUES, VALUES, np.array([1e4]), 0 * HALF, form=form)
    assert_close(out, np.array([[10.0], [20.0], [40.0]]))


@every_form
def test_the_bonus_is_for_the_current_token_and_not_stored(form):
    """With e^u = 3: (10 + 3·30) / 4, then (5 + 30 + 3·50) / 4.5."""
    u = np.array([np.log(3)])
    out, state = wkv(0 * VALUES, VALUES, HALF, u, form=form, return_state=True)
    assert_close(out, np.array([[10.0], [25.0], [185 / 4.5]]))
    _, without = wkv(0 * VALUES, VALUES, HALF, 0 * u, form=form, return_state=True)
    np.testing.assert_array_equal(state, without)


@every_form
def test_the_safe_state_has_a_maximum_of_its_own(form):
    """A large bonus raises what is read, not what is kept: its maximum is that of the keys."""
    _, state = wkv(0 * VALUES, VALUES, HALF, np.array([60.0]), form=form, return_state=True)
    assert state.maximum == 0
    _, state = wkv(VALUES, VALUES, HALF, 0 * HALF, form=form, return_state=True)
    assert state.maximum == 50
    _, state = wkv(-VALUES, VALUES, HALF, 0 * HALF, form=form, return_state=True)
    assert_close(state.maximum, np.array([-10 - 2 * HALF[0]]))


def test_it_is_aft_full_with_a_bias_that_fades():
    """-(t-1-i) w below the diagonal, u on it, channel by channel; the gate is 1/2 for q = 0."""
    k, v, w, u = draw(leading=(2,))
    t = np.arange(7)[:, None]
    for d in range(3):
        bias = -(t - 1 - t.T) * w[d] + (u[d] - w[d]) * np.eye(7)
        column = [x[..., d : d + 1] for x in (k, v)]
        expected = 2 * aft_full(np.zeros((7, 1)), *column, bias, causal=True)
        for form in FORMS:
            assert_close(wkv(*column, w[d : d + 1], u[d : d + 1], form=form), expected)


def test_without_decay_it_is_aft_simple():
    k, v, w, _ = draw(leading=(2,))
    expected = 2 * aft_simple(np.zeros_like(k), k, v, causal=True)
    for form in FORMS:
        assert_close(wkv(k, v, 0 * w + 1e-15, 0 * w, form=form), expected)


@every_form
def test_nothing_has_been_seen(form):
    out, state = wkv(*draw(0), form=form, return_state=True)
    assert out.shape == (0, 3)
    assert not state.numerator.any() and not state.denominator.any()
    assert (state.maximum == -1e38).all()


@every_form
def test_keys_up_to_80_in_float32(form):
    """e^80 times 1,000 values is beyond float32; decays from e^-5 to e^3."""
    rng = np.random.default_rng(9)
    N, D = 60, 9
    k = rng.choice([-80.0, -79.0, 0.0, 80.0, 79.5], size=(N, D))
    k[:5] = -80  # begin with weights that would all be 0
    v, w, u = rng.normal(size=(N, D)), np.exp(np.linspace(-5, 3, D)), rng.normal(size=D)
    exact = wkv(k, v, w, u)
    expected = loop(k, v, w, u, np.zeros(D), np.zeros(D))[0]  # float64 holds e^80, and e^-80
    assert_close(exact, expected)
    found, state = wkv(*(x.astype("float32") for x in (k, v, w, u)), form=form, return_state=True)
    assert np.isfinite(found).all() and all(np.isfinite(x).all() for x in state)
    assert_close(found, exact, "float32")


@every_form
def test_any_constant_cancels(form):
    k, v, w, u = draw(20)
    out = wkv(k, v, w, u, form=form)
    for constant in (-1e4, 700.0, 1e5):
        found = wkv(k + constant, v, w, u, form=form)
        np.testing.assert_allclose(found, out, rtol=0, atol=1e-9)


@every_form
def test_a_key_of_minus_infinity_has_no_weight(form):
    k, v, w, u = draw(9)
    k[[0, 1, 4]] = -np.inf
    k[:, 2] = -np.inf
    out, state = wkv(k, v, w, u, form=form, return_state=True)
    np.testing.assert_array_equal(out[:2], 0)  # nothing has been seen
    np.testing.assert_array_equal(out[:, 2], 0)
    assert state.denominator[2] == 0 and state.maximum[2] == -1e38
    expected = k.copy()
    expected[np.isinf(k)] = -600  # so small a weight is 0 beside the others, in float64 too
    reference = wkv(expected, v, w, u)
    assert_close(out[2:, :2], reference[2:, :2])
    # Padding at the end: the decay goes on, the weights of the rest stay in proportion.
    padded = np.concatenate([k, np.full((3, 3), -np.inf)])
    out_padded, _ = wkv(padded, np.ones((12, 3)), w, u, form=form, return_state=True)
    assert np.isfinite(out_padded).all()
    values = np.concatenate([v, np.zeros((3, 3))])
    assert_close(wkv(padded, values, w, u, form=form)[:9], out)


@every_form
def test_a_zero_key_has_weight(form):
    k, v, w, u = draw()
    padded = [np.concatenate([x, np.zeros((1, 3))]) for x in (k, v)]
    _, state = wkv(*padded, w, u, form=form, return_state=True)
    _, before = wkv(k, v, w, u, form=form, return_state=True)
    weights, decayed = (x.denominator * np.exp(x.maximum) for x in (state, before))
    assert_close(weights, decayed * np.exp(-w) + 1)


def test_the_maximum_of_half_precision_may_be_minus_infinity():
    k, v, w, u = draw(dtype="float16")
    k[0] = -np.inf
    zeros = np.zeros(3, "float16")
    state = WKVState(zeros, zeros, zeros - np.float16("inf"))
    for form in FORMS:
        np.testing.assert_array_equal(
            wkv(k, v, w, u, form=form, initial_state=state), wkv(k, v, w, u, form=form)
        )


@every_form
def test_nan_stays_in_its_channel_and_sequence(form):
    for spoiled in range(2):
        args = draw(9, (2,))
        args[spoiled][1, 5, 2] = np.nan
        bad = np.isnan(wkv(*args, form=form))
        assert bad[1, 5:, 2].all() and bad.sum() == bad[1, :, 2].sum()
        if form == "recurrent":
            assert not bad[1, :5].any()
