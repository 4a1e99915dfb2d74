"""Softmax attention in torch: against NumPy in float64, and under everything that torch adds."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import lesson_code.numpy as reference
from lesson_code.torch import softmax
from lesson_code.torch.softmax import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)
from tests.arrays import normal, tensors

NAN, INF = math.nan, math.inf
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LEADING = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((2, 3), (3,), (2, 1)),
    ((), (2,), (3, 1)),
    ((0,), (1,), (0,)),
]


def draw(seed, *shapes, dtype=torch.float64):
    return tensors(*normal(*shapes, seed=seed), dtype=dtype)


def qkv(seed=0, Nq=6, Nk=6, D=3, M=4, leading=((), (), ()), dtype=torch.float64):
    shapes = ((Nq, D), (Nk, D), (Nk, M))
    return draw(seed, *(a + b for a, b in zip(leading, shapes, strict=True)), dtype=dtype)


def assert_close(found, expected, tolerance=1e-12):
    """The same shape and numbers; expected may be an array of NumPy's."""
    found, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


class Case(NamedTuple):
    """One of the functions, its options, and shapes for it of sizes that all differ."""

    name: str
    shapes: callable
    options: dict = {}

    def __str__(self):
        return "-".join([self.name, *(key for key, value in self.options.items() if value is True)])

    def __call__(self, *args, **more):
        return getattr(softmax, self.name)(*args, **self.options, **more)

    def reference(self, *args, **more):
        arrays = [x.detach().double().numpy() for x in args]
        return getattr(reference, self.name)(*arrays, **self.options, **more)


def similarity(q, k):
    """Some similarity that NumPy and torch write alike."""
    return 1 + (q @ k.swapaxes(-1, -2)) ** 2


CASES = [
    Case("softmax_attention", lambda Nq, Nk: ((2, 1, Nq, 4), (3, Nk, 4), (2, 3, Nk, 7))),
    Case("attention_weights", lambda Nq, Nk: ((2, 1, Nq, 4), (3, Nk, 4))),
    Case(
        "similarity_attention",
        lambda Nq, Nk: ((2, 1, Nq, 4), (3, Nk, 4), (2, 3, Nk, 7)),
        {"similarity": similarity},
    ),
    Case(
        "tiled_softmax_attention",
        lambda Nq, Nk: ((2, 1, Nq, 4), (3, Nk, 4), (2, 3, Nk, 7)),
        {"tile_size": 2},
    ),
    Case("grouped_query_attention", lambda Nq, Nk: ((2, 6, Nq, 4), (3, Nk, 4), (2, 3, Nk, 7))),
    Case("latent_attention", lambda Nq, Nk: ((5, 3, Nq, 4), (5, Nk, 2), (3, 2, 4), (3, 2, 7)), {}),
    Case(
        "latent_attention",
        lambda Nq, Nk: ((5, 3, Nq, 4), (5, Nk, 2), (3, 2, 4), (3, 2, 7)),
        {"absorb": True},
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_order = pytest.mark.parametrize("lengths", [(6, 8), (8, 6)], ids=["fewer q", "more q"])
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
whole_and_tiled = pytest.mark.parametrize(
    "attention",
    [softmax_attention, lambda *args, **more: tiled_softmax_attention(*args, tile_size=2, **more)],
    ids=["whole", "tiled"],
)


# The outputs.


@every_case
@both_masks
@every_order
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_function_is_its_numpy_twin(case, causal, lengths, dtype):
    args = draw(1, *case.shapes(*lengths), dtype=dtype)
    out = case(*args, causal=causal)
    assert out.dtype == dtype
    assert_close(out, case.reference(*args, causal=causal), TOLERANCE[dtype])


@settings(max_examples=100, deadline=None)
@given(
    Nq=st.integers(0, 9),
    Nk=st.integers(0, 9),
    D=st.integers(1, 4),
    M=st.integers(0, 4),
    leading=st.sampled_from(LEADING),
    dtype=st.sampled_from(list(TOLERANCE)),
    causal=st.booleans(),
    scale=st.sampled_from([None, 1.0, -0.3, 0]),
    tile_size=st.integers(1, 11),
    seed=st.integers(0, 2**32 - 1),
)
@example(4, 6, 2, 3, LEADING[1], torch.float64, True, None, 4, 0)
@example(1, 5, 2, 3, LEADING[1], torch.float64, True, None, 2, 0)
@example(5, 1, 2, 3, LEADING[2], torch.float64, True, None, 2, 0)
@example(0, 5, 2, 3, LEADING[2], torch.float64, True, None, 2, 0)
@example(5, 0, 2, 3, LEADING[3], torch.float32, True, None, 2, 0)
@example(5, 0, 2, 3, LEADING[3], torch.float32, False, None, 2, 0)
def test_softmax_attention_whole_and_tiled(
    Nq, Nk, D, M, leading, dtype, causal, scale, tile_size, seed
):
    q, k, v = qkv(seed, Nq, Nk, D, M, leading, dtype)
    arrays = [x.double().numpy() for x in (q, k, v)]
    options = {"causal": causal, "scale": scale}
    expected = reference.softmax_attention(*arrays, **options)
    assert_close(softmax_attention(q, k, v, **options), expected, TOLERANCE[dtype])
    tiled = tiled_softmax_attention(q, k, v, tile_size=tile_size, **options)
    assert_close(tiled, expected, TOLERANCE[dtype])
    expected = reference.attention_weights(*arrays[:2], **options)
    assert_close(attention_weights(q, k, **options), expected, TOLERANCE[dtype])


@whole_and_tiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_maximum_keeps_exp_from_overflowing(attention, dtype):
    q = torch.tensor([[1.0]], dtype=dtype)
    k = torch.tensor([[240.0], [241.0], [60000.0]], dtype=dtype)
    v = torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype)
    first = 1 / (1 + math.e)
    assert_close(attention(q, k[:2], v[:2]), [[2 - first]], TOLERANCE[dtype])
    assert_close(attention(q, k, v), [[3]], TOLERANCE[dtype])
    assert_close(attention(q, -k, v), [[1 + first]], TOLERANCE[dtype])


# NaN, infinities, and queries that see nothing.


ON_SEQUENCES = [
    case for case in CASES if case.name in ("softmax_attention", "similarity_attention")
]
ON_SEQUENCES += [case for case in CASES if case.name == "tiled_softmax_attention"]
every_attention = pytest.mark.parametrize("attention", ON_SEQUENCES, ids=str)


@every_attention
def test_the_future_is_hidden_even_when_it_is_nan(attention):
    q, k, v = qkv(4, 8, 8)
    past = attention(q, k, v, causal=True)[:5]
    for spoiled, value in ((k, NAN), (v, NAN), (v, INF), (k, 30.0), (v, -7.0)):
        before = spoiled[5:].clone()
        spoiled[5:] = value
        out = attention(q, k, v, causal=True)
        assert_close(out[:5], past)
        if not math.isfinite(value):
            assert not out[5:].isfinite().any()
        spoiled[5:] = before


@every_case
@every_order
def test_nan_goes_where_it_goes_in_numpy(case, lengths):
    args = draw(5, *case.shapes(*lengths))
    clean = case(*args, causal=True)
    for at, spoiled in enumerate(args[:3]):
        if case.name == "latent_attention" and at == 2:  # a weight, not a sequence
            continue
        index = tuple([0] * (spoiled.ndim - 2) + [2, 1])
        before, spoiled[index] = spoiled[index].clone(), NAN
        out = case(*args, causal=True)
        assert out.isnan().any()
        assert_close(out, case.reference(*args, causal=True))
        untouched = ~out.isnan()
        assert_close(out[untouched], clean[untouched])
        spoiled[index] = before


@pytest.mark.parametrize("tile_size", [1, 2, 5])
def test_infinite_scores(tile_size):
    q = torch.tensor([[1.0], [-1.0], [0.5]])
    k = torch.tensor([[1.0], [-INF], [2.0]])
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    kept = softmax_attention(q, k[[0, 2]], v[[0, 2]])
    hidden = torch.full((3, 1), -INF)
    for attention, options in (
        (softmax_attention, {}),
        (tiled_softmax_attention, {"tile_size": tile_size}),
    ):
        out = attention(q, k, v, **options)
        assert_close(out[[0, 2]], kept[[0, 2]], 1e-6)
        assert out[1].isnan().all()  # its score is +inf
        assert (attention(q[:1], hidden, v, **options) == 0).all()


@every_attention
def test_queries_that_see_no_key_give_zero(attention):
    q, k, v = (x.requires_grad_() for x in qkv(6, 7, 3))
    out = attention(q, k, v, causal=True)
    assert (out[:4] == 0).all() and (out[4:] != 0).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (gradients[0][:4] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (attention(q, k, torch.full_like(v, NAN), causal=True)[:4] == 0).all()
    nothing = attention(q, k[:0], v[:0])
    assert nothing.shape == (7, 4) and (nothing == 0).all()
    assert attention(q[:0], k, v).shape == (0, 4)


def test_a_value_without_finite_mean_spoils_no_earlier_gradient():
    q, k, v = (x.requires_grad_() for x in qkv(7, 6, 6))
    expected = torch.autograd.grad(softmax_attention(q, k, v, causal=True)[:4].sum(), (q, k, v))
    spoiled = torch.where(torch.arange(6)[:, None] < 4, v, NAN)
    out = softmax_attention(q, k, spoiled, causal=True)
    for found, clean in zip(torch.autograd.grad(out[:4].sum(), (q, k, v)), expected, strict=True):
        assert_close(found, clean)


# Gradients, transformations and compilation.


@every_case
@pytest.mark.parametrize("lengths", [(2, 3), (3, 2)], ids=["fewer q", "more q"])
def test_gradients(case, lengths):
    args = [x.requires_grad_() for x in draw(8, *case.shapes(*lengths))]
    assert torch.autograd.gradcheck(lambda *args: case(*args, causal=True), args, fast_mode=True)


def test_second_gradients_of_the_tiles():
    args = [x.requires_grad_() for x in qkv(9, 3, 4, 2, 2)]
    assert torch.autograd.gradgradcheck(
        lambda *args: tiled_softmax_attention(*args, causal=True, tile_size=2), args
    )


@whole_and_tiled
def test_gradients_stay_finite_in_float32(attention):
    """Scores so large that most weights are exactly 0, and -inf where they overflow."""
    q, k, v = qkv(10, 9, 9, dtype=torch.float32)
    for factor in (1e2, 1e15, 1e25):
        args = [(factor * q.abs()).requires_grad_(), (-factor * k.abs()).requires_grad_(), v]
        out = attention(*args, causal=True)
        assert out.isfinite().all()
        for gradient in torch.autograd.grad(out.square().sum(), args[:2]):
            assert gradient.isfinite().all()


def test_a_scale_and_a_length_that_change_still_compile():
    """torch.compile makes a number that changes a symbol, which the checks must let through."""
    torch.compiler.reset()
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="eager")
    for N, scale in ((5, 0.5), (6, 0.25), (7, 2.0)):
        args = qkv(14, N, N)
        out = compiled(*args, causal=True, scale=scale)
        assert_close(out, softmax_attention(*args, causal=True, scale=scale))


def test_autocast_does_not_change_what_the_backward_pass_computes_again():
    args = [x.requires_grad_() for x in qkv(16, 5, 7, dtype=torch.float32)]
    out = tiled_softmax_attention(*args)
    expected = torch.autograd.grad(out.sum(), args, retain_graph=True)
    with torch.autocast("cpu"):
        found = torch.autograd.grad(out.sum(), args)
    for gradient, same in zip(found, expected, strict=True):
        assert (gradient == same).all()


@every_case
@both_masks
def test_new_tensors_are_made_on_the_device_of_the_inputs(case, causal):
    """Fake tensors have a device but no numbers: to mix devices, or to read one, is an error."""
    with FakeTensorMode():
        args = [
            torch.empty(shape, device="meta", requires_grad=True) for shape in case.shapes(5, 7)
        ]
        out = case(*args, causal=causal)
        assert out.device.type == "meta"
        out.sum().backward()


# Memory.


class Largest(TorchDispatchMode):
    """The size in entries of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.itemsize)
        return out


def memory(function, *args):
    """Largest tensor of the forward pass, of the backward pass, and what the first keeps for it."""
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    args = [x.requires_grad_() for x in args]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), Largest() as forward:
        out = function(*args)
    with Largest() as backward:
        out.sum().backward()
    return forward.entries, backward.entries, sum(kept.values())


@both_masks
def test_tiled_memory_is_linear(causal):
    """Neither pass makes or keeps an N×N matrix: a tile of the weights, N×M inputs and outputs."""
    N, width = 96, 5

    def attend(attention, **options):
        return memory(
            lambda *args: attention(*args, causal=causal, **options), *qkv(16, N, N, width, width)
        )

    forward, backward, kept = attend(tiled_softmax_attention, tile_size=8)
    assert forward == N * width and backward == N * width
    assert kept == 3 * N * width
    assert min(attend(softmax_attention)) >= N * N


def test_absorbed_and_grouped_keys_are_never_copied():
    """Not once per head: a broadcast ``matmul`` would, with another leading dimension before it."""
    B, H, N, R, D = 2, 8, 500, 4, 16
    args = draw(17, (B, H, 1, D), (B, N, R), (H, R, D), (H, R, D))
    with Largest() as absorbed:
        latent_attention(*args, absorb=True)
    assert absorbed.entries == B * H * N  # the scores
    with Largest() as plain:
        latent_attention(*args)
    assert plain.entries == B * H * N * D  # the keys
    args = draw(18, (B, H, 1, D), (B, 2, N, D), (B, 2, N, D))
    with Largest() as grouped:
        grouped_query_attention(*args)
    assert grouped.entries == B * 2 * N * D  # the keys as they are cached, scaled or cast at most


# Known bugs of known libraries.


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 1), (0, 2)], ids=str)
def test_known_bug_grouped_heads_are_interleaved_not_tiled(heads):
    """Head h reads head h // (Hq / Hkv); ``repeat``, which tiles, pairs it with h % Hkv."""
    Hq, Hkv = heads
    q, k, v = draw(19, (2, Hq, 4, 3), (Hkv, 5, 3), (2, Hkv, 5, 7))
    out = grouped_query_attention(q, k, v, causal=True)
    group = Hq // Hkv
    assert_close(
        out,
        softmax_attention(
            q, k.repeat_interleave(group, -3), v.repeat_interleave(group, -3), causal=True
        ),
    )
    if 1 < Hkv < Hq:
        tiled = softmax_attention(q, k.repeat(group, 1, 1), v.repeat(1, group, 1, 1), causal=True)
        assert (out - tiled).abs().max() > 0.1


def test_known_bug_the_queries_are_the_last_ones():
    """A mask made by ``tril`` of the scores lets the first query see the first key only."""
    q, k, v = qkv(20, 3, 8)
    out = softmax_attention(q, k, v, causal=True)
    assert_close(out, softmax_attention(torch.cat([q, q, q])[1:], k, v, causal=True)[-3:])
    seen = torch.ones(3, 8, dtype=torch.bool)
    plain = torch.nn.functional.scaled_dot_product_attention
    assert_close(out, plain(q, k, v, attn_mask=seen.tril(5)))
    assert (out - plain(q, k, v, attn_mask=seen.tril())).abs().max() > 0.1


def test_known_bug_rows_without_a_key_are_not_nan():
    """``torch.softmax`` of a row of -inf is NaN, and so is its gradient behind ``nan_to_num``."""
    q, k, v = (x.requires_grad_() for x in qkv(21, 4, 2))
    weights = attention_weights(q, k, causal=True)
    assert (weights[:2] == 0).all() and torch.softmax(torch.full((3,), -INF), 0).isnan().all()
    for gradient in torch.autograd.grad(weights.square().sum(), (q, k)):
        assert gradient.isfinite().all()


# Similarity attention.


def test_similarities_that_sum_to_zero_give_zero():
    q, k, v = qkv(22, 3, 2)
    signed = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.5, 0.25]], dtype=torch.float64)
    signed.requires_grad_()
    out = similarity_attention(q, k, v, lambda q, k: signed)
    assert (out[0] == 0).all()
    assert_close(out[1], v.mean(dim=0))
    (gradient,) = torch.autograd.grad(out.sum(), signed)
    assert (gradient[0] == 0).all() and gradient[1:].isfinite().all()


def test_a_similarity_in_another_precision_is_cast():
    q, k, v = qkv(Nq=4, Nk=7, dtype=torch.float32)
    out = similarity_attention(q, k, v, lambda q, k: torch.exp(q.double() @ k.double().T / 3))
    assert out.dtype == torch.float32
    assert_close(out, softmax_attention(q, k, v, scale=1 / 3), 1e-5)


def test_a_similarity_cannot_write_into_the_callers_tensors():
    q, k, v = qkv(Nq=4, Nk=7)
    before = q.clone()
    similarity_attention(q, k, v, lambda q, k: torch.exp(q.mul_(2) @ k.T))
    assert (q == before).all()


# Arguments.
