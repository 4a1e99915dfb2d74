"""A batch whose rows are padded at the end gives each row what it would have alone."""

from collections.abc import Callable

import numpy as np

from lesson_code.checks._agreement import close, tolerance_of
from lesson_code.checks._calling import (
    cases,
    describe,
    draw,
    is_float,
    like,
    output_of,
    refuse_no_pair,
    run,
    time_axes_of,
    to_numpy,
)

ROWS = (9, 4, 1, 6, 0)  # real tokens of each row, of 9


def check_padding(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` unless padding at the end of a row changes nothing of it.

    Five rows of 9, 4, 1, 6 and 0 tokens are read in one array, with other numbers at the padding.
    The outputs of real tokens must be those of each row alone, and 0 at the padding. So must what
    the rows go on to: three more tokens are read from the states, which may have any form.

    Parameters
    ----------
    fn : callable
        ``fn(*inputs, lengths=..., initial_state=..., return_state=True)`` returns ``(out, state)``.
        Lengths are an array (B,), and the first state is None.
    inputs : callable, optional
        Returns arrays (B, N, ...), of which the checks take five rows.

    Examples
    --------
    >>> def running_sum(q, k, v, *, lengths, initial_state=None, return_state=False):
    ...     real = (np.arange(v.shape[1]) < lengths[:, None])[..., None]
    ...     total = np.cumsum(np.where(real, v, 0), axis=1)
    ...     total = total if initial_state is None else total + initial_state
    ...     last = total[:, -1:] if v.shape[1] else np.zeros((len(v), 1, 3))
    ...     return np.where(real, total, 0), last
    >>> check_padding(running_sum)
    >>> def fading_sum(q, k, v, *, lengths, initial_state=None, return_state=False):
    ...     real = (np.arange(v.shape[1]) < lengths[:, None])[..., None]
    ...     S, out = np.zeros((len(v), 3)) if initial_state is None else initial_state, []
    ...     for v_t in np.moveaxis(np.where(real, v, 0), 1, 0):
    ...         S = 0.5 * S + v_t
    ...         out.append(S)
    ...     return np.where(real, np.stack(out, axis=1) if out else v, 0), S
    >>> check_padding(fading_sum)                          # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Row 1, 4 tokens and 5 of padding, goes on wrongly: ... a decay goes on, ...
    """
    N, B = max(ROWS), len(ROWS)
    shape = {"leading": (B,)}
    ((names, args),) = cases(fn, inputs, seed, (N, shape if inputs is None else {}))
    axes = time_axes_of(inputs, seed, N, shape)
    _check_rows(args, axes, B)
    more = draw(inputs, [seed, 1], 3, shape)
    others = draw(inputs, [seed, 2], N, shape)
    args, more, others = (
        [_rows(x, a, slice(B)) for x, a in zip(y, axes, strict=True)] for y in (args, more, others)
    )
    tolerance = tolerance_of(*filter(is_float, args))

    def read(args, lengths, state=None):
        template = next(x for x in args if is_float(x))
        counts = like(np.array(lengths), template)
        counts = counts.long() if hasattr(counts, "long") else counts.astype(np.int64)
        result = run(fn, names, args, lengths=counts, initial_state=state, return_state=True)
        refuse_no_pair(result)
        return output_of(result), result[1]

    def padded(which):
        """The inputs with other numbers at the padding of some of them."""
        return [
            _with_padding(x, other, axis) if i in which and axis else x
            for i, (x, other, axis) in enumerate(zip(args, others, axes, strict=True))
        ]

    def go_on(which):
        out, state = read(padded(which), ROWS)
        return out, read(more, (3,) * B, state)[0]

    every = range(len(args))
    out, after = go_on(every)
    if out.shape[:2] != (B, N):
        raise AssertionError(f"With {describe(names, args)} your output has shape {out.shape}.")
    for b, n in enumerate(ROWS):
        row = [_rows(x, a, slice(b, b + 1), slice(n)) for x, a in zip(args, axes, strict=True)]
        own, state = read(row, (n,))
        wrong = ~close(out[b, :n], own[0], tolerance)
        told = f"Row {b}, {n} tokens and {N - n} of padding,"
        if wrong.any():
            t = int(np.argwhere(wrong)[0][0])
            raise AssertionError(
                f"{told} is wrong at position {t}: alone it has {_first(own[0], wrong):.5g} there, "
                f"in the batch {_first(out[b, :n], wrong):.5g}. Does a real token look at padding, "
                "or at another row?"
            )
        if to_numpy(out[b, n:]).any():
            raise AssertionError(
                f"{told} has outputs other than 0 at its padding, such as "
                f"{out[b, n:][out[b, n:] != 0][0]:.5g}."
            )
        last = [_rows(x, a, slice(b, b + 1)) for x, a in zip(more, axes, strict=True)]
        expected = read(last, (3,), state)[0][0]
        wrong = ~close(after[b], expected, tolerance)
        if wrong.any():
            raise AssertionError(
                f"{told} goes on wrongly: from its own state the next token gives "
                f"{_first(expected, wrong):.5g}, from that of the batch "
                f"{_first(after[b], wrong):.5g}. " + _cause(names, axes, b, after, go_on, tolerance)
            )


def _cause(names, axes, b, after, go_on, tolerance):
    """How padding has come into the state of row b."""
    clean = go_on(())[1][b]
    through = [
        names[i]
        for i in range(len(names))
        if axes[i] and not close(go_on((i,))[1][b], clean, tolerance).all()
    ]
    if through:
        return (
            f"What stands at the padding comes in through {' and '.join(through)}: it must not be "
            "written, and a key of 0 is written too where its feature is not 0."
        )
    return (
        "What stands there makes no difference, that there is something does: a decay goes on, "
        "a convolution takes padding for its last inputs, positions are counted, or the state is "
        "that of the last column."
    )


def _check_rows(args, axes, B):
    for x, axis in zip(args, axes, strict=True):
        if axis and (axis[0] != 1 or len(x) < B):
            raise ValueError(
                f"inputs must return arrays (B, N, ...) of at least {B} rows, got {tuple(x.shape)}."
            )


def _rows(x, axis, rows, times=slice(None)):
    """Rows and times of an argument, if it has any."""
    return x[rows, times] if axis else x


def _with_padding(x, other, axis):
    x, kept = np.array(to_numpy(other)), to_numpy(x)
    for b, n in enumerate(ROWS):
        x[b, :n] = kept[b, :n]
    return like(x, other)


def _first(x, wrong):
    return x[tuple(int(i) for i in np.argwhere(wrong)[0])]
