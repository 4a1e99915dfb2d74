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
All memories are two heads of 16 by 16 numbers, those of the plain sum with a normalizer of 16 more:
the mixers are those of `mixers.py`; "fitted decay" is retention that learns its two decays. Short
convolutions begin as the identity, as a note is a single token.

The step size of each mixer is one for all numbers of keys: the one of three with the smallest sum
of the losses at 8 keys and at 64, for a seed that is not used again. (A fourth, 0.1, was the worst
or the second worst at 64 keys.) The file has these runs, too, and for the delta rule and the three
models with gates alone a run at 64 keys that is three times as long, so that nobody is only slow.
"accuracy" is on texts that no model was trained on, of the same length; "late" that of the second
half of the texts alone, where a key has had several values.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes
about half an hour.
"""

import harness
import mixers
import numpy as np
import torch
from torch import nn

import lesson_code.torch as lt
from lesson_code.data import tasks

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
    "seeds": [0, 1, 2, 3, 4],
    "asked": 256,  # texts
}
QUICK = {"keys": [4, 8], "active": 4, "length": 8, "batch": 4, "steps": 2, "longer": 2}
QUICK |= {"rates": [[4, [1e-2]], [8, [1e-2]]], "seeds": [0], "asked": 8}

# Names of the file, and the mixers.
MIXERS = {
    "softmax": mixers.MIXERS["softmax"],
    "delta": mixers.MIXERS["DeltaNet"],
    "gated delta": mixers.MIXERS["gated delta"],
    "GLA": mixers.MIXERS["GLA"],
    "RWKV-6": mixers.MIXERS["RWKV-6"],
    "Mamba-2": mixers.MIXERS["Mamba-2"],
    "fitted decay": mixers.fitted_decay,
    "decay": mixers.MIXERS["RetNet"],
    "plain": mixers.MIXERS["linear (elu + 1)"],
}
RIVALS = ["delta", "GLA", "RWKV-6", "Mamba-2"]


def make_model(name, keys, settings):
    values, width, heads = settings["values"], settings["width"], settings["heads"]
    model = lt.LanguageModel(keys * (values + 1), width, [lambda width: MIXERS[name](width, heads)])
    model.embedding = mixers.PairEmbedding(keys, values, width)
    model.head = nn.Linear(width, values, bias=False)
    mixers.begin_as_identity(model)
    mixers.fill_up(model.blocks[0], settings["block_parameters"])
    return model


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
    """Train and ask one model."""
    model, rng = make_model(name, keys, settings), np.random.default_rng(seed)

    def batch_loss(i):
        inputs, targets, mask = draw(keys, settings["batch"], rng, settings)
        return nn.functional.cross_entropy(model(inputs)[mask], targets[mask])

    harness.train(model, batch_loss, steps, rate)
    sizes = {
        "parameters": mixers.count(model),
        "state": mixers.state_numbers(model, settings["length"]),
    }
    return sizes | ask(model, keys, seed, settings)


def trials(settings):
    steps, seed = settings["steps"], settings["choosing"]
    return [
        (name, keys, steps, rate, seed)
        for keys, rates in settings["rates"]
        for name in MIXERS
        for rate in rates
    ]


def runs(rows, settings):
    steps, seeds = settings["steps"], settings["seeds"]
    trial = {"seed": settings["choosing"], "steps": steps}
    rates = {
        name: harness.best_rate(rows, lambda row: row["loss"], mixer=name, **trial)
        for name in MIXERS
    }
    short = [
        (name, keys, steps, rates[name], seed)
        for seed in seeds
        for keys in settings["keys"]
        for name in MIXERS
    ]
    most, longer = max(settings["keys"]), settings["longer"] * steps
    return short + [(name, most, longer, rates[name], seeds[0]) for name in RIVALS]


EXPERIMENT = harness.Experiment(
    name="overwriting",
    what="questions for the last value of a key, models of one block, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "keys", "steps", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: f"accuracy {row['accuracy']:.3f}, loss {row['loss']:.3f}",
)

if __name__ == "__main__":
    EXPERIMENT.main()
