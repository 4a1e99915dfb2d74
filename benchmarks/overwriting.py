"""Keys whose values change: every gate and every correction, trained on more and more keys.

python benchmarks/overwriting.py                    writes lesson_code/results/overwriting.json
python benchmarks/overwriting.py --output FILE      writes another file
python benchmarks/overwriting.py --seeds 0 1        trains these seeds only
python benchmarks/overwriting.py --renew            begins again, whatever the file holds
python benchmarks/overwriting.py --quick            a few steps for each model: only a try

The task is `lesson_code.data.tasks.overwriting`: notes "key a has the value b" and questions "what
is a?", in random order. Each text is about 8 keys, and each of them is noted four times on average.
The number of keys that there are grows from 8 to 64. A layer has two heads of 16 channels, so that
up to 16 keys can have a channel of their own in both heads, up to 32 in one of them, and 64 cannot.

All models are one block, a mixer and a feed-forward sublayer as wide as makes the blocks equally
large, over an embedding that is the sum of one for the key and one for the value (or the question).
All memories are two heads of 16 by 16 numbers, those of the plain sum with a normalizer of 16 more;
for that, gated linear attention has keys as wide as its values, and Mamba-2 as many numbers of
state in each channel as a head is wide. The ranks of RWKV-6's token shift are 4, not 32, in
proportion to the width. Short convolutions begin as the identity, as a note is a single token.

The step size of each mixer is one for all numbers of keys: the one of three with the smallest sum
of the losses at 8 keys and at 64, for a seed that is not used again. (A fourth, 0.1, was the worst
or the second worst at 64 keys.) The file has these runs, too, and for the delta rule and the three
models with gates alone a run at 64 keys that is three times as long, so that nobody is only slow.
"accuracy" is on texts that no model was trained on, of the same length; "late" that of the second
half of the texts alone, where a key has had several values.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes about
20 minutes.
"""

import argparse
import contextlib
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import lesson_code.torch as lt
from lesson_code import results
from lesson_code.data import tasks
from lesson_code.torch.modules._parts import ShortConvolution

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "keys": [8, 16, 32, 64],
    "values": 8,
    "active": 8,  # keys of one text
    "length": 64,
    "batch": 16,
    "width": 32,
    "heads": 2,
    "block_parameters": 16 * 32**2,
    "steps": 600,
    "longer": 3,
    "rates": [[8, [1e-2, 3e-2]], [64, [3e-3, 1e-2, 3e-2, 1e-1]]],  # tried for so many keys
    "choosing": 100,  # the seed that chooses the rate
    "seeds": [0, 1],
    "asked": 256,  # texts
}
QUICK = {"keys": [4, 8], "active": 4, "length": 8, "batch": 4, "steps": 2, "longer": 2}
QUICK |= {"rates": [[4, [1e-2]], [8, [1e-2]]], "seeds": [0], "asked": 8}
RENEW = "python benchmarks/overwriting.py --renew"


def wide_keys(width, num_heads):
    """Gated linear attention whose keys are as wide as its values."""
    layer = lt.GatedLinearAttention(width, num_heads)
    layer.head_width = width // num_heads
    rank = layer.forget[0].out_features
    layer.query, layer.key = (nn.Linear(width, width, bias=False) for _ in range(2))
    layer.forget = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
    return layer


def small_shift(width, num_heads, rank=4):
    """The time mix of RWKV-6 with a token shift of a small rank."""
    layer = lt.RWKV6TimeMix(width, num_heads)
    layer.shares_down = nn.Parameter(torch.zeros(width, 5 * rank))
    layer.shares_up = nn.Parameter(torch.empty(5, rank, width).uniform_(-0.01, 0.01))
    return layer


def square_states(width, num_heads):
    """The block of Mamba-2 with states as wide as they are high."""
    return lt.StateSpaceDual(width, num_heads, state_width=width // num_heads, expand=1)


MIXERS = {
    "softmax": lt.SoftmaxAttention,
    "delta": lt.DeltaNet,
    "gated delta": lt.GatedDeltaNet,
    "GLA": wide_keys,
    "RWKV-6": small_shift,
    "Mamba-2": square_states,
    "decay": lt.Retention,
    "plain": lt.LinearAttention,
}
RIVALS = ["delta", "GLA", "RWKV-6", "Mamba-2"]


class NoteEmbedding(nn.Module):
    """A vector for the key of a token plus one for its value, or for the question."""

    def __init__(self, keys, values, width):
        super().__init__()
        self.values = values
        self.key, self.value = nn.Embedding(keys, width), nn.Embedding(values + 1, width)

    def forward(self, tokens):
        return self.key(tokens // (self.values + 1)) + self.value(tokens % (self.values + 1))


def make_model(name, keys, settings):
    values, width, heads = settings["values"], settings["width"], settings["heads"]
    model = lt.LanguageModel(keys * (values + 1), width, [lambda width: MIXERS[name](width, heads)])
    model.embedding = NoteEmbedding(keys, values, width)
    model.head = nn.Linear(width, values, bias=False)
    (block,) = model.blocks
    for module in block.modules():
        if isinstance(module, ShortConvolution):
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.weight[:, -1])
    block.feed_forward = nn.Identity()
    hidden = round((settings["block_parameters"] - count(block) - width) / (2 * width + 1))
    block.feed_forward = nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
    )
    return model


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def state_numbers(model, settings):
    """Numbers that the model keeps of a text; of a cache, those at the end."""
    with torch.no_grad():
        tokens = torch.zeros(1, settings["length"], dtype=torch.int64)
        _, state = model(tokens, return_state=True)
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves(state))


def draw(keys, batch, rng, settings):
    examples = tasks.overwriting(
        keys=keys,
        values=settings["values"],
        active=settings["active"],
        length=settings["length"],
        batch=batch,
        seed=rng,
    )
    return [torch.from_numpy(array) for array in examples]


def train(model, keys, rate, steps, seed, settings):
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for i in range(steps):
        warm, cold = min(1, 10 * (i + 1) / steps), (1 + math.cos(math.pi * i / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate * warm * cold
        inputs, targets, mask = draw(keys, settings["batch"], rng, settings)
        loss = nn.functional.cross_entropy(model(inputs)[mask], targets[mask])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def ask(model, keys, seed, settings):
    """Loss, share of right answers, and that of the second half, on texts of no training."""
    rng = np.random.default_rng([seed, keys])
    inputs, targets, mask = draw(keys, settings["asked"], rng, settings)
    logits = model(inputs)
    right = logits.argmax(dim=-1) == targets
    late = mask & (torch.arange(mask.shape[1]) >= mask.shape[1] // 2)
    return {
        "loss": nn.functional.cross_entropy(logits[mask], targets[mask]).item(),
        "accuracy": right[mask].double().mean().item(),
        "late": right[late].double().mean().item(),
    }


def run(name, keys, steps, rate, seed, settings):
    torch.manual_seed(seed)
    start = time.process_time()
    model = make_model(name, keys, settings)
    train(model, keys, rate, steps, seed, settings)
    return {
        "mixer": name,
        "keys": keys,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "parameters": count(model),
        "state": state_numbers(model, settings),
        **ask(model, keys, seed, settings),
        "seconds": time.process_time() - start,
    }


def best_rate(name, rows, settings):
    """Of the rates tried for few keys and for many, that with the smallest sum of both losses."""

    def loss(rate):
        seed, steps = settings["choosing"], settings["steps"]
        jobs = [(name, keys, steps, rate, seed) for keys, _ in settings["rates"]]
        return sum(row["loss"] for row in rows if job_of(row) in jobs)

    (_, few), (_, many) = settings["rates"]
    return min(set(few) & set(many), key=loss)


def all_jobs(rows, settings):
    """Mixer, keys, steps, rate and seed of every run; the rest is known when rates are chosen."""
    steps, most = settings["steps"], max(settings["keys"])
    choice = [
        (name, keys, steps, rate, settings["choosing"])
        for keys, rates in settings["rates"]
        for name in MIXERS
        for rate in rates
    ]
    if not set(choice) <= {job_of(row) for row in rows}:
        return choice
    rates = {name: best_rate(name, rows, settings) for name in MIXERS}
    short = [
        (name, keys, steps, rates[name], seed)
        for seed in settings["seeds"]
        for keys in settings["keys"]
        for name in MIXERS
    ]
    first = settings["seeds"][0]
    long = [(name, most, settings["longer"] * steps, rates[name], first) for name in RIVALS]
    return choice + short + long


def job_of(row):
    return row["mixer"], row["keys"], row["steps"], row["rate"], row["seed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = SETTINGS | QUICK if options.quick else SETTINGS
    if options.quick and not options.output:
        parser.error("--quick needs an --output, so that no result is lost")
    output = options.output or Path(results.__file__).with_name("overwriting.json")
    torch.set_num_threads(1)
    rows = [] if options.renew else results.earlier_rows(output, settings, RENEW)
    seeds = [settings["choosing"], *(options.seeds or settings["seeds"])]

    def missing():
        done = {job_of(row) for row in rows}
        return [job for job in all_jobs(rows, settings) if job not in done and job[-1] in seeds]

    while left := missing():
        row = run(*left[0], settings)
        rows.append(row)
        jobs = all_jobs(rows, settings)
        rows.sort(key=lambda row: jobs.index(job_of(row)))
        found = f"accuracy {row['accuracy']:.3f}, loss {row['loss']:.3f}"
        print(f"{len(left)} left; {job_of(row)}: {found} ({row['seconds']:.0f} s)", flush=True)
        save(output, settings, rows)
    print(f"wrote {output}")


def save(output, settings, rows):
    result = {
        "what": "questions for the last value of a key, models of one block, float32",
        "seed": settings["seeds"],
        "settings": settings,
        "renew": RENEW,
        "rows": rows,
    }
    with contextlib.redirect_stdout(None):
        results.save("overwriting", result, output=output)


if __name__ == "__main__":
    main()
