"""The additive engine: every form against the sum over tokens, written out in float64."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

from lesson_code.measure import peak_bytes
from lesson_code.torch.engines import additive as engine
from lesson_code.torch.engines.additive import additive
from tests.arrays import assert_close, tensors
from tests.torch.engines.exponents import largest_exponent

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
every_width = pytest.mark.parametrize("width", [1, 3], ids=["one decay", "a decay per channel"])
with_and_without_bonus = pytest.mark.parametrize("bonus", [False, True], ids=["plain", "bonus"])
INF = math.inf


def the_sum(q, k, v, g, S, u=None):
    """The definition: what token j wrote has decayed by all tokens after it, up to the read.

    It is read after token t has decayed the memory, or, with a bonus, before; with a bonus the own
    token counts u times. One sequence or many; differentiable.
    """
    N = k.shape[-2]
    outs = []
    for t in range(N):
        last = t if u is not None else t + 1  # decays g_{j+1} ... g_t, or up to g_{t-1}
        out = q[..., t, None, :] * g[..., :last, :].sum(dim=-2, keepdim=True).exp() @ S
        for j in range(t):
            decayed = g[..., j + 1 : last, :].sum(dim=-2, keepdim=True).exp()
            weight = (q[..., t, None, :] * decayed * k[..., j, None, :]).sum(dim=-1, keepdim=True)
            out = out + weight * v[..., j, None, :]
        own = q[..., t, :] * k[..., t, :] if u is None else q[..., t, :] * u * k[..., t, :]
        outs.append(out + own.sum(dim=-1)[..., None, None] * v[..., t, None, :])
    state = g.sum(dim=-2)[..., None].exp() * S
    for j in range(N):
        decayed = g[..., j + 1 :, :].sum(dim=-2).exp() * k[..., j, :]
        state = state + decayed[..., None] * v[..., j, None, :]
    return torch.cat(outs, dim=-2) if outs else (q if u is None else q * u[..., None, :]) @ S, state


def tensor(rng, *shape):
    return tensors(rng.normal(size=shape))[0]


def decay_logs(rng, *shape):
    """Between 0 and -2; one in eight is 0, one -50, one -inf."""
    g, kind = -rng.uniform(0, 2, size=shape), rng.integers(8, size=shape)
    g[kind == 0], g[kind == 1], g[kind == 2] = 0, -50, -INF
    return torch.from_numpy(g)


def draw(seed=0, N=7, C=3, M=4, width=3, bonus=False, leading=((),) * 6, logs=decay_logs):
    """q, k, v, g, S with the leading dimensions that k, v, g and its own share, and u or None."""
    rng = np.random.default_rng(seed)
    of_q, of_k, of_v, of_g, of_S, of_u = leading
    shared = np.broadcast_shapes(of_k, of_v, of_g, of_S)
    return [
        tensor(rng, *of_q, N, C),
        tensor(rng, *of_k, N, C),
        tensor(rng, *of_v, N, M),
        logs(rng, *of_g, N, width),
        tensor(rng, *of_S, C, M).expand(*shared, C, M),
        tensor(rng, *of_u, C) if bonus else None,
    ]


# Every form is the sum.


@settings(max_examples=80, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=6, max_dims=2, max_side=3, min_side=0),
    N=st.integers(0, 20),
    chunk_size=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 13, 64]),
    C=st.integers(1, 4),
    M=st.integers(0, 5),
    one_decay=st.booleans(),
    bonus=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    BroadcastableShapes(((5, 1, 1), (3, 1), (), (2,), (), ()), ()), 13, 5, 3, 4, False, True, 0
)
@example(
    BroadcastableShapes(((5, 1, 1), (3, 1), (), (2,), (), ()), ()), 13, 5, 3, 4, True, False, 0
)
@example(BroadcastableShapes(((), (), (), (), (), (2, 1)), ()), 9, 4, 3, 4, False, True, 0)
@example(BroadcastableShapes(((), (), (), (), (), (2, 1)), ()), 0, 4, 3, 4, False, True, 0)
@example(BroadcastableShapes(((2,),) * 6, (2,)), 1, 4, 1, 4, False, True, 0)
@example(BroadcastableShapes(((2, 3), (3,), (), (), (), ()), ()), 0, 4, 3, 4, True, False, 0)
def test_forms_are_the_sum(shapes, N, chunk_size, C, M, one_decay, bonus, seed):
    width = 1 if one_decay else C
    args = draw(seed, N, C, M, width, bonus, shapes.input_shapes)
    expected = the_sum(*args)
    for form in [*FORMS, None]:
        for found, right in zip(
            additive(form, *args, chunk_size=chunk_size), expected, strict=True
        ):
            assert_close(found, right)


@every_form
@every_width
@with_and_without_bonus
def test_zeros_change_nothing(form, width, bonus):
    """Padding with k = v = g = 0 leaves the state as it is, to the last digit."""
    q, k, v, g, S, u = draw(3, 0, 3, 4, width, bonus)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in (q, k, v, g)]
    _, last = additive(form, *padded, S, u, chunk_size=2)
    assert torch.equal(last, S)


# Decays of any strength.


@every_form
@every_width
@with_and_without_bonus
def test_no_exponent_is_above_zero(form, width, bonus):
    """Each decay is exp of a sum of its own, never exp(G_t) * exp(-G_j)."""
    args = draw(4, 37, 3, 4, width, bonus, logs=lambda rng, *s: -50 * decay_logs(rng, *s).abs())
    assert largest_exponent(lambda: additive(form, *args, chunk_size=16)) <= 0


@every_form
@every_width
@with_and_without_bonus
@pytest.mark.parametrize("strength", [-1e4, -INF])
def test_strong_decays_in_float32(form, width, bonus, strength):
    """Everywhere, or only here and there: finite, right, and so are all gradients."""
    for everywhere in (True, False):
        rng = np.random.default_rng(5)
        q, k, v, g, S, u = draw(5, 20, 3, 4, width, bonus)
        strong = torch.from_numpy(rng.random(g.shape)) < (1 if everywhere else 0.1)
        g = torch.where(strong, strength, -torch.from_numpy(rng.uniform(0, 0.01, g.shape)))
        args = [q, k, v, g, S] + ([u] if bonus else [])
        expected = the_sum(*args)
        single = [x.float().requires_grad_() for x in args]
        found = additive(form, *single, chunk_size=8)
        for x, right in zip(found, expected, strict=True):
            assert x.isfinite().all()
            assert_close(x.double(), right, tolerance=2e-6)
        double = [x.detach().clone().requires_grad_() for x in args]
        loss, right = (sum(x.square().sum() for x in outs) for outs in (found, the_sum(*double)))
        for x, y in zip(
            torch.autograd.grad(loss, single), torch.autograd.grad(right, double), strict=True
        ):
            assert x.isfinite().all()
            assert_close(x.double(), y, tolerance=1e-5)


@every_form
@every_width
def test_a_decay_of_zero_has_a_gradient_of_zero(form, width):
    q, k, v, g, S, _ = draw(6, 9, 3, 4, width)
    g = g.nan_to_num(neginf=-1.0)
    g[4] = -INF
    g.requires_grad_()
    out, last = additive(form, q, k, v, g, S, chunk_size=4)
    (gradient,) = torch.autograd.grad(out.sum() + last.sum(), g)
    assert gradient.isfinite().all() and gradient[4].eq(0).all()
    # Nothing from before is left: not even its NaN or size would matter in exact arithmetic.
    other = [x.clone() for x in (k, v)]
    other[0][:4], other[1][:4] = 1e3, -1e3
    again, same = additive(form, q, *other, g.detach(), 1e3 * S, chunk_size=4)
    assert_close(again[4:], out[4:].detach(), tolerance=1e-9)
    assert_close(same, last.detach())


@every_form
@every_width
@with_and_without_bonus
def test_weak_decays_beside_strong_ones_keep_their_digits(form, width, bonus):
    """Differences of cumulative sums would lose them: -0.001 after -10,000."""
    q, k, v, g, S, u = draw(7, 300, 3, 4, width, bonus)
    g = torch.full_like(g, -1e-3)
    g[100] = -1e4
    args = [q, k, v, g, S] + ([u] if bonus else [])
    exact = additive("recurrent", *args)
    found = additive(form, *(x.float() for x in args), chunk_size=64)
    for x, y in zip(found, exact, strict=True):
        assert_close(x.double(), y, tolerance=1e-6)


# Derivatives.


@pytest.mark.parametrize("form", FORMS)
@every_width
@with_and_without_bonus
def test_gradients_are_those_of_the_sum(form, width, bonus):
    leading = ((2, 1), (3,), (2, 3), (3,), (), (2, 1))
    args = [x for x in draw(8, 11, 3, 4, width, bonus, leading) if x is not None]
    results = []
    for function in (the_sum, lambda *args: additive(form, *args, chunk_size=4)):
        tracked = [x.detach().clone().requires_grad_() for x in args]
        rng = np.random.default_rng(0)
        loss = sum((tensor(rng, *x.shape) * x).sum() for x in function(*tracked))
        results.append(torch.autograd.grad(loss, tracked))
    for x, y in zip(*results, strict=True):
        assert x.isfinite().all()
        assert_close(x, y)


# Which form.


def test_a_single_token_takes_the_recurrent_form_and_more_take_chunks():
    with mock.patch.object(engine, "by_segments", side_effect=engine.by_segments) as chunkwise:
        for form, N in ((None, 0), (None, 1), ("parallel", 0), ("chunkwise", 0), ("recurrent", 9)):
            additive(form, *draw(10, N))
        assert not chunkwise.called
        for form, N, size in ((None, 2, 2), ("parallel", 100, 100), (None, 100, 64)):
            additive(form, *draw(10, N))
            assert chunkwise.call_args.args[-1] == size


@every_width
@with_and_without_bonus
def test_memory_of_the_chunkwise_form_is_linear(width, bonus):
    peaks = []
    for N in (1000, 2000):
        args = draw(11, N, 3, 4, width, bonus)
        peaks.append(peak_bytes(lambda args=args: additive("chunkwise", *args, chunk_size=16)))
    assert peaks[1] < 2.2 * peaks[0]
