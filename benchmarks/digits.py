"""Two transformers that draw digits pixel by pixel: one with linear attention, one with softmax.

python benchmarks/digits.py                  writes lesson_code/results/digits.json and the weights
python benchmarks/digits.py --output FILE    writes another file, and the weights beside it
python benchmarks/digits.py --seeds 0 1      makes the runs of these seeds only
python benchmarks/digits.py --renew          begins again, whatever the file holds
python benchmarks/digits.py --quick          tiny models for a few steps: only a try

Both models are an `ImageModel` of the same size, trained in the same way on the same images, in the
same order for the same seed; only the mixer differs. Softmax attention does not rotate its queries
and keys here, as both models have an embedding of the position.

1,500 images are few. So both models train with weight decay and with dropout, of what is looked up
for a pixel and of what each sublayer adds. What is kept is a running mean of the weights, from the
step at which it was best on images set apart from those trained on. The images held out are looked
at once, by the model that is kept, for the number of bits that is reported. Each mixer is trained
with several seeds and one step size; the weights are those of the first seed.

Every run is saved when it ends, and a run that the file has is not repeated. One thread takes about
26 minutes.

At last the models of the first seed draw 1,000 digits each, and the file gets "nearest": how far
each of them is from the nearest image trained on, as a sum of squares over pixels, an integer, and
the same of other images to compare with. "real" are the images held out. "nearly copied" are images
trained on, each pixel changed by at most one level, "moved copies" the same moved to the right by a
pixel. "two halves" are the upper half of an image held out and the lower half of the next one.
"still" compares images as they are; for "shifted" those trained on are moved by a pixel, too, in
eight directions, and the nearest of all nine counts.
"""

import itertools
import math

import harness
import mixers
import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lesson_code.data import digits
from lesson_code.torch.modules import ImageModel, LinearAttention, SoftmaxAttention

# All that a result depends on. A change of anything else that matters raises the version.
SETTINGS = {
    "version": 1,
    "levels": 17,
    "width": 64,
    "layers": 4,
    "heads": 4,
    "logistics": 10,
    "dropout": 0.2,
    "weight_decay": 0.1,
    "rate": 5e-3,
    "steps": 1400,
    "batch": 64,
    "set_apart": 150,
    "every": 50,  # steps between two looks at the images set apart
    "average": 0.99,  # of the running mean, kept at each step
    "seeds": [0, 1, 2, 3, 4],
    "drawn": 1000,  # digits, of each model
}
QUICK = {"width": 8, "layers": 1, "logistics": 2, "steps": 4, "every": 2, "seeds": [0, 1]}
QUICK |= {"drawn": 8}


def unrotated(width, num_heads):
    return SoftmaxAttention(width, num_heads, rotary=False)


MIXERS = {"linear": LinearAttention, "softmax": unrotated}


def make_model(mixer, settings):
    heads = settings["heads"]
    return ImageModel(
        64,
        settings["levels"],
        settings["width"],
        [lambda width: MIXERS[mixer](width, heads)] * settings["layers"],
        num_logistics=settings["logistics"],
    )


def add_dropout(model, share):
    """While it trains, drop a share of what the embedding and each sublayer of a block give."""

    def drop(module, inputs, output):
        if isinstance(output, tuple):  # of a mixer, with its state
            return drop(module, inputs, output[0]), *output[1:]
        return nn.functional.dropout(output, share, module.training)

    for module in (model.value, *(part for b in model.blocks for part in sublayers(b))):
        module.register_forward_hook(drop)


def sublayers(block):
    return block.mixer, block.feed_forward


def schedule(i, steps):
    """The share of the step size at step i: up for a twentieth of the steps, then down to 0."""
    return min(1, 20 * (i + 1) / steps) * (1 + math.cos(math.pi * i / steps)) / 2


def train(model, settings, seed):
    """The best mean of the weights, its step, and the bits at each look."""
    rng, every = np.random.default_rng(seed), settings["every"]
    images = torch.from_numpy(digits.load()[0])
    apart, images = images.split([settings["set_apart"], len(images) - settings["set_apart"]])
    add_dropout(model, settings["dropout"])
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings["average"])).eval()
    curve, best = [], {"step": 0, "weights": model.state_dict()}

    def batch_loss(_):
        return model.bits(images[rng.integers(len(images), size=settings["batch"])]).mean()

    def look(i):
        mean.update_parameters(model)
        if (i + 1) % every == 0:
            bits = bits_of_images(mean.module, apart).mean().item()
            if bits < min(curve, default=math.inf):
                weights = {name: x.clone() for name, x in mean.module.state_dict().items()}
                best.update(step=i + 1, weights=weights)
            curve.append(bits)

    options = {"schedule": schedule, "weight_decay": settings["weight_decay"], "after": look}
    harness.train(model, batch_loss, settings["steps"], settings["rate"], **options)
    return best | {"curve": curve}


@torch.no_grad()
def bits_of_images(model, images):
    """Bits per pixel of each image."""
    return model.bits(images).double().mean(dim=1)


def run(mixer, seed, settings):
    """Train one model and look at the images held out."""
    model = make_model(mixer, settings)
    found = train(model, settings, seed)
    model.load_state_dict(found["weights"])
    bits = bits_of_images(model.eval(), torch.from_numpy(digits.load()[1]))
    return {
        "parameters": mixers.count(model),
        "bits": bits.mean().item(),
        "standard_error": bits.std().item() / len(bits) ** 0.5,
    } | found


def draw(mixer, settings, weights, count):
    """Digits (count, 64) that a trained model draws."""
    model = make_model(mixer, settings).eval()
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    return model.generate(torch.zeros(count, 0, dtype=torch.int64), seed=1).numpy()


def nearest(images, known):
    """Squared distance of each image to the nearest known one, smallest first."""
    squares = (images**2).sum(axis=1)[:, None] - 2 * images @ known.T + (known**2).sum(axis=1)
    return np.sort(squares.min(axis=1)).tolist()


def move(images, down, right):
    """Images (n, 64) moved by at most a pixel each way, with blank paper coming in."""
    wide = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    return wide[:, 1 - down : 9 - down, 1 - right : 9 - right].reshape(-1, 64)


def moved(images):
    """Each image where it is, and moved by a pixel in eight directions, (9 n, 64)."""
    return np.concatenate([move(images, *way) for way in itertools.product((1, 0, -1), repeat=2)])


def compare(rows, settings, output):
    """How far images of several kinds are from those trained on."""
    known, held_out = digits.load()
    known = known[settings["set_apart"] :]
    kinds = {"real": held_out}
    for mixer in MIXERS:
        job = mixer, settings["seeds"][0]
        with np.load(EXPERIMENT.weights_file(job, settings, output)) as weights:
            kinds[mixer] = draw(mixer, settings, weights, settings["drawn"])
    few = known[:300]
    noise = np.random.default_rng(0).integers(-1, 2, size=few.shape)
    next_one = np.roll(held_out, -1, axis=0)
    others = {
        "nearly copied": (few + noise).clip(0, 16),
        "two halves": np.hstack([held_out[:, :32], next_one[:, 32:]]),
        "moved copies": move(few, down=0, right=1),
    }
    distances = {
        name: {"still": nearest(images, known), "shifted": nearest(images, moved(known))}
        for name, images in (kinds | others).items()
    }
    return {"nearest": distances}


EXPERIMENT = harness.Experiment(
    name="digits",
    what="bits per pixel of digits held out, for two transformers of the same size, float32",
    settings=SETTINGS,
    quick=QUICK,
    fields=("mixer", "seed"),
    trials=lambda settings: [],
    runs=lambda rows, settings: [(name, seed) for seed in settings["seeds"] for name in MIXERS],
    run=run,
    shown=lambda row: f"{row['bits']:.3f} bits per pixel at step {row['step']}",
    kept=tuple(MIXERS),
    more=("nearest",),
    finish=compare,
)

if __name__ == "__main__":
    EXPERIMENT.main()
