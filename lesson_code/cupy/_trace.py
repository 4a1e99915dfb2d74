"""What the threads of a kernel do with memory: the emulator's events, counted.

A GPU runs the 32 threads of a warp together. One instruction of a warp therefore asks for up to 32
addresses at once, and what it costs depends on how they lie: in global memory on how many lines of
128 bytes they touch, in shared memory on how many of them lie in the same of 32 banks.
"""

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np

LANES = 32
LINE, SECTOR = 128, 32  # bytes: what the cache keeps together, and what it fetches at least
BANKS, WORD = 32, 4  # shared memory: word i lies in bank i % 32

# struct Event of cpu_trace.h
EVENT = np.dtype(
    [
        ("address", np.uint64),
        ("place", np.uint32),
        ("block", np.uint32),
        ("phase", np.uint32),
        ("warp_phase", np.uint32),
        ("thread", np.uint16),
        ("bytes", np.uint8),
        ("kind", np.uint8),
    ],
    align=True,
)
STORE, SHARED, UNWRITTEN = 1, 2, 4
_ARRAY = 44  # bits of an offset in an array; its number stands above
TAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


class Counters(ctypes.Structure):
    """struct Counters of cpu_trace.h."""

    _fields_ = [
        ("blocks", ctypes.c_longlong),
        ("barriers", ctypes.c_longlong),
        ("idle_threads", ctypes.c_longlong),
        ("thread_phases", ctypes.c_longlong),
        ("tile_products", ctypes.c_longlong),
        ("threads_in_phase", ctypes.c_int * 1024),
        ("idle_in_phase", ctypes.c_int * 1024),
    ]


class Range(ctypes.Structure):
    """struct Range of cpu_trace.h."""

    _fields_ = [("start", ctypes.c_uint64), ("stop", ctypes.c_uint64)]


class RaceError(RuntimeError):
    """Threads whose order is left to chance touch the same memory."""


@dataclasses.dataclass
class Counts:
    """What the launches of one kernel did.

    Attributes
    ----------
    launches, blocks : int
        How many there were.
    global_load_bytes, global_store_bytes : int
        Bytes that threads loaded and stored, each thread's counted.
    distinct_load_bytes, distinct_store_bytes : int
        The same with every byte of an array counted once in a launch: what a perfect cache moves.
    global_accesses : int
        Instructions of a warp that touch global memory.
    global_lines, global_sectors : int
        Lines of 128 bytes and sectors of 32 bytes that those touch, summed over them.
    ideal_lines, ideal_sectors : int
        How few they could be if each access's bytes lay side by side.
    shared_accesses : int
        Instructions of a warp that touch shared memory.
    shared_passes, ideal_passes : int
        How often shared memory is asked for them, and how often without bank conflicts.
    barriers : int
        ``__syncthreads()``, counted once a block.
    idle_threads, thread_phases : int
        Threads that touched no memory and multiplied no tiles between two barriers, and all
        threads, summed over the phases between barriers.
    tile_products : int
        Products of matrix tiles, 16x16 by 16x8, each of one warp.
    """

    launches: int = 0
    blocks: int = 0
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    distinct_load_bytes: int = 0
    distinct_store_bytes: int = 0
    global_accesses: int = 0
    global_lines: int = 0
    global_sectors: int = 0
    ideal_lines: int = 0
    ideal_sectors: int = 0
    shared_accesses: int = 0
    shared_passes: int = 0
    ideal_passes: int = 0
    barriers: int = 0
    idle_threads: int = 0
    thread_phases: int = 0
    tile_products: int = 0

    @property
    def bank_conflicts(self) -> int:
        """Passes through shared memory beyond those that no layout avoids."""
        return self.shared_passes - self.ideal_passes

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the tile products."""
        return self.tile_products * 16 * 16 * 8

    @property
    def idle_share(self) -> float:
        """Share of threads that have nothing to do, averaged over the phases between barriers."""
        return self.idle_threads / self.thread_phases if self.thread_phases else 0.0

    @property
    def line_efficiency(self) -> float:
        """Ideal over actual lines, which is 1 when every access is coalesced."""
        return self.ideal_lines / self.global_lines if self.global_lines else 1.0

    @property
    def sector_efficiency(self) -> float:
        """Ideal over actual sectors."""
        return self.ideal_sectors / self.global_sectors if self.global_sectors else 1.0


@dataclasses.dataclass
class Access:
    """What one instruction that touches memory did, summed over warps and launches.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    line : int or None
        Line of the .cu file; None where no tool tells it.
    space, kind : str
        "global" or "shared"; "load" or "store".
    bytes : int
        Bytes of one lane.
    accesses, lanes : int
        How often a warp made it, and how many lanes did in all.
    passes, ideal_passes : int
        In global memory the lines of 128 bytes that were touched, in shared memory the passes
        through it; and how few they could have been.
    """

    kernel: str
    line: int | None
    space: str
    kind: str
    bytes: int
    accesses: int = 0
    lanes: int = 0
    passes: int = 0
    ideal_passes: int = 0


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses to the same byte that nothing orders, the first of them a store.

    Attributes
    ----------
    kernel, space : str
        Name of the kernel; "global" or "shared".
    lines : tuple of int or None
        Lines of the two accesses.
    kinds : tuple of str
        "store" and "load", or "store" twice.
    threads : tuple of int
        One pair of threads that does it.
    blocks : tuple of int
        Their blocks, numbered in the order of the launch.
    """

    kernel: str
    space: str
    lines: tuple[int | None, int | None]
    kinds: tuple[str, str]
    threads: tuple[int, int]
    blocks: tuple[int, int]

    def __str__(self) -> str:
        first, second = (
            f"thread {thread}{f' of block {block}' if across else ''} {kind}s in line {line}"
            for thread, block, kind, line, across in zip(
                self.threads,
                self.blocks,
                self.kinds,
                self.lines,
                [self.blocks[0] != self.blocks[1]] * 2,
                strict=True,
            )
        )
        missing = (
            "blocks of one launch run in any order"
            if self.blocks[0] != self.blocks[1]
            else "no __syncthreads() orders the two"
            if self.threads[0] // LANES != self.threads[1] // LANES
            else "no __syncwarp() orders the two"
        )
        return (
            f"kernel {self.kernel}: {first} and {second}, the same {self.space} memory; {missing}."
        )


class Trace:
    """What the kernels launched inside ``with trace() as ...`` did.

    Attributes
    ----------
    kernels : dict
        Counts by name of the kernel, summed over its launches.
    accesses : list of Access
        The same for each instruction that touches memory, in the order of the lines.
    races : list of Race
        Accesses whose order is left to chance, one for each pair of lines.
    unwritten : list of tuple
        (kernel, line, thread) of loads from shared memory where nobody had stored anything yet.
    idle : dict
        For each phase between barriers (the first 1,024) the share of threads that had nothing to
        do, in the kernel's last launch.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, Counts] = {}
        self.races: list[Race] = []
        self.unwritten: list[tuple[str, int | None, int]] = []
        self.idle: dict[str, list[float]] = {}
        self._accesses: dict[tuple, Access] = {}
        self._warps: dict[str, tuple[np.ndarray, dict, bool]] = {}

    @property
    def accesses(self) -> list[Access]:
        return sorted(self._accesses.values(), key=lambda one: (one.kernel, one.line or 0))

    def check(self) -> None:
        """Raise RaceError if the result of a launch depended on the order of its threads."""
        for race in self.races:
            raise RaceError(str(race))
        for kernel, line, thread in self.unwritten:
            raise RaceError(
                f"kernel {kernel}: thread {thread} loads in line {line} from shared memory "
                "where no thread has stored anything yet."
            )

    def lanes(
        self,
        kernel: str,
        line: int,
        *,
        space: str | None = None,
        kind: str | None = None,
        execution: int = 0,
    ) -> np.ndarray:
        """Where the lanes of one warp read or write: warp 0 of the block that ran first.

        Parameters
        ----------
        kernel : str
            Name of the kernel.
        line : int
            A line of the .cu file.
        space, kind : str, optional
            "global" or "shared", "load" or "store", where a line does several of them.
        execution : int
            Which of the accesses: 0 is the first.

        Returns
        -------
        array, shape (32,)
            Bytes from the start of the array, or of shared memory, or (where `launch` was not told
            the arrays) from the lowest of these addresses; -1 for a lane without access.

        Raises
        ------
        ValueError
            If the warp made no such access.
        """
        if kernel not in self._warps:
            raise ValueError(f"no kernel {kernel!r} was traced.")
        events, lines, knows_arrays = self._warps[kernel]
        wanted = np.array([lines[int(place)] == line for place in events["place"]], bool)
        for name, word, bit in ((space, "shared", SHARED), (kind, "store", STORE)):
            if name is not None:
                wanted &= (events["kind"] & bit != 0) == (name == word)
        _, access, first = _accesses(events := events[wanted])
        if not 0 <= execution < len(first):
            raise ValueError(
                f"warp 0 of kernel {kernel} made {len(first)} such accesses in line {line}, "
                f"there is no number {execution}."
            )
        chosen = events[access == np.argsort(first)[execution]]
        address = (chosen["address"] & np.uint64((1 << _ARRAY) - 1)).astype(np.int64)
        offsets = np.full(LANES, -1)
        is_offset = knows_arrays or chosen["kind"][0] & SHARED
        offsets[chosen["thread"]] = address if is_offset else address - address.min()
        return offsets


class Launch:
    """Takes the events of one launch, piece by piece."""

    def __init__(self, trace: Trace, kernel: str, extents: list[tuple[int, int, int]]) -> None:
        """Extents of the arrays: first byte, the one after the last, start of the whole memory."""
        self.trace, self.kernel = trace, kernel
        self.ranges = (Range * len(extents))(*(Range(*extent[:2]) for extent in extents))
        self.starts = np.array(sorted({start for _, _, start in extents}), np.int64)
        self.callback = TAKE(self._take)
        self.error: BaseException | None = None
        self.counts = Counts(launches=1)
        self.sums: dict[tuple, np.ndarray] = {}  # by place, kind and bytes of an instruction
        self.pairs: list[np.ndarray] = []  # of racing events
        self.touched: list[np.ndarray] = []  # global memory, for what blocks share
        self.unwritten: list[np.ndarray] = []
        self.warp: np.ndarray | None = None

    def _take(self, pointer: int | None, count: int) -> None:
        try:
            if pointer and count:
                memory = (ctypes.c_char * (count * EVENT.itemsize)).from_address(pointer)
                self._count(np.frombuffer(memoryview(memory), EVENT))
        except BaseException as error:  # it cannot pass through the code that called
            self.error = self.error or error

    def _count(self, events: np.ndarray) -> None:
        events = self._relative(events)
        if self.warp is None:
            first = (events["block"] == 0) & (events["thread"] < LANES)
            self.warp = events[first][: 1 << 16].copy()
        shared = events["kind"] & SHARED != 0
        self._count_accesses(events[~shared], _lines)
        self._count_accesses(events[shared], _bank_passes)
        epoch = _numbered(_changes(events["block"], events["phase"]))
        self.pairs += _races(events, epoch)
        self.unwritten.append(_distinct(events[events["kind"] & UNWRITTEN != 0], "place"))
        self.touched.append(_distinct(events[~shared], "address", "block", "place", "kind"))

    def _relative(self, events: np.ndarray) -> np.ndarray:
        """Addresses as if each array began where a line begins, as a GPU's do: array, offset."""
        events = events.copy()
        if len(self.starts):
            address = events["address"].astype(np.int64)
            array = np.searchsorted(self.starts, address, side="right") - 1
            relative = (array + 1 << _ARRAY) + address - self.starts[array]
            events["address"] = np.where(events["kind"] & SHARED, address, relative)
        return events

    def _count_accesses(self, events: np.ndarray, passes_of) -> None:
        if not len(events):
            return
        instruction, access, first = _accesses(events)
        counts = [np.ones(len(first), int), np.bincount(access), *passes_of(events, access)]
        # Summed over the accesses of each instruction.
        sums = np.stack([np.bincount(instruction[first], each) for each in counts]).astype(int)
        _, example = np.unique(instruction, return_index=True)
        for column, event in zip(sums.T, events[example], strict=True):
            key = int(event["place"]), int(event["kind"]) & (STORE | SHARED), int(event["bytes"])
            self.sums[key] = self.sums.get(key, 0) + column

    def finish(self, counters: Counters, line_of) -> None:
        """Add everything to the trace. ``line_of`` tells the lines of a list of places."""
        if self.error:
            raise self.error
        counts = self.counts
        for name in ("blocks", "barriers", "idle_threads", "thread_phases", "tile_products"):
            setattr(counts, name, getattr(counters, name))
        touched = np.concatenate([*self.touched, np.empty(0, EVENT)])
        counts.distinct_load_bytes, counts.distinct_store_bytes, pairs = _between_blocks(touched)
        pairs += self.pairs
        unwritten = np.concatenate([*self.unwritten, np.empty(0, EVENT)])
        places = {place for place, _, _ in self.sums}
        lines = line_of(sorted(places))
        for (place, kind, size), sums in sorted(self.sums.items()):
            self._add(lines[place], kind, size, *(int(x) for x in sums))
        for one, other in pairs:
            race = Race(
                self.kernel,
                "shared" if one["kind"] & SHARED else "global",
                (lines[int(one["place"])], lines[int(other["place"])]),
                (_kind_of(one), _kind_of(other)),
                (int(one["thread"]), int(other["thread"])),
                (int(one["block"]), int(other["block"])),
            )
            same = (race.kernel, race.space, race.lines, race.kinds)
            if same not in {(r.kernel, r.space, r.lines, r.kinds) for r in self.trace.races}:
                self.trace.races.append(race)
        for event in unwritten:
            read = (self.kernel, lines[int(event["place"])], int(event["thread"]))
            if read[:2] not in {one[:2] for one in self.trace.unwritten}:
                self.trace.unwritten.append(read)
        shares = [
            idle / threads
            for idle, threads in zip(counters.idle_in_phase, counters.threads_in_phase, strict=True)
            if threads
        ]
        self.trace.idle[self.kernel] = shares
        total = self.trace.kernels.setdefault(self.kernel, Counts())
        for field in dataclasses.fields(Counts):
            setattr(total, field.name, getattr(total, field.name) + getattr(counts, field.name))
        if self.warp is not None and self.kernel not in self.trace._warps:
            self.trace._warps[self.kernel] = self.warp, lines, bool(len(self.starts))

    def _add(self, line, kind, size, accesses, lanes, passes, ideal, sectors=0, ideal_sectors=0):
        counts = self.counts
        space = "shared" if kind & SHARED else "global"
        way = "store" if kind & STORE else "load"
        if space == "shared":
            counts.shared_accesses += accesses
            counts.shared_passes += passes
            counts.ideal_passes += ideal
        else:
            counts.global_accesses += accesses
            counts.global_lines += passes
            counts.ideal_lines += ideal
            counts.global_sectors += sectors
            counts.ideal_sectors += ideal_sectors
            name = f"global_{way}_bytes"
            setattr(counts, name, getattr(counts, name) + lanes * size)
        key = (self.kernel, line, space, way, size)
        access = self.trace._accesses.setdefault(key, Access(*key))
        access.accesses += accesses
        access.lanes += lanes
        access.passes += passes
        access.ideal_passes += ideal


# ---- Sorting and grouping. A group is a run of equal rows in sorted columns. ---------------------


def _changes(*columns: np.ndarray) -> np.ndarray:
    """Where a row differs from the one before it; true for the first."""
    changes = np.zeros(len(columns[0]), bool)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return changes


def _numbered(changes: np.ndarray) -> np.ndarray:
    return np.cumsum(changes) - 1


def _key(*columns: np.ndarray) -> np.ndarray:
    """One integer for each row, ordered as the rows are."""
    key, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        count = int(column.max(initial=0)) + 1
        key, size = key * count + column, size * count
    assert size < 2**63
    return key


def _distinct(events: np.ndarray, *fields: str) -> np.ndarray:
    """One event for each combination of the fields' values."""
    events = events[np.lexsort([events[field] for field in fields])]
    return events[_changes(*(events[field] for field in fields))].copy() if len(events) else events


def _accesses(events: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which events are one access of a warp: the n-th of an instruction since the last barrier.

    For each event the numbers of its instruction and its access; for each access its first event.
    """
    _, place = np.unique(events["place"], return_inverse=True)
    kind = events["kind"] & (STORE | SHARED)
    _, instruction = np.unique(_key(place, kind, events["bytes"]), return_inverse=True)
    epoch = _numbered(_changes(events["block"], events["phase"]))
    key = _key(epoch, instruction, events["thread"])
    order = np.argsort(key, kind="stable")
    changes = _changes(key[order])
    n = np.empty(len(events), np.int64)
    n[order] = np.arange(len(events)) - np.flatnonzero(changes)[_numbered(changes)]
    _, first, access = np.unique(
        _key(epoch, instruction, events["thread"] // LANES, n),
        return_index=True,
        return_inverse=True,
    )
    return instruction, access, first


# ---- What an access costs. -----------------------------------------------------------------------


def _lines(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lines and sectors that each access touches, and how few they could be.

    Accesses are aligned to their size, so that none reaches into a second line.
    """
    order = np.lexsort((events["address"], access))
    access, address = access[order], events["address"][order]
    lines = np.bincount(access, _changes(access, address // LINE)).astype(int)
    sectors = np.bincount(access, _changes(access, address // SECTOR)).astype(int)
    distinct = np.bincount(access, _changes(access, address) * events["bytes"][order])
    return lines, np.ceil(distinct / LINE), sectors, np.ceil(distinct / SECTOR)


def _bank_passes(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Passes that each access takes through shared memory, and how few they could be.

    A pass brings one word from each bank. Accesses of 8 and 16 bytes are made by half and quarter
    warps; lanes that want the same word share it.
    """
    words = np.maximum(events["bytes"] // WORD, 1).astype(np.int64)
    part = access * 4 + events["thread"] % LANES // (LANES // words)
    index = np.repeat(np.arange(len(events)), words)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(words) - words, words)
    part, word = part[index], events["address"][index].astype(np.int64) // WORD + offset
    order = np.lexsort((word, word % BANKS, part))
    part, word = part[order], word[order]
    new_bank = _changes(part, word % BANKS)
    distinct = np.bincount(_numbered(new_bank), _changes(part, word)).astype(int)
    passes, ideal = (np.zeros(int(access.max() + 1) * 4, int) for _ in range(2))
    np.maximum.at(passes, part[new_bank], distinct)
    ideal[part] = 1
    return passes.reshape(-1, 4).sum(1), ideal.reshape(-1, 4).sum(1)


# ---- Who disturbs whom. --------------------------------------------------------------------------


def _cells(events: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Each event once for each of the small cells that it touches: indices, cells, bytes a cell."""
    size = int(events["bytes"].min(initial=16))
    cells = (events["bytes"] // size).astype(np.int64)
    index = np.repeat(np.arange(len(events)), cells)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(cells) - cells, cells)
    return index, events["address"][index].astype(np.int64) // size + offset, size


def _contested(keys: list[np.ndarray], actor: np.ndarray, stores: np.ndarray) -> list[np.ndarray]:
    """Groups of rows with equal keys in which one stores and several actors take part."""
    if not len(actor):
        return []
    order = np.lexsort(keys)
    starts = np.flatnonzero(_changes(*(key[order] for key in keys)))
    ends = np.append(starts[1:], len(order))
    least, most = (of.reduceat(actor[order], starts) for of in (np.minimum, np.maximum))
    found = (least != most) & np.logical_or.reduceat(stores[order], starts)
    return [order[a:b] for a, b in zip(starts[found], ends[found], strict=True)]


def _kind_of(event: np.void) -> str:
    return "store" if event["kind"] & STORE else "load"


def _conflicts(
    keys: list[np.ndarray], actor: np.ndarray, stores: np.ndarray, place: np.ndarray
) -> list[list[int]]:
    """Pairs of rows in one group, of different actors, the first a store; one for two places."""
    pairs: dict[tuple, list[int]] = {}
    for rows in _contested(keys, actor, stores):
        store = rows[np.argmax(stores[rows])]
        other = rows[np.argmax(actor[rows] != actor[store])]
        pairs.setdefault((place[store], place[other]), [store, other])
    return list(pairs.values())


def _races(events: np.ndarray, epoch: np.ndarray) -> list[np.ndarray]:
    """Pairs of events, first a store, that touch the same byte between two barriers."""
    index, cell, _ = _cells(events)
    thread, stores = events["thread"][index], events["kind"][index] & STORE != 0
    suspects = _contested([cell, epoch[index]], thread, stores)
    if not suspects:
        return []
    rows = np.concatenate(suspects)
    index, cell, thread, stores = index[rows], cell[rows], thread[rows], stores[rows]
    warp, place = thread // LANES, events["place"][index]
    keys = [cell, epoch[index]]
    pairs = _conflicts(keys, warp, stores, place)  # of two warps
    keys += [warp, events["warp_phase"][index]]
    pairs += _conflicts(keys, thread, stores, place)  # of one warp
    return [events[index[pair]] for pair in pairs]


def _between_blocks(touched: np.ndarray) -> tuple[int, int, list[np.ndarray]]:
    """Distinct bytes loaded, distinct bytes stored, and pairs of events of different blocks."""
    index, cell, size = _cells(touched)
    stores = touched["kind"][index] & STORE != 0
    loaded, stored = (int(_changes(np.sort(cell[of])).sum()) * size for of in (~stores, stores))
    pairs = _conflicts([cell], touched["block"][index], stores, touched["place"][index])
    return loaded, stored, [touched[index[pair]] for pair in pairs]


_known_lines: dict[tuple[Path, int], int | None] = {}


def line_numbers(library: Path, name: str, places: list[int]) -> dict[int, int | None]:
    """Lines of the file ``name`` in which instructions of a library stand, as addr2line tells."""
    new = [place for place in places if (library, place) not in _known_lines]
    program = shutil.which("addr2line")
    if program is not None and new:
        # A return address is behind the call: one byte before it is the call itself.
        addresses = [hex(place - 1) for place in new]
        command = [program, "--addresses", "--inlines", f"--exe={library}", *addresses]
        result = subprocess.run(command, capture_output=True, text=True)
        place = 0  # the first line tells it
        for text in result.stdout.splitlines():
            if text.startswith("0x"):
                place = int(text, 16) + 1
            else:  # the innermost function first; those of headers are passed over
                file, number = text.split(" ")[0].rsplit(":", 1)
                if Path(file).name == name and number.isdigit():
                    _known_lines.setdefault((library, place), int(number))
    return {place: _known_lines.setdefault((library, place), None) for place in places}
