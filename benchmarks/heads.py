"""Queries and keys of a small transformer that has learned to read, for experiments with maps.

python benchmarks/heads.py                  writes lesson_code/results/heads.json and the arrays
python benchmarks/heads.py --output FILE    writes another file, and the arrays beside it
python benchmarks/heads.py --quick          a few steps: only a try

A language model of two layers of softmax attention is trained on the letters of the first chapter
of *Alice's Adventures in Wonderland*, but for the end, which it never sees. Then it reads pieces of
32 letters of both parts, and the queries and keys of the four heads of its second layer are kept,
rotated by their positions as the scores see them. Whole numbers of sixteenths keep the file small;
whoever reads them divides by 16. It takes about ten seconds on one core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from lesson_code import results
from lesson_code.data import texts
from lesson_code.torch.modules import LanguageModel, SoftmaxAttention

SETTINGS = {
    "version": 1,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "rate": 3e-3,
    "weight_decay": 0.1,
    "steps": 200,
    "batch": 16,
    "length": 64,  # of the pieces it is trained on
    "held_out": 0.15,  # of the text, at its end
    "piece": 32,  # letters of a piece that is kept
    "pieces": [24, 12],  # of the part trained on, and of the part held out
    "seed": 0,
}
QUICK = {"width": 16, "layers": 1, "steps": 2, "batch": 2}


def load_text(settings):
    """The part to train on and the part held out, as tensors of whole numbers."""
    text = texts.load("alice")
    alphabet = sorted(set(text))
    numbers = torch.tensor([alphabet.index(letter) for letter in text])
    cut = round(len(numbers) * (1 - settings["held_out"]))
    return numbers[:cut], numbers[cut:], len(alphabet)


def loss_of(model, pieces):
    logits = model(pieces[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def train(model, text, settings, rng):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["rate"], weight_decay=settings["weight_decay"]
    )
    for _ in range(settings["steps"]):
        starts = rng.integers(len(text) - settings["length"], size=settings["batch"])
        pieces = torch.stack([text[i : i + settings["length"] + 1] for i in starts])
        loss = loss_of(model, pieces)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evenly(text, length, number):
    """So many pieces of a text, at equal distances."""
    starts = np.linspace(0, len(text) - length, number).astype(int)
    return torch.stack([text[i : i + length] for i in starts])


@torch.no_grad()
def queries_and_keys(model, tokens):
    """Those of the last layer, (B, H, N, D) each, and the loss on the tokens."""
    mixer = model.blocks[-1].mixer
    inputs = []
    hook = mixer.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    loss = loss_of(model, tokens)
    model(tokens)
    hook.remove()
    x = inputs[-1]
    _, cache = mixer(x, return_state=True)
    twin = SoftmaxAttention(model.embedding.embedding_dim, mixer.num_heads)
    twin.key = mixer.query  # what turns keys turns queries in the same way
    _, turned = twin(x, return_state=True)
    return turned.k, cache.k, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="another file than the package's")
    parser.add_argument("--quick", action="store_true", help="a few steps, only as a try")
    options = parser.parse_args()
    settings = SETTINGS | (QUICK if options.quick else {})
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    rng = np.random.default_rng(settings["seed"])
    text, held_out, letters = load_text(settings)
    mixers = [SoftmaxAttention] * settings["layers"]
    model = LanguageModel(letters, settings["width"], mixers, num_heads=settings["heads"])
    train(model, text, settings, rng)
    arrays, losses = {}, {}
    for part, numbers, kept in zip(
        ("train", "test"), (text, held_out), settings["pieces"], strict=True
    ):
        tokens = evenly(numbers, settings["piece"], kept)
        q, k, losses[part] = queries_and_keys(model, tokens)
        for name, array in ("q", q), ("k", k):
            sixteenths = (16 * array).round().clamp(-127, 127)
            arrays[f"{part}_{name}"] = sixteenths.to(torch.int8).numpy()
        arrays[f"{part}_tokens"] = tokens.to(torch.int8).numpy()
    what = "queries and keys of the second layer of a softmax transformer, on letters"
    seed = settings["seed"]
    result = {
        "what": what,
        "seed": seed,
        "settings": settings,
        "rows": [{"nats_per_letter": losses}],
    }
    results.save("heads", result, output=options.output)
    output = options.output or Path(results.__file__).with_name("heads.json")
    np.savez_compressed(output.with_name(f"{output.stem}_alice.npz"), **arrays)


if __name__ == "__main__":
    main()
