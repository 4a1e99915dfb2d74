"""A language whose entropy is known: every mixer, read word by word.

python benchmarks/language.py                    writes lesson_code/results/language.json
python benchmarks/language.py --output FILE      writes another file
python benchmarks/language.py --seeds 0 1        makes the runs of these seeds only
python benchmarks/language.py --renew            begins again, whatever the file holds
python benchmarks/language.py --quick            a few steps for each model: only a try

The texts are those of `lesson_code.data.facts`: remarks, which need the last two words, and facts,
"anna lamp .", of which a name that comes again needs its own. No text comes twice, so nothing can
be learned by heart, and the loss of new texts is the loss. The grammar knows the smallest loss that
is possible, at every word; "lines" are this entropy and the losses of tables of one, two and three
words, counted on other texts.

Models have one block, all with equally many parameters, and mixers with memories of equal size,
from `mixers.py`. There are two kinds of embedding:

    last    mixes each word with the three before it, by learned weights, so that every mixer finds
            a name and its thing at one place, whether it has a short convolution of its own or not
    word    a word alone: where the two stand, the mixers must find out by themselves

From gated delta one part is taken away at a time. Each mixer's step size is the one of three with
the smallest loss for a seed that is not used again. Mixers that have not learned by then to look
facts up (half of their price or more is paid with most of three seeds) are trained once more, three
times as long. Losses are in nats a word, above the entropy of the same texts: "excess" of all
words, "grammar" of those that need a few words, "facts" of the things of names that have come
before. "right" is the share of these that are guessed right, by how many words ago the name came
for the last time: 1 to 16, 17 to 32 and so on; "right_in_long" the share at the end of texts four
times as long. "curve" is what "facts" was on the training texts, 50 steps together.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes about
two hours.
"""

import functools

import harness
import mixers
import numpy as np
import torch
from mixers import MIXERS
from torch import nn
from torch.nn.functional import cross_entropy

import lesson_code.torch as lt
from lesson_code.data import facts

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "width": 64,
    "heads": 2,
    "block_parameters": 60_000,
    "length": 96,
    "batch": 16,
    "steps": 800,
    "rates": [3e-3, 1e-2, 3e-2],
    "longer": 3,  # times as many steps
    "choosing": 100,  # the seed that chooses the rate
    "seeds": [0, 1, 2, 3, 4],
    "asked": 256,  # texts
    "long": [384, 64],  # words of longer texts, and how many of them
    "bin": 16,  # words of age
    "counted": 20_000,  # texts for the tables
}
QUICK = {"width": 16, "heads": 2, "block_parameters": 5_000, "length": 24, "batch": 2, "steps": 2}
QUICK |= {"rates": [1e-2], "seeds": [0], "asked": 4, "long": [48, 2], "counted": 20}


def without(part, mixer):
    """A delta layer without its short convolution, its norm or its gate."""

    def make(width, num_heads):
        layer = mixer(width, num_heads)
        if part == "convolution":
            mixers.begin_as_identity(layer)
            layer.convolution.requires_grad_(False)
        elif part == "norm":
            layer.norm = nn.Flatten(-2)
        else:
            layer.gate = Open()
        return layer

    return make


class Open(nn.Module):
    """The logit of a gate that lets everything pass: silu(1.2785) = 1."""

    def forward(self, x):
        return x.new_full((), 1.278464542761074)


NAMES = [name for name in MIXERS if name != "linear (Taylor)"]
PARTS = {
    f"gated delta, no {part}": without(part, lt.GatedDeltaNet)
    for part in ("convolution", "norm", "gate")
}
MODELS = {name: MIXERS[name] for name in NAMES} | PARTS
WORD_BY_WORD = ["softmax", "linear (elu + 1)", "Mamba-2", "gated delta"]
WORD_BY_WORD += ["gated delta, no convolution"]


def make_model(name, embedding, settings):
    width, words = settings["width"], len(facts.vocabulary())
    mixer = functools.partial(MODELS[name], num_heads=settings["heads"])
    model = lt.LanguageModel(words, width, [lambda width: mixer(width)])
    mixers.fill_up(model.blocks[0], settings["block_parameters"])
    if embedding == "last":
        model.embedding = mixers.LastWords(words, width)
    return model


def draw(batch, length, rng):
    """Tokens (B, N + 1), what the grammar would pay for each, and the age of each fact (B, N)."""
    return map(torch.from_numpy, facts.draw(batch=batch, length=length, seed=rng))


def prices(model, tokens):
    """What a model pays for each token, and whether it is its first guess: (B, N) each."""
    logits = model(tokens[:, :-1])
    paid = cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    return paid, (logits.argmax(dim=-1) == tokens[:, 1:]).double()


@torch.no_grad()
def ask(model, seed, settings):
    rng = np.random.default_rng(1000 + seed)
    tokens, surprise, age = draw(settings["asked"], settings["length"], rng)
    paid, right = prices(model, tokens)
    above, known, bins = paid - surprise, age > 0, settings["length"] // settings["bin"]
    which = (age - 1) // settings["bin"]
    length, texts = settings["long"]
    long, _, long_age = draw(texts, length, rng)
    _, right_in_long = prices(model, long)
    end = torch.arange(length) >= length - settings["length"]
    return {
        "excess": above.mean().item(),
        "grammar": above[~known].mean().item(),
        "facts": above[known].mean().item(),
        "right": [right[known & (which == i)].mean().item() for i in range(bins)],
        "right_in_long": right_in_long[(long_age > 0) & end].mean().item(),
    }


def run(name, embedding, steps, rate, seed, settings):
    model = make_model(name, embedding, settings)
    rng, curve = np.random.default_rng(seed), []

    def batch_loss(_):
        tokens, surprise, age = draw(settings["batch"], settings["length"], rng)
        paid, _ = prices(model, tokens)
        curve.append((paid.detach() - surprise)[age > 0].mean().item())
        return paid.mean()

    harness.train(model, batch_loss, steps, rate)
    return {
        "parameters": mixers.count(model),
        "state": mixers.state_numbers(model, settings["length"]),
        "curve": [float(np.mean(curve[i : i + 50])) for i in range(0, len(curve), 50)],
    } | ask(model, seed, settings)


def rows_of(n, tokens):
    """All n words in a row whose last is not one of the first two of a text."""
    return tuple(tokens[:, 3 - n + i : tokens.shape[1] + 1 - n + i] for i in range(n))


def lines(rows, settings, output):
    """The entropy of the grammar, and the excess of tables of one, two and three words in a row."""
    tokens, surprise, _ = facts.draw(batch=settings["counted"], length=settings["length"], seed=99)
    test, floor, _ = facts.draw(batch=settings["asked"], length=settings["length"], seed=98)
    V, found = len(facts.vocabulary()), {"entropy": float(surprise.mean())}
    for n in (1, 2, 3):
        counts = np.ones((V,) * n)
        np.add.at(counts, rows_of(n, tokens), 1)
        share = counts / counts.sum(axis=-1, keepdims=True)
        found[str(n)] = float(-np.log(share[rows_of(n, test)]).mean() - floor[:, 1:].mean())
    return {"lines": found}


def trials(settings):
    steps, seed = settings["steps"], settings["choosing"]
    return [(name, "last", steps, rate, seed) for name in NAMES for rate in settings["rates"]]


def runs(rows, settings):
    """The best step size is the one with the smallest loss of everything."""
    trial, steps = {"embedding": "last", "seed": settings["choosing"]}, settings["steps"]
    rates = {
        name: harness.best_rate(rows, lambda row: row["excess"], mixer=name, **trial)
        for name in NAMES
    }
    rates |= dict.fromkeys(PARTS, rates["gated delta"])
    jobs = [
        (name, embedding, steps, rates[name], seed)
        for seeds in (settings["seeds"][:3], settings["seeds"][3:])
        for embedding, names in (("last", MODELS), ("word", WORD_BY_WORD))
        for seed in seeds
        for name in names
    ]
    late = [name for name in NAMES if has_not_begun(name, rows, settings)]
    longer, seed = settings["longer"] * steps, settings["seeds"][0]
    return jobs + [(name, "last", longer, rates[name], seed) for name in late]


def has_not_begun(name, rows, settings):
    """Whether most of the first seeds pay more than half of what a guess at a fact costs."""
    first = settings["seeds"][:3]
    same = {"mixer": name, "embedding": "last", "steps": settings["steps"]}
    paid = [row["facts"] for row in rows if row | same == row and row["seed"] in first]
    return len(paid) == len(first) and np.median(paid) > np.log(len(facts.THINGS)) / 2


EXPERIMENT = harness.Experiment(
    name="language",
    what="nats a word above the entropy of a grammar, models of one block, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "embedding", "steps", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: f"excess {row['excess']:.3f}, facts {row['facts']:.3f}",
    more=("lines",),
    finish=lines,
)

if __name__ == "__main__":
    EXPERIMENT.main()
