"""Time and memory of functions."""

from __future__ import annotations

import platform
import subprocess
import sys
import time

import pytest
import torch

from lesson_code import measure


def test_functions_take_turns() -> None:
    calls = []
    times = measure.seconds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2
    )
    assert calls == ["a", "b"] * 3  # the first round is not timed
    assert list(times) == ["a", "b"]


def test_the_best_round_counts() -> None:
    waits = iter([0.2, 0.2, 0.02, 0.2])
    seconds = measure.seconds({"nap": lambda: time.sleep(next(waits))}, repeats=3)["nap"]
    assert 0.02 <= seconds < 0.19


def test_peak_counts_what_is_held_at_once() -> None:
    x = torch.ones(1000)

    def twice_in_a_row():
        y = x + 1
        del y
        return x + 2

    assert measure.peak_bytes(lambda: x.clone()) == 4000
    assert measure.peak_bytes(lambda: [x.clone(), x.clone()]) == 8000
    assert 4000 <= measure.peak_bytes(twice_in_a_row) < 5000


def test_the_profiler_is_silent(capfd) -> None:
    measure.peak_bytes(lambda: torch.ones(10))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_machine() -> None:
    machine = measure.machine()
    assert machine["threads"] == torch.get_num_threads()
    assert machine["torch"] == torch.__version__


KEEPING = """
import resource, numpy
from lesson_code.measure import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    numpy.ones(2**24)  # 128 MiB, written and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = new_pages(), new_pages()
kept = keep_freed_memory()
print(int(kept), *returned, new_pages(), new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc is asked for it")
def test_freed_memory_is_kept() -> None:
    """In a process of its own: the setting is for all of it."""
    result = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True)
    kept, first, again, last_new, from_kept = map(int, result.stdout.split())
    assert kept == 1
    assert again > first / 2  # it had been returned to the system, page by page
    assert from_kept < last_new / 2


def test_other_systems_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(measure.platform, "libc_ver", lambda: ("", ""))
    assert measure.keep_freed_memory() is False
