"""The harness of the scripts that train models, on a model of one number."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from lesson_code import results

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"version": 1, "steps": 40, "rates": [1e-3, 3e-1, 1e9], "seeds": [0, 1], "choosing": 9}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("harness")


@pytest.fixture
def experiment(harness: ModuleType) -> Callable:
    """An experiment whose runs stop the script before the last of `most`."""

    def make(most: int = 100, made: list | None = None):
        made = [] if made is None else made

        def run(name, rate, seed, settings):
            if len(made) == most:
                raise KeyboardInterrupt
            if harness.Estimate.in_use is None:
                made.append((name, rate, seed))
            model = torch.nn.Linear(1, 1)

            def batch_loss(i):
                return (model(torch.ones(1)) - len(name)).square().sum()

            losses = harness.train(model, batch_loss, settings["steps"], rate)
            return {"loss": losses[-1]}

        def runs(rows, settings):
            rates = {
                name: harness.best_rate(rows, lambda row: row["loss"], mixer=name, seed=9)
                for name in ("a", "bcd")
            }
            return [(name, rates[name], seed) for seed in settings["seeds"] for name in rates]

        return harness.Experiment(
            name="recall",
            what="numbers",
            settings=SETTINGS,
            quick={"steps": 2},
            fields=("mixer", "rate", "seed"),
            trials=lambda settings: [(n, r, 9) for n in ("a", "bcd") for r in settings["rates"]],
            runs=runs,
            run=run,
            shown=lambda row: f"{row['loss']:.3f}",
        )

    return make


def read(output: Path) -> list[dict]:
    return json.loads(output.read_text(encoding="utf-8"))["rows"]


def test_the_best_of_three_step_sizes_is_taken(experiment: Callable, tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    experiment().do(SETTINGS, {}, output)
    rows = read(output)
    assert len(rows) == 10
    assert [row["rate"] for row in rows if row["seed"] != 9] == [0.3] * 4
    assert all(row["loss"] < 0.1 for row in rows if row["seed"] != 9)


def test_a_stopped_script_goes_on_where_it_was(
    experiment: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output, made = tmp_path / "x.json", []
    with pytest.raises(KeyboardInterrupt):
        experiment(7, made).do(SETTINGS, {}, output)
    rows = read(output)
    assert len(rows) == 7
    capsys.readouterr()
    experiment(made=made).do(SETTINGS, results.earlier(output, SETTINGS, "again"), output)
    assert capsys.readouterr().out.startswith("7 runs done, 3 left, about 0 minutes")
    assert len(made) == len(set(made)) == 10  # none twice
    assert [row for row in read(output) if row in rows] == rows

    whole = tmp_path / "whole.json"
    experiment().do(SETTINGS, {}, whole)
    assert [row | {"seconds": 0} for row in read(whole)] == [
        row | {"seconds": 0} for row in read(output)
    ]


def test_some_seeds_alone(experiment: Callable, tmp_path: Path) -> None:
    experiment().do(SETTINGS, {}, tmp_path / "x.json", [1])
    assert {row["seed"] for row in read(tmp_path / "x.json")} == {9, 1}


def test_more_seeds_go_on_in_the_same_file(experiment: Callable, tmp_path: Path) -> None:
    output, more = tmp_path / "x.json", SETTINGS | {"seeds": [0, 1, 2]}
    experiment().do(SETTINGS, {}, output)
    rows, made = read(output), []
    experiment(made=made).do(more, results.earlier(output, more, "again"), output)
    assert made == [("a", 0.3, 2), ("bcd", 0.3, 2)]
    assert [row for row in read(output) if row["seed"] != 2] == rows
    assert json.loads(output.read_text(encoding="utf-8"))["settings"] == more


def test_a_row_says_which_machine_made_it(
    harness: ModuleType, experiment: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, first = tmp_path / "x.json", harness.measure.machine()
    second = first | {"device": "another"}

    def go_on(machine, seeds):
        monkeypatch.setattr(harness.measure, "machine", lambda *_: machine)
        experiment().do(SETTINGS, results.earlier(output, SETTINGS, "again"), output, seeds)
        found = json.loads(output.read_text(encoding="utf-8"))
        return found["machine"], [(row["seed"], row["machine"]) for row in found["rows"]]

    assert go_on(first, [0]) == ([first], [(9, 0)] * 6 + [(0, 0)] * 2)
    assert go_on(second, [0]) == ([first], [(9, 0)] * 6 + [(0, 0)] * 2)  # it had nothing to do
    expected = [(9, 0)] * 6 + [(0, 0)] * 2 + [(1, 1)] * 2
    assert go_on(second, [1]) == ([first, second], expected)
    monkeypatch.setattr(harness.measure, "machine", lambda *_: first)
    more = SETTINGS | {"seeds": [0, 1, 2]}
    experiment().do(more, results.earlier(output, more, "again"), output)
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["machine"] == [first, second] and found["rows"][-1]["machine"] == 0


def test_weights_of_the_first_seed_are_kept(experiment: Callable, tmp_path: Path) -> None:
    """Without them a run is made again; with them none is."""
    output, made = tmp_path / "x.json", []
    keeping = dataclasses.replace(experiment(made=made), kept=("bcd",))
    run = keeping.run

    def with_weights(*job):
        return run(*job) | {"weights": {"w": torch.tensor([job[1], job[2]])}}

    keeping.run = with_weights
    keeping.do(SETTINGS, {}, output)
    assert [path.name for path in tmp_path.glob("*.npz")] == ["x_bcd.npz"]
    assert all("weights" not in row for row in read(output))
    with np.load(tmp_path / "x_bcd.npz") as arrays:
        assert np.allclose(arrays["w"], [0.3, 0])
    keeping.do(SETTINGS, results.earlier(output, SETTINGS, "again"), output)
    assert len(made) == 10
    (tmp_path / "x_bcd.npz").unlink()
    keeping.do(SETTINGS, results.earlier(output, SETTINGS, "again"), output)
    assert made[10:] == [("bcd", 0.3, 0)] and (tmp_path / "x_bcd.npz").exists()


def test_the_end_comes_once(experiment: Callable, tmp_path: Path) -> None:
    """What is counted when all is done stays as it is until there is a new run."""
    output, counted = tmp_path / "x.json", []

    def finish(rows, settings, file):
        assert file == output
        counted.append(len(rows))
        return {"count": {"rows": len(rows)}}

    ending = dataclasses.replace(experiment(), more=("count",), finish=finish)
    ending.do(SETTINGS, {}, output, [0])
    assert not counted and json.loads(output.read_text(encoding="utf-8"))["count"] == {}
    for _ in range(2):
        ending.do(SETTINGS, results.earlier(output, SETTINGS, "again"), output)
        assert json.loads(output.read_text(encoding="utf-8"))["count"] == {"rows": 10}
    assert counted == [10]


def test_a_file_with_other_settings_is_refused(
    experiment: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, small = tmp_path / "x.json", experiment()
    small.do(SETTINGS | {"version": 0}, {}, output)
    before = output.read_text(encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["x.py", "--output", str(output)])
    with pytest.raises(SystemExit, match=r"another version.*benchmarks/recall.py --renew"):
        small.main()
    assert output.read_text(encoding="utf-8") == before
    monkeypatch.setattr("sys.argv", ["x.py", "--renew", "--output", str(output)])
    small.main()
    assert len(read(output)) == 10


def test_a_try_needs_a_file_of_its_own(
    experiment: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--quick"])
    with pytest.raises(SystemExit):
        experiment().main()


def test_only_step_sizes_tried_everywhere_are_compared(harness: ModuleType) -> None:
    rows = [
        {"rate": rate, "loss": loss, "keys": keys}
        for keys, rate, loss in [(8, 0.1, 3), (64, 0.1, 3), (8, 0.2, 1), (64, 0.2, 4), (64, 0.3, 0)]
    ]
    assert harness.best_rate(rows, lambda row: row["loss"]) == 0.2
    assert harness.best_rate(rows, lambda row: row["loss"], keys=64) == 0.3
    assert harness.best_rate(rows, lambda row: row["loss"], keys=1) == 0


def test_training_leaves_alone_what_needs_no_gradient(harness: ModuleType) -> None:
    model, seen = torch.nn.Linear(1, 1), []
    model.bias.requires_grad_(False)
    before = model.bias.item(), model.weight.item()

    def after(i):
        seen.append((i, model.weight.item()))

    losses = harness.train(model, lambda i: model(torch.ones(1)).sum(), 3, 0.1, after=after)
    assert [i for i, _ in seen] == [0, 1, 2] and len(losses) == 3
    assert seen[-1][1] == model.weight.item() != before[1]
    assert model.bias.item() == before[0]


def test_memories_and_blocks_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    mixers, recall = (importlib.import_module(name) for name in ("mixers", "recall"))
    grow = {"softmax", "softmax + gated delta", "log-linear"}
    sizes = []
    for name, mixer in mixers.MIXERS.items():
        model = recall.make_model(name, 2, recall.SETTINGS)
        sizes.append(mixers.count(model))
        _, state = mixer(32, 2)(torch.zeros(1, 64, 32), return_state=True)
        leaves = torch.utils._pytree.tree_leaves(state)
        memory = sum(x.numel() for x in leaves if x.ndim >= 4)
        assert (memory > 1_000) if name in grow else memory in (510 - 30, 512), name
    assert max(sizes) <= 1.01 * min(sizes)
