"""Mistakes in the exercises of the chapter on generating images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lesson_code.checks import check_exercise

SEQUENCE = "An image is a sequence"
PIXEL = "A distribution for one pixel"
HALF = "Completing a half"
COUNTING = "Counting what generation costs"
CONTEXTS = "Decoding after a long context"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("p", [0.195, 0.245, 0.195], "do not end half a level outside", PIXEL),
        ("p", [0.1966, 0.25, 0.1966], "the height of the bell", PIXEL),
        ("p", [0.5, 0.231, 0.269], "The bins are moved", PIXEL),
        ("p", [0.62246, 0.24492, 0.62246], "Which side of the edge", PIXEL),
        ("widest", 1.443, "not a whole one", PIXEL),
        ("widest", 0.455, "more than a half", PIXEL),
        ("widest", 1.386, "Upside down", PIXEL),
        ("bits", 1.19, "The logarithm is the natural one", SEQUENCE),
        ("bits", -1.717, "a cost is the negative logarithm", SEQUENCE),
        ("bits", 6.87, "the whole image", SEQUENCE),
        ("bits", 1.558, "if the levels are drawn from p", SEQUENCE),
        ("bits", 1.614, "the mean over the three levels", SEQUENCE),
        ("bits", 1.684, "were averaged first", SEQUENCE),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-images-hand", words, section, **{part: answer})


def test_right_by_hand(capsys) -> None:
    check_exercise("ex-images-hand", p=[0.378, 0.245, 0.378], widest=0.721, bits=1.72)
    assert "p, widest and bits are right" in capsys.readouterr().out


# --- One bin -----------------------------------------------------------------------------------


def softplus(y):
    return max(y, 0.0) + math.log1p(math.exp(-abs(y)))


def one_by_one(rule):
    """rule(x, a, b) for each level, where a and b are the edges of its bin, in widths."""

    def fn(x, mean, scale):
        out = np.empty(x.shape)
        for i, level in np.ndenumerate(x):
            m, s = float(mean[i]), float(scale[i])
            out[i] = rule(int(level), (level - 0.5 - m) / s, (level + 0.5 - m) / s, 1 / s)
        return out

    return fn


def right(x, a, b, width):
    """The complementary cases of the same formula, in scalars."""
    first, last = -softplus(-b), -softplus(a)
    if x in (0, 16):
        return last if x else first
    return first + last + math.log(-math.expm1(-width))


def no_edges(x, a, b, width):
    return right(8, a, b, width)


def edges_exchanged(x, a, b, width):
    return {0: -softplus(a), 16: -softplus(-b)}.get(x, right(x, a, b, width))


def no_third(x, a, b, width):
    if x in (0, 16):
        return right(x, a, b, width)
    return -softplus(-b) - softplus(a)


def cancels(x, a, b, width):
    if x in (0, 16):
        return right(x, a, b, width)
    inside = 1 - math.exp(-width)
    return -softplus(-b) - softplus(a) + (math.log(inside) if inside else -math.inf)


def subtracts(x, mean, scale):
    F = [1 / (1 + np.exp(-(x + half - mean) / scale)) for half in (-0.5, 0.5)]
    F[0][x == 0] = 0
    F[1][x == 16] = 1
    return np.log(F[1] - F[0])


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (one_by_one(no_edges), "a bin with two ends"),
        (one_by_one(edges_exchanged), "the wrong sigmoid was dropped"),
        (one_by_one(no_third), "The third term is missing"),
        (one_by_one(cancels), "loses its digits"),
        (one_by_one(lambda x, a, b, width: -right(x, a, b, width)), "The sign is wrong"),
        (one_by_one(lambda x, a, b, width: right(x, a, b, width) / math.log(2)), "of base 2"),
        (subtracts, "The sigmoids are subtracted"),
    ],
)
def test_one_bin(refused, fn, words) -> None:
    refused("ex-images-bin", words, PIXEL, log_bin=fn)


def test_a_sigmoid_that_is_0_before_its_logarithm(refused) -> None:
    def fn(x, mean, scale):
        a, b = (x - 0.5 - mean) / scale, (x + 0.5 - mean) / scale
        with np.errstate(all="ignore"):
            below, above = -np.log(1 + np.exp(-b)), -np.log(1 + np.exp(a))
        middle = below + above + np.log(-np.expm1(-1 / scale))
        return np.select([x == 0, x == 16], [below, above], middle)

    refused("ex-images-bin", "rounds to 0 before its logarithm is taken", PIXEL, log_bin=fn)


def test_far(refused) -> None:
    check_exercise("ex-images-bin", log_bin=one_by_one(right), far=-1550)
    refused("ex-images-bin", "tiny, but not 0", PIXEL, far=-math.inf)
    refused("ex-images-bin", "at level 0 itself", PIXEL, far=-1600)
    refused("ex-images-bin", "half a level below 0", PIXEL, far=-1650)
    refused("ex-images-bin", "a bell of width 1", PIXEL, far=-15.5)
    refused("ex-images-bin", "The sign is wrong", PIXEL, far=1550)


# --- In place ----------------------------------------------------------------------------------


def recurrent(step, copy=True):
    def fn(q, k, v, *, initial_state=None, return_state=False):
        S = np.zeros((k.shape[1], v.shape[1])) if initial_state is None else initial_state
        S = S.copy() if copy else S
        out = np.array([step(S, *row) for row in zip(q, k, v, strict=True)]).reshape(v.shape)
        return (out, S) if return_state else out

    return fn


def write_and_read(S, q, k, v):
    S += np.multiply.outer(k, v)
    return S.T @ q


def read_and_write(S, q, k, v):
    found = S.T @ q
    S += np.multiply.outer(k, v)
    return found


def wrong_side(S, q, k, v):
    S += np.multiply.outer(k, v)
    return S @ q


def overwrite(S, q, k, v):
    S[:] = np.multiply.outer(k, v)
    return S.T @ q


def test_in_place(refused) -> None:
    label = "ex-images-in-place"
    check_exercise(label, right_ones=1, repaired=recurrent(write_and_read))
    refused(label, "changed in place the state", HALF, repaired=recurrent(write_and_read, False))
    refused(label, "before its own token", HALF, repaired=recurrent(read_and_write))
    refused(label, "wrong side", HALF, repaired=recurrent(wrong_side))
    refused(label, "not carried", HALF, repaired=recurrent(overwrite))
    refused(label, "when the second one begins", HALF, right_ones=5)
    refused(label, "Nothing has been overwritten yet", HALF, right_ones=0)


def test_a_state_that_is_not_used(refused) -> None:
    def fn(q, k, v, *, initial_state=None, return_state=False):
        return recurrent(write_and_read)(q, k, v, return_state=return_state)

    refused("ex-images-in-place", "is initial_state used?", HALF, repaired=fn)


# --- A cache in a buffer -----------------------------------------------------------------------


def decode(q, k, v, *, head=None, scale=None, filled=lambda t, N: t + 1):
    H, N, D = q.shape
    group = H // len(k)
    scale = D**-0.5 if scale is None else scale(D, v.shape[-1])
    keys, values = torch.zeros_like(k), torch.zeros_like(v)
    out = q.new_zeros(H, N, v.shape[-1])
    for t in range(N):
        keys[:, t], values[:, t] = k[:, t], v[:, t]
        for h in range(H):
            g = h // group if head is None else head(h, len(k))
            n = filled(t, N)
            weights = torch.softmax(keys[g, :n] @ q[h, t] * scale, dim=0)
            out[h, t] = weights @ values[g, :n]
    return out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": lambda h, groups: h % groups}, "not neighbors here"),
        ({"head": lambda h, groups: 0}, "All queries read the first head"),
        ({"scale": lambda D, M: 1.0}, "are not divided"),
        ({"scale": lambda D, M: 1 / D}, "It is the root of it"),
        ({"scale": lambda D, M: M**-0.5}, "width of the values"),
        ({"filled": lambda t, N: t}, "The own token is left out"),
        ({"filled": lambda t, N: N}, "The whole buffer is read"),
    ],
)
def test_a_cache_in_a_buffer(refused, options, words) -> None:
    refused("ex-images-buffer", words, CONTEXTS, decode=lambda q, k, v: decode(q, k, v, **options))


def test_groups_of_every_second_head(refused) -> None:
    def fn(q, k, v):
        a, b = decode(q[0::2], k[:1], v[:1]), decode(q[1::2], k[1:], v[1:])
        return torch.cat([a, b])

    refused("ex-images-buffer", "every H'-th head", CONTEXTS, decode=fn)


def test_a_buffer_is_filled_with_what_is_to_come(refused) -> None:
    def fn(q, k, v):
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        return torch.softmax(q @ k.transpose(1, 2) / k.shape[-1] ** 0.5, dim=-1) @ v

    refused("ex-images-buffer", "those to come as well", SEQUENCE, decode=fn)


def test_what_copies_cost(refused) -> None:
    check_exercise("ex-images-buffer", decode=decode, ratio=2.99)
    refused("ex-images-buffer", "Something is left out", COUNTING, ratio=2)
    refused("ex-images-buffer", "Written it is only by the copy", COUNTING, ratio=3.99)


# --- How many at once --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("linear", 45776, "but no z", HALF),
        ("linear", 710_227, "a model of one layer", HALF),
        ("linear", 5699, "one wide head. Eight", COUNTING),
        ("linear", 5722, "one wide head, and has no z", COUNTING),
        ("linear", 355_113, "one head in each layer", HALF),
        ("linear", 88_778, "This is 16 bit", COUNTING),
        ("linear", 177_556, "not their bytes", COUNTING),
        ("linear", 47_662, "10⁹", COUNTING),
        ("cached", 476, "Twice as many as fit", COUNTING),
        ("cached", 3814, "a model of one layer", COUNTING),
        ("cached", 715, "one for each color", COUNTING),
        ("cached", 256, "10⁹", COUNTING),
        ("scores", 37.7, "This is one head", COUNTING),
        ("scores", 75.5, "not their bytes", COUNTING),
        ("scores", 151, "its masked half", COUNTING),
        ("scores", 288, "not 2²⁰", COUNTING),
        ("scores", 4832, "all the layers", COUNTING),
        ("scores", 33.6, "one for each color", COUNTING),
    ],
)
def test_how_many_at_once(refused, part, answer, words, section) -> None:
    refused("ex-images-memory", words, section, **{part: answer})


def test_how_many_fit() -> None:
    check_exercise("ex-images-memory", linear=44_389, cached=238.4, scores=302)
    with pytest.raises(AssertionError, match="cached is not right"):
        check_exercise("ex-images-memory", cached=239)
