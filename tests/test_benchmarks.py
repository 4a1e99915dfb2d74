"""The scripts that measure, and what they have measured."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

import lesson_code.torch as lt
from lesson_code import costs, results
from lesson_code.data import digits

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["harness", "mixers"]  # what the scripts that train have in common
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SHARED)
# It has a result where it has run on a GPU; tests/cupy/test_benchmark.py tries it without one.
NAMES.remove("kernels")
SMALL = {
    "bracket": ["--lengths", "70", "128", "--repeats", "1"],
    "chapters": ["--chapters", "02"],
    "causal": ["--lengths", "70", "128", "--repeats", "1"],
    "crossings": ["--settings", "base", "--lengths", "70", "--repeats", "1", "--runs", "1"],
    "decoding": ["--positions", "5", "50", "--contexts", "5", "50", "--repeats", "1"],
    "delta": ["--lengths", "130", "--widths", "16", "--long", "130", "--repeats", "1"],
    "exchange": ["--ranks", "2", "--heads", "1", "2", "512", "--repeats", "1"],
    "family": ["--length", "70", "--repeats", "1"],
    "forgetting": ["--quick"],
    "forms": ["--tokens", "70", "--lengths", "1", "16", "--repeats", "1"],
    "letters": ["--quick"],
    "kernel_times": ["--kernels", "tensor_core", "--gpus", "H200", "--shapes", "1,2,128,64"],
    "habits": ["--calls", "2", "--trials", "1"],
    "heads": ["--quick"],
    "generation": ["--size", "1", "64", "--repeats", "1", "--memory", "2000000", "--eager"],
    "language": ["--quick"],
    "needle": ["--quick"],
    "predictions": ["--groups", "streams", "walks"],
    "pronouns": ["--steps", "3", "--seeds", "0"],
    "readers": ["--readers", "1", "3", "--tokens", "5", "--repeats", "1"],
    "real_models": ["--models", "Qwen3Next", "--length", "70", "--width", "64", "--head", "16"]
    + ["--repeats", "1"],
    "registers": ["--architectures", "sm_80", "--kernels", "wkv", "--widths", "64"],
    "scans": ["--lengths", "64", "128", "--repeats", "1"],
    "regression": ["--quick"],
    "stalls": ["--kernels", "chunked"],
    "tracking": ["--quick"],
}


def keys(value):
    """The structure of a result, without its numbers: one row stands for all."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [keys(item) for item in value[:1]]
    return type(value).__name__


class Done(NamedTuple):
    """What a program has printed, and its exit status."""

    returncode: int | str
    stdout: str
    stderr: str


def run(name: str, output: Path, *options: str) -> Done:
    """A script with options, in this process: another one would have to import torch first."""
    path = ROOT / "benchmarks" / f"{name}.py"
    printed, complained = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
        contextlib.chdir(ROOT),
        mock.patch.object(sys, "argv", [str(path), "--output", str(output), *options]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        mock.patch.object(torch, "set_num_threads"),  # one, as in all tests
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
    return Done(code, printed.getvalue(), f"{complained.getvalue()}{code or ''}")


@pytest.mark.parametrize("name", SMALL)
def test_a_script_writes_what_is_committed(name: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    result = run(name, output, *SMALL[name])
    assert result.returncode == 0, result.stderr
    found, committed = json.loads(output.read_text(encoding="utf-8")), results.load(name)
    assert keys(found) == keys(committed)
    # A number of the kernel files, and of what they are compiled with: it changes with them.
    assert found.get("sources") == committed.get("sources"), f"run: python benchmarks/{name}.py"
    if name == "registers" and found["nvrtc"] == committed["nvrtc"]:
        assert all(row in committed["rows"] for row in found["rows"])


@pytest.mark.parametrize("name", NAMES)
def test_a_result_says_where_it_comes_from(name: str) -> None:
    result = results.load(name)
    assert {"what", "machine", "date", "rows"} <= set(result)
    no_draws = ("chapters", "exchange", "kernel_times", "predictions", "registers", "stalls")
    assert "seed" in result or name in no_draws
    machines = result["machine"] if isinstance(result["machine"], list) else [result["machine"]]
    for machine in machines:
        assert {"device", "threads", "python", "torch"} <= set(machine)
    assert result["rows"]
    if machines is result["machine"]:  # each row says on which it was made
        seen = dict.fromkeys(row["machine"] for row in result["rows"])
        assert set(seen) == set(range(len(machines)))


def test_every_result_has_its_script() -> None:
    folder = Path(results.__file__).parent
    ends = re.compile("_(cuda|scale|linear)$")  # what a script writes with an option
    found = {ends.sub("", path.stem) for path in folder.glob("*.json")}
    assert found - {"kernels"} == set(NAMES)


def test_an_unknown_result() -> None:
    with pytest.raises(ValueError, match="must be one of bracket, causal, chapters.*got 'speed'"):
        results.load("speed")


# --- The steps that are measured against each other ----------------------------------------------

CACHES = ["KV cache", "grouped cache", "latent cache"]
STATES = ["linear", "gated", "delta"]


def script(name: str) -> ModuleType:
    """A script as a module."""
    folder = str(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)  # as if it was run: it may import the scripts beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


@pytest.fixture(scope="module")
def decoding() -> ModuleType:
    return script("decoding")


@pytest.fixture
def draw() -> Callable[..., torch.Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", STATES)
def test_a_measured_step_is_that_of_the_package(
    decoding: ModuleType, draw: Callable, name: str
) -> None:
    H, N, D, M = 3, 6, 4, 5
    q, k, v = draw(H, N, D), draw(H, N, D), draw(H, N, M)
    S, z = torch.zeros(H, D, M), torch.zeros(H, D, 1)
    if name == "linear":
        step, memory, more = decoding.linear_step, (S, z), ()
        expected = lt.linear_attention(q, k, v, causal=True)
    elif name == "gated":
        step, memory, more = decoding.gated_step, (S,), (-draw(H, N, D).abs(),)
        expected = lt.gated_linear_attention(q, k, v, *more)
    else:
        k = torch.nn.functional.normalize(k, dim=-1)
        step, memory, more = decoding.delta_step, (S,), (draw(H, N, 1).sigmoid(),)
        expected = lt.delta_rule(q, k, v, more[0][..., 0])
    for t in range(N):
        token = slice(t, t + 1)
        out = step(*memory, *(x[:, token] for x in (q, k, v, *more)))
        torch.testing.assert_close(out, expected[:, token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_measured_cache_is_that_of_the_package(
    decoding: ModuleType, draw: Callable, way: int, kv_heads: int
) -> None:
    H, N, D = 6, 7, 4
    q, (k, v) = draw(H, 1, D), draw(2, kv_heads, N, D)
    cache = torch.stack([k, v])
    cache[:, :, -1] = torch.nan  # the place of the token that is to be written
    out = decoding.cached_step(decoding.ATTEND[way], cache, q, k[:, -1:], v[:, -1:])
    torch.testing.assert_close(out, lt.grouped_query_attention(q, k, v))

    R = 5
    latent = draw(1, N, R)
    up_k, up_v = draw(2, H, R, D)
    cache = latent.clone()
    cache[:, -1] = torch.nan
    out = decoding.latent_step(decoding.ATTEND[way], cache, q, latent[:, -1:], up_k, up_v)
    torch.testing.assert_close(out, lt.latent_attention(q, latent[0], up_k, up_v))


def test_memories_have_the_size_that_is_written_down(decoding: ModuleType) -> None:
    N = 5_000
    for name, size in decoding.kept_bytes(N).items():
        step, *_ = decoding.steps(name, N, "cpu")
        memory = step.args[: 2 if name == "linear" else 1]
        if "cache" in name:
            memory = step.args[1:2]
        assert sum(4 * x.numel() for x in memory) == size
        assert all(torch.isfinite(x).all() for x in memory)


def test_a_cache_that_outgrows_the_memory_is_not_run(decoding: ModuleType) -> None:
    kept = decoding.kept_bytes(300)
    row = decoding.measure_context(300, "cpu", 1, memory=kept["grouped cache"])
    assert row["bytes"] == kept
    assert {name for name, t in row["seconds"].items() if t is None} == {"KV cache"}


# --- The scripts that train ---------------------------------------------------------------------


TRAINED = ["conversion", "digits", "layer", "lookup", "overwriting", "recall"]


def train(name: str, output: Path, *, expect: str) -> dict:
    """Try a script; what it writes, of the same form as what is committed."""
    done = run(name, output, "--quick")
    assert done.returncode == 0, done.stderr
    assert expect in done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert keys(result) == keys(results.load(name))
    return result


def without_seconds(result: dict) -> list[dict]:
    return [row | {"seconds": 0} for row in result["rows"]]


def test_rows_of_another_machine_are_kept_with_its_name(tmp_path: Path) -> None:
    output = tmp_path / "lookup.json"
    result = train("lookup", output, expect="0 runs done, 7 left")
    [here], kept = result["machine"], result["rows"][:-1]
    there = here | {"device": "another"}
    output.write_text(json.dumps(result | {"machine": [there], "rows": kept}), encoding="utf-8")
    again = train("lookup", output, expect="6 runs done, 1 left")
    assert again["machine"] == [there, here]
    assert [row["machine"] for row in again["rows"]] == [0] * 6 + [1]


def test_every_script_is_tried() -> None:
    assert sorted([*SMALL, *TRAINED]) == NAMES


@pytest.mark.parametrize("name", TRAINED)
def test_results_of_another_version_are_refused(name: str, tmp_path: Path) -> None:
    output, module = tmp_path / f"{name}.json", script(name)
    settings = module.SETTINGS | module.QUICK | {"version": 0}
    other = results.load(name) | {"settings": settings}
    output.write_text(json.dumps(other), encoding="utf-8")
    done = run(name, output, "--quick")
    assert done.returncode != 0 and "from another version of this script" in done.stderr
    assert f"python benchmarks/{name}.py --renew" in done.stderr
    assert json.loads(output.read_text(encoding="utf-8")) == other


def test_recall_is_trained_again_where_it_is_missing(tmp_path: Path) -> None:
    """What is missing comes to the same accuracy; nothing else is trained."""
    output = tmp_path / "recall.json"
    result = train("recall", output, expect="0 runs done, 56 left")
    settings, rows = result["settings"], result["rows"]
    assert [row["seed"] == settings["choosing"] for row in rows] == [True] * 18 + [False] * 38
    sizes = [row["parameters"] for row in rows]
    assert max(sizes) <= 1.01 * min(sizes)

    kept = [row for row in rows if row["mixer"] != "DeltaNet" or row["heads"] == 2]
    output.write_text(json.dumps(result | {"rows": kept}), encoding="utf-8")
    again = train("recall", output, expect="54 runs done, 2 left")
    assert without_seconds(again) == without_seconds(result)
    assert all(row in again["rows"] for row in kept)


def test_layers_are_trained_again_where_they_are_missing(tmp_path: Path) -> None:
    """The short runs come first, as they choose the step size of the long ones."""
    output = tmp_path / "layer.json"
    result = train("layer", output, expect="0 runs done, 7 left")
    short = [row["steps"] == result["settings"]["steps"] for row in result["rows"]]
    assert short == [True] * 4 + [False] * 3

    kept = [row for row in result["rows"] if row["mixer"] != "linear"]
    output.write_text(json.dumps(result | {"rows": kept}), encoding="utf-8")
    again = train("layer", output, expect="5 runs done, 2 left")
    assert without_seconds(again) == without_seconds(result)
    assert all(row in again["rows"] for row in kept)


def test_a_conversion_goes_on_from_the_softmax_model_of_its_seed(tmp_path: Path) -> None:
    """It is trained again, and the same; step sizes are those that the trials have chosen."""
    output = tmp_path / "conversion.json"
    result = train("conversion", output, expect="0 runs done, 30 left")
    assert [row["rates"] for row in result["rows"]][:15] == [[]] * 15
    kept = [row for row in result["rows"] if (row["way"], row["seed"]) != ("T2R", 0)]
    output.write_text(json.dumps(result | {"rows": kept}), encoding="utf-8")
    again = train("conversion", output, expect="29 runs done, 1 left")

    def stages(found: dict) -> list:
        return [[s | {"seconds": 0} for s in row["stages"]] for row in found["rows"]]

    assert stages(again) == stages(result)
    assert [row["rates"] for row in again["rows"]] == [row["rates"] for row in result["rows"]]


def test_notes_are_trained_again_where_they_are_missing(tmp_path: Path) -> None:
    """The step size is chosen first; the seed that chooses it is in no other run."""
    output = tmp_path / "overwriting.json"
    result = train("overwriting", output, expect="0 runs done, 40 left")
    settings, rows = result["settings"], result["rows"]
    assert [row["seed"] == settings["choosing"] for row in rows] == [True] * 18 + [False] * 22
    sizes = [row["parameters"] for row in rows if row["keys"] == 8]
    assert max(sizes) <= 1.01 * min(sizes)

    kept = [row for row in rows if row["mixer"] != "GLA" or row["seed"] == settings["choosing"]]
    output.write_text(json.dumps(result | {"rows": kept}), encoding="utf-8")
    again = train("overwriting", output, expect="3 left")
    assert without_seconds(again) == without_seconds(result)
    assert all(row in again["rows"] for row in kept)


def test_digits_are_trained_again_where_they_are_missing(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    output = tmp_path / "digits.json"

    def weights(mixer: str) -> dict[str, np.ndarray]:
        with np.load(tmp_path / f"digits_{mixer}.npz") as arrays:
            return dict(arrays)

    result = train("digits", output, expect="0 runs done, 4 left")
    before = weights("linear")
    assert len(result["rows"]) == 4
    settings = result["settings"]
    for row in result["rows"]:
        assert len(row["curve"]) == settings["steps"] // settings["every"]
        assert row["step"] == settings["every"] * (1 + np.argmin(row["curve"]))

    # The weights are those whose bits the file has.
    train_images, held_out = map(torch.from_numpy, digits.load())
    mixers = {
        "linear": lt.LinearAttention,
        "softmax": lambda width, num_heads: lt.SoftmaxAttention(width, num_heads, rotary=False),
    }
    for row in result["rows"][:2]:
        model = lt.ImageModel(64, 17, settings["width"], [mixers[row["mixer"]]], num_logistics=2)
        model.load_state_dict({k: torch.from_numpy(x) for k, x in weights(row["mixer"]).items()})
        with torch.no_grad():
            assert model.bits(held_out).mean().item() == pytest.approx(row["bits"], abs=1e-5)
            apart = model.bits(train_images[: settings["set_apart"]]).mean().item()
        assert apart == pytest.approx(min(row["curve"]), abs=1e-5)

    # What is drawn is compared with the images that training has seen.
    seen, held = train_images[settings["set_apart"] :], held_out
    squares = ((held[:, None] - seen) ** 2).sum(dim=2).min(dim=1).values
    assert result["nearest"]["real"]["still"] == sorted(squares.tolist())
    assert len(result["nearest"]["linear"]["shifted"]) == 8

    # A missing row or a missing file of weights is made again, and the same.
    (tmp_path / "digits_linear.npz").unlink()
    output.write_text(json.dumps(result | {"rows": result["rows"][:-1]}), encoding="utf-8")
    again = train("digits", output, expect="2 runs done, 2 left")
    assert without_seconds(again) == without_seconds(result)
    assert all(np.array_equal(x, before[name]) for name, x in weights("linear").items())


# --- What the book says about the measurements ---------------------------------------------------


def rows(which: str) -> dict[int, dict]:
    """Rows of one pass, by length."""
    return {row["N"]: row for row in results.load("causal")["rows"] if row["pass"] == which}


@pytest.mark.parametrize("which", ["forward", "forward + backward"])
@pytest.mark.parametrize("name", ["linear", "linear, normalized"])
def test_linear_attention_wins_from_512_positions_on(which: str, name: str) -> None:
    for N, row in rows(which).items():
        if N >= 512 and "softmax" in row["seconds"]:
            assert row["seconds"][name] < row["seconds"]["softmax"], N


@pytest.mark.parametrize("name", ["linear", "linear, normalized"])
def test_memory_is_that_of_the_results(name: str) -> None:
    inputs = 65_536 * results.load("causal")["input_bytes_per_position"]
    forward, both = (
        rows(which)[65_536]["bytes"][name] for which in ("forward", "forward + backward")
    )
    assert forward < 1.05 * inputs  # the output itself is as large as one input
    assert both < 4.1 * inputs  # and so is each of the three gradients


def test_a_state_takes_the_same_time_anywhere_and_a_cache_does_not() -> None:
    first, *_, last = results.load("decoding")["rows"]
    assert last["position"] == 1_000 * first["position"]
    assert last["seconds"]["state"] < 2 * first["seconds"]["state"]
    assert last["bytes"]["state"] == first["bytes"]["state"]
    assert last["seconds"]["cache"] > 20 * first["seconds"]["cache"]
    assert last["bytes"]["cache"] == 1_000 * first["bytes"]["cache"]


def contexts() -> dict[int, dict]:
    """Rows of the memories alone, by the length of the context."""
    return {row["N"]: row for row in results.load("decoding")["contexts"]}


@pytest.mark.parametrize("name", STATES)
def test_a_state_after_a_million_tokens_is_that_after_a_thousand(name: str) -> None:
    rows = contexts()
    short, long = rows[1_000], rows[1_000_000]
    assert long["bytes"][name] == short["bytes"][name] == 4 * 8 * 64 * (64 + (name == "linear"))
    assert long["seconds"][name] < 1.5 * short["seconds"][name]
    assert short["seconds"][name] < 1.5 * long["seconds"][name]


@pytest.mark.parametrize("name, numbers", list(zip(CACHES, (1_024, 256, 128), strict=True)))
def test_a_cache_grows_in_proportion(name: str, numbers: int) -> None:
    rows = contexts()
    assert all(row["bytes"][name] == 4 * numbers * N for N, row in rows.items())
    seconds = {N: row["seconds"][name] for N, row in rows.items()}
    assert 6 < seconds[1_000_000] / seconds[100_000] < 16
    assert seconds[1_000_000] > 100 * seconds[1_000]
    assert all(seconds[100_000] > 20 * rows[100_000]["seconds"][state] for state in STATES)


def test_what_outgrows_the_memory_is_marked() -> None:
    result = results.load("decoding")
    for row in result["contexts"]:
        for name, size in row["bytes"].items():
            assert (row["seconds"][name] is None) == (size > result["memory"])
    largest = max(contexts().values(), key=lambda row: row["N"])
    assert largest["seconds"]["KV cache"] is None  # so that the book has one to show


def test_a_smaller_cache_reads_fewer_bytes_in_less_time() -> None:
    for N, row in contexts().items():
        if 30_000 <= N <= 1_000_000:
            assert row["seconds"]["grouped cache"] < row["seconds"]["KV cache"]
            assert row["seconds"]["latent cache"] < row["seconds"]["KV cache"]


def test_many_readers_gain_less_in_time_than_in_bytes() -> None:
    """Weights that many share are used so often that they wait for arithmetic."""
    one, *_, many = results.load("readers")["rows"]
    assert (one["B"], many["B"]) == (1, 32)
    gains = {kind: many[kind]["KV cache"] / many[kind]["state"] for kind in ("bytes", "seconds")}
    assert gains["bytes"] > 16 and 3 < gains["seconds"] < 8
    assert many["bytes"]["none"] == one["bytes"]["none"] == 4 * 12 * 1_024**2
    assert many["seconds"]["none"] > 3 * one["seconds"]["none"]


MODELS = [
    *("conversion", "digits", "forgetting", "language", "layer", "letters", "lookup", "needle"),
    *("overwriting", "recall", "tracking"),
]


@pytest.mark.parametrize("name", MODELS)
def test_committed_runs_are_those_of_the_script(name: str) -> None:
    """All of them, in its order, with the step sizes that its trials choose, and none twice."""
    experiment, result = script(name).EXPERIMENT, results.load(name)
    assert result["settings"] == experiment.settings and result["what"] == experiment.what
    runs = [experiment.job_of(row) for row in result["rows"]]
    jobs = experiment.all_jobs(result["rows"], experiment.settings)
    assert runs == jobs
    output = Path(results.__file__).with_name(f"{name}.json")
    assert all(experiment.is_whole(row, experiment.settings, output) for row in result["rows"])


@pytest.mark.parametrize("name", ["digits", "layer", "overwriting", "recall"])
def test_models_that_are_compared_are_equally_large(name: str) -> None:
    by_task: dict = {}  # more keys need a larger vocabulary
    for row in results.load(name)["rows"]:
        if " of " not in row["mixer"]:  # other numbers of heads and features, on purpose
            by_task.setdefault(row.get("keys"), []).append(row["parameters"])
    assert all(max(sizes) <= 1.01 * min(sizes) for sizes in by_task.values())


def told(mixer: str, steps: int) -> list[float]:
    """Probabilities of known verbs, a number for each seed, with the best step size."""
    rows = [row for row in results.load("layer")["rows"] if row["steps"] == steps]
    by_rate: dict[float, list[dict]] = {}
    for row in rows:
        if row["mixer"] == mixer:
            by_rate.setdefault(row["rate"], []).append(row)

    def loss(runs: list[dict]) -> float:
        return sum(row["loss_to_choose_by"] for row in runs)

    return [row["probability"] for row in min(by_rate.values(), key=loss)]


@pytest.mark.parametrize("steps", [600, 1800])
def test_only_keys_find_the_verb(steps: int) -> None:
    assert len(told("softmax", steps)) == 5 and min(told("softmax", steps)) > 0.98
    assert {600: 0.5, 1800: 0.93}[steps] < min(told("linear", steps))
    assert max(told("linear", steps)) < 0.99
    assert max(told("keyless", steps)) < 0.11  # what counting verbs gives


def recalled(mixer: str, heads: int = 2) -> np.ndarray:
    """Accuracies (seeds, numbers of pairs)."""
    result = results.load("recall")
    rows = [row for row in result["rows"] if row["seed"] in result["settings"]["seeds"]]
    found = [row["accuracy"] for row in rows if (row["mixer"], row["heads"]) == (mixer, heads)]
    return np.array(found)


def test_softmax_recalls_all_pairs_and_a_fixed_state_does_not() -> None:
    assert recalled("softmax").min() > 0.98
    for name in ("linear (elu + 1)", "RetNet", "GLA", "Mamba-2", "DeltaNet", "KDA"):
        assert recalled(name)[:, -1].max() < 0.6
        assert (np.diff(recalled(name).mean(axis=0)) <= 0).all()  # the more pairs, the fewer found


def test_a_larger_state_recalls_more() -> None:
    for name in ("linear (elu + 1)", "DeltaNet"):
        small, middle, large = (recalled(name, heads)[:, -1].mean() for heads in (4, 2, 1))
        assert small < middle < large


def test_corrections_use_twice_the_memory_and_sums_and_decays_hardly_do() -> None:
    """At 64 pairs, in the words of the chapters on recall and on the family."""

    def gain(name: str) -> float:
        return recalled(name, 1)[:, -1].mean() - recalled(name)[:, -1].mean()

    for name in ("DeltaNet", "DeltaProduct", "KDA"):
        assert gain(name) > 0.2
    for name in ("linear (elu + 1)", "linear (Taylor)", "RetNet", "GLA"):
        assert 0 < gain(name) < 0.1
    assert recalled("Mamba-3", 1)[:, -1].max() < recalled("Mamba-3")[:, -1].min()


def test_learned_keys_come_to_what_the_law_says_of_random_ones() -> None:
    """A sum of outer products, of which each of 128 values is told by the nearest."""
    rng, law = np.random.default_rng(0), []
    for n in (16, 32, 64):
        k = rng.normal(size=(100, 2, n, 16))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        values = rng.normal(size=(100, 128, 32))
        v = values[:, :n].reshape(100, n, 2, 16).swapaxes(1, 2)
        read = (k @ (k.swapaxes(-1, -2) @ v)).swapaxes(1, 2).reshape(100, n, 32)
        distance = (values**2).sum(axis=-1)[:, None] - 2 * read @ values.swapaxes(-1, -2)
        law.append(np.mean(distance.argmin(axis=-1) == np.arange(n)))
    for name in ("linear (elu + 1)", "DeltaNet", "KDA"):
        assert np.abs(recalled(name).mean(axis=0)[2:] - law).max() < 0.12


def seconds_per_image(pixels: int) -> dict[str, float]:
    row = next(row for row in results.load("generation")["rows"] if row["pixels"] == pixels)
    return {name: found["seconds_per_image"] for name, found in row["methods"].items()}


@pytest.mark.parametrize(("pixels", "recomputed", "cache"), [(784, 500, 4), (3072, 1900, 10)])
def test_a_state_generates_fastest(pixels: int, recomputed: float, cache: float) -> None:
    seconds = seconds_per_image(pixels)
    assert seconds["recomputed"] > recomputed * seconds["state"]
    assert seconds["cache"] > cache * seconds["state"]
    assert seconds["tiled"] > recomputed * seconds["state"]
    assert seconds["recomputed"] > seconds["tiled"] > seconds["cache"]


CHUNKWISE = [
    "retention",
    "gated_linear_attention",
    "rwkv6",
    "state_space_dual",
    "delta_rule",
    "gated_delta_rule",
]


def family() -> dict[str, dict]:
    """Rows of the models, by name."""
    result = results.load("family")
    assert result["N"] == 8_192
    return {row["name"]: row for row in result["rows"]}


@pytest.mark.parametrize("name", CHUNKWISE)
def test_chunks_train_many_times_as_fast_as_the_recurrence_and_faster_than_softmax(
    name: str,
) -> None:
    row = family()[name]
    fewest = 8 if name == "gated_linear_attention" else 10  # its decays cost more than its products
    assert row["form"] == "chunkwise" and row["ratio"] >= fewest
    assert row["seconds"]["fast"] < family()["softmax"]["seconds"]["fast"]


def test_the_selective_scan_trains_five_times_as_fast_as_its_recurrence() -> None:
    assert family()["selective_scan"]["ratio"] >= 5


def test_every_model_that_trains_in_two_forms_is_measured_in_both() -> None:
    for name, row in family().items():
        both = {"fast", "recurrent"} if row["form"] else {"fast"}
        assert set(row["seconds"]) == set(row["bytes"]) == both, name


def test_a_model_of_an_exchange_predicts_times_that_it_was_not_fitted_to() -> None:
    result = results.load("exchange")
    fitted = [row for row in result["rows"] if row["fitted"]]
    assert {row["ranks"] for row in fitted} == {2} and len(fitted) >= 4
    for row in result["rows"]:
        sizes = {"heads": row["heads"], **result["model"]}
        predicted = costs.exchange_seconds(row["ranks"], 64, 64, **sizes)
        assert row["predicted"] == pytest.approx(predicted)
        most = 1.5 if row["ranks"] == 2 else 3  # more ranks share the cores of one machine
        assert 1 / most < row["predicted"] / row["seconds"] < most, row


def test_two_models_of_digits_are_alike_with_softmax_a_little_ahead() -> None:
    bits = {mixer: [] for mixer in ("linear", "softmax")}
    for row in results.load("digits")["rows"]:
        bits[row["mixer"]].append(row["bits"])
        assert row["standard_error"] < 0.03
        assert row["curve"][0] > 2.5 and row["step"] < results.load("digits")["settings"]["steps"]
    assert all(len(seeds) == 5 for seeds in bits.values())
    assert max(bits["softmax"]) < min(bits["linear"])
    assert max(bits["linear"]) - min(bits["softmax"]) < 0.03
    assert max(bits["linear"]) < 1.9


@pytest.mark.parametrize(("pixels", "layers"), [(784, 8), (3072, 16)])
def test_an_image_takes_what_its_operations_or_bytes_say(pixels: int, layers: int) -> None:
    (row,) = (row for row in results.load("generation")["rows"] if row["pixels"] == pixels)
    assert row["layers"] == layers
    t = {name: found["seconds_per_image"] for name, found in row["methods"].items()}
    size = pixels, 256, layers
    state = costs.recurrent_generation_operations(*size, heads=8).total
    half, whole = (
        costs.recomputed_generation_operations(*size, skip_masked=skip).total
        for skip in (True, False)
    )
    assert 0.75 < (t["tiled"] / half) / (t["state"] / state) < 1.25
    assert t["recomputed"] > t["tiled"]
    cached = costs.cached_generation_operations(*size).total
    moved = (
        costs.cached_generation_bytes(*size).memory
        / costs.recurrent_generation_bytes(*size, heads=8).memory
    )
    assert 1.5 * cached / state < t["cache"] / t["state"] < moved


@pytest.mark.parametrize(("pixels", "layers"), [(784, 8), (3072, 16)])
def test_two_rates_say_how_long_an_image_takes(pixels: int, layers: int) -> None:
    """Multiply-adds at the rate of linear maps, and bytes at that of a long cache."""
    (row,) = (row for row in results.load("generation")["rows"] if row["pixels"] == pixels)
    state = row["methods"]["state"]
    adds = state["batch"] * layers * 12 * 256**2 / state["products"]
    cache = contexts()[1_000_000]
    moves = cache["bytes"]["KV cache"] / cache["seconds"]["KV cache"]
    size, i = (pixels, 256, layers), np.arange(1, pixels + 1.0)
    bounds = {
        "recomputed": costs.recomputed_generation_operations(*size).total / adds
        + layers * 12 * 8 * 4 * (i**2).sum() / moves,
        "tiled": costs.recomputed_generation_operations(*size, skip_masked=True).total / adds,
        "cache": costs.cached_generation_operations(*size).total / adds
        + costs.cached_generation_bytes(*size).memory / moves,
        "state": costs.recurrent_generation_operations(*size, heads=8).total / adds
        + costs.recurrent_generation_bytes(*size, heads=8).memory / moves,
    }
    for name, bound in bounds.items():
        least = 1.0 if name == "state" else 1.3
        assert least < row["methods"][name]["seconds_per_image"] / bound < 1.7, name


def test_generation_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    output = tmp_path / "generation.json"
    assert run("generation", output, *SMALL["generation"]).returncode == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    removed = result["rows"][0]["methods"].pop("cache")
    output.write_text(json.dumps(result), encoding="utf-8")
    again = run("generation", output, *SMALL["generation"])
    assert again.returncode == 0 and again.stdout.count("per image") == 1
    methods = json.loads(output.read_text(encoding="utf-8"))["rows"][0]["methods"]
    assert methods.pop("cache").keys() == removed.keys()
    assert methods == result["rows"][0]["methods"]


def median_distance(kind: str, way: str) -> float:
    return np.median(np.sqrt(results.load("digits")["nearest"][kind][way]))


@pytest.mark.parametrize("mixer", ["linear", "softmax"])
def test_drawn_digits_are_farther_from_the_training_images_than_real_ones(mixer: str) -> None:
    found = results.load("digits")["nearest"]
    assert [len(found[kind]["still"]) for kind in (mixer, "real")] == [1000, 297]
    for way in ("still", "shifted"):
        real, drawn = (median_distance(kind, way) for kind in ("real", mixer))
        assert 1.15 * real < drawn < 0.85 * median_distance("two halves", way)
        assert median_distance("nearly copied", way) < real / 2
    close = np.quantile(found["real"]["still"], 0.05)
    assert np.mean(np.array(found[mixer]["still"]) < close) < 0.01


def test_a_moved_copy_is_far_until_the_images_may_move() -> None:
    assert median_distance("moved copies", "still") > 2 * median_distance("real", "still")
    assert set(results.load("digits")["nearest"]["moved copies"]["shifted"]) == {0}


def remembered(task: str, rule: str) -> np.ndarray:
    """Shares of right answers (seeds, kinds) of one rule."""
    result = results.load("forgetting")
    return np.array(
        [
            row["right"]
            for row in result["rows"]
            if (row["task"], row["rule"]) == (task, rule)
            and row["seed"] in result["settings"]["seeds"]
        ]
    )


AGAIN, VOID = 1, 2


@pytest.mark.parametrize("task", ["one", "four"])
def test_facts_that_change_need_a_correction(task: str) -> None:
    alone = np.stack([remembered(task, rule) for rule in ("decay", "decay per channel")])
    assert alone.shape == (2, 5, 3)
    assert np.sum(alone[..., AGAIN] > 0.75) == {"one": 1, "four": 0}[task]
    assert alone[..., AGAIN].max() < 0.815 and alone[..., VOID].min() > 0.85
    for rule in ("delta", "gated delta", "KDA", "RWKV-7"):
        assert 0.935 < remembered(task, rule)[:, AGAIN].max() < 0.995
    assert remembered(task, "RWKV-7").min() > 0.775


@pytest.mark.parametrize(("task", "shares"), [("one", [41, 15, 45]), ("four", [30, 30, 40])])
def test_how_often_each_kind_of_fact_is_asked_for(task: str, shares: list[int]) -> None:
    """The chapter on gated delta rules names these percentages."""
    forgetting = script("forgetting")
    rng = np.random.default_rng(0)
    *_, kinds = forgetting.draw(forgetting.TASKS[task], 4_096, forgetting.SETTINGS, rng)
    counted = np.bincount(kinds[kinds >= 0].numpy(), minlength=3)
    assert np.abs(100 * counted / counted.sum() - shares).max() < 1


def losses_of_letters(mixer: str) -> dict[str, list[float]]:
    """Losses by seed of one mixer, of words that end and of a sign that lasts."""
    result = results.load("letters")
    rows = [r for r in result["rows"] if r["mixer"] == mixer and r["seed"] in result["seed"]]
    assert len(rows) == 5
    return {what: [row[what] for row in rows] for what in ("loss", "words", "sign")}


def test_only_a_gate_for_each_channel_ends_words_and_keeps_a_sign() -> None:
    plain, constant, one, channels = (
        losses_of_letters(f"own, {name}")
        for name in ("no gate", "constant", "one gate", "gate per channel")
    )
    assert max(plain["sign"]) < 0.1 and min(plain["words"]) > 1.5
    assert min(constant["sign"]) > 0.5 and min(constant["words"]) > max(one["words"]) + 0.05
    assert min(one["sign"]) > 1.2 and max(one["words"]) < 1.13
    assert max(channels["sign"]) < 0.05 and max(channels["words"]) < 1.11


def test_a_constant_for_each_channel_gets_neither_quite_right() -> None:
    one, each, gates = (
        losses_of_letters(f"own, {name}")
        for name in ("constant", "constant per channel", "gate per channel")
    )
    assert max(each["sign"]) < min(one["sign"]) - 0.3
    assert min(each["sign"]) > max(gates["sign"]) + 0.05
    assert max(gates["words"]) + 0.04 < min(each["words"])
    assert max(each["words"]) < min(one["words"])


def test_the_root_of_its_gates_does_not_keep_gla_from_closing_them() -> None:
    result = results.load("letters")
    rows = [r for r in result["rows"] if r["mixer"] == "GLA" and r["seed"] in result["seed"]]
    assert max(row["gate"] for row in rows) < 0.01
    assert all(-85 < row["logit"] < -75 for row in rows)


def test_few_gates_would_do_and_more_are_found_more_often() -> None:
    """The exercise on the number of gates counts the seeds that keep the sign."""
    kept = [
        sum(sign < 0.1 for sign in losses_of_letters(f"own, {n} gates")["sign"]) for n in (2, 4, 8)
    ]
    assert kept == [0, 2, 5]


def test_two_heads_with_one_gate_each_do_nearly_as_well() -> None:
    mamba, gla = (np.mean(losses_of_letters(name)["loss"]) for name in ("Mamba-2", "GLA"))
    assert 0 < mamba - gla < 0.03
    assert max(losses_of_letters("fitted decay")["words"]) < min(
        losses_of_letters("RetNet")["words"]
    )
    assert max(losses_of_letters("RWKV-6")["sign"]) > 0.5  # not with every seed


def test_the_delta_rule_marks_what_is_void() -> None:
    mark = results.load("forgetting")["mark"]
    assert abs(mark["overlap"]) > 10 * mark["spread"]
    assert mark["length"] > 1.5 * mark["length_of_notes"]


def on_facts(mixer: str, embedding: str = "last", steps: int = 800) -> np.ndarray:
    """Losses on facts, for each seed but the one that chose the rate."""
    found = results.load("language")
    wanted = {"mixer": mixer, "embedding": embedding, "steps": steps}
    rows = [row for row in found["rows"] if row | wanted == row and row["seed"] in found["seed"]]
    return np.array([row["facts"] for row in rows])


def test_in_one_layer_only_a_convolution_brings_two_words_together() -> None:
    guess = np.log(16)
    assert on_facts("gated delta", "word").max() < 0.1
    for mixer in ("gated delta, no convolution", "softmax", "linear (elu + 1)"):
        assert on_facts(mixer, "word").min() > 0.9 * guess


def test_longer_training_teaches_all_to_look_facts_up_but_a_window() -> None:
    assert on_facts("softmax").max() < 0.2
    for mixer in ("GLA", "RetNet", "Mamba-3", "window + gated delta"):
        assert on_facts(mixer).mean() > 1 and on_facts(mixer, steps=2400).max() < 0.1
    assert on_facts("window", steps=2400).min() > 1.4
    lines = results.load("language")["lines"]
    assert lines["3"] < lines["2"] < lines["1"]


CONVERTED = {(row["way"], row["seed"]): row["stages"] for row in results.load("conversion")["rows"]}


def converted(way: str, stage: int, what: str) -> np.ndarray:
    """What a stage of a way has reached, for each seed but the one that chose the step sizes."""
    return np.array([found[stage][what] for (w, seed), found in CONVERTED.items() if w == way][1:])


def test_a_swap_loses_recall_and_matching_brings_most_of_it_back() -> None:
    assert converted("softmax", -1, "right").min() > 0.9
    assert converted("elu + 1", 0, "right").max() < 0.3
    for way in ("weights, all", "outputs, all"):
        assert converted(way, 1, "right").min() > 0.85
        assert (converted(way, 1, "right") > converted("elu + 1", 1, "right")).all()
        assert (converted(way, -1, "right_in_long") > 0.9).all()


def test_a_window_alone_and_training_from_scratch_find_less() -> None:
    assert converted("window alone", -1, "right").max() < 0.4
    assert converted("from scratch", -1, "right").max() < 0.7
    assert (converted("window", -1, "right") > converted("window alone", -1, "right") + 0.5).all()


def test_a_row_maximum_loses_recent_facts_whatever_its_factor() -> None:
    window = converted("window", -1, "recall")[:, 0]
    for way in ("window, row maximum", "window, free factor"):
        assert (converted(way, -1, "right") < converted("window", -1, "right") - 0.07).all()
        assert (converted(way, -1, "recall")[:, 0] < window - 0.1).all()


def looked_up(mixer: str, people: int) -> float:
    """The mean share of right answers, with the better step size."""
    rows = [
        row
        for row in results.load("lookup")["rows"]
        if (row["mixer"], row["keys"]) == (mixer, people)
    ]
    rate = script("harness").best_rate(rows, lambda row: row["loss_to_choose_by"])
    return np.mean([row["right"] for row in rows if row["rate"] == rate])


@pytest.mark.parametrize("people", [8, 16, 32])
def test_fast_clocks_lose_a_name_and_slow_ones_do_not(people: int) -> None:
    fast, slow, none = (
        looked_up(mixer, people) for mixer in ("RWKV-4", "RWKV-4, slow clocks", "WKV, no decay")
    )
    assert slow > fast + 0.15
    assert abs(slow - none) < 0.03


def test_a_decay_that_fits_does_not_reach_the_delta_rule() -> None:
    late = {
        name: [
            row["late"]
            for row in results.load("overwriting")["rows"]
            if (row["mixer"], row["keys"], row["steps"]) == (name, 64, 600) and row["seed"] < 100
        ]
        for name in ("decay", "fitted decay", "delta")
    }
    assert np.mean(late["decay"]) < np.mean(late["fitted decay"])
    assert max(late["fitted decay"]) + 0.2 < min(late["delta"])


@pytest.mark.parametrize(("task", "learned"), [("parity", 5), ("swaps", 4)])
def test_a_bare_layer_learns_to_follow_with_a_decay_too(task: str, learned: int) -> None:
    found = results.load("tracking")
    first = found["settings"]["moves"] // found["settings"]["bin"]
    right = [
        min(row["accuracy"][:first])
        for row in found["rows"]
        if (row["task"], row["layer"]) == (task, "delta with a decay")
        and row["seed"] in found["settings"]["seeds"]
    ]
    assert sum(share > 0.99 for share in right) == learned


@pytest.mark.parametrize(
    ("task", "layer", "learned"),
    [
        ("orders", "delta, J = 2", 0),
        ("orders", "LSTM", 0),
        ("orders", "delta, J = 4", 5),
        ("at once", "delta, J = 4", 0),
    ],
)
def test_four_corrections_learn_any_order_from_short_sequences(
    task: str, layer: str, learned: int
) -> None:
    found = results.load("tracking")
    first = found["settings"]["moves"] // found["settings"]["bin"]
    right = [
        np.mean(row["accuracy"][:first])
        for row in found["rows"]
        if (row["task"], row["layer"]) == (task, layer)
        and row["seed"] in found["settings"]["seeds"]
    ]
    assert len(right) == 5 and sum(share > 0.95 for share in right) == learned
