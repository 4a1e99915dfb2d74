"""Exercises of the chapter on splitting a sequence over machines."""

import numpy as np

from lesson_code import costs
from lesson_code.checks import check_causal, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.numpy import delta_rule, gated_linear_attention

CHAPTER = "Across machines"
NEEDS = "What a later part needs"
DECAY = "The same with a decay"
EXCHANGE = "One exchange"
BACK = "One exchange back"
BYTES = "Bytes"
BESIDE = "Beside it"

# --- When is it worth it? ----------------------------------------------------------------------

BYTES_BY_HAND = Exercise("ex-machines-bytes", CHAPTER)
RANKS, HEADS, WIDTH = 8, 16, 64
HEADER = costs.EXCHANGE_HEADER_BYTES


def exchanged(heads=HEADS, **options):
    return costs.state_exchange_bytes(RANKS, WIDTH, WIDTH, heads=heads, **options)


ALL = exchanged()
MESSAGE = ALL // (RANKS - 1)


def sent(name, section, direction):
    return BYTES_BY_HAND.value(name, ALL, section, "a number of bytes").mistakes(
        (RANKS * MESSAGE, "One message too many: a rank has its own from the start.", BYTES),
        (ALL - (RANKS - 1) * HEADER, "The headers are missing.", BYTES),
        (
            exchanged(extra=0),
            "The state is S alone here. The normalizer is one more column, in both directions.",
            direction,
        ),
    )


sent("forward", BYTES, EXCHANGE)
sent("backward", BACK, BACK).mistakes(
    (
        0,
        "The keys and values of a part were read by later ranks. Their gradients need what these "
        "ranks know.",
    ),
)

OF_A_TOKEN = HEADS * 2 * WIDTH * 2  # bytes of its keys and values, in 16 bit
TOKENS = MESSAGE // OF_A_TOKEN + 1

BYTES_BY_HAND.value("tokens", TOKENS, BYTES, "a number of tokens in a part").mistakes(
    (
        TOKENS - 1,
        "With so many ring attention still sends a little less. What else is in a message beside "
        "the state?",
    ),
    (RANKS * TOKENS, "This is the whole sequence; a part was asked for."),
    (
        MESSAGE // (OF_A_TOKEN // 2) + 1,
        "Ring attention sends keys and values, not only one of them.",
    ),
)

# --- A gate that is split ----------------------------------------------------------------------

SPLIT = Exercise("ex-machines-fold", CHAPTER)


def with_gates(rng, N, D=5, M=3):
    q, k, v = random_qkv(rng, N, D=D, M=M)
    return q, k, v, -rng.exponential(size=k.shape)


def without_decay(rng):
    return *random_qkv(rng, 10), np.zeros((10, 5))


@SPLIT.function(DECAY, inputs=with_gates, special=[without_decay])
def my_split(q, k, v, g):
    return gated_linear_attention(q, k, v, g)


my_split.passes(check_causal, NEEDS)


def fold(A, T, a):
    return a[:, None] * A + T


def split(*, step=fold, before=True, seen=lambda g: np.exp(np.cumsum(g, axis=0))):
    """The exercise's function, with a piece of it exchanged for a mistake."""

    def wrong(q, k, v, g):
        A, out = np.zeros((k.shape[-1], v.shape[-1])), []
        for part in zip(*(np.array_split(x, 3) for x in (q, k, v, g)), strict=True):
            own, T = gated_linear_attention(*part, return_state=True)
            B, A = A, step(A, T, np.exp(part[3].sum(axis=0)))
            out.append(own + (seen(part[3]) * part[0]) @ (B if before else A))
        return np.concatenate(out)

    return wrong


nothing_fades = split(step=lambda A, T, a: A + T)
reads_too_much = split(before=False)

my_split.mistakes(
    (
        nothing_fades,
        "The fold adds up what the parts write, and nothing fades: the decay of a part acts on all "
        "that was written before it.",
    ),
    (
        reads_too_much,
        "Each part reads a memory that its own tokens are in already, later ones too. It needs the "
        "memory before it.",
    ),
    (
        split(seen=np.ones_like),
        "What came before a part is read as it was at the part's beginning. It goes on fading up "
        "to the token that reads.",
    ),
    (
        split(step=lambda A, T, a: a[:, None] * (A + T)),
        "What a part writes is decayed by the whole part. T has faded as far as it must when the "
        "part ends.",
    ),
    (
        split(step=lambda A, T, a: T),
        "A part hands on only what it wrote itself: what came before it is lost.",
    ),
)

# --- Two mistakes in a fold --------------------------------------------------------------------

MISTAKES = Exercise("ex-machines-mistakes", CHAPTER)
ASK = "Look at each function on its own: is its output another one than it should be?"
FUTURE = "Look at each sum: are there tokens in it that come after the query?"


def differs(fn):
    args = with_gates(np.random.default_rng(0), 12)
    return not np.allclose(fn(*args), gated_linear_attention(*args))


def looks_ahead(fn):
    """Whether an output before the last token changes with that token."""
    q, k, v, g = with_gates(np.random.default_rng(0), 12)
    other = np.vstack([v[:-1], -v[-1:]])
    return not np.allclose(fn(q, k, v, g)[:-1], fn(q, k, other, g)[:-1])


COLLEAGUES = nothing_fades, reads_too_much

MISTAKES.value(
    "same_objects", [differs(fn) for fn in COLLEAGUES], DECAY, "two of True and False"
).mistakes(
    ([False, True], f"{ASK} The first one reads what has long faded."),
    ([True, False], f"{ASK} The second one reads its own part twice."),
)
MISTAKES.value(
    "causal_objects", [looks_ahead(fn) for fn in COLLEAGUES], DECAY, "the same for check_causal"
).mistakes(
    ([True, True], f"{FUTURE} A sum may be wrong without looking ahead."),
    ([False, False], f"{FUTURE} The first token of a part reads, too."),
)

# --- What the delta rule sends -----------------------------------------------------------------

DELTA = Exercise("ex-machines-delta", CHAPTER)


def with_rates(rng, N, D=5, M=3):
    _, k, v = random_qkv(rng, N, D=D, M=M)
    return k / np.linalg.norm(k, axis=-1, keepdims=True), v, rng.uniform(size=N)


def last_state(k, v, beta, start=None):
    return delta_rule(k, k, v, beta, initial_state=start, return_state=True)[1]


@DELTA.function(BESIDE, inputs=with_rates, unit="")
def message(k, v, beta):
    P = last_state(k, np.zeros_like(k), beta, np.eye(k.shape[-1]))
    return P, last_state(k, v, beta)


def transitions(k, beta):
    return message.reference(k, k, beta)[0]


message.mistakes(
    (
        lambda k, v, beta: (transitions(k, beta).T, last_state(k, v, beta)),
        "P is transposed: the transitions are multiplied in the opposite order. What a later token "
        "does comes on the left.",
    ),
    (
        lambda k, v, beta: (
            np.eye(k.shape[-1]) - (beta[:, None] * k).T @ k,
            last_state(k, v, beta),
        ),
        "The corrections of all tokens are added up. Each one acts on what the corrections before "
        "it have left.",
    ),
    (
        lambda k, v, beta: message.reference(k, v, np.ones_like(beta)),
        "Neither P nor T knows beta: a token corrects only a part of the error.",
    ),
    (
        lambda k, v, beta: (transitions(k, beta), (beta[:, None] * k).T @ v),
        "T is a plain sum of writes. Inside the part, too, each token corrects what the ones "
        "before it wrote.",
    ),
)

# A message of the delta rule is P beside T; that of a gate is S with a column of decays.
C = M = 128
DELTA.value("ratio", C * (C + M) / (C * (M + 1)), BESIDE, "a number, to three digits").mistakes(
    (
        C * (C + M) / (C * M),
        "The gated message has the decays beside the state: one more column.",
        DECAY,
    ),
    (C * C / (C * (M + 1)), "This is P alone. The part's own T is sent as well."),
)
