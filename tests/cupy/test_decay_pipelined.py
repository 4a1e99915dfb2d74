"""A decay on the tensor cores, against float64: values, gradients, bytes, races, registers."""

import contextlib
import re
import sys

import numpy as np
import pytest
import torch

import lesson_code.torch as lt
from lesson_code.cupy import _kernels, _launches, decay_pipelined, decaying_scan, emulator
from lesson_code.cupy.decay import _check_kernel, backward
from tests.cupy import test_decay
from tests.cupy.test_decay import draw, error, expected

TOLERANCE = {"float16": 5e-4, "bfloat16": 4e-3}
# N around the 64 tokens of a chunk and the 16 of a band; widths around those that tiles have.
SIZES = [
    ("bfloat16", 0, 5, 3),
    ("float16", 1, 5, 33),
    ("bfloat16", 63, 64, 33),
    ("float16", 65, 33, 64),
    ("bfloat16", 200, 64, 64),
    ("bfloat16", 70, 128, 100),
]
every_size = pytest.mark.parametrize(("dtype", "N", "D", "M"), SIZES)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
# One decay for all channels, or one for each: that is decay_channels.cu, of test_decay_channels.py.
every_kind = pytest.mark.parametrize("kind", ["head", "channel"])


def run(q, k, v, g, S, device="cpu", bonus=None):
    """Outputs and the last state, by this kernel alone."""
    options = {"return_state": True, "kernel": "pipelined", "device": device}
    return decaying_scan(q, k, v, g, bonus, initial_state=S, **options)


def scan(q, k, v, g, u, S):
    return run(q, k, v, g, S)


def drawn(dtype, N, D, M, leading=(2,), kind="head"):
    """[q, k, v, log_decay, initial state]: some gates are open, and some are closed."""
    q, k, v, g, _, S = draw(kind, N, D, M, dtype, leading)
    return [q, k, v, g.astype(np.float32), S]


def right(q, k, v, g, S):
    return expected(q, k, v, g, None, S)


def assert_recurrence(place, arrays, dtype):
    out, last = run(*(place.put(x)[0] for x in arrays), device=place.device)
    for mine, theirs in zip((out, last), right(*arrays), strict=True):
        assert error(place.get(mine), theirs) < TOLERANCE[dtype]


def gradients(arrays, dtype):
    """(those of the kernel, those of the recurrence in float64), of q, k, v, log_decay and S."""
    q, k, v, g, S = arrays
    mine = list(test_decay.tensors([q, k, v, g, None, S], dtype))
    mine[3] = torch.from_numpy(g).requires_grad_()
    exact = [None if x is None else x.detach().double().requires_grad_() for x in mine]
    found = test_decay.gradients(scan, mine)
    for x, y in zip(found, [x for x in mine if x is not None], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.isfinite().all()
    return found, test_decay.gradients(test_decay.recurrence, exact)


def assert_gradients(arrays, dtype):
    """That of a decay is one number for a whole state, whose terms may cancel."""
    found, exact = gradients(arrays, dtype)
    for x, y, times in zip(found, exact, (1.5, 1.5, 1.5, 4, 1.5), strict=True):
        assert error(x.double(), y) < times * TOLERANCE[dtype]
    return found


# ---- Values and gradients. -----------------------------------------------------------------------


@every_size
def test_it_is_the_recurrence(place, dtype, N, D, M):
    assert_recurrence(place, drawn(dtype, N, D, M), dtype)


@every_size
def test_gradients(dtype, N, D, M):
    assert_gradients(drawn(dtype, N, D, M), dtype)


@every_kind
@pytest.mark.parametrize("log", [-100.0, -20.0, -np.inf])
def test_gradients_where_almost_nothing_is_left(log, kind):
    """Those of the decays, and of the first state, are tiny, and right: nothing has cancelled."""
    arrays = drawn("float16", 70, 5, 3, kind=kind)
    arrays[3][:] = log
    d_log = assert_gradients(arrays, "float16")[3]
    assert (d_log == 0).all() == (log == -np.inf)


@every_dtype
def test_a_closed_gate_forgets_exactly(dtype):
    """What was there is large: nothing of it may be left, in outputs and in gradients."""
    large = np.float32(1e12 if dtype == "float16" else 1e30)
    q, k, v, g, S = drawn(dtype, 140, 5, 3)
    g[:] = -0.1
    g[:, 21] = g[:, 100] = -np.inf
    out, last = run(q, k, v, g, S * large)
    rest = [x[:, 21:].copy() for x in (q, k, v, g)]
    theirs, end = right(*rest, np.zeros_like(S))
    assert error(out[:, 21:], theirs) < TOLERANCE[dtype] and error(last, end) < TOLERANCE[dtype]
    d_log = gradients([q, k, v, g, S], dtype)[0][3]
    assert (d_log[:, [21, 100]] == 0).all() and (d_log[:, 22:100] != 0).all()


@every_kind
def test_many_tokens_that_hardly_fade(kind):
    q, k, v, g, _ = drawn("bfloat16", 3000, 2, 1, leading=(), kind=kind)
    g[:] = np.log1p(-(2.0**-13))
    S = np.zeros((2, 1), np.float32)
    q, k, v = (abs(x) for x in (q, k, v))
    for mine, theirs in zip(run(q, k, v, g, S), right(q, k, v, g, S), strict=True):
        assert error(mine, theirs) < TOLERANCE["bfloat16"]


@every_kind
def test_nan_reaches_its_own_sequence_alone(kind):
    for spoiled in range(4):
        arrays = drawn("bfloat16", 140, 5, 3, kind=kind)
        arrays[3][:] = -0.1
        arrays[spoiled][1, 70] = np.nan
        bad = np.isnan(run(*arrays)[0].astype(np.float32))
        assert not bad[0].any() and not bad[1, :64].any() and bad[1, 70 + (spoiled == 3)].any()


@pytest.mark.parametrize("processors", [3, 8])
def test_segments_of_a_sequence(monkeypatch, processors, dtype="float16"):
    """However many there are; in 8, the last of them is shorter."""
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((9, 0), processors))
    monkeypatch.setattr(_launches, "MIN_SEGMENT", 48)
    arrays = drawn(dtype, 330, 20, 40, leading=(1,))
    arrays[3][:] *= 0.05
    arrays[3][0, 100] = -np.inf
    with emulator.trace() as counted:
        for mine, theirs in zip(run(*arrays), right(*arrays), strict=True):
            assert error(mine, theirs) < TOLERANCE[dtype]
        assert_gradients(arrays, dtype)
    counted.check()
    segments = -(-330 // (128 if processors == 3 else 64))
    assert counted.kernels["fading_walk"].blocks == 2 * segments
    assert counted.kernels["fading_backward"].blocks == segments


# ---- Bytes, threads and barriers. ----------------------------------------------------------------


def test_bytes():
    """Every number once forward; backward k and v once more, and a state each 64 tokens."""
    N, D = 256, 64
    q, k, v, g, S = drawn("bfloat16", N, D, D, leading=(1,))
    with emulator.trace() as forward:
        run(q, k, v, g, S)
    with emulator.trace() as gradients_too:
        decay_pipelined.backward(v, S, q, k, v, g, S)
    counts = forward.kernels["fading_walk"]
    logs, state, images = 4 * N, 4 * D * D, N // 64 * 2 * D * D
    assert counts.global_load_bytes == 2 * 3 * N * D + logs + state
    assert counts.global_store_bytes == 2 * N * D + state
    assert counts.sector_efficiency > 0.8  # a state is moved in halves of sectors
    states, walk = (gradients_too.kernels[f"fading_{name}"] for name in ("states", "backward"))
    assert states.global_load_bytes == 2 * 2 * N * D + logs + state
    assert states.global_store_bytes == images
    assert walk.global_load_bytes == 2 * 4 * N * D + logs + state + images
    assert walk.global_store_bytes == 2 * 3 * N * D + logs + state
    assert walk.sector_efficiency > 0.9 and states.sector_efficiency > 0.8


def everything(kind="head", dtype="float16"):
    """Outputs, states and gradients."""
    q, k, v, g, S = drawn(dtype, 140, 64, 64, leading=(1,), kind=kind)
    tensors = list(test_decay.tensors([q, k, v, g, None, S], dtype))
    return [*scan(*tensors), *test_decay.gradients(scan, tensors)]


def assert_the_same_in_any_order(kind):
    first = everything(kind)
    for order in ("reverse", 1):
        with emulator.order(order):
            for a, b in zip(first, everything(kind), strict=True):
                assert torch.equal(a, b)


def test_no_result_depends_on_the_order_of_threads():
    assert_the_same_in_any_order("head")


WAITS = re.compile(r"__sync(threads|warp)\(\);\n")
COUNT = len(WAITS.findall(_kernels.text(decay_pipelined.FILE)))


@pytest.mark.parametrize("number", [None, *range(COUNT)])
def test_a_barrier_that_is_missing_is_caught(leave_out, number):
    """Each barrier is needed: without it a race is found, and with all of them there is none."""
    leave_out(decay_pipelined.FILE, number, WAITS)
    with emulator.trace() as counted:
        everything()
    with contextlib.nullcontext() if number is None else pytest.raises(emulator.RaceError):
        counted.check()


def test_messages_name_the_line_of_the_file():
    """Also behind the headers that are included."""
    lines = _kernels.source(decay_pipelined.FILE).splitlines()
    at = max(i for i, line in enumerate(lines) if line.endswith(f'"{decay_pipelined.FILE}"'))
    own = _kernels.text(decay_pipelined.FILE).splitlines()
    assert lines[at + 1 :] == own[int(lines[at].split()[1]) - 1 :]
    assert '#line 1 "tiles.h"' in lines and not any(line.startswith('#include "') for line in lines)


# ---- Which kernel it is. -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "capability", "widths", "N", "why"),
    [
        ("bfloat16", (8, 0), (1, 64, 64), 17, ""),
        ("float16", (12, 0), (1, 128, 128), 17, ""),
        ("float16", (8, 0), (1, 64, 64), 16, None),
        ("float32", (8, 0), (1, 64, 64), 17, "float16 or bfloat16, got float32"),
        ("float16", (7, 5), (1, 64, 64), 17, "compute capability 8.0, got 7.5"),
        ("float16", (8, 0), (1, 129, 64), 17, "at most 128 wide, got 129 and 64"),
    ],
)
def test_which_kernel_is_taken(monkeypatch, dtype, capability, widths, N, why):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(capability))
    decays, D, M = widths
    q, _, v, _, _, _ = draw("head", N, D, M, dtype)
    g = np.zeros((2, N, decays), np.float32)
    assert _check_kernel(None, q, v, g) == ("pipelined" if why == "" else "chunked")
    if not why:
        assert _check_kernel("pipelined", q, v, g) == "pipelined"
        with pytest.raises(ValueError, match="kernel must be None or one of 'chunked', 'pipelin"):
            _check_kernel("fast", q, v, g)
    else:
        with pytest.raises(ValueError, match=f"kernel='pipelined' needs .*{why}"):
            _check_kernel("pipelined", q, v, g)


def test_gradients_of_a_state_that_does_not_fit(monkeypatch):
    """Wide ones on a GPU with little shared memory are those of the other kernel."""
    launched = []
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((8, 6)))
    monkeypatch.setattr(_kernels, "run", lambda file, *others, **options: launched.append(file))
    q, k, v, g, S = drawn("bfloat16", 20, 65, 65, leading=(1,))
    assert decay_pipelined.backward(v, S, q, k, v, g, S) is None and launched == []
    *_, d_log, d_bonus, d_initial = backward(v, S, q, k, v, g, None, S, "pipelined")
    assert set(launched) == {"decay.cu"} and d_bonus is None
    assert d_log.shape == (1, 20, 2) and d_initial.shape == S.shape  # in parts, to be summed


OPERATORS = {
    "retention": lambda q, k, v, g: (q, k, v, torch.tensor([0.5, 0.9]).bfloat16()),
    "state_space_dual": lambda q, k, v, g: (v, g[..., 0], k, q),
    "gated_linear_attention": lambda q, k, v, g: (q, k, v, g),
    "rwkv6": lambda q, k, v, g: (q, k, v, g, torch.randn(2, 5).bfloat16()),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_by_the_kernel(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, width).bfloat16() for width in (5, 5, 3))
    arrays = OPERATORS[name](q, k, v, -torch.rand(2, 70, 5).bfloat16())
    function, state, options = getattr(lt, name), torch.randn(2, 5, 3), {"return_state": True}
    exact = [x.double().requires_grad_() for x in arrays]
    arrays = [x.requires_grad_() for x in arrays]
    with emulator.trace() as counted:
        out, last = function(*arrays, backend="cupy", initial_state=state, **options)
    per_channel = name in ("gated_linear_attention", "rwkv6")
    assert set(counted.kernels) == {"channel_walk" if per_channel else "fading_walk"}
    assert out.dtype == torch.bfloat16 and last.dtype == torch.float32
    theirs, end = function(*exact, form="recurrent", initial_state=state.double(), **options)
    assert error(out.detach().double(), theirs.detach()) < TOLERANCE["bfloat16"]
    assert error(last.detach(), end.detach()) < TOLERANCE["bfloat16"]
    found = torch.autograd.grad(out.float().sum() + last.sum(), arrays)
    for x, y in zip(found, torch.autograd.grad(theirs.sum() + end.sum(), exact), strict=True):
        assert error(x.double(), y) < 2 * TOLERANCE["bfloat16"]


def test_what_compiling_is_told_of_the_operator():
    q, k, v, g, _, S = test_decay.tensors([*draw("head", 70, 5, 3, leading=(2,))], "bfloat16")
    out = decaying_scan(q, k, v, g, initial_state=S, kernel="pipelined", device="cpu")
    inputs = [x.detach() for x in (q, k, v, g)] + [None, S.detach(), "pipelined"]
    operators, check = torch.ops.lesson_code, torch.library.opcheck
    check(operators.decaying_scan.default, inputs)
    made = operators.decaying_scan(*inputs)
    assert torch.equal(made[0], out)
    check(operators.decaying_scan_backward.default, (*made, *inputs))


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")
def test_rows_that_begin_anywhere_spill_nothing(architecture="sm_80", dtype="bfloat16"):
    """All else is in registers.json, see test_nvrtc.py."""
    from lesson_code.cupy import nvrtc

    number = int(architecture.removeprefix("sm_"))
    gpu = _kernels.Gpu((number // 10, number % 10))
    plan = decay_pipelined.plan("BACKWARD", 65, 64, dtype, gpu)
    macros = {"BACKWARD": 1, "TYPE": dtype, "LOG": "float", "FEATURES": 128, "COLUMNS": 64}
    macros |= {"ONES": 0, "CHUNK": plan.chunk, "STAGES": plan.stages, "ALIGNED": 0}
    source = _kernels.source(decay_pipelined.FILE)
    compiled = nvrtc.compile_source(architecture, source, macros, name=decay_pipelined.FILE)
    (usage,) = compiled.kernels.values()
    assert compiled.warnings == "" and usage.spill_bytes == usage.stack_bytes == 0
