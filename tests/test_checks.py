"""The checks pass right answers in several forms and refuse known wrong ones, with the reason.

The answers are written out here, small and on purpose naive, so that these tests need nothing else
of the package. A table for each check has its wrong answers, each beside words of the refusal.
"""

import re
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lesson_code.checks import (
    check_causal,
    check_gradients,
    check_linear_cost,
    check_same,
    check_streaming,
    random_qkv,
)

SEEDS = (0, 1, 2)


def refusal(check, *functions, **keywords):
    """The sentence with which a check refuses."""
    with warnings.catch_warnings(), pytest.raises(AssertionError) as caught:
        warnings.simplefilter("ignore")
        check(*functions, **keywords)
    message = str(caught.value)
    assert message.endswith((".", "?")) and "  " not in message and "\n" not in message
    return message


def assert_refused(words, check, *functions):
    for seed in SEEDS:
        message = refusal(check, *functions, seed=seed)
        assert re.search(words, message), message


# --- Right answers -----------------------------------------------------------------------------


def swap(x):
    return np.swapaxes(x, -1, -2)


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def mask(s, diagonal=0):
    return np.tril(np.ones(s.shape[-2:], bool), diagonal)


def weights(q, k, v=None, diagonal=0):
    """Causal softmax weights."""
    s = q @ swap(k) / np.sqrt(q.shape[-1])
    s = np.where(mask(s, diagonal), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)).astype(q.dtype)


def softmax(q, k, v):
    return weights(q, k) @ v


def full_softmax(q, k, v):
    e = np.exp(q @ swap(k) / np.sqrt(q.shape[-1]))
    return e / e.sum(-1, keepdims=True) @ v


# Causal linear attention, without a normalizer and in four forms with one


def plain(q, k, v):
    return np.tril(phi(q) @ swap(phi(k))) @ v


def masked(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)))
    return a @ v / a.sum(-1, keepdims=True)


def cumsum(q, k, v, z_axis=-2):
    fq, fk = phi(q), phi(k)
    S = np.cumsum(fk[..., :, None] * v[..., None, :], axis=-3)
    z = np.cumsum(fk, axis=z_axis)
    return (fq[..., None, :] @ S)[..., 0, :] / (fq * z).sum(-1, keepdims=True)


class State(NamedTuple):
    S: np.ndarray
    z: np.ndarray


def recurrence(q, k, v, state=None):
    fq, fk = phi(q), phi(k)
    S = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]), k.dtype)
    S, z = (S, 0 * S[..., 0]) if state is None else state
    out = np.empty_like(v)
    for t in range(v.shape[-2]):
        S = S + fk[..., t, :, None] * v[..., t, None, :]
        z = z + fk[..., t, :]
        out[..., t, :] = (swap(S) @ fq[..., t, :, None])[..., 0] / (fq[..., t, :] * z).sum(
            -1, keepdims=True
        )
    return out, State(S, z)


def recurrent(q, k, v):
    return recurrence(q, k, v)[0]


def chunks(q, k, v, state=None, L=16):
    fq, fk = phi(q), phi(k)
    ones = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)  # the normalizer as a value
    S = np.zeros((*k.shape[:-2], k.shape[-1], ones.shape[-1]), k.dtype) if state is None else state
    out = [ones[..., :0, :]]
    for start in range(0, v.shape[-2], L):
        a, b, c = (x[..., start : start + L, :] for x in (fq, fk, ones))
        out.append(np.tril(a @ swap(b)) @ c + a @ S)
        S = S + swap(b) @ c
    out = np.concatenate(out, axis=-2)
    return out[..., :-1] / out[..., -1:], S


def chunkwise(q, k, v):
    return chunks(q, k, v)[0]


def in_float32(rng, N):
    return tuple(x.astype(np.float32) for x in random_qkv(rng, N, leading=(2,)))


# --- Parts of wrong answers --------------------------------------------------------------------


def late(x):
    return np.concatenate([0 * x[..., :1, :], x[..., :-1, :]], axis=-2)


def early(x):
    return np.concatenate([x[..., 1:, :], 0 * x[..., :1, :]], axis=-2)


def flip(x):
    return np.flip(x, -2)


def everything(q, k, v):
    """The state of the whole sequence, read by all positions."""
    return phi(q) @ (swap(phi(k)) @ v) / (phi(q) @ phi(k).sum(-2)[..., None])


def strict(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)), -1)
    return a @ v / np.maximum(a.sum(-1, keepdims=True), 1e-300)


def pieces(L):
    """Chunks of L positions that know nothing of each other."""

    def fn(q, k, v):
        starts = range(0, q.shape[-2], L)
        parts = [masked(*(x[..., i : i + L, :] for x in (q, k, v))) for i in starts]
        return np.concatenate(parts, axis=-2)

    return fn


def with_epsilon(epsilon):
    def fn(q, k, v):
        a = np.tril(phi(q) @ swap(phi(k)))
        return a @ v / (a.sum(-1, keepdims=True) + epsilon)

    return fn


def put(positions, value, fn=masked):
    """Another value at some positions of an output; `value` may be a function of v."""

    def wrong(q, k, v):
        out = np.array(fn(q, k, v))
        out[..., positions, :] = value(out, v) if callable(value) else value
        return out

    return wrong


def no_return(q, k, v):
    masked(q, k, v)


def changes_k(q, k, v):
    k *= 1.0 + 1e-3
    return masked(q, k / (1.0 + 1e-3), v)


def not_written(q, k, v):
    raise NotImplementedError("fill me in")


# --- check_same --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inputs", [None, in_float32])
def test_same_passes_every_form(seed, inputs):
    for form in (cumsum, recurrent, chunkwise, masked):
        check_same(form, masked, inputs=inputs, seed=seed)
    check_same(softmax, softmax, inputs=inputs, seed=seed)


def test_same_takes_one_sequence_and_single_arrays():
    check_same(lambda q, k, v: q @ k.T @ v, lambda q, k, v: q @ (k.T @ v), inputs=random_qkv)
    check_same(
        np.tanh, lambda x: 2 / (1 + np.exp(-2 * x)) - 1, inputs=lambda rng, N: rng.normal(size=N)
    )


@pytest.mark.parametrize("kind", [float, np.float64, np.asarray])
def test_same_takes_numbers_and_names_them_with_five_digits(kind):
    def draw(rng, N):
        return kind(rng.normal()), kind(1 / 3)

    check_same(lambda a, b: a + b, lambda a, b: b + a, inputs=draw)
    message = refusal(check_same, lambda a, b: 2 * (a + b), lambda a, b: a + b, inputs=draw)
    assert "With a 0.12573, b 0.33333 your output is wrong" in message
    assert "2 times the reference" in message


def test_same_names_outputs_and_states():
    def both(q, k, v):
        return {"scores": q @ swap(k), "values": v}

    check_same(both, both)
    message = refusal(check_same, lambda q, k, v: {**both(q, k, v), "values": -v}, both)
    assert "your output[values] is wrong" in message

    def forgets_z(q, k, v):
        out, (S, z) = recurrence(q, k, v)
        return out, State(S, 0 * z)

    check_same(recurrence, recurrence)
    message = refusal(check_same, forgets_z, recurrence)
    assert "output[1][z]" in message and "zero everywhere" in message
    assert "one array where a tuple of 2" in refusal(check_same, recurrent, recurrence)
    message = refusal(check_same, lambda q, k, v: (q, k), lambda q, k, v: (q, (k, v)))
    assert "returns one array as output[1] where a tuple of 2 is expected." in message


def test_arguments_are_called_what_the_function_calls_them():
    def wrong(queries, keys, values):
        return everything(queries, keys, values)

    message = refusal(check_same, wrong, masked, inputs=random_qkv)
    assert message.startswith(
        "With queries (7, 5), keys (7, 5), values (7, 3) your output is wrong"
    )
    message = refusal(check_same, lambda *qkv: everything(*qkv), masked, inputs=random_qkv)
    assert message.startswith("With input 0 (7, 5), input 1 (7, 5), input 2 (7, 3) your output")


def after_normalizing(q, k, v):
    s = phi(q) @ swap(phi(k))
    return np.tril(s / s.sum(-1, keepdims=True)) @ v


def over_queries(q, k, v):
    s = np.where(mask(q @ swap(k)), q @ swap(k), -np.inf)
    e = np.exp(s - s.max(-2, keepdims=True))
    return e / e.sum(-2, keepdims=True)


def without_the_tail(q, k, v):
    N = v.shape[-2]
    return put(slice(64 * (N // 64), None), 0)(q, k, v) if N > 64 else masked(q, k, v)


def root(x):
    return np.sqrt(x.shape[-1])


SAME_WRONG = [
    # Masks and sums
    ("Position 0 is zero.*diagonal", strict, masked),
    (
        "Only position 0 is not finite.*diagonal",
        lambda q, k, v: weights(q, k, diagonal=-1) @ v,
        softmax,
    ),
    (
        "Position 0 is zero.*read after the write",
        lambda q, k, v: np.tril(phi(q) @ swap(phi(k)), -1) @ v,
        plain,
    ),
    ("Only the last position agrees.*K\\^T V, see the future", everything, masked),
    ("multiple of the right one.*mask applied after normalizing", after_normalizing, masked),
    ("multiple of the right one.*normalizer is missing", plain, masked),
    (
        "normalizer is missing, or sums over the wrong axis",
        lambda q, k, v: cumsum(q, k, v, z_axis=-1),
        masked,
    ),
    ("columns sum to one", over_queries, weights),
    ("Position 0 agrees and no later one", lambda q, k, v: v, masked),
    # Scales
    ("the scale 1/√D is missing", lambda q, k, v: softmax(q * root(q), k, v), softmax),
    ("once too often", lambda q, k, v: softmax(q / root(q), k, v), softmax),
    ("q and k were exchanged", lambda q, k, v: softmax(k, q, v), softmax),
    ("0.5 times the reference everywhere", lambda *qkv: masked(*qkv) / 2, masked),
    ("-1 times the reference everywhere: is a sign exchanged", lambda *qkv: -masked(*qkv), masked),
    ("zero everywhere", lambda q, k, v: 0 * v, masked),
    ("Not a number", lambda *qkv: masked(*qkv) * np.nan, masked),
    ("multiple of|small", with_epsilon(1e-4), masked),
    ("small.*is an epsilon added", with_epsilon(1e-6), masked),
    ("lower precision", lambda *qkv: masked(*map(np.float32, qkv)) + np.zeros(1), masked),
    ("The difference is small", lambda *qkv: masked(*qkv) * (1 + 1e-5), masked),
    # Places in time
    ("one position late", lambda *qkv: late(masked(*qkv)), masked),
    ("one position early", lambda *qkv: early(masked(*qkv)), masked),
    ("reversed order of time", lambda *qkv: flip(masked(*qkv)), masked),
    ("Positions 0 to 3 are zero", put(slice(4), 0), masked),
    ("Positions 0 to 3 are right, position 4 is the first", pieces(4), masked),
    (r"position 64\).*came out right: is a length or a chunk size fixed", pieces(64), masked),
    ("Positions 0 to 127 are right", without_the_tail, masked),
    # Axes, shapes and types
    (
        r"\(2, 4, 9, 3\).*reach into the heads",  # time for one sequence, heads for several
        lambda q, k, v: cumsum(q, k, v, z_axis=0),
        masked,
    ),
    (
        r"raised ValueError.*np\.swapaxes",
        lambda q, k, v: q @ k.T @ v,
        lambda q, k, v: q @ swap(k) @ v,
    ),
    (
        r"shape \(3, 7\), \(7, 3\) is expected.*is the transpose",
        lambda *qkv: swap(masked(*qkv)),
        masked,
    ),
    (
        r"shape \(3,\), \(1, 3\) is expected.*length 1 squeezed",
        lambda *qkv: np.squeeze(masked(*qkv)),
        masked,
    ),
    ("only the last position", lambda *qkv: masked(*qkv)[..., -1, :], masked),
    ("multiply it by v", weights, softmax),
    ("dtype float32, float64 is expected", lambda *qkv: masked(*qkv).astype(np.float32), masked),
    ("dtype int64, float64 is expected", lambda *qkv: masked(*qkv).astype(int), masked),
    ("a list of 7 where one array is expected", lambda *qkv: list(masked(*qkv)), masked),
    # How it behaves
    ("returned None: is its return missing", no_return, masked),
    ("raised NotImplementedError: fill me in", not_written, masked),
    ("changed k in place", changes_k, masked),
]


@pytest.mark.parametrize("words, wrong, reference", SAME_WRONG)
def test_same_refuses(words, wrong, reference):
    assert_refused(words, check_same, wrong, reference)


@pytest.mark.parametrize("wrong", [with_epsilon(1e-6), without_the_tail])
def test_the_normalizer_is_not_blamed_for_all(wrong):
    message = refusal(check_same, wrong, masked)
    assert "normalizer" not in message
    expected, got = re.search(r"expected (.*), got (.*?)[.] ", message).groups()
    assert expected != got


def test_same_says_where_with_five_digits():
    right = masked(*random_qkv(np.random.default_rng(0), 7))[3, 1]
    message = refusal(check_same, put(3, lambda out, v: out[..., 3, :] + [0, 1, 0]), masked)
    assert f"index (3, 1) (position 3): expected {right:.5g}, got {right + 1:.5g}" in message


# --- check_causal ------------------------------------------------------------------------------


def additive_mask(q, k, v):
    s = q @ swap(k) / np.sqrt(q.shape[-1]) - 1e9 * ~mask(q @ swap(k))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def by_subtraction(q, k, v):
    """A running sum as the total less what is still to come: right, with its own rounding."""
    later = flip(np.cumsum(flip(v), axis=-2)) - v
    return v.sum(-2, keepdims=True) - later


def naive_exponential(q, k, v):
    """Overflows for scores above 709, where it gives NaN: the reader's problem, not a leak."""
    s = np.exp(q @ swap(k)) * mask(q @ swap(k))
    return s / s.sum(-1, keepdims=True) @ v


def with_position_bias(k, v, bias):
    w = np.exp(np.where(mask(bias), k[..., None, :, 0] + bias, -np.inf))
    return w / w.sum(-1, keepdims=True) @ v


def biased_inputs(rng, N):
    return rng.normal(size=(N, 1)), rng.normal(size=(N, 3)), rng.normal(size=(N, N))


@pytest.mark.parametrize("seed", SEEDS)
def test_causal_passes_what_is_causal(seed):
    for right in (masked, cumsum, chunkwise, softmax, strict, additive_mask, by_subtraction):
        check_causal(right, seed=seed)
    for right in (naive_exponential, weights, recurrence):
        check_causal(right, seed=seed)
    check_causal(masked, inputs=in_float32, seed=seed)
    check_causal(with_position_bias, inputs=biased_inputs, seed=seed)


def test_causal_finds_time_whatever_axis_it_is():
    def tokens(rng, N):
        return (rng.integers(0, 50, size=(2, N)),)

    check_causal(lambda x: np.cumsum(x, axis=-1).astype(float), inputs=tokens)
    message = refusal(check_causal, lambda x: np.flip(np.cumsum(x, -1), -1) * 1.0, inputs=tokens)
    assert message.startswith("Position 0 looks ahead: with x (2, 7)")
    with pytest.raises(ValueError, match="^inputs must return arrays that get longer"):
        check_causal(np.sin, inputs=lambda rng, N: rng.normal(size=5))


def normalized(x, **axes):
    return x / np.sqrt((x**2).sum(keepdims=True, **axes))


def global_normalizer(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)))
    return a @ v / a.sum(axis=(-1, -2), keepdims=True)


def maximum_of_keys_over_time(q, k, v):
    """The stabilizer of Performers: over all keys, so that the future scales the past."""
    e = np.exp(k - k.max(axis=(-1, -2), keepdims=True)) + 1e-4
    a = np.tril(phi(q) @ swap(e))
    return a @ v / a.sum(-1, keepdims=True)


def maximum_of_keys_that_cancels(q, k, v):
    e = np.exp(k - k.max(axis=-2, keepdims=True))
    return np.cumsum(e[..., :1] * v, axis=-2) / np.cumsum(e[..., :1], axis=-2)


def largest_score_of_the_row(q, k, v):
    s = q @ swap(k)
    e = np.exp(s - s.max(-1, keepdims=True)) * mask(s)
    return e / e.sum(-1, keepdims=True) @ v


def beyond_a_hundred(q, k, v):
    out = masked(q, k, v)
    if v.shape[-2] > 101:
        out[..., 1, :] += v[..., 101, :]
    return out


def inside_chunks(q, k, v):
    """The state of the whole chunk instead of the masked product: right for chunks of one."""
    starts = range(0, v.shape[-2], 4)
    reads = [everything(*(x[..., : i + 4, :] for x in (q, k, v)))[..., i:, :] for i in starts]
    return np.concatenate(reads, axis=-2)


CAUSAL_WRONG = [
    # The whole sequence
    ("Position 0 looks ahead.*come in through k or v,.*whole time axis", full_softmax),
    ("Position 0 looks ahead.*K\\^T V", everything),
    ("sum, mean, maximum or norm", lambda *qkv: normalized(masked(*qkv), axis=-2)),
    ("through v, .*whole time axis", lambda q, k, v: masked(q, k, v - v.mean(-2, keepdims=True))),
    (
        "Position 0 looks ahead.*through v",
        lambda q, k, v: masked(q, k, v) + 1e-6 * v.sum(-2)[..., None, :],
    ),
    ("Position 1 looks ahead.*through k.*maximum", maximum_of_keys_over_time),
    # Its size alone
    (
        "through k,.*only its size changes.*Mask first, then normalize",
        lambda q, k, v: np.tril(full_softmax(q, k, np.eye(k.shape[-2]))) @ v,
    ),
    ("only its size changes", global_normalizer),
    ("only its size changes, not its direction", lambda *qkv: normalized(masked(*qkv))),
    # Some positions
    (
        "Position 0.*next position and nothing beyond.*diagonal",
        lambda q, k, v: weights(q, k, diagonal=1) @ v,
    ),
    ("through v.*sequence shifted the wrong way", lambda q, k, v: early(v)),
    ("Position 0 looks ahead.*next position and nothing beyond", lambda *qkv: early(masked(*qkv))),
    (
        "Position 1 looks ahead.*through k,.*next position and nothing",
        lambda q, k, v: masked(q, early(k), v),
    ),
    ("Position [01] looks ahead.*through q", lambda q, k, v: masked(flip(q), k, v)),
    ("Position 0 looks ahead", lambda *qkv: flip(masked(*qkv))),
    ("Position 0 looks ahead.*it sees: 1, 2, 3", inside_chunks),
    (
        "Position 2 looks ahead.*through v.*it sees: 6",
        put(2, lambda out, v: out[..., 2, :] + v[..., -1, :]),
    ),
    (r"Position 1 looks ahead.*v \(131, 3\).*it sees: 101", beyond_a_hundred),
    # Large values alone, or leading dimensions alone
    ("1,000 times as large.*to nan.*maximum include later positions", maximum_of_keys_that_cancels),
    ("1,000 times as large.*mask applied after the exponential", largest_score_of_the_row),
    (
        "Position 0.*1,000 times.*to nan",
        lambda q, k, v: np.where(k.max(axis=(-1, -2), keepdims=True) > 20, np.nan, masked(q, k, v)),
    ),
    (
        r"Position 0 looks ahead: with q \(2, 4, 9, 5\)",
        lambda q, k, v: np.cumsum(v, axis=-2) if v.ndim == 2 else flip(v),
    ),
    # What cannot be judged
    ("not finite at index .0, 0.", lambda *qkv: masked(*qkv) * np.nan),
    ("no axis of which has length N = 7", lambda *qkv: masked(*qkv)[..., -1, :]),
    ("returned None", no_return),
    ("changed k in place", changes_k),
    ("one array, it is of type list", lambda q, k, v: [v, np.zeros(3)]),
    ("keeps something between calls", lambda q, k, v, kept=[]: v + len(kept.append(0) or kept)),
]


@pytest.mark.parametrize("words, wrong", CAUSAL_WRONG)
def test_causal_refuses(words, wrong):
    assert_refused(words, check_causal, wrong)


def test_causal_looks_through_a_bias_between_positions():
    def wrong(k, v, bias):
        return with_position_bias(k, v, np.tril(bias) + bias.mean(0))

    assert "looks ahead" in refusal(check_causal, wrong, inputs=biased_inputs)


# --- check_streaming ---------------------------------------------------------------------------


def streamed(step):
    """(q, k, v, state) -> (out, state) as the check calls it."""

    def fn(*inputs, initial_state=None, return_state=False):
        return step(*inputs, initial_state)

    return fn


def sums(q, k, v, state=None):
    """Linear attention without a normalizer."""
    S = np.cumsum(phi(k)[..., :, None] * v[..., None, :], axis=-3)
    if state is None:
        state = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    S = S + state[..., None, :, :]
    return (phi(q)[..., None, :] @ S)[..., 0, :], S[..., -1, :, :] if v.shape[-2] else state


def kv_cache(q, k, v, cache):
    if cache is not None:
        k, v = (np.concatenate([a, b], -2) for a, b in zip(cache, (k, v), strict=True))
    late = k.shape[-2] - q.shape[-2]
    s = np.where(np.tril(np.ones((q.shape[-2], k.shape[-2]), bool), late), q @ swap(k), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    return e / e.sum(-1, keepdims=True) @ v, [k, v]


def token_shift(x, mix, state):
    last = 0 * mix if state is None else state["last"]
    before = np.concatenate([last[None], x], axis=0)
    return mix * x + (1 - mix) * before[:-1], {"last": before[-1]}


def mixed(rng, N):
    return rng.normal(size=(N, 4)), rng.uniform(size=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_streaming_passes_states_of_any_kind(seed):
    for right in (recurrence, chunks, sums, kv_cache, lambda q, k, v, state: (v, None)):
        check_streaming(streamed(right), seed=seed)
    check_streaming(streamed(recurrence), inputs=in_float32, seed=seed)
    check_streaming(streamed(token_shift), inputs=mixed, seed=seed)


def new_state(change, step=sums):
    """`step`, with another state than the right one; `change` takes it and what was given."""

    def wrong(q, k, v, state):
        out, new = step(q, k, v, state)
        return out, change(new, state)

    return wrong


def reads_twice(q, k, v, state):
    out, S = sums(q, k, v, state)
    return out if state is None else out + phi(q) @ state, S


def forgets_z(q, k, v, S):
    state = None if S is None else State(S, np.zeros((*k.shape[:-2], k.shape[-1])))
    out, state = recurrence(q, k, v, state)
    return out, state.S


def in_place(q, k, v, state):
    out, new = recurrence(q, k, v, state)
    if state is not None:
        state.S[...] = new.S
    return out, new


def before_last_write(q, k, v, state):
    shorter = (x[..., :-1, :] for x in (q, k, v))
    return recurrence(q, k, v, state)[0], recurrence(*shorter, state)[1]


def nothing_for_empty(q, k, v, state):
    outputs = []
    for t in range(v.shape[-2]):
        out, state = sums(*(x[..., t : t + 1, :] for x in (q, k, v)), state)
        outputs.append(out)
    return np.concatenate(outputs, -2), state


def appends(q, k, v, rows):
    rows = [] if rows is None else rows
    rows.append(v)
    before = sum(row.sum(-2, keepdims=True) for row in rows[:-1])
    return before + np.cumsum(v, -2), rows


class Total:
    value = np.zeros(1)

    def add(self, v):
        before, self.value = self.value, self.value + v.sum(-2)
        return np.cumsum(v, axis=-2) + before[..., None, :]


def changes_an_object(q, k, v, total):
    total = total or Total()
    return total.add(v), total


TOTAL = Total()


def keeps_it_elsewhere(q, k, v, state):
    TOTAL.value = np.zeros(1) if state is None else TOTAL.value
    return TOTAL.add(v), "nothing"


STREAMING_WRONG = [
    # The state is not used, or not what it should be
    (
        "Split at 3, position 3 is wrong.*is initial_state used",
        lambda q, k, v, state: recurrence(q, k, v),
    ),
    ("all zeros", new_state(lambda new, state: State(0 * new.S, 0 * new.z), recurrence)),
    ("counted twice", reads_twice),
    (
        "counted twice",
        lambda q, k, v, state: recurrence(q, k, v, state and State(2 * state.S, 2 * state.z)),
    ),
    ("counted twice", new_state(lambda new, state: new if state is None else new + state)),
    ("multiple of the right one.*normalizer z", forgets_z),
    ("returned after the last write", before_last_write),
    (
        "Split at 2, 3, 4, position 3 is wrong.*lacks something",  # what this piece alone wrote
        lambda q, k, v, state: (recurrence(q, k, v, state)[0], recurrence(q, k, v)[1]),
    ),
    (
        "Split at 4, position 4 is wrong",
        new_state(lambda S, state: S[:, ::-1] if S.ndim > 2 else S),
    ),
    (
        "position 3 is wrong",  # right while every split is at a multiple of 64
        lambda q, k, v, state: new_state(lambda S, _: S if k.shape[-2] % 64 == 0 else 0.9 * S)(
            q, k, v, state
        ),
    ),
    ("in the first piece.*check_causal", lambda q, k, v, state: (everything(q, k, v), None)),
    # Empty pieces
    ("An empty piece has an empty output", nothing_for_empty),
    (
        "Split at 0|Split at 3, 3, position 3 is wrong",
        lambda q, k, v, state: sums(q, k, v, state if v.shape[-2] else None),
    ),
    # States that change
    ("changed in place the state.*S = S", in_place),
    ("changed in place the state", appends),
    ("Two calls with the same state", changes_an_object),
    ("Two calls with the same state", keeps_it_elsewhere),
    # What is returned
    (r"the pair \(out, state\), it returned ndarray", lambda q, k, v, state: masked(q, k, v)),
    ("one array, it is of type tuple", lambda q, k, v, state: ((v.sum(-2), v.sum()), v)),
]


@pytest.mark.parametrize("words, wrong", STREAMING_WRONG)
def test_streaming_refuses(words, wrong):
    assert_refused(words, check_streaming, streamed(wrong))


def test_streaming_asks_for_its_keywords():
    assert_refused("raised TypeError.*unexpected keyword argument", check_streaming, masked)


def test_streaming_finds_a_missing_last_input():
    def no_last(x, mix, state):
        out, _ = token_shift(x, mix, None)
        out[0] += 0 if state is None else state
        return out, mix  # not nothing, but not the last input either

    assert "Only the first position after the split" in refusal(
        check_streaming, streamed(no_last), inputs=mixed
    )


# --- check_linear_cost -------------------------------------------------------------------------


def small_rows(q, k, v):
    """Quadratic in time, but one row of weights at a time."""
    return np.stack([softmax(q[t : t + 1], k[: t + 1], v[: t + 1])[0] for t in range(len(q))])


def scan_with_levels(q, k, v):
    """A prefix scan that keeps all of its log2(N) levels."""
    levels, shift = [v], 1
    while shift < v.shape[-2]:
        x = levels[-1].copy()
        x[shift:] += levels[-1][:-shift]
        levels.append(x)
        shift *= 2
    return levels[-1]


def with_a_table(fn):
    """2,000,000 numbers more, whatever N is."""

    def fn_with_a_table(q, k, v):
        table = np.zeros(2_000_000)
        return fn(q, k, v) + table[0]

    return fn_with_a_table


@pytest.mark.parametrize(
    "right",
    [cumsum, recurrent, chunkwise, everything, scan_with_levels, with_a_table(cumsum), small_rows]
    + [lambda q, k, v: v, lambda q, k, v: v.sum()],
)
def test_linear_cost_passes(right):
    check_linear_cost(right)


def list_of_rows(q, k, v):
    rows = [k @ q[t] for t in range(len(q))]
    return np.stack([row @ v for row in rows])


def growing_cache(q, k, v):
    caches = [k[: t + 1].copy() for t in range(len(k))]
    return np.stack([cache.sum(0) for cache in caches])


def position_mask_of_integers(q, k, v):
    t = np.arange(len(q))
    return (t[:, None] - t[None, :]).clip(0, 1) @ v


def half_of_the_pairs(q, k, v):
    i, j = np.tril_indices(len(q))
    out = np.zeros_like(v)
    np.add.at(out, i, v[j])
    return out


@pytest.mark.parametrize(
    "wrong",
    [masked, softmax, with_a_table(masked), list_of_rows, growing_cache, position_mask_of_integers]
    + [
        half_of_the_pairs,
        lambda q, k, v: cumsum(q, k, v) + 0 * np.ones((len(q), len(q)), bool)[0, 0],
        lambda q, k, v: np.einsum("ij,jm->im", np.einsum("id,jd->ij", q, k), v),
        lambda q, k, v: ((q[:, None, :] - k[None, :, :]) ** 2).sum(-1) @ v,
    ],
)
def test_linear_cost_refuses(wrong):
    message = refusal(check_linear_cost, wrong)
    assert re.search(r"grows with N².*bytes at N = 2,004\. .* added \d\.\d times", message), message


def test_linear_cost_states_the_peak():
    message = refusal(check_linear_cost, lambda q, k, v: (q @ k.T)[:, :3] + v)
    peak = int(re.search(r"([\d,]+) bytes at N = 2,004", message)[1].replace(",", ""))
    assert 8 * 2004**2 <= peak < 8 * 2004**2 + 500_000
    assert "returned None" in refusal(check_linear_cost, no_return)


# --- check_gradients ---------------------------------------------------------------------------


def attention_with_gradients(q, k, v, change=lambda gradients: gradients):
    """Masked form; ``change`` may spoil the dictionary of what the pullback has computed."""
    fq, fk = np.exp(q), np.exp(k)
    a = np.tril(fq @ swap(fk))
    z = a.sum(-1, keepdims=True)
    out = a @ v / z

    def pullback(grad_out):
        through_sum = np.tril(grad_out / z @ swap(v))
        through_normalizer = np.tril(-(grad_out * out).sum(-1, keepdims=True) / z * np.ones_like(a))
        grad_a = through_sum + through_normalizer
        gradients = {
            "q": fq * (grad_a @ fk),
            "k": fk * (swap(grad_a) @ fq),
            "v": swap(a / z) @ grad_out,
            "q without normalizer": fq * (through_sum @ fk),
            "k without normalizer": fk * (swap(through_sum) @ fq),
            "out": grad_out,
        }
        return tuple((gradients | change(gradients))[x] for x in "qkv")

    return out, pullback


def squared(x, n):
    return x**2, lambda grad_out: (2 * x * grad_out, None)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_passes(seed):
    def in_single(rng, N):
        return rng.normal(size=(N, 2)).astype(np.float32), 3

    check_gradients(lambda q, k, v: attention_with_gradients(q, k, v), seed=seed)
    check_gradients(squared, inputs=lambda rng, N: (rng.normal(size=N), 3), seed=seed)
    check_gradients(squared, inputs=in_single, seed=seed)


SPOILED = [
    (
        "gradient of k is wrong.*gradient of q and of v agrees.*normalizer, k has a second path",
        lambda g: {"k": g["k without normalizer"]},
    ),
    ("gradient of q is wrong", lambda g: {"q": g["q without normalizer"]}),
    ("gradient of v is wrong.*zero everywhere", lambda g: {"v": 0 * g["v"]}),
    ("gradient of v is None", lambda g: {"v": None}),
    ("gradient of v is wrong", lambda g: {"v": g["out"]}),
    ("gradient of q is wrong.*-1 times the right one", lambda g: {"q": -g["q"]}),
    ("gradient of k is wrong.*2 times the right one", lambda g: {"k": 2 * g["k"]}),
    ("Only position 0 is right", lambda g: {"v": np.cumsum(g["v"], -2)}),
    ("gradient of k is wrong", lambda g: {"k": flip(g["k"])}),
    (r"has shape \(5,\), k itself \(6, 5\)", lambda g: {"k": g["k"].sum(0)}),
    ("Not a number", lambda g: {"q": g["q"] * np.nan}),
    (
        "gradient of q is wrong.*Wrong as well: k. The gradient of v agrees",
        lambda g: {"q": g["k"], "k": g["q"]},
    ),
    (
        r"v \(131, 3\) the gradient of k is wrong: along a random direction.*one chunk to the next",
        lambda g: {"k": g["k"] + (len(g["k"]) > 64) * 0.1},
    ),
    (
        r"q \(2, 4, 3, 5\).* the gradient of q is wrong",
        lambda g: {"q": g["q"] if g["q"].ndim < 3 else flip(g["q"])},
    ),
]


@pytest.mark.parametrize("words, change", SPOILED)
def test_gradients_refuses(words, change):
    assert_refused(
        words, check_gradients, lambda q, k, v: attention_with_gradients(q, k, v, change)
    )


def changes_grad_out(q, k, v):
    def pullback(grad_out):
        grad_out *= 2
        return 0 * q, 0 * k, grad_out

    return v, pullback


@pytest.mark.parametrize(
    "words, wrong",
    [
        (r"the pair \(out, pullback\)", masked),
        ("a tuple of 3 gradients", lambda q, k, v: (v, lambda grad_out: (grad_out,))),
        ("changed grad_out in place", changes_grad_out),
        (
            r"With grad_out \(6, 3\) your function raised ValueError",
            lambda q, k, v: (v, lambda grad_out: q @ k),
        ),
        (
            "Only the last position is right.*runs backward",
            lambda q, k, v: (np.cumsum(v, -2), lambda grad_out: (0 * q, 0 * k, grad_out)),
        ),
        ("let inputs return tensors", lambda q, k, v: torch.from_numpy(v) * 2),
    ],
)
def test_gradients_refuses_a_wrong_pullback(words, wrong):
    assert re.search(words, refusal(check_gradients, wrong))


# --- Tensors -----------------------------------------------------------------------------------


def tensors(rng, N):
    return tuple(torch.from_numpy(x) for x in random_qkv(rng, N, leading=(2,)))


def torch_sums(q, k, v, *, initial_state=None, return_state=False):
    S = torch.cumsum(k[..., :, None] * v[..., None, :], dim=-3)
    S = S if initial_state is None else S + initial_state[..., None, :, :]
    out = torch.einsum("...nc,...ncm->...nm", q, S)
    if not return_state:
        return out
    return out, S[..., -1, :, :] if k.shape[-2] else initial_state


def torch_masked(q, k, v):
    return (q @ k.mT).tril() @ v


def test_every_check_takes_tensors():
    check_same(torch_sums, torch_masked, inputs=tensors)
    for check in (check_causal, check_streaming, check_linear_cost, check_gradients):
        check(torch_sums, inputs=tensors)
    check_causal(torch_masked, inputs=lambda rng, N: tuple(x.bfloat16() for x in tensors(rng, N)))


@pytest.mark.parametrize(
    "words, check, functions",
    [
        (
            "dtype float32, float64 is expected",
            check_same,
            (lambda *qkv: torch_masked(*qkv).float(), torch_masked),
        ),
        (
            "changed k in place",
            check_same,
            (lambda q, k, v: torch_masked(q, k.add_(0.1), v), torch_masked),
        ),
        ("Position 0 looks ahead", check_causal, (lambda q, k, v: q @ k.mT @ v,)),
        (
            "is initial_state used",
            check_streaming,
            (lambda *qkv, initial_state, return_state: torch_sums(*qkv, return_state=True),),
        ),
        ("grows with N²", check_linear_cost, (torch_masked,)),
        (
            "gradient of k is wrong",
            check_gradients,
            (lambda q, k, v: torch_masked(q, k.detach(), v),),
        ),
        (
            "does not require a gradient",
            check_gradients,
            (lambda *qkv: torch_masked(*qkv).detach(),),
        ),
    ],
)
def test_every_check_refuses_wrong_tensors(words, check, functions):
    assert words in refusal(check, *functions, inputs=tensors)


# --- Inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 131])
@pytest.mark.parametrize("axis", [-1, 0])
def test_any_axis_of_the_right_length_is_not_time(size, axis):
    """The number of channels or sequences may be one of the lengths that the checks try."""

    def sums(x, *, initial_state=None, return_state=False):
        out = np.cumsum(x, axis)
        if initial_state is not None:
            out = out + np.expand_dims(initial_state, axis)
        state = initial_state if out.shape[axis] == 0 else out.take(-1, axis)
        return (out, state) if return_state else out

    def inputs(rng, N):
        return rng.normal(size=(2, size, N) if axis else (N, size, 2))

    check_causal(sums, inputs=inputs)
    check_streaming(sums, inputs=inputs)


def test_inputs_that_are_none():
    with pytest.raises(TypeError, match="inputs must be a function .*got tuple"):
        check_causal(softmax, inputs=(1, 2, 3))
    with pytest.raises(TypeError, match="inputs must return .*got NoneType"):
        check_causal(softmax, inputs=lambda rng, N: None)
    with pytest.raises(ValueError, match="at least one array of floating point"):
        check_gradients(
            lambda i: (i * 1.0, lambda g: (None,)), inputs=lambda rng, N: rng.integers(0, 9, N)
        )
    check_causal(softmax, inputs=lambda rng, N: (x for x in random_qkv(rng, N)))
