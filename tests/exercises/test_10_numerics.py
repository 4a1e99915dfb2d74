"""Mistakes in the exercises of the chapter on floating-point numbers."""

from __future__ import annotations

import math

import pytest
import torch

from lesson_code.checks import check_exercise

SPACING = "Floats have spacing"
STICK = "Sums stick"
REPAIRS = "Two repairs: more digits, or fewer additions"
ZERO = "A feature that rounds to zero"
RANGE = "Exponentials out of range"
WHICH = "Which maximum may be subtracted"
RUNNING = "The running maximum"


@pytest.mark.parametrize(
    ("part", "answer", "words", "section"),
    [
        ("floats", 28, "also at the last one before 40", SPACING),
        ("floats", 24, "Beyond 32 there are floats as well", SPACING),
        ("floats", 36, "the leading 1 is one of them", SPACING),
        ("floats", 17, "the floats of three digits", SPACING),
        ("ones", 32, "the tie was rounded up", SPACING),
        ("ones", 15, "One more can be added", SPACING),
        ("threes", 32, "a sum goes to the nearer float", SPACING),
        ("threes", 48, "Three times as far", SPACING),
        ("threes", 60, "Add once more", SPACING),
    ],
)
def test_by_hand(refused, part, answer, words, section) -> None:
    refused("ex-numerics-hand", words, section, **{part: answer})


def test_right_by_hand() -> None:
    check_exercise("ex-numerics-hand", floats=26, ones=16, threes=64)


# --- A running logarithm -----------------------------------------------------------------------


def naive(x):
    out, total = torch.zeros_like(x), 0.0
    for t in range(x.shape[-2]):
        total = total + torch.exp(x[..., t, :])
        out[..., t, :] = torch.log(total)
    return out


def maximum_of_all(x):
    largest = x.max(dim=-2, keepdim=True).values
    return largest + naive(x - largest)


def steps(x, factor=None, finish=None, start=None):
    """Position by position; the first one begins, unless ``start`` is a maximum and a sum."""
    mu, total = start or (x[..., 0, :], None)
    out = []
    for t in range(x.shape[-2]):
        new = torch.maximum(torch.as_tensor(mu, dtype=x.dtype), x[..., t, :])
        scaled = 0.0 if total is None else total * (factor or right_factor)(mu, new)
        total, mu = scaled + torch.exp(x[..., t, :] - new), new
        out.append((finish or right_end)(mu, total))
    return torch.stack(out, dim=-2)


def right_factor(old, new):
    return torch.exp(old - new)


def right_end(mu, total):
    return mu + torch.log(total)


@pytest.mark.parametrize(
    ("fn", "words", "section"),
    [
        (naive, "leave the range of the format", RANGE),
        (maximum_of_all, "not known at t", WHICH),
        (lambda x: steps(x, factor=lambda old, new: 1), "keeps its scale", RUNNING),
        (lambda x: steps(x, finish=lambda mu, total: total.log()), "added again", RANGE),
        (lambda x: steps(x, finish=lambda mu, total: mu + total), "the sum is not yet", RANGE),
        (
            lambda x: steps(x, finish=lambda mu, total: mu.exp() * total),
            "Their logarithm is asked for",
            RANGE,
        ),
        (lambda x: steps(x, finish=lambda mu, total: mu), "running maximum alone", RANGE),
        (lambda x: steps(x, start=(0.0, 0.0)), "starts at 0", RUNNING),
        (lambda x: steps(x, start=(0.0, 1.0)), "one term too many", RUNNING),
        (lambda x: steps(x.mT).mT, "over the channels", RUNNING),
    ],
)
def test_logarithm(refused, fn, words, section) -> None:
    refused("ex-numerics-logcumsumexp", words, section, my_logcumsumexp=fn)


def upside_down(x):
    mu, out = torch.full(x[..., 0, :].shape, -torch.inf, dtype=x.dtype), []
    total = torch.zeros_like(mu)
    for t in range(x.shape[-2]):
        new = torch.maximum(mu, x[..., t, :])
        total = torch.exp(new - mu) * total + torch.exp(x[..., t, :] - new)
        mu = new
        out.append(mu + torch.log(total))
    return torch.stack(out, dim=-2)


def streaming(ignore=False, in_log=True):
    def fn(x, *, initial_state=None, return_state=False):
        mu = torch.full(x[..., :0, :].sum(dim=-2).shape, -torch.inf, dtype=x.dtype)
        total, out = torch.zeros_like(mu), torch.empty_like(x)
        if initial_state is not None and not ignore:
            mu, total = initial_state
        for t in range(x.shape[-2]):
            new = torch.maximum(mu, x[..., t, :])
            total = torch.exp(mu - new) * total + torch.exp(x[..., t, :] - new)
            mu = new
            out[..., t, :] = mu + torch.log(total)
        return (out, (mu, total)) if return_state else out

    return fn


def test_the_factor_and_the_state(refused) -> None:
    label = "ex-numerics-logcumsumexp"
    refused(label, "upside down", RUNNING, my_logcumsumexp=upside_down)
    refused(label, "is initial_state used?", RUNNING, my_logcumsumexp=streaming(ignore=True))
    check_exercise(label, streaming())


# --- The others --------------------------------------------------------------------------------


def drawn(rng, *shape):
    return torch.tensor(rng.standard_normal(shape))


def inputs(move):
    def low(rng, N):
        k = drawn(rng, N, 4)
        return drawn(rng, N, 4), move(k), drawn(rng, N, 2)

    return low


def some_channels(k):
    k[:, ::2] = -100.0
    return k


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (lambda k: k, "no entry comes near the limit"),
        (lambda k: 5 * k, "no entry comes near the limit"),
        (some_channels, "others of the same token"),
        (lambda k: k - 1000, "e^x itself rounds to 0"),
    ],
)
def test_inputs_that_find_nothing(refused, move, words) -> None:
    refused("ex-numerics-inputs", words, ZERO, low=inputs(move))


@pytest.mark.parametrize("move", [lambda k: k - 60, lambda k: 0 * k - 40, lambda k: k - 25])
def test_inputs_that_find_it(move) -> None:
    check_exercise("ex-numerics-inputs", limit=-37.4, low=inputs(move))


def test_inputs_of_lower_precision_are_no_answer() -> None:
    def low(rng, N):
        return tuple(torch.from_numpy(rng.standard_normal((N, 4))).float() - 60 for _ in range(3))

    with pytest.raises(AssertionError, match="q, k and v must be float64 tensors"):
        check_exercise("ex-numerics-inputs", limit=-37.4, low=low)


def test_low_queries_find_it_too() -> None:
    def low(rng, N):
        return drawn(rng, N, 3) - 80, drawn(rng, N, 3), drawn(rng, N, 1)

    check_exercise("ex-numerics-inputs", limit=math.log(2) * -54, low=low)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (37.4, "positive or negative"),
        (-17.3, "the limit of float32"),
        (-36.7, "below half of it"),
        (-54, "to base 2"),
    ],
)
def test_the_limit(refused, answer, words) -> None:
    refused("ex-numerics-inputs", words, ZERO, limit=answer)


def test_where_float32_sticks(refused) -> None:
    label = "ex-numerics-stick"
    refused(label, "adding 1 still counts", STICK, recurrent=2**23)
    refused(label, "the tie", SPACING, recurrent=2**25)
    refused(label, "its 64 tokens at once", REPAIRS, chunkwise=2**24)
    refused(label, "adding 64 still counts", STICK, chunkwise=2**29)
    refused(label, "the tie", SPACING, chunkwise=2**31)
    check_exercise(label, recurrent=16_777_216, chunkwise=1_073_741_824)
