"""Exercises of the chapter on floating-point numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from lesson_code.checks._agreement import same, tolerance_of
from lesson_code.checks._calling import random_qkv, to_numpy
from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.torch import elu_plus_one, linear_attention

SPACING = "Floats have spacing"
STICK = "Sums stick"
REPAIRS = "Two repairs: more digits, or fewer additions"
ZERO = "A feature that rounds to zero"
RANGE = "Exponentials out of range"
WHICH = "Which maximum may be subtracted"
RUNNING = "The running maximum"

# --- Floats of four digits ---------------------------------------------------------------------


def rounded(x: float, p: int = 4, nearest: Callable = round) -> float:
    """The float of p binary digits that is nearest to x > 0; ``round`` sends ties to even."""
    spacing = 2.0 ** (math.floor(math.log2(x)) - p + 1)
    return spacing * nearest(x / spacing)


def up(x: float) -> int:
    """To the nearest whole number, ties upward."""
    return math.floor(x + 0.5)


def whole_floats(p: int = 4) -> int:
    return sum(rounded(n, p) == n for n in range(1, 41))


def stuck(term: int, p: int = 4, nearest: Callable = round) -> float:
    """Where a running sum of equal terms stays."""
    total: float = term
    while (new := rounded(total + term, p, nearest)) != total:
        total = new
    return total


ONE_DIGIT = "Written with p binary digits, the leading 1 is one of them."

HAND = (
    Value(
        name="floats",
        reference=whole_floats,
        section=SPACING,
        form="how many of the whole numbers from 1 to 40 are floats",
        mistakes=(
            Mistake(
                16 + 24 // 2,
                "The spacing doubles at every power of two, also at the last one before 40.",
                SPACING,
            ),
            Mistake(24, "Beyond 32 there are floats as well, 4 apart.", SPACING),
            Mistake(lambda: whole_floats(5), ONE_DIGIT, SPACING),
            Mistake(lambda: whole_floats(3), "These are the floats of three digits.", SPACING),
            Mistake(40, "Not all of them. Write 17 in binary: how many digits?", SPACING),
        ),
    ),
    Value(
        name="ones",
        reference=lambda: stuck(1),
        section=STICK,
        form="where the sum of ones sticks",
        mistakes=(
            Mistake(
                lambda: stuck(1, nearest=up),
                "Here the tie was rounded up. It goes to the neighbor whose last digit is even.",
                SPACING,
            ),
            Mistake(
                lambda: stuck(1) - 1,
                "One more can be added: the next whole number needs one digit more, but that digit "
                "is a 0.",
                SPACING,
            ),
            Mistake(lambda: stuck(1, p=3), "There a float of four digits still moves.", STICK),
        ),
    ),
    Value(
        name="threes",
        reference=lambda: stuck(3),
        section=STICK,
        form="where the sum of threes sticks",
        mistakes=(
            Mistake(
                lambda: stuck(3, nearest=math.floor),
                "There the spacing is larger than 3, but a sum goes to the nearer float. Which one "
                "is nearer to 35?",
                SPACING,
            ),
            Mistake(
                lambda: 3 * stuck(1),
                "Three times as far as ones would go: but between powers of two the spacing does "
                "not change.",
                SPACING,
            ),
            Mistake(
                lambda: stuck(3) / 16 * 15,
                "Add once more. The result is no float; which neighbor is nearer?",
                SPACING,
            ),
        ),
    ),
)

# --- A running logarithm -----------------------------------------------------------------------


def logcumsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logcumsumexp(x, dim=-2)


def running_max(x: torch.Tensor) -> torch.Tensor:
    return x.cummax(dim=-2).values


def by_steps(x, scale=lambda old, new: (old - new).exp(), start=-math.inf, before=0.0):
    """The running maximum and the sum, with mistakes."""
    mu = torch.full_like(x[..., 0, :], start)
    total, out = torch.full_like(mu, before), []
    for x_t in x.unbind(dim=-2):
        new = torch.maximum(mu, x_t)
        total = total * scale(mu, new) + (x_t - new).exp()
        mu = new
        out.append(mu + total.log())
    return torch.stack(out, dim=-2)


def with_last_maximum(x):
    mu = x.amax(dim=-2, keepdim=True)
    return mu + (x - mu).exp().cumsum(dim=-2).log()


def large(rng, N, leading=(), M=3):
    return (torch.from_numpy(1000 * rng.standard_normal((*leading, N, M))),)


def near(center: float) -> Callable:
    return lambda rng: (torch.from_numpy(center + rng.standard_normal((20, 3))),)


LOGARITHM = (
    Function(
        signature="my_logcumsumexp(x, *, initial_state=None, return_state=False)",
        reference=logcumsumexp,
        section=RUNNING,
        inputs=large,
        special=(near(0.0), near(1000.0), near(-1000.0), lambda rng: (torch.zeros(9, 2),)),
        mistakes=(
            Mistake(
                lambda x: x.exp().cumsum(dim=-2).log(),
                "The exponentials are summed as they are, and leave the range of the format. "
                "Subtract a maximum first.",
                RANGE,
            ),
            Mistake(
                with_last_maximum,
                "The maximum over all positions is subtracted: it is not known at t, and what is "
                "far below it rounds to 0.",
                WHICH,
            ),
            Mistake(
                lambda x: by_steps(x, scale=lambda old, new: 1.0),
                "What was summed before keeps its scale when the maximum rises.",
                RUNNING,
            ),
            Mistake(
                lambda x: by_steps(x, scale=lambda old, new: (new - old).exp()),
                "The factor of the old sum is upside down: when the maximum rises, it is below 1.",
                RUNNING,
            ),
            Mistake(
                lambda x: logcumsumexp(x).exp(),
                "These are the sums of the exponentials. Their logarithm is asked for, which stays "
                "in range.",
                RANGE,
            ),
            Mistake(
                lambda x: logcumsumexp(x) - running_max(x),
                "The maximum that was subtracted inside has to be added again.",
                RANGE,
            ),
            Mistake(
                lambda x: running_max(x) + (logcumsumexp(x) - running_max(x)).exp(),
                "The maximum is a logarithm, the sum is not yet.",
                RANGE,
            ),
            Mistake(
                running_max,
                "This is the running maximum alone. It comes close when one term is far above the "
                "others, but they add to the sum.",
                RANGE,
            ),
            Mistake(
                lambda x: by_steps(x, start=0.0),
                "The running maximum starts at 0, so that a sequence far below has only zeros to "
                "add up. What is the maximum of no numbers?",
                RUNNING,
            ),
            Mistake(
                lambda x: by_steps(x, start=0.0, before=1.0),
                "There is one term too many, that of a maximum of 0 before the first position.",
                RUNNING,
            ),
            Mistake(
                lambda x: torch.logcumsumexp(x, dim=-1),
                "The sum runs over the channels. Time is the axis -2.",
                RUNNING,
            ),
        ),
        further=(
            Further(check_causal, WHICH, inputs=large),
            Further(check_streaming, RUNNING, inputs=large, options={"empty_pieces": False}),
        ),
    ),
)

# --- Inputs that find the mistake --------------------------------------------------------------


def as_it_reads(x):
    return torch.nn.functional.elu(x) + 1


LIMIT = math.log(2.0**-54)


def findings(low):
    """What a check finds out with some inputs.

    If it finds the mistake, the rest is true as well: the rest only tells why it does not.
    """

    def of_seed(seed):
        rng, found, below, alive = np.random.default_rng(seed), False, False, False
        for N in (7, 1, 2, 13):
            q, k, v = low(rng, N)
            if any(getattr(x, "dtype", None) != torch.float64 for x in (q, k, v)):
                raise TypeError("q, k and v must be float64 tensors")
            right, wrong = (
                to_numpy(linear_attention(q, k, v, feature_map=phi, causal=True))
                for phi in (elu_plus_one, as_it_reads)
            )
            found |= not same(wrong, right, tolerance_of(q, k, v))
            below |= bool((q < LIMIT).any() or (k < LIMIT).any())
            alive |= bool(right.any())
        return {
            "check_same objects": float(found),
            "below the limit": float(found or below),
            "right output not zero": float(found or alive),
        }

    return of_seed


def shifted(shift, channels=slice(None)):
    """Inputs of which some channels of the keys are moved."""

    def inputs(rng, N):
        q, k, v = (torch.from_numpy(x) for x in random_qkv(rng, N))
        k[..., channels] += shift
        return q, k, v

    return inputs


INPUTS = (
    Value(
        name="limit",
        reference=lambda: LIMIT,
        section=ZERO,
        form="below it a float64 feature of the colleague is 0",
        mistakes=(
            Mistake(lambda: -LIMIT, "Is such an entry positive or negative?", ZERO),
            Mistake(lambda: math.log(2.0**-25), "That is the limit of float32, with p = 24.", ZERO),
            Mistake(
                lambda: math.log(2.0**-53),
                "There the feature is as large as the spacing just above -1. What is lost is below "
                "half of it.",
                ZERO,
            ),
            Mistake(-54, "That is its logarithm to base 2; the exponential has base e.", ZERO),
        ),
    ),
    Function(
        signature="low(rng, N)",
        reference=shifted(-50.0),
        section=ZERO,
        inputs=lambda rng, N: (int(rng.integers(1000)),),
        view=findings,
        unit="",
        mistakes=(
            Mistake(
                shifted(0.0),
                "With these inputs the colleague's function passes: no entry comes near the limit.",
                ZERO,
            ),
            Mistake(
                shifted(-50.0, slice(0, 1)),
                "With these inputs the colleague's function passes. Some features vanish, but "
                "others of the same token are there and carry the sum.",
                ZERO,
            ),
            Mistake(
                shifted(-2000.0),
                "So far below, e^x itself rounds to 0, in the right function, too: both return 0, "
                "and the check has nothing to object to.",
                ZERO,
            ),
        ),
    ),
)

# --- Where float32 sticks ----------------------------------------------------------------------


def first_power_that_stays(term: float) -> float:
    """The smallest power of two that a float32 sum cannot leave by adding ``term``."""
    return next(2.0**n for n in range(64) if np.float32(2.0**n) + np.float32(term) == 2.0**n)


STICKS = (
    Value(
        name="recurrent",
        reference=lambda: first_power_that_stays(1),
        section=STICK,
        form="the z at which the recurrent form sticks",
        mistakes=(
            Mistake(
                2**23,
                "There the spacing is 1, and adding 1 still counts. Float32 has p = 24 digits, the "
                "leading one included.",
                STICK,
            ),
            Mistake(
                2**25,
                "It sticks before: think of the tie, and of where it goes.",
                SPACING,
            ),
            Mistake(2**8, "That is bfloat16.", STICK),
        ),
    ),
    Value(
        name="chunkwise",
        reference=lambda: first_power_that_stays(64),
        section=REPAIRS,
        form="the z at which the chunkwise form sticks, given 64 tokens at a time",
        mistakes=(
            Mistake(
                2**24,
                "There single ones are lost. The chunkwise form adds the sum of its 64 tokens at "
                "once.",
                REPAIRS,
            ),
            Mistake(
                2**29,
                "There the spacing is 64, and adding 64 still counts.",
                STICK,
            ),
            Mistake(
                2**31,
                "It sticks before: think of the tie, and of where it goes.",
                SPACING,
            ),
            Mistake(
                2**18,
                "Divided by 64 where larger terms let the sum go further.",
                REPAIRS,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Numbers that misbehave",
    ("ex-numerics-hand", *HAND),
    ("ex-numerics-logcumsumexp", *LOGARITHM),
    ("ex-numerics-inputs", *INPUTS),
    ("ex-numerics-stick", *STICKS),
)
