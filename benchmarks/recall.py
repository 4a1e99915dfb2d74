"""What a state can hold: every mixer of the book, trained on multi-query associative recall.

python benchmarks/recall.py                    writes lesson_code/results/recall.json
python benchmarks/recall.py --seeds 0 1 2      makes the runs of these seeds only
python benchmarks/recall.py --renew            begins again, whatever the file holds
python benchmarks/recall.py --output FILE      writes another file
python benchmarks/recall.py --quick            a model of each kind for a few steps: only a try

The task is `lesson_code.data.tasks.multi_query_associative_recall`, shortened: a pair of a key and
a value is one token, and so is a question for a key. So a text has n pairs, then n questions, each
key once. To bind a value to its key, no model needs a convolution or a second layer: one layer is
asked for what its memory holds, and for nothing else. Between 127 keys and 128 values each text
chooses anew.

All models are one block, a mixer and a feed-forward sublayer as wide as makes the blocks equally
large, over an embedding that is the sum of one for the key and one for the value (or the question).
All mixers are those of `mixers.py`, with memories of equal size: width²/H numbers in H heads. There
are two sizes, 512 numbers (two heads) and 1,024 (one), and for two of the mixers a third, 256 (four
heads). A row's "memory" is this number, and its "state" what the model keeps of a text with the
most pairs, tails of convolutions and all.

Each model is trained on all numbers of pairs, from the fewest to the most in the first half of the
training. Its step size is the one of three with the smallest loss, as a mean over the numbers of
pairs, after half as many steps, for a seed that is not used again, with two heads. "accuracy" and
"loss" of a row are lists, with an entry for each number of pairs, on texts that no model was
trained on.

One thread takes about an hour and a half for five seeds, and the first three come first.
"""

import harness
import mixers
import numpy as np
import torch
from mixers import MIXERS
from torch import nn

import lesson_code.torch as lt
from lesson_code.data import tasks

SETTINGS = {
    "version": 2,
    "vocab_size": 256,  # half of it keys, and half of it values
    "pairs": [4, 8, 16, 32, 64],
    "width": 32,
    "heads": [2, 1],
    "other_heads": [4],  # for two of the mixers
    "block_parameters": 16 * 32**2,
    "steps": 1600,
    "trial_steps": 800,
    "tokens": 512,  # of a step
    "rates": [1e-2, 3e-2, 6e-2],
    "choosing": 100,  # the seed that chooses the rate
    "seeds": [0, 1, 2, 3, 4],
    "asked": 4096,  # questions of each number of pairs
}
TWO = ["linear (elu + 1)", "DeltaNet"]
QUICK = {
    "pairs": [2, 4],
    "steps": 3,
    "trial_steps": 2,
    "tokens": 16,
    "rates": [1e-2],
    "seeds": [0],
    "asked": 16,
}


def make_model(name, heads, settings):
    width, values = settings["width"], settings["vocab_size"] // 2
    vocab_size = values * (values + 1)  # pairs of a key and a value or a question
    model = lt.LanguageModel(vocab_size, width, [lambda width: MIXERS[name](width, heads)])
    model.embedding = mixers.PairEmbedding(values, values, width)
    model.head = nn.Linear(width, values, bias=False)
    mixers.begin_as_identity(model)
    mixers.fill_up(model.blocks[0], settings["block_parameters"])
    return model


def draw(pairs, questions, rng, settings):
    """Texts (B, 2 pairs) with so many questions in all, and the answers (B, pairs)."""
    half = settings["vocab_size"] // 2
    text, targets, _ = tasks.multi_query_associative_recall(
        vocab_size=2 * half,
        pairs=pairs,
        length=4 * pairs,
        batch=max(questions // pairs, 1),
        seed=rng,
    )
    keys, values, asked = (
        text[:, : 2 * pairs : 2],
        text[:, 1 : 2 * pairs : 2],
        text[:, 2 * pairs :: 2],
    )
    tokens = np.concatenate([keys * (half + 1) + values - half + 1, asked * (half + 1)], axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets[:, 2 * pairs :: 2] - half)


def run(name, heads, steps, rate, seed, settings):
    """Train and ask one model."""
    model, sizes = make_model(name, heads, settings), settings["pairs"]
    rng = np.random.default_rng(seed)

    def loss_and_right(pairs, questions, rng):
        tokens, answers = draw(pairs, questions, rng, settings)
        logits = model(tokens)[:, pairs:].flatten(0, 1)
        right = (logits.argmax(dim=-1) == answers.flatten()).double().mean()
        return nn.functional.cross_entropy(logits, answers.flatten()), right

    def batch_loss(i):
        hardest = min(1 + int(2 * i / steps * len(sizes)), len(sizes))
        return loss_and_right(sizes[rng.integers(hardest)], settings["tokens"] // 2, rng)[0]

    harness.train(model, batch_loss, steps, rate)
    with torch.no_grad():
        asked = [
            loss_and_right(pairs, settings["asked"], np.random.default_rng([seed, pairs]))
            for pairs in sizes
        ]
    return {
        "parameters": mixers.count(model),
        "memory": settings["width"] ** 2 // heads,
        "state": mixers.state_numbers(model, 2 * max(sizes)),
        "loss": [loss.item() for loss, _ in asked],
        "accuracy": [right.item() for _, right in asked],
    }


def trials(settings):
    heads, steps, seed = settings["heads"][0], settings["trial_steps"], settings["choosing"]
    return [(name, heads, steps, rate, seed) for rate in settings["rates"] for name in MIXERS]


def runs(rows, settings):
    """Three seeds before the others, and the models that matter most first."""
    trial, steps = {"seed": settings["choosing"]}, settings["steps"]
    rates = {
        name: harness.best_rate(rows, lambda row: np.mean(row["loss"]), mixer=name, **trial)
        for name in MIXERS
    }
    first, *others = settings["heads"]
    jobs = [
        (name, heads, steps, rates[name], seed)
        for seeds in (settings["seeds"][:3], settings["seeds"][3:])
        for sizes, names in (
            ([first], MIXERS),
            ([*others, *settings["other_heads"]], TWO),
            (others, MIXERS),
        )
        for seed in seeds
        for heads in sizes
        for name in names
    ]
    return list(dict.fromkeys(jobs))


EXPERIMENT = harness.Experiment(
    name="recall",
    what="accuracy on multi-query associative recall, models of one block, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "heads", "steps", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: "right " + " ".join(f"{share:.2f}" for share in row["accuracy"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
