"""Exercises of the chapter on causal scans."""

import numpy as np
import torch

from lesson_code.checks import check_linear_cost, check_streaming, random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V
from lesson_code.torch import elu_plus_one, identity, linear_attention

CHAPTER = "Causal scans"
CHUNKS = "Chunks"
BACKWARD = "The backward pass"
FIRST_VALUE = "Who has read the first value?"
TWO_LOOPS = "Three gradients, two loops"
NORMALIZER = "The normalizer's path"
KEPT = "What autograd would have kept"

# --- One gradient: the tokens of the chapter, and a loss of the first entry of o_3 --------------

HAND = Exercise("ex-scans-hand", CHAPTER)
GRAD_OUT = np.array([4.0, 0.0])
S, Z = K.T @ V, K.sum(axis=0)
R_3 = K[2] @ Z
OUT = K[2] @ S / R_3
DN = GRAD_OUT / R_3
DR = -(DN @ OUT)
DS, DZ = np.outer(K[2], DN), K[2] * DR  # of every position, as only the last query reads
LAST = np.array([[0], [0], [1]])
CONSTANT = "The divisor is taken for a constant. "

HAND.value("dn_3", DN, NORMALIZER, "two numbers").mistakes(
    (
        GRAD_OUT,
        "That is the gradient of the output; the output is the numerator divided by r.",
    ),
)
HAND.value("dr_3", DR, NORMALIZER).mistakes(
    (-DR, "Does a larger divisor make the output larger?"),
    (
        -(GRAD_OUT @ OUT),
        "One factor r too many: multiply the gradient of the numerator and the output, which are "
        "both divided already.",
    ),
)
HAND.value("dq_3", S @ DN + Z * DR, NORMALIZER, "two numbers").mistakes(
    (S @ DN, CONSTANT + "It was made from this query, too."),
    (
        S @ DN + K[2] * DR,
        "The divisor is the product of the query and z, the sum of all keys so far.",
    ),
)
HAND.value(
    "dk", V @ DS.T + DZ, NORMALIZER, "three rows of two numbers, one for each token"
).mistakes(
    (V @ DS.T, CONSTANT + "All keys are part of z."),
    (
        LAST * (V @ DS.T + DZ),
        "Tokens 1 and 2 get nothing. Their keys are in the state that query 3 reads: the gradient "
        "of the state goes backward in time.",
        FIRST_VALUE,
    ),
)
HAND.value("dv", K @ DS, TWO_LOOPS, "three rows of two numbers").mistakes(
    (
        LAST * (K @ DS),
        "Tokens 1 and 2 get nothing. Their values are in the state that query 3 reads: the "
        "gradient of the state goes backward in time.",
        FIRST_VALUE,
    ),
    (
        R_3 * (K @ DS),
        "The gradient of the output was written to the state, not that of the numerator.",
        NORMALIZER,
    ),
)

# --- Three mistakes, with the tokens of the chapter in chunks of two -----------------------------

MISTAKES = Exercise("ex-scans-mistakes", CHAPTER)
RIGHT = np.tril(K @ K.T) @ V
ROWS = "three rows of two numbers"


def in_chunks(k=K, diagonal=0, update_first=False, L=2):
    S, rows = np.zeros((k.shape[1], V.shape[1])), []
    for start in range(0, len(k), L):
        q_i, k_i, v_i = (x[start : start + L] for x in (K, k, V))
        after = S + k_i.T @ v_i
        own = np.tril(q_i @ k_i.T, diagonal) @ v_i
        rows.append(own + q_i @ (after if update_first else S))
        S = after
    return np.concatenate(rows)


MISTAKES.value("first", in_chunks(diagonal=-1), CHUNKS, ROWS).mistakes(
    (RIGHT, "These are the right outputs. Without the diagonal a token does not see itself."),
    (np.zeros_like(V), "The cherry still reads the state of the first chunk."),
)
MISTAKES.value("second", in_chunks(update_first=True), CHUNKS, ROWS).mistakes(
    (RIGHT, "Each chunk reads itself twice: in its triangle, and in the state."),
    (2 * RIGHT, "The cherry reads the first chunk only once, in the state."),
)
CHANGED = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
MISTAKES.value("moved", in_chunks(CHANGED, update_first=True)[0], CHUNKS, "two numbers").mistakes(
    (in_chunks(update_first=True)[0], "Red asks for the first feature, and round has it now."),
    (V[0], "This is the right output. Here red reads the state of its whole chunk, too."),
)
MISTAKES.value("third", S @ DN, NORMALIZER, "two numbers").mistakes(
    (S @ DN + Z * DR, "This is the right gradient. Which part of it comes from dr?"),
    (Z * DR, "This part is the one that is missing."),
)

# --- Chunkwise ---------------------------------------------------------------------------------

CHUNKWISE = Exercise("ex-scans-chunkwise", CHAPTER)


def batch(rng, N, leading=(2,), D=5, M=3):
    return [torch.tensor(x) for x in random_qkv(rng, N, leading=leading, D=D, M=M)]


@CHUNKWISE.function(CHUNKS, inputs=batch)
def my_chunkwise(q, k, v, *, initial_state=None, return_state=False, L=16):
    state = {"initial_state": initial_state, "return_state": return_state}
    return linear_attention(q, k, v, causal=True, **state)


my_chunkwise.passes(check_streaming, CHUNKS, empty_pieces=False)
my_chunkwise.passes(check_linear_cost, CHUNKS)


def weighted(mask, divisor=None, phi=elu_plus_one):
    """Attention with weights ``mask(own, same, earlier)``, divided by the sum of other ones.

    The three are the keys up to the own one in its chunk, all of the chunk, those of earlier ones.
    """

    def attention(q, k, v):
        N = k.shape[-2]
        chunk, ones = torch.arange(N) // 16, torch.ones(N, N, dtype=torch.float64)
        same, earlier = (chunk[:, None] == chunk) * ones, (chunk[:, None] > chunk) * ones
        weights = phi(q) @ phi(k).mT
        seen, counted = ((m or mask)(same.tril(), same, earlier) for m in (mask, divisor))
        return (weights * seen) @ v / (weights * counted).sum(dim=-1, keepdim=True)

    return attention


def right_mask(own, same, earlier):
    return own + earlier


my_chunkwise.mistakes(
    (
        weighted(lambda own, same, earlier: same + earlier),
        "A chunk's own block is not masked, so that a token sees the rest of its chunk.",
    ),
    (
        weighted(lambda own, same, earlier: own + same + earlier),
        "The state is updated before the chunk reads it: the chunk's own tokens count twice, and "
        "later ones are seen.",
    ),
    (
        weighted(lambda own, same, earlier: own),
        "Every chunk sees itself alone: nothing of the chunks before it arrives.",
    ),
    (
        weighted(right_mask, divisor=lambda own, same, earlier: own),
        "The divisor counts a chunk's own keys alone. It has a part from the state, as the "
        "numerator has.",
    ),
    (
        weighted(right_mask, phi=identity),
        "The feature map is missing: similarities may be negative, and the output is no mean.",
        NORMALIZER,
    ),
)


@my_chunkwise.mistake(
    "The last tokens are lost where N is no multiple of L. The last chunk may be shorter."
)
def without_the_rest(q, k, v):
    N = k.shape[-2] // 16 * 16
    return linear_attention(q[..., :N, :], k[..., :N, :], v[..., :N, :], causal=True)


# --- Keep every s-th state ---------------------------------------------------------------------

CHECKPOINTS = Exercise("ex-scans-checkpoints", CHAPTER)
LENGTH = 16_384
PIECE = int(LENGTH**0.5)

CHECKPOINTS.value("s", PIECE, KEPT, "a number of tokens").mistakes(
    (LENGTH // 2, "Then two states are kept, and half of all states are computed again at once."),
    (1, "That keeps every state."),
)
CHECKPOINTS.value("states", LENGTH // PIECE + PIECE, KEPT).mistakes(
    (PIECE, "Kept states and the states of one piece are in memory at the same time."),
    (LENGTH, "That is all of them."),
)
CHECKPOINTS.value("factor", LENGTH / (LENGTH // PIECE + PIECE), KEPT).mistakes(
    (PIECE, "Kept states and the states of one piece count, not one of the two alone."),
)
CHECKPOINTS.value("passes", 2, KEPT, "how many forward passes in place of one").mistakes(
    (1, "The states of each piece are computed again, and there are as many as in one pass."),
)

# --- The film run backward ---------------------------------------------------------------------

REVERSE = Exercise("ex-scans-reverse", CHAPTER)
S_2 = np.float32(1) + np.float32(2**25)

REVERSE.value("dq_1", S_2 - np.float32(2**25), TWO_LOOPS, "a number, as float32 gives it").mistakes(
    (
        1,
        "That is what exact arithmetic gives. How far apart are neighboring float32 numbers at "
        "2^25?",
    ),
    (
        2**25,
        "That is S_2. Going backward, the second token is taken out before query 1 reads.",
    ),
)
REVERSE.value(
    "growth",
    0.9**-400,
    TWO_LOOPS,
    "the factor by which an error grows on the way back",
    tolerance=0.02,
).mistakes(
    (
        0.9**400,
        "That is how an error fades forward in time. Undoing a step undoes its decay, too.",
    ),
    (400 / 0.9, "Every step multiplies what the one before has made: it is a power."),
)
