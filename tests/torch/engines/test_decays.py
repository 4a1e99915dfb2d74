"""What fades inside a chunk: products, factors and their gradients, against sums written out."""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch.engines import decays
from tests.arrays import assert_close

INF = math.inf
WIDTHS = pytest.mark.parametrize("width", [1, 5], ids=["shared", "by channel"])
EARLY = pytest.mark.parametrize("early", [False, True])


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def decay_logs(*shape, seed=0, resets=0.1):
    """Between 0 and -3, some -50, some -inf."""
    rng = np.random.default_rng(seed)
    g = -rng.uniform(0, 3, size=shape)
    g[rng.random(shape) < resets] = -50
    g[rng.random(shape) < resets] = -INF
    return torch.from_numpy(g)


def faded(x, y, g, early):
    """Every product by itself, each decay the exp of its own sum."""
    L, g = x.shape[-2], g.expand(x.shape)
    P = []
    for t in range(L):
        for j in range(L):
            if j > t or (early and j == t):
                P.append(0 * (x[..., t, :] * y[..., j, :]).sum(dim=-1))
            else:
                between = g[..., j + 1 : t if early else t + 1, :].sum(dim=-2).exp()
                P.append((x[..., t, :] * between * y[..., j, :]).sum(dim=-1))
    return torch.stack(P, dim=-1).unflatten(-1, (L, L))


def products(fading, x, y, early):
    return fading.meet([(x, early)], [y])[0][0][0]


def factors(g):
    """before, through, to_end and total."""
    L = g.shape[-2]
    parts = [[g[..., :t, :] for t in range(L)], [g[..., : t + 1, :] for t in range(L)]]
    parts += [[g[..., t + 1 :, :] for t in range(L)], [g]]
    return [torch.stack([x.sum(dim=-2) for x in part], dim=-2).exp() for part in parts]


@pytest.mark.parametrize("L", [1, 2, 5])
@WIDTHS
def test_sums_over_a_part_of_a_chunk(L, width):
    g = decay_logs(2, L, width, seed=L)
    for t in range(L):
        for sums, part in (
            (decays.sums_through, g[:, : t + 1]),
            (decays.sums_before, g[:, :t]),
        ):
            torch.testing.assert_close(sums(g)[:, t], part.sum(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("L", [1, 2, 3, 7, 8, 9, 16, 24, 33])
@WIDTHS
@EARLY
def test_products_and_factors_are_the_sums(L, width, early):
    x, y, g = draw(2, 3, L, 5), draw(2, 3, L, 5, seed=1), decay_logs(2, 3, L, width, seed=L)
    fading = decays.decays(g)
    (row,), (x_faded,), y_faded, total = fading.meet([(x, early)], [y, 2 * y])
    for scale, P in enumerate(row, 1):
        assert_close(P.tril(), scale * faded(x, y, g, early))
    found = fading.factors()
    for factor, right in zip(found, factors(g), strict=True):
        assert_close(factor, right)
    before, through, to_end, whole = found
    assert_close(x_faded, x * (before if early else through))
    assert_close(y_faded[1], 2 * y * to_end)
    assert_close(total, whole)


@pytest.mark.parametrize("L", [1, 2, 3, 7, 8, 9, 16, 24, 33])
@WIDTHS
def test_gradients_are_those_of_the_sums(L, width):
    """Of two products of the same decays, early and late, and of all factors."""
    x, y, a, b = (draw(2, L, 5, seed=i).requires_grad_() for i in range(4))
    g = decay_logs(2, L, width, seed=L).requires_grad_()
    d_early, d_late = draw(2, L, L, seed=7).tril(-1), draw(2, L, L, seed=8).tril()
    weights = [draw(*w.shape, seed=9) for w in factors(g)]
    loss = (d_early * faded(x, y, g, True)).sum() + (d_late * faded(a, b, g, False)).sum()
    loss = loss + sum((w * f).sum() for w, f in zip(weights, factors(g), strict=True))
    expected = torch.autograd.grad(loss, (x, y, a, b, g))

    fading = decays.decays(g.detach())
    fading.factors()
    found = []
    for pair, dP, early in (((x, y), d_early, True), ((a, b), d_late, False)):
        pair = [x.detach() for x in pair]
        found += [torch.zeros_like(x) for x in pair]
        fading.add_gradients(dP, products(fading, *pair, early), *pair, early, *found[-2:])
    before, through, *rest = (w * f.detach() for w, f in zip(weights, factors(g), strict=True))
    found.append(fading.log_gradient([(before, True), (through, False)], *rest))
    for x, right in zip(found, expected, strict=True):
        assert_close(x, right)


@WIDTHS
def test_known_bug_a_difference_of_cumulative_sums(width):
    """It loses digits beside a strong decay, and is NaN beside a decay of 0.

    Four tokens of -0.001 stand around one that wipes everything.
    """
    one = torch.ones(5, width)
    for wipe, lost in ((-1e4, 1e-4), (-1e6, 1e-2), (-INF, INF)):
        g = torch.tensor([-0.001, wipe, -0.001, -0.001, -0.001])[:, None].repeat(1, width)
        G = g.cumsum(dim=0)[:, 0]
        wrong = G[4] - G[1]
        assert wrong.isnan() if lost == INF else abs(wrong / -0.003 - 1) > lost
        P = products(decays.decays(g), one, one / width, False)
        assert abs(P[4, 1].log() / -0.003 - 1) < 1e-4  # 0.003 beside 1: three digits less
        assert P[4, 0] == 0


@WIDTHS
def test_decays_in_float32_keep_their_digits_however_many_there_are(width):
    one, g = torch.ones(4096, width), torch.full((4096, width), -0.1)
    P = products(decays.decays(g), one, one / width, False)
    exact = math.exp(5 * torch.tensor(-0.1).double())
    for t in (5, 500, 4095):
        assert abs(P[t, t - 5] / exact - 1) < 1e-6
    assert P[4095, 0] == 0  # exp(-409.5)


@WIDTHS
def test_the_future_leaves_no_trace_in_gradients(width):
    """fla's chunks took exp before the mask: exp of the future is inf, and 0 * inf is NaN."""
    one, g = torch.ones(1, 33, width), torch.full((1, 33, width), -200.0)
    fading = decays.decays(g)
    P = products(fading, one, one / width, False)
    fading.factors()
    assert torch.equal(P[0].tril(), torch.eye(33))
    dx, dy, nothing = torch.zeros(3, 1, 33, width)
    fading.add_gradients(torch.ones(1, 33, 33).tril(), P, one, one / width, False, dx, dy)
    assert dx.isfinite().all() and dy.isfinite().all()
    rows = [(nothing, True), (nothing, False)]
    assert fading.log_gradient(rows, nothing, torch.zeros(1, 1, width)).eq(0).all()
