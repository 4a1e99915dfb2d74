"""Exercises of the chapter on PyTorch."""

import math

import torch

from lesson_code.costs import chunkwise_cost
from lesson_code.exercises import Exercise
from lesson_code.torch import linear_attention

CHAPTER = "PyTorch on any device"
CROSSING = "Where the lines cross on your device"
DOUBLING = "Why time doubles when N doubles"
FLOOR = "The floor"
PADDING = "Batches of unequal length"

# --- A crossing and a padding ------------------------------------------------------------------

HAND = Exercise("ex-torch-hand", CHAPTER)
SHORT, LONG = 1000, 4000
SOFTMAX, LINEAR = 10.0, 20.0  # milliseconds at the shorter length

HAND.value(
    "times",
    [SOFTMAX * 4**2, LINEAR * 4],
    DOUBLING,
    "two numbers, the milliseconds of softmax and of linear attention at N = 4,000",
).mistakes(
    (
        [SOFTMAX * 4, LINEAR * 4],
        "Here both grow in proportion to N. How often does N double on the way, and what does "
        "softmax do each time?",
    ),
    ([SOFTMAX * 2**2, LINEAR * 2], "This is for twice the tokens; N is four times as large."),
)


def meeting(g0, g1):
    """Where a line through two gaps is zero, as a part of the way from the first to the second."""
    return g0 / (g0 - g1)


GAPS = SOFTMAX / LINEAR, SOFTMAX * 4**2 / (LINEAR * 4)
MEET = SHORT * 4 ** meeting(*map(math.log, GAPS))

HAND.value("meet", MEET, CROSSING, "the N at which the lines cross").mistakes(
    (
        SHORT + (LONG - SHORT) * meeting(SOFTMAX - LINEAR, SOFTMAX * 4**2 - LINEAR * 4),
        "These are straight lines on ordinary axes. The g of the formula is the logarithm of a "
        "quotient.",
    ),
    (
        SHORT**2 / MEET,
        "The exponent has the wrong sign: softmax is the faster one at the shorter length.",
    ),
)

QUERY = torch.tensor([[1.0, 0.0]])
KEYS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
VALUES = torch.tensor([[10.0, 20.0], [0.0, 0.0], [0.0, 0.0]])
PADDED = linear_attention(QUERY, KEYS, VALUES)[0]

HAND.value("reads", PADDED, PADDING, "two numbers, what the query reads with the padding").mistakes(
    (VALUES[0], "The padding has no weight here. What is elu + 1 of a zero?"),
    (
        VALUES.mean(dim=0),
        "All three have the same weight here, as in softmax, where all scores are 0. Compute the "
        "similarities from the features.",
    ),
)
HAND.value("should_read", VALUES[0], PADDING, "two numbers, what it should read").mistakes(
    (PADDED, "That is with the padding. The judge is the sequence by itself."),
)

# --- Your device -------------------------------------------------------------------------------

DEVICE = Exercise("ex-torch-device", CHAPTER)
WIDTHS = (32, 64, 128)


def floors(skipped):
    """Where the floors cross, from the counts of both; softmax skips a part of its work."""
    return [chunkwise_cost(64, C, C, L=64).work / 64 / (2 * C * (1 - skipped)) for C in WIDTHS]


DEVICE.value(
    "floors",
    floors(skipped=1 / 2),
    FLOOR,
    "three numbers, the N at which the floors cross for the widths 32, 64 and 128",
).mistakes(
    (floors(skipped=0), "A causal kernel for softmax skips half of its work."),
    ([2 * (C + 1) for C in WIDTHS], "The products inside the chunks are missing."),
)
