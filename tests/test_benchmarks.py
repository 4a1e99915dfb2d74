"""The scripts that measure, and what they have measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lesson_code import results

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
# It has a result where it has run on a GPU; tests/cupy/test_benchmark.py tries it without one.
NAMES.remove("kernels")
NAMES.remove("recall")  # until its long run has been committed
SMALL = {
    "causal": ["--lengths", "70", "128", "--repeats", "1"],
    "decoding": ["--positions", "5", "50", "--repeats", "1"],
    "family": ["--length", "70", "--repeats", "1"],
    "recall": ["--quick"],
    "registers": ["--architectures", "sm_80", "--kernels", "chunked", "--widths", "64"],
    "scans": ["--lengths", "70", "128", "--repeats", "1"],
}


def keys(value):
    """The structure of a result, without its numbers: one row stands for all."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [keys(item) for item in value[:1]]
    return type(value).__name__


@pytest.mark.parametrize("name", NAMES)
def test_a_script_writes_what_is_committed(name: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--output", output, *SMALL[name]]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    assert keys(json.loads(output.read_text(encoding="utf-8"))) == keys(results.load(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_result_says_where_it_comes_from(name: str) -> None:
    result = results.load(name)
    assert {"what", "machine", "date", "rows"} <= set(result)
    assert "seed" in result or name == "registers"  # which draws nothing
    assert {"device", "threads", "python", "torch"} <= set(result["machine"])
    assert result["rows"]


def test_every_result_has_its_script() -> None:
    folder = Path(results.__file__).parent
    found = {path.stem.removesuffix("_cuda") for path in folder.glob("*.json")}
    assert found - {"kernels"} == set(NAMES)


def test_an_unknown_result() -> None:
    with pytest.raises(ValueError, match="name must be one of causal, decoding.*got 'speed'"):
        results.load("speed")


# --- The script that trains ----------------------------------------------------------------------


def train(output: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "benchmarks" / "recall.py", "--quick", "--output", output]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_training_resumes_and_refuses_the_results_of_another_version(tmp_path: Path) -> None:
    output = tmp_path / "recall.json"
    first = train(output)
    assert first.returncode == 0, first.stderr
    result = json.loads(output.read_text(encoding="utf-8"))
    assert "10 runs, 10 left" in first.stdout and len(result["rows"]) == 10
    sizes = [row["parameters"] for row in result["rows"]]
    assert max(sizes) <= 1.01 * min(sizes)
    assert {row["heads"] for row in result["rows"] if row["mixer"] == "delta"} == {2, 4}

    # What is missing is trained again, to the same accuracy; nothing else is.
    kept = [row for row in result["rows"] if row["mixer"] not in ("softmax", "delta")]
    output.write_text(json.dumps(result | {"rows": kept}), encoding="utf-8")
    second = train(output)
    assert second.returncode == 0 and "10 runs, 3 left" in second.stdout
    again = json.loads(output.read_text(encoding="utf-8"))
    for row, before in zip(again["rows"], result["rows"], strict=True):
        assert row | {"seconds": 0} == before | {"seconds": 0}
        assert row in kept or row["mixer"] in ("softmax", "delta")

    other = result | {"settings": result["settings"] | {"version": 0}}
    output.write_text(json.dumps(other), encoding="utf-8")
    third = train(output)
    assert third.returncode != 0
    assert "from another version of this script" in third.stderr
    assert "python benchmarks/recall.py --renew" in third.stderr
    assert json.loads(output.read_text(encoding="utf-8")) == other


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
