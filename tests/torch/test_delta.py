"""The delta rules in torch: every form against NumPy in float64, and under all that torch adds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.checks import check_causal, check_gradients, check_linear_cost
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


@both_rules
@every_form
@every_dtype
def test_states_in_either_dtype(rule, form, dtype):
    leading = ((5, 1, 1), (3, 1), (3, 1), (), (1, 1), (2,))
    for given_dtype in {dtype, kept(dtype)}:
        *tensors, state = draw(2, 9, leading=leading, dtype=dtype)
        args, state = arguments(rule, tensors), state.to(given_dtype)
        found = rule(*args, form=form, chunk_size=4, initial_state=state, return_state=True)
        assert_result(found, numpys(rule, args, state), dtype)
        assert found[1].shape == (3, 2, 3, 4)


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
@pytest.mark.parametrize("first", FORMS)
def test_split_anywhere_and_hand_the_state_to_any_form(rule, first):
    leading = ((2, 1), (3,), (3,), (2, 1), (), ())
    *tensors, state = draw(3, leading=leading, forgetting=0.1)
    args = arguments(rule, tensors)
    options = {"chunk_size": 3, "return_state": True}
    whole = numpys(rule, args, state)
    for t in range(8):
        before = [x[..., :t, :] for x in args[:3]] + [x[..., :t] for x in args[3:]]
        after = [x[..., t:, :] for x in args[:3]] + [x[..., t:] for x in args[3:]]
        head, between = rule(*before, form=first, initial_state=state, **options)
        for second in [*FORMS, None]:
            tail, last = rule(*after, form=second, initial_state=between, **options)
            assert_result((torch.cat([head, tail], dim=-2), last), whole, torch.float64)


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


def as_inputs(rule):
    def inputs(rng, N):
        leading = ((2, 3), (3,), (2, 1), (2, 3), (3,), ())
        return arguments(rule, draw(int(rng.integers(2**31)), N, leading=leading))

    return inputs


@both_rules
@every_form
def test_checks(rule, form):
    def run(*args, **options):
        return rule(*args, form=form, chunk_size=5, **options)

    check_causal(run, inputs=as_inputs(rule))
    check_linear_cost(run, inputs=as_inputs(rule))
    if rule is delta_rule:  # a step of finite differences may take log_decay above 0
        check_gradients(run, inputs=lambda rng, N: draw(int(rng.integers(2**31)), N)[:4])


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


@both_rules
@every_form
@pytest.mark.parametrize("N", [0, 1, 9])
def test_outputs_own_their_memory_and_inputs_are_left_alone(rule, form, N):
    for leading in (NONE, ((2, 3), (3,), (2, 1), (), (), ())):
        *tensors, state = draw(7, N, leading=leading)
        args = arguments(rule, tensors)
        before = [x.clone() for x in (*args, state)]
        for found in rule(*args, form=form, initial_state=state, return_state=True):
            assert found.untyped_storage().nbytes() == found.nbytes
            found.fill_(math.nan)
        for x, y in zip((*args, state), before, strict=True):
            assert torch.equal(x, y)


@both_rules
@every_form
def test_any_strides_work(rule, form):
    *tensors, state = draw(8, 9, leading=((2, 5),) * 6)
    args = arguments(rule, tensors)
    options = {"form": form, "chunk_size": 4, "initial_state": state}
    expected = rule(*args, **options)
    wide = [torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2] for x in args]
    swapped = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args]
    late = [x.movedim(2, -1).contiguous().movedim(-1, 2) for x in args]
    for strided in (wide, swapped, late):
        assert_close(rule(*strided, **options), expected)
    shared = [x[:1].expand(4, *x.shape[1:]) for x in args]
    found = rule(*shared, **options | {"initial_state": state[:1]})
    assert_close(found, expected[:1].expand(4, *expected.shape[1:]))


@both_rules
@every_form
def test_nan_stays_in_its_sequence(rule, form):
    for spoiled in range(4 if rule is delta_rule else 5):
        tensors = draw(9, 9, leading=((2, 3),) * 6)
        at = (1, 2, 5) if spoiled > 2 else (1, 2, 5, 1)
        tensors[spoiled][at] = math.nan
        args = [x.requires_grad_() for x in arguments(rule, tensors)]
        out = rule(*args, form=form, chunk_size=4)
        rows = out.isnan().any(dim=-1)
        assert rows[1, 2, 5] and rows.sum() == rows[1, 2].sum()
        assert not rows[1, 2, : 5 if form == "recurrent" else 4].any()
        for gradient in torch.autograd.grad(out.sum(), args):
            lost = gradient.isnan().flatten(2).any(dim=-1)
            assert lost.sum() == lost[1, 2]


@both_rules
@every_form
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_half_precision_is_computed_in_float32_and_rounded_once(rule, form, dtype):
    tensors = draw(10, 300, 16, dtype=dtype)
    args = arguments(rule, tensors)
    expected = torch.from_numpy(numpys(rule, args)[0])
    out = rule(*args, form=form)
    assert out.dtype == dtype
    bound = ROUNDING[dtype] * expected.abs() + 2e-5 * expected.abs().max()
    assert ((out - expected).abs() <= bound).all()


@both_rules
@every_form
def test_autocast_lowers_no_precision(rule, form):
    *tensors, state = draw(11, 20, dtype=torch.float32)
    args = [x.requires_grad_() for x in arguments(rule, tensors)]
    options = {"form": form, "chunk_size": 6, "initial_state": state, "return_state": True}
    expected = rule(*args, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rule(*args, **options)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


# Derivatives and transformations.


@both_rules
@every_form
def test_gradcheck(rule, form):
    """Of all arguments and the state, once and twice, over several chunks and leading dimensions.

    The decays are away from 0, so that finite differences stay below it.
    """
    leading = ((2,), (), (2,), (), (2,), ())
    *tensors, state = draw(12, 5, 2, 2, leading=leading)
    tensors[4] = tensors[4] - 0.1
    args = [x.requires_grad_() for x in (*arguments(rule, tensors), state)]

    def run(*args):
        return rule(*args[:-1], form=form, chunk_size=2, initial_state=args[-1], return_state=True)

    assert torch.autograd.gradcheck(run, args)
    small = [x.detach()[..., :3, :].requires_grad_() for x in args[:3]]
    small += [x.detach()[..., :3].requires_grad_() for x in args[3:-1]]
    assert torch.autograd.gradgradcheck(run, [*small, args[-1]])


@both_rules
@every_form
def test_func_and_vmap(rule, form):
    tensors = draw(13, 9, leading=((5,),) * 6)
    args = (*arguments(rule, tensors), tensors[5])

    def run(*args):
        return rule(*args[:-1], form=form, chunk_size=4, initial_state=args[-1], return_state=True)

    def loss(*args):
        out, last = run(*args)
        return out.square().sum() + last.square().sum()

    for x, y in zip(torch.func.vmap(run)(*args), run(*args), strict=True):
        assert_close(x, y)
    every = tuple(range(len(args)))
    found = torch.func.vmap(torch.func.grad(loss, argnums=every))(*args)
    tracked = [x.clone().requires_grad_() for x in args]
    for x, y in zip(found, torch.autograd.grad(loss(*tracked), tracked), strict=True):
        assert_close(x, y, 1e-11)


@both_rules
@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compile(rule, form):
    torch.compiler.reset()
    *tensors, state = draw(14, 10, dtype=torch.float32)
    args = [x.requires_grad_() for x in arguments(rule, tensors)]

    def run(*args):
        return rule(*args, form=form, chunk_size=4, initial_state=state, return_state=True)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    found, expected = compiled(*args), run(*args)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, 1e-5)
    found, expected = (torch.autograd.grad(out.sum(), args) for out, _ in (found, expected))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, 1e-4)


def test_meta_tensors_have_the_right_shapes():
    tensors = [x.to("meta") for x in draw(15, leading=((2,), (3, 1), (), (), (), ()))]
    for form in FORMS:
        out, last = gated_delta_rule(*tensors[:5], form=form, return_state=True)
        assert out.shape == (3, 2, 7, 4) and last.shape == (3, 1, 3, 4)


# Arguments.


@both_rules
def test_arguments_that_are_no_float_tensors(rule):
    names = ["q", "k", "v", "beta", "log_decay"]
    args = dict(zip(names, arguments(rule, draw()), strict=False))
    for name, x in args.items():
        for wrong in (x.int(), x > 0):
            with pytest.raises(TypeError, match=f"^{name} must have a floating dtype"):
                rule(**args | {name: wrong})
        with pytest.raises(TypeError, match=f"^{name} must be a torch tensor, got ndarray"):
            rule(**args | {name: x.numpy()})
        with pytest.raises(TypeError, match="must have the dtype of q, float"):
            rule(**args | {name: x.float()})
        with pytest.raises(ValueError, match="must be on the device of q, "):
            rule(**args | {name: x.to("meta")})


@both_rules
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"form": "parallel"}, ValueError, "form must be None or one of 'recurrent', 'chunkwise'"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 0, "form": "recurrent"}, ValueError, "chunk_size must be at least 1"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size must be an integer, got 2.0"),
        ({"return_state": "no"}, TypeError, "return_state must be True or False, got 'no'"),
        ({"initial_state": torch.ones(4, 3)}, TypeError, "initial_state must have dtype float64"),
        (
            {"initial_state": torch.ones(4, 3).double()},
            ValueError,
            r"initial_state must have shape \(..., D, M\), \(..., 3, 4\), got \(4, 3\)",
        ),
        ({"beta": torch.ones(6).double()}, ValueError, "beta must have the length of k, 7, got 6"),
        ({"beta": torch.ones(()).double()}, ValueError, "beta must have shape"),
        ({"q": torch.ones(6, 3).double()}, ValueError, "q must have the length of k, 7, got 6"),
        (
            {"beta": torch.ones(2, 7).double(), "q": torch.ones(3, 7, 3).double()},
            ValueError,
            "the leading dimensions of q, k, v, beta.* must broadcast",
        ),
    ],
)
def test_options(rule, options, error, message):
    names = ["q", "k", "v", "beta", "log_decay"]
    args = dict(zip(names, arguments(rule, draw()), strict=False))
    with pytest.raises(error, match="^" + message):
        rule(**args | options)


def test_decays_above_one_are_refused_in_eager_mode_only():
    *args, log_decay, _ = draw()
    log_decay[3] = 0.25
    for form in FORMS:
        with pytest.raises(ValueError, match="^log_decay must be at most 0, got 0.25"):
            gated_delta_rule(*args, log_decay, form=form)
    torch.func.vmap(gated_delta_rule)(*(x[None] for x in (*args, log_decay)))
    log_decay[3] = math.nan  # is not refused
    assert gated_delta_rule(*args, log_decay)[3:].isnan().all()
