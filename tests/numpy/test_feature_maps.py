"""Feature maps: their values, their similarities, and the randomness of the random ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesson_code.numpy import (
    elu_plus_one,
    exponential,
    hedgehog,
    identity,
    linear_attention,
    polynomial,
    positive_random_features,
    relu,
    softmax_attention,
    taylor,
)

PLAIN = {
    elu_plus_one: lambda x: x + 1 if x > 0 else math.exp(x),
    relu: lambda x: x if x > 0 else 0.0,
    identity: lambda x: x,
    exponential: math.exp,
}
FACTORIES = [
    lambda dim: polynomial(1, dim),
    lambda dim: polynomial(3, dim),
    taylor,
    hedgehog,
    lambda dim: hedgehog(dim, weight=np.full((3, dim), 0.25), bias=np.arange(3.0) / 4),
    lambda dim: positive_random_features(7, dim),
    lambda dim: positive_random_features(7, dim, orthogonal=False),
]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}


@pytest.mark.parametrize("phi", PLAIN)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_plain_maps_elementwise(phi, dtype):
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(dtype)
    x[0, 0] = [0, -3, 3]
    features = phi(x)
    assert features.shape == x.shape and features.dtype == x.dtype
    expected = [PLAIN[phi](float(value)) for value in x.ravel()]
    np.testing.assert_allclose(features.ravel(), expected, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("phi", PLAIN)
def test_plain_maps_pass_nan_and_leave_the_rest(phi):
    x = np.array([[0.5, np.nan], [-0.5, 1.0]])
    before = x.copy()
    assert np.isnan(phi(x)).tolist() == [[False, True], [False, False]]
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("phi", [*PLAIN, taylor(3)])
def test_maps_refuse_what_is_not_floating(phi):
    for wrong in (np.arange(3), np.ones(3, bool), [0.1, 0.2, 0.3], 0.5):
        with pytest.raises(TypeError, match="^x must "):
            phi(wrong)


def test_elu_plus_one_is_exp_below_zero():
    x = np.array([-80.0, -30.0, -17.5], "float32")
    assert (elu_plus_one(x) > 0).all()  # elu(x) + 1 is 0 for all three
    np.testing.assert_allclose(elu_plus_one(x), np.exp(x.astype(float)), rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_elu_plus_one_at_the_ends(dtype):
    largest = np.finfo(dtype).max
    x = np.array([-np.inf, -largest, largest, np.inf], dtype)
    np.testing.assert_array_equal(elu_plus_one(x), np.array([0, 0, largest, np.inf], dtype))


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_factories_keep_leading_shape_and_dtype(make, dtype):
    phi = make(4)
    x = np.random.default_rng(1).normal(size=(2, 3, 5, 4)).astype(dtype)
    features = phi(x)
    assert features.shape == (2, 3, 5, phi.num_features) and features.dtype == x.dtype
    np.testing.assert_allclose(features, phi(x.astype(float)), rtol=TOLERANCE[dtype], atol=1e-3)
    # Each vector has its own features, whatever stands beside it.
    np.testing.assert_allclose(phi(x[1, 2, 3]), features[1, 2, 3], rtol=TOLERANCE[dtype])
    assert phi(x[:, :0]).shape == (2, 0, 5, phi.num_features)


@pytest.mark.parametrize("make", FACTORIES)
def test_factories_refuse_another_width(make):
    phi = make(4)
    with pytest.raises(ValueError, match=r"^x must have shape \(\.\.\., 4\) for .*got \(5, 3\)"):
        phi(np.zeros((5, 3)))
    with pytest.raises(ValueError, match="^x must have shape"):
        phi(np.array(1.0))


@pytest.mark.parametrize("make", FACTORIES)
def test_nan_stays_in_its_vector(make):
    x = np.random.default_rng(2).normal(size=(5, 4))
    x[2, 1] = np.nan
    assert np.isnan(make(4)(x)).any(axis=-1).tolist() == [False, False, True, False, False]


@given(degree=st.integers(1, 4), dim=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_polynomial_similarity(degree, dim, seed):
    phi = polynomial(degree, dim)
    q, k = np.random.default_rng(seed).normal(size=(2, 6, dim))
    assert phi.num_features == math.comb(dim + degree, degree) == phi(q).shape[-1]
    gram = [[(1 + sum(a * b for a, b in zip(x, y, strict=True))) ** degree for y in k] for x in q]
    np.testing.assert_allclose(phi(q) @ phi(k).T, gram, rtol=1e-9, atol=1e-9)


def test_polynomial_order():
    a, b = 2.0, 5.0
    root = math.sqrt(2)
    expected = [1, root * a, root * b, a * a, root * a * b, b * b]
    np.testing.assert_allclose(polynomial(2, 2)(np.array([a, b])), expected, rtol=1e-12)


@given(dim=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_taylor_similarity(dim, seed):
    phi = taylor(dim)
    q, k = 3 * np.random.default_rng(seed).normal(size=(2, 6, dim))
    assert phi.num_features == 1 + dim + dim * (dim + 1) // 2 == phi(q).shape[-1]
    s = np.array([[sum(x * y) / math.sqrt(dim) for y in k] for x in q])
    similarity = phi(q) @ phi(k).T
    np.testing.assert_allclose(similarity, 1 + s + s**2 / 2, rtol=1e-9, atol=1e-9)
    assert similarity.min() > 0.499


@given(dim=st.integers(1, 7), m=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_hedgehog_similarity(dim, m, seed):
    rng = np.random.default_rng(seed)
    W, b = rng.normal(size=(m, dim)) / 2, rng.normal(size=m) / 2
    q, k = rng.normal(size=(2, 6, dim))
    phi = hedgehog(dim, weight=W, bias=b)
    assert phi.num_features == 2 * m == phi(q).shape[-1]
    similarity = [[2 * np.cosh(W @ (x + y) + 2 * b).sum() for y in k] for x in q]
    np.testing.assert_allclose(phi(q) @ phi(k).T, similarity, rtol=1e-9)


def test_hedgehog_order_and_defaults():
    x = np.array([[0.5, -1.0], [0.25, 2.0]])
    np.testing.assert_allclose(hedgehog(2)(x), np.exp(np.concatenate([x, -x], axis=-1)))
    np.testing.assert_allclose(hedgehog(2, weight=np.eye(2), bias=np.zeros(2))(x), hedgehog(2)(x))
    np.testing.assert_allclose(hedgehog(2, bias=np.ones(2))(x), hedgehog(2)(x + 1))


def test_hedgehog_a_matrix_for_each_head():
    rng = np.random.default_rng(0)
    W, b, x = rng.normal(size=(3, 5, 4)), rng.normal(size=(3, 5)), rng.normal(size=(2, 3, 7, 4))
    features = hedgehog(4, weight=W, bias=b)(x)
    assert features.shape == (2, 3, 7, 10)
    for head in range(3):
        alone = hedgehog(4, weight=W[head], bias=b[head])
        np.testing.assert_allclose(features[:, head], alone(x[:, head]))


# Positive random features. Rows of W can be read off a map: phi(D^(1/4) e_i) = exp(W e_i - 1/2)/√m.


def rows_of(phi, dim):
    features = phi(dim**0.25 * np.eye(dim))  # (D, m)
    return (np.log(features * math.sqrt(phi.num_features)) + 0.5).T  # (m, D)


def test_random_features_are_the_equation():
    dim, m = 5, 8
    phi = positive_random_features(m, dim, seed=3)
    W = rows_of(phi, dim)
    x = np.random.default_rng(0).normal(size=dim)
    scaled = x / dim**0.25
    expected = [math.exp(w @ scaled - scaled @ scaled / 2) / math.sqrt(m) for w in W]
    np.testing.assert_allclose(phi(x), expected, rtol=1e-9)


def test_orthogonal_blocks_and_redrawn_lengths():
    dim, m = 3, 8  # blocks of 3, 3 and 2
    gram = np.zeros((m, m))
    lengths = []
    for seed in range(300):
        W = rows_of(positive_random_features(m, dim, seed=seed), dim)
        gram = np.maximum(gram, abs(W @ W.T))
        lengths.extend((W * W).sum(axis=-1))
    inside = np.arange(m)[:, None] // dim == np.arange(m) // dim
    assert gram[inside & ~np.eye(m, dtype=bool)].max() < 1e-8
    assert gram[~inside].min() > 1
    # Squared lengths are chi-squared with D degrees of freedom: mean D, variance 2 D.
    assert abs(np.mean(lengths) - dim) < 0.2
    assert abs(np.var(lengths) - 2 * dim) < 1.2


def test_same_seed_same_features():
    x = np.random.default_rng(0).normal(size=(5, 4))
    first = positive_random_features(9, 4, seed=1)(x)
    np.testing.assert_array_equal(positive_random_features(9, 4, seed=1)(x), first)
    np.testing.assert_array_equal(
        positive_random_features(9, 4)(x), positive_random_features(9, 4, seed=0)(x)
    )
    assert abs(positive_random_features(9, 4, seed=2)(x) - first).max() > 0.01
    assert abs(positive_random_features(9, 4, seed=1, orthogonal=False)(x) - first).max() > 0.01


def ratios(make_phi, dim, draws):
    """Estimate over exact similarity for each draw and feature, q' = k' = e1 / 2; true mean 1.

    It must be along e1: there QR without the sign fix is far off, and almost nowhere else.
    """
    x = np.zeros(dim)
    x[0] = dim**0.25 / 2
    exact = math.exp(x @ x / math.sqrt(dim))
    features = np.array([make_phi(seed)(x) for seed in range(draws)])
    return features**2 * features.shape[-1] / exact  # (draws, m)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_random_features_are_unbiased(orthogonal):
    found = ratios(
        lambda seed: positive_random_features(6, 4, orthogonal=orthogonal, seed=seed), 4, 8000
    )
    # One feature has a standard deviation of about 1.3, its mean over the draws one of 0.015.
    assert abs(found.mean() - 1) < 0.025
    np.testing.assert_allclose(found.mean(axis=0), 1, atol=0.08)


def test_without_the_sign_of_qr_features_are_biased():
    """The recipe of known libraries: the test above must be able to refuse it."""

    def make_phi(seed):
        rng = np.random.default_rng(seed)
        Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
        W = np.sqrt(rng.chisquare(4, size=(4, 1))) * Q.T
        return lambda x: np.exp(W @ (x / math.sqrt(2)) - x @ x / 4) / 2

    found = ratios(make_phi, 4, 8000)
    assert abs(found.mean() - 0.83) < 0.025
    assert found[:, 0].mean() < 0.4


def test_orthogonal_rows_lower_the_variance():
    """Summed over z and -z, as only the even terms of exp gain from orthogonal rows."""
    dim, x = 8, np.full(8, 8**-0.5 * 8**0.25 * 0.35)  # |q' + k'| = 0.7
    pair = np.stack([x, -x])
    variance = {}
    for orthogonal in (True, False):
        maps = (
            positive_random_features(dim, dim, orthogonal=orthogonal, seed=seed)
            for seed in range(3000)
        )
        variance[orthogonal] = np.var([(phi(pair) ** 2).sum() for phi in maps])
    assert variance[True] < 0.6 * variance[False]  # about 0.4


def test_random_features_approach_softmax_attention():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 12, 5)) / 2
    v = rng.normal(size=(12, 3))
    exact = softmax_attention(q, k, v)
    error = [
        np.abs(linear_attention(q, k, v, feature_map=positive_random_features(m, 5)) - exact).max()
        for m in (10, 10000)
    ]
    assert error[1] < 0.02 < error[0]


def test_names():
    assert repr(polynomial(3, 4)) == "polynomial(degree=3, dim=4)"
    assert repr(taylor(4)) == "taylor(dim=4)"
    assert repr(hedgehog(4)) == "hedgehog(dim=4)"
    assert repr(hedgehog(4, weight=np.ones((3, 4)))) == "hedgehog(dim=4, weight (3, 4))"
    assert (
        repr(positive_random_features(8, 4, orthogonal=False, seed=5))
        == "positive_random_features(num_features=8, dim=4, orthogonal=False, seed=5)"
    )


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: polynomial(0, 3), ValueError, "degree"),
        (lambda: polynomial(2.0, 3), TypeError, "degree"),
        (lambda: polynomial(True, 3), TypeError, "degree"),
        (lambda: polynomial(2, 0), ValueError, "dim"),
        (lambda: taylor(-1), ValueError, "dim"),
        (lambda: taylor("3"), TypeError, "dim"),
        (lambda: hedgehog(0), ValueError, "dim"),
        (lambda: hedgehog(3, weight=np.ones((4, 2))), ValueError, "weight"),
        (lambda: hedgehog(3, weight=np.ones(())), ValueError, "weight"),
        (lambda: hedgehog(3, weight=np.ones(3)), ValueError, "weight"),
        (lambda: hedgehog(3, weight=[[1.0, 0.0, 0.0]]), TypeError, "weight"),
        (lambda: hedgehog(3, weight=np.ones((4, 3), int)), TypeError, "weight"),
        (lambda: hedgehog(3, bias=np.ones(2)), ValueError, "bias"),
        (lambda: hedgehog(3, weight=np.ones((4, 3)), bias=np.ones(3)), ValueError, "bias"),
        (lambda: hedgehog(3, bias=1.0), TypeError, "bias"),
        (lambda: positive_random_features(-1, 3), ValueError, "num_features"),
        (lambda: positive_random_features(0, 3), ValueError, "num_features"),
        (lambda: positive_random_features(4, 0), ValueError, "dim"),
        (lambda: positive_random_features(4, 3, seed=-1), ValueError, "seed"),
        (lambda: positive_random_features(4, 3, seed=0.5), TypeError, "seed"),
    ],
)
def test_factories_refuse(make, error, name):
    with pytest.raises(error, match=f"^{name} must (be|have) "):
        make()
