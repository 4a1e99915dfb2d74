"""Exercises of the chapter on the one recurrence and its many models."""

import functools
from types import SimpleNamespace

import numpy as np

from lesson_code.checks import random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V, over_tokens
from lesson_code.numpy import rwkv6
from lesson_code.numpy.family import MODELS, run

CHAPTER = "One recurrence, many models"
QUESTIONS = "Three questions"
TABLE = "The table"
CONVENTIONS = "Conventions"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-family-hand", CHAPTER)


def halving(q, k, v, read, decay=0.5):
    """The state is halved and written; ``read(before, S, q, k, v)`` is the output."""

    def step(S, q, k, v):
        after = decay * S + np.outer(k, v)
        return after, read(S, after, q, k, v)

    return over_tokens(step, q, k, v)


def with_bonus(before, after, q, k, v, bonus=2.0):
    return q @ before + q @ (bonus * k) * v


HAND.value("out", halving(K, K, V, with_bonus), TABLE, "three rows of two numbers").mistakes(
    (
        halving(K, K, V, functools.partial(with_bonus, bonus=1.0)),
        "The own token enters without its bonus.",
    ),
    (
        halving(K, K, V, lambda before, after, q, k, v: q @ after),
        "This is RetNet: read after the write. RWKV-6 reads the state before its token, and adds "
        "that with a bonus.",
        CONVENTIONS,
    ),
    (
        halving(K, K, V, lambda before, after, q, k, v: with_bonus(before / 2, after, q, k, v)),
        "The state was decayed before it was read. The decay is part of the transition, and the "
        "read comes before that.",
    ),
    (
        halving(K, K, V, with_bonus, decay=1.0),
        "Nothing has decayed. Between two writes the state is halved.",
        QUESTIONS,
    ),
)

# --- Rows within a row -------------------------------------------------------------------------

SPECIAL = Exercise("ex-family-special", CHAPTER)


def gla_inputs(rng, N, D=5, M=3):
    return *random_qkv(rng, N, D=D, M=M), -rng.exponential(size=(N, D))


def delta_inputs(rng, N, D=5, M=3):
    q, k, v = random_qkv(rng, N, D=D, M=M)
    return q, k, v, rng.uniform(0.2, 1.8, N) / (k**2).sum(axis=-1)


def gated_inputs(rng, N, D=5, M=3):
    return *delta_inputs(rng, N, D, M), -rng.exponential(size=N)


def by_rwkv7(choose):
    """The outputs of the row of RWKV-7, with the inputs that the reader's function returns."""

    @functools.wraps(choose)  # so that messages name the inputs as the reader does
    def outputs(*inputs):
        chosen = choose(*inputs)
        if not isinstance(chosen, dict):
            raise TypeError(f"a dictionary is expected, got {type(chosen).__name__}")
        for name, x in chosen.items():
            if np.ndim(x) != 2:
                raise ValueError(
                    f"{name} must have a row for every token and a column for every channel, its "
                    f"shape is {np.shape(x)}"
                )
        return run(MODELS["RWKV-7"], **chosen)[0]

    return outputs


@SPECIAL.function(TABLE, inputs=gla_inputs, view=by_rwkv7)
def as_gla(q, k, v, log_decay):
    inputs = {"r": q, "k": k, "v": v, "log_decay": log_decay}
    return inputs | {"removal_key": k, "learning_rate": np.zeros_like(k)}


as_gla.mistakes(
    (
        lambda q, k, v, g: as_gla.reference(q, k, v, g) | {"learning_rate": np.ones_like(k)},
        "Something is removed at the key. GLA removes nothing, it only fades.",
    ),
    (
        lambda q, k, v, g: as_gla.reference(q, k, v, np.exp(g)),
        "The decay was given as a factor. This row takes its logarithm.",
        CONVENTIONS,
    ),
    (
        lambda q, k, v, g: as_gla.reference(q, k, v, 0 * g),
        "Nothing fades: the decay of GLA has to go in, too.",
    ),
)


@SPECIAL.function(TABLE, inputs=gated_inputs, view=by_rwkv7)
def as_gated_delta(q, k, v, beta, log_decay):
    b, g = beta[:, None], np.broadcast_to(log_decay[:, None], k.shape)
    inputs = {"r": q, "k": b * k, "v": v, "log_decay": g}
    return inputs | {"removal_key": k, "learning_rate": b * np.exp(g)}


@SPECIAL.function(TABLE, inputs=delta_inputs, view=by_rwkv7)
def as_delta(q, k, v, beta):
    return as_gated_delta.reference(q, k, v, beta, np.zeros(len(k)))


def exchanged(part, **inputs):
    """The part's function with other inputs of the row, functions of the keys and of beta."""

    def wrong(q, k, v, beta, *log_decay):
        others = {name: x(k, beta[:, None]) for name, x in inputs.items()}
        return part.reference(q, k, v, beta, *log_decay) | others

    return wrong


BETA_WRITES = (
    "Too much is written: the delta rules write the share beta of the value. In this row only k "
    "and v enter the write."
)
UNIT_KAPPA = (
    "Here the removal key has length 1. The delta rules remove along the key as it is, whatever "
    "its length."
)
TWICE = (
    "beta enters the removal twice. It may stand in the learning rate or in the removal key, but "
    "that occurs twice."
)

for part in as_gated_delta, as_delta:
    part.mistakes(
        (exchanged(part, k=lambda k, b: k), BETA_WRITES),
        (
            exchanged(part, removal_key=lambda k, b: k / np.linalg.norm(k, axis=-1, keepdims=True)),
            UNIT_KAPPA,
        ),
        (exchanged(part, removal_key=lambda k, b: b * k), TWICE),
    )
as_gated_delta.mistakes(
    (
        exchanged(as_gated_delta, learning_rate=lambda k, b: b + 0 * k),
        "The state before its decay is asked what to remove. Multiply Gated DeltaNet's transition "
        "out: what stands before the outer product?",
        CONVENTIONS,
    ),
)
as_delta.mistakes(
    (
        exchanged(as_delta, log_decay=lambda k, b: np.ones_like(k)),
        "The decay was given as a factor of 1. This row takes its logarithm.",
        CONVENTIONS,
    ),
)

# --- A loop in place ---------------------------------------------------------------------------

IN_PLACE = Exercise("ex-family-in-place", CHAPTER)

IN_PLACE.truth(
    "after_right",
    True,
    CONVENTIONS,
    "After both lines S holds what it should. Does such a model look at `before`?",
    "True or False, for models that read after the write",
)
IN_PLACE.truth(
    "before_right",
    False,
    CONVENTIONS,
    "`before = S` gives a second name to the array. What does `before` show when the array has "
    "been changed in place?",
    "True or False, for models that read before it",
)
IN_PLACE.truth(
    "causal_objects",
    False,
    CONVENTIONS,
    "Which token too many enters the output at t? Is it a later one?",
)


def one_head(rng, N, D=5, M=3):
    return random_qkv(rng, N, D=D, M=M)


@IN_PLACE.function(TABLE, inputs=one_head)
def mended(q, k, v):
    return rwkv6(q, k, v, np.full_like(k, np.log(0.5)), np.zeros(k.shape[-1]))


mended.mistakes(
    (
        lambda q, k, v: halving(q, k, v, lambda before, after, q, k, v: q @ after),
        "Every query still sees its own token: what is read is the state after the write. Without "
        "a bonus it must not be in the output.",
        CONVENTIONS,
    ),
    (
        lambda q, k, v: halving(q, k, v, lambda before, after, q, k, v: q @ before / 2),
        "Everything is half as large: the state is read after its decay, or the own write decays, "
        "too. In which order come the read, the decay and the write?",
        CONVENTIONS,
    ),
    (
        lambda q, k, v: halving(q, k, v, functools.partial(with_bonus, bonus=1.0)),
        "The own token is added. That is a bonus of 1, and here there is none.",
        CONVENTIONS,
    ),
)

# --- A new row ---------------------------------------------------------------------------------

ROW = Exercise("ex-family-row", CHAPTER)


def one_token(rng, N, D=5, M=3):
    """A state and a token: key, value, beta and the logarithm of the decay of each channel."""
    S = rng.normal(size=(D, M))
    return S, rng.normal(size=D), rng.normal(size=M), rng.uniform(), -rng.exponential(size=D)


def of_a_token(transition):
    return lambda S, k, v, beta, g: transition(S, SimpleNamespace(k=k, v=v, beta=beta, log_decay=g))


def faded(S, x):
    return np.exp(x.log_decay)[:, None] * S


def found(S, x):
    return np.outer(x.k, x.k @ S)


@ROW.function(TABLE, inputs=one_token, view=of_a_token, unit="")
def decay_then_correct(S, x):
    return faded(S, x) - x.beta * found(faded(S, x), x)


decay_then_correct.mistakes(
    (
        lambda S, x: faded(S - x.beta * found(S, x), x),
        "The correction comes first, and then the decay. In the formula, which of the two stands "
        "next to the state?",
        CONVENTIONS,
    ),
    (
        lambda S, x: faded(S, x) - x.beta * found(S, x),
        "The state before its decay is asked what the key finds. That is the convention of RWKV-7.",
        CONVENTIONS,
    ),
    (
        lambda S, x: (np.eye(len(S)) - x.beta * x.k @ x.k) @ faded(S, x),
        "`k @ k.T` is one number, as `.T` does nothing to an array with one axis. The transition "
        "has an outer product.",
    ),
    (
        lambda S, x: decay_then_correct.reference(S, x) + np.outer(x.beta * x.k, x.v),
        "The write is in it. It is a part of its own in the row, and would be added twice.",
        QUESTIONS,
    ),
)
ROW.truth(
    "order_matters",
    True,
    TABLE,
    "A number commutes with every matrix. Does a diagonal matrix?",
    "True or False, for decays that differ between channels",
)
