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
    events = events[np.lexsort([events[field] for field in fields])]
    return events[changes(*(events[field] for field in fields))].copy()


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
    _, place = np.unique(events["place"], return_inverse=True)
    kind = events["kind"] & (STORE | SHARED)
    _, instruction = np.unique(_key(place, kind, events["bytes"]), return_inverse=True)
    epoch = epochs(events)
    key = _key(epoch, instruction, events["thread"])
    order = np.argsort(key, kind="stable")
    starts = changes(key[order])
    n = np.empty(len(events), np.int64)
    n[order] = np.arange(len(events)) - np.flatnonzero(starts)[np.cumsum(starts) - 1]
    key = _key(epoch, instruction, events["thread"] // LANES, n)
    _, first, access = np.unique(key, return_index=True, return_inverse=True)
    return instruction, access, first


def _key(*columns: np.ndarray) -> np.ndarray:
    """One integer for each row, ordered as the rows are."""
    key, size = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        count = int(column.max(initial=0)) + 1
        key, size = key * count + column, size * count
    assert size < 2**63
    return key


# ---- What an access costs. -----------------------------------------------------------------------


def lines_and_sectors(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lines that each access touches, how few they could be; and the same of sectors.

    Accesses are aligned to their size, so that none reaches into a second line.
    """
    order = np.lexsort((events["address"], access))
    access, address = access[order], events["address"][order]
    lines = np.bincount(access, changes(access, address // LINE)).astype(int)
    sectors = np.bincount(access, changes(access, address // SECTOR)).astype(int)
    size = np.bincount(access, changes(access, address) * events["bytes"][order])
    return lines, np.ceil(size / LINE), sectors, np.ceil(size / SECTOR)


def bank_passes(events: np.ndarray, access: np.ndarray) -> tuple[np.ndarray, ...]:
    """Passes that each access takes through shared memory, and how few they could be.

    A pass brings one word from each bank. Accesses of 8 and 16 bytes are made by half and quarter
    warps; lanes that want the same word share it. A load of them takes half as many passes where
    all lanes have the address of their next neighbor, or all of the one two away: what a pass
    brings is then packed for twice as many (NVIDIA, developer forum, topic 77228, of capability 7).
    """
    words = np.maximum(events["bytes"] // WORD, 1).astype(np.int64)
    words = np.where((words > 1) & _in_pairs(events, access), words // 2, words)
    index, word = units(events, WORD)
    part = (access * 4 + events["thread"] % LANES // (LANES // words))[index]
    order = np.lexsort((word, word % BANKS, part))
    part, word = part[order], word[order]
    new_bank = changes(part, word % BANKS)
    in_bank = np.bincount(np.cumsum(new_bank) - 1, changes(part, word)).astype(int)
    passes, ideal = (np.zeros(int(access.max() + 1) * 4, int) for _ in range(2))
    np.maximum.at(passes, part[new_bank], in_bank)
    ideal[part] = 1
    return passes.reshape(-1, 4).sum(1), ideal.reshape(-1, 4).sum(1)


def _in_pairs(events, access):
    """For each event, whether it is a load whose lanes share addresses in pairs."""
    lane, count = events["thread"] % LANES, int(access.max()) + 1
    address = np.zeros((count, LANES), np.uint64)  # 0: the lane takes no part
    address[access, lane] = events["address"]
    neighbor = np.arange(LANES)
    paired = [(address == address[:, neighbor ^ away]).all(axis=1) for away in (1, 2)]
    return np.logical_or(*paired)[access] & ~_is_store(events)


# ---- Who disturbs whom. --------------------------------------------------------------------------


def races(events: np.ndarray) -> list[np.ndarray]:
    """Pairs of events, first a store, that touch the same byte between two barriers."""
    index, cell = units(events, _smallest(events))
    epoch, thread = epochs(events)[index], events["thread"][index]
    suspects = _contested([cell, epoch], thread, _is_store(events)[index])
    if not suspects:
        return []
    rows = np.concatenate(suspects)
    index, cell, epoch, thread = index[rows], cell[rows], epoch[rows], thread[rows]
    stores, place = _is_store(events)[index], events["place"][index]
    warp, warp_phase = thread // LANES, events["warp_phase"][index]
    pairs = _conflicts([cell, epoch], warp, stores, place)  # of two warps
    pairs += _conflicts([cell, epoch, warp, warp_phase], thread, stores, place)  # of one warp
    return [events[index[pair]] for pair in pairs]


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
