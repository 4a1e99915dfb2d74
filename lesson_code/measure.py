"""Time and memory of torch functions, on the reader's own device.

A machine that does other work beside this one has slow moments. Functions that are to be compared
are therefore run in turn, and the best of several runs of each is kept.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable

import torch

__all__ = ["keep_freed_memory", "machine", "peak_bytes", "seconds"]


def seconds(
    functions: dict[str, Callable[[], object]], *, repeats: int = 5, device: str = "cpu"
) -> dict[str, float]:
    """Best time of each of several functions, which take turns.

    Parameters
    ----------
    functions : dict
        Functions without arguments, by name.
    repeats : int
        Timed rounds, after one that is not timed.
    device : str
        Where the functions work: on "cuda" the clock waits until their kernels have ended.

    Returns
    -------
    dict
        Seconds, by name.

    Examples
    --------
    >>> x = torch.randn(200, 200)
    >>> times = seconds({"sum": lambda: x.sum(), "product": lambda: x @ x @ x @ x})
    >>> list(times), min(times.values()) > 0
    (['sum', 'product'], True)
    """
    best: dict[str, float] = {}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            elapsed = time.perf_counter() - start
            if round_number:
                best[name] = min(elapsed, best.get(name, elapsed))
    return best


def peak_bytes(function: Callable[[], object], *, device: str = "cpu") -> int:
    """The most tensor memory that a function holds at once beyond what was there before.

    Parameters
    ----------
    function : callable
        Without arguments. What it returns counts, its inputs do not.
    device : str
        "cpu" or "cuda".

    Returns
    -------
    int
        Bytes.

    Examples
    --------
    >>> x = torch.randn(100, 100)
    >>> peak_bytes(lambda: x.clone())
    40000
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its start on stderr
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def keep_freed_memory() -> bool:
    """Let this process keep large arrays that are freed, for the next ones to take.

    glibc returns an array above 32 MiB to the system when it is freed. The next one of its size is
    then new, and the system hands it out page by page when it is first written, which a function
    that computes little for each number waits for. On a GPU PyTorch's allocator keeps it anyway.

    Returns
    -------
    bool
        Whether this system could be told so: it is Linux with glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    return all(libc.mallopt(option, 2**30) for option in (trim_threshold, mmap_threshold))


def machine(device: str = "cpu") -> dict[str, str | int]:
    """What a measurement depends on: processor, threads, versions.

    Examples
    --------
    >>> sorted(machine())
    ['device', 'python', 'threads', 'torch']
    """
    name = torch.cuda.get_device_name(device) if device != "cpu" else _processor()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor():
    """The processor's name, or its architecture where the system does not tell the name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
