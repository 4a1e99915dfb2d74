"""The counts, against numbers that count their own operations and arrays that tell their size."""

import inspect
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesson_code import costs

widths = st.integers(1, 300)
lengths = st.integers(0, 100_000)


class Counted:
    """A number that counts: a product is an operation, and a sum is one unless it takes a product.

    So is the product that an addition follows, or an addition alone, once.
    """

    operations = 0

    def __init__(self, value, product=False):
        self.value, self.product = float(value), product

    def __mul__(self, other):
        Counted.operations += 1
        return Counted(self.value * other.value, product=True)

    def __add__(self, other):
        Counted.operations += not (self.product or other.product)
        return Counted(self.value + other.value)


def counted(x):
    return np.vectorize(Counted, otypes=[object])(x)


def draw(*shapes):
    rng = np.random.default_rng(0)
    return [counted(rng.normal(size=shape)) for shape in shapes]


def zeros(*shape):
    return counted(np.zeros(shape))


def operations(compute):
    Counted.operations = 0
    compute()
    return Counted.operations


# --- One head: operations ----------------------------------------------------------------------


def test_numbers_count_themselves():
    a, b = draw((4, 3), (3, 5))
    assert operations(lambda: a @ b) == 4 * 3 * 5
    assert operations(lambda: a + a) == 4 * 3


@pytest.mark.parametrize("N, C, M", [(0, 2, 2), (1, 2, 3), (5, 3, 2), (4, 1, 1)])
def test_operations_are_those_of_the_two_brackets(N, C, M):
    q, k, v, z = draw((N, C), (N, C), (N, M), C)
    S = k.T @ v if N else zeros(C, M)
    terms = operations(lambda: q @ k.T), operations(lambda: zeros(N, N) @ v)
    assert costs.quadratic_operations(N, C, M) == terms
    assert costs.quadratic_operations(N, C, M).total == sum(terms)
    terms = [lambda: k.T @ v, lambda: sum(k, zeros(C)), lambda: q @ S, lambda: q @ z]
    terms = tuple(map(operations, terms))
    assert costs.linear_operations(N, C, M) == terms
    assert costs.linear_operations(N, C, M).total == sum(terms)
    step = operations(lambda: z @ k.T) + operations(lambda: zeros(1, N) @ v)
    assert costs.cached_step_operations(N, C, M) == step


@given(D=widths, M=widths, C=widths)
def test_crossover_is_the_smallest_n(D, M, C):
    def linear_is_cheaper(N):
        linear, quadratic = costs.linear_operations(N, C, M), costs.quadratic_operations(N, D, M)
        return linear.total < quadratic.total

    N = costs.crossover(D, M, C)
    assert linear_is_cheaper(N) and not linear_is_cheaper(N - 1)


@pytest.mark.parametrize("D", [2, 16, 64, 128])
def test_both_crossings_when_all_widths_are_equal(D):
    assert costs.cache_passes_state(D, D) == D // 2
    assert costs.crossover(D, D) == D + 2  # the counts are equal at D + 1


# --- One head: what is kept --------------------------------------------------------------------


def test_memory_against_arrays():
    N, C, M = 11, 5, 3
    rng = np.random.default_rng(0)
    features, v = rng.normal(size=(N, C)), rng.normal(size=(N, M))
    out, z = features @ features.T @ v, features.sum(0)
    assert costs.attention_matrix_entries(N) == (features @ features.T).size
    assert costs.quadratic_memory(N, M) == (features @ features.T).size + out.size
    assert costs.linear_memory(N, C, M) == features.size + out.size + (features.T @ v).size
    states = np.cumsum(features[:, :, None] * v[:, None, :], axis=0)
    assert costs.cumsum_memory(N, C, M) == states.size
    assert costs.state_entries(C, M) == states[-1].size
    assert costs.state_entries(C, M, normalizer=True) == states[-1].size + z.size


def test_caches_against_arrays():
    N, H, D, M, R = 7, 4, 3, 5, 16
    k, v = np.zeros((H, N, D)), np.zeros((H, N, M))
    assert costs.kv_cache_entries(N, D, M, num_kv_heads=H) == k.size + v.size
    assert costs.kv_cache_entries(N, D, M) == k[0].size + v[0].size
    assert costs.latent_cache_entries(N, R) == np.zeros((N, R)).size
    for dtype in (np.float16, np.float32):
        cache = np.zeros((2, N, 12), dtype)
        assert costs.kv_cache_bytes(N, 12, bytes_per_number=cache.itemsize) == cache.nbytes
    assert costs.kv_cache_bytes(N, 12) == np.zeros((2, N, 12), np.float16).nbytes


@given(N=lengths, C=widths, M=widths)
def test_the_cumulative_sum_keeps_more_than_the_matrix_while_n_is_small(N, C, M):
    more = costs.cumsum_memory(N, C, M) > costs.attention_matrix_entries(N)
    assert more == (0 < N < C * M)


@given(D=widths, M=widths, C=widths)
def test_the_cache_passes_the_state_at_the_smallest_n(D, M, C):
    N, state = costs.cache_passes_state(D, M, C), costs.state_entries(C, M)
    assert costs.kv_cache_entries(N, D, M) >= state > costs.kv_cache_entries(N - 1, D, M)


# --- The causal forms: each returns what it computes, what it keeps, and its steps ---------------


def masked(q, k, v):
    weights = causal(q @ k.T)
    return weights @ v, weights.size, min(len(q), 1)


def causal(scores):
    return np.where(np.tri(*scores.shape, dtype=bool), scores, Counted(0))


def written(k, v, S, z):
    for k_t, v_t in zip(k, v, strict=True):
        S, z = S + np.outer(k_t, v_t), z + k_t
    return S, z


def recurrent(q, k, v):
    S, z, out = zeros(k.shape[1], v.shape[1]), zeros(k.shape[1]), []
    for t, q_t in enumerate(q):
        S, z = written(k[t : t + 1], v[t : t + 1], S, z)
        out.append((q_t @ S, q_t @ z)[0])
    return out, S.size + z.size, len(q)


def pairs(k, v):
    """The pair (k_t v_t, k_t) of each token as a matrix, the first added to an empty state."""
    items = [np.column_stack([np.outer(*token), token[0]]) for token in zip(k, v, strict=True)]
    return [zeros(*items[0].shape) + items[0], *items[1:]] if items else []


def read(q, states):
    out = [q_t @ state for q_t, state in zip(q, states, strict=True)]
    return [numbers[:-1] for numbers in out], sum(state.size for state in states)


def cumsum(q, k, v):
    states = pairs(k, v)
    for t in range(1, len(states)):
        states[t] = states[t - 1] + states[t]
    return *read(q, states), len(states)


def scan(q, k, v):
    states, distance, rounds = pairs(k, v), 1, 0
    while distance < len(states):
        later = [a + b for a, b in zip(states, states[distance:], strict=False)]
        states, distance, rounds = states[:distance] + later, 2 * distance, rounds + 1
    return *read(q, states), rounds


def chunkwise(q, k, v, L):
    S, z, out, most = zeros(k.shape[1], v.shape[1]), zeros(k.shape[1]), [], 0
    starts = range(0, len(q), L)
    for start in starts:
        chunk = slice(start, start + L)
        inside = causal(q[chunk] @ k[chunk].T)
        out += list(np.hstack([inside, q[chunk]]) @ np.vstack([v[chunk], S]))
        q[chunk] @ z
        S, z = written(k[chunk], v[chunk], S, z)
        most = max(most, inside.size)
    return out, most + S.size + z.size, len(starts)


FORMS = {form.__name__: form for form in (masked, recurrent, cumsum, scan)}
FORMS |= {f"chunks of {L}": partial(chunkwise, L=L) for L in (1, 3, 8, 11)}


@pytest.mark.parametrize("N", [0, 1, 2, 5, 8, 11])
@pytest.mark.parametrize("name", FORMS)
def test_a_causal_form_costs_what_its_numbers_count(name, N):
    C, M = 3, 2
    q, k, v = draw((N, C), (N, C), (N, M))
    Counted.operations = 0
    out, kept, steps = FORMS[name](q, k, v)
    work = Counted.operations
    if name.startswith("chunks"):
        cost = costs.chunkwise_cost(N, C, M, **FORMS[name].keywords)
    else:
        cost = getattr(costs, f"{name}_cost")(N, C, M)
    assert cost == (work, kept, steps)
    values = np.vectorize(lambda x: x.value, otypes=[float])
    q, k, v = values(q), values(k), values(v)
    expected = np.tril(q @ k.T) @ v  # it is the form that it claims to be
    np.testing.assert_allclose(values(np.reshape(out, (N, M))), expected, rtol=1e-12, atol=1e-12)


def test_numpy_integers_give_plain_ones():
    N = np.int32(100_000)
    count = costs.attention_matrix_entries(N)
    assert type(count) is int and count == 10**10  # past the largest 32-bit integer
    for cost in (costs.masked_cost, costs.recurrent_cost, costs.cumsum_cost, costs.scan_cost):
        assert set(map(type, cost(N, 64, 64))) == {int}
    assert set(map(type, costs.chunkwise_cost(N, 64, 64, np.int32(64)))) == {int}


# --- A model that generates ----------------------------------------------------------------------


def layer_shapes(F):
    return [(F, F)] * 4 + [(F, 4 * F), (4 * F, F)]


GENERATED = pytest.mark.parametrize(
    "N, heads, M, layers", [(0, 1, 2, 1), (1, 2, 2, 2), (4, 2, 3, 2)]
)


@GENERATED
def test_generation_is_counted_token_by_token(N, heads, M, layers):
    F = heads * M
    weights = [zeros(*shape) for shape in layer_shapes(F)]
    k, S = zeros(M), zeros(M, M)
    of_weights = operations(lambda: [zeros(len(matrix)) @ matrix for matrix in weights])
    of_state = heads * operations(lambda: (written([k], [k], S, k), k @ S, k @ k))
    of_query = [  # that sees t tokens
        heads * operations(lambda t=t: (k @ zeros(M, t), zeros(t) @ zeros(t, M)))
        for t in range(N + 1)
    ]
    recomputed, visible, cached, recurrent = np.zeros((4, 2), int)
    for t in range(1, N + 1):
        recomputed += t * of_weights, t * of_query[t]
        visible += t * of_weights, sum(of_query[1 : t + 1])
        cached += of_weights, of_query[t]
        recurrent += of_weights, of_state
    model = {"N": N, "width": F, "layers": layers}
    recomputing = partial(costs.recomputed_generation_operations, **model)
    assert recomputing() == tuple(layers * recomputed)
    assert recomputing(skip_masked=True) == tuple(layers * visible)
    assert costs.cached_generation_operations(**model) == tuple(layers * cached)
    of_rnn = costs.recurrent_generation_operations(**model, heads=heads)
    assert of_rnn == tuple(layers * recurrent) and of_rnn.total == sum(of_rnn)


@GENERATED
def test_bytes_of_generation_are_those_of_the_arrays(N, heads, M, layers):
    F = heads * M
    weights = [np.zeros(shape, np.float32) for shape in layer_shapes(F) * layers]
    state = np.zeros((layers, heads, M, M + 1), np.float32)
    of_token = np.zeros((layers, 2, F), np.float32)
    read_weights = of_cache = of_state = 0
    for t in range(1, N + 1):
        read_weights += sum(matrix.nbytes for matrix in weights)
        of_cache += of_token.nbytes + np.stack([of_token] * t).nbytes  # written, read
        of_state += 2 * state.nbytes
    cached = costs.cached_generation_bytes(N, F, layers)
    recurrent = costs.recurrent_generation_bytes(N, F, layers, heads=heads)
    assert cached == (read_weights, of_cache) and recurrent == (read_weights, of_state)
    assert (cached.total, recurrent.total) == (read_weights + of_cache, read_weights + of_state)


@pytest.mark.parametrize("N, layers, bounds", [(784, 8, [515, 450]), (3_072, 16, [3_510, 2_508])])
def test_the_bound_on_how_much_faster_an_rnn_draws(N, layers, bounds):
    rnn = costs.recurrent_generation_operations(N, 256, layers, heads=8).total
    recomputed = [
        costs.recomputed_generation_operations(N, 256, layers, skip_masked=skip).total
        for skip in (False, True)
    ]
    assert [round(total / rnn) for total in recomputed] == bounds


# --- A sequence over ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_bytes_of_messages_that_are_passed_around_a_ring(ranks):
    heads, C, M, number = 3, 5, 7, 8
    state = np.zeros((2, heads, C, M + 1))
    messages = [costs.EXCHANGE_HEADER_BYTES + state.nbytes for _ in range(ranks - 1)]
    sizes = {"heads": heads, "states": 2, "bytes_per_number": number}
    assert costs.state_exchange_bytes(ranks, C, M, **sizes) == sum(messages)

    N, D = 4 * ranks - (ranks > 1), 6  # parts of 4, the last one shorter
    k, v = np.zeros((heads, 4, D), np.float16), np.zeros((heads, 4, M), np.float16)
    visits = [k.nbytes + v.nbytes for _ in range(ranks - 1)]
    assert costs.ring_attention_bytes(ranks, N, D, M, heads=heads) == sum(visits)


@given(ranks=st.integers(1, 70), heads=widths, C=widths, M=widths)
def test_seconds_of_messages_that_follow_each_other(ranks, heads, C, M):
    message = 280 + np.float32().nbytes * heads * C * (M + 1)
    seconds = partial(
        costs.exchange_seconds, ranks, C, M, heads=heads, latency=0.25, bandwidth=1000
    )
    step = 2 * 0.25 + message / 1000
    assert seconds() == pytest.approx((ranks - 1) * step)
    rounds, known = 0, 1  # parts that a rank's state stands for
    while known < ranks:
        rounds, known = rounds + 1, 2 * known
    assert seconds(scan=True) == pytest.approx(rounds * step)


# --- What is refused -----------------------------------------------------------------------------

RATES = {"latency": 1e-5, "bandwidth": 1e9}
FUNCTIONS = [name for name in costs.__all__ if name[0].islower()]


def call(name, **changed):
    """Call a function with every count 2."""
    parameters = inspect.signature(getattr(costs, name)).parameters
    counts = {key: 2 for key, p in parameters.items() if p.annotation in (int, int | None)}
    given = counts | {key: RATES[key] for key in parameters if key in RATES}
    getattr(costs, name)(**given | changed)
    return counts, [key for key, p in parameters.items() if p.annotation is bool]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments_are_named(name):
    counts, flags = call(name)
    assert counts
    for key in counts:
        for value in (2.0, "2", True):
            with pytest.raises(TypeError, match=rf"^{key} "):
                call(name, **{key: value})
        if may_be_0 := key in ("N", "extra"):
            call(name, **{key: 0})
        with pytest.raises(ValueError, match=rf"^{key} "):
            call(name, **{key: -1 if may_be_0 else 0})
    for key in flags:
        with pytest.raises(TypeError, match=f"^{key} must be True or False"):
            call(name, **{key: 1})


@pytest.mark.parametrize("name", ["recurrent_generation_operations", "recurrent_generation_bytes"])
def test_heads_that_do_not_divide_the_width(name):
    with pytest.raises(ValueError, match="^width must be a multiple of heads, 3, got 8"):
        call(name, width=8, heads=3)


@pytest.mark.parametrize("key", RATES)
def test_rates_that_are_none(key):
    for value in ("1", None, True):
        with pytest.raises(TypeError, match=rf"^{key} must "):
            call("exchange_seconds", **{key: value})
    too_small = {"latency": -1e-9, "bandwidth": 0}[key]
    for value in (too_small, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"^{key} must "):
            call("exchange_seconds", **{key: value})
    call("exchange_seconds", latency=0)
