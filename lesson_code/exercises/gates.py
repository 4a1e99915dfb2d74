"""Exercises of the chapter on gates."""

import numpy as np

from lesson_code.checks import check_causal, check_streaming
from lesson_code.exercises import Exercise
from lesson_code.exercises._arrays import K, V, over_tokens
from lesson_code.numpy import gated_linear_attention

CHAPTER = "Gates: GLA and RWKV-5/6"
GATE = "One gate for each channel"
PARALLEL = "The parallel form, and how it overflows"
CHUNKS = "Chunks, halved"
RWKV = "RWKV-5 and 6: read before write"
SOURCE = "Where a gate comes from"
SHIFT = "A token shift that depends on the token"


def gated(rng, N, D=5, M=3):
    """Queries, keys, values and logarithms of gates, of which some are closed."""
    q, k, g = rng.normal(size=(3, N, D))
    g = np.where(rng.random((N, D)) < 0.1, -np.inf, -np.exp(g))
    return q, k, rng.normal(size=(N, M)), g


def before(g):
    """Row r: the logarithm of the decay from the border to row r, its own gate not counted."""
    return np.concatenate([np.zeros_like(g[:1]), np.cumsum(g[:-1], axis=0)])


def after(g):
    """Row r: from row r to the end."""
    return before(g[::-1])[::-1]


# --- The gate on the own token -----------------------------------------------------------------

OWN = Exercise("ex-gates-own", CHAPTER)


def recurrence(step):
    """``step(S, write, gate)`` returns the state to read and the state to keep."""

    def attention(q, k, v, gates):
        def token(S, q, k, v, gate):
            read, S = step(S, np.outer(k, v), gate)
            return S, q @ read

        return over_tokens(token, q, k, v, gates)

    return attention


def gate_own(S, write, gate):
    S = gate * (S + write)
    return S, S


def gate_old(S, write, gate):
    S = gate * S + write
    return S, S


def gate_late(S, write, gate):
    return S + write, gate * (S + write)


def gate_write(S, write, gate):
    S = S + gate * write
    return S, S


BY_THE_CHAPTER = "This is the rule of the chapter, in which a gate does not touch its own token."
ALPHA = np.array([[1.0, 1.0], [0.5, 1.0], [1.0, 0.0]])
ROWS = ALPHA[:, :, None]

OWN.value(
    "outputs", recurrence(gate_own)(K, K, V, ROWS), GATE, "three rows of two numbers"
).mistakes(
    (recurrence(gate_old)(K, K, V, ROWS), BY_THE_CHAPTER),
    (
        recurrence(gate_late)(K, K, V, ROWS),
        "Here the gate acts after the read. The colleague's acts between the write and the read.",
    ),
    (
        recurrence(gate_own)(K, K, V, ALPHA[:, None, :]),
        "The gate was applied to the columns. A channel of the keys is a row of the memory.",
    ),
)


@OWN.function(GATE, inputs=gated)
def gate_after_write(q, k, v, g):
    return recurrence(gate_own)(q, k, v, np.exp(g)[:, :, None])


def with_gates(step):
    return lambda q, k, v, g: recurrence(step)(q, k, v, np.exp(g)[:, :, None])


gate_after_write.mistakes(
    (with_gates(gate_old), BY_THE_CHAPTER),
    (
        with_gates(gate_late),
        "The query reads before the gate acts. Here it reads after write and gate.",
    ),
    (
        with_gates(gate_write),
        "The old memory does not fade: only what the token writes goes through the gate.",
    ),
    (
        lambda q, k, v, g: gated_linear_attention(np.exp(g) * q, k, v, g),
        "The gate multiplies the query. What a token writes must have faded in the memory too, for "
        "all later queries.",
    ),
)

# --- A half-life ---------------------------------------------------------------------------------

HALF = Exercise("ex-gates-half", CHAPTER)
GATE_100 = 0.5 ** (1 / 100)


def logit_of(share):
    return np.log(share / (1 - share))


HALF.value("alpha", GATE_100, GATE).mistakes(
    (0.5, "This gate halves with every token. It is multiplied a hundred times."),
)
HALF.value("logit", logit_of(GATE_100**16), SOURCE).mistakes(
    (logit_of(GATE_100), "This forgets the root: the gate is the sixteenth root of the sigmoid."),
    (
        logit_of(GATE_100 ** (1 / 16)),
        "The sigmoid is the sixteenth power of the gate, not its root.",
    ),
)
HALF.value("w", np.log(-np.log(GATE_100)), SHIFT).mistakes(
    (np.log(GATE_100), "This is the logarithm of the gate, which is minus the exponential of w."),
    (-np.log(100), "This gate leaves 1/e after 100 tokens."),
)

# --- Padding -----------------------------------------------------------------------------------

PADDING = Exercise("ex-gates-padding", CHAPTER)


def padding_inputs(rng, N, D=5, M=3):
    return *gated(rng, N, D, M)[1:], int(rng.integers(1, 5))


def state_of_padded(pad):
    def view(k, v, g, n):
        expected = [(len(x) + n, x.shape[1]) for x in (k, v, g)]
        padded = pad(k, v, g, n)
        if not isinstance(padded, tuple | list) or len(padded) != 3:
            raise TypeError("pad must return three arrays, k, v and g")
        shapes = [np.shape(x) for x in padded]
        if shapes != expected:
            raise ValueError(
                f"the arrays must get n = {n} more rows each, their shapes are {shapes}"
            )
        k, v, g = map(np.asarray, padded)
        return (k * np.exp(after(g))).T @ v

    return view


@PADDING.function(GATE, inputs=padding_inputs, view=state_of_padded, unit="")
def pad(k, v, g, n):
    return tuple(np.concatenate([x, np.zeros((n, x.shape[1]))]) for x in (k, v, g))


def padded_with(gate, row=0.0):
    """Appends rows of numbers; without one, the last row again and again."""

    def wrong(k, v, g, n):
        rows = (
            np.repeat(x[-1:], n, axis=0) if fill is None else np.full((n, x.shape[1]), fill)
            for x, fill in ((k, row), (v, row), (g, gate))
        )
        return tuple(np.concatenate([x, new]) for x, new in zip((k, v, g), rows, strict=True))

    return wrong


pad.mistakes(
    (
        padded_with(-np.inf),
        "These gates are closed: they empty the memory. g is the logarithm of a gate.",
    ),
    (
        padded_with(1.0),
        "A gate whose logarithm is 1 multiplies the memory by e. What is the logarithm of a gate "
        "that keeps everything?",
    ),
    (
        padded_with(None),
        "The padding writes nothing, but the memory goes on fading with the last gate.",
    ),
    (
        padded_with(0.0, row=None),
        "The memory does not fade, but the last token is written again and again.",
    ),
)

# --- Chunkwise ---------------------------------------------------------------------------------

CODE = Exercise("ex-gates-chunkwise", CHAPTER)


@CODE.function(CHUNKS, inputs=gated)
def my_gla(q, k, v, g, *, initial_state=None, return_state=False, L=16):
    return gated_linear_attention(
        q, k, v, g, initial_state=initial_state, return_state=return_state
    )


my_gla.passes(check_causal, PARALLEL).passes(check_streaming, CHUNKS, empty_pieces=False)


def up_to(g):
    return np.cumsum(g, axis=0)


def chunkwise(
    inside=gated_linear_attention, read=up_to, write=after, carry=lambda g: g.sum(axis=0)
):
    """Gated attention in chunks of 16, with parts to be replaced by wrong ones."""

    def wrong(q, k, v, g):
        S, out = np.zeros((k.shape[1], v.shape[1])), np.empty_like(v)
        for start in range(0, len(k), 16):
            at = slice(start, start + 16)
            out[at] = inside(q[at], k[at], v[at], g[at]) + (q[at] * np.exp(read(g[at]))) @ S
            faded = k[at] * np.exp(write(g[at]))
            S = np.exp(carry(g[at]))[:, None] * S + faded.T @ v[at]
        return out

    return wrong


def two_factors(q, k, v, g):
    return np.tril((q * np.exp(up_to(g))) @ (k * np.exp(-up_to(g))).T) @ v


my_gla.mistakes(
    (chunkwise(lambda q, k, v, g: np.tril(q @ k.T) @ v), "Inside a chunk nothing fades."),
    (
        chunkwise(two_factors),
        "Inside a chunk the decays are products of a factor that overflows and one that vanishes, "
        "and a closed gate gives nan.",
        PARALLEL,
    ),
    (
        chunkwise(read=before),
        "What a query reads from the state has faded up to the token before it. That is the "
        "convention of RWKV; here the own gate counts.",
        RWKV,
    ),
    (
        chunkwise(write=np.zeros_like),
        "Keys go into the state as they are. They must fade to the end of the chunk.",
    ),
    (
        chunkwise(carry=lambda g: g[-1]),
        "The state fades by the last gate of the chunk alone. All gates of the chunk act on it.",
    ),
)
