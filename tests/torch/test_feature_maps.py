"""Feature maps in torch: against NumPy, under everything that torch adds, and known bugs."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lesson_code.numpy as reference
from lesson_code.torch import feature_maps
from lesson_code.torch.feature_maps import (
    elu_plus_one,
    exponential,
    hedgehog,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
INF = math.inf
PLAIN = [elu_plus_one, relu, identity, exponential]
WIDTH = 4
MADE = [
    polynomial(1, WIDTH),
    polynomial(3, WIDTH),
    taylor(WIDTH),
    hedgehog(WIDTH),
    positive_random_features(7, WIDTH, seed=2),
    positive_random_features(7, WIDTH, orthogonal=False),
]


def name(phi):
    return getattr(phi, "__name__", repr(phi))


every_map = pytest.mark.parametrize("phi", PLAIN + MADE, ids=name)
every_made_map = pytest.mark.parametrize("phi", MADE, ids=name)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def twin(phi):
    """The same map of NumPy's: the plain one, or the one that its description makes."""
    return eval(name(phi), vars(reference))


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def assert_close(found, expected, tolerance=1e-12):
    found, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# The features.


@every_map
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_map_is_its_numpy_twin(phi, dtype):
    x = draw(2, 3, 5, WIDTH, dtype=dtype)
    features = phi(x)
    assert features.dtype == dtype
    assert features.shape == (2, 3, 5, getattr(phi, "num_features", WIDTH))
    assert_close(features, twin(phi)(x.double().numpy()), TOLERANCE[dtype])
    assert phi(x[:, :0]).shape == (2, 0, 5, features.shape[-1])


@every_map
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(phi, dtype):
    """As good as the exact result, rounded once."""
    x = draw(50, WIDTH, dtype=dtype)
    exact = torch.from_numpy(twin(phi)(x.double().numpy()))
    rounding = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(phi(x).double(), exact, rtol=rounding, atol=1e-7)


@every_map
def test_nan_goes_where_it_goes_in_numpy(phi):
    x = draw(5, WIDTH)
    x[2, 1] = math.nan
    features = phi(x)
    assert features.isnan().any(-1).tolist() == [False, False, True, False, False]
    assert_close(features, twin(phi)(x.numpy()))


def test_identity_is_no_copy():
    for dtype in TOLERANCE:
        x = draw(3, dtype=dtype)
        assert identity(x) is x


def test_same_seed_same_features_here_and_in_numpy():
    x = draw(5, WIDTH)
    for orthogonal in (True, False):
        first = positive_random_features(9, WIDTH, orthogonal=orthogonal, seed=1)(x)
        again = positive_random_features(9, WIDTH, orthogonal=orthogonal, seed=1)(x)
        assert (again == first).all()
        other = positive_random_features(9, WIDTH, orthogonal=orthogonal, seed=2)(x)
        assert (other - first).abs().max() > 0.01
        phi = reference.positive_random_features(9, WIDTH, orthogonal=orthogonal, seed=1)
        assert_close(first, phi(x.numpy()))


def test_the_callers_random_numbers_stay_as_they_are():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    positive_random_features(9, WIDTH, seed=1)
    assert torch.rand(()) == expected


@every_dtype
def test_elu_plus_one_at_the_ends(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([-INF, -largest, -1000, 0, 1000, largest, INF], dtype=dtype)
    x.requires_grad_()
    features = elu_plus_one(x)
    assert features.tolist() == torch.tensor([0, 0, 0, 1, 1001, largest, INF], dtype=dtype).tolist()
    (gradient,) = torch.autograd.grad(features, x, torch.ones_like(x))
    assert gradient.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_hedgehog_of_given_weights_is_its_numpy_twin():
    W, b, x = draw(3, 5, WIDTH), draw(3, 5, seed=1), draw(2, 3, 7, WIDTH, seed=2)
    phi = hedgehog(WIDTH, weight=W, bias=b)
    expected = reference.hedgehog(WIDTH, weight=W.numpy(), bias=b.numpy())(x.numpy())
    assert phi.num_features == 10 and repr(phi) == "hedgehog(dim=4, weight (3, 5, 4), bias (3, 5))"
    assert_close(phi(x), expected)
    half = phi(x.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert_close(half / phi(x.to(torch.bfloat16).double()), torch.ones(2, 3, 7, 10), 5e-3)


def test_hedgehog_learns():
    W, b = draw(5, WIDTH).requires_grad_(), draw(5).requires_grad_()
    x = draw(3, WIDTH, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *a: hedgehog(WIDTH, weight=a[0], bias=a[1])(a[2]), (W, b, x)
    )


# Gradients, transformations, compilation, devices.


@every_map
def test_gradients(phi):
    x = draw(2, WIDTH, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(phi, x)


@every_map
def test_vmap_and_grad(phi):
    x = draw(3, 5, WIDTH, seed=2)
    assert_close(torch.vmap(phi, in_dims=1)(x), phi(x).swapaxes(0, 1))
    gradients = torch.vmap(torch.func.grad(lambda x: phi(x).square().sum()))(x)
    x.requires_grad_()
    assert_close(gradients, torch.autograd.grad(phi(x).square().sum(), x)[0])


@pytest.mark.parametrize("phi", [elu_plus_one, MADE[1], MADE[2], MADE[3]], ids=name)
def test_compiles_as_one_graph(phi):
    torch.compiler.reset()
    x = draw(3, 5, WIDTH, seed=3).requires_grad_()
    compiled = torch.compile(lambda x: phi(x), fullgraph=True, backend="eager")
    assert_close(compiled(x), phi(x))
    gradients = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, phi)]
    assert_close(*gradients)


@every_map
def test_autocast_rounds_nothing(phi):
    x = draw(5, WIDTH, dtype=torch.float32)
    expected = phi(x)
    with torch.autocast("cpu"):
        features = phi(x)
    assert features.dtype == torch.float32 and (features == expected).all()


@every_map
def test_constants_follow_the_device(phi):
    """Fake tensors have a device but no numbers: to mix devices, or to read one, is an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, WIDTH, device="meta", requires_grad=True)
        features = phi(x)
        assert features.device.type == "meta"
        features.sum().backward()


def test_constants_are_made_whatever_the_default_device_and_dtype():
    x = draw(5, WIDTH)
    expected = [phi(x) for phi in MADE]
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            again = [eval(repr(phi), vars(feature_maps))(x) for phi in MADE]
    finally:
        torch.set_default_dtype(torch.float32)
    for found, features in zip(again, expected, strict=True):
        assert (found == features).all()


# Known bugs of known libraries.


@pytest.mark.parametrize(
    ("dtype", "below"),
    [(torch.bfloat16, -6.5), (torch.float16, -8.5), (torch.float32, -18), (torch.float64, -38)],
    ids=str,
)
def test_known_bug_elu_plus_one_does_not_round_to_zero(dtype, below):
    """``elu(x) + 1`` subtracts 1 and adds it again: a key whose features are all 0 is lost."""
    x = torch.full((3,), below, dtype=dtype, requires_grad=True)
    assert (torch.nn.functional.elu(x) + 1 == 0).all()
    features = elu_plus_one(x)
    assert_close(features / math.exp(below), torch.ones(3), torch.finfo(dtype).eps)
    (gradient,) = torch.autograd.grad(features.sum(), x)
    assert_close(gradient / math.exp(below), torch.ones(3), torch.finfo(dtype).eps)


def ratios(make_phi, dim, draws):
    """Estimate over exact similarity for each draw and feature, q' = k' = e1 / 2; true mean 1.

    It must be along e1: there QR without the sign fix is far off, and almost nowhere else.
    """
    x = torch.zeros(dim, dtype=torch.float64)
    x[0] = dim**0.25 / 2
    exact = math.exp(x @ x / math.sqrt(dim))
    features = torch.stack([make_phi(seed)(x) for seed in range(draws)])
    return features**2 * features.shape[-1] / exact  # (draws, m)


def test_known_bug_orthogonal_random_features_have_no_preferred_sign():
    """LAPACK fixes the signs of QR's Q, so that Q alone is not uniform: features are biased."""
    found = ratios(lambda seed: positive_random_features(6, 4, seed=seed), 4, 3000)
    # One feature has a standard deviation of about 1.3, its mean over the draws one of 0.024.
    assert abs(found.mean() - 1) < 0.04
    assert (found.mean(dim=0) - 1).abs().max() < 0.12

    def without_the_signs(seed):
        rng = np.random.default_rng(seed)
        Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
        W = torch.from_numpy(np.sqrt(rng.chisquare(4, size=(4, 1))) * Q.T)
        return lambda x: torch.exp(W @ (x / math.sqrt(2)) - x @ x / 4) / 2

    found = ratios(without_the_signs, 4, 3000)
    assert abs(found.mean() - 0.83) < 0.04
    assert found[:, 0].mean() < 0.4


@every_made_map
def test_known_bug_features_of_a_key_do_not_depend_on_other_keys(phi):
    """Subtracting the largest exponent over all keys lets the last key change the first ones."""
    x = draw(6, WIDTH)
    before = phi(x)[:5]
    x[5] *= 4
    assert (phi(x)[:5] == before).all()


# Arguments.


@every_map
def test_maps_refuse_what_is_no_float_tensor(phi):
    for wrong in (torch.arange(4), torch.ones(4) > 0, np.ones(4), [0.1] * 4, 0.5):
        with pytest.raises(TypeError, match="^x must (be a torch tensor|have a floating dtype)"):
            phi(wrong)


@every_made_map
def test_maps_refuse_another_width(phi):
    with pytest.raises(ValueError, match=r"^x must have shape \(\.\.\., 4\) for .*got \(5, 3\)"):
        phi(torch.zeros(5, 3))
    with pytest.raises(ValueError, match="^x must have shape"):
        phi(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: polynomial(0, 3), ValueError, "degree"),
        (lambda: polynomial(2.0, 3), TypeError, "degree"),
        (lambda: polynomial(2, 0), ValueError, "dim"),
        (lambda: taylor(-1), ValueError, "dim"),
        (lambda: taylor("3"), TypeError, "dim"),
        (lambda: hedgehog(0), ValueError, "dim"),
        (lambda: hedgehog(3, weight=torch.ones(4, 2)), ValueError, "weight"),
        (lambda: hedgehog(3, weight=torch.ones(())), ValueError, "weight"),
        (lambda: hedgehog(3, weight=np.ones((4, 3))), TypeError, "weight"),
        (lambda: hedgehog(3, weight=torch.ones(4, 3, dtype=int)), TypeError, "weight"),
        (lambda: hedgehog(3, weight=torch.ones(4, 3), bias=torch.ones(3)), ValueError, "bias"),
        (lambda: positive_random_features(0, 3), ValueError, "num_features"),
        (lambda: positive_random_features(4, True), TypeError, "dim"),
        (lambda: positive_random_features(4, 3, seed=-1), ValueError, "seed"),
        (lambda: positive_random_features(4, 3, seed=0.5), TypeError, "seed"),
        (lambda: positive_random_features(4, 3, orthogonal=1), TypeError, "orthogonal"),
    ],
)
def test_factories_refuse(make, error, name):
    with pytest.raises(error, match=f"^{name} must (be|have) "):
        make()
