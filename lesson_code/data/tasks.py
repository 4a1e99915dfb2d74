r"""Small tasks that show what a state can hold: data for training, the same for the same seed.

Each function draws a batch of B sequences of length N and returns :class:`Examples`: the inputs,
what a model should answer at each position, and at which positions it is asked. A causal model
reads ``inputs`` and is judged where ``mask`` is true: with PyTorch,
``cross_entropy(model(inputs)[mask], targets[mask])``.

What a state of fixed size loses as it fills up: :func:`copying`, :func:`associative_recall`,
:func:`multi_query_associative_recall`, :func:`needle_in_a_haystack`, and :func:`overwriting`, where
it has to give up what is out of date and nothing else. What it does well:
:func:`majority`, :func:`running_mean`, :func:`in_context_regression`, with
:func:`least_squares` as its yardstick.

All arguments are given by name. ``batch`` is the number B of sequences, ``length`` their length N.
The ``seed`` is an integer, which gives the same batch at every call, or a
``numpy.random.Generator``, which goes on from where it is, so that a loop draws a new batch each
time. Every function raises TypeError for an argument of another type, and ValueError for settings
that cannot be had, and names the argument.
"""

from typing import NamedTuple

import numpy as np

from lesson_code import _arguments

__all__ = [
    "Examples",
    "associative_recall",
    "copying",
    "in_context_regression",
    "least_squares",
    "majority",
    "multi_query_associative_recall",
    "needle_in_a_haystack",
    "overwriting",
    "running_mean",
]


class Examples(NamedTuple):
    """A batch of sequences, with the right answers.

    Parameters
    ----------
    inputs : array, shape (B, N) or (B, N, F)
        Tokens (int64), or numbers (float64) where the function says so.
    targets : array, shape (B, N)
        The right answer at each position: a token (int64) or a number (float64). It is 0 where
        `mask` is false.
    mask : boolean array, shape (B, N)
        Where an answer is asked for.
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray


def copying(
    *, vocab_size: int, tokens: int, length: int, batch: int, seed: int | np.random.Generator = 0
) -> Examples:
    """Repeat a text, after a pause.

    The sequence is `tokens` random tokens, blanks (0), the signal to begin (1), and the text once
    more without its last token: what is asked for is always the next token. Texts are made of the
    tokens 2 ... vocab_size - 1, each drawn by itself, so that a token may come several times.

    Parameters
    ----------
    vocab_size : int
        Number of tokens with blank and signal, at least 4.
    tokens : int
        Length of the text.
    length : int
        Length N of the sequence, at least 2 · tokens; what is more is blank.

    Returns
    -------
    Examples
        The last `tokens` positions are asked for. A guess is right once in vocab_size - 2 times.

    References
    ----------
    Arjovsky et al. (2016), section 5.1, where the input is blank during the answer; Jelassi et al.
    (2024), where it is, as here, the text so far.

    Examples
    --------
    >>> inputs, targets, mask = copying(vocab_size=10, tokens=3, length=8, batch=1)
    >>> inputs
    array([[8, 7, 6, 0, 0, 1, 8, 7]])
    >>> targets
    array([[0, 0, 0, 0, 0, 8, 7, 6]])
    """
    vocab_size = _arguments.check_integer("vocab_size", vocab_size, minimum=4)
    tokens = _arguments.check_integer("tokens", tokens, minimum=1)
    length = _length(length, 2 * tokens, f"2 · tokens = {2 * tokens}")
    rng, batch = _generator(seed), _batch(batch)

    text = rng.integers(2, vocab_size, (batch, tokens))
    inputs, targets, mask = _nothing(batch, length)
    inputs[:, :tokens] = text
    inputs[:, length - tokens] = 1
    inputs[:, length - tokens + 1 :] = text[:, :-1]
    targets[:, length - tokens :] = text
    mask[:, length - tokens :] = True
    return Examples(inputs, targets, mask)


def associative_recall(
    *, vocab_size: int, pairs: int, length: int, batch: int, seed: int | np.random.Generator = 0
) -> Examples:
    """Look up one key, whose value may have changed.

    The sequence is pairs of a key and a value, blanks (0), and one key, whose value is asked for.
    The lower half of the vocabulary, 1 ... vocab_size // 2 - 1, are keys, the rest values. Keys are
    drawn independently, so that one may be written several times: the last value counts.

    Parameters
    ----------
    vocab_size : int
        Number of tokens with the blank, at least 4.
    pairs : int
        Number of pairs; of distinct keys there may be fewer.
    length : int
        Length N of the sequence, at least 2 · pairs + 1; what is more is blank.

    Returns
    -------
    Examples
        The last position is asked for. A guess is right once in vocab_size - vocab_size // 2 times.

    References
    ----------
    Ba et al. (2016), section 4.1, where the keys of a sequence are distinct.

    Examples
    --------
    >>> inputs, targets, mask = associative_recall(
    ...     vocab_size=10, pairs=4, length=10, batch=1, seed=2)
    >>> inputs                                          # key 2 is written twice
    array([[4, 7, 2, 9, 1, 7, 2, 5, 0, 2]])
    >>> targets[:, -1]
    array([5])
    """
    num_keys, num_values = _halves(vocab_size)
    pairs = _arguments.check_integer("pairs", pairs, minimum=1)
    length = _length(length, 2 * pairs + 1, f"2 · pairs + 1 = {2 * pairs + 1}")
    rng, batch = _generator(seed), _batch(batch)

    keys = rng.integers(1, 1 + num_keys, (batch, pairs))
    values = rng.integers(1 + num_keys, 1 + num_keys + num_values, (batch, pairs))
    asked = rng.integers(pairs, size=(batch, 1))
    query = np.take_along_axis(keys, asked, axis=1)
    last = pairs - 1 - np.argmax(keys[:, ::-1] == query, axis=1, keepdims=True)
    inputs, targets, mask = _nothing(batch, length)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    inputs[:, -1:] = query
    targets[:, -1:] = np.take_along_axis(values, last, axis=1)
    mask[:, -1] = True
    return Examples(inputs, targets, mask)


def multi_query_associative_recall(
    *,
    vocab_size: int = 8192,
    pairs: int = 8,
    length: int = 64,
    batch: int,
    power: float = 0.01,
    seed: int | np.random.Generator = 0,
) -> Examples:
    r"""Look up every key, each once, some soon and some late (MQAR).

    First come `pairs` pairs of a key and a value. In what follows every second position is a slot,
    and each key comes once more, in a slot of its own; there its value is asked for. All other
    positions are blank (0), the answers' too. The lower half of the vocabulary,
    1 ... vocab_size // 2 - 1, are keys, the rest values; within a sequence all keys are distinct,
    and all values.

    Slot g = 0, 1, ... is chosen with a probability proportional to :math:`(g + 1)^{a - 1}`, as long
    as it is free, by the first key first: repetitions in natural text are more often near than far.

    Parameters
    ----------
    vocab_size : int
        Number of tokens with the blank, at least 4.
    pairs : int
        Number of pairs, and of queries; at most vocab_size // 2 - 1, the number of keys.
    length : int
        Length N of the sequence, at least 4 · pairs: with that, every slot has a query.
    batch : int
        Number B of sequences.
    power : float
        The a above, at least 0; with 1 all slots are equally likely.
    seed : int or numpy.random.Generator

    Returns
    -------
    Examples
        `pairs` positions of each sequence are asked for. A guess is right once in
        vocab_size - vocab_size // 2 times, a guess among the values that occurred once in `pairs`.

    Notes
    -----
    Layout and defaults are those of the paper's experiments, where 64 positions come with 4 pairs,
    128 with 8 and 256 with 16. Its code can also put random tokens in place of the blanks.

    References
    ----------
    Arora et al. (2023), "Zoology: Measuring and improving recall in efficient language models",
    section 4 and appendix.

    Examples
    --------
    >>> inputs, targets, mask = multi_query_associative_recall(
    ...     vocab_size=12, pairs=2, length=12, batch=1, seed=1)
    >>> inputs
    array([[ 5, 11,  1, 10,  0,  0,  1,  0,  0,  0,  5,  0]])
    >>> targets
    array([[ 0,  0,  0,  0,  0,  0, 10,  0,  0,  0, 11,  0]])
    """
    num_keys, num_values = _halves(vocab_size)
    pairs = _arguments.check_integer("pairs", pairs, minimum=1)
    if pairs > num_keys:
        raise ValueError(
            f"pairs must be at most the number of keys, vocab_size // 2 - 1 = {num_keys}, "
            f"got {pairs}."
        )
    length = _length(length, 4 * pairs, f"4 · pairs = {4 * pairs}")
    power = _arguments.check_number("power", power)
    if power < 0:
        raise ValueError(f"power must be at least 0, got {power}.")
    rng, batch = _generator(seed), _batch(batch)

    keys = 1 + _distinct(rng, batch, num_keys, pairs)
    values = 1 + num_keys + _distinct(rng, batch, num_values, pairs)
    slots = (length - 2 * pairs) // 2
    # The order in which exponential waiting times end is that of draws without replacement; by
    # their logarithms, as the weights of a large power overflow.
    waiting = np.log(rng.standard_exponential((batch, slots)))
    waiting -= (power - 1) * np.log(np.arange(1, slots + 1))
    at = 2 * pairs + 2 * np.argsort(waiting, axis=1)[:, :pairs]
    inputs, targets, mask = _nothing(batch, length)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    np.put_along_axis(inputs, at, keys, axis=1)
    np.put_along_axis(targets, at, values, axis=1)
    np.put_along_axis(mask, at, True, axis=1)
    return Examples(inputs, targets, mask)


def needle_in_a_haystack(
    *,
    vocab_size: int,
    length: int,
    batch: int,
    position: int | None = None,
    seed: int | np.random.Generator = 0,
) -> Examples:
    """Find the one token that was marked, in a long text.

    The text is of random tokens, 1 ... vocab_size - 1. A mark (0) stands before one of them, the
    needle, and once more at the end, where the needle is asked for.

    Parameters
    ----------
    vocab_size : int
        Number of tokens with the mark, at least 3.
    length : int
        Length N of the sequence, at least 3.
    batch : int
        Number B of sequences.
    position : int, optional
        Where the mark stands, 0 ... length - 3; drawn for each sequence by itself if None.
    seed : int or numpy.random.Generator

    Returns
    -------
    Examples
        The last position is asked for. A guess is right once in vocab_size - 1 times.

    Examples
    --------
    >>> inputs, targets, mask = needle_in_a_haystack(
    ...     vocab_size=10, length=9, batch=1, position=3)
    >>> inputs
    array([[8, 6, 5, 0, 3, 1, 1, 1, 0]])
    >>> targets[:, -1]
    array([3])
    """
    vocab_size = _arguments.check_integer("vocab_size", vocab_size, minimum=3)
    length = _arguments.check_integer("length", length, minimum=3)
    if position is not None:
        position = _arguments.check_integer("position", position, minimum=0)
        if position > length - 3:
            raise ValueError(f"position must be at most length - 3 = {length - 3}, got {position}.")
    rng, batch = _generator(seed), _batch(batch)

    inputs = rng.integers(1, vocab_size, (batch, length))
    if position is None:
        at = rng.integers(length - 2, size=(batch, 1))
    else:
        at = np.full((batch, 1), position)
    _, targets, mask = _nothing(batch, length)
    np.put_along_axis(inputs, at, 0, axis=1)
    inputs[:, -1] = 0
    targets[:, -1:] = np.take_along_axis(inputs, at + 1, axis=1)
    mask[:, -1] = True
    return Examples(inputs, targets, mask)


def overwriting(
    *,
    keys: int,
    values: int,
    active: int,
    length: int,
    batch: int,
    seed: int | np.random.Generator = 0,
) -> Examples:
    """Say what a key's value is now, where every key gets a new one again and again.

    Each token is a note, "key a has the value b", or a question, "what is a?", one as likely as the
    other. The answer is the value of the last note on a. A sequence is about `active` keys, drawn
    for it from all of them; each of its tokens is about one of these, and each note has a value
    drawn by itself.

    Parameters
    ----------
    keys : int
        Number of keys that there are.
    values : int
        Number of values.
    active : int
        Number of different keys that a sequence is about, at most `keys`.
    length : int
        Length N of the sequence.

    Returns
    -------
    Examples
        Tokens are a · (values + 1) + b, where b = `values` stands for a question. Targets are
        values, 0 ... values - 1. Every question is asked for whose key has a note before it. A
        guess is right once in `values` times.

    Examples
    --------
    >>> inputs, targets, mask = overwriting(
    ...     keys=4, values=8, active=2, length=8, batch=1, seed=1)
    >>> inputs // 9                                     # keys
    array([[3, 2, 2, 2, 3, 3, 2, 2]])
    >>> inputs % 9                                      # values; 8 asks
    array([[3, 2, 8, 2, 8, 8, 8, 8]])
    >>> targets[mask]
    array([2, 3, 3, 2, 2])
    """
    keys = _arguments.check_integer("keys", keys, minimum=1)
    values = _arguments.check_integer("values", values, minimum=1)
    active = _arguments.check_integer("active", active, minimum=1)
    if active > keys:
        raise ValueError(f"active must be at most keys = {keys}, got {active}.")
    length = _length(length, 1, "1")
    rng, batch = _generator(seed), _batch(batch)

    key = rng.integers(active, size=(batch, length))
    key = np.take_along_axis(_distinct(rng, batch, keys, active), key, axis=1)
    value = rng.integers(values, size=(batch, length))
    asks = rng.random((batch, length)) < 0.5
    # Position of the last note on the key, -1 if there is none: (B, t, j) with j before t.
    noted = (
        (key[:, :, None] == key[:, None, :]) & ~asks[:, None, :] & np.tri(length, k=-1, dtype=bool)
    )
    last = np.max(np.where(noted, np.arange(length), -1), axis=2, initial=-1)
    mask = asks & (last >= 0)
    targets = np.where(mask, np.take_along_axis(value, np.maximum(last, 0), axis=1), 0)
    return Examples(key * (values + 1) + np.where(asks, values, value), targets, mask)


def majority(
    *, vocab_size: int, length: int, batch: int, seed: int | np.random.Generator = 0
) -> Examples:
    """Say at each position which token has come most often so far.

    Each sequence has probabilities of its own, drawn uniformly from all that add up to 1; its
    tokens, 0 ... vocab_size - 1, are drawn with them. What has to be kept is a count of each token.

    Parameters
    ----------
    vocab_size : int
        Number of tokens, at least 2.
    length : int
        Length N of the sequence.

    Returns
    -------
    Examples
        Every position is asked for at which no two tokens share the first place.

    Examples
    --------
    >>> inputs, targets, mask = majority(vocab_size=3, length=8, batch=1, seed=2)
    >>> inputs
    array([[0, 2, 2, 1, 0, 1, 2, 2]])
    >>> targets
    array([[0, 0, 2, 2, 0, 0, 2, 2]])
    >>> mask.astype(int)                                # 0 where tokens share the first place
    array([[1, 0, 1, 1, 0, 0, 1, 1]])
    """
    vocab_size = _arguments.check_integer("vocab_size", vocab_size, minimum=2)
    length = _arguments.check_integer("length", length, minimum=1)
    rng, batch = _generator(seed), _batch(batch)

    probabilities = rng.standard_exponential((batch, vocab_size))
    edges = np.cumsum(probabilities, axis=1) / np.sum(probabilities, axis=1, keepdims=True)
    drawn = rng.random((batch, length))
    inputs = (drawn[..., None] >= edges[:, None, :-1]).sum(axis=-1, dtype=np.int64)
    counts = np.cumsum(inputs[..., None] == np.arange(vocab_size), axis=1)  # (B, N, V)
    mask = np.sum(counts == np.max(counts, axis=-1, keepdims=True), axis=-1) == 1
    return Examples(inputs, np.where(mask, np.argmax(counts, axis=-1), 0), mask)


def running_mean(*, length: int, batch: int, seed: int | np.random.Generator = 0) -> Examples:
    """Say at each position the mean of the numbers so far.

    Each sequence has a level of its own, drawn from a standard normal distribution; its numbers are
    the level plus noise of the same kind. What has to be kept is a sum and a count.

    Parameters
    ----------
    length : int
        Length N of the sequence.

    Returns
    -------
    Examples
        Inputs are numbers, (B, N, 1), and so are targets. Every position is asked for.

    Examples
    --------
    >>> inputs, targets, mask = running_mean(length=3, batch=1)
    >>> inputs[0, :, 0].round(2).tolist()
    [-0.01, 0.77, 0.23]
    >>> targets[0].round(2).tolist()
    [-0.01, 0.38, 0.33]
    """
    length = _arguments.check_integer("length", length, minimum=1)
    rng, batch = _generator(seed), _batch(batch)

    inputs = rng.standard_normal((batch, 1)) + rng.standard_normal((batch, length))
    targets = np.cumsum(inputs, axis=1) / np.arange(1, length + 1)
    return Examples(inputs[..., None], targets, np.ones((batch, length), dtype=bool))


def in_context_regression(
    *, dim: int, pairs: int, batch: int, seed: int | np.random.Generator = 0
) -> Examples:
    """Guess a linear function from examples of it.

    Each sequence has a function w · x of its own; w and all x are drawn from a standard normal
    distribution of D = `dim` channels. Positions 0, 2, 4, ... hold an x, those after them its
    value, which is asked for at the x, before it is seen. So the answer at pair i rests on i
    examples.

    Parameters
    ----------
    dim : int
        Number D of channels of x.
    pairs : int
        Number of x; the length N is 2 · pairs.

    Returns
    -------
    Examples
        Inputs are numbers, (B, N, D + 1): (x, 0) or (0, w · x). Every x is asked for.

    Notes
    -----
    Who always answers 0 has a mean squared error of D. The best that i examples allow is D - i, and
    nothing from D examples on: that is what :func:`least_squares` reaches.

    References
    ----------
    Garg et al. (2022), "What can transformers learn in-context?", sections 2 and 3.

    Examples
    --------
    >>> inputs, targets, mask = in_context_regression(dim=2, pairs=3, batch=1)
    >>> inputs.shape, mask.astype(int).tolist()
    ((1, 6, 3), [[1, 0, 1, 0, 1, 0]])
    >>> bool((inputs[:, 1::2, 2] == targets[:, ::2]).all())  # what is asked for comes next
    True
    """
    dim = _arguments.check_integer("dim", dim, minimum=1)
    pairs = _arguments.check_integer("pairs", pairs, minimum=1)
    rng, batch = _generator(seed), _batch(batch)

    w = rng.standard_normal((batch, 1, dim))
    x = rng.standard_normal((batch, pairs, dim))
    y = np.sum(w * x, axis=-1)
    inputs = np.zeros((batch, 2 * pairs, dim + 1))
    inputs[:, 0::2, :dim] = x
    inputs[:, 1::2, dim] = y
    targets = np.zeros((batch, 2 * pairs))
    targets[:, 0::2] = y
    mask = np.zeros((batch, 2 * pairs), dtype=bool)
    mask[:, 0::2] = True
    return Examples(inputs, targets, mask)


def least_squares(inputs: np.ndarray) -> np.ndarray:
    """Answers of least squares to :func:`in_context_regression`.

    At each x the shortest w that fits all earlier pairs best, and w · x.

    Parameters
    ----------
    inputs : array, shape (B, N, D + 1)
        Inputs of :func:`in_context_regression`.

    Returns
    -------
    array, shape (B, N)
        The answers at each x, and 0 at the positions of values.

    Raises
    ------
    TypeError
        If `inputs` is no array of floats.
    ValueError
        If it is not (B, N, D + 1) with an even N and a D of at least 1.

    Notes
    -----
    NaN in an input raises ``numpy.linalg.LinAlgError``.

    Examples
    --------
    >>> inputs, targets, mask = in_context_regression(dim=2, pairs=4, batch=1000)
    >>> errors = ((least_squares(inputs) - targets) ** 2)[:, ::2].mean(axis=0)  # near 2, 1, 0, 0
    >>> errors.round().tolist()
    [2.0, 1.0, 0.0, 0.0]
    """
    _arguments.check_arrays(np.ndarray, inputs=inputs)
    if inputs.ndim != 3 or inputs.shape[1] % 2 or inputs.shape[2] < 2:
        raise ValueError(
            f"inputs must have shape (B, N, D + 1) with an even N and D >= 1, got {inputs.shape}."
        )
    answers = np.zeros(inputs.shape[:2], dtype=inputs.dtype)
    inputs = inputs.astype(np.promote_types(inputs.dtype, np.float32), copy=False)
    x, y = inputs[:, 0::2, :-1], inputs[:, 1::2, -1:]
    for i in range(1, x.shape[1]):
        # Singular values that rounding alone has made count as 0: an x may come again.
        rounding = max(i, x.shape[2]) * np.finfo(inputs.dtype).eps
        w = np.linalg.pinv(x[:, :i], rcond=rounding) @ y[:, :i]  # (B, D, 1)
        answers[:, 2 * i] = (x[:, i : i + 1] @ w)[:, 0, 0]
    return answers


def _generator(seed):
    if isinstance(seed, np.random.Generator):
        return seed
    return np.random.default_rng(_arguments.check_integer("seed", seed, minimum=0))


def _batch(batch):
    return _arguments.check_integer("batch", batch, minimum=0)


def _length(length, minimum, shown):
    length = _arguments.check_integer("length", length, minimum=1)
    if length < minimum:
        raise ValueError(f"length must be at least {shown}, got {length}.")
    return length


def _halves(vocab_size):
    """Numbers of keys, 1 ... vocab_size // 2 - 1, and of values, which are the tokens after."""
    vocab_size = _arguments.check_integer("vocab_size", vocab_size, minimum=4)
    return vocab_size // 2 - 1, vocab_size - vocab_size // 2


def _distinct(rng, batch, among, count):
    """For each row `count` different numbers of 0 ... among - 1, in random order."""
    return rng.permuted(np.tile(np.arange(among), (batch, 1)), axis=1)[:, :count]


def _nothing(batch, length):
    """Blank inputs, targets of 0, and nothing asked for."""
    inputs, targets = np.zeros((2, batch, length), dtype=np.int64)
    return inputs, targets, np.zeros((batch, length), dtype=bool)
