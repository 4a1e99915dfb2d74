"""Exercises of the chapter on causal scans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from lesson_code.checks._calling import random_qkv
from lesson_code.checks.linear_cost import check_linear_cost
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.torch import elu_plus_one, identity, linear_attention

CHUNKS = "Chunks"
BACKWARD = "The backward pass"
FIRST_VALUE = "Who has read the first value?"
TWO_SCANS = "Three gradients, two scans"
NORMALIZER = "The normalizer's path"

# --- One gradient: the tokens of the chapter, and a loss of the first entry of o_3 --------------

Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
GRAD_OUT = np.array([4.0, 0.0])
S, z = K.T @ V, K.sum(axis=0)
d = Q[2] @ z
out = Q[2] @ S / d
dn = GRAD_OUT / d
dd = -(dn @ out)
dS, dz = np.outer(Q[2], dn), Q[2] * dd  # of every position, as only the last query reads

HAND = (
    Value(
        name="dn_3",
        reference=lambda: dn,
        section=NORMALIZER,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: GRAD_OUT,
                "That is the gradient of the output; the output is the numerator divided by d.",
                NORMALIZER,
            ),
            Mistake(
                lambda: GRAD_OUT * d,
                "Multiplied where it is divided: the output is the numerator over d.",
                NORMALIZER,
            ),
        ),
    ),
    Value(
        name="dd_3",
        reference=lambda: dd,
        section=NORMALIZER,
        form="a number",
        mistakes=(
            Mistake(lambda: -dd, "Does a larger divisor make the output larger?", NORMALIZER),
            Mistake(
                lambda: -(GRAD_OUT @ out),
                "One factor d too many: multiply the gradient of the numerator and the output, "
                "which are both divided already.",
                NORMALIZER,
            ),
            Mistake(lambda: dd / d, "This is divided by d once too often.", NORMALIZER),
        ),
    ),
    Value(
        name="dq_3",
        reference=lambda: S @ dn + z * dd,
        section=NORMALIZER,
        form="two numbers",
        mistakes=(
            Mistake(
                lambda: S @ dn,
                "The divisor is taken for a constant. It was made from this query, too.",
                NORMALIZER,
            ),
            Mistake(
                lambda: S @ dn - z * dd,
                "The two parts are subtracted. The path through the divisor has its sign already.",
                NORMALIZER,
            ),
            Mistake(
                lambda: S @ dn + K[2] * dd,
                "The divisor is the product of the query and z, the sum of all keys so far.",
                NORMALIZER,
            ),
        ),
    ),
    Value(
        name="dk",
        reference=lambda: V @ dS.T + dz,
        section=NORMALIZER,
        form="three rows of two numbers, one for each token",
        mistakes=(
            Mistake(
                lambda: V @ dS.T,
                "The divisor is taken for a constant. All keys are part of z.",
                NORMALIZER,
            ),
            Mistake(
                lambda: np.array([[0], [0], [1]]) * (V @ dS.T + dz),
                "Tokens 1 and 2 get nothing. Their keys are in the state that query 3 reads: the "
                "gradient of the state goes backward in time.",
                FIRST_VALUE,
            ),
            Mistake(
                lambda: V @ dS + dz,
                "The gradient of the state is used transposed: its rows belong to the entries of "
                "the key.",
                TWO_SCANS,
            ),
            Mistake(
                lambda: d * (V @ dS.T + dz),
                "The gradient of the output was written to the state, not that of the numerator.",
                NORMALIZER,
            ),
            Mistake(
                lambda: V @ dS.T - dz,
                "The two parts are subtracted. The path through the divisor has its sign already.",
                NORMALIZER,
            ),
        ),
    ),
    Value(
        name="dv",
        reference=lambda: K @ dS,
        section=TWO_SCANS,
        form="three rows of two numbers",
        mistakes=(
            Mistake(
                lambda: np.array([[0], [0], [1]]) * (K @ dS),
                "Tokens 1 and 2 get nothing. Their values are in the state that query 3 reads: "
                "the gradient of the state goes backward in time.",
                FIRST_VALUE,
            ),
            Mistake(
                lambda: K @ dS.T,
                "The gradient of the state is used transposed: its columns belong to the entries "
                "of the value.",
                TWO_SCANS,
            ),
            Mistake(
                lambda: d * (K @ dS),
                "The gradient of the output was written to the state, not that of the numerator.",
                NORMALIZER,
            ),
        ),
    ),
)

# --- Three mistakes and three checks -----------------------------------------------------------


def in_chunks(q, k, v, diagonal=0, update_first=False, L=2):
    S, pieces = k.new_zeros(k.shape[1], v.shape[1]), []
    for q_i, k_i, v_i in zip(q.split(L), k.split(L), v.split(L), strict=True):
        after = S + k_i.T @ v_i
        own = torch.tril(q_i @ k_i.T, diagonal) @ v_i
        pieces.append(own + q_i @ (after if update_first else S))
        S = after
    return torch.cat(pieces)


def constant_normalizer(q, k, v):
    weights = torch.tril(elu_plus_one(q) @ elu_plus_one(k).mT)
    return weights @ v / weights.sum(dim=-1, keepdim=True).detach()


def refused_by(fn, right):
    """Whether check_same, check_causal and check_gradients refuse a function.

    What these three look for, in one small case, as the checks themselves take seconds.
    """
    q, k, v = (torch.tensor(x) for x in random_qkv(np.random.default_rng(0), 6))
    k.requires_grad_()
    out = fn(q, k, v)
    later = fn(q, torch.cat([k[:-1], -k[-1:]]), v)
    (gradient,) = torch.autograd.grad(out.sum(), k)
    ahead, behind = (fn(q, k + step, v).sum() for step in (1e-5, -1e-5))
    return [
        not torch.allclose(out, right(q, k, v)),
        not torch.allclose(out[:-1], later[:-1]),
        not torch.allclose(gradient.sum(), (ahead - behind) / 2e-5, rtol=1e-5),
    ]


def right_chunks(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


NOT_GRADIENTS = (
    "check_gradients compares a function's gradients with finite differences of the same function. "
    "Are they wrong only because the outputs are?"
)
OUTPUTS = "check_same compares outputs. Are they right?"

MISTAKES = (
    Value(
        name="first",
        reference=lambda: refused_by(partial(in_chunks, diagonal=-1), right_chunks),
        section=CHUNKS,
        form="three times True or False: who finds the first mistake",
        mistakes=(
            Mistake(
                [True, True, False],
                "Without the diagonal a token sees less than it may. Does it see anything that "
                "comes later?",
                CHUNKS,
            ),
            Mistake([True, False, True], NOT_GRADIENTS, BACKWARD),
            Mistake([False, False, False], OUTPUTS, CHUNKS),
        ),
    ),
    Value(
        name="second",
        reference=lambda: refused_by(partial(in_chunks, update_first=True), right_chunks),
        section=CHUNKS,
        form="the same for the second",
        mistakes=(
            Mistake(
                [True, False, False],
                "Which tokens are in the state of a chunk once it is updated? Do some of them come "
                "after the first token of the chunk?",
                CHUNKS,
            ),
            Mistake([True, True, True], NOT_GRADIENTS, BACKWARD),
            Mistake([False, True, False], OUTPUTS, CHUNKS),
        ),
    ),
    Value(
        name="third",
        reference=lambda: refused_by(
            constant_normalizer, lambda q, k, v: linear_attention(q, k, v, causal=True)
        ),
        section=NORMALIZER,
        form="the same for the third",
        mistakes=(
            Mistake(
                [True, False, True],
                "The changed line is in the backward pass. What does it do to the outputs?",
                NORMALIZER,
            ),
            Mistake(
                [False, False, False],
                "The changed line takes one path out of the backward pass. Is there a check that "
                "looks at what comes back?",
                NORMALIZER,
            ),
        ),
    ),
)

# --- Chunkwise ---------------------------------------------------------------------------------


def masks(N, L=16):
    """Which keys each query sees: those up to its own in its chunk, those of earlier chunks."""
    chunk, ones = torch.arange(N) // L, torch.ones(N, N, dtype=torch.float64)
    same = (chunk[:, None] == chunk) * ones
    return torch.tril(same), same, (chunk[:, None] > chunk) * ones


def weighted(
    mask: Callable, divisor: Callable | None = None, phi: Callable = elu_plus_one
) -> Callable:
    """Attention with weights ``mask(own, same, earlier)``, divided by the sum of other ones."""

    def attention(q, k, v):
        parts = masks(k.shape[-2])
        weights = phi(q) @ phi(k).mT
        total = (weights * (divisor or mask)(*parts)).sum(dim=-1, keepdim=True)
        return (weights * mask(*parts)) @ v / total

    return attention


def right_mask(own, same, earlier):
    return own + earlier


def own_alone(own, same, earlier):
    return own


def the_one_before(own, same, earlier):
    """Of the earlier chunks only the last."""
    N = len(own)
    chunk = torch.arange(N) // 16
    return own + (chunk[:, None] == chunk + 1) * torch.ones(N, N, dtype=torch.float64)


def not_normalized(q, k, v):
    return linear_attention(q, k, v, causal=True, normalize=False)


def each_part_divided(q, k, v):
    own = weighted(own_alone)(q, k, v)
    return own + weighted(lambda own, same, earlier: earlier)(q, k, v)


def divided_where_it_can_be(q, k, v):
    own = weighted(own_alone)(q, k, v)
    return own + weighted(lambda own, same, earlier: earlier)(q, k, v).nan_to_num(0.0)


def without_the_rest(q, k, v):
    N = k.shape[-2] // 16 * 16
    return linear_attention(q[..., :N, :], k[..., :N, :], v[..., :N, :], causal=True)


def batch(rng, N, leading=(2,), D=5, M=3):
    return [torch.tensor(x) for x in random_qkv(rng, N, leading=leading, D=D, M=M)]


EACH_PART = (
    "The chunk's own part and the part from the state are divided each by itself. A mean is one "
    "numerator over one divisor: add first."
)

CHUNKWISE = (
    Function(
        signature="my_chunkwise(q, k, v, *, initial_state=None, return_state=False, L=16)",
        reference=lambda q, k, v: linear_attention(q, k, v, causal=True),
        section=CHUNKS,
        inputs=batch,
        mistakes=(
            Mistake(
                weighted(lambda own, same, earlier: same + earlier),
                "A chunk's own block is not masked, so that a token sees the rest of its chunk.",
                CHUNKS,
            ),
            Mistake(
                weighted(lambda own, same, earlier: own + same + earlier),
                "The state is updated before the chunk reads it: the chunk's own tokens count "
                "twice, and later ones are seen.",
                CHUNKS,
            ),
            Mistake(
                weighted(lambda own, same, earlier: torch.tril(own, -1) + earlier),
                "The diagonal of a chunk's own block is missing: a token sees itself.",
                CHUNKS,
            ),
            Mistake(
                weighted(own_alone),
                "Every chunk sees itself alone: nothing of the chunks before it arrives.",
                CHUNKS,
            ),
            Mistake(
                weighted(lambda own, same, earlier: earlier),
                "A chunk reads the state and leaves out its own block.",
                CHUNKS,
            ),
            Mistake(
                weighted(the_one_before),
                "The state has the last chunk alone. What a chunk leaves is added to the state, it "
                "does not replace it.",
                CHUNKS,
            ),
            Mistake(
                not_normalized,
                "The normalizer is missing.",
                NORMALIZER,
            ),
            Mistake(
                weighted(right_mask, divisor=own_alone),
                "The divisor counts a chunk's own keys alone. It has a part from the state, as the "
                "numerator has.",
                CHUNKS,
            ),
            Mistake(
                weighted(right_mask, divisor=lambda own, same, earlier: same + earlier),
                "z is updated before the chunk reads it, so that the divisor has later keys of the "
                "chunk.",
                CHUNKS,
            ),
            Mistake(each_part_divided, EACH_PART, CHUNKS),
            Mistake(divided_where_it_can_be, EACH_PART, CHUNKS),
            Mistake(
                without_the_rest,
                "The last tokens are lost where N is no multiple of L. The last chunk may be "
                "shorter.",
                CHUNKS,
            ),
            Mistake(
                weighted(right_mask, phi=identity),
                "The feature map is missing: similarities may be negative, and the output is no "
                "mean.",
                NORMALIZER,
            ),
        ),
        further=(
            Further(check_streaming, CHUNKS, options={"empty_pieces": False}),
            Further(check_linear_cost, CHUNKS),
        ),
    ),
)

# --- The film run backward ---------------------------------------------------------------------


def undone():
    """S_1 as it comes back from S_2, in float32."""
    S_2 = np.float32(1) + np.float32(2**25)
    return S_2 - np.float32(2**25)


REVERSE = (
    Value(
        name="dq_1",
        reference=undone,
        section=TWO_SCANS,
        form="a number, as float32 gives it",
        mistakes=(
            Mistake(
                1,
                "That is what exact arithmetic gives. How far apart are neighboring float32 "
                "numbers at 2^25?",
                TWO_SCANS,
            ),
            Mistake(
                2**25,
                "That is S_2. Going backward, the second token is taken out before query 1 reads.",
                TWO_SCANS,
            ),
        ),
    ),
    Value(
        name="growth",
        reference=lambda: 0.9**-400,
        section=TWO_SCANS,
        form="the factor by which an error grows on the way back",
        tolerance=0.02,
        mistakes=(
            Mistake(
                lambda: 0.9**400,
                "That is how an error fades forward in time. Undoing a step undoes its decay, too.",
                TWO_SCANS,
            ),
            Mistake(
                lambda: 400 / 0.9,
                "Every step multiplies what the one before has made: it is a power.",
                TWO_SCANS,
            ),
            Mistake(lambda: 1 / 0.9, "That is one step.", TWO_SCANS),
        ),
    ),
)

EXERCISES = chapter(
    "Causal scans",
    ("ex-scans-hand", *HAND),
    ("ex-scans-mistakes", *MISTAKES),
    ("ex-scans-chunkwise", *CHUNKWISE),
    ("ex-scans-reverse", *REVERSE),
)
