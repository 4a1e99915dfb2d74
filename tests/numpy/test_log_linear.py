"""Log-linear attention: its levels by hand, what it is when they weigh alike, and its limits.

That every form is the sum over blocks is tested in test_definitions.py.
"""

import re

import numpy as np
import pytest

from lesson_code.numpy import (
    LogLinearState,
    gated_linear_attention,
    log_linear_attention,
    state_space_dual,
)
from tests.arrays import assert_close
from tests.operators import draw, draw_state

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def given(form, **options):
    return {"form": form, "chunk_size": 4, "return_state": True, **options}


def levels_read(form, N, levels=6):
    """Which level each token is on, for each that reads: row t, columns j <= t."""
    values, ones = np.eye(N), np.ones((N, 1))
    weights = np.tile(np.arange(1.0, levels + 1), (N, 1))
    read = log_linear_attention(ones, ones, values, np.zeros(N), weights, **given(form))[0]
    return [(row[: t + 1] - 1).round().astype(int).tolist() for t, row in enumerate(read)]


@every_form
def test_the_levels_of_the_first_eight_tokens(form):
    assert levels_read(form, 8) == [
        [0],
        [1, 0],
        [2, 2, 0],
        [2, 2, 1, 0],
        [3, 3, 3, 3, 0],
        [3, 3, 3, 3, 1, 0],
        [3, 3, 3, 3, 2, 2, 0],
        [3, 3, 3, 3, 2, 2, 1, 0],
    ]


@every_form
def test_blocks_are_the_bits_of_a_position(form):
    for t, read in enumerate(levels_read(form, 32)):
        bits = [level for level in range(1, 6) if t & 2 ** (level - 1)]
        assert {x: read.count(x) for x in set(read)} == {0: 1} | {x: 2 ** (x - 1) for x in bits}
        assert read == sorted(read, reverse=True)  # longer ones are further away


@every_form
def test_one_more_state_than_bits_is_alive(form):
    """So what a token costs rises and falls: 5 states at token 15, 2 at token 16."""
    q, k, v, g, weights = draw("log_linear_attention", 32).values()
    for t in range(32):
        args = (x[: t + 1] for x in (q, k, v, 0.01 * g, weights))
        _, state = log_linear_attention(*args, **given(form))
        alive = abs(state.S).max(axis=(-2, -1)) > 0
        assert alive.sum() == t.bit_count() + 1 and state.position == t + 1


@every_form
def test_equal_weights_are_one_memory(form):
    q, k, v, g, weights = draw("log_linear_attention", 21, leading=(2,)).values()
    out, state = log_linear_attention(q, k, v, g, np.ones_like(weights), **given(form))
    expected, S = state_space_dual(v, g, k, q, return_state=True)
    assert_close(out, expected)
    assert_close(state.S.sum(axis=-3), S)
    gates = np.repeat(g[..., None], 4, axis=-1)
    assert_close(out, gated_linear_attention(q, k, v, gates))


@every_form
def test_weights_that_fall_with_the_level_fade_by_a_power(form):
    """Halved at each level: what is j tokens old weighs between 1/(4 j) and 1/(2 j)."""
    ones, weights = np.ones((32, 1)), 0.5 ** np.tile(np.arange(6.0), (32, 1))
    read = log_linear_attention(ones, ones, np.eye(32), np.zeros(32), weights, **given(form))[0]
    first = read[1:, 0]
    age = np.arange(1, 32)
    assert (first <= 1 / age).all() and (first >= 1 / (4 * age)).all()


@every_form
def test_more_tokens_than_levels_are_refused(form):
    arrays = draw("log_linear_attention", 33)
    message = "level_weights must have levels for all tokens, got 6, which are enough for 32, not"
    with pytest.raises(ValueError, match=re.escape(f"{message} for 33.")):
        log_linear_attention(**arrays, **given(form))
    state = draw_state("log_linear_attention")  # after 5 tokens
    arrays = draw("log_linear_attention", 28)
    with pytest.raises(ValueError, match=re.escape(f"{message} for 33.")):
        log_linear_attention(**arrays, **given(form, initial_state=state))
    arrays = draw("log_linear_attention", 27)
    out, last = log_linear_attention(**arrays, **given(form, initial_state=state))
    assert last.position == 32 and np.isfinite(out).all()


@every_form
@pytest.mark.parametrize("N", [1, 5, 7, 13, 16, 31])
def test_the_last_chunk_may_be_short(N, form):
    """Nothing past its end is read: what follows in another call, does not matter."""
    arrays = draw("log_linear_attention", N)
    out, last = log_linear_attention(**arrays, **given(form, chunk_size=5))
    expected, S = log_linear_attention(**arrays, form="recurrent", return_state=True)
    assert_close(out, expected)
    assert_close(last.S, S.S)


@every_form
def test_a_gate_of_minus_infinity_is_no_nan(form):
    """A difference of cumulative sums would be -inf - -inf."""
    q, k, v, g, weights = draw("log_linear_attention", 13).values()
    g[[0, 5, 6]] = -np.inf
    S = draw_state("log_linear_attention")
    out, last = log_linear_attention(q, k, v, g, weights, **given(form, initial_state=S))
    assert np.isfinite(out).all() and np.isfinite(last.S).all()
    changed = v.copy()
    changed[:6] = 7
    found, _ = log_linear_attention(q, k, changed, g, weights, **given(form, initial_state=S))
    assert_close(found[6:], out[6:])


@every_form
def test_each_sequence_has_a_position_of_its_own(form):
    arrays = draw("log_linear_attention", 6, leading=(3,))
    states = [
        draw_state("log_linear_attention", seed=i)._replace(position=p)
        for i, p in enumerate((0, 5, 8))
    ]
    together = LogLinearState(np.stack([s.S for s in states]), np.array([0, 5, 8]))
    out, last = log_linear_attention(**arrays, **given(form, initial_state=together))
    assert last.position.tolist() == [6, 11, 14]
    for i, state in enumerate(states):
        own = {name: x[i] for name, x in arrays.items()}
        alone, end = log_linear_attention(**own, **given(form, initial_state=state))
        assert_close(out[i], alone)
        assert_close(last.S[i], end.S)
