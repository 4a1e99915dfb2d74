"""Queries and keys of a small transformer that has learned to read, and maps fitted to them.

python benchmarks/heads.py                  writes lesson_code/results/heads.json and the arrays
python benchmarks/heads.py --output FILE    writes another file, and the arrays beside it
python benchmarks/heads.py --quick          a few steps: only a try

A language model of two layers of softmax attention is trained on the letters of the first chapter
of *Alice's Adventures in Wonderland*, but for the end, which it never sees. Then it reads pieces of
32 letters of both parts, and the queries and keys of the four heads of its second layer are kept,
rotated by their positions as the scores see them. Whole numbers of sixteenths keep the file small;
whoever reads them divides by 16.

The feature maps of the chapter are then compared with softmax on the pieces held out, fixed ones
and learned ones, and all of it is done with three seeds. It takes about a minute on one core.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import lesson_code.torch as lt
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
    "map_steps": 300,
    "seeds": [0, 1, 2],
}
QUICK = {"width": 16, "layers": 1, "steps": 2, "batch": 2, "map_steps": 2, "seeds": [0]}


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


def sixteenths(x):
    return (16 * x).round().clamp(-127, 127).to(torch.int8)


def read(seed, settings):
    """Train a transformer, and let it read: arrays by part and name, and a row of the result."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
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
        arrays |= {f"{part}_q": sixteenths(q), f"{part}_k": sixteenths(k)}
        arrays[f"{part}_tokens"] = tokens.to(torch.int8)
    return arrays, {"seed": seed, "nats_per_letter": losses}


# The maps of the chapter: what is learned is W and b before a map, one pair for each head.


def before(entrywise):
    return lambda W, b: lambda x: entrywise(x @ W.mT + b[:, None])


LEARNED = {  # and their step sizes, the best of 0.01, 0.03 and 0.1 for the first seed
    "learned elu + 1": (before(lt.elu_plus_one), 0.1),
    "learned exp": (before(torch.exp), 0.03),
    "Hedgehog": (lambda W, b: lt.hedgehog(W.shape[-1], weight=W, bias=b), 0.03),
}


def cross_entropy(phi, q, k):
    """Of the weights under a map with those of softmax: the mean over all rows."""
    past = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    target = lt.attention_weights(q, k, causal=True)[..., past]
    A = (phi(q) @ phi(k).mT).tril()
    A = A / A.sum(dim=-1, keepdim=True)
    return -(target * A[..., past].log()).sum(dim=-1).mean() / q.shape[-2]


def entropy(q, k):
    weights = lt.attention_weights(q, k, causal=True)
    return -torch.special.xlogy(weights, weights).sum(dim=-1).mean()


def learn(make, rate, q, k, settings):
    heads, D = q.shape[1], q.shape[-1]
    W = torch.eye(D, dtype=torch.float64).repeat(heads, 1, 1) / 2
    b = torch.zeros(heads, D, dtype=torch.float64)
    optimizer = torch.optim.Adam([W.requires_grad_(), b.requires_grad_()], lr=rate)
    phi = make(W, b)
    for _ in range(settings["map_steps"]):
        loss = cross_entropy(phi, q, k)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return phi


def divergences(arrays, settings):
    """Of each map from softmax, on the pieces held out."""
    q, k, q_test, k_test = (
        arrays[name].double() / 16 for name in ("train_q", "train_k", "test_q", "test_k")
    )
    maps = {
        "elu + 1": lt.elu_plus_one,
        "exponential": lt.exponential,
        "Taylor": lt.taylor(q.shape[-1]),
    }
    maps |= {name: learn(*how, q, k, settings) for name, how in LEARNED.items()}
    with torch.no_grad():
        least = entropy(q_test, k_test)
        return {n: (cross_entropy(phi, q_test, k_test) - least).item() for n, phi in maps.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="another file than the package's")
    parser.add_argument("--quick", action="store_true", help="a few steps, only as a try")
    options = parser.parse_args()
    settings = SETTINGS | (QUICK if options.quick else {})
    output = options.output or Path(results.__file__).with_name("heads.json")
    torch.set_num_threads(1)
    rows = []
    for seed in settings["seeds"]:
        arrays, row = read(seed, settings)
        if not rows:  # of the first seed the arrays are kept
            kept = {name: array.numpy() for name, array in arrays.items()}
            np.savez_compressed(output.with_name(f"{output.stem}_alice.npz"), **kept)
        rows.append(row | {"divergence": divergences(arrays, settings)})
        print(rows[-1], flush=True)
    what = "feature maps against softmax, in the second layer of transformers that read letters"
    result = {"what": what, "seed": settings["seeds"], "settings": settings, "rows": rows}
    results.save("heads", result, output=options.output)


if __name__ == "__main__":
    main()
