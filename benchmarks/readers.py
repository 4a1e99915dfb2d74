"""One decoding step of a whole layer for many readers at once: weights that all of them share, and
for each of them a cache or a state of its own.

python benchmarks/readers.py                    writes lesson_code/results/readers.json
python benchmarks/readers.py --output FILE      writes another file

A step multiplies the tokens of all readers by the matrices of the layer (q, k and v, the output,
and a feed-forward sublayer four times as wide, without norms), writes into each memory and reads
it. "none" leaves the memories out. The grouped cache keeps a quarter of the heads; its matrices
are left as wide as the others'. Caches lie in a buffer and are read in the fastest of three ways;
states are overwritten in place. "bytes" are those that a step has to move: the weights once,
caches read, states read and written. "speeds" are the most that this machine has shown: bytes a
second of the longest caches, and multiply-adds a second of a large matrix product.

Width 1,024, 16 heads, float32.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from lesson_code import costs, measure, results
from lesson_code.torch import elu_plus_one

WIDTH, HEADS, SEED = 1_024, 16, 0
HEAD_WIDTH = WIDTH // HEADS
KV_HEADS = HEADS // 4
TOKENS = 4_096
FLOAT = 4  # bytes
READERS = [1, 2, 4, 8, 16, 32]


def step_bytes(B, N):
    """Bytes that a step moves for B readers with N tokens each."""
    D = HEAD_WIDTH
    state = HEADS * costs.state_entries(D, D, normalizer=True)
    memory = {
        "none": 0,
        "KV cache": costs.kv_cache_entries(N, D, D, num_kv_heads=HEADS),
        "grouped cache": costs.kv_cache_entries(N, D, D, num_kv_heads=KV_HEADS),
        "state": 2 * state,
    }
    return {name: FLOAT * (12 * WIDTH**2 + B * each) for name, each in memory.items()}


def fused(q, keys, values):
    return scaled_dot_product_attention(q, keys, values, scale=1.0)


def by_products(q, keys, values):
    return (q @ keys.mT).softmax(dim=-1) @ values


def by_columns(q, keys, values):
    return (keys @ q.mT).mT.softmax(dim=-1) @ values


def read_nothing(q, k, v):
    return v


def read_cache(attend, cache, q, k, v):
    """The cache is (2, B, H or fewer, N, D), and q, k and v are (B, H, 1, D)."""
    keys, values = cache
    kv_heads = keys.shape[1]
    keys[:, :, -1:], values[:, :, -1:] = k[:, :kv_heads], v[:, :kv_heads]
    grouped = (q * q.shape[-1] ** -0.5).reshape(len(q), kv_heads, -1, q.shape[-1])
    return attend(grouped, keys, values).reshape(q.shape)


def read_state(S, z, q, k, v):
    """S is (B, H, D, D) and z (B, H, D, 1)."""
    q, k = elu_plus_one(q), elu_plus_one(k)
    S.flatten(0, 1).baddbmm_(k.mT.flatten(0, 1), v.flatten(0, 1))
    z.add_(k.mT)
    return (q @ S) / (q @ z)


def layer_step(weights, memory, x):
    """One token (B, F) of each reader."""
    qkv, out, up, down = weights
    q, k, v = (x @ qkv).view(len(x), 3, HEADS, 1, HEAD_WIDTH).unbind(1)
    x = x + memory(q, k, v).reshape(x.shape) @ out
    return x + (x @ up).relu_() @ down


def ways(name, B, N, draw):
    """The ways to use one kind of memory."""
    D = HEAD_WIDTH
    if name == "none":
        return [read_nothing]
    if name == "state":
        return [partial(read_state, draw(B, HEADS, D, D), N + draw(B, HEADS, D, 1).abs())]
    cache = torch.empty(2, B, KV_HEADS if name == "grouped cache" else HEADS, N, D)
    cache[:] = draw(N, D)
    return [partial(read_cache, attend, cache) for attend in (fused, by_products, by_columns)]


def measure_readers(B, N, weights, repeats, draw):
    """A row: seconds of one step for all B readers."""
    x, times = draw(B, WIDTH), {}
    for name in step_bytes(B, N):
        functions = {
            str(i): partial(layer_step, weights, way, x)
            for i, way in enumerate(ways(name, B, N, draw))
        }
        with torch.inference_mode():
            times[name] = min(measure.seconds(functions, repeats=repeats).values())
    shown = ", ".join(f"{name} {1e3 * t:.2f} ms" for name, t in times.items())
    print(f"{B:3d} readers: {shown}", flush=True)
    return {"B": B, "seconds": times, "bytes": step_bytes(B, N)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--readers", type=int, nargs="+", default=READERS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    F, N = WIDTH, options.tokens
    shapes = (F, 3 * F), (F, F), (F, 4 * F), (4 * F, F)
    weights = [draw(*shape) / shape[0] ** 0.5 for shape in shapes]
    rows = [measure_readers(B, N, weights, options.repeats, draw) for B in options.readers]
    last = rows[-1]
    seconds = last["seconds"]["KV cache"] - last["seconds"]["none"]
    square = draw(F, F)
    product = measure.seconds({"": lambda: square @ square}, repeats=options.repeats)[""]
    result = {
        "what": "one decoding step of a layer, width 1,024, 16 heads, float32",
        "seed": SEED,
        "tokens": N,
        "rows": rows,
        "speeds": {
            "bytes": (last["bytes"]["KV cache"] - last["bytes"]["none"]) / seconds,
            "operations": F**3 / product,
        },
    }
    results.save("readers", result, device="cpu", output=options.output)


if __name__ == "__main__":
    main()
