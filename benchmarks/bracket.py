"""Both orders of the same product, through the matrix and through the state: time and memory.

python benchmarks/bracket.py                  writes lesson_code/results/bracket.json
python benchmarks/bracket.py --output FILE    writes another file
python benchmarks/bracket.py --device cuda    measures a GPU, for bracket_cuda.json

One head of width 64, float32, every position sees every other, elu + 1, normalized, forward. Two
parts of the order with the state are timed alone: the features of q and k, and the products with S.
On a CPU one thread, so that the orders are compared and not how they share out their work.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from lesson_code import measure, results
from lesson_code.torch import elu_plus_one, linear_attention

WIDTH, SEED = 64, 0
LENGTHS = [*(2**i for i in range(4, 14)), 10_000]


def measure_orders(N, device, repeats):
    """Seconds and peak bytes of both orders for N tokens, and seconds of parts of the second."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(N, WIDTH, generator=generator).to(device) for _ in range(3))
    orders = {
        form: partial(linear_attention, q, k, v, form=form) for form in ("quadratic", "linear")
    }
    q_features, k_features = elu_plus_one(q), elu_plus_one(k)
    parts = {
        "features": lambda: (elu_plus_one(q), elu_plus_one(k)),
        "products": lambda: q_features @ (k_features.mT @ v),
    }
    seconds = measure.seconds(orders | parts, repeats=repeats, device=device)
    peaks = {n: measure.peak_bytes(f, device=device) for n, f in orders.items()}
    ratio = seconds["quadratic"] / seconds["linear"]
    print(f"N = {N:6d} {ratio:6.2f}", flush=True)
    return {"N": N, "seconds": seconds, "bytes": peaks}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {
        "what": "both orders of linear attention, one head, C = D = M = 64, float32, forward",
        "seed": SEED,
        "keeps_freed_memory": measure.keep_freed_memory(),
        "rows": [measure_orders(N, options.device, options.repeats) for N in options.lengths],
    }
    results.save("bracket", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
