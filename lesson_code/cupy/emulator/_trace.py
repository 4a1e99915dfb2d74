"""What the kernels of a launch did: the counts and races that a reader sees."""

import ctypes
import dataclasses

import numpy as np

from lesson_code.cupy.emulator import _records
from lesson_code.cupy.emulator._records import COPIED, EVENT, LANES, SHARED, STORE, UNWRITTEN

_ARRAY = 44  # bits of an offset in an array; its number stands above


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
        across = self.blocks[0] != self.blocks[1]
        first, second = (
            f"thread {thread}{f' of block {block}' if across else ''} {kind}s in line {line}"
            for thread, block, kind, line in zip(
                self.threads, self.blocks, self.kinds, self.lines, strict=True
            )
        )
        warps = {thread // LANES for thread in self.threads}
        missing = "no __syncwarp() orders the two"
        if across:
            missing = "blocks of one launch run in any order"
        elif len(warps) == 2:
            missing = "no __syncthreads() orders the two"
        return (
            f"kernel {self.kernel}: {first} and {second}, the same {self.space} memory; {missing}."
        )

    def _same(self) -> tuple:
        """What two races share that are told as one."""
        return self.kernel, self.space, self.lines, self.kinds


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
        """
        if kernel not in self._warps:
            raise ValueError(f"no kernel {kernel!r} was traced.")
        events, lines, knows_arrays = self._warps[kernel]
        wanted = np.array([lines[int(place)] == line for place in events["place"]], bool)
        for name, word, bit in ((space, "shared", SHARED), (kind, "store", STORE)):
            if name is not None:
                wanted &= (events["kind"] & bit != 0) == (name == word)
        _, access, first = _records.accesses(events := events[wanted])
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


# ---- Filling a trace. ----------------------------------------------------------------------------


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


TAKE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)


class Launch:
    """Takes the events of one launch, piece by piece."""

    def __init__(self, trace: Trace, kernel: str, extents: list[tuple[int, int, int]]) -> None:
        """Extents of the arrays: first byte, the one after the last, start of the whole memory."""
        self.trace, self.kernel = trace, kernel
        self.ranges = (Range * len(extents))(*(Range(*extent[:2]) for extent in extents))
        self.starts = np.array(sorted({start for _, _, start in extents}), np.int64)
        self.callback = TAKE(self._take)
        self.error: BaseException | None = None
        self.sums: dict[tuple, np.ndarray] = {}  # by place, kind and bytes of an instruction
        self.pairs: list[np.ndarray] = []  # of racing events
        self.touched = [np.empty(0, EVENT)]  # global memory, for what blocks share
        self.unwritten = [np.empty(0, EVENT)]
        self.warp = [np.empty(0, EVENT)]  # of block 0, for `Trace.lanes`

    def _take(self, pointer: int | None, count: int) -> None:
        try:
            if pointer and count:
                memory = (ctypes.c_char * (count * EVENT.itemsize)).from_address(pointer)
                events = np.frombuffer(memoryview(memory), EVENT)
                self.pairs += _records.races(events)
                self._count(self._relative(events))
        except BaseException as error:  # it cannot pass through the code that called
            self.error = self.error or error

    def _relative(self, events: np.ndarray) -> np.ndarray:
        """Addresses as if each array began where a line begins, as a GPU's do: array, offset."""
        if len(self.starts):
            address = events["address"].astype(np.int64)
            array = np.searchsorted(self.starts, address, side="right") - 1
            relative = (array + 1 << _ARRAY) + address - self.starts[array]
            events["address"] = np.where(events["kind"] & SHARED, address, relative)
        return events

    def _count(self, events: np.ndarray) -> None:
        if events["block"][0] == 0 and sum(map(len, self.warp)) < 1 << 16:
            self.warp.append(events.compress((events["block"] == 0) & (events["thread"] < LANES)))
        shared, copied = (events["kind"] & bit != 0 for bit in (SHARED, COPIED))
        self._count_accesses(events.compress(~shared), _records.lines_and_sectors)
        self._count_accesses(events.compress(shared & ~copied), _records.bank_passes)
        unwritten = events.compress(events["kind"] & UNWRITTEN != 0)
        self.unwritten.append(_records.distinct(unwritten, "place"))
        touched = _records.distinct(events.compress(~shared), "address", "block", "place", "kind")
        self.touched.append(touched)

    def _count_accesses(self, events: np.ndarray, passes_of) -> None:
        if not len(events):
            return
        instruction, access, first = _records.accesses(events)
        counts = [np.ones(len(first), int), np.bincount(access), *passes_of(events, access)]
        # Summed over the accesses of each instruction.
        sums = np.stack([np.bincount(instruction[first], each) for each in counts]).astype(int)
        _, example = np.unique(instruction, return_index=True)
        for column, event in zip(sums.T, events[example], strict=True):
            key = int(event["place"]), int(event["kind"]) & (STORE | SHARED), int(event["bytes"])
            self.sums[key] = self.sums.get(key, 0) + column

    def finish(self, counters: Counters, line_numbers) -> None:
        """Add everything to the trace. ``line_numbers`` tells the lines of a list of places."""
        if self.error:
            raise self.error
        names = ("blocks", "barriers", "idle_threads", "thread_phases", "tile_products")
        trace, counts = self.trace, Counts(1, **{name: getattr(counters, name) for name in names})
        trace.idle[self.kernel] = [
            idle / threads
            for idle, threads in zip(counters.idle_in_phase, counters.threads_in_phase, strict=True)
            if threads
        ]
        lines = line_numbers(sorted({place for place, _, _ in self.sums}))
        for (place, kind, size), sums in sorted(self.sums.items()):
            self._add(counts, lines[place], kind, size, *map(int, sums))
        touched = np.concatenate(self.touched)
        loaded, stored, pairs = _records.between_blocks(touched)
        counts.distinct_load_bytes, counts.distinct_store_bytes = loaded, stored
        for pair in pairs + self.pairs:
            race = self._race(pair, lines)
            if race._same() not in {other._same() for other in trace.races}:
                trace.races.append(race)
        for event in np.concatenate(self.unwritten):
            read = (self.kernel, lines[int(event["place"])], int(event["thread"]))
            if read[:2] not in {other[:2] for other in trace.unwritten}:
                trace.unwritten.append(read)
        _increase(trace.kernels.setdefault(self.kernel, Counts()), dataclasses.asdict(counts))
        warp = np.concatenate(self.warp)[: 1 << 16]
        if len(warp):
            trace._warps.setdefault(self.kernel, (warp, lines, bool(len(self.starts))))

    def _race(self, pair: np.ndarray, lines: dict) -> Race:
        one, other = (
            (
                lines[int(event["place"])],
                "store" if event["kind"] & STORE else "load",
                int(event["thread"]),
                int(event["block"]),
            )
            for event in pair
        )
        space = "shared" if pair[0]["kind"] & SHARED else "global"
        return Race(self.kernel, space, *zip(one, other, strict=True))

    def _add(self, counts, line, kind, size, accesses, lanes, passes, ideal, *sectors) -> None:
        """Count one instruction; `sectors` are there, and how few they could be, if global."""
        space = "shared" if kind & SHARED else "global"
        way = "store" if kind & STORE else "load"
        if space == "shared":
            counted = {"shared_accesses": accesses, "shared_passes": passes, "ideal_passes": ideal}
        else:
            counted = {"global_accesses": accesses, "global_lines": passes, "ideal_lines": ideal}
            counted |= zip(("global_sectors", "ideal_sectors"), sectors, strict=True)
            counted[f"global_{way}_bytes"] = lanes * size
        _increase(counts, counted)
        key = (self.kernel, line, space, way, size)
        access = self.trace._accesses.setdefault(key, Access(*key))
        counted = {"accesses": accesses, "lanes": lanes, "passes": passes, "ideal_passes": ideal}
        _increase(access, counted)


def _increase(counts: Counts | Access, by: dict[str, int]) -> None:
    for name, number in by.items():
        setattr(counts, name, getattr(counts, name) + number)
