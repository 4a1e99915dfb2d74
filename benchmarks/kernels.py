"""The kernels of the causal scan on a GPU, beside what else computes it, and beside the floor.

python benchmarks/kernels.py                    writes lesson_code/results/kernels_cuda.json
python benchmarks/kernels.py --dtype float16    for a GPU whose tensor cores have no bfloat16
python benchmarks/kernels.py --output FILE      writes another file
python benchmarks/kernels.py --device cpu --shapes 1,1,70,16 --output FILE
                                                tries the script without a GPU, in the emulator

Unnormalized causal linear attention, the identity map, 16-bit inputs, D = M; forward, and forward
plus backward with all three gradients. Beside the three kernels: torch's chunkwise form and
cumulative sum, softmax attention (`scaled_dot_product_attention(is_causal=True)`, which computes
something else), and the chunked kernels of flash-linear-attention where the package `fla` is
installed. Each gets contiguous arrays in the order of axes that it is made for.

First every contender is checked at every shape: the last head of what it computes, against float64,
the largest error being that of any 64 positions, a ratio of norms.
One that fails, is wrong, finds no memory or takes more than a second is not timed; "failed" says
why. The others take turns, and "seconds" is the median of each, "spread" its quartiles. They are
times of the GPU alone, from CUDA events: before every run a buffer of several times the cache's
size is read, so that no input is in the cache and nothing waits to be written, and read often
enough for the host to be done with launching when the run begins. "host" is what the launching
takes. "replayed" is a CUDA graph of the same, run after run without a word to the cache; graphs
come last, when all else has been written.

The floor is the larger of two times, with the bandwidth of a large copy (bytes read and written)
and the rate of a product of large matrices, both measured in the same run. The bytes: every input
read once, every output written once. Forward these are q, k, v and the output, 2 D + 2 M numbers a
token; the backward pass adds q, k, v and the output's gradient, 2 D + 2 M, and the three gradients,
2 D + M. The operations are those of the recurrence, 2 D M for every write to a state and every read
of one: forward a write and a read; backward the writes of the state once more, those of its
gradient, and a read for each of the three gradients. "floors" is the time as a multiple of the
floor, "ratio" as a multiple of the time of the kernel "tensor_core".
"""

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from lesson_code import results
from lesson_code.torch import identity, linear_attention

SEED = 0
SHAPES = [  # B, H, N, D
    (B, H, N, D) for B, H, N in [(8, 16, 4096), (1, 8, 65_536), (4, 16, 2048)] for D in (64, 128)
]
PASSES = ("forward", "forward + backward")
NUMBERS = {"forward": 4, "forward + backward": 11}  # moved for each token, in units of D = M
PRODUCTS = {"forward": 2, "forward + backward": 7}  # of 2 D M operations each, for each token
TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-3}
LIMIT = 1.0  # seconds


class Contender(NamedTuple):
    """A function of q, k and v, made by a function that imports what it needs."""

    make: Callable
    heads_first: bool = True  # (B, H, N, D); otherwise (B, N, H, D)
    same: bool = True  # whether it computes the causal scan


def contenders(device):
    """All contenders by name. The kernels stand last: what they might break is done by then."""

    def torch_form(form):
        options = {"feature_map": identity, "normalize": False, "backend": "torch"}
        return partial(linear_attention, causal=True, form=form, **options)

    def flash_linear_attention(name):
        from fla.ops import linear_attn

        function = getattr(linear_attn, name)
        return lambda q, k, v: function(q, k, v, scale=1.0, normalize=False)[0]

    def kernel(name):
        from lesson_code.cupy import causal_scan

        return partial(causal_scan, kernel=name, device=device)

    def softmax():
        return partial(scaled_dot_product_attention, is_causal=True)

    def fla(name):
        return Contender(lambda: flash_linear_attention(name), heads_first=False)

    return {
        "softmax": Contender(softmax, same=False),
        "torch, chunkwise": Contender(lambda: torch_form("chunkwise")),
        "torch, cumsum": Contender(lambda: torch_form("cumsum")),
        "fla, chunk": fla("chunk_linear_attn"),
        "fla, fused chunk": fla("fused_chunk_linear_attn"),
        "recurrent": Contender(lambda: kernel("recurrent")),
        "chunked": Contender(lambda: kernel("chunked")),
        "tensor_core": Contender(lambda: kernel("tensor_core")),
    }


# --- What is computed ----------------------------------------------------------------------------


def draw(shape, dtype, device):
    """q, k, v and the gradient of the output, (B, H, N, D)."""
    generator = torch.Generator(device).manual_seed(SEED)
    q, k, v, grad_out = (torch.randn(shape, generator=generator, device=device) for _ in range(4))
    return [x.to(dtype) for x in (q * shape[-1] ** -0.5, k, v, grad_out)]


def run_of(function, tensors, which):
    """A function without arguments: what one pass computes, the output first."""
    *inputs, grad_out = tensors

    def forward():
        with torch.no_grad():
            return (function(*inputs),)

    def both():
        tracked = [x.detach().requires_grad_() for x in inputs]
        out = function(*tracked)
        return out.detach(), *torch.autograd.grad(out, tracked, grad_out)

    return forward if which == "forward" else both


def prepared(contender, tensors, which):
    """The pass of a contender, on arrays in its own order of axes."""
    if not contender.heads_first:
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    return run_of(contender.make(), tensors, which)


def reference(tensors, which):
    """The last head in float64."""
    options = {"feature_map": identity, "normalize": False, "form": "chunkwise"}
    head = [x[-1, -1].double() for x in tensors]
    return run_of(partial(linear_attention, causal=True, **options), head, which)()


def error_of(arrays, expected, heads_first):
    """The largest error of the last head, among the arrays and among pieces of 64 positions."""
    last = (-1, -1) if heads_first else (-1, slice(None), -1)
    errors = []
    for array, wanted in zip(arrays, expected, strict=True):
        wrong = array[last].double() - wanted
        pieces = zip(wrong.split(64), wanted.split(64), strict=True)
        errors += [difference.norm() / piece.norm() for difference, piece in pieces]
    return float(torch.stack(errors).max())  # NaN where one is


def check(contender, tensors, which, expected, clock):
    """Error against float64, None for softmax; raises where there is a reason not to time."""
    run = prepared(contender, tensors, which)
    # What is not written holds what stood in the memory before: here NaN.
    poison = [torch.full_like(x, float("nan")) for x in tensors for _ in range(2)]
    del poison
    error = None
    if contender.same:
        error = error_of(run(), expected, contender.heads_first)
        tolerance = TOLERANCE[str(tensors[0].dtype).removeprefix("torch.")]
        if not error <= tolerance:
            raise ArithmeticError(f"wrong: its error is {error:.2g}")
    run()
    seconds, _ = clock(run)
    if seconds > LIMIT:
        raise TimeoutError(f"a run takes {seconds:.1f} s")
    return error


# --- Clocks --------------------------------------------------------------------------------------


class HostClock:
    """Seconds of a run, twice: on a CPU the host does the work."""

    def __call__(self, function, host_seconds=0.0):
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start,) * 2


class GpuClock:
    """Seconds of a run on the GPU, with nothing in its cache, and on the host."""

    def __init__(self):
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.buffer = torch.ones(max(4 * cache, 2**26) // 4, device="cuda")
        self.total = torch.zeros((), device="cuda")
        self._flush()
        self.flush_seconds = self._events(lambda: [self._flush() for _ in range(10)])[0] / 10

    def __call__(self, function, host_seconds=0.0):
        times = 1 + min(int(1.5 * host_seconds / self.flush_seconds), 1000)
        torch.cuda.synchronize()
        for _ in range(times):
            self._flush()
        return self._events(function)

    def _flush(self):
        torch.sum(self.buffer, dim=0, out=self.total)

    @staticmethod
    def _events(function):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        function()
        end.record()
        host = time.perf_counter() - begin
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host


def replayed(function, repeats):
    """Median seconds of the replays of a CUDA graph, one right after the other."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()  # noqa: F841  (the graph writes into it)
    graph.replay()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs)


def ceilings(clock, dtype, device, repeats):
    """What the machine can do at best: bytes a second in a copy, operations in a product."""
    if device == "cpu":
        size, width = 2**24, 256
    else:
        size, width = min(2**32, torch.cuda.mem_get_info()[0] // 4), 8192
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    copy, product = partial(target.copy_, source), partial(torch.matmul, a, b)
    for function in (copy, product):
        for _ in range(3):
            clock(function)
    copies, products = ([clock(f)[0] for _ in range(repeats)] for f in (copy, product))
    return {
        "bytes_per_second": 2 * size / statistics.median(copies),
        "operations_per_second": 2 * width**3 / statistics.median(products),
    }


# --- Rows ----------------------------------------------------------------------------------------


def floor(shape, which, dtype, ceiling):
    """Bytes, operations, and the least time that they can take."""
    B, H, N, D = shape
    moved = B * H * N * NUMBERS[which] * D * dtype.itemsize
    operations = B * H * N * PRODUCTS[which] * 2 * D * D
    memory = moved / ceiling["bytes_per_second"]
    arithmetic = operations / ceiling["operations_per_second"]
    bound = "memory" if memory >= arithmetic else "arithmetic"
    return {
        "bytes": moved,
        "operations": operations,
        "floor": max(memory, arithmetic),
        "bound": bound,
    }


def in_turns(runs, repeats, clock, failed):
    """All times of every run, and what its launch takes; one that fails is moved to `failed`."""
    seconds, host = {name: [] for name in runs}, {}
    for turn in range(repeats + 2):
        for name in [name for name in runs if name not in failed]:
            try:
                device, launch = clock(runs[name], host.get(name, 0.0))
            except Exception as error:
                failed[name] = _reason(error)
                start_again_if_broken(name)
                continue
            host[name] = min(launch, host.get(name, launch))
            if turn >= 2:
                seconds[name].append(device)
    return {n: s for n, s in seconds.items() if n not in failed}, host


def measure_row(shape, which, dtype, device, all_contenders, failed, ceiling, clock, repeats):
    """One row of the result."""
    tensors = draw(shape, dtype, device)
    left = {name: one for name, one in all_contenders.items() if name not in failed}
    runs = {name: prepared(contender, tensors, which) for name, contender in left.items()}
    times, host = in_turns(runs, repeats, clock, failed)
    B, H, N, D = shape
    row = {"B": B, "H": H, "N": N, "D": D, "pass": which}
    row |= floor(shape, which, dtype, ceiling)
    row["seconds"] = {name: statistics.median(s) for name, s in times.items()}
    row["spread"] = {name: _quartiles(s) for name, s in times.items()}
    row["host"] = {name: host[name] for name in times}
    row["floors"] = {name: s / row["floor"] for name, s in row["seconds"].items()}
    ours = row["seconds"].get("tensor_core")
    row["ratio"] = {name: s / ours for name, s in row["seconds"].items()} if ours else {}
    return row


def add_replays(row, dtype, device, all_contenders, repeats):
    """Times of CUDA graphs, into a row."""
    row["replayed"] = {}
    tensors = draw((row["B"], row["H"], row["N"], row["D"]), dtype, device)
    for name in row["seconds"]:
        try:
            run = prepared(all_contenders[name], tensors, row["pass"])
            row["replayed"][name] = replayed(run, repeats)
        except Exception as error:
            print(f"  {name} is no graph: {_reason(error)}", flush=True)


def _quartiles(seconds):
    if len(seconds) < 2:
        return seconds * 2
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return [low, high]


def _reason(error):
    """One line about an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


# --- The whole -----------------------------------------------------------------------------------


def check_all(cases, dtype, device, all_contenders, clock, left_out):
    """Errors against float64 and reasons not to time, by case and name."""
    errors, failures = {}, {}
    for shape, which in cases:
        tensors = draw(shape, dtype, device)
        expected = reference(tensors, which)
        errors[shape, which] = {}
        failed = failures[shape, which] = dict.fromkeys(left_out, "left out: --without")
        for name, contender in all_contenders.items():
            if name in left_out:
                continue
            try:
                error = check(contender, tensors, which, expected, clock)
                if error is not None:
                    errors[shape, which][name] = error
            except Exception as error:
                failed[name] = _reason(error)
                print(f"{_shown(shape, which)}: {name}: {failed[name]}", flush=True)
                start_again_if_broken(name)
        print(f"{_shown(shape, which)}: checked", flush=True)
    return errors, failures


def start_again_if_broken(name):
    """After an access to memory that is not there, nothing works in the process any more."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        print(f"starting again without {name}", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv, "--without", name])


def versions():
    """What the times depend on beside the GPU."""
    found = {"cuda": torch.version.cuda, "driver": None, "nvrtc": None}
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found["driver"] = shown.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        from lesson_code.cupy import nvrtc

        found["nvrtc"] = nvrtc.version()
    except ImportError:
        pass
    for package in ("cupy-cuda12x", "cupy-cuda13x", "triton", "fla-core"):
        try:
            found[package.partition("-cuda")[0]] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found.setdefault(package.partition("-cuda")[0], None)
    return found


def _shown(shape, which):
    B, H, N, D = shape
    return f"B {B} H {H} N {N} D {D} {which}"


def _shape(text):
    B, H, N, D = map(int, text.split(","))
    return B, H, N, D


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=list(TOLERANCE))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--shapes", type=_shape, nargs="+", default=SHAPES, metavar="B,H,N,D")
    parser.add_argument("--without", action="append", default=[], metavar="CONTENDER")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device, dtype, repeats = options.device, getattr(torch, options.dtype), options.repeats
    if device == "cpu" and options.output is None:
        parser.error("--device cpu only tries the script: name an --output")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU: --device cpu tries the script without one")
    clock = GpuClock() if device == "cuda" else HostClock()
    everyone, cases = contenders(device), [(s, w) for s in options.shapes for w in PASSES]
    errors, failures = check_all(cases, dtype, device, everyone, clock, options.without)
    ceiling = ceilings(clock, dtype, device, repeats)
    print(", ".join(f"{value:.3g} {name}" for name, value in ceiling.items()), flush=True)
    result = {
        "what": "unnormalized causal linear attention, D = M, and softmax attention, on a GPU",
        "versions": versions(),
        "seed": SEED,
        "dtype": options.dtype,
        **ceiling,
        "rows": [],
    }

    def save():
        results.save("kernels", result, device=device, output=options.output)

    for shape, which in cases:
        failed = failures[shape, which]
        row = measure_row(shape, which, dtype, device, everyone, failed, ceiling, clock, repeats)
        row |= {"error": errors[shape, which], "failed": failed, "replayed": {}}
        result["rows"].append(row)
        shown = ", ".join(
            f"{name} {1e3 * s:.3f} ms ({row['floors'][name]:.2f})"
            for name, s in sorted(row["seconds"].items(), key=lambda item: item[1])
        )
        print(f"{_shown(shape, which)}: {shown}", flush=True)
        save()
    if device == "cuda":
        for row in result["rows"]:
            add_replays(row, dtype, device, everyone, repeats)
            save()


if __name__ == "__main__":
    main()
