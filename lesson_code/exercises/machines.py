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
BYTES = "Bytes"
CUT = "What else crosses the cut"

# --- When is it worth it? ----------------------------------------------------------------------

BYTES_BY_HAND = Exercise("ex-machines-bytes", CHAPTER)
RANKS, HEADS, WIDTH = 8, 16, 64
STEPS = RANKS - 1
HEADER = costs.EXCHANGE_HEADER_BYTES


def exchanged(extra):
    """Bytes that a rank sends, without the headers."""
    sent = costs.state_exchange_bytes(RANKS, WIDTH, WIDTH, heads=HEADS, extra=extra)
    return sent - STEPS * HEADER


def sent(name, extra, section):
    right = exchanged(extra)
    return BYTES_BY_HAND.value(name, right, section, "a number of bytes").mistakes(
        (right // STEPS * RANKS, "One message too many: a rank has its own from the start.", BYTES),
        (right + STEPS * HEADER, "Leave the headers out."),
    )


sent("forward", 1, EXCHANGE).mistakes(
    (exchanged(1) // 2, "States are float32: four bytes a number.", BYTES),
    (exchanged(0), "The state is S alone here. The normalizer is one more column."),
)
sent("delta", WIDTH, CUT).mistakes(
    (exchanged(0), "This is T alone. What does the part do to the memory that it finds?"),
    (exchanged(WIDTH + 1), "A delta rule has no normalizer here: no further column."),
)

OF_A_TOKEN = HEADS * 2 * WIDTH * 2  # bytes of its keys and values, in 16 bit
TOKENS = exchanged(1) // STEPS // OF_A_TOKEN + 1

BYTES_BY_HAND.value("tokens", TOKENS, BYTES, "a number of tokens in a part").mistakes(
    (TOKENS - 1, "With so many, both rings send the same."),
    (RANKS * TOKENS, "This is the whole sequence; a part was asked for."),
    (
        exchanged(1) // STEPS // (OF_A_TOKEN // 2) + 1,
        "Ring attention sends keys and values, not only one of them.",
    ),
)
TAIL_BYTES = 3 * (3 * HEADS * WIDTH) * 2

BYTES_BY_HAND.value("tail", TAIL_BYTES, CUT, "a number of bytes").mistakes(
    (TAIL_BYTES // 3 * 4, "A window of four taps has the token itself in it."),
    (STEPS * TAIL_BYTES, "Only the next rank needs a tail: it is sent once."),
    (TAIL_BYTES // 3, "The queries, the keys and the values are convolved, all three."),
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
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # red, round, cherry
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
HALVED = K, K, V, np.full((3, 2), np.log(0.5))
RIGHT: np.ndarray = np.asarray(gated_linear_attention(*HALVED))[2]

MISTAKES.value("undecayed", lambda: nothing_fades(*HALVED)[2], DECAY, "two numbers").mistakes(
    (RIGHT, "This is the right read. Which entry of B is another one?"),
    (
        lambda: split(step=lambda A, T, a: A + T, seen=np.ones_like)(*HALVED)[2],
        "The cherry still halves what it finds, before it writes.",
    ),
)
MISTAKES.value("too_late", lambda: reads_too_much(*HALVED)[2], DECAY, "two numbers").mistakes(
    (RIGHT, "This is the right read. Now the cherry's own write is in what it finds, too."),
)

# --- A part shorter than the tail --------------------------------------------------------------

SHORT = Exercise("ex-machines-tail", CHAPTER)
NUMBERS = 2 ** np.arange(6)  # 1, 2, 4, 8 on rank 0, 16 on rank 1, 32 on rank 2

SHORT.value("tail", NUMBERS[2:5], CUT, "three numbers").mistakes(
    (NUMBERS[3:6], "The last one is rank 2's own."),
    ([0, 0, NUMBERS[4]], "Rank 1 has one number. The two before it stand on rank 0."),
)
SHORT.value("last", NUMBERS[2:].sum(), CUT, "a number").mistakes(
    (NUMBERS[2:5].sum(), "This is the tail alone; rank 2 adds its own number."),
    (NUMBERS[3:].sum(), "This is the sum of three; four were asked for."),
)
SHORT.value("wrong", NUMBERS[4:].sum(), CUT, "a number").mistakes(
    (NUMBERS[2:].sum(), "This is the right sum. What has rank 1 of its own?"),
    (NUMBERS[5], "Rank 1 does send its number."),
)

# --- What the delta rule sends -----------------------------------------------------------------

DELTA = Exercise("ex-machines-delta", CHAPTER)


def with_rates(rng, N, D=5, M=3):
    _, k, v = random_qkv(rng, N, D=D, M=M)
    return k / np.linalg.norm(k, axis=-1, keepdims=True), v, rng.uniform(size=N)


def last_state(k, v, beta, start=None):
    return delta_rule(k, k, v, beta, initial_state=start, return_state=True)[1]


@DELTA.function(CUT, inputs=with_rates, unit="")
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

# A message of the delta rule is P beside T; a token is a key, a value and a rate.
C = M = 128
FEWER = C * (C + M) // (C + M + 1)
DELTA.value("fewer", FEWER, CUT, "a number of tokens").mistakes(
    (FEWER + 1, "A token has its rate beta, too."),
    (C * M // (C + M + 1), "This compares with T alone, or P alone. Both are sent."),
    (C * (C + M) // C, "A token brings its key and its value."),
)
