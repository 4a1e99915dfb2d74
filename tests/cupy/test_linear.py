"""The causal scan's kernels against float64: outputs, states, gradients, and their use of memory.

They run in the emulator, and on a GPU as well where there is one.
"""

import contextlib
import re
import sys
from functools import partial
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lesson_code.numpy as reference
import lesson_code.torch as lt
from lesson_code.cupy import _arrays, _kernels, _launches, causal_scan, choose_kernel, emulator
from tests.cupy.conftest import Place

KERNELS = ("recurrent", "chunked", "tensor_core", "pipelined", "tiled")
BFLOAT16 = ml_dtypes.bfloat16
# Outputs are rounded once; those on tensor cores also round the states and scores they multiply.
TOLERANCE = {
    ("recurrent", "float32"): 2e-6,
    ("chunked", "float32"): 2e-6,
    ("tiled", "float32"): 2e-6,
    **{(kernel, "float16"): 4e-4 for kernel in ("recurrent", "chunked")},
    **{(kernel, "bfloat16"): 3e-3 for kernel in ("recurrent", "chunked")},
    **{(kernel, "float16"): 6e-4 for kernel in ("tensor_core", "pipelined")},
    **{(kernel, "bfloat16"): 4e-3 for kernel in ("tensor_core", "pipelined")},
}
NUMPY = Place("numpy", "cpu")
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_case = pytest.mark.parametrize(("kernel", "dtype"), TOLERANCE, ids="-".join)
both_normalizations = pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])


def error(actual, expected):
    """Relative to the size of the whole array, in float64."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def numpy_dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name).type


def draw(rng, dtype, N, C, M, leading=((), (), ())):
    """Positive features, as the sums over them are then well conditioned, and any values."""
    shapes = ((N, C), (N, C), (N, M))
    q, k, v = (rng.random((*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True))
    return tuple(x.astype(numpy_dtype(dtype)) for x in (q + 0.1, k + 0.1, v - 0.5))


def expected(q, k, v, normalize, state=None):
    """The recurrence of lesson_code.numpy in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if state is not None:
        state = reference.LinearAttentionState(*(x.astype(np.float64) for x in state))
    return reference.linear_attention(
        q, k, v, feature_map=reference.identity, causal=True, normalize=normalize,
        form="recurrent", initial_state=state, return_state=True,
    )  # fmt: skip


on_cpu = partial(causal_scan, device="cpu")
by_torch = partial(lt.linear_attention, feature_map=lt.identity, causal=True, form="masked")


def assert_right(arrays, kernel, normalize, state=None, *, keep=True, place=NUMPY, tolerance=None):
    """Outputs, and the last state if it is kept, are those of the recurrence."""
    q, k, v = arrays
    tolerance = tolerance or (TOLERANCE[kernel, q.dtype.name], 2e-6)
    kind = lt.LinearAttentionState if place.library == "torch" else reference.LinearAttentionState
    given = None if state is None else kind(*place.put(*state))
    result = causal_scan(
        *place.put(q, k, v), normalize=normalize, initial_state=given, return_state=keep,
        kernel=kernel, device=place.device,
    )  # fmt: skip
    out, last = result if keep else (result, ())
    right, end = expected(q, k, v, normalize, state)
    assert _arrays.library(out) == place.library and _arrays.c_type(out) == _arrays.c_type(q)
    assert out.shape == right.shape and error(place.get(out), right) < tolerance[0]
    assert not keep or type(last) is kind
    for mine, theirs in zip(last, end, strict=False):
        assert mine.shape == theirs.shape and mine.dtype in (np.float32, torch.float32)
        assert error(place.get(mine), theirs) < tolerance[1]
    if given is not None:  # what was given is left alone
        assert all((place.get(x) == y).all() for x, y in zip(given, state, strict=True))


def draw_state(rng, C, M, leading=()):
    shapes = (*leading, C, M), (*leading, C)
    return reference.LinearAttentionState(*(rng.random(x).astype(np.float32) for x in shapes))


# ---- Values. -------------------------------------------------------------------------------------


# Each kernel and dtype with the usual widths; and other sizes with one dtype for each kernel, as
# every combination is a compilation. Hypothesis draws the small ones, below.
ONE_DTYPE = {"recurrent": "float32", "chunked": "float32", "tensor_core": "bfloat16"}
SIZES = [(63, 64, 64), (200, 20, 33), (130, 80, 130), (40, 0, 3), (40, 3, 0), (40, 0, 0)]
SIZES += [(70, 256, 256), (70, 250, 7), (70, 1, 255), (70, 129, 65)]


@every_case
@both_normalizations
def test_outputs_and_states_of_all_kernels(place, kernel, dtype, normalize):
    check_outputs_and_states(place, kernel, dtype, normalize, 65, 64, 64)


@pytest.mark.parametrize(
    ("kernel", "dtype", "normalize", "N", "C", "M"),
    [(*case, bool(M % 2), N, C, M) for case in ONE_DTYPE.items() for N, C, M in SIZES]
    + [("tensor_core", "bfloat16", False, 70, 144, 64)]  # the widest that takes 64 columns
    + [("pipelined", "bfloat16", bool(M % 2), N, C, M) for N, C, M in (SIZES[1], *SIZES[3:6])]
    + [("pipelined", "bfloat16", True, 70, 128, 130)]
    + [("tiled", "float32", bool(M % 2), N, C, M) for N, C, M in (SIZES[1], *SIZES[3:6])]
    + [("tiled", "float32", True, 70, 128, 130), ("tiled", "float32", False, 70, 130, 65)]
    + [("tiled", "float32", True, 65, 100, 68)],  # rows that are read by 16 bytes, and end early
)
def test_other_sizes(device, kernel, dtype, normalize, N, C, M):
    """With the arrays of one library, as which it is has nothing to do with their size."""
    check_outputs_and_states(device, kernel, dtype, normalize, N, C, M)


def check_outputs_and_states(place, kernel, dtype, normalize, N, C, M):
    rng = np.random.default_rng(N)
    arrays = draw(rng, dtype, N, C, M, ((2,), (2,), (2,)))
    assert_right(arrays, kernel, normalize, keep=False, place=place)
    assert_right(arrays, kernel, normalize, draw_state(rng, C, M, (2,)), place=place)


WIDTHS = st.sampled_from([1, 2, 5, 8, 16])


@pytest.mark.parametrize("kernel", [*ONE_DTYPE, "pipelined", "tiled"])
@given(
    N=st.integers(0, 140),
    C=WIDTHS,
    M=WIDTHS,
    leading=st.sampled_from(
        [
            ((), (), ()),
            ((3,), (3,), (3,)),
            ((2, 1, 2), (1, 3, 1), (2,)),
            ((4,), (), ()),
            ((0,), (0,), (0,)),
            ((), (2, 1), (3,)),
            ((2, 3), (2, 1), (1, 3)),
        ]
    ),
    normalize=st.booleans(),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_awkward_shapes(kernel, N, C, M, leading, normalize, data):
    dtype = "float16" if kernel in ("tensor_core", "pipelined") else "float32"
    rng = np.random.default_rng(N)
    q, k, v = map(np.abs, draw(rng, dtype, N, C, M, leading))  # no sum comes near zero
    state = None
    if data.draw(st.booleans()):
        state = draw_state(rng, C, M, np.broadcast_shapes(*leading[1:]))
    assert_right((q, k, v), kernel, normalize, state)


@pytest.mark.parametrize("kernel", ONE_DTYPE)
def test_layouts_are_read_where_they_are(place, kernel):
    """(B, H, N, D) that lies in memory as (B, N, H, D); and every other number of it: a copy."""
    q, k, v = draw(
        np.random.default_rng(0), ONE_DTYPE[kernel], 70, 48, 24, ((2, 3), (1, 3), (2, 1))
    )
    axes = [0, 2, 1, 3]

    def tokens_first(x):
        put = place.put(np.ascontiguousarray(x.transpose(axes)))[0]
        return put.permute(axes) if place.library == "torch" else put.transpose(axes)

    for step in (1, 2):
        out, _ = expected(q[..., ::step], k[..., ::step], v, True)
        arrays = [tokens_first(x)[..., ::step] for x in (q, k)] + [tokens_first(v)]
        actual = causal_scan(*arrays, normalize=True, kernel=kernel, device=place.device)
        assert error(place.get(actual), out) < TOLERANCE[kernel, ONE_DTYPE[kernel]]


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(x, "float32" if x == "tiled" else "float16") for x in KERNELS]
)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., 1:],  # begins at the second number, 66 bytes from row to row
        lambda x: x[..., ::-1, :],
        lambda x: x.astype(x.dtype.newbyteorder()),
    ],
    ids=["not-16-bytes", "backwards", "byte-order"],
)
def test_views(kernel, dtype, view):
    arrays = draw(np.random.default_rng(0), dtype, 70, 33, 33, ((2,),) * 3)
    assert_right([*map(view, arrays)], kernel, False, keep=False)


def test_which_layouts_are_copied():
    x = np.zeros((2, 3, 5, 8), np.float32)
    kept = [x, x.transpose(0, 2, 1, 3), x[:, ::2], x[:, :, ::-1], x[..., :3], x[0], x[:, :1]]
    for view in kept:
        leading = np.broadcast_shapes(view.shape[:-2], (1,))
        assert _arrays.rows(view, leading).struct["data"] == _arrays.address(view)
        tensor = torch.from_numpy(view.copy())
        assert _arrays.rows(tensor, leading).struct["data"] == tensor.data_ptr()
    repeated = np.broadcast_to(x[:, :1], (2, 64, 5, 8))
    assert _arrays.rows(x[:, :1], (2, 64)).struct["data"] == _arrays.address(repeated)
    copied = [x[..., ::2], x.swapaxes(-1, -2), np.zeros((4, 4, 4, 5, 8), np.float32)[:, :3, :3]]
    for view in copied:
        rows = _arrays.rows(view, view.shape[:-2])
        assert rows.struct["data"] != _arrays.address(view)
        assert (rows.array == view).all()


def test_a_state_without_queries():
    k, v = np.ones((3, 2), np.float32), np.ones((3, 4), np.float32)
    out, state = on_cpu(np.ones((0, 3, 2), np.float32), k, v, return_state=True)
    assert out.shape == (0, 3, 4)
    assert (state.S == 3).all() and state.S.shape == (2, 4) and (state.z == 3).all()


@every_case
@both_normalizations
def test_a_state_is_handed_from_any_kernel_to_any_other(kernel, dtype, normalize):
    q, k, v = draw(np.random.default_rng(0), dtype, 150, 24, 16, ((2,), (2,), (2,)))
    out, last = expected(q, k, v, normalize)
    others = [other for other in KERNELS if (other, dtype) in TOLERANCE]
    state, pieces = None, []
    for begin, end, which in ((0, 70, kernel), (70, 71, others[0]), (71, 150, others[-1])):
        piece, state = on_cpu(
            *(x[:, begin:end] for x in (q, k, v)),
            normalize=normalize,
            initial_state=state,
            return_state=True,
            kernel=which,
        )
        pieces.append(piece)
    assert error(np.concatenate(pieces, axis=1), out) < TOLERANCE[kernel, dtype] + 3e-3 * (
        "16" in dtype
    )
    assert error(state.S, last.S) < 2e-6 and error(state.z, last.z) < 2e-6


@both_normalizations
@pytest.mark.parametrize("processors", [1, 7, 100])
def test_segments_of_a_sequence(monkeypatch, normalize, processors):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(processors=processors))
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 1100, 16, 24)
    state = draw_state(np.random.default_rng(1), 16, 24)
    with emulator.trace() as counted:
        assert_right((q, k, v), "tensor_core", normalize, state)
    segments = counted.kernels["segment_outputs"].blocks
    assert segments == {1: 2, 7: 4, 100: 4}[processors]  # none shorter than 256 tokens
    assert counted.kernels["segment_sums"].blocks == segments


def test_many_heads_are_not_cut():
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 600, 16, 8, ((8,), (8,), (8,)))
    with emulator.trace() as counted:
        on_cpu(q, k, v, kernel="tensor_core")
    assert set(counted.kernels) == {"segment_outputs"}


@pytest.mark.parametrize("kernel", ["recurrent", "chunked"])
def test_a_long_sequence(kernel):
    arrays = draw(np.random.default_rng(0), "float32", 30_000, 3, 2)
    assert_right(arrays, kernel, True, tolerance=(2e-5, 2e-5))


# ---- Numbers that misbehave. ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "scales"),
    [(True, (30, 300, 200)), (False, (1e-3, 300, 200)), (False, (100, 1e-3, 1e-2))],
    ids=["large-scores-and-states", "large-states", "almost-nothing"],
)
@pytest.mark.parametrize("kernel", ["tensor_core", "pipelined"])
def test_float16_numbers_of_any_size(kernel, normalize, scales):
    arrays = draw(np.random.default_rng(0), "float16", 200, 16, 16)
    q, k, v = (x * np.float16(scale) for x, scale in zip(arrays, scales, strict=True))
    largest = np.abs(k.astype(float).T @ v.astype(float)).max()
    assert largest > 65504 or scales[1] < 1  # which is the largest float16
    actual = on_cpu(q, k, v, normalize=normalize, kernel=kernel)
    assert np.isfinite(actual.astype(float)).all()
    assert error(actual, expected(q, k, v, normalize)[0]) < 1e-3


@both_normalizations
@pytest.mark.parametrize("small", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("kernel", ["tensor_core", "pipelined"])
def test_float16_small_queries_beside_a_large_state(kernel, normalize, small):
    """The scores of the chunk and the state before it have scales of their own."""
    q, k, v = draw(np.random.default_rng(0), "float16", 192, 4, 4)
    q, v = (q * np.float16(small)).astype(np.float16), (v + 1) * np.float16(3e4)
    actual = on_cpu(q, k, v, normalize=normalize, kernel=kernel)
    right = expected(q, k, v, normalize)[0]
    assert (np.abs(actual.astype(float) - right) < 2e-3 * np.abs(right) + 1e-7).all()


@every_kernel
def test_an_output_whose_normalizer_is_zero(kernel):
    dtype = "float32" if kernel == "tiled" else "float16"
    q, k, v = draw(np.random.default_rng(0), dtype, 70, 8, 8)
    q[5:9] = 0
    k[0] = 0
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    out = on_cpu(*tensors, normalize=True, kernel=kernel)
    assert (out[5:9] == 0).all() and (out[0] == 0).all()
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][5:9] == 0).all()


@every_kernel
def test_where_nan_goes(kernel):
    dtype = "float32" if kernel == "tiled" else "float16"
    q, k, v = draw(np.random.default_rng(0), dtype, 150, 8, 8, ((2,), (2,), (2,)))
    v[1, 80, 3] = np.nan
    out = on_cpu(q, k, v, kernel=kernel)
    assert np.isfinite(out[0].astype(float)).all()
    assert np.isnan(out[1, 80:, 3]).all()
    assert np.isfinite(out[1, :64].astype(float)).all()
    if kernel == "recurrent":
        assert np.isfinite(out[1, :80].astype(float)).all()


# ---- Gradients. ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*ONE_DTYPE.items(), ("chunked", "bfloat16"), ("tensor_core", "float16")]
    + [("pipelined", "bfloat16"), ("pipelined", "float16"), ("tiled", "float32")],
)
@pytest.mark.parametrize(
    ("normalize", "with_state", "keep"),  # each two of them in all four ways
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
    ids=["mean-from-a-state-keep-it", "mean", "sum-from-a-state", "sum-keep-a-state"],
)
def test_gradients(kernel, dtype, normalize, with_state, keep):
    N, C, M = 150, 20, 33
    leading = ((2, 1), (2, 1), (1, 2))
    rng = np.random.default_rng(N)
    arrays = [*draw(rng, dtype, N, C, M, leading)]
    state = [rng.random((2, 1, C, M)) - 0.5, rng.random((2, 1, C)) + 1]
    weights = [rng.normal(size=shape) for shape in ((2, 2, N, M), (2, 2, C, M), (2, 2, C))]

    def loss(out, last):
        grad = torch.from_numpy(weights[0]).to(out.dtype)  # what reaches the output, rounded alike
        total = (out.double() * grad.double()).sum()
        if keep:
            for x, weight in zip(last, weights[1:], strict=True):
                total = total + (x.double() * torch.from_numpy(weight)).sum()
        return total

    def run(function, tensors):
        initial = lt.LinearAttentionState(*tensors[3:]) if with_state else None
        out = function(*tensors[:3], normalize=normalize, initial_state=initial, return_state=keep)
        out, last = out if keep else (out, None)
        return torch.autograd.grad(loss(out, last), tensors, allow_unused=True)

    tensors = [torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)) for x in arrays]
    tensors += [torch.from_numpy(x).float() for x in state] if with_state else []
    tensors = [x.requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]

    by_kernel = partial(causal_scan, kernel=kernel, device="cpu")
    actual, right = run(by_kernel, tensors), run(by_torch, exact)
    # A gradient of a normalized output is a difference of two terms, each rounded once more.
    tolerance = 2 * TOLERANCE[kernel, dtype] * (2 if normalize else 1)
    for name, mine, theirs, x in zip("qkvSz", actual, right, tensors, strict=False):
        if theirs is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine.shape == x.shape and mine.dtype == x.dtype
        assert error(mine.double(), theirs) < tolerance, name


def test_gradient_of_a_sum_which_is_one_number_repeated():
    q, k, v = (torch.rand(2, 70, 8, requires_grad=True) for _ in range(3))
    mine = torch.autograd.grad(on_cpu(q, k, v).sum(), (q, k, v))
    right = torch.autograd.grad((torch.tril(q @ k.mT) @ v).sum(), (q, k, v))
    for a, b in zip(mine, right, strict=True):
        assert error(a, b) < 2e-6


def test_gradients_are_scans_with_time_reversed():
    """What the book derives, with arrays: dq = scan(g, v, k), dk and dv backwards in time."""
    q, k, v = draw(np.random.default_rng(0), "float32", 90, 12, 8)
    g = np.random.default_rng(1).normal(size=(90, 8)).astype(np.float32)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(on_cpu(*tensors), tensors, torch.from_numpy(g))

    def back(x):
        return x[::-1]

    dq = on_cpu(g, v, k)
    dk = back(on_cpu(back(v), back(g), back(q)))
    dv = back(on_cpu(back(k), back(q), back(g)))
    for mine, theirs in zip((dq, dk, dv), right, strict=True):
        assert error(mine, theirs) < 1e-6


# ---- Barriers, and memory. ------------------------------------------------------------------


WAITS = re.compile(r"__sync(threads|warp)\(\);|wait_for_groups<[^>]*>\(\);|end_group\(\);")


def waits():
    """(kernel, file, number in the file) of each wait, and for each kernel with None left out."""
    seen = set()
    for file in ("linear.cu", "walk.h", "pipelined.cu", "tiled.cu"):
        source = _kernels.text(file)
        for number, match in enumerate(WAITS.finditer(source)):
            section = re.findall(r"^#ifdef (\w+)$", source[: match.start()], re.MULTILINE)
            other = "tiled" if file == "tiled.cu" else "pipelined"
            kernel = section[-1].lower() if file == "linear.cu" else other
            if kernel not in seen:
                yield kernel, file, None
            seen.add(kernel)
            yield kernel, file, number


@pytest.mark.parametrize(("kernel", "file", "number"), list(waits()))
def test_a_wait_that_is_missing_is_caught(leave_out, kernel, file, number):
    """Each is needed: without a barrier a race is found, and without a wait an early access."""
    leave_out(file, number, WAITS)
    mistake = pytest.raises((emulator.RaceError, RuntimeError))
    with contextlib.nullcontext() if number is None else mistake, emulator.trace() as counted:
        if kernel == "pipelined":
            _walk_both_ways()
        else:
            N = 600 if kernel == "tensor_core" else 70  # several segments, or chunks
            dtype = "float32" if kernel == "tiled" else "float16"
            q, k, v = draw(np.random.default_rng(0), dtype, N, 32, 16)
            for normalize in (False, True):
                on_cpu(q, k, v, normalize=normalize, kernel=kernel)
        counted.check()


def _walk_both_ways():
    """Every barrier of pipelined.cu: in float16, normalized, and where sequences are cut."""
    gpu = _kernels.Gpu(processors=2)
    for dtype, N, normalize, alone in (
        ("float16", 200, False, 0),
        ("bfloat16", 200, True, 0),
    ):
        rng = np.random.default_rng(0)
        arrays = draw(rng, dtype, N, 64, 64)
        with mock.patch.object(_kernels, "gpu", lambda array: gpu):
            with mock.patch.object(_launches, "ALONE", alone):
                q, k, v = (x.requires_grad_() for x in Place("torch", "cpu").put(*arrays))
                on_cpu(q, k, v, normalize=normalize, kernel="pipelined").sum().backward()


@pytest.mark.parametrize("order", ["reverse", 1])
def test_the_pipelined_kernel_in_any_order_of_threads(order):
    with emulator.order(order):
        assert_right(draw(np.random.default_rng(0), "bfloat16", 150, 64, 64), "pipelined", True)


# One processor cuts nothing, so that no segment can stand alone.
@pytest.mark.parametrize(("processors", "alone"), [(1, 0), (2, 0), (3, 0), (2, 1024), (3, 1024)])
@both_normalizations
def test_cut_walks_make_the_same_gradients(monkeypatch, processors, alone, normalize):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((9, 0), processors))
    monkeypatch.setattr(_launches, "ALONE", alone)
    monkeypatch.setattr(_launches, "INTERVAL", 64)  # a state for every chunk
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 170, 16, 24)
    tensors = [x.requires_grad_() for x in Place("torch", "cpu").put(q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    weights = torch.randn(170, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    with emulator.trace() as counted:
        out = on_cpu(*tensors, normalize=normalize, kernel="pipelined")
        mine = torch.autograd.grad((out.double() * weights.double()).sum(), tensors)
    counted.check()
    assert counted.kernels["backward_walk"].blocks == processors
    assert ("sums_of_segments" in counted.kernels) == (processors > 1 and not alone)
    right = by_torch(*exact, normalize=normalize)
    right = torch.autograd.grad((right * weights.double()).sum(), exact)
    for a, b in zip(mine, right, strict=True):
        assert error(a.double(), b) < 8e-3 * (2 if normalize else 1)


def test_a_state_that_runs_backwards_begins_anew(monkeypatch):
    """Rounding of what comes later does not reach the gradients before a saved state."""
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 256, 16, 16)
    k, v = k.copy(), v.copy()
    k[200], v[200] = 2**40, 2**40  # next to which all earlier states are lost
    errors = {}
    for interval in (64, 2048):
        monkeypatch.setattr(_launches, "INTERVAL", interval)
        monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(processors=1))
        tensors = [x.requires_grad_() for x in Place("torch", "cpu").put(q, k, v)]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        (mine,) = torch.autograd.grad(on_cpu(*tensors, kernel="pipelined").sum(), tensors[:1])
        (right,) = torch.autograd.grad(by_torch(*exact, normalize=False).sum(), exact[:1])
        errors[interval] = error(mine[:128].double(), right[:128])
    assert errors[64] < 8e-3 < errors[2048]


def test_bytes_that_the_pipelined_kernel_moves(monkeypatch):
    """Every number once, forward and backward: 4 vectors and 7, and the saved states."""
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((9, 0), processors=2))
    heads, N, C = 2, 192, 64
    arrays = draw(np.random.default_rng(0), "bfloat16", N, C, C, ((heads,),) * 3)
    tensors = [x.requires_grad_() for x in Place("torch", "cpu").put(*arrays)]
    with emulator.trace() as counted:
        out = on_cpu(*tensors, kernel="pipelined")
        out.backward(torch.ones_like(out))
    vector, state = heads * N * C * 2, heads * C * C * 4
    forward, backward = (counted.kernels[f"{way}_walk"] for way in ("forward", "backward"))
    assert forward.global_load_bytes == 3 * vector
    assert forward.global_store_bytes == vector + state
    assert backward.global_load_bytes == 4 * vector + state
    assert backward.global_store_bytes == 3 * vector
    assert forward.bank_conflicts == backward.bank_conflicts == 0
    # Scores are 10 tiles of a chunk; each product of 64 x 64 x 64 numbers is 128 products of tiles.
    # Of the last band, the pair of tiles that sticks out of the triangle is computed as well.
    scores, read, whole = 8 * 10, 8 * 10, 128
    assert forward.tile_products == heads * N // 64 * (scores + read + 2 * whole)
    assert backward.tile_products == heads * N // 64 * (2 * scores + 3 * read + 5 * whole)


def test_bytes_that_the_tiled_kernel_moves():
    """Every number once; and a load of 16 bytes by a warp takes two passes, by its pairs."""
    heads, N, C = 8, 128, 64
    q, k, v = draw(np.random.default_rng(0), "float32", N, C, C, ((heads,),) * 3)
    with emulator.trace() as counted:
        on_cpu(q, k, v, kernel="tiled")
    (counts,) = counted.kernels.values()
    vector = heads * N * C * 4
    assert counts.global_load_bytes == 3 * vector and counts.global_store_bytes == vector
    assert counts.sector_efficiency == 1
    loads = [x for x in counted.accesses if x.space == "shared" and x.kind == "load"]
    wide = [x for x in loads if x.bytes == 16]
    assert wide and all(x.passes == 2 * x.accesses for x in wide)


def test_segments_of_the_tiled_kernel(monkeypatch):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(processors=4))
    q, k, v = draw(np.random.default_rng(0), "float32", 1100, 16, 24)
    with emulator.trace() as counted:
        assert_right((q, k, v), "tiled", True, draw_state(np.random.default_rng(1), 16, 24))
    counted.check()
    assert counted.kernels["tiled_walk"].blocks == counted.kernels["tiled_sums"].blocks == 4


@pytest.mark.parametrize("order", ["reverse", 1])
def test_the_tiled_kernel_in_any_order_of_threads(order):
    with emulator.order(order):
        assert_right(draw(np.random.default_rng(0), "float32", 70, 64, 64), "tiled", True)


@both_normalizations
def test_bytes_that_the_tensor_core_kernel_moves(normalize):
    """Every number of q, k and v once, every output once, eight numbers at a time."""
    heads, N, C, M = 8, 320, 64, 64
    q, k, v = draw(np.random.default_rng(0), "bfloat16", N, C, M, ((heads,),) * 3)
    with emulator.trace() as counted:
        on_cpu(q, k, v, normalize=normalize, kernel="tensor_core")
    (counts,) = counted.kernels.values()
    assert counts.global_load_bytes == heads * N * (2 * C + M) * 2
    assert counts.global_store_bytes == heads * N * (M * 2 + 4 * normalize)  # and the normalizer
    assert counts.line_efficiency > 0.97
    assert counts.bank_conflicts == 0
    # A chunk has scores of 1 + 2 + 3 + 4 tiles of 16 x 16; each also meets the values. Then there
    # are reading from the state and writing to it.
    tiles, columns = 10, (M + 16 * normalize) // 8
    per_chunk = tiles * (C // 16 * 2 + columns) + 2 * 4 * (C // 16) * columns
    assert counts.tile_products == heads * N // 64 * per_chunk


def test_bytes_of_the_other_kernels():
    heads, N, C, M = 2, 128, 64, 64
    q, k, v = draw(np.random.default_rng(0), "float32", N, C, M, ((heads,),) * 3)
    numbers, state = heads * N * (2 * C + M), heads * C * M
    with emulator.trace() as counted:
        on_cpu(q, k, v, kernel="recurrent")
        on_cpu(q, k, v, kernel="chunked")
    recurrent, states, outputs = (
        counted.kernels[name] for name in ("recurrent", "chunk_states", "chunk_outputs")
    )
    assert recurrent.global_load_bytes == 4 * numbers
    assert recurrent.global_store_bytes == 4 * heads * N * M
    chunks = N // 64
    assert states.global_load_bytes == 4 * heads * N * (C + M)
    assert states.global_store_bytes == 4 * chunks * state
    assert outputs.global_load_bytes == 4 * (numbers + chunks * state)
    assert outputs.global_store_bytes == 4 * heads * N * M
    assert recurrent.line_efficiency == 1
    for counts in (recurrent, states, outputs):
        assert counts.sector_efficiency == 1  # half a warp writes a row of 64 bytes, two sectors


# ---- The choice, and what is refused. ------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "N", "capability", "kernel"),
    [
        ("float32", 100, None, "tiled"),
        ("float32", 100, (7, 5), "chunked"),
        ("float16", 100, None, "pipelined"),
        ("bfloat16", 100, None, "pipelined"),
        ("float16", 100, (7, 5), "tensor_core"),
        ("bfloat16", 100, (7, 5), "chunked"),
        ("float16", 100, (7, 0), "chunked"),
        ("float16", 100, (12, 0), "pipelined"),
        ("float16", 1, None, "recurrent"),
    ],
)
def test_what_is_chosen(monkeypatch, dtype, N, capability, kernel):
    x = np.zeros((N, 33), numpy_dtype(dtype))
    assert choose_kernel(x, x, x, device="cpu", capability=capability) == kernel
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu(capability or (8, 0)))
    launched = []
    monkeypatch.setattr(
        _kernels, "run", lambda file, macros, name, *others, **options: launched.append(name)
    )
    on_cpu(x, x, x)
    functions = {"chunked": "chunk_outputs", "tensor_core": "segment_outputs"}
    functions |= {"pipelined": "forward_walk", "tiled": "tiled_walk"}
    assert functions.get(kernel, kernel) in launched


@pytest.mark.parametrize("capability", [(7,), (7.5, 0), (-1, 0), "8.0", [7, 5]])
def test_what_is_no_capability(capability):
    with pytest.raises(ValueError, match="capability must be two integers like"):
        choose_kernel(X, X, X, device="cpu", capability=capability)


X, T = np.ones((20, 4), np.float32), torch.ones(20, 4)
WIDE = np.ones((20, 257), np.float32)
STATE = reference.LinearAttentionState(np.zeros((4, 4), np.float32), np.zeros(4, np.float32))
HALF_STATE = STATE._replace(z=np.zeros(4, np.float16))
TORCH_STATE = lt.LinearAttentionState(torch.zeros(4, 4), torch.zeros(4))
FLOATS = "must have dtype float32, float16 or bfloat16, got"


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((X, X, X), {"device": "gpu"}, ValueError, "device must be 'cuda' or 'cpu', got 'gpu'"),
        ((X, X, X), {"device": "cuda"}, TypeError, "q must be a CuPy array.*numpy.*device='cpu'"),
        ((T, T, T), {"device": "cuda"}, ValueError, "q must be a CuPy.*on cpu.*device='cpu'"),
        (([1.0], X, X), {}, TypeError, "q must be a NumPy array or a torch CPU tensor"),
        ((T.to_sparse(), T, T), {}, TypeError, "q must be a dense tensor.*sparse_coo"),
        ((X, X, X), {"kernel": ["chunked"]}, ValueError, "kernel must be None or one of"),
        ((X, T, X), {}, TypeError, "k must be a numpy.ndarray, as q is, got torch.Tensor"),
        ((X.astype(float), X, X), {}, TypeError, f"q {FLOATS} float64"),
        ((X.astype(int), X, X), {}, TypeError, f"q {FLOATS} int64"),
        ((X, X.astype(np.float16), X), {}, TypeError, "k must have the dtype of q, float32"),
        ((X, X[:, :3], X), {}, ValueError, r"k must have shape \(..., N, D\), \(..., 20, 4\)"),
        ((X, X, X[:5]), {}, ValueError, r"v must have shape \(..., N, M\), \(..., 20, 4\)"),
        ((X[:5], X, X), {}, ValueError, r"k must have shape \(..., N, D\), \(..., 5, 4\)"),
        ((X[0], X, X), {}, ValueError, r"q must have shape \(..., N, D\)"),
        ((np.stack([X] * 3), np.stack([X] * 2), X), {}, ValueError, "broadcast"),
        ((WIDE, WIDE, X), {}, ValueError, "q must be at most 256 wide, got 257"),
        ((X, X, WIDE), {}, ValueError, "v must be at most 256 wide, got 257"),
        ((X, X, X), {"kernel": "fast"}, ValueError, "kernel must be None or one of 'recurrent'"),
        ((X, X, X), {"kernel": "tensor_core"}, ValueError, "needs float16 or bfloat16, got float"),
        (
            (X.astype(np.float16),) * 3,
            {"kernel": "tiled"},
            ValueError,
            "kernel='tiled' needs float32, got float16",
        ),
        ((X, X, X), {"normalize": 1}, TypeError, "normalize must be True or False, got 1"),
        ((X, X, X), {"initial_state": X}, TypeError, "must be a LinearAttentionState, got nda"),
        ((X, X, X[:, :3]), {"initial_state": STATE}, ValueError, r"S of .* \(..., 4, 3\), got"),
        (
            (X, X, X),
            {"initial_state": TORCH_STATE},
            TypeError,
            "S of .* must be a numpy.ndarray, as k is",
        ),
        ((X, X, X), {"initial_state": HALF_STATE}, TypeError, "z of .* dtype float32, got float16"),
    ],
)
def test_what_is_refused(arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        causal_scan(*arguments, **({"device": "cpu"} | options))


def test_bfloat16_on_a_gpu_without_such_tensor_cores(monkeypatch):
    monkeypatch.setattr(_kernels, "gpu", lambda array: _kernels.Gpu((7, 5)))
    x = np.ones((100, 8), BFLOAT16)
    with pytest.raises(ValueError, match="needs float16 on a GPU of compute capability 7.5"):
        on_cpu(x, x, x, kernel="tensor_core")


def test_cupy_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install .*cuda12"):
        _kernels.cupy()


# ---- linear_attention(backend="cupy"). -----------------------------------------------------------


@both_normalizations
def test_linear_attention_by_the_kernels(normalize):
    q, k, v = (torch.randn(2, 90, 8, requires_grad=True) for _ in range(3))
    state = lt.LinearAttentionState(torch.rand(2, 8, 8), torch.rand(2, 8))
    options = {"causal": True, "normalize": normalize}
    options |= {"initial_state": state, "return_state": True}
    out, last = lt.linear_attention(q, k, v, backend="cupy", **options)
    right, end = lt.linear_attention(q, k, v, **options)
    mine, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, right))
    for a, b in zip((out, *last, *mine), (right, *end, *theirs), strict=True):
        assert a.dtype == b.dtype and error(a.detach(), b.detach()) < 2e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "jax"}, "backend must be None, 'torch' or 'cupy', got 'jax'"),
        ({"backend": "cupy", "causal": False}, "backend='cupy' needs causal=True"),
        ({"backend": "cupy", "form": "masked"}, "form must be None when backend='cupy'"),
    ],
)
def test_backends_that_cannot_serve(options, message):
    with pytest.raises(ValueError, match=message):
        lt.linear_attention(T, T, T, **({"causal": True} | options))


def test_backend_torch_is_the_default():
    one = lt.linear_attention(T, T, T, causal=True, backend="torch")
    assert torch.equal(one, lt.linear_attention(T, T, T, causal=True))
