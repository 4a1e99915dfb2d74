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

Models have two blocks, of equally many parameters, and mixers with memories of equal size, those of
`mixers.py`. Two kinds of embedding:

    last    mixes each word with the three before it, by learned weights, so that every mixer finds
            a name and its thing at one place, whether it has a short convolution of its own or not
    word    a word alone: where the two stand, the mixers must find out by themselves

Then one part of gated delta is taken away at a time. Each model's step size is the one of three
with the smallest loss for a seed that is not used again. Losses are in nats a word, above the
entropy of the same texts: "excess" of all words, "grammar" of those that need a few words, "facts"
of the things of names that have come before. "right" is the share of these that are guessed right,
by how many words ago the name came for the last time: 1 to 16, 17 to 32 and so on; "right_in_long"
the share at the end of texts four times as long. "train" is the excess over the last 20 steps.

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
    "heads": 4,
    "layers": 2,
    "block_parameters": 50_000,
    "length": 96,
    "batch": 16,
    "steps": 400,
    "rates": [3e-3, 1e-2, 3e-2],
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


LEFT_OUT = {"mesa"}  # takes five times as long as the others
ABLATIONS = {
    f"gated delta, no {part}": without(part, lt.GatedDeltaNet)
    for part in ("convolution", "norm", "gate")
}
MODELS = {name: mixer for name, mixer in MIXERS.items() if name not in LEFT_OUT} | ABLATIONS
WORD_BY_WORD = ("softmax", "linear (elu + 1)", "Mamba-2", "gated delta")
PAIRS = [(name, "last") for name in MODELS]
PAIRS += [(name, "word") for name in (*WORD_BY_WORD, "gated delta, no convolution")]


def make_model(name, embedding, settings):
    width, words = settings["width"], len(facts.vocabulary())
    mixer = functools.partial(MODELS[name], num_heads=settings["heads"])
    model = lt.LanguageModel(words, width, [lambda width: mixer(width)] * settings["layers"])
    for block in model.blocks:
        mixers.fill_up(block, settings["block_parameters"])
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


def run(name, embedding, rate, seed, settings):
    model = make_model(name, embedding, settings)
    rng, above = np.random.default_rng(seed), []

    def batch_loss(_):
        tokens, surprise, _ = draw(settings["batch"], settings["length"], rng)
        loss = prices(model, tokens)[0].mean()
        above.append(loss.item() - surprise.mean().item())
        return loss

    harness.train(model, batch_loss, settings["steps"], rate)
    return {
        "parameters": mixers.count(model),
        "state": mixers.state_numbers(model, settings["length"]),
        "train": float(np.mean(above[-20:])),
    } | ask(model, seed, settings)


def rows_of(n, tokens):
    """All n words in a row whose last is not one of the first two of a text."""
    return tuple(tokens[:, 3 - n + i : tokens.shape[1] + 1 - n + i] for i in range(n))


def lines(rows, settings):
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
    return [(*pair, rate, settings["choosing"]) for pair in PAIRS for rate in settings["rates"]]


def runs(rows, settings):
    """The best step size is the one with the smallest loss of everything."""
    rates = {
        pair: harness.best_rate(
            rows,
            lambda row: row["excess"],
            mixer=pair[0],
            embedding=pair[1],
            seed=settings["choosing"],
        )
        for pair in PAIRS
    }
    return [(*pair, rates[pair], seed) for seed in settings["seeds"] for pair in PAIRS]


EXPERIMENT = harness.Experiment(
    name="language",
    what="nats a word above the entropy of a grammar, models of two blocks, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "embedding", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: f"excess {row['excess']:.3f}, facts {row['facts']:.3f}",
    more={"lines": {}},
    finish=lines,
)

if __name__ == "__main__":
    EXPERIMENT.main()
