"""What a state can follow: models of one layer, trained on 32 moves and asked after up to 512.

python benchmarks/tracking.py                  writes lesson_code/results/tracking.json
python benchmarks/tracking.py --output FILE    writes another file
python benchmarks/tracking.py --renew          begins again, whatever the file holds
python benchmarks/tracking.py --quick          every kind of model for a few steps: only a try

There are m cups. The first m tokens put a thing under each, always the same one; every further
token is a move, one of a list that all models know by its number alone. After each move the model
says which thing is under the first cup. The tasks differ in their moves:

    parity      two cups, swapped or left alone
    modulo 3    three cups in a ring, turned by 0, 1 or 2 places
    swaps       five cups, two of which change places (10 moves)
    orders      five cups, brought into any order (120 moves), from short sequences to long ones
    at once     the same, but all sequences are long

A model is an embedding, one layer with its residual and a feed-forward sublayer, and a map to the
answers (`LanguageModel`). The layers called "delta" and "rotation" are bare: queries, keys, values
and rates are linear in the token, there is no convolution, no gate and no decay, so that only their
transitions differ. "delta with a decay" adds a decay to one of them, made and begun as that of
`GatedDeltaNet`. Mamba-2 and softmax are the package's modules, with all that belongs to them.
The LSTM is torch's; it is cheap, and gets four times as many steps. Mamba-3, RWKV-7, Kimi delta
attention and DeltaProduct (with a beta below 2), and log-linear attention are whole modules, too.

For "orders" all models begin with sequences of 2 moves, and each fifth of the training doubles
their length; a batch has as many moves as ever. Both of the last tasks get twice as many steps.

The step size is the best of three for a seed of its own, by the loss on new sequences of the
training's length; the five seeds of the result are others.
"""

import itertools
import math
from functools import partial

import harness
import mixers
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus

import lesson_code.torch as lt
from lesson_code.torch.modules._parts import initial_step_bias

SETTINGS = {
    "version": 2,
    "width": 32,
    "batch": 16,
    "moves": 32,  # of a sequence in training
    "steps": 600,
    "lstm": {"batch": 16, "steps": 2400},
    "orders": {"moves": [2, 4, 8, 16, 32], "times": 2},  # one after another; times the steps
    "rates": [3e-3, 1e-2, 3e-2],
    "trial_seed": 100,
    "seeds": [0, 1, 2, 3, 4],
    "asked": 128,  # sequences
    "asked_moves": 512,
    "bin": 16,  # moves, over which the accuracy is a mean
}
QUICK = {"width": 8, "steps": 2, "lstm": {"batch": 2, "steps": 2}, "rates": [1e-2]}
QUICK |= {"orders": {"moves": [2, 32], "times": 1}, "seeds": [0], "asked": 4, "asked_moves": 64}


# --- The tasks -----------------------------------------------------------------------------------

ORDERS = ("orders", "at once")


def moves_of(task):
    """The moves (n, m) of a task: after move p the cup c has what was under cup p[c]."""
    if task == "parity":
        return np.array([[0, 1], [1, 0]])
    if task == "modulo 3":
        return np.array([np.roll(range(3), -s) for s in range(3)])
    every = np.array(list(itertools.permutations(range(5))))
    if task in ORDERS:
        return every
    return every[(every != np.arange(5)).sum(axis=1) == 2]


def draw(task, rng, B, N):
    """Tokens (B, m + N), and what is under the first cup after each of the N moves (B, N)."""
    moves = moves_of(task)
    n, m = moves.shape
    chosen = rng.integers(n, size=(B, N))
    things, first = np.tile(np.arange(m), (B, 1)), np.empty((B, N), np.int64)
    for t in range(N):
        things = np.take_along_axis(things, moves[chosen[:, t]], axis=1)
        first[:, t] = things[:, 0]
    tokens = np.concatenate([np.tile(n + np.arange(m), (B, 1)), chosen], axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(first)


# --- The layers ----------------------------------------------------------------------------------


class Delta(lt.Mixer):
    """J corrections of a token, each with a beta in (0, top), and nothing else."""

    def __init__(self, width, J=1, top=2):
        super().__init__(width)
        self.J, self.top = J, top
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, J * width, bias=False) for _ in range(2))
        self.beta = nn.Linear(width, J)

    def mix(self, x, state):
        k, v = (f(x).unflatten(-1, (self.J, -1)) for f in (self.key, self.value))
        q, k = (normalize(y, dim=-1) for y in (self.query(x), k))
        beta = self.top * self.beta(x).sigmoid()
        return self.output(lt.gated_delta_product(q, k, v, beta, self.log_decay(x))), None

    def log_decay(self, x):
        return x.new_zeros(x.shape[:2])


class FadingDelta(Delta):
    """The same with the decay of `GatedDeltaNet`, one number for each token."""

    def __init__(self, width):
        super().__init__(width)
        self.decay = nn.Linear(width, 1)
        self.decay.bias.data.copy_(initial_step_bias(1))
        self.log_rate = nn.Parameter(torch.empty(1).uniform_(1e-3, 16).log())

    def log_decay(self, x):
        return -(self.log_rate.exp() * softplus(self.decay(x)))[..., 0]


class Rotation(lt.Mixer):
    """Each pair of channels of the memory turns by an angle that the token chooses."""

    def __init__(self, width):
        super().__init__(width)
        maps = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.query, self.key, self.value, self.output = maps
        self.angle = nn.Linear(width, width // 2)

    def mix(self, x, state):
        theta = (math.pi * self.angle(x).tanh()).cumsum(dim=1)
        q, k = (turn(normalize(f(x), dim=-1), theta) for f in (self.query, self.key))
        o = lt.linear_attention(
            q, k, self.value(x), feature_map=lt.identity, causal=True, normalize=False
        )
        return self.output(o), None


def turn(x, theta):
    a, b = x.chunk(2, dim=-1)
    cos, sin = theta.cos(), theta.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class LSTM(lt.Mixer):
    def __init__(self, width):
        super().__init__(width)
        self.cell = nn.LSTM(width, width, batch_first=True)

    def mix(self, x, state):
        return self.cell(x)


# All with one head but Mamba-2, which has had two since it was first trained.
LAYERS = {
    "softmax": partial(lt.SoftmaxAttention, num_heads=1),
    "Mamba-2": partial(lt.StateSpaceDual, num_heads=2),
    "Mamba-3": partial(mixers.MIXERS["Mamba-3"], num_heads=1),
    "log-linear": partial(lt.LogLinearAttention, num_heads=1),
    "delta, beta below 1": partial(Delta, top=1),
    "delta": Delta,
    "delta with a decay": FadingDelta,
    "delta, J = 2": partial(Delta, J=2),
    "delta, J = 4": partial(Delta, J=4),
    "KDA": partial(lt.KimiDeltaAttention, num_heads=1, allow_negative_eigenvalues=True),
    "RWKV-7": partial(mixers.MIXERS["RWKV-7"], num_heads=1),
    "DeltaProduct": partial(lt.GatedDeltaProduct, num_heads=1),
    "rotation": Rotation,
    "LSTM": LSTM,
}
BARE = ["delta, beta below 1", "delta", "delta with a decay"]
NEW = ["Mamba-3", "log-linear", "KDA", "RWKV-7", "DeltaProduct"]
TASKS = {
    "parity": ["softmax", "Mamba-2", *BARE, "LSTM", *NEW],
    "swaps": ["softmax", "Mamba-2", *BARE, "LSTM", *NEW],
    "modulo 3": ["delta", "delta, J = 2", "rotation", *NEW],
    "orders": ["softmax", "Mamba-2", "delta", "delta, J = 2", "delta, J = 4", "LSTM"],
    "at once": ["delta, J = 4"],
}


# --- A run ---------------------------------------------------------------------------------------


@torch.no_grad()
def ask(model, task, seed, settings):
    """The loss over the training's length, and the accuracy in each bin of moves."""
    N, short = settings["asked_moves"], settings["moves"]
    tokens, first = draw(task, np.random.default_rng([seed, 1]), settings["asked"], N)
    logits = model(tokens)[:, -N:]
    loss = cross_entropy(logits[:, :short].flatten(0, 1), first[:, :short].flatten()).item()
    right = (logits.argmax(dim=-1) == first).double().mean(dim=0)
    return loss, right.unflatten(0, (-1, settings["bin"])).mean(dim=1).tolist()


def run(task, layer, rate, seed, settings):
    """Train and ask one model."""
    n, m = moves_of(task).shape
    model = lt.LanguageModel(n + m, settings["width"], [LAYERS[layer]])
    own = settings["lstm"] if layer == "LSTM" else settings
    batch, steps, rng = own["batch"], own["steps"], np.random.default_rng(seed)
    if task in ORDERS:
        steps *= settings["orders"]["times"]
    longest = settings["moves"]
    lengths = settings["orders"]["moves"] if task == "orders" else [longest]

    def batch_loss(i):
        N = lengths[len(lengths) * i // steps]
        tokens, first = draw(task, rng, batch * longest // N, N)
        logits = model(tokens)[:, -N:]
        return cross_entropy(logits.flatten(0, 1), first.flatten())

    adam = {"schedule": harness.linear, "weight_decay": 0.01}
    losses = harness.train(model, batch_loss, steps, rate, **adam)
    loss, accuracy = ask(model, task, seed, settings)
    return {
        "batch": batch,
        "steps": steps,
        "parameters": mixers.count(model),
        "loss_in_training": float(np.mean(losses[-50:])),
        "loss_to_choose_by": loss,
        "accuracy": accuracy,
    }


def pairs():
    return [(task, layer) for task, layers in TASKS.items() for layer in layers]


def trials(settings):
    return [(*pair, rate, settings["trial_seed"]) for pair in pairs() for rate in settings["rates"]]


def runs(rows, settings):
    def rate(task, layer):
        trial = {"task": task, "layer": layer, "seed": settings["trial_seed"]}
        return harness.best_rate(rows, lambda row: row["loss_to_choose_by"], **trial)

    best = [(*pair, rate(*pair)) for pair in pairs()]
    return [(*job, seed) for seed in settings["seeds"] for job in best]


EXPERIMENT = harness.Experiment(
    name="tracking",
    what="cups that change places, followed by models of one layer, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("task", "layer", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: f"right {row['accuracy'][0]:.3f} ... {row['accuracy'][-1]:.3f}",
)

if __name__ == "__main__":
    EXPERIMENT.main()
