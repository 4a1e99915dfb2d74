"""A decay for each channel on the tensor cores, against float64: values, gradients, bytes, races.

What it has in common with one decay for all is tested in test_decay_pipelined.py.
"""

import contextlib
import functools
import sys

import numpy as np
import pytest
import torch

from lesson_code.cupy import _kernels, _launches, decay_pipelined, emulator
from lesson_code.cupy.decay import _check_kernel
from tests.cupy import test_decay, test_decay_pipelined
from tests.cupy.test_decay import error
from tests.cupy.test_decay_pipelined import (
    TOLERANCE,
    WAITS,
    assert_gradients,
    assert_recurrence,
    assert_the_same_in_any_order,
    every_dtype,
    everything,
    gradients,
    right,
    run,
)

FILE = decay_pipelined.CHANNELS_FILE
# N around the 64 tokens of a chunk and the powers of two below; widths around those of tiles.
SIZES = [
    ("bfloat16", 0, 5, 3),
    ("float16", 1, 5, 33),
    ("float16", 65, 33, 64),
    ("bfloat16", 200, 64, 64),
    ("bfloat16", 70, 128, 100),
]
every_size = pytest.mark.parametrize(("dtype", "N", "D", "M"), SIZES)


drawn = functools.partial(test_decay_pipelined.drawn, kind="channel")


@pytest.fixture
def segments(monkeypatch):
    """A GPU that cuts a sequence of one head into segments of 64 tokens."""
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((9, 0), 8))
    monkeypatch.setattr(_launches, "MIN_SEGMENT", 48)


# ---- Values. -------------------------------------------------------------------------------------


@every_size
def test_it_is_the_recurrence(device, dtype, N, D, M):
    assert_recurrence(device, drawn(dtype, N, D, M), dtype)


@pytest.mark.parametrize(("dtype", "N", "D", "M"), SIZES[:-1])
def test_gradients(dtype, N, D, M):
    assert_gradients(drawn(dtype, N, D, M), dtype)


def test_gradients_of_wide_keys_are_made_by_halves():
    dtype, *size = SIZES[-1]
    with emulator.trace() as counted:
        assert_gradients(drawn(dtype, *size), dtype)
    assert counted.kernels["channel_backward"].launches == 2


@every_dtype
def test_a_closed_gate_forgets_exactly(dtype):
    """What was there is large: nothing of it may be left, in the channels whose gates closed."""
    large = np.float32(1e12 if dtype == "float16" else 1e30)
    q, k, v, g, S = drawn(dtype, 140, 5, 3)
    g[:] = -0.1
    for c, t in enumerate((21, 3, 15, 20, 0)):  # behind token 21 all have been
        g[:, t, c] = -np.inf
    out, last = run(q, k, v, g, S * large)
    theirs, end = right(q, k, v, g, np.zeros_like(S))
    assert np.abs(out[:, 20].astype(np.float32)).max() > 1e6  # one was open until then
    assert error(out[:, 21:], theirs[:, 21:]) < TOLERANCE[dtype]
    assert error(last, end) < TOLERANCE[dtype]
    closed = g == -np.inf
    d_log = gradients([q, k, v, g, S], dtype)[0][3].numpy()
    assert (d_log[closed] == 0).all() and (d_log[~closed] != 0).mean() > 0.95


def test_segments_of_a_sequence(segments, dtype="float16"):
    arrays = drawn(dtype, 330, 20, 40, leading=(1,))
    arrays[3][:] *= 0.05
    arrays[3][0, 100, ::2] = -np.inf
    with emulator.trace() as counted:
        for mine, theirs in zip(run(*arrays), right(*arrays), strict=True):
            assert error(mine, theirs) < TOLERANCE[dtype]
        assert_gradients(arrays, dtype)
    counted.check()
    assert counted.kernels["channel_walk"].blocks == 2 * 6
    assert counted.kernels["channel_backward"].blocks == 6


def test_logarithms_in_16_bits():
    q, k, v, g, S = drawn("bfloat16", 70, 64, 64)
    half = g.astype(q.dtype)
    wide = half.astype(g.dtype)
    for mine, same in zip(run(q, k, v, half, S), run(q, k, v, wide, S), strict=True):
        np.testing.assert_array_equal(mine, same)
    found, same = (decay_pipelined.backward(v, S, q, k, v, g, S) for g in (half, wide))
    for x, y in zip(found, same, strict=True):
        np.testing.assert_array_equal(x, y.astype(x.dtype))


def test_gradients_have_no_gaps_where_keys_have():
    """Rows of 33 numbers cut out of 40 begin at multiples of 16 bytes; their gradients do not."""
    q, k, v, g, S = drawn("float16", 65, 33, 64)
    wide = [np.zeros((2, 65, 40), x.dtype) for x in (q, k, g)]
    for x, own in zip(wide, (q, k, g), strict=True):
        x[..., :33] = own
    q, k, g = (x[..., :33] for x in wide)
    found = decay_pipelined.backward(v, S, q, k, v, g, S)
    same = decay_pipelined.backward(v, S, q.copy(), k.copy(), v, g.copy(), S)
    for x, y in zip(found, same, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- Bytes, threads and barriers. ----------------------------------------------------------------


def test_bytes(monkeypatch):
    """Every number once forward; backward k, v and g once more, and a state each 64 tokens."""
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((9, 0), 4))
    N, D = 256, 64
    q, k, v, g, S = drawn("bfloat16", N, D, D, leading=(1,))
    with emulator.trace() as forward:
        run(q, k, v, g, S)
    with emulator.trace() as gradients_too:
        decay_pipelined.backward(v, S, q, k, v, g, S)
    counts = forward.kernels["channel_walk"]
    logs, state, images = 4 * N * D, 4 * D * D, N // 64 * 2 * D * D
    assert counts.global_load_bytes == 2 * 3 * N * D + logs + state
    assert counts.global_store_bytes == 2 * N * D + state
    states, walk = (gradients_too.kernels[f"channel_{name}"] for name in ("states", "backward"))
    assert states.global_load_bytes == 2 * 2 * N * D + logs + state
    assert states.global_store_bytes == images
    assert walk.global_load_bytes == 2 * 4 * N * D + logs + state + images
    assert walk.global_store_bytes == 2 * 3 * N * D + logs + state
    assert min(x.sector_efficiency for x in (counts, states, walk)) > 0.8


def test_no_result_depends_on_the_order_of_threads(segments):
    assert_the_same_in_any_order("channel")


COUNT = len(WAITS.findall(_kernels.text(FILE)))


@pytest.mark.parametrize("number", [None, *range(COUNT)])
def test_a_barrier_that_is_missing_is_caught(leave_out, segments, number):
    leave_out(FILE, number, WAITS)
    with emulator.trace() as counted:
        everything("channel")
    with contextlib.nullcontext() if number is None else pytest.raises(emulator.RaceError):
        counted.check()


# ---- Which kernel it is. -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "D", "M", "why"),
    [
        ((8, 0), 128, 128, ""),
        ((8, 6), 64, 128, ""),
        ((8, 6), 65, 64, "more shared memory than the 101376 bytes of this GPU for D = 65"),
    ],
)
def test_which_kernel_is_taken(monkeypatch, capability, D, M, why):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(capability))
    q, _, v, g, _ = drawn("bfloat16", 17, D, M)
    assert _check_kernel(None, q, v, g) == ("chunked" if why else "pipelined")
    if why:
        with pytest.raises(ValueError, match=f"kernel='pipelined' needs {why}"):
            _check_kernel("pipelined", q, v, g)


def test_gradients_of_wide_values_take_shorter_chunks_or_the_other_kernel(monkeypatch):
    plans = [
        decay_pipelined.plan("BACKWARD", *widths, "bfloat16", gpu, per_channel=True)
        for gpu in (_kernels.Gpu((9, 0)), _kernels.Gpu((8, 6)))
        for widths in ((64, 128), (64, 64))
    ]
    assert [one and one.chunk for one in plans] == [32, 64, None, 32]
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((8, 6)))
    q, k, v, g, S = drawn("bfloat16", 17, 65, 100)
    assert decay_pipelined.backward(v, S, q, k, v, g, S) is None


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")
def test_rows_that_begin_anywhere_spill_nothing():
    """With logarithms in float32, which take more registers; all else is in registers.json."""
    from lesson_code.cupy import nvrtc

    macros = {"BACKWARD": 1, "TYPE": "float16", "LOG": "float", "FEATURES": 64, "COLUMNS": 64}
    macros |= {"ONES": 0, "CHUNK": 64, "STAGES": 3, "ALIGNED": 0}
    compiled = nvrtc.compile_source("sm_90", _kernels.source(FILE), macros, name=FILE)
    (usage,) = compiled.kernels.values()
    assert compiled.warnings == "" and usage.spill_bytes == usage.stack_bytes == 0


# ---- Reading before the memory decays, with a bonus. ---------------------------------------------


def with_bonus(q, k, v, g, u, S, device="cpu"):
    return run(q, k, v, g, S, device, u)


def recurrence_with_bonus(q, k, v, g, u, S):
    return test_decay.recurrence(q, k, v, g.expand(k.shape), u, S)


@every_size
def test_a_bonus(place, dtype, N, D, M):
    arrays = test_decay.draw("bonus", N, D, M, dtype)
    found = with_bonus(*(place.put(x)[0] for x in arrays), device=place.device)
    for mine, theirs in zip(found, test_decay.expected(*arrays), strict=True):
        assert error(place.get(mine), theirs) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "N", "D", "M", "decays"),
    [(*size, None) for size in SIZES[:3]] + [("bfloat16", 70, 20, 33, 1)],  # one is RWKV-5's
)
def test_gradients_with_a_bonus(dtype, N, D, M, decays):
    arrays = test_decay.draw("bonus", N, D, M, dtype)
    mine = list(test_decay.tensors(arrays, dtype))
    mine[3] = torch.from_numpy(arrays[3][..., :decays].astype(np.float32)).requires_grad_()
    with emulator.trace() as counted:
        found = test_decay.gradients(with_bonus, mine)
    own = {name for name in counted.kernels if name.startswith(("channel", "fading"))}
    assert own == set(counted.kernels) or not N
    exact = [x.detach().double().requires_grad_() for x in mine]
    exact = test_decay.gradients(recurrence_with_bonus, exact)
    for x, y, z in zip(found, exact, mine, strict=True):
        assert x.dtype == z.dtype and error(x.double(), y) < 4 * TOLERANCE[dtype]


def test_a_bonus_with_leading_dimensions_of_its_own():
    q, k, v, g, _, S = test_decay.draw("bonus", 20, 5, 3, "float16", leading=(2, 1))
    q, S = q[0, 0], S[:1]
    u = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    out, last = with_bonus(q, k, v, g, u, S)
    full = [np.broadcast_to(x, (2, 4, *x.shape[-2:])) for x in (q, k, v, g, S)]
    right, end = test_decay.expected(*full[:4], u, full[4])
    assert last.shape == (2, 1, 5, 3) and error(last, end[:, :1]) < TOLERANCE["float16"]
    assert error(out, right) < TOLERANCE["float16"]


def test_a_bonus_and_closed_gates():
    """What was there is large: nothing of it may be left, wherever the gate is."""
    for closed in (0, 1, 30, 69):
        arrays = test_decay.draw("bonus", 70, 5, 3, "bfloat16")
        arrays[3][:, :closed] = -0.1
        arrays[3][:, closed] = -np.inf
        arrays[5] *= np.float32(1e30)
        rest = [x[:, closed + 1 :].astype(np.float64) for x in arrays[:4]]
        k, v = (x[:, closed].astype(np.float64) for x in arrays[1:3])
        S = k[..., None] * v[:, None]
        out, last = with_bonus(*arrays)
        right, end = test_decay.expected(*rest, arrays[4], S)
        assert error(out[:, closed + 1 :], right) < TOLERANCE["bfloat16"]
        assert error(last, end) < TOLERANCE["bfloat16"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_bonus_under_transforms():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 20, width).bfloat16() for width in (8, 8, 5, 8))
    tensors = [q, k, v, -g.abs(), torch.randn(8), torch.randn(2, 8, 5)]
    compiled = torch.compile(with_bonus, fullgraph=True, backend="aot_eager")
    for x, y in zip(with_bonus(*tensors), compiled(*tensors), strict=True):
        assert torch.equal(x, y)
    mapped = torch.vmap(with_bonus, (0, 0, 0, 0, None, 0))(*tensors)
    for x, y in zip(with_bonus(*tensors), mapped, strict=True):
        assert torch.equal(x, y)
