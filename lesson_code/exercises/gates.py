"""Exercises of the chapter on gates, those on Mamba among them."""

from __future__ import annotations

import math

import numpy as np

from lesson_code.checks.causal import check_causal
from lesson_code.checks.streaming import check_streaming
from lesson_code.exercises._old import Function, Further, Mistake, Value, chapter
from lesson_code.numpy import gated_linear_attention, state_space_dual

GATE = "One gate for each channel"
PARALLEL = "The parallel form, and how it overflows"
CHUNKS = "Chunks, halved"
RWKV = "RWKV-5 and 6: read before write"
RATE = "Mamba: from a rate to a decay"
SCAN = "The selective scan"
CONVOLUTION = "A short convolution"
HEADS = "Mamba-2: one decay for each head"


def gated(rng, N, D=5, M=3):
    """Queries, keys, values and logarithms of gates, of which some are closed."""
    q, k, g = rng.normal(size=(3, N, D))
    g = np.where(rng.random((N, D)) < 0.1, -np.inf, -np.exp(g))
    return q, k, rng.normal(size=(N, M)), g


# --- The gate on the own token -----------------------------------------------------------------

K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
ALPHA = np.array([[1.0, 1.0], [0.5, 1.0], [1.0, 0.0]])


def recurrence(q, k, v, gates, *, before=False, after=False, own=False, late=False):
    """Gated attention whose gate acts before the write, after it, on the write or after the read.

    `gates` are the factors, not their logarithms; they may be of any shape that broadcasts with the
    state.
    """
    S, out = np.zeros((k.shape[1], v.shape[1])), np.empty_like(v)
    for t, gate in enumerate(gates):
        write = np.outer(k[t], v[t])
        S = (gate * S if before else S) + (gate * write if own else write)
        S = gate * S if after else S
        out[t] = q[t] @ S
        S = gate * S if late else S
    return out


def by_rows(alpha):
    return alpha[:, :, np.newaxis]


def gate_at(**where):
    return lambda q, k, v, g: recurrence(q, k, v, by_rows(np.exp(g)), **where)


OWN = (
    Value(
        name="outputs",
        reference=lambda: recurrence(K, K, V, by_rows(ALPHA), after=True),
        section=GATE,
        form="three rows of two numbers",
        mistakes=(
            Mistake(
                lambda: recurrence(K, K, V, by_rows(ALPHA), before=True),
                "This is the rule of the chapter, in which a gate does not touch its own token.",
                GATE,
            ),
            Mistake(
                lambda: recurrence(K, K, V, by_rows(ALPHA), late=True),
                "Here the gate acts after the read. The colleague's acts between the write and the "
                "read.",
                GATE,
            ),
            Mistake(
                lambda: recurrence(K, K, V, by_rows(ALPHA), own=True),
                "Only what the token writes has gone through the gate. The old memory does, too.",
                GATE,
            ),
            Mistake(
                lambda: recurrence(K, K, V, ALPHA[:, np.newaxis, :], after=True),
                "The gate was applied to the columns. A channel of the keys is a row of the "
                "memory.",
                GATE,
            ),
        ),
    ),
    Function(
        signature="gate_after_write(q, k, v, g)",
        reference=gate_at(after=True),
        section=GATE,
        inputs=gated,
        mistakes=(
            Mistake(
                gate_at(before=True),
                "This is the rule of the chapter, in which a gate does not touch its own token.",
                GATE,
            ),
            Mistake(
                gate_at(late=True),
                "The query reads before the gate acts. Here it reads after write and gate.",
                GATE,
            ),
            Mistake(
                gate_at(own=True),
                "The old memory does not fade: only what the token writes goes through the gate.",
                GATE,
            ),
            Mistake(
                gate_at(before=True, after=True),
                "The gate acts twice on the old memory, before the write and after it.",
                GATE,
            ),
            Mistake(
                lambda q, k, v, g: gated_linear_attention(np.exp(g) * q, k, v, g),
                "The gate multiplies the query. What a token writes must have faded in the memory "
                "too, for all later queries.",
                GATE,
            ),
            Mistake(
                lambda q, k, v, g: recurrence(q, k, v, by_rows(g), after=True),
                "g is used as the gate itself. It is the logarithm of the gate.",
                GATE,
            ),
        ),
    ),
)

# --- Padding -----------------------------------------------------------------------------------


def state_after(k, v, g):
    S = np.zeros((k.shape[1], v.shape[1]))
    for k_t, v_t, g_t in zip(k, v, g, strict=True):
        S = np.exp(g_t)[:, np.newaxis] * S + np.outer(k_t, v_t)
    return S


def padded_with(key, value, gate):
    """A function that appends rows: a number for all of them, or "last" for the last row."""

    def pad(k, v, g, n):
        rows = (
            np.repeat(x[-1:], n, axis=0) if fill == "last" else np.full((n, x.shape[1]), fill)
            for x, fill in ((k, key), (v, value), (g, gate))
        )
        return tuple(np.concatenate([x, row]) for x, row in zip((k, v, g), rows, strict=True))

    return pad


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
        return state_after(*map(np.asarray, padded))

    return view


def padding_inputs(rng, N, D=5, M=3):
    return *gated(rng, N, D, M)[1:], int(rng.integers(1, 5))


PADDING = (
    Function(
        signature="pad(k, v, g, n)",
        reference=padded_with(0.0, 0.0, 0.0),
        section=GATE,
        inputs=padding_inputs,
        view=state_of_padded,
        unit="",
        mistakes=(
            Mistake(
                padded_with(0.0, 0.0, -np.inf),
                "These gates are closed: they empty the memory. g is the logarithm of a gate.",
                GATE,
            ),
            Mistake(
                padded_with(0.0, 0.0, 1.0),
                "A gate whose logarithm is 1 multiplies the memory by e. What is the logarithm of "
                "a gate that keeps everything?",
                GATE,
            ),
            Mistake(
                padded_with(0.0, 0.0, "last"),
                "The padding writes nothing, but the memory goes on fading with the last gate.",
                GATE,
            ),
            Mistake(
                padded_with("last", "last", "last"),
                "The last token is repeated, so it is written again and again.",
                GATE,
            ),
            Mistake(
                padded_with("last", "last", 0.0),
                "The memory does not fade, but the last token is written again and again.",
                GATE,
            ),
            Mistake(
                padded_with(1.0, 1.0, 0.0),
                "The padding writes keys and values of ones. What must a write be to add nothing?",
                GATE,
            ),
        ),
    ),
)

# --- Chunkwise ---------------------------------------------------------------------------------

L = 16


def before(g):
    """Row r: the logarithm of the decay from the border to row r, its own gate not counted."""
    return np.concatenate([np.zeros_like(g[:1]), np.cumsum(g[:-1], axis=0)])


def after(g):
    """Row r: from row r to the end."""
    return before(g[::-1])[::-1]


def segments(g):
    """[t, j]: the logarithm of the decay from token j to token t, -inf above the diagonal."""
    t = np.arange(len(g))
    terms = np.where((t[:, None] > t)[..., None], g[:, None, :], 0.0)
    return np.where((t[:, None] >= t)[..., None], np.cumsum(terms, axis=0), -np.inf)


def inside(g, q, k):
    return np.einsum("td,tjd,jd->tj", q, np.exp(segments(g)), k)


def chunkwise(
    q,
    k,
    v,
    g,
    *,
    weights=inside,
    read=lambda g: np.cumsum(g, axis=0),
    write=after,
    carry=lambda g: g.sum(axis=0),
):
    """Gated attention in chunks of 16, with parts to be replaced by wrong ones."""
    S, out = np.zeros((k.shape[1], v.shape[1])), np.empty_like(v)
    for start in range(0, len(k), L):
        part = slice(start, start + L)
        gates = g[part]
        out[part] = weights(gates, q[part], k[part]) @ v[part] + (q[part] * np.exp(read(gates))) @ S
        S = np.exp(carry(gates))[:, None] * S + (k[part] * np.exp(write(gates))).T @ v[part]
    return out


def with_part(**part):
    return lambda q, k, v, g: chunkwise(q, k, v, g, **part)


def split(g, q, k):
    """The decays inside a chunk as products of two factors, of which one overflows."""
    G = np.cumsum(g, axis=0)
    return np.tril((q * np.exp(G)) @ (k * np.exp(-G)).T)


CODE = (
    Function(
        signature="my_gla(q, k, v, g, *, initial_state=None, return_state=False, L=16)",
        reference=lambda q, k, v, g: gated_linear_attention(q, k, v, g),
        section=CHUNKS,
        inputs=gated,
        mistakes=(
            Mistake(
                with_part(weights=lambda g, q, k: np.tril(inside(g, q, k), -1)),
                "Inside a chunk no token sees itself. `earlier` gives the weights of earlier "
                "tokens alone.",
                CHUNKS,
            ),
            Mistake(
                with_part(weights=lambda g, q, k: np.tril(q @ k.T)),
                "Inside a chunk nothing fades.",
                CHUNKS,
            ),
            Mistake(
                with_part(weights=split),
                "Inside a chunk the decays are products of a factor that overflows and one that "
                "vanishes, and a closed gate gives nan.",
                PARALLEL,
            ),
            Mistake(
                with_part(weights=lambda g, q, k: np.zeros((len(q), len(q)))),
                "Tokens of the same chunk are missing.",
                CHUNKS,
            ),
            Mistake(
                with_part(read=np.zeros_like),
                "What a query reads from the state has not faded since the chunk began.",
                CHUNKS,
            ),
            Mistake(
                with_part(read=before),
                "What a query reads from the state has faded up to the token before it. That is "
                "the convention of RWKV; here the own gate counts.",
                RWKV,
            ),
            Mistake(
                with_part(read=lambda g: np.full_like(g, -np.inf)),
                "Nothing is read from earlier chunks.",
                CHUNKS,
            ),
            Mistake(
                with_part(write=np.zeros_like),
                "Keys go into the state as they are. They must fade to the end of the chunk.",
                CHUNKS,
            ),
            Mistake(
                with_part(write=lambda g: np.cumsum(g[::-1], axis=0)[::-1]),
                "Keys fade by the gate of their own token on the way to the end of the chunk. A "
                "gate never touches its own token.",
                GATE,
            ),
            Mistake(
                with_part(write=lambda g: np.cumsum(g, axis=0)),
                "Keys are multiplied by the decay from the start of the chunk. The state needs the "
                "decay from the key to the end.",
                CHUNKS,
            ),
            Mistake(
                with_part(write=lambda g: np.cumsum(g, axis=0)[-1:] - np.cumsum(g, axis=0)),
                "The decay to the end of the chunk is a difference of two sums, which is "
                "-inf + inf where a gate is closed. Add up each segment by itself, as `after` "
                "does.",
                PARALLEL,
            ),
            Mistake(
                with_part(carry=lambda g: np.zeros_like(g[0])),
                "The state does not fade from chunk to chunk.",
                CHUNKS,
            ),
            Mistake(
                with_part(carry=lambda g: g[-1]),
                "The state fades by the last gate of the chunk alone. All gates of the chunk act "
                "on it.",
                CHUNKS,
            ),
        ),
        further=(
            Further(check_causal, PARALLEL, gated),
            Further(check_streaming, CHUNKS, gated, options={"empty_pieces": False}),
        ),
    ),
)

# --- Three steps of Mamba ----------------------------------------------------------------------

X = (8.0, 4.0, 2.0)
STEPS = (1.0, 2.0, 0.0)


def states(steps=STEPS, decay=lambda d: 2.0**-d, write=lambda d: d):
    h, found = 0.0, []
    for x, d in zip(X, steps, strict=True):
        h = decay(d) * h + write(d) * x
        found.append(h)
    return found


def last_of(**rule):
    return lambda: states((1.0, 2.0, 30.0), **rule)[-1]


def exact(d):
    return (1 - 2.0**-d) / math.log(2)


HAND = (
    Value(
        name="h",
        reference=states,
        section=SCAN,
        form="three numbers",
        mistakes=(
            Mistake(
                lambda: states(write=lambda d: 1.0),
                "The inputs are written as they are. The step multiplies what is written, too.",
                SCAN,
            ),
            Mistake(
                lambda: states(decay=lambda d: 0.5),
                "Every step has halved the memory. The decay depends on the step.",
                RATE,
            ),
            Mistake(
                lambda: states(write=exact),
                "These are the exact writes. Mamba takes the approximation.",
                RATE,
            ),
            Mistake(
                lambda: states(decay=lambda d: math.exp(-d)),
                "The rate is 1 here. With A = -ln 2, what is left after a step of 1?",
                RATE,
            ),
            Mistake(
                lambda: states(decay=lambda d: 2.0**d),
                "The memory grows. The rate A is negative.",
                RATE,
            ),
            Mistake(
                lambda: [*states()[:2], 0.0],
                "The memory is empty at the end. When no time passes, what leaks out?",
                RATE,
            ),
            Mistake(
                lambda: [*states()[:2], X[2]],
                "At the end there is the third input alone. With a step of 0, what leaks out, and "
                "what flows in?",
                RATE,
            ),
            Mistake(
                lambda: [*states()[:2], states()[1] + X[2]],
                "The third input has been added. With a step of 0, what flows in?",
                RATE,
            ),
        ),
    ),
    Value(
        name="h_late",
        reference=last_of(),
        section=SCAN,
        mistakes=(
            Mistake(
                2.0,
                "The past is gone, but the third input is not written as it is: the step "
                "multiplies it.",
                SCAN,
            ),
            Mistake(
                lambda: states()[1] + 30 * X[2],
                "The past has not faded. How much of it is left after so long a step?",
                RATE,
            ),
            Mistake(
                0.0,
                "The past is gone, but the step acts on the write as well.",
                SCAN,
            ),
            Mistake(
                last_of(write=exact),
                "This is the exact write. Mamba takes the approximation.",
                RATE,
            ),
        ),
    ),
)

# --- A convolution that looks ahead ------------------------------------------------------------

W = np.array([1.0, 2.0, 3.0, 4.0])


def shifted(x, weights=W, delay=0):
    """The sum of weights[3 - i] * x[t - i - delay], with zeros outside of x."""
    out, N = np.zeros_like(x), len(x)
    for i, w in enumerate(weights[::-1]):
        n = i + delay
        if 0 <= n < N:
            out[n:] += w * x[: N - n]
        elif -N < n < 0:
            out[:n] += w * x[-n:]
    return out


def with_mode_same(x, weights=W):
    columns = (np.convolve(c, weights[::-1], mode="same")[: len(x)] for c in x.T)
    return np.stack(list(columns), axis=1)


def silu(x):
    return x / (1 + np.exp(-x))


SAME = (
    Value(
        name="ahead",
        reference=lambda: 1,
        section=CONVOLUTION,
        form="how many positions",
        mistakes=(
            Mistake(
                2,
                "That is how far it looks back. Four weights cover the token itself and three "
                "others.",
                CONVOLUTION,
            ),
            Mistake(3, "As far as that the mode does not move the outputs.", CONVOLUTION),
            Mistake(
                0,
                "Put in an impulse and look at the first output that is not 0: where is it?",
                CONVOLUTION,
            ),
        ),
    ),
    Function(
        signature="repaired(x)",
        reference=shifted,
        section=CONVOLUTION,
        inputs=lambda rng, N, D=2: (rng.normal(size=(N, D)),),
        mistakes=(
            Mistake(
                with_mode_same,
                "It is the middle of the full convolution still, so each output sees a later "
                "token. Which outputs of the full one see no later token?",
                CONVOLUTION,
            ),
            Mistake(
                lambda x: shifted(x, W[::-1]),
                "The weights are in reverse: the last one belongs to the token itself.",
                CONVOLUTION,
            ),
            Mistake(
                lambda x: with_mode_same(x, W[::-1]),
                "It is the middle of the full convolution still, and its weights are in reverse.",
                CONVOLUTION,
            ),
            Mistake(
                lambda x: shifted(x, delay=-3),
                "These are the last outputs of the full convolution: each sees three later tokens.",
                CONVOLUTION,
            ),
            Mistake(
                lambda x: shifted(x, delay=1),
                "No output sees its own token: everything is one position too late.",
                CONVOLUTION,
            ),
            Mistake(
                lambda x: silu(shifted(x)),
                "The silu is in it. This exercise asks for the sum alone.",
                CONVOLUTION,
            ),
        ),
        further=(
            Further(
                check_causal,
                CONVOLUTION,
                lambda rng, N: (rng.normal(size=(N, 2)),),
            ),
        ),
    ),
)

# --- Two documents -----------------------------------------------------------------------------


def with_rows(rows, value=-np.inf):
    """A function that sets log decays of the rows that rows(start) selects."""

    def apart(g, start):
        g = g.copy()
        g[rows(start)] = value
        return g

    return apart


def documents(rng, N, D=5, M=3):
    B, C = rng.normal(size=(2, N, D))
    return rng.normal(size=(N, M)), -rng.random(N), B, C, int(rng.integers(N // 3, N))


DOCUMENTS = (
    Function(
        signature="apart(g, start)",
        reference=with_rows(lambda start: start),
        section=HEADS,
        inputs=documents,
        view=lambda apart: lambda x, g, B, C, start: state_space_dual(x, apart(g, start), B, C),
        mistakes=(
            Mistake(
                with_rows(lambda start: slice(max(start - 1, 0), max(start, 1))),
                "The memory is emptied one token too early: the last token of the first text is "
                "still in it when the second begins.",
                HEADS,
            ),
            Mistake(
                with_rows(lambda start: slice(start + 1, start + 2)),
                "The memory is emptied one token too late: the first token of the second text "
                "reads the first text, and is forgotten with it.",
                HEADS,
            ),
            Mistake(
                with_rows(lambda start: slice(start, None)),
                "Every token of the second text empties the memory, so each sees itself alone.",
                HEADS,
            ),
            Mistake(
                with_rows(lambda start: slice(0, start)),
                "The first text forgets itself, and its last token is still there when the second "
                "one begins.",
                HEADS,
            ),
            Mistake(
                with_rows(lambda start: start, 0.0),
                "A log decay of 0 is a decay of 1: it keeps everything.",
                HEADS,
            ),
            Mistake(
                lambda g, start: g,
                "Nothing separates the texts.",
                HEADS,
            ),
        ),
    ),
)

EXERCISES = chapter(
    "Gates: GLA, RWKV-5/6, Mamba",
    ("ex-gates-own", *OWN),
    ("ex-gates-padding", *PADDING),
    ("ex-gates-chunkwise", *CODE),
    ("ex-mamba-hand", *HAND),
    ("ex-mamba-same", *SAME),
    ("ex-mamba-documents", *DOCUMENTS),
)
