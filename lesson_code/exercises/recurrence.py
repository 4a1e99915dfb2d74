"""Exercises of the chapter on the recurrent and the parallel form."""

from __future__ import annotations

import numpy as np

from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.numpy import elu_plus_one, identity, linear_attention

GLOBAL = "The global bracket sees the future"
RECURRENCE = "From attention to a recurrence"
MASKED = "The masked form"
MEAN = "A running mean from a running sum"
UNROLLED = "And back: an RNN that unrolls to attention"
STEPS = "Linear steps make a linear step"
HINGE = "Train in parallel, run as a recurrence"

# --- By hand -----------------------------------------------------------------------------------

K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
QUERY = np.array([2.0, 1.0])


def weights(seen):
    """The similarities of the query to the first tokens, zero after them."""
    return np.where(np.arange(3) < seen, K @ QUERY, 0.0)


HAND = (
    Value(
        name="row",
        reference=lambda: weights(2),
        section=MASKED,
        form="three numbers, row 2 of the masked matrix",
        mistakes=(
            Mistake(
                lambda: weights(3),
                "The row is not masked: token 2 must not see token 3.",
                MASKED,
            ),
            Mistake(
                lambda: weights(1),
                "The own token is masked as well. The mask keeps the diagonal, j ≤ t.",
                MASKED,
            ),
            Mistake(
                lambda: weights(2) / weights(2).sum(),
                "This row is normalized. The rows of A hold plain similarities and need not sum to "
                "one.",
                MASKED,
            ),
        ),
    ),
    Value(
        name="plain",
        reference=lambda: weights(2) @ V,
        section=RECURRENCE,
        form="two numbers, o_2 without the normalizer",
        mistakes=(
            Mistake(
                lambda: weights(3) @ V,
                "This is read from the last state, or the unmasked row: token 3 is in it.",
                GLOBAL,
            ),
            Mistake(
                lambda: weights(1) @ V,
                "This is read before token 2 is written to the state.",
                RECURRENCE,
            ),
            Mistake(
                lambda: K[:2].T @ V[:2] @ QUERY,
                "The state was read from the wrong side: the query mixes the rows of S.",
                RECURRENCE,
            ),
        ),
    ),
    Value(
        name="normalized",
        reference=lambda: weights(2) @ V / weights(2).sum(),
        section=MEAN,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: weights(2) @ V / weights(3).sum(),
                "The divisor counts token 3, which the sum above it does not: it must end at t, "
                "too.",
                MEAN,
            ),
            Mistake(
                lambda: weights(3) @ V / weights(3).sum(),
                "Numerator and divisor both run over all three tokens.",
                GLOBAL,
            ),
            Mistake(
                lambda: weights(2) @ V / 2,
                "Divided by the number of tokens. The divisor is the sum of the row.",
                MEAN,
            ),
            Mistake(lambda: weights(2) @ V, "This is not divided by anything yet.", MEAN),
        ),
    ),
)

# --- The recurrent form ------------------------------------------------------------------------


def sums(k, v):
    """S_1 to S_N, (..., N, C, M), and z_1 to z_N, (..., N, C)."""
    return np.cumsum(k[..., :, None] * v[..., None, :], axis=-3), np.cumsum(k, axis=-2)


def read(q, S):
    return (q[..., None, :] @ S)[..., 0, :]


def attention(q, k, v, map_q=elu_plus_one, map_k=elu_plus_one):
    """Numerator and divisor of every position."""
    q, k = map_q(q), map_k(k)
    S, z = sums(k, v)
    return read(q, S), (q * z).sum(axis=-1, keepdims=True)


def divide(parts):
    return parts[0] / parts[1]


def before_the_write(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    (S, z), new = sums(k, v), k[..., :, None] * v[..., None, :]
    return read(q, S - new) / (q * (z - k)).sum(axis=-1, keepdims=True)


def state_before_normalizer_after(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    (S, z), new = sums(k, v), k[..., :, None] * v[..., None, :]
    return read(q, S - new) / (q * z).sum(axis=-1, keepdims=True)


def own_key_alone(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    return read(q, sums(k, v)[0]) / (q * k).sum(axis=-1, keepdims=True)


def wrong_side(q, k, v):
    S, z = sums(elu_plus_one(k), v)
    q = elu_plus_one(q)
    return (S @ q[..., :, None])[..., 0] / (q * z).sum(axis=-1, keepdims=True)


def sum_of_features(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    S, z = sums(k, v)
    return read(q, S) / z.sum(axis=-1, keepdims=True)


def by_count(q, k, v):
    return attention(q, k, v)[0] / np.arange(1.0, k.shape[-2] + 1)[:, None]


CODE = (
    Function(
        signature="my_attention(q, k, v, *, initial_state=None, return_state=False)",
        reference=lambda q, k, v: linear_attention(q, k, v, causal=True),
        section=RECURRENCE,
        mistakes=(
            Mistake(
                before_the_write,
                "The read comes before the write, so that no query sees its own token, and the "
                "first one divides 0 by 0.",
                RECURRENCE,
            ),
            Mistake(
                state_before_normalizer_after,
                "S is read before the token is written, z after it. Both sums end at t.",
                RECURRENCE,
            ),
            Mistake(
                lambda q, k, v: attention(q, k, v)[0],
                "The normalizer is missing: each output has to be divided by the product of its "
                "query and z.",
                MEAN,
            ),
            Mistake(
                own_key_alone,
                "The divisor has the own key alone. z is a running sum, as S is.",
                RECURRENCE,
            ),
            Mistake(
                wrong_side,
                "The state is read from the wrong side, as S q: the query must mix the rows of S.",
                RECURRENCE,
            ),
            Mistake(
                by_count,
                "The output is divided by the number of tokens. The divisor is the sum of the "
                "weights, the product of the query and z.",
                MEAN,
            ),
            Mistake(
                sum_of_features,
                "The divisor is the sum of z. It is the product of the query and z.",
                RECURRENCE,
            ),
            Mistake(
                lambda q, k, v: linear_attention(q, k, v),
                "Every query reads the last state, in which its future is written already.",
                GLOBAL,
            ),
            Mistake(
                lambda q, k, v: divide(attention(q, k, v, map_q=identity)),
                "The feature map is applied to the keys, but not to the queries.",
                RECURRENCE,
            ),
            Mistake(
                lambda q, k, v: divide(attention(q, k, v, map_k=identity)),
                "The feature map is applied to the queries, but not to the keys.",
                RECURRENCE,
            ),
            Mistake(
                lambda q, k, v: divide(attention(q, k, v, identity, identity)),
                "The feature map is missing: similarities may be negative, and the output is no "
                "mean.",
                RECURRENCE,
            ),
        ),
        further=(
            Further(check_causal, GLOBAL),
            Further(check_streaming, HINGE, options={"empty_pieces": False}),
        ),
    ),
)

# --- One position off --------------------------------------------------------------------------

TWO = "The two checks look for different things: one compares, one changes the future."

SHIFT = (
    Value(
        name="first_refused",
        reference=lambda: 1,
        section=RECURRENCE,
        form="how many of the two checks object to the first function",
        mistakes=(
            Mistake(
                2,
                f"{TWO} Does an output that leaves its own token out depend on later ones?",
                GLOBAL,
            ),
            Mistake(0, f"{TWO} Write token t, then read: is the own token in the sum?", RECURRENCE),
        ),
    ),
    Value(
        name="second_refused",
        reference=lambda: 2,
        section=MASKED,
        form="the same for the second function",
        mistakes=(
            Mistake(
                1,
                f"{TWO} Write down which tokens position 0 sees. Are they others than it should "
                "see, and do some of them come later?",
                MASKED,
            ),
            Mistake(0, f"{TWO} Write down which tokens position 0 sees.", MASKED),
        ),
    ),
)

# --- Powers of a -------------------------------------------------------------------------------


def distances(N):
    return np.arange(N)[:, None] - np.arange(N)


def decay_matrix(a, N):
    return np.tril(a ** np.abs(distances(N)))


DECAY = (
    Function(
        signature="decay_matrix(a, N)",
        reference=decay_matrix,
        section=UNROLLED,
        inputs=lambda rng, N: (float(rng.uniform(0.5, 0.95)), N),
        unit="tokens",
        mistakes=(
            Mistake(
                lambda a, N: a ** np.abs(distances(N)),
                "There are entries above the diagonal: position t would see later inputs.",
                MASKED,
            ),
            Mistake(
                lambda a, N: decay_matrix(a, N).T,
                "It is the transpose: row t belongs to the output at t, column j to the input at "
                "j ≤ t.",
                MASKED,
            ),
            Mistake(
                lambda a, N: a * decay_matrix(a, N),
                "The own input is decayed already, and every other one once too often: a "
                "multiplies the old state before the new input is added.",
                UNROLLED,
            ),
            Mistake(
                lambda a, N: a ** np.tril(distances(N)),
                "The exponents above the diagonal are 0, so that the entries there are 1. The "
                "entries have to be 0.",
                MASKED,
            ),
            Mistake(
                lambda a, N: np.tril((1 / a) ** np.abs(distances(N))),
                "The sign of the exponent is wrong: the older an input is, the larger it becomes.",
                UNROLLED,
            ),
            Mistake(
                lambda a, N: np.tril(decay_matrix(a, N), k=-1),
                "The diagonal is missing: the input at t is part of the state at t.",
                UNROLLED,
            ),
            Mistake(
                lambda a, N: np.tril(a * distances(N) + np.eye(N)),
                "The distance is multiplied by a. It is the exponent: every step multiplies by a "
                "once more.",
                UNROLLED,
            ),
            Mistake(
                lambda a, N: np.tril(a ** np.broadcast_to(np.arange(N)[:, None], (N, N))),
                "All entries of a row are alike. What counts is the distance t - j, not t.",
                UNROLLED,
            ),
            Mistake(
                lambda a, N: np.tril(np.full((N, N), a)),
                "Each entry is a itself, whatever the distance. Insert the recurrence into itself "
                "twice and look at the powers.",
                UNROLLED,
            ),
        ),
    ),
)

# --- Another arithmetic ------------------------------------------------------------------------


def then_max(first, second):
    (a1, b1), (a2, b2) = first, second
    return a1 + a2, max(b1 + a2, b2)


SECOND_B = "The b of the second step comes last. Nothing is added to it any more."

MAX = (
    Function(
        signature="then_max(first, second)",
        reference=then_max,
        section=STEPS,
        inputs=lambda rng, N: tuple(rng.normal(size=4).tolist()),
        view=lambda f: lambda a1, b1, a2, b2: f((a1, b1), (a2, b2)),
        unit="",
        mistakes=(
            Mistake(
                lambda first, second: then_max(second, first),
                "The order is reversed: the first pair acts on h first.",
                STEPS,
            ),
            Mistake(
                lambda first, second: (first[0] + second[0], max(first[1], second[1])),
                "The result of the first step is what the second one starts from, so its b, too, "
                "has something to pass through.",
                STEPS,
            ),
            Mistake(
                lambda first, second: (
                    first[0] + second[0],
                    max(first[1] + second[0], second[1] + first[0]),
                ),
                SECOND_B,
                STEPS,
            ),
            Mistake(
                lambda first, second: (
                    first[0] + second[0],
                    max(first[1], second[1]) + second[0],
                ),
                SECOND_B,
                STEPS,
            ),
            Mistake(
                lambda first, second: (
                    first[0] * second[0],
                    second[0] * first[1] + second[1],
                ),
                "This is the rule for linear steps. Insert this recurrence into itself instead.",
                STEPS,
            ),
            Mistake(
                lambda first, second: (max(first[0], second[0]), then_max(first, second)[1]),
                "Both steps add to h, so what they add is added up.",
                STEPS,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Recurrent = parallel",
    ("ex-recurrence-hand", *HAND),
    ("ex-recurrence-code", *CODE),
    ("ex-recurrence-shift", *SHIFT),
    ("ex-recurrence-decay", *DECAY),
    ("ex-recurrence-max", *MAX),
)
