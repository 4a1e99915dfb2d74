"""Every model of the family beside softmax attention: time and memory of training.

python benchmarks/family.py                    writes lesson_code/results/family.json
python benchmarks/family.py --output FILE      writes another file
python benchmarks/family.py --device cuda      measures a GPU, for family_cuda.json

Forward and backward pass with the gradients of all inputs, one sequence, float32: 8 heads of width
64, or as many channels, 512, where a model has no heads; the selective scan has 16 numbers a
channel. "fast" is the form to train with, which "form" names, and "recurrent" the loop over
positions. All fast forms and `scaled_dot_product_attention(is_causal=True)` take turns, then each
recurrent form, which is slow, a few times with the fast one beside it: "ratio" is how many times as
fast that is. The process keeps the memory that it frees, so that no function pays for new pages.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention, softplus

import lesson_code.torch as lt
from lesson_code import measure, results

HEADS, WIDTH, STATE, SEED = 8, 64, 16, 0
CHANNELS = HEADS * WIDTH


def models(N, device):
    """By name: the form to train with, and the function and its inputs, those to differentiate."""
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    heads = (1, HEADS, N)
    q, k, v = (draw(*heads, WIDTH) for _ in range(3))
    x, y, z = (draw(1, N, CHANNELS) for _ in range(3))
    B, C = draw(1, N, STATE), draw(1, N, STATE)
    unit, beta = normalize(k, dim=-1), draw(*heads).sigmoid()
    decay, decays = logsigmoid(draw(*heads)) / 16, logsigmoid(draw(*heads, WIDTH)) / 16
    bonus, rate, skip = draw(HEADS, WIDTH), softplus(draw(CHANNELS)), draw(CHANNELS)
    A = -torch.arange(1.0, STATE + 1).to(device).expand(CHANNELS, STATE)
    gammas = lt.retention_decays(HEADS).to(device)  # fixed: RetNet does not train them

    def retention(q, k, v, **options):
        return lt.retention(q, k, v, gammas, **options)

    def softmax(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    return {
        "retention": ("chunkwise", retention, (q, k, v)),
        "gated_linear_attention": ("chunkwise", lt.gated_linear_attention, (q, k, v, decays)),
        "rwkv6": ("chunkwise", lt.rwkv6, (q, k, v, decays, bonus)),
        "state_space_dual": ("chunkwise", lt.state_space_dual, (v, decay, k, q)),
        "delta_rule": ("chunkwise", lt.delta_rule, (q, unit, v, beta)),
        "gated_delta_rule": ("chunkwise", lt.gated_delta_rule, (q, unit, v, beta, decay)),
        "selective_scan": ("scan", lt.selective_scan, (x, softplus(y - 3), A, B, C, skip)),
        "wkv": ("parallel", lt.wkv, (x, y, rate, skip)),
        "aft_simple": (None, partial(lt.aft_simple, causal=True), (x, y, z)),
        "softmax": (None, softmax, (q, k, v)),
    }


def training(function, inputs, form):
    """A function without arguments: the forward and the backward pass, in one form."""
    options = {"form": form} if form else {}

    def run():
        tracked = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*tracked, **options).sum(), tracked)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recurrent-repeats", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = measure.keep_freed_memory()
    device, family = options.device, models(options.length, options.device)
    fast = {
        name: training(function, inputs, form) for name, (form, function, inputs) in family.items()
    }
    seconds = measure.seconds(fast, repeats=options.repeats, device=device)
    rows = []
    for name, (form, function, inputs) in family.items():
        row = {"name": name, "form": form, "seconds": {"fast": seconds[name]}}
        row["bytes"] = {"fast": measure.peak_bytes(fast[name], device=device)}
        if form:
            both = {"fast": fast[name], "recurrent": training(function, inputs, "recurrent")}
            turns = measure.seconds(both, repeats=options.recurrent_repeats, device=device)
            row["seconds"]["recurrent"] = turns["recurrent"]
            row["bytes"]["recurrent"] = measure.peak_bytes(both["recurrent"], device=device)
            row["ratio"] = turns["recurrent"] / min(turns["fast"], seconds[name])
        rows.append(row)
        shown = ", ".join(f"{which} {t:.3f} s" for which, t in row["seconds"].items())
        print(f"{name:24s} {shown}, ratio {row.get('ratio', 1):.1f}", flush=True)
    result = {
        "what": "the family, batch 1, 8 heads of 64 or 512 channels, float32, forward + backward",
        "seed": SEED,
        "N": options.length,
        "keeps_freed_memory": kept,
        "rows": rows,
    }
    results.save("family", result, device=device, output=options.output)


if __name__ == "__main__":
    main()
