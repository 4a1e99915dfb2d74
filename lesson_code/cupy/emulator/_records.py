"""What accesses to memory cost a GPU, and which of them race: the emulator's events, sorted.

A GPU runs the 32 threads of a warp together. One instruction of a warp therefore asks for up to 32
addresses at once, and what it costs depends on how they lie: in global memory on how many lines of
128 bytes they touch, in shared memory on how many of them lie in the same of 32 banks.
"""

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
STORE, SHARED, UNWRITTEN, COPIED = 1, 2, 4, 8


# ---- Sorting and grouping. A group is a run of equal rows in sorted columns. ---------------------


def changes(*columns: np.ndarray) -> np.ndarray:
    """Where a row differs from the one before it; true for the first."""
    found = np.zeros(len(columns[0]), bool)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found


def epochs(events: np.ndarray) -> np.ndarray:
    """For each event the number of the stretch between two barriers in which it happens."""
    return np.cumsum(changes(events["block"], events["phase"])) - 1


def distinct(events: np.ndarray, *fields: str) -> np.ndarray:
    """One event for each combination of the fields' values."""
    events = events.take(np.lexsort([events[field] for field in fields]))
    return events.compress(changes(*(events[field] for field in fields)))


def units(events: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each event once for each unit of `size` bytes that it touches: its index, and the unit."""
    count = np.maximum(events["bytes"] // size, 1).astype(np.int64)
    index = np.repeat(np.arange(len(events)), count)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    return index, events["address"][index].astype(np.int64) // size + offset


def accesses(events: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which events are one access of a warp: the n-th of an instruction since the last barrier.

    For each event the numbers of its instruction and its access; for each access its first event.
    """
    kind = events["kind"] & (STORE | SHARED)
    instruction = _ranks(_key(_ranks(events["place"]), kind, events["bytes"]))
    warp = _key(epochs(events), instruction, events["thread"] // LANES)
    order, thread_begins = _sorted(_key(warp, events["thread"] % LANES))
    position = np.arange(len(events))
    n = position - np.maximum.accumulate(np.where(thread_begins, position, 0))
    warp_begins = changes(warp[order])
    # A warp makes as many accesses as the thread of it that makes most.
    count = np.maximum.reduceat(n, np.flatnonzero(warp_begins)) + 1 if len(n) else n
    access, first = np.empty(len(events), np.int64), np.empty(count.sum(), np.int64)
    access[order] = (np.cumsum(count) - count)[np.cumsum(warp_begins) - 1] + n
    first[access[::-1]] = position[::-1]  # what is written last stays
    return instruction, access, first


def _key(*columns: np.ndarray) -> np.ndarray:
    """One integer for each row, ordered as the rows are."""
    key, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        count = int(column.max(initial=0)) + 1
        key, size = key * count + column, size * count
    assert size < 2**63
    return key


def _ranks(values: np.ndarray) -> np.ndarray:
    """For each value how many distinct ones are smaller: by a table, as values lie close."""
    values = values - (values.min() if len(values) else 0)
    is_there = np.zeros(int(values.max(initial=0)) + 1, bool)
    is_there[values] = True
    return (np.cumsum(is_there) - 1)[values]


def _sorted(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order of the keys, and where in it a new one begins."""
    bits = len(key).bit_length()
    assert int(key.max(initial=0)) < 2 ** (63 - bits)
    both = np.sort(key << bits | np.arange(len(key)))  # much faster than np.argsort
    return both & (1 << bits) - 1, changes(both >> bits)


# ---- What an access costs. -----------------------------------------------------------------------


def lines_and_sectors(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lines that each access touches, how few they could be; and the same of sectors.

    Accesses are aligned to their size, so that none reaches into a second line.
    """
    address, size = _by_lane(events, access)
    address.sort(axis=1)
    size *= _distinct_in_rows(address)
    lines, sectors = (_distinct_in_rows(address // unit) for unit in (LINE, SECTOR))
    return lines, np.ceil(size / LINE), sectors, np.ceil(size / SECTOR)


def bank_passes(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Passes that each access takes through shared memory, and how few they could be.

    A pass brings one word from each bank. Accesses of 8 and 16 bytes are made by half and quarter
    warps; lanes that want the same word share it. A load of them takes half as many passes where
    all lanes have the address of their next neighbor, or all of the one two away: what a pass
    brings is then packed for twice as many (NVIDIA, developer forum, topic 77228, of capability 7).
    """
    address, size = _by_lane(events, access)
    words = np.maximum(size // WORD, 1)  # of a lane, and into so many parts a warp is cut
    is_load = np.empty(len(size), bool)
    is_load[access] = ~_is_store(events)
    neighbor = np.arange(LANES)
    paired = [(address == address[:, neighbor ^ away]).all(axis=1) for away in (1, 2)]
    parts = np.where((words > 1) & is_load & np.logical_or(*paired), words // 2, words)
    passes, ideal = (np.zeros(len(size), int) for _ in range(2))
    for kind in np.unique(words * LANES + parts):
        these = np.flatnonzero(words * LANES + parts == kind)
        of_lane, count = divmod(int(kind), LANES)
        first = address[these, :, None].astype(np.int32) // WORD
        word = np.where(first < 0, -1, first + np.arange(of_lane)).reshape(len(these) * count, -1)
        word.sort(axis=1)
        is_new = word >= 0
        is_new[:, 1:] &= word[:, 1:] != word[:, :-1]
        part, at = np.nonzero(is_new)
        cell = part * BANKS + word[part, at] % BANKS
        in_bank = np.bincount(cell, minlength=len(word) * BANKS).reshape(len(these), count, BANKS)
        most = in_bank.max(axis=2)
        passes[these], ideal[these] = most.sum(axis=1), (most > 0).sum(axis=1)
    return passes, ideal


def _by_lane(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each access the addresses of its lanes, -1 where one takes no part, and their bytes."""
    count = int(access.max(initial=-1)) + 1
    address, size = np.full((count, LANES), -1, np.int64), np.empty(count, np.int64)
    address[access, events["thread"] % LANES] = events["address"]
    size[access] = events["bytes"]
    return address, size


def _distinct_in_rows(rows: np.ndarray) -> np.ndarray:
    """How many values that are not negative there are in each row, which is sorted."""
    return (rows[:, 1:] != rows[:, :-1]).sum(axis=1) + (rows[:, 0] >= 0)


# ---- Who disturbs whom. --------------------------------------------------------------------------


def races(events: np.ndarray) -> list[np.ndarray]:
    """Pairs of events, first a store, that touch the same byte between two barriers."""
    epoch = epochs(events)
    place = events["address"].astype(np.int64) // 16  # no access reaches from one into the next
    rows = _suspects(place, epoch, events["thread"], _is_store(events))
    events, epoch = events.take(rows), epoch[rows]
    index, cell = units(events, _smallest(events))
    rows = _suspects(cell, epoch[index], events["thread"][index], _is_store(events)[index])
    index, cell = index[rows], cell[rows]
    epoch, thread = epoch[index], events["thread"][index]
    stores, place = _is_store(events)[index], events["place"][index]
    warp, warp_phase = thread // LANES, events["warp_phase"][index]
    pairs = _conflicts([cell, epoch], warp, stores, place)  # of two warps
    pairs += _conflicts([cell, epoch, warp, warp_phase], thread, stores, place)  # of one warp
    return [events.take(index[pair]) for pair in pairs]


SLOTS = 1 << 16


def _suspects(
    place: np.ndarray, epoch: np.ndarray, thread: np.ndarray, stores: np.ndarray
) -> np.ndarray:
    """Rows of places that one thread stores to and another one touches, and maybe some more.

    Places that share a slot of the table pass for one: it needs no sorting, and loses nothing.
    """
    slot = (place + 40_503 * epoch) & SLOTS - 1
    stored, several = np.zeros((2, SLOTS), bool)
    stored[slot[stores]] = True
    someone = np.zeros(SLOTS, thread.dtype)
    someone[slot] = thread
    several[slot[someone[slot] != thread]] = True
    return np.flatnonzero((stored & several)[slot])


def between_blocks(events: np.ndarray) -> tuple[int, int, list[np.ndarray]]:
    """Distinct bytes loaded, distinct bytes stored, and pairs of events of different blocks."""
    size = _smallest(events)
    index, cell = units(events, size)
    stores = _is_store(events)[index]
    loaded, stored = (int(changes(np.sort(cell[of])).sum()) * size for of in (~stores, stores))
    pairs = _conflicts([cell], events["block"][index], stores, events["place"][index])
    return loaded, stored, [events[index[pair]] for pair in pairs]


def _smallest(events: np.ndarray) -> int:
    return int(events["bytes"].min(initial=16))


def _is_store(events: np.ndarray) -> np.ndarray:
    return events["kind"] & STORE != 0


def _contested(keys: list[np.ndarray], actor: np.ndarray, stores: np.ndarray) -> list[np.ndarray]:
    """Groups of rows with equal keys in which one stores and several actors take part."""
    if not len(actor):
        return []
    order = np.lexsort(keys)
    starts = np.flatnonzero(changes(*(key[order] for key in keys)))
    ends = np.append(starts[1:], len(order))
    least, most = (of.reduceat(actor[order], starts) for of in (np.minimum, np.maximum))
    found = (least != most) & np.logical_or.reduceat(stores[order], starts)
    return [order[a:b] for a, b in zip(starts[found], ends[found], strict=True)]


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


# ---- Where it stands in the source. --------------------------------------------------------------

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
