"""Exercises of the chapter on PyTorch."""

from __future__ import annotations

import math

import torch

from lesson_code.checks._calling import random_qkv
from lesson_code.costs import chunkwise_cost
from lesson_code.exercises._old import Function, Mistake, Value, chapter
from lesson_code.torch import (
    elu_plus_one,
    identity,
    linear_attention,
    relu,
    taylor,
)

CROSSING = "Where the lines cross on your device"
DOUBLING = "Why time doubles when N doubles"
FLOOR = "The floor"
PADDING = "Batches of unequal length"

# --- A crossing and a padding ------------------------------------------------------------------

SHORT, LONG = 1000, 4000
MS = {"softmax": 10.0, "linear": 20.0}


def at_long(softmax_power, linear_power):
    factor = LONG / SHORT
    return [MS["softmax"] * factor**softmax_power, MS["linear"] * factor**linear_power]


def meeting():
    """Where the two lines of the log-log plot meet."""
    softmax, linear = at_long(2, 1)
    g0, g1 = math.log(MS["softmax"] / MS["linear"]), math.log(softmax / linear)
    return SHORT * (LONG / SHORT) ** (g0 / (g0 - g1))


def meeting_without_logarithms():
    softmax, linear = at_long(2, 1)
    g0, g1 = MS["softmax"] - MS["linear"], softmax - linear
    return SHORT + (LONG - SHORT) * g0 / (g0 - g1)


QUERY = torch.tensor([[1.0, 0.0]])
KEYS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
VALUES = torch.tensor([[10.0, 20.0], [0.0, 0.0], [0.0, 0.0]])


def reading(tokens=3, **options):
    return linear_attention(QUERY, KEYS[:tokens], VALUES[:tokens], **options)[0]


HAND = (
    Value(
        name="times",
        reference=lambda: at_long(2, 1),
        section=DOUBLING,
        form="two numbers, the milliseconds of softmax and of linear attention at N = 4,000",
        mistakes=(
            Mistake(
                lambda: at_long(1, 1),
                "Here both grow in proportion to N. How often does N double on the way, and what "
                "does softmax do each time?",
                DOUBLING,
            ),
            Mistake(lambda: at_long(2, 2), "Here both grow with the square of N.", DOUBLING),
            Mistake(
                lambda: at_long(1, 0.5),
                "This is for twice the tokens; N is four times as large.",
                DOUBLING,
            ),
            Mistake(
                lambda: at_long(2, 1)[::-1], "The two are exchanged: softmax comes first.", DOUBLING
            ),
        ),
    ),
    Value(
        name="meet",
        reference=meeting,
        section=CROSSING,
        form="the N at which the lines cross",
        mistakes=(
            Mistake(
                meeting_without_logarithms,
                "These are straight lines on ordinary axes. The g of the formula is the logarithm "
                "of a quotient.",
                CROSSING,
            ),
            Mistake(
                lambda: (SHORT + LONG) / 2,
                "That is half way on an ordinary axis. The lengths are on a logarithmic one.",
                CROSSING,
            ),
            Mistake(
                lambda: SHORT**2 / meeting(),
                "The exponent has the wrong sign: softmax is the faster one at the shorter length.",
                CROSSING,
            ),
        ),
    ),
    Value(
        name="reads",
        reference=reading,
        section=PADDING,
        form="two numbers, what the query reads with the padding",
        mistakes=(
            Mistake(
                lambda: VALUES[0],
                "The padding has no weight here. What is elu + 1 of a zero?",
                PADDING,
            ),
            Mistake(
                lambda: reading(normalize=False), "This is not divided by anything yet.", PADDING
            ),
            Mistake(
                lambda: VALUES.mean(dim=0),
                "All three have the same weight here, as in softmax, where all scores are 0. "
                "Compute the similarities from the features.",
                PADDING,
            ),
        ),
    ),
    Value(
        name="should_read",
        reference=lambda: reading(tokens=1),
        section=PADDING,
        form="two numbers, what it should read",
        mistakes=(
            Mistake(
                reading,
                "That is with the padding. The judge is the sequence by itself.",
                PADDING,
            ),
            Mistake(
                lambda: reading(tokens=1, normalize=False),
                "This is not divided by anything yet.",
                PADDING,
            ),
        ),
    ),
)

# --- Prompts of unequal length -----------------------------------------------------------------


def prompts(rng, N, D=5, M=3):
    qkv = random_qkv(rng, N, leading=(4,), D=D, M=M)
    return *map(torch.tensor, qkv), torch.tensor(rng.integers(0, N + 1, 4))


def is_real(k, lengths, more=0):
    return (torch.arange(k.shape[-2]) < lengths[:, None] + more)[..., None]


def in_batch(q, k, v, features_seen, out_seen, normalize=True):
    """Causal attention whose features and outputs are multiplied by what is seen."""
    q, k = elu_plus_one(q), elu_plus_one(k) * features_seen
    kind = {"feature_map": identity, "causal": True, "normalize": normalize}
    out, state = linear_attention(q, k, v, return_state=True, **kind)
    return out.masked_fill(~out_seen, 0), *state


def prefill(q, k, v, lengths, normalize=True):
    real = is_real(k, lengths)
    return in_batch(q, k, v, real, real, normalize)


def everything(k):
    return torch.ones_like(k[..., :1], dtype=torch.bool)


def without_mask(q, k, v, lengths):
    return in_batch(q, k, v, everything(k), is_real(k, lengths))


def mask_before_the_map(q, k, v, lengths):
    real = is_real(k, lengths)
    return in_batch(q, k * real, v * real, everything(k), real)


def not_divided(q, k, v, lengths):
    return prefill(q, k, v, lengths, normalize=False)[0], *prefill(q, k, v, lengths)[1:]


def not_causal(q, k, v, lengths):
    real = is_real(k, lengths)
    weights = elu_plus_one(q) @ (elu_plus_one(k) * real).mT
    out = weights @ v / weights.sum(dim=-1, keepdim=True)
    return out.masked_fill(~real, 0), *prefill(q, k, v, lengths)[1:]


def values_alone(q, k, v, lengths):
    real = is_real(k, lengths)
    return in_batch(q, k, v * real, everything(k), real)


def one_more(q, k, v, lengths):
    real = is_real(k, lengths, more=1)
    return in_batch(q, k, v, real, real)


def one_less(q, k, v, lengths):
    real = is_real(k, lengths, more=-1)
    return in_batch(q, k, v, real, real)


PREFILL = (
    Function(
        signature="prefill(q, k, v, lengths)",
        reference=prefill,
        section=PADDING,
        inputs=prompts,
        mistakes=(
            Mistake(
                without_mask,
                "The outputs are right, but the padding has been written to S and z: it comes "
                "after the last real token, and before the state that you return.",
                PADDING,
            ),
            Mistake(
                lambda q, k, v, lengths: in_batch(q, k, v, is_real(k, lengths), everything(k)),
                "The state is right. The outputs in the padding have to be 0.",
                PADDING,
            ),
            Mistake(
                lambda q, k, v, lengths: in_batch(q, k, v, everything(k), everything(k)),
                "The lengths are not used: the padding is written, and answered.",
                PADDING,
            ),
            Mistake(
                mask_before_the_map,
                "Keys and values are set to 0 before the feature map. S is right then, but z is "
                "not: elu + 1 of a zero key is not 0.",
                PADDING,
            ),
            Mistake(
                values_alone,
                "The values of the padding are 0, its features are not: S is right, z is not.",
                PADDING,
            ),
            Mistake(
                not_divided,
                "The state is right. The outputs are not divided by the normalizer.",
                PADDING,
            ),
            Mistake(
                not_causal,
                "The state is right. The outputs are not causal: a token sees all of its text.",
                PADDING,
            ),
            Mistake(
                lambda q, k, v, lengths: (
                    prefill(q, k, v, lengths)[0],
                    *linear_attention(q[:, :0], k[:, :0], v[:, :0], causal=True, return_state=True)[
                        1
                    ],
                ),
                "The state is that of no tokens at all.",
                PADDING,
            ),
            Mistake(
                one_more,
                "Each text has one token too many: positions are counted from 0, so the last real "
                "one is lengths - 1.",
                PADDING,
            ),
            Mistake(one_less, "Each text lacks its last token.", PADDING),
            Mistake(
                lambda q, k, v, lengths: prefill(q, k, v, k.shape[-2] - lengths),
                "The lengths of the paddings are taken for those of the texts.",
                PADDING,
            ),
            Mistake(
                lambda q, k, v, lengths: prefill(q, k, v, lengths)[0],
                "The state is not returned: the function returns out, S and z.",
                PADDING,
            ),
        ),
    ),
)

# --- The mask in the wrong place ---------------------------------------------------------------


def taylor_map(x):
    return taylor(x.shape[-1])(x)


def passes(*maps):
    """Whether a zero key has no features, and so no weight."""
    return [not phi(torch.zeros(1, 5)).any().item() for phi in maps]


MASK = (
    Value(
        name="passes",
        reference=lambda: passes(relu, elu_plus_one, taylor_map),
        section=PADDING,
        form="three times True or False: relu, elu_plus_one, taylor",
        mistakes=(
            Mistake(
                [True, False, True],
                "Which weight does a zero key get from the Taylor map, 1 + q·k + (q·k)²/2?",
                PADDING,
            ),
            Mistake(
                [True, True, True],
                "A zero value adds nothing above the line. What do the keys of the padding add "
                "below it?",
                PADDING,
            ),
            Mistake(
                [True, True, False],
                "What is elu + 1 of a zero key, and what does that add to the normalizer?",
                PADDING,
            ),
            *(
                Mistake(
                    [False, True, taylor_passes],
                    "It is the other way round: True where the check says nothing.",
                    PADDING,
                )
                for taylor_passes in (False, True)
            ),
            Mistake(
                [False, False, False],
                "The colleague has tested this with relu. What is relu of a zero key?",
                PADDING,
            ),
        ),
    ),
)

# --- Your device -------------------------------------------------------------------------------

WIDTHS = (32, 64, 128)


def floors(L=64, causal=True):
    """Where the floors cross, from the counts of both."""
    return [chunkwise_cost(L, C, C, L=L).work / L / (2 * C) * (2 if causal else 1) for C in WIDTHS]


DEVICE = (
    Value(
        name="floors",
        reference=floors,
        section=FLOOR,
        form="three numbers, the N at which the floors cross for the widths 32, 64 and 128",
        mistakes=(
            Mistake(
                lambda: floors(causal=False),
                "A causal kernel for softmax skips half of its work.",
                FLOOR,
            ),
            Mistake(
                lambda: [4 * C + 2 for C in WIDTHS],
                "Here the chunk is as long as the features are wide. L stays at 64.",
                FLOOR,
            ),
            Mistake(
                lambda: [2 * (C + 1) for C in WIDTHS],
                "The products inside the chunks are missing.",
                FLOOR,
            ),
            Mistake(
                lambda: [C + 1 for C in WIDTHS],
                "That is the crossing without a mask: softmax skips nothing, and there are no "
                "chunks.",
                FLOOR,
            ),
            Mistake(
                lambda: [2 * (C + 64) for C in WIDTHS],
                "The normalizer is missing: it is one more column of the state.",
                FLOOR,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "PyTorch on any device",
    ("ex-torch-hand", *HAND),
    ("ex-torch-prefill", *PREFILL),
    ("ex-torch-mask", *MASK),
    ("ex-torch-device", *DEVICE),
)
