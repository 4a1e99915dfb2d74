"""Which gate suits a text in which some things end and one thing lasts: mixers, trained.

python benchmarks/letters.py                    writes lesson_code/results/letters.json
python benchmarks/letters.py --output FILE      writes another file
python benchmarks/letters.py --seeds 0 1        makes the runs of these seeds only
python benchmarks/letters.py --renew            begins again, whatever the file holds
python benchmarks/letters.py --quick            a few steps for each model: only a try

The task is that of the chapter on gates. A text is a pile of letters by one writer. Token 0 opens a
letter, tokens 1 to 4 are signs of writers, of which a text has one, and every letter is made of two
words out of eight. So a new letter makes the words of the last one void, and the sign lasts.

"own" models are the chapter's layer with one head, whose rules differ in their gates alone: none, a
learned constant for the head or for each channel, or gates that are told the token, each for a
group of neighboring channels. The others are layers of the package with two heads, or the nearest
to them with memories of 16 by 16 numbers a head, as in `overwriting.py`; "fitted decay" is
retention that learns its two decays. Each model is one block. Its step size is the one of three
with the smallest loss for a seed that is not used again. Losses are in nats, on texts that no model
was trained on: "loss" of all tokens, "words" of a word among words, "sign" of a sign among signs
where the writer has been seen in an earlier letter and not yet in this one. "gate" and "logit" of
GLA are the medians at token 0.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes about
a quarter of an hour.
"""

import harness
import torch
from mixers import count, fitted_decay, small_shift, square_states, wide_keys
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, rms_norm

import lesson_code.torch as lt
from lesson_code.torch.modules.gated import GATE_ROOT

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "words": 8,
    "signs": 4,
    "opens": 0.1,  # share of tokens that open a letter
    "signed": 0.15,  # and of the others, of signs
    "length": 48,
    "batch": 32,
    "width": 32,
    "steps": 400,
    "rates": [3e-3, 1e-2, 3e-2],
    "choosing": 100,  # the seed that chooses the rate
    "seeds": [0, 1, 2, 3, 4],
    "asked": 512,  # texts
}
QUICK = {"length": 12, "batch": 4, "steps": 2, "rates": [1e-2], "seeds": [0], "asked": 64}


class Gated(nn.Module):
    """Linear attention with one head: without a gate, or with some, each for as many channels.

    A gate that is not ``told`` the token is a learned constant. The chapter on gates shows the same
    layer.
    """

    def __init__(self, width, gates, told=True):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.full((gates,), 3.0))  # sigmoid(3) = 0.95
        self.gate = nn.Linear(width, gates, bias=False) if gates and told else None

    def forward(self, x):
        q, k, v = (f(x) for f in self.maps[:3])
        logits = self.bias + self.gate(x) if self.gate else self.bias
        g = logsigmoid(logits)
        if len(self.bias):  # a gate serves a group of neighboring channels
            g = g.repeat_interleave(k.shape[-1] // len(self.bias), dim=-1).expand_as(k)
        else:
            g = torch.zeros_like(k)
        o = lt.gated_linear_attention(q, k, v, g)
        return self.maps[3](rms_norm(o, o.shape[-1:]))


class Block(nn.Module):
    """A mixer and a feed-forward sublayer, between an embedding and the answer."""

    def __init__(self, vocabulary, width, mixer):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.mixer, self.norms = mixer, nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.mixer(self.norms[0](x))
        x = x + self.feed_forward(self.norms[1](x))
        return self.head(self.norms[2](x))


MIXERS = {
    "own, no gate": lambda width: Gated(width, 0),
    "own, constant": lambda width: Gated(width, 1, told=False),
    "own, constant per channel": lambda width: Gated(width, width, told=False),
    "own, one gate": lambda width: Gated(width, 1),
    "own, gate per channel": lambda width: Gated(width, width),
    "own, 2 gates": lambda width: Gated(width, 2),
    "own, 4 gates": lambda width: Gated(width, 4),
    "own, 8 gates": lambda width: Gated(width, 8),
    "plain": lambda width: lt.LinearAttention(width, 2),
    "RetNet": lambda width: lt.Retention(width, 2),
    "fitted decay": lambda width: fitted_decay(width, 2),
    "GLA": lambda width: wide_keys(width, 2),
    "RWKV-6": lambda width: small_shift(width, 2),
    "Mamba-2": lambda width: square_states(lt.StateSpaceDual)(width, 2),
    "softmax": lambda width: lt.SoftmaxAttention(width, 2),
}


def draw(batch, generator, settings):
    """Texts (batch, N)."""
    V, W, N = settings["words"], settings["signs"], settings["length"]
    pairs = 1 + W + torch.rand(batch, N, V, generator=generator).topk(2).indices
    opens = torch.rand(batch, N, generator=generator) < settings["opens"]
    opens[:, 0] = True
    letter = (opens.cumsum(dim=1) - 1)[..., None].expand(-1, -1, 2)
    pick = torch.randint(2, (batch, N, 1), generator=generator)
    words = pairs.gather(1, letter).gather(2, pick)[..., 0]
    writer = 1 + torch.randint(W, (batch, 1), generator=generator)
    signed = torch.rand(batch, N, generator=generator) < settings["signed"]
    return torch.where(signed, writer, words).masked_fill(opens, 0)


def up_and_down(i, steps):
    """The share of the step size at step i: up for a tenth of the steps, down for the last half."""
    return min(1, 10 * (i + 1) / steps, 2 * (1 - i / steps))


def train(model, rate, seed, settings):
    generator = torch.Generator().manual_seed(seed)

    def batch_loss(_):
        texts = draw(settings["batch"], generator, settings)
        return cross_entropy(model(texts[:, :-1]).mT, texts[:, 1:])

    harness.train(
        model, batch_loss, settings["steps"], rate, schedule=up_and_down, betas=(0.9, 0.999)
    )


@torch.no_grad()
def ask(model, seed, settings):
    """Losses on new texts: of everything, of words among words, of signs that have to be kept."""
    texts = draw(settings["asked"], torch.Generator().manual_seed(1000 + seed), settings)
    before, after, W = texts[:, :-1], texts[:, 1:], settings["signs"]
    logits = model(before)
    is_sign = (before > 0) & (before <= W)
    letter = (before == 0).cumsum(dim=1)
    earlier = is_sign.cumsum(dim=1) > 0
    here = torch.stack([is_sign & (letter == n) for n in range(1, letter.max() + 1)]).cumsum(dim=2)
    in_this = here.gather(0, letter[None] - 1)[0] > 0
    kept = (after > 0) & (after <= W) & earlier & ~in_this

    def loss(first, last, at):
        among = logits[at][:, first:last]
        return cross_entropy(among, after[at] - first).item()

    return {
        "loss": cross_entropy(logits.mT, after).item(),
        "words": loss(1 + W, None, after > W),
        "sign": loss(1, 1 + W, kept),
    }


@torch.no_grad()
def closed(model):
    """How far GLA closes its gates where a letter opens: medians over the channels."""
    opens = torch.zeros(1, 1, dtype=torch.long)
    logits = model.mixer.forget(model.norms[0](model.embedding(opens)))
    gates = (logsigmoid(logits) / GATE_ROOT).exp()
    return {"gate": gates.median().item(), "logit": logits.median().item()}


def run(name, rate, seed, settings):
    vocabulary = 1 + settings["signs"] + settings["words"]
    model = Block(vocabulary, settings["width"], MIXERS[name](settings["width"]))
    train(model, rate, seed, settings)
    found = {"parameters": count(model)} | ask(model, seed, settings)
    return found | (closed(model) if name == "GLA" else {})


def trials(settings):
    return [(name, rate, settings["choosing"]) for name in MIXERS for rate in settings["rates"]]


def runs(rows, settings):
    """The best step size is the one with the smallest loss of everything."""
    rates = {
        name: harness.best_rate(
            rows, lambda row: row["loss"], mixer=name, seed=settings["choosing"]
        )
        for name in MIXERS
    }
    return [(name, rates[name], seed) for seed in settings["seeds"] for name in MIXERS]


EXPERIMENT = harness.Experiment(
    name="letters",
    what="losses in nats on piles of letters by one writer, models of one block, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "rate", "seed"),
    trials=trials,
    runs=runs,
    run=run,
    shown=lambda row: ", ".join(f"{name} {row[name]:.3f}" for name in ("loss", "words", "sign")),
)

if __name__ == "__main__":
    EXPERIMENT.main()
