"""The chapter's own forms of causal linear attention, timed: how work and waiting trade off.

python benchmarks/forms.py                  writes lesson_code/results/forms.json
python benchmarks/forms.py --output FILE    writes another file

One head of width 64, float32, NumPy, one thread, the sum without the normalizer. Seconds
of the processor (on one thread, the time of the clock if nothing else runs). Each chunk length is
one row; a length of 1 is the recurrence, token by token.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from lesson_code import results

WIDTH, SEED = 64, 0
LENGTHS = [*(2**i for i in range(13)), 16_384]


def recurrent(Q, K, V):
    S, O_sum = np.zeros((K.shape[1], V.shape[1]), dtype=K.dtype), []
    for q, k, v in zip(Q, K, V, strict=True):
        S = S + np.outer(k, v)
        O_sum.append(q @ S)
    return np.array(O_sum)


def chunkwise(Q, K, V, L):
    S, O_sum = np.zeros((K.shape[1], V.shape[1]), dtype=K.dtype), []
    for start in range(0, len(Q), L):
        chunk = slice(start, start + L)
        q, k, v = Q[chunk], K[chunk], V[chunk]
        O_sum.append(np.tril(q @ k.T) @ v + q @ S)
        S = S + k.T @ v
    return np.vstack(O_sum)


def best_seconds(function, repeats):
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for the record; the arrays are NumPy's
    rng = np.random.default_rng(SEED)
    Q, K, V = rng.standard_normal((3, options.tokens, WIDTH), dtype=np.float32)
    rows = []
    for L in options.lengths:
        form = (lambda: recurrent(Q, K, V)) if L == 1 else (lambda L=L: chunkwise(Q, K, V, L))
        seconds = best_seconds(form, options.repeats)
        rows.append({"L": L, "seconds": seconds})
        print(f"L = {L:6d} {1e3 * seconds:8.1f} ms", flush=True)
    result = {
        "what": "causal linear attention in chunks of L, one head, C = M = 64, float32, NumPy",
        "seed": SEED,
        "tokens": options.tokens,
        "rows": rows,
    }
    results.save("forms", result, output=options.output)


if __name__ == "__main__":
    main()
