"""Which gate forgets what: six rules, trained on texts that end and on facts that change.

python benchmarks/forgetting.py                    writes lesson_code/results/forgetting.json
python benchmarks/forgetting.py --output FILE      writes another file
python benchmarks/forgetting.py --renew            begins again, whatever the file holds
python benchmarks/forgetting.py --quick            one short run of each kind: only a try

A token is a note ("key 17 has value 3"), a question ("what is 17?") or an end. An end makes all
earlier notes void: in the task "one" those on all keys, in the task "four" those on the keys of one
of four speakers, whose keys are a quarter of all. The answer is the value of the last note on the
key that is not void, or "nothing" if there is none. Half of the questions are of each kind, and
what has no note that counts had one before.

All models have one layer, which differs in its rule alone: the maps that make queries, keys of
length 1, values and rates, the norm, the gate and the feed-forward sublayer are the same, and so is
the size of the memory. A rule without a correction scales its values by the rate instead. Each rule
is trained at every learning rate with a seed of its own, and its best one, by the accuracy on
sequences drawn for that, is trained again with the seeds that count.

At the end a model of the delta rule is trained once more, to look at its key of an end. One thread
takes about an hour and a half.
"""

import math

import harness
import mixers
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, silu, softplus

import lesson_code.torch as lt
from lesson_code.torch.modules._parts import HeadNorm, initial_step_bias, split_heads

SETTINGS = {
    "version": 1,
    "keys": 64,
    "active": 12,  # keys that the notes between two ends are about
    "values": 8,
    "ends": 0.06,  # share of tokens that are ends
    "length": 64,
    "width": 32,
    "heads": 1,
    "steps": 400,
    "batch": 32,
    "rates": [1e-2, 3e-2, 6e-2],
    "seeds": [0, 1, 2, 4, 5],
    "asked": 512,  # sequences that a model is asked about
}
CHOOSING = 3  # the seed that chooses the rate, whatever seeds are added to those that count
QUICK = {"length": 24, "steps": 2, "rates": [1e-2], "seeds": [0], "asked": 16}
TASKS = {"one": 1, "four": 4}  # speakers
RULES = ["decay", "decay per channel", "delta", "gated delta", "KDA", "RWKV-7"]
KINDS = ["written once", "rewritten", "void"]
MARKED = ("one", "delta")  # the model whose key of an end is looked at
AT_ONCE = 20  # batches, which are drawn together, as that is faster


class Memory(nn.Module):
    """A layer that reads and writes a memory by one of the rules."""

    def __init__(self, width, heads, rule):
        super().__init__()
        self.heads, self.rule = heads, rule
        self.maps = nn.Linear(width, 4 * width, bias=False)  # q, k, v and the gate
        self.rate = nn.Linear(width, width if rule == "RWKV-7" else heads)
        self.norm = HeadNorm(width // heads)
        self.output = nn.Linear(width, width, bias=False)
        if rule == "RWKV-7":
            self.removal = nn.Linear(width, width, bias=False)
            self.removal.weight.data.copy_(self.maps.weight[width : 2 * width])
        if rule != "delta":
            decays = heads if rule in ("decay", "gated delta") else width
            self.decay = nn.Linear(width, decays)
            self.decay.bias.data.copy_(initial_step_bias(decays))

    def forward(self, x):
        q, k, v, gate = self.maps(x).chunk(4, dim=-1)
        q, k, v = (split_heads(y, self.heads) for y in (q, k, v))  # (B, H, N, D)
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        rate = self.rate(x).sigmoid()
        if self.rule == "RWKV-7":
            read = self._rwkv7(q, k, v, rate, x)
        else:
            read = self._read(q, k, v, rate.mT, x)
        return self.output(self.norm(read.transpose(1, 2)) * silu(gate))

    def _read(self, q, k, v, beta, x):
        if self.rule == "delta":
            return lt.delta_rule(q, k, v, beta)
        written = beta[..., None] * v
        g = -softplus(self.decay(x))
        if self.rule == "decay":
            return lt.state_space_dual(written, g.mT, k, q)
        if self.rule == "gated delta":
            return lt.gated_delta_rule(q, k, v, beta, g.mT)
        g = split_heads(g, self.heads)
        if self.rule == "KDA":
            return lt.kimi_delta_attention(q, k, v, beta, g)
        return lt.gated_linear_attention(q, k, written, g)

    def _rwkv7(self, q, k, v, rate, x):
        g, kappa, rate = (
            split_heads(y, self.heads)
            for y in (-math.exp(-0.5) * self.decay(x).sigmoid(), self.removal(x), rate)
        )
        return lt.rwkv7(q, rate * k, v, g, normalize(kappa, dim=-1), rate)


class Layer(nn.Module):
    """Embeddings, memory, feed-forward sublayer, and the answer."""

    def __init__(self, settings, rule):
        super().__init__()
        F, V = settings["width"], settings["values"]
        self.subject = nn.Embedding(settings["keys"] + max(TASKS.values()), F)  # or who ends
        self.content = nn.Embedding(V + 2, F)  # a value, a question or an end
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(F) for _ in range(3))
        self.memory = Memory(F, settings["heads"], rule)
        self.feed_forward = nn.Sequential(nn.Linear(F, 4 * F), nn.GELU(), nn.Linear(4 * F, F))
        self.head = nn.Linear(F, V + 1)

    def forward(self, tokens):
        x = self.subject(tokens[..., 0]) + self.content(tokens[..., 1])
        x = x + self.memory(self.norm_1(x))
        x = x + self.feed_forward(self.norm_2(x))
        return self.head(self.norm_3(x))


def draw(speakers, batch, settings, rng):
    """Tokens (batch, N, 2); answers and kinds (batch, N) of questions, -1 where none is asked."""
    K, V, N = settings["keys"], settings["values"], settings["length"]
    each, active = K // speakers, settings["active"] // speakers
    rows = np.arange(batch)
    owner = np.arange(K) // each

    def choose():  # the active keys of one speaker, without its first key
        return rng.random((batch, each)).argsort(axis=1)[:, :active]

    subjects = np.stack([choose() + each * s for s in range(speakers)], axis=1)
    value = np.full((batch, K), -1)  # of the last note that counts
    times = np.zeros((batch, K), int)  # notes that count
    seen = np.zeros((batch, K), bool)
    answers, kinds = (np.full((batch, N), -1) for _ in range(2))
    tokens = np.zeros((batch, N, 2), int)
    for t in range(N):
        u, speaker = rng.random(batch), rng.integers(speakers, size=batch)
        ends = u < settings["ends"]
        known, void = value >= 0, seen & (value < 0)
        pool = np.where((rng.random(batch) < 0.5)[:, None], known, void)
        asks = ~ends & (u < 0.5) & pool.any(axis=1)
        asked = (pool * rng.random((batch, K))).argmax(axis=1)
        noted = subjects[rows, speaker, rng.integers(active, size=batch)]
        old = value[rows, noted]
        new = np.where(old < 0, rng.integers(V, size=batch), (old + rng.integers(1, V, batch)) % V)
        tokens[:, t, 0] = np.where(ends, K + speaker, np.where(asks, asked, noted))
        tokens[:, t, 1] = np.where(ends, V + 1, np.where(asks, V, new))
        found = value[rows, asked]
        answers[asks, t] = np.where(found < 0, V, found)[asks]
        kinds[asks, t] = np.where(found < 0, 2, np.minimum(times[rows, asked], 2) - 1)[asks]
        notes = ~ends & ~asks
        value[rows[notes], noted[notes]] = new[notes]
        times[rows[notes], noted[notes]] += 1
        seen[rows[notes], noted[notes]] = True
        ended = ends[:, None] & (owner == speaker[:, None])
        value[ended], times[ended] = -1, 0
        fresh = np.stack([choose() + each * s for s in range(speakers)], axis=1)
        change = ends[:, None] & (np.arange(speakers) == speaker[:, None])
        subjects = np.where(change[..., None], fresh, subjects)
    return tuple(torch.from_numpy(x) for x in (tokens, answers, kinds))


def trained(task, rule, rate, seed, settings):
    model, rng = Layer(settings, rule), np.random.default_rng([seed, 1])
    batches = iter(())

    def batch_loss(i):
        nonlocal batches
        if i % AT_ONCE == 0:
            drawn = draw(TASKS[task], AT_ONCE * settings["batch"], settings, rng)
            batches = zip(*(x.split(settings["batch"]) for x in drawn), strict=True)
        tokens, answers, _ = next(batches)
        return cross_entropy(model(tokens).flatten(0, 1), answers.flatten(), ignore_index=-1)

    harness.train(model, batch_loss, settings["steps"], rate)
    return model


@torch.no_grad()
def right(model, speakers, settings, seed):
    """Share of right answers to questions of each kind, and to all."""
    rng = np.random.default_rng([seed, 2])
    tokens, answers, kinds = draw(speakers, settings["asked"], settings, rng)
    hits = (model(tokens).argmax(dim=-1) == answers).double()
    return [hits[kinds == i].mean().item() for i in range(3)], hits[kinds >= 0].mean().item()


@torch.no_grad()
def mark(model, settings):
    """How the key of an end overlaps with the queries of all questions, and how long values are.

    The models' way to clear without a decay: a value at a direction that all keys share.
    """
    K, V, memory = settings["keys"], settings["values"], model.memory
    questions = torch.stack([torch.arange(K), torch.full((K,), V)], dim=-1)
    notes = torch.cartesian_prod(torch.arange(K), torch.arange(V))
    end = torch.tensor([[K, V + 1]])

    def made(tokens):
        x = model.norm_1(model.subject(tokens[:, 0]) + model.content(tokens[:, 1]))
        return memory.maps(x).chunk(4, dim=-1)[:3]  # q, k, v

    overlaps = normalize(made(questions)[0], dim=-1) @ normalize(made(end)[1], dim=-1)[0]
    return {
        "overlap": overlaps.mean().item(),
        "spread": overlaps.std().item(),
        "length": made(end)[2].norm().item(),
        "length_of_notes": made(notes)[2].norm(dim=-1).mean().item(),
    }


def run(task, rule, rate, seed, settings):
    """Train and ask one model."""
    model = trained(task, rule, rate, seed, settings)
    by_kind, total = right(model, TASKS[task], settings, seed)
    return {"parameters": mixers.count(model), "right": by_kind, "right_of_all": total}


def trials(settings):
    rates = settings["rates"]
    return [(task, rule, r, CHOOSING) for r in rates for rule in RULES for task in TASKS]


def runs(rows, settings):
    """At the best rate of the trials, seed by seed."""

    def rate(task, rule):
        trial = {"task": task, "rule": rule, "seed": CHOOSING}
        return harness.best_rate(rows, lambda row: -row["right_of_all"], **trial)

    best = [(task, rule, rate(task, rule)) for task in TASKS for rule in RULES]
    return [(*job, seed) for seed in settings["seeds"] for job in best]


def look_at_an_end(rows, settings, output):
    job = next(job for job in runs(rows, settings) if job[:2] == MARKED)
    torch.manual_seed(job[-1])
    return {"kinds": KINDS, "mark": mark(trained(*job, settings), settings)}


EXPERIMENT = harness.Experiment(
    name="forgetting",
    what="share of right answers about texts that end, models of one layer, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("task", "rule", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: "right " + ", ".join(f"{share:.3f}" for share in row["right"]),
    more=("kinds", "mark"),
    finish=look_at_an_end,
)

if __name__ == "__main__":
    EXPERIMENT.main()
