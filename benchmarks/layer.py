"""One layer with three ways of mixing, trained on tales in which everybody has one habit.

python benchmarks/layer.py                     writes lesson_code/results/layer.json
python benchmarks/layer.py --output FILE       writes another file
python benchmarks/layer.py --renew             begins again, whatever the file holds
python benchmarks/layer.py --quick             every kind of model for a few steps: only a try

A tale is a row of sentences such as "Ida knits .": 16 names, 16 verbs, and in one tale each person
does always the same. So the verb is known wherever the name has come before, if the model can look
it up. One pair of name and verb in eight never comes in training.

The three models are those of the chapter on the layer. They differ in how a token gets at the ones
before it: softmax attention, linear attention (elu + 1), or the plain mean of all values, which has
no keys and puts their parameters into a wider feed-forward sublayer. The step size of each is the
one of four with which the loss on other tales of the training's kind is smallest, over all seeds;
the models are trained three times as long, too, with this step size and the next smaller one.

For linear attention, a row also says which names share a place in the state: those where the query
of one matches the keys of the other at least half as well as its own. And it says how much of the
probability that the model misses is missed at these names.

A list of its own, "drawers", has linear attention with other numbers of heads and of features (in
all heads together; the values keep their width). It is trained for 600 steps, with two step sizes
and three seeds, and shared places are listed for each head.

Besides, one batch goes forward and backward through the linear model, by one call and by one step
for each word; the file has the fastest of the times, in milliseconds of the processor.

Every run is saved when it ends, and a run that the file has is not repeated.
"""

import argparse
import json
import time
from pathlib import Path

import harness
import numpy as np
import torch
from torch import nn

import lesson_code.torch as lt
from lesson_code import results

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 2,
    "words": 16,  # names, and as many verbs
    "sentences": 32,
    "width": 32,
    "batch": 32,
    "steps": 600,
    "longer": 3,
    "rates": [3e-3, 1e-2, 3e-2, 1e-1],
    "seeds": [0, 1, 2],
    "asked": 512,  # tales
    "people": [[1, 2], [3, 4], [5, 8], [9, 12], [13, 16]],
    "drawers": [[1, 8], [1, 16], [1, 64], [2, 32], [4, 32]],  # heads, features
    "drawer_rates": [1e-2, 3e-2],
}
QUICK = {"width": 8, "steps": 3, "longer": 2, "rates": [1e-2], "seeds": [0], "asked": 32}
QUICK |= {"drawers": [[2, 4]], "drawer_rates": [1e-2]}
RENEW = harness.renew("layer")
WHAT = "tales in which a name tells the verb, models of one layer, float32"


def held_out(who, verb):
    return (who + verb) % 8 == 0


def tales(rng, B, settings, *, new=False):
    """Texts (B, 3 * sentences); with new=True the pairs that training leaves out come, too."""
    words, people = settings["words"], np.arange(settings["words"])
    does = rng.integers(words, size=(B, words))
    while not new and (bad := held_out(people, does)).any():
        does[bad] = rng.integers(words, size=bad.sum())
    who = rng.integers(words, size=(B, settings["sentences"]))
    verb = np.take_along_axis(does, who, axis=1)
    text = np.stack([who, words + verb, np.full_like(who, 2 * words)], axis=2)
    return torch.from_numpy(text.reshape(B, -1))


class WithPrevious(lt.Mixer):
    """Adds to each token what a matrix makes of the one before."""

    is_block = True

    def __init__(self, width):
        super().__init__(width)
        self.previous = nn.Linear(width, width, bias=False)

    def mix(self, x, state):
        last = x.new_zeros(len(x), 1, self.width) if state is None else state
        shifted = torch.cat([last, x], dim=1)
        return x + self.previous(shifted[:, :-1]), shifted[:, -1:]


class SoftmaxLayer(lt.LinearTransformerLayer):
    def mix(self, x, state):
        q, k, v = self.query(x), self.key(x), self.value(x)
        u = self.norm_1(lt.softmax_attention(q, k, v, causal=True) + x)
        return self.norm_2(u + self.feed_forward(u)), None


class KeylessLayer(lt.LinearTransformerLayer):
    def __init__(self, width, num_heads):
        super().__init__(width, num_heads)
        del self.query, self.key
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 5 * width), nn.GELU(), nn.Linear(5 * width, width)
        )

    def mix(self, x, state):
        t = torch.arange(1, x.shape[1] + 1)[:, None]
        u = self.norm_1(self.value(x).cumsum(dim=1) / t + x)
        return self.norm_2(u + self.feed_forward(u)), None


class DrawersLayer(lt.LinearTransformerLayer):
    """Linear attention whose heads have as many features in all as asked for."""

    def __init__(self, width, num_heads, features):
        super().__init__(width, num_heads)
        self.heads = num_heads
        self.query = nn.Linear(width, features, bias=False)
        self.key = nn.Linear(width, features, bias=False)

    def mix(self, x, state):
        maps = self.query, self.key, self.value
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in maps)
        o = lt.linear_attention(q, k, v, causal=True).transpose(1, 2).flatten(-2)
        u = self.norm_1(o + x)
        return self.norm_2(u + self.feed_forward(u)), None


LAYERS = {"softmax": SoftmaxLayer, "linear": lt.LinearTransformerLayer, "keyless": KeylessLayer}


def make_model(mixer, settings):
    layers = [WithPrevious, LAYERS[mixer]]
    return lt.LanguageModel(2 * settings["words"] + 1, settings["width"], layers, num_heads=1)


def train(model, steps, rate, seed, settings):
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (i + 1) / 50) * (1 - i / steps)
        text = tales(rng, settings["batch"], settings)
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def ask(model, text, settings):
    """Where the verb is known: its log-probability, the name, the people met, and what is new."""
    who, verb = text[:, 0::3], text[:, 1::3]
    known = (who[:, :, None] == who[:, None, :]).tril(-1).any(dim=-1)
    people = (~known).cumsum(dim=1)
    log_p = model(text)[:, 0::3].log_softmax(dim=-1).gather(-1, verb[..., None])[..., 0]
    is_new = held_out(who, verb - settings["words"])
    return log_p[known], who[known], people[known], is_new[known]


@torch.no_grad()
def asked_and_written(model, settings):
    """Each name's query, before the feature map, and the keys of the verbs after it."""
    n, words, block, layer = settings["words"], model.embedding.weight, *model.blocks
    asking = words[:n] + block.previous(words[2 * n])  # a name after the period
    written = words[n : 2 * n] + block.previous(words[:n])[:, None]  # each verb after each name
    return layer.query(asking), layer.key(written)


def shared_places(model, settings, heads=1):
    """Pairs of names of which one's query matches the other's keys half as well as its own.

    A list for each head.
    """
    n, pairs = settings["words"], []
    q, k = (lt.elu_plus_one(x) for x in asked_and_written(model, settings))
    for q_h, k_h in zip(q.chunk(heads, dim=-1), k.mean(dim=1).chunk(heads, dim=-1), strict=True):
        match = q_h @ k_h.T / (q_h * k_h).sum(dim=-1, keepdim=True)
        near = [(i, j) for i in range(n) for j in range(i)]
        pairs.append([[i, j] for i, j in near if max(match[i, j], match[j, i]) > 0.5])
    return pairs


def run(mixer, steps, rate, seed, settings):
    """Train and ask one model: a row of the result."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    model = make_model(mixer, settings)
    train(model, steps, rate, seed, settings)
    seconds = time.perf_counter() - start
    other = tales(np.random.default_rng([seed, 1]), settings["asked"], settings)
    new = tales(np.random.default_rng([seed, 2]), settings["asked"], settings, new=True)
    log_p, who, people, is_new = ask(model, new, settings)
    p = log_p.exp()
    shared = shared_places(model, settings)[0] if mixer == "linear" else None
    in_pair = torch.isin(who, torch.tensor(shared or [], dtype=who.dtype))
    return {
        "mixer": mixer,
        "steps": steps,
        "rate": rate,
        "seed": seed,
        "parameters": sum(x.numel() for x in model.parameters()),
        "loss_to_choose_by": -ask(model, other, settings)[0].mean().item(),
        "loss": -log_p.mean().item(),
        "probability": p.mean().item(),
        "probability_new_pairs": p[is_new].mean().item(),
        "probability_by_people": [
            p[(people >= low) & (people <= high)].mean().item() for low, high in settings["people"]
        ],
        "shared": shared,
        "missed_at_shared": ((1 - p)[in_pair].sum() / (1 - p).sum()).item() if shared else None,
        "seconds": seconds,
    }


def run_drawers(heads, features, rate, seed, settings):
    """Train and ask linear attention with these heads and features: a row of the list."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    words, width = settings["words"], settings["width"]

    def layer(width, num_heads):
        return DrawersLayer(width, num_heads, features)

    model = lt.LanguageModel(2 * words + 1, width, [WithPrevious, layer], num_heads=heads)
    train(model, settings["steps"], rate, seed, settings)
    seconds = time.perf_counter() - start
    other = tales(np.random.default_rng([seed, 1]), settings["asked"], settings)
    new = tales(np.random.default_rng([seed, 2]), settings["asked"], settings, new=True)
    log_p = ask(model, new, settings)[0]
    return {
        "heads": heads,
        "features": features,
        "rate": rate,
        "seed": seed,
        "parameters": sum(x.numel() for x in model.parameters()),
        "loss_to_choose_by": -ask(model, other, settings)[0].mean().item(),
        "loss": -log_p.mean().item(),
        "probability": log_p.exp().mean().item(),
        "shared": shared_places(model, settings, heads),
        "seconds": seconds,
    }


def time_batch(settings, repeats=20):
    """Fewest milliseconds to make the gradients of one batch, in parallel and step by step."""
    torch.manual_seed(0)
    model = make_model("linear", settings)
    text = tales(np.random.default_rng(0), settings["batch"], settings)

    def in_steps(words):
        state, logits = model.initial_state(len(words)), []
        for t in range(words.shape[1]):
            logit, state = model.step(words[:, t], state)
            logits.append(logit)
        return torch.stack(logits, dim=1)

    def milliseconds(forward):
        start = time.process_time()
        logits = forward(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        return 1000 * (time.process_time() - start)

    return {
        name: min(milliseconds(forward) for _ in range(repeats))
        for name, forward in {"forward": model, "step": in_steps}.items()
    }


def best_rates(mixer, rows, settings):
    """The best step size, and the next smaller one."""

    def loss(rate):
        found = (mixer, settings["steps"], rate)
        chosen = [row for row in rows if (row["mixer"], row["steps"], row["rate"]) == found]
        return np.mean([row["loss_to_choose_by"] for row in chosen])

    best = settings["rates"].index(min(settings["rates"], key=loss))
    return settings["rates"][max(best - 1, 0) : best + 1]


def all_jobs(settings, rows):
    """Mixer, steps, rate and seed of every run; the long ones are known when the short are done."""
    short = [
        (mixer, settings["steps"], rate, seed)
        for mixer in LAYERS
        for rate in settings["rates"]
        for seed in settings["seeds"]
    ]
    done = [job_of(row) for row in rows]
    if not set(short) <= set(done):
        return short + [job for job in done if job not in short]
    long = settings["longer"] * settings["steps"]
    return short + [
        (mixer, long, rate, seed)
        for mixer in LAYERS
        for rate in best_rates(mixer, rows, settings)
        for seed in settings["seeds"]
    ]


def job_of(row):
    return row["mixer"], row["steps"], row["rate"], row["seed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = SETTINGS | QUICK if options.quick else SETTINGS
    if options.quick and not options.output:
        parser.error("--quick needs an --output, so that no result is lost")
    output = options.output or Path(results.__file__).with_name("layer.json")
    torch.set_num_threads(1)
    rows = [] if options.renew else results.earlier_rows(output, settings, RENEW)
    earlier = {} if options.renew or not output.exists() else json.loads(output.read_text())
    times = earlier.get("milliseconds_batch") or time_batch(settings)
    drawers = earlier.get("drawers", [])

    while left := [job for job in all_jobs(settings, rows) if job not in map(job_of, rows)]:
        row = run(*left[0], settings)
        rows.append(row)
        jobs = all_jobs(settings, rows)
        rows.sort(key=lambda row: jobs.index(job_of(row)))
        found = f"probability {row['probability']:.3f}, loss {row['loss']:.3f}"
        print(f"{len(left)} left; {job_of(row)}: {found} ({row['seconds']:.0f} s)", flush=True)
        save(output, settings, times, rows, drawers)

    for heads, features in settings["drawers"]:
        for rate in settings["drawer_rates"]:
            for seed in settings["seeds"]:
                job = {"heads": heads, "features": features, "rate": rate, "seed": seed}
                if any(row | job == row for row in drawers):
                    continue
                drawers.append(run_drawers(**job, settings=settings))
                print(job, f"probability {drawers[-1]['probability']:.3f}", flush=True)
                save(output, settings, times, rows, drawers)
    save(output, settings, times, rows, drawers)
    print(f"wrote {output}")


def save(output, settings, times, rows, drawers):
    harness.save(
        "layer", WHAT, settings, output, milliseconds_batch=times, rows=rows, drawers=drawers
    )


if __name__ == "__main__":
    main()
