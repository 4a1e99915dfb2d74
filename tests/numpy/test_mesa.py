"""Mesa: worked numbers, what it tends to, and how far conjugate gradients come.

That both forms are the sum and its inverse is tested in test_definitions.py.
"""

import numpy as np
import pytest

from lesson_code.numpy import delta_rule, gated_linear_attention, mesa
from lesson_code.numpy.mesa import conjugate_gradients
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw, draw_state

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def given(form, **options):
    return {"form": form, "chunk_size": 4, "return_state": True, **options}


@every_form
def test_worked_numbers(form):
    """A key twice, 8 and 20, with a ridge of 1: 8 / 2, then 28 / 3; halved: (4 + 20) / 2.5."""
    k, v = np.ones((2, 1)), np.array([[8.0], [20.0]])
    one, ridge = np.ones(2), np.ones(1)
    assert_close(mesa(k, k, v, one, 0 * one, ridge, form=form), np.array([[4.0], [28 / 3]]))
    out, state = mesa(k, k, v, one, np.log(one / 2), ridge, **given(form))
    assert_close(out, np.array([[4.0], [24 / 2.5]]))
    assert state.H.tolist() == [[1.5]] and state.G.tolist() == [[24]]


@every_form
def test_it_is_ridge_regression(form):
    """The minimum over S of Σ_j w_j |v_j - S'k_j|² + tr S'ΛS, as least squares of more rows."""
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    out = mesa(q, k, v, beta, g, ridge, **given(form))[0]
    for t in range(9):
        weights = beta[: t + 1] * np.exp([g[j + 1 : t + 1].sum() for j in range(t + 1)])
        rows = np.concatenate([np.sqrt(weights)[:, None] * k[: t + 1], np.diag(np.sqrt(ridge))])
        wanted = np.concatenate([np.sqrt(weights)[:, None] * v[: t + 1], np.zeros((4, 3))])
        S = np.linalg.lstsq(rows, wanted, rcond=None)[0]
        assert_close(out[t], q[t] @ S)


@every_form
def test_the_three_pairs_of_the_book(form):
    """Keys (1, 0), (0, 1), (1, 1) cannot all be met: the best S, by hand, and a small ridge."""
    one, ridge = np.ones(3), np.full(2, 1e-12)
    _, state = mesa(KEYS, KEYS, VALUES, one, 0 * one, ridge, **given(form))
    S = np.linalg.solve(state.H, state.G)
    assert state.H.tolist() == [[2, 1], [1, 2]] and state.G.tolist() == [[60, 80], [80, 100]]
    assert_close(S, np.array([[40 / 3, 20], [100 / 3, 40]]))


@every_form
def test_a_huge_ridge_is_linear_attention_over_the_ridge(form):
    q, k, v, beta, g, _ = draw("mesa", 11).values()
    out, state = mesa(q, k, v, beta, g, np.full(4, 1e9), **given(form))
    gates = np.repeat(g[:, None], 4, axis=1)
    expected, S = gated_linear_attention(q, beta[:, None] * k, v, gates, return_state=True)
    assert_close(1e9 * out, expected, tolerance=1e-7)
    assert_close(state.G, S)


@every_form
def test_orthonormal_keys_find_their_values_as_with_the_delta_rule(form):
    rng = np.random.default_rng(0)
    k = np.linalg.qr(rng.normal(size=(9, 9)))[0][:7]
    q, v, one = rng.normal(size=(7, 9)), rng.normal(size=(7, 4)), np.ones(7)
    out = mesa(q, k, v, one, 0 * one, np.full(9, 1e-6), **given(form))[0]
    assert_close(out, delta_rule(q, k, v, one), tolerance=1e-5)


@every_form
def test_it_is_where_the_delta_rule_comes_to_rest(form):
    """Over the same pairs, again and again: keys that overlap, and values that S can give."""
    rng = np.random.default_rng(1)
    k, S = rng.normal(size=(4, 4)) + np.eye(4), rng.normal(size=(4, 3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    often = np.tile(k, (4000, 1))
    _, last = delta_rule(often, often, often @ S, np.ones(16000), return_state=True)
    one, ridge = np.ones(4), np.full(4, 1e-10)
    out = mesa(np.eye(4), k, k @ S, one, 0 * one, ridge, **given(form))[0]
    assert_close(out[3], last[3], tolerance=1e-6)
    assert_close(out[3], S[3], tolerance=1e-6)


@every_form
def test_the_order_of_pairs_does_not_matter(form):
    """Without a decay: unlike one step of descent for each."""
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    other = np.random.default_rng(3).permutation(9)
    q = np.repeat(q[-1:], 9, axis=0)
    found, expected = (
        mesa(q, k[i], v[i], beta[i], 0 * g, ridge, **given(form))[0][-1]
        for i in (other, np.arange(9))
    )
    assert_close(found, expected)


def test_both_sums_are_the_gradient_of_the_objective():
    """(H + Λ) S - G, at any S, by differences of the sum that is to be as small as possible."""
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    _, (H, G) = mesa(q, k, v, beta, g, ridge, return_state=True)
    weights = beta * np.exp([g[j + 1 :].sum() for j in range(9)])

    def objective(S):
        errors = ((v - k @ S) ** 2).sum(axis=1)
        return (weights @ errors + (ridge[:, None] * S**2).sum()) / 2

    S = np.random.default_rng(5).normal(size=G.shape)
    found = np.empty_like(S)
    for place in np.ndindex(*S.shape):
        step = np.zeros_like(S)
        step[place] = 1e-4
        found[place] = (objective(S + step) - objective(S - step)) / 2e-4
    assert_close((H + np.diag(ridge)) @ S - G, found, tolerance=1e-7)


def test_it_is_a_delta_rule_with_a_matrix_for_a_step():
    """Without a decay each error is written along (H + Λ)⁻¹ β k."""
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    S, H, out = np.zeros((4, 3)), np.diag(ridge), []
    for q_t, k_t, v_t, b_t in zip(q, k, v, beta, strict=True):
        H = H + b_t * np.outer(k_t, k_t)
        S = S + np.outer(np.linalg.solve(H, b_t * k_t), v_t - S.T @ k_t)
        out.append(S.T @ q_t)
    assert_close(mesa(q, k, v, beta, 0 * g, ridge), np.array(out))


def test_the_residual_falls_as_iterations_grow():
    arrays = draw("mesa", 40, sizes={"D": 16, "M": 8})
    exact = mesa(**arrays, form="recurrent")
    errors = [
        abs(mesa(**arrays, form="chunkwise", iterations=n) - exact).max() for n in range(1, 21)
    ]
    assert errors[0] > 0.1 and errors[19] < 1e-12
    assert (np.diff(errors[:13:3]) < 0).all()


def test_no_epsilon_floors_the_error():
    """1e-5 added to each denominator would leave 5e-4 after 30 steps, however easy the system."""
    rng = np.random.default_rng(0)
    A = rng.normal(size=(8, 8))
    H, q = A @ A.T / 8 + np.eye(8), 1e-3 * rng.normal(size=(5, 8))
    x = conjugate_gradients(lambda p: p @ H, q, 30)
    np.testing.assert_allclose(x, q @ np.linalg.inv(H), rtol=0, atol=1e-17)

    def floored(q, iterations):
        x, r, p = 0 * q, q, q
        for _ in range(iterations):
            size = (r * r).sum(axis=-1, keepdims=True)
            step = size / ((p * (p @ H)).sum(axis=-1, keepdims=True) + 1e-5)
            x, r = x + step * p, r - step * (p @ H)
            p = r + (r * r).sum(axis=-1, keepdims=True) / (size + 1e-5) * p
        return x

    wrong = abs(floored(q, 30) - q @ np.linalg.inv(H)).max()
    assert wrong > 0.01 * abs(x).max()


@every_form
def test_what_is_solved_already_stays_as_it_is(form):
    """A query of 0, keys of 0, and far more iterations than a system has unknowns: no 0/0."""
    q, k, v, beta, g, ridge = draw("mesa", 7).values()
    q[3], k[:5] = 0, 0
    out = mesa(q, k, v, beta, g, ridge, iterations=500, **given(form))[0]
    assert (out[:5] == 0).all() and np.isfinite(out).all() and abs(out[5:]).min() > 0
    assert_close(out, mesa(q, k, v, beta, g, ridge, form="recurrent"))


@every_form
def test_a_gate_that_closes_forgets_both_sums(form):
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    g[5] = -np.inf
    S = draw_state("mesa")
    out, last = mesa(q, k, v, beta, g, ridge, **given(form, initial_state=S))
    new, new_last = mesa(*(x[5:] for x in (q, k, v, beta, g)), ridge, **given(form))
    assert_close(out[5:], new)
    assert_close(last.H, new_last.H)
    assert_close(last.G, new_last.G)


@every_form
def test_padding_is_exact(form):
    q, k, v, beta, g, ridge = draw("mesa", 9).values()
    beta[6:], g[6:] = 0, 0
    _, last = mesa(q, k, v, beta, g, ridge, **given(form))
    _, short = mesa(*(x[:6] for x in (q, k, v, beta, g)), ridge, **given(form))
    assert_close(last.H, short.H)
    assert_close(last.G, short.G)
