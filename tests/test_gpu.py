"""Predicted times: redone by hand, monotonic, and refused where an argument makes no sense."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lesson_code import results
from lesson_code.gpu import GPUS, START, Launch, launch_of, predict

H200 = GPUS["H200"]
TERMS = ("bytes", "multiply_adds", "special", "tensor", "instructions", "passes", "chain")


def test_one_block_by_hand() -> None:
    # 2 GHz: every rate is a round number.
    gpu = H200._replace(multiply_adds=2e9 * 128 * 132, tensor=2e9 * 132 * 1024, bandwidth=1e12)
    launch = Launch(
        *(1, 64),
        bytes=4000,  # 4 ns at 1 TB/s
        multiply_adds=12_800,  # 100 cycles of 128 lanes
        special=3200,  # 200 cycles of 16
        tensor=307_200,  # 300 cycles of 1,024
        instructions=1600,  # 400 cycles of 4
        passes=500,
        trips=2,  # of 1 microsecond
        cycles=600 - START,  # 300 ns with the start
    )
    found = predict(launch, gpu, latency=1e-6)
    expected = (4e-9, 50e-9, 100e-9, 150e-9, 200e-9, 250e-9, 2.3e-6)
    assert found[:7] == pytest.approx(expected)
    assert dict(zip(TERMS, found[:7], strict=True)) == found.terms
    assert found.bound == "chain"
    assert found.seconds == pytest.approx(2.3e-6)
    assert found.estimate == pytest.approx(math.sqrt(sum(x * x for x in expected)))
    assert found.waves == 1
    # Two thousand bytes a trip, in a microsecond: 2 GB/s of 1 TB/s.
    assert found.in_flight == 2000
    assert found.attainable == pytest.approx(2e9)


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared", "resident"),
    [
        ("H200", 96, 248, 0, 2),  # the chapter's table: registers
        ("H200", 256, 80, 0, 3),
        ("H200", 256, 108, 0, 2),
        ("H200", 128, 171, 41 * 1024, 2),
        ("H200", 128, 32, 41 * 1024, 5),  # shared memory, of which 1 kB a block is the driver's
        ("T4", 128, 171, 41 * 1024, 1),
        ("A6000", 1024, 32, 0, 1),  # 1,536 places
        ("H200", 32, 16, 0, 32),  # no more blocks than that
        ("T4", 32, 16, 0, 16),
        ("H200", 33, 255, 0, 4),  # whole warps
    ],
)
def test_blocks_of_a_multiprocessor(gpu, threads, registers, shared, resident) -> None:
    launch = Launch(1, threads, bytes=1, registers=registers, shared_bytes=shared)
    assert predict(launch, GPUS[gpu]).resident == resident


def test_waves_and_the_fullest_multiprocessor() -> None:
    def chain(blocks):
        found = predict(Launch(blocks, 128, bytes=0, registers=168, trips=3), H200)
        return found.waves, found.chain

    for blocks, waves in ((1, 1), (3 * 132, 1), (3 * 132 + 1, 2), (9 * 132, 3)):
        assert chain(blocks) == (
            waves,
            pytest.approx(waves * (3 * H200.latency + START / H200.clock)),
        )
    # 133 equal blocks on 132 multiprocessors take as long as 264.
    times = [
        predict(Launch(n, 128, bytes=0, instructions=1000 * n), H200).instructions
        for n in (132, 133, 264)
    ]
    assert times == pytest.approx([times[0], 2 * times[0], 2 * times[0]])


def test_littles_law_and_the_chain_are_one() -> None:
    # Blocks that do nothing but load: as long as all bytes take at the attainable bandwidth, and
    # a start.
    launch = Launch(132, 64, bytes=132 * 4096 * 768, trips=512)
    found = predict(launch, H200)
    assert found.in_flight == 132 * 4096 * 768 / 512
    assert found.attainable < H200.bandwidth
    assert found.chain == pytest.approx(launch.bytes / found.attainable + START / H200.clock)


def test_the_chapters_kernel() -> None:
    # Kernel (a), 128 heads of 4,096 tokens: 0.11 ms of bytes, 512 trips, 436 cycles a token.
    tokens = 128 * 4096
    launch = Launch(128, 64, 1024 * tokens, trips=512, cycles=436 * 4096, registers=242)
    found = predict(launch, H200, latency=0.6e-6)
    assert 1e3 * found.bytes == pytest.approx(0.112, abs=5e-4)
    assert 1e3 * found.seconds == pytest.approx(1.21, abs=5e-3)
    assert 1e3 * predict(launch, H200, latency=0.3e-6).seconds == pytest.approx(1.05, abs=6e-3)


amounts = st.floats(0, 1e12)
launches = st.builds(
    Launch,
    st.integers(1, 100_000),
    st.integers(1, 256),
    amounts,
    *[amounts] * 3,
    instructions=amounts,
    passes=amounts,
    trips=st.floats(0, 1e5),
    cycles=st.floats(0, 1e7),
    registers=st.integers(1, 255),
    shared_bytes=st.integers(0, 60_000),
)


@given(launches, st.sampled_from(["A100", "H100", "H200", "B200"]), st.data())
def test_more_is_never_faster(launch, name, data) -> None:
    gpu = GPUS[name]
    found = predict(launch, gpu)
    assert all(x >= 0 for x in found[:7])
    assert found.seconds <= found.estimate * (1 + 1e-12)
    assert found.estimate <= math.sqrt(7) * found.seconds * (1 + 1e-12)
    assert found.resident * launch.threads <= gpu.threads
    assert found.resident * launch.threads * launch.registers <= 65_536
    assert found.attainable <= gpu.bandwidth
    fields = [f.name for f in dataclasses.fields(launch)]
    field = data.draw(st.sampled_from([f for f in fields if f not in ("blocks", "threads")]))
    value = getattr(launch, field)
    more = min(value + 7, 255) if field == "registers" else value * 2 + 1
    if field == "shared_bytes":
        more = min(more, 99_000)
    after = predict(dataclasses.replace(launch, **{field: more}), gpu)
    assert after.seconds >= found.seconds * (1 - 1e-12)
    assert predict(launch, gpu, latency=2 * gpu.latency).seconds >= found.seconds
    faster = gpu._replace(bandwidth=2 * gpu.bandwidth, processors=2 * gpu.processors)
    faster = faster._replace(multiply_adds=2 * gpu.multiply_adds, tensor=2 * gpu.tensor)
    assert predict(launch, faster).seconds <= found.seconds * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"blocks": 0}, ValueError, "blocks must be at least 1, got 0."),
        ({"blocks": 1.5}, TypeError, "blocks must be an integer"),
        ({"threads": 2048}, ValueError, "threads must be at most 1024, got 2048."),
        ({"registers": 256}, ValueError, "registers must be at most 255, got 256."),
        ({"bytes": -1}, ValueError, "bytes must not be negative, got -1.0."),
        ({"bytes": math.nan}, ValueError, "bytes must be finite"),
        ({"trips": "3"}, TypeError, "trips must be a real number"),
        ({"shared_bytes": -1}, ValueError, "shared_bytes must be at least 0, got -1."),
    ],
)
def test_a_launch_refuses(change, error, message) -> None:
    with pytest.raises(error, match=message):
        Launch(**({"blocks": 1, "threads": 32, "bytes": 1} | change))


def test_a_gpu_that_cannot() -> None:
    with pytest.raises(ValueError, match="registers must leave room for one block.*got 100"):
        predict(Launch(1, 1024, bytes=1, registers=100), H200)
    with pytest.raises(ValueError, match="shared_bytes must leave room.*got 70000"):
        predict(Launch(1, 32, bytes=1, shared_bytes=70_000), GPUS["T4"])
    with pytest.raises(ValueError, match="known rate of its tensor cores, got None"):
        predict(Launch(1, 32, bytes=1, tensor=1), GPUS["A6000"])
    with pytest.raises(ValueError, match="latency must not be negative, got -1.0"):
        predict(Launch(1, 32, bytes=1), H200, latency=-1)


def test_clocks_are_those_of_the_data_sheets() -> None:
    clocks = {name: round(gpu.clock / 1e9, 2) for name, gpu in GPUS.items()}
    assert clocks["T4"] == 1.58
    assert clocks["A100"] == clocks["A100 80GB"] == 1.41
    assert clocks["A6000"] == 1.8
    assert clocks["H100 PCIe"] == 1.75
    assert clocks["H100"] == clocks["H200"] == 1.98


def test_counts_of_the_emulator_are_scaled() -> None:
    counts = SimpleNamespace(
        blocks=2, global_lines=10, global_sectors=40, shared_passes=30, multiply_adds=4096
    )
    launch = launch_of(counts, 6, 128, trips=5, registers=40)
    assert launch == Launch(6, 128, 3840, tensor=12_288, passes=120, trips=5, registers=40)
    assert launch_of(counts, 6, 128, bytes=7).bytes == 7
    counts.blocks = 0
    with pytest.raises(ValueError, match="counts must be of one block at least, got none."):
        launch_of(counts, 6, 128)


# --- What has been published -------------------------------------------------------------------


def test_published_times() -> None:
    found = results.load("predictions")
    rows = found["rows"]
    assert {row["source"] for row in rows} == set(found["sources"])
    for row in rows:
        assert row["error"] == pytest.approx(row["estimate"] / row["published"] - 1)
        assert row["bound"] <= row["estimate"] * (1 + 1e-12)
    # A bound may be beaten by as much as a count is coarse, and in no more than one case of 50.
    beaten = [row for row in rows if row["error_of_bound"] > 0]
    assert len(beaten) <= len(rows) / 50
    assert all(row["error_of_bound"] < 0.1 for row in beaten)


def test_the_first_stream_by_hand() -> None:
    row = results.load("predictions")["rows"][0]
    # One block of 128 threads, one load of 8 bytes each: 2^25 / 128 trips.
    v100 = GPUS["V100"]
    assert row["bound"] == pytest.approx(2**25 / 128 * v100.latency + START / v100.clock)
    assert row["published"] == pytest.approx(8 * 2**25 / 3e9)
