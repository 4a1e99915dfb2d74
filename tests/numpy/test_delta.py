"""The delta rules: worked numbers, what they promise, and systems that are hard to solve.

That both forms are the recurrence with whole transition matrices is tested in test_definitions.py.
"""

import math

import numpy as np
import pytest

from lesson_code.numpy import delta_rule, gated_delta_rule, identity, linear_attention
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw_all
from tests.oracles import gated_delta_rule as loop

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
both_rules = pytest.mark.parametrize("rule", [delta_rule, gated_delta_rule])


def draw(N=7, seed=0, dtype="float64"):
    """q, k, v, beta, log_decay that is never -inf, and a state."""
    arrays = draw_all("gated_delta_rule", N, seed, dtype)
    arrays[4] = np.maximum(arrays[4], -2)
    return arrays


def arguments(rule, arrays):
    """What the rule takes, out of what `draw` returns."""
    return arrays[:4] if rule is delta_rule else arrays[:5]


@both_rules
def test_many_chunks_of_the_default_size(rule):
    *arrays, state = draw(129)
    args = arguments(rule, arrays)
    expected, S = rule(*args, form="recurrent", initial_state=state, return_state=True)
    for form in ("chunkwise", None):
        out, last = rule(*args, form=form, initial_state=state, return_state=True)
        assert_close(out, expected)
        assert_close(last, S)
    np.testing.assert_array_equal(rule(*args), rule(*args, chunk_size=64, form="chunkwise"))


@every_form
def test_worked_numbers(form):
    """The third key finds 10 + 30 and 20 + 40 already; half of the error is written."""
    beta = np.array([1.0, 1.0, 0.5])
    options = {"form": form, "chunk_size": 2, "return_state": True}
    out, S = delta_rule(KEYS, KEYS, VALUES, beta, **options)
    assert out.tolist() == [[10, 20], [30, 40], [50, 60]]  # beta |k|² is 1, thrice
    assert S.tolist() == [[15, 20], [35, 40]]
    assert delta_rule(KEYS, KEYS, VALUES, np.ones(3), form=form)[2].tolist() == [60, 60]


@every_form
def test_worked_numbers_with_a_gate(form):
    """Half of [8] is left, 4 is found, and half of the error of 6 is written."""
    k, v = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[8.0], [10.0]])
    beta, log_decay = np.array([1.0, 0.5]), np.array([0.0, -math.log(2)])
    out, S = gated_delta_rule(k, k, v, beta, log_decay, form=form, return_state=True)
    np.testing.assert_allclose(out, [[8], [10]], rtol=1e-14)
    np.testing.assert_allclose(S, [[7], [3]], rtol=1e-14)


@every_form
def test_the_gated_rule_decays_before_it_takes_the_error(form):
    """With the other order, a (S + k u'), or the error of what is not decayed, 10 is not found."""
    k = np.array([[1.0, 0.0], [1.0, 0.0]])
    v, beta = np.array([[8.0], [10.0]]), np.ones(2)
    log_decay = np.array([0.0, -math.log(2)])
    out, S = gated_delta_rule(k, k, v, beta, log_decay, form=form, return_state=True)
    np.testing.assert_allclose(S, [[10], [0]], rtol=1e-14)
    np.testing.assert_allclose(out, [[8], [10]], rtol=1e-14)


@both_rules
@every_form
def test_a_key_written_twice_finds_exactly_the_second_value(rule, form):
    rng = np.random.default_rng(2)
    key, other = np.linalg.qr(rng.normal(size=(8, 8)))[0][:2]
    k = np.stack([key, other, key])
    v = rng.normal(size=(3, 5))
    log_decay = np.array([0.0, 0.0, -0.7])
    args = arguments(rule, [k, k, v, np.ones(3), log_decay])
    out, S = rule(*args, form=form, return_state=True)
    assert_close(out, v)
    assert_close(key @ S, v[2])
    assert_close(other @ S, v[1] * math.exp(-0.7 if rule is gated_delta_rule else 0))


@every_form
def test_the_same_key_many_times(form):
    """Each write moves what the key finds by beta of the way, and beta = 2 mirrors it."""
    N, key = 6, np.array([0.6, 0.8])
    k = np.tile(key, (N, 1))
    for beta in (0.25, 1.0, 2.0):
        out = delta_rule(k, k, np.full((N, 1), 10.0), np.full(N, beta), form=form)
        expected = 10 - 10 * (1 - beta) ** np.arange(1, N + 1)
        assert_close(out[:, 0], expected)


@every_form
def test_beta_of_two_reflects_and_more_diverges(form):
    """beta |k|² = 2 keeps the length of S, for it mirrors it at the key; 2.5 multiplies by -1.5."""
    rng = np.random.default_rng(3)
    k, S = 3 * rng.normal(size=(40, 4)), rng.normal(size=(4, 5))
    squares = (k**2).sum(axis=-1)
    nothing = np.zeros((40, 5))
    options = {"form": form, "initial_state": S, "return_state": True, "chunk_size": 16}
    _, last = delta_rule(k, k, nothing, 2 / squares, **options)
    np.testing.assert_allclose(np.linalg.norm(last), np.linalg.norm(S), rtol=1e-12)
    same = np.tile(k[:1], (40, 1))
    _, last = delta_rule(same, same, nothing, np.full(40, 2 / squares[0]), **options)
    assert_close(last, S)  # an even number of reflections
    _, last = delta_rule(same, same, nothing, np.full(40, 2.5 / squares[0]), **options)
    np.testing.assert_allclose(k[0] @ last, 1.5**40 * (k[0] @ S), rtol=1e-9)
    _, last = delta_rule(k, k, nothing, 1.9 / squares, **options)
    assert np.linalg.norm(last) < np.linalg.norm(S)


@every_form
def test_beta_is_not_checked(form):
    q, k, v, beta, _, _ = draw()
    assert np.isfinite(delta_rule(q, k, v, 7 * beta - 5, form=form)).all()


@every_form
def test_orthonormal_keys_store_as_plain_linear_attention_does(form):
    rng = np.random.default_rng(5)
    k = np.linalg.qr(rng.normal(size=(9, 9)))[0][:7]
    q, v = rng.normal(size=(7, 9)), rng.normal(size=(7, 4))
    out, S = delta_rule(q, k, v, np.ones(7), form=form, return_state=True, chunk_size=3)
    plain, state = linear_attention(
        q, k, v, feature_map=identity, causal=True, normalize=False, return_state=True
    )
    assert_close(out, plain)
    assert_close(S, state.S)
    assert_close(k @ S, v)  # and every pair is found again


@every_form
def test_one_step_goes_down_the_gradient_of_the_squared_error(form):
    """S - beta times the gradient of |v - S'k|²/2, which is taken by finite differences."""
    q, k, v, beta, _, S = draw(1)

    def loss(S):
        return ((v[0] - k[0] @ S) ** 2).sum() / 2

    gradient, h = np.zeros_like(S), 1e-4
    for at in np.ndindex(S.shape):
        up, down = S.copy(), S.copy()
        up[at] += h
        down[at] -= h
        gradient[at] = (loss(up) - loss(down)) / (2 * h)
    _, last = delta_rule(q, k, v, beta, form=form, initial_state=S, return_state=True)
    assert_close(last, S - beta[0] * gradient, tolerance=1e-9)


@every_form
def test_the_rule_is_linear_in_the_memory_and_the_values(form):
    """So it could be scanned: the difference is not in S, but in a transition of C×C numbers."""
    q, k, v, beta, log_decay, S = draw()
    other = draw(seed=1)
    args = (beta, log_decay)
    options = {"form": form, "chunk_size": 3, "return_state": True}
    runs = [
        gated_delta_rule(q, k, v, *args, initial_state=S, **options),
        gated_delta_rule(q, k, other[2], *args, initial_state=other[5], **options),
        gated_delta_rule(q, k, 2 * v - other[2], *args, initial_state=2 * S - other[5], **options),
    ]
    for first, second, mixed in zip(*runs, strict=True):
        assert_close(mixed, 2 * first - second)


@every_form
def test_without_decay_the_gated_rule_is_the_delta_rule(form):
    q, k, v, beta, _, S = draw(11)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    plain = delta_rule(q, k, v, beta, **options)
    gated = gated_delta_rule(q, k, v, beta, np.zeros(11), **options)
    for x, y in zip(gated, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13)


@every_form
def test_minus_infinity_forgets_everything_exactly(form):
    q, k, v, beta, log_decay, S = draw(11)
    log_decay[5] = -np.inf
    options = {"form": form, "chunk_size": 4, "return_state": True}
    out, last = gated_delta_rule(q, k, v, beta, log_decay, initial_state=1e6 * S, **options)
    # What came before leaves no trace, not even in the last digit.
    again, same = gated_delta_rule(q, k, v, beta, log_decay, initial_state=S, **options)
    np.testing.assert_array_equal(out[5:], again[5:])
    np.testing.assert_array_equal(last, same)
    rest = [x[5:] for x in (q, k, v, beta, log_decay)]
    fresh, fresh_last = gated_delta_rule(*rest, **options)
    assert_close(out[5:], fresh)
    assert_close(last, fresh_last)


@every_form
def test_strong_decays_keep_their_digits(form):
    """Differences of cumulative sums would lose those of the weak decays beside -1e6 and -inf."""
    q, k, v, beta, log_decay, S = draw(40, dtype="float32")
    log_decay *= 1e-3
    log_decay[[7, 21]], log_decay[30] = [-1e6, -50], -np.inf
    args = (q, k, v, beta, log_decay)
    expected, last = loop(*args, S)
    options = {"form": form, "initial_state": S, "return_state": True}
    for chunk_size in (16, 64):
        out, found = gated_delta_rule(*args, chunk_size=chunk_size, **options)
        assert_close(out, expected, "float32")
        assert_close(found, last, "float32")


def correlated(N=512, D=16, M=8, seed=12):
    """Unit keys that are nearly parallel, and a beta near 2: the system has entries near 2."""
    rng = np.random.default_rng(seed)
    k = np.ones(D) + 0.05 * rng.normal(size=(N, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return rng.normal(size=(N, D)), k, rng.normal(size=(N, M)), rng.uniform(1.9, 2, size=N)


def test_the_triangular_system_of_correlated_keys_is_solved_well():
    """Float32 errors grow with the chunk size, not with powers of it."""
    args = correlated()
    exact = delta_rule(*args, form="recurrent")
    in_float32 = [x.astype("float32") for x in args]

    def error(**options):
        return np.abs(delta_rule(*in_float32, **options) - exact).max() / np.abs(exact).max()

    assert error(form="recurrent") < 3e-6
    for chunk_size in (8, 64, 256):
        assert error(form="chunkwise", chunk_size=chunk_size) < 1e-6 * chunk_size


@both_rules
@every_form
def test_padding_with_zeros_is_exact(rule, form):
    """Zero keys, values, beta and decay logs leave S exactly as it was, and the outputs before."""
    *arrays, state = draw(10)
    args = arguments(rule, arrays)
    padding = [np.zeros((5, *x.shape[1:])) for x in args]
    padded = [np.concatenate([x, zeros]) for x, zeros in zip(args, padding, strict=True)]
    options = {"form": form, "chunk_size": 10, "initial_state": state, "return_state": True}
    out, last = rule(*args, **options)
    found, same = rule(*padded, **options)
    np.testing.assert_array_equal(found[:10], out)
    np.testing.assert_array_equal(same, last)
    out, last = rule(*args, **options | {"chunk_size": 4})
    found, same = rule(*padded, **options | {"chunk_size": 4})
    assert_close(found[:10], out)
    assert_close(same, last)


@every_form
def test_states_in_float32_do_not_stick(form):
    """A step of beta = 2⁻¹² towards 1 is below half of float16's spacing from 0.5 on."""
    N = 20_000
    ones, beta = np.ones((N, 1), "float16"), np.full(N, 2.0**-12, "float16")
    out, S = delta_rule(ones, ones, ones, beta, form=form, return_state=True)
    assert S.dtype == "float32" and out.dtype == "float16"
    np.testing.assert_allclose(S, 1 - (1 - 2.0**-12) ** N, rtol=1e-4)
