"""What both engines do with chunks and decay logs: every sum against one written out."""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch.engines import chunks

INF = math.inf


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def decay_logs(*shape, seed=0, resets=0.1):
    """Between 0 and -3, some -50, some -inf."""
    rng = np.random.default_rng(seed)
    g = -rng.uniform(0, 3, size=shape)
    g[rng.random(shape) < resets] = -50
    g[rng.random(shape) < resets] = -INF
    return torch.from_numpy(g)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 7, 8, 100])
@pytest.mark.parametrize("N", [1, 2, 7])
def test_split_and_merge(N, chunk_size):
    x = draw(2, 3, N, 4)
    pieces = chunks.split(x, chunk_size)
    n = math.ceil(N / chunk_size)
    assert pieces.shape == (2, 3, n, chunk_size, 4)
    for t in range(N):
        assert torch.equal(pieces[..., t // chunk_size, t % chunk_size, :], x[..., t, :])
    assert pieces.flatten(-3, -2)[..., N:, :].eq(0).all()
    assert torch.equal(chunks.merge(pieces, N), x)


@pytest.mark.parametrize("C", [1, 3])
@pytest.mark.parametrize("L", [1, 2, 5])
def test_sums_over_a_part_of_a_chunk(L, C):
    g = decay_logs(2, L, C, seed=L)
    for t in range(L):
        for sums, part in (
            (chunks.sums_through, g[:, : t + 1]),
            (chunks.sums_before, g[:, :t]),
            (chunks.sums_after, g[:, t + 1 :]),
        ):
            torch.testing.assert_close(sums(g)[:, t], part.sum(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("L", [1, 2, 5, 8])
def test_decays_between(L):
    g = decay_logs(3, L, 1, seed=L)
    found = chunks.decays_between(g)
    assert found.shape == (3, L, L)
    for t in range(L):
        for j in range(L):
            expected = g[:, j + 1 : t + 1, 0].sum(dim=1).exp() if j <= t else torch.zeros(3)
            torch.testing.assert_close(found[:, t, j], expected.double(), rtol=1e-13, atol=0)


def test_known_bug_a_difference_of_cumulative_sums():
    """It loses digits beside a strong decay, and is NaN beside a decay of 0; and so its gradient.

    Four tokens of -0.001 stand around one that wipes everything.
    """
    for wipe, lost in ((-1e4, 1e-4), (-1e6, 1e-2), (-INF, INF)):
        g = torch.tensor([-0.001, wipe, -0.001, -0.001, -0.001])[:, None].requires_grad_()
        G = g.cumsum(dim=0)[:, 0]
        wrong = G[4] - G[1]
        assert wrong.isnan() if lost == INF else abs(wrong / -0.003 - 1) > lost
        decays = chunks.decays_between(g)
        assert abs(decays[4, 1].log() / -0.003 - 1) < 1e-4  # 0.003 beside 1: three digits less
        (gradient,) = torch.autograd.grad(decays.sum(), g)
        assert gradient.isfinite().all()
        # Entry [t, j] depends on g_{j+1} ... g_t alone.
        (gradient,) = torch.autograd.grad(chunks.decays_between(g)[4, 1], g)
        assert gradient[:2].eq(0).all() and gradient[2:].gt(0.9).all()


def test_decays_in_float32_keep_their_digits_however_many_there_are():
    g = torch.full((4096, 1), -0.1)
    decays = chunks.decays_between(g)
    exact = math.exp(5 * torch.tensor(-0.1).double())
    for t in (5, 500, 4095):
        assert abs(decays[t, t - 5] / exact - 1) < 1e-6
    assert decays[4095, 0] == 0 and decays[0, 4095] == 0  # exp(-409.5), and the future


def test_the_masked_future_leaves_no_trace_in_gradients():
    """Masked before exp: exp of the future would be inf, and 0 * inf is NaN."""
    g = torch.full((6, 1), -200.0, requires_grad=True)
    decays = chunks.decays_between(g)
    assert torch.equal(decays, torch.eye(6))
    (gradient,) = torch.autograd.grad(decays.sum(), g)
    assert gradient.eq(0).all()


def test_carry():
    S, writes = draw(3, 4), draw(2, 5, 3, 4, seed=1)
    a, T = draw(2, 5, 3, 1, seed=2), draw(2, 5, 3, 3, seed=3)
    for transitions, apply in ((a, torch.mul), (T, torch.matmul)):
        starts, last = chunks.carry(S.expand(2, 3, 4), transitions, writes, apply)
        assert starts.shape == (2, 5, 3, 4)
        state = S.expand(2, 3, 4)
        for i in range(5):
            torch.testing.assert_close(starts[:, i], state, rtol=0, atol=1e-13)
            state = apply(transitions[:, i], state) + writes[:, i]
        torch.testing.assert_close(last, state, rtol=0, atol=1e-13)
