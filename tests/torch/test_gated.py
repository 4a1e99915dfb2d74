"""Gated linear attention in torch: against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.checks import check_causal, check_streaming
from lesson_code.torch import gated_linear_attention

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,  # computed in float32 and rounded once
    torch.bfloat16: 2.0**-8 + 1e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def draw(seed=0, N=7, D=3, M=4, leading=((),) * 5, dtype=torch.float64, closed=True):
    """q, k, v, log_decay with a few gates that are closed, and an initial state."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D, M))
    q, k, v, g, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -np.exp(2 * g)
    g[rng.random(g.shape) < 0.1] = 0
    if closed:
        g[rng.random(g.shape) < 0.1] = -math.inf
    return [torch.from_numpy(np.asarray(x)).to(dtype) for x in (q, k, v, g, S)]


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def kept(dtype):
    """The dtype of the state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_close(found, expected, tolerance=1e-12, dtype=torch.float64):
    assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=5, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 1), (3,), (1, 1), (), ()), ()), True, 37, 7, 3, 5, *"??")
@example(BroadcastableShapes(((5, 2, 3), (3,), (2, 1), (), (3,)), ()), True, 9, 4, 3, 2, *"??")
@example(BroadcastableShapes(((), (2,), (3, 1), (1,), ()), ()), False, 1, 4, 2, 3, *"??")
@example(BroadcastableShapes(((2,), (1,), (1,), (1,), ()), ()), True, 0, 4, 2, 3, *"??")
def test_every_form_is_numpys(shapes, with_state, N, chunk_size, D, M, dtype, seed):
    dtype, seed = (torch.float64, 0) if dtype == "?" else (dtype, seed)
    *inputs, S = draw(seed, N, D, M, shapes.input_shapes, dtype)
    S = S.to(kept(dtype)) if with_state else None
    state = None if S is None else S.double().numpy()
    expected, last = reference.gated_linear_attention(
        *arrays(*inputs), initial_state=state, return_state=True
    )
    for form in [*FORMS, None]:
        options = {"form": form, "chunk_size": chunk_size, "return_state": True}
        out, found = gated_linear_attention(*inputs, initial_state=S, **options)
        assert_close(out, expected, TOLERANCE[dtype], dtype)
        assert_close(found, last, TOLERANCE[kept(dtype)], kept(dtype))


KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
GATES = torch.tensor([[0.0, 0.5], [0.5, 1.0], [1.0, 0.0]])


@every_form
@every_dtype
def test_worked_numbers(form, dtype):
    inputs = (x.to(dtype) for x in (KEYS, KEYS, VALUES, GATES.log()))
    out, S = gated_linear_attention(*inputs, form=form, chunk_size=2, return_state=True)
    assert out.round().tolist() == [[10, 20], [30, 40], [105, 130]]
    assert S.round().tolist() == [[55, 70], [50, 60]]


@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.parametrize("strength", [-50.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_strong_decay_in_value_and_gradient(form, strength, dtype):
    """A product with exp(-G), G a cumulative sum, would be inf, and its gradient NaN."""
    args = draw(1, N=40, dtype=dtype)
    args[3][::2] = strength
    args[3][5] = 0
    args = [x.requires_grad_() for x in args]
    double = [x.detach().double().requires_grad_() for x in args]
    options = {"chunk_size": 16, "return_state": True}
    results = [
        gated_linear_attention(*x[:4], form=f, initial_state=x[4], **options)
        for x, f in ((args, form), (double, "recurrent"))
    ]
    gradients = [
        torch.autograd.grad(out.square().sum() + S.square().sum(), x)
        for (out, S), x in zip(results, (args, double), strict=True)
    ]
    both = zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True)
    for found, expected in both:
        assert found.isfinite().all()
        assert_close(found, expected, TOLERANCE[dtype], dtype)
    assert (gradients[0][3][args[3] == -math.inf] == 0).all()


@every_form
def test_segments_keep_their_digits(form):
    """A difference of cumulative sums would have lost them: 1e6 - 1e6 - 0.004."""
    g = torch.full((6, 1), -0.001)
    g[0] = -1e6
    q, k, v = torch.zeros(3, 6, 1)
    q[-1], k[1], v[1] = 1, 1, 1
    out = gated_linear_attention(q, k, v, g, form=form)
    assert_close(out[-1], [math.exp(-0.004)], 1e-6, torch.float32)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(form, dtype):
    """Sums of 4,096 ones would stop at 256 or 2,048."""
    ones = torch.ones(4096 if form != "parallel" else 300, 1, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, S = gated_linear_attention(ones, ones, ones, 0 * ones, form=form, return_state=True)
    assert out.dtype == dtype and S.dtype == torch.float32 and S == len(ones)


@every_form
def test_autocast_lowers_no_precision(form):
    *inputs, S = draw(30, N=20, dtype=torch.float32)
    options = {"form": form, "chunk_size": 8, "initial_state": S, "return_state": True}
    expected = gated_linear_attention(*inputs, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gated_linear_attention(*inputs, **options)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@every_form
def test_checks(form):
    def inputs(rng, N):
        return draw(int(rng.integers(2**31)), N, leading=((2,), (2,), (2,), (2,), ()))[:4]

    def attention(*tensors, **options):
        return gated_linear_attention(*tensors, form=form, chunk_size=5, **options)

    check_causal(attention, inputs=inputs)
    check_streaming(attention, inputs=inputs)


@pytest.mark.parametrize("first", FORMS)
def test_split_anywhere_and_hand_the_state_to_any_form(first):
    *inputs, S = draw(2, leading=((2, 3), (3,), (2, 1), (), (3,)))
    options = {"chunk_size": 3, "return_state": True}
    whole, final = gated_linear_attention(*inputs, initial_state=S, **options)
    assert final.shape == (2, 3, 3, 4)
    for t in range(8):
        before, after = ([x[..., part, :] for x in inputs] for part in (np.s_[:t], np.s_[t:]))
        head, state = gated_linear_attention(*before, form=first, initial_state=S, **options)
        for second in [*FORMS, None]:
            tail, last = gated_linear_attention(*after, form=second, initial_state=state, **options)
            assert_close(torch.cat([head, tail], dim=-2), whole)
            assert_close(last, final)


@every_form
def test_padding_with_zero_keys_and_zero_logs_is_exact(form):
    *inputs, S = draw(3)
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(*inputs, **options)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 5)) for x in inputs]
    found, memory = gated_linear_attention(*padded, **options)
    assert_close(found[:7], out)
    assert_close(memory, last)


@every_form
@pytest.mark.parametrize("N", [0, 1, 9])
def test_inputs_are_left_alone_and_results_are_new(form, N):
    *inputs, S = draw(4, N)
    before = [x.clone() for x in (*inputs, S)]
    options = {"form": form, "chunk_size": 4, "initial_state": S, "return_state": True}
    out, last = gated_linear_attention(*inputs, **options)
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in inputs]
    assert_close(gated_linear_attention(*strided, **options)[0], out)
    expanded = [x.expand(2, *x.shape) for x in inputs]
    assert_close(gated_linear_attention(*expanded, **options)[1], last.expand(2, 3, 4))
    for x in (out, last):
        x.fill_(math.nan)
    for x, y in zip((*inputs, S), before, strict=True):
        assert torch.equal(x, y)


@every_form
def test_nan_stays_in_its_sequence(form):
    for spoiled in range(4):
        *inputs, _ = draw(5, N=9, leading=((2,),) * 4 + ((),), closed=False)
        inputs[spoiled][1, 5, 1] = math.nan
        out = gated_linear_attention(*inputs, form=form, chunk_size=4)
        rows = out.isnan().any(dim=-1)
        assert rows[1, 5] and not rows[0].any()
        if form == "recurrent":
            assert not rows[1, :5].any()


@every_form
def test_gradcheck(form):
    args = [x.requires_grad_() for x in draw(6, N=5, D=2, M=3, closed=False)]
    args[3] = (-0.1 - args[3].abs().clamp(max=3)).detach().requires_grad_()

    def function(q, k, v, g, S):
        return gated_linear_attention(
            q, k, v, g, form=form, chunk_size=3, initial_state=S, return_state=True
        )

    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args)


@every_form
def test_gradients_of_broadcast_inputs(form):
    args = draw(7, N=9, leading=((2, 1), (3,), (1, 1), (2, 3), (3,)))

    def gradients(form):
        leaves = [x.clone().requires_grad_() for x in args]
        out, S = gated_linear_attention(
            *leaves[:4], form=form, chunk_size=4, initial_state=leaves[4], return_state=True
        )
        return torch.autograd.grad(out.sin().sum() + S.sin().sum(), leaves)

    for found, expected in zip(gradients(form), gradients("recurrent"), strict=True):
        assert_close(found, expected, 1e-11)


def test_compile_traces_the_whole():
    torch.compiler.reset()
    inputs = draw(8, N=9, dtype=torch.float32)[:4]
    for form in ("recurrent", "chunkwise"):
        compiled = torch.compile(
            lambda *x, form=form: gated_linear_attention(
                *x, form=form, chunk_size=4, return_state=True
            ),
            fullgraph=True,
            backend="eager",
        )
        expected = gated_linear_attention(*inputs, form=form, chunk_size=4, return_state=True)
        for x, y in zip(compiled(*inputs), expected, strict=True):
            assert_close(x, y, 1e-6, torch.float32)


@every_form
def test_vmap_and_grad(form):
    inputs = draw(9, N=6, leading=((5,), (5,), (5,), (5,), ()))[:4]

    def loss(q, k, v, g):
        return gated_linear_attention(q, k, v, g, form=form, chunk_size=4).sin().sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*inputs)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_what_is_refused():
    args = dict(zip(["q", "k", "v", "log_decay"], draw(closed=False)[:4], strict=True))
    for changes, error, message in (
        ({"form": "masked"}, ValueError, "form must be None or one of 'recurrent', 'parallel', 'c"),
        ({"chunk_size": 0, "form": "recurrent"}, ValueError, "chunk_size must be at least 1"),
        ({"return_state": None}, TypeError, "return_state must be True or False"),
        ({"q": np.ones((7, 3))}, TypeError, "q must be a torch tensor, got ndarray"),
        ({"v": torch.ones(7, 4, dtype=torch.int64)}, TypeError, "v must have a floating dtype"),
        (
            {"log_decay": torch.zeros(7, 3)},
            TypeError,
            "log_decay must have the dtype of q, float64",
        ),
        ({"log_decay": args["log_decay"][:, :1]}, ValueError, "log_decay must have shape"),
        (
            {"log_decay": args["log_decay"].to("meta")},
            ValueError,
            "log_decay must be on the device",
        ),
        ({"log_decay": -args["log_decay"]}, ValueError, "log_decay must be at most 0, got "),
        ({"k": args["k"][:3]}, ValueError, r"k must have shape \(\.\.\., N, D\), \(\.\.\., 7, 3\)"),
        ({"initial_state": torch.ones(4, 3).double()}, ValueError, "initial_state must have shape"),
        ({"initial_state": torch.ones(3, 4)}, TypeError, "initial_state must have dtype float64"),
        ({"initial_state": 0.0}, TypeError, "initial_state must be a torch tensor, got float"),
    ):
        with pytest.raises(error, match="^" + message):
            gated_linear_attention(**args | changes)
