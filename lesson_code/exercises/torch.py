"""Exercises of the chapter on PyTorch."""

import math
from functools import partial

import torch

from lesson_code.checks import random_qkv
from lesson_code.costs import chunkwise_cost
from lesson_code.exercises import Exercise
from lesson_code.torch import elu_plus_one, identity, linear_attention, relu, taylor

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

# --- Prompts of unequal length -----------------------------------------------------------------

PREFILL = Exercise("ex-torch-prefill", CHAPTER)


def prompts(rng, N, D=5, M=3):
    qkv = random_qkv(rng, N, leading=(4,), D=D, M=M)
    return *map(torch.tensor, qkv), torch.tensor(rng.integers(0, N + 1, 4))


def in_batch(q, k, v, features_seen, out_seen, normalize=True):
    """Causal attention whose features and outputs are multiplied by what is seen."""
    q, k = elu_plus_one(q), elu_plus_one(k) * features_seen
    kind = partial(linear_attention, feature_map=identity, causal=True, normalize=normalize)
    out, state = kind(q, k, v, return_state=True)
    return out.masked_fill(~out_seen, 0), *state


def real_tokens(k, lengths):
    return (torch.arange(k.shape[-2]) < lengths[:, None])[..., None]


def everything(k):
    return torch.ones_like(k[..., :1], dtype=torch.bool)


@PREFILL.function(PADDING, inputs=prompts)
def prefill(q, k, v, lengths):
    real = real_tokens(k, lengths)
    return in_batch(q, k, v, real, real)


prefill.mistakes(
    (
        lambda q, k, v, lengths: in_batch(q, k, v, everything(k), real_tokens(k, lengths)),
        "The outputs are right, but the padding has been written to S and z: it comes after the "
        "last real token, and before the state that you return.",
    ),
    (
        lambda q, k, v, lengths: in_batch(q, k, v, real_tokens(k, lengths), everything(k)),
        "The state is right. The outputs in the padding have to be 0.",
    ),
    (
        lambda q, k, v, lengths: prefill.reference(q, k, v, lengths + 1),
        "Each text has one token too many: positions are counted from 0, so the last real one is "
        "lengths - 1.",
    ),
)


@prefill.mistake(
    "Keys and values are set to 0 before the feature map. S is right then, but z is not: elu + 1 "
    "of a zero key is not 0."
)
def mask_before_the_map(q, k, v, lengths):
    real = real_tokens(k, lengths)
    return in_batch(q, k * real, v * real, everything(k), real)


@prefill.mistake("The state is right. The outputs are not divided by the normalizer.")
def not_divided(q, k, v, lengths):
    real = real_tokens(k, lengths)
    out, _, _ = in_batch(q, k, v, real, real, normalize=False)
    return out, *prefill.reference(q, k, v, lengths)[1:]


# --- The mask in the wrong place ---------------------------------------------------------------

MASK = Exercise("ex-torch-mask", CHAPTER)
ZERO_KEY = torch.zeros(1, 5)

MASK.value(
    "passes",
    [not phi(ZERO_KEY).any().item() for phi in (relu, elu_plus_one, taylor(5))],
    PADDING,
    "three times True or False: relu, elu_plus_one, taylor",
).mistakes(
    (
        [True, False, True],
        "Which weight does a zero key get from the Taylor map, 1 + q·k + (q·k)²/2?",
    ),
    (
        [True, True, True],
        "A zero value adds nothing above the line. What do the keys of the padding add below it?",
    ),
    (
        [False, False, False],
        "The colleague has tested this with relu. What is relu of a zero key?",
    ),
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
