"""Exercises of the chapter on the one recurrence and its many models."""

import functools
from types import SimpleNamespace

import numpy as np

from lesson_code.checks import random_qkv
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V, over_tokens
from lesson_code.numpy.family import MODELS, run

CHAPTER = "One recurrence, many models"
QUESTIONS = "Three questions"
TABLE = "Four ways to treat the past"
FOLLOW = "The first axis: what it can follow"
HOLDS = "The second axis: how much it holds, at what price"

# --- By hand -----------------------------------------------------------------------------------

HAND = Exercise("ex-family-hand", CHAPTER)


def halving(q, k, v, read, decay=0.5):
    """The state is halved and written; ``read(before, S, q, k, v)`` is the output."""

    def step(S, q, k, v):
        after = decay * S + np.outer(k, v)
        return after, read(S, after, q, k, v)

    return over_tokens(step, q, k, v)


BONUS = np.array([3.0, 0.5])


def with_bonus(before, after, q, k, v, bonus=BONUS):
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
        TABLE,
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
        TABLE,
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
        TABLE,
    ),
)
as_delta.mistakes(
    (
        exchanged(as_delta, log_decay=lambda k, b: np.ones_like(k)),
        "The decay was given as a factor of 1. This row takes its logarithm.",
        TABLE,
    ),
)

# --- Where the lines cross ---------------------------------------------------------------------

SIZES = Exercise("ex-family-sizes", CHAPTER)
SIZES.value("larger", 65, HOLDS, "tokens from which on the cache is larger").mistakes(
    (64, "With 64 tokens the cache has exactly as many numbers."),
    (33, "That is a state of C M numbers. Mesa keeps the sums of keys with keys as well."),
)
SIZES.value("slower", 859, HOLDS, "tokens from which on softmax costs more").mistakes(
    (858, "At 858 tokens softmax costs a little less: 858 times 128 is 109,824."),
    (683, "The system alone is 683 tokens' worth. Mesa also updates two sums and reads."),
)
SIZES.value("tokens", 576, HOLDS, "tokens of a cache").mistakes(
    (544, "There are 17 blocks at most, and the token itself."),
    (1152, "A token of the cache is a key and a value, 128 numbers."),
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


@ROW.function(FOLLOW, inputs=one_token, view=of_a_token, unit="")
def correct_then_decay(S, x):
    return faded(S - x.beta * found(S, x), x)


correct_then_decay.mistakes(
    (
        lambda S, x: faded(S, x) - x.beta * found(faded(S, x), x),
        "The decay comes first, and then the correction: that is Kimi delta attention. In the "
        "formula, which of the two stands next to the state?",
        TABLE,
    ),
    (
        lambda S, x: faded(S, x) - x.beta * found(S, x),
        "What was found is taken away whole, although the rest has faded. That is the convention "
        "of RWKV-7. Here the decay reaches both.",
        TABLE,
    ),
    (
        lambda S, x: faded((np.eye(len(S)) - x.beta * x.k @ x.k) @ S, x),
        "`k @ k.T` is one number, as `.T` does nothing to an array with one axis. The transition "
        "has an outer product.",
    ),
    (
        lambda S, x: correct_then_decay.reference(S, x) + np.outer(x.beta * x.k, x.v),
        "The write is in it. It is a part of its own in the row, and would be added twice.",
        QUESTIONS,
    ),
)
ROW.truth(
    "eigenvalues_differ",
    False,
    FOLLOW,
    "If A B x = c x, what does B A do to the vector B x?",
    "True or False, for the transitions of one token in the two orders",
)
