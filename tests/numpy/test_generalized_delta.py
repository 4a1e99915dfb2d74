"""The delta rules that ship: each as a case of another, and what their transitions can do."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lesson_code.numpy import (
    delta_rule,
    gated_delta_product,
    gated_delta_rule,
    gated_linear_attention,
    generalized_delta_rule,
    kimi_delta_attention,
    rwkv7,
)
from tests.arrays import assert_close
from tests.operators import draw

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def both(function, *args, **options):
    return function(*args, chunk_size=4, return_state=True, **options)


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


@every_form
def test_one_decay_for_all_channels_is_the_gated_delta_rule(form):
    q, k, v, beta, g = draw("gated_delta_rule", 11).values()
    every = np.repeat(g[:, None], k.shape[-1], axis=1)
    expected = both(gated_delta_rule, q, k, v, beta, g)
    same(both(kimi_delta_attention, q, k, v, beta, every, form=form), expected)


@every_form
def test_one_correction_for_each_token_is_the_gated_delta_rule(form):
    q, k, v, beta, g = draw("gated_delta_rule", 11).values()
    expected = both(gated_delta_rule, q, k, v, beta, g)
    found = both(gated_delta_product, q, k[:, None], v[:, None], beta[:, None], g, form=form)
    same(found, expected)


@every_form
def test_without_decay_corrections_are_tokens(form):
    """The delta rule of 3 N tokens, read after every third."""
    q, k, v, beta, g = draw("gated_delta_product", 5, sizes={"D": 4, "M": 2, "J": 3}).values()
    found, S = both(gated_delta_product, q, k, v, beta, 0 * g, form=form)
    flat = k.reshape(15, 4), v.reshape(15, 2), beta.reshape(15)
    out, last = both(delta_rule, np.repeat(q, 3, axis=0), *flat)
    same((found, S), (out[2::3], last))


@every_form
def test_the_rows_of_the_table_of_the_generalized_rule(form):
    q, k, v, a, _, g = draw("generalized_delta_rule", 11).values()
    beta = np.random.default_rng(1).uniform(0, 0.4, (11, 1))
    decay = np.exp(g)
    moved = both(generalized_delta_rule, q, beta * k, v, decay * k, -beta * k, g, form=form)
    same(moved, both(kimi_delta_attention, q, k, v, beta[:, 0], g))
    moved = both(generalized_delta_rule, q, k, v, a, -beta * a, g, form=form)
    same(moved, both(rwkv7, q, k, v, g, a, np.repeat(beta, 4, axis=1)))
    added = both(generalized_delta_rule, q, k, v, a, 0 * a, g, form=form)
    same(added, both(gated_linear_attention, q, k, v, g))


def test_kda_looks_for_its_error_after_the_decay_and_rwkv7_before():
    """A token that halves 8, and removes what it finds, which is 4 after the decay, 8 before."""
    one, zero, half = np.ones((1, 1)), np.zeros((1, 1)), np.log([[0.5]])
    S = np.array([[8.0]])
    options = {"initial_state": S, "return_state": True}
    _, forgets_first = kimi_delta_attention(one, one, zero, one[0], half, **options)
    _, removes_what_was = rwkv7(one, one, zero, half, one, one, **options)
    assert forgets_first[0, 0] == 0  # 4 is found, and 4 removed
    assert removes_what_was[0, 0] == -4  # 8 is found, 4 are left, and 8 removed


def swaps(permutation):
    """Pairs whose exchanges, one after the other, make a permutation; at most m - 1."""
    now, pairs = list(range(len(permutation))), []
    for i, wanted in enumerate(permutation):
        j = now.index(wanted)
        if i != j:
            pairs.append((i, j))
            now[i], now[j] = now[j], now[i]
    return pairs


@every_form
def test_products_of_reflections_follow_permutations_of_five_things(form):
    """500 random ones in a row; each is at most four exchanges, and one exchange a reflection."""
    rng = np.random.default_rng(0)
    every = list(itertools.permutations(range(5)))
    chosen = [every[i] for i in rng.integers(len(every), size=500)]
    k, beta = np.zeros((500, 4, 5)), np.zeros((500, 4))
    for t, permutation in enumerate(chosen):
        for j, (a, b) in enumerate(swaps(permutation)):
            k[t, j, a], k[t, j, b], beta[t, j] = math.sqrt(0.5), -math.sqrt(0.5), 2
    q, v, keep = np.zeros((500, 5)), np.zeros((500, 4, 5)), np.zeros(500)
    _, S = gated_delta_product(
        q, k, v, beta, keep, form=form, initial_state=np.eye(5), return_state=True
    )
    things = np.arange(5)
    for permutation in chosen:
        things = things[list(permutation)]
    assert_close(S, np.eye(5)[things], tolerance=1e-10)


@every_form
def test_a_closed_channel_forgets_and_the_others_do_not(form):
    q, k, v, beta, g = draw("kimi_delta_attention", 6).values()
    g[:], g[3, 1], k[3:] = 0, -math.inf, 0
    S = np.random.default_rng(2).normal(size=(4, 3))
    options = {"form": form, "chunk_size": 4, "return_state": True}
    _, last = kimi_delta_attention(q, k, v, beta, g, initial_state=S, **options)
    _, kept = delta_rule(q[:3], k[:3], v[:3], beta[:3], initial_state=S, return_state=True)
    assert (last[1] == 0).all()
    assert_close(last[[0, 2, 3]], kept[[0, 2, 3]])


@every_form
def test_parity_by_a_rate_of_two(form):
    """A unit key and beta = 2 turn the sign, exactly, however often."""
    bits = np.random.default_rng(0).integers(2, size=1000)
    one, start = np.ones((1000, 1)), np.ones((1, 1))
    out = delta_rule(one, one, 0 * one, 2.0 * bits, form=form, initial_state=start)
    assert (out[:, 0] == (-1.0) ** bits.cumsum()).all()


@every_form
def test_a_key_with_two_signs_swaps_two_rows(form):
    """Integers: the key e_a - e_b with beta = 1; a second such key makes a ring of three turn."""
    S = np.array([[5.0], [7.0], [1.0]])
    k = np.array([[[0.0, 1, -1], [1.0, -1, 0]]])
    options = {"form": form, "initial_state": S, "return_state": True}
    v, beta = np.zeros((1, 2, 1)), np.ones((1, 2))
    _, one = delta_rule(k[:, 0], k[:, 0], v[:, 0], beta[:, 0], **options)
    assert (one == [[5], [1], [7]]).all()
    _, both = gated_delta_product(k[:, 0], k, v, beta, np.zeros(1), **options)
    assert (both == [[1], [5], [7]]).all()
