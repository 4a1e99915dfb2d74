"""The gated engines beside the plain PyTorch of the transformers library: time and memory.

python benchmarks/delta.py                  writes lesson_code/results/delta.json
python benchmarks/delta.py --output FILE    writes another file

One sequence, 8 heads, float32, two threads, forward and with gradients: what the library computes
where no kernel is installed, the same arrays in its own layout, and this package's functions.
State space duality stands beside the chunks of two models, as each has its own length for them.
Gated linear attention, which the library does not have, stands beside its own recurrence. The two
sides take turns, and the best of some rounds is kept. Bytes are the most that a forward and a
backward pass hold beyond their inputs, in units of q, k and v.

All is timed twice: as a process begins, where memory that is freed goes back to the system, and
with `measure.keep_freed_memory`, which helps the side that makes more arrays.
"""

import argparse
import importlib
import os
from functools import partial
from pathlib import Path

import torch

import lesson_code.torch as lt
from lesson_code import measure, results

SEED, HEADS = 0, 8
LENGTHS, WIDTHS = [2_048, 8_192], [64, 128]
LONG = 32_768


def of(model, name):
    """A function of the library, which looks nothing up."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    path = f"transformers.models.{model}.modeling_{model}"
    return getattr(importlib.import_module(path), name)


def their_gated_delta_rule(q, k, v, beta, g):
    return of("qwen3_next", "torch_chunk_gated_delta_rule")(q, k, v, g, beta)[0]


def their_kimi_delta_attention(q, k, v, beta, g):
    return of("kimi_linear", "chunk_kimi_delta_attention")(q, k, v, g, beta)[0]


def their_state_space_dual(chunk_size, x, g, B, C):
    """With a step of -g and a rate of -1, values that it multiplies."""
    rate = -torch.ones(x.shape[2])
    return of("nemotron_h", "mamba2_chunk_scan")(x, -g, rate, B, C, chunk_size)


# The other side, where it is not the function's own recurrence.
THEIRS = {
    ("gated_delta_rule", "transformers"): their_gated_delta_rule,
    ("kimi_delta_attention", "transformers"): their_kimi_delta_attention,
    ("state_space_dual", "transformers, chunks of Nemotron-H"): partial(
        their_state_space_dual, 128
    ),
    ("state_space_dual", "transformers, chunks of Mamba-2"): partial(their_state_space_dual, 256),
}
PAIRS = [*THEIRS, ("gated_linear_attention", "recurrent")]
LIMITS = {"kimi_delta_attention": 2_048, "gated_linear_attention": 2_048}  # the other side is slow


def inputs(name, N, D):
    """Arrays (1, H, N, .) in the order of the function's arguments."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = torch.randn(3, 1, HEADS, N, D, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    beta, rates = torch.rand(2, 1, HEADS, N, generator=generator)
    by_channel = -0.1 * torch.rand(1, HEADS, N, D, generator=generator)
    return {
        "gated_delta_rule": (q, k, v, beta, -0.1 * rates),
        "kimi_delta_attention": (q, k, v, beta, by_channel),
        "state_space_dual": (v, -0.1 * rates, k, q),
        "gated_linear_attention": (q, k, v, by_channel),
    }[name]


def sides(name, beside, N, D):
    """What is compared: functions and their arrays."""
    ours, arrays = getattr(lt, name), inputs(name, N, D)
    if beside == "recurrent":
        return {"ours": (ours, arrays), beside: (partial(ours, form=beside), arrays)}
    turned = [x.transpose(1, 2).contiguous() for x in arrays]
    return {"ours": (ours, arrays), beside: (THEIRS[name, beside], turned)}


def train(function, arrays):
    leaves = [x.detach().requires_grad_() for x in arrays]
    out = function(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


@torch.no_grad()
def read(function, arrays):
    function(*arrays)


def measure_times(name, beside, freed, N, D, repeats):
    both = sides(name, beside, N, D)
    seconds = {}
    for kind, step in (("forward", read), ("with gradients", train)):
        functions = {side: partial(step, *given) for side, given in both.items()}
        seconds[kind] = measure.seconds(functions, repeats=repeats)
    ratios = {kind: times[beside] / times["ours"] for kind, times in seconds.items()}
    shown = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())
    print(f"{name:24s} {beside:36s} {freed:9s} N = {N:6d} D = {D:4d} {shown}", flush=True)
    return {
        "name": name,
        "beside": beside,
        "freed_memory": freed,
        "N": N,
        "D": D,
        "seconds": seconds,
        "ratios": ratios,
    }


def measure_bytes(name, N, D):
    function, arrays = getattr(lt, name), inputs(name, N, D)
    size = 3 * HEADS * N * D * 4  # of q, k and v
    peak = measure.peak_bytes(partial(train, function, arrays)) / size
    print(f"{name:24s} N = {N:6d} D = {D:4d} {peak:.2f} times q, k and v", flush=True)
    return {"name": name, "N": N, "D": D, "peak": peak}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--long", type=int, default=LONG)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    shapes = [
        (*pair, N, D)
        for pair in PAIRS
        for N in options.lengths
        for D in options.widths
        if N <= LIMITS.get(pair[0], N)
    ]
    rows = []
    for freed in ("returned", "kept"):
        if freed == "kept":
            measure.keep_freed_memory()
        for name, beside, N, D in shapes:
            rows.append(measure_times(name, beside, freed, N, D, options.repeats))
    result = {
        "what": "gated engines beside transformers' plain PyTorch, 8 heads, float32, two threads",
        "transformers": importlib.import_module("transformers").__version__,
        "seed": SEED,
        "rows": rows,
        "memory": [measure_bytes(name, options.long, options.widths[0]) for name in dict(PAIRS)],
    }
    results.save("delta", result, output=options.output)


if __name__ == "__main__":
    main()
