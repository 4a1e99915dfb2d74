"""One decoding step after a long context: a KV cache against a state of fixed size.

python benchmarks/decoding.py                    writes lesson_code/results/decoding.json
python benchmarks/decoding.py --output FILE      writes another file
python benchmarks/decoding.py --device cuda      measures a GPU, for decoding_cuda.json

`SoftmaxAttention.step` with a cache, `LinearAttention.step` with (S, z), and softmax attention that
computes the whole context again, at growing positions: one sequence, width 512, 8 heads, float32.
Each is measured by itself: in turns, a long KV cache would push the others out of the processor's.
"""

import argparse
from pathlib import Path

import torch

from lesson_code import measure, results
from lesson_code.torch import KVCache, LinearAttention, LinearAttentionState, SoftmaxAttention

WIDTH, HEADS, SEED = 512, 8, 0
POSITIONS = [100, 1_000, 10_000, 100_000]
RECOMPUTE_UNTIL = 1_000


def state_bytes(state):
    return sum(x.numel() * x.element_size() for x in state)


def measure_position(position, softmax, linear, repeats):
    """Seconds of one step after `position` tokens, and bytes of what it has to remember."""
    device = linear.query.weight.device.type
    D = WIDTH // HEADS
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
    print(f"position {position:7,d}: {shown}", flush=True)
    return {
        "position": position,
        "seconds": times,
        "bytes": {"state": state_bytes(state), "cache": state_bytes(cache)},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--positions", type=int, nargs="+", default=POSITIONS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    softmax = SoftmaxAttention(WIDTH, HEADS).to(options.device)
    linear = LinearAttention(WIDTH, HEADS).to(options.device)
    rows = [
        measure_position(position, softmax, linear, options.repeats)
        for position in options.positions
    ]
    result = {
        "what": "one step of attention, batch 1, width 512, 8 heads, float32",
        "seed": SEED,
        "rows": rows,
    }
    results.save("decoding", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
