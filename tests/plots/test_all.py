"""What holds for every figure. A new one needs a line in `FIGURES` and nothing else."""

from __future__ import annotations

import functools
import inspect
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from lesson_code import plots
from lesson_code.plots.colors import luminance
from tests.plots.conftest import texts

RNG = np.random.default_rng(0)
Q = K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
V = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
GO = np.ones((3, 2))
X, KEYS = RNG.normal(size=8), RNG.normal(size=(8, 2))
WEIGHTS = np.tril(RNG.uniform(0.1, 1, (8, 8)))
READS = np.triu(RNG.uniform(0.1, 1, (24, 24)))
ROW = np.full(8, 1 / 8)
PIXELS = RNG.integers(0, 17, (12, 64))
TIMES = {"one": 0.98, "two": 0.0077, "three": 0.00062}
LANES = np.arange(32)
LINE = {64: 1e-3, 1024: 1e-2}
STEP = {"N": 10, "seconds": {"a": 0.1, "b": None}, "bytes": {"a": 40, "b": 64}}
SENT = [
    {"ranks": ranks, "bytes": 1e4 * 4**i, "predicted": t, "seconds": 1.2 * t, "fitted": i % 2}
    for ranks in (2, 3)
    for i, t in enumerate(1e-4 * ranks * 3.0 ** np.arange(4))
]
DEVICES = {
    "slow": (1e11, {"float32": 1e12, "tensor cores": 1e13}),
    "fast": (1e12, {"float32": 2e13, "tensor cores": 4e14}),
}
FIGURES = {
    "curves": ([1, 10, 100], {"a": [1, 2, 3], "b": [3, 2, 1]}),
    "matrix_equation": (("Q", Q), r"\times", ("K^\\top", K.T), "=", ("S", Q @ K.T)),
    "softmax.words_and_weights": (
        [(["the", "cherry", "is", "red"], [0.05, 0.9, 0, 0.05])] * 2,
        "ab",
    ),
    "softmax.learning": ([0, 10], {"big": np.eye(2, 3), "small": np.eye(2, 3)}, "abc"),
    "softmax.weights_side_by_side": (Q, K, [f"token {i}" for i in range(len(K))]),
    "softmax.tiles": (5,),
    "bracket.two_brackets": (512, 64),
    "bracket.weight_rows": (KEYS[:1], KEYS),
    "bracket.sharpness": ([64, 1000], {10: [0.9, 0.5], 5: [0.5, 0.1]}, [0.04, 0.001], 64),
    "bracket.gain": ([16, 128, 1024], [0.9, 1.2, 6], [0.2, 2, 16]),
    "memory.writes": (K, V, ("red", "round", "cherry")),
    "memory.signal_and_crosstalk": (K, V, 0),
    "memory.capacity": ([2, 3, 5], {16: [0.1, 0.1, 0.2], 64: [0.02, 0.03, 0.06]}),
    "memory.drowning": ({"a": {1: X[:4], 9: X[4:]}, "b": {1: X[:4], 9: X[4:]}},),
    "memory.retrieval": (
        [0.25, 1, 4],
        {16: [0.01, 0.2, 0.5], 64: [0, 0.002, 0.2]},
        ([1, 4], [0.03, 0.3]),
        {16: 1.3, 64: 3.0},
    ),
    "memory.halfway": (65, 64, 64),
    "recurrence.unrolled": (Q, K, V),
    "recurrence.two_ways": (Q, K, V, 3),
    "recurrence.composed_steps": (1.5, [0.5, -1.0, 0.3], (1, 3)),
    "recurrence.marks": (np.linspace(-2, 2, 5), np.ones((2, 5)), np.eye(2, 5)),
    "recurrence.valley": ([1, 8, 64, 512], [80.0, 27.0, 10.0, 34.0], [1.0, 1.1, 2.0, 9.0]),
    "recurrence.between": (6, (1, 3, 6)),
    "feature_maps.heads_reading": ({"a": np.tri(3) / 2, "b": np.tri(3)}, "a b"),
    "feature_maps.fixed_rows": ({"a": np.tri(2, 3) / 2, "b": np.tri(4, 3) / 4}, "a b"),
    "feature_maps.trained_and_not": ({"a": ({16: 1.2}, {16: 0.5, 32: 0.4}), "b": ({32: 1}, {})},),
    "feature_maps.plane_and_weights": ([2.0, -1.0], K, {"a": ROW[:3], "b": ROW[:3], "c": ROW[:3]}),
    "random_features.estimated_over_exact": ((16, 256),),
    "random_features.best_rank": ({"a": np.linspace(1, 0, 9)}, 0.1),
    "random_features.where_the_mean_is": ((1, 4),),
    "random_features.two_rooms": (1.0, 0.5, [0.8, -0.5, 1.2]),
    "random_features.misplaced_weight": (
        [4, 16, 64],
        {"b": [0.5, 0.4, 0.3], "c": [0.5, 0.3, 0.2]},
        {"a": (8, 0.2)},
        0.45,
    ),
    "layer.cell": (),
    "layer.two_orders": (3, 5),
    "layer.model": (),
    "layer.three_ways": (K, V, {"Bytes kept after 1,000 tokens:": (0, 512_000, 16_640)}),
    "layer.by_people": ([(1, 2), (3, 4)], {"one": [[1, 0.9], [1, 0.8]], "two": [[0.5, 0.1]]}),
    "layer.places": (["Ann", "Bob", "Cy"], np.eye(3), [1.0, 0.9, 0.5]),
    "layer.who_sees_whom": ({"one": WEIGHTS, "other": 100 * WEIGHTS},),
    "scans.scan_of_pairs": ([(1, 3), (2, 1), (1, 4), (2, 2)],),
    "scans.row_and_column": (4, 3, 2),
    "scans.chunk_sizes": ({"a": {8: 3.0, 16: 1.0}, "b": {8: 2.0, 16: 4.0}},),
    "scans.orders": (8, 2, 2),
    "scans.gradients": (Q, K, V, GO),
    "devices.side_by_side": ({"this": {"a": LINE, "b": LINE}, "that": {"a": LINE}},),
    "devices.one_above_the_other": ({"this": {"a": LINE}, "that": {"a": LINE}},),
    "devices.calls": ([0.9, 0.012, 0.01, 0.03, 0.01],),
    "devices.quotients": ({"short": {"one way": [0.3, 2.5, 1.1], "another": [0.99, 1.0]}},),
    "devices.moved": (
        {"base": [300], "a": [1_900, 2_000], "b": [140]},
        {"base": 290, "a": 1_800, "b": 130},
        "base",
        (2_000, 8_000),
    ),
    "kernels.roofline": (DEVICES, {"D = 64": (16384, 512), "D = 128": (65536, 1024)}),
    "kernels.waiting": (),
    "kernels.bounds": (
        {"8 heads": {"a": {"work": 0.1, "trips": 0.3}, "b": {"work": 2}}},
        0.1,
        (1,),
        "trips",
    ),
    "kernels.reasons": ({"8 heads": {"bytes": {"a": (0.9, 1.4), "b": (14, 22)}}}, 0.06),
    "kernels.orders": ({"alternating": "LsLsLs", "together": "LLLsss"},),
    "kernels.chunk_bands": (),
    "kernels.packed": (),
    "kernels.gpu_map": (),
    "kernels.issue": ({"lonely": [[0], []], "together": [[0, 2], [1, 3]]},),
    "kernels.warp_access": ({"neighbors": LANES * 4, "apart": LANES * 128},),
    "kernels.column_threads": (),
    "kernels.chunk_passes": (),
    "kernels.chunk_tiles": (),
    "kernels.tile_lanes": (),
    "kernels.bank_access": ({"128 bytes": LANES[:8] * 128, "144 bytes": LANES[:8] * 144},),
    "kernels.segments": (),
    "numerics.sums_stick": ({"a": np.minimum(np.arange(1, 41), 8), "b": np.arange(1, 41)},),
    "numerics.bit_layouts": ({"a": (8, 7), "b": (5, 10)},),
    "numerics.number_lines": (),
    "numerics.stored_state": (
        25.0,
        {"a": 23 * np.arange(1, 41), "b": np.minimum(23 * np.arange(1, 41), 524)},
    ),
    "numerics.growth": (2.0 ** np.arange(8), {"a": np.arange(1, 9), "b": np.ones(8)}, {"a": 0.5}),
    "numerics.fading": (10.0 ** -np.arange(9), {"a": np.full(9, 10), "b": 10 * (np.arange(9) < 4)}),
    "numerics.running_maximum": ([1, 3, 2, 4],),
    "numerics.masked_exponents": (np.arange(8) - np.arange(8)[:, None], 5.0),
    "numerics.errors_by_size": (np.geomspace(1e-6, 1, 40), np.full(40, 1e-8), 1e-3),
    "numerics.rounded_parts": (
        {"a": {"x": (1e-3, 0.1), "y": (1e-2, 1)}, "b": {"x": (1e-3, 0.1), "y": (1e-2, 1)}},
        ("one", "two"),
        {"limit": 1.0},
    ),
    "rwkv.weights": ({"one": WEIGHTS, "other": WEIGHTS}, list("abcdefgh")),
    "rwkv.blocks": ({"one": WEIGHTS, "other": WEIGHTS}, 4),
    "rwkv.weights_of_the_past": (np.geomspace(1, 0.01, 32), 400),
    "rwkv.block": (),
    "retnet.fading": (K, V, 0.5),
    "retnet.noise": ({"1": 8 * np.ones(40), "1/2": 2.0 ** np.arange(40)}, 8),
    "retnet.exponents": (0.5, 3, 3),
    "gates.plane": ({"no gate": [[1.5, 0.1]] * 2, "one gate": [[1.1, 1.3]] * 2}, 1.1),
    "gates.over_time": (READS, [0, 1, 5, 6] * 6),
    "gates.halving": (8,),
    "mamba.selection": (X, [3, 5], {"chosen": X, "fixed": -X}),
    "mamba.inflow": (),
    "mamba.turns": ({"fades": [1, 0.5, 0.25], "turns": [1, 0.9j, -0.8]},),
    "mamba.blocks": (),
    "gated_delta.answers": (["one", "two"], GO[:2], {"a": GO[:2], "b": 0 * GO[:2]}, ("x", "y")),
    "gated_delta.two_shares": (),
    "gated_delta.half_lives": ({"a": [1.0, 8.0, 300.0], "b": [50.0, 700.0]}, [(1, "here")]),
    "gated_delta.right_answers": ({"a": {"x": GO, "y": GO / 2}}, ("one", "two"), 0.1),
    "conversion.reading": (
        dict.fromkeys("abcd", WEIGHTS),
        "one two . one two . six ten".split(),
        [(3, 1)],
    ),
    "conversion.by_age": ([8, 24], {"a": {"x": GO[0], "y": GO[1]}, "b": {"z": GO[0]}}, 0.1),
    "delta.rewritten": ({"first": [1, np.nan], "second": [np.nan, 2]}, {"a": K[:2], "b": K[1:]}),
    "delta.many_keys": ([8, 16], {"one": [[1, 0.9], [1, 0.8]], "two": [[0.5, 0.1]]}),
    "delta.projections": (K, [1.0, 2.0, 2.0], [1.0, 1.0, 0.5]),
    "tracking.cups": ([(1, 3), (2, 5)], 1),
    "tracking.disk": (),
    "tracking.mirrors": (),
    "tracking.reach": ({"a": {"one": [0, 32, 64], "two": [512] * 3}, "b": {"one": [16] * 3}}, 32),
    "learning.walks": (
        [[1, 0], [1, 1]],
        [10, 30],
        {"a": [[0, 0], [10, 0], [40, 30]], "b": [[0, 0], [10, 0], [10, 20]]},
        ("x", "y"),
        ("s", "t"),
    ),
    "learning.exam": ([1, 2], {"a": {"x": GO, "y": GO / 2}, "b": {"x": GO / 4}}),
    "between.covers": (9, 3, 0.8),
    "between.levels": (8,),
    "between.by_distance": ([1, 2, 4], {"a": {"one": GO.T / 2, "two": GO.T}, "b": {"x": GO.T}}),
    "family.token_weights": (K, V[:, 0], {"plain": ROW[:3], "decay": ROW[:3]}),
    "family.eigenvalues": ({"fade": [0.5, 1.0], "flip": [-1.0], "rotate": [1j, -1j]},),
    "family.learning": ([50, 100], {"one": [[2, 1], [2, 2]], "two": [[2, 0], [1, 0]]}, 2.7),
    "family.two_axes": ({"fade": [["plain", "RetNet"], []], "flip": [[], ["delta"]]}, ["1", "2"]),
    "family.continuation": ("a prompt", " and what\nfollows it"),
    "real_models.hybrids": ({"one": "SSSC" * 12, "another": "S-S-S-SC-" * 3},),
    "real_models.layer": (),
    "real_models.speeds": (
        [
            {"model": m, "task": t, "tokens": 100, "seconds": {"library": 0.2, "here": 0.1}}
            for m in ("Qwen3Next", "KimiLinear")
            for t in ("prefill", "training", "decode")
        ],
    ),
    "recall.overflow": ({"one": np.eye(8, dtype=bool), "other": np.ones((8, 8), bool)}, 3),
    "recall.lookups": ({"a": (WEIGHTS, np.arange(8), np.arange(8) > 5)},),
    "recall.blocks": ({"one": WEIGHTS, "other": WEIGHTS}, 4),
    "recall.spread": ([4, 8, 16], {"a": [[1, 0.9, 0.5]], "b": [[0.9, 0.5, 0.2]]}),
    "recall.groups": (
        [4, 8, 16],
        {"one": {"a": [[1, 0.9, 0.5]]}, "other": {"b": [[0.9, 0.5, 0.2]]}},
        [1, 0.8, 0.4],
    ),
    "recall.against_law": ([1, 2], [0.9, 0.3], {"a": {"512": ([1, 2], [0.8, 0.2])}}),
    "recall.sizes": (
        {"a": {"512": [0.4, 0.5], "1,024": [0.7, 0.8]}, "b": {"512": [0.2], "1,024": [0.3]}},
        {"512": 0.5, "1,024": 0.8},
    ),
    "worth.exchange": ({"a": (500, 0.4), "b": (600, 0.4), "softmax": (8000, 1.0)}, 0.5),
    "images.raster": (PIXELS[0], 27, 17),
    "images.bins": ([0.3, 0.7], [1.0, 3.5], [0.4, 0.6], np.full(17, 1 / 17)),
    "images.gallery": ({"held out": PIXELS, "drawn": PIXELS}, 17),
    "images.completions": (PIXELS[:2], [PIXELS[:3], PIXELS[:3]], 32, 17),
    "images.distances": ({"a": [0.5, 1.5, 3.0], "b": [2.0, 7.5]},),
    "images.gains": (
        [16, 64, 256],
        {"here": {"a": [10, 40, 160], "b": [1, 2, 3]}, "there": {"a": [5, 20, 80]}},
        {"here": {"a": {64: 50}}, "there": {}},
    ),
    "decoding.readers": (4e8, {"a": 2e9, "b": 4e6}, {"a": 1, "b": 900}),
    "decoding.contexts": ([STEP, {**STEP, "N": 100}], ["a", "b"]),
    "machines.states_that_travel": ([V[:2], V[:2], V[1:]], V),
    "machines.timeline": ([2.4, 4.6, 3.3],),
    "machines.prediction": (SENT,),
    "machines.durations": (TIMES,),
}
LABELS = {"xlabel": "N", "ylabel": "numbers"}
every_figure = pytest.mark.parametrize("name", FIGURES)


def draw(name: str):
    function = functools.reduce(getattr, name.split("."), plots)
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.name in LABELS and p.default is p.empty]
    return function(*FIGURES[name], **{label: LABELS[label] for label in needed})


figure_of = functools.cache(draw)


@functools.cache
def texts_of(name: str) -> list[Text]:
    return texts(figure_of(name))


def test_all_figures_are_here() -> None:
    modules = [name for name in plots.__all__ if inspect.ismodule(getattr(plots, name))]
    drawn = {
        f"{module}.{name}"
        for module in modules
        for name, value in vars(getattr(plots, module)).items()
        if hasattr(value, "__wrapped__") and value.__module__ == f"lesson_code.plots.{module}"
    }
    assert set(FIGURES) == drawn | {"curves", "matrix_equation"}


ONE_OF_EACH = {name.partition(".")[0]: name for name in FIGURES}
ONE_OF_EACH["random_features"] = "random_features.estimated_over_exact"  # it draws numbers


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_the_same_figure_is_the_same_bytes(name: str) -> None:
    """One of each module: to draw all of them twice takes a minute, and they are made alike."""
    assert figure_of(name)._repr_svg_() == draw(name)._repr_svg_()


@every_figure
def test_a_phone_can_show_it(name: str) -> None:
    width = figure_of(name).get_figwidth()
    assert width <= 6.4
    smallest = min((text.get_fontsize() for text in texts_of(name)), default=11)
    assert smallest * 350 / (width * 72) > 7


@every_figure
def test_no_text_covers_another(name: str) -> None:
    boxes = [(text, text.get_window_extent().padded(-1)) for text in texts_of(name)]
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other), (a.get_text(), b.get_text())


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith("kernels")])
def test_no_text_is_pale(name: str) -> None:
    for text in texts_of(name):
        assert 1.05 / (luminance(to_rgb(text.get_color())) + 0.05) >= 4.5, text.get_text()
