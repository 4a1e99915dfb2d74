"""Exercises of the chapter on models that are converted from softmax."""

import numpy as np

from lesson_code.exercises import Exercise

CHAPTER = "From softmax to linear"
SWAP = "Swap and look"
WAYS = "How to train what is new"
WINDOW = "A window beside the state"

# --- One scale -----------------------------------------------------------------------------------

SCALE = Exercise("ex-conversion-scale", CHAPTER)
NEAR, FAR = np.array([[4.0, 1.0], [2.0, 2.0]]), np.array([5.0, 4.0])


def share(near, far):
    """Of the window, in the weight of a row."""
    return near.sum() / (near.sum() + far)


SUBTRACTED = NEAR / NEAR.max(axis=1, keepdims=True)  # the window's, after its maximum is gone

SCALE.value("share", share(NEAR[0], FAR[0]), WINDOW).mistakes(
    (NEAR[0].sum() / FAR[0] + 1, "That is a ratio of sums. A share lies between 0 and 1."),
    (NEAR[0, 0] / (NEAR[0].sum() + FAR[0]), "That is the first key's share. The window has two."),
)
SCALE.value("subtracted", share(SUBTRACTED[0], FAR[0]), WINDOW).mistakes(
    (
        share(NEAR[0], FAR[0]),
        "The maximum was taken from both parts. Here the state keeps its own.",
    ),
    (
        share(np.exp(NEAR[0] - NEAR[0].max()), FAR[0]),
        "The maximum of the similarities was subtracted. It is a maximum of scores, so "
        "similarities are divided by the largest one.",
    ),
)
SCALE.value("factor", NEAR[0].max(), WINDOW).mistakes(
    (1 / NEAR[0].max(), "That would shrink the window once more. It has to grow."),
    (np.log(NEAR[0].max()), "That is the maximum itself, a score. The factor is a similarity."),
)
SCALE.value("second", share(NEAR[0].max() * SUBTRACTED[1], FAR[1]), WINDOW).mistakes(
    (share(NEAR[1], FAR[1]), "That is the right share. The fixed factor gives another one."),
    (share(SUBTRACTED[1], FAR[1]), "The factor of the first row is missing."),
)

# --- A map inside the projection -----------------------------------------------------------------

FOLD = Exercise("ex-conversion-fold", CHAPTER)


def projections(rng, N):
    """A query projection (H D, F) and a square matrix for each head."""
    H, D = 2 + N % 2, 2 + N % 3
    return rng.normal(size=(H * D, H * D + 1)), rng.normal(size=(H, D, D))


def by_heads(query, W):
    return query.reshape(W.shape[0], W.shape[2], -1)


@FOLD.function(WAYS, inputs=projections, unit="")
def fold(query, W):
    return (W @ by_heads(query, W)).reshape(-1, query.shape[1])


fold.mistakes(
    (
        lambda query, W: fold.reference(query, np.swapaxes(W, 1, 2)),
        "The matrices are transposed. A token's query comes first, and W multiplies it from the "
        "left.",
    ),
    (
        lambda query, W: fold.reference(query, np.broadcast_to(W[:1], W.shape)),
        "All heads have the matrix of the first.",
    ),
)
FOLD.value("apart", 64 * 16 + 16 * 16, WAYS).mistakes(
    (64 * 16, "That is the projection. The matrix of the map comes on top."),
    (64 * 16 * 16 * 16, "The two products follow one another, so their costs add up."),
)
FOLD.value("folded", 64 * 16, WAYS).mistakes(
    (64 * 16 + 16 * 16, "That is the cost before. One matrix has taken the place of two."),
    (16 * 16, "The folded matrix reads all F channels of the token."),
)

# --- Which layer to keep -------------------------------------------------------------------------

KEEP = Exercise("ex-conversion-keep", CHAPTER)

KEEP.value("keep", 0, SWAP, "0 or 1").mistakes(
    (1, "With the second layer kept, most facts are lost. Which layer finds them?"),
)
