"""A needle at a distance: caches, states and what lies between, trained and asked further back.

python benchmarks/needle.py                    writes lesson_code/results/needle.json
python benchmarks/needle.py --output FILE      writes another file
python benchmarks/needle.py --seeds 0 1        makes the runs of these seeds only
python benchmarks/needle.py --renew            begins again, whatever the file holds
python benchmarks/needle.py --quick            a few steps for each model: only a try

Three tokens of four are notes, "key a has the value b", and no key of a text is noted twice. Every
fourth token is a question, "what is a?", about a key that was noted some tokens ago; how many is
drawn so that each doubling of the distance is as likely as the others, up to 128 in training. All
notes before are hay for the question: nothing marks the one that will be asked for.

A text of training has 192 tokens. The tests ask at the end of texts of 640, for notes at distances
up to 512, four times those of the training. "accuracy" has a number for each doubling: distance 1,
2 to 3, 4 to 7, ..., 256 to 511. A guess is right once in 8 times.

A key is one of 512 random directions that are not trained, and a token is the sum of its key's
direction, mapped, and an embedding of its value, or of the question. All models have two blocks of
width 32 with two heads of 16, so a state has 512 numbers, as many as a window of 8 keys and values;
the window has 16. Softmax is tried with rotated queries and keys and, as in Kimi Linear's hybrid,
without positions. Mamba-2 has states as wide as they are high, and short convolutions begin as the
identity, since a note is a single token.

The step size of each model is the better of two, by the loss on a seed that is not used again.
Four models run once more, four times as long: so that nobody is only slow. The gated delta rule,
alone and beside a window, does so at both step sizes and on all seeds, because the better step size
of the short runs says little here: after 300 steps the hybrid guesses with both. Every run is saved
when it ends, and a run that the file has is not repeated. One thread takes about half an hour.
"""

import itertools
import math
from functools import partial

import harness
import numpy as np
import torch
from mixers import begin_as_identity, count, square_states, state_numbers
from torch import nn

import lesson_code.torch as lt

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "keys": 512,
    "values": 8,
    "width": 32,
    "heads": 2,
    "window": 16,
    "levels": 11,
    "length": 192,
    "reach": 128,  # the largest distance in training
    "batch": 8,
    "steps": 300,
    "longer": 4,
    "rates": [1e-2, 3e-2],
    "choosing": 100,  # the seed that chooses the rate
    "seeds": [0, 1, 2, 3, 4],
    "asked": 64,  # texts
    "asked_length": 640,
    "asked_reach": 512,
}
QUICK = {"width": 8, "steps": 2, "longer": 2, "rates": [1e-2], "seeds": [0], "asked": 8}
LONGER = ["Mamba-2", "gated delta", "log-linear", "gated delta + window"]
AT_ALL_RATES = ["gated delta + window", "gated delta"]  # longer, and on all seeds


def mixers(settings):
    """The two layers of each model, as functions of their width and heads."""
    window = partial(lt.SlidingWindowAttention, window=settings["window"])
    no_positions = partial(lt.SoftmaxAttention, rotary=False)
    log_linear = partial(lt.LogLinearAttention, levels=settings["levels"])
    return {
        "softmax": [no_positions] * 2,
        "softmax, RoPE": [lt.SoftmaxAttention] * 2,
        "FoX": [lt.ForgettingAttention] * 2,
        "window": [window] * 2,
        "Mamba-2": [square_states(lt.StateSpaceDual)] * 2,
        "gated delta": [lt.GatedDeltaNet] * 2,
        "log-linear": [log_linear] * 2,
        "gated delta + window": [lt.GatedDeltaNet, window],
        "gated delta + softmax": [lt.GatedDeltaNet, no_positions],
    }


class NoteEmbedding(nn.Module):
    """The direction of a token's key, mapped, plus a vector for its value or for the question."""

    def __init__(self, keys, values, width):
        super().__init__()
        self.values = values
        directions = nn.functional.normalize(torch.randn(keys, width), dim=-1)
        self.register_buffer("directions", directions)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Embedding(values + 1, width)

    def forward(self, tokens):
        key = self.directions[tokens // (self.values + 1)]
        return self.key(key * key.shape[-1] ** 0.5) + self.value(tokens % (self.values + 1))


def make_model(name, settings):
    keys, values, width = settings["keys"], settings["values"], settings["width"]
    layers = [partial(mixer, num_heads=settings["heads"]) for mixer in mixers(settings)[name]]
    model = lt.LanguageModel(keys * (values + 1), width, layers)
    model.embedding = NoteEmbedding(keys, values, width)
    model.head = nn.Linear(width, values, bias=False)
    begin_as_identity(model)
    return model


def draw(batch, length, reach, rng, settings):
    """Tokens (B, N), the values that are asked for at every fourth, and how far back they are."""
    keys, values = settings["keys"], settings["values"]
    noted = rng.permuted(np.tile(np.arange(keys), (batch, 1)), axis=1)[:, :length]
    value = rng.integers(values, size=(batch, length))
    asking = np.arange(3, length, 4)
    distance = np.exp(rng.uniform(0, math.log(reach), (batch, len(asking)))).astype(int)
    about = np.maximum(asking - distance, 0)
    about -= about % 4 == 3  # a question is no note
    key = np.empty((batch, length), int)
    key[:, np.arange(length) % 4 != 3] = noted[:, : length - len(asking)]
    key[:, asking] = np.take_along_axis(key, about, axis=1)
    target = np.take_along_axis(value, about, axis=1)
    value[:, asking] = values  # the question
    tokens = key * (values + 1) + value
    return torch.from_numpy(tokens), torch.from_numpy(target), asking - about


def loss_of(model, batch, rng, settings):
    """The loss on texts of the training's length."""
    tokens, target, _ = draw(batch, settings["length"], settings["reach"], rng, settings)
    return nn.functional.cross_entropy(model(tokens)[:, 3::4].flatten(0, 1), target.flatten())


@torch.no_grad()
def ask(model, seed, settings):
    """Loss on new texts of the training's length; share of right answers by distance on longer."""
    rng, texts = np.random.default_rng([seed, 1]), settings["asked"]
    loss = loss_of(model, texts, rng, settings)
    reach = settings["asked_reach"]
    right, octave = [], []
    for _ in range(texts // 8):
        tokens, target, distance = draw(8, settings["asked_length"], reach, rng, settings)
        late = slice(reach // 4, None)  # the questions that can look back so far
        answers = model(tokens)[:, 3::4].argmax(dim=-1)
        right.append((answers == target).numpy()[:, late])
        octave.append(np.frexp(distance)[1][:, late] - 1)
    right, octave = np.concatenate(right), np.concatenate(octave)
    octaves = range(reach.bit_length() - 1)
    return {"loss": loss.item(), "accuracy": [right[octave == i].mean() for i in octaves]}


def run(name, steps, rate, seed, settings):
    model, rng = make_model(name, settings), np.random.default_rng(seed)
    harness.train(model, lambda _: loss_of(model, settings["batch"], rng, settings), steps, rate)
    return {
        "parameters": count(model),
        "kept": state_numbers(model, settings["asked_length"]),
        **ask(model, seed, settings),
    }


def trials(settings):
    steps, trial = settings["steps"], settings["choosing"]
    return [(name, steps, rate, trial) for name in mixers(settings) for rate in settings["rates"]]


def runs(rows, settings):
    names, steps, first = mixers(settings), settings["steps"], settings["seeds"][0]
    trial = {"steps": steps, "seed": settings["choosing"]}
    best = {
        name: harness.best_rate(rows, lambda row: row["loss"], model=name, **trial)
        for name in names
    }
    short = [(name, steps, best[name], seed) for seed in settings["seeds"] for name in names]
    steps *= settings["longer"]
    long = [(name, steps, best[name], first) for name in LONGER]
    for name, rate in itertools.product(AT_ALL_RATES, settings["rates"]):
        long += [(name, steps, rate, seed) for seed in settings["seeds"]]
    return short + list(dict.fromkeys(long))


EXPERIMENT = harness.Experiment(
    name="needle",
    what="questions for a note by its distance, models of two blocks, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("model", "steps", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: " ".join(f"{share:.2f}" for share in row["accuracy"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
