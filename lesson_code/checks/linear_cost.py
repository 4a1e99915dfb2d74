"""Peak memory grows with N, not with N²."""

import tracemalloc
from collections.abc import Callable

import numpy as np

from lesson_code.checks._calling import cases, copy_of, run, values_of


def check_linear_cost(fn: Callable, *, inputs: Callable | None = None, seed: int = 0) -> None:
    """Refuse ``fn`` if its peak memory grows faster than its sequence.

    The peak of what ``fn`` allocates, its inputs not counted, is measured at N = 501, 1,002 and
    2,004; 64 KiB are taken for noise. From step to step linear memory grows by a factor of 2
    whatever its constant part is, the levels of a prefix scan (N log N) by 2.2, an N by N array by
    4; above 2.5 it is refused. Bytes are measured, not seconds, so a quadratic loop that stores no
    matrix passes. Keep D and M small in ``inputs``: an N by N array can hide behind N·C·M numbers
    when C·M is far above 2,000. NumPy reports its memory to ``tracemalloc``; for tensors torch is
    asked.

    Examples
    --------
    >>> check_linear_cost(lambda q, k, v: q @ (k.T @ v))
    >>> check_linear_cost(lambda q, k, v: (q @ k.T) @ v)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    AssertionError: Memory grows with N²: ...
    """
    sizes = (501, 1002, 2004)
    peaks: list[int] = []
    for N in sizes:
        ((names, args),) = cases(fn, inputs, seed, (N, {}))
        if not peaks:
            run(fn, names, args)  # whatever is imported or cached at first does not count
        peaks.append(_peak_bytes(fn, args))
    noise = 2**16
    if peaks[2] - peaks[1] > 2.5 * (peaks[1] - peaks[0]) + noise:
        measured = ", ".join(
            f"{peak:,} bytes at N = {N:,}" for N, peak in zip(sizes, peaks, strict=True)
        )
        growth = (peaks[2] - peaks[1]) / max(peaks[1] - peaks[0], 1)
        raise AssertionError(
            f"Memory grows with N²: the peak was {measured}. The second doubling of N added "
            f"{growth:.1f} times what the first one added (linear memory adds 2 times as much, an "
            f"N by N array 4 times). At N = {sizes[2]:,} one N by N array of float64 has "
            f"{8 * sizes[2] ** 2:,} bytes: is one formed, as scores, as a mask, or as an "
            "intermediate of einsum?"
        )


def _peak_bytes(fn, args):
    """The largest amount of memory that a call holds at once, its arguments not counted."""
    args = [copy_of(x) for x in args]
    if any(hasattr(x, "detach") for x in args):
        from lesson_code.measure import peak_bytes

        cuda = any(getattr(x, "is_cuda", False) for x in args)
        return peak_bytes(lambda: fn(*args), device="cuda" if cuda else "cpu")
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with np.errstate(all="ignore"):
            result = fn(*args)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    if any(hasattr(x, "detach") for x in values_of(result)):
        raise AssertionError(
            "Your function returned tensors for NumPy inputs, and their memory cannot be seen: let "
            "inputs return tensors."
        )
    return peak - before
