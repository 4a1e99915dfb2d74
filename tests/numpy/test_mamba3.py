"""Mamba-3's state space: worked numbers, what it is a case of, and what rotations can count.

That every form is the sum that it stands for is tested in test_definitions.py.
"""

import numpy as np
import pytest

from lesson_code.numpy import mamba3, selective_scan, state_space_dual
from tests.arrays import assert_close
from tests.operators import draw, draw_state

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
SIZES = {"P": 3, "R": 2}


def given(form, **options):
    return {"form": form, "chunk_size": 4, "return_state": True, **options}


@every_form
def test_worked_numbers(form):
    """Steps of 2, halved at each token: a quarter of a step comes late, and so is halved once."""
    x, one = np.array([[8.0], [4.0], [0.0]]), np.ones(3)
    B = C = np.array([[1.0, 0.0]] * 3)
    still = np.zeros((3, 1))
    y, state = mamba3(x, 2 * one, np.log(one / 2), 0.75 * one, still, B, C, **given(form))
    # 1.5 · 8; (12 + 0.5 · 8) / 2 + 1.5 · 4; (14 + 0.5 · 4) / 2
    assert_close(y, np.array([[12.0], [14.0], [8.0]]))
    assert_close(state.S, np.array([[8.0], [0.0]]))
    assert state.k.tolist() == [1, 0] and state.x.tolist() == [0] and state.angle.tolist() == [0]


@every_form
def test_eulers_rule_without_a_rotation_is_mamba_2(form):
    x, delta, g, share, angle, B, C = draw("mamba3", 11, leading=(2,), sizes=SIZES).values()
    S = draw_state("mamba3", (2,), sizes=SIZES)
    S = S._replace(angle=np.zeros((2, 2)))
    all_now = np.ones_like(share)
    y, last = mamba3(x, delta, g, all_now, 0 * angle, B, C, **given(form, initial_state=S))
    expected = state_space_dual(delta[..., None] * x, g, B, C, initial_state=S.S, return_state=True)
    assert_close(y, expected[0])
    assert_close(last.S, expected[1])


@every_form
def test_the_trapezoid_is_two_writes_of_mamba_2(form):
    """The token before comes as a token of its own, decayed with the memory."""
    x, delta, g, share, angle, B, C = draw("mamba3", 9, sizes=SIZES).values()
    y, last = mamba3(x, delta, g, share, 0 * angle, B, C, **given(form))

    def beside(late, now):
        """The late write comes first, and at once decays."""
        return np.stack([late, now], axis=1).reshape(18, *late.shape[1:])

    before = [np.concatenate([0 * a[:1], a[:-1]]) for a in (x, B)]
    twice_x = beside(((1 - share) * delta)[:, None] * before[0], (share * delta)[:, None] * x)
    twice_g = beside(0 * g, g)
    expected = state_space_dual(
        twice_x, twice_g, beside(before[1], B), beside(0 * C, C), return_state=True
    )
    assert_close(y, expected[0][1::2])
    assert_close(last.S, expected[1])


@every_form
def test_a_state_that_turns_is_keys_and_queries_that_turn(form):
    """A complex state space: h = e^{g - ia} h + B x of pairs, of which the real part is read."""
    x, delta, g, share, angle, B, C = draw("mamba3", 11, sizes=SIZES).values()
    y = mamba3(x, delta, g, np.ones_like(share), angle, B, C, **given(form))[0]
    z, c = (a[:, 0::2] + 1j * a[:, 1::2] for a in (B, C))
    h, expected = np.zeros((2, 3), complex), []
    for t in range(11):
        turn = np.exp(g[t] - 1j * angle[t])[:, None]
        h = turn * h + delta[t] * np.outer(z[t], x[t])
        expected.append((c[t].conj() @ h).real)
    assert_close(y, np.array(expected))


@every_form
def test_half_turns_follow_parity(form):
    """One bit of state, turned by π at each 1: exact after 1,000 bits, and no decay."""
    bits = np.random.default_rng(0).integers(2, size=1000)
    one, x = np.ones(1000), np.zeros((1000, 1))
    x[0] = 1
    B = C = np.array([[1.0, 0.0]] * 1000)
    angle = np.pi * np.where(np.arange(1000) > 0, bits, 0)[:, None]
    y, _ = mamba3(x, one, 0 * one, one, angle, B, C, form=form, return_state=True)
    assert_close(y[:, 0], np.cos(np.pi * (np.cumsum(bits) - bits[0])))


@every_form
def test_a_third_of_a_turn_counts_modulo_three(form):
    """Which needs complex eigenvalues."""
    digits = np.random.default_rng(1).integers(3, size=300)
    x, one, B = np.zeros((300, 1)), np.ones(300), np.array([[1.0, 0.0]] * 300)
    x[0], digits[0] = 1, 0
    angle = 2 * np.pi / 3 * digits[:, None]
    at = 2 * np.pi / 3 * np.arange(3)
    reads = [
        mamba3(x, one, 0 * one, one, angle, B, np.tile([np.cos(a), -np.sin(a)], (300, 1)))[:, 0]
        for a in at
    ]
    counts = np.cumsum(digits) % 3
    assert (np.array(reads).argmax(axis=0) == counts).all()


@every_form
def test_the_angle_of_a_state_is_known_modulo_a_full_turn(form):
    arrays = draw("mamba3", 6, sizes=SIZES)
    arrays["angle"] *= 100
    S = draw_state("mamba3", sizes=SIZES)
    y, last = mamba3(**arrays, **given(form, initial_state=S))
    turns = S._replace(angle=S.angle + 2 * np.pi * np.array([3, -5]))
    y_turned, last_turned = mamba3(**arrays, **given(form, initial_state=turns))
    assert_close(y_turned, y)
    assert_close(np.cos(last_turned.angle), np.cos(last.angle))
    assert (last.angle >= 0).all() and (last.angle <= 2 * np.pi).all()


@every_form
def test_the_late_write_has_the_step_and_the_decay_of_the_next_token(form):
    """Not its own: of the first token, half of the second one's step of 6 is written, decayed."""
    x, B = np.array([[1.0], [0.0]]), np.array([[1.0, 0.0]] * 2)
    delta, g, share = np.array([2.0, 6.0]), np.log([1.0, 0.25]), np.array([1.0, 0.5])
    y, _ = mamba3(x, delta, g, share, np.zeros((2, 1)), B, B, **given(form))
    assert_close(y, np.array([[2.0], [(2 + 3) / 4]]))


@every_form
def test_a_memory_alone_does_not_continue(form):
    """S lacks the late share of the last token, for which k and x are kept."""
    arrays = draw("mamba3", 9, sizes=SIZES)
    y, _ = mamba3(**arrays, **given(form))
    _, state = mamba3(**{a: b[:5] for a, b in arrays.items()}, **given(form))
    rest = {a: b[5:] for a, b in arrays.items()}
    assert_close(mamba3(**rest, **given(form, initial_state=state))[0], y[5:])
    alone = state._replace(k=0 * state.k)
    assert abs(mamba3(**rest, **given(form, initial_state=alone))[0] - y[5:]).max() > 1e-3


@every_form
def test_a_step_of_zero_is_padding_but_for_the_last_token(form):
    """It writes nothing and forgets nothing where g is 0; what would come late, does not."""
    x, delta, g, share, angle, B, C = draw("mamba3", 5, sizes=SIZES).values()
    S = draw_state("mamba3", sizes=SIZES)
    zero = np.zeros(5)
    _, last = mamba3(x, zero, zero, share, 0 * angle, B, C, **given(form, initial_state=S))
    assert_close(last.S, S.S)


@every_form
@pytest.mark.parametrize("strong", [-50.0, -1e30, -np.inf])
def test_strong_decay(form, strong):
    """A token finds its own write, and not the late one of the token before."""
    x, delta, _, share, angle, B, C = draw("mamba3", 9, dtype="float32", sizes=SIZES).values()
    g = np.full(9, strong, "float32")
    y = mamba3(x, delta, g, share, angle, B, C, **given(form))[0]
    own = (share * delta * (B * C).sum(axis=-1))[:, None] * x
    assert_close(y, own, "float32")


@every_form
def test_the_trapezoid_is_of_second_order(form):
    """∫ e^{-(1-s)} cos(5 s) ds by steps of 1/N: errors fall as 1/N², with Euler's rule as 1/N."""
    exact = (np.cos(5) + 5 * np.sin(5) - np.exp(-1)) / 26

    def error(N, share):
        s = (np.arange(N + 1) / N)[:, None]
        step = np.full(N + 1, 1 / N)
        step[0] = 0  # the first token is the start
        one, still = np.ones((N + 1, 2)) * [1, 0], np.zeros((N + 1, 1))
        y = mamba3(np.cos(5 * s), step, -step, share * np.ones(N + 1), still, one, one, form=form)
        return abs(y[-1, 0] - exact)

    for share, order in ((1, 1), (0.5, 2)):
        fall = np.log2(error(64, share) / error(128, share))
        assert abs(fall - order) < 0.2


def test_the_selective_scan_with_one_rate_is_its_eulers_rule():
    x, delta, A, B, C, _ = draw("selective_scan", 8, sizes={"E": 3, "K": 4}).values()
    delta, A = np.repeat(delta[:, :1], 3, axis=1), np.full((3, 4), -0.7)
    still, one = np.zeros((8, 2)), np.ones(8)
    y = mamba3(x, delta[:, 0], -0.7 * delta[:, 0], one, still, B, C)
    assert_close(y, selective_scan(x, delta, A, B, C))
