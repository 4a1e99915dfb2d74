"""What moves the length from which on linear attention is faster than softmax attention.

python benchmarks/crossings.py                  writes lesson_code/results/crossings.json
python benchmarks/crossings.py --output FILE    writes another file
python benchmarks/crossings.py --device cuda    measures a GPU, for crossings_cuda.json

The base is one sequence, 8 heads of width 64, float32, causal, the forward pass alone, on one
thread: torch's softmax kernel against the default form of `linear_attention`. Every other setting
changes one thing. The two take turns at each length, and lengths double until softmax attention
takes more than twice as long. All of it is run three times, one time after another.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from lesson_code import measure, results
from lesson_code.torch import linear_attention, softmax_attention

SEED = 0
LENGTHS = [2**i for i in range(6, 15)]
BASE = {
    "batch": 1,
    "heads": 8,
    "width": 64,
    "dtype": "float32",
    "threads": 1,
    "pass": "forward",
    "softmax": "tiles",
    "form": None,
}
SETTINGS = {
    "base": {},
    "width 32": {"width": 32},
    "width 128": {"width": 128},
    "1 head": {"heads": 1},
    "8 sequences": {"batch": 8},
    "two threads": {"threads": 2},
    "training": {"pass": "forward + backward"},
    "bfloat16": {"dtype": "bfloat16"},
    "matrix stored": {"softmax": "matrix"},
    "token by token": {"form": "recurrent"},
}


def functions(options, N, device):
    """The two rivals under these options, as functions without arguments."""
    generator = torch.Generator().manual_seed(SEED)
    shape = options["batch"], options["heads"], N, options["width"]
    dtype, backward = getattr(torch, options["dtype"]), options["pass"] != "forward"
    q, k, v, grad_out = (
        torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)
    )

    def call(function):
        def run():
            if not backward:
                with torch.no_grad():
                    return function(q, k, v)
            tracked = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(function(*tracked), tracked, grad_out)

        return run

    def softmax(q, k, v):
        if options["softmax"] == "matrix":
            return softmax_attention(q, k, v, causal=True)
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def linear(q, k, v):
        return linear_attention(q, k, v, causal=True, form=options["form"])

    return {"softmax": call(softmax), "linear": call(linear)}


def race(setting, options):
    """Times of both at each length, until softmax attention takes twice as long."""
    torch.set_num_threads(setting["threads"])
    for N in options.lengths:
        repeats = options.repeats if N <= 1_024 else min(options.repeats, 5)
        rivals = functions(setting, N, options.device)
        times = measure.seconds(rivals, repeats=repeats, device=options.device)
        yield {"N": N, "seconds": times}
        if times["softmax"] > 2 * times["linear"]:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kept = measure.keep_freed_memory()
    rows = []
    for run in range(options.runs):
        for name in options.settings:
            for row in race(BASE | SETTINGS[name], options):
                rows.append({"run": run, "setting": name, **row})
                shown = ", ".join(f"{n} {1e3 * t:.3f} ms" for n, t in row["seconds"].items())
                print(f"run {run} {name:15s} N = {row['N']:5d}  {shown}", flush=True)
    torch.set_num_threads(BASE["threads"])
    result = {
        "what": "causal attention, crossings of softmax and linear",
        "seed": SEED,
        "keeps_freed_memory": kept,
        "base": BASE,
        "rows": rows,
    }
    results.save("crossings", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
