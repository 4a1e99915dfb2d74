"""What holds for all kernels: torch's transforms, any order of threads, every address."""

import importlib
from functools import partial

import pytest
import torch

import lesson_code.torch as lt
from lesson_code.cupy import causal_scan, decaying_scan, delta_scan, emulator, wkv

plain_scan = partial(lt.linear_attention, feature_map=lt.identity, causal=True, form="masked")


def per_head(q, k, v, log_decay, **options):
    return lt.state_space_dual(v, log_decay[..., 0], k, q, **options)


def gated_delta(q, k, v, beta, log_decay, **options):
    return lt.gated_delta_rule(q, k, v, beta, log_decay[..., 0], **options)


def scan(function, normalize, q, k, v, S, z):
    state = lt.LinearAttentionState(S, z)
    out, last = function(q, k, v, normalize=normalize, initial_state=state, return_state=True)
    return out, *last


def mean(function, k, v, w, u, *state):
    """The outputs, and what the returned state stands for, whatever it is scaled by."""
    out, last = function(k, v, w, u, initial_state=lt.WKVState(*state), return_state=True)
    return out, last.numerator / last.denominator, last.denominator.log() + last.maximum


def decaying(function, *arrays):
    *arrays, state = arrays
    return function(*arrays, initial_state=state, return_state=True)


def draw(kind, N=40, dtype=torch.float32):
    torch.manual_seed(0)
    if kind in ("decay", "bonus"):
        q, k, v = (torch.randn(3, N, width).to(dtype) for width in (8, 8, 5))
        g, u, S = -torch.rand(3, N, 8).to(dtype), torch.randn(3, 8), torch.randn(3, 8, 5)
        return [q, k, v, g[..., :1], S] if kind == "decay" else [q, k, v, g, u.to(dtype), S]
    if kind == "delta":
        q, k, v = (torch.randn(3, N, width).to(dtype) / 2 for width in (8, 8, 5))
        return [q, k, v, torch.rand(3, N), -torch.rand(3, N, 1), torch.randn(3, 8, 5)]
    if kind == "wkv":
        k, v = (torch.randn(3, N, 5).to(dtype) for _ in range(2))
        return [k, v, torch.rand(5) + 0.1, torch.randn(5), *(torch.rand(3, 5) + 0.1 for _ in "abm")]
    q, k, v = (torch.rand(3, N, width).to(dtype) + 0.1 for width in (8, 8, 5))
    return [q, k, v, torch.rand(3, 8, 5), torch.rand(3, 8) + 0.1]


FUNCTIONS = {"scan": causal_scan, "wkv": wkv, "decay": decaying_scan, "delta": delta_scan}
ON_CPU = {name: partial(function, device="cpu") for name, function in FUNCTIONS.items()}
CASES = {  # by a kernel, and by torch
    "normalized": (partial(scan, ON_CPU["scan"], True), partial(scan, plain_scan, True)),
    "sum": (partial(scan, ON_CPU["scan"], False), partial(scan, plain_scan, False)),
    "wkv": (partial(mean, ON_CPU["wkv"]), partial(mean, lt.wkv)),
    "decay": (partial(decaying, ON_CPU["decay"]), partial(decaying, per_head)),
    "bonus": (partial(decaying, ON_CPU["decay"]), partial(decaying, lt.rwkv6)),
    "delta": (partial(decaying, ON_CPU["delta"]), partial(decaying, gated_delta)),
}
every_case = pytest.mark.parametrize("case", CASES)


def loss(function, *tensors):
    return sum(x.float().square().sum() for x in function(*tensors))


def gradients(function, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(function, *leaves), leaves)


# ---- Transforms. ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Of each operator one kind. What compiling is told of the others, opcheck tries below.
@pytest.mark.parametrize("case", ["normalized", "wkv", "bonus", "delta"])
def test_compiled(case):
    torch.compiler.reset()
    by_kernel, _ = CASES[case]
    compiled = torch.compile(by_kernel, fullgraph=True, backend="aot_eager")
    for N in (38, 40):  # the second time with a length that may vary
        tensors = draw(case, N)
        for x, y in zip(by_kernel(*tensors), compiled(*tensors), strict=True):
            assert torch.equal(x, y)
        for x, y in zip(gradients(by_kernel, tensors), gradients(compiled, tensors), strict=True):
            torch.testing.assert_close(x, y)


@every_case
@pytest.mark.parametrize("mapped", [{0}, {1, 3}], ids=str)
def test_vmap_and_func(case, mapped):
    tensors = draw(case)
    in_dims = tuple(0 if i in mapped else None for i in range(len(tensors)))
    stacked = [torch.stack([x, 1.5 * x]) if i in mapped else x for i, x in enumerate(tensors)]
    of_kernel, of_torch = (partial(loss, function) for function in CASES[case])
    every = tuple(range(len(tensors)))
    right = [
        torch.func.grad(of_torch, every)(
            *(x[n] if i in mapped else x for i, x in enumerate(stacked))
        )
        for n in range(2)
    ]
    found = torch.vmap(torch.func.grad(of_kernel, every), in_dims)(*stacked)
    for mine, *theirs in zip(found, *right, strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs), rtol=1e-4, atol=1e-4)

    leaves = [x.requires_grad_() for x in stacked]  # which vmap hides
    found = torch.autograd.grad(torch.vmap(of_kernel, in_dims)(*leaves).sum(), leaves)
    for i, (mine, *theirs) in enumerate(zip(found, *right, strict=True)):
        theirs = torch.stack(theirs) if i in mapped else sum(theirs)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@every_case
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(case, reentrant):
    by_kernel, _ = CASES[case]

    def checkpointed(*tensors):
        return torch.utils.checkpoint.checkpoint(by_kernel, *tensors, use_reentrant=reentrant)

    leaves = [x.requires_grad_() for x in draw(case)]
    loss(checkpointed, *leaves).backward()
    for x, y in zip(leaves, gradients(by_kernel, leaves), strict=True):
        assert torch.equal(x.grad, y)


@every_case
def test_autocast_changes_nothing(case):
    by_kernel, _ = CASES[case]
    expected = gradients(by_kernel, draw(case))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(by_kernel, draw(case))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@every_case
def test_once_differentiable(case):
    leaves = [x.requires_grad_() for x in draw(case)]
    value = loss(CASES[case][0], *leaves)
    (first,) = torch.autograd.grad(value, leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once, in reverse mode"):
        first.sum().backward()


@pytest.mark.parametrize("keep", [True, False])
def test_what_compiling_is_told_of_the_operators(keep):
    for family in ("linear", "wkv", "decay", "delta"):  # an operator is there once its module is
        importlib.import_module(f"lesson_code.cupy._torch_{family}")
    operators, check = torch.ops.lesson_code, torch.library.opcheck
    q, k, v, S, z = draw("scan", 20)
    initial = torch.cat([S, z[..., None]], dim=-1) if keep else None
    for kernel, dtype in (("chunked", q.dtype), ("pipelined", torch.bfloat16)):
        q, k, v = (x.detach().to(dtype) for x in (q, k, v))
        inputs = (q, k, v, initial, keep, keep, kernel)
        check(operators.causal_scan.default, inputs)
        out, last, *kept = operators.causal_scan(*inputs)
        inputs = (out, last if keep else None, q, k, v, initial, out, *kept, keep, kernel)
        check(operators.causal_scan_backward.default, inputs)

    k, v, w, u, *state = draw("wkv", 20, torch.float16)
    inputs = (k, v, w.expand(3, -1), u.expand(3, -1), torch.stack(state, dim=-2))
    check(operators.wkv.default, (*inputs, keep))
    out, last, *kept = operators.wkv(*inputs, True)
    check(operators.wkv_backward.default, (out, last, *inputs, last, *kept))

    *inputs, S = draw("bonus" if keep else "decay", 20)
    inputs = (*inputs, S, "chunked") if keep else (*inputs, None, S, "chunked")
    check(operators.decaying_scan.default, inputs)
    check(operators.decaying_scan_backward.default, (*operators.decaying_scan(*inputs), *inputs))

    q, k, v, beta, g, S = draw("delta", 20)
    inputs = (q, k, v, beta[..., None], g, S)
    check(operators.delta_scan.default, inputs)
    check(operators.delta_scan_backward.default, (*operators.delta_scan(*inputs), *inputs))


# ---- Threads and addresses. ----------------------------------------------------------------------

# Those of memories that fade have the same tests beside them, with each kind of decay.
KERNELS = {
    kernel: partial(scan, partial(ON_CPU["scan"], kernel=kernel), True)
    for kernel in ("recurrent", "chunked", "tensor_core", "pipelined")
} | {"wkv": CASES["wkv"][0]}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def everything(kernel):
    """Forward and backward, with all that there is: outputs, states and gradients."""
    tensors = draw(kernel, 70, torch.float16)
    return [*KERNELS[kernel](*tensors), *gradients(KERNELS[kernel], tensors)]


@every_kernel
def test_no_result_depends_on_the_order_of_threads(kernel):
    first = everything(kernel)
    for order in ("reverse", 1, 2):
        with emulator.order(order):
            for a, b in zip(first, everything(kernel), strict=True):
                assert torch.equal(a, b)


@every_kernel
def test_no_races(kernel):
    with emulator.trace() as counted:
        everything(kernel)
    assert {"split_gradient", "backward"} & set(counted.kernels)
    counted.check()


SANITIZED = """
import numpy as np
from lesson_code.cupy import causal_scan
from lesson_code.cupy import decay, delta
from lesson_code.cupy.wkv import backward, forward

rng = np.random.default_rng(0)
for kernel in ("recurrent", "chunked", "tensor_core", "pipelined"):
    for N, C, M in ((70, 32, 8), (1, 19, 5), (600, 17, 9)):  # one program, or two, for all
        q, k, v = (rng.random((2, N, width)).astype(np.float16) for width in (C, C, M))
        causal_scan(q, k, v, normalize=True, return_state=True, kernel=kernel, device="cpu")
for N, D, G in ((0, 3, 2), (1, 1, 1), (7, 33, 2), (8, 5, 3), (13, 31, 1), (16, 2, 1)):
    k, v, grad = rng.normal(size=(3, G, N, D)).astype("float16")
    w, state = np.ones(D, "float32"), np.ones((G, 3, D), "float32")
    _, *kept = forward(k, v, w, w, state, True)
    backward(grad, state, k, v, w, w, state, *kept)
for N, D, M in ((0, 35, 2), (1, 1, 1), (17, 33, 5)):
    q, k = rng.normal(size=(2, 2, N, D)).astype("float16")
    v, S = rng.normal(size=(2, N, M)).astype("float16"), np.ones((2, D, M), "float32")
    cases = ((D, S[..., 0], "chunked"), (1, None, "chunked"))
    cases += ((1, None, "pipelined"), (D, None, "pipelined"))
    for width, u, kernel in cases:
        g = -np.ones((2, N, width), "float32")
        decay.forward(q, k, v, g, u, S, kernel)
        decay.backward(v, S, q, k, v, g, u, S, kernel)
for N in (0, 1, 17):
    q, k, v, g = (rng.normal(size=(2, N, width)).astype("float32") for width in (5, 5, 3, 5))
    S, g = np.ones((2, 5, 3), "float32"), -abs(g)
    delta.forward(q, k, v, -g[..., :1], g, S)
    delta.backward(v, S, q, k, v, -g[..., :1], g, S)
print("clean")
"""


def test_no_address_is_wrong():
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, with awkward sizes."""
    try:
        result = emulator.sanitized(SANITIZED)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert result.stdout.strip() == "clean", result.stderr[-2000:]
