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
from lesson_code.torch.engines import segments
from tests.arrays import assert_close, tensors
from tests.torch.engines.exponents import largest_exponent

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
INF = math.inf
SHAPES = [
    BroadcastableShapes(shapes, ())
    for shapes in (
        ((5, 1, 1), (3, 1), (), (2,), (), (), ()),
        ((2, 3), (3,), (), (), (), (), ()),
        ((), (), (), (), (), (2,), ()),
    )
]


def delta(form, *args, chunk_size):
    """The engine, whose terms are given."""
    *rows, S = args
    if rows[4] is not None:
        return engine.delta(form, lambda *rows: rows, rows, S, chunk_size=chunk_size)
    del rows[4]
    return engine.delta(form, _without_b, rows, S, chunk_size=chunk_size)


def _without_b(q, k, v, a, g):
    return q, k, v, a, None, g


def the_sum(q, k, v, a, b, g, S):
    """The recurrence unrolled: what token j wrote goes through the transitions of all later ones.

    A transition is a matrix: diag(exp(g)) + b aᵀ or, without b, (I - k aᵀ) diag(exp(g)). One
    sequence or many; differentiable.
    """
    N, C = k.shape[-2:]
    identity = torch.eye(C, dtype=k.dtype)
    fade = (g.exp().expand(*g.shape[:-1], C)[..., None] * identity).unbind(-3)  # (..., C, C)
    if b is None:
        moves = (identity - k[..., :, None] * a[..., None, :]).unbind(-3)
        transitions = [move @ kept for move, kept in zip(moves, fade, strict=True)]
    else:
        moves = (b[..., :, None] * a[..., None, :]).unbind(-3)
        transitions = [kept + move for move, kept in zip(moves, fade, strict=True)]
    writes = (k[..., :, None] * v[..., None, :]).unbind(-3)
    outs, state = [], S
    for t in range(N):
        state = S
        for transition in transitions[: t + 1]:
            state = transition @ state
        for j in range(t + 1):
            written = writes[j]
            for transition in transitions[j + 1 : t + 1]:
                written = transition @ written
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


def unit(rng, *shape):
    return torch.nn.functional.normalize(tensor(rng, *shape), dim=-1)


def draw(seed=0, N=7, C=3, M=4, leading=((),) * 7, logs=decay_logs, width=1, corrects=True):
    """q, k, v, a, b or None, g, and S with the leading dimensions that all but q share.

    Without b, k is β a for a unit a and β in [0, 2]; otherwise b is -η a with η in [0, 1] by
    channel: the memory stays bounded.
    """
    rng = np.random.default_rng(seed)
    of_q, of_k, of_v, of_a, of_b, of_g, of_S = leading
    shared = np.broadcast_shapes(*leading[1:])
    a = unit(rng, *of_a, N, C)
    of_k = np.broadcast_shapes(of_k, of_a)
    k = torch.from_numpy(rng.uniform(0, 2, size=(*of_k, N, 1))) * a if corrects else None
    rate = torch.from_numpy(-rng.uniform(0, 1, size=(*of_b, N, C)))
    return [
        tensor(rng, *of_q, N, C),
        unit(rng, *of_k, N, C) if k is None else k,
        tensor(rng, *of_v, N, M),
        a,
        None if corrects else rate * a,
        logs(rng, *of_g, N, width),
        tensor(rng, *of_S, C, M).expand(*shared, C, M),
    ]


# Every form is the definition.


KINDS = [{"corrects": c, "width": w} for c in (True, False) for w in (1, 3)]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=["corrects", "corrects by channel", "moves", "moves by channel"]
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=7, max_dims=2, max_side=3, min_side=0),
    N=st.integers(0, 20),
    chunk_size=st.sampled_from([1, 2, 3, 5, 7, 8, 17, 64]),
    C=st.integers(1, 4),
    M=st.integers(0, 5),
    logs=st.sampled_from([decay_logs, no_decay]),
    by_channel=st.booleans(),
    corrects=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(SHAPES[0], 12, 5, 3, 4, decay_logs, False, True, 0)
@example(SHAPES[0], 20, 17, 3, 4, decay_logs, True, False, 0)
@example(SHAPES[1], 0, 4, 3, 4, decay_logs, True, True, 0)
@example(SHAPES[2], 1, 4, 1, 4, no_decay, False, False, 0)
def test_forms_are_the_definition(shapes, N, chunk_size, C, M, logs, by_channel, corrects, seed):
    width = C if by_channel else 1
    args = draw(seed, N, C, M, shapes.input_shapes, logs, width, corrects)
    expected = the_sum(*args)
    for form in [*FORMS, None]:
        for found, right in zip(delta(form, *args, chunk_size=chunk_size), expected, strict=True):
            assert_close(found, right)


@every_form
@every_kind
def test_zeros_change_nothing(form, kind):
    """Padding with zeros, and k = b = g = 0 alone, to the last digit."""
    *args, S = draw(3, 0, **kind)
    padded = [None if x is None else torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in args]
    assert torch.equal(delta(form, *padded, S, chunk_size=2)[1], S)
    q, k, v, a, b, g, S = draw(3, 5, **kind)
    b = None if b is None else 0 * b
    assert torch.equal(delta(form, q, 0 * k, v, a, b, torch.zeros_like(g), S, chunk_size=2)[1], S)


# Decays of any strength.


@every_form
@every_kind
def test_no_exponent_is_above_zero(form, kind):
    args = draw(5, 37, logs=lambda rng, *s: -50 * decay_logs(rng, *s).abs(), **kind)
    assert largest_exponent(lambda: delta(form, *args, chunk_size=16)) <= 0


@every_form
@every_kind
@pytest.mark.parametrize("strength", [-1e4, -INF])
def test_strong_decays_in_float32(form, kind, strength):
    """Everywhere, or only here and there: finite, right, and so are all gradients."""
    for everywhere in (True, False):
        rng = np.random.default_rng(6)
        args = draw(6, 16, **kind)
        g = args[5]
        strong = torch.from_numpy(rng.random(g.shape)) < (1 if everywhere else 0.2)
        args[5] = torch.where(strong, strength, -torch.from_numpy(rng.uniform(0, 0.01, g.shape)))
        expected = the_sum(*args)
        single = [None if x is None else x.float().requires_grad_() for x in args]
        found = delta(form, *single, chunk_size=6)
        for x, right in zip(found, expected, strict=True):
            assert x.isfinite().all()
            assert_close(x.double(), right, tolerance=5e-6)
        double = [None if x is None else x.detach().clone().requires_grad_() for x in args]
        losses = (sum(x.square().sum() for x in outs) for outs in (found, the_sum(*double)))
        gradients = (
            torch.autograd.grad(loss, [x for x in leaves if x is not None])
            for loss, leaves in zip(losses, (single, double), strict=True)
        )
        for x, y in zip(*gradients, strict=True):
            assert x.isfinite().all()
            assert_close(x.double(), y, tolerance=2e-5)


@every_form
@every_kind
def test_a_decay_of_zero_forgets_everything(form, kind):
    """But for what a reads of it in the moment before."""
    q, k, v, a, b, g, S = draw(7, 9, logs=no_decay, **kind)
    g[4], a[4] = -INF, 0
    g.requires_grad_()
    out, last = delta(form, q, k, v, a, b, g, S, chunk_size=4)
    (gradient,) = torch.autograd.grad(out.sum() + last.sum(), g)
    assert gradient.isfinite().all() and gradient[4].eq(0).all()
    fresh = (None if x is None else x[4:] for x in (q, k, v, a, b))
    again, same = delta(form, *fresh, torch.zeros_like(g[4:]), 0 * S, chunk_size=4)
    assert_close(out[4:].detach(), again)
    assert_close(last.detach(), same)


@every_form
@every_kind
def test_float32_keeps_its_digits(form, kind):
    """1,000 tokens with unit keys and steps up to 1, and one decay that wipes almost everything."""
    width = 16 if kind["width"] > 1 else 1
    q, k, v, a, b, g, S = draw(8, 1000, 16, 8, (((),) * 7), no_decay, width, kind["corrects"])
    g = g - 1e-3
    g[100] = -1e4
    args = [q, k / 2, v, a, b, g, S]
    exact = delta("recurrent", *args, chunk_size=64)
    single = [None if x is None else x.float() for x in args]
    for x, y in zip(delta(form, *single, chunk_size=64), exact, strict=True):
        assert_close(x.double(), y, tolerance=5e-6)


@every_form
def test_the_same_unit_key_again_and_again(form):
    """The system is as badly conditioned as it can be: ones below the diagonal, all of them."""
    k = torch.tensor([0.6, 0.8]).expand(300, 2)
    v = tensor(np.random.default_rng(9), 300, 3, dtype=torch.float32)
    out, _ = delta(form, k, k, v, k, None, torch.zeros(300, 1), torch.zeros(2, 3), chunk_size=64)
    assert_close(out, v, torch.float32)  # always the value that was written last


# Derivatives.


@every_form
@every_kind
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_gradients_are_those_of_the_definition(form, kind, again):
    leading = ((2, 1), (3,), (2, 3), (3,), (), (2, 1), ())
    args = draw(10, 20, leading=leading, **kind)
    results = []

    def run(*args):
        with mock.patch.multiple(segments, SEGMENT={"cpu": 60}, LONG=0 if again else 100):
            return delta(form, *args, chunk_size=9)

    for function in (the_sum, run):
        tracked = [None if x is None else x.detach().clone().requires_grad_() for x in args]
        rng = np.random.default_rng(0)
        loss = sum((tensor(rng, *x.shape) * x).sum() for x in function(*tracked))
        leaves = [x for x in tracked if x is not None]
        results.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*results, strict=True):
        assert x.isfinite().all()
        assert_close(x, y)


def test_chunks_are_differentiated_once():
    q, *rest = draw(11)
    out, _ = delta("chunkwise", q.requires_grad_(), *rest, chunk_size=4)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='^Chunks can be .* once, .* take form "recurrent"'):
        dq.sum().backward()


# Which form, and what it holds.


def test_a_single_token_takes_the_recurrent_form_and_more_take_chunks():
    with mock.patch.object(engine, "by_segments", side_effect=engine.by_segments) as chunkwise:
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


@pytest.mark.parametrize("width", [1, 16], ids=["one decay", "a decay by channel"])
def test_a_long_sequence_keeps_little_for_its_backward_pass(width):
    """Output, gradients and all that stands between: less than six times the inputs."""
    N, C = 2048, 16
    leaves = [x.float().requires_grad_() for x in draw(14, N, C, C, width=width) if x is not None]

    def run():
        q, k, v, a, g, S = leaves
        out, _ = delta("chunkwise", q, k, v, a, None, g, S, chunk_size=32)
        torch.autograd.grad(out.sum(), leaves)

    with mock.patch.multiple(segments, SEGMENT={"cpu": 128}, LONG=0):
        run()
        assert peak_bytes(run) < 6 * 4 * 3 * N * C
