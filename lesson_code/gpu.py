r"""How long a CUDA kernel takes on a GPU that need not be there, and what it waits for.

A kernel is a :class:`Launch`: blocks, what a block takes of a multiprocessor, what it moves and
does, and the longest chain of steps that must follow one another. They can be written down by hand,
or counted by the emulator and scaled up with :func:`launch_of`. :func:`predict` divides each by the
rate of a :class:`GPU`, and returns the terms by their names; :eq:`eq-roofline` are the first two:

.. math:: t \ge \max\left(\frac{b}{\beta},\; \max_i \frac{n_i}{\pi_i},\;
   \text{waves} \cdot (r\,\lambda + \text{cycles})\right)

The rates are those of data sheets. Two numbers are on no data sheet, and others have measured them:
the latency of an idle memory, and the cycles in which a block begins and ends, which are those of a
V100. `benchmarks/predictions.py` holds the terms against published times.
"""

import dataclasses
import math
from typing import NamedTuple, Protocol

from lesson_code._arguments import check_integer, check_number

__all__ = ["GPU", "GPUS", "Launch", "Prediction", "launch_of", "predict"]

LANES = 32
REGISTERS = 65_536  # of a multiprocessor, from Volta to Blackwell
ISSUED = 4  # instructions of a warp that a multiprocessor begins in a cycle
SPECIAL = 16  # exponentials, roots and the like of a multiprocessor in a cycle
START = 350  # cycles of a block beside all that it does; see the group "short blocks"


class GPU(NamedTuple):
    """What a GPU can do at best, and what its multiprocessors hold.

    Parameters
    ----------
    bandwidth : float
        Bytes a second of the GPU's memory.
    multiply_adds : float
        Multiply-adds a second in float32. Data sheets count each as two operations.
    tensor : float or None
        Multiply-adds a second of the tensor cores, of 16-bit numbers that are not sparse.
    latency : float
        Seconds of one trip to the GPU's memory while nobody else uses it.
    processors, lanes : int
        Multiprocessors of the GPU, and units of one of them that make a float32 multiply-add.
    threads, blocks, shared_bytes : int
        The most that a multiprocessor holds at a time.
    reserved_bytes : int
        Of shared memory, that the driver takes for each block.
    """

    bandwidth: float
    multiply_adds: float
    tensor: float | None
    latency: float
    processors: int
    lanes: int
    threads: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int

    @property
    def clock(self) -> float:
        """Cycles a second, as the rate of multiply-adds implies it."""
        return self.multiply_adds / (self.processors * self.lanes)


# Rates: NVIDIA's white papers and data sheets. Limits of a multiprocessor: its CUDA C++ Programming
# Guide, compute capabilities 7.0, 7.5, 8.0, 8.6, 9.0 and 10.0.
_VOLTA, _TURING = (64, 2048, 32, 96 * 1024, 0), (64, 1024, 16, 64 * 1024, 0)
_A100, _GA102 = (64, 2048, 32, 164 * 1024, 1024), (128, 1536, 16, 100 * 1024, 1024)
_HOPPER = (128, 2048, 32, 228 * 1024, 1024)

# Latencies: cycles at a clock, from github.com/te42kyfo/gpu-benches, cuda-latency and gpu-latency.
# Kin stand in where there is none: V100 for T4, A100 for A6000, H100 PCIe for the later ones.
_V100_TRIP, _A100_TRIP, _H100_TRIP = 436 / 1.38e9, 574 / 1.41e9, 655 / 1.755e9

GPUS = {
    "V100": GPU(0.9e12, 14e12 / 2, None, _V100_TRIP, 80, *_VOLTA),
    "T4": GPU(0.32e12, 8.1e12 / 2, 65e12 / 2, _V100_TRIP, 40, *_TURING),
    "A100": GPU(1.555e12, 19.5e12 / 2, 312e12 / 2, _A100_TRIP, 108, *_A100),
    "A100 80GB": GPU(2.039e12, 19.5e12 / 2, 312e12 / 2, _A100_TRIP, 108, *_A100),
    "A6000": GPU(0.768e12, 38.7e12 / 2, None, _A100_TRIP, 84, *_GA102),
    "H100 PCIe": GPU(2e12, 51e12 / 2, 756e12 / 2, _H100_TRIP, 114, *_HOPPER),
    "H100": GPU(3.35e12, 67e12 / 2, 989e12 / 2, _H100_TRIP, 132, *_HOPPER),
    "H200": GPU(4.8e12, 67e12 / 2, 989e12 / 2, _H100_TRIP, 132, *_HOPPER),
    "B200": GPU(7.7e12, 75e12 / 2, 2250e12 / 2, _H100_TRIP, 148, *_HOPPER),
}
"""GPUs by name, the V100 as a PCIe card, A100, H100, H200 and B200 as modules (SXM).

:meta hide-value:
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Parameters
    ----------
    blocks, threads : int
        How many blocks, of how many threads.
    bytes : float
        That the launch moves from and to the GPU's memory.
    multiply_adds, special, tensor : float
        Operations of all threads of the launch: multiply-adds, exponentials and the like, and
        multiply-adds of the tensor cores.
    instructions : float
        That all warps of the launch begin.
    passes : float
        Through the cache and the shared memory of a multiprocessor, each of 128 bytes at most: one
        for each line that an instruction of a warp touches, or for each bank conflict.
    trips, cycles : float
        Of one block that is alone: trips to the GPU's memory that must follow one another, and
        cycles that it takes between them.
    registers, shared_bytes : int
        Registers of a thread and shared memory of a block.

    Raises
    ------
    TypeError
        If a number is none, or one that counts things is not an integer.
    ValueError
        If it is negative; blocks, threads and registers must be 1 at least, and registers 255 at
        most.
    """

    blocks: int
    threads: int
    bytes: float
    multiply_adds: float = 0
    special: float = 0
    tensor: float = 0
    instructions: float = 0
    passes: float = 0
    trips: float = 1
    cycles: float = 0
    registers: int = 32
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        least = {"blocks": 1, "threads": 1, "registers": 1, "shared_bytes": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in least:
                value = check_integer(field.name, value, least[field.name])
            else:
                value = _not_negative(field.name, value)
            object.__setattr__(self, field.name, value)
        for name, most in (("threads", 1024), ("registers", 255)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}.")

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // LANES)


class Prediction(NamedTuple):
    """Seconds that each reason to wait takes alone, and what they follow from.

    Parameters
    ----------
    bytes : float
        At the bandwidth of the data sheet.
    multiply_adds, special, tensor, instructions, passes : float
        Of the multiprocessor with the most blocks.
    chain : float
        Trips and cycles of a block, its start among them, for each wave of blocks.
    resident : int
        Blocks that a multiprocessor holds at a time.
    waves : int
        How often the GPU is filled with blocks, the last time perhaps in part.
    in_flight : float
        Bytes that are on their way at a time, of the whole GPU, if each trip brings as much.
    attainable : float
        Bytes a second, by Little's law: those in flight over the latency, at most the bandwidth.
    """

    bytes: float
    multiply_adds: float
    special: float
    tensor: float
    instructions: float
    passes: float
    chain: float
    resident: int
    waves: int
    in_flight: float
    attainable: float

    @property
    def terms(self) -> dict[str, float]:
        """The seconds by name."""
        return dict(zip(self._fields[:7], self[:7], strict=True))

    @property
    def bound(self) -> str:
        """Name of the longest term."""
        return max(self.terms, key=self.terms.__getitem__)

    @property
    def seconds(self) -> float:
        """The longest term, a bound; it is the time if everything else hides behind it."""
        return self.terms[self.bound]

    @property
    def estimate(self) -> float:
        """Root of the sum of squares, which is the longest term where the others are short.

        Terms of like length get in each other's way, and take 1.4 times as long where two are
        equal. No law says so; `benchmarks/predictions.py` says how well it fits.
        """
        return math.hypot(*self[:7])


class Counted(Protocol):
    """What :func:`launch_of` reads of the emulator's counts."""

    blocks: int
    global_lines: int
    global_sectors: int
    shared_passes: int

    @property
    def multiply_adds(self) -> int: ...


def launch_of(counts: Counted, blocks: int, threads: int, **more: float) -> Launch:
    """A launch of more blocks like those that the emulator has run.

    Bytes are those of the sectors that were touched, 32 each, as if no cache had any of them;
    passes are lines and shared memory together; multiply-adds of tiles are the tensor cores'.

    Parameters
    ----------
    counts : Counts
        Of one kernel: ``trace.kernels[name]``.
    blocks, threads : int
        Of the launch.
    more : float
        What the emulator does not count, or counts otherwise: the other parameters of a
        :class:`Launch`, for the whole launch.

    Raises
    ------
    ValueError
        If no block was counted, or for an attribute that :class:`Launch` refuses.
    """
    if counts.blocks < 1:
        raise ValueError("counts must be of one block at least, got none.")
    times = check_integer("blocks", blocks, 1) / counts.blocks
    counted = {
        "bytes": 32 * counts.global_sectors * times,
        "passes": (counts.global_lines + counts.shared_passes) * times,
        "tensor": counts.multiply_adds * times,
    }
    return Launch(blocks, threads, **(counted | more))  # type: ignore[arg-type]


def predict(launch: Launch, gpu: GPU, *, latency: float | None = None) -> Prediction:
    r"""Seconds of a launch on a GPU, by reason.

    A multiprocessor holds as many blocks as its threads, registers and shared memory suffice for.
    The units of a multiprocessor work for its own blocks alone, so their time is that of the one
    with the most blocks. All share the memory.

    Parameters
    ----------
    launch : Launch
    gpu : GPU
        One of :data:`GPUS`, or another.
    latency : float, optional
        Seconds of one trip to the GPU's memory; that of the GPU where it is left out.

    Raises
    ------
    ValueError
        If not even one block fits on a multiprocessor, if the GPU's tensor cores are needed and
        their rate is not known, or if the latency is negative.

    References
    ----------
    Williams et al. (2009), the roofline; Volkov (2016), Little's law for GPUs.

    Examples
    --------
    A copy of 2 GB by 262,144 blocks, a float4 for each thread, on an H200:

    >>> copy = Launch(2**18, 256, bytes=2 * 2**26 * 16, instructions=2**18 * 8 * 10)
    >>> found = predict(copy, GPUS["H200"])
    >>> found.bound, round(1e3 * found.seconds, 3), round(1e3 * found.estimate, 3)
    ('bytes', 0.447, 0.468)
    >>> found.resident, found.waves
    (8, 249)
    """
    latency = _not_negative("latency", gpu.latency if latency is None else latency)
    if launch.tensor and gpu.tensor is None:
        raise ValueError("gpu must have a known rate of its tensor cores, got None.")
    resident = _resident(launch, gpu)
    most = -(-launch.blocks // gpu.processors)  # on one multiprocessor, one after the other
    share = most / launch.blocks  # of all work

    def seconds(amount: float, per_cycle: float) -> float:
        return amount * share / (per_cycle * gpu.clock)

    waves = -(-launch.blocks // (resident * gpu.processors))
    at_a_time = min(launch.blocks, resident * gpu.processors)
    in_flight = launch.bytes / launch.blocks / launch.trips * at_a_time if launch.trips else 0.0
    reach = in_flight / latency if launch.trips and latency else math.inf
    tensor = gpu.tensor or math.inf
    return Prediction(
        bytes=launch.bytes / gpu.bandwidth,
        multiply_adds=seconds(launch.multiply_adds, gpu.lanes),
        special=seconds(launch.special, SPECIAL),
        tensor=launch.tensor * share * gpu.processors / tensor,
        instructions=seconds(launch.instructions, ISSUED),
        passes=seconds(launch.passes, 1),
        chain=waves * (launch.trips * latency + (START + launch.cycles) / gpu.clock),
        resident=resident,
        waves=waves,
        in_flight=in_flight,
        attainable=min(gpu.bandwidth, reach),
    )


def _resident(launch: Launch, gpu: GPU) -> int:
    """Blocks that a multiprocessor holds: registers are given out in eights, to whole warps."""
    threads = launch.warps * LANES
    registers = -(-launch.registers // 8) * 8 * threads
    limits = {
        "threads": gpu.threads // threads,
        "registers": REGISTERS // registers,
        "shared_bytes": gpu.shared_bytes // max(1, launch.shared_bytes + gpu.reserved_bytes),
    }
    short = min(limits, key=limits.__getitem__)
    if limits[short] < 1:
        raise ValueError(
            f"{short} must leave room for one block on a multiprocessor, "
            f"got {getattr(launch, short)}."
        )
    return min(gpu.blocks, limits[short])


def _not_negative(name: str, value: float) -> float:
    value = check_number(name, value)
    if not value >= 0:
        raise ValueError(f"{name} must not be negative, got {value}.")
    return value
