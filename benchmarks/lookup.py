"""What loses a name, a missing query or the decay: RWKV-4 beside linear attention.

python benchmarks/lookup.py                    writes lesson_code/results/lookup.json
python benchmarks/lookup.py --output FILE      writes another file
python benchmarks/lookup.py --seeds 0 1        makes the runs of these seeds only
python benchmarks/lookup.py --renew            begins again, whatever the file holds
python benchmarks/lookup.py --quick            every kind of model for a few steps: only a try

Six names, drawn from a number of keys, come with a color each, one of eight. Then all six names
come once more, in another order, and each asks for its color. Names and colors are drawn anew for
every text, so that a blind guess is right once in eight times, whatever the number of keys.

The models are blocks of RWKV-4, and the same blocks with changes. In "WKV, no decay" the decay of
every channel stays 0. In the others the receptance is no gate but a query, which is multiplied with
the keys as in linear attention (elu + 1), and there is no bonus; maps, shifts, norms and channel
mix are the same. With 16 heads of width 2 the memory has as many numbers as WKV's, three for each
channel. "16 heads of 2, fading" has WKV's decays too, which begin as in RWKV-4 and are learned; the
other heads have none. In "RWKV-4, slow clocks" every channel begins with the slowest of RWKV-4's
decays, and learns its own from there: is it the decay that loses a name, or where it begins? The
maps of key and receptance begin at random in all models; where both
begin at 0, as in RWKV-4's code, the channels of a head would stay equal to each other.

Of the two step sizes that one counts, for each kind and number of keys, with which the loss on
other texts is smaller, over all seeds. Two blocks are trained with the smaller one alone. Every run
is saved when it ends, and a run that the file has is not repeated. All runs take one process
three quarters of an hour.
"""

import math

import harness
import numpy as np
import torch
from mixers import count
from torch import nn
from torch.nn.functional import cross_entropy

import lesson_code.torch as lt

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "keys": [8, 16, 32],
    "pairs": 6,
    "values": 8,
    "width": 32,
    "steps": 600,
    "batch": 32,
    "rates": [0.01, 0.03],
    "seeds": [0, 1, 2, 3, 4],
    "asked": 1000,  # texts that a model is asked about
}
QUICK = {"keys": [8], "steps": 2, "rates": [0.01], "seeds": [0], "asked": 8}
SLOWEST = -5.0  # the logarithm of the smallest rate with which a channel of RWKV-4 begins
MIXERS = {  # blocks, heads where a query chooses the weights, and whether the past fades
    "RWKV-4": (1, None, True),
    "RWKV-4, slow clocks": (1, None, True),
    "WKV, no decay": (1, None, False),
    "16 heads of 2, fading": (1, 16, True),
    "16 heads of 2": (1, 16, False),
    "1 head of 32": (1, 1, False),
    "RWKV-4, 2 blocks": (2, None, True),
}
SLOW = ("RWKV-4, 2 blocks",)  # with the smaller step size only


def fading_attention(q, k, v, decay):
    """Linear attention of q, k, v (B, H, N, D) whose features fade as WKV's keys do; decay (H, D).

    It takes N^2 D operations, which is nothing for texts of 23 tokens.
    """
    t = torch.arange(q.shape[-2])
    age = (t[:, None] - t - 1).clamp(min=0)[..., None]
    faded = torch.exp(-age * decay[:, None, None])  # (H, N, N, D)
    f, g = lt.elu_plus_one(q), lt.elu_plus_one(k)
    weights = (f[..., :, None, :] * g[..., None, :, :] * faded).sum(-1).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


class Asking(lt.RWKV4TimeMix):
    """The time mix with linear attention in the place of WKV and its gate; it keeps no state."""

    def __init__(self, width, heads, fading):
        super().__init__(width)
        self.heads, self.fading = heads, fading
        del self.bonus
        if not fading:
            del self.log_rate

    def mix(self, x, state):
        maps = (self.receptance, self.mix_receptance), (self.key, self.mix_key)
        maps = *maps, (self.value, self.mix_value)
        q, k, v = (
            linear(lt.token_shift(x, share)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear, share in maps
        )
        if self.fading:
            o = fading_attention(q, k, v, self.log_rate.exp().unflatten(-1, (self.heads, -1)))
        else:
            o = lt.linear_attention(q, k, v, causal=True)
        return self.output(o.transpose(1, 2).flatten(-2)), (None,) * 4


def make_model(mixer, keys, settings):
    (blocks, heads, fading), F = MIXERS[mixer], settings["width"]
    model = lt.LanguageModel(keys + settings["values"], F, [lt.RWKV4Block] * blocks)
    for block in model.blocks:
        if heads is not None:
            block.time_mix = Asking(F, heads, fading)
        elif not fading:
            block.time_mix.log_rate.requires_grad_(False).fill_(-math.inf)  # w = 0
        elif mixer == "RWKV-4, slow clocks":
            nn.init.constant_(block.time_mix.log_rate, SLOWEST)
        for linear in (block.time_mix.key, block.time_mix.receptance):
            nn.init.normal_(linear.weight, std=F**-0.5)
    return model


def draw(keys, batch, settings, rng):
    """Texts (batch, 4 pairs): names and colors, and once more in another order."""
    pairs = settings["pairs"]

    def shuffled(n):
        return rng.permuted(np.tile(np.arange(n), (batch, 1)), axis=1)

    told = np.stack(
        [shuffled(keys)[:, :pairs], keys + rng.integers(settings["values"], size=(batch, pairs))],
        axis=2,
    )
    asked = np.take_along_axis(told, shuffled(pairs)[:, :, None], axis=1)
    return torch.from_numpy(np.concatenate([told, asked], axis=1).reshape(batch, -1))


def answers(model, text, settings):
    """Logits of the colors that are asked for, and the right ones."""
    first = 2 * settings["pairs"]
    return model(text[:, :-1])[:, first::2].flatten(0, 1), text[:, first + 1 :: 2].flatten()


def train(model, keys, rate, settings, seed):
    rng = np.random.default_rng([seed, 1])

    def batch_loss(_):
        return cross_entropy(
            *answers(model, draw(keys, settings["batch"], settings, rng), settings)
        )

    adam = {"schedule": harness.linear, "betas": (0.9, 0.999), "clip": math.inf}
    harness.train(model, batch_loss, settings["steps"], rate, **adam)


@torch.no_grad()
def asked(model, keys, settings, seed):
    """Loss and share of right answers."""
    rng = np.random.default_rng([seed, 2])
    logits, right = answers(model, draw(keys, settings["asked"], settings, rng), settings)
    return cross_entropy(logits, right).item(), (logits.argmax(-1) == right).double().mean().item()


def run(mixer, keys, rate, seed, settings):
    model = make_model(mixer, keys, settings)
    train(model, keys, rate, settings, seed)
    return {
        "parameters": count(model),
        "loss_to_choose_by": asked(model, keys, settings, 1000 + seed)[0],
        "right": asked(model, keys, settings, seed)[1],
    }


def runs(rows, settings):
    """Every step size with every seed: which of them counts is for the reader of the file."""
    return [
        (mixer, keys, rate, seed)
        for mixer in MIXERS
        for seed in settings["seeds"]
        for rate in settings["rates"][: 1 if mixer in SLOW else None]
        for keys in settings["keys"]
    ]


EXPERIMENT = harness.Experiment(
    name="lookup",
    what="share of right answers about six pairs of name and color, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "keys", "rate", "seed"),
    trials=lambda settings: [],
    runs=runs,
    run=run,
    shown=lambda row: f"{row['right']:.3f}",
)

if __name__ == "__main__":
    EXPERIMENT.main()
