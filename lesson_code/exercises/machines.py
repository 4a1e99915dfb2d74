"""Exercises of the chapter on splitting a sequence over machines."""

from __future__ import annotations

from functools import partial

import numpy as np

from lesson_code import costs
from lesson_code.checks._calling import random_qkv
from lesson_code.checks.causal import check_causal
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.numpy import delta_rule, gated_linear_attention

NEEDS = "What a later part needs"
DECAY = "The same with a decay"
EXCHANGE = "One exchange"
BACK = "One exchange back"
BYTES = "Bytes"
BESIDE = "Beside it"

# --- When is it worth it? ----------------------------------------------------------------------

RANKS, HEADS, WIDTH = 8, 16, 64


def exchanged(**changes):
    options = {"heads": HEADS, **changes}
    return costs.state_exchange_bytes(RANKS, WIDTH, WIDTH, **options)


def messages(count):
    """The bytes of ``count`` messages with header and state."""
    return exchanged() // (RANKS - 1) * count


def exchange_mistakes(section):
    return (
        Mistake(
            lambda: messages(RANKS),
            "One message too many: a rank has its own from the start.",
            BYTES,
        ),
        Mistake(
            lambda: messages(1),
            "This is one message. In a ring a rank also passes on what it got from others.",
            BYTES,
        ),
        Mistake(
            lambda: exchanged() - (RANKS - 1) * costs.EXCHANGE_HEADER_BYTES,
            "The headers are missing.",
            BYTES,
        ),
        Mistake(
            lambda: exchanged(extra=0),
            "The state is S alone here. The normalizer is one more column, in both directions.",
            section,
        ),
        Mistake(lambda: exchanged(heads=1), "This is a single head.", BYTES),
        Mistake(
            lambda: exchanged(bytes_per_number=2), "This is 16 bit; states are float32.", BYTES
        ),
        Mistake(
            lambda: exchanged(heads=1) * HEADS,
            "Each head has a header of its own here. One message takes all heads.",
            BYTES,
        ),
    )


def part_length(*, header=costs.EXCHANGE_HEADER_BYTES, heads=HEADS, width=2 * WIDTH, size=2):
    """From how many tokens on keys and values of a part take more bytes than its message."""
    message = heads * WIDTH * (WIDTH + 1) * 4 + header
    return message // (heads * width * size) + 1


BYTES_BY_HAND = (
    Value(
        name="forward",
        reference=exchanged,
        section=BYTES,
        form="a number of bytes",
        mistakes=exchange_mistakes(EXCHANGE),
    ),
    Value(
        name="backward",
        reference=exchanged,
        section=BACK,
        form="a number of bytes",
        mistakes=(
            *exchange_mistakes(BACK),
            Mistake(
                lambda: exchanged(states=2),
                "Two states travel back only if the last state was returned. Here it was not.",
                BACK,
            ),
            Mistake(
                lambda: 2 * exchanged(),
                "These are both directions together.",
                BACK,
            ),
            Mistake(
                0,
                "The keys and values of a part were read by later ranks. Their gradients need what "
                "these ranks know.",
                BACK,
            ),
        ),
    ),
    Value(
        name="tokens",
        reference=part_length,
        section=BYTES,
        form="a number of tokens in a part",
        mistakes=(
            Mistake(
                lambda: part_length() - 1,
                "With so many ring attention still sends a little less. What else is in a message "
                "beside the state?",
                BYTES,
            ),
            Mistake(
                lambda: messages(1) / (HEADS * 2 * WIDTH * 2),
                "There both send the same. From which whole number of tokens on is it more?",
                BYTES,
            ),
            Mistake(
                lambda: RANKS * part_length(),
                "This is the whole sequence; a part was asked for.",
                BYTES,
            ),
            Mistake(
                lambda: part_length(width=WIDTH),
                "Ring attention sends keys and values, not only one of them.",
                BYTES,
            ),
            Mistake(
                lambda: part_length(size=4),
                "Keys and values are sent in 16 bit, the state in float32.",
                BYTES,
            ),
            Mistake(
                lambda: part_length(heads=1),
                "Each head has a header of its own here. One message takes all heads.",
                BYTES,
            ),
        ),
    ),
)

# --- A gate that is split ----------------------------------------------------------------------


def with_gates(rng, N, D=5, M=3):
    q, k, v = random_qkv(rng, N, D=D, M=M)
    return q, k, v, -rng.exponential(size=k.shape)


def inside(q, k, v, g):
    return gated_linear_attention(q, k, v, g, return_state=True)


def reads_first(q, k, v, g):
    out, T = inside(q, k, v, g)
    return out - (q * k).sum(axis=-1, keepdims=True) * v, T


def no_decay_inside(q, k, v, g):
    return inside(q, k, v, g)[0], k.T @ v


def fold(a, A, T):
    return a[:, None] * A + T


def whole_part(g):
    return np.exp(g.sum(axis=0))


def so_far(g):
    return np.exp(np.cumsum(g, axis=0))


def split_by(*, own_part=inside, step=fold, before=False, decay=whole_part, seen=so_far):
    """The exercise's function, with a piece of it exchanged for a mistake."""

    def split(q, k, v, g):
        A, out = np.zeros((k.shape[-1], v.shape[-1])), []
        for part in zip(*(np.array_split(x, 3) for x in (q, k, v, g)), strict=True):
            own, T = own_part(*part)
            B, A = A, step(decay(part[3]), A, T)
            out.append(own + (seen(part[3]) * part[0]) @ (A if before else B))
        return np.concatenate(out)

    return split


def from_the_beginning(q, k, v, g):
    """Decays from the beginning of the sequence, applied to what has faded up to the part."""
    A, out, start = np.zeros((k.shape[-1], v.shape[-1])), [], 1.0
    for part in zip(*(np.array_split(x, 3) for x in (q, k, v, g)), strict=True):
        own, T = inside(*part)
        out.append(own + (start * so_far(part[3]) * part[0]) @ A)
        start, A = start * whole_part(part[3]), fold(whole_part(part[3]), A, T)
    return np.concatenate(out)


def not_exponentiated(q, k, v, g):
    S, out = np.zeros((k.shape[-1], v.shape[-1])), np.empty_like(v)
    for t in range(len(k)):
        S = g[t][:, None] * S + np.outer(k[t], v[t])
        out[t] = q[t] @ S
    return out


def decays_last(q, k, v, g, *, reads_last):
    """Written first, decayed then, with what was just written; read before or after that."""
    earlier = np.vstack([np.zeros_like(g[:1]), g[:-1]])
    return gated_linear_attention(q * np.exp(g) if reads_last else q, k, v, earlier)


SPLIT = (
    Function(
        signature="my_split(q, k, v, g)",
        reference=gated_linear_attention,
        section=DECAY,
        inputs=with_gates,
        special=(lambda rng: (*random_qkv(rng, 10), np.zeros((10, 5))),),
        further=(Further(check_causal, NEEDS, inputs=with_gates),),
        mistakes=(
            Mistake(
                split_by(step=lambda a, A, T: A + T),
                "The fold adds up what the parts write, and nothing fades: the decay of a part "
                "acts on all that was written before it.",
                DECAY,
            ),
            Mistake(
                split_by(before=True),
                "Each part reads a memory that its own tokens are in already, later ones too. It "
                "needs the memory before it.",
                DECAY,
            ),
            Mistake(
                split_by(seen=np.ones_like),
                "What came before a part is read as it was at the part's beginning. It goes on "
                "fading up to the token that reads.",
                DECAY,
            ),
            Mistake(
                split_by(seen=lambda g: np.exp(np.cumsum(g, axis=0) - g)),
                "What came before a part is read one decay too early: a token decays the memory "
                "before it writes and reads.",
                DECAY,
            ),
            Mistake(
                split_by(step=lambda a, A, T: a[:, None] * (A + T)),
                "What a part writes is decayed by the whole part. T has faded as far as it must "
                "when the part ends.",
                DECAY,
            ),
            Mistake(
                split_by(step=lambda a, A, T: 0 * A),
                "Nothing crosses the cuts: each part is computed as if it were alone.",
                NEEDS,
            ),
            Mistake(
                split_by(step=lambda a, A, T: T),
                "A part hands on only what it wrote itself: what came before it is lost.",
                DECAY,
            ),
            Mistake(
                split_by(step=lambda a, A, T: a[None, :] * A + T),
                "The decays multiply the columns of a state. They belong to the channels of the "
                "keys, and these are its rows.",
                DECAY,
            ),
            Mistake(
                lambda q, k, v, g: gated_linear_attention(q, k, v, np.zeros_like(g)),
                "Nothing fades at all, inside the parts or between them: the gates are not used.",
                DECAY,
            ),
            Mistake(
                not_exponentiated,
                "The memory is multiplied by g. These are logarithms of the decays.",
                DECAY,
            ),
            *(
                Mistake(
                    partial(decays_last, reads_last=reads_last),
                    "A token decays what it has just written itself. The memory decays first, then "
                    "the token writes, then it reads.",
                    DECAY,
                )
                for reads_last in (False, True)
            ),
            Mistake(
                split_by(own_part=reads_first),
                "Each query is answered before its own token is written.",
                NEEDS,
            ),
            Mistake(
                split_by(own_part=no_decay_inside),
                "The state that a part hands on is written without the decays inside the part.",
                DECAY,
            ),
            Mistake(
                split_by(decay=lambda g: np.exp(g[-1:].sum(axis=0))),
                "A part's decay is that of its last token alone. It is the product over all of "
                "its tokens.",
                DECAY,
            ),
            Mistake(
                from_the_beginning,
                "The decays run from the beginning of the sequence. The memory before a part has "
                "faded up to there already, so that they must begin with the part.",
                DECAY,
            ),
        ),
    ),
)

# --- Two mistakes in a fold --------------------------------------------------------------------

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


COLLEAGUES = split_by(step=lambda a, A, T: A + T), split_by(before=True)

MISTAKES = (
    Value(
        name="same_objects",
        reference=lambda: [differs(fn) for fn in COLLEAGUES],
        section=DECAY,
        form="two of True and False",
        mistakes=(
            Mistake([False, True], f"{ASK} The first one reads what has long faded.", DECAY),
            Mistake([True, False], f"{ASK} The second one reads its own part twice.", DECAY),
            Mistake([False, False], ASK, DECAY),
        ),
    ),
    Value(
        name="causal_objects",
        reference=lambda: [looks_ahead(fn) for fn in COLLEAGUES],
        section=DECAY,
        form="the same for check_causal",
        mistakes=(
            Mistake(
                [True, True],
                f"{FUTURE} A sum may be wrong without looking ahead.",
                DECAY,
            ),
            Mistake(
                [False, False],
                f"{FUTURE} The first token of a part reads, too.",
                DECAY,
            ),
            Mistake([True, False], FUTURE, DECAY),
        ),
    ),
)

# --- What the delta rule sends -----------------------------------------------------------------


def message(k, v, beta):
    C = k.shape[-1]
    P = delta_rule(
        k, k, np.zeros_like(k), beta, initial_state=np.eye(C), return_state=True
    )[1]  # fmt: skip
    return P, delta_rule(k, k, v, beta, return_state=True)[1]


def with_rates(rng, N, D=5, M=3):
    _, k, v = random_qkv(rng, N, D=D, M=M)
    return k / np.linalg.norm(k, axis=-1, keepdims=True), v, rng.uniform(size=N)


def values_kept(k, v, beta):
    start = np.eye(k.shape[-1])
    P = delta_rule(k, k, v, beta, initial_state=start, return_state=True)[1]
    return P, message(k, v, beta)[1]


def entries(C=128, M=128):
    """Numbers in a message of the delta rule, and of a gate."""
    return C * (C + M), C * (M + 1)


DELTA = (
    Function(
        signature="message(k, v, beta)",
        reference=message,
        section=BESIDE,
        inputs=with_rates,
        unit="",
        mistakes=(
            Mistake(
                values_kept,
                "P is computed with the values, so that it has what the part writes in it, too.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k, v, beta)[0].T, message(k, v, beta)[1]),
                "P is transposed: the transitions are multiplied in the opposite order. What a "
                "later token does comes on the left.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (
                    np.eye(k.shape[-1]) - (beta[:, None] * k).T @ k,
                    message(k, v, beta)[1],
                ),
                "The corrections of all tokens are added up. Each one acts on what the corrections "
                "before it have left.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k, v, np.ones_like(beta))[0], message(k, v, beta)[1]),
                "P does not know beta: a token takes out only a part of what its key reads.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: message(k, v, np.ones_like(beta)),
                "Neither P nor T knows beta: a token corrects only a part of the error.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k, v, beta)[0], message(k, v / beta[:, None], beta)[1]),
                "T has values that were written whole. Both parts of a correction have beta, what "
                "is taken out and what is written.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k[-1:], v[-1:], beta[-1:])[0], message(k, v, beta)[1]),
                "P is the transition of the last token alone.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k, v, beta)[0], (beta[:, None] * k).T @ v),
                "T is a plain sum of writes. Inside the part, too, each token corrects what the "
                "ones before it wrote.",
                BESIDE,
            ),
            Mistake(
                lambda k, v, beta: (message(k, v, beta)[0], sum(message(k, v, beta))),
                "T begins with the identity. What a part writes begins with an empty memory.",
                NEEDS,
            ),
            Mistake(lambda k, v, beta: message(k, v, beta)[::-1], "Return P first, then T.", DECAY),
        ),
    ),
    Value(
        name="ratio",
        reference=lambda: entries()[0] / entries()[1],
        section=BESIDE,
        form="a number, to three digits",
        mistakes=(
            Mistake(
                lambda: entries()[0] / (128 * 128),
                "The gated message has the decays beside the state: one more column.",
                DECAY,
            ),
            Mistake(
                lambda: 128 * 128 / entries()[1],
                "This is P alone. The part's own T is sent as well.",
                BESIDE,
            ),
            Mistake(
                lambda: entries()[1] / entries()[0],
                "The ratio is upside down.",
                BESIDE,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Across machines",
    ("ex-machines-bytes", *BYTES_BY_HAND),
    ("ex-machines-fold", *SPLIT),
    ("ex-machines-mistakes", *MISTAKES),
    ("ex-machines-delta", *DELTA),
)
