"""The five causal forms of linear attention, and the chunk size of the fifth: time and memory.

python benchmarks/scans.py                    writes lesson_code/results/scans.json
python benchmarks/scans.py --output FILE      writes another file
python benchmarks/scans.py --device cuda      measures a GPU, for scans_cuda.json

One head of width 64, float32, unnormalized, forward: the functions that the chapter prints. On a
CPU they run in one thread, so that the forms are compared and not how they share out their work;
the clock counts the time of the processor, so that other programs beside do not count; and freed
memory is kept, or the forms that store much would mostly wait for new pages. A form ends where it
would store gigabytes. The chunk sizes are measured at one length, beside the "count": the time in
which products of large matrices multiply as often as `costs.chunkwise_cost` says.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from lesson_code import costs, measure, results

WIDTH, SEED = 64, 0
LENGTHS = [2**i for i in range(6, 17)]
UNTIL = {"masked": 2**13, "recurrent": 2**16, "cumsum": 2**12, "scan": 2**12, "chunkwise": 2**16}
CHUNK_SIZES = [2**i for i in range(3, 11)]
CHUNKED_LENGTH = 2**14


def masked(Q, K, V):
    return torch.tril(Q @ K.T) @ V


def recurrent(Q, K, V):
    S, out = torch.zeros(K.shape[1], V.shape[1]).to(V), []
    for q, k, v in zip(Q, K, V, strict=True):
        S = torch.addr(S, k, v)  # S + outer(k, v)
        out.append(q @ S)
    return torch.stack(out)


def cumsum(Q, K, V):
    S = torch.cumsum(K[:, :, None] * V[:, None, :], dim=0)
    return (Q[:, None, :] @ S)[:, 0]


def scan(Q, K, V):
    S, distance = K[:, :, None] * V[:, None, :], 1
    while distance < len(S):
        S = torch.cat([S[:distance], S[:-distance] + S[distance:]])
        distance *= 2
    return (Q[:, None, :] @ S)[:, 0]


def chunkwise(Q, K, V, L=64):
    S, out = torch.zeros(K.shape[1], V.shape[1]).to(V), []
    for q, k, v in zip(Q.split(L), K.split(L), V.split(L), strict=True):
        out.append(torch.tril(q @ k.T) @ v + q @ S)
        S = S + k.T @ v
    return torch.cat(out)


FORMS = {f.__name__: f for f in (masked, recurrent, cumsum, scan, chunkwise)}


def measure_seconds(functions, repeats, device):
    """Like `measure.seconds`, but on a CPU in time of the processor."""
    if device != "cpu":
        return measure.seconds(functions, repeats=repeats, device=device)
    best = {}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            start = time.thread_time()
            function()
            elapsed = time.thread_time() - start
            if round_number:
                best[name] = min(elapsed, best.get(name, elapsed))
    return best


def inputs(N, device):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(N, WIDTH, generator=generator).to(device) for _ in range(3)]


def measure_forms(lengths, device, repeats):
    """One row for each length: seconds and peak bytes of every form."""
    rows = []
    for N in lengths:
        tensors = inputs(N, device)
        functions = {
            name: partial(form, *tensors) for name, form in FORMS.items() if N <= UNTIL[name]
        }
        rounds = repeats * max(1, 2**12 // N)  # the short ones more often
        seconds = measure_seconds(functions, rounds, device)
        peaks = {n: measure.peak_bytes(f, device=device) for n, f in functions.items()}
        rows.append({"N": N, "seconds": seconds, "bytes": peaks})
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in seconds.items())
        print(f"N = {N:6d} {shown}", flush=True)
    return rows


def measure_chunk_sizes(N, device, repeats):
    """One row for each chunk size: seconds of the chunkwise form, and of its count."""
    tensors, size = inputs(N, device), 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device)
    functions = {L: partial(chunkwise, *tensors, L) for L in CHUNK_SIZES}
    functions["product"] = lambda: matrix @ matrix
    seconds = measure_seconds(functions, repeats, device)
    per_operation = seconds.pop("product") / size**3
    rows = []
    for L, elapsed in seconds.items():
        count = per_operation * costs.chunkwise_cost(N, WIDTH, WIDTH, L).work
        rows.append({"L": L, "seconds": {"chunkwise": elapsed, "count": count}})
        print(f"L = {L:6d} {1e3 * elapsed:.2f} ms, count {1e3 * count:.2f} ms", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    result = {
        "what": "causal forms of linear attention, one head, D = M = 64, float32, forward",
        "seed": SEED,
        "rows": measure_forms(options.lengths, options.device, options.repeats),
        "chunk_sizes": {
            "N": CHUNKED_LENGTH,
            "rows": measure_chunk_sizes(CHUNKED_LENGTH, options.device, 3 * options.repeats),
        },
    }
    results.save("scans", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
