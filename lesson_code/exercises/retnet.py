"""Exercises of the chapter on decay and RetNet."""

from __future__ import annotations

import numpy as np
import torch

from lesson_code.checks._calling import random_qkv
from lesson_code.checks.causal import check_causal
from lesson_code.checks.linear_cost import check_linear_cost
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.numpy import retention, retention_decays
from lesson_code.torch import retention as torch_retention

FADES = "A memory that fades"
ALL = "All positions at once"
LONG = "How long is the memory?"
CHUNKS = "Chunks: three factors"
TURNING = "Turning by position"

# --- One more token ----------------------------------------------------------------------------

K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
V = np.array([[16.0, 8.0], [4.0, 12.0], [2.0, 6.0], [1.0, 3.0]])
GAMMA = 0.5


def state(n, gamma=GAMMA):
    """S_n, with the decay before each write."""
    S = np.zeros((2, 2))
    for k, v in zip(K[:n], V[:n], strict=True):
        S = gamma * S + np.outer(k, v)
    return S


def fourth_token():
    return np.outer(K[3], V[3])


HAND = (
    Value(
        name="S_4",
        reference=lambda: state(4),
        section=FADES,
        form="two rows of two numbers",
        mistakes=(
            Mistake(
                lambda: GAMMA * (state(3) + fourth_token()),
                "The new token has faded too. The memory fades before the token writes.",
                FADES,
            ),
            Mistake(
                lambda: state(3) + fourth_token(),
                "The memory has not faded before this write.",
                FADES,
            ),
            Mistake(
                lambda: np.stack([V[3], GAMMA * state(3)[1]]),
                "The first row has been replaced. Decay does not replace: what is left of the old "
                "row stays, and the value is added.",
                FADES,
            ),
            Mistake(
                lambda: GAMMA * state(3) + V[3],
                "The value was added to both rows: each row takes it times its own number of the "
                "key.",
                FADES,
            ),
            Mistake(
                lambda: state(4).T,
                "It is the transpose: the key chooses the rows, the value runs along them.",
                FADES,
            ),
        ),
    ),
    Value(
        name="o_4",
        reference=lambda: K[3] @ state(4),
        section=FADES,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: GAMMA * K[3] @ state(3),
                "This is read before token 4 writes. A query finds its own token.",
                FADES,
            ),
            Mistake(
                lambda: K[3] @ state(3),
                "This is read from S_3. Before query 4 reads, the memory fades and token 4 writes.",
                FADES,
            ),
            Mistake(
                lambda: K[3] @ (state(3) + fourth_token()),
                "The memory has not faded since token 3.",
                FADES,
            ),
            Mistake(
                lambda: V[3],
                "That is token 4 alone. Older tokens answer as well, with smaller weights.",
                FADES,
            ),
            Mistake(
                lambda: state(4) @ K[3],
                "The state was read from the wrong side: the query mixes the rows of S.",
                FADES,
            ),
        ),
    ),
    Value(
        name="a",
        reference=lambda: GAMMA ** np.array([1, 2]),
        section=CHUNKS,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: GAMMA ** np.array([0, 1]),
                "This counts from the first token of the chunk. The state is that at the end of "
                "the chunk before, which is one step earlier.",
                CHUNKS,
            ),
            Mistake(
                lambda: GAMMA ** np.array([2, 1]),
                "The other way round: which of the two queries is farther from the chunk before?",
                CHUNKS,
            ),
            Mistake(
                lambda: GAMMA ** np.array([1, 0]),
                "That is b. It belongs to the keys and counts to the end of the chunk.",
                CHUNKS,
            ),
        ),
    ),
    Value(
        name="b",
        reference=lambda: GAMMA ** np.array([1, 0]),
        section=CHUNKS,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: GAMMA ** np.array([2, 1]),
                "The last token of a chunk is at its end already: how often has it faded there?",
                CHUNKS,
            ),
            Mistake(
                lambda: GAMMA ** np.array([0, 1]),
                "The other way round: which of the two tokens is farther from the end?",
                CHUNKS,
            ),
            Mistake(
                lambda: GAMMA ** np.array([1, 2]),
                "That is a. It belongs to the queries and counts from the start of the chunk.",
                CHUNKS,
            ),
        ),
    ),
    Value(
        name="tokens",
        reference=lambda: next(n for n in range(99) if (GAMMA**n * state(4) < 0.1).all()),
        section=FADES,
        mistakes=(
            Mistake(
                lambda: np.log2(state(4).max() / 0.1),
                "There the largest entry is just 0.1. How many whole tokens does it take?",
                FADES,
            ),
            Mistake(6, "The largest entry is then still a little above 0.1.", FADES),
            Mistake(5, "That is when the smallest entry has fallen below 0.1.", FADES),
            Mistake(0, "A key of 0 writes nothing. Does the memory fade all the same?", FADES),
        ),
    ),
)

# --- Retention in chunks -----------------------------------------------------------------------

DECAYS = retention_decays(3)
L = 16


def ages(n):
    return np.arange(n)[:, None] - np.arange(n)


def decay_mask(g, n, first=0):
    return np.where(ages(n) >= first, g ** np.maximum(ages(n), 0), 0.0)


def chunkwise(
    q,
    k,
    v,
    *,
    mask=decay_mask,
    a=lambda g, r, n: g**r,
    b=lambda g, r, n: g ** (n - r),
    carry=lambda g, n: g**n,
    g=DECAYS[:, None, None],
):
    """Retention in chunks of 16, with factors to be replaced by wrong ones."""
    S, out = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1])), np.empty_like(v)
    for start in range(0, k.shape[-2], L):
        part = np.s_[..., start : start + L, :]
        n = k[part].shape[-2]
        r = np.arange(1, n + 1)[:, None]
        scores = q[part] @ np.swapaxes(k[part], -1, -2)
        out[part] = (scores * mask(g, n)) @ v[part] + a(g, r, n) * (q[part] @ S)
        S = carry(g, n) * S + np.swapaxes(b(g, r, n) * k[part], -1, -2) @ v[part]
    return out


def three_heads(rng, N, leading=(2,), D=5, M=3):
    return random_qkv(rng, N, leading=(*leading, 3), D=D, M=M)


def one_text(rng, N):
    return three_heads(rng, N, leading=(), D=3, M=2)


def with_factor(**factor):
    return lambda q, k, v: chunkwise(q, k, v, **factor)


CODE = (
    Function(
        signature="my_retention(q, k, v, *, initial_state=None, return_state=False, L=16)",
        reference=lambda q, k, v: retention(q, k, v, DECAYS),
        section=CHUNKS,
        inputs=three_heads,
        mistakes=(
            Mistake(
                with_factor(mask=lambda g, n: np.tri(n)),
                "Inside a chunk nothing fades: the scores need the decay mask there, not only "
                "zeros and ones.",
                CHUNKS,
            ),
            Mistake(
                with_factor(mask=lambda g, n: decay_mask(g, n, first=1)),
                "The diagonal is missing inside the chunks: a query finds its own token.",
                ALL,
            ),
            Mistake(
                with_factor(mask=lambda g, n: g ** np.abs(ages(n))),
                "Inside a chunk, queries see later tokens: the decay mask is 0 there.",
                ALL,
            ),
            Mistake(
                with_factor(a=lambda g, r, n: g ** (r - 1)),
                "What a query reads from the state has faded once too little. The border is the "
                "end of the chunk before.",
                CHUNKS,
            ),
            Mistake(
                with_factor(a=lambda g, r, n: 1.0),
                "What a query reads from the state has not faded since the start of the chunk: the "
                "factor a is missing.",
                CHUNKS,
            ),
            Mistake(
                with_factor(b=lambda g, r, n: g ** (n - r + 1)),
                "Keys fade once too often on their way to the end of the chunk. The last token is "
                "there already.",
                CHUNKS,
            ),
            Mistake(
                with_factor(b=lambda g, r, n: 1.0),
                "Keys go into the state as they are: the factor b, to the end of the chunk, is "
                "missing.",
                CHUNKS,
            ),
            Mistake(
                with_factor(b=lambda g, r, n: g**r),
                "The first tokens of a chunk fade least on their way into the state. It is the "
                "last ones that are nearest to its end.",
                CHUNKS,
            ),
            Mistake(
                with_factor(carry=lambda g, n: g),
                "The state fades by one step for a whole chunk. It must fade once for each token.",
                CHUNKS,
            ),
            Mistake(
                with_factor(carry=lambda g, n: 1.0),
                "The state does not fade from chunk to chunk.",
                CHUNKS,
            ),
            Mistake(
                with_factor(a=lambda g, r, n: 0.0),
                "Nothing is read from earlier chunks.",
                CHUNKS,
            ),
            Mistake(
                with_factor(g=DECAYS[0]),
                "All heads fade like head 0. The decays have to broadcast along the axis of the "
                "heads.",
                LONG,
            ),
            Mistake(
                lambda q, k, v: retention(q, k, v, 1.0),
                "Nothing fades at all.",
                FADES,
            ),
        ),
        further=(
            Further(check_causal, ALL, three_heads),
            Further(check_streaming, CHUNKS, three_heads, options={"empty_pieces": False}),
            Further(check_linear_cost, CHUNKS, one_text),
        ),
    ),
)

# --- Off by one --------------------------------------------------------------------------------

ITSELF = (
    "check_streaming compares a function with itself: a state that it hands on has to fit its own "
    "next step, and nothing else."
)
FUTURE = "Does any output depend on a later token?"

OFF = (
    Value(
        name="first",
        reference=lambda: 1,
        section=FADES,
        form="how many of the three checks object to the first",
        mistakes=(
            Mistake(
                0,
                "Write down the first output by this rule, and beside it that of retention.",
                FADES,
            ),
            Mistake(2, ITSELF, FADES),
            Mistake(3, f"{FUTURE} And: {ITSELF}", FADES),
        ),
    ),
    Value(
        name="second",
        reference=lambda: 0,
        section=FADES,
        form="the same for the second",
        mistakes=(
            Mistake(
                1,
                "Write down the first two outputs by this rule. How often has token 1 faded when "
                f"query 2 reads? And for the state: {ITSELF}",
                FADES,
            ),
            Mistake(
                2,
                "Write down the first two outputs by this rule. How often has token 1 faded when "
                "query 2 reads?",
                FADES,
            ),
        ),
    ),
    Value(
        name="third",
        reference=lambda: 2,
        section=CHUNKS,
        form="the same for the third",
        mistakes=(
            Mistake(
                1,
                "The outputs depend on where the chunks begin. What does that mean for a text that "
                "comes in pieces?",
                CHUNKS,
            ),
            Mistake(
                0,
                "Compute token 3 by hand, as the second chunk for L = 2, with this factor.",
                CHUNKS,
            ),
            Mistake(3, FUTURE, CHUNKS),
        ),
    ),
)

# --- A memory that turns -----------------------------------------------------------------------


def turn(x, times):
    """Rotate row i of x, (rows, D), by times[i] steps."""
    slow = torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    angle = times[:, None] * 10_000**-slow
    a, b = x[:, 0::2], x[:, 1::2]
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, dim=-1).flatten(-2)


def positions(x):
    return torch.arange(len(x), dtype=x.dtype)


def turning(q, k, v, *, gamma=0.9, by=1, own=False):
    """Retention of queries and keys that are rotated `by` times per position."""
    q, k = (turn(x, by * positions(x)) for x in (q, k))
    if own:  # token t, too, is turned and faded before the query reads
        k = gamma * turn(k, torch.full((len(k),), -by, dtype=k.dtype))
    return torch_retention(q, k, v, gamma)


def by_index(q, k, v, back):
    """A memory that `back` turns in another way than it should."""
    T, out = q.new_zeros(k.shape[1], v.shape[1]), []
    for q_t, k_t, v_t in zip(q, k, v, strict=True):
        T = 0.9 * back(T) + torch.outer(k_t, v_t)
        out.append(q_t @ T)
    return torch.stack(out)


def for_turning(rng, N, M=8):
    return tuple(torch.tensor(rng.normal(size=(N, width))) for width in (8, 8, M))


TURN = (
    Function(
        signature="memory_that_turns(q, k, v)",
        reference=turning,
        section=TURNING,
        inputs=for_turning,
        mistakes=(
            Mistake(
                lambda q, k, v: turning(q, k, v, by=0),
                "The memory fades, but it does not turn.",
                TURNING,
            ),
            Mistake(
                lambda q, k, v: turning(q, k, v, by=-1),
                "The memory turns the wrong way. To undo a rotation, turn back.",
                TURNING,
            ),
            Mistake(
                lambda q, k, v: by_index(q, k, v, lambda T: turn(T.mT, positions(T.mT)).mT),
                "Column m of the memory turns by m steps. All columns turn back by one: give "
                "`turn` each as a sequence of its own.",
                TURNING,
            ),
            Mistake(
                lambda q, k, v: by_index(q, k, v, lambda T: turn(T.mT, positions(T.mT) - 1).mT),
                "Column m of the memory turns by m - 1 steps. All columns turn back by one: give "
                "`turn` each as a sequence of its own.",
                TURNING,
            ),
            Mistake(
                lambda q, k, v: by_index(q, k, v, lambda T: turn(T, positions(T) - 1)),
                "`turn` was given the rows of the memory, which are values. Keys are turned, and "
                "they lie along its columns.",
                TURNING,
            ),
            Mistake(
                lambda q, k, v: turning(q, k, v, own=True),
                "The token that has just been written fades and turns before its query reads. What "
                "is multiplied is the old memory.",
                FADES,
            ),
            Mistake(
                lambda q, k, v: turning(q, k, v, gamma=1.0),
                "The memory turns, but it does not fade.",
                FADES,
            ),
            Mistake(
                lambda q, k, v: turning(q, k, v, by=2),
                "Everything turns twice: queries and keys by their positions, and the memory too. "
                "Here queries and keys stay as they are.",
                TURNING,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Decay: RetNet",
    ("ex-retnet-hand", *HAND),
    ("ex-retnet-chunkwise", *CODE),
    ("ex-retnet-mistakes", *OFF),
    ("ex-retnet-turn", *TURN),
)
