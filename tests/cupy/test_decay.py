"""The kernels of memories that fade, against float64: values, gradients, bytes, races, registers.

They run in the emulator, and on a GPU as well where there is one.
"""

import contextlib
import functools
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
import lesson_code.torch as lt
from lesson_code.cupy import _arrays, _kernels, _launches, decaying_scan, emulator
from lesson_code.cupy.decay import LENGTH, _backward_bytes, _forward_bytes, _macros, backward
from tests.cupy.conftest import BARRIER

TOLERANCE = {"float32": 1e-6, "float16": 4e-4, "bfloat16": 3e-3}
# N around the 16 tokens of a chunk; D and M around the multiples of 16 that the kernels think in.
SIZES = [(0, 5, 3), (1, 5, 33), (7, 33, 5), (16, 5, 3), (65, 5, 33), (65, 33, 5)]
KINDS = {"head": (False, False), "channel": (True, False), "bonus": (True, True)}
every_kind = pytest.mark.parametrize("kind", KINDS)
halves = pytest.mark.parametrize(("kind", "dtype"), [("head", "float16"), ("bonus", "bfloat16")])
every_size = pytest.mark.parametrize("size", SIZES, ids=str)

on_cpu = functools.partial(decaying_scan, kernel="chunked", device="cpu")


def error(actual, expected):
    """Relative to the size of the whole array, in float64."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def numpy_dtype(name):
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name).type


def draw_decays(rng, shape):
    """Gates that are open, almost open, half closed, -100, and closed."""
    rates = np.exp(rng.uniform(-8, 1, size=shape))
    odd = rng.choice([0, 100, np.inf], size=shape)
    return -np.where(rng.random(shape) < 0.2, odd, rates)


def draw(kind, N, D, M, dtype="float32", leading=(2,), seed=0):
    """[q, k, v, log_decay, bonus or None, initial state]."""
    per_channel, with_bonus = KINDS[kind]
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(*leading, N, width)) for width in (D, D, M))
    g = draw_decays(rng, (*leading, N, D if per_channel else 1))
    u = rng.normal(size=(*leading[-1:], D)) if with_bonus else None
    S = rng.normal(size=(*leading, D, M)).astype(np.float32)
    return [None if x is None else x.astype(numpy_dtype(dtype)) for x in (q, k, v, g, u)] + [S]


def expected(q, k, v, g, u, S):
    """The recurrences of lesson_code.numpy in float64."""
    q, k, v, g, u, S = (None if x is None else x.astype(np.float64) for x in (q, k, v, g, u, S))
    options = {"form": "recurrent", "initial_state": S, "return_state": True}
    if u is not None:
        return reference.rwkv6(q, k, v, g, u, **options)
    if g.shape[-1] == 1 < k.shape[-1]:
        return reference.state_space_dual(v, g[..., 0], k, q, **options)
    return reference.gated_linear_attention(q, k, v, g, **options)


def run(place, q, k, v, g, u, S):
    given = [None if x is None else place.put(x)[0] for x in (q, k, v, g, u, S)]
    *arrays, state = given
    out, last = decaying_scan(
        *arrays, initial_state=state, return_state=True, kernel="chunked", device=place.device
    )
    assert _arrays.library(out) == place.library and _arrays.c_type(out) == _arrays.c_type(q)
    for x, y in zip(given, (q, k, v, g, u, S), strict=True):  # what was given is left alone
        assert y is None or np.array_equal(place.get(x), y.astype(place.get(x).dtype))
    return place.get(out), place.get(last)


# ---- Values. -------------------------------------------------------------------------------------


@every_kind
@every_size
def test_it_is_the_recurrence(device, kind, size):
    arrays = draw(kind, *size)
    for mine, theirs in zip(run(device, *arrays), expected(*arrays), strict=True):
        assert error(mine, theirs) < TOLERANCE["float32"]


def test_wide_heads(device):
    """The widest that there are: more channels than a state in registers has columns for."""
    arrays = draw("channel", 17, 255, 40, leading=(1,))
    for mine, theirs in zip(run(device, *arrays), expected(*arrays), strict=True):
        assert error(mine, theirs) < TOLERANCE["float32"]


@halves
def test_half_precision_is_only_how_numbers_are_stored(place, kind, dtype):
    arrays = draw(kind, 40, 5, 3, dtype)
    right, end = expected(*arrays)
    out, last = run(place, *arrays)
    assert error(out, right) < TOLERANCE[dtype] and error(last, end) < TOLERANCE["float32"]
    arrays[3] = arrays[3].astype(np.float32)  # decays in float32 beside it
    wide, _ = run(place, *arrays)
    np.testing.assert_array_equal(wide, out)


def test_without_a_state():
    q, k, v, g, u, _ = draw("bonus", 20, 5, 3)
    out = on_cpu(q, k, v, g, u)
    assert error(out, reference.rwkv6(*(x.astype(float) for x in (q, k, v, g, u)))) < 1e-6


def test_leading_dimensions_and_layouts():
    q, k, v, g, u, _ = draw("bonus", 20, 5, 3, leading=(2, 3))
    S = np.random.default_rng(1).normal(size=(3, 5, 3)).astype(np.float32)
    k, g = k[:1], g[:, :1]
    turned = [np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3) for x in (q, k, v)]
    full = [np.broadcast_to(x, (2, 3, *x.shape[-2:])) for x in (q, k, v, g)]
    right, end = expected(*full, np.broadcast_to(u, (2, 3, 5)), np.broadcast_to(S, (2, 3, 5, 3)))
    out, last = on_cpu(*turned, g, u, initial_state=S, return_state=True)
    assert error(out, right) < 1e-6 and error(last, end) < 1e-6


def test_a_state_has_no_axis_that_only_queries_have():
    q, k, v, g, u, S = draw("bonus", 20, 5, 3, leading=(2,))
    k, v, g, S = k[0], v[0], g[0], S[0]
    out, last = on_cpu(q, k, v, g, u, initial_state=S, return_state=True)
    assert out.shape == (2, 20, 3) and last.shape == (5, 3)
    none, same = on_cpu(q[:0], k, v, g, initial_state=S, return_state=True)
    assert none.shape == (0, 20, 3)
    np.testing.assert_array_equal(last, same)


@every_kind
def test_split_anywhere_and_hand_the_state_on(kind):
    q, k, v, g, u, S = draw(kind, 40, 5, 3)
    whole, final = on_cpu(q, k, v, g, u, initial_state=S, return_state=True)
    for t in (0, 1, 16, 23, 40):
        head, state = on_cpu(
            *(x[:, :t] for x in (q, k, v, g)), u, initial_state=S, return_state=True
        )
        tail, last = on_cpu(
            *(x[:, t:] for x in (q, k, v, g)), u, initial_state=state, return_state=True
        )
        assert error(np.concatenate([head, tail], axis=1), whole) < 1e-6
        assert error(last, final) < 1e-6


# ---- Decays of all sizes. ------------------------------------------------------------------------


@every_kind
def test_a_closed_gate_forgets_exactly(kind):
    """What was there is 1e30: nothing of it may be left."""
    q, k, v, g, u, S = draw(kind, 40, 5, 3)
    S = S * np.float32(1e30)
    k[:, :20] *= np.float32(1e20)
    g[:] = -0.1
    g[:, 21] = -np.inf
    out, last = on_cpu(q, k, v, g, u, initial_state=S, return_state=True)
    start = 22 if u is not None else 21
    rest = [x[:, 21:].copy() for x in (q, k, v, g)]
    right, end = expected(*rest, u, np.zeros_like(S))
    assert error(out[:, start:], right[:, start - 21 :]) < 1e-6 and error(last, end) < 1e-6


@every_kind
def test_all_gates_closed(kind):
    """Each token has itself, or with a bonus the one before it and itself."""
    q, k, v, g, u, S = draw(kind, 40, 5, 3)
    g[:] = -np.inf
    arrays = [q, k, v, g, u, S]
    assert error(on_cpu(q, k, v, g, u, initial_state=S), expected(*arrays)[0]) < 1e-6


def test_many_tokens_that_hardly_fade():
    """1 - 2^-13 a token: sums of logarithms keep the digits that products of decays would lose."""
    q, k, v, _, _, _ = draw("head", 5000, 2, 1, leading=())
    q, k, v = np.abs(q), np.abs(k), np.abs(v)
    g = np.full((5000, 1), np.log1p(-(2.0**-13)), np.float32)
    out = on_cpu(q, k, v, g)
    right = reference.retention(*(x.astype(float) for x in (q, k, v)), 1 - 2.0**-13)
    assert error(out, right) < 2e-6


@every_kind
def test_nan_reaches_what_depends_on_it_alone(kind):
    for spoiled in range(4):
        arrays = draw(kind, 40, 5, 3)
        arrays[3][:] = -0.1
        arrays[spoiled][1, 21] = np.nan
        bad = np.isnan(on_cpu(*arrays[:5], initial_state=arrays[5]))
        assert not bad[0].any() and not bad[1, :21].any() and bad[1, 21 + (spoiled == 3) :].any()
        if spoiled == 0:
            assert not bad[1, 22:].any()


# ---- Gradients. ----------------------------------------------------------------------------------


def tensors(arrays, dtype="float32"):
    for x in arrays:
        own = torch.float32 if x is arrays[-1] else getattr(torch, dtype)
        wide = None if x is None else torch.from_numpy(x.astype(np.float32))
        yield None if wide is None else wide.to(own).requires_grad_()


def recurrence(q, k, v, g, u, S):
    options = {"form": "recurrent", "initial_state": S, "return_state": True}
    if u is not None:
        return lt.rwkv6(q, k, v, g, u, **options)
    return lt.gated_linear_attention(q, k, v, g.expand(*g.shape[:-1], k.shape[-1]), **options)


def scan(q, k, v, g, u, S):
    return on_cpu(q, k, v, g, u, initial_state=S, return_state=True)


def gradients(function, arrays, seed=0):
    """Of a loss that has outputs and the last state in it, all weights of which bfloat16 holds."""
    out, last = function(*arrays)
    rng = np.random.default_rng(seed)
    loss = 0.0
    for x in (out, last):
        weights = torch.from_numpy(rng.integers(-8, 9, size=x.shape) / 8)
        loss = loss + (x.double() * weights).sum()
    return torch.autograd.grad(loss, [x for x in arrays if x is not None])


def assert_gradients(arrays, dtype="float32", tolerance=None):
    mine = list(tensors(arrays, dtype))
    exact = [None if x is None else x.detach().double().requires_grad_() for x in mine]
    found, right = gradients(scan, mine), gradients(recurrence, exact)
    given = [x for x in mine if x is not None]
    for x, y, z in zip(found, right, given, strict=True):
        assert x.dtype == z.dtype and x.shape == z.shape and x.isfinite().all()
        assert error(x.double(), y) < (tolerance or 2 * TOLERANCE[dtype])
    return found


@every_kind
@every_size
def test_gradients(kind, size):
    assert_gradients(draw(kind, *size))


@halves
def test_gradients_of_half_precision(kind, dtype):
    assert_gradients(draw(kind, 40, 5, 3, dtype), dtype)


@every_kind
def test_gradients_of_broadcast_arrays(kind):
    q, k, v, g, u, S = draw(kind, 20, 5, 3, leading=(2, 2))
    arrays = list(tensors([q, k[:1], v, g[:, :1], u, S[0]]))
    exact = [None if x is None else x.detach().double().requires_grad_() for x in arrays]

    def expanded(q, k, v, g, u, S):
        return recurrence(q, k, v, g.expand(*q.shape[:-1], g.shape[-1]), u, S)

    for x, y in zip(gradients(scan, arrays), gradients(expanded, exact), strict=True):
        assert error(x, y) < 2e-6


@every_kind
@pytest.mark.parametrize("log", [-100.0, -20.0, -np.inf])
def test_gradients_where_almost_nothing_is_left(kind, log):
    """Those of the decays are tiny, and each right to six digits: no large terms have cancelled."""
    arrays = draw(kind, 40, 5, 3)
    arrays[3][:] = log
    *_, g, u, S = assert_gradients(arrays) if kind == "bonus" else [*assert_gradients(arrays), None]
    d_log = g if kind == "bonus" else u
    if log == -np.inf:
        assert (d_log == 0).all()


def test_once_differentiable():
    arrays = [x.requires_grad_() for x in (torch.rand(20, 4), torch.rand(20, 4), torch.rand(20, 4))]
    out = on_cpu(*arrays, -torch.rand(20, 1))
    (first,) = torch.autograd.grad(out.square().sum(), arrays[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        first.sum().backward()


# ---- Sequences that are cut into segments. -------------------------------------------------------


@every_kind
def test_segments_of_a_sequence(monkeypatch, kind):
    """Of 200 tokens in segments of 64, with a last one that is shorter."""
    monkeypatch.setattr(_launches, "MIN_SEGMENT", 48)
    arrays = draw(kind, 200, 5, 20, leading=(1,))
    with emulator.trace() as counted:
        out, last = on_cpu(*arrays[:5], initial_state=arrays[5], return_state=True)
        right, end = expected(*arrays)
        assert error(out, right) < 1e-6 and error(last, end) < 1e-6
        assert_gradients(arrays)
    assert counted.kernels["forward"].blocks == 3 * 4
    assert counted.kernels["backward"].blocks == 4
    counted.check()


@every_kind
def test_segments_do_not_depend_on_each_other(monkeypatch, kind):
    """However many they are, and whether or not the GPU is full."""
    arrays = draw(kind, 600, 5, 3, leading=(1,))
    results = []
    for processors in (1, 100):
        monkeypatch.setattr(_kernels, "gpu", lambda array, n=processors: _kernels.Gpu((8, 0), n))
        results.append(on_cpu(*arrays[:5], initial_state=arrays[5], return_state=True))
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-6


# ---- Bytes, threads and barriers. ----------------------------------------------------------------


@every_kind
def test_bytes(kind):
    """By hand, for one head with 5 chunks of tokens, 2 blocks of channels and one of columns."""
    N, D, M = 80, 80, 32
    q, k, v, g, u, S = draw(kind, N, D, M, leading=(1,))
    decays, chunks, tiles, spans = g.shape[-1], N // LENGTH, 2, 2
    with emulator.trace() as counted:
        on_cpu(q, k, v, g, u, initial_state=S)
    (counts,) = counted.kernels.values()
    # Every number of q, k, v, g and u once, every output once; the state comes and goes.
    own = D * (kind == "bonus")
    assert counts.global_load_bytes == 4 * (N * (2 * D + M + decays) + D * M + own)
    assert counts.global_store_bytes == 4 * (N * M + D * M)
    assert counts.barriers == 4 * chunks

    with emulator.trace() as counted:
        backward(v, S, q, k, v, g, u, S, "chunked")
    starts, walk = counted.kernels["walk"], counted.kernels["backward"]
    # A block for 64 channels reads v, and the gradients, for itself; so does it one decay for all.
    shared = tiles if kind == "head" else 1
    assert starts.global_load_bytes == 4 * (N * (D + tiles * M + shared * decays) + D * M)
    assert starts.global_store_bytes == 4 * spans * D * M
    read = N * (2 * D + 2 * tiles * M + shared * decays)
    assert walk.global_load_bytes == 4 * (read + spans * D * M + D * M + own)
    grad_logs = tiles if kind == "head" else D
    assert walk.global_store_bytes == 4 * (N * (2 * D + grad_logs) + D * M + own)
    assert starts.barriers == 3 * chunks * tiles
    # Of 4 chunks, and then of one: 2 for each that is walked through again, 1 before, 3 for each.
    assert walk.barriers == (2 * 3 + 1 + 3 * 4 + 1 + 3) * tiles
    assert walk.sector_efficiency > 0.9 and starts.sector_efficiency > 0.9


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_the_backward_pass_moves_about_twice_what_it_must(kind):
    """All sectors that it touches, against every array once, for a head of 64 channels."""
    N, D = 192, 64
    q, k, v, g, u, S = draw(kind, N, D, D, leading=(1,))
    with emulator.trace() as counted:
        backward(v, S, q, k, v, g, u, S, "chunked")
    touched = 32 * sum(one.global_sectors for one in counted.kernels.values())
    least = 4 * (N * (4 * D + 3 * D + 2 * g.shape[-1]) + 3 * D * D)
    assert 1.5 * least < touched < 2.25 * least  # 2.0 of a long sequence


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


@every_kind
def test_no_races(kind):
    with emulator.trace() as counted:
        everything(kind)
    assert set(counted.kernels) == {"forward", "walk", "backward"}
    counted.check()


BARRIERS = len(BARRIER.findall(_kernels.text("decay.cu")))


@pytest.mark.parametrize("number", [None, *range(BARRIERS)])
def test_a_barrier_that_is_missing_is_caught(leave_out, number):
    """Each barrier is needed: without it a race is found, and with all of them there is none."""
    leave_out("decay.cu", number)
    q, k, v, g, u, S = draw("channel", 40, 5, 3, leading=(1,))
    with emulator.trace() as counted:
        backward(v, S, q, k, v, g, u, S, "chunked")
    with contextlib.nullcontext() if number is None else pytest.raises(emulator.RaceError):
        counted.check()


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")
@pytest.mark.parametrize(
    ("architecture", "size", "kind"), [("sm_75", 128, "bonus"), ("sm_100", 64, "head")]
)
def test_it_compiles_for_gpus_without_a_spill(monkeypatch, architecture, size, kind):
    """Float16 beside decays in float32; all else is in registers.json, see test_nvrtc.py."""
    from lesson_code.cupy import nvrtc

    number = int(architecture.removeprefix("sm_"))
    gpu = _kernels.Gpu((number // 10, number % 10))
    monkeypatch.setattr(_kernels, "gpu", lambda array: gpu)
    q, k, v, g, u, _ = draw(kind, 1, size, size, "float16")
    macros, source = _macros(q, g.astype(np.float32), u, k, v), _kernels.source("decay.cu")
    compiled = nvrtc.compile_source(architecture, source, macros, name="decay.cu")
    assert compiled.warnings == ""
    for usage in compiled.kernels.values():
        assert usage.spill_bytes == usage.stack_bytes == 0
        assert usage.shared_bytes <= 48 * 1024 and 256 * usage.registers <= 65_536


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0)])
def test_the_largest_block_fits_every_gpu(monkeypatch, capability):
    gpu = _kernels.Gpu(capability)
    monkeypatch.setattr(_kernels, "gpu", lambda array: gpu)
    spans = []
    for width in (64, 128, 256):
        q, k, v, g, u, _ = draw("channel", 1, width, width, "float16")
        macros = _macros(q, g, u, k, v)
        spans.append(macros["SPAN"])
        assert max(_forward_bytes(macros), _backward_bytes(macros)) <= gpu.shared_bytes
    assert spans[0] == {(7, 5): 16, (8, 0): 64, (8, 6): 32, (9, 0): 64}[capability]


# ---- What is refused. ----------------------------------------------------------------------------

X, G = np.ones((20, 4), np.float32), -np.ones((20, 4), np.float32)
WIDE = np.ones((20, 257), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X, X, X, X), {}, ValueError, "log_decay must be at most 0, got 1.0"),
        ((X, X, X, G[:, :3]), {}, ValueError, r"log_decay must have shape \(..., N, D\), \(..., 2"),
        ((X, X, X, G[:5]), {}, ValueError, r"log_decay must have shape \(..., N, D\), \(..., 20, "),
        ((X, X, X, G[:5, :1]), {}, ValueError, r"log_decay must have shape \(..., N, 1\), \(..., "),
        ((X, X, X, -0.5), {}, TypeError, "log_decay must be a NumPy array"),
        ((X, X, X, G.astype(float)), {}, TypeError, "log_decay must have dtype float32"),
        ((X, X[:, :3], X, G), {}, ValueError, r"k must have shape \(..., N, D\)"),
        ((X, X, X, G, X[0, :3]), {}, ValueError, r"bonus must have shape \(..., D\), \(..., 4\), "),
        ((X, X, WIDE, G), {}, ValueError, "v must be at most 256 wide, got 257"),
        (
            (X, X, X, G),
            {"initial_state": X},
            ValueError,
            r"initial_state must .*\(..., 4, 4\), got",
        ),
        ((X, X, X, G), {"return_state": 1}, TypeError, "return_state must be True or False, got 1"),
        ((X, X, X, G), {"device": "gpu"}, ValueError, "device must be 'cuda' or 'cpu', got 'gpu'"),
    ],
)
def test_what_is_refused(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        decaying_scan(*arguments, **({"device": "cpu"} | options))


# ---- backend="cupy". -----------------------------------------------------------------------------

OPERATORS = {
    "retention": lambda q, k, v: (q, k, v, torch.tensor([0.5, 0.9])),
    "state_space_dual": lambda q, k, v: (v, -torch.rand(2, 20), k, q),
    "gated_linear_attention": lambda q, k, v: (q, k, v, -torch.rand(2, 20, 5)),
    "rwkv6": lambda q, k, v: (q, k, v, -torch.rand(2, 20, 5), torch.randn(2, 5)),
}
every_operator = pytest.mark.parametrize("name", OPERATORS)


def call(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, width) for width in (5, 5, 3))
    return [x.requires_grad_() for x in OPERATORS[name](q, k, v)]


@every_operator
def test_operators_by_the_kernels(name):
    function, state = getattr(lt, name), torch.randn(2, 5, 3)
    arrays = call(name)
    exact = [x.detach().double().requires_grad_() for x in arrays]
    options = {"initial_state": state, "return_state": True}
    with emulator.trace() as counted:
        out, last = function(*arrays, backend="cupy", **options)
    assert set(counted.kernels) == {"forward"}
    assert out.dtype == last.dtype == torch.float32
    options["initial_state"] = state.double()
    right, end = function(*exact, form="recurrent", **options)
    for mine, theirs in ((out, right), (last, end)):
        assert error(mine.detach().double(), theirs.detach()) < TOLERANCE["float32"]
    found = torch.autograd.grad(out.sum() + last.sum(), arrays)
    theirs = torch.autograd.grad(right.sum() + end.sum(), exact)
    for x, y in zip(found, theirs, strict=True):
        assert error(x.double(), y) < 2 * TOLERANCE["float32"]


def test_retention_with_one_number_and_no_tokens():
    q, k, v = (torch.randn(2, 20, width) for width in (5, 5, 3))
    out = lt.retention(q, k, v, 0.9, backend="cupy")
    assert error(out, lt.retention(q.double(), k.double(), v.double(), 0.9)) < 1e-6
    nothing = (x[:, :0] for x in (q, k, v))
    none, last = lt.retention(*nothing, 0.9, backend="cupy", return_state=True)
    assert none.shape == (2, 0, 3) and last.shape == (2, 5, 3)


@every_operator
def test_backends_that_cannot_serve(name):
    function, arrays = getattr(lt, name), call(name)
    with pytest.raises(ValueError, match="backend must be None, 'torch' or 'cupy', got 'jax'"):
        function(*arrays, backend="jax")
    with pytest.raises(ValueError, match="form must be None when backend='cupy', got 'recurrent'"):
        function(*arrays, backend="cupy", form="recurrent")
    assert torch.equal(function(*arrays, backend="torch"), function(*arrays))
    with pytest.raises(TypeError, match="must have dtype float32, float16 or bfloat16, got float6"):
        function(*(x.double() for x in arrays), backend="cupy")
