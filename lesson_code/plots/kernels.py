"""Figures of the GPU kernels: who computes what, in which order, and how memory is asked for it."""

from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Circle, Patch, Polygon
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from lesson_code.plots import pale
from lesson_code.plots.cells import arrow, box, canvas, rectangle, way, write
from lesson_code.plots.colors import BLUE, COLORS, GRAY, GREEN, INK, VERMILION, look
from lesson_code.plots.lines import beside, legend_below
from lesson_code.plots.style import BookFigure, drawing, new_figure

FAINT = "#f4f4f4"


@drawing
def roofline(
    devices: Mapping[str, tuple[float, Mapping[str, float]]],
    kernels: Mapping[str, tuple[float, float]],
) -> BookFigure:
    """How fast each device can be at most, against the operations that there are for each byte.

    devices gives bytes per second and, for each kind of arithmetic, operations per second; kernels
    the operations and the bytes of each.
    """
    figure, (panels,) = new_figure(len(devices), width=6.0, height=3.7, sharex=True, sharey=True)
    ridges = [peak / rate for rate, peaks in devices.values() for peak in peaks.values()]
    at = {name: operations / bytes_ for name, (operations, bytes_) in kernels.items()}
    ends = min(*ridges, *at.values()) / 6, max(*ridges, *at.values()) * 15
    x = np.geomspace(*ends, 400)
    bottom = ends[0] * min(rate for rate, _ in devices.values())
    for axes, (device, (rate, peaks)) in zip(panels, devices.items(), strict=True):
        for index, (kind, peak) in enumerate(sorted(peaks.items(), key=lambda item: -item[1])):
            roof = np.minimum(rate * x, peak)
            axes.plot(x, roof, color=INK, linestyle="-" if index == 0 else (0, (4, 2)))
            beside(axes, kind, (ends[1], peak), (0, 3), ha="right", fontsize=10)
        for index, (name, intensity) in enumerate(at.items()):
            style = look(index, linestyle="none", markersize=7, markeredgecolor="white", zorder=4)
            heights = [min(rate * intensity, peak) for peak in peaks.values()]
            ends_of_line = bottom, max(heights)
            axes.plot([intensity] * 2, ends_of_line, color=style["color"], linestyle=":", lw=1.4)
            axes.plot(np.full(len(heights), intensity), heights, label=name, **style)
        axes.set(xscale="log", yscale="log", title=device, xlim=ends)
    panels[0].set_ylim(bottom, 3 * max(max(peaks.values()) for _, peaks in devices.values()))
    panels[0].set_ylabel("operations / second")
    figure.supxlabel("operations for each byte", fontsize=11)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 3))
    return figure


@drawing
def waiting(loads: int = 4, latency: float = 4.5) -> BookFigure:
    """The same loads and the same work: one trip after another, and all on their way at once."""
    work, shift, row = 1.7, 0.25, 1.2
    each, below = latency + work, 3.4
    end = below + 0.9 + row * loads + 0.6
    figure, axes = canvas(loads * each + 0.4, end + 1.0, unit=0.235)

    def load(i: int, asked: float, used: float, y: float) -> None:
        rectangle(axes, asked, y, latency, 1, pale.BLUE)
        _write(axes, asked + latency / 2, y + 0.52, f"load {i + 1}")
        rectangle(axes, used, y, work, 1, pale.GREEN)
        _write(axes, used + work / 2, y + 0.52, f"use {i + 1}", fontsize=9)

    _write(axes, 0, 0, "one trip after another", ha="left")
    _write(axes, 0, below, "all in flight together", ha="left")
    arrow(axes, (0, 2.2), (latency, 2.2), gap=0, arrowstyle="<->", linewidth=1.2)
    _write(axes, latency + 0.5, 2.2, r"$\lambda$")
    for i in range(loads):
        load(i, each * i, each * i + latency, 0.8)
        y = below + 0.8 + row * i
        load(i, shift * i, latency + work * i, y)
    _line(axes, (0, end), (loads * each, end), color=GRAY)
    _write(axes, loads * each, end - 0.7, "time", ha="right", color=GRAY)
    axes.set(xlim=(-0.2, loads * each + 0.2), ylim=(end + 0.3, -0.7))
    return figure


@drawing
def bounds(
    cases: Mapping[str, Mapping[str, Mapping[str, float]]],
    bytes_alone: float,
    ends: Sequence[float],
    doubtful: str = "",
) -> BookFigure:
    """The least time of each kernel, in milliseconds: what it waits for, one after another.

    cases gives for the title of a panel, of each kernel, the times by name; bytes_alone is marked
    in every panel. A panel ends at its number of `ends`, and a longer bar is broken off there. The
    part called `doubtful`, the last one, is drawn with a dashed edge, and both sums are written.
    """
    kernels = [kernel for case in cases.values() for kernel in case.values()]
    names = list(dict.fromkeys(name for kernel in kernels for name in kernel))
    rows = [len(case) for case in cases.values()]
    figure, panels = new_figure(
        1,
        len(cases),
        width=5.6,
        height=0.7 + 0.75 * len(cases) + 0.42 * sum(rows),
        height_ratios=rows,
    )
    fills = cycle([(pale.BLUE, ""), (pale.VERMILION, "//"), (pale.GREEN, "..")])
    bar: dict[str, dict[str, Any]] = {
        name: {"fc": fc, "hatch": hatch, "ec": GRAY, "linewidth": 0.8}
        for name, (fc, hatch) in zip(names, fills, strict=False)
    }
    if doubtful:
        bar[doubtful] = {"fc": "white", "ec": GRAY, "linewidth": 1.2, "linestyle": (0, (2, 2))}
    handles: list[Artist] = [Patch(**style) for style in bar.values()]
    for (axes,), (title, case), end in zip(panels, cases.items(), ends, strict=True):
        for y, parts in enumerate(case.values()):
            left, total = 0.0, sum(parts.values())
            for name, time in parts.items():
                width = min(time, max(0.9 * end - left, 0)) if total > end else time
                axes.barh(y, width, 0.62, left, **bar[name])
                left += width
            if total > end:  # two white strokes break the bar off
                for x in (0.79, 0.82):
                    stroke = np.array([x - 0.01, x + 0.01]) * end
                    axes.plot(stroke, [y + 0.4, y - 0.4], color="white", linewidth=3, zorder=4)
            sums = [total - parts[doubtful], total] if doubtful in parts else [total]
            text = " to ".join(f"{x:.2f}" if total < 10 else f"{x:.1f}" for x in sums)
            beside(axes, text, (left, y), (5, 0), va="center")
        if bytes_alone > 0.005 * end:  # else it would be on the axis
            line = axes.axvline(bytes_alone, color=INK, linestyle=(0, (1.5, 1.5)), linewidth=1.6)
        axes.set_yticks(range(len(case)), list(case))
        axes.set(xlim=(0, 1.03 * end), ylim=(len(case) - 0.5, -0.5))
        axes.set_title(title, loc="left")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(visible=False, axis="y")
    panels[-1, 0].set_xlabel("milliseconds at least")
    ncols = 2 if doubtful else 4
    legend_below(figure, [*handles, line], [*names, "every byte once"], ncols=ncols)
    return figure


@drawing
def reasons(
    cases: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]], bytes_alone: float
) -> BookFigure:
    """How long each kernel waits for each reason, in milliseconds, on a logarithmic axis.

    cases gives for the title of a panel, of each reason, the least and the most by kernel: a dot
    where both are the same, a bar else, with the kernel's name beside it.
    """
    kernels = max(len(row) for case in cases.values() for row in case.values())
    rows = [len(case) for case in cases.values()]
    height = 1.0 + 0.4 * len(cases) + (0.12 + 0.15 * kernels) * sum(rows)
    figure, panels = new_figure(
        1, len(cases), width=5.6, height=height, sharex=True, height_ratios=rows
    )
    for (axes,), (title, case) in zip(panels, cases.items(), strict=True):
        for y, row in enumerate(case.values()):
            if y % 2:
                axes.axhspan(y - 0.5, y + 0.5, color="0.95", linewidth=0, zorder=0)
            for index, (kernel, (least, most)) in enumerate(row.items()):
                level = y + 0.8 / kernels * (index - (len(row) - 1) / 2)
                mark = {"marker": "o", "markersize": 6} if least == most else {"linewidth": 6}
                axes.plot(
                    (least, most),
                    (level, level),
                    color=COLORS[index],
                    solid_capstyle="butt",
                    zorder=4,
                    **mark,
                )
                beside(axes, kernel, (most, level), (6, 0), va="center")
        line = axes.axvline(bytes_alone, color=INK, linestyle=(0, (1.5, 1.5)), linewidth=1.6)
        axes.set_yticks(range(len(case)), list(case))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set(ylim=(len(case) - 0.5, -0.5), xscale="log")
        axes.margins(x=0.1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(title, loc="left")
    panels[-1, 0].set_xlabel("milliseconds")
    legend_below(figure, [line], ["every byte once"], ncols=1)
    return figure


@drawing
def orders(programs: Mapping[str, str], latency: float = 10, cell: float = 0.4) -> BookFigure:
    """Loads (L), stores (s) and uses (u) in the order in which a program makes them.

    Where a store or a use follows a load, it waits for a whole trip, drawn `latency` long.
    """
    fills = {"L": BLUE, "s": GREEN, "u": GREEN}
    longest = max(len(order) * cell + _trips(order) * latency for order in programs.values())
    figure, ((axes,),) = new_figure(width=6.0, height=0.75 * len(programs) + 0.75)
    axes.set_axis_off()
    for row, (name, order) in enumerate(programs.items()):
        x, y, trips = 0.0, 2 * row, _trips(order)
        _write(axes, 0, y - 0.45, f"{name}: {trips} trip{'s' * (trips > 1)}", ha="left")
        for i, kind in enumerate(order):
            if i and order[i - 1] == "L" and kind != "L":
                rectangle(axes, x, y, latency, 1, pale.VERMILION, GRAY, linewidth=0.8)
                _write(axes, x + latency / 2, y + 0.52, r"$\lambda$")
                x += latency
            rectangle(axes, x, y, cell, 1, fills[kind], "white", linewidth=0.2)
            x += cell
    end = 2 * len(programs) - 0.4
    _line(axes, (0, end), (longest, end), color=GRAY)
    _write(axes, longest, end - 0.4, "time", ha="right", color=GRAY)
    axes.set(xlim=(-0.2, longest + 0.2), ylim=(end + 0.2, -0.9))
    handles = [
        Patch(fc=BLUE, ec=GRAY),
        Patch(fc=pale.VERMILION, ec=GRAY),
        Patch(fc=GREEN, ec=GRAY),
    ]
    legend_below(figure, handles, ["load", "wait for a trip", "store or use"], ncols=3)
    return figure


def _trips(order: str) -> int:
    return sum(a == "L" != b for a, b in pairwise(order))


@drawing
def issue(kernels: Mapping[str, Sequence[Sequence[int]]], cycles: int = 12) -> BookFigure:
    """When the groups of units of a multiprocessor begin an instruction, and of which warp.

    kernels gives for each title the warps of every group. They take turns; a lonely one pauses in
    every second cycle.
    """
    figure, (panels,) = new_figure(len(kernels), width=6.2, height=2.3, sharey=True)
    for axes, (title, groups) in zip(panels, kernels.items(), strict=True):
        for y, warps in enumerate(groups):
            for x in range(cycles):
                turn = x % max(len(warps), 2)
                rectangle(axes, x, y, 1, 0.8, FAINT, "#d5d5d5", linewidth=0.6)
                if turn < len(warps):
                    fill = (pale.BLUE, pale.VERMILION)[turn]
                    rectangle(axes, x, y, 1, 0.8, fill, GRAY, linewidth=0.8)
                    _write(axes, x + 0.5, y + 0.42, str(warps[turn]), fontsize=9)
        axes.set_title(title)
        axes.set(xlim=(-0.1, cycles + 0.1), ylim=(len(groups), -0.2), xticks=[])
        axes.set_xlabel("cycles", fontsize=10)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    names = [f"group {y}" for y in range(max(map(len, kernels.values())))]
    panels[0].set_yticks(np.arange(len(names)) + 0.4, names)
    return figure


@drawing
def gpu_map() -> BookFigure:
    """Where a kernel's numbers can be: in registers, in shared memory, in the GPU's memory."""
    figure, axes = canvas(13.2, 11.2)
    u, left = 0.245, 0.65  # of a thread; where the warps begin
    for shift in (0.5, 0.25, 0.0):
        rectangle(axes, shift, -shift, 10.7, 7.9, "white", linewidth=1.2)
    _write(axes, 0.3, 0.5, "multiprocessor, with 256 kB of registers", ha="left")
    for x, width in (0.3, 8.55), (9.05, 1.4):
        rectangle(axes, x, 0.95, width, 6.65, FAINT, linestyle=(0, (4, 3)))
    _write(axes, left, 1.4, "block", ha="left")
    _write(axes, 9.75, 1.4, "block")
    for y in 2.5, 4.4:
        _write(axes, left + 16 * u, y - 0.35, "warp of 32 threads")
        for i in range(32):
            x = left + i * u
            rectangle(axes, x, y, u, 0.4, "white", linewidth=0.6)
            rectangle(axes, x, y + 0.4, u, 0.7, pale.GREEN, linewidth=0.6)
        behind = {"fc": pale.GREEN, "ec": "none", "pad": 1.5}
        _write(axes, left + 16 * u, y + 0.75, "registers", bbox=behind)
    _double(axes, left + 16 * u, 5.5, 6.35)
    _box(axes, left, 6.35, 32 * u, 0.9, "shared memory, up to 228 kB", pale.YELLOW)
    _double(axes, left + 16 * u, 7.9, 8.9)
    _box(axes, 0, 8.9, 11.2, 1.3, "global memory, 141 GB, some 0.6 µs away", pale.BLUE)
    _double(axes, -0.6, 3.1, 9.9)
    _write(axes, -1.0, 3.2, "small and fast", rotation=90)
    _write(axes, -1.0, 8.8, "large and slow", rotation=90)
    axes.set(xlim=(-1.4, 11.4), ylim=(10.4, -0.7))
    return figure


@drawing
def warp_access(accesses: Mapping[str, ArrayLike], size: int = 4) -> BookFigure:
    """The lines of 128 bytes that the lanes of a warp touch, one below the other.

    accesses gives for each title the byte offset of each lane, -1 for a lane without; a lane asks
    for `size` bytes.
    """
    shown = {name: np.unique(np.asarray(row)) for name, row in accesses.items()}
    most = max(len(np.unique(row[row >= 0] // 128)) for row in shown.values())
    height = 1.6 + min(0.2 * max(most, 4), 2.6)
    whole_lines = True
    figure, (panels,) = new_figure(
        len(accesses), width=5.6, height=height, sharex=True, sharey=True
    )
    for axes, (name, offsets) in zip(panels, shown.items(), strict=True):
        asked = offsets[offsets >= 0]
        lines = np.unique(asked // 128)
        sectors = np.unique(asked // 32 * 32)
        whole_lines &= len(sectors) == 4 * len(lines)
        for y in range(len(lines)):
            rectangle(axes, 0, y, 128, 0.72, "white", "#bdbdbd", linewidth=0.8)
        for starts, width, fill in (sectors, 32, pale.VERMILION), (asked, size, BLUE):
            for start in starts:
                row = np.searchsorted(lines, start // 128)
                rectangle(axes, start % 128, row, width, 0.72, fill, "white", linewidth=0.4)
        axes.set_title(f"{name}: {len(lines)} line{'s' * (len(lines) > 1)}")
        axes.set(xticks=[0, 32, 64, 96], yticks=[], xlabel="byte of the line", xlim=(-2, 130))
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
    panels[0].set_ylim(max(most, 4), -0.3)
    looks = {"asked for": BLUE, "comes along": pale.VERMILION, "rest of the line": "white"}
    if whole_lines:
        del looks["rest of the line"]
    handles = [Patch(fc=fill, ec="#bdbdbd") for fill in looks.values()]
    legend_below(figure, handles, list(looks), ncols=3)
    return figure


@drawing
def column_threads(C: int = 4, M: int = 6) -> BookFigure:
    """One token in the kernel "recurrent": each thread has a column of the state to itself."""
    x0, width = 4.0, M + 8.0
    figure, axes = canvas(width, C + 6.0)
    for x, name in (0.0, "k"), (1.5, "q"):
        for c in range(C):
            _cell(axes, x, c, "white")
        _write(axes, x + 0.5, -0.5, f"${name}_t$")
    rectangle(axes, -0.35, -1.1, 3.2, C + 1.4, "none", linestyle=(0, (4, 3)))
    _write(axes, 1.25, C + 0.45, "shared memory", va="top", color=GRAY)
    for c in range(C):  # every thread reads every number
        y = c + 0.5
        _line(axes, (2.85, y), (x0, y), color=GRAY)
        axes.plot([x0, x0 + M - 0.5], [y, y], color=GRAY, linewidth=1, zorder=3)
        axes.plot(x0 + np.arange(M) + 0.5, np.full(M, y), "o", color=GRAY, markersize=3.5, zorder=4)

    for m in range(M):
        color, x = COLORS[m % 6], x0 + m
        for y in (-2.6, *range(C), C + 1.6):
            _cell(axes, x, y, _pale(color))
        _line(axes, (x + 0.5, -1.6), (x + 0.5, 0), color=color)
        _line(axes, (x + 0.5, C), (x + 0.5, C + 1.6), color=color)
        rectangle(axes, x, 0, 1, C, "none", color, linewidth=1.8, zorder=3)
        _write(axes, x + 0.5, -3.1, str(m))
    right = x0 + M + 0.3
    _write(axes, x0 - 0.3, -3.1, "thread", ha="right")
    _write(axes, x0 - 0.3, -2.1, "$v_t$", ha="right")
    _write(axes, x0 - 0.3, C + 2.1, "$o_t$", ha="right")
    _write(axes, right, C / 2 - 0.35, "$S$", ha="left")
    _write(axes, right, C / 2 + 0.45, "registers", ha="left", color=GRAY)
    for y in (-2.1, C + 2.1):
        _write(axes, right, y, "global\nmemory", ha="left", color=GRAY)
    axes.set(xlim=(-0.45, x0 + M + 2.6), ylim=(C + 2.9, -3.6))
    return figure


@drawing
def chunk_passes(chunks: int = 4) -> BookFigure:
    """The kernel "chunked" in time, downward: a walk through the chunks, then all at once."""
    w, step = 2.35, 1.35
    states = step * chunks + 0.75
    outputs = states + 2.1
    figure, axes = canvas(w * chunks + 3.9, outputs + 3.2)
    for i in range(chunks):
        x, y = w * i, step * i
        _box(axes, x, y, w, 1, f"chunk {i + 1}", pale.VERMILION)
        if i < chunks - 1:
            corner = x + w + 0.55, y + 0.5
            _line(axes, (x + w, y + 0.5), corner, (corner[0], y + step))
        _line(axes, (x + 0.55, y + 1), (x + 0.55, states))
        _box(axes, x, states, 1.1, 1, f"$S_{{[{i}]}}$", pale.BLUE)
        _line(axes, (x + 0.55, states + 1), (x + 0.55, outputs))
        _box(axes, x + 0.08, outputs, w - 0.16, 1, f"chunk {i + 1}", pale.GREEN)
        _line(axes, (x + w / 2, outputs + 1), (x + w / 2, outputs + 1.8), color=GREEN)
        _write(axes, x + w / 2, outputs + 2.2, f"$O_{{[{i + 1}]}}$")
    _stages(axes, {"pass 1:\none block": 0.5, "in memory": states + 0.5}, -0.3)
    _stages(axes, {"pass 2:\na block\nfor each": outputs + 0.5}, -0.3)
    _time(axes, -2.9, 0, outputs + 1)
    axes.set(xlim=(-3.6, w * chunks + 0.1), ylim=(outputs + 2.75, -0.2))
    return figure


@drawing
def chunk_tiles(x: int = 5, y: int = 3) -> BookFigure:
    """A block of the second pass of "chunked": products of tiles, a slice of 16 at a time.

    Dots are the numbers that thread (x, y) computes; lines are what it reads for them in a slice.
    """
    T, gap = 3.4, 1.3  # a tile, and the space between two
    column, row = T + gap, T + gap
    unit, thread = T / 64, np.arange(4) * 16
    figure, axes = canvas(3 * T + 2 * gap + 0.3, 3 * T + 2 * gap + 1.0)

    def tile(i, j, name, fill=FAINT):
        rectangle(axes, j * column, i * row, T, T, fill)
        _write(axes, j * column + T / 2, i * row - 0.42, name)

    def slice_(i, j, across, start, fill, color):
        """16 rows of a tile (across) or 16 columns, and the four that the thread reads."""
        left, top = j * column, i * row
        corner = (left, top + start * unit) if across else (left + start * unit, top)
        width, height = (T, T / 4) if across else (T / 4, T)
        rectangle(axes, *corner, width, height, fill, color, zorder=2)
        for at in (x if across else y) + thread + 0.5:
            ends = np.array([start, start + 16]) * unit
            at = np.full(2, at * unit)
            xs, ys = (at, ends) if across else (ends, at)
            axes.plot(
                left + xs, top + ys, color=color, linewidth=1.2, solid_capstyle="butt", zorder=3
            )

    tile(2, 0, "$Q$, 64 × $C$")
    tile(1, 1, "$K^\\top$, $C$ × 64")
    tile(1, 2, "$S$, $C$ × 64")
    tile(0, 2, "$V$, 64 × 64")
    tile(2, 1, "weights, 64 × 64", "white")
    tile(2, 2, "$O$, 64 × 64", pale.GREEN)
    future = [(column, 2 * row), (column + T, 2 * row), (column + T, 2 * row + T)]
    axes.add_patch(Polygon(future, fc="#dcdcdc", ec="none"))
    slice_(2, 0, False, 16, pale.BLUE, BLUE)
    slice_(1, 1, True, 16, pale.BLUE, BLUE)
    slice_(1, 2, True, 16, pale.BLUE, BLUE)
    slice_(2, 1, False, 32, pale.VERMILION, VERMILION)
    slice_(0, 2, True, 32, pale.VERMILION, VERMILION)
    for i, j, at_x, at_y, step in (
        (2, 0, 24, 58, 1),
        (1, 1, 58, 24, 1),
        (1, 2, 58, 24, 1),
        (2, 1, 40, 58, 2),
        (0, 2, 58, 40, 2),
    ):
        _write(axes, j * column + at_x * unit, i * row + at_y * unit, str(step), fontweight="bold")
    for j in 1, 2:
        for m in x + thread:
            for t in y + thread:
                masked = j == 1 and m > t
                at = (j * column + (m + 0.5) * unit, 2 * row + (t + 0.5) * unit)
                style = {"fc": "white" if masked else INK, "ec": GRAY if masked else INK}
                axes.add_patch(Circle(at, 0.1, zorder=6, **style))
    for i, (fill, color) in enumerate(((pale.BLUE, BLUE), (pale.VERMILION, VERMILION))):
        rectangle(axes, 0, i - 0.1, 0.7, 0.7, fill, color)
        _write(axes, 0.35, i + 0.27, str(i + 1), fontweight="bold")
    axes.add_patch(Circle((0.35, 2.25), 0.1, fc=INK, ec=INK))
    axes.add_patch(Circle((0.35, 3.25), 0.1, fc="white", ec=GRAY))
    axes.plot([0, 0.7], [4.25, 4.25], color=BLUE, linewidth=1.2)
    key = (
        "$Q K^\\top$ and $Q S$, 16 features at a time",
        "weights times $V$, 16 tokens at a time",
        "what one thread computes",
        "what it computes and then masks",
        "what it reads",
    )
    for i, text in enumerate(key):
        _write(axes, 1.0, 0.25 + i, text, ha="left")
    axes.set(xlim=(-0.1, 2 * column + T + 0.1), ylim=(2 * row + T + 0.1, -0.9))
    return figure


@drawing
def tile_lanes(lane: int = 5) -> BookFigure:
    """Which lane holds which entry in a product of tiles; entries of one register have one color.

    The left 8 columns of A are laid out as C is: two C side by side are an A.
    """
    u, gap = 0.9, 1.7  # height of a cell; between the tiles
    figure, axes = canvas((24 + gap + 1.8) * 0.5, ((32 + gap) * u + 2.6) * 0.5)
    left, top = 16 + gap, (16 + gap) * u
    grays = ("#dedede", "#f2f2f2")
    quarters = (pale.BLUE, pale.VERMILION, pale.YELLOW, pale.GREEN)
    for each in range(32):
        g, t = divmod(each, 4)
        for register, color in enumerate(quarters):
            row, column = g + register % 2 * 8, 2 * t + register // 2 * 8
            _held(axes, column, top + row * u, 2, u, color, each, each == lane)
            if register < 2:
                _held(axes, left + column, top + row * u, 2, u, color, each, each == lane)
                row = 2 * t + register * 8
                _held(axes, left + g, row * u, 1, 2 * u, grays[register], each, each == lane)
    for x, y, width, height, name in (
        (0, top, 16, 16, "$A$, 16 × 16"),
        (left, 0, 8, 16, "$B$, 16 × 8"),
        (left, top, 8, 16, "$C$, 16 × 8"),
    ):
        for corner in np.ndindex(height // 8, width // 8):
            at = (x + 8 * corner[1], y + 8 * corner[0] * u)
            rectangle(axes, *at, 8, 8 * u, "none", INK, linewidth=1.4, zorder=4)
        _write(axes, x + width / 2, y - 0.75, name)

    _write(axes, 2.6, 4.1, "registers\nof a lane", linespacing=1.3)
    for register, color in enumerate(quarters):
        column, row = divmod(register, 2)
        y = 7.2 + 2 * row
        _box(axes, 2.6 * column, y, 2.6, 2, f"a[{register}]", color)
        if register < 2:
            _box(axes, 6.4, 2.1 + 2 * row, 4.8, 2, f"b{register}", grays[register])
            _box(axes, 6.4, y, 4.8, 2, f"c[{2 * register}], c[{2 * register + 1}]", color)
    axes.set(xlim=(-0.2, left + 8.2), ylim=(top + 16 * u + 0.2, -1.5))
    return figure


@drawing
def chunk_bands(warp: int = 2) -> BookFigure:
    """What each of the four warps of "tensor_core" owns, and what one of them reads."""
    T, gap = 4.4, 3.0  # a matrix, and the space between two
    far = T + gap
    figure, axes = canvas(2 * T + gap + 3.2, 2 * T + 5.6, unit=0.36)
    fills = (pale.BLUE, pale.VERMILION, pale.YELLOW, pale.GREEN)
    down = T + 2.4
    for x, y, name, place, where in (
        (0, 0, "$S$", "registers, float32", -0.45),
        (far, 0, "copy of $S$", "shared memory, 16 bits", -0.45),
        (0, down, "$Q$", "shared memory", T + 0.5),
        (far, down, "$O$", "registers, then memory", T + 0.5),
    ):
        copied = name.startswith("copy")
        for w, fill in enumerate(fills):
            rectangle(axes, x, y + w * T / 4, T, T / 4, fill, GRAY, linewidth=0.8)
            text = f"from warp {w}" if copied else f"warp {w}"
            _write(axes, x + T / 2, y + (w + 0.5) * T / 4, text)
        _write(axes, x + T / 2, y - 1.0 if where < 0 else y + T + 1.05, name)
        _write(axes, x + T / 2, y + where, place, color=GRAY)
    for x, y, height in (
        (far, 0, T),
        (0, down + warp * T / 4, T / 4),
        (far, down + warp * T / 4, T / 4),
    ):
        rectangle(axes, x, y, T, height, "none", INK, linewidth=2.4, zorder=6)
    _line(axes, (T + 0.1, T / 2), (far - 0.1, T / 2), color=INK)
    _write(axes, T + gap / 2, T / 2 - 0.4, "round")
    middle = down + (warp + 0.5) * T / 4
    _line(axes, (T + 0.1, middle), (far - 0.1, middle), color=INK)
    _write(axes, T + gap / 2, middle - 0.4, "its 16 rows")
    _line(axes, (far + T / 2, T + 0.1), (far + T / 2, down - 0.1), color=INK)
    _write(axes, far + T / 2 - 0.3, T + 1.2, "all 64 rows", ha="right")
    axes.set(xlim=(-1.6, far + T + 1.6), ylim=(down + T + 1.6, -1.6))
    return figure


@drawing
def packed(lane: int = 5) -> BookFigure:
    """Two tiles of scores slide together, and every lane holds its part of a left factor."""
    u, gap, top = 0.5, 1.6, 11.6  # height of a cell; between the tiles of scores; where A begins
    figure, axes = canvas(29, 22.4, unit=0.2)
    row, column = lane // 4, lane % 4 * 2
    halves = ((pale.BLUE, pale.VERMILION), (pale.YELLOW, pale.GREEN))
    for n, colors in enumerate(halves):
        above, below = n * (8 + gap), gap / 2 + 8 * n
        for half, color in enumerate(colors):
            e = 2 * half
            for left, y, text in (
                (above, 8 * half * u, f"scores[{n}][{e}],\nscores[{n}][{e + 1}]"),
                (below, top + 8 * half * u, f"a[{2 * n + half}]"),
            ):
                rectangle(axes, left, y, 8, 8 * u, color, INK, linewidth=1.2)
                _write(axes, left + 4, y + 5.4 * u, text, linespacing=1.2)
                cell = (left + column, y + row * u, 2, u)
                rectangle(axes, *cell, "white", VERMILION, linewidth=2, zorder=5)
        start, end = above + 4, below + 4
        _line(axes, (start, 16 * u + 0.2), (end, top - 0.2))
    right = 16 + gap + 0.7
    for y, text in (
        (4.0, "two $C$: each framed\npair is two float32\nregisters of lane 5"),
        (9.8, "mask, scale, pack"),
        (top + 4.0, "one $A$: each pair is\none register of lane 5,\ntwo 16-bit numbers"),
    ):
        _write(axes, right, y, text, ha="left", linespacing=1.3)
    axes.set(xlim=(-0.2, 29), ylim=(top + 16 * u + 0.2, -0.3))
    return figure


@drawing
def bank_access(accesses: Mapping[str, NDArray], size: int = 16) -> BookFigure:
    """Which of the 32 banks of shared memory each lane reads; where lanes must wait, it is hatched.

    accesses gives for each title the byte offset of each lane, -1 for a lane without; a lane reads
    `size` bytes there. The title counts the passes through shared memory.
    """
    words = max(size // 4, 1)
    lanes = max(len(offsets) for offsets in accesses.values())
    height = (0.7 + max(0.17 * lanes, 1.0)) * len(accesses) + 0.4
    figure, panels = new_figure(1, len(accesses), width=5.6, height=height, sharex=True)
    for (axes,), (name, offsets) in zip(panels, accesses.items(), strict=True):
        passes = 0
        for i in range(len(offsets)):
            for bank in range(32):
                rectangle(axes, bank, i, 1, 1, "white", "#d5d5d5", linewidth=0.6)
        for first in range(0, len(offsets), 32 // words):  # lanes that are served together
            together = {
                i: offsets[i] // 4 + np.arange(words)
                for i in range(first, min(first + 32 // words, len(offsets)))
                if offsets[i] >= 0
            }
            wanted = np.unique([*together.values()] or [[]]).astype(int)
            users = np.bincount(wanted % 32, minlength=32)  # lanes that want one word share it
            passes += int(users.max())
            for i, row in together.items():
                for bank in row % 32:
                    waits = (pale.VERMILION, VERMILION, "////")
                    fill, edge, hatch = waits if users[bank] > 1 else (BLUE, "white", None)
                    rectangle(axes, bank, i, 1, 1, fill, edge, hatch=hatch, linewidth=0.8)
        axes.set_title(f"{name}: {passes} pass{'es' * (passes > 1)}")
        axes.set(xlim=(-0.1, 32.1), ylim=(len(offsets) + 0.1, -0.1), ylabel="lane")
        named = np.arange(0, len(offsets), 1 if len(offsets) <= 8 else 4)
        axes.set_yticks(named + 0.5, named)
        axes.set_xticks(np.arange(0, 32, 4) + 0.5, range(0, 32, 4))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    panels[-1, 0].set_xlabel("bank")
    return figure


@drawing
def segments(segments: int = 3, chunks: int = 4) -> BookFigure:
    """The kernel "tensor_core" in time, downward: segments at once, then their sums, then again."""
    w, gap = 0.7, 0.7
    length = w * chunks
    pitch = length + gap
    sums = length + 1.1  # where the second pass adds, and where the third begins
    outputs = sums + 1.3
    figure, axes = canvas(pitch * segments + 3.6, outputs + length + 1.3)
    for s in range(segments):
        x, end = pitch * s, pitch * s + length - w / 2
        _write(axes, x + length / 2, -0.6, f"segment {s + 1}")
        for i in range(chunks):
            for y, color in (0, pale.VERMILION), (outputs, pale.GREEN):
                rectangle(axes, x + w * i, y + w * i, w, w, color)
        _line(axes, (end, length), (end, sums - 0.33), color=VERMILION)
        before = pitch * (s - 1) + length - w / 2 + 0.33 if s else -w / 2
        _line(axes, (before, sums), (x + w / 2, sums), (x + w / 2, outputs))
        _line(axes, (x + w / 2, sums), (end - 0.33, sums))
        axes.add_patch(Circle((end, sums), 0.33, fc="white", ec=INK, zorder=4))
        _write(axes, end, sums, "+")
    _line(axes, (end + 0.33, sums), (end + gap + w, sums))
    rows = {"pass 1:\nsums": length / 2, "pass 2:\nstates": sums}
    _stages(axes, rows | {"pass 3:\noutputs": outputs + length / 2}, -0.55)
    _time(axes, -2.8, 0, outputs + length)
    axes.set(xlim=(-3.5, pitch * segments + 0.4), ylim=(outputs + length + 0.1, -1.1))
    return figure


# ---- Pieces. -------------------------------------------------------------------------------------


def _pale(color: str, share: float = 0.28) -> tuple[float, ...]:
    """A color mixed with white."""
    return tuple(1 - share * (1 - part) for part in to_rgb(color))


def _write(axes: Axes, x: float, y: float, text: str, **style) -> None:
    write(axes, x, y, text, **{"zorder": 5, **style})


def _cell(axes: Axes, x: float, y: float, fill) -> None:
    rectangle(axes, x, y, 1, 1, fill, linewidth=0.8)


def _box(axes: Axes, x, y, width, height, text: str, fill) -> None:
    box(axes, x, y, width, height, text, fill, zorder=5)


def _line(axes: Axes, *points: tuple[float, float], color: str = BLUE) -> None:
    way(axes, *points, color=color, linewidth=1.2, shrinkB=1)


def _double(axes: Axes, x: float, start: float, end: float) -> None:
    arrow(axes, (x, start), (x, end), gap=1, arrowstyle="<|-|>", linewidth=1.2)


def _stages(axes: Axes, rows: Mapping[str, float], x: float) -> None:
    for text, y in rows.items():
        _write(axes, x, y, text, ha="right", linespacing=1.3)


def _time(axes: Axes, x: float, start: float, end: float) -> None:
    _line(axes, (x, start), (x, end), color=GRAY)
    _write(axes, x - 0.4, (start + end) / 2, "time", rotation=90, color=GRAY)


def _held(axes: Axes, x, y, width, height, fill, lane: int, frame: bool) -> None:
    """Neighbouring entries that one lane holds in one register."""
    rectangle(axes, x, y, width, height, fill, "#bdbdbd", linewidth=0.6)
    weight = "bold" if frame else "normal"
    _write(axes, x + width / 2, y + height / 2, str(lane), fontsize=9, fontweight=weight)
    if frame:
        rectangle(axes, x, y, width, height, "none", VERMILION, linewidth=2, zorder=5)
