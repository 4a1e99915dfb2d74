"""Queries and keys of a small transformer that has learned to read, and maps fitted to them.

python benchmarks/heads.py                  writes lesson_code/results/heads.json and the arrays
python benchmarks/heads.py --output FILE    writes another file, and the arrays beside it
python benchmarks/heads.py --quick          a few steps: only a try

A language model of two layers of softmax attention is trained on the letters of the first chapter
of *Alice's Adventures in Wonderland*, but for the end, which it never sees. Then it reads pieces of
32 letters of both parts, and the queries and keys of the four heads of its second layer are kept,
rotated by their positions as the scores see them. Whole numbers of sixteenths keep the file small;
whoever reads them divides by 16.

The feature maps of the chapter are then compared with softmax on the pieces held out: fixed ones,
and the same functions after a matrix W and numbers b that are learned for each head, at two widths.
Each learned map has a step size of its own, the best of three when the map is fitted to the first
18 of the 24 pieces and measured on the other 6, on average over three transformers that differ in
their seed. It is then fitted to all 24. The pieces held out choose nothing. It takes about ten
minutes on one core.
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
    "version": 2,
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
    "map_rates": [0.01, 0.03, 0.1],
    "fitted": 18,  # of the pieces of the part trained on, while the step size is chosen
    "seeds": [0, 1, 2],
}
QUICK = {"width": 16, "layers": 1, "steps": 2, "batch": 2, "map_steps": 2, "seeds": [0]}
QUICK |= {"map_rates": [0.01, 0.1]}


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


# Each map of the chapter works on the x of one head. What is learned is a W and a b before it.


def before(phi):
    return lambda W, b: lambda x: phi(x @ W.mT + b[:, None])


def fixed_maps(D):
    return {
        "elu + 1": lt.elu_plus_one,
        "exponential": lt.exponential,
        "Taylor": lt.taylor(D),
        "Hedgehog": lt.hedgehog(D),
    }


def learned_maps(D):
    """Name, what makes the map of W and b, and the rows of W: two widths of each map."""
    hedgehog = lambda W, b: lt.hedgehog(D, weight=W, bias=b)  # noqa: E731
    few = 3 * D // 8
    return [
        ("elu + 1", before(lt.elu_plus_one), D),
        ("elu + 1", before(lt.elu_plus_one), 2 * D),
        ("exponential", before(torch.exp), D),
        ("exponential", before(torch.exp), 2 * D),
        ("Hedgehog", hedgehog, D // 2),
        ("Hedgehog", hedgehog, D),
        ("Taylor", before(lt.taylor(few)), few),
        ("Taylor", before(lt.taylor(D)), D),
    ]


def weights_of(phi, q, k):
    A = (phi(q) @ phi(k).mT).tril()
    return A / A.sum(dim=-1, keepdim=True)


def cross_entropy(phi, q, k):
    """Of the weights under a map with those of softmax: the mean over all rows."""
    past = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    target = lt.attention_weights(q, k, causal=True)[..., past]
    return -(target * weights_of(phi, q, k)[..., past].log()).sum(dim=-1).mean() / q.shape[-2]


def entropy(q, k):
    weights = lt.attention_weights(q, k, causal=True)
    return -torch.special.xlogy(weights, weights).sum(dim=-1).mean()


def learn(make, rows, rate, q, k, settings):
    heads, D = q.shape[1], q.shape[-1]
    start = torch.eye(D, dtype=torch.float64) / 2
    W = torch.cat([start, -start])[:rows].repeat(heads, 1, 1)
    b = torch.zeros(heads, rows, dtype=torch.float64)
    optimizer = torch.optim.Adam([W.requires_grad_(), b.requires_grad_()], lr=rate)
    phi = make(W, b)
    for _ in range(settings["map_steps"]):
        loss = cross_entropy(phi, q, k)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return phi


@torch.no_grad()
def compared(phi, q, k):
    """A map with softmax: its features, and means over all rows."""
    sigma, a = lt.attention_weights(q, k, causal=True), weights_of(phi, q, k)
    return {
        "C": phi(q).shape[-1],
        "divergence": (cross_entropy(phi, q, k) - entropy(q, k)).item(),
        "wrong": (sigma - a).abs().sum(dim=-1).mean().item() / 2,
        "largest": [weights_of(phi, f * q, k).amax(dim=-1).mean().item() for f in (1, 4, 16)],
    }


def queries_keys(arrays, part):
    return tuple(arrays[f"{part}_{name}"].double() / 16 for name in "qk")


def best_rate(make, rows, all_arrays, settings):
    """The step size with which a map does best on pieces that it was not fitted to."""
    fitted = settings["fitted"]

    def loss(rate):
        total = 0.0
        for arrays in all_arrays:
            q, k = queries_keys(arrays, "train")
            phi = learn(make, rows, rate, q[:fitted], k[:fitted], settings)
            with torch.no_grad():
                total += cross_entropy(phi, q[fitted:], k[fitted:]).item()
        return total

    return min(settings["map_rates"], key=loss)


def compare_maps(all_arrays, settings):
    """Each map with softmax, on the pieces held out: a list for each seed."""
    D = all_arrays[0]["train_q"].shape[-1]
    found = [[] for _ in all_arrays]
    for name, phi in fixed_maps(D).items():
        for maps, arrays in zip(found, all_arrays, strict=True):
            maps.append({"map": name, "learned": 0} | compared(phi, *queries_keys(arrays, "test")))
    for name, make, rows in learned_maps(D):
        rate = best_rate(make, rows, all_arrays, settings)
        row = {"map": name, "learned": rows * (D + 1), "rate": rate}  # numbers of each head
        for maps, arrays in zip(found, all_arrays, strict=True):
            phi = learn(make, rows, rate, *queries_keys(arrays, "train"), settings)
            maps.append(row | compared(phi, *queries_keys(arrays, "test")))
            print(maps[-1], flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="another file than the package's")
    parser.add_argument("--quick", action="store_true", help="a few steps, only as a try")
    options = parser.parse_args()
    settings = SETTINGS | (QUICK if options.quick else {})
    output = options.output or Path(results.__file__).with_name("heads.json")
    torch.set_num_threads(1)
    read_by = [read(seed, settings) for seed in settings["seeds"]]
    all_arrays = [arrays for arrays, _ in read_by]
    kept = {name: array.numpy() for name, array in all_arrays[0].items()}  # of the first seed
    np.savez_compressed(output.with_name(f"{output.stem}_alice.npz"), **kept)
    found = compare_maps(all_arrays, settings)
    rows = [row | {"maps": maps} for (_, row), maps in zip(read_by, found, strict=True)]
    what = "feature maps against softmax, in the second layer of transformers that read letters"
    result = {"what": what, "seed": settings["seeds"], "settings": settings, "rows": rows}
    results.save("heads", result, output=options.output)


if __name__ == "__main__":
    main()
