"""One decoding step after a long context: KV caches against states of fixed size.

python benchmarks/decoding.py                    writes lesson_code/results/decoding.json
python benchmarks/decoding.py --output FILE      writes another file
python benchmarks/decoding.py --device cuda      measures a GPU, for decoding_cuda.json

"rows" are the modules as a reader calls them: `SoftmaxAttention.step`, which copies its cache,
`LinearAttention.step`, and softmax attention that computes the whole context again.

"contexts" are the memories alone, each at its best. A step gets the queries, keys and values of one
token, writes what it has to remember and returns what all heads read: no projections, which are the
same at every length, and nothing copied. The states (linear with elu + 1 and a normalizer, gated,
delta) are updated in place. The caches stand in a buffer with room for the next token, and are read
in the fastest of three ways: `scaled_dot_product_attention`, or two products with the scores by
rows or by columns. The grouped cache has 2 heads of keys and values; the latent cache has 128
numbers a token, with the up-projections absorbed, which its step computes. A cache larger than
`--memory` bytes, half of what is free unless that says otherwise, is not run: its seconds are null.
"bytes" are what is kept, by the formulas of `lesson_code.costs`.

One sequence, width 512, 8 heads, float32. Each is measured by itself: in turns, a long KV cache
would push the others out of the processor's.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

from lesson_code import costs, measure, results
from lesson_code.torch import (
    KVCache,
    LinearAttention,
    LinearAttentionState,
    SoftmaxAttention,
    elu_plus_one,
)

WIDTH, HEADS, SEED = 512, 8, 0
HEAD_WIDTH = WIDTH // HEADS
KV_HEADS, LATENT = 2, 128
FLOAT = 4  # bytes
POSITIONS = [100, 1_000, 10_000, 100_000]
RECOMPUTE_UNTIL = 1_000
CONTEXTS = [factor * 10**power for power in range(2, 7) for factor in (1, 3)] + [10**7]


# --- The modules ---------------------------------------------------------------------------------


def state_bytes(state):
    return sum(x.numel() * x.element_size() for x in state)


def measure_position(position, softmax, linear, repeats):
    """Seconds of one step after `position` tokens, and bytes of what it has to remember."""
    device = linear.query.weight.device.type
    D = HEAD_WIDTH
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    cache = KVCache(draw(1, HEADS, position, D), draw(1, HEADS, position, D))
    state = LinearAttentionState(position * draw(1, HEADS, D, D), position + draw(1, HEADS, D))
    x_t = draw(1, WIDTH)
    functions = {
        "state": lambda: linear.step(x_t, state),
        "cache": lambda: softmax.step(x_t, cache),
    }
    if position <= RECOMPUTE_UNTIL:
        x = draw(1, position + 1, WIDTH)
        functions["recompute"] = lambda: softmax(x)
    times = {}
    with torch.inference_mode():
        for name, function in functions.items():
            times |= measure.seconds({name: function}, repeats=repeats, device=device)
    shown = ", ".join(f"{name} {1e6 * t:.0f} us" for name, t in times.items())
    print(f"position {position:10,d}: {shown}", flush=True)
    return {
        "position": position,
        "seconds": times,
        "bytes": {"state": state_bytes(state), "cache": state_bytes(cache)},
    }


# --- The memories alone: q, k and v of one token are (H, 1, D) -----------------------------------


def linear_step(S, z, q, k, v):
    q, k = elu_plus_one(torch.stack([q, k]))
    S.baddbmm_(k.mT, v)
    z.add_(k.mT)
    return (q @ S) / (q @ z)


def gated_step(S, q, k, v, log_decay):
    S.mul_(log_decay.exp().mT).baddbmm_(k.mT, v)
    return q @ S


def delta_step(S, q, k, v, beta):
    S.baddbmm_(k.mT, beta * (v - k @ S))
    return q @ S


def attend_fused(q, k, v):
    return scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)[0]


def attend_by_rows(q, k, v):
    return (q @ k.mT).softmax(dim=-1) @ v


def attend_by_columns(q, k, v):
    return (k @ q.mT).mT.softmax(dim=-1) @ v


ATTEND = (attend_fused, attend_by_rows, attend_by_columns)


def cached_step(attend, cache, q, k, v):
    """Write into the last place of a cache (2, H or fewer, N, D) and read all of it."""
    keys, values = cache
    keys[:, -1:], values[:, -1:] = k, v
    grouped = (q * q.shape[-1] ** -0.5).view(len(keys), -1, q.shape[-1])  # (Hkv, H / Hkv, D)
    return attend(grouped, keys, values).reshape(q.shape)


def latent_step(attend, cache, q, latent, up_k, up_v):
    """Write a latent (1, 1, R) into the last place of a cache (1, N, R); up_k is (H, R, D)."""
    cache[:, -1:] = latent
    absorbed = (q * q.shape[-1] ** -0.5) @ up_k.mT  # (H, 1, R)
    read = attend(absorbed.transpose(0, 1), cache, cache)  # (1, H, R): the heads share the latents
    return read.transpose(0, 1) @ up_v


def kept_bytes(N):
    """Bytes that each memory keeps of N tokens."""
    D = HEAD_WIDTH
    state = HEADS * costs.state_entries(D, D)
    numbers = {
        "linear": HEADS * costs.state_entries(D, D, normalizer=True),
        "gated": state,
        "delta": state,
        "KV cache": costs.kv_cache_entries(N, D, D, num_kv_heads=HEADS),
        "grouped cache": costs.kv_cache_entries(N, D, D, num_kv_heads=KV_HEADS),
        "latent cache": costs.latent_cache_entries(N, LATENT),
    }
    return {name: FLOAT * count for name, count in numbers.items()}


def repeated(block, N):
    """An array (..., N, D) that has the rows of a block again and again."""
    out = block.new_empty((*block.shape[:-2], N, block.shape[-1]))
    for start in range(0, N, block.shape[-2]):
        part = out[..., start : start + block.shape[-2], :]
        part.copy_(block[..., : part.shape[-2], :])
    return out


def steps(name, N, device):
    """The ways to take one step with a memory that holds N tokens, this one among them."""
    D = HEAD_WIDTH
    generator = torch.Generator().manual_seed(SEED)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    q, k, v = (draw(HEADS, 1, D) for _ in range(3))
    if name == "linear":
        return [partial(linear_step, N * draw(HEADS, D, D), N + draw(HEADS, D, 1), q, k, v)]
    if name == "gated":
        log_decay = -draw(HEADS, 1, D).abs() / 16
        return [partial(gated_step, draw(HEADS, D, D), q, k, v, log_decay)]
    if name == "delta":
        unit, beta = normalize(k, dim=-1), draw(HEADS, 1, 1).sigmoid()
        return [partial(delta_step, draw(HEADS, D, D), q, unit, v, beta)]
    if name == "latent cache":
        cache = repeated(draw(1, 4096, LATENT), N)
        latent, up_k, up_v = draw(1, 1, LATENT), draw(HEADS, LATENT, D), draw(HEADS, LATENT, D)
        return [partial(latent_step, way, cache, q, latent, up_k, up_v) for way in ATTEND]
    kv_heads = KV_HEADS if name == "grouped cache" else HEADS
    cache = repeated(draw(2, kv_heads, 4096, D), N)
    return [partial(cached_step, way, cache, q, k[:kv_heads], v[:kv_heads]) for way in ATTEND]


def fastest(name, N, device, repeats):
    """Seconds of one step, in the best way; what it remembers is gone afterwards."""
    with torch.inference_mode():
        ways = dict(enumerate(steps(name, N, device)))
        return min(measure.seconds(ways, repeats=repeats, device=device).values())


def measure_context(N, device, repeats, memory):
    """Seconds of one step of each memory with N tokens, None where it is larger than `memory`."""
    kept, times = kept_bytes(N), {}
    fewer = max(min(repeats, 5), repeats * 10_000 // max(N, 10_000))  # of what takes long
    for name, size in kept.items():
        rounds = fewer if "cache" in name else 100 * repeats
        times[name] = fastest(name, N, device, rounds) if size <= memory else None
    shown = ", ".join(f"{name} {1e6 * t:.0f} us" for name, t in times.items() if t is not None)
    print(f"context {N:11,d}: {shown}", flush=True)
    return {"N": N, "seconds": times, "bytes": kept}


def free_bytes(device):
    """Memory that is free now; a guess where the system does not say it."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if "MemAvailable" in line)
    except (OSError, StopIteration):
        return 4 * 10**9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--memory", type=int, help="bytes that a cache may take")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    memory = free_bytes(options.device) // 2 if options.memory is None else options.memory
    softmax = SoftmaxAttention(WIDTH, HEADS).to(options.device)
    linear = LinearAttention(WIDTH, HEADS).to(options.device)
    rows = [
        measure_position(position, softmax, linear, options.repeats)
        for position in options.positions
    ]
    contexts = [
        measure_context(N, options.device, options.repeats, memory) for N in options.contexts
    ]
    result = {
        "what": "one step of attention, batch 1, width 512, 8 heads, float32",
        "seed": SEED,
        "memory": memory,
        "rows": rows,
        "contexts": contexts,
    }
    results.save("decoding", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
