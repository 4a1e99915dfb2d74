"""The chunkwise form in torch: its backward pass, its operators, its memory.

That its outputs are right is tested with those of the other forms, in test_linear.py.
"""

import functools
import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

from lesson_code.measure import peak_bytes
from lesson_code.torch.engines import linear as engine
from lesson_code.torch.feature_maps import elu_plus_one, exponential, identity, relu, taylor
from lesson_code.torch.linear import LinearAttentionState, linear_attention
from tests.arrays import normal, tensors

INSIDE = [elu_plus_one, relu, exponential, identity]  # the maps that the operator applies itself
both_normalizations = pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])


def applied_outside(x):
    """elu_plus_one, which the operator does not know under this name."""
    return elu_plus_one(x)


def widen(x):
    return torch.cat([x * x, x.flip(-1).abs(), torch.ones_like(x[..., :1])], dim=-1)


MAPS = {phi.__name__: phi for phi in [*INSIDE, applied_outside, widen]}


@pytest.fixture(params=[1, 8, 24, 2048])
def segment(request, monkeypatch):
    """Positions in a segment: one chunk, parts of a sequence, several sequences, all of them."""
    monkeypatch.setitem(engine.SEGMENT, "cpu", request.param)


def draw(seed=0, N=9, D=3, M=4, leading=((), (), ()), dtype=torch.float64):
    shapes = ((N, D), (N, D), (N, M))
    own = (lead + shape for lead, shape in zip(leading, shapes, strict=True))
    return tensors(*normal(*own, seed=seed), dtype=dtype)


def draw_state(C=3, M=4, leading=(), seed=1, dtype=torch.float64):
    """S and z, which is positive."""
    S, z = normal((*leading, C, M), (*leading, C), seed=seed)
    return tensors(S, 1 + abs(z), dtype=dtype)


def attention(q, k, v, S=None, z=None, **options):
    """Output, S and z, of the chunkwise form with chunks of 4 by default."""
    options = {"form": "chunkwise", "chunk_size": 4} | options
    state = None if S is None else LinearAttentionState(S, z)
    out, state = linear_attention(
        q, k, v, causal=True, initial_state=state, return_state=True, **options
    )
    return out, *state


def gradients(args, weights, **options):
    """Of the weighted sum of outputs and state, in the dtype of the arguments."""
    args = [x.detach().clone().requires_grad_() for x in args]
    found = attention(*args, **options)
    loss = sum((w.to(x.dtype) * x).sum() for w, x in zip(weights, found, strict=True))
    return torch.autograd.grad(loss, args)


def weights_of(*outputs):
    return tensors(*normal(*(x.shape for x in outputs), seed=2))


def assert_close(found, expected, tolerance=1e-12):
    """Pairs of the same shapes, with errors relative to the largest number."""
    for x, y in zip(found, expected, strict=True):
        bound = tolerance * max(1, y.detach().abs().max()) if y.numel() else 0
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=float(bound))


def error(found, expected):
    """Relative error of the whole."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# The backward pass.


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=4, max_dims=2, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    segment=st.sampled_from([1, 13, 32, 2048]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    name=st.sampled_from(list(MAPS)),
    normalize=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    BroadcastableShapes(((2, 1), (3,), (1, 1), ()), ()), True, 37, 7, 16, 3, 5, "widen", True, 0
)
@example(BroadcastableShapes(((5, 2), (2,), (), ()), ()), True, 9, 4, 8, 3, 2, "relu", True, 0)
@example(BroadcastableShapes(((6,),) * 4, ()), True, 9, 4, 20, 3, 2, "elu_plus_one", True, 0)
@example(BroadcastableShapes(((6,),) * 4, ()), True, 9, 4, 20, 3, 2, "identity", False, 0)
@example(BroadcastableShapes(((2,),) * 4, ()), True, 0, 4, 20, 3, 2, "elu_plus_one", True, 0)
@example(BroadcastableShapes(((2,),) * 4, ()), True, 70, 2, 2048, 3, 2, "elu_plus_one", True, 0)
def test_gradients_of_everything_are_those_of_the_masked_form(
    shapes, with_state, N, chunk_size, segment, D, M, name, normalize, seed
):
    """Through outputs and returned state at once, to q, k, v and the initial state."""
    feature_map = MAPS[name]
    *leading, state_leading = shapes.input_shapes
    args = draw(seed, N, D, M, leading)
    if with_state:
        C = feature_map(torch.zeros(D)).shape[-1]
        args += draw_state(C, M, state_leading, seed)
    options = {"feature_map": feature_map, "chunk_size": chunk_size}
    options["normalize"] = normalize and name != "identity"  # whose normalizer comes near zero
    outputs = attention(*args, form="masked", **options)
    weights = weights_of(*outputs)
    with mock.patch.dict(engine.SEGMENT, cpu=segment):
        assert_close(attention(*args, **options), outputs)
        found = gradients(args, weights, **options)
    expected = gradients(args, weights, form="masked", **options)
    assert_close(found, expected, 1e-9 if name == "relu" else 1e-11)  # few features: small sums


@both_normalizations
@pytest.mark.parametrize("which", ["out", "S", "z"])
def test_gradients_through_each_output_alone(segment, normalize, which):
    args = [*draw(1, 19, leading=((2,), (2,), (2,))), *draw_state(leading=(2,))]
    kept = ["out", "S", "z"].index(which)

    def gradients(form):
        tracked = [x.clone().requires_grad_() for x in args]
        out = attention(*tracked, normalize=normalize, form=form)[kept]
        loss = (weights_of(out)[0] * out).sum()
        return torch.autograd.grad(loss, tracked, materialize_grads=True)

    assert_close(gradients("chunkwise"), gradients("masked"), 1e-11)


@pytest.mark.parametrize("wanted", range(5), ids=["q", "k", "v", "S", "z"])
def test_gradients_to_each_input_alone(wanted):
    args = [*draw(2, 9), *draw_state()]
    weights = weights_of(*attention(*args))
    expected = gradients(args, weights)[wanted]
    args[wanted].requires_grad_()
    out = sum((w * x).sum() for w, x in zip(weights, attention(*args), strict=True))
    assert_close(torch.autograd.grad(out, args[wanted]), [expected])


@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [
        (elu_plus_one, True),
        (elu_plus_one, False),
        (exponential, True),
        (identity, False),
        (taylor(2), True),
        (widen, True),
    ],
)
def test_gradcheck(monkeypatch, feature_map, normalize):
    monkeypatch.setitem(engine.SEGMENT, "cpu", 4)
    C = feature_map(torch.zeros(2)).shape[-1]
    args = [*draw(3, 5, 2, 3, leading=((2,), (), (2,))), *draw_state(C, 3)]
    assert torch.autograd.gradcheck(
        lambda *args: attention(*args, feature_map=feature_map, normalize=normalize, chunk_size=2),
        [x.requires_grad_() for x in args],
        fast_mode=feature_map is not widen,  # every entry of the Jacobian is tried once
    )


# Relative errors: a gradient is rounded once, but for those of states, which stay in float32.
PRECISION = {torch.float32: 3e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}


@both_normalizations
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("feature_map", [elu_plus_one, applied_outside])
def test_gradients_in_lower_precision(normalize, dtype, feature_map):
    args = draw(4, 300, 8, 8, leading=((2,), (2,), (2,)), dtype=dtype)
    args += draw_state(8, 8, leading=(2,), dtype=torch.float32)
    options = {"feature_map": feature_map, "normalize": normalize, "chunk_size": 64}
    weights = [x.to(dtype) for x in weights_of(*attention(*args, **options))]
    found = gradients(args, weights, **options)
    expected = gradients([x.double() for x in args], weights, form="masked", **options)
    for x, y, of in zip(found, expected, args, strict=True):
        assert x.dtype == of.dtype
        assert error(x, y) < PRECISION[dtype]


def test_the_maps_inside_are_those_of_the_package():
    """Their values and slopes, at 0 and far out as well, and through both ways to the state."""
    points = [-1000.0, -80.0, -20.0, -1e-3, -0.0, 0.0, 1e-3, 3.0, 80.0]
    x = torch.tensor(points, dtype=torch.float64)[:, None]
    one = torch.ones(9, 1, dtype=torch.float64)
    for phi in INSIDE:
        for leading in ((), (2,)):  # one memory for one query, and for several
            k = x.clone().requires_grad_()
            _, S, z = attention(one.expand(*leading, 9, 1), k, one, feature_map=phi)
            expected = phi(k).sum()
            assert_close([S[0, 0], z[0]], [expected, expected])
            slopes = torch.autograd.grad(expected, k)
            assert_close(torch.autograd.grad(S.sum(), k, retain_graph=True), slopes)
            assert_close(torch.autograd.grad(z.sum(), k), slopes)
        q = x.clone().requires_grad_()
        out, _, _ = attention(q, 0 * one, one, one[:1], one[0], feature_map=phi, normalize=False)
        rows = torch.arange(1, 10)[:, None] * phi(torch.zeros(1)).double() + 1
        assert_close(
            torch.autograd.grad(out.sum(), q), torch.autograd.grad((phi(q) * rows).sum(), q)
        )


def test_a_normalizer_of_zero_has_no_gradient(segment):
    """Also where the gradient that comes in is infinite: such an output does not move."""
    q, k, v = (x.abs() for x in draw(5, 12))
    k[:5] = -k[:5]  # nothing is remembered in the first chunk, and one position more
    q[8] = -q[8]
    args = [x.requires_grad_() for x in (q, k, v)]
    out, *_ = attention(*args, feature_map=relu)
    zero = [0, 1, 2, 3, 4, 8]
    assert (out[zero] == 0).all() and (out[[5, 6, 7, 9, 10, 11]] > 0).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), args)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert (dq[zero] == 0).all() and (dk[:5] == 0).all() and (dv[:5] == 0).all()
    assert (dv[5:] > 0).all()


@both_normalizations
@pytest.mark.parametrize(("D", "M"), [(0, 4), (3, 0)])
def test_widths_of_zero(segment, D, M, normalize):
    """Without features the normalizer is 0, and so is the output."""
    args = [*draw(30, 9, D, M, leading=((2,),) * 3), *draw_state(D, M)]
    found = attention(*args, normalize=normalize)
    assert [x.shape for x in found] == [(2, 9, M), (2, D, M), (2, D)]
    assert D or (found[0] == 0).all()
    weights = weights_of(*found)
    expected = gradients(args, weights, form="masked", normalize=normalize)
    assert_close(gradients(args, weights, normalize=normalize), expected, 1e-11)


def test_nan_stays_in_its_sequence(segment):
    """Whatever shares a segment with it."""
    for spoiled in range(5):
        args = [*draw(6, 9, leading=((6,),) * 3), *draw_state(leading=(6,))]
        args[spoiled][3].view(-1)[1] = math.nan
        args = [x.requires_grad_() for x in args]
        found = attention(*args)
        loss = sum(x.sum() for x in found)
        for x in (*found, *torch.autograd.grad(loss, args)):
            lost = x.isnan().flatten(1).any(dim=1)
            assert lost.sum() == lost[3]


def test_the_past_is_kept_bit_by_bit(segment):
    """Outputs and the gradients that they give do not look beyond their position."""
    args = draw(7, 23, leading=((3,),) * 3)
    changed = [x.clone() for x in args]
    for x in changed:
        x[:, 14:] = 5 - x[:, 14:]
    results = []
    for each in (args, changed):
        tracked = [x.requires_grad_() for x in each]
        out, *_ = attention(*tracked)
        results.append([out[:, :14], *torch.autograd.grad(out[:, :14].sum(), tracked)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x[:, :14], y[:, :14])
    for x in results[0][1:]:
        assert (x[:, 14:] == 0).all()


def test_nothing_that_is_given_changes(segment):
    """Neither inputs nor the gradients that come in; and a second backward pass finds the same."""
    for phi, normalize in ((identity, False), (elu_plus_one, True), (relu, True)):
        for dtype in (torch.float32, torch.bfloat16):
            args = draw(8, 13, leading=((2,),) * 3, dtype=dtype)
            args += draw_state(leading=(2,), dtype=torch.float32)
            args = [x.requires_grad_() for x in args]
            found = attention(*args, feature_map=phi, normalize=normalize)
            incoming = [w.to(x.dtype) for w, x in zip(weights_of(*found), found, strict=True)]
            given_tensors = [*args, *found, *incoming]
            before = [x.detach().clone() for x in given_tensors]
            first = torch.autograd.grad(found, args, incoming, retain_graph=True)
            kept = [x.clone() for x in first]
            second = torch.autograd.grad(found, args, incoming)
            for x, y in zip((*given_tensors, *first), (*before, *kept), strict=True):
                assert torch.equal(x, y)
            for x, y in zip(first, second, strict=True):
                assert torch.equal(x, y)


def test_any_strides_of_inputs_and_of_incoming_gradients(segment):
    args = [*draw(9, 13, leading=((2, 3),) * 3), *draw_state(leading=(2, 3))]
    found = attention(*args)
    weights = weights_of(*found)
    expected = gradients(args, weights)
    strided = [x.movedim(1, -2).contiguous().movedim(-2, 1) for x in args[:3]]
    strided += [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in args[3:]]
    assert not any(x.is_contiguous() for x in strided)
    strided = [x.requires_grad_() for x in strided]
    incoming = [x.movedim(0, -1).contiguous().movedim(-1, 0) for x in weights]
    assert_close(torch.autograd.grad(attention(*strided), strided, incoming), expected, 1e-11)
    ones = [torch.ones((), dtype=torch.float64).expand(x.shape) for x in found]  # as sum() gives
    found = torch.autograd.grad(attention(*strided), strided, ones)
    assert_close(found, gradients(args, [x.clone() for x in ones]), 1e-11)


def test_autocast_lowers_no_precision():
    args = [*draw(10, 21, dtype=torch.float32), *draw_state(dtype=torch.float32)]
    found = attention(*args)
    expected = [*found, *gradients(args, weights_of(*found))]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # forward and backward
        found = attention(*args)
        found = [*found, *gradients(args, weights_of(*found))]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


# Memory.

HEADS, WIDTH = 4, 16


def peaks(N, normalize=True, feature_map=elu_plus_one):
    """Peak bytes of the forward pass, and with the backward pass, in units of the output."""
    q, k, v = draw(11, N, WIDTH, WIDTH, leading=((HEADS,),) * 3, dtype=torch.float32)
    options = {"causal": True, "normalize": normalize, "feature_map": feature_map}

    def both():
        tracked = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(linear_attention(*tracked, **options), tracked, v)

    forward = peak_bytes(lambda: linear_attention(q, k, v, **options))
    return np.array([forward, peak_bytes(both)]) / v.nbytes


@both_normalizations
@pytest.mark.parametrize("feature_map", INSIDE)
def test_memory_is_that_of_outputs_and_gradients(normalize, feature_map):
    """Twice the length takes as much more as the output, and three gradients, are larger.

    One number a position comes to that for the normalizer, 1/16 of the output here, and one for
    its gradient. The N states of the cumsum form would take 16 outputs, an N by N matrix 1,024.
    """
    N = 16_384
    small, large = (peaks(length, normalize, feature_map) for length in (N // 2, N))
    forward, both = 2 * large - small  # of what another N / 2 positions add
    assert 0.99 < forward < 1.02 + normalize / WIDTH
    assert 3.99 < both < 4.02 + 2 * normalize / WIDTH
    constant = 2**22 / (4 * HEADS * N * WIDTH)  # a segment and its states: less than 4 MiB
    assert (large < np.array([1.02, 4.02]) + 2 * normalize / WIDTH + constant).all()


def test_memory_of_half_precision():
    """A copy of all inputs in float32 would take six outputs."""
    N = 16_384
    q, k, v = draw(12, N, WIDTH, WIDTH, leading=((HEADS,),) * 3, dtype=torch.bfloat16)
    assert peak_bytes(lambda: linear_attention(q, k, v, causal=True)) < 1.3 * v.nbytes + 2**22


def test_what_is_kept_for_the_backward_pass():
    """Inputs, the output and one number for each position; nothing else, however long."""
    q, k, v = (x.requires_grad_() for x in draw(13, 512, leading=((2,),) * 3, dtype=torch.float32))
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = linear_attention(q, k, v, causal=True, chunk_size=16)
    for x in (q, k, v):
        kept.pop(x.data_ptr())
    state = 4 * 2 * (3 * 4 + 3)
    assert sum(kept.values()) <= out.nbytes + 4 * 2 * 512 + state


# The operators, under everything that torch adds.


@both_normalizations
@pytest.mark.parametrize(("G", "N"), [(2, 9), (1, 4), (2, 0), (0, 9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_operators_are_what_torch_expects(normalize, G, N, dtype):
    S, z = draw_state(leading=(G,), dtype=torch.promote_types(dtype, torch.float32))
    values = dict(zip("qkv", draw(14, N, leading=((G,),) * 3, dtype=dtype), strict=True))
    values |= {"S": S, "z": z, "feature_map": "elu_plus_one", "normalize": normalize}
    values |= {"chunk_size": 4}
    tests = ["test_schema", "test_faketensor"]
    if G == 2 and N == 9 and normalize:  # slow
        tests += ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    for name in ("linear_forward", "linear_backward"):
        operator = getattr(torch.ops.lesson_code, name).default
        args = [values[x.name] for x in operator._schema.arguments]
        torch.library.opcheck(operator, args, test_utils=tests)
        if name == "linear_forward":
            out, denominator, S, z = operator(*args)
            values |= {"out": out, "denominator": denominator}
            values |= {"grad_out": torch.ones_like(out), "grad_S": S, "grad_z": z}


@both_normalizations
@pytest.mark.parametrize("N", [0, 9])
@pytest.mark.parametrize("feature_map", [elu_plus_one, widen])
def test_vmap_and_grad(normalize, N, feature_map):
    """Also of nothing, where no size can be inferred."""
    args = draw(15, N, leading=((2, 3),) * 3)

    def loss(q, k, v):
        found = attention(q, k, v, feature_map=feature_map, normalize=normalize)
        return sum(x.square().sum() for x in found), found

    tracked = [x.clone().requires_grad_() for x in args]
    value, outputs = loss(*tracked)
    expected = torch.autograd.grad(value, tracked)
    vectorized = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True))
    found, found_outputs = vectorized(*args)
    assert_close(found_outputs, outputs)
    assert_close(found, expected, 1e-11)
    found, _ = torch.vmap(vectorized, in_dims=1, out_dims=1)(*args)
    assert_close(found, expected, 1e-11)


def test_vmap_over_nothing():
    for sizes in ((0, 3), (3, 0)):
        args = draw(16, 9, leading=(sizes,) * 3)
        for i in (0, 1):
            found = torch.vmap(attention, in_dims=i, out_dims=i)(*args)
            assert [x.shape for x in found] == [(*sizes, 9, 4), (*sizes, 3, 4), (*sizes, 3)]


@both_normalizations
def test_vmap_over_some_arguments(normalize):
    q, k, v = draw(16, 9, leading=((5,), (5,), (5,)))
    S, z = draw_state(leading=(5,))

    def function(*args):
        return attention(*args, normalize=normalize)

    for mapped in range(5):
        args = [q[0], k[0], v[0], S[0], z[0]]
        args[mapped] = (q, k, v, S, z)[mapped].movedim(0, 1)
        in_dims = tuple(1 if i == mapped else None for i in range(5))
        found = torch.vmap(function, in_dims=in_dims)(*args)
        for i in range(5):
            args[mapped] = (q, k, v, S, z)[mapped][i]
            assert_close([x[i] for x in found], function(*args))


def test_vmap_of_the_operator_over_any_dimension():
    def operator(*args):
        return torch.ops.lesson_code.linear_forward(*args, "elu_plus_one", True, 4)

    args = [*draw(25, 9, leading=((5, 2),) * 3), *draw_state(leading=(5, 2))]
    in_dims = (1, 2, -1, 3, 0)
    moved = [x.movedim(0, i) for x, i in zip(args, in_dims, strict=True)]
    found = torch.vmap(operator, in_dims=in_dims, out_dims=1)(*moved)
    for i in range(5):
        assert_close([x[:, i] for x in found], operator(*(x[i] for x in args)))


def test_jacobians():
    """vmap of the backward pass alone: the incoming gradient is mapped, the rest is not."""
    args = draw(17, 5, 2, 2)

    def jacobians(form):
        function = functools.partial(attention, form=form, chunk_size=2)
        return [x for row in torch.func.jacrev(function, (0, 1, 2))(*args) for x in row]

    assert_close(jacobians("chunkwise"), jacobians("masked"), 1e-11)


def test_known_bug_a_second_derivative_that_is_silently_zero():
    """A backward pass that autograd cannot see counts as a constant. It must be an error."""
    q, k, v = draw(18, 9)

    def loss(q, form):
        return linear_attention(q, k, v, causal=True, form=form, chunk_size=4).square().sum()

    def by_functions(q, form):
        slope = torch.func.grad(loss)
        return torch.func.grad(lambda q: slope(q, form).square().sum())(q)

    def by_autograd(q, form):
        q = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(q, form), q, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), q)[0]

    def mapped(q, form):
        return torch.vmap(by_functions, in_dims=(0, None))(q[None], form)[0]

    expected = by_functions(q, "masked")
    assert expected.abs().max() > 0.01
    for second_derivative in (by_autograd, by_functions, mapped):
        assert_close([second_derivative(q, "masked")], [expected], 1e-11)
        with pytest.raises(RuntimeError, match="differentiated once"):
            second_derivative(q, "chunkwise")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # in Dynamo
def test_compiles_as_one_graph():
    """Forward and backward, with state, and with a map inside and outside of the operator."""

    def run(*args):
        inside = attention(*args)
        return *inside, *attention(*args, feature_map=applied_outside, normalize=False)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    args = [*draw(19, 9, leading=((2, 1), (3,), (2, 3))), *draw_state()]
    args = [x.requires_grad_() for x in args]
    found, expected = compiled(*args), run(*args)
    assert_close(found, expected)
    found, expected = (
        torch.autograd.grad(sum(x.square().sum() for x in outs), args) for outs in (found, expected)
    )
    assert_close(found, expected, 1e-11)


def test_shapes_alone():
    args = [
        x.to("meta").requires_grad_()
        for x in (*draw(20, leading=((2, 1), (3,), ())), *draw_state())
    ]
    found = attention(*args)
    assert [x.shape for x in found] == [(2, 3, 9, 4), (3, 3, 4), (3, 3)]
    for x, gradient in zip(args, torch.autograd.grad([x.sum() for x in found], args), strict=True):
        assert gradient.shape == x.shape and gradient.device.type == "meta"


# Known bugs of known libraries.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 6e-4)])
def test_known_bug_a_gradient_from_outputs_in_half_precision(dtype, tolerance):
    """The normalizer's gradient needs the product of output and incoming gradient.

    With the output rounded to half precision its error is as large as the gradient of q itself,
    where values have a mean: every key pulls the same way, and the error does not average out.
    """
    q, k, v = draw(21, 1024, 8, 8, dtype=dtype)
    v = v + 30
    incoming = weights_of(v)[0].to(dtype)

    def gradient(q, k, v, form):
        q = q.detach().requires_grad_()
        out, *_ = attention(q, k, v, form=form, chunk_size=64)
        return torch.autograd.grad(out, q, incoming.to(q.dtype))[0]

    exact = gradient(q.double(), k.double(), v.double(), "masked")

    x = q.float().requires_grad_()
    A = (elu_plus_one(x) @ elu_plus_one(k.float()).mT).tril()
    d = A.sum(dim=-1, keepdim=True)
    rounded = (A @ v.float() / d).to(dtype).float()
    dn = incoming.float() / d
    dA = (dn @ v.float().mT - (dn * rounded).sum(dim=-1, keepdim=True)).tril()
    (wrong,) = torch.autograd.grad(A, x, dA)
    assert error(wrong, exact) > 20 * tolerance
    assert error(gradient(q, k, v, "chunkwise"), exact) < tolerance


def test_known_bug_the_last_partial_chunk_is_dropped():
    """``N // chunk_size`` chunks leave a rest behind, which the state then lacks."""
    q, k, v = draw(22, 10)
    whole = 10 // 4 * 4
    for wrong, right in zip(
        attention(q[:whole], k[:whole], v[:whole])[1:],
        attention(q, k, v, form="masked")[1:],
        strict=True,
    ):
        assert error(wrong, right) > 0.05
    assert_close(attention(q, k, v), attention(q, k, v, form="masked"))


def test_known_bug_no_gradient_reaches_what_came_before():
    """A state that is detached between chunks trains on one chunk alone."""
    q, k, v = draw(23, 12)

    def gradient(detach):
        tracked, state, outs = k.clone().requires_grad_(), None, []
        for start in range(0, 12, 4):
            part = slice(start, start + 4)
            out, state = linear_attention(
                q[part], tracked[part], v[part], causal=True, initial_state=state, return_state=True
            )
            state = LinearAttentionState(*(x.detach() for x in state)) if detach else state
            outs.append(out)
        return torch.autograd.grad(torch.cat(outs).square().sum(), tracked)[0]

    tracked = k.clone().requires_grad_()
    out, *_ = attention(q, tracked, v)
    (found,) = torch.autograd.grad(out.square().sum(), tracked)
    assert error(gradient(detach=True), found) > 0.1
    assert error(gradient(detach=False), found) < 1e-12


def test_known_bug_the_gradient_of_a_memory_that_queries_share():
    """Six queries read one memory, and its keys were written once: not six times."""
    args = [*draw(24, leading=((6,), (), ())), *draw_state()]
    found = attention(*args)
    assert found[1].shape == (3, 4) and found[2].shape == (3,)
    weights = weights_of(*found)
    expected = gradients(args, weights, form="masked")
    assert_close(gradients(args, weights), expected, 1e-11)
    repeated = [args[0], *(x.expand(6, *x.shape) for x in args[1:])]
    six = gradients(repeated, [weights[0], *(x.expand(6, *x.shape) for x in weights[1:])])
    assert error(six[1].sum(dim=0), expected[1]) > 0.5
