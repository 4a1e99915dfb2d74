"""What the compiled kernels do in their loops: instructions, pauses, loads and stores.

python benchmarks/stalls.py                  writes lesson_code/results/stalls.json
python benchmarks/stalls.py --output FILE    writes another file

The kernels are compiled by NVRTC for an H200, for D = M = 64 without the normalizer, the one on
tensor cores for slabs of 32 and of 64 columns; no GPU is needed. From Volta on, an instruction has
16 bytes. Four of their bits say how many cycles at least must pass before the same warp may start
its next instruction (Jia et al. 2018). A row is one pass through a loop without the loops inside
it, loop 0 what lies outside of all loops: how many instructions there are, how many multiply-adds,
reads of shared memory and, on tensor cores, products of tiles among them, and the sum of the
cycles. Waiting for memory, global or shared, is not in this sum. Where the program branches,
the row follows the way of a full tile: the one with the most (and widest) accesses to memory.

"orders" are the loads (L) from global and the stores (s) to shared memory of three ways to fetch
eight tokens, as the compiler orders them, and "variants" what others would make of kernel (a): one
pass through its loop over tokens, with the loop that copies them if there is one, for one warp.
"""

import argparse
import struct
from pathlib import Path
from unittest import mock

import numpy as np

from lesson_code import results
from lesson_code.cupy import _kernels, nvrtc
from lesson_code.cupy.linear import causal_scan

GPU = _kernels.Gpu((9, 0), 132)  # an H200
OPERATIONS = {0x23: "multiply_adds", 0x84: "reads"}  # FFMA, LDS: the last 8 of 12 bits
LOAD, WRITE, STORE, JUMP, EXIT = 0x81, 0x86, 0x88, 0x47, 0x4D  # LDG, STG, STS, BRA, EXIT
PRODUCT, COPY_ASYNC, EXPONENTIAL = 0x3C, 0xAE, 0x08  # HMMA, LDGSTS, MUFU
TENSOR = {PRODUCT, 0x3B}  # and LDSM

COPY = """
        for (int i = threadIdx.x; i < 8 * 64; i += 64) {
            queries[i / 64][i % 64] = q.number(start + i / 64, i % 64);
            keys[i / 64][i % 64] = k.number(start + i / 64, i % 64);
        }
        __syncthreads();
"""
CHECKED = """
        for (int i = threadIdx.x; i < 8 * 64; i += 64) {
            bool known = start + i / 64 < N;
            queries[i / 64][i % 64] = known ? q.number(start + i / 64, i % 64) : 0.0f;
            keys[i / 64][i % 64] = known ? k.number(start + i / 64, i % 64) : 0.0f;
        }
        __syncthreads();
"""
VALUE = "is_value && t < count ? to_float(v.row(start + t)[column]) : 0.0f"
AHEAD = """    Tile<TOKENS, FEATURES, THREADS> some_queries, some_keys;
    float values[TOKENS];
    auto ask = [&](int first) {
        some_queries.ask(q, first, N, 0);
        some_keys.ask(k, first, N, 0);
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            values[t] = is_value && first + t < N ? to_float(v.row(first + t)[column]) : 0.0f;
    };
    ask(0);
"""
LOOP = "    for (int start = 0; start < N; start += TOKENS) {\n"
STORED = """        __syncthreads();
        some_queries.store(queries);
        some_keys.store(keys);
        __syncthreads();
"""
FEW = "PARTS == 1 ? 8 : 2"
NOW = "        float now[TOKENS];\n        for (int t = 0; t < TOKENS; t++) now[t] = values[t];\n"


def launched(kernel, heads=128):
    """File, macros and name of each function that a kernel launches."""
    kind = np.float16 if kernel == "tensor_core" else np.float32
    found, x = [], np.zeros((heads, 512, 64), kind)

    def note(file, macros, name, *arguments, **options):
        found.append((file, macros, name))

    with mock.patch.multiple(_kernels, run=note, gpu=lambda array: GPU):
        causal_scan(x, x, x, kernel=kernel, device="cpu")
    return found


def section(binary, name):
    """The bytes of a section of an ELF file."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<3H", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, start + i * size) for i in range(count)]
    for header in headers:
        at = headers[names][4] + header[0]
        if binary[at : binary.index(b"\0", at)].decode() == name:
            return binary[header[4] : header[4] + header[5]]
    raise ValueError(f"there is no section {name}")


class Program:
    """The instructions of a function: what each is, how long it pauses, and what may follow it."""

    special = 0  # accesses to memory that one exponential counts for, where a way is looked for

    def __init__(self, binary, name):
        words = list(struct.iter_unpack("<QQ", section(binary, f".text.{name}")))
        self.kinds = [low & 0xFF for low, _ in words]
        self.cycles = [high >> 41 & 15 for _, high in words]
        self.wide = [high >> 9 & 7 == 6 for _, high in words]  # 16 bytes at a time
        # What comes late is waited for by its number: who gives it, frees it, and must have it.
        self.gives = [high >> 46 & 7 for _, high in words]
        self.frees = [high >> 49 & 7 for _, high in words]
        self.waits = [high >> 52 & 63 for _, high in words]
        self.next = []
        for i, (low, _) in enumerate(words):
            always = low >> 12 & 15 == 7  # without a predicate
            follow = [] if self.kinds[i] in (JUMP, EXIT) and always else [i + 1]
            if self.kinds[i] == JUMP:
                units = (low >> 34) - (1 << 30 if low >> 63 else 0)
                follow.append(i + 1 + ((units << 8) | (low >> 16 & 0xFF)) // 4)
            self.next.append([j for j in follow if j < len(words)])

    def loops(self):
        """First and last instruction of every loop: only by its first can it be entered."""
        jumps = [(j, i) for i, follow in enumerate(self.next) for j in follow if j < i]
        return [(j, i) for j, i in jumps if i not in self.reached(0, j)]

    def reached(self, start, end=None):
        """What can come after `start`, each before all that follow it, loops being left at once."""
        order, seen, open_ = [], {start}, [(start, iter(self.next[start]))]
        path = {start}
        self.back = set() if end is None else {(end, start)}
        while open_:
            i, follow = open_[-1]
            for j in follow if i != end else ():
                if j in path:
                    self.back.add((i, j))
                elif j not in seen:
                    seen.add(j)
                    path.add(j)
                    open_.append((j, iter(self.next[j])))
                    break
            else:
                order.append(i)
                path.remove(i)
                open_.pop()
        return order[::-1]

    def weight(self, i, wide):
        if self.kinds[i] in {LOAD, WRITE, *OPERATIONS}:
            return int(self.wide[i] or not wide)
        if self.kinds[i] == COPY_ASYNC:  # the way of a whole tile
            return 100
        if self.kinds[i] == EXPONENTIAL:
            return self.special
        return int(self.kinds[i] in {STORE, *TENSOR})

    def path(self, start, end, wide):
        """The way from start to end with the most accesses; of several, the shortest."""
        best = {}
        for i in reversed(self.reached(start, end)):
            own = self.weight(i, wide)
            if i == end or not self.next[i] and end is None:
                best[i] = (own, -1), None
                continue
            ways = [(best[j][0], j) for j in self.next[i] if j in best and (i, j) not in self.back]
            if ways:
                (most, length), j = max(ways)
                best[i] = (own + most, length - 1), j
        way, i = [], start
        while i is not None:
            way.append(i)
            i = best[i][1]
        return way


def ways_of(program, wide):
    """For each loop on the way of a full tile its own instructions; first, those outside."""
    ways = {(0, None): program.path(0, None, wide)}
    for loop in sorted(program.loops()):
        way = program.path(*loop, wide)
        if any(set(way) < set(other) for other in ways.values()):
            ways[loop] = way
    sets = [set(way) for way in ways.values()]
    return [sorted(way.difference(*(other for other in sets if other < way))) for way in sets]


def rows_of(kernel, function, program):
    """A row for each loop on the way of a full tile, and one for what is outside of them."""
    wide = kernel == "tensor_core"
    for number, own in enumerate(ways_of(program, wide)):
        kinds = [OPERATIONS.get(program.kinds[i]) for i in own]
        row = {"kernel": kernel, "function": function, "loop": number, "instructions": len(own)}
        row |= {kind: kinds.count(kind) for kind in OPERATIONS.values()}
        if wide:
            row["products"] = sum(program.kinds[i] == PRODUCT for i in own)
        yield row | {"cycles": sum(program.cycles[i] for i in own)}


def measure(kernels):
    for kernel in kernels:
        for heads in (128, 200) if kernel == "tensor_core" else (128,):  # 200 have whole slabs
            for file, macros, name in launched(kernel, heads):
                if name == "segment_states":
                    continue
                compiled = nvrtc.compile_source("sm_90", _kernels.source(file), macros)
                slab = {"slab": macros["SLAB"]} if "SLAB" in macros else {}
                for row in rows_of(kernel, name, Program(compiled.binary, name)):
                    yield row | slab


def replaced(text, *pairs):
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"the kernel has no {old!r} any more")
        text = text.replace(old, new, 1)
    return text


def versions():
    """Kernel (a) by name: as it is, with other loops that fetch, and with other repairs."""
    ((file, _, _),) = launched("recurrent")
    text = _kernels.source(file)
    first = text.index("        Tile<TOKENS, FEATURES, THREADS> some_queries")
    last = text.index("        float output[TOKENS];")
    late = (
        (
            "            float sum = 0.0f;",
            f"            float value = {VALUE};\n            float sum = 0.0f;",
        ),
        ("* values[t]", "* value"),
        ("        if (ONES) __syncthreads();", "        __syncthreads();"),
    )
    total = "            for (int lanes = 1; lanes < PARTS;"
    sums = (
        ("            float sum = 0.0f;", "            float sums[4] = {};"),
        ("                sum += queries[t]", "                sums[j % 4] += queries[t]"),
        (total, f"            float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);\n{total}"),
    )
    ahead = text[:first] + STORED + NOW + "        ask(start + TOKENS);\n" + text[last:]
    return {
        "as it is": text,
        "printed": replaced(text[:first] + COPY + text[last:], *late),
        "checked": replaced(text[:first] + CHECKED + text[last:], *late),
        "16 tokens": replaced(text, (FEW, "16")),
        "four threads": replaced(text, (FEW, "8")),
        "four threads, 32 tokens": replaced(text, (FEW, "32")),
        "four sums": replaced(text, *sums),
        "ahead": replaced(ahead, (LOOP, AHEAD + LOOP), ("* values[t]", "* now[t]")),
    }


def order_of(program):
    """Loads and stores of the innermost loop with stores: of what fetches the tokens."""
    letters = {LOAD: "L", STORE: "s"}
    orders = [
        "".join(letters.get(kind, "") for kind in program.kinds[first : last + 1])
        for first, last in sorted(program.loops(), key=lambda loop: loop[1] - loop[0])
    ]
    return next(order for order in orders if "s" in order)


def compare():
    """Orders of the loads and stores, and the costs of the versions."""
    ((_, macros, name),) = launched("recurrent")
    orders, variants = {}, []
    for title, text in versions().items():
        parts = {"PARTS": 4 if title.startswith("four threads") else 1}
        compiled = nvrtc.compile_source("sm_90", text, macros | parts)
        program, usage = Program(compiled.binary, name), compiled.kernels[name]
        orders[title] = order_of(program)
        loops = list(rows_of("recurrent", name, program))[1:]  # the second, if any, copies
        passes = 1, 16 / orders[title].count("s")
        row = {"name": title, "registers": usage.registers, "spill_bytes": usage.spill_bytes}
        for kind in ("instructions", "reads", "cycles"):
            row[kind] = round(sum(n * r[kind] for n, r in zip(passes, loops, strict=False)))
        variants.append(row)
    kept = ("printed", "checked", "as it is")
    return {title: orders[title] for title in kept}, variants


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    choices = ["recurrent", "chunked", "tensor_core"]
    parser.add_argument("--kernels", nargs="+", default=choices, choices=choices)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = list(measure(options.kernels))
    orders, variants = compare()
    for row in (*rows, orders, *variants):
        print(*(f"{name} {value}" for name, value in row.items()))
    result = {
        "what": "instructions of the kernels' loops and the cycles between them, on an H200",
        "nvrtc": nvrtc.version(),
        "rows": rows,
        "orders": orders,
        "variants": variants,
    }
    results.save("stalls", result, output=options.output)


if __name__ == "__main__":
    main()
