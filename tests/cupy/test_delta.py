"""The kernels of the delta rule, against float64: values, gradients, bytes, races, registers.

They run in the emulator, and on a GPU as well where there is one.
"""

import contextlib
import functools
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
import lesson_code.torch as lt
from lesson_code.cupy import _arrays, _kernels, delta_scan, emulator
from lesson_code.cupy.delta import LENGTH, _backward_bytes, _macros, _shared_bytes, backward
from lesson_code.cupy.delta import forward as delta_forward
from tests.cupy.conftest import BARRIER
from tests.cupy.test_decay import TOLERANCE, draw_decays, error, numpy_dtype

# N around the 16 tokens of a chunk; D and M around the multiples of 16 that the kernels think in.
SIZES = [
    ("head", (0, 5, 3)),
    ("head", (1, 5, 33)),
    ("head", (17, 5, 3)),
    ("head", (65, 5, 33)),
    ("channel", (16, 5, 3)),
    ("channel", (65, 48, 5)),
]
every_size = pytest.mark.parametrize(("kind", "size"), SIZES, ids=str)
every_kind = pytest.mark.parametrize("kind", ["head", "channel"])
halves = pytest.mark.parametrize(("kind", "dtype"), [("head", "float16"), ("channel", "bfloat16")])

on_cpu = functools.partial(delta_scan, device="cpu")


def draw(kind, N, D, M, dtype="float32", leading=(2,), seed=0):
    """[q, k, v, beta, log_decay, initial state], with keys of length 1 and betas from 0 to 2."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(*leading, N, width)) for width in (D, D, M))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    some, odd = rng.uniform(0, 2, size=k.shape[:-1]), rng.choice([0, 1, 2], size=k.shape[:-1])
    beta = np.where(rng.random(k.shape[:-1]) < 0.3, odd, some)
    g = draw_decays(rng, (*leading, N, D if kind == "channel" else 1))
    S = rng.normal(size=(*leading, D, M)).astype(np.float32)
    gates = numpy_dtype("float32" if dtype == "bfloat16" else dtype)  # may be finer than the rest
    return [
        *(x.astype(numpy_dtype(dtype)) for x in (q, k, v)),
        *(x.astype(gates) for x in (beta, g)),
        S,
    ]


def expected(q, k, v, beta, g, S):
    """The recurrences of lesson_code.numpy in float64."""
    q, k, v, beta, g, S = (x.astype(np.float64) for x in (q, k, v, beta, g, S))
    options = {"form": "recurrent", "initial_state": S, "return_state": True}
    if g.shape[-1] == 1:
        return reference.gated_delta_rule(q, k, v, beta, g[..., 0], **options)
    return reference.kimi_delta_attention(q, k, v, beta, g, **options)


def run(place, *arrays):
    given = place.put(*arrays)
    *rows, state = given
    options = {"initial_state": state, "return_state": True, "device": place.device}
    out, last = delta_scan(*rows, **options)
    assert _arrays.library(out) == place.library and _arrays.c_type(out) == _arrays.c_type(rows[0])
    for x, y in zip(given, arrays, strict=True):  # what was given is left alone
        assert np.array_equal(place.get(x), y.astype(place.get(x).dtype))
    return place.get(out), place.get(last)


# ---- Values. -------------------------------------------------------------------------------------


@every_size
def test_it_is_the_recurrence(device, kind, size):
    arrays = draw(kind, *size)
    for mine, theirs in zip(run(device, *arrays), expected(*arrays), strict=True):
        assert error(mine, theirs) < TOLERANCE["float32"]


@halves
def test_half_precision_is_only_how_numbers_are_stored(place, kind, dtype):
    arrays = draw(kind, 40, 5, 3, dtype)
    right, end = expected(*arrays)
    out, last = run(place, *arrays)
    assert error(out, right) < TOLERANCE[dtype] and error(last, end) < TOLERANCE["float32"]


def test_without_decays_and_without_a_state():
    q, k, v, beta, _, _ = draw("head", 20, 5, 3)
    right = reference.delta_rule(*(x.astype(float) for x in (q, k, v, beta)))
    assert error(on_cpu(q, k, v, beta), right) < 1e-6


def test_leading_dimensions_and_layouts():
    q, k, v, beta, g, _ = draw("head", 20, 5, 3, leading=(2, 3))
    S = np.random.default_rng(1).normal(size=(3, 5, 3)).astype(np.float32)
    k, beta, g = k[:1], beta[:, :1], g[0, 0]
    turned = [np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3) for x in (q, k, v)]
    late = np.asfortranarray(beta)
    full = [np.broadcast_to(x, (2, 3, *x.shape[-2:])) for x in (q, k, v)]
    gates = np.broadcast_to(beta, (2, 3, 20)), np.broadcast_to(g, (2, 3, 20, 1))
    right, end = expected(*full, *gates, np.broadcast_to(S, (2, 3, 5, 3)))
    out, last = on_cpu(*turned, late, g, initial_state=S, return_state=True)
    assert error(out, right) < 1e-6 and error(last, end) < 1e-6


def test_a_state_has_no_axis_that_only_queries_have():
    q, k, v, beta, g, S = draw("head", 20, 5, 3)
    rest, options = (k[0], v[0], beta[0], g[0]), {"initial_state": S[0], "return_state": True}
    out, last = on_cpu(q, *rest, **options)
    assert out.shape == (2, 20, 3) and last.shape == (5, 3)
    none, same = on_cpu(q[:0], *rest, **options)
    assert none.shape == (0, 20, 3)
    np.testing.assert_array_equal(last, same)


@every_kind
def test_split_anywhere_and_hand_the_state_on(kind):
    *rows, S = draw(kind, 40, 5, 3)
    whole, final = on_cpu(*rows, initial_state=S, return_state=True)
    for t in (0, 1, 16, 23, 40):
        head, state = on_cpu(*(x[:, :t] for x in rows), initial_state=S, return_state=True)
        tail, last = on_cpu(*(x[:, t:] for x in rows), initial_state=state, return_state=True)
        assert error(np.concatenate([head, tail], axis=1), whole) < 1e-6
        assert error(last, final) < 1e-6


# ---- What people get wrong. ----------------------------------------------------------------------


def test_the_last_value_of_a_key_stays():
    """40 times the same key, with β = 1: each error is the step from one value to the next."""
    v = np.random.default_rng(0).integers(-9, 10, size=(2, 40, 3)).astype(np.float32)
    k = np.zeros((2, 40, 5), np.float32)
    k[..., 2] = 1
    np.testing.assert_array_equal(on_cpu(k, k, v, np.ones((2, 40), np.float32)), v)


def test_reflections_keep_every_length():
    """With β = 2 and keys of length 1 a state is mirrored: 2000 times, and as long as before."""
    q, k, v, _, _, S = draw("head", 2000, 5, 3, leading=())
    beta = np.full(2000, 2, np.float32)
    arrays = [q, k, 0 * v, beta, np.zeros((2000, 1), np.float32), S]
    out, last = on_cpu(*arrays[:-1], initial_state=S, return_state=True)
    right, end = expected(*arrays)
    assert error(out, right) < 1e-5 and error(last, end) < 1e-5  # lengths of keys are rounded alike
    assert abs(np.linalg.norm(end) / np.linalg.norm(S) - 1) < 1e-4


@every_kind
def test_a_closed_gate_forgets_exactly(kind):
    """What was there is 1e30: nothing of it may be left."""
    q, k, v, beta, g, S = draw(kind, 40, 5, 3)
    v[:, :20] *= np.float32(1e30)
    g[:] = -0.1
    g[:, 21] = -np.inf
    S = S * np.float32(1e30)
    out, last = on_cpu(q, k, v, beta, g, initial_state=S, return_state=True)
    rest = [x[:, 21:].copy() for x in (q, k, v, beta, g)]
    right, end = expected(*rest, np.zeros_like(S))
    assert error(out[:, 21:], right) < 1e-6 and error(last, end) < 1e-6


@every_kind
def test_nan_reaches_what_depends_on_it_alone(kind):
    for spoiled in range(5):
        *rows, S = draw(kind, 40, 5, 3)
        rows[3][:], rows[4][:] = 0.5, -0.1
        rows[spoiled][1, 21] = np.nan
        bad = np.isnan(on_cpu(*rows, initial_state=S))
        assert not bad[0].any() and not bad[1, :21].any() and bad[1, 21].any()
        if spoiled == 0:
            assert not bad[1, 22:].any()


# ---- Gradients. ----------------------------------------------------------------------------------


def tensors(arrays):
    """Leaves of the same dtypes."""
    for x in arrays:
        wide = torch.from_numpy(x.astype(np.float32))
        yield wide.to(getattr(torch, x.dtype.name)).requires_grad_()


def recurrence(q, k, v, beta, g, S):
    options = {"form": "recurrent", "initial_state": S, "return_state": True}
    if g.shape[-1] == 1:
        return lt.gated_delta_rule(q, k, v, beta, g[..., 0], **options)
    return lt.kimi_delta_attention(q, k, v, beta, g, **options)


def scan(*arrays):
    *rows, S = arrays
    return on_cpu(*rows, initial_state=S, return_state=True)


def gradients(function, arrays, seed=0):
    """Of a loss that has outputs and the last state in it, all weights of which bfloat16 holds."""
    rng, loss = np.random.default_rng(seed), 0.0
    for x in function(*arrays):
        weights = torch.from_numpy(rng.integers(-8, 9, size=x.shape) / 8)
        loss = loss + (x.double() * weights).sum()
    return torch.autograd.grad(loss, arrays)


def assert_gradients(arrays, dtype="float32"):
    mine = list(tensors(arrays))
    exact = [x.detach().double().requires_grad_() for x in mine]
    found, right = gradients(scan, mine), gradients(recurrence, exact)
    for x, y, z in zip(found, right, mine, strict=True):
        assert x.dtype == z.dtype and x.shape == z.shape and x.isfinite().all()
        assert error(x.double(), y) < 2 * TOLERANCE[dtype]
    return found


@every_size
def test_gradients(kind, size):
    assert_gradients(draw(kind, *size))


def test_wide_heads():
    """As wide as they are in large models, in values and gradients."""
    arrays = draw("head", 17, 128, 40, leading=(1,))
    for mine, theirs in zip(scan(*tensors(arrays)), expected(*arrays), strict=True):
        assert error(mine.detach(), theirs) < TOLERANCE["float32"]
    assert_gradients(arrays)


@halves
def test_gradients_of_half_precision(kind, dtype):
    assert_gradients(draw(kind, 40, 5, 3, dtype), dtype)


@every_kind
def test_gradients_of_broadcast_arrays(kind):
    q, k, v, beta, g, S = draw(kind, 20, 5, 3, leading=(2, 2))
    arrays = list(tensors([q, k[:1], v, beta[:, :1], g[0], S[0]]))
    exact = [x.detach().double().requires_grad_() for x in arrays]
    for x, y in zip(gradients(scan, arrays), gradients(recurrence, exact), strict=True):
        assert error(x, y) < 2e-6


@every_kind
@pytest.mark.parametrize("log", [-100.0, -20.0, -np.inf])
def test_gradients_where_almost_nothing_is_left(kind, log):
    """Those of the decays are tiny, and each right to six digits: no large terms have cancelled."""
    arrays = draw(kind, 40, 5, 3)
    arrays[4][:] = log
    d_log = assert_gradients(arrays)[4]
    if log == -np.inf:
        assert (d_log == 0).all()


# ---- Bytes, threads and barriers. ----------------------------------------------------------------


@every_kind
def test_bytes(kind):
    """By hand, for one head with 2 chunks of tokens, and 2 blocks of channels and of columns."""
    N, D, M = 32, 32, 48
    q, k, v, beta, g, S = draw(kind, N, D, M, leading=(1,))
    beta, decays, chunks, tiles, blocks = beta[..., None], g.shape[-1], N // LENGTH, D // 16, 2
    with emulator.trace() as counted:
        delta_forward(q, k, v, beta, g, S)
        backward(v, S, q, k, v, beta, g, S)
    outputs, starts, values, walk = (
        counted.kernels[name] for name in ("forward", "chunk_starts", "values_backward", "backward")
    )
    # A block of columns reads queries, keys and gates for itself, and its share of the values once.
    gates, state = blocks * N * (1 + decays), D * M
    assert outputs.global_load_bytes == 4 * (blocks * N * 2 * D + gates + N * M + state)
    assert outputs.global_store_bytes == 4 * (N * M + state)
    assert starts.global_load_bytes == 4 * (blocks * N * D + gates + N * M + state)
    assert starts.global_store_bytes == 4 * (N * M + chunks * state)
    assert values.global_load_bytes == outputs.global_load_bytes
    assert values.global_store_bytes == 4 * N * M
    # A block of channels reads errors, their gradients and those of the outputs for itself.
    own_decays = N * (D if kind == "channel" else tiles)
    read = N * (2 * D + tiles * (3 * M + 1)) + own_decays
    assert walk.global_load_bytes == 4 * (read + chunks * state + state)
    assert walk.global_store_bytes == 4 * (N * (2 * D + tiles) + own_decays + state)
    assert outputs.barriers == starts.barriers == values.barriers == 6 * chunks * blocks
    assert walk.barriers == 4 * chunks * tiles


def everything(kind):
    """Outputs, states and gradients."""
    arrays = list(tensors(draw(kind, 40, 5, 3)))
    return [*scan(*arrays), *gradients(scan, arrays)]


@every_kind
def test_no_result_depends_on_the_order_of_threads(kind):
    first = everything(kind)
    for order in ("reverse", 1, 2):
        with emulator.order(order):
            for a, b in zip(first, everything(kind), strict=True):
                assert torch.equal(a, b)


BARRIERS = len(BARRIER.findall(_kernels.text("delta.cu")))


@pytest.mark.parametrize("number", [None, *range(BARRIERS)])
def test_a_barrier_that_is_missing_is_caught(leave_out, number):
    """Each barrier is needed: without it a race is found, and with all of them there is none."""
    leave_out("delta.cu", number)
    q, k, v, beta, g, S = draw("channel", 20, 5, 3, leading=(1,))
    beta = beta[..., None]
    with emulator.trace() as counted:
        delta_forward(q, k, v, beta, g, S)
        backward(v, S, q, k, v, beta, g, S)
    with contextlib.nullcontext() if number is None else pytest.raises(emulator.RaceError):
        counted.check()


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_100"])
def test_it_compiles_for_gpus_without_a_spill(architecture):
    """Float16 beside decays in float32; all else is in registers.json, see test_nvrtc.py."""
    from lesson_code.cupy import nvrtc

    x, gates = np.zeros((1, 128), np.float16), np.zeros((1, 1), np.float32)
    macros, source = _macros(x, gates, gates, 128, 128), _kernels.source("delta.cu")
    compiled = nvrtc.compile_source(architecture, source, macros, name="delta.cu")
    assert compiled.warnings == ""
    for usage in compiled.kernels.values():
        assert usage.spill_bytes == usage.stack_bytes == 0
        assert 256 * usage.registers <= 65_536


def test_the_largest_block_fits_a_turing_gpu():
    x = np.zeros((1, 256), np.float32)
    macros = _macros(x, x, x, 256, 256)
    assert max(_shared_bytes(macros), _backward_bytes(macros)) <= 64 * 1024


# ---- What is refused. ----------------------------------------------------------------------------

X, G = np.ones((20, 4), np.float32), -np.ones((20, 4), np.float32)
B, WIDE = np.ones(20, np.float32), np.ones((20, 257), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X, X, X, B, X), {}, ValueError, "log_decay must be at most 0, got 1.0"),
        ((X, X, X, B, G[:, :3]), {}, ValueError, r"log_decay must have shape \(..., N, D\), "),
        ((X, X, X, B, G[:5, :1]), {}, ValueError, r"log_decay must have shape \(..., N, 1\), "),
        ((X, X, X, B, B), {}, ValueError, r"log_decay must have .*, got \(20,\)"),
        ((X, X, X, B, -0.5), {}, TypeError, "log_decay must be a NumPy array"),
        ((X, X, X, B, G.astype(float)), {}, TypeError, "log_decay must have dtype float32"),
        ((X, X, X, X), {}, ValueError, r"beta must have shape \(..., N\), .* got \(20, 4\)"),
        ((X, X, X, 0.5), {}, TypeError, "beta must be a NumPy array"),
        ((X, X[:, :3], X, B), {}, ValueError, r"k must have shape \(..., N, D\)"),
        ((X, X, WIDE, B), {}, ValueError, "v must be at most 256 wide, got 257"),
        ((WIDE, WIDE, X, B), {}, ValueError, "q must be at most 256 wide, got 257"),
        ((X, X, X, B), {"initial_state": X}, ValueError, r"initial_state must .*\(..., 4, 4\),"),
        ((X, X, X, B), {"return_state": 1}, TypeError, "return_state must be True or False, got 1"),
        ((X, X, X, B), {"device": "gpu"}, ValueError, "device must be 'cuda' or 'cpu', got 'gpu'"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        delta_scan(*arguments, **({"device": "cpu"} | options))


# ---- backend="cupy". -----------------------------------------------------------------------------

OPERATORS = {
    "delta_rule": lambda q, k, v, beta: (q, k, v, beta),
    "gated_delta_rule": lambda q, k, v, beta: (q, k, v, beta, -torch.rand(2, 20)),
    "kimi_delta_attention": lambda q, k, v, beta: (q, k, v, beta, -torch.rand(2, 20, 5)),
    "gated_delta_product": lambda q, k, v, beta: (
        q[:, ::2], *(x.unflatten(1, (10, 2)) for x in (k, v, beta)), -torch.rand(2, 10)
    ),
}  # fmt: skip
every_operator = pytest.mark.parametrize("name", OPERATORS)


def call(name):
    torch.manual_seed(0)
    arrays = (torch.from_numpy(x) for x in draw("head", 20, 5, 3)[:4])
    return [x.detach().requires_grad_() for x in OPERATORS[name](*arrays)]


@every_operator
def test_operators_by_the_kernels(name, monkeypatch):
    function, state, arrays = getattr(lt, name), torch.randn(2, 5, 3), call(name)
    exact = [x.detach().double().requires_grad_() for x in arrays]
    launch = mock.Mock(wraps=_kernels.run)
    monkeypatch.setattr(_kernels, "run", launch)
    out, last = function(*arrays, backend="cupy", initial_state=state, return_state=True)
    assert [call.args[2] for call in launch.call_args_list] == ["forward"]
    options = {"initial_state": state.double(), "return_state": True, "form": "recurrent"}
    right, end = function(*exact, **options)
    assert error(out.detach(), right.detach()) < 1e-6 and error(last.detach(), end.detach()) < 1e-6
    found = torch.autograd.grad(out.sum() + last.sum(), arrays)
    for x, y in zip(found, torch.autograd.grad(right.sum() + end.sum(), exact), strict=True):
        assert error(x, y) < 2e-6


@every_operator
def test_backends_that_cannot_serve(name):
    function, arrays = getattr(lt, name), call(name)
    with pytest.raises(ValueError, match="backend must be None, 'torch' or 'cupy', got 'jax'"):
        function(*arrays, backend="jax")
    with pytest.raises(ValueError, match="form must be None when backend='cupy', got 'recurrent'"):
        function(*arrays, backend="cupy", form="recurrent")
    assert torch.equal(function(*arrays, backend="torch"), function(*arrays))
    with pytest.raises(TypeError, match="must have dtype float32, float16 or bfloat16, got float6"):
        function(*(x.detach().double() for x in arrays), backend="cupy")
