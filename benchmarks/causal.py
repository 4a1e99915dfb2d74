"""Causal linear attention against softmax attention: time and memory over the sequence length.

python benchmarks/causal.py                    writes lesson_code/results/causal.json
python benchmarks/causal.py --output FILE      writes another file
python benchmarks/causal.py --device cuda      measures a GPU, for causal_cuda.json

One sequence, 8 heads of width 64, float32; the default form of `linear_attention`, normalized and
not, and `scaled_dot_product_attention(is_causal=True)`, each forward alone and forward plus
backward. At every length all of them take turns, so that their ratios hold on a busy machine. The
"floor" is the time of the same multiplications as products of large matrices, which is what the
machine can do at best. The process keeps the memory that it frees, so that no function pays for new
pages. Where softmax attention would take minutes it is left out.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from lesson_code import measure, results
from lesson_code.torch import linear_attention

HEADS, WIDTH, CHUNK, SEED = 8, 64, 64, 0
LENGTHS = [2**i for i in range(8, 17)]
SOFTMAX_UNTIL = {"cpu": 2**14, "cuda": 2**16}
# Products of 64 by 64 matrices for each chunk. Forward: q kᵀ, A v, kᵀ v, q S. Backward: five inside
# the chunk (A, dA, and one each for dq, dk, dv); between chunks kᵀ v twice, qᵀ dn, and three reads.
PRODUCTS = {"forward": 4, "forward + backward": 4 + 11}


def attention(name):
    if name == "softmax":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    normalize = name == "linear, normalized"
    return lambda q, k, v: linear_attention(q, k, v, causal=True, normalize=normalize)


def passes(function, inputs, grad_out):
    """Functions without arguments: the forward pass alone, and with the backward pass."""

    def forward():
        with torch.no_grad():
            return function(*inputs)

    def forward_and_backward():
        tracked = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*tracked), tracked, grad_out)

    return {"forward": forward, "forward + backward": forward_and_backward}


def floor(N, products, device):
    """A function that multiplies as often as linear attention, in large square matrices."""
    size = 1024 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device)
    multiplications = products * HEADS * N * CHUNK * WIDTH
    return lambda: matrix @ matrix, multiplications / size**3


def measure_length(N, device, repeats):
    """Rows of the result for one length: seconds of every function, bytes, and the floors."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v, grad_out = (
        torch.randn(1, HEADS, N, WIDTH, generator=generator).to(device) for _ in range(4)
    )
    names = ["linear", "linear, normalized"]
    if N <= SOFTMAX_UNTIL[device]:
        names.append("softmax")
    rows = []
    for which in PRODUCTS:
        functions = {n: passes(attention(n), (q, k, v), grad_out)[which] for n in names}
        product, factor = floor(N, PRODUCTS[which], device)
        times = measure.seconds({**functions, "floor": product}, repeats=repeats, device=device)
        times["floor"] *= factor
        row = {"N": N, "pass": which, "seconds": times}
        row["bytes"] = {n: measure.peak_bytes(f, device=device) for n, f in functions.items()}
        rows.append(row)
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in times.items())
        print(f"N = {N:6d} {which:18s} {shown}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = measure.keep_freed_memory()
    rows = []
    for N in options.lengths:
        rows += measure_length(N, options.device, options.repeats)
    result = {
        "what": "causal attention, batch 1, heads 8, D = M = 64, float32",
        "seed": SEED,
        "keeps_freed_memory": kept,
        "input_bytes_per_position": 4 * HEADS * WIDTH,
        "rows": rows,
    }
    results.save("causal", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
