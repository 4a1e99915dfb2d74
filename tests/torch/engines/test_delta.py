"""The delta engine: every form against products of whole transition matrices, in float64."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

from lesson_code.measure import peak_bytes
from lesson_code.torch.engines import delta as engine
from lesson_code.torch.engines.delta import delta

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
INF = math.inf


def the_sum(q, k, v, beta, g, S):
    """The recurrence unrolled: what token j wrote goes through the transitions of all later ones.

    A transition is exp(g) (I - beta k kᵀ), a matrix. One sequence or many; differentiable.
    """
    N, C = k.shape[-2:]
    identity = torch.eye(C, dtype=k.dtype)
    transitions = [
        g[..., t, None, :].exp()
        * (identity - beta[..., t, None, :] * k[..., t, :, None] * k[..., t, None, :])
        for t in range(N)
    ]
    writes = [beta[..., t, None, :] * k[..., t, :, None] * v[..., t, None, :] for t in range(N)]
    outs, state = [], S
    for t in range(N):
        state = S
        for a in transitions[: t + 1]:
            state = a @ state
        for j in range(t + 1):
            written = writes[j]
            for a in transitions[j + 1 : t + 1]:
                written = a @ written
            state = state + written
        outs.append(q[..., t, None, :] @ state)
    return torch.cat(outs, dim=-2) if outs else q @ S, state


def tensor(rng, *shape, dtype=torch.float64):
    return torch.from_numpy(rng.normal(size=shape)).to(dtype)


def decay_logs(rng, *shape):
    """Between 0 and -1; one in eight is 0, one -50, one -inf."""
    g, kind = -rng.uniform(0, 1, size=shape), rng.integers(8, size=shape)
    g[kind == 0], g[kind == 1], g[kind == 2] = 0, -50, -INF
    return torch.from_numpy(g)


def no_decay(rng, *shape):
    return torch.zeros(shape, dtype=torch.float64)


def draw(seed=0, N=7, C=3, M=4, leading=((),) * 6, logs=decay_logs):
    """q, unit k, v, beta in [0, 2], g, and S with the leading dimensions that all but q share."""
    rng = np.random.default_rng(seed)
    of_q, of_k, of_v, of_beta, of_g, of_S = leading
    shared = np.broadcast_shapes(*leading[1:])
    return [
        tensor(rng, *of_q, N, C),
        torch.nn.functional.normalize(tensor(rng, *of_k, N, C), dim=-1),
        tensor(rng, *of_v, N, M),
        torch.from_numpy(rng.uniform(0, 2, size=(*of_beta, N, 1))),
        logs(rng, *of_g, N, 1),
        tensor(rng, *of_S, C, M).expand(*shared, C, M),
    ]


def assert_close(found, expected, tolerance=1e-11):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


# Every form is the definition.


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=6, max_dims=2, max_side=3, min_side=0),
    N=st.integers(0, 12),
    chunk_size=st.sampled_from([1, 2, 3, 5, 7, 8, 64]),
    C=st.integers(1, 4),
    M=st.integers(0, 5),
    logs=st.sampled_from([decay_logs, no_decay]),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((5, 1, 1), (3, 1), (), (2,), (), ()), ()), 12, 5, 3, 4, decay_logs, 0)
@example(BroadcastableShapes(((2, 3), (3,), (), (), (), ()), ()), 0, 4, 3, 4, decay_logs, 0)
@example(BroadcastableShapes(((), (), (), (), (2,), ()), ()), 1, 4, 1, 4, no_decay, 0)
def test_forms_are_the_definition(shapes, N, chunk_size, C, M, logs, seed):
    args = draw(seed, N, C, M, shapes.input_shapes, logs)
    expected = the_sum(*args)
    for form in [*FORMS, None]:
        for found, right in zip(delta(form, *args, chunk_size=chunk_size), expected, strict=True):
            assert_close(found, right)


@every_form
def test_dimensions_that_only_queries_have_do_not_reach_the_state(form):
    leading = ((5, 1, 1), (3, 1), (1, 1), (2,), (), ())
    out, S = delta(form, *draw(1, 9, leading=leading), chunk_size=4)
    assert out.shape == (5, 3, 2, 9, 4) and S.shape == (3, 2, 3, 4)


@every_form
def test_worked_numbers(form):
    """The same key twice: the value is replaced, with half a beta they meet in the middle.

    With a decay of 1/2 the memory has faded before the error is taken.
    """
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    v = torch.tensor([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0]])
    S, one, zero = torch.zeros(2, 2), torch.ones(3, 1), torch.zeros(3, 1)
    for beta, g, expected in (
        (one, zero, [[2.0, 6.0], [4.0, 12.0]]),
        (one / 2, zero, [[5.0, 5.0], [2.0, 6.0]]),  # 8 4, then halfway to 2 6
        (one, zero + math.log(0.5), [[2.0, 6.0], [2.0, 6.0]]),
        (one / 2, zero + math.log(0.5), [[2.0, 3.5], [1.0, 3.0]]),  # 8 4 fades to 2 1
    ):
        out, last = delta(form, k, k, v, beta, g, S, chunk_size=2)
        assert_close(last, torch.tensor(expected), 1e-6)
        assert_close(out[-1], torch.tensor(expected[0]), 1e-6)


@every_form
def test_split_anywhere(form):
    *args, S = draw(2, 9)
    whole, final = delta("recurrent", *args, S, chunk_size=64)
    for t in range(10):
        head, between = delta(form, *(x[:t] for x in args), S, chunk_size=4)
        tail, last = delta(form, *(x[t:] for x in args), between, chunk_size=4)
        assert_close(torch.cat([head, tail]), whole)
        assert_close(last, final)


@every_form
def test_zeros_change_nothing(form):
    """Padding with k = v = beta = g = 0, and with beta = g = 0 alone, to the last digit."""
    *args, S = draw(3, 0)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in args]
    assert torch.equal(delta(form, *padded, S, chunk_size=2)[1], S)
    q, k, v, beta, g, S = draw(3, 5)
    assert torch.equal(delta(form, q, k, v, 0 * beta, torch.zeros_like(g), S, chunk_size=2)[1], S)


@every_form
def test_a_beta_of_two_reflects(form):
    """I - 2 k kᵀ keeps lengths: the bound of beta |k|² that the rule allows."""
    q, k, v, beta, g, S = draw(4, 200, logs=no_decay)
    _, last = delta(form, q, k, 0 * v, torch.full_like(beta, 2), g, S, chunk_size=16)
    assert abs(last.norm() / S.norm() - 1) < 1e-11
    assert (last - S).abs().max() > 0.1


# Decays of any strength.


@every_form
def test_no_exponent_is_above_zero(form):
    largest = []
    exp = torch.Tensor.exp

    def watched(x):
        largest.append(x.max().item())
        return exp(x)

    args = draw(5, 37, logs=lambda rng, *s: -50 * decay_logs(rng, *s).abs())
    with mock.patch.object(torch.Tensor, "exp", watched), mock.patch("torch.exp", watched):
        delta(form, *args, chunk_size=16)
    assert largest and max(largest) <= 0


@every_form
@pytest.mark.parametrize("strength", [-50.0, -1e4, -INF])
def test_strong_decays_in_float32(form, strength):
    """Everywhere, or only here and there: finite, right, and so are all gradients."""
    for everywhere in (True, False):
        rng = np.random.default_rng(6)
        q, k, v, beta, g, S = draw(6, 16)
        strong = torch.from_numpy(rng.random(g.shape)) < (1 if everywhere else 0.2)
        g = torch.where(strong, strength, -torch.from_numpy(rng.uniform(0, 0.01, g.shape)))
        args = [q, k, v, beta, g, S]
        expected = the_sum(*args)
        single = [x.float().requires_grad_() for x in args]
        found = delta(form, *single, chunk_size=6)
        for x, right in zip(found, expected, strict=True):
            assert x.isfinite().all()
            assert_close(x.double(), right, 5e-6)
        double = [x.detach().clone().requires_grad_() for x in args]
        loss, right = (sum(x.square().sum() for x in outs) for outs in (found, the_sum(*double)))
        for x, y in zip(
            torch.autograd.grad(loss, single), torch.autograd.grad(right, double), strict=True
        ):
            assert x.isfinite().all()
            assert_close(x.double(), y, 2e-5)


@every_form
def test_a_decay_of_zero_forgets_everything(form):
    q, k, v, beta, g, S = draw(7, 9, logs=no_decay)
    g[4] = -INF
    g.requires_grad_()
    out, last = delta(form, q, k, v, beta, g, S, chunk_size=4)
    (gradient,) = torch.autograd.grad(out.sum() + last.sum(), g)
    assert gradient.isfinite().all() and gradient[4].eq(0).all()
    fresh = (x[4:] for x in (q, k, v, beta))
    again, same = delta(form, *fresh, torch.zeros(5, 1).double(), 0 * S, chunk_size=4)
    assert_close(out[4:].detach(), again)
    assert_close(last.detach(), same)


@every_form
def test_float32_keeps_its_digits(form):
    """1,000 tokens with unit keys and betas up to 1, and one that wipes almost everything."""
    q, k, v, beta, g, S = draw(8, 1000, 16, 8, logs=no_decay)
    g = g - 1e-3
    g[100] = -1e4
    args = [q, k, v, beta / 2, g, S]
    exact = delta("recurrent", *args, chunk_size=64)
    for x, y in zip(delta(form, *(x.float() for x in args), chunk_size=64), exact, strict=True):
        assert_close(x.double(), y, 5e-6)


@every_form
def test_the_same_unit_key_again_and_again(form):
    """The system is as badly conditioned as it can be: ones below the diagonal, all of them."""
    k = torch.tensor([0.6, 0.8]).expand(300, 2)
    v = tensor(np.random.default_rng(9), 300, 3, dtype=torch.float32)
    one, zero = torch.ones(300, 1), torch.zeros(300, 1)
    out, _ = delta(form, k, k, v, one, zero, torch.zeros(2, 3), chunk_size=64)
    assert_close(out, v, 1e-5)  # always the value that was written last


# Derivatives.


@every_form
def test_gradients_are_those_of_the_definition(form):
    leading = ((2, 1), (3,), (2, 3), (3,), (), ())
    args = draw(10, 8, leading=leading)
    results = []
    for function in (the_sum, lambda *args: delta(form, *args, chunk_size=3)):
        tracked = [x.detach().clone().requires_grad_() for x in args]
        rng = np.random.default_rng(0)
        loss = sum((tensor(rng, *x.shape) * x).sum() for x in function(*tracked))
        results.append(torch.autograd.grad(loss, tracked))
    for x, y in zip(*results, strict=True):
        assert x.isfinite().all()
        assert_close(x, y)


@every_form
def test_gradcheck(form):
    args = draw(11, 5, 2, 3, ((2,), (), (2,), (), (), ()))
    args[4] = args[4].clamp(min=-3)  # at -inf finite differences are NaN
    args = [x.detach().clone().requires_grad_() for x in args]
    assert torch.autograd.gradcheck(lambda *args: delta(form, *args, chunk_size=3), args)


# Which form, and what it holds.


def test_a_single_token_takes_the_recurrent_form_and_more_take_chunks():
    with mock.patch.object(engine, "_chunkwise", side_effect=engine._chunkwise) as chunkwise:
        for form, N in ((None, 0), (None, 1), ("chunkwise", 0), ("recurrent", 9)):
            delta(form, *draw(12, N), chunk_size=4)
        assert not chunkwise.called
        for N, size in ((2, 2), (9, 4)):
            delta(None, *draw(12, N), chunk_size=4)
            assert chunkwise.call_args.args[-1] == size


def test_memory_of_the_chunkwise_form_is_linear():
    peaks = []
    for N in (1000, 2000):
        args = draw(13, N)
        peaks.append(peak_bytes(lambda args=args: delta("chunkwise", *args, chunk_size=16)))
    assert peaks[1] < 2.2 * peaks[0]
