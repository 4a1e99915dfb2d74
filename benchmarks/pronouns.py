"""Attention heads that find out what *it* means, and what each of their parts is good for.

python benchmarks/pronouns.py                  writes lesson_code/results/pronouns.json and weights
python benchmarks/pronouns.py --output FILE    writes another file, and the weights beside it
python benchmarks/pronouns.py --steps 3 --seeds 0    only a try
python benchmarks/pronouns.py --scale          writes lesson_code/results/pronouns_scale.json
python benchmarks/pronouns.py --linear         writes lesson_code/results/pronouns_linear.json

A model reads a sentence of `lesson_code.data.sentences`. The vectors of its words and of their
positions are added; its heads are softmax attention without a mask, asked by the last word alone.
From what the heads find a matrix makes a number for each word of the vocabulary, and the largest is
the answer. The target is the noun meant, and, for models with two questions, the other noun too;
nothing says where to look. What varies: the number of heads, side by side in the same width, so
that their weights are as many; whether words have positions; whether all words of the sentence get
the same weight instead. Each model has the same steps, and of three learning rates the one that led
to the smallest loss on the training sentences. Sentences held out are looked at once, in the end.
Each is trained with several seeds; the weights kept are those of the first. Three minutes on one
core. With --scale: the head with the scores divided by the root of the width and without, and the
wrong answers of equal weights. --width sets the width there: 256 takes hours. With --linear: the
head with softmax and with linear attention, the weights that they give to the nouns, and how the
first of each came to them, step by step.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, elu

from lesson_code import results
from lesson_code.data import sentences

F = 16
MODELS = {
    "one head": {},
    "no positions": {"positions": False},
    "equal weights": {"equal": True},
    "one head, two questions": {"questions": 2},
    "two heads, two questions": {"heads": 2, "questions": 2},
}
RATES = [0.02, 0.04, 0.08]
KEPT = {"one head": "head", "two heads, two questions": "two_heads"}
WORDS = sentences.vocabulary()


def encode(part):
    """Tokens (B, N), padded at the end; lengths (B,); the noun meant and the other one (B, 2)."""
    number = {word: i for i, word in enumerate(WORDS)}
    lengths = torch.tensor([len(sentence.words) for sentence in part])
    tokens = torch.zeros(len(part), 15, dtype=torch.long)
    for row, sentence in zip(tokens, part, strict=True):
        row[: len(sentence.words)] = torch.tensor([number[word] for word in sentence.words])
    nouns = torch.tensor([[number[s.meant], number[s.other]] for s in part])
    return tokens, lengths, nouns


def draw_weights(seed, positions, questions, F, N=15):
    """Rows of E and P of size 1, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).requires_grad_()

    weights = {"E": draw(len(WORDS), F)}
    if positions:
        weights["P"] = draw(N, F)
    for name in ("W_q", "W_k", "W_v"):
        weights[name] = draw(F, F, scale=F**-0.5)
    return weights | {"U": draw(questions, F, len(WORDS), scale=F**-0.5)}


def attend(weights, tokens, lengths, heads=1, equal=False, scaled=True, linear=False):
    """The weights of the words, (B, heads, 1, N), and their values, (B, heads, N, D)."""
    x = weights["E"][tokens]
    (B, N, F) = x.shape
    D = F // heads
    if "P" in weights:
        x = x + weights["P"][:N]
    last = x[torch.arange(B), lengths - 1]
    q = (last @ weights["W_q"]).view(B, heads, 1, D)
    k, v = ((x @ weights[name]).view(B, N, heads, D).transpose(1, 2) for name in ("W_k", "W_v"))
    padding = (torch.arange(N) >= lengths[:, None])[:, None, None]
    if linear:
        similarities = (elu(q) + 1) @ (elu(k) + 1).transpose(-1, -2)
        similarities = similarities.masked_fill(padding, 0)
        return similarities / similarities.sum(dim=-1, keepdim=True), v
    scores = q @ k.transpose(-1, -2) / (math.sqrt(D) if scaled else 1)
    scores = (0 * scores if equal else scores).masked_fill(padding, -math.inf)
    return scores.softmax(dim=-1), v


def answers(weights, tokens, lengths, **options):
    """A number for each question and word, (B, questions, vocabulary)."""
    a, v = attend(weights, tokens, lengths, **options)
    return torch.einsum("bf,qfw->bqw", (a @ v).flatten(1), weights["U"])


def train(data, seed, rate, steps, watch=None, positions=True, questions=1, width=F, **options):
    tokens, lengths, nouns = data
    weights = draw_weights(seed, positions, questions, width)
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    for t in range(steps):
        if watch and t % 10 == 0 and t <= 200:
            watch(t, weights)
        optimizer.param_groups[0]["lr"] = rate * (1 - t / steps)
        batch = torch.randint(len(tokens), (256,), generator=generator)
        out = answers(weights, tokens[batch], lengths[batch], **options)
        loss = cross_entropy(out.flatten(0, 1), nouns[batch, :questions].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: w.detach() for name, w in weights.items()}


@torch.no_grad()
def judge(weights, data, questions=1, positions=True, width=F, **options):
    """The loss, and the share of sentences of which every question is answered rightly."""
    tokens, lengths, nouns = data
    out, target = answers(weights, tokens, lengths, **options), nouns[:, :questions]
    loss = cross_entropy(out.flatten(0, 1), target.flatten()).item()
    return loss, (out.argmax(dim=-1) == target).all(dim=1).double().mean().item()


@torch.no_grad()
def mistakes(weights, data, **options):
    """Of the sentences where one noun alone can hold something: right answers, the other noun."""
    tokens, lengths, nouns = data
    holders = torch.tensor([word in sentences.HOLDERS for word in WORDS])
    clear = holders[nouns].sum(dim=1) == 1
    answer = answers(weights, tokens, lengths, **options)[:, 0].argmax(dim=-1)
    named = (answer[:, None] == nouns)[clear].double().mean(dim=0)
    return {"clear, right": named[0].item(), "clear, the other noun": named[1].item()}


@torch.no_grad()
def on_nouns(weights, data, **options):
    """The mean weight of the noun meant and of the other one, for a single head."""
    tokens, lengths, nouns = data
    a = attend(weights, tokens, lengths, **options)[0][:, 0, 0]
    both = (a[:, None] * (tokens[:, None] == nouns[:, :, None])).sum(dim=-1).double().mean(dim=0)
    return {"on meant": both[0].item(), "on other": both[1].item()}


@torch.no_grad()
def by_adjective(weights, data, **options):
    """For each last word, the mean weight of the noun meant, and those of the first nine words."""
    tokens, lengths, nouns = data
    a = attend(weights, tokens, lengths, **options)[0][:, 0, 0]
    meant = (a * (tokens == nouns[:, :1])).sum(dim=1)
    last = tokens[torch.arange(len(tokens)), lengths - 1]
    groups = {WORDS[i]: last == i for i in last.unique()}
    return {
        word: (meant[group].mean().item(), a[group, :9].double().mean(dim=0).tolist())
        for word, group in groups.items()
    }


def longest_stuck(log):
    """Steps for which the noun meant has had a weight below 0.01 for one and the same adjective."""
    longest = 0
    for word in log[0]["nouns"]:
        run = 0
        for row in log:
            run = run + 10 if row["nouns"][word] < 0.01 else 0
            longest = max(longest, run)
    return longest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--width", type=int, default=F)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file_name = "pronouns" + ("_scale" if options.scale else "_linear" if options.linear else "")
    output = options.output or Path(results.__file__).with_name(f"{file_name}.json")
    models = MODELS
    if options.scale:
        models = {
            "equal weights": MODELS["equal weights"],
            "scaled": {"width": options.width},
            "not scaled": {"width": options.width, "scaled": False},
        }
    if options.linear:
        models = {"softmax": {}, "linear": {"linear": True}}
    training, held_out = map(encode, sentences.load())
    rows, watched = [], []
    for name, model in models.items():
        for seed in options.seeds:
            tried = []
            for rate in RATES:
                seen_so_far = []

                def watch(t, weights, log=seen_so_far, model=model):
                    loss, right = judge(weights, held_out, **model)
                    nouns = on_nouns(weights, held_out, **model)
                    log.append({"step": t, "loss": loss, "held out": right} | nouns)
                    asked = by_adjective(weights, held_out, **model)
                    log[-1]["nouns"] = {word: on_noun for word, (on_noun, _) in asked.items()}
                    log[-1] |= {word: asked[word][1] for word in ("big", "small")}

                watching = watch if options.linear else None
                weights = train(training, seed, rate, options.steps, watching, **model)
                tried.append((*judge(weights, training, **model), rate, weights, seen_so_far))
            loss, seen, rate, weights, log = min(tried, key=lambda run: run[0])
            if seed == options.seeds[0]:
                watched += [{"model": name} | row for row in log]
            right = judge(weights, held_out, **model)[1]
            rows.append(
                {
                    "model": name,
                    "seed": seed,
                    "rate": rate,
                    "loss": loss,
                    "training": seen,
                    "held out": right,
                    "parameters": sum(w.numel() for w in weights.values()),
                }
            )
            if options.scale and "width" not in model:
                rows[-1] |= mistakes(weights, held_out, **model)
            if options.linear:
                rows[-1] |= on_nouns(weights, held_out, **model)
                rows[-1]["stuck"] = longest_stuck(log)
            print(
                f"{name:25} seed {seed}  rate {rate:.2f}  loss {loss:.3f}"
                f"  training {seen:.3f}  held out {right:.3f}",
                flush=True,
            )
            kept = {"linear": "head"} if options.linear else {} if options.scale else KEPT
            if name in kept and seed == options.seeds[0]:
                file = output.with_name(f"{output.stem}_{kept[name]}.npz")
                np.savez(file, **{key: w.numpy() for key, w in weights.items()})
    result = {
        "what": "the share of sentences in which a head finds the noun, float32",
        "seed": options.seeds,
        "steps": options.steps,
        "sentences": {"training": len(training[0]), "held out": len(held_out[0])},
        "rows": rows,
    }
    if options.linear:
        result["watched"] = watched
    results.save(file_name, result, output=options.output)


if __name__ == "__main__":
    main()
