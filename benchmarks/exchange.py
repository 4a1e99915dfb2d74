"""Time of one exchange of states between processes of one machine, and a model fitted to it.

python benchmarks/exchange.py                    writes lesson_code/results/exchange.json
python benchmarks/exchange.py --output FILE      writes another file

Groups of 2, 3 and 4 processes, joined by gloo, call `linear_attention` across ranks with empty
parts, so that nothing is left to do but the exchange: the headers, the states, and their fold. The
heads have width 64, float32, forward, with one thread in each process. What counts is the slowest
rank, in the best of several rounds.

Latency and bandwidth are fitted to every other size of two processes. The other sizes, and all of
three and four processes, are predicted. All processes share the cores of one machine, whose number
is in the result: four processes on two cores are not four machines.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lesson_code import costs, measure, results
from lesson_code.torch import identity
from lesson_code.torch.distributed import linear_attention

WIDTH = 64
RANKS, HEADS = [2, 3, 4], [1, 2, 4, 8, 16, 32, 64, 128, 256]
CALLS = 5  # in a round


def seconds_of_a_call(heads, group, rounds):
    """Seconds on the slowest rank, in the best of some rounds; the first warms up."""
    empty, elapsed, best = torch.zeros(heads, 0, WIDTH), torch.zeros(()), float("inf")
    for round_number in range(rounds + 1):
        dist.all_reduce(elapsed.zero_(), group=group)  # so that all begin together
        start = time.perf_counter()
        for _ in range(CALLS):
            linear_attention(empty, empty, empty, feature_map=identity, causal=True, group=group)
        elapsed.fill_((time.perf_counter() - start) / CALLS)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
        if round_number:
            best = min(best, elapsed.item())
    return best


def be_a_rank(rank, options, file, answers):
    """Take part in every group; rank 0 answers with what was measured."""
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=max(options.ranks),
        timeout=timedelta(seconds=300),
    )
    rows = []
    for ranks in options.ranks:
        group = dist.new_group(list(range(ranks)))
        for heads in options.heads if rank < ranks else []:
            sent = costs.state_exchange_bytes(ranks, WIDTH, WIDTH, heads=heads)
            seconds = seconds_of_a_call(heads, group, options.repeats)
            rows.append({"ranks": ranks, "heads": heads, "bytes": sent, "seconds": seconds})
            if rank == 0:
                print(f"{ranks} ranks {sent:11,} bytes {1e3 * seconds:8.2f} ms", flush=True)
        dist.barrier()
    if rank == 0:
        answers.put(rows)
    dist.destroy_process_group()


def measure_rows(options):
    """Start the processes, and return their rows."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(be_a_rank, (options, f"{folder}/meet", answers), nprocs=max(options.ranks))
        return answers.get()


def fit(rows):
    """Latency and bandwidth with the least squares of relative errors."""
    terms = np.array([[2 * (row["ranks"] - 1), row["bytes"]] for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    latency, per_byte = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(rows)), rcond=None)[0]
    if latency < 0 or per_byte <= 0:
        raise RuntimeError("the times do not grow with the bytes: measure on a machine at rest.")
    return {"latency": float(latency), "bandwidth": float(1 / per_byte)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_rows(options)
    for row in rows:
        every_other = row["heads"] in options.heads[::2]
        row["fitted"] = row["ranks"] == options.ranks[0] and every_other
    model = fit([row for row in rows if row["fitted"]])
    for row in rows:
        sizes = row["ranks"], WIDTH, WIDTH
        row["predicted"] = costs.exchange_seconds(*sizes, heads=row["heads"], **model)
    result = {
        "what": "one exchange of states, heads of width 64 in float32, gloo on one machine",
        "cores": os.cpu_count(),
        "model": model,
        "rows": rows,
    }
    results.save("exchange", result, output=options.output)


if __name__ == "__main__":
    main()
