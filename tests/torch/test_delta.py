"""The delta rules in torch: every form against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.torch import delta_rule, gated_delta_rule

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)
both_rules = pytest.mark.parametrize("rule", [delta_rule, gated_delta_rule])

# Half precision is computed in float32 and rounded once, by at most half of its epsilon.
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: ROUNDING[torch.float16] + 2e-5,
    torch.bfloat16: ROUNDING[torch.bfloat16] + 2e-5,
}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NONE = ((),) * 6


def draw(seed=0, N=7, D=3, M=4, leading=NONE, dtype=torch.float64, forgetting=0.0):
    """q, k, v, beta, log_decay and a state: keys of length 1, beta in [0, 2]."""
    rng = np.random.default_rng(seed)
    q, k, v, state = (
        rng.normal(size=(*leading[i], *shape))
        for i, shape in ((0, (N, D)), (1, (N, D)), (2, (N, M)), (5, (D, M)))
    )
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.uniform(0, 2, size=(*leading[3], N))
    log_decay = -rng.exponential(size=(*leading[4], N))
    log_decay[rng.random(log_decay.shape) < forgetting] = -np.inf
    return [torch.from_numpy(x).to(dtype) for x in (q, k, v, beta, log_decay, state)]


def arguments(rule, tensors):
    """What the rule takes, out of what `draw` returns."""
    return tensors[:4] if rule is delta_rule else tensors[:5]


def numpys(rule, args, state=None, **options):
    """NumPy's outputs and state, in float64."""
    twin = getattr(reference, rule.__name__)
    args = [x.detach().double().numpy() for x in args]
    state = None if state is None else state.detach().double().numpy()
    return twin(*args, initial_state=state, return_state=True, **options)


def kept(dtype):
    """The dtype of the state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def assert_close(found, expected, tolerance=1e-12, dtype=None):
    """The same shape, and an error relative to the largest number; expected may be NumPy's."""
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


def assert_result(found, expected, dtype):
    """Outputs and state, against NumPy's."""
    assert_close(found[0], expected[0], TOLERANCE[dtype], dtype)
    assert_close(found[1], expected[1], TOLERANCE[kept(dtype)], kept(dtype))


# Every form is NumPy's function.


@both_rules
@settings(max_examples=60, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=6, max_dims=3, max_side=3, min_side=0),
    with_state=st.booleans(),
    N=st.integers(0, 40),
    chunk_size=st.sampled_from([1, 2, 3, 7, 16, 50]),
    D=st.integers(1, 4),
    M=st.integers(0, 5),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    BroadcastableShapes(((2, 1), (3,), (1, 1), (), (2, 3), (3,)), (2, 3)),
    True,
    37,
    7,
    3,
    5,
    None,
    0,
)
@example(
    BroadcastableShapes(((5, 2, 3), (3,), (2, 1), (), (), (2, 1)), ()), True, 9, 4, 3, 2, None, 0
)
@example(BroadcastableShapes(((), (2,), (3, 1), (), (3, 2), ()), ()), False, 1, 4, 2, 3, None, 0)
@example(BroadcastableShapes(((2,),) * 6, ()), True, 0, 4, 2, 3, None, 0)
def test_forms_are_numpys(rule, shapes, with_state, N, chunk_size, D, M, dtype, seed):
    dtype = dtype or torch.float64
    tensors = draw(seed, N, D, M, shapes.input_shapes, dtype, forgetting=0.1)
    args, state = arguments(rule, tensors), tensors[5] if with_state else None
    expected = numpys(rule, args, state, form="recurrent")
    options = {"chunk_size": chunk_size, "initial_state": state, "return_state": True}
    for form in [*FORMS, None]:
        assert_result(rule(*args, form=form, **options), expected, dtype)
    assert_close(rule(*args, initial_state=state), expected[0], TOLERANCE[dtype], dtype)


KEYS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
VALUES = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


@every_form
@every_dtype
def test_worked_numbers(form, dtype):
    k, v, beta = KEYS.to(dtype), VALUES.to(dtype), torch.tensor([1.0, 1.0, 0.5], dtype=dtype)
    out, S = delta_rule(k, k, v, beta, form=form, chunk_size=2, return_state=True)
    assert out.tolist() == [[10, 20], [30, 40], [50, 60]]
    assert S.tolist() == [[15, 20], [35, 40]]


@every_form
def test_the_gated_rule_decays_before_it_takes_the_error(form):
    k, v = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[8.0], [10.0]])
    log_decay = torch.tensor([0.0, -math.log(2)])
    out, S = gated_delta_rule(k, k, v, torch.ones(2), log_decay, form=form, return_state=True)
    assert_close(out, v, 1e-6)
    assert_close(S, torch.tensor([[10.0], [0.0]]), 1e-6)


# Streaming, padding, what lesson_code.checks says.


@both_rules
@every_form
def test_padding_with_zeros_is_exact(rule, form):
    *tensors, state = draw(4, N=10)
    args = arguments(rule, tensors)
    padded = [torch.cat([x, x.new_zeros(5, *x.shape[1:])]) for x in args]
    options = {"form": form, "chunk_size": 5, "initial_state": state, "return_state": True}
    out, last = rule(*args, **options)
    found, same = rule(*padded, **options)
    assert_close(found[:10], out, 1e-14)
    assert_close(same, last, 1e-14)


# Strong decays and hard systems.


def with_strong_decays(dtype, N=40):
    """Weak decays beside -50, -1e6 and -inf."""
    *args, log_decay, state = draw(5, N, dtype=dtype)
    log_decay = log_decay * 1e-3
    log_decay[[0, 21]], log_decay[7], log_decay[[30, 31]] = -50, -1e6, -math.inf
    return [*args, log_decay, state]


@every_form
@every_dtype
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_strong_decays_keep_their_digits(form, dtype, chunk_size):
    *args, state = with_strong_decays(dtype)
    options = {"form": form, "chunk_size": chunk_size, "initial_state": state}
    found = gated_delta_rule(*args, return_state=True, **options)
    assert_result(found, numpys(gated_delta_rule, args, state, form="recurrent"), dtype)


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_under_strong_decays(form, dtype):
    """Finite in every argument; and those of the recurrence in float64."""

    def gradients(form, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in with_strong_decays(torch.float64)]
        *args, state = tensors
        options = {"form": form, "chunk_size": 16, "initial_state": state, "return_state": True}
        out, last = gated_delta_rule(*args, **options)
        return torch.autograd.grad(out.square().sum() + last.square().sum(), tensors)

    found, expected = gradients(form, dtype), gradients("recurrent", torch.float64)
    for x, y in zip(found, expected, strict=True):
        assert x.isfinite().all()
        assert_close(x, y, 1e-11 if dtype == torch.float64 else 1e-4, dtype)
    assert (found[4][[30, 31]] == 0).all()  # of log_decay, where it is -inf


@every_form
def test_what_is_forgotten_has_no_gradient(form):
    tensors = [x.requires_grad_() for x in with_strong_decays(torch.float64)]
    options = {"form": form, "chunk_size": 16, "initial_state": tensors[5], "return_state": True}
    out, last = gated_delta_rule(*tensors[:5], **options)
    gradients = torch.autograd.grad(out[31:].sum() + last.sum(), tensors)
    for x in gradients[:5]:
        assert (x[:31] == 0).all() and (x[32:39] != 0).all()
    assert (gradients[5] == 0).all()


@every_form
def test_constant_decays_of_minus_fifty(form):
    *args, log_decay, state = draw(6, 200, 8, 8, dtype=torch.float32)
    args = [x.requires_grad_() for x in (*args, torch.full_like(log_decay, -50), state)]
    out, last = gated_delta_rule(*args[:5], form=form, initial_state=args[5], return_state=True)
    assert_result((out, last), numpys(gated_delta_rule, args[:5], args[5]), torch.float32)
    for gradient in torch.autograd.grad(out.sum() + last.sum(), args):
        assert gradient.isfinite().all()


def correlated(N=512, D=16, M=8, seed=12):
    """Unit keys that are nearly parallel, and a beta near 2: the system has entries near 2."""
    rng = np.random.default_rng(seed)
    k = np.ones(D) + 0.05 * rng.normal(size=(N, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = (rng.normal(size=(N, D)), k, rng.normal(size=(N, M)), rng.uniform(1.9, 2, size=N))
    return [torch.from_numpy(x) for x in arrays]


def test_the_triangular_system_of_correlated_keys_is_solved_well():
    """Float32 errors grow with the chunk size, not with powers of it; gradients included."""
    errors = {}
    for form in FORMS:
        results = []
        for dtype in (torch.float64, torch.float32):
            args = [x.to(dtype).requires_grad_() for x in correlated()]
            out = delta_rule(*args, form=form)
            results.append([out, *torch.autograd.grad(out.square().sum(), args)])
        errors[form] = [
            ((found - exact).abs().max() / exact.abs().max()).item()
            for exact, found in zip(*results, strict=True)
        ]
    assert max(errors["recurrent"]) < 1e-5 and max(errors["chunkwise"]) < 1e-4, errors


# Inputs, outputs, NaN, precision.


# Derivatives and transformations.


def test_meta_tensors_have_the_right_shapes():
    tensors = [x.to("meta") for x in draw(15, leading=((2,), (3, 1), (), (), (), ()))]
    for form in FORMS:
        out, last = gated_delta_rule(*tensors[:5], form=form, return_state=True)
        assert out.shape == (3, 2, 7, 4) and last.shape == (3, 1, 3, 4)


# Arguments.


def test_decays_above_one_are_refused_in_eager_mode_only():
    *args, log_decay, _ = draw()
    log_decay[3] = 0.25
    for form in FORMS:
        with pytest.raises(ValueError, match="^log_decay must be at most 0, got 0.25"):
            gated_delta_rule(*args, log_decay, form=form)
    torch.func.vmap(gated_delta_rule)(*(x[None] for x in (*args, log_decay)))
    log_decay[3] = math.nan  # is not refused
    assert gated_delta_rule(*args, log_decay)[3:].isnan().all()
