"""One layer with three ways of mixing, trained on tales in which everybody has one habit.

python benchmarks/layer.py                     writes lesson_code/results/layer.json
python benchmarks/layer.py --output FILE       writes another file
python benchmarks/layer.py --seeds 0 1         makes the long runs of these seeds only
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

"linear, 2 of 16" and the like are linear attention with so many heads of so many features each;
the values keep their width. They are trained for 600 steps, with two step sizes. Shared places are
listed for each head.

Besides, one batch goes forward and backward through the linear model, by one call and by one step
for each word; the file has the fastest of the times, in milliseconds of the processor.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes about
an hour.
"""

import math
import time

import harness
import mixers
import numpy as np
import torch
from torch import nn

import lesson_code.torch as lt

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 3,
    "words": 16,  # names, and as many verbs
    "sentences": 32,
    "width": 32,
    "batch": 32,
    "steps": 600,
    "longer": 3,
    "rates": [3e-3, 1e-2, 3e-2, 1e-1],
    "seeds": [0, 1, 2, 3, 4],
    "asked": 512,  # tales
    "people": [[1, 2], [3, 4], [5, 8], [9, 12], [13, 16]],
    "drawers": [[1, 8], [1, 16], [1, 64], [2, 16], [4, 8]],  # heads, features of each
    "drawer_rates": [1e-2, 3e-2],
}
QUICK = {"width": 8, "steps": 3, "longer": 2, "rates": [1e-2], "seeds": [0], "asked": 32}
QUICK |= {"drawers": [[2, 2]], "drawer_rates": [1e-2]}


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
    """Linear attention whose heads have as many features each as asked for."""

    def __init__(self, width, num_heads, features):
        super().__init__(width, num_heads)
        self.heads = num_heads
        self.query = nn.Linear(width, num_heads * features, bias=False)
        self.key = nn.Linear(width, num_heads * features, bias=False)

    def mix(self, x, state):
        maps = self.query, self.key, self.value
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in maps)
        o = lt.linear_attention(q, k, v, causal=True).transpose(1, 2).flatten(-2)
        u = self.norm_1(o + x)
        return self.norm_2(u + self.feed_forward(u)), None


LAYERS = {"softmax": SoftmaxLayer, "linear": lt.LinearTransformerLayer, "keyless": KeylessLayer}


def drawers(settings):
    """Heads, and features of each, of the models that have other numbers of them."""
    return {f"linear, {heads} of {each}": (heads, each) for heads, each in settings["drawers"]}


def make_model(mixer, settings):
    heads, each = drawers(settings).get(mixer, (1, None))

    def layer(width, num_heads):
        return DrawersLayer(width, heads, each) if each else LAYERS[mixer](width, num_heads)

    words, width = settings["words"], settings["width"]
    return lt.LanguageModel(2 * words + 1, width, [WithPrevious, layer], num_heads=1)


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


def shared_places(model, settings, heads):
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
    """Train and ask one model."""
    model, rng = make_model(mixer, settings), np.random.default_rng(seed)

    def batch_loss(_):
        text = tales(rng, settings["batch"], settings)
        logits = model(text[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    adam = {"schedule": harness.linear, "betas": (0.9, 0.999), "clip": math.inf}
    harness.train(model, batch_loss, steps, rate, **adam)
    other = tales(np.random.default_rng([seed, 1]), settings["asked"], settings)
    new = tales(np.random.default_rng([seed, 2]), settings["asked"], settings, new=True)
    log_p, who, people, is_new = ask(model, new, settings)
    p, shared = log_p.exp(), None
    if mixer.startswith("linear"):
        shared = shared_places(model, settings, drawers(settings).get(mixer, (1, None))[0])
    found = {
        "parameters": mixers.count(model),
        "loss_to_choose_by": -ask(model, other, settings)[0].mean().item(),
        "loss": -log_p.mean().item(),
        "probability": p.mean().item(),
        "shared": shared,
    }
    if mixer not in LAYERS:
        return found
    in_pair = torch.isin(who, torch.tensor(shared[0] if shared else [], dtype=who.dtype))
    missed = ((1 - p)[in_pair].sum() / (1 - p).sum()).item()
    return found | {
        "probability_new_pairs": p[is_new].mean().item(),
        "probability_by_people": [
            p[(people >= low) & (people <= high)].mean().item() for low, high in settings["people"]
        ],
        "missed_at_shared": missed if shared and shared[0] else None,
    }


def time_batch(rows, settings, output, repeats=20):
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

    times = {
        name: min(milliseconds(forward) for _ in range(repeats))
        for name, forward in {"forward": model, "step": in_steps}.items()
    }
    return {"milliseconds_batch": times}


def trials(settings):
    """Every step size with every seed; they choose the step size of the long runs."""
    rates = dict.fromkeys(LAYERS, settings["rates"])
    rates |= dict.fromkeys(drawers(settings), settings["drawer_rates"])
    return [
        (mixer, settings["steps"], rate, seed)
        for mixer in rates
        for rate in rates[mixer]
        for seed in settings["seeds"]
    ]


def runs(rows, settings):
    """Longer runs, with the best step size and the next smaller one."""

    def rates(mixer):
        trial = {"mixer": mixer, "steps": settings["steps"]}
        best = harness.best_rate(rows, lambda row: row["loss_to_choose_by"], **trial)
        return [rate for rate in settings["rates"] if rate <= (best or math.inf)][-2:]

    steps = settings["longer"] * settings["steps"]
    return [
        (mixer, steps, rate, seed)
        for mixer in LAYERS
        for rate in rates(mixer)
        for seed in settings["seeds"]
    ]


EXPERIMENT = harness.Experiment(
    name="layer",
    what="tales in which a name tells the verb, models of one layer, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "steps", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: f"probability {row['probability']:.3f}, loss {row['loss']:.3f}",
    more=("milliseconds_batch",),
    finish=time_batch,
)

if __name__ == "__main__":
    EXPERIMENT.main()
