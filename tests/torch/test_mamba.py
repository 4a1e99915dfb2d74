"""The selective scan and the state-space dual in torch: the scan's own derivatives and memory.

That every form is its sum is tested in test_definitions.py.
"""

import functools
from unittest import mock

import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import selective_scan, state_space_dual
from lesson_code.torch.engines import selective as engine
from tests.arrays import assert_close, normal, numbers, tensors
from tests.operators import CONTRACTS, draw_all

every_selective_form = pytest.mark.parametrize("form", ["recurrent", "scan"])
FORMS = [
    (f, form) for f in (selective_scan, state_space_dual) for form in CONTRACTS[f.__name__].forms
]


def draw(function, N=7, seed=0, leading=(), dtype=torch.float64):
    """Arguments by name, with a state."""
    name = function.__name__
    values = draw_all(name, N, seed, dtype, leading)
    return dict(zip([*CONTRACTS[name].axes, "initial_state"], values, strict=True))


draw_selective = functools.partial(draw, selective_scan)


def numpys(arguments):
    return {name: numbers(x) for name, x in arguments.items()}


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


@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
@pytest.mark.parametrize("length", [1, 7, 16, 100])
def test_gradients_of_the_scan_are_those_of_the_loop(leading, length):
    arguments = draw_selective(37, leading=leading)
    expected = gradients(loss_of(selective_scan, "recurrent"), arguments)
    with mock.patch.multiple(engine, SEGMENT=1, FEWEST=length):
        found = gradients(loss_of(selective_scan, "scan"), arguments)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


@every_selective_form
def test_strong_decay(form):
    """No inf or NaN in value or gradient, and what the definition says."""
    arguments = draw_selective(9, dtype=torch.float32)
    arguments["A"] = torch.full_like(arguments["A"], -1e30)
    arguments["delta"] = arguments["delta"].clamp(0.5, 2)
    expected = reference.selective_scan(**numpys(arguments), return_state=True)
    found = selective_scan(**arguments, form=form, return_state=True)
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y, torch.float32)
    exact = {name: x.double() for name, x in arguments.items()}
    wanted = gradients(loss_of(selective_scan, "recurrent"), exact)
    for x, y in zip(gradients(loss_of(selective_scan, form), arguments), wanted, strict=True):
        assert x.isfinite().all()
        assert_close(x, y, torch.float32, 1e-4)


@every_selective_form
def test_large_and_zero_steps(form):
    """delta 0 leaves the state, delta 1e4 forgets it; both have a gradient."""
    arguments = draw_selective(6)
    arguments["delta"][:3], arguments["delta"][3:] = 0, 1e4
    y, h = selective_scan(**arguments, form=form, return_state=True)
    x, _, _, B, C, D, h_0 = arguments.values()
    assert_close(y[:3], C[:3] @ h_0.mT + D * x[:3])
    assert_close(h, 1e4 * x[-1][:, None] * B[-1])
    _, d_delta, *_ = gradients(loss_of(selective_scan, form), arguments)
    assert d_delta.isfinite().all() and (d_delta[:3] != 0).all()


@pytest.mark.parametrize("function", [selective_scan, state_space_dual])
def test_second_derivatives(function):
    arguments = inside(draw(function, 4))
    arrays = [x.requires_grad_() for x in arguments.values()]

    def run(*args):
        return function(**dict(zip(arguments, args, strict=True)), form="recurrent")

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
    shapes = ((N, E), (N, E), (E, K), (N, K), (N, K), (E,), (E, K))
    x, delta, A, B, C, D, h = tensors(*normal(*shapes), dtype=torch.float32)
    delta, A = delta.abs(), -A.abs()
    leaves = [x.requires_grad_() for x in (x, delta, A, B, C, D, h)]

    def run(form):
        y = selective_scan(*leaves[:6], form=form, initial_state=leaves[6])
        torch.autograd.grad(y.sum(), leaves)

    with mock.patch.object(engine, "SEGMENT", 2**16):
        assert peak_bytes(lambda: run("scan")) < 0.4 * 4 * N * E * K
    assert peak_bytes(lambda: run("recurrent")) > 2 * 4 * N * E * K


@pytest.mark.parametrize(("function", "form"), [(selective_scan, "scan"), (state_space_dual, None)])
def test_vmap_and_grad(function, form):
    """Each argument mapped, A and D too, as in modules that are stacked."""
    several = [draw(function, 6, seed, (2,)) for seed in range(3)]
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
    small = draw(function, 3)
    jacobian = torch.func.jacrev(lambda x: run(**(small | {"x": x})))(small["x"])
    x = small["x"]
    expected = torch.autograd.functional.jacobian(lambda x: run(**(small | {"x": x})), x)
    assert_close(jacobian, expected)


def test_operators_keep_torchs_contract():
    w, delta, A, B, C, _, h = draw_selective(6, leading=(2,)).values()
    A, h = A.mT.expand(2, 3, 4), h.expand(2, 4, 3)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    forward = (w, delta, A, B, C, h.mT, 4)
    torch.library.opcheck(engine._forward, forward, test_utils=utils)
    y, starts, h_end = engine._forward(*forward)
    backward = (y, h_end, w, delta, A, B, C, starts, 4)
    torch.library.opcheck(engine._backward, backward, test_utils=utils)
