"""Exercises of the chapter on what lies between a state and a cache."""

import math

import numpy as np

from lesson_code.exercises import Exercise
from lesson_code.numpy import log_linear_attention, sliding_window_attention

CHAPTER = "Between a state and a cache"
WINDOW = "A cache that stops growing"
HYBRIDS = "A few layers that keep everything"
FOX = "A cache that forgets"
TREE = "A few states, longer ones further back"
NEEDLE = "A needle against distance"

# --- By hand: the bits of a position -----------------------------------------------------------

BITS = Exercise("ex-between-bits", CHAPTER)
BITS.value("blocks", [16, 4, 2, 1], TREE, "lengths, the oldest block first").mistakes(
    ([16, 4, 2], "These are the tokens before. Token 22 reads itself, too: level 0."),
    ([1, 2, 4, 16], "These are the right blocks in the wrong order: long ones are far away."),
    ([16, 4, 1, 1], "22 = 16 + 4 + 2: which bits are set?"),
)
BITS.value("level", 3, TREE, "the level of token 17").mistakes(
    (5, "Level 5 holds tokens 0 to 15. Token 17 comes after them."),
    (4, "The block has four tokens, 2 to the power of its level less 1."),
    (2, "Its block holds tokens 16 to 19, four of them. Which level has 2^(l − 1) = 4?"),
)
BITS.value("merged", [16, 8, 1], TREE, "lengths for t = 24, the oldest block first").mistakes(
    ([16, 4, 2, 1, 1], "That is 24 tokens at t = 23. At 24 the short blocks become one."),
    ([16, 8], "Token 24 reads itself, too."),
    ([24, 1], "24 = 16 + 8, and a block's length is a power of two."),
)
BITS.value("states", 17, TREE, "the most states that are alive in 65,536 tokens").mistakes(
    (16, "Sixteen bits, all set at t = 65,535, and the token itself."),
    (18, "The last position is 65,535, which has sixteen bits."),
    (2, "That is at t = 65,536, the first token that is not among them."),
)

# --- By hand: windows and caches ---------------------------------------------------------------

BYTES = Exercise("ex-between-bytes", CHAPTER)
LAYERS, PERIOD, SPAN, N, PER_TOKEN = 42, 6, 1024, 131_072, 2 * 8 * 128
CACHES = LAYERS // PERIOD
KEPT = (CACHES * N + (LAYERS - CACHES) * SPAN) / (LAYERS * N)
BYTES.value("gigabytes", LAYERS * N * PER_TOKEN * 2 / 1e9, HYBRIDS).mistakes(
    (
        LAYERS * N * PER_TOKEN / 1e9,
        "A factor of 2 is missing: a token has a key and a value, and each number two bytes.",
    ),
    (LAYERS * N * PER_TOKEN * 4 / 1e9, "A number of 16 bits has two bytes, not four."),
)
BYTES.value("share", KEPT, HYBRIDS, "a number between 0 and 1").mistakes(
    (1 / PERIOD, "Close: that counts the seven caches. The windows keep something, too."),
    (1 / (PERIOD - 1), "Five windows and one cache are six layers."),
)
BYTES.value("reach", 1 + 35 * (SPAN - 1), WINDOW, "a number of tokens").mistakes(
    (35 * SPAN, "Each window has the own token in it, so it reaches 1,023 tokens further back."),
    (SPAN, "That is one layer. The next reads what the first has gathered."),
    (35 * (SPAN - 1), "So far back it reaches. It sees its own token as well."),
)

# --- In code: a window in a ring ---------------------------------------------------------------

RING = Exercise("ex-between-ring", CHAPTER)


def ring_inputs(rng, N, D=5, M=3):
    q, k = rng.normal(size=(2, N, D))
    return q, k, rng.normal(size=(N, M)), 4


@RING.function(WINDOW, inputs=ring_inputs)
def ring(q, k, v, window):
    return sliding_window_attention(q, k, v, window=window)


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def slots(q, k, v, window, *, full=False, at=None, scale=None, before=False):
    """The ring with a mistake."""
    D, out = q.shape[1], np.empty_like(v)
    K, V = np.zeros((window, D)), np.zeros((window, v.shape[1]))
    for t in range(len(q)):
        slot = (at or (lambda t: t % window))(t)
        if not before:
            K[slot], V[slot] = k[t], v[t]
        seen = window if full else min(t + 1, window)
        out[t] = softmax(K[:seen] @ q[t] * (scale or D**-0.5)) @ V[:seen]
        if before:
            K[slot], V[slot] = k[t], v[t]
    return out


ring.mistakes(
    (
        lambda q, k, v, window: slots(q, k, v, window, full=True),
        "Slots that no token has filled take part: a score of 0 is not a weight of 0. Read the "
        "first t + 1 slots until the ring is full.",
    ),
    (
        lambda q, k, v, window: slots(q, k, v, window, at=lambda t: min(t, window - 1)),
        "When the ring is full, every new token replaces the last one. It should replace the "
        "oldest.",
    ),
    (
        lambda q, k, v, window: slots(q, k, v, window, before=True),
        "The query reads before its own token is written. A window has the own token in it.",
    ),
    (
        lambda q, k, v, window: slots(q, k, v, window, scale=1.0),
        "The scores are not divided by the square root of D.",
    ),
    (
        lambda q, k, v, window: sliding_window_attention(q, k, v, window=window + 1),
        "One key too many is seen: the own one is among the window's.",
    ),
)

# --- In code: what may be pruned ---------------------------------------------------------------

PRUNE = Exercise("ex-between-prune", CHAPTER)


def gates(rng, N):
    return -rng.exponential(2.0, size=N), 1.0, 0.01


def closed(rng):
    g = -rng.exponential(0.5, size=12)
    g[[4, 9]] = -np.inf
    return g, 1.0, 0.01


@PRUNE.function(FOX, inputs=gates, special=(closed,))
def first_kept(g, bound, tolerance):
    least, first = math.log(tolerance) - 2 * bound, np.empty(len(g), int)
    for t in range(len(g)):
        j, faded = t, 0.0
        while j > 0 and faded + g[j] >= least:
            faded += g[j]
            j -= 1
        first[t] = j
    return first


def kept_from(least, *, own=False):
    def wrong(g, bound, tolerance):
        first = np.empty(len(g), int)
        for t in range(len(g)):
            faded = [g[j + (not own) : t + (not own)].sum() for j in range(t + 1)]
            enough = np.array(faded) >= least(bound, tolerance)
            first[t] = np.argmax(enough) if enough.any() else t
        return first

    return wrong


first_kept.mistakes(
    (
        kept_from(lambda bound, tolerance: math.log(tolerance)),
        "The scores count, too: a faded key may score `bound` and the own one `-bound`.",
    ),
    (
        kept_from(lambda bound, tolerance: math.log(tolerance) - bound),
        "Both scores count: in the worst case the faded key's is `bound` and the own one's is "
        "`-bound`, which are `2 * bound` apart.",
    ),
    (
        kept_from(lambda bound, tolerance: math.log(tolerance) - 2 * bound, own=True),
        "The gate of a key's own token does not fade it. The sum begins at j + 1 and ends with t.",
    ),
    (
        lambda g, bound, tolerance: np.array(
            [
                np.argmax(x) if x.any() else 0
                for x in np.tril(
                    np.subtract.outer(np.cumsum(g), np.cumsum(g)) >= math.log(tolerance) - 2 * bound
                )
            ]
        ),
        "After a gate of −inf both cumulative sums are −inf, and their difference is NaN, which no "
        "comparison finds. Add the gates between, without a difference.",
    ),
)

# --- In code: all levels at once ---------------------------------------------------------------

MASK = Exercise("ex-between-mask", CHAPTER)


def level_inputs(rng, N, D=5, M=3):
    q, k = rng.normal(size=(2, N, D))
    return q, k, rng.normal(size=(N, M)), rng.uniform(size=(N, max(N - 1, 1).bit_length() + 1))


@MASK.function(TREE, inputs=level_inputs)
def by_mask(q, k, v, weights):
    return log_linear_attention(q, k, v, np.zeros(len(q)), weights)


def masked(level, row=lambda t, j: t):
    def wrong(q, k, v, weights):
        t, j = np.indices((len(q), len(q)))
        chosen = np.clip(level(t, j), 0, weights.shape[1] - 1)
        return np.tril((q @ k.T) * weights[row(t, j), chosen]) @ v

    return wrong


def bits(t, j):
    return np.frexp(t ^ j)[1]


by_mask.mistakes(
    (
        masked(lambda t, j: np.frexp(t - j)[1]),
        "These are levels by distance. A block begins at a multiple of its length: where is the "
        "highest bit in which t and j differ?",
    ),
    (
        masked(lambda t, j: bits(t, j) - 1),
        "All levels are one too low: level 0 is the token itself, so bit 0 is level 1.",
    ),
    (
        masked(bits, row=lambda t, j: j),
        "The weights are those of the token that was written. The one that reads chooses.",
    ),
    (
        lambda q, k, v, weights: (
            (q @ k.T) * np.take_along_axis(weights, bits(*np.indices((len(q), len(q)))), axis=1) @ v
        ),
        "The mask is missing: later tokens are read as well.",
    ),
)
