"""A sequence in segments: the same results however it is cut, and what is kept of it."""

from unittest import mock

import pytest
import torch

from lesson_code.torch.engines import segments

CALLS = []


def running_sum(q, v, S, chunk_size):
    """An operator of the simplest kind: each token adds its value, and reads q times the sum."""
    CALLS.append((q.shape[1], chunk_size))
    sums = S[:, :1] + v.cumsum(dim=1)
    return q * sums, sums[:, -1:].expand(S.shape)


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()


def draw(N, G=2):
    generator = torch.Generator().manual_seed(N)
    return [torch.randn(*s, generator=generator) for s in ((G, N, 3), (G, N, 3), (G, 4, 3))]


@pytest.mark.parametrize(
    ("N", "chunk_size", "cut"),
    [
        (12, 4, [(4, 4), (4, 4), (4, 4)]),  # 10 positions of 2 sequences: one chunk
        (11, 2, [(4, 2), (4, 2), (2, 2), (1, 1)]),
        (3, 3, [(3, 3)]),
        (7, 7, [(7, 7)]),  # a chunk is never cut
    ],
)
def test_segments_are_whole_chunks_and_a_rest(N, chunk_size, cut):
    q, v, S = draw(N)
    with mock.patch.object(segments, "SEGMENT", {"cpu": 10}):
        out, last = segments.by_segments(running_sum, (q, v), S, chunk_size)
    assert cut == CALLS
    torch.testing.assert_close(out, q * (S[:, :1] + v.cumsum(dim=1)))
    torch.testing.assert_close(last, (S[:, :1] + v.sum(dim=1, keepdim=True)).expand(S.shape))


def test_queries_may_have_more_leading_dimensions():
    q, v, S = draw(6)
    many = torch.stack([q, 2 * q])
    out, last = segments.by_segments(running_sum, (many, v), S, 2)
    one, same = segments.by_segments(running_sum, (q, v), S, 2)
    torch.testing.assert_close(out, torch.stack([one, 2 * one]))
    assert last.shape == S.shape
    torch.testing.assert_close(last, same)


@pytest.mark.parametrize(("N", "times"), [(8, 1), (9, 2)])
def test_long_sequences_are_computed_again(N, times):
    q, v, S = (x.requires_grad_() for x in draw(N))
    with mock.patch.object(segments, "LONG", 8):
        out, last = segments.by_segments(running_sum, (q, v), S, N)
        torch.autograd.grad(out.sum() + last.sum(), (q, v, S))
    assert len(CALLS) == times
    CALLS.clear()
    with mock.patch.object(segments, "LONG", 8), torch.no_grad():
        segments.by_segments(running_sum, (q, v), S, N)
    assert len(CALLS) == 1
