"""Exercises of the chapter on decay and RetNet."""

import numpy as np
import torch

from lesson_code.checks import check_causal, check_linear_cost, check_streaming, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import transpose
from lesson_code.numpy import retention, retention_decays
from lesson_code.torch import retention as torch_retention

CHAPTER = "Decay: RetNet"
FADES = "A memory that fades"
ALL = "All positions at once"
LONG = "How long is the memory?"
CHUNKS = "Chunks: three factors"
TURNING = "Turning by position"

# --- One more token ----------------------------------------------------------------------------

HAND = Exercise("ex-retnet-hand", CHAPTER)
K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
V = np.array([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0], [1.0, 3.0]])
S_3 = (K[:3] * [[0.25], [0.5], [1.0]]).T @ V[:3]
FOURTH = np.outer(K[3], V[3])
S_4 = S_3 / 2 + FOURTH

HAND.value("S_4", S_4, FADES, "two rows of two numbers").mistakes(
    (
        (S_3 + FOURTH) / 2,
        "The new token has faded too. The memory fades before the token writes.",
    ),
    (
        np.stack([V[3], S_3[1] / 2]),
        "The first row has been replaced. Decay does not replace: what is left of the old row "
        "stays, and the value is added.",
    ),
)
HAND.value("o_4", K[3] @ S_4, FADES, "two numbers").mistakes(
    (K[3] @ S_3 / 2, "This is read before token 4 writes. A query finds its own token."),
    (V[3], "That is token 4 alone. Older tokens answer as well, with smaller weights."),
)
HAND.value("a", [0.5, 0.25], CHUNKS, "two numbers").mistakes(
    (
        [1.0, 0.5],
        "This counts from the first token of the chunk. The state is that at the end of the chunk "
        "before, which is one step earlier.",
    ),
    (
        [0.25, 0.5],
        "The other way round: which of the two queries is farther from the chunk before?",
    ),
)
HAND.value("b", [0.5, 1.0], CHUNKS, "two numbers").mistakes(
    (
        [0.25, 0.5],
        "The last token of a chunk is at its end already: how often has it faded there?",
    ),
    ([1.0, 0.5], "The other way round: which of the two tokens is farther from the end?"),
)

HALVINGS = np.log2(S_4 / 0.1)

HAND.value("tokens", np.ceil(HALVINGS.max()), FADES).mistakes(
    (
        HALVINGS.max(),
        "There the largest entry is just 0.1. How many whole tokens does it take?",
    ),
    (np.ceil(HALVINGS.min()), "That is when the smallest entry has fallen below 0.1."),
)

# --- Retention in chunks -----------------------------------------------------------------------

CODE = Exercise("ex-retnet-chunkwise", CHAPTER)
DECAYS = retention_decays(3)


def three_heads(rng, N, leading=(2,), D=5, M=3):
    return random_qkv(rng, N, leading=(*leading, 3), D=D, M=M)


def one_text(rng, N):
    return three_heads(rng, N, leading=(), D=3, M=2)


@CODE.function(CHUNKS, inputs=three_heads)
def my_retention(q, k, v, *, initial_state=None, return_state=False, L=16):
    return retention(q, k, v, DECAYS, initial_state=initial_state, return_state=return_state)


my_retention.passes(check_causal, ALL)
my_retention.passes(check_streaming, CHUNKS, empty_pieces=False)
my_retention.passes(check_linear_cost, CHUNKS, inputs=one_text)


def chunkwise(
    inside=lambda q, k, v, g: retention(q, k, v, g[..., 0, 0]),
    a=lambda g, r, n: g**r,
    b=lambda g, r, n: g ** (n - r),
    carry=lambda g, n: g**n,
):
    """Retention in chunks of 16, with factors to be replaced by wrong ones."""

    def wrong(q, k, v):
        g = DECAYS[:, None, None]
        S, out = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])), np.empty_like(v)
        for start in range(0, k.shape[-2], 16):
            at = np.s_[..., start : start + 16, :]
            n = k[at].shape[-2]
            r = np.arange(1, n + 1)[:, None]
            out[at] = inside(q[at], k[at], v[at], g) + a(g, r, n) * (q[at] @ S)
            S = carry(g, n) * S + transpose(b(g, r, n) * k[at]) @ v[at]
        return out

    return wrong


my_retention.mistakes(
    (
        chunkwise(lambda q, k, v, g: np.tril(q @ transpose(k)) @ v),
        "Inside a chunk nothing fades: the scores need the decay mask there, not only zeros and "
        "ones.",
    ),
    (
        chunkwise(a=lambda g, r, n: g ** (r - 1)),
        "What a query reads from the state has faded once too little. The border is the end of the "
        "chunk before.",
    ),
    (
        chunkwise(b=lambda g, r, n: g ** (n - r + 1)),
        "Keys fade once too often on their way to the end of the chunk. The last token is there "
        "already.",
    ),
    (
        chunkwise(carry=lambda g, n: g),
        "The state fades by one step for a whole chunk. It must fade once for each token.",
    ),
    (
        lambda q, k, v: retention(q, k, v, DECAYS[0]),
        "All heads fade like head 0. The decays have to broadcast along the axis of the heads.",
        LONG,
    ),
)

# --- Off by one --------------------------------------------------------------------------------

OFF = Exercise("ex-retnet-mistakes", CHAPTER)
OUTPUTS = np.array([[16.0, 8.0], [4.0, 12.0], [10.0, 20.0]])
BORDER = np.array([[8.0, 4.0], [4.0, 12.0]])  # the state after tokens 1 and 2
LATE = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]) @ BORDER  # what token 3 reads of it
ROWS = "three rows of two numbers"

OFF.value("first", OUTPUTS / 2, FADES, ROWS).mistakes(
    (OUTPUTS, "This is the rule of the chapter. Here the new token has faded, too, when it reads."),
)
OFF.value("second", OUTPUTS, FADES, ROWS).mistakes(
    (OUTPUTS / 2, "Here the query reads before the memory fades."),
    (
        np.array([[16.0, 8.0], [4.0, 12.0], [24.0, 32.0]]),
        "In the third row nothing has faded. The memory fades after each read.",
    ),
)
OFF.value("third", OUTPUTS + LATE / 2, CHUNKS, ROWS).mistakes(
    (
        OUTPUTS,
        "That is right with the factors of the chapter. Here token 3 takes the state as it stands.",
    ),
    (
        OUTPUTS - LATE / 2,
        "Token 3 has not read the state at all. What did the first two tokens leave?",
    ),
)

# --- A memory that turns -----------------------------------------------------------------------

TURN = Exercise("ex-retnet-turn", CHAPTER)


def for_turning(rng, N, M=8):
    return tuple(torch.tensor(rng.normal(size=(N, width))) for width in (8, 8, M))


def positions(x):
    return torch.arange(len(x), dtype=x.dtype)


def turn(x, times):
    """Rotate row i of x, (rows, D), by times[i] steps."""
    slow = torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    angle = times[:, None] * 10_000**-slow
    a, b = x[:, 0::2], x[:, 1::2]
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, dim=-1).flatten(-2)


def turning(by, gamma=0.9):
    """Retention of queries and keys that are rotated ``by`` times per position."""

    def attention(q, k, v):
        q, k = (turn(x, by * positions(x)) for x in (q, k))
        return torch_retention(q, k, v, gamma)

    return attention


@TURN.function(TURNING, inputs=for_turning)
def memory_that_turns(q, k, v):
    return turning(1)(q, k, v)


memory_that_turns.mistakes(
    (turning(0), "The memory fades, but it does not turn."),
    (turning(-1), "The memory turns the wrong way. To undo a rotation, turn back."),
    (
        turning(2),
        "Everything turns twice: queries and keys by their positions, and the memory too. Here "
        "queries and keys stay as they are.",
    ),
    (turning(1, gamma=1.0), "The memory turns, but it does not fade.", FADES),
)


@memory_that_turns.mistake(
    "Column m of the memory turns by m steps. All columns turn back by one: give `turn` each as a "
    "sequence of its own."
)
def turned_by_index(q, k, v):
    return torch.stack([turning(-m)(q, k, v)[:, m] for m in range(v.shape[1])], dim=-1)
