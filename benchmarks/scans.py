"""The causal forms of linear attention, the chunk size, and the backward pass: time and memory.

python benchmarks/scans.py                    writes lesson_code/results/scans.json
python benchmarks/scans.py --output FILE      writes another file
python benchmarks/scans.py --device cuda      measures a GPU, for scans_cuda.json

One head of width 64, float32, unnormalized: the functions that the chapter prints, forward, and the
chunkwise form with its two backward passes. On a CPU they run in one thread, so that the forms are
compared and not how they share out their work; the clock counts the time of the processor, so that
other programs beside do not count; Python's garbage collector rests, as it searches the list of the
loop's outputs again and again; and freed memory is kept, or the forms that store much would mostly
wait for new pages. A form ends where it would store gigabytes. The chunk sizes are measured at one
length, beside the "count": the time in which products of large matrices multiply as often as
`costs.chunkwise_cost` says.
"""

import argparse
import gc
import time
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from lesson_code import costs, measure, results

WIDTH, SEED = 64, 0
LENGTHS = [2**i for i in range(6, 17)]
UNTIL = {"masked": 2**13, "cumsum": 2**12, "scan": 2**12}
CHUNK_SIZES = [2**i for i in range(3, 11)]
CHUNKED_LENGTHS = [2**12, 2**14]
TRAINED_LENGTHS = [2**10, 2**12, 2**14]


def masked(Q, K, V):
    return torch.tril(Q @ K.T) @ V


def recurrent(Q, K, V):
    S, out = torch.zeros(K.shape[1], V.shape[1]).to(V), []
    for q, k, v in zip(Q, K, V, strict=True):
        S = torch.addr(S, k, v)  # S + outer(k, v)
        out.append(q @ S)
    return torch.stack(out)


def cumsum(Q, K, V):
    S = torch.cumsum(K[:, :, None] * V[:, None, :], dim=0)
    return (Q[:, None, :] @ S)[:, 0]


def scan(Q, K, V):
    S, distance = K[:, :, None] * V[:, None, :], 1
    while distance < len(S):
        S = torch.cat([S[:distance], S[:-distance] + S[distance:]])
        distance *= 2
    return (Q[:, None, :] @ S)[:, 0]


def chunkwise(Q, K, V, L=64):
    S, out = torch.zeros(K.shape[1], V.shape[1]).to(V), []
    for q, k, v in zip(Q.split(L), K.split(L), V.split(L), strict=True):
        out.append(torch.tril(q @ k.T) @ v + q @ S)
        S = S + k.T @ v
    return torch.cat(out)


def two_levels(Q, K, V, L=64):
    q, k, v = (x.view(-1, L, x.shape[1]) for x in (Q, K, V))
    W = k.mT @ v  # all chunks at once
    S = torch.stack(list(accumulate(W[:-1], initial=torch.zeros_like(W[0]))))
    return (torch.tril(q @ k.mT) @ v + q @ S).flatten(0, 1)


def chunkwise_gradients(Q, K, V, G, L=64):
    dQ, dK, dV = (torch.zeros_like(x) for x in (Q, K, V))
    chunks = [slice(s, s + L) for s in range(0, len(Q), L)]
    S = dS = torch.zeros(K.shape[1], V.shape[1]).to(V)
    for i in chunks:  # forward in time
        dA = torch.tril(G[i] @ V[i].T)
        dQ[i] = dA @ K[i] + G[i] @ S.T
        S = S + K[i].T @ V[i]
    for i in reversed(chunks):  # backward in time
        A, dA = torch.tril(Q[i] @ K[i].T), torch.tril(G[i] @ V[i].T)
        dK[i] = dA.T @ Q[i] + V[i] @ dS.T
        dV[i] = A.T @ G[i] + K[i] @ dS
        dS = dS + Q[i].T @ G[i]
    return dQ, dK, dV


FORMS = {f.__name__: f for f in (masked, recurrent, cumsum, scan, chunkwise, two_levels)}


def measure_seconds(functions, repeats, device):
    """Like `measure.seconds`, but on a CPU in time of the processor."""
    if device != "cpu":
        return measure.seconds(functions, repeats=repeats, device=device)
    best = {}
    gc.disable()
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            start = time.thread_time()
            function()
            elapsed = time.thread_time() - start
            if round_number:
                best[name] = min(elapsed, best.get(name, elapsed))
    gc.enable()
    return best


def inputs(N, device):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(N, WIDTH, generator=generator).to(device) for _ in range(3)]


def measure_forms(lengths, device, repeats):
    """One row for each length: seconds and peak bytes of every form."""
    rows = []
    for N in lengths:
        tensors = inputs(N, device)
        functions = {
            name: partial(form, *tensors) for name, form in FORMS.items() if N <= UNTIL.get(name, N)
        }
        rounds = repeats * max(1, 2**12 // N)  # the short ones more often
        seconds = measure_seconds(functions, rounds, device)
        peaks = {n: measure.peak_bytes(f, device=device) for n, f in functions.items()}
        rows.append({"N": N, "seconds": seconds, "bytes": peaks})
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in seconds.items())
        print(f"N = {N:6d} {shown}", flush=True)
    return rows


def measure_cumsum(N, device, repeats):
    """The steps of `cumsum`, and a loop that keeps every state until it has them all."""
    Q, K, V = inputs(N, device)
    written = K[:, :, None] * V[:, None, :]

    def keep_all():
        states = [torch.zeros(WIDTH, WIDTH).to(V)]
        for k, v in zip(K, V, strict=True):
            states.append(torch.addr(states[-1], k, v))
        return torch.stack([q @ S for q, S in zip(Q, states[1:], strict=True)])

    functions = {
        "write": lambda: K[:, :, None] * V[:, None, :],
        "add": lambda: torch.cumsum(written, dim=0),
        "read": lambda: (Q[:, None, :] @ written)[:, 0],
        "loop, one state": partial(recurrent, Q, K, V),
        "loop, all states": keep_all,
    }
    seconds = measure_seconds(functions, repeats, device)
    print(f"N = {N:6d}", ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in seconds.items()), flush=True)
    return {"N": N, "seconds": seconds}


def measure_chunk_sizes(N, device, repeats):
    """One row for each chunk size: seconds of both chunkwise programs, and of their count."""
    tensors, size = inputs(N, device), 512 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device)
    functions = {
        (form, L): partial(FORMS[form], *tensors, L)
        for L in CHUNK_SIZES
        for form in ("chunkwise", "two_levels")
    }
    functions["product"] = lambda: matrix @ matrix
    seconds = measure_seconds(functions, repeats, device)
    per_operation = seconds.pop("product") / size**3
    rows = []
    for L in CHUNK_SIZES:
        count = per_operation * costs.chunkwise_cost(N, WIDTH, WIDTH, L).work
        taken = {form: seconds[form, L] for form in ("chunkwise", "two_levels")}
        rows.append({"L": L, "seconds": {**taken, "count": count}})
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in rows[-1]["seconds"].items())
        print(f"N = {N:6d} L = {L:6d} {shown}", flush=True)
    return rows


def measure_training(lengths, device, repeats):
    """One row for each length: a forward pass, and forward and backward, by autograd and by us."""
    rows = []
    for N in lengths:
        tensors = inputs(N, device)
        leaves = [x.clone().requires_grad_() for x in tensors]
        G = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        functions = {
            "forward": partial(chunkwise, *tensors),
            "autograd": lambda x=leaves, G=G: torch.autograd.grad(chunkwise(*x), x, G),
            "our own": lambda x=tensors, G=G: (chunkwise(*x), chunkwise_gradients(*x, G)),
        }
        seconds = measure_seconds(functions, repeats * max(1, 2**12 // N), device)
        rows.append({"N": N, "seconds": seconds})
        shown = ", ".join(f"{n} {1e3 * t:.2f} ms" for n, t in seconds.items())
        print(f"N = {N:6d} {shown}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    device, repeats = options.device, options.repeats
    longest = max(options.lengths)
    result = {
        "what": "causal forms of linear attention, one head, D = M = 64, float32",
        "seed": SEED,
        "rows": measure_forms(options.lengths, device, repeats),
        "cumsum": measure_cumsum(min(UNTIL["cumsum"], longest), device, repeats),
        "chunk_sizes": [
            {"N": N, "rows": measure_chunk_sizes(N, device, 3 * repeats)} for N in CHUNKED_LENGTHS
        ],
        "training": measure_training(TRAINED_LENGTHS, device, 3 * repeats),
    }
    results.save("scans", result, device=options.device, output=options.output)


if __name__ == "__main__":
    main()
