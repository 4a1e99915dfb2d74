"""The checks pass right answers in several forms and refuse known wrong ones, with the reason.

The answers are written out here, small and on purpose naive, so that these tests need nothing else
of the package.
"""

import functools
import re
import warnings
from typing import NamedTuple

import numpy as np
import pytest

from lesson_code.checks import (
    check_causal,
    check_gradients,
    check_linear_cost,
    check_same,
    check_streaming,
    random_qkv,
)

SEEDS = (0, 1, 2)


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


# Causal linear attention in four forms


def masked(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)))
    return a @ v / a.sum(-1, keepdims=True)


def cumsum(q, k, v):
    fq, fk = phi(q), phi(k)
    S = np.cumsum(fk[..., :, None] * v[..., None, :], axis=-3)
    z = np.cumsum(fk, axis=-2)
    return (fq[..., None, :] @ S)[..., 0, :] / (fq * z).sum(-1, keepdims=True)


class State(NamedTuple):
    S: np.ndarray
    z: np.ndarray


def recurrent(q, k, v, *, initial_state=None, return_state=False):
    fq, fk = phi(q), phi(k)
    S = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]), k.dtype)
    z = np.zeros((*k.shape[:-2], k.shape[-1]), k.dtype)
    if initial_state is not None:
        S, z = initial_state
    out = np.empty_like(v)
    for t in range(v.shape[-2]):
        S = S + fk[..., t, :, None] * v[..., t, None, :]
        z = z + fk[..., t, :]
        out[..., t, :] = (swap(S) @ fq[..., t, :, None])[..., 0] / (fq[..., t, :] * z).sum(
            -1, keepdims=True
        )
    return (out, State(S, z)) if return_state else out


def chunkwise(q, k, v, *, initial_state=None, return_state=False, L=16):
    fq, fk = phi(q), phi(k)
    ones = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)  # the normalizer as a value
    S = np.zeros((*k.shape[:-2], k.shape[-1], ones.shape[-1]), k.dtype)
    S = S if initial_state is None else initial_state
    out = [ones[..., :0, :]]
    for start in range(0, v.shape[-2], L):
        a, b, c = (x[..., start : start + L, :] for x in (fq, fk, ones))
        out.append(np.tril(a @ swap(b)) @ c + a @ S)
        S = S + swap(b) @ c
    out = np.concatenate(out, axis=-2)
    out = out[..., :-1] / out[..., -1:]
    return (out, S) if return_state else out


def in_float32(rng, N):
    return tuple(x.astype(np.float32) for x in random_qkv(rng, N, leading=(2,)))


def refusal(check, *args, **keywords):
    """The sentence with which a check refuses."""
    with warnings.catch_warnings(), pytest.raises(AssertionError) as caught:
        warnings.simplefilter("ignore")
        check(*args, **keywords)
    message = str(caught.value)
    assert message.endswith((".", "?")) and "  " not in message and "\n" not in message
    return message


def named(*cases):
    """Parametrize over (function, words that the message must have)."""
    return [pytest.param(*case, id=case[0].__name__.strip("_")) for case in cases]


# check_same


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


def test_same_takes_plain_numbers():
    def mean(x):
        return float(x.mean())

    def draw(rng, N):
        return rng.normal(size=N)

    check_same(mean, np.mean, inputs=draw)
    assert "2 times the reference" in refusal(check_same, lambda x: 2 * mean(x), mean, inputs=draw)


@pytest.mark.parametrize("kind", [float, np.float64, np.asarray])
def test_numbers_are_named_with_five_digits(kind):
    def draw(rng, N):
        return kind(rng.normal()), kind(1 / 3)

    check_same(lambda a, b: a + b, lambda a, b: b + a, inputs=draw)
    message = refusal(check_same, lambda a, b: a * b, lambda a, b: a + b, inputs=draw)
    assert "With a 0.12573, b 0.33333 your output is wrong" in message


def test_outputs_by_name():
    def both(q, k, v):
        return {"scores": q @ swap(k), "values": v}

    check_same(both, both)
    message = refusal(check_same, lambda q, k, v: {**both(q, k, v), "values": -v}, both)
    assert "your output[values] is wrong" in message
    assert "Your output is -1 times the reference everywhere" in message


def test_arguments_are_called_what_the_function_calls_them():
    def wrong(queries, keys, values):
        return global_state(queries, keys, values)

    message = refusal(check_same, wrong, masked, inputs=random_qkv)
    assert message.startswith(
        "With queries (7, 5), keys (7, 5), values (7, 3) your output is wrong"
    )
    message = refusal(check_same, lambda *qkv: global_state(*qkv), masked, inputs=random_qkv)
    assert message.startswith("With input 0 (7, 5), input 1 (7, 5), input 2 (7, 3) your output")


def test_same_compares_states_and_names_them():
    def with_state(q, k, v):
        return recurrent(q, k, v, return_state=True)

    def forgets_z(q, k, v):
        out, (S, z) = with_state(q, k, v)
        return out, State(S, 0 * z)

    check_same(with_state, with_state)
    message = refusal(check_same, forgets_z, with_state)
    assert "output[1][z]" in message and "zero everywhere" in message
    assert "one array where a tuple of 2" in refusal(check_same, recurrent, with_state)


def strict_mask(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)), -1)
    return a @ v / np.maximum(a.sum(-1, keepdims=True), 1e-300)


def strict_softmax(q, k, v):
    return weights(q, k, diagonal=-1) @ v


def mask_after_normalizing(q, k, v):
    s = phi(q) @ swap(phi(k))
    return np.tril(s / s.sum(-1, keepdims=True)) @ v


def no_normalizer(q, k, v):
    return np.tril(phi(q) @ swap(phi(k))) @ v


def normalizer_over_heads(q, k, v):
    S = np.cumsum(phi(k)[..., :, None] * v[..., None, :], axis=-3)
    z = np.cumsum(phi(k), axis=0)  # time for one sequence, heads for several
    return (phi(q)[..., None, :] @ S)[..., 0, :] / (phi(q) * z).sum(-1, keepdims=True)


def normalizer_over_features(q, k, v):
    S = np.cumsum(phi(k)[..., :, None] * v[..., None, :], axis=-3)
    z = phi(k).cumsum(-1)
    return (phi(q)[..., None, :] @ S)[..., 0, :] / (phi(q) * z).sum(-1, keepdims=True)


def global_state(q, k, v):
    return phi(q) @ (swap(phi(k)) @ v) / (phi(q) @ phi(k).sum(-2)[..., None])


def no_scale(q, k, v):
    return softmax(q * np.sqrt(q.shape[-1]), k, v)


def scaled_twice(q, k, v):
    return softmax(q / np.sqrt(q.shape[-1]), k, v)


def q_and_k_exchanged(q, k, v):
    return softmax(k, q, v)


def softmax_over_queries(q, k, v):
    s = np.where(mask(q @ swap(k)), q @ swap(k) / np.sqrt(q.shape[-1]), -np.inf)
    e = np.exp(s - s.max(-2, keepdims=True))
    return e / e.sum(-2, keepdims=True)


def read_before_write(q, k, v):
    S = np.cumsum(phi(k)[..., :, None] * v[..., None, :], axis=-3)
    S = np.concatenate([0 * S[..., :1, :, :], S[..., :-1, :, :]], axis=-3)
    return (phi(q)[..., None, :] @ S)[..., 0, :]


def first_bucket_zero(q, k, v):
    out = masked(q, k, v).copy()
    out[..., :4, :] = 0
    return out


def chunks_without_state(q, k, v):
    out = [masked(*(x[..., i : i + 4, :] for x in (q, k, v))) for i in range(0, q.shape[-2], 4)]
    return np.concatenate(out, axis=-2)


def chunk_of_64(q, k, v):
    return np.concatenate(
        [masked(*(x[..., i : i + 64, :] for x in (q, k, v))) for i in range(0, q.shape[-2], 64)],
        axis=-2,
    )


def no_memory(q, k, v):
    return v


def epsilon(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)))
    return a @ v / (a.sum(-1, keepdims=True) + 1e-4)


def one_late(q, k, v):
    out = masked(q, k, v)
    return np.concatenate([0 * out[..., :1, :], out[..., :-1, :]], axis=-2)


def one_early(q, k, v):
    out = masked(q, k, v)
    return np.concatenate([out[..., 1:, :], 0 * out[..., :1, :]], axis=-2)


def reversed_time(q, k, v):
    return masked(q, k, v)[..., ::-1, :]


def transposed(q, k, v):
    return swap(masked(q, k, v))


def squeezed(q, k, v):
    return np.squeeze(masked(q, k, v))


def last_position(q, k, v):
    return masked(q, k, v)[..., -1, :]


def only_weights(q, k, v):
    return weights(q, k)


def in_single(q, k, v):
    return masked(q, k, v).astype(np.float32)


def in_integers(q, k, v):
    return masked(q, k, v).astype(int)


def axis_zero(q, k, v):
    return np.cumsum(v, axis=0)


def running_sum(q, k, v):
    return np.cumsum(v, axis=-2)


def dot_t(q, k, v):
    return q @ k.T @ v


def product(q, k, v):
    return q @ swap(k) @ v


def rows_of_a_list(q, k, v):
    return list(masked(q, k, v))


def no_return(q, k, v):
    masked(q, k, v)


def not_written(q, k, v):
    raise NotImplementedError("fill me in")


def changes_k(q, k, v):
    k *= 1.0 + 1e-3
    return masked(q, k / (1.0 + 1e-3), v)


def all_nan(q, k, v):
    return masked(q, k, v) * np.nan


def zeros(q, k, v):
    return 0 * v


def half(q, k, v):
    return masked(q, k, v) / 2


def negative(q, k, v):
    return -masked(q, k, v)


SAME_WRONG = named(
    (strict_mask, masked, "Position 0 is zero.*diagonal"),
    (strict_softmax, softmax, "Only position 0 is not finite.*diagonal"),
    (mask_after_normalizing, masked, "multiple of the right one.*mask applied after normalizing"),
    (no_normalizer, masked, "multiple of the right one.*normalizer is missing"),
    (normalizer_over_heads, masked, r"\(2, 4, 9, 3\).*reach into the heads"),
    (normalizer_over_features, masked, "normalizer is missing, or sums over the wrong axis"),
    (global_state, masked, "Only the last position agrees.*K\\^T V, see the future"),
    (no_scale, softmax, "the scale 1/√D is missing"),
    (scaled_twice, softmax, "once too often"),
    (q_and_k_exchanged, softmax, "q and k were exchanged"),
    (softmax_over_queries, weights, "columns sum to one"),
    (read_before_write, no_normalizer, "Position 0 is zero.*read after the write"),
    (first_bucket_zero, masked, "Positions 0 to 3 are zero"),
    (chunks_without_state, masked, "Positions 0 to 3 are right, position 4 is the first"),
    (chunk_of_64, masked, r"position 64\).*came out right: is a length or a chunk size fixed"),
    (no_memory, masked, "Position 0 agrees and no later one"),
    (epsilon, masked, "multiple of|small"),
    (one_late, masked, "one position late"),
    (one_early, masked, "one position early"),
    (reversed_time, masked, "reversed order of time"),
    (transposed, masked, r"shape \(3, 7\), \(7, 3\) is expected.*is the transpose"),
    (squeezed, masked, r"shape \(3,\), \(1, 3\) is expected.*length 1 squeezed"),
    (last_position, masked, "only the last position"),
    (only_weights, softmax, "multiply it by v"),
    (in_single, masked, "dtype float32, float64 is expected"),
    (in_integers, masked, "dtype int64, float64 is expected"),
    (axis_zero, running_sum, "reach into the heads"),
    (dot_t, product, "raised ValueError.*np.swapaxes"),
    (rows_of_a_list, masked, "a list of 7 where one array is expected"),
    (no_return, masked, "returned None: is its return missing"),
    (not_written, masked, "raised NotImplementedError: fill me in"),
    (changes_k, masked, "changed k in place"),
    (all_nan, masked, "Not a number"),
    (zeros, masked, "zero everywhere"),
    (half, masked, "0.5 times the reference everywhere"),
    (negative, masked, "-1 times the reference everywhere: is a sign exchanged"),
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong, reference, words", SAME_WRONG)
def test_same_refuses(wrong, reference, words, seed):
    message = refusal(check_same, wrong, reference, seed=seed)
    assert re.search(words, message), message


def test_same_says_where_with_five_digits():
    def wrong(q, k, v):
        out = np.array(masked(q, k, v))
        out[..., 3, 1] += 1
        return out

    q, k, v = random_qkv(np.random.default_rng(0), 7)
    right = masked(q, k, v)[3, 1]
    message = refusal(check_same, wrong, masked)
    assert f"index (3, 1) (position 3): expected {right:.5g}, got {right + 1:.5g}" in message


# check_causal


def additive_mask(q, k, v):
    s = q @ swap(k) / np.sqrt(q.shape[-1]) - 1e9 * ~mask(q @ swap(k))
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def by_subtraction(q, k, v):
    """A running sum as the total less what is still to come: right, with its own rounding."""
    later = np.flip(np.cumsum(np.flip(v, -2), axis=-2), -2) - v
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
    for right in (masked, cumsum, recurrent, chunkwise, softmax, strict_mask, one_late, no_memory):
        check_causal(right, seed=seed)
    for right in (additive_mask, by_subtraction, naive_exponential, weights, no_normalizer):
        check_causal(right, seed=seed)
    check_causal(masked, inputs=in_float32, seed=seed)
    check_causal(functools.partial(recurrent, return_state=True), seed=seed)
    check_causal(with_position_bias, inputs=biased_inputs, seed=seed)


def test_causal_finds_time_whatever_axis_it_is():
    def tokens(rng, N):
        return (rng.integers(0, 50, size=(2, N)),)

    check_causal(lambda x: np.cumsum(x, axis=-1).astype(float), inputs=tokens)
    message = refusal(check_causal, lambda x: np.flip(np.cumsum(x, -1), -1) * 1.0, inputs=tokens)
    assert message.startswith("Position 0 looks ahead: with x (2, 7)")
    with pytest.raises(ValueError, match="^inputs must return arrays that get longer"):
        check_causal(np.sin, inputs=lambda rng, N: rng.normal(size=5))


def no_mask(q, k, v):
    return full_softmax(q, k, v)


def diagonal_one_too_far(q, k, v):
    return weights(q, k, diagonal=1) @ v


def normalized_before_mask(q, k, v):
    return np.tril(full_softmax(q, k, np.eye(k.shape[-2]))) @ v


def global_normalizer(q, k, v):
    a = np.tril(phi(q) @ swap(phi(k)))
    return a @ v / a.sum(axis=(-1, -2), keepdims=True)


def norm_over_time(q, k, v):
    out = masked(q, k, v)
    return (out - out.mean(-2, keepdims=True)) / out.std(-2, keepdims=True)


def norm_of_batch_features_and_time(q, k, v):
    out = masked(q, k, v)
    return out / np.sqrt((out**2).mean())


def centered_values(q, k, v):
    return masked(q, k, v - v.mean(-2, keepdims=True))


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


def far_future(q, k, v):
    out = masked(q, k, v)
    out[..., 2, :] += v[..., -1, :]
    return out


def beyond_a_hundred(q, k, v):
    out = masked(q, k, v)
    if v.shape[-2] > 101:
        out[..., 1, :] += v[..., 101, :]
    return out


def inside_chunks(q, k, v):
    """The state of the whole chunk instead of the masked product: right for chunks of one."""
    out = np.empty_like(v)
    for i in range(0, v.shape[-2], 4):
        out[..., i : i + 4, :] = global_state(*(x[..., : i + 4, :] for x in (q, k, v)))[..., i:, :]
    return out


def next_value(q, k, v):
    return np.concatenate([v[..., 1:, :], v[..., :1, :] * 0], axis=-2)


def keys_ahead(q, k, v):
    ahead = np.concatenate([k[..., 1:, :], 0 * k[..., :1, :]], axis=-2)
    return masked(q, ahead, v)


def queries_ahead(q, k, v):
    return masked(np.flip(q, -2), k, v)


def tiny_leak(q, k, v):
    return masked(q, k, v) + 1e-6 * v.sum(-2, keepdims=True)


def not_finite(q, k, v):
    """A later key that is large makes every earlier output NaN."""
    out = masked(q, k, v)
    return np.where(k.max(axis=(-1, -2), keepdims=True) > 20, np.nan, out)


def heads_for_time(q, k, v):
    """A running sum from the front, which for several heads flips what it should not."""
    return np.cumsum(v, axis=-2) if v.ndim == 2 else np.flip(v, axis=-2)


CAUSAL_WRONG = named(
    (no_mask, "Position 0 looks ahead.*come in through k or v,.*whole time axis"),
    (global_state, "Position 0 looks ahead.*K\\^T V"),
    (diagonal_one_too_far, "Position 0.*next position and nothing beyond.*diagonal"),
    (normalized_before_mask, "through k,.*only its size changes.*Mask first, then normalize"),
    (global_normalizer, "only its size changes"),
    (norm_over_time, "sum, mean, maximum or norm over the whole time axis"),
    (norm_of_batch_features_and_time, "only its size changes, not its direction"),
    (centered_values, "through v, .*whole time axis"),
    (maximum_of_keys_over_time, "Position 1 looks ahead.*through k.*maximum"),
    (maximum_of_keys_that_cancels, "1,000 times as large.*to nan.*maximum include later positions"),
    (largest_score_of_the_row, "1,000 times as large.*mask applied after the exponential"),
    (far_future, "Position 2 looks ahead.*through v.*it sees: 6"),
    (beyond_a_hundred, "Position 1 looks ahead.*v \\(131, 3\\).*it sees: 101"),
    (inside_chunks, "Position 0 looks ahead.*it sees: 1, 2, 3"),
    (next_value, "through v.*sequence shifted the wrong way"),
    (one_early, "Position 0 looks ahead.*next position and nothing beyond"),
    (keys_ahead, "Position 1 looks ahead.*through k,.*next position and nothing beyond"),
    (queries_ahead, "Position [01] looks ahead.*through q"),
    (reversed_time, "Position 0 looks ahead"),
    (tiny_leak, "Position 0 looks ahead.*through v"),
    (not_finite, "Position 0.*1,000 times.*to nan"),
    (heads_for_time, r"Position 0 looks ahead: with q \(2, 4, 9, 5\)"),
    (all_nan, "not finite at index .0, 0."),
    (no_return, "returned None"),
    (changes_k, "changed k in place"),
    (last_position, "no axis of which has length N = 7"),
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong, words", CAUSAL_WRONG)
def test_causal_refuses(wrong, words, seed):
    message = refusal(check_causal, wrong, seed=seed)
    assert re.search(words, message), message


def test_causal_refuses_what_keeps_something_between_calls():
    kept = []

    def wrong(q, k, v):
        kept.append(v)
        return v + len(kept)

    assert "keeps something between calls" in refusal(check_causal, wrong)


def test_causal_looks_through_a_bias_between_positions():
    def wrong(k, v, bias):
        return with_position_bias(k, v, np.tril(bias) + bias.mean(0))

    assert "looks ahead" in refusal(check_causal, wrong, inputs=biased_inputs)


# check_streaming


def unnormalized(q, k, v, *, initial_state=None, return_state=False):
    fk = phi(k)
    S = np.cumsum(fk[..., :, None] * v[..., None, :], axis=-3)
    if initial_state is not None:
        S = S + initial_state[..., None, :, :]
    out = (phi(q)[..., None, :] @ S)[..., 0, :]
    zero = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    last = S[..., -1, :, :] if v.shape[-2] else (zero if initial_state is None else initial_state)
    return out, last


def kv_cache(q, k, v, *, initial_state=None, return_state=False):
    if initial_state is not None:
        k, v = (np.concatenate([a, b], -2) for a, b in zip(initial_state, (k, v), strict=True))
    late = k.shape[-2] - q.shape[-2]
    s = np.where(np.tril(np.ones((q.shape[-2], k.shape[-2]), bool), late), q @ swap(k), -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True, initial=-1e30))
    return e / e.sum(-1, keepdims=True) @ v, [k, v]


def token_shift(x, mix, *, initial_state=None, return_state=False):
    last = 0 * mix if initial_state is None else initial_state["last"]
    before = np.concatenate([last[None], x], axis=0)
    return mix * x + (1 - mix) * before[:-1], {"last": before[-1]}


def mixed(rng, N):
    return rng.normal(size=(N, 4)), rng.uniform(size=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_streaming_passes_states_of_any_kind(seed):
    for right in (recurrent, chunkwise, unnormalized, kv_cache):
        check_streaming(right, seed=seed)
    check_streaming(recurrent, inputs=in_float32, seed=seed)
    check_streaming(token_shift, inputs=mixed, seed=seed)
    check_streaming(lambda q, k, v, **_: (v, None), seed=seed)


def ignores_state(q, k, v, *, initial_state=None, return_state=False):
    return recurrent(q, k, v, return_state=True)


def returns_zeros(q, k, v, *, initial_state=None, return_state=False):
    out, state = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    return out, State(0 * state.S, 0 * state.z + 0)


def counts_twice(q, k, v, *, initial_state=None, return_state=False):
    out, S = unnormalized(q, k, v, initial_state=initial_state)
    if initial_state is not None:
        out = out + phi(q) @ initial_state
    return out, S


def counts_both_twice(q, k, v, *, initial_state=None, return_state=False):
    if initial_state is not None:
        initial_state = State(*(2 * x for x in initial_state))
    out, state = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    return out, state


def adds_again(q, k, v, *, initial_state=None, return_state=False):
    out, S = unnormalized(q, k, v, initial_state=initial_state)
    return out, S if initial_state is None else S + initial_state


def forgets_z(q, k, v, *, initial_state=None, return_state=False):
    if initial_state is not None:
        initial_state = State(initial_state, np.zeros((*k.shape[:-2], k.shape[-1])))
    out, state = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    return out, state.S


def in_place(q, k, v, *, initial_state=None, return_state=False):
    out, state = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    if initial_state is not None:
        initial_state.S[...] = state.S
    return out, state


def before_last_write(q, k, v, *, initial_state=None, return_state=False):
    out, _ = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    shorter = (x[..., :-1, :] for x in (q, k, v))
    return out, recurrent(*shorter, initial_state=initial_state, return_state=True)[1]


def only_last_piece(q, k, v, *, initial_state=None, return_state=False):
    """Uses the state, but returns what this piece alone wrote."""
    out, _ = recurrent(q, k, v, initial_state=initial_state, return_state=True)
    return out, recurrent(q, k, v, return_state=True)[1]


def transposed_heads(q, k, v, *, initial_state=None, return_state=False):
    out, S = unnormalized(q, k, v, initial_state=initial_state)
    return out, S[:, ::-1] if S.ndim > 2 else S


def looks_ahead(q, k, v, *, initial_state=None, return_state=False):
    return global_state(q, k, v), None


def chunks_of_the_whole(q, k, v, *, initial_state=None, return_state=False):
    """Right while every split is at a multiple of 64."""
    out, S = unnormalized(q, k, v, initial_state=initial_state)
    return out, S if k.shape[-2] % 64 == 0 else 0.9 * S


def nothing_for_empty(q, k, v, *, initial_state=None, return_state=False):
    out = [unnormalized(q[..., :0, :], k[..., :0, :], v[..., :0, :])[0]] * 0
    S = initial_state
    for t in range(v.shape[-2]):
        one = (x[..., t : t + 1, :] for x in (q, k, v))
        o, S = unnormalized(*one, initial_state=S)
        out.append(o)
    return np.concatenate(out, -2), S


def empty_clears(q, k, v, *, initial_state=None, return_state=False):
    state = initial_state if v.shape[-2] else None
    return unnormalized(q, k, v, initial_state=state)


def no_state(q, k, v, *, initial_state=None, return_state=False):
    return recurrent(q, k, v, initial_state=initial_state)


def no_keywords(q, k, v):
    return recurrent(q, k, v, return_state=True)


STREAMING_WRONG = named(
    (ignores_state, "Split at 3, position 3 is wrong.*is initial_state used"),
    (returns_zeros, "all zeros"),
    (counts_twice, "counted twice"),
    (counts_both_twice, "counted twice"),
    (adds_again, "counted twice"),
    (forgets_z, "multiple of the right one.*normalizer z"),
    (in_place, "changed in place the state.*S = S"),
    (before_last_write, "returned after the last write"),
    (only_last_piece, "Split at 2, 3, 4, position 3 is wrong.*lacks something"),
    (transposed_heads, "Split at 4, position 4 is wrong"),
    (looks_ahead, "in the first piece.*check_causal"),
    (chunks_of_the_whole, "position 3 is wrong"),
    (nothing_for_empty, "An empty piece has an empty output"),
    (empty_clears, "Split at 0|Split at 3, 3, position 3 is wrong"),
    (no_state, r"must return the pair \(out, state\), it returned ndarray"),
    (no_keywords, "raised TypeError.*unexpected keyword argument"),
    (no_return, "raised TypeError"),
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong, words", STREAMING_WRONG)
def test_streaming_refuses(wrong, words, seed):
    message = refusal(check_streaming, wrong, seed=seed)
    assert re.search(words, message), message


def test_streaming_finds_a_missing_last_input():
    def forgets_last(x, mix, *, initial_state=None, return_state=False):
        return token_shift(x, mix)[0] + (initial_state or 0), 1e-3

    def no_last(x, mix, *, initial_state=None, return_state=False):
        out, _ = token_shift(x, mix)
        out[0] += 0 if initial_state is None else initial_state
        return out, mix  # not nothing, but not the last input either

    assert "Only the first position after the split" in refusal(
        check_streaming, no_last, inputs=mixed
    )
    assert "Split at" in refusal(check_streaming, forgets_last, inputs=mixed)


def test_streaming_notices_a_cache_that_grows_in_place():
    def appends(q, k, v, *, initial_state=None, return_state=False):
        rows = [] if initial_state is None else initial_state
        rows.append(v)
        before = sum(row.sum(-2, keepdims=True) for row in rows[:-1])
        return before + np.cumsum(v, -2), rows

    assert "changed in place the state" in refusal(check_streaming, appends)


# check_linear_cost


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


def large_constant(q, k, v):
    table = np.zeros(2_000_000)
    return cumsum(q, k, v) + table[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_linear_cost_passes(seed):
    for right in (cumsum, recurrent, chunkwise, global_state, scan_with_levels, large_constant):
        check_linear_cost(right, seed=seed)
    check_linear_cost(no_memory, seed=seed)
    check_linear_cost(lambda q, k, v: v.sum(), seed=seed)


def test_linear_cost_is_about_memory_not_time():
    check_linear_cost(small_rows)


def boolean_matrix(q, k, v):
    mask(np.empty((len(q), len(q))))
    return cumsum(q, k, v)


def matrix_and_large_constant(q, k, v):
    table = np.zeros(2_000_000)
    return masked(q, k, v) + table[0]


def einsum_in_the_wrong_order(q, k, v):
    return np.einsum("ij,jm->im", np.einsum("id,jd->ij", q, k), v)


def list_of_rows(q, k, v):
    rows = [k @ q[t] for t in range(len(q))]
    return np.stack([row @ v for row in rows])


def growing_cache(q, k, v):
    caches = [k[: t + 1].copy() for t in range(len(k))]
    return np.stack([cache.sum(0) for cache in caches])


def position_mask_of_integers(q, k, v):
    t = np.arange(len(q))
    return (t[:, None] - t[None, :]).clip(0, 1) @ v


def distances(q, k, v):
    return ((q[:, None, :] - k[None, :, :]) ** 2).sum(-1) @ v


def half_of_the_pairs(q, k, v):
    i, j = np.tril_indices(len(q))
    out = np.zeros_like(v)
    np.add.at(out, i, v[j])
    return out


LINEAR_COST_WRONG = [
    boolean_matrix,
    matrix_and_large_constant,
    einsum_in_the_wrong_order,
    list_of_rows,
    growing_cache,
    position_mask_of_integers,
    distances,
    half_of_the_pairs,
    masked,
    full_softmax,
    softmax,
]


@pytest.mark.parametrize("wrong", LINEAR_COST_WRONG, ids=lambda wrong: wrong.__name__)
def test_linear_cost_refuses(wrong):
    message = refusal(check_linear_cost, wrong)
    assert re.search(r"grows with N².*bytes at N = 2,004\. .* added \d\.\d times", message), message


def test_linear_cost_states_the_peak():
    message = refusal(check_linear_cost, lambda q, k, v: (q @ k.T)[:, :3] + v)
    peak = int(re.search(r"([\d,]+) bytes at N = 2,004", message)[1].replace(",", ""))
    assert 8 * 2004**2 <= peak < 8 * 2004**2 + 500_000
    assert "returned None" in refusal(check_linear_cost, no_return)


# check_gradients


def linear_with_pullback(q, k, v):
    """Normalized causal linear attention with the identity map shifted to be positive."""
    return attention_with_gradients(q, k, v, lambda gradients: gradients)


def attention_with_gradients(q, k, v, change):
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
        }
        no_normalizer = {"q": fq * (through_sum @ fk), "k": fk * (swap(through_sum) @ fq)}
        return tuple(
            change(gradients | {"alone": no_normalizer, "grad_out": grad_out})[x] for x in "qkv"
        )

    return out, pullback


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_passes(seed):
    check_gradients(linear_with_pullback, seed=seed)

    def squared(x, n):
        return x**2, lambda grad_out: (2 * x * grad_out, None)

    check_gradients(squared, inputs=lambda rng, N: (rng.normal(size=N), 3), seed=seed)
    in_single = lambda rng, N: (rng.normal(size=(N, 2)).astype(np.float32), 3)  # noqa: E731
    check_gradients(squared, inputs=in_single, seed=seed)


def flip(x):
    return np.flip(x, -2)


SPOILED = {
    "k_without_normalizer": (
        lambda g: g | {"k": g["alone"]["k"]},
        "gradient of k is wrong.*gradient of q and of v agrees.*normalizer, k has a second path",
    ),
    "q_without_normalizer": (lambda g: g | {"q": g["alone"]["q"]}, "gradient of q is wrong"),
    "no_gradient_of_v": (
        lambda g: g | {"v": 0 * g["v"]},
        "gradient of v is wrong.*zero everywhere",
    ),
    "sign": (lambda g: g | {"q": -g["q"]}, "gradient of q is wrong.*-1 times the right one"),
    "scale": (lambda g: g | {"k": 2 * g["k"]}, "gradient of k is wrong.*2 times the right one"),
    "v_not_accumulated": (
        lambda g: g | {"v": g["grad_out"]},
        "gradient of v is wrong",
    ),
    "forward_scan": (lambda g: g | {"v": np.cumsum(g["v"], -2)}, "Only position 0 is right"),
    "reversed": (lambda g: g | {"k": flip(g["k"])}, "gradient of k is wrong"),
    "heads_summed": (lambda g: g | {"k": g["k"].sum(0)}, r"has shape \(5,\), k itself \(6, 5\)"),
    "nan": (lambda g: g | {"q": g["q"] * np.nan}, "Not a number"),
    "none": (lambda g: g | {"v": None}, "gradient of v is None"),
    "q_and_k_exchanged": (
        lambda g: g | {"q": g["k"], "k": g["q"]},
        "gradient of q is wrong.*Wrong as well: k. The gradient of v agrees",
    ),
    "long": (
        lambda g: g | {"k": g["k"] + (len(g["k"]) > 64) * 0.1},
        r"v \(131, 3\) the gradient of k is wrong: along a random direction.*one chunk to the next",
    ),
    "leading": (
        lambda g: g | {"q": g["q"] if g["q"].ndim < 3 else flip(g["q"])},
        r"q \(2, 4, 3, 5\).* the gradient of q is wrong",
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("change, words", SPOILED.values(), ids=SPOILED)
def test_gradients_refuses(change, words, seed):
    def wrong(q, k, v):
        return attention_with_gradients(q, k, v, change)

    message = refusal(check_gradients, wrong, seed=seed)
    assert re.search(words, message), message


def test_gradients_asks_for_a_pullback():
    assert "the pair (out, pullback)" in refusal(check_gradients, masked)
    too_few = refusal(check_gradients, lambda q, k, v: (v, lambda grad_out: (grad_out,)))
    assert "a tuple of 3 gradients" in too_few


def test_gradients_runs_the_pullback_with_care():
    def changes_grad_out(q, k, v):
        def pullback(grad_out):
            grad_out *= 2
            return 0 * q, 0 * k, grad_out

        return v, pullback

    assert "changed grad_out in place" in refusal(check_gradients, changes_grad_out)
    message = refusal(check_gradients, lambda q, k, v: (v, lambda grad_out: q @ k))
    assert "With grad_out (6, 3) your function raised ValueError" in message


def test_gradients_of_the_last_position_alone():
    def wrong(q, k, v):
        return np.cumsum(v, -2), lambda grad_out: (0 * q, 0 * k, grad_out)

    message = refusal(check_gradients, wrong)
    assert "Only the last position is right" in message and "runs backward" in message


# Tensors


def torch_inputs(rng, N):
    torch = pytest.importorskip("torch")
    return tuple(torch.from_numpy(x) for x in random_qkv(rng, N, leading=(2,)))


def torch_cumsum(q, k, v, *, initial_state=None, return_state=False):
    torch = pytest.importorskip("torch")
    S = torch.cumsum(k[..., :, None] * v[..., None, :], dim=-3)
    S = S if initial_state is None else S + initial_state[..., None, :, :]
    out = torch.einsum("...nc,...ncm->...nm", q, S)
    if not return_state:
        return out
    if k.shape[-2] == 0:
        return out, initial_state
    return out, S[..., -1, :, :]


def torch_masked(q, k, v):
    return (q @ k.mT).tril() @ v


def test_every_check_takes_tensors():
    check_same(torch_cumsum, torch_masked, inputs=torch_inputs)
    check_causal(torch_cumsum, inputs=torch_inputs)
    check_streaming(torch_cumsum, inputs=torch_inputs)
    check_linear_cost(torch_cumsum, inputs=torch_inputs)
    check_gradients(torch_cumsum, inputs=torch_inputs)

    def half_precision(rng, N):
        return tuple(x.bfloat16() for x in torch_inputs(rng, N))

    check_causal(torch_masked, inputs=half_precision)


def test_every_check_refuses_wrong_tensors():
    def no_gradient(q, k, v):
        return torch_masked(q, k.detach(), v)

    def cut_off(q, k, v):
        return torch_masked(q, k, v).detach()

    def no_mask(q, k, v):
        return q @ k.mT @ v

    def single(q, k, v):
        return torch_masked(q, k, v).float()

    def ignores(q, k, v, *, initial_state, return_state):
        return torch_cumsum(q, k, v, return_state=True)

    def adds_in_place(q, k, v):
        return torch_masked(q, k.add_(0.1), v)

    def refused(check, *functions):
        return refusal(check, *functions, inputs=torch_inputs)

    assert "dtype float32, float64 is expected" in refused(check_same, single, torch_masked)
    assert "changed k in place" in refused(check_same, adds_in_place, torch_masked)
    assert "Position 0 looks ahead" in refused(check_causal, no_mask)
    assert "is initial_state used" in refused(check_streaming, ignores)
    assert "grows with N²" in refused(check_linear_cost, torch_masked)
    assert "gradient of k is wrong" in refused(check_gradients, no_gradient)
    assert "does not require a gradient" in refused(check_gradients, cut_off)


# What an outside user met


def test_any_axis_of_the_right_length_is_not_time():
    """The number of channels or sequences may be one of the lengths that the checks try."""

    def sums(axis):
        def fn(x, *, initial_state=None, return_state=False):
            out = np.cumsum(x, axis)
            if initial_state is not None:
                out = out + np.expand_dims(initial_state, axis)
            state = initial_state if out.shape[axis] == 0 else out.take(-1, axis)
            return (out, state) if return_state else out

        return fn

    for size in (7, 131):
        for axis, inputs in (
            (-1, lambda rng, N, size=size: rng.normal(size=(2, size, N))),
            (0, lambda rng, N, size=size: rng.normal(size=(N, size, 2))),
        ):
            check_causal(sums(axis), inputs=inputs)
            check_streaming(sums(axis), inputs=inputs)


def test_a_state_of_any_kind_is_not_changed_in_place():
    class State:
        total = np.zeros(1)

    def changes_an_object(q, k, v, *, initial_state=None, return_state=False):
        state = initial_state or State()
        out = np.cumsum(v, axis=-2) + state.total[..., None, :]
        state.total = state.total + v.sum(-2)
        return out, state

    kept = {}

    def keeps_it_elsewhere(q, k, v, *, initial_state=None, return_state=False):
        if initial_state is None:
            kept["total"] = np.zeros(1)
        out = np.cumsum(v, axis=-2) + kept["total"][..., None, :]
        kept["total"] = kept["total"] + v.sum(-2)
        return out, "nothing"

    for wrong in (changes_an_object, keeps_it_elsewhere):
        assert "Two calls with the same state" in refusal(check_streaming, wrong)


def test_an_epsilon_is_not_taken_for_a_missing_normalizer():
    def with_epsilon(q, k, v):
        a = np.tril(phi(q) @ swap(phi(k)))
        return a @ v / (a.sum(-1, keepdims=True) + 1e-6)

    message = refusal(check_same, with_epsilon, masked)
    assert "is an epsilon added" in message and "normalizer" not in message
    expected, got = re.search("expected (.*), got (.*?)[.] ", message).groups()
    assert expected != got
    single = functools.partial(refusal, check_same)
    assert "lower precision" in single(lambda *x: masked(*map(np.float32, x)) + np.zeros(1), masked)
    assert "The difference is small" in single(lambda *x: masked(*x) * (1 + 1e-5), masked)

    def without_the_tail(q, k, v):
        out = masked(q, k, v)
        out[..., 64 * (v.shape[-2] // 64) :, :] *= v.shape[-2] < 64
        return out

    message = refusal(check_same, without_the_tail, masked)
    assert "Positions 0 to 127 are right" in message and "normalizer" not in message


def test_what_is_no_output():
    def pair(q, k, v, **_):
        return [v, np.zeros(3)]

    def exchanged(q, k, v, **_):
        return (v.sum(-2), v.sum()), v

    assert "one array, it is of type list" in refusal(check_causal, pair)
    assert "one array, it is of type tuple" in refusal(check_streaming, exchanged)
    message = refusal(check_same, lambda q, k, v: (q, k), lambda q, k, v: (q, (k, v)))
    assert "returns one array as output[1] where a tuple of 2 is expected." in message


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


def test_gradients_of_tensors_made_from_arrays():
    torch = pytest.importorskip("torch")

    def fn(q, k, v):
        return torch.from_numpy(v) * 2

    assert "let inputs return tensors" in refusal(check_gradients, fn)
