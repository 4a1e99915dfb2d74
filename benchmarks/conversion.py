"""A softmax model converted to linear attention, in every way of the chapter, step by step.

python benchmarks/conversion.py                    writes lesson_code/results/conversion.json
python benchmarks/conversion.py --output FILE      writes another file
python benchmarks/conversion.py --seeds 0 1        makes the runs of these seeds only
python benchmarks/conversion.py --renew            begins again, whatever the file holds
python benchmarks/conversion.py --quick            a few steps for each way: only a try

The texts are those of `lesson_code.data.facts`. The model has two blocks of softmax attention
without rotation, over an embedding that mixes each token with the three before it, so that one
layer can look a fact up. Each seed trains such a model, and every way converts the same one:

    softmax, all           not converted, but trained on for as many steps
    elu + 1, Taylor        put in the place of softmax; then all parameters train, with elu + 1
    T2R                    relu(W x + b), trained with all other parameters; twice as many features
                           as a head is wide, and as many, which is as many as elu + 1 has
    weights, outputs       Hedgehog's map, trained alone to match attention weights or the outputs
                           of the layer; then all parameters, or low-rank changes of the
                           four projections
    window                 the last tokens by softmax, the others by the state, on one scale
    window, row maximum    the same, where the maximum of a row is subtracted from the scores of the
                           window only, with a learned factor below 1 for each head, as in LoLCATs
    window, free factor    the same, where this factor may be any positive number
    window alone           the others not at all
    from scratch           the converted model from random weights, with the steps of the softmax
                           model and of the conversion together

Beside a window Hedgehog's features are divided by sqrt(2 D). Their product is a sum of 2 D
exponentials, and so a token of no score weighs about as much in the state as e^0 in the window.

All conversions have as many steps in all. While maps are matched, each layer reads what the softmax
model has at this place. Each stage takes the best of three step sizes for a seed that is used for
nothing else: that with the smallest mismatch of new texts, or the smallest loss. The rows of this
seed say what was tried. "rates" of the others are those of the softmax model and of each stage.

"recall" is the share of right answers where a name comes again, by how many tokens ago it came for
the last time: 1 to 16, 17 to 32 and so on. "divergence" (from the softmax weights, per row) and
"error" (squared, in parts of the softmax outputs') are means over the layers. "right_in_long" is
the share of right answers at the end of texts four times as long as those of the training.

Every run is saved when it ends, and a run that the file has is not repeated. The softmax model of
the first seed is saved beside the file. One thread takes about half an hour.
"""

import copy
import math
import time

import harness
import mixers
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

import lesson_code.torch as lt
from lesson_code.data import facts

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 2,
    "width": 64,
    "heads": 4,
    "layers": 2,
    "length": 96,
    "batch": 16,
    "steps": 400,  # of the softmax model
    "stage": 100,  # steps of each of two stages
    "rank": 4,
    "window": 8,
    "factor": 0.1,  # of the window, at first, after a row maximum
    "rates": {
        "softmax": [3e-3, 1e-2, 3e-2],
        "scratch": [3e-3, 1e-2, 3e-2],
        "all": [1e-3, 3e-3, 1e-2],
        "low rank": [3e-3, 1e-2, 3e-2],
        "weights": [1e-2, 3e-2, 1e-1],
        "outputs": [1e-2, 3e-2, 1e-1],
    },
    "choosing": 100,  # the seed that chooses the rates
    "seeds": [0, 1, 2, 3, 4],
    "asked": 256,  # texts
    "long": [384, 64],  # tokens of longer texts, and how many of them
    "bin": 16,  # tokens of age
}
QUICK = {"width": 16, "heads": 2, "length": 24, "batch": 2, "steps": 2, "stage": 1, "seeds": [0]}
QUICK |= {"rates": {stage: [rates[0]] for stage, rates in SETTINGS["rates"].items()}, "asked": 4}
QUICK |= {"long": [48, 2]}

# The map, what stands beside the state, and the stages after the swap.
WAYS = {
    "softmax": ("softmax", "", ["softmax"]),
    "softmax, all": ("softmax", "", ["all", "all"]),
    "elu + 1": ("elu + 1", "", ["all", "all"]),
    "Taylor": ("Taylor", "", []),
    "T2R": ("relu", "", ["all", "all"]),
    "T2R, 16 features": ("narrow relu", "", ["all", "all"]),
    "weights, all": ("hedgehog", "", ["weights", "all"]),
    "weights, low rank": ("hedgehog", "", ["weights", "low rank"]),
    "outputs, all": ("hedgehog", "", ["outputs", "all"]),
    "outputs, low rank": ("hedgehog", "", ["outputs", "low rank"]),
    "window": ("hedgehog", "window", ["outputs", "low rank"]),
    "window, row maximum": ("hedgehog", "row maximum", ["outputs", "low rank"]),
    "window, free factor": ("hedgehog", "free factor", ["outputs", "low rank"]),
    "window alone": ("none", "window", ["low rank", "low rank"]),
    "from scratch": ("hedgehog", "", ["scratch"]),
}


# --- The model -----------------------------------------------------------------------------------


def softmax_model(settings):
    def softmax(width):
        return lt.SoftmaxAttention(width, settings["heads"], rotary=False)

    words = len(facts.vocabulary())
    model = lt.LanguageModel(words, settings["width"], [softmax] * settings["layers"])
    model.embedding = mixers.LastWords(words, settings["width"])
    return model


def heads(x, H):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Attention(nn.Module):
    """A layer of the softmax model with another similarity: query, key, value and output stay."""

    def __init__(self, softmax, kind, beside, settings):
        super().__init__()
        self.query, self.key, self.value, self.output = (
            copy.deepcopy(x) for x in (softmax.query, softmax.key, softmax.value, softmax.output)
        )
        self.num_heads = H = softmax.num_heads
        self.kind, self.beside, self.window = kind, beside, settings["window"]
        D = settings["width"] // H
        if kind == "Taylor":
            self.taylor = lt.taylor(D)
        if "relu" in kind:
            C = D if kind == "narrow relu" else 2 * D
            self.W = nn.Parameter(torch.randn(H, C, D) / D**0.5)
            self.b = nn.Parameter(torch.zeros(H, C))
        if kind == "hedgehog":
            self.W = nn.Parameter(0.5 * torch.eye(D).repeat(H, 1, 1))
            self.b = nn.Parameter(torch.zeros(H, D))
        g = settings["factor"]
        if beside == "row maximum":
            self.factor = nn.Parameter(torch.full((H, 1, 1), math.log(g / (1 - g))))
        if beside == "free factor":
            self.factor = nn.Parameter(torch.full((H, 1, 1), math.log(g)))

    def phi(self, x):
        if self.kind == "hedgehog":
            y = lt.hedgehog(x.shape[-1], weight=self.W, bias=self.b)(x)
            return y / y.shape[-1] ** 0.5 if self.beside else y  # without a window it cancels
        if "relu" in self.kind:
            return relu(x @ self.W.mT + self.b[:, None])
        return lt.elu_plus_one(x) if self.kind == "elu + 1" else self.taylor(x)

    def weights(self, x):
        """(B, H, N, N), each row with the sum 1."""
        q, k = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key)
        )
        D, N = q.shape[-1], x.shape[1]
        scores = q @ k.mT / D**0.5
        if self.kind == "softmax":
            return scores.masked_fill(~torch.ones(N, N).tril().bool(), -math.inf).softmax(-1)
        near = torch.ones(N, N).tril().bool()
        A = scores.new_zeros(scores.shape)
        if self.kind != "none":
            A = (self.phi(q) @ self.phi(k).mT).tril()
        if self.beside:
            near = near.triu(1 - self.window)
            near_scores = scores.masked_fill(~near, -math.inf)
            m = near_scores.amax(-1, keepdim=True)
            if self.beside == "window":  # both parts are divided by e^m
                A = torch.where(near, (near_scores - m).exp(), A * (-m).exp())
            else:
                g = self.factor.sigmoid() if self.beside == "row maximum" else self.factor.exp()
                A = torch.where(near, g * (near_scores - m).exp(), A)
        return A / A.sum(-1, keepdim=True).clamp(min=1e-6)

    def read(self, weights, x):
        v = heads(self.value(x), self.num_heads)
        return self.output((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x, *, state=None, return_state=False):
        y = self.read(self.weights(x), x)
        return (y, None) if return_state else y


class LowRank(nn.Module):
    """A linear map that is not trained, plus one of low rank that is."""

    def __init__(self, linear, rank):
        super().__init__()
        F, G = linear.in_features, linear.out_features
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, F) / F**0.5)
        self.up = nn.Parameter(torch.zeros(G, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def converted(model, kind, beside, settings):
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.mixer = Attention(block.mixer, kind, beside, settings)
    return model


# --- Training and asking -------------------------------------------------------------------------


def draw(batch, length, rng):
    text = facts.draw(batch=batch, length=length, seed=rng)
    return [torch.from_numpy(array) for array in text]


def mismatch(model, teacher, tokens, what):
    """How far the layers are from the teacher's, each reading what the teacher has there."""
    x, losses = teacher.embedding(tokens), []
    for block, other in zip(model.blocks, teacher.blocks, strict=True):
        normed = other.norm_1(x).detach()
        expected, weights = other.mixer.weights(normed).detach(), block.mixer.weights(normed)
        if what == "weights":
            terms = torch.special.xlogy(expected, expected / weights.clamp(min=1e-9))
            losses.append(terms.sum(dim=-1).mean())
        else:
            y = other.mixer.read(expected, normed).detach()
            error = (block.mixer.read(weights, normed) - y).square().mean()
            losses.append(error / y.square().mean())
        x = other(x).detach()
    return sum(losses) / len(losses)


def choose_parameters(model, stage, settings):
    """Let the parameters of a stage train alone; low-rank maps are put in where there are none."""
    mixers = [block.mixer for block in model.blocks]
    if stage == "low rank":
        for mixer in mixers:
            for name in ("query", "key", "value", "output"):
                linear = getattr(mixer, name)
                if not isinstance(linear, LowRank):
                    setattr(mixer, name, LowRank(linear, settings["rank"]))
    ends = {
        "low rank": (".down", ".up"),
        "weights": ("mixer.W", "mixer.b", "mixer.factor"),
        "outputs": ("mixer.W", "mixer.b", "mixer.factor"),
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(ends.get(stage, "")))


def train(model, teacher, stage, rate, seed, settings):
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, len(stage)])
    choose_parameters(model, stage, settings)

    def batch_loss(_):
        tokens, _, _ = draw(settings["batch"], settings["length"], rng)
        if stage in ("weights", "outputs"):
            return mismatch(model, teacher, tokens[:, :-1], stage)
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    harness.train(model, batch_loss, steps_of(stage, settings), rate)


@torch.no_grad()
def ask(model, teacher, seed, settings):
    """What one model has learned, on new texts."""
    rng = np.random.default_rng([seed, 99])
    tokens, surprise, age = draw(settings["asked"], settings["length"], rng)
    logits, expected = model(tokens[:, :-1]), tokens[:, 1:]
    right = (logits.argmax(dim=-1) == expected).double()
    bins = range(0, settings["length"], settings["bin"])
    losses = cross_entropy(logits.mT, expected, reduction="none")
    first = tokens[:16, :-1]
    length, batch = settings["long"]
    long, _, old = draw(batch, length, rng)
    right_in_long = model(long[:, :-1]).argmax(dim=-1) == long[:, 1:]
    late = (old > 0) & (torch.arange(length) >= length - settings["length"])
    return {
        "loss": losses.mean().item(),
        "floor": surprise.mean().item(),
        "loss_of_facts": losses[age > 0].mean().item(),
        "right": right[age > 0].mean().item(),
        "recall": [
            right[(age > low) & (age <= low + settings["bin"])].mean().nan_to_num().item()
            for low in bins
        ],
        "right_in_long": right_in_long[late].double().mean().item(),
        "divergence": mismatch(model, teacher, first, "weights").item(),
        "error": mismatch(model, teacher, first, "outputs").item(),
    }


def steps_of(stage, settings):
    if stage == "softmax":
        return settings["steps"]
    if stage == "scratch":
        return settings["steps"] + 2 * settings["stage"]
    return settings["stage"]


def criterion(stage, found):
    return found[{"weights": "divergence", "outputs": "error"}.get(stage, "loss")]


def advance(model, teacher, stage, rates, seed, settings):
    """The best of the models that these step sizes give, what it has learned, and all tries."""
    best, tried = None, []
    for rate in rates:
        start, new = time.process_time(), copy.deepcopy(model)
        train(new, teacher, stage, rate, seed, settings)
        found = {"stage": stage, "rate": rate, **ask(new, teacher or new, seed, settings)}
        found["seconds"] = time.process_time() - start
        value = criterion(stage, found)
        tried.append([rate, value])
        if best is None or value < criterion(stage, best[1]):
            best = new, found
    return *best, tried


def fresh(seed, settings):
    torch.manual_seed(seed)
    return converted(softmax_model(settings), "softmax", "", settings)


TEACHERS = {}  # the softmax models, from which every way of a seed begins


def teacher_of(seed, rates, settings):
    """The softmax model of a seed, what it has learned and all tries; it is trained once."""
    key = seed, harness.Estimate.in_use is None  # an estimate does not train it to the end
    if key not in TEACHERS:
        TEACHERS[key] = advance(fresh(seed, settings), None, "softmax", rates, seed, settings)
    return TEACHERS[key]


def run(way, rates, seed, settings):
    """Go through the stages of a way, at these step sizes; where there are none, try all."""
    kind, beside, stages = WAYS[way]
    every = [settings["rates"][stage] for stage in ("softmax", *stages)]
    first, *others = [[rate] for rate in rates] or every
    teacher, learned, tries = teacher_of(seed, first, settings)
    if way == "softmax":
        return {"stages": [learned], "tried": [tries], "weights": teacher.state_dict()}
    source = fresh(seed, settings) if way == "from scratch" else teacher
    torch.manual_seed(seed)
    model = converted(source, kind, beside, settings)
    found = [{"stage": "swap", "rate": None, **ask(model, teacher, seed, settings)}]
    tried = []
    for stage, some in zip(stages, others, strict=True):
        model, learned, tries = advance(model, teacher, stage, some, seed, settings)
        found.append(learned)
        tried.append(tries)
    return {"stages": found, "tried": tried}


def runs(rows, settings):
    """Every way with the step sizes that its trial has chosen, and first that of softmax."""
    trials = {row["way"]: row["stages"] for row in rows if row["seed"] == settings["choosing"]}

    def chosen(way):
        found = [stage["rate"] for stage in trials.get(way, []) if stage["rate"]]
        return found or [1e-3] * len(WAYS[way][2])  # any, until it is known

    rates = {way: tuple(chosen("softmax") + chosen(way)) for way in WAYS}
    rates["softmax"] = tuple(chosen("softmax"))
    return [(way, rates[way], seed) for seed in settings["seeds"] for way in WAYS]


def told(row):
    return "  ".join(
        f"{stage['stage']} {stage['loss']:.3f} {stage['right']:.2f}" for stage in row["stages"]
    )


EXPERIMENT = harness.Experiment(
    name="conversion",
    what="a softmax model of two blocks, converted to linear attention, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("way", "rates", "seed"),
    trials=lambda settings: [(way, (), settings["choosing"]) for way in WAYS],
    runs=runs,
    run=run,
    shown=told,
    kept=("softmax",),
)

if __name__ == "__main__":
    EXPERIMENT.main()
