"""The selective scan and the state-space dual in torch: against NumPy, and what torch adds."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import (
    gated_linear_attention,
    retention,
    selective_scan,
    state_space_dual,
)
from lesson_code.torch.engines import selective as engine

SELECTIVE = ["recurrent", "scan"]
DUAL = ["recurrent", "parallel", "chunkwise"]
every_selective_form = pytest.mark.parametrize("form", SELECTIVE)
every_dual_form = pytest.mark.parametrize("form", DUAL)
FORMS = [(selective_scan, form) for form in SELECTIVE] + [(state_space_dual, f) for f in DUAL]
every_form = pytest.mark.parametrize(
    ("function", "form"), FORMS, ids=[f"{function.__name__}-{form}" for function, form in FORMS]
)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Leading dimensions of x, delta or log_decay, B, C and the state.
LEADING = [
    ((), (), (), (), ()),
    ((2,), (2,), (2,), (2,), (2,)),
    ((2, 3), (3,), (2, 1), (), (3,)),
    ((), (3,), (), (2, 1), ()),
    ((), (), (), (), (2, 1)),
    ((0,), (1,), (), (0,), ()),
]
NAMES = {
    selective_scan: ["x", "delta", "A", "B", "C", "D", "initial_state"],
    state_space_dual: ["x", "log_decay", "B", "C", "initial_state"],
}


def kept(dtype):
    """The dtype of the state."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw_selective(seed=0, N=7, E=4, K=3, leading=LEADING[0], dtype=torch.float64):
    """Arguments by name; a third of the steps is 0, a third is large."""
    rng = np.random.default_rng(seed)
    shapes = ((N, E), (N, E), (N, K), (N, K), (E, K))
    x, delta, B, C, h = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    delta = abs(delta) * rng.choice([0, 1, 30], size=delta.shape)
    arrays = (x, delta, -rng.uniform(0.1, 3, size=(E, K)), B, C, rng.normal(size=E), h)
    return as_arguments(selective_scan, arrays, dtype)


def draw_dual(seed=0, N=7, K=3, P=4, leading=LEADING[0], dtype=torch.float64):
    """Arguments by name; some decays are 0 or nearly 0."""
    rng = np.random.default_rng(seed)
    shapes = ((N, P), (N,), (N, K), (N, K), (K, P))
    x, g, B, C, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    g = -abs(g) * rng.choice([0, 1, 30, np.inf], p=[0.3, 0.5, 0.1, 0.1], size=g.shape)
    return as_arguments(state_space_dual, (x, g, B, C, S), dtype)


DRAW = {selective_scan: draw_selective, state_space_dual: draw_dual}


def as_arguments(function, arrays, dtype):
    tensors = [torch.from_numpy(np.asarray(array)).to(dtype) for array in arrays]
    tensors[-1] = tensors[-1].to(kept(dtype))
    return dict(zip(NAMES[function], tensors, strict=True))


def numpys(arguments):
    return {name: x.detach().double().numpy() for name, x in arguments.items()}


def assert_close(found, expected, tolerance=1e-11, dtype=None):
    """The same shape, and an error relative to the largest number; expected may be NumPy's."""
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


def assert_result(found, expected, dtype=torch.float64):
    """Outputs and state, against NumPy's."""
    assert_close(found[0], expected[0], TOLERANCE[dtype], dtype)
    assert_close(found[1], expected[1], TOLERANCE[kept(dtype)], kept(dtype))


def inside(arguments):
    """The same away from the ends of what is allowed, where finite differences step outside."""
    bounds = {"delta": (0.01, 2), "log_decay": (-2, -0.01)}
    return {k: x.clamp(*bounds[k]) if k in bounds else x for k, x in arguments.items()}


def loss_of(function, form, **options):
    """A number that depends on all outputs and on the last state."""

    def loss(**arguments):
        out, state = function(**arguments, form=form, return_state=True, **options)
        return out.sin().sum() + state.cos().sum()

    return loss


def gradients(loss, arguments):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    return torch.autograd.grad(loss(**leaves), list(leaves.values()))


# Every form is NumPy's function.


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(0, 40),
    E=st.integers(0, 3),
    K=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    segment=st.sampled_from([1, 60, 200, 2**19]),
    fewest=st.sampled_from([1, 5]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(37, 3, 2, LEADING[2], 200, 5, torch.float64, 0)
@example(37, 3, 2, LEADING[3], 1, 5, torch.float64, 0)
@example(0, 3, 2, LEADING[2], 1, 1, torch.float16, 0)
def test_selective_scan_is_numpys(N, E, K, leading, segment, fewest, dtype, seed):
    arguments = draw_selective(seed, N, E, K, leading, dtype)
    expected = reference.selective_scan(**numpys(arguments), return_state=True)
    fewer = {k: x for k, x in arguments.items() if k not in ("D", "initial_state")}
    expected_fewer = reference.selective_scan(**numpys(fewer), return_state=True)
    with mock.patch.multiple(engine, SEGMENT=segment, FEWEST=fewest):
        for form in [*SELECTIVE, None]:
            options = {"form": form, "return_state": True}
            assert_result(selective_scan(**arguments, **options), expected, dtype)
            assert_result(selective_scan(**fewer, **options), expected_fewer, dtype)


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(0, 40),
    chunk_size=st.integers(1, 42),
    K=st.integers(0, 3),
    P=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(20, 6, 2, 4, LEADING[2], torch.float64, 0)
@example(0, 6, 2, 4, LEADING[3], torch.float32, 0)
def test_state_space_dual_is_numpys(N, chunk_size, K, P, leading, dtype, seed):
    arguments = draw_dual(seed, N, K, P, leading, dtype)
    expected = reference.state_space_dual(**numpys(arguments), return_state=True)
    for form in [*DUAL, None]:
        options = {"form": form, "chunk_size": chunk_size, "return_state": True}
        assert_result(state_space_dual(**arguments, **options), expected, dtype)


HALF = torch.tensor([[0.5]], dtype=torch.float64).log()


@every_form
def test_worked_numbers(function, form):
    """With a decay of 1/2: 8, then 8/2 + 4 = 8, then 8/2 + 2 = 6."""
    x = torch.tensor([[8.0], [4.0], [2.0]], dtype=torch.float64)
    one = torch.ones_like(x)
    arguments = (x, one, HALF) if function is selective_scan else (x, HALF.expand(3, 1)[:, 0])
    y, state = function(*arguments, one, one, form=form, return_state=True)
    assert_close(y, [[8.0], [8.0], [6.0]])
    assert_close(state, [[6.0]])


@every_dual_form
def test_the_dual_is_gated_linear_attention_and_with_a_constant_decay_retention(form):
    x, g, B, C, S = draw_dual(N=11).values()
    options = {"initial_state": S, "return_state": True, "chunk_size": 4}
    expected = gated_linear_attention(C, B, x, g[:, None].expand(11, 3), **options)
    assert_result(state_space_dual(x, g, B, C, form=form, **options), expected)
    expected = retention(C, B, x, 0.9, **options)
    g = torch.full((11,), 0.9, dtype=torch.float64).log()
    assert_result(state_space_dual(x, g, B, C, form=form, **options), expected)


@every_dual_form
def test_one_rate_for_all_entries_is_the_dual(form):
    x, delta, _, B, C, _, h = draw_selective(N=11, leading=LEADING[2]).values()
    delta, A = delta[..., :1], torch.full((4, 3), -0.7, dtype=torch.float64)
    steps = delta.expand(3, 11, 4)
    y, h_last = selective_scan(x, steps, A, B, C, initial_state=h, return_state=True)
    options = {"form": form, "chunk_size": 4, "initial_state": h.mT, "return_state": True}
    found = state_space_dual(delta * x, -0.7 * delta[..., 0], B, C, **options)
    assert_result(found, (y, h_last.mT))


# The state.


# Gradients.


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("length", [1, 7, 16, 100])
def test_gradients_of_the_scan_are_those_of_the_loop(leading, length):
    arguments = draw_selective(2, 37, leading=leading)
    arguments["A"], arguments["D"] = arguments["A"][:, :3], arguments["D"]
    expected = gradients(loss_of(selective_scan, "recurrent"), arguments)
    with mock.patch.multiple(engine, SEGMENT=1, FEWEST=length):
        found = gradients(loss_of(selective_scan, "scan"), arguments)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@every_form
@pytest.mark.parametrize("strong", [-50.0, -1e4, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strong_decay(function, form, strong, dtype):
    """No inf or NaN in value or gradient, and what the definition says."""
    arguments = DRAW[function](3, 9, dtype=dtype)
    if function is state_space_dual:
        arguments["log_decay"] = torch.full((9,), strong, dtype=dtype)
        arguments["log_decay"][::4] = -0.1
    else:
        arguments["A"] = torch.full_like(arguments["A"], max(strong, -1e30))
        arguments["delta"] = arguments["delta"].clamp(0.5, 2)
    expected = getattr(reference, function.__name__)(**numpys(arguments), return_state=True)
    found = function(**arguments, form=form, return_state=True)
    assert_result(found, expected, dtype)
    exact = {name: x.double() for name, x in arguments.items()}
    wanted = gradients(loss_of(function, "recurrent"), exact)
    for a, b in zip(gradients(loss_of(function, form), arguments), wanted, strict=True):
        assert a.isfinite().all() and b.isfinite().all()
        assert_close(a, b, 1e-10 if dtype == torch.float64 else 1e-4)
    if strong == -torch.inf and function is state_space_dual:
        gradient = gradients(loss_of(function, form), arguments)[1]
        assert not gradient[arguments["log_decay"] == strong].any()


@every_selective_form
def test_large_and_zero_steps(form):
    """delta 0 leaves the state, delta 1e4 forgets it; both have a gradient."""
    arguments = draw_selective(4, 6)
    arguments["delta"][:3], arguments["delta"][3:] = 0, 1e4
    y, h = selective_scan(**arguments, form=form, return_state=True)
    x, _, _, B, C, D, h_0 = arguments.values()
    assert_close(y[:3], C[:3] @ h_0.mT + D * x[:3])
    assert_close(h, 1e4 * x[-1][:, None] * B[-1])
    _, d_delta, *_ = gradients(loss_of(selective_scan, form), arguments)
    assert d_delta.isfinite().all() and (d_delta[:3] != 0).all()


@pytest.mark.parametrize(
    ("function", "form"), [pair for pair in FORMS if pair != (selective_scan, "scan")]
)
def test_second_derivatives(function, form):
    arguments = inside(DRAW[function](5, 4, 2, 2))
    arrays = [x.requires_grad_() for x in arguments.values()]

    def run(*args):
        return function(**dict(zip(arguments, args, strict=True)), form=form)

    assert torch.autograd.gradgradcheck(run, arrays, fast_mode=True)


def test_the_scan_is_differentiated_once():
    arguments = draw_selective()
    x = arguments.pop("x").requires_grad_()
    y = selective_scan(x, **arguments, form="scan")
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    message = '^form "scan" can be differentiated once, .* take "recurrent"'
    with pytest.raises(RuntimeError, match=message):
        dx.sum().backward()

    def loss(x):
        return selective_scan(x, **arguments, form="scan").square().sum()

    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x.detach())


def test_what_the_scan_keeps_does_not_grow_with_the_states():
    """N E K states would be 16 times the inputs; one in 16 positions is kept."""
    N, E, K = 1024, 64, 64
    x, delta, A, B, C, D, h = (
        x.requires_grad_() for x in draw_selective(0, N, E, K, dtype=torch.float32).values()
    )

    def run(form):
        y = selective_scan(x, delta, A, B, C, D, form=form, initial_state=h)
        torch.autograd.grad(y.sum(), [x, delta, A, B, C, D, h])

    with mock.patch.object(engine, "SEGMENT", 2**16):
        assert peak_bytes(lambda: run("scan")) < 0.4 * 4 * N * E * K
    assert peak_bytes(lambda: run("recurrent")) > 2 * 4 * N * E * K


# torch.func and torch.compile.


@every_form
def test_vmap_and_grad(function, form):
    """Each argument mapped, A and D too, as in modules that are stacked."""
    several = [DRAW[function](seed, 6, leading=LEADING[1]) for seed in range(3)]
    if function is state_space_dual:
        for arguments in several:
            arguments["log_decay"].clamp_(min=-9)
    loss = loss_of(function, form)
    stacked = {name: torch.stack([a[name] for a in several]) for name in several[0]}

    def of_args(*args):
        return loss(**dict(zip(stacked, args, strict=True)))

    each = tuple(range(len(stacked)))
    found = torch.func.vmap(torch.func.grad(of_args, each))(*stacked.values())
    for i, arguments in enumerate(several):
        for a, b in zip(found, gradients(loss, arguments), strict=True):
            assert_close(a[i], b)
    first = tuple(several[0].values())
    for a, b in zip(torch.func.grad(of_args, each)(*first), found, strict=True):
        assert_close(a, b[0])
    # Of one argument alone, and the other way round: a gradient for each of several outputs.
    rest = several[0] | {"B": None}
    run = functools.partial(function, form=form)
    out = torch.func.vmap(lambda B: run(**(rest | {"B": B})))(stacked["B"])
    assert_close(out[1], run(**(rest | {"B": stacked["B"][1]})))
    small = DRAW[function](9, 3, 2, 2)
    jacobian = torch.func.jacrev(lambda x: run(**(small | {"x": x})))(small["x"])
    x = small["x"]
    expected = torch.autograd.functional.jacobian(lambda x: run(**(small | {"x": x})), x)
    assert_close(jacobian, expected)


@every_form
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compile(function, form):
    torch.compiler.reset()
    loss = loss_of(function, form)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    arguments = DRAW[function](6, 18, leading=LEADING[2])
    if function is state_space_dual:
        arguments["log_decay"].clamp_(min=-9)
    with mock.patch.multiple(engine, SEGMENT=1, FEWEST=5):
        found, expected = gradients(compiled, arguments), gradients(loss, arguments)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_operators_keep_torchs_contract():
    w, delta, A, B, C, _, h = draw_selective(7, 6, leading=LEADING[1]).values()
    A = A.mT.expand(2, 3, 4)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    forward = (w, delta, A, B, C, h.mT, 4)
    torch.library.opcheck(engine._forward, forward, test_utils=utils)
    y, starts, h_end = engine._forward(*forward)
    backward = (y, h_end, w, delta, A, B, C, starts, 4)
    torch.library.opcheck(engine._backward, backward, test_utils=utils)


# NaN, and arguments.
