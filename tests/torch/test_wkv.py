"""WKV in torch: both forms against NumPy in float64, and under all that torch adds."""

import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import WKVState, wkv

FORMS = ["recurrent", "parallel"]
every_form = pytest.mark.parametrize("form", FORMS)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def kept(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw(seed=0, N=7, D=3, leading=((), ()), dtype=torch.float64):
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(size=(*lead, N, D)) for lead in leading)
    w, u = rng.uniform(0.05, 3, size=D), rng.normal(size=D)
    return [torch.from_numpy(x).to(dtype) for x in (k, v, w, u)]


def draw_state(D=3, leading=(), seed=1, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    a, b, maximum = rng.normal(size=(3, *leading, D))
    return WKVState(*(torch.from_numpy(x).to(dtype) for x in (a, abs(b) + 0.5, maximum)))


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def numpy_wkv(args, state=None):
    state = None if state is None else reference.WKVState(*arrays(*state))
    return reference.wkv(*arrays(*args), initial_state=state, return_state=True)


def assert_close(found, expected, tolerance=1e-12, dtype=None):
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


def assert_result(found, expected, dtype):
    assert_close(found[0], expected[0], TOLERANCE[dtype], dtype)
    assert isinstance(found[1], WKVState)
    for x, y in zip(found[1], expected[1], strict=True):
        assert_close(x, y, TOLERANCE[kept(dtype)], kept(dtype))


# Every form is NumPy's function.


@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    D=st.integers(1, 4),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 1), (3,), (1, 1)), ()), True, 37, 3, torch.float64, 0)
@example(BroadcastableShapes(((2,), (2,), (5, 2)), ()), True, 0, 3, torch.float64, 0)
@example(BroadcastableShapes(((), (), ()), ()), False, 1, 2, torch.float32, 0)
def test_forms_are_numpys(shapes, with_state, N, D, dtype, seed):
    *leading, state_leading = shapes.input_shapes
    args = draw(seed, N, D, leading, dtype)
    state = draw_state(D, state_leading, seed, kept(dtype)) if with_state else None
    expected = numpy_wkv(args, state)
    for form in [*FORMS, None]:
        found = wkv(*args, form=form, initial_state=state, return_state=True)
        assert_result(found, expected, dtype)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100])
def test_the_scan_joins_any_number_of_tokens(N):
    args = draw(3, N)
    assert_result(wkv(*args, form="parallel", return_state=True), numpy_wkv(args), torch.float64)


VALUES = torch.tensor([[10.0], [30.0], [50.0]])
HALF = torch.tensor([2.0]).log()


@every_form
@every_dtype
def test_worked_numbers_the_previous_token_carries_no_decay(form, dtype):
    k, v, w = (x.to(dtype) for x in (0 * VALUES, VALUES, HALF))
    out = wkv(k, v, w, 0 * w, form=form)
    assert_close(out, [[10.0], [20.0], [34.0]], 2.0**-7 if dtype == torch.bfloat16 else 1e-3)


@every_form
def test_the_bonus_is_not_stored(form):
    out, state = wkv(0 * VALUES, VALUES, HALF, 0 * HALF + 60, form=form, return_state=True)
    assert_close(out, VALUES, 1e-6)
    _, without = wkv(0 * VALUES, VALUES, HALF, 0 * HALF, form=form, return_state=True)
    for x, y in zip(state, without, strict=True):
        assert torch.equal(x, y)


# Keys of any size.


def hard(N=60, D=9, dtype=torch.float64):
    """Keys from -80 to 80, decays from e^-5 to e^3, tokens without weight at the beginning."""
    rng = np.random.default_rng(7)
    k = rng.choice([-80.0, -79.0, 0.0, 80.0, 79.5], size=(N, D))
    k[:5] = -80
    k[:2, ::2] = k[30:40, 1] = -np.inf
    k[:, 4] = -np.inf
    v, u = rng.normal(size=(N, D)), rng.normal(size=D)
    tensors = (torch.from_numpy(x) for x in (k, v, np.exp(np.linspace(-5, 3, D)), u))
    return [x.to(dtype) for x in tensors]


@every_form
@every_dtype
def test_keys_up_to_80_and_minus_infinity(form, dtype):
    args = [x.requires_grad_() for x in hard(dtype=dtype)]
    expected, _ = numpy_wkv(args)
    assert np.isfinite(expected).all() and (expected[:2, ::2] == 0).all()
    out, state = wkv(*args, form=form, return_state=True)
    assert_close(out, expected, 2 * TOLERANCE[dtype], dtype)
    assert (out[:2, ::2] == 0).all() and (out[:, 4] == 0).all()
    assert all(x.isfinite().all() for x in state)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    found = torch.autograd.grad((out * weights.to(dtype)).sum(), args)
    exact = [x.detach().double().requires_grad_() for x in args]
    other = FORMS[form == "recurrent"]
    wanted = torch.autograd.grad((wkv(*exact, form=other) * weights).sum(), exact)
    for x, y in zip(found, wanted, strict=True):
        assert x.isfinite().all()
        assert_close(x, y, 1e-9 if dtype == torch.float64 else 20 * TOLERANCE[dtype])
    assert (found[0][args[0].isinf()] == 0).all() and found[2].any() and found[3].any()


@every_form
def test_the_forms_of_float32_agree_after_many_tokens(form):
    """The maximum loses 0.0001 per token there, less than float32 can tell: the sums make up."""
    k, v, _, u = draw(8, 3000, 5)
    args = k * 5, v, torch.linspace(-9, 3, 5).double().exp(), u
    expected = numpy_wkv(args)
    found = wkv(*(x.float() for x in args), form=form, return_state=True)
    assert_close(found[0], expected[0], 1e-5)
    mean = expected[1].numerator / expected[1].denominator
    assert_close(found[1].numerator / found[1].denominator, mean, 1e-4)


def test_a_state_of_half_precision_may_hold_minus_infinity():
    args = draw(9, dtype=torch.float16)
    args[0][0] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.float16)
    state = WKVState(zeros, zeros, zeros - torch.inf)
    for form in FORMS:
        found = wkv(*args, form=form, initial_state=state)
        assert torch.equal(found, wkv(*args, form=form))


@every_form
def test_nan_goes_forward_in_its_channel_only(form):
    for spoiled in range(2):
        args = draw(10, N=9, leading=((2,), (2,)))
        args[spoiled][1, 5, 2] = torch.nan
        bad = wkv(*args, form=form).isnan()
        assert bad[1, 5:, 2].all() and bad.sum() == 4


# What torch adds.


@every_form
def test_gradients_go_through_a_split(form):
    k, v, w, u = (x.requires_grad_() for x in draw(12))
    expected = torch.autograd.grad(wkv(k, v, w, u).square().sum(), (k, v, w, u))
    head, state = wkv(k[:3], v[:3], w, u, form=form, return_state=True)
    tail = wkv(k[3:], v[3:], w, u, form=form, initial_state=state)
    found = torch.autograd.grad(torch.cat([head, tail]).square().sum(), (k, v, w, u))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_meta_tensors():
    args = [torch.empty(x.shape, device="meta") for x in draw(16, leading=((2,), (2,)))]
    for form in FORMS:
        out, state = wkv(*args, form=form, return_state=True)
        assert out.shape == (2, 7, 3) and {x.shape for x in state} == {(2, 3)}
        assert out.device.type == state.maximum.device.type == "meta"


def test_parallel_needs_less_time_than_recurrent():
    """Forward and backward at N = 1,024; it is about ten times as fast."""
    args = [x.requires_grad_() for x in draw(17, 1024, 32, dtype=torch.float32)]
    seconds = {form: [] for form in (*FORMS, None)}
    for _ in range(3):
        for form in seconds:
            start = time.perf_counter()
            wkv(*args, form=form).sum().backward()
            seconds[form].append(time.perf_counter() - start)
    assert min(seconds["parallel"]) < min(seconds["recurrent"]) / 2
    assert min(seconds[None]) < min(seconds["recurrent"]) / 2  # and so it is what None takes


def test_parallel_keeps_no_number_for_each_pair_of_tokens():
    """Nor one for each level of the scan: twice the tokens, twice the memory."""

    def peak(N):
        args = [x.requires_grad_() for x in draw(18, N, 16, dtype=torch.float32)]
        return peak_bytes(lambda: wkv(*args, form="parallel").sum().backward())

    assert peak(8192) < 2.4 * peak(4096) + 2**20


# Errors.
