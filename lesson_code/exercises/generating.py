"""Exercises of the chapter on what one more token costs."""

import math

import numpy as np

from lesson_code import costs
from lesson_code.checks import random_qkv
from lesson_code.exercises import Exercise
from lesson_code.numpy import (
    elu_plus_one,
    grouped_query_attention,
    identity,
    linear_attention,
    relu,
    taylor,
)

CHAPTER = "What one more token costs"
CACHES = "Smaller caches"
MEASURED = "Measured"
READERS = "Many readers"
PADDING = "Texts of unequal length"

# --- How many conversations --------------------------------------------------------------------

FIT = Exercise("ex-generating-fit", CHAPTER)
FREE, TOKENS, LAYERS = 64 * 10**9, 32_768, 32
TOKEN = 2 * LAYERS * costs.kv_cache_entries(1, 128, 128, num_kv_heads=8)
STATES = 4 * LAYERS * 32 * costs.state_entries(128, 128, normalizer=True)
CONVERSATIONS = "a whole number of conversations"

FIT.value("cached", FREE // (TOKEN * TOKENS), CACHES, CONVERSATIONS).mistakes(
    (80 * 10**9 // (TOKEN * TOKENS), "The weights take their part of the memory, too.", READERS),
    (FREE // (4 * TOKEN * TOKENS), "All 32 heads have keys and values here. How many are kept?"),
    (2 * FREE // (TOKEN * TOKENS), "Keys and values are both kept, each number in 2 bytes."),
    (LAYERS * FREE // (TOKEN * TOKENS), "This is one layer. Each layer keeps a cache."),
)
FIT.value("stated", FREE // STATES, READERS, CONVERSATIONS).mistakes(
    (80 * 10**9 // STATES, "The weights take their part of the memory, too."),
    (2 * FREE // STATES, "Twice as many as fit: a number in float32 has 4 bytes."),
    (
        FREE // (4 * LAYERS * costs.state_entries(4_096, 4_096, normalizer=True)),
        "The state is that of one wide head. 32 heads share the width.",
    ),
)
FIT.value("passes", STATES // TOKEN + 1, CACHES, "a whole number of tokens").mistakes(
    (STATES // TOKEN, "At this length the two are equal. From which on is the cache larger?"),
    (STATES // (4 * TOKEN) + 1, "All 32 heads have keys and values here. How many are kept?"),
)

# --- To fold or not to fold --------------------------------------------------------------------

FOLD = Exercise("ex-generating-fold", CHAPTER)
LATENTS, RANK, HEAD = 10_000, 512, 128


def unfolding(n):
    return 2 * LATENTS * RANK * HEAD + 2 * n * LATENTS * HEAD


def folding(n):
    return 2 * n * RANK * HEAD + 2 * n * LATENTS * RANK


FOLD.value("decode_ratio", unfolding(1) / folding(1), CACHES, "a number, to two digits").mistakes(
    (
        (LATENTS * RANK * HEAD + 2 * LATENTS * HEAD) / (RANK * HEAD + 2 * LATENTS * RANK),
        "Keys and values are both unfolded. With folding, queries and outputs are.",
    ),
    (RANK / HEAD, "Unfolding N latents is work, too, before the first score."),
    (folding(1) / unfolding(1), "This is folding against unfolding."),
)
FOLD.value(
    "prefill_ratio", folding(LATENTS) / unfolding(LATENTS), CACHES, "a number, to two digits"
).mistakes(
    (RANK / HEAD, "Close, but unfolding the latents and folding the queries is work, too."),
    (unfolding(LATENTS) / folding(LATENTS), "This is unfolding against folding."),
)
FOLD.value("queries", 171, CACHES, "a whole number of queries").mistakes(
    (170, "At 170 folding is still slightly cheaper."),
    (
        128,
        "From n = D on the scores and sums of folding alone cost more than unfolding. But "
        "unfolding has scores and sums, too.",
    ),
)

# --- A zero key --------------------------------------------------------------------------------

ZERO = Exercise("ex-torch-mask", CHAPTER)
QUERY = np.array([[1.0, 0.0]])
KEYS = np.array([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
VALUES = np.array([[10.0, 20.0], [0.0, 0.0], [0.0, 0.0]])
PADDED = linear_attention(QUERY, KEYS, VALUES)[0]

ZERO.value(
    "similarities",
    [(phi(QUERY) @ phi(KEYS[1:2]).T).item() for phi in (relu, elu_plus_one, taylor(2))],
    PADDING,
    "three numbers: relu, elu_plus_one, taylor",
).mistakes(
    ([0, 3, 0], "The first feature of a Taylor map is 1, whatever the vector."),
    ([0, 2, 1], "Both entries of elu + 1 of a zero are 1, and both are multiplied by the query's."),
    ([0, 0, 0], "The key is zero before the map. What is it after?"),
)
ZERO.value("reads", PADDED, PADDING, "two numbers, what the query reads with the padding").mistakes(
    (VALUES[0], "The padding has no weight here. What is elu + 1 of a zero?"),
    (
        VALUES.mean(axis=0),
        "All three have the same weight here, as in softmax, where all scores are 0. Compute the "
        "similarities from the features.",
    ),
)
ZERO.value("should_read", VALUES[0], PADDING, "two numbers, what it should read").mistakes(
    (PADDED, "That is with the padding. The judge is the text by itself."),
)

# --- Prompts of unequal length -----------------------------------------------------------------

PREFILL = Exercise("ex-torch-prefill", CHAPTER)


def prompts(rng, N, D=5, M=3):
    return *random_qkv(rng, N, leading=(4,), D=D, M=M), rng.integers(0, N + 1, 4)


def in_batch(q, k, v, features_seen, out_seen, normalize=True):
    """Causal attention whose features and outputs are multiplied by what is seen."""
    fq, fk = elu_plus_one(q), elu_plus_one(k) * features_seen
    out, state = linear_attention(
        fq, fk, v, feature_map=identity, causal=True, normalize=normalize, return_state=True
    )
    return out * out_seen, *state


def real_tokens(k, lengths):
    return (np.arange(k.shape[-2]) < lengths[:, None])[..., None]


@PREFILL.function(PADDING, inputs=prompts)
def prefill(q, k, v, lengths):
    real = real_tokens(k, lengths)
    return in_batch(q, k, v, real, real)


prefill.mistakes(
    (
        lambda q, k, v, lengths: in_batch(q, k, v, 1, real_tokens(k, lengths)),
        "The outputs are right, but the padding has been written to S and z: it comes after the "
        "last real token, and before the state that you return.",
    ),
    (
        lambda q, k, v, lengths: in_batch(q, k, v, real_tokens(k, lengths), 1),
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
    return in_batch(q, k * real, v * real, 1, real)


@prefill.mistake("The state is right. The outputs are not divided by the normalizer.")
def not_divided(q, k, v, lengths):
    real = real_tokens(k, lengths)
    out, _, _ = in_batch(q, k, v, real, real, normalize=False)
    return out, *prefill.reference(q, k, v, lengths)[1:]


# --- Borders -----------------------------------------------------------------------------------

PACKED = Exercise("ex-generating-packed", CHAPTER)


def one_row(rng, N, D=5, M=3):
    first = rng.random(N) < 0.15
    first[:1] = True
    return *random_qkv(rng, N, D=D, M=M), first, 4


def in_chunks(q, k, v, first, L, *, inside=True, reads=True, drops="Sz", writes=True):
    """Each of the masks can be left out; ``drops`` names what is emptied at a border."""
    fq, fk, text = elu_plus_one(q), elu_plus_one(k), np.cumsum(first)
    state, before, out = {"S": 0.0, "z": 0.0}, 1, np.empty_like(v)
    for start in range(0, len(q), L):
        c = slice(start, start + L)
        own = text[c, None] == text[c] if inside else True
        old = (text[c] == before)[:, None] if reads else True
        A, f = np.tril(fq[c] @ fk[c].T) * own, fq[c] * old
        numerator, divisor = A @ v[c], A.sum(axis=1)
        if start:
            numerator, divisor = numerator + f @ state["S"], divisor + f @ state["z"]
        out[c] = numerator / divisor[:, None]
        last = (text[c] == text[c][-1])[:, None] if writes else True
        runs_on = text[c][-1] == before
        written = {"S": (fk[c] * last).T @ v[c], "z": (fk[c] * last).sum(axis=0)}
        state = {x: written[x] + (state[x] if runs_on or x not in drops else 0) for x in "Sz"}
        before = text[c][-1]
    return out


@PACKED.function(PADDING, inputs=one_row)
def my_packed(q, k, v, first, L):
    return in_chunks(q, k, v, first, L)


my_packed.mistakes(
    (
        lambda q, k, v, first, L: in_chunks(
            q, k, v, first, L, inside=False, reads=False, drops="", writes=False
        ),
        "The state runs on: every text is answered from those before it.",
    ),
    (
        lambda q, k, v, first, L: in_chunks(q, k, v, first, L, inside=False),
        "Within a chunk the triangle goes across the borders.",
    ),
    (
        lambda q, k, v, first, L: in_chunks(q, k, v, first, L, reads=False),
        "All rows of a chunk read the state that was carried in. After a border none may.",
    ),
    (
        lambda q, k, v, first, L: in_chunks(q, k, v, first, L, writes=False),
        "What is carried on has tokens from before the last border of the chunk.",
    ),
    (
        lambda q, k, v, first, L: in_chunks(q, k, v, first, L, drops=""),
        "A chunk with a border adds its tokens to the old state, which belongs to another text.",
    ),
    (
        lambda q, k, v, first, L: in_chunks(q, k, v, first, L, drops="S"),
        "S begins anew and z does not: outputs shrink from one text to the next.",
    ),
    (
        lambda q, k, v, first, L: my_packed.reference(q, k, v, np.roll(first, 1), L),
        "The borders are one token late.",
    ),
)

# --- A cache in a buffer -----------------------------------------------------------------------

BUFFER = Exercise("ex-images-buffer", CHAPTER)


def grouped(rng, N, D=5, M=3):
    q = rng.normal(size=(6, N, D))
    _, k, v = random_qkv(rng, N, leading=(2,), D=D, M=M)
    return q, k, v


@BUFFER.function(CACHES, inputs=grouped)
def decode(q, k, v):
    return grouped_query_attention(q, k, v, causal=True)


GROUPS = np.arange(6) // 3
STRIDED = [0, 2, 4, 1, 3, 5]


def attend(q, k, v, heads=GROUPS, unseen=-np.inf, diagonal=1):
    """Head h reads head ``heads[h]``; what is written later has the score ``unseen``."""
    k, v = k[heads], v[heads]
    scores = q @ np.swapaxes(k, 1, 2) / math.sqrt(k.shape[-1])
    later = np.triu(np.ones(scores.shape[-2:], dtype=bool), diagonal)
    weights = np.exp(np.where(later, unseen, scores))
    sums = weights.sum(axis=-1, keepdims=True)
    return np.where(later, 0, weights / np.where(sums == 0, 1, sums)) @ v


decode.mistakes(
    (
        lambda q, k, v: attend(q, k, v, heads=np.arange(6) % 2),
        "The queries of a group are not neighbors here: head h reads head h mod H'. It is the "
        "first H/H' heads that share the first head of the cache.",
    ),
    (
        lambda q, k, v: decode.reference(q[STRIDED], k, v),
        "The groups are made of every H'-th head, and the outputs are left in this order. Which "
        "axis comes first when one axis is made into two?",
    ),
    (
        lambda q, k, v: attend(q, k, v, diagonal=0),
        "The own token is left out: write it into its place before the queries read, and read that "
        "place, too.",
    ),
    (
        lambda q, k, v: attend(q, k, v, unseen=0.0),
        "The whole buffer is read. Places that are not written yet hold zeros, and a score of 0 "
        "has a weight.",
    ),
)


def bytes_ratio(reads):
    """Bytes with ``reads`` touches of each earlier token, against those without a copy."""
    moved = costs.cached_generation_bytes(1_000, 512, layers=1).memory
    once = sum(costs.kv_cache_bytes(t - 1, 512, bytes_per_number=4) for t in range(1, 1_001))
    return (moved + (reads - 1) * once) / moved


BUFFER.value("ratio", bytes_ratio(3), MEASURED, "a number, to three digits").mistakes(
    (
        bytes_ratio(2),
        "Something is left out. A copy is a read and a write, and the queries read the cache as "
        "they did before.",
    ),
    (
        bytes_ratio(4),
        "A cache is read once by its queries, and once for the copy. Written it is only by the "
        "copy.",
    ),
)
