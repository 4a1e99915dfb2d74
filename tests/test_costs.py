"""The counts, against loops that count one by one, and against the numbers that the book quotes."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesson_code import costs

widths = st.integers(1, 300)
lengths = st.integers(0, 100_000)


def test_the_matrix_of_the_fifth_source():
    assert costs.attention_matrix_entries(512) == 262_144
    assert costs.attention_matrix_entries(4_000) == 16_000_000
    assert costs.attention_matrix_entries(100_000) == 10_000_000_000
    assert costs.attention_matrix_entries(10_000) == 100_000_000
    assert costs.attention_matrix_entries(0) == 0


def test_the_cache_of_a_long_text():
    assert round(costs.kv_cache_bytes(100_000, 4_096) / 1e9, 2) == 1.64
    assert costs.kv_cache_bytes(10, 64, bytes_per_number=4) == 10 * 2 * 64 * 4


def test_heads_of_half_the_width_cache_the_same_in_all():
    assert costs.kv_cache_entries(7, 32, 32, num_kv_heads=4) == costs.kv_cache_entries(7, 128, 128)
    assert costs.kv_cache_entries(7, 3, 5) == 7 * 8
    assert costs.latent_cache_entries(7, 16) == 112


def test_the_operations_of_the_third_source():
    quadratic, linear = (
        costs.quadratic_operations(10_000, 64, 64),
        costs.linear_operations(10_000, 64, 64),
    )
    assert quadratic.total == 12_800_000_000 == sum(quadratic._asdict().values())
    assert linear.total == 83_200_000 == sum(linear._asdict().values())


@pytest.mark.parametrize("N, D, M, C", [(1, 2, 3, 4), (5, 3, 2, 7), (4, 1, 1, 1), (0, 2, 2, 2)])
def test_operations_against_loops_that_count(N, D, M, C):
    scores = sum(1 for _ in range(N) for _ in range(N) for _ in range(D))
    weighted = sum(1 for _ in range(N) for _ in range(N) for _ in range(M))
    assert costs.quadratic_operations(N, D, M) == (scores, weighted)

    state = sum(1 for _ in range(N) for _ in range(C) for _ in range(M))
    normalizer = sum(1 for _ in range(N) for _ in range(C))
    assert costs.linear_operations(N, C, M) == (state, normalizer, state, normalizer)


def test_memory_against_arrays():
    N, C, M = 11, 5, 3
    rng = np.random.default_rng(0)
    features, v = rng.normal(size=(N, C)), rng.normal(size=(N, M))
    out = features @ features.T @ v
    assert costs.quadratic_memory(N, M) == (features @ features.T).size + out.size
    assert costs.linear_memory(N, C, M) == features.size + out.size + (features.T @ v).size
    states = np.cumsum(features[:, :, None] * v[:, None, :], axis=0)
    assert costs.cumsum_memory(N, C, M) == states.size
    assert costs.state_entries(C, M) == states[-1].size
    z = features.sum(0)
    assert costs.state_entries(C, M, normalizer=True) == states[-1].size + z.size


@given(N=lengths, C=widths, M=widths)
def test_the_cumulative_sum_keeps_more_than_the_matrix_while_n_is_small(N, C, M):
    more = costs.cumsum_memory(N, C, M) > costs.attention_matrix_entries(N)
    assert more == (0 < N < C * M)


@given(D=widths, M=widths, C=widths)
def test_crossover_is_the_smallest_n(D, M, C):
    def linear_is_cheaper(N):
        linear, quadratic = costs.linear_operations(N, C, M), costs.quadratic_operations(N, D, M)
        return linear.total < quadratic.total

    N = costs.crossover(D, M, C)
    assert linear_is_cheaper(N) and not linear_is_cheaper(N - 1)


@given(D=widths, M=widths, C=widths)
def test_the_cache_passes_the_state_at_the_smallest_n(D, M, C):
    N, state = costs.cache_passes_state(D, M, C), costs.state_entries(C, M)
    assert costs.kv_cache_entries(N, D, M) >= state > costs.kv_cache_entries(N - 1, D, M)


@pytest.mark.parametrize("D", [2, 16, 64, 128])
def test_both_crossings_when_all_widths_are_equal(D):
    assert costs.cache_passes_state(D, D) == D // 2
    assert costs.crossover(D, D) == D + 2  # the counts are equal at D + 1


def test_a_step_costs_its_share():
    N, D, M = 6, 3, 2
    steps = sum(costs.cached_step_operations(t, D, M) for t in range(1, N + 1))
    assert 2 * steps == costs.quadratic_operations(N, D, M).total + N * (D + M)
    assert N * costs.linear_operations(1, D, M).total == costs.linear_operations(N, D, M).total


@given(N=st.integers(0, 300), C=widths, M=widths)
def test_a_scan_is_counted_as_its_rounds_run(N, C, M):
    rounds = additions = 0
    distance = 1
    while distance < N:
        additions += sum(1 for i in range(N) if i >= distance)
        distance, rounds = 2 * distance, rounds + 1
    in_order = max(N - 1, 0)  # additions of the recurrence, each with a multiplication before it
    state = costs.state_entries(C, M, normalizer=True)
    assert costs.scan_cost(N, C, M) == (
        costs.recurrent_cost(N, C, M).work + (additions - in_order) * state,
        N * state,
        rounds,
    )


@given(N=st.integers(0, 300), C=widths, M=widths, L=widths)
def test_chunks_are_counted_one_by_one(N, C, M, L):
    lengths = [min(L, N - start) for start in range(0, N, L)]
    state = costs.state_entries(C, M, normalizer=True)
    inside = sum(n * n * (C + M) for n in lengths)
    written_and_read = sum(2 * n * state for n in lengths)
    assert costs.chunkwise_cost(N, C, M, L) == (
        inside + written_and_read,
        max((n * n for n in lengths), default=0) + state,
        len(lengths),
    )


@given(N=lengths, C=widths, M=widths)
def test_a_cumulative_sum_is_a_recurrence_that_keeps_its_states(N, C, M):
    recurrent, cumsum = costs.recurrent_cost(N, C, M), costs.cumsum_cost(N, C, M)
    assert (cumsum.work, cumsum.depth) == (recurrent.work, recurrent.depth)
    assert recurrent == (N * costs.linear_operations(1, C, M).total, (M + 1) * C, N)
    assert cumsum.memory == costs.cumsum_memory(N, C, M + 1)  # z is one column more


@given(N=st.integers(1, 1_000), C=widths, M=widths)
def test_one_chunk_is_the_masked_form_and_a_state(N, C, M):
    masked, recurrent = costs.masked_cost(N, C, M), costs.recurrent_cost(N, C, M)
    one = costs.chunkwise_cost(N, C, M, L=N)
    assert masked == (costs.quadratic_operations(N, C, M).total, N * N, 1)
    assert one == (masked.work + recurrent.work, masked.memory + recurrent.memory, masked.depth)
    assert costs.chunkwise_cost(N, C, M, L=N + 7) == one


def test_numpy_integers_give_plain_ones():
    N = np.int32(100_000)
    count = costs.attention_matrix_entries(N)
    assert type(count) is int and count == 10**10  # past the largest 32-bit integer
    for cost in (costs.masked_cost, costs.recurrent_cost, costs.cumsum_cost, costs.scan_cost):
        assert set(map(type, cost(N, 64, 64))) == {int}
    assert set(map(type, costs.chunkwise_cost(N, 64, 64, np.int32(64)))) == {int}


models = st.fixed_dictionaries(
    {"layers": st.integers(1, 4), "feed_forward": st.integers(0, 5), "outputs": st.integers(0, 9)}
)


@given(N=st.integers(0, 40), heads=st.integers(1, 4), M=st.integers(1, 9), model=models)
def test_generation_is_counted_token_by_token(N, heads, M, model):
    F = heads * M
    sizes = [(F, F)] * 4 + [(F, model["feed_forward"] * F), (model["feed_forward"] * F, F)]
    layer = sum(rows * columns for rows, columns in sizes)
    last = F * model["outputs"]
    recomputed, visible, cached, recurrent = (np.zeros(2, int) for _ in range(4))
    for t in range(1, N + 1):
        once = model["layers"] * layer + last
        for query in range(1, t + 1):  # the prefix, of which only the last position has outputs
            of_position = model["layers"] * layer + last * (query == t)
            recomputed += of_position, model["layers"] * sum(2 * F for _ in range(t))
            visible += of_position, model["layers"] * sum(2 * F for _ in range(query))
        cached += once, model["layers"] * sum(2 * F for _ in range(t))
        written_and_read = heads * 2 * (M * M + M)
        recurrent += once, model["layers"] * written_and_read
    assert costs.recomputed_generation_operations(N, F, **model) == tuple(recomputed)
    assert costs.recomputed_generation_operations(N, F, skip_masked=True, **model) == tuple(visible)
    assert costs.cached_generation_operations(N, F, **model) == tuple(cached)
    assert costs.recurrent_generation_operations(N, F, heads=heads, **model) == tuple(recurrent)


@given(N=st.integers(0, 40), B=st.integers(1, 5), number=st.integers(1, 8), model=models)
def test_bytes_of_generation_are_counted_step_by_step(N, B, number, model):
    heads, M, C, entries = 2, 3, 5, 7
    F = heads * M
    weights = model["layers"] * F * F * (4 + 2 * model["feed_forward"]) + F * model["outputs"]
    read_weights = cache = state = 0
    for t in range(1, N + 1):
        read_weights += weights * number
        for _ in range(B * model["layers"]):
            cache += (entries + t * entries) * number  # one token written, t read
            state += 2 * heads * (C * M + C) * 4  # read and written, in float32
    sizes = {"batch_size": B, "bytes_per_number": number, **model}
    cached = costs.cached_generation_bytes(N, F, entries=entries, **sizes)
    assert cached == (read_weights, cache)
    recurrent = costs.recurrent_generation_bytes(N, F, heads=heads, C=C, **sizes)
    assert recurrent == (read_weights, state)
    assert (cached.total, recurrent.total) == (read_weights + cache, read_weights + state)
    whole = costs.cached_generation_bytes(N, F, entries=2 * F, **sizes)
    assert costs.cached_generation_bytes(N, F, **sizes) == whole


@pytest.mark.parametrize("N, layers, bounds", [(784, 8, [515, 450]), (3_072, 16, [3_510, 2_508])])
def test_the_bound_on_how_much_faster_an_rnn_draws(N, layers, bounds):
    rnn = costs.recurrent_generation_operations(N, 256, layers, heads=8).total
    recomputed = [
        costs.recomputed_generation_operations(N, 256, layers, skip_masked=skip).total
        for skip in (False, True)
    ]
    assert [round(total / rnn) for total in recomputed] == bounds


def test_heads_that_do_not_divide_the_width():
    for function in (costs.recurrent_generation_operations, costs.recurrent_generation_bytes):
        with pytest.raises(ValueError, match="^width must be a multiple of heads, 3, got 8"):
            function(5, 8, 2, heads=3)
    with pytest.raises(TypeError, match="^skip_masked must be True or False"):
        costs.recomputed_generation_operations(5, 8, 2, skip_masked=1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bytes_of_messages_that_are_passed_around_a_ring(ranks):
    heads, C, M, number = 3, 5, 7, 8
    state = np.zeros((2, heads, C, M + 1))
    messages = [costs.EXCHANGE_HEADER_BYTES + state.nbytes for _ in range(ranks - 1)]
    sizes = {"heads": heads, "states": 2, "bytes_per_number": number}
    assert costs.state_exchange_bytes(ranks, C, M, **sizes) == sum(messages)

    # Keys and values visit the other ranks. Backward they do so again, with the gradients so far,
    # which go one step more, to where they belong.
    N, D = 4 * ranks - (ranks > 1), 6
    k, v = np.zeros((heads, 4, D), np.float16), np.zeros((heads, 4, M), np.float16)
    visits = [k.nbytes + v.nbytes for _ in range(ranks - 1)]
    home = [k.nbytes + v.nbytes for _ in range(ranks if ranks > 1 else 0)]
    assert costs.ring_attention_bytes(ranks, N, D, M, heads=heads) == sum(visits)
    backward = costs.ring_attention_bytes(ranks, N, D, M, heads=heads, backward=True)
    assert backward == sum(visits + home)
    with pytest.raises(TypeError, match="^backward must be True or False"):
        costs.ring_attention_bytes(ranks, N, D, M, backward=1)


@given(ranks=st.integers(1, 70), heads=widths, C=widths, M=widths, extra=st.integers(0, 2))
def test_seconds_of_messages_that_follow_each_other(ranks, heads, C, M, extra):
    message = 280 + 2 * heads * C * (M + extra) * 8
    sizes = {"heads": heads, "extra": extra, "states": 2, "bytes_per_number": 8}
    rates = {"latency": 0.25, "bandwidth": 1000}
    step = 2 * 0.25 + message / 1000
    ring = costs.exchange_seconds(ranks, C, M, **sizes, **rates)
    assert ring == pytest.approx((ranks - 1) * step)
    sent = costs.state_exchange_bytes(ranks, C, M, **sizes)
    assert ring == pytest.approx((ranks - 1) * 0.5 + sent / 1000)
    rounds, known = 0, 1  # parts that a rank's state stands for
    while known < ranks:
        rounds, known = rounds + 1, 2 * known
    scan = costs.exchange_seconds(ranks, C, M, **sizes, **rates, scan=True)
    assert scan == pytest.approx(rounds * step)
    assert costs.exchange_seconds(3, C, M, latency=0, bandwidth=1e9) > 0


def test_rates_that_are_none():
    sizes = {"ranks": 2, "C": 3, "M": 3, "latency": 1e-5, "bandwidth": 1e9}
    for name, value, error in [
        *(("latency", x, TypeError) for x in ("1", None, True)),
        *(("bandwidth", x, TypeError) for x in ("1", None, True)),
        *(("latency", x, ValueError) for x in (-1e-9, float("nan"), float("inf"))),
        *(("bandwidth", x, ValueError) for x in (0, -1.0, float("nan"), float("inf"))),
        ("scan", 1, TypeError),
    ]:
        with pytest.raises(error, match=rf"^{name} must "):
            costs.exchange_seconds(**{**sizes, name: value})


RATES = {"latency": 1e-5, "bandwidth": 1e9}
MAY_BE_0 = {"N", "extra", "feed_forward", "outputs"}
MODEL = {"N": 3, "width": 2, "layers": 1, "feed_forward": 4, "outputs": 2}
CALLS = {
    costs.attention_matrix_entries: {"N": 3},
    costs.kv_cache_entries: {"N": 3, "D": 2, "M": 2, "num_kv_heads": 1},
    costs.latent_cache_entries: {"N": 3, "R": 2},
    costs.kv_cache_bytes: {"N": 3, "width": 2, "bytes_per_number": 2},
    costs.state_entries: {"C": 2, "M": 2},
    costs.cache_passes_state: {"D": 2, "M": 2, "C": 2},
    costs.quadratic_memory: {"N": 3, "M": 2},
    costs.linear_memory: {"N": 3, "C": 2, "M": 2},
    costs.cumsum_memory: {"N": 3, "C": 2, "M": 2},
    costs.quadratic_operations: {"N": 3, "D": 2, "M": 2},
    costs.linear_operations: {"N": 3, "C": 2, "M": 2},
    costs.cached_step_operations: {"N": 3, "D": 2, "M": 2},
    costs.crossover: {"D": 2, "M": 2, "C": 2},
    costs.masked_cost: {"N": 3, "C": 2, "M": 2},
    costs.recurrent_cost: {"N": 3, "C": 2, "M": 2},
    costs.cumsum_cost: {"N": 3, "C": 2, "M": 2},
    costs.scan_cost: {"N": 3, "C": 2, "M": 2},
    costs.chunkwise_cost: {"N": 3, "C": 2, "M": 2, "L": 2},
    costs.recomputed_generation_operations: MODEL,
    costs.cached_generation_operations: MODEL,
    costs.recurrent_generation_operations: {**MODEL, "heads": 1, "C": 2},
    costs.cached_generation_bytes: {**MODEL, "batch_size": 1, "entries": 2, "bytes_per_number": 4},
    costs.recurrent_generation_bytes: {
        **{**MODEL, "heads": 1, "C": 2, "batch_size": 1},
        **{"bytes_per_number": 4, "bytes_per_state_number": 4},
    },
    costs.state_exchange_bytes: {
        **{"ranks": 3, "C": 2, "M": 2, "heads": 1},
        **{"extra": 1, "states": 1, "bytes_per_number": 4},
    },
    costs.ring_attention_bytes: {
        **{"ranks": 3, "N": 3, "D": 2, "M": 2, "heads": 1, "bytes_per_number": 2},
    },
    partial(costs.exchange_seconds, **RATES): {
        **{"ranks": 3, "C": 2, "M": 2, "heads": 1},
        **{"extra": 1, "states": 1, "bytes_per_number": 4},
    },
}


def name_of(function):
    return getattr(function, "func", function).__name__


@pytest.mark.parametrize("function", CALLS, ids=name_of)
def test_wrong_arguments_are_named(function):
    for name in CALLS[function]:
        for value in (2.0, "2", True):
            with pytest.raises(TypeError, match=rf"^{name} "):
                function(**{**CALLS[function], name: value})
        too_small = -1 if name in MAY_BE_0 else 0
        with pytest.raises(ValueError, match=rf"^{name} "):
            function(**{**CALLS[function], name: too_small})


def test_every_function_is_public():
    classes = {name for name in costs.__all__ if name[0].isupper()}
    assert {name_of(function) for function in CALLS} == set(costs.__all__) - classes
