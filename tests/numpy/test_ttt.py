"""TTT-Linear: worked numbers, what it is without its norm, and which token a rate belongs to.

That both forms are the sum over batches is tested in test_definitions.py.
"""

import math

import numpy as np
import pytest

from lesson_code.numpy import TTTState, delta_rule, gated_linear_attention, ttt_linear
from lesson_code.numpy.ttt import gradient, normed
from tests.arrays import assert_close
from tests.operators import draw, draw_state

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def given(form, **options):
    return {"form": form, "batch_size": 4, "return_state": True, **options}


def plain(arrays):
    """Sums of gradients, and a norm that scales nothing."""
    arrays["share"] = np.ones_like(arrays["share"])
    arrays["norm_weight"] = np.ones_like(arrays["norm_weight"])
    arrays["norm_bias"] = np.zeros_like(arrays["norm_bias"])
    return arrays


@every_form
def test_worked_numbers(form):
    """Batches of two, targets 7, 19 and 19, with the key 1 and a bias: W + b is 0, then 26."""
    q, v = np.ones((3, 1)), np.array([[8.0], [20.0], [20.0]])
    rate, one, none = np.full(3, 0.5), np.ones(1), np.zeros(1)
    options = given(form, batch_size=2, normalize=False)
    out, state = ttt_linear(q, q, v, rate, np.ones(3), one, none, **options)
    assert_close(out - q, np.array([[7.0], [26.0], [19.0]]))
    assert state.W.tolist() == [[13]] and state.b.tolist() == [13] and state.position == 3
    assert state.dW.tolist() == [[3.5]] and state.db.tolist() == [3.5]  # half of 26 - 19
    # The mean of both gradients in the place of their sum: 13 when the first batch ends.
    share = np.array([1, 0.5, 1])
    out, _ = ttt_linear(q, q, v, rate, share, one, none, **options)
    assert_close(out - q, np.array([[7.0], [13.0], [19.0]]))


@every_form
def test_without_norm_a_batch_of_one_is_the_delta_rule(form):
    """On targets v - k, with a key that has a 1 more for the bias, and the query added."""
    arrays = plain(draw("ttt_linear", 9))
    q, k, v, eta, *_ = arrays.values()
    S = draw_state("ttt_linear")
    first = TTTState(S.W, S.b, 0 * S.W, 0 * S.b, 0)
    options = given(form, batch_size=1, normalize=False, initial_state=first)
    out, last = ttt_linear(**arrays, **options)
    with_one = [np.concatenate([x, np.ones((9, 1))], axis=1) for x in (q, k)]
    memory = np.concatenate([S.W, S.b[None]])
    expected, end = delta_rule(*with_one, v - k, eta, initial_state=memory, return_state=True)
    assert_close(out - q, expected)
    assert_close(np.concatenate([last.W, last.b[None]]), end)


@every_form
def test_without_norm_and_in_one_batch_it_is_linear_attention(form):
    """All gradients at W = 0: the targets are added up under their keys, and nothing corrected."""
    arrays = plain(draw("ttt_linear", 9))
    q, k, v, eta, *_ = arrays.values()
    out, _ = ttt_linear(**arrays, **given(form, batch_size=9, normalize=False))
    with_one = [np.concatenate([x, np.ones((9, 1))], axis=1) for x in (q, k)]
    expected = gated_linear_attention(*with_one, eta[:, None] * (v - k), np.zeros((9, 5)))
    assert_close(out - q, expected)


def test_the_gradient_is_that_of_the_loss():
    z, target, w, c = np.random.default_rng(0).normal(size=(4, 6))

    def loss(z, normalize):
        return ((w * normed(z, normalize)[0] + c - target) ** 2).sum() / 2

    for normalize in (True, False):
        h = 1e-6 * np.eye(6)
        numeric = [(loss(z + e, normalize) - loss(z - e, normalize)) / 2e-6 for e in h]
        found = gradient(z, target, w, c, normalize)
        assert_close(found, np.array(numeric), tolerance=1e-8)
    g = gradient(z, target, w, c, True)  # changes neither the mean of z nor, nearly, its length
    assert abs(g.sum()) < 1e-13 and abs(g @ (z - z.mean())) < 1e-4


@every_form
def test_one_step_goes_down_the_loss_of_its_batch(form):
    arrays = draw("ttt_linear", 4)
    arrays["eta"] *= 1e-4
    arrays["share"][:] = 1
    S = draw_state("ttt_linear")
    first = TTTState(S.W, S.b, 0 * S.W, 0 * S.b, 0)
    _, last = ttt_linear(**arrays, **given(form, initial_state=first))
    _, k, v, eta, _, w, c = arrays.values()

    def loss(W, b):
        x = w * normed(k @ W + b, True)[0] + c
        return (eta * ((x - v + k) ** 2).sum(axis=1)).sum() / 2

    change = ((last.W - S.W) ** 2).sum() + ((last.b - S.b) ** 2).sum()
    assert_close(loss(last.W, last.b) - loss(S.W, S.b), np.array(-change), tolerance=1e-10)
    assert (loss(S.W, S.b) - loss(last.W, last.b)) / change == pytest.approx(1, rel=1e-2)


@every_form
def test_a_rate_belongs_to_the_token_that_is_written(form):
    """And `share` to the one that reads: with η on rows of the mask, W would end elsewhere."""
    arrays = draw("ttt_linear", 4)
    arrays["share"][:] = 1
    S = draw_state("ttt_linear")
    first = TTTState(S.W, S.b, 0 * S.W, 0 * S.b, 0)
    _, last = ttt_linear(**arrays, **given(form, initial_state=first))
    _, k, v, eta, _, w, c = arrays.values()
    g = gradient(k @ S.W + S.b, v - k, w, c, True)
    assert_close(last.W, S.W - (eta[:, None] * k).T @ g)
    on_rows = S.W - eta[-1] * k.T @ g  # the last row of η ⊙ tril(Q K')
    assert abs(on_rows - last.W).max() > 0.1 * abs(S.W - last.W).max()
    out, _ = ttt_linear(**arrays, **given(form, initial_state=first))
    arrays["eta"][3] = 0  # the last one does not write: no other output changes
    found, _ = ttt_linear(**arrays, **given(form, initial_state=first))
    assert_close(found[:3], out[:3])
    arrays["eta"][0] = 0  # the first one does not: all others change
    found, _ = ttt_linear(**arrays, **given(form, initial_state=first))
    assert (abs(found[:3] - out[:3]).max(axis=1) > 0).all()


@every_form
def test_a_token_in_a_batch_sees_no_other_gradient_change(form):
    """The second token of a batch is written as if the first had not been: same W, same b."""
    q, k, v, eta, share, w, c = draw("ttt_linear", 3).values()
    S = draw_state("ttt_linear")
    first = TTTState(S.W, S.b, 0 * S.W, 0 * S.b, 0)
    eta[0] = 0
    args = q, k, v, eta, share, w, c
    _, without = ttt_linear(*args, **given(form, initial_state=first))
    eta[0] = 0.3
    _, state = ttt_linear(*args, **given(form, initial_state=first))
    g = gradient(k[:1] @ S.W + S.b, v[:1] - k[:1], w, c, True)
    assert_close(state.dW - without.dW, 0.3 * k[:1].T @ g)
    assert_close(state.W, S.W)


@every_form
@pytest.mark.parametrize("N", [1, 3, 4, 5, 8, 11])
def test_batches_are_counted_from_the_first_token(N, form):
    """A state says how far its batch has come; a prompt of any length may be read."""
    arrays = draw("ttt_linear", 16)
    out, last = ttt_linear(**arrays, **given(form))

    def piece(rows, **options):
        cut = {
            x: y[rows] if x not in ("norm_weight", "norm_bias") else y for x, y in arrays.items()
        }
        return ttt_linear(**cut, **given(form, **options))

    begin, state = piece(slice(0, N))
    rest, end = piece(slice(N, 16), initial_state=state)
    assert state.position == N and end.position == 16
    assert (abs(state.dW).max() == 0) == (N % 4 == 0)
    assert_close(np.concatenate([begin, rest]), out)
    assert_close(end.W, last.W)


@every_form
def test_sequences_may_be_at_different_places_of_their_batches(form):
    arrays = draw("ttt_linear", 9, leading=(3,))
    states = [draw_state("ttt_linear", seed=i)._replace(position=i + 2) for i in range(3)]
    parts = [np.stack(x) for x in zip(*(s[:4] for s in states), strict=True)]
    together = TTTState(*parts, np.array([2, 3, 4]))
    out, last = ttt_linear(**arrays, **given(form, initial_state=together))
    assert last.position.tolist() == [11, 12, 13]
    for i, state in enumerate(states):
        own = {name: x[i] for name, x in arrays.items()}
        alone, end = ttt_linear(**own, **given(form, initial_state=state))
        assert_close(out[i], alone)
        assert_close(last.W[i], end.W)
        assert_close(last.dW[i], end.dW)


@every_form
def test_from_nothing_the_first_step_divides_by_the_root_of_epsilon(form):
    """Where W and b are 0, norm'(0) is 1,000: what a layer learns to begin with spares it that."""
    arrays = plain(draw("ttt_linear", 1))
    out, state = ttt_linear(**arrays, **given(form))
    _, k, v, eta, *_ = arrays.values()
    target = v - k
    g = -1000 * (target - target.mean())
    assert_close(state.db, eta[0] * g[0], tolerance=1e-9)
    assert np.isfinite(out).all() and math.isclose(abs(out - arrays["q"]).max(), 1.5, abs_tol=0.6)
