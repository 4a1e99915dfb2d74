"""Seconds to generate an image, pixel by pixel: softmax recomputed, with a KV cache, and as an RNN.

python benchmarks/generation.py                    writes lesson_code/results/generation.json
python benchmarks/generation.py --output FILE      writes another file
python benchmarks/generation.py --renew            begins again, whatever the file holds
python benchmarks/generation.py --device cuda      measures a GPU, for generation_cuda.json

The sizes are those of Katharopoulos et al. (2020): 8 layers for 784 pixels and 16 for 3,072, 8
heads of 32, a feed-forward sublayer four times as wide, 256 levels, a mixture of 10 logistics;
untrained, as the time does not depend on the weights. Four ways to the next pixel:

    recomputed   softmax attention reads all pixels so far again, with the N×N matrix in memory
    tiled        the same with scaled_dot_product_attention, which never has the matrix in memory
    cache        softmax attention reads one pixel; keys and values are in a KV cache with room
    state        linear attention reads one pixel; its states are overwritten

Each uses the batch that makes most pixels per second near the end of an image, among powers of two
whose largest arrays fit into the same memory (--memory). The time of a pixel is measured at a few
places of the image, and between them it is a polynomial of the place: of degree 2 where everything
is read again, of degree 1 with a cache, and constant with a state. The sum over all places is the
time of an image: the first three are extrapolated in this way, as an image of 3,072 pixels would
take hours.

The step with a state is compiled, which fuses what lies between the matrix products (--eager leaves
it as it is); on a GPU it is one CUDA graph instead, which Python starts once a pixel. The others
are not: their arrays are larger from pixel to pixel, and matrix products and attention take most of
their time. For "state" there are two more numbers: "eager", seconds of a step that is not compiled,
and "products", of its linear maps alone.

Every method is saved when it has been measured, and one that the file has is not measured again.
"""

import argparse
import contextlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lesson_code import measure, results
from lesson_code.torch import draw_logistic_mixture
from lesson_code.torch.modules import ImageModel, LinearAttention, SoftmaxAttention
from lesson_code.torch.modules._parts import merge_heads, split_heads
from lesson_code.torch.modules.in_place import own
from lesson_code.torch.modules.softmax import KVCache, rotate

WIDTH, HEADS, LEVELS, SEED = 256, 8, 256, 0
SIZES = [(8, 784), (16, 3072)]
RENEW = "python benchmarks/generation.py --renew"
DEGREES = {"recomputed": 2, "tiled": 2, "cache": 1, "state": 0}


class TiledAttention(SoftmaxAttention):
    """Softmax attention without the N×N matrix in memory."""

    def mix(self, x, state):
        q, k, v = (split_heads(f(x), HEADS) for f in (self.query, self.key, self.value))
        q, k = rotate(q, 0), rotate(k, 0)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(merge_heads(out)), KVCache(k, v)


MIXERS = {
    "recomputed": SoftmaxAttention,
    "tiled": TiledAttention,
    "cache": SoftmaxAttention,
    "state": LinearAttention,
}


def make_model(method, layers, pixels, device):
    torch.manual_seed(SEED)
    mixers = layers * [MIXERS[method]]
    return ImageModel(pixels, LEVELS, WIDTH, mixers, num_heads=HEADS).to(device)


def largest_bytes(method, layers, pixels, batch):
    """What the method holds at the end of an image, in float32, its weights aside."""
    D = WIDTH // HEADS
    numbers = {
        "recomputed": 3 * HEADS * pixels**2 + 2 * layers * WIDTH * pixels,
        "tiled": 2 * (layers + 6) * WIDTH * pixels,
        "cache": 2 * layers * WIDTH * pixels,
        "state": layers * HEADS * D * (D + 1),
    }
    return 4 * batch * numbers[method]


def make_step(method, model, batch, place, device):
    """A function that draws the pixel at `place` as `generate` does; each call goes on."""
    if method in ("recomputed", "tiled"):
        images = torch.zeros(batch, place, dtype=torch.int64, device=device)
        return lambda: draw_logistic_mixture(model.read(images)[0], LEVELS)
    D = WIDTH // HEADS
    parameters, state = model.read(torch.zeros(batch, 0, dtype=torch.int64, device=device))
    state.position.fill_(place)
    if method == "cache":
        blocks = tuple(
            KVCache(*(torch.full((batch, HEADS, place, D), 0.1, device=device) for _ in "kv"))
            for _ in model.blocks
        )
        state = state._replace(blocks=blocks)
    state = state._replace(blocks=own(state.blocks))
    latest = [parameters, state]

    def step():
        latest[:] = model.step(draw_logistic_mixture(latest[0], LEVELS), latest[1])

    return step if device == "cpu" or method == "cache" else as_graph(model, *latest)


def as_graph(model, parameters, state):
    """The step as a CUDA graph: it reads and writes the same memory at every call."""

    def step():
        new, after = model.step(draw_logistic_mixture(parameters, LEVELS), state)
        parameters.copy_(new)
        state.position.copy_(after.position)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # libraries allocate at their first calls
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def products(model, batch, device):
    """The linear maps of one pixel, and nothing else."""
    maps = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)] + [model.head]
    inputs = {m.in_features: torch.randn(batch, m.in_features, device=device) for m in maps}
    return lambda: [m(inputs[m.in_features]) for m in maps]


def best_batch(method, model, layers, pixels, memory, device):
    """The power of two with the most pixels per second near the end."""
    best, tried, batch = {}, 0, 1
    while batch == 1 or largest_bytes(method, layers, pixels, batch) <= memory:
        step = make_step(method, model, batch, pixels - 16, device)
        best[batch] = measure.seconds({"": step}, repeats=2, device=device)[""] / batch
        tried = tried + 1 if best[batch] > min(best.values()) else 0
        if tried == 2:  # twice no better
            break
        batch *= 2
    return min(best, key=best.get)


def measure_method(method, layers, pixels, options):
    """What a method needs for an image of this size."""
    device, model = options.device, make_model(method, layers, pixels, options.device)
    places = sorted({pixels * i // 8 for i in (1, 2, 4, 6)} | {pixels - 16})
    batch = best_batch(method, model, layers, pixels, options.memory, device)
    more = {}
    if method == "state":
        step = make_step(method, model, batch, places[0], device)
        alone = {"eager": step, "products": products(model, batch, device)}
        more = measure.seconds(alone, repeats=10, device=device)
        if device == "cpu" and not options.eager:
            model.step = torch.compile(model.step, dynamic=False)
    seconds = []
    for place in places:
        step = make_step(method, model, batch, place, device)
        seconds += measure.seconds({"": step}, repeats=options.repeats, device=device).values()
    # Weighted so that it is the relative error of each place that counts.
    fit = np.polynomial.Polynomial.fit(places, seconds, DEGREES[method], w=1 / np.array(seconds))
    image = fit(np.arange(pixels)).sum() / batch
    times = ", ".join(f"{1e3 * t / batch:.4g}" for t in seconds)
    print(f"{layers} layers, {pixels:,} pixels, {method}: {image:.4g} s per image", flush=True)
    print(f"    batch {batch}, at {places}: {times} ms per pixel", flush=True)
    found = {"batch": batch, "places": places, "seconds": seconds, "seconds_per_image": image}
    return found | more


def row_of(rows, layers, pixels):
    """The row of this size, a new one if there is none."""
    for row in rows:
        if (row["layers"], row["pixels"]) == (layers, pixels):
            return row
    rows.append({"layers": layers, "pixels": pixels, "methods": {}})
    return rows[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--memory", type=int, default=4 * 2**30, help="bytes for each method")
    parser.add_argument("--size", type=int, nargs=2, action="append", metavar=("LAYERS", "PIXELS"))
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sizes = options.size or SIZES
    if options.repeats > 12 or any(pixels < 64 for _, pixels in sizes):
        parser.error("a measurement must end before the image does: --repeats <= 12, PIXELS >= 64")
    torch.set_num_threads(options.threads)
    measure.keep_freed_memory()
    suffix = "" if options.device == "cpu" else f"_{options.device}"
    output = options.output or Path(results.__file__).with_name(f"generation{suffix}.json")
    settings = {"version": 1, "memory": options.memory, "threads": options.threads}
    rows = [] if options.renew else results.earlier(output, settings, RENEW).get("rows", [])
    with torch.inference_mode():
        for layers, pixels in sizes:
            methods = row_of(rows, layers, pixels)["methods"]
            for method in [name for name in DEGREES if name not in methods]:
                methods[method] = measure_method(method, layers, pixels, options)
                save(output, settings, rows, options.device)
    print(f"wrote {output}")


def save(output, settings, rows, device):
    result = {
        "what": "generating an image, width 256, 8 heads, 256 levels, 10 logistics, float32",
        "seed": SEED,
        "settings": settings,
        "renew": RENEW,
        "rows": rows,
    }
    with contextlib.redirect_stdout(None):
        results.save("generation", result, device=device, output=output)


if __name__ == "__main__":
    main()
