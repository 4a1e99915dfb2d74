"""Exercises of the chapter on tensor cores."""

import math
from collections import Counter

import numpy as np

from lesson_code.exercises import Exercise

CHAPTER = "Tensor cores"
TILES = "A product of tiles"
WARPS = "Warps that wait for warps"
BANKS = "Sixteen bytes more in a row"
SEGMENTS = "Segments"
BACKWARD = "The backward pass is three scans"

# --- Counting bytes ----------------------------------------------------------------------------

BYTES = Exercise("ex-cuda-bytes", CHAPTER)


def segments(tokens=65_536, blocks=264, blocks_per_segment=2):
    length = 64 * math.ceil(tokens / (blocks / blocks_per_segment) / 64)
    return math.ceil(tokens / length)


EQUAL = 2 * 64 * 64 / (4 * 64)  # two ways of a state against four rows of each token
MOVED = 4 * segments() * 4 * 64 * 64
TOKENS = 65_536 * 512

BYTES.value("equal", EQUAL, SEGMENTS, "the L at which both are equal, for C = M = 64").mistakes(
    (EQUAL / 2, "A state is stored by the first pass and loaded by the second."),
    (2 * EQUAL, "Queries, keys, values and outputs are four rows for each token, not two."),
)
BYTES.value("segments", segments(), SEGMENTS, "a whole number").mistakes(
    (
        segments(blocks_per_segment=1),
        "A segment takes two blocks, as a block holds 32 of the 64 columns. How many segments keep "
        "all multiprocessors busy?",
    ),
    (132, "So many segments would have 496.5 tokens each. They are made of whole chunks."),
)
BYTES.value("moved", MOVED, SEGMENTS, "a number of bytes").mistakes(
    (
        MOVED // 4,
        "Each state travels four times: stored, loaded, stored and loaded again. (Or did you count "
        "numbers? Each has four bytes.)",
    ),
    (
        MOVED // 2,
        "Half of it is missing: states are float32, whatever the inputs are, and they travel four "
        "times.",
    ),
)
BYTES.value(
    "share",
    MOVED / TOKENS,
    SEGMENTS,
    "what part of the bytes of the tokens that is, from 0 to 1",
).mistakes(
    (100 * MOVED / TOKENS, "As a number from 0 to 1."),
    (
        MOVED / (TOKENS + MOVED),
        "This is the share of all bytes. The question is for the share of the tokens' own.",
    ),
)

# --- Bank conflicts ----------------------------------------------------------------------------

CONFLICTS = Exercise("ex-cuda-banks", CHAPTER)


def extra_passes(pitch):
    """A column of a tile: how often a bank is asked again."""
    return max(Counter(row * pitch % 32 for row in range(32)).values()) - 1


EXTRA = np.array([extra_passes(pitch) for pitch in (32, 33, 34)])

CONFLICTS.value("conflicts", 32 * EXTRA, BANKS, "three numbers, for PITCH 32, 33 and 34").mistakes(
    (EXTRA, "That is for one column. The warp loads 32 of them."),
    (
        32 * EXTRA + 32,
        "These are all passes. A conflict is one more than the one that is needed.",
    ),
    (
        32 * EXTRA * [1, 0, 0],
        "With 34 the banks go up in steps of two: how many different ones are there?",
    ),
)

# --- A chunk in tiles --------------------------------------------------------------------------

CHUNK = Exercise("ex-tensor-chunk", CHAPTER)


def a_chunk(rng, N, C=5, M=3):
    n = 16 * (1 + N % 4)
    q, k = rng.normal(size=(2, n, C))
    return q, k, rng.normal(size=(n, M)), rng.normal(size=(C, M))


def by_tiles(keep, state=1.0):
    """Scores times ``keep(t, s)``, which says of each query and key whether it is computed."""

    def chunk_in_tiles(q, k, v, S):
        t = np.arange(len(q))
        return state * q @ S + (q @ k.T * keep(t[:, None], t[None])) @ v

    return chunk_in_tiles


@CHUNK.function(TILES, inputs=a_chunk, unit="")
def chunk_in_tiles(q, k, v, S):
    return by_tiles(lambda t, s: s <= t)(q, k, v, S)


chunk_in_tiles.mistakes(
    (
        by_tiles(lambda t, s: s // 16 <= t // 16),
        "On the diagonal a tile has later keys, too: there the mask is needed, entry by entry.",
    ),
    (
        by_tiles(lambda t, s: s // 16 < t // 16),
        "The tile on the diagonal is missing: tokens of one band read each other as well.",
    ),
    (
        by_tiles(lambda t, s: (s // 16 < t // 16) | (s % 16 <= t % 16)),
        "Tiles of later keys are computed as well. The loop ends at the band of the queries.",
    ),
    (
        by_tiles(lambda t, s: (s // 16 <= t // 16) & (s % 16 <= t % 16)),
        "Every tile is masked. Of earlier bands all 16 keys may be read.",
    ),
    (
        by_tiles(lambda t, s: s <= t, state=0.0),
        "What the tokens before the chunk have written is missing: q S.",
    ),
)

PRODUCTS = [32 + 16 * (w + 1) + 64 * (w < 4) for w in range(8)]

CHUNK.value("last", PRODUCTS[-1], WARPS, "a number of products").mistakes(
    (
        PRODUCTS[-1] + 64,
        "The last warp has no rows of the state to update: the first four have all 64.",
    ),
    (
        96,
        "Each band of keys takes 8 products for its scores, and 8 to multiply them.",
    ),
    (128, "That is the last warp of four. Here it has eight bands of keys, its own included."),
)
CHUNK.value(
    "waiting", 1 - sum(PRODUCTS) / (8 * max(PRODUCTS)), WARPS, "a share, from 0 to 1"
).mistakes(
    (0.1875, "That is the share with chunks of 64 tokens and four warps."),
    (sum(PRODUCTS) / (8 * max(PRODUCTS)), "That is the share of the time in which it works."),
    (
        1 - sum(32 + 16 * (w + 1) + 32 * (w < 4) for w in range(8)) / (8 * 160),
        "16 rows of the state with 128 tokens are 8 slices of tokens by 8 tiles of columns.",
    ),
)

# --- The gradients of retention ----------------------------------------------------------------

RETENTION = Exercise("ex-tensor-retention", CHAPTER)


def with_a_decay(rng, N, C=5, M=3):
    q, k = rng.normal(size=(2, N, C))
    v, g = rng.normal(size=(2, N, M))
    return q, k, v, g, rng.uniform(0.5, 1)


def decayed(q, k, v, gamma):
    t = np.arange(len(q))
    past = t[:, None] >= t
    return (q @ k.T * np.where(past, gamma ** np.where(past, t[:, None] - t, 0), 0)) @ v


def three_scans(dk_of=lambda v, g, q: (v, g, q), turn=True, gamma_of=lambda gamma: gamma):
    """The three scans: in which places the arrays of dk are, whether time turns, which decay."""

    def retention_gradients(q, k, v, g, gamma):
        step = -1 if turn else 1
        gamma = gamma_of(gamma)

        def back(q, k, v):
            return decayed(q[::step], k[::step], v[::step], gamma)[::step]

        return decayed(g, v, k, gamma), back(*dk_of(v, g, q)), back(k, q, g)

    return retention_gradients


@RETENTION.function(BACKWARD, inputs=with_a_decay)
def retention_gradients(q, k, v, g, gamma):
    return three_scans()(q, k, v, g, gamma)


retention_gradients.mistakes(
    (
        three_scans(turn=False),
        "Gradients of keys and values come from later tokens: for them time has to run backward.",
    ),
    (
        three_scans(gamma_of=lambda gamma: 1.0),
        "The decay is missing. A pair of tokens keeps its factor, whoever of the two asks.",
    ),
    (
        three_scans(gamma_of=lambda gamma: 1 / gamma),
        "Backward in time, too, the factor gets smaller with the distance of two tokens.",
    ),
)

# --- The places of a lane ----------------------------------------------------------------------

LANE = Exercise("ex-tensor-lane", CHAPTER)

LANE.value("rows", np.array([3, 11]), TILES, "two rows of A, from 0 on").mistakes(
    (np.array([1, 9]), "Four lanes share a row: which multiple of four is in 13?"),
    (np.array([3, 4]), "The second row is in the lower half of A, eight rows further down."),
)
LANE.value("columns", np.array([2, 3, 10, 11]), TILES, "four columns of A, from 0 on").mistakes(
    (np.array([1, 2, 9, 10]), "A lane has two neighbors: lane 12 has columns 0 and 1."),
    (np.array([6, 7, 14, 15]), "Each row begins with a lane that is a multiple of four."),
)


def entries(rng, N):
    return int(rng.integers(16)), int(rng.integers(8))


@LANE.function(TILES, inputs=entries)
def b_owner(row, column):
    return column * 4 + row % 8 // 2


b_owner.mistakes(
    (
        lambda row, column: row % 8 * 4 + column // 2,
        "That is the layout of C. In the picture the lanes of B count down the columns.",
    ),
    (
        lambda row, column: column * 4 + row // 2,
        "The lower half of B has the same lanes as the upper one.",
    ),
)
