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
from tests.arrays import assert_close, tensors

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
    return tensors(rng.normal(size=shape), dtype=dtype)[0]


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
def test_zeros_change_nothing(form):
    """Padding with k = v = beta = g = 0, and with beta = g = 0 alone, to the last digit."""
    *args, S = draw(3, 0)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in args]
    assert torch.equal(delta(form, *padded, S, chunk_size=2)[1], S)
    q, k, v, beta, g, S = draw(3, 5)
    assert torch.equal(delta(form, q, k, v, 0 * beta, torch.zeros_like(g), S, chunk_size=2)[1], S)


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
@pytest.mark.parametrize("strength", [-1e4, -INF])
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
            assert_close(x.double(), right, tolerance=5e-6)
        double = [x.detach().clone().requires_grad_() for x in args]
        loss, right = (sum(x.square().sum() for x in outs) for outs in (found, the_sum(*double)))
        for x, y in zip(
            torch.autograd.grad(loss, single), torch.autograd.grad(right, double), strict=True
        ):
            assert x.isfinite().all()
            assert_close(x.double(), y, tolerance=2e-5)


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
        assert_close(x.double(), y, tolerance=5e-6)


@every_form
def test_the_same_unit_key_again_and_again(form):
    """The system is as badly conditioned as it can be: ones below the diagonal, all of them."""
    k = torch.tensor([0.6, 0.8]).expand(300, 2)
    v = tensor(np.random.default_rng(9), 300, 3, dtype=torch.float32)
    one, zero = torch.ones(300, 1), torch.zeros(300, 1)
    out, _ = delta(form, k, k, v, one, zero, torch.zeros(2, 3), chunk_size=64)
    assert_close(out, v, torch.float32)  # always the value that was written last


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
