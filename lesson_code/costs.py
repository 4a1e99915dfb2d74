r"""What attention costs: operations and stored numbers, counted in plain integers.

One head of one sequence unless a function says otherwise: N positions, key width D, value width M,
feature width C, which is D where it is left out. One operation is one multiplication with the
addition that follows it, or one addition alone. The feature map, the exponential and the divisions
are not counted: there is one per number, not one per sum.

What has several terms is a NamedTuple: ``total`` is their sum, ``_asdict()`` a table. Each causal
form of linear attention has a function of its own, which gives its work, memory and depth as a
:class:`CausalCost`, the normalizer included.

A model that generates has `layers` layers of width F, and each of them four projections of F by F
and a feed-forward sublayer with 4 F in its middle: :math:`12 F^2` weights, in float32. Its heads
have keys and values of width M = F/H, and no feature map changes that.

A sequence may be split over R `ranks`, which pass messages round a ring; `heads` are then those of
all sequences in the batch, and the bytes are those that one rank sends, and also receives.

Every function raises TypeError for a count that is not an integer and ValueError for a negative
length or a width below 1, and names the argument.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from lesson_code._arguments import check_flags, check_integer, check_number

__all__ = [
    "CausalCost",
    "GenerationBytes",
    "GenerationOperations",
    "LinearOperations",
    "QuadraticOperations",
    "attention_matrix_entries",
    "cache_passes_state",
    "cached_generation_bytes",
    "cached_generation_operations",
    "cached_step_operations",
    "chunkwise_cost",
    "crossover",
    "cumsum_cost",
    "cumsum_memory",
    "exchange_seconds",
    "kv_cache_bytes",
    "kv_cache_entries",
    "latent_cache_entries",
    "linear_memory",
    "linear_operations",
    "masked_cost",
    "quadratic_memory",
    "quadratic_operations",
    "recomputed_generation_operations",
    "recurrent_cost",
    "recurrent_generation_bytes",
    "recurrent_generation_operations",
    "ring_attention_bytes",
    "scan_cost",
    "state_entries",
    "state_exchange_bytes",
]

# What a rank says of itself before it sends a state: 35 integers of 64 bit.
EXCHANGE_HEADER_BYTES = 280

MAY_BE_0 = ("N", "extra")

P = ParamSpec("P")
Result = TypeVar("Result")


def _checked(function: Callable[P, Result]) -> Callable[P, Result]:
    """Call a function with plain ints, or raise the error that names the wrong argument."""
    signature = inspect.signature(function)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}

    @functools.wraps(function)
    def check(*args: P.args, **kwargs: P.kwargs) -> Result:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            if kinds[name] is bool:
                check_flags(**{name: value})
            elif kinds[name] is int or (kinds[name] == int | None and value is not None):
                minimum = 0 if name in MAY_BE_0 else 1
                given.arguments[name] = check_integer(name, value, minimum)
        return function(*given.args, **given.kwargs)

    return check


# What has to be kept


@_checked
def attention_matrix_entries(N: int) -> int:
    r"""Numbers in the matrix of attention weights, :eq:`eq-attention-weights`: :math:`N^2`.

    Examples
    --------
    >>> attention_matrix_entries(100_000)
    10000000000
    """
    return N * N


@_checked
def kv_cache_entries(N: int, D: int, M: int, *, num_kv_heads: int = 1) -> int:
    r"""Numbers in the KV cache of one layer after N tokens: :math:`N H_{kv} (D + M)`.

    With fewer key-value heads than query heads this is grouped-query attention,
    :eq:`eq-grouped-query`; with one, multi-query attention, or the cache of a single head.

    References
    ----------
    Shazeer (2019), multi-query attention; Ainslie et al. (2023), grouped-query attention.

    Examples
    --------
    Per token, with 32 query heads of width 128 that share 32, 8 or 1 key-value heads:

    >>> [kv_cache_entries(1, 128, 128, num_kv_heads=heads) for heads in (32, 8, 1)]
    [8192, 2048, 256]
    """
    return N * num_kv_heads * (D + M)


@_checked
def latent_cache_entries(N: int, R: int) -> int:
    r"""Numbers in the cache of multi-head latent attention after N tokens: :math:`N R`.

    All heads share one latent of width R, from which :eq:`eq-latent-attention` makes their keys and
    values. A key part for positions (RoPE), which real models cache beside it, is not counted.

    References
    ----------
    DeepSeek-AI (2024), DeepSeek-V2, section 2.1.

    Examples
    --------
    >>> latent_cache_entries(1, 512)
    512
    """
    return N * R


@_checked
def kv_cache_bytes(N: int, width: int, *, bytes_per_number: int = 2) -> int:
    r"""Bytes of the KV cache of one layer of width F after N tokens: :math:`2 N F` numbers.

    Examples
    --------
    >>> kv_cache_bytes(100_000, 4_096)  # 16 bit a number, 1.64 GB a layer
    1638400000
    """
    return kv_cache_entries(N, width, width) * bytes_per_number


@_checked
def state_entries(C: int, M: int, *, normalizer: bool = False) -> int:
    r"""Numbers in the state, :eq:`eq-recurrence`: :math:`C M`, and C more for the normalizer z.

    References
    ----------
    Katharopoulos et al. (2020), equations 10 and 11.

    Examples
    --------
    >>> state_entries(64, 64), state_entries(64, 64, normalizer=True)
    (4096, 4160)
    """
    return C * (M + normalizer)


@_checked
def cache_passes_state(D: int, M: int, C: int | None = None) -> int:
    r"""First N at which a head's KV cache is as large as its state, :math:`N (D + M) \ge C M`.

    Examples
    --------
    >>> cache_passes_state(64, 64)
    32
    """
    return _divide_up(state_entries(C or D, M), D + M)


@_checked
def quadratic_memory(N: int, M: int) -> int:
    r"""Numbers kept by attention that forms its matrix: :math:`N^2 + N M`, matrix and output.

    Examples
    --------
    >>> quadratic_memory(10_000, 64)
    100640000
    """
    return attention_matrix_entries(N) + N * M


@_checked
def linear_memory(N: int, C: int, M: int) -> int:
    r"""Numbers kept by linear attention: :math:`N (C + M) + C M`, features, output and state.

    The features are those of the keys, or afterwards those of the queries: :eq:`eq-bracket-trick`
    needs one at a time.

    Examples
    --------
    >>> linear_memory(10_000, 64, 64)
    1284096
    """
    return N * (C + M) + state_entries(C, M)


@_checked
def cumsum_memory(N: int, C: int, M: int) -> int:
    r"""Numbers kept by the cumulative sum of :eq:`eq-cumsum-form`: :math:`N C M`, all N states.

    Examples
    --------
    >>> cumsum_memory(4_096, 64, 64) == attention_matrix_entries(4_096)  # for fewer tokens, more
    True
    """
    return N * state_entries(C, M)


# What has to be computed


class QuadraticOperations(NamedTuple):
    """Terms of :func:`quadratic_operations`."""

    scores: int
    weighted_sum: int

    @property
    def total(self) -> int:
        return sum(self)


class LinearOperations(NamedTuple):
    """Terms of :func:`linear_operations`."""

    write_state: int
    write_normalizer: int
    read_state: int
    read_normalizer: int

    @property
    def total(self) -> int:
        return sum(self)


@_checked
def quadratic_operations(N: int, D: int, M: int) -> QuadraticOperations:
    r"""Operations of attention through the N by N matrix, term by term, :eq:`eq-cost-quadratic`.

    :math:`N^2 D` are for the scores and :math:`N^2 M` for the weighted sum of values. The
    normalizer only adds scores that are there already, :math:`N^2` additions more: one part in
    D + M of the total, left out here.

    Examples
    --------
    >>> quadratic_operations(10_000, 64, 64)
    QuadraticOperations(scores=6400000000, weighted_sum=6400000000)
    """
    return QuadraticOperations(scores=N * N * D, weighted_sum=N * N * M)


@_checked
def linear_operations(N: int, C: int, M: int) -> LinearOperations:
    r"""Operations of linear attention through the state, term by term, :eq:`eq-cost-linear`.

    S is written and read with :math:`N C M` operations each, z with :math:`N C` each; at every
    position with as many.

    Examples
    --------
    >>> linear_operations(10_000, 64, 64)  # doctest: +NORMALIZE_WHITESPACE
    LinearOperations(write_state=40960000, write_normalizer=640000,
                     read_state=40960000, read_normalizer=640000)
    """
    S, z = N * C * M, N * C
    return LinearOperations(write_state=S, write_normalizer=z, read_state=S, read_normalizer=z)


@_checked
def cached_step_operations(N: int, D: int, M: int) -> int:
    r"""Operations of one softmax step that reads a KV cache of N tokens: :math:`N (D + M)`.

    Without the cache the step computes all earlier positions again and costs
    ``quadratic_operations(N, D, M)``; with a state in its place, ``linear_operations(1, C, M)``.

    Examples
    --------
    >>> cached_step_operations(1_000, 64, 64)
    128000
    """
    return N * (D + M)


@_checked
def crossover(D: int, M: int, C: int | None = None) -> int:
    r"""Smallest N at which the linear order needs fewer operations than the quadratic one.

    From :math:`N^2 (D + M) > 2 N C (M + 1)` it is the first N above :math:`2 C (M + 1) / (D + M)`.
    Counts alone decide here; on a machine the crossing lies elsewhere.

    Examples
    --------
    >>> crossover(64, 64), crossover(64, 64, C=2_145)  # of all monomials up to degree 2
    (66, 2179)
    """
    return linear_operations(1, C or D, M).total // quadratic_operations(1, D, M).total + 1


# What the five causal forms cost


class CausalCost(NamedTuple):
    """Cost of one causal form of linear attention.

    Parameters
    ----------
    work : int
        Operations.
    memory : int
        Numbers stored at a time, beside features, values and outputs.
    depth : int
        Steps in time that wait for the one before: positions, rounds of a scan, or chunks. A matrix
        product is one step, whatever its widths.
    """

    work: int
    memory: int
    depth: int


@_checked
def masked_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-masked-form`: :math:`N^2 (C + M)` operations, :math:`N^2` numbers, 1 step.

    The masked half of the matrix is multiplied out like the other one.

    Examples
    --------
    >>> masked_cost(1_000, 64, 64)
    CausalCost(work=128000000, memory=1000000, depth=1)
    """
    work = quadratic_operations(N, C, M).total
    return CausalCost(work, attention_matrix_entries(N), depth=min(N, 1))


@_checked
def recurrent_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-recurrence`: one state of :math:`C (M + 1)` numbers, in N steps.

    Each step writes every number of the state once and reads it once.

    Examples
    --------
    >>> recurrent_cost(1_000, 64, 64)
    CausalCost(work=8320000, memory=4160, depth=1000)
    """
    work = linear_operations(N, C, M).total
    return CausalCost(work, state_entries(C, M, normalizer=True), depth=N)


@_checked
def cumsum_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-cumsum-form`: the operations of the recurrence, but all N states are kept.

    The depth is that of a cumulative sum that adds one position after the other.

    Examples
    --------
    >>> cumsum_cost(1_000, 64, 64)
    CausalCost(work=8320000, memory=4160000, depth=1000)
    """
    work, state, _ = recurrent_cost(N, C, M)
    return CausalCost(work, N * state, depth=N)


@_checked
def scan_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of a prefix scan in :math:`R = \lceil \log_2 N \rceil` rounds, all N states kept.

    Each item is combined by :eq:`eq-scan-operator`. The round of distance d adds N - d states;
    :math:`N R - 2^R + 1` states are added in all, where the recurrence adds N - 1.

    References
    ----------
    Hillis and Steele (1986).

    Examples
    --------
    >>> scan_cost(1_000, 64, 64)
    CausalCost(work=41508480, memory=4160000, depth=10)
    """
    work, state, _ = recurrent_cost(N, C, M)
    in_order = max(N - 1, 0)
    rounds = in_order.bit_length()
    added = N * rounds - 2**rounds + 1
    return CausalCost(work + (added - in_order) * state, N * state, depth=rounds)


@_checked
def chunkwise_cost(N: int, C: int, M: int, L: int) -> CausalCost:
    r"""Cost of chunks of L positions, masked inside and with a state from one to the next.

    The form is :eq:`eq-chunkwise`. Inside the chunks there are :math:`N L (C + M)` operations,
    fewer when the last one is shorter; through the state those of the recurrence. One L by L matrix
    is kept, and one state.

    References
    ----------
    Hua et al. (2022), section 3; Sun et al. (2023), equation 7.

    Examples
    --------
    >>> chunkwise_cost(1_000, 64, 64, L=64)
    CausalCost(work=16389120, memory=8256, depth=16)
    """
    whole, rest = divmod(N, L)
    inside = whole * quadratic_operations(L, C, M).total + quadratic_operations(rest, C, M).total
    work, state, _ = recurrent_cost(N, C, M)
    memory = attention_matrix_entries(min(L, N)) + state
    return CausalCost(work + inside, memory, depth=_divide_up(N, L))


# What a whole model costs that generates


class GenerationOperations(NamedTuple):
    """Operations of a model that generates: with its weights, and in its attention."""

    weights: int
    attention: int

    @property
    def total(self) -> int:
        return sum(self)


class GenerationBytes(NamedTuple):
    """Bytes that a model moves that generates: its weights, and those of its caches or states."""

    weights: int
    memory: int

    @property
    def total(self) -> int:
        return sum(self)


def _weights(width: int, layers: int) -> int:
    return 12 * layers * width * width


def _head_width(width: int, heads: int) -> int:
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, {heads}, got {width}.")
    return width // heads


@_checked
def recomputed_generation_operations(
    N: int, width: int, layers: int, *, skip_masked: bool = False
) -> GenerationOperations:
    r"""Operations of generating N tokens with softmax that computes the whole prefix each time.

    Token t takes a forward pass of t positions, so that the weights of each layer are used
    :math:`N (N + 1) / 2` times in all, and its attention takes :math:`2 F \sum_t t^2`, or
    :math:`2 F \sum_t t (t + 1) / 2` where the masked half is skipped: N³ either way. The last layer
    could do with a single query, which is not what a forward pass does.

    Examples
    --------
    >>> recomputed_generation_operations(3, 8, layers=1)
    GenerationOperations(weights=4608, attention=224)
    >>> recomputed_generation_operations(3, 8, layers=1, skip_masked=True)
    GenerationOperations(weights=4608, attention=160)
    """
    prefixes = N * (N + 1) // 2  # 1 + 2 + ... + N
    if skip_masked:
        scores = prefixes * (N + 2) // 3  # the sum of t (t + 1) / 2
    else:
        scores = prefixes * (2 * N + 1) // 3  # the sum of t^2
    return GenerationOperations(
        weights=_weights(width, layers) * prefixes,
        attention=layers * quadratic_operations(1, width, width).total * scores,
    )


@_checked
def cached_generation_operations(N: int, width: int, layers: int) -> GenerationOperations:
    r"""Operations of generating N tokens with softmax and a KV cache.

    The weights are used once for a token; token t reads t keys and values in each layer,
    :math:`F N (N + 1)` operations in all, whether or not heads share them.

    Examples
    --------
    >>> cached_generation_operations(3, 8, layers=1)
    GenerationOperations(weights=2304, attention=96)
    """
    return GenerationOperations(
        weights=_weights(width, layers) * N, attention=layers * width * N * (N + 1)
    )


@_checked
def recurrent_generation_operations(
    N: int, width: int, layers: int, *, heads: int
) -> GenerationOperations:
    r"""Operations of generating N tokens with linear attention as an RNN.

    The weights are used once for a token, and in each layer a token costs
    :math:`2 H M (M + 1)` operations, a write and a read of S and z in each head.

    References
    ----------
    Katharopoulos et al. (2020), section 3.4.

    Examples
    --------
    >>> recurrent_generation_operations(3, 8, layers=1, heads=2)
    GenerationOperations(weights=2304, attention=240)
    """
    M = _head_width(width, heads)
    return GenerationOperations(
        weights=_weights(width, layers) * N,
        attention=layers * heads * linear_operations(N, M, M).total,
    )


@_checked
def cached_generation_bytes(N: int, width: int, layers: int) -> GenerationBytes:
    r"""Bytes that generating N tokens moves, with softmax and a KV cache.

    Each step reads the weights, and in every layer writes the key and the value of its token and
    reads those of all t tokens so far. What is computed from one token is not counted, and neither
    is a copy of the cache.

    Examples
    --------
    >>> cached_generation_bytes(3, 8, layers=1)
    GenerationBytes(weights=9216, memory=576)
    """
    moved = N + N * (N + 1) // 2  # tokens written and read, in one layer
    return GenerationBytes(
        weights=4 * N * _weights(width, layers),
        memory=layers * kv_cache_bytes(moved, width, bytes_per_number=4),
    )


@_checked
def recurrent_generation_bytes(N: int, width: int, layers: int, *, heads: int) -> GenerationBytes:
    r"""Bytes that generating N tokens moves, with linear attention as an RNN.

    Each step reads the weights, and in every layer reads and writes S and z of all heads.

    Examples
    --------
    >>> recurrent_generation_bytes(3, 8, layers=1, heads=2)
    GenerationBytes(weights=9216, memory=960)
    """
    M = _head_width(width, heads)
    state = heads * state_entries(M, M, normalizer=True)
    return GenerationBytes(
        weights=4 * N * _weights(width, layers), memory=2 * 4 * N * layers * state
    )


# What a sequence that is split over ranks sends


@_checked
def state_exchange_bytes(
    ranks: int,
    C: int,
    M: int,
    *,
    heads: int = 1,
    extra: int = 1,
    states: int = 1,
    bytes_per_number: int = 4,
) -> int:
    r"""Bytes of one exchange of states, whatever the length of the sequence.

    An all-gather in a ring passes on one message per rank and step, :math:`R - 1` times: each rank
    sends :math:`(R - 1) (s H C (M + e) b + h)` bytes, with s states for each of H heads, e extra
    columns, b bytes per number and a header of h.

    The extra column is the normalizer z, forward and backward, or the decay of gated linear
    attention, forward alone; the transition of a delta rule takes C of them, forward alone. There
    are two states in the backward pass of a call that returned the last state. Half precision is
    sent in float32, four bytes a number; float64 takes eight.

    References
    ----------
    Sun et al. (2025), LASP-2.

    Examples
    --------
    >>> [state_exchange_bytes(ranks, 64, 64) for ranks in (1, 2, 4)]
    [0, 16920, 50760]
    """
    payload = states * heads * C * (M + extra) * bytes_per_number
    return (ranks - 1) * (payload + EXCHANGE_HEADER_BYTES)


@_checked
def ring_attention_bytes(ranks: int, N: int, D: int, M: int, *, heads: int = 1) -> int:
    r"""Bytes of ring attention, which is softmax attention over a split sequence, in 16 bit.

    Each rank keeps the queries of its N / R positions, and the keys and values of every part go
    round the ring: :math:`R - 1` times :math:`\lceil N / R \rceil H (D + M)` numbers.

    References
    ----------
    Liu et al. (2023), Ring attention with blockwise transformers.

    Examples
    --------
    >>> ring_attention_bytes(4, 100_000, 64, 64)
    19200000
    """
    return (ranks - 1) * _divide_up(N, ranks) * heads * (D + M) * 2


@_checked
def exchange_seconds(
    ranks: int,
    C: int,
    M: int,
    *,
    latency: float,
    bandwidth: float,
    heads: int = 1,
    scan: bool = False,
) -> float:
    r"""Seconds of one exchange of states, :eq:`eq-exchange-seconds`, without those of adding them.

    A step passes on a header and a state, in a message each. It takes twice the latency (seconds)
    and the bytes of both over the bandwidth (bytes per second). The all-gather of
    :func:`state_exchange_bytes` takes :math:`R - 1` steps, a prefix scan over the ranks
    :math:`\lceil \log_2 R \rceil`.

    References
    ----------
    Thakur et al. (2005), for the model; Hillis and Steele (1986), for the scan.

    Examples
    --------
    32 heads of width 128 on 1,024 GPUs, at 10 microseconds and 50 GB/s:

    >>> sizes = {"heads": 32, "latency": 1e-5, "bandwidth": 5e10}
    >>> round(exchange_seconds(1024, 128, 128, **sizes), 4)
    0.0637
    >>> round(exchange_seconds(1024, 128, 128, **sizes, scan=True), 4)
    0.0006
    """
    latency, bandwidth = check_number("latency", latency), check_number("bandwidth", bandwidth)
    if latency < 0:
        raise ValueError(f"latency must not be negative, got {latency}.")
    if bandwidth <= 0:
        raise ValueError(f"bandwidth must be above 0, got {bandwidth}.")
    message = state_exchange_bytes(2, C, M, heads=heads)
    steps = (ranks - 1).bit_length() if scan else ranks - 1
    return steps * (2 * latency + message / bandwidth)


def _divide_up(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)
