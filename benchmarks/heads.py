"""Queries and keys of a small transformer that has learned to read, and maps fitted to them.

python benchmarks/heads.py                  writes lesson_code/results/heads.json and the arrays
python benchmarks/heads.py --output FILE    writes another file, and the arrays beside it
python benchmarks/heads.py --quick          a few steps: only a try

A language model of two layers of softmax attention is trained on the letters of the first chapter
of *Alice's Adventures in Wonderland*, but for the end, which it never sees. Then it reads the text
in pieces of 32 letters, all of the part it was trained on and some of the end, and the queries and
keys of the four heads of its second layer are noted, rotated by their positions as the scores see
them. To stay small, the file has 60 pieces of the first part, in whole numbers of sixteenths;
whoever reads it divides by 16.

The feature maps of the chapter are then compared with softmax on the pieces held out: fixed ones,
and the same functions after a matrix W and numbers b that are learned for each head, at two widths.
Each learned map has a step size of its own, the best of three when the map is fitted to the first
240 of the 297 pieces and measured on the other 57, on average over three transformers that differ
in their seed. It is then fitted to all 297, and, where it is small, once more to only 24. The
pieces held out choose nothing. Last, each map takes the place of softmax in the second layer, and
the model guesses the letters of the end as well as it can. It takes about ten minutes on one core.
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
from lesson_code.torch.modules._parts import merge_heads

SETTINGS = {
    "version": 3,
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
    "pieces": [297, 12],  # of the part trained on, and of the part held out
    "kept": 60,  # of the pieces of the part trained on, in the file
    "guessed": 52,  # pieces of the part held out on which the model guesses the letters
    "map_steps": 1000,
    "map_batch": 32,  # pieces in a step
    "map_rates": [0.03, 0.1, 0.3],
    "fitted": 240,  # of the pieces of the part trained on, while the step size is chosen
    "few": 24,  # pieces of the second fit
    "small": 32,  # features that a map of the second fit has at most
    "seeds": [0, 1, 2],
}
QUICK = {"width": 16, "layers": 1, "steps": 2, "batch": 2, "map_steps": 2, "seeds": [0]}
QUICK |= {"map_rates": [0.03, 0.1], "pieces": [16, 4], "kept": 8, "fitted": 12, "few": 4}
QUICK |= {"map_batch": 4}


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


def spread(number, kept):
    """So many of a number of pieces, at equal distances."""
    return np.linspace(0, number - 1, kept).astype(int)


def evenly(text, length, number):
    """So many pieces of a text, at equal distances."""
    starts = np.linspace(0, len(text) - length, number).astype(int)
    return torch.stack([text[i : i + length] for i in starts])


def queries_keys_values(mixer, x):
    """Those of softmax attention, (B, H, N, D) each."""
    _, cache = SoftmaxAttention.mix(mixer, x, None)
    twin = SoftmaxAttention(mixer.width, mixer.num_heads)
    twin.key = mixer.query  # what turns keys turns queries in the same way
    _, turned = twin(x, return_state=True)
    return turned.k, cache.k, cache.v


@torch.no_grad()
def queries_and_keys(model, tokens):
    """Those of the last layer."""
    mixer = model.blocks[-1].mixer
    inputs = []
    hook = mixer.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    model(tokens)
    hook.remove()
    return queries_keys_values(mixer, inputs[-1])[:2]


@torch.no_grad()
def loss_with(phi, model, tokens):
    """The model's loss while the map takes the place of softmax in its last layer."""
    mixer = model.blocks[-1].mixer

    def mix(x, state):
        q, k, v = queries_keys_values(mixer, x)
        return mixer.output(merge_heads(weights_of(phi, q.double(), k.double()).float() @ v)), state

    mixer.mix = mix
    loss = loss_of(model, tokens).item()
    del mixer.mix
    return loss


def sixteenths(x):
    return (16 * x).round().clamp(-127, 127).to(torch.int8)


def read(seed, settings):
    """Train a transformer, and let it read: the model, what it guesses, arrays, and a row."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    text, held_out, letters = load_text(settings)
    mixers = [SoftmaxAttention] * settings["layers"]
    model = LanguageModel(letters, settings["width"], mixers, num_heads=settings["heads"])
    train(model, text, settings, rng)
    arrays = {}
    for part, numbers, kept in zip(
        ("train", "test"), (text, held_out), settings["pieces"], strict=True
    ):
        tokens = evenly(numbers, settings["piece"], kept)
        q, k = queries_and_keys(model, tokens)
        arrays |= {f"{part}_q": sixteenths(q), f"{part}_k": sixteenths(k)}
        arrays[f"{part}_tokens"] = tokens.to(torch.int8)
    guessed = evenly(held_out, settings["piece"], settings["guessed"])
    with torch.no_grad():
        losses = {
            "train": loss_of(model, arrays["train_tokens"].long()).item(),
            "test": loss_of(model, guessed).item(),
        }
    return model, guessed, arrays, {"seed": seed, "nats_per_letter": losses}


# Each map of the chapter works on the x of one head. What is learned is a W and a b before it.


def before(phi):
    return lambda W, b: lambda x: phi(x @ W.mT + b[:, None])


def learned_taylor(rows):
    def make(W, b):
        def turned(x):
            return x @ W.mT + b[:, None]

        def similarities(q, k):  # those of the features, for a tenth of the work
            s = turned(q) @ turned(k).mT / rows**0.5
            return ((s + 1).square() + 1) / 2

        def phi(x):
            return lt.taylor(rows)(turned(x))

        phi.similarities = similarities
        return phi

    return make


def fixed_maps(D):
    return {
        "equal": lambda x: torch.ones_like(x[..., :1]),
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
        ("Taylor", learned_taylor(few), few),
        ("Taylor", learned_taylor(D), D),
    ]


def weights_of(phi, q, k):
    quick = getattr(phi, "similarities", None)
    A = (quick(q, k) if quick else phi(q) @ phi(k).mT).tril()
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
    """Learned in float32, which is quicker; the map that is returned computes in float64."""
    q, k = q.float(), k.float()
    heads, D = q.shape[1], q.shape[-1]
    start, rng = torch.eye(D) / 2, np.random.default_rng(0)
    W = torch.cat([start, -start])[:rows].repeat(heads, 1, 1)
    b = torch.zeros(heads, rows)
    optimizer = torch.optim.Adam([W.requires_grad_(), b.requires_grad_()])
    phi, steps = make(W, b), settings["map_steps"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        chosen = rng.integers(len(q), size=settings["map_batch"])
        loss = cross_entropy(phi, q[chosen], k[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return make(W.detach().double(), b.detach().double())


@torch.no_grad()
def divergence(phi, q, k):
    return (cross_entropy(phi, q, k) - entropy(q, k)).item()


@torch.no_grad()
def compared(phi, q, k):
    """A map with softmax: its features, and means over all rows."""
    sigma, a = lt.attention_weights(q, k, causal=True), weights_of(phi, q, k)
    return {
        "C": phi(q).shape[-1],
        "divergence": divergence(phi, q, k),
        "wrong": (sigma - a).abs().sum(dim=-1).mean().item() / 2,
        "first": (sigma.argmax(dim=-1) == a.argmax(dim=-1)).double().mean().item(),
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


def compare_maps(read_by, settings):
    """Each map with softmax, on the pieces held out: a list for each seed."""
    D = read_by[0][2]["train_q"].shape[-1]
    found = [[] for _ in read_by]

    def note(maps, model, guessed, arrays, phi, row):
        row |= {"train_divergence": divergence(phi, *queries_keys(arrays, "train"))}
        row |= compared(phi, *queries_keys(arrays, "test"))
        row["nats_per_letter"] = loss_with(phi, model, guessed)
        maps.append(row)
        print(row, flush=True)

    for name, phi in fixed_maps(D).items():
        for maps, (model, guessed, arrays, _) in zip(found, read_by, strict=True):
            note(maps, model, guessed, arrays, phi, {"map": name, "learned": 0})
    for name, make, rows in learned_maps(D):
        rate = best_rate(make, rows, [arrays for _, _, arrays, _ in read_by], settings)
        row = {"map": name, "learned": rows * (D + 1), "rate": rate}  # numbers of each head
        for maps, (model, guessed, arrays, _) in zip(found, read_by, strict=True):
            q, k = queries_keys(arrays, "train")
            phi = learn(make, rows, rate, q, k, settings)
            note(maps, model, guessed, arrays, phi, dict(row))
            if maps[-1]["C"] <= settings["small"]:
                some = spread(len(q), settings["few"])
                phi = learn(make, rows, rate, q[some], k[some], settings)
                maps[-1]["few"] = {
                    "train_divergence": divergence(phi, q[some], k[some]),
                    "divergence": divergence(phi, *queries_keys(arrays, "test")),
                }
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
    kept = {name: array.numpy() for name, array in read_by[0][2].items()}  # of the first seed
    for name in ("train_q", "train_k", "train_tokens"):
        kept[name] = kept[name][spread(len(kept[name]), settings["kept"])]
    np.savez_compressed(output.with_name(f"{output.stem}_alice.npz"), **kept)
    found = compare_maps(read_by, settings)
    rows = [row | {"maps": maps} for (*_, row), maps in zip(read_by, found, strict=True)]
    what = "feature maps against softmax, in the second layer of transformers that read letters"
    result = {"what": what, "seed": settings["seeds"], "settings": settings, "rows": rows}
    results.save("heads", result, output=options.output)


if __name__ == "__main__":
    main()
