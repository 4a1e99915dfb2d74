"""AFT in torch: against NumPy in float64, and under all that torch adds."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import aft_full, aft_simple, wkv

module = sys.modules["lesson_code.torch.aft"]
causal_or_not = pytest.mark.parametrize("causal", [True, False])
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
    torch.bfloat16: 2.0**-8 + 1e-5,
}


def draw(seed=0, Nq=7, Nk=7, D=3, leading=((), (), ()), dtype=torch.float64):
    rng = np.random.default_rng(seed)
    shapes = ((Nq, D), (Nk, D), (Nk, D))
    arrays = [rng.normal(size=(*lead, *s)) for lead, s in zip(leading, shapes, strict=True)]
    return [torch.from_numpy(x).to(dtype) for x in (*arrays, rng.normal(size=(Nq, Nk)))]


def arrays(*tensors):
    return [x.detach().double().numpy() for x in tensors]


def assert_close(found, expected, tolerance=1e-12, dtype=None):
    if dtype is not None:
        assert found.dtype == dtype
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    bound = tolerance * max(1, expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


@pytest.fixture(params=[1, 100, 2**20], ids=lambda size: f"tile {size}")
def tile(request, monkeypatch):
    monkeypatch.setattr(module, "TILE", request.param)


@settings(max_examples=80, deadline=None)
@given(
    shapes=mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3, min_side=0),
    Nq=st.integers(0, 12),
    Nk=st.integers(0, 12),
    causal=st.booleans(),
    D=st.integers(1, 4),
    size=st.sampled_from([1, 50, 2**20]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
@example(BroadcastableShapes(((2, 3), (3,), (2, 1)), ()), 5, 9, False, 3, 50, torch.float64, 0)
@example(BroadcastableShapes(((2, 3), (3,), (2, 1)), ()), 9, 9, True, 3, 50, torch.float64, 0)
@example(BroadcastableShapes(((2,), (), ()), ()), 4, 0, False, 2, 1, torch.float32, 0)
def test_they_are_numpys(shapes, Nq, Nk, causal, D, size, dtype, seed):
    q, k, v, bias = draw(seed, Nk if causal else Nq, Nk, D, shapes.input_shapes, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", size)
        found = aft_full(q, k, v, bias, causal=causal)
    expected = reference.aft_full(*arrays(q, k, v, bias), causal=causal)
    assert_close(found, expected, TOLERANCE[dtype], dtype)
    expected = reference.aft_simple(*arrays(q, k, v), causal=causal)
    assert_close(aft_simple(q, k, v, causal=causal), expected, TOLERANCE[dtype], dtype)


def test_worked_numbers():
    q, v = torch.zeros(3, 1), torch.tensor([[10.0], [30.0], [50.0]])
    k = torch.tensor([[1.0], [2.0], [1.0]]).log()
    assert_close(aft_simple(q, k, v, causal=True), [[5.0], [35 / 3], [15.0]], 1e-6)
    assert_close(aft_simple(q, k, v), [[15.0]] * 3, 1e-6)


def test_idiap_causal_aft_simple_divides_inside_the_sum():
    """A running mean of equal values is this value."""
    q, k, v, _ = draw(1)
    assert_close(aft_simple(q + 1e4, k, 0 * v + 3, causal=True), 0 * v + 3)


def test_idiap_aft_full_multiplies_by_the_bias(tile):
    """The bias and the mask are added to the keys: 0 changes nothing, -inf hides, any sign of k."""
    q, k, v, bias = draw(2)
    mask = bias.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    for keys in (k, -k.abs(), k.abs(), 0 * k):
        for causal in (True, False):
            simple = aft_simple(q, keys, v, causal=causal)
            assert_close(aft_full(q, keys, v, 0 * bias, causal=causal), simple)
        assert_close(aft_full(q, keys, v, mask), aft_full(q, keys, v, bias, causal=True))


def test_aft_simple_is_wkv_without_decay():
    q, k, v, _ = draw(3)
    w = torch.full((3,), 1e-15, dtype=torch.float64)
    expected = q.sigmoid() * wkv(k, v, w, 0 * w)
    assert_close(aft_simple(q, k, v, causal=True), expected)


@causal_or_not
def test_keys_and_biases_of_any_size(causal, tile):
    rng = np.random.default_rng(4)
    q, k, v, bias = draw(4, 20, 20)
    k = k + torch.from_numpy(rng.choice([-80.0, 0.0, 80.0], size=k.shape))
    k[:2, ::2] = k[:, 1] = -torch.inf
    bias = bias + torch.from_numpy(rng.choice([-300.0, 0.0, 300.0], size=bias.shape))
    bias[5] = bias[:, 7] = -torch.inf
    exact = [q, k, v, bias]
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        args = [x.to(dtype).requires_grad_() for x in exact]
        full = aft_full(*args, causal=causal)
        assert_close(full, reference.aft_full(*arrays(*exact), causal=causal), bound)
        assert (full[5] == 0).all() and (full[:, 1] == 0).all()
        simple = aft_simple(*args[:3], causal=causal)
        assert_close(simple, reference.aft_simple(*arrays(*exact[:3]), causal=causal), bound)
        for found in (
            *torch.autograd.grad(full.sum(), args),
            *torch.autograd.grad(simple.sum(), args[:3]),
        ):
            assert found.isfinite().all() and found.any()


@causal_or_not
def test_gradcheck(causal, tile):
    args = [x.requires_grad_() for x in draw(5, 4, 4, 2, leading=((2,), (), (2,)))]
    assert torch.autograd.gradcheck(lambda *args: aft_full(*args, causal=causal), args)
    assert torch.autograd.gradgradcheck(lambda *args: aft_full(*args, causal=causal), args)
    assert torch.autograd.gradcheck(lambda *args: aft_simple(*args, causal=causal), args[:3])


@causal_or_not
def test_vmap_and_func(causal, tile):
    q, k, v, bias = draw(6, leading=((4,),) * 3)
    expected = aft_full(q, k, v, bias, causal=causal)
    found = torch.func.vmap(lambda q, k, v: aft_full(q, k, v, bias, causal=causal))(q, k, v)
    assert_close(found, expected)
    found = torch.func.vmap(lambda q, k, v: aft_simple(q, k, v, causal=causal))(q, k, v)
    assert_close(found, aft_simple(q, k, v, causal=causal))

    def loss(*args):
        return aft_full(*args, causal=causal).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for x, y in zip(
        torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias), expected, strict=True
    ):
        assert_close(x, y)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile(monkeypatch):
    monkeypatch.setattr(module, "TILE", 50)
    torch.compiler.reset()
    everything = [x.requires_grad_() for x in draw(7)]
    for function, args in ((aft_full, everything), (aft_simple, everything[:3])):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        found = compiled(*args, causal=True)
        assert_close(found, function(*args, causal=True))
        found.sum().backward()


def test_memory_is_that_of_a_tile(monkeypatch):
    """256² 16 exponents take 4 MiB in float32; also where the backward pass needs them."""
    monkeypatch.setattr(module, "TILE", 2**15)
    args = [x.requires_grad_() for x in draw(8, 256, 256, 16, dtype=torch.float32)]
    aft_full(*args).sum().backward()
    assert peak_bytes(lambda: aft_full(*args).sum().backward()) < 2**20 * 2
