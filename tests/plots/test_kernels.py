"""The figures of the GPU kernels: what they draw is what the kernels and the counts say."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import Circle

from lesson_code.plots import kernels, pale
from lesson_code.plots.colors import BLUE, VERMILION
from tests.plots.conftest import patches, texts, words

LANES = np.arange(32)
DEVICES = {
    "slow": (1e11, {"float32": 1e12, "tensor cores": 1e13}),
    "fast": (1e12, {"float32": 2e13, "tensor cores": 4e14}),
}
KERNELS = {"D = 64": (16384, 512), "D = 128": (65536, 1024)}


def test_a_point_of_the_roofline_is_on_every_roof() -> None:
    figure = kernels.roofline(DEVICES, KERNELS)
    assert [axes.get_title() for axes in figure.axes] == list(DEVICES)
    for axes, (rate, peaks) in zip(figure.axes, DEVICES.values(), strict=True):
        marked = {line.get_label(): line for line in axes.get_lines()}
        for kernel, (operations, bytes_) in KERNELS.items():
            x, y = marked[kernel].get_data()
            assert (x == operations / bytes_).all()
            assert sorted(y) == sorted(min(rate * x[0], peak) for peak in peaks.values())


@pytest.mark.parametrize("loads", [3, 4])
def test_loads_that_overlap_end_earlier(loads: int) -> None:
    figure = kernels.waiting(loads)
    waits, uses = (patches(figure, color=color) for color in (pale.BLUE, pale.GREEN))
    assert len(waits) == len(uses) == 2 * loads
    top = min(p.get_y() for p in waits)
    for above in (True, False):
        asked = [p.get_x() for p in waits if (p.get_y() == top) == above]
        used = [p.get_x() for p in uses if (p.get_y() == top) == above]
        after = [x + waits[0].get_width() for x in asked]
        assert all(x <= y + 1e-9 for x, y in zip(after, used, strict=True))
        overlap = [x < y for x, y in zip(asked[1:], after[:-1], strict=True)]
        assert set(overlap) == {not above}


def test_bars_of_bounds_are_as_long_as_the_times() -> None:
    case = {"a": {"work": 0.1, "trips": 0.3}, "b": {"work": 0.2, "trips": 0.16}}
    figure = kernels.bounds({"few": case, "many": case}, 0.05, (1, 2))
    expected = [time for kernel in case.values() for time in kernel.values()]
    for axes, title in zip(figure.axes, ("few", "many"), strict=True):
        assert axes.get_title(loc="left") == title
        widths = [p.get_width() for p in axes.patches]
        np.testing.assert_allclose(widths, expected, rtol=1e-12)
        assert axes.get_lines()[-1].get_xdata()[0] == 0.05
    assert {"0.40", "0.36", "work", "trips", "every byte once"} <= set(words(figure))


def test_a_bar_that_is_too_long_is_broken_off() -> None:
    figure = kernels.bounds({"one": {"a": {"trips": 5, "work": 8}, "b": {"work": 0.5}}}, 0.1, (1,))
    (axes,) = figure.axes
    assert [p.get_width() for p in axes.patches] == [0.9, 0, 0.5]
    assert {"13.0", "0.50"} <= set(words(figure))


def test_a_doubtful_part_has_a_dashed_edge_and_a_second_sum() -> None:
    case = {"a": {"work": 0.1, "trips": 0.3, "more trips": 0.25}}
    figure = kernels.bounds({"one": case}, 0.05, (1,), "more trips")
    (axes,) = figure.axes
    dashed = [p for p in axes.patches if p.get_linestyle() != "solid" and p.get_linestyle() != "-"]
    assert [p.get_width() for p in dashed] == pytest.approx([0.25])
    assert "0.40 to 0.65" in words(figure)


def test_reasons_lie_between_the_least_and_the_most() -> None:
    rows = {"bytes": {"a": (0.25, 0.25), "b": (0.5, 0.75)}, "trips": {"a": (1, 2), "b": (3, 4)}}
    figure = kernels.reasons({"few": rows, "many": rows}, 0.05)
    for axes in figure.axes:
        drawn = [tuple(line.get_xdata()) for line in axes.get_lines()]
        assert drawn[:-1] == [ends for row in rows.values() for ends in row.values()]
        assert drawn[-1][0] == 0.05
        assert [text.get_text() for text in axes.get_yticklabels()] == list(rows)


def test_a_lonely_warp_pauses_and_two_take_turns() -> None:
    figure = kernels.issue({"one": [[0], []], "two": [[0, 2], [1, 3]]}, cycles=4)
    one, two = (texts_of(axes) for axes in figure.axes)
    assert one == ["0", "0"]
    assert two == [*"0202", *"1313"]


def texts_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_every_warp_owns_a_band_and_one_reads_all_of_the_copy() -> None:
    figure = kernels.chunk_bands(warp=1)
    assert words(figure).count("warp 1") == 3
    assert "from warp 3" in words(figure)


@pytest.mark.parametrize(("order", "trips"), [("LsLsLs", 3), ("LLLsss", 1), ("LLssLLu", 2)])
def test_a_store_behind_a_load_waits_for_a_trip(order: str, trips: int) -> None:
    figure = kernels.orders({"one": order}, latency=3, cell=1)
    assert words(figure).count(r"$\lambda$") == trips
    assert f"one: {trips} trip{'s' * (trips > 1)}" in words(figure)
    bars = sorted(patches(figure), key=lambda p: p.get_x())
    ends = [p.get_x() + p.get_width() for p in bars]
    assert [p.get_x() for p in bars] == [0, *ends[:-1]]
    assert ends[-1] == len(order) + 3 * trips
    loads = patches(figure, color=BLUE)
    assert len(loads) == order.count("L")


@pytest.mark.parametrize("lane", [0, 5, 31])
def test_scores_stay_in_their_lane(lane: int) -> None:
    figure = kernels.packed(lane)
    frames = [p for p in patches(figure) if same_color(p.get_edgecolor()[:3], VERMILION)]
    quarters = [p for p in patches(figure) if p.get_width() == 8]
    assert len(frames) == len(quarters) == 8
    places = {
        (round(f.get_x() - q.get_x(), 6), round(f.get_y() - q.get_y(), 6))
        for f, q in zip(frames, quarters, strict=True)
    }
    assert places == {(lane % 4 * 2, lane // 4 * 0.5)}
    for q in (0, 2, 4, 6):  # a half of a C, and the quarter of A that it becomes
        assert same_color(quarters[q].get_facecolor(), quarters[q + 1].get_facecolor())


@pytest.mark.parametrize(("C", "M"), [(4, 6), (2, 8)])
def test_every_thread_has_a_column_and_a_value_and_an_output(C: int, M: int) -> None:
    figure = kernels.column_threads(C, M)
    cells = [p for p in patches(figure) if p.get_width() == p.get_height() == 1]
    per_column = np.unique([p.get_x() for p in cells], return_counts=True)[1]
    assert sorted(per_column) == sorted([C, C] + M * [C + 2])
    assert {str(m) for m in range(M)} <= set(words(figure))


@pytest.mark.parametrize("chunks", [2, 4])
def test_the_first_pass_walks_and_the_second_does_not(chunks: int) -> None:
    figure = kernels.chunk_passes(chunks)
    first, states, second = (
        [p.get_y() for p in patches(figure, color=color)]
        for color in (pale.VERMILION, pale.BLUE, pale.GREEN)
    )
    assert len(first) == len(states) == len(second) == chunks
    assert (np.diff(first) >= 1).all()
    assert len(set(second)) == len(set(states)) == 1
    assert max(first) < min(states) < min(second)
    assert [f"$S_{{[{i}]}}$" in words(figure) for i in range(chunks + 1)] == [True] * chunks + [0]


def test_a_thread_of_a_block_has_16_numbers_of_each_product() -> None:
    x, y = 5, 3
    dots = [p for p in patches(kernels.chunk_tiles(x, y), Circle) if p.zorder == 6]
    weights, outputs = dots[:16], dots[16:]
    assert len(outputs) == 16
    filled = sum(same_color(p.get_facecolor()[:3], "#222222") for p in weights)
    assert filled == sum(x + 16 * j <= y + 16 * i for i in range(4) for j in range(4))


def test_lanes_hold_what_the_manual_says() -> None:
    """Every register of every lane, from the formulas of mma.m16n8k16's fragments."""
    figure = kernels.tile_lanes()
    (axes,) = figure.axes
    u, left = 0.9, 17.7
    top = left * u
    lane_at = {
        (round(t.get_position()[0], 3), round(t.get_position()[1], 3)): int(t.get_text())
        for t in axes.texts
        if t.get_text().isdigit()
    }
    fill_at = {
        (round(p.get_x() + p.get_width() / 2, 3), round(p.get_y() + p.get_height() / 2, 3)): p
        for p in reversed(patches(figure))
        if p.get_height() < 2 and p.get_facecolor()[3]
    }
    expected, colors = {}, {}
    for lane in range(32):
        g, t = lane // 4, lane % 4
        a = [(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]
        for register, (row, column) in enumerate(a):  # and the next column
            expected[column + 1, top + (row + 0.5) * u] = lane
            colors[column + 1, top + (row + 0.5) * u] = register
        for row in (2 * t, 2 * t + 8):  # and the next row
            expected[left + g + 0.5, (row + 1) * u] = lane
        for register, row in enumerate((g, g + 8)):
            expected[left + 2 * t + 1, top + (row + 0.5) * u] = lane
            colors[left + 2 * t + 1, top + (row + 0.5) * u] = register
    rounded = {(round(x, 3), round(y, 3)): lane for (x, y), lane in expected.items()}
    assert len(rounded) == 32 * 8
    assert lane_at == rounded
    names = (pale.BLUE, pale.VERMILION, pale.YELLOW, pale.GREEN)
    for (x, y), register in colors.items():
        fill = fill_at[round(x, 3), round(y, 3)].get_facecolor()[:3]
        assert same_color(fill, names[register])


@pytest.mark.parametrize("lane", [0, 5, 31])
def test_the_frames_are_those_of_one_lane(lane: int) -> None:
    figure = kernels.tile_lanes(lane)
    bold = [text.get_text() for text in texts(figure) if text.get_fontweight() == "bold"]
    assert bold == 8 * [str(lane)]
    frames = [p for p in patches(figure) if same_color(p.get_edgecolor()[:3], VERMILION)]
    assert len(frames) == 8


@pytest.mark.parametrize(("segments", "chunks"), [(3, 4), (2, 3)])
def test_segments_start_together_and_walk_twice(segments: int, chunks: int) -> None:
    figure = kernels.segments(segments, chunks)
    for color in (pale.VERMILION, pale.GREEN):
        rows, counts = np.unique(
            [round(p.get_y(), 6) for p in patches(figure, color=color)], return_counts=True
        )
        assert len(rows) == chunks
        assert (counts == segments).all()
    assert words(figure).count("+") == segments


@pytest.mark.parametrize(
    ("offsets", "size"),
    [
        (LANES * 4, 4),
        (LANES * 4 + 64, 4),
        (LANES * 128, 4),
        (LANES * 8, 4),
        (LANES * 16, 16),
        (LANES * 0, 4),
        (np.where(LANES < 5, LANES * 256, -1), 4),
    ],
)
def test_lines_are_counted_as_the_emulator_counts_them(offsets, size: int) -> None:
    records = pytest.importorskip("lesson_code.cupy.emulator._records")
    figure = kernels.warp_access({"lanes": offsets}, size)
    lines, _, sectors, _ = (
        int(x[0]) for x in records.lines_and_sectors(*events(records, offsets, size))
    )
    (title,) = (axes.get_title() for axes in figure.axes)
    assert title == f"lanes: {lines} line{'s' * (lines > 1)}"
    assert len(patches(figure, color=pale.VERMILION)) == sectors
    asked = patches(figure, color=BLUE)
    assert len(asked) == len({*offsets} - {-1})
    assert {p.get_width() for p in asked} == {size}


@pytest.mark.parametrize(
    ("offsets", "size"),
    [
        (LANES[:8] * 128, 16),
        (LANES[:8] * 144, 16),
        (LANES * 16, 16),
        (LANES * 4, 4),
        (LANES * 8, 4),
        (LANES * 8, 8),
        (LANES // 16 * 256 + LANES % 16 * 4, 4),
        (LANES // 16 * 320 + LANES % 16 * 4, 4),
        (LANES * 0, 4),
        (np.where(LANES % 2, LANES * 128, -1), 4),
    ],
)
def test_passes_are_counted_as_the_emulator_counts_them(offsets, size: int) -> None:
    records = pytest.importorskip("lesson_code.cupy.emulator._records")
    figure = kernels.bank_access({"lanes": offsets}, size)
    passes, ideal = (int(x[0]) for x in records.bank_passes(*events(records, offsets, size)))
    (title,) = (axes.get_title() for axes in figure.axes)
    assert title == f"lanes: {passes} pass{'es' * (passes > 1)}"
    assert bool(patches(figure, color=pale.VERMILION)) == (passes > ideal)
    hit = patches(figure, color=pale.VERMILION) + patches(figure, color=BLUE)
    assert len(hit) == sum(offsets >= 0) * size // 4


def events(records, offsets, size: int) -> tuple:
    """One access of a warp, as the emulator writes it down."""
    offsets = np.asarray(offsets)
    (threads,) = np.nonzero(offsets >= 0)
    written = np.zeros(len(threads), records.EVENT)
    written["thread"], written["address"], written["bytes"] = threads, offsets[threads], size
    return written, np.zeros(len(threads), int)
