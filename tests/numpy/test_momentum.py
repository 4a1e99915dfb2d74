"""The delta rule with momentum: worked numbers, and what it is without its extras.

That it is its recurrence is tested in test_definitions.py.
"""

import numpy as np

from lesson_code.numpy import MomentumState, delta_rule, momentum_delta_rule
from tests.arrays import KEYS, VALUES, assert_close
from tests.operators import draw, draw_state

EXTRA = ("log_decay", "momentum")


def test_without_momentum_and_decay_it_is_the_delta_rule():
    arrays = draw("momentum_delta_rule", 11, leading=(2,))
    S = draw_state("momentum_delta_rule", (2,))
    arrays |= {name: 0 * arrays[name] for name in EXTRA}
    options = {"initial_state": S, "return_state": True}
    out, last = momentum_delta_rule(**arrays, **options)
    *four, _, _ = arrays.values()
    expected, expected_S = delta_rule(*four, initial_state=S.S, return_state=True)
    assert_close(out, expected)
    assert_close(last.S, expected_S)


def test_worked_numbers():
    """The third token finds 45 and 70: the first write of (10, 20) came again, halved."""
    one, half = np.ones(3), np.full(3, 0.5)
    out, state = momentum_delta_rule(KEYS, KEYS, VALUES, one, 0 * one, half, return_state=True)
    first = np.array([[10.0, 20], [0, 0]])
    second = first / 2 + [[0, 0], [30, 40]]
    found = (first + second).sum(axis=0)  # (45, 70)
    third = second / 2 + (VALUES[2] - found)  # both rows, as the key is (1, 1)
    assert found.tolist() == [45, 70]
    assert_close(state.M, third)
    assert_close(state.S, first + second + third)
    assert_close(out, np.array([[10, 20], [30, 40], (first + second + third).sum(axis=0)]))


def test_the_error_is_that_of_the_memory_before_its_decay():
    """With the gated rule's order, 8 / 2 = 4 would be found, and 10 be read."""
    one = np.ones((1, 1))
    first = MomentumState(np.array([[8.0]]), np.zeros((1, 1)))
    half = np.log(np.array([0.5]))
    _, last = momentum_delta_rule(
        one, one, 10 * one, one[0], half, 0 * one[0], initial_state=first, return_state=True
    )
    assert_close(last.S, np.array([[6.0]]))  # 8 / 2 + (10 - 8)


def test_forgetting_everything_keeps_what_is_on_its_way():
    q, k, v, beta, g, momentum = draw("momentum_delta_rule", 2).values()
    first = draw_state("momentum_delta_rule")
    g[1] = -np.inf
    args = q, k, v, beta, g, momentum
    _, last = momentum_delta_rule(*args, initial_state=first, return_state=True)
    assert_close(last.S, last.M)
    assert abs(last.S).min() > 0


def test_a_write_goes_on_as_a_geometric_series():
    """With a momentum of 1/2 a pair that nothing disturbs is written twice in the end."""
    k, v = np.array([[0.6, 0.8]]), np.array([[3.0, 5.0]])
    k, v = (np.concatenate([x, np.zeros((60, 2))]) for x in (k, v))
    half = np.full(61, 0.5)
    _, last = momentum_delta_rule(k, k, v, 2 * half, 0 * half, half, return_state=True)
    assert_close(k[0] @ last.S, 2 * v[0])


def test_padding_is_exact_but_for_what_is_on_its_way():
    q, k, v, beta, g, momentum = draw("momentum_delta_rule", 9).values()
    k[6:], g[6:], momentum[6:] = 0, 0, 0
    _, last = momentum_delta_rule(q, k, v, beta, g, momentum, return_state=True)
    args = (x[:6] for x in (q, k, v, beta, g, momentum))
    assert_close(last.S, momentum_delta_rule(*args, return_state=True)[1].S)
