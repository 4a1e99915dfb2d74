"""A sequence that is split anywhere gives the same outputs, through the state."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from lesson_code.checks._agreement import close, row_factors, same, tolerance_of
from lesson_code.checks._calling import (
    cases,
    copy_of,
    describe,
    is_array,
    is_float,
    length_of,
    map_arrays,
    output_of,
    refuse_no_pair,
    run,
    time_axes_of,
    time_axis_of,
    to_numpy,
    unchanged,
    values_of,
)


def check_streaming(
    fn: Callable,
    *,
    inputs: Callable | None = None,
    seed: int = 0,
    empty_pieces: bool = True,
) -> None:
    """Refuse ``fn`` unless a sequence in pieces gives the outputs of the whole sequence.

    The first piece runs with ``initial_state=None`` and each later one with the state that the one
    before it returned. Sequences of length 7, 131 and, with leading dimensions, 9 are split at many
    places, into single tokens, and into pieces of which some are empty. States are compared by the
    outputs that they lead to, so they may have any form. Arguments without a time axis, such as a
    decay, go to every piece whole.

    Parameters
    ----------
    fn : callable
        ``fn(*inputs, initial_state=..., return_state=True)`` returns ``(out, state)``.
    empty_pieces : bool
        Whether to try pieces of length 0 too, which a function for N >= 1 need not stand.

    Examples
    --------
    >>> import numpy as np
    >>> def running_sum(q, k, v, *, initial_state=None, return_state=False):
    ...     out = np.cumsum(v, axis=-2)
    ...     if initial_state is not None:
    ...         out = out + initial_state[..., None, :]
    ...     return out, out[..., -1, :] if v.shape[-2] else initial_state
    >>> check_streaming(running_sum)
    >>> check_streaming(lambda q, k, v, **_: (np.cumsum(v, axis=-2), None))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Split at 3, position 3 is wrong: ... is initial_state used?
    """
    for N, shape in (7, {}), (131, {}), (9, {"leading": (2, 4)}):
        for names, args in cases(fn, inputs, seed, (N, shape)):
            axes = time_axes_of(inputs, seed, N, shape)
            cuts = (N // 2, 1, 2, N - 2, N - 1) if N < 100 else (63, 64, 65, 128)
            splits = [*((cut,) for cut in cuts), (2, 3, N - 3), tuple(range(1, N))]
            with_empty_pieces = [(0,), (N,), (N // 2, N // 2)]
            if empty_pieces:
                splits += with_empty_pieces
            _check_splits(fn, names, args, axes, splits)


def _check_splits(fn, names, args, axes, splits):
    N = length_of(args, axes)
    whole, _ = _step(fn, names, args, None)
    time = time_axis_of(whole, args, axes)
    whole = np.moveaxis(whole, time, 0)
    tolerance = tolerance_of(whole, *filter(is_float, args))

    def step(start, stop, state):
        """Output of one piece, time first, and the state after it."""
        piece = [_slice(x, axis, start, stop) for x, axis in zip(args, axes, strict=True)]
        out, state = _step(fn, names, piece, state)
        if out.ndim != whole.ndim or out.shape[time] != stop - start:
            raise AssertionError(
                f"With {describe(names, piece)} your output has shape {out.shape}."
            )
        return np.moveaxis(out, time, 0), state

    for cuts in splits:
        pieces, outputs, states = list(pairwise((0, *cuts, N))), [], [None]
        for start, stop in pieces:
            out, state = step(start, stop, states[-1])
            outputs.append(out)
            states.append(state)
        got = np.concatenate(outputs)
        again = step(*pieces[-1], states[-2])[0]
        if not same(again, outputs[-1], tolerance):
            raise AssertionError(
                "Two calls with the same state give different outputs: your function changed in "
                "place the state that it was given, or keeps something between calls. All that "
                "later positions need belongs in the state, and a new state in a new object."
            )
        wrong = ~close(got, whole, tolerance)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            number = next(i for i, (_, stop) in enumerate(pieces) if index[0] < stop)
            start, stop = pieces[number]
            raise AssertionError(
                f"Split at {', '.join(map(str, cuts)) if len(cuts) < 4 else 'every position'}, "
                f"position {index[0]} is wrong: the whole sequence gives {whole[index]:.5g} there, "
                f"the pieces give {got[index]:.5g}. "
                + _cause_of_split(
                    step,
                    start,
                    stop,
                    states[: number + 1],
                    outputs[number],
                    whole[start:stop],
                    tolerance,
                )
            )


def _step(fn, names, args, state):
    """Call ``fn`` for one piece; refuse what is not a pair, and a changed state."""
    given = copy_of(state)
    try:
        result = run(fn, names, args, initial_state=state, return_state=True)
    except AssertionError as error:
        if all(to_numpy(x).size for x in args if is_array(x)):
            raise
        raise AssertionError(
            f"{error} An empty piece has an empty output and leaves the state as it was."
        ) from error
    refuse_no_pair(result)
    before, after = values_of(given), values_of(state)
    if len(before) != len(after) or not all(map(unchanged, before, after)):
        raise AssertionError(
            "Your function changed in place the state that it was given: whoever holds that state "
            "can no longer continue from it. Write S = S + ..., which makes a new array, in place "
            "of S += ...."
        )
    return output_of(result), result[1]


def _slice(x, axes, start, stop):
    for axis in axes:
        x = x[(slice(None),) * axis + (slice(start, stop),)]
    return x


def _cause_of_split(step, start, stop, states, got, want, tolerance):
    """What may have become of the state, the last of ``states``, at the start of a piece."""
    state = states[-1]
    if start == 0:
        return (
            "This is in the first piece, so the output there depends on later positions: see "
            "check_causal."
        )
    if same(got, step(start, stop, None)[0], tolerance):
        values = list(map(to_numpy, values_of(state)))
        if values and not any(x.any() for x in values):
            return "The state that your function returned is all zeros."
        return "The piece comes out as if the sequence began there: is initial_state used?"
    # A state that is read twice is right at half its size; one that was kept twice is a sum.
    half = map_arrays(lambda x: x / 2 if is_float(x) else x, state)
    now, right, earlier = (
        list(map(to_numpy, values_of(x))) for x in (state, step(0, start, None)[1], states[-2])
    )
    kept_twice = any(
        a.shape == b.shape == c.shape and c.any() and same(a, b + c, tolerance)
        for a, b, c in zip(now, right, earlier, strict=False)
    )
    if kept_twice or same(step(start, stop, half)[0], want, tolerance):
        return "What came before the split is counted twice."
    if row_factors(got, want, tolerance) is not None:
        return (
            "Each output is a multiple of the right one: the sums are carried along, but not the "
            "normalizer z (or the other way round)."
        )
    if stop - start > 1 and same(got[1:], want[1:], tolerance):
        return (
            "Only the first position after the split is wrong: something that it needs from the "
            "position before it (the last input of a token shift or a convolution) is not carried."
        )
    return (
        "The state lacks something that later positions need: is it returned after the last "
        "write, and is everything that the recurrence carries in it?"
    )
