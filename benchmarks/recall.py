"""What a state can hold: every mixer of the book, trained on multi-query associative recall.

python benchmarks/recall.py                    writes lesson_code/results/recall.json
python benchmarks/recall.py --output FILE      writes another file
python benchmarks/recall.py --renew            begins again, whatever the file holds
python benchmarks/recall.py --quick            a model of each kind for a few steps: only a try

Models of four layers and of equal size are trained on sequences of 4, 8, 16 and 32 pairs, then
asked for all keys of new sequences. Each key is asked for once and the length is four times the
number of pairs, so that every second position after the pairs asks. All mixers are compared with
four heads, three seeds each, and two of them with other numbers of heads H, too: at a fixed width F
the memory of a layer has F²/H numbers. A row's "state" is what the model keeps of a sequence of the
largest number of pairs, all layers together.

A layer mixes each token with the one before (token shift), so that a value is stored beside its
key, then comes the mixer, then a feed-forward sublayer as wide as makes the layers of all models
equally large. The hybrids have softmax in one layer, the first or the last, and linear attention
(elu + 1) in the other three.

All models begin in the same way, as the question is what a state can hold and not how soon training
finds it: linear maps as torch draws them, short convolutions as the identity, and queries equal to
keys, so that a key finds itself from the first step on. Without this, retention and gated linear
attention still guess among the values of a sequence when others are done. The first half of the
training goes from the fewest pairs to the most.

Every run is saved when it ends, and a run that the file has is not repeated. Two processes work
side by side, each with one thread; all runs take them less than an hour.
"""

import argparse
import contextlib
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lesson_code import results
from lesson_code.data import tasks
from lesson_code.torch import taylor, token_shift
from lesson_code.torch.modules import (
    DeltaNet,
    GatedDeltaNet,
    GatedLinearAttention,
    LanguageModel,
    LinearAttention,
    Mixer,
    Retention,
    SoftmaxAttention,
)
from lesson_code.torch.modules._parts import ShortConvolution
from lesson_code.torch.modules.blocks import Block

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "vocab_size": 128,
    "pairs": [4, 8, 16, 32],
    "width": 32,
    "heads": 4,
    "other_heads": [1, 2, 8],
    "block_parameters": 8 * 32**2,
    "steps": 2000,
    "tokens": 2048,  # of a step
    "rate": 1e-2,
    "seeds": [0, 1, 2],
    "asked": 8192,  # of each number of pairs, when all is learned
}
QUICK = {"width": 16, "other_heads": [2], "block_parameters": 8 * 16**2, "pairs": [2, 4]}
QUICK |= {"steps": 3, "seeds": [0], "asked": 64}
RENEW = "python benchmarks/recall.py --renew"


def linear_taylor(width, num_heads):
    return LinearAttention(width, num_heads, feature_map=taylor(width // num_heads))


MIXERS = {
    "softmax": [SoftmaxAttention] * 4,
    "linear (elu + 1)": [LinearAttention] * 4,
    "linear (Taylor)": [linear_taylor] * 4,
    "retention": [Retention] * 4,
    "gated": [GatedLinearAttention] * 4,
    "delta": [DeltaNet] * 4,
    "gated delta": [GatedDeltaNet] * 4,
    "hybrid, softmax first": [SoftmaxAttention] + [LinearAttention] * 3,
    "hybrid, softmax last": [LinearAttention] * 3 + [SoftmaxAttention],
}
TWO = ["linear (elu + 1)", "delta"]


class ShiftedMixer(Mixer):
    """A mixer that sees each token with the one before."""

    def __init__(self, width, mixer):
        super().__init__(width)
        self.share = nn.Parameter(torch.full((width,), 0.5))
        self.mixer = mixer

    def mix(self, x, state):
        last, inner = state or (x.new_zeros(len(x), self.width), None)
        y, inner = self.mixer(token_shift(x, self.share, last), state=inner, return_state=True)
        return y, (torch.cat([last[:, None], x], dim=1)[:, -1], inner)


def make_block(mixer, heads, parameters):
    """A function width -> block with as nearly as possible this many parameters."""

    def make(width):
        block = Block(width, ShiftedMixer(width, mixer(width, heads)))
        block.feed_forward = nn.Identity()
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, ShortConvolution):
                nn.init.zeros_(module.weight)
                nn.init.ones_(module.weight[:, -1])
        with torch.no_grad():
            block.mixer.mixer.query.weight.copy_(block.mixer.mixer.key.weight)
        hidden = round((parameters - count(block) - width) / (2 * width + 1))
        block.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        return block

    return make


def make_model(name, heads, settings):
    blocks = [make_block(mixer, heads, settings["block_parameters"]) for mixer in MIXERS[name]]
    return LanguageModel(settings["vocab_size"], settings["width"], blocks)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def state_numbers(model, length):
    """Numbers that the model keeps of one sequence after it has read this many tokens."""
    with torch.no_grad():
        _, state = model(torch.zeros(1, length, dtype=torch.int64), return_state=True)
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves(state))


def draw(pairs, tokens, rng, settings):
    """Sequences of this many tokens in all, as tensors."""
    examples = tasks.multi_query_associative_recall(
        vocab_size=settings["vocab_size"],
        pairs=pairs,
        length=4 * pairs,
        batch=max(tokens // (4 * pairs), 1),
        seed=rng,
    )
    return [torch.from_numpy(array) for array in examples]


def train(model, settings, seed):
    rng = np.random.default_rng(seed)
    steps, rate = settings["steps"], settings["rate"]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    for i in range(steps):
        warm, cold = min(1, 10 * (i + 1) / steps), (1 + math.cos(math.pi * i / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate * warm * cold
        hardest = min(1 + int(2 * i / steps * len(settings["pairs"])), len(settings["pairs"]))
        pairs = settings["pairs"][rng.integers(hardest)]
        inputs, targets, mask = draw(pairs, settings["tokens"], rng, settings)
        loss = nn.functional.cross_entropy(model(inputs)[mask], targets[mask])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def accuracy(model, pairs, settings, seed):
    """Share of right answers, to sequences that no model was trained on."""
    rng = np.random.default_rng([seed, pairs])
    inputs, targets, mask = draw(pairs, 4 * settings["asked"], rng, settings)
    right = model(inputs)[mask].argmax(dim=-1) == targets[mask]
    return right.double().mean().item()


def run(job):
    """Train and ask one model: a row of the result."""
    name, heads, seed, settings = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start = time.perf_counter()
    model = make_model(name, heads, settings)
    train(model, settings, seed)
    return {
        "mixer": name,
        "heads": heads,
        "seed": seed,
        "parameters": count(model),
        "state": state_numbers(model, 4 * max(settings["pairs"])),
        "accuracy": [accuracy(model, pairs, settings, seed) for pairs in settings["pairs"]],
        "seconds": time.perf_counter() - start,
    }


def all_jobs(settings):
    """Mixer, heads and seed of every run, seed by seed, so that a part of them is of use, too."""
    return [
        (name, heads, seed)
        for seed in settings["seeds"]
        for heads in [settings["heads"], *settings["other_heads"]]
        for name in (MIXERS if heads == settings["heads"] else TWO)
    ]


def check_sizes(settings):
    """Print the number of parameters of every model; refuse models that differ by a percent."""
    sizes = {
        (name, heads): count(make_model(name, heads, settings))
        for name, heads, seed in all_jobs(settings)
        if seed == settings["seeds"][0]
    }
    for (name, heads), size in sizes.items():
        print(f"{name:21s} {heads} heads {size:8,d} parameters")
    if max(sizes.values()) > 1.01 * min(sizes.values()):
        raise SystemExit("The models must have equally many parameters, to a percent.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = SETTINGS | QUICK if options.quick else SETTINGS
    if options.quick and not options.output:
        parser.error("--quick needs an --output, so that no result is lost")
    output = options.output or Path(results.__file__).with_name("recall.json")
    torch.set_num_threads(1)
    rows = [] if options.renew else results.earlier_rows(output, settings, RENEW)
    check_sizes(settings)

    jobs = all_jobs(settings)
    done = [(row["mixer"], row["heads"], row["seed"]) for row in rows]
    left = [(*job, settings) for job in jobs if job not in done]
    print(f"{len(jobs)} runs, {len(left)} left", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for row in pool.imap_unordered(run, left):
            rows.append(row)
            rows.sort(key=lambda row: jobs.index((row["mixer"], row["heads"], row["seed"])))
            shown = ", ".join(f"{a:.3f}" for a in row["accuracy"])
            print(
                f"{len(rows)}/{len(jobs)} {row['mixer']}, {row['heads']} heads, seed {row['seed']}:"
                f" {shown} ({row['seconds']:.0f} s)",
                flush=True,
            )
            save(output, settings, rows)
    print(f"wrote {output}")


def save(output, settings, rows):
    result = {
        "what": "accuracy on multi-query associative recall, models of 4 layers, float32",
        "seed": settings["seeds"],
        "settings": settings,
        "renew": RENEW,
        "rows": rows,
    }
    with contextlib.redirect_stdout(None):
        results.save("recall", result, output=output)


if __name__ == "__main__":
    main()
