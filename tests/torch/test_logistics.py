"""The mixture of logistics over the levels of a pixel, against sums in float64."""

import numpy as np
import pytest
import torch

from lesson_code.torch import draw_logistic_mixture, logistic_mixture


def by_hand(parameters, levels):
    """Probabilities (levels,) of one mixture, as differences of sigmoids at the bins' edges."""
    logits, means, log_scales = np.split(np.asarray(parameters, dtype=np.float64), 3)
    weights = np.exp(logits) / np.exp(logits).sum()
    edges = (np.arange(levels + 1) - 0.5) * 2 / (levels - 1) - 1
    edges[0], edges[-1] = -np.inf, np.inf
    with np.errstate(over="ignore"):
        cumulative = 1 / (1 + np.exp(-(edges[:, None] - means) / np.exp(log_scales)))
    return (np.diff(cumulative, axis=0) * weights).sum(axis=1)


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
@pytest.mark.parametrize("K", [1, 2, 10])
def test_probabilities_are_the_shares_of_the_bins(levels: int, K: int) -> None:
    rng = np.random.default_rng(levels + K)
    parameters = rng.normal(size=(4, 3, 3 * K))
    parameters[..., 2 * K :] -= 2
    found = logistic_mixture(
        torch.from_numpy(parameters)[..., None, :], torch.arange(levels), levels
    ).exp()
    expected = [[by_hand(p, levels) for p in row] for row in parameters]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-14)
    np.testing.assert_allclose(found.sum(dim=-1), 1, rtol=1e-12)


def test_far_from_the_mean_the_logarithm_keeps_its_digits() -> None:
    # A scale of e^-6, the mean at -1: the bin of level 200 of 256 is about 600 scales away.
    parameters = torch.tensor([0.0, -1.0, -6.0])
    found = logistic_mixture(parameters, torch.tensor(200), 256).item()
    h, c, s = 1 / 255, 2 * 200 / 255 - 1, np.exp(-6.0)
    lower, upper = (c - h + 1) / s, (c + h + 1) / s
    expected = -lower + np.log(-np.expm1(lower - upper))  # sigmoids are 1 - e^-x up there
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_nothing_but_the_logarithm(dtype: torch.dtype) -> None:
    # Bins of 256 levels are as narrow as the numbers of bfloat16 near 1 are far apart.
    torch.manual_seed(0)
    parameters, pixels = torch.randn(7, 1, 6).to(dtype), torch.arange(256)
    found = logistic_mixture(parameters, pixels, 256)
    assert found.dtype == dtype
    expected = logistic_mixture(parameters.double(), pixels, 256).to(dtype)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)

    n, parameters = 100_000, torch.tensor([0.0, 0.25, -1.0], dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    drawn = draw_logistic_mixture(parameters.expand(n, -1), 256, generator=generator)
    expected = by_hand(parameters.double(), 256)
    deviation = np.sqrt(expected * (1 - expected) / n)
    assert (abs(np.bincount(drawn, minlength=256) / n - expected) < 5 * deviation).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("levels", [200, 256, 257, 70_000])
def test_pixels_of_every_integer_dtype(dtype: torch.dtype, levels: int) -> None:
    parameters, pixels = torch.tensor([0.0, -0.9, -2.0]), torch.tensor([0, 1, 100])
    expected = logistic_mixture(parameters, pixels, levels)
    assert torch.equal(logistic_mixture(parameters, pixels.to(dtype), levels), expected)


def test_draws_beside_nan_are_as_without_it() -> None:
    parameters = torch.zeros(4, 3)
    expected = draw_logistic_mixture(parameters, 17, generator=torch.Generator().manual_seed(0))
    parameters[1] = torch.nan
    found = draw_logistic_mixture(parameters, 17, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert 0 <= found[1] < 17


def test_gradients() -> None:
    torch.manual_seed(0)
    parameters = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    pixels = torch.tensor([0, 1, 2, 3, 4])
    assert torch.autograd.gradcheck(lambda p: logistic_mixture(p, pixels, 5), parameters)


def test_gradients_are_finite_at_the_edges_and_far_away() -> None:
    parameters = torch.tensor([[0.0, 50.0, -12.0], [0.0, -50.0, 5.0]], requires_grad=True)
    logistic_mixture(parameters[:, None], torch.arange(17), 17).sum().backward()
    assert parameters.grad.isfinite().all()


def test_draws_have_these_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = torch.tensor([0.0, 1.0, -0.8, 0.4, -2.0, -1.0])
    n = 200_000
    drawn = draw_logistic_mixture(parameters.expand(n, -1), 5, generator=generator)
    expected = by_hand(parameters, 5)
    found = np.bincount(drawn, minlength=5) / n
    deviation = np.sqrt(expected * (1 - expected) / n)
    assert (abs(found - expected) < 5 * deviation).all()


def test_draws_repeat_with_the_seed() -> None:
    parameters = torch.zeros(100, 3)
    first, second, other = (
        draw_logistic_mixture(parameters, 17, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert first.dtype == torch.int64 and first.min() >= 0 and first.max() <= 16


@pytest.mark.parametrize(
    ("parameters", "pixels", "levels", "error", "message"),
    [
        (torch.zeros(3).long(), torch.tensor(0), 4, TypeError, "parameters must"),
        ([0.0, 0.0, 0.0], torch.tensor(0), 4, TypeError, "parameters must"),
        (torch.zeros(2, 4), torch.tensor(0), 4, ValueError, r"\(\.\.\., 3K\).*got \(2, 4\)"),
        (torch.zeros(2, 0), torch.tensor(0), 4, ValueError, "3K"),
        (torch.tensor(0.0), torch.tensor(0), 4, ValueError, "3K"),
        (torch.zeros(3), torch.tensor(0.0), 4, TypeError, "pixels must have an integer dtype"),
        (torch.zeros(3), 0, 4, TypeError, "pixels must be a torch tensor, got int"),
        (torch.zeros(3), torch.tensor(0), 1, ValueError, "levels must be at least 2"),
        (torch.zeros(3), torch.tensor(0), 4.0, TypeError, "levels must"),
        (torch.zeros(5, 3), torch.zeros(4).long(), 4, ValueError, "parameters.*pixels"),
    ],
)
def test_refusals(parameters, pixels, levels, error, message) -> None:
    with pytest.raises(error, match=message):
        logistic_mixture(parameters, pixels, levels)
