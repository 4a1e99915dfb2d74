"""The causal scan's kernels against float64: outputs, states, gradients, and their use of memory.

They run in the emulator, and on a GPU as well where there is one.
"""

import re
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lesson_code.numpy as reference
import lesson_code.torch as lt
from lesson_code.cupy import _arrays, _kernels, causal_scan, choose_kernel, emulator

KERNELS = ("recurrent", "chunked", "tensor_core")
BFLOAT16 = ml_dtypes.bfloat16
# Outputs are rounded once; "tensor_core" also rounds the states and scores that it multiplies.
TOLERANCE = {
    ("recurrent", "float32"): 2e-6,
    ("chunked", "float32"): 2e-6,
    **{(kernel, "float16"): 4e-4 for kernel in ("recurrent", "chunked")},
    **{(kernel, "bfloat16"): 3e-3 for kernel in ("recurrent", "chunked")},
    ("tensor_core", "float16"): 6e-4,
    ("tensor_core", "bfloat16"): 4e-3,
}
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


def state_of(place, S, z):
    kind = lt.LinearAttentionState if place.library == "torch" else reference.LinearAttentionState
    return kind(*place.put(S, z))


# ---- Values. -------------------------------------------------------------------------------------


# Each kernel and dtype with the usual widths; and other sizes with one dtype for each kernel, as
# every combination is a compilation.
SIZES = [(1, 5, 3), (16, 16, 8), (63, 64, 64), (200, 20, 33), (130, 80, 130)]
ONE_DTYPE = {"recurrent": "float32", "chunked": "float32", "tensor_core": "bfloat16"}


@pytest.mark.parametrize(
    ("kernel", "dtype", "N", "C", "M"),
    [(*case, 65, 64, 64) for case in TOLERANCE]
    + [(*case, *sizes) for case in ONE_DTYPE.items() for sizes in SIZES],
)
@both_normalizations
def test_outputs_and_states_of_all_kernels(place, kernel, dtype, normalize, N, C, M):
    rng = np.random.default_rng(N)
    q, k, v = draw(rng, dtype, N, C, M, ((2,), (2,), (2,)))
    S, z = (rng.random(shape).astype(np.float32) for shape in ((2, C, M), (2, C)))
    options = {"normalize": normalize, "kernel": kernel, "device": place.device}
    out, last = expected(q, k, v, normalize)
    actual = causal_scan(*place.put(q, k, v), **options)
    assert _arrays.library(actual) == place.library
    assert error(place.get(actual), out) < TOLERANCE[kernel, dtype]

    out, last = expected(q, k, v, normalize, (S, z))
    state = state_of(place, S, z)
    actual, end = causal_scan(
        *place.put(q, k, v), initial_state=state, return_state=True, **options
    )
    assert error(place.get(actual), out) < TOLERANCE[kernel, dtype]
    for mine, theirs in zip(end, last, strict=True):
        assert mine.dtype in (np.float32, torch.float32)
        assert error(place.get(mine), theirs) < 2e-6
    assert (place.get(state.S) == S).all()  # what was given is left alone


@every_kernel
@pytest.mark.parametrize(("C", "M"), [(256, 256), (250, 7), (1, 255), (129, 65), (144, 64)])
def test_widths_up_to_256(kernel, C, M):
    dtype, normalize = ONE_DTYPE[kernel], True
    q, k, v = draw(np.random.default_rng(C), dtype, 70, C, M)
    actual, state = causal_scan(
        q, k, v, normalize=normalize, return_state=True, kernel=kernel, device="cpu"
    )
    out, last = expected(q, k, v, normalize)
    assert error(actual, out) < TOLERANCE[kernel, dtype]
    assert error(state.S, last.S) < 2e-6 and error(state.z, last.z) < 2e-6


WIDTHS = st.sampled_from([1, 2, 5, 8, 16])


@every_kernel
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
    dtype = "float16" if kernel == "tensor_core" else "float32"
    rng = np.random.default_rng(N)
    q, k, v = map(np.abs, draw(rng, dtype, N, C, M, leading))  # no sum comes near zero
    with_state = data.draw(st.booleans())
    state = None
    if with_state:
        lead = np.broadcast_shapes(*leading[1:])
        state = (rng.random((*lead, C, M)), rng.random((*lead, C)))
        state = reference.LinearAttentionState(*(x.astype(np.float32) for x in state))
    actual, last = causal_scan(
        q, k, v, normalize=normalize, initial_state=state, return_state=True, kernel=kernel,
        device="cpu",
    )  # fmt: skip
    out, end = expected(q, k, v, normalize, state)
    assert actual.shape == out.shape and actual.dtype == q.dtype
    assert error(actual, out) < TOLERANCE[kernel, dtype]
    for mine, theirs in zip(last, end, strict=True):
        assert mine.shape == theirs.shape
        assert error(mine, theirs) < 2e-6


@every_kernel
def test_a_sequence_without_features_or_values(kernel):
    for C, M in ((0, 3), (3, 0), (0, 0)):
        x, v = np.ones((2, 40, C), np.float16), np.ones((2, 40, M), np.float16)
        out, state = causal_scan(x, x, v, return_state=True, kernel=kernel, device="cpu")
        assert out.shape == (2, 40, M) and not out.any()
        assert state.S.shape == (2, C, M) and state.z.shape == (2, C)
        assert (state.z == 40).all()


@every_kernel
def test_layouts_are_read_where_they_are(place, kernel):
    dtype = ONE_DTYPE[kernel]
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, dtype, 70, 2 * 24, 24, ((2, 3), (1, 3), (2, 1)))
    out, _ = expected(q[..., ::2], k[..., ::2], v, True)
    options = {"normalize": True, "kernel": kernel, "device": place.device}

    def tokens_first(x):  # (B, H, N, D) that lies in memory as (B, N, H, D)
        axes = [0, 2, 1, 3]
        put = place.put(np.ascontiguousarray(x.transpose(axes)))[0]
        return put.permute(axes) if place.library == "torch" else put.transpose(axes)

    halves = [tokens_first(x)[..., ::2] for x in (q, k)]  # every other number: copied
    assert (
        error(place.get(causal_scan(*halves, tokens_first(v), **options)), out)
        < TOLERANCE[kernel, dtype]
    )

    out, _ = expected(q, k, v, True)
    actual = causal_scan(*map(tokens_first, (q, k, v)), **options)
    assert error(place.get(actual), out) < TOLERANCE[kernel, dtype]


@pytest.mark.parametrize("kernel", ["chunked", "tensor_core"])
def test_addresses_that_do_not_fit_sixteen_bytes(kernel):
    rng = np.random.default_rng(0)
    wide = [x for x in draw(rng, "float16", 70, 33, 33)]
    q, k, v = (x[:, 1:] for x in wide)  # begins at the second number, 66 bytes from row to row
    out, _ = expected(q, k, v, False)
    assert error(causal_scan(q, k, v, kernel=kernel, device="cpu"), out) < 6e-4


def test_backwards_in_memory():
    q, k, v = draw(np.random.default_rng(0), "float32", 70, 8, 8, ((2,), (2,), (2,)))
    q, k, v = (x[:, ::-1] for x in (q, k, v))
    out, _ = expected(q, k, v, False)
    assert error(causal_scan(q, k, v, device="cpu"), out) < 2e-6


def test_other_byte_order():
    q, k, v = draw(np.random.default_rng(0), "float32", 30, 8, 8)
    out, _ = expected(q, k, v, False)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    assert error(causal_scan(*swapped, device="cpu"), out) < 2e-6


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
    out, state = causal_scan(np.ones((0, 3, 2), np.float32), k, v, return_state=True, device="cpu")
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
        piece, state = causal_scan(
            *(x[:, begin:end] for x in (q, k, v)), normalize=normalize, initial_state=state,
            return_state=True, kernel=which, device="cpu",
        )  # fmt: skip
        pieces.append(piece)
    assert error(np.concatenate(pieces, axis=1), out) < TOLERANCE[kernel, dtype] + 3e-3 * (
        "16" in dtype
    )
    assert error(state.S, last.S) < 2e-6 and error(state.z, last.z) < 2e-6


@both_normalizations
@pytest.mark.parametrize("processors", [1, 7, 100])
def test_segments_of_a_sequence(monkeypatch, normalize, processors):
    monkeypatch.setattr(_kernels, "processors", lambda array: processors)
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 1100, 16, 24)
    S, z = np.random.default_rng(1).random((16, 24)), np.ones(16)
    state = reference.LinearAttentionState(S.astype(np.float32), z.astype(np.float32))
    with emulator.trace() as counted:
        actual, last = causal_scan(
            q, k, v, normalize=normalize, initial_state=state, return_state=True, device="cpu"
        )
    segments = counted.kernels["segment_outputs"].blocks
    assert segments == {1: 2, 7: 4, 100: 4}[processors]  # none shorter than 256 tokens
    assert counted.kernels["segment_sums"].blocks == segments
    out, end = expected(q, k, v, normalize, state)
    assert error(actual, out) < 4e-3
    assert error(last.S, end.S) < 2e-6 and error(last.z, end.z) < 2e-6


def test_many_heads_are_not_cut(monkeypatch):
    q, k, v = draw(np.random.default_rng(0), "bfloat16", 600, 16, 8, ((8,), (8,), (8,)))
    with emulator.trace() as counted:
        causal_scan(q, k, v, device="cpu")
    assert set(counted.kernels) == {"segment_outputs"}


def test_a_long_sequence():
    q, k, v = draw(np.random.default_rng(0), "float32", 30_000, 3, 2)
    for kernel in ("recurrent", "chunked"):
        out, last = expected(q, k, v, True)
        actual, state = causal_scan(
            q, k, v, normalize=True, return_state=True, kernel=kernel, device="cpu"
        )
        assert error(actual, out) < 2e-5
        assert error(state.S, last.S) < 2e-5


# ---- Numbers that misbehave. ---------------------------------------------------------------------


@both_normalizations
def test_float16_states_and_scores_beyond_its_range(normalize):
    rng = np.random.default_rng(0)
    q, k, v = draw(rng, "float16", 200, 16, 16)
    k, v = (k * np.float16(300)).astype(np.float16), (v * np.float16(200)).astype(np.float16)
    q = (q * np.float16(30 if normalize else 1e-3)).astype(np.float16)
    scores = q.astype(float) @ k.astype(float).T
    assert np.abs(k.astype(float).T @ v.astype(float)).max() > 65504  # the largest float16
    assert scores.max() > 65504 or not normalize
    actual = causal_scan(q, k, v, normalize=normalize, kernel="tensor_core", device="cpu")
    assert np.isfinite(actual.astype(float)).all()
    assert error(actual, expected(q, k, v, normalize)[0]) < 1e-3


def test_float16_numbers_that_are_almost_nothing():
    q, k, v = draw(np.random.default_rng(0), "float16", 150, 16, 16)
    k, v = (k * np.float16(1e-3)).astype(np.float16), (v * np.float16(1e-2)).astype(np.float16)
    q = (q * np.float16(100)).astype(np.float16)
    actual = causal_scan(q, k, v, kernel="tensor_core", device="cpu")
    assert error(actual, expected(q, k, v, False)[0]) < 1e-3


@both_normalizations
@pytest.mark.parametrize("small", [1e-6, 1e-5, 1e-4])
def test_float16_small_queries_beside_a_large_state(normalize, small):
    """The scores of the chunk and the state before it have scales of their own."""
    q, k, v = draw(np.random.default_rng(0), "float16", 192, 4, 4)
    q, v = (q * np.float16(small)).astype(np.float16), (v + 1) * np.float16(3e4)
    actual = causal_scan(q, k, v, normalize=normalize, kernel="tensor_core", device="cpu")
    right = expected(q, k, v, normalize)[0]
    assert (np.abs(actual.astype(float) - right) < 2e-3 * np.abs(right) + 1e-7).all()


@every_kernel
def test_an_output_whose_normalizer_is_zero(kernel):
    q, k, v = draw(np.random.default_rng(0), "float16", 70, 8, 8)
    q[5:9] = 0
    k[0] = 0
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    out = causal_scan(*tensors, normalize=True, kernel=kernel, device="cpu")
    assert (out[5:9] == 0).all() and (out[0] == 0).all()
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][5:9] == 0).all()


@every_kernel
def test_where_nan_goes(kernel):
    q, k, v = draw(np.random.default_rng(0), "float16", 150, 8, 8, ((2,), (2,), (2,)))
    v[1, 80, 3] = np.nan
    out = causal_scan(q, k, v, kernel=kernel, device="cpu")
    assert np.isfinite(out[0].astype(float)).all()
    assert np.isnan(out[1, 80:, 3]).all()
    assert np.isfinite(out[1, :64].astype(float)).all()
    if kernel == "recurrent":
        assert np.isfinite(out[1, :80].astype(float)).all()


# ---- Gradients. ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"), [*ONE_DTYPE.items(), ("chunked", "bfloat16"), ("tensor_core", "float16")]
)
@both_normalizations
@pytest.mark.parametrize("with_state", [False, True], ids=["from-zero", "from-a-state"])
@pytest.mark.parametrize("keep", [False, True], ids=["outputs", "outputs-and-state"])
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

    as_torch = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    tensors = [torch.from_numpy(x.astype(np.float32)).to(as_torch[dtype]) for x in arrays]
    tensors += [torch.from_numpy(x).float() for x in state] if with_state else []
    tensors = [x.requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in tensors]

    def by_kernel(*args, **options):
        return causal_scan(*args, kernel=kernel, device="cpu", **options)

    def by_torch(*args, **options):
        return lt.linear_attention(
            *args, feature_map=lt.identity, causal=True, form="masked", **options
        )

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
    mine = torch.autograd.grad(causal_scan(q, k, v, device="cpu").sum(), (q, k, v))
    right = torch.autograd.grad((torch.tril(q @ k.mT) @ v).sum(), (q, k, v))
    for a, b in zip(mine, right, strict=True):
        assert error(a, b) < 2e-6


def test_gradients_are_scans_with_time_reversed():
    """What the book derives, with arrays: dq = scan(g, v, k), dk and dv backwards in time."""
    q, k, v = draw(np.random.default_rng(0), "float32", 90, 12, 8)
    g = np.random.default_rng(1).normal(size=(90, 8)).astype(np.float32)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(causal_scan(*tensors, device="cpu"), tensors, torch.from_numpy(g))

    def back(x):
        return x[::-1]

    dq = causal_scan(g, v, k, device="cpu")
    dk = back(causal_scan(back(v), back(g), back(q), device="cpu"))
    dv = back(causal_scan(back(k), back(q), back(g), device="cpu"))
    for mine, theirs in zip((dq, dk, dv), right, strict=True):
        assert error(mine, theirs) < 1e-6


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant):
    x = torch.rand(40, 3, requires_grad=True)

    def scan(x):
        return causal_scan(x, x, x, normalize=True, device="cpu")

    checkpointed = torch.utils.checkpoint.checkpoint(scan, x, use_reentrant=reentrant)
    (mine,) = torch.autograd.grad(scan(x).square().sum(), x)
    checkpointed.square().sum().backward()
    assert torch.equal(mine, x.grad)


def test_once_differentiable():
    q = torch.rand(20, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        causal_scan(q, q, q, device="cpu").sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(gradient.sum(), q)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@both_normalizations
def test_compiled(normalize):
    q, k, v = (torch.rand(2, 70, 8, requires_grad=True) for _ in range(3))
    state = lt.LinearAttentionState(torch.rand(2, 8, 8), torch.rand(2, 8))

    def step(q, k, v):
        out, last = causal_scan(
            q.exp(), k, v, normalize=normalize, initial_state=state, return_state=True,
            device="cpu",
        )  # fmt: skip
        return out.sum() + last.S.sum() + last.z.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for f in (step, compiled):
        assert torch.isfinite(f(q, k, v))
    one, two = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (step, compiled))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


@both_normalizations
def test_under_vmap_and_torch_func(normalize):
    q, k, v = torch.rand(3, 40, 8), torch.rand(2, 3, 40, 8), torch.rand(3, 40, 5)
    S, z = torch.rand(2, 8, 5), torch.rand(8)

    def loss(q, k, v, S, by_kernel=True):
        options = {"normalize": normalize, "return_state": True}
        options["initial_state"] = lt.LinearAttentionState(S, z)
        if by_kernel:
            out, last = causal_scan(q, k, v, device="cpu", **options)
        else:
            options |= {"feature_map": lt.identity, "causal": True, "form": "masked"}
            out, last = lt.linear_attention(q, k, v, **options)
        return out.sum() + last.S.square().sum() + last.z.sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    mapped = torch.func.vmap(gradients, in_dims=(None, 0, None, 0))
    right = torch.func.grad(lambda *args: loss(*args, by_kernel=False), argnums=(0, 1, 2, 3))
    for i, *mine in zip(range(2), *mapped(q, k, v, S), strict=True):
        for a, b in zip(mine, right(q, k[i], v, S[i]), strict=True):
            assert error(a, b) < 5e-6


@pytest.mark.parametrize("keep", [True, False])
def test_what_compiling_is_told_of_the_operators(keep):
    q, k, v, initial = (torch.rand(2, *shape) for shape in ((20, 4), (20, 4), (20, 3), (4, 4)))
    operators, checks = torch.ops.lesson_code, ("test_schema", "test_faketensor")
    initial = initial if keep else None
    inputs = (q, k, v, initial, keep, keep, "chunked")
    torch.library.opcheck(operators.causal_scan.default, inputs, test_utils=checks)
    out, last, normalizers = operators.causal_scan(*inputs)
    grad_last = last if keep else None
    inputs = (out, grad_last, q, k, v, initial, out, normalizers, keep, "chunked")
    torch.library.opcheck(operators.causal_scan_backward.default, inputs, test_utils=checks)


# ---- Races, orders, and memory. ------------------------------------------------------------------


def everything(kernel, dtype="float16", N=150, C=24, M=16):
    """Forward and backward, with all that there is: outputs and gradients."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in draw(rng, dtype, N, C, M, ((2,),) * 3))
    S, z = (torch.rand(2, C, M, requires_grad=True), torch.ones(2, C, requires_grad=True))
    out, last = causal_scan(
        q, k, v, normalize=True, initial_state=lt.LinearAttentionState(S, z), return_state=True,
        kernel=kernel, device="cpu",
    )  # fmt: skip
    loss = out.float().sum() + last.S.sum() + last.z.sum()
    return [out, *last, *torch.autograd.grad(loss, (q, k, v, S, z))]


@every_kernel
def test_no_result_depends_on_the_order_of_threads(kernel):
    torch.manual_seed(0)
    first = everything(kernel)
    for order in ("reverse", 1, 2):
        torch.manual_seed(0)
        with emulator.order(order):
            for a, b in zip(first, everything(kernel), strict=True):
                assert torch.equal(a, b)


@every_kernel
def test_no_races(kernel):
    with emulator.trace() as counted:
        everything(kernel, N=70, C=16, M=8)
    assert "split_gradient" in counted.kernels
    counted.check()


def barriers():
    """(kernel, how many'th barrier of the file) for each barrier of causal_scan.cu."""
    source = _kernels.text("causal_scan.cu")
    for number, match in enumerate(re.finditer(r"__sync(threads|warp)\(\);", source)):
        section = re.findall(r"^#ifdef (\w+)$", source[: match.start()], re.MULTILINE)[-1]
        yield section.lower(), number


@pytest.mark.parametrize(("kernel", "number"), list(barriers()))
def test_a_barrier_that_is_missing_is_caught(monkeypatch, kernel, number):
    """Each barrier is needed: without it a race is found."""
    text = _kernels.text
    barrier = re.compile(r"__sync(threads|warp)\(\);")
    places = iter(range(1000))

    def without(match):
        return "" if next(places) == number else match[0]

    broken = barrier.sub(without, text("causal_scan.cu"))
    monkeypatch.setattr(_kernels, "text", lambda f: broken if f == "causal_scan.cu" else text(f))
    _kernels._load_cpu.cache_clear()
    try:
        N = 600 if kernel == "tensor_core" else 70  # several segments, or more than one chunk
        q, k, v = draw(np.random.default_rng(0), "float16", N, 16, 16)
        with emulator.trace() as counted:
            causal_scan(q, k, v, normalize=True, kernel=kernel, device="cpu")
        with pytest.raises(emulator.RaceError):
            counted.check()
    finally:
        _kernels._load_cpu.cache_clear()


@both_normalizations
def test_bytes_that_the_tensor_core_kernel_moves(normalize):
    """Every number of q, k and v once, every output once, eight numbers at a time."""
    heads, N, C, M = 8, 320, 64, 64
    q, k, v = draw(np.random.default_rng(0), "bfloat16", N, C, M, ((heads,),) * 3)
    with emulator.trace() as counted:
        causal_scan(q, k, v, normalize=normalize, kernel="tensor_core", device="cpu")
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
        causal_scan(q, k, v, kernel="recurrent", device="cpu")
        causal_scan(q, k, v, kernel="chunked", device="cpu")
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


SANITIZED = """
import numpy as np
from lesson_code.cupy import causal_scan
rng = np.random.default_rng(0)
for kernel in ("recurrent", "chunked", "tensor_core"):
    for N, C, M in ((70, 16, 8), (1, 3, 5), (600, 17, 9)):
        q, k, v = (rng.random((2, N, width)).astype(np.float16) for width in (C, C, M))
        causal_scan(q, k, v, normalize=True, return_state=True, kernel=kernel, device="cpu")
print("clean")
"""


def test_no_address_is_out_of_bounds():
    result = emulator.sanitized(SANITIZED)
    assert result.stdout.strip() == "clean", result.stderr[-2000:]


# ---- The choice, and what is refused. ------------------------------------------------------------


def test_what_is_chosen():
    def choose(dtype, N=100, **options):
        x = np.zeros((N, 8), dtype)
        return choose_kernel(x, x, x, device="cpu", **options)

    assert choose(np.float32) == "chunked"
    assert choose(np.float16) == choose(BFLOAT16) == "tensor_core"
    assert choose(np.float16, capability=(7, 5)) == "tensor_core"
    assert choose(BFLOAT16, capability=(7, 5)) == "chunked"
    assert choose(np.float16, capability=(7, 0)) == "chunked"
    assert choose(np.float16, capability=(12, 0)) == "tensor_core"
    assert choose(np.float16, N=1) == "recurrent"


@pytest.mark.parametrize("capability", [(7,), (7, 5, 0), (7.5, 0), (-1, 0), 8.0, "8.0", [7, 5]])
def test_what_is_no_capability(capability):
    with pytest.raises(ValueError, match="capability must be two integers like"):
        choose_kernel(X, X, X, device="cpu", capability=capability)


def test_none_takes_what_is_chosen():
    x = np.ones((100, 8), np.float16)
    with emulator.trace() as counted:
        causal_scan(x, x, x, device="cpu")
        causal_scan(x[:3], x[:3], x[:3], device="cpu")
    assert set(counted.kernels) == {"segment_outputs", "recurrent"}


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
        ((X, X[:, :3], X), {}, ValueError, "k must have the width of q, 4, got 3"),
        ((X, X, X[:5]), {}, ValueError, "v must have the length of k, 20, got 5"),
        ((X[:5], X, X), {}, ValueError, "q must have the length of k, 20, got 5"),
        ((X[0], X, X), {}, ValueError, r"q must have shape \(..., N, D\)"),
        ((np.stack([X] * 3), np.stack([X] * 2), X), {}, ValueError, "broadcast"),
        ((WIDE, WIDE, X), {}, ValueError, "q must be at most 256 wide, got 257"),
        ((X, X, WIDE), {}, ValueError, "v must be at most 256 wide, got 257"),
        ((X, X, X), {"kernel": "fast"}, ValueError, "kernel must be None or one of 'recurrent'"),
        ((X, X, X), {"kernel": "tensor_core"}, ValueError, "needs float16 or bfloat16, got float"),
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
    monkeypatch.setattr(_kernels, "capability", lambda array: (7, 5))
    x = np.ones((100, 8), BFLOAT16)
    with pytest.raises(ValueError, match="needs float16 on a GPU of compute capability 7.5"):
        causal_scan(x, x, x, kernel="tensor_core", device="cpu")


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
