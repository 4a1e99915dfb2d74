"""What a clock shows while other programs come and go, for the chapter on measuring.

python benchmarks/habits.py                  writes lesson_code/results/habits.json
python benchmarks/habits.py --output FILE    writes another file

First sixty calls of causal linear attention, one after another, in a process that has not called it
before. Then twenty trials of 24 calls of one function, a product of two matrices, small or large,
while another process multiplies matrices on two threads in bursts. A burst, and a pause, lasts as
long as 6 to 30 calls. Nothing is compared here: the chapter splits the 24 times of a trial into two
halves of 12, in blocks and in turns, and compares the halves.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch

from lesson_code import results
from lesson_code.torch import linear_attention

SEED, CALLS = 0, 24
SIZES = {"short": 300, "long": 1_000}


def stopwatch(function):
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bursts(call):
    """Work that comes and goes until the process is ended; `call` is the time of one call."""
    torch.set_num_threads(2)
    matrix = torch.randn(300, 300)
    rng = np.random.default_rng(SEED)
    while True:
        until = time.perf_counter() + rng.uniform(6, 30) * call
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)
        time.sleep(rng.uniform(6, 30) * call)


def disturbed(size, trials):
    """Seconds of each call in each trial, while another process works in bursts."""
    matrix = torch.randn(size, size)

    def product():
        return (matrix @ matrix).sum().item()

    call = float(np.median([stopwatch(product) for _ in range(30)]))
    other = multiprocessing.get_context("spawn").Process(target=bursts, args=(call,), daemon=True)
    other.start()
    time.sleep(4 if trials > 1 else 0)  # until it has imported torch
    times = [[stopwatch(product) for _ in range(CALLS)] for _ in range(trials)]
    other.terminate()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    q, k, v = torch.randn(3, 1, 8, 64, 64)

    def linear():
        return linear_attention(q, k, v, causal=True)

    result = {
        "what": "single calls, and trials of 24 equal calls, beside a program that works in bursts",
        "seed": SEED,
        "calls": [stopwatch(linear) for _ in range(options.calls)],
        "sizes": SIZES,
        "rows": [
            {"call": name, "trial": trial, "seconds": seconds}
            for name, size in SIZES.items()
            for trial, seconds in enumerate(disturbed(size, options.trials))
        ],
    }
    results.save("habits", result, output=options.output)


if __name__ == "__main__":
    main()
