r"""What attention costs: operations and stored numbers, counted in plain integers.

One head of one sequence unless a function says otherwise: N positions, key width D, value width M,
feature width C (D where there is no feature map). One operation is one multiplication with the
addition that follows it, or one addition alone. The feature map, the exponential and the divisions
are not counted: there is one per number, not one per sum.

Each causal form of linear attention has a function of its own, which gives its work, memory and
depth as a :class:`CausalCost`, the normalizer included.

Every function raises TypeError for a count that is not an integer and ValueError for a negative
length or a width below 1, and names the argument.
"""

from typing import NamedTuple

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


def _lengths_and_widths(N: int = 0, **widths: int) -> list[int]:
    """Return N and the widths as plain ints, or raise the error that names the wrong one."""
    return [
        check_integer("N", N, 0),
        *(check_integer(name, width, 1) for name, width in widths.items()),
    ]


# What has to be kept


def attention_matrix_entries(N: int) -> int:
    r"""Numbers in the matrix of attention weights: :math:`N^2`.

    The matrix is that of :eq:`eq-attention-weights`.

    Examples
    --------
    >>> for N in (512, 4_000, 100_000):
    ...     print(f"{N:>7,} positions {attention_matrix_entries(N):>14,} weights")
        512 positions        262,144 weights
      4,000 positions     16,000,000 weights
    100,000 positions 10,000,000,000 weights
    """
    (N,) = _lengths_and_widths(N)
    return N * N


def kv_cache_entries(N: int, D: int, M: int, *, num_kv_heads: int = 1) -> int:
    r"""Numbers in the KV cache of one layer after N tokens: :math:`N H_{kv} (D + M)`.

    With as many key-value heads as query heads this is multi-head attention; with fewer,
    grouped-query attention, :eq:`eq-grouped-query`; with one, multi-query attention, which is also
    the cache of a single head.

    References
    ----------
    Shazeer (2019), multi-query attention; Ainslie et al. (2023), grouped-query attention.

    Examples
    --------
    Per token, with 32 query heads of width 128 that share 32, 8 or 1 key-value heads:

    >>> [kv_cache_entries(1, 128, 128, num_kv_heads=heads) for heads in (32, 8, 1)]
    [8192, 2048, 256]
    """
    N, D, M, num_kv_heads = _lengths_and_widths(N, D=D, M=M, num_kv_heads=num_kv_heads)
    return N * num_kv_heads * (D + M)


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
    N, R = _lengths_and_widths(N, R=R)
    return N * R


def kv_cache_bytes(N: int, width: int, *, bytes_per_number: int = 2) -> int:
    r"""Bytes of the KV cache of one layer after N tokens: :math:`2 N F` numbers.

    All heads together hold one key and one value of the model's width F per token. The default is
    16 bit, two bytes a number.

    Examples
    --------
    >>> kv_cache_bytes(100_000, 4_096)  # 1.64 GB a layer
    1638400000
    """
    N, width, bytes_per_number = _lengths_and_widths(
        N, width=width, bytes_per_number=bytes_per_number
    )
    return kv_cache_entries(N, width, width) * bytes_per_number


def state_entries(C: int, M: int, *, normalizer: bool = False) -> int:
    r"""Numbers in the state of one head: :math:`C M`, and :math:`C` more for the normalizer z.

    The state is that of :eq:`eq-recurrence`; its size does not depend on N.

    References
    ----------
    Katharopoulos et al. (2020), equations 10 and 11.

    Examples
    --------
    >>> state_entries(64, 64)
    4096
    >>> state_entries(64, 64, normalizer=True)
    4160
    """
    _, C, M = _lengths_and_widths(C=C, M=M)
    check_flags(normalizer=normalizer)
    return C * M + (C if normalizer else 0)


def cache_passes_state(D: int, M: int, C: int | None = None) -> int:
    r"""First N at which a head's KV cache is as large as its state, :math:`N (D + M) \ge C M`.

    Without C the state is D by M, as for a feature map that keeps the width; then N = D / 2 when
    keys and values have the same width.

    Examples
    --------
    >>> cache_passes_state(64, 64)
    32
    """
    _, D, M, C = _lengths_and_widths(D=D, M=M, C=D if C is None else C)
    return -(-state_entries(C, M) // (D + M))  # division that rounds up


def quadratic_memory(N: int, M: int) -> int:
    r"""Numbers kept by attention that forms its matrix: :math:`N^2 + N M`, matrix and output.

    Examples
    --------
    >>> quadratic_memory(10_000, 64)
    100640000
    """
    N, M = _lengths_and_widths(N, M=M)
    return attention_matrix_entries(N) + N * M


def linear_memory(N: int, C: int, M: int) -> int:
    r"""Numbers kept by linear attention: :math:`N (C + M) + C M`, features, output and state.

    The features are those of the keys, or afterwards those of the queries: :eq:`eq-bracket-trick`
    needs one at a time.

    Examples
    --------
    >>> linear_memory(10_000, 64, 64)
    1284096
    """
    N, C, M = _lengths_and_widths(N, C=C, M=M)
    return N * (C + M) + state_entries(C, M)


def cumsum_memory(N: int, C: int, M: int) -> int:
    r"""Numbers kept by the cumulative sum of :eq:`eq-cumsum-form`: :math:`N C M`, all N states.

    This is more than the attention matrix while N < C M.

    Examples
    --------
    >>> cumsum_memory(1_000, 64, 64), attention_matrix_entries(1_000)
    (4096000, 1000000)
    >>> cumsum_memory(4_096, 64, 64) == attention_matrix_entries(4_096)
    True
    """
    N, C, M = _lengths_and_widths(N, C=C, M=M)
    return N * state_entries(C, M)


# What has to be computed


class QuadraticOperations(NamedTuple):
    """Terms of :func:`quadratic_operations`; ``total`` is their sum, ``_asdict()`` a table."""

    scores: int
    weighted_sum: int

    @property
    def total(self) -> int:
        return sum(self)


class LinearOperations(NamedTuple):
    """Terms of :func:`linear_operations`; ``total`` is their sum, ``_asdict()`` a table."""

    write_state: int
    write_normalizer: int
    read_state: int
    read_normalizer: int

    @property
    def total(self) -> int:
        return sum(self)


def quadratic_operations(N: int, D: int, M: int) -> QuadraticOperations:
    r"""Operations of attention through the N by N matrix, term by term, :eq:`eq-cost-quadratic`.

    ============  ===================  ====================================================
    term          operations           what is computed
    ============  ===================  ====================================================
    scores        :math:`N^2 D`        a dot product of width D for each query and each key
    weighted_sum  :math:`N^2 M`        M products with a value for each query and each key
    ============  ===================  ====================================================

    Notes
    -----
    The normalizer only adds scores that are there already, :math:`N^2` additions more: one part in
    D + M of the total, left out here.

    Examples
    --------
    >>> quadratic_operations(10_000, 64, 64)
    QuadraticOperations(scores=6400000000, weighted_sum=6400000000)
    >>> f"{quadratic_operations(10_000, 64, 64).total:.2e}"
    '1.28e+10'
    """
    N, D, M = _lengths_and_widths(N, D=D, M=M)
    return QuadraticOperations(scores=N * N * D, weighted_sum=N * N * M)


def linear_operations(N: int, C: int, M: int) -> LinearOperations:
    r"""Operations of linear attention through the state, term by term, :eq:`eq-cost-linear`.

    ================  =================  ================================================
    term              operations         what is computed
    ================  =================  ================================================
    write_state       :math:`N C M`      an outer product for each key, summed into S
    write_normalizer  :math:`N C`        the features of each key, summed into z
    read_state        :math:`N C M`      a vector-matrix product with S for each query
    read_normalizer   :math:`N C`        a dot product with z for each query
    ================  =================  ================================================

    Notes
    -----
    One step of the recurrence costs ``linear_operations(1, C, M)``, at every position the same.

    Examples
    --------
    >>> linear_operations(10_000, 64, 64)  # doctest: +NORMALIZE_WHITESPACE
    LinearOperations(write_state=40960000, write_normalizer=640000,
                     read_state=40960000, read_normalizer=640000)
    >>> f"{linear_operations(10_000, 64, 64).total:.2e}"
    '8.32e+07'
    """
    N, C, M = _lengths_and_widths(N, C=C, M=M)
    return LinearOperations(
        write_state=N * C * M,
        write_normalizer=N * C,
        read_state=N * C * M,
        read_normalizer=N * C,
    )


def cached_step_operations(N: int, D: int, M: int) -> int:
    r"""Operations of one softmax step that reads a KV cache of N tokens: :math:`N (D + M)`.

    Without the cache the step computes all earlier positions again and costs
    ``quadratic_operations(N, D, M)``; with a state in its place, ``linear_operations(1, C, M)``.

    Examples
    --------
    >>> cached_step_operations(1_000, 64, 64)
    128000
    >>> quadratic_operations(1_000, 64, 64).total, linear_operations(1, 64, 64).total
    (128000000, 8320)
    """
    N, D, M = _lengths_and_widths(N, D=D, M=M)
    return N * (D + M)


def crossover(D: int, M: int, C: int | None = None) -> int:
    r"""Smallest N at which the linear order needs fewer operations than the quadratic one.

    From :math:`N^2 (D + M) > 2 N C (M + 1)` it is the first N above :math:`2 C (M + 1) / (D + M)`.
    When all widths are D that bound is D + 1. Without C the feature map keeps the width D. Counts
    alone decide here; on a machine the crossing lies elsewhere.

    Examples
    --------
    >>> crossover(64, 64)
    66
    >>> quadratic_operations(65, 64, 64).total - linear_operations(65, 64, 64).total
    0

    A feature map that makes 64 numbers into 2,145 (all monomials up to degree 2) moves it:

    >>> crossover(64, 64, C=2_145)
    2179
    """
    _, D, M, C = _lengths_and_widths(D=D, M=M, C=D if C is None else C)
    return linear_operations(1, C, M).total // quadratic_operations(1, D, M).total + 1


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


def masked_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-masked-form`: :math:`N^2 (C + M)` operations, :math:`N^2` numbers, 1 step.

    The masked half of the matrix is multiplied out like the other one.

    Examples
    --------
    >>> masked_cost(1_000, 64, 64)
    CausalCost(work=128000000, memory=1000000, depth=1)
    """
    N, C, M = _lengths_and_widths(N, C=C, M=M)
    work = quadratic_operations(N, C, M).total
    return CausalCost(work, attention_matrix_entries(N), depth=min(N, 1))


def recurrent_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-recurrence`: one state of :math:`C (M + 1)` numbers, in N steps.

    Each step writes every number of the state once and reads it once.

    Examples
    --------
    >>> recurrent_cost(1_000, 64, 64)
    CausalCost(work=8320000, memory=4160, depth=1000)
    """
    N, C, M = _lengths_and_widths(N, C=C, M=M)
    work = linear_operations(N, C, M).total
    return CausalCost(work, state_entries(C, M, normalizer=True), depth=N)


def cumsum_cost(N: int, C: int, M: int) -> CausalCost:
    r"""Cost of :eq:`eq-cumsum-form`: the operations of the recurrence, but all N states are kept.

    The depth is that of a cumulative sum that adds one position after the other.

    Examples
    --------
    >>> cumsum_cost(1_000, 64, 64)
    CausalCost(work=8320000, memory=4160000, depth=1000)
    """
    work, state, N = recurrent_cost(N, C, M)
    return CausalCost(work, N * state, depth=N)


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

    Eight running sums, of states that are one number and its normalizer:

    >>> (scan_cost(8, 1, 1).work - recurrent_cost(8, 1, 1).work) // 2 + 7  # additions
    17
    """
    work, state, N = recurrent_cost(N, C, M)
    rounds = max(N - 1, 0).bit_length()
    added = N * rounds - 2**rounds + 1
    more = added - max(N - 1, 0)
    return CausalCost(work + more * state, N * state, depth=rounds)


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
    N, C, M, L = _lengths_and_widths(N, C=C, M=M, L=L)
    whole, rest = divmod(N, L)
    inside = whole * quadratic_operations(L, C, M).total + quadratic_operations(rest, C, M).total
    work, state, _ = recurrent_cost(N, C, M)
    memory = attention_matrix_entries(min(L, N)) + state
    return CausalCost(work + inside, memory, depth=-(-N // L))  # rounded up


# What a whole model costs that generates


class GenerationOperations(NamedTuple):
    """Operations of a model that generates; ``total`` is their sum, ``_asdict()`` a table.

    Parameters
    ----------
    weights : int
        Products with weights: projections, feed-forward sublayers, and the last linear map.
    attention : int
        Scores and weighted sums, or what is written to the state and read from it.
    """

    weights: int
    attention: int

    @property
    def total(self) -> int:
        return sum(self)


class GenerationBytes(NamedTuple):
    """Bytes that a model moves that generates; ``total`` is their sum, ``_asdict()`` a table.

    Parameters
    ----------
    weights : int
        Weights, read once in each step for all sequences of the batch.
    memory : int
        What is written to the caches or states of all sequences, and read from them.
    """

    weights: int
    memory: int

    @property
    def total(self) -> int:
        return sum(self)


def _model_weights(width, layers, feed_forward, outputs):
    """Weights of all layers, and of the linear map that follows the last one."""
    feed_forward = check_integer("feed_forward", feed_forward, 0)
    outputs = check_integer("outputs", outputs, 0)
    return layers * (4 + 2 * feed_forward) * width * width, outputs * width


def _head_widths(width, heads, C):
    """Heads, the width M of each, and that of its features."""
    heads = check_integer("heads", heads, 1)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, {heads}, got {width}.")
    M = width // heads
    return heads, M, check_integer("C", M if C is None else C, 1)


def recomputed_generation_operations(
    N: int,
    width: int,
    layers: int,
    *,
    skip_masked: bool = False,
    feed_forward: int = 4,
    outputs: int = 0,
) -> GenerationOperations:
    r"""Operations of generating N tokens with softmax that computes the whole prefix each time.

    Token t takes a forward pass of t positions, so that the weights of each layer are used
    :math:`N (N + 1) / 2` times in all, and its attention takes :math:`2 F \sum_t t^2`, or
    :math:`2 F \sum_t t (t + 1) / 2` where the masked half is skipped: N³ either way.

    Parameters
    ----------
    N : int
        Tokens, or pixels, of one sequence.
    width : int
        Width F of the model, that of all heads together, for keys and for values.
    layers : int
        Layers, each with four projections of F by F and a feed-forward sublayer.
    skip_masked : bool
        Count only the scores that the causal mask leaves.
    feed_forward : int
        Width of the feed-forward sublayer's middle, as a multiple of F; 0 leaves it out.
    outputs : int
        Numbers that the last linear map computes for a position: it is used for the last position
        of each prefix only. 0 leaves it out.

    Returns
    -------
    GenerationOperations
        Operations of one sequence.

    Raises
    ------
    TypeError
        If a count is no integer, or `skip_masked` neither True nor False.
    ValueError
        If `N`, `feed_forward` or `outputs` is negative, or another count below 1.

    Notes
    -----
    Each layer is counted for all positions of the prefix. The last one could do with a single query
    and feed-forward sublayer, which is not what a forward pass does.

    Examples
    --------
    >>> recomputed_generation_operations(3, 8, layers=1)
    GenerationOperations(weights=4608, attention=224)
    >>> recomputed_generation_operations(3, 8, layers=1, skip_masked=True)
    GenerationOperations(weights=4608, attention=160)

    The bound that counting sets to the speed of an RNN, for 784 pixels in 8 layers of width 256
    with 8 heads: the masked half computed, or skipped.

    >>> rnn = recurrent_generation_operations(784, 256, layers=8, heads=8).total
    >>> for skip in (False, True):
    ...     recomputed = recomputed_generation_operations(784, 256, layers=8, skip_masked=skip)
    ...     print(f"{recomputed.total / rnn:.0f}")
    515
    450
    """
    N, width, layers = _lengths_and_widths(N, width=width, layers=layers)
    check_flags(skip_masked=skip_masked)
    in_layers, last = _model_weights(width, layers, feed_forward, outputs)
    prefixes = N * (N + 1) // 2  # 1 + 2 + ... + N
    if skip_masked:
        scores = prefixes * (N + 2) // 3  # the sum of t (t + 1) / 2
    else:
        scores = prefixes * (2 * N + 1) // 3  # the sum of t^2
    return GenerationOperations(
        weights=in_layers * prefixes + last * N,
        attention=layers * quadratic_operations(1, width, width).total * scores,
    )


def cached_generation_operations(
    N: int, width: int, layers: int, *, feed_forward: int = 4, outputs: int = 0
) -> GenerationOperations:
    r"""Operations of generating N tokens with softmax and a KV cache.

    The weights are used once for a token; token t reads t keys and values in each layer,
    :math:`F N (N + 1)` operations in all. Groups of heads that share keys and values change
    nothing of this sum.

    Parameters
    ----------
    N, width, layers, feed_forward, outputs
        As in :func:`recomputed_generation_operations`.

    Returns
    -------
    GenerationOperations
        Operations of one sequence.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `N`, `feed_forward` or `outputs` is negative, or another argument below 1.

    Examples
    --------
    >>> cached_generation_operations(3, 8, layers=1)
    GenerationOperations(weights=2304, attention=96)
    >>> 16 * sum(t for t in (1, 2, 3))
    96
    """
    N, width, layers = _lengths_and_widths(N, width=width, layers=layers)
    in_layers, last = _model_weights(width, layers, feed_forward, outputs)
    return GenerationOperations(
        weights=(in_layers + last) * N,
        attention=layers * width * N * (N + 1),
    )


def recurrent_generation_operations(
    N: int,
    width: int,
    layers: int,
    *,
    heads: int,
    C: int | None = None,
    feed_forward: int = 4,
    outputs: int = 0,
) -> GenerationOperations:
    r"""Operations of generating N tokens with linear attention as an RNN.

    The weights are used once for a token, and in each layer a token costs
    :math:`2 H C (M + 1)` operations, a write and a read of S and z in each head: the same at every
    position.

    Parameters
    ----------
    N, width, layers, feed_forward, outputs
        As in :func:`recomputed_generation_operations`.
    heads : int
        Heads H of width M = F/H.
    C : int, optional
        Width of the features of a head; M where it is None.

    Returns
    -------
    GenerationOperations
        Operations of one sequence.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `N`, `feed_forward` or `outputs` is negative, another argument below 1, or `width` no
        multiple of `heads`.

    References
    ----------
    Katharopoulos et al. (2020), section 3.4.

    Examples
    --------
    >>> recurrent_generation_operations(3, 8, layers=1, heads=2)
    GenerationOperations(weights=2304, attention=240)
    """
    N, width, layers = _lengths_and_widths(N, width=width, layers=layers)
    heads, M, C = _head_widths(width, heads, C)
    in_layers, last = _model_weights(width, layers, feed_forward, outputs)
    return GenerationOperations(
        weights=(in_layers + last) * N,
        attention=layers * heads * linear_operations(N, C, M).total,
    )


def cached_generation_bytes(
    N: int,
    width: int,
    layers: int,
    *,
    batch_size: int = 1,
    entries: int | None = None,
    feed_forward: int = 4,
    outputs: int = 0,
    bytes_per_number: int = 4,
) -> GenerationBytes:
    r"""Bytes that generating N tokens moves, with softmax and a KV cache.

    In each step the sequences of a batch share one reading of the weights; each writes what a cache
    keeps of its token, and reads what it keeps of all t tokens so far, in every layer.

    Parameters
    ----------
    N, width, layers, feed_forward, outputs
        As in :func:`recomputed_generation_operations`.
    batch_size : int
        Sequences that are generated together.
    entries : int, optional
        Numbers that a layer keeps of a token: 2 F where it is None, fewer in a grouped or latent
        cache. The count of the weights stays.
    bytes_per_number : int
        Four in float32, two in half precision.

    Returns
    -------
    GenerationBytes
        Bytes for all sequences together.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `N`, `feed_forward` or `outputs` is negative, or another argument below 1.

    Notes
    -----
    What is computed from one token stays close to the processor and is not counted, and neither is
    a copy of the cache. Softmax that computes the prefix again reads the weights as often, and
    keeps nothing.

    Examples
    --------
    >>> cached_generation_bytes(3, 8, layers=1, batch_size=2)
    GenerationBytes(weights=9216, memory=1152)
    """
    N, width, layers, batch_size, bytes_per_number = _lengths_and_widths(
        N, width=width, layers=layers, batch_size=batch_size, bytes_per_number=bytes_per_number
    )
    entries = check_integer("entries", 2 * width if entries is None else entries, 1)
    moved = N + N * (N + 1) // 2  # tokens written and read, by one sequence and layer
    return GenerationBytes(
        weights=N * sum(_model_weights(width, layers, feed_forward, outputs)) * bytes_per_number,
        memory=batch_size * layers * entries * moved * bytes_per_number,
    )


def recurrent_generation_bytes(
    N: int,
    width: int,
    layers: int,
    *,
    heads: int,
    C: int | None = None,
    batch_size: int = 1,
    feed_forward: int = 4,
    outputs: int = 0,
    bytes_per_number: int = 4,
    bytes_per_state_number: int = 4,
) -> GenerationBytes:
    r"""Bytes that generating N tokens moves, with linear attention as an RNN.

    In each step the sequences of a batch share one reading of the weights; each reads and writes
    its state, S and z of every head, in every layer.

    Parameters
    ----------
    N, width, layers, feed_forward, outputs
        As in :func:`recomputed_generation_operations`.
    heads, C
        As in :func:`recurrent_generation_operations`.
    batch_size : int
        Sequences that are generated together.
    bytes_per_number : int
        Of a weight: four in float32, two in half precision.
    bytes_per_state_number : int
        Of a number in the state, which is kept in float32 beside weights of half precision.

    Returns
    -------
    GenerationBytes
        Bytes for all sequences together.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `N`, `feed_forward` or `outputs` is negative, another argument below 1, or `width` no
        multiple of `heads`.

    Examples
    --------
    >>> recurrent_generation_bytes(3, 8, layers=1, heads=2, batch_size=2)
    GenerationBytes(weights=9216, memory=1920)
    """
    N, width, layers, batch_size, bytes_per_number, bytes_per_state_number = _lengths_and_widths(
        N,
        width=width,
        layers=layers,
        batch_size=batch_size,
        bytes_per_number=bytes_per_number,
        bytes_per_state_number=bytes_per_state_number,
    )
    heads, M, C = _head_widths(width, heads, C)
    state = heads * state_entries(C, M, normalizer=True)
    return GenerationBytes(
        weights=N * sum(_model_weights(width, layers, feed_forward, outputs)) * bytes_per_number,
        memory=2 * N * batch_size * layers * state * bytes_per_state_number,
    )


# What a sequence that is split over ranks sends


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
    r"""Bytes that each rank sends in one exchange of states, whatever the length of the sequence.

    An all-gather in a ring passes on one message per rank and step, :math:`R - 1` times: each rank
    sends, and receives, :math:`(R - 1) (s H C (M + e) b + h)` bytes, with s states for each of H
    heads, e extra columns, b bytes per number and a header of h.

    Parameters
    ----------
    ranks : int
        Ranks R that share the sequence.
    C : int
        Width of the features, or of the keys where there is no feature map.
    M : int
        Width of the values.
    heads : int
        Heads of all sequences in the batch.
    extra : int
        Columns beside S: one for the normalizer z, forward and backward, or for the decay, forward.
    states : int
        Two in the backward pass of a call that returned the last state, otherwise one.
    bytes_per_number : int
        Four in float32, in which half precision is sent too; eight in float64.

    Returns
    -------
    int
        Bytes that a rank sends, which are also those that it receives.

    Raises
    ------
    TypeError
        If an argument is no integer.
    ValueError
        If `extra` is negative or another argument below 1.

    Notes
    -----
    Gated linear attention sends a decay forward and none backward, ``extra=0``.

    References
    ----------
    Sun et al. (2025), LASP-2.

    Examples
    --------
    >>> state_exchange_bytes(4, 64, 64)
    50760
    >>> state_exchange_bytes(1, 64, 64)
    0
    """
    _, ranks, C, M, heads, states, bytes_per_number = _lengths_and_widths(
        ranks=ranks, C=C, M=M, heads=heads, states=states, bytes_per_number=bytes_per_number
    )
    extra = check_integer("extra", extra, 0)
    payload = states * heads * C * (M + extra) * bytes_per_number
    return (ranks - 1) * (payload + EXCHANGE_HEADER_BYTES)


def ring_attention_bytes(
    ranks: int,
    N: int,
    D: int,
    M: int,
    *,
    heads: int = 1,
    backward: bool = False,
    bytes_per_number: int = 2,
) -> int:
    r"""Bytes that each rank sends in ring attention: softmax attention over a split sequence.

    Each rank keeps the queries of its N / R positions, and the keys and values of every part go
    round the ring: :math:`R - 1` times :math:`\lceil N / R \rceil H (D + M) b` bytes. Backward
    they go round once more, with their gradients, which take one step more to come home:
    :math:`2 R - 1` times as many bytes. Either grows with N.

    Parameters
    ----------
    ranks : int
        Ranks R that share the sequence evenly.
    N : int
        Positions in all.
    D : int
        Width of the keys.
    M : int
        Width of the values.
    heads : int
        Heads of keys and values, of all sequences in the batch.
    backward : bool
        Count the backward pass instead.
    bytes_per_number : int
        Two in half precision, for the gradients as well.

    Returns
    -------
    int
        Bytes that a rank sends, which are also those that it receives.

    Raises
    ------
    TypeError
        If a count is no integer, or `backward` neither True nor False.
    ValueError
        If N is negative or another count below 1.

    References
    ----------
    Liu et al. (2023), Ring attention with blockwise transformers.

    Examples
    --------
    >>> ring_attention_bytes(4, 100_000, 64, 64)
    19200000
    >>> ring_attention_bytes(4, 200_000, 64, 64) // ring_attention_bytes(4, 100_000, 64, 64)
    2
    >>> ring_attention_bytes(4, 100_000, 64, 64, backward=True)
    44800000
    """
    N, ranks, D, M, heads, bytes_per_number = _lengths_and_widths(
        N, ranks=ranks, D=D, M=M, heads=heads, bytes_per_number=bytes_per_number
    )
    check_flags(backward=backward)
    block = -(-N // ranks) * heads * (D + M) * bytes_per_number  # rounded up
    if ranks == 1:  # nothing leaves the rank
        return 0
    return (2 * ranks - 1 if backward else ranks - 1) * block


def exchange_seconds(
    ranks: int,
    C: int,
    M: int,
    *,
    latency: float,
    bandwidth: float,
    heads: int = 1,
    extra: int = 1,
    states: int = 1,
    bytes_per_number: int = 4,
    scan: bool = False,
) -> float:
    r"""Seconds of one exchange of states, :eq:`eq-exchange-seconds`.

    A step passes on a header and a state, in a message each: :math:`2 \alpha + m / \beta` for a
    latency :math:`\alpha`, a bandwidth :math:`\beta` and the bytes m of both. An all-gather in a
    ring takes :math:`R - 1` steps, a scan :math:`\lceil \log_2 R \rceil`.

    Parameters
    ----------
    ranks : int
        Ranks R that share the sequence.
    C : int
        Width of the features, or of the keys where there is no feature map.
    M : int
        Width of the values.
    latency : float
        Seconds from one rank to the next for a message of no length.
    bandwidth : float
        Bytes per second that each rank can send while it receives as many.
    heads, extra, states, bytes_per_number : int
        As in :func:`state_exchange_bytes`.
    scan : bool
        Count a prefix scan over the ranks, in which a rank sends one state in each round, in place
        of the all-gather.

    Returns
    -------
    float
        Seconds, without those in which states are added.

    Raises
    ------
    TypeError
        If a count is no integer, `latency` or `bandwidth` no real number, or `scan` neither True
        nor False.
    ValueError
        If `latency` or `extra` is negative, `bandwidth` not above 0, or another count below 1.

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
    check_flags(scan=scan)
    sizes = {"heads": heads, "extra": extra, "states": states, "bytes_per_number": bytes_per_number}
    message = state_exchange_bytes(2, C, M, **sizes)
    ranks = check_integer("ranks", ranks, 1)
    steps = (ranks - 1).bit_length() if scan else ranks - 1
    return steps * (2 * latency + message / bandwidth)
