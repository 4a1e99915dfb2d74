"""Exercises of the chapter on the one recurrence and its many models."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np

from lesson_code.checks._calling import random_qkv
from lesson_code.exercises._old import Function, Mistake, Value, chapter, truth
from lesson_code.numpy import rwkv6
from lesson_code.numpy.family import MODELS, run

QUESTIONS = "Three questions"
TABLE = "The table"
CONVENTIONS = "Conventions"

# --- By hand -----------------------------------------------------------------------------------

Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])


def read_before(*, decay=0.5, own=lambda q, k: q @ (2 * k), memory=lambda before, after: before):
    """The three outputs, with one part changed."""
    S, out = np.zeros((2, 2)), []
    for q, k, v in zip(Q, K, V, strict=True):
        before, S = S, decay * S + np.outer(k, v)
        out.append(memory(before, S).T @ q + own(q, k) * v)
    return np.array(out)


HAND = (
    Value(
        name="out",
        reference=read_before,
        section=TABLE,
        form="three rows of two numbers",
        mistakes=(
            Mistake(
                lambda: read_before(own=lambda q, k: q @ k),
                "The own token enters without its bonus.",
                TABLE,
            ),
            Mistake(
                lambda: read_before(own=lambda q, k: 0),
                "The own token is missing. The read is from before the write, and the bonus is "
                "its way in.",
                TABLE,
            ),
            Mistake(
                lambda: read_before(own=lambda q, k: 0, memory=lambda before, after: after),
                "This is RetNet: read after the write. RWKV-6 reads the state before its token, "
                "and adds that with a bonus.",
                CONVENTIONS,
            ),
            Mistake(
                lambda: read_before(memory=lambda before, after: after),
                "The own token is counted twice: it is in the state after the write, and the bonus "
                "adds it once more. Which state does RWKV-6 read?",
                CONVENTIONS,
            ),
            Mistake(
                lambda: read_before(memory=lambda before, after: 0.5 * before),
                "The state was decayed before it was read. The decay is part of the transition, "
                "and the read comes before that.",
                TABLE,
            ),
            Mistake(
                lambda: read_before(memory=lambda before, after: 2 * before),
                "The bonus multiplies the memory, too. It belongs to the own token alone.",
                TABLE,
            ),
            Mistake(
                lambda: read_before(decay=1.0),
                "Nothing has decayed. Between two writes the state is halved.",
                QUESTIONS,
            ),
            Mistake(
                lambda: read_before(own=lambda q, k: 2),
                "The own token weighs the product of its query and u ⊙ k. That is the bonus itself "
                "only for keys that are unit vectors.",
                TABLE,
            ),
        ),
    ),
)

# --- Rows within a row -------------------------------------------------------------------------


def tokens(rng, N, D=5, M=3):
    """q, k, v, beta (N,), and a logarithm of the decay for each channel (N, D)."""
    q, k, v = random_qkv(rng, N, D=D, M=M)
    beta = rng.uniform(0.2, 1.8, N) / (k**2).sum(axis=-1)
    return q, k, v, beta, -rng.exponential(size=(N, D))


def gla_inputs(rng, N, D=5, M=3):
    q, k, v, _, g = tokens(rng, N, D, M)
    return q, k, v, g


def gated_inputs(rng, N, D=5, M=3):
    q, k, v, beta, g = tokens(rng, N, D, M)
    return q, k, v, beta, g[:, 0]


def delta_inputs(rng, N, D=5, M=3):
    return tokens(rng, N, D, M)[:4]


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


def as_gla(q, k, v, g, **other):
    chosen = {"r": q, "k": k, "v": v, "log_decay": g, "kappa": k, "a": np.zeros_like(k)}
    return chosen | other


def as_gated(q, k, v, beta, g, **other):
    b, g = beta[:, None], np.broadcast_to(g[:, None], k.shape)
    a = np.exp(g) * b
    return {"r": q, "k": b * k, "v": v, "log_decay": g, "kappa": k, "a": a} | other


def as_delta(q, k, v, beta, **other):
    return as_gated(q, k, v, beta, np.zeros(len(k)), **other)


def column(x):
    return x[:, None] * np.ones((1, 1))


def unit(k):
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


NO_BETA_WRITE = (
    "Too much is written: the delta rules write the share beta of the value. In this row only k "
    "and v enter the write."
)
UNIT_KAPPA = (
    "Here kappa has length 1. The delta rules remove along the key as it is, whatever its length."
)
TWICE = "beta enters the removal twice. It may stand in a or in kappa, but kappa occurs twice."

SPECIAL = (
    Function(
        signature="as_gla(q, k, v, log_decay)",
        reference=as_gla,
        section=TABLE,
        inputs=gla_inputs,
        view=by_rwkv7,
        mistakes=(
            Mistake(
                lambda q, k, v, g: as_gla(q, k, v, g, a=np.ones_like(k)),
                "Something is removed at the key. GLA removes nothing, it only fades.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, g: as_gla(q, k, v, np.exp(g)),
                "The decay was given as a factor. This row takes its logarithm.",
                CONVENTIONS,
            ),
            Mistake(
                lambda q, k, v, g: as_gla(q, k, v, 0 * g),
                "Nothing fades: the decay of GLA has to go in, too.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, g: as_gla(k, q, v, g),
                "Queries and keys have changed places: r is what asks.",
                TABLE,
            ),
        ),
    ),
    Function(
        signature="as_gated_delta(q, k, v, beta, log_decay)",
        reference=as_gated,
        section=TABLE,
        inputs=gated_inputs,
        view=by_rwkv7,
        mistakes=(
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g, a=column(beta) + 0 * k),
                "The state before its decay is asked what to remove. Multiply Gated DeltaNet's "
                "transition out: what stands before the outer product?",
                CONVENTIONS,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g) | {"k": k},
                NO_BETA_WRITE,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, beta[:, None] * v, beta, g),
                "beta enters the write twice, with the key and with the value.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(
                    q, k, v, beta, g, a=-column(np.exp(g) * beta) + 0 * k
                ),
                "Content is added at the key. The minus stands in the row already.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g, a=np.exp(column(g)) + 0 * k),
                "What is removed has to be the share beta.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g, kappa=unit(k)),
                UNIT_KAPPA,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g, kappa=beta[:, None] * k),
                TWICE,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, 0 * g),
                "Nothing fades: this is DeltaNet, without the gate.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta, g: as_gated(q, k, v, beta, g, a=0 * k),
                "Nothing is removed at the key: the state only fades.",
                TABLE,
            ),
        ),
    ),
    Function(
        signature="as_delta(q, k, v, beta)",
        reference=as_delta,
        section=TABLE,
        inputs=delta_inputs,
        view=by_rwkv7,
        mistakes=(
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta) | {"k": k},
                NO_BETA_WRITE,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta, a=np.ones_like(k)),
                "What is removed has to be the share beta.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta, kappa=unit(k)),
                UNIT_KAPPA,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta, kappa=beta[:, None] * k),
                TWICE,
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta, a=0 * k),
                "Nothing is removed at the key: this is plain linear attention with smaller "
                "writes.",
                TABLE,
            ),
            Mistake(
                lambda q, k, v, beta: as_delta(q, k, v, beta, log_decay=np.ones_like(k)),
                "The decay was given as a factor of 1. This row takes its logarithm.",
                CONVENTIONS,
            ),
        ),
    ),
)

# --- A loop in place ---------------------------------------------------------------------------


def half(q, k, v, *, read, decay=0.5):
    """read(before, S, own, q): the state before, after, and what the token writes."""
    S, out = np.zeros((k.shape[-1], v.shape[-1])), np.empty_like(v)
    for t in range(len(k)):
        own = np.outer(k[t], v[t])
        before, S = S, decay * S + own
        out[t] = q[t] @ read(before, S, own)
    return out


def without_bonus(q, k, v):
    return rwkv6(q, k, v, np.full_like(k, np.log(0.5)), np.zeros(k.shape[-1]))


IN_PLACE = (
    truth(
        "after_right",
        True,
        section=CONVENTIONS,
        form="True or False, for models that read after the write",
        message="After both lines S holds what it should. Does such a model look at `before`?",
    ),
    truth(
        "before_right",
        False,
        section=CONVENTIONS,
        form="True or False, for models that read before it",
        message=(
            "`before = S` gives a second name to the array. What does `before` show when the "
            "array has been changed in place?"
        ),
    ),
    truth(
        "causal_objects",
        False,
        section=CONVENTIONS,
        message="Which token too many enters the output at t? Is it a later one?",
    ),
    Function(
        signature="mended(q, k, v)",
        reference=without_bonus,
        section=TABLE,
        inputs=lambda rng, N, D=5, M=3: random_qkv(rng, N, D=D, M=M),
        mistakes=(
            Mistake(
                lambda q, k, v: half(q, k, v, read=lambda before, S, own: S),
                "Every query still sees its own token: what is read is the state after the write. "
                "Without a bonus it must not be in the output.",
                CONVENTIONS,
            ),
            Mistake(
                lambda q, k, v: half(q, k, v, read=lambda before, S, own: S - own),
                "Everything is half as large: the state is read after its decay, or the own write "
                "decays, too. In which order come the read, the decay and the write?",
                CONVENTIONS,
            ),
            Mistake(
                lambda q, k, v: half(q, k, v, read=lambda before, S, own: before + own),
                "The own token is added. That is a bonus of 1, and here there is none.",
                CONVENTIONS,
            ),
            Mistake(
                lambda q, k, v: half(q, k, v, read=lambda before, S, own: before, decay=1.0),
                "Nothing decays.",
                QUESTIONS,
            ),
        ),
    ),
)

# --- A new row ---------------------------------------------------------------------------------


def one_token(rng, N, D=5, M=3):
    """A state and a token: key, value, beta and the logarithm of the decay of each channel."""
    S = rng.normal(size=(D, M))
    return S, rng.normal(size=D), rng.normal(size=M), rng.uniform(), -rng.exponential(size=D)


def of_a_token(transition):
    def call(S, k, v, beta, g):
        return transition(S, SimpleNamespace(k=k, v=v, beta=beta, log_decay=g))

    return call


def faded(S, x):
    return np.exp(x.log_decay)[:, None] * S


def corrected(S, x, share=None):
    return S - np.outer((x.beta if share is None else share) * x.k, x.k @ S)


ROW = (
    Function(
        signature="decay_then_correct(S, x)",
        reference=lambda S, x: corrected(faded(S, x), x),
        section=TABLE,
        inputs=one_token,
        view=of_a_token,
        unit="",
        mistakes=(
            Mistake(
                lambda S, x: faded(corrected(S, x), x),
                "The correction comes first, and then the decay. In the formula, which of the two "
                "stands next to the state?",
                CONVENTIONS,
            ),
            Mistake(
                lambda S, x: faded(S, x) + corrected(S, x) - S,
                "The state before its decay is asked what the key finds. That is the convention of "
                "RWKV-7.",
                CONVENTIONS,
            ),
            Mistake(
                lambda S, x: np.exp(x.log_decay[0]) * corrected(S, x),
                "All channels decay alike, by the decay of the first: that is Gated DeltaNet.",
                TABLE,
            ),
            Mistake(
                lambda S, x: corrected(faded(S, x), x, share=1.0),
                "The share beta is missing: the correction removes everything at the key.",
                TABLE,
            ),
            Mistake(
                lambda S, x: (np.eye(len(S)) - x.beta * x.k @ x.k) @ faded(S, x),
                "`k @ k.T` is one number, as `.T` does nothing to an array with one axis. The "
                "transition has an outer product.",
                TABLE,
            ),
            Mistake(
                lambda S, x: corrected(faded(S, x), x, share=-x.beta),
                "The correction is added. What the key finds has to be taken away.",
                TABLE,
            ),
            Mistake(
                lambda S, x: faded(S, x),
                "The state fades, but nothing is removed at the key.",
                TABLE,
            ),
            Mistake(
                lambda S, x: corrected(x.log_decay[:, None] * S, x),
                "The logarithm multiplies the state. The decay is its exponential.",
                CONVENTIONS,
            ),
            Mistake(
                lambda S, x: corrected(faded(S, x), x) + np.outer(x.beta * x.k, x.v),
                "The write is in it. It is a part of its own in the row, and would be added twice.",
                QUESTIONS,
            ),
            Mistake(
                lambda S, x: corrected(S, x),
                "The decay is missing: this is the transition of DeltaNet.",
                TABLE,
            ),
        ),
    ),
    truth(
        "order_matters",
        True,
        section=TABLE,
        form="True or False, for decays that differ between channels",
        message="A number commutes with every matrix. Does a diagonal matrix?",
    ),
)

EXERCISES = chapter(
    "One recurrence, many models",
    ("ex-family-hand", *HAND),
    ("ex-family-special", *SPECIAL),
    ("ex-family-in-place", *IN_PLACE),
    ("ex-family-row", *ROW),
)
