"""Regression in context: how well each memory has learned a linear map after so many examples.

python benchmarks/regression.py                  writes lesson_code/results/regression.json
python benchmarks/regression.py --output FILE    writes another file
python benchmarks/regression.py --quick          few examples and settings: only a try

An example is a key k of length 1 and a value v = Pᵀk + noise, with a matrix P of D by D that is
drawn for each sequence, with entries of variance 1. At each token the memory reads the key and its
value, and then predicts the value of a new key of the same kind. The error is the mean square of
what it predicts less Pᵀq, without noise; a prediction of 0 has an error of 1. Nothing is trained.

plain         keys in all directions alike
correlated    the variances of the keys' directions fall from 1 to 1/100, before their length is
              made 1; the directions are drawn for each seed
drift         keys as in plain, and P changes at every token: P ← a P + √(1 - a²) (a new matrix),
              a = 1 - 1/64

The settings of each rule are the ones of a grid with the smallest mean error over all tokens, for a
seed that is not used again. A row has the errors of one seed, each the mean over the tokens from
n/2 + 1 to n, for n = 1, 2, 4, ... examples; all sequences of a seed are averaged.

"delta" has one step for all tokens; that of "delta, falling" is h / (h + t) at token t = 1, 2, ...,
so it begins near 1 and is one half at t = h. "mesa, keeps all" is Mesa without its decay. "batch"
takes all gradients of 16 tokens where they begin, without the norm and the bias that TTT-Linear
adds; "ttt, no norm, no bias" is "ttt" without both, so that only its residual connection is left.
One thread takes about two minutes. As nothing is trained, no run is worth saving by itself,
and `harness.py` has no part in this.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

from lesson_code import results
from lesson_code.numpy import (
    TTTState,
    gated_delta_rule,
    mesa,
    momentum_delta_rule,
    retention,
    ttt_linear,
)

SETTINGS = {
    "tasks": ["plain", "correlated", "drift"],
    "width": 16,
    "length": 256,
    "noise": 0.2,
    "sequences": 64,
    "batch": 16,
    "tried": 16,  # sequences with which the settings are chosen
    "choosing": 100,  # the seed of those
    "seeds": [0, 1, 2, 3, 4],
}
QUICK = {"length": 32, "sequences": 2, "tried": 2, "seeds": [0, 1]}

DECAYS = [0.8, 0.85, 0.9, 0.94, 0.97, 0.98, 0.99, 1.0]
STEPS = [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.25]
RIDGES = [0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0, 2.0, 4.0]
GRID = {
    "linear": {"scale": [4, 6, 8, 12, 16, 24], "extra": [0, 8, 16, 32, 64], "decay": DECAYS},
    "delta": {"beta": STEPS, "decay": DECAYS},
    "delta, falling": {"half": [8, 16, 32, 64, 128, 256, 512, 1024], "decay": DECAYS},
    "momentum": {"beta": STEPS, "momentum": [0.0625, 0.125, 0.25, 0.5, 0.75], "decay": DECAYS},
    "batch": {"beta": [0.0625, *STEPS]},
    "ttt, no norm": {"eta": [2.0**i for i in range(-8, 0)]},
    "ttt, no norm, no bias": {"beta": [0.0625, *STEPS]},
    "ttt": {
        "eta": [2.0**i for i in range(-12, -2)],
        "weight": [0.25, 0.5, 0.75, 1.0],
        "start": [0.02, 0.1, 0.3, 1.0],
    },
    "mesa": {"ridge": RIDGES, "decay": DECAYS},
    "mesa, keeps all": {"ridge": RIDGES},
}


def draw(task, rng, sequences, settings):
    """Queries, keys, values and what the queries should find, each (sequences, N, D)."""
    N, D = settings["length"], settings["width"]
    axes = np.linalg.qr(rng.standard_normal((D, D)))[0]

    def keys():
        x = rng.standard_normal((sequences, N, D))
        if task == "correlated":
            x = (x * np.geomspace(1, 0.1, D)) @ axes
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = keys(), keys()
    P = rng.standard_normal((sequences, D, D))
    v, wanted = np.empty_like(k), np.empty_like(k)
    a = 1 - 1 / 64 if task == "drift" else 1.0
    for t in range(N):
        v[:, t] = (k[:, t, None] @ P)[:, 0]
        wanted[:, t] = (q[:, t, None] @ P)[:, 0]
        P = a * P + np.sqrt(1 - a**2) * rng.standard_normal(P.shape)
    return q, k, v + settings["noise"] * rng.standard_normal(v.shape), wanted


def predict(rule, q, k, v, batch, *, decay=1.0, **own):
    """What a rule predicts at each token with its settings, (sequences, N, D)."""
    (B, N, D), log_decay = k.shape, np.full(k.shape[:2], np.log(decay))
    ones = np.ones((B, N))
    if rule == "linear":  # a mean of the values, as if a few zeros had come before
        count = np.cumsum(decay ** np.arange(N))[:, None]
        return own["scale"] * retention(q, k, v, decay) / (own["extra"] + count)
    if rule == "delta":
        return gated_delta_rule(q, k, v, own["beta"] * ones, log_decay)
    if rule == "delta, falling":
        beta = own["half"] / (own["half"] + np.arange(1, N + 1))
        return gated_delta_rule(q, k, v, beta * ones, log_decay)
    if rule == "momentum":
        steps = own["beta"] * ones, log_decay, own["momentum"] * ones
        return momentum_delta_rule(q, k, v, *steps)
    if rule == "batch":
        S, out = np.zeros((B, D, D)), []
        for start in range(0, N, batch):
            Q, K, V = (x[:, start : start + batch] for x in (q, k, v))
            E = own["beta"] * (V - K @ S)
            out.append(Q @ S + np.tril(Q @ K.mT) @ E)
            S = S + K.mT @ E
        return np.concatenate(out, axis=1)
    if rule == "ttt, no norm, no bias":  # batches, fitted to what a value adds to its key
        return q + predict("batch", q, k, v - k, batch, **own)
    if rule.startswith("ttt"):
        W = own.get("start", 0) * np.random.default_rng(0).standard_normal((D, D))
        none = np.zeros((B, D, D)), np.zeros((B, D))
        first = TTTState(np.broadcast_to(W, (B, D, D)), none[1], *none, 0)
        norm = np.full(D, own.get("weight", 1.0)), np.zeros(D)
        options = {"normalize": rule == "ttt", "batch_size": batch, "form": "chunkwise"}
        eta = own["eta"] * ones
        return ttt_linear(q, k, v, eta, ones, *norm, initial_state=first, **options)
    return mesa(q, k, v, ones, log_decay, np.full(D, own["ridge"]))


def errors(predicted, wanted):
    """The mean square at each token, (N,)."""
    return np.mean((predicted - wanted) ** 2, axis=(0, 2))


def choose(rule, task, settings):
    """The settings of the grid with the smallest mean error."""
    rng = np.random.default_rng(settings["choosing"])
    *arrays, wanted = draw(task, rng, settings["tried"], settings)
    best, chosen = np.inf, {}
    for values in itertools.product(*GRID[rule].values()):
        own = dict(zip(GRID[rule], values, strict=True))
        with np.errstate(over="ignore", invalid="ignore"):  # steps that are too large
            error = errors(predict(rule, *arrays, settings["batch"], **own), wanted).mean()
        if error < best:
            best, chosen = error, own
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for the record; the arrays are NumPy's
    settings = SETTINGS | (QUICK if options.quick else {})
    examples = 2 ** np.arange(int(np.log2(settings["length"])) + 1)
    rows = []
    for task, rule in itertools.product(settings["tasks"], GRID):
        own = choose(rule, task, settings)
        for seed in settings["seeds"]:
            *arrays, wanted = draw(
                task, np.random.default_rng(seed), settings["sequences"], settings
            )
            error = errors(predict(rule, *arrays, settings["batch"], **own), wanted)
            means = [float(error[n // 2 : n].mean()) for n in examples]
            rows.append({"task": task, "rule": rule, "chosen": own, "seed": seed, "error": means})
        print(task, rule, own, f"{rows[-1]['error'][-1]:.4f}", flush=True)
    result = {
        "what": "mean square error of what each memory predicts, after so many examples",
        "settings": settings,
        "seed": settings["seeds"],
        "grid": GRID,
        "examples": examples.tolist(),
        "rows": rows,
    }
    results.save("regression", result, output=options.output)


if __name__ == "__main__":
    main()
