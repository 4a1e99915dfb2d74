"""Why two results may differ: NumPy arrays in, a sentence for the reader out.

Each ``cause_...`` function compares what came, a, with what was expected, b, and returns the first
explanation that fits exactly, or an empty string. Time is axis -2.
"""

import numpy as np

from lesson_code.checks._agreement import row_factors, same


def cause_of_shape(a, b, tolerance):
    """A likely cause of the difference between two shapes."""
    if a.ndim > 1 and b.ndim > 1 and a.shape == np.swapaxes(b, -1, -2).shape:
        if same(a, np.swapaxes(b, -1, -2), tolerance):
            return "Your output is the transpose."
        return "Is your output transposed?"
    if a.ndim == b.ndim - 1:
        return (
            "Is an axis summed away (keepdims=True keeps it), or only the last position returned?"
        )
    if a.ndim > 1 and a.ndim == b.ndim and a.shape[-2:] == (b.shape[-2], b.shape[-2]):
        return "This is the N by N matrix of weights: multiply it by v."
    return "Write the shape of each line's result beside it."


def cause(a, b, tolerance, in_time=True):
    """A likely cause of the difference between an output and what was expected, or ''.

    Without ``in_time`` the axis -2 is any axis, such as the rows of a state.
    """
    if not a.any():
        return "Your output is zero everywhere."
    lost = ~np.isfinite(a) & np.isfinite(b)
    if lost.any():
        if in_time and a.ndim > 1 and lost[..., 0, :].all() and not lost[..., 1:, :].any():
            return (
                "Only position 0 is not finite: it sees no token at all, and 0/0 is NaN. The mask "
                "must keep the diagonal, j <= t."
            )
        return (
            "Not a number or infinite: look for 0/0, an exponential of a large number, inf - inf."
        )
    factor = (a * b).sum() / (b * b).sum()
    if same(a, factor * b, tolerance) and f"{factor:.5g}" != "1":
        # One number alone is a multiple of any other: only 2, 1/3 or -1 times says something.
        if a.size > 1:
            sign = f"{factor:.5g}" == "-1"
            why = "a sign exchanged" if sign else "a scale missing, or applied twice"
            return f"Your output is {factor:.5g} times the reference everywhere: is {why}?"
        if any(np.isclose(x, np.round(x), rtol=1e-9, atol=0) for x in (factor, 1 / factor)):
            return f"Your output is {factor:.5g} times the reference."
    if a.ndim < 2:
        return ""
    if a.shape[-1] == a.shape[-2] > 1 and same(a, np.swapaxes(b, -1, -2), tolerance):
        return "Your output is the transpose."
    rows, columns = b.sum(-1), a.sum(-2)
    if same(rows, np.ones_like(rows), tolerance) and same(
        columns, np.ones_like(columns), tolerance
    ):
        return (
            "Your columns sum to one, but the rows should: normalize over the last axis, the keys."
        )
    return (in_time and _cause_in_time(a, b, tolerance)) or _small_difference(a, b)


def _cause_in_time(a, b, tolerance):
    N = a.shape[-2]
    if N == 1:
        return ""
    if same(a, b[..., ::-1, :], tolerance):
        return "Your output is right in reversed order of time."
    if same(a[..., 1:, :], b[..., :-1, :], tolerance):
        return "Your output is the right one, one position late."
    if same(a[..., :-1, :], b[..., 1:, :], tolerance):
        return "Your output is the right one, one position early."
    zero = [not a[..., t, :].any() and b[..., t, :].any() for t in range(N)]
    if zero[0]:
        until = zero.index(False) if False in zero else N
        return (
            f"{_positions(0, until)} zero: no token is seen there, not even itself. Does the "
            "mask keep the diagonal (j <= t); is the memory read after the write; is the own chunk "
            "included?"
        )
    factors = row_factors(a, b, tolerance)
    if factors is not None and factors.all() and not np.allclose(factors, 1, rtol=0, atol=1e-3):
        last = " The last position is right: is the mask applied after normalizing?"
        return (
            f"Every position is a multiple of the right one ({factors.flat[0]:.5g} times at "
            f"position 0, {factors.flat[N - 1]:.5g} times at position {N - 1}), so the normalizer "
            "is missing, or sums over the wrong axis or the wrong positions."
            + (last if np.isclose(factors[..., -1], 1).all() else "")
        )
    small = _small_difference(a, b)
    right = [same(a[..., t, :], b[..., t, :], tolerance) for t in range(N)]
    if right[-1] and not any(right[:-1]):
        return small or (
            "Only the last position agrees: it alone may see all positions. Position t must see "
            "j <= t only; sums over the whole axis, such as K^T V, see the future."
        )
    if right[0] and not any(right[1:]):
        return small or (
            "Position 0 agrees and no later one does. Is what came before carried along, summed "
            "over time (axis -2), and read at every step? If the weights of a row sum to one, "
            "position 0 is right whatever they are: are scale, similarity and feature map right?"
        )
    if right[0] and False in right:
        until = right.index(False)
        return f"{_positions(0, until)} right, position {until} is the first that is not. {small}"
    return ""


def _positions(start, stop):
    return f"Position {start} is" if stop - start == 1 else f"Positions {start} to {stop - 1} are"


def _small_difference(a, b):
    share = np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)
    if share > 1e-3:
        return ""
    return (
        f"The difference is small, {share:.1e} of the largest value at most: is an epsilon added, "
        "or a sum kept in lower precision?"
    )


def cause_of_gradient(a, b, tolerance):
    """A likely cause of the difference between a gradient and its finite differences, or ''."""
    if not np.isfinite(a).all():
        return "Not a number or infinite: look for 0/0 and for exponentials of large numbers."
    if not a.any():
        return "It is zero everywhere: is a path from this input to the output left out?"
    factor = (a * b).sum() / (b * b).sum()
    if same(a, factor * b, tolerance):
        return f"It is {factor:.5g} times the right one everywhere: is a scale or a sign missing?"
    if a.ndim > 1:
        right = [same(a[..., t, :], b[..., t, :], tolerance) for t in range(a.shape[-2])]
        if right[-1] and not any(right[:-1]):
            return (
                "Only the last position is right: what position j writes is read at every t >= j, "
                "so its gradient sums over later positions, a scan that runs backward."
            )
        if right[0] and not any(right[1:]):
            return "Only position 0 is right: is the scan run in the wrong direction of time?"
    return ""
