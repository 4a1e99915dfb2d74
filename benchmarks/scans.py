"""The five causal forms of linear attention, and the chunk size of the fifth: time and memory.

python benchmarks/scans.py                    writes lesson_code/results/scans.json
python benchmarks/scans.py --output FILE      writes another file
python benchmarks/scans.py --device cuda      measures a GPU, for scans_cuda.json

One head of width 64, float32, the identity map, unnormalized, forward; on a CPU one thread, so that
the forms are compared and not how they share out their work. A form ends where it would store
gigabytes. The chunk sizes are measured at one length, beside the "count": the time in which
products of large matrices multiply as often as `costs.chunkwise_cost` says.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from lesson_code import costs, measure, results
from lesson_code.torch import identity, linear_attention

WIDTH, SEED = 64, 0
LENGTHS = [2**i for i in range(6, 17)]
UNTIL = {"masked": 2**13, "recurrent": 2**16, "cumsum": 2**12, "scan": 2**12, "chunkwise": 2**16}
CHUNK_SIZES = [2**i for i in range(3, 11)]
CHUNKED_LENGTH = 2**14


def attend(q, k, v, form, chunk_size=64):
    options = {"feature_map": identity, "normalize": False, "chunk_size": chunk_size}
    return linear_attention(q, k, v, causal=True, form=form, **options)


def inputs(N, device):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(N, WIDTH, generator=generator).to(device) for _ in range(3)]


def measure_forms(lengths, device, repeats):
    """One row for each length: seconds and peak bytes of every form."""
    rows = []
    for N in lengths:
        tensors = inputs(N, device)
        functions = {
            form: partial(attend, *tensors, form) for form, until in UNTIL.items() if N <= until
        }
        seconds = measure.seconds(functions, repeats=repeats, device=device)
        peaks = {n: measure.peak_bytes(f, device=device) for n, f in functions.items()}
        rows.append({"N": N, "seconds": seconds, "bytes": peaks})
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in seconds.items())
        print(f"N = {N:6d} {shown}", flush=True)
    return rows


def measure_chunk_sizes(N, device, repeats):
    """One row for each chunk size: seconds of the chunkwise form, and of its count."""
    tensors, size = inputs(N, device), 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device)
    functions = {L: partial(attend, *tensors, "chunkwise", L) for L in CHUNK_SIZES}
    functions["product"] = lambda: matrix @ matrix
    seconds = measure.seconds(functions, repeats=repeats, device=device)
    per_operation = seconds.pop("product") / size**3
    rows = []
    for L, time in seconds.items():
        count = per_operation * costs.chunkwise_cost(N, WIDTH, WIDTH, L).work
        rows.append({"L": L, "seconds": {"chunkwise": time, "count": count}})
        print(f"L = {L:6d} {1e3 * time:.2f} ms, count {1e3 * count:.2f} ms", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
