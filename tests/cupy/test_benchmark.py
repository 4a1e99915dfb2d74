"""The script that measures the kernels on a GPU, as far as it can be tried without one."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from lesson_code.torch import identity, linear_attention

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"
SHAPE = (2, 3, 70, 16)
OURS = ["recurrent", "chunked", "tensor_core"]
CEILING = {"bytes_per_second": 4e12, "operations_per_second": 8e14}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scan(q, k, v):
    return linear_attention(q, k, v, feature_map=identity, causal=True, normalize=False)


def heads_behind(q, k, v):
    assert q.is_contiguous()
    return scan(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Counter:
    """A clock: every run takes as many seconds as its turn."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, function, host_seconds=0.0):
        function()
        self.turn += 1
        return self.turn / 100, 1e-3


# --- The floor -----------------------------------------------------------------------------------


def test_the_bytes_of_a_pass_are_those_of_its_arrays(script: ModuleType) -> None:
    q, k, v, grad_out = tensors = script.draw(SHAPE, torch.bfloat16, "cpu")
    for which in script.PASSES:
        written = script.run_of(scan, tensors, which)()
        arrays = [q, k, v, *written]
        if which == "forward + backward":
            arrays += [q, k, v, grad_out]  # read once more
        row = script.floor(SHAPE, which, torch.bfloat16, CEILING)
        assert row["bytes"] == sum(array.nbytes for array in arrays)


def test_the_operations_of_a_pass_are_those_of_the_recurrence(script: ModuleType) -> None:
    B, H, N, D = SHAPE
    forward = script.floor(SHAPE, "forward", torch.bfloat16, CEILING)["operations"]
    assert forward == B * H * N * (2 * D * D + 2 * D * D)
    both = script.floor(SHAPE, "forward + backward", torch.bfloat16, CEILING)["operations"]
    assert both == forward + B * H * N * 5 * 2 * D * D


def test_the_floor_is_the_larger_time(script: ModuleType) -> None:
    row = script.floor(SHAPE, "forward", torch.bfloat16, CEILING)
    assert row["bound"] == "memory" and row["floor"] == row["bytes"] / 4e12
    slow = CEILING | {"operations_per_second": 1e9}
    row = script.floor(SHAPE, "forward", torch.bfloat16, slow)
    assert row["bound"] == "arithmetic" and row["floor"] == row["operations"] / 1e9


# --- The check before the clock ------------------------------------------------------------------


@pytest.fixture
def checked(script: ModuleType):
    def run(contenders, which="forward + backward", clock=None, without=()):
        errors, failures = script.check_all(
            [(SHAPE, which)],
            torch.bfloat16,
            "cpu",
            contenders,
            clock or script.HostClock(),
            without,
        )
        return errors[SHAPE, which], failures[SHAPE, which]

    return run


def test_right_contenders_have_an_error_and_no_reason(script: ModuleType, checked) -> None:
    contenders = {
        "first": script.Contender(lambda: scan),
        "behind": script.Contender(lambda: heads_behind, heads_first=False),
    }
    for which in script.PASSES:
        errors, failed = checked(contenders, which)
        assert failed == {}
        assert all(0 < errors[name] < 5e-3 for name in contenders)


def without_the_own_token(q, k, v):
    return scan(q, k, v) - (q * k).sum(-1, keepdim=True) * v


def wrong_at_the_end(q, k, v):
    return torch.cat([scan(q, k, v)[..., :-1, :], v[..., -1:, :]], -2)


def not_a_number(q, k, v):
    return scan(q, k, v).index_fill(-1, torch.tensor([3]), float("nan"))


def without_a_gradient(q, k, v):
    return scan(q, k.detach(), v) + 0 * k.sum()


@pytest.mark.parametrize(
    "function", [without_the_own_token, wrong_at_the_end, not_a_number, without_a_gradient]
)
def test_a_wrong_contender_is_not_timed(script: ModuleType, checked, function) -> None:
    errors, failed = checked({"wrong": script.Contender(lambda: function)})
    assert errors == {}
    assert failed["wrong"].startswith("ArithmeticError: wrong: its error is ")


def test_a_contender_that_fails_costs_the_others_nothing(script: ModuleType, checked) -> None:
    def missing():
        raise ImportError("No module named 'fla'\nand more")

    def breaks(q, k, v):
        raise RuntimeError("out of memory")

    contenders = {
        "missing": script.Contender(missing),
        "breaks": script.Contender(lambda: breaks),
        "right": script.Contender(lambda: scan),
        "unwanted": script.Contender(missing),
    }
    errors, failed = checked(contenders, without=["unwanted"])
    assert list(errors) == ["right"]
    assert failed == {
        "missing": "ImportError: No module named 'fla' and more",
        "breaks": "RuntimeError: out of memory",
        "unwanted": "left out: --without",
    }


def test_a_slow_contender_is_not_timed(script: ModuleType, checked) -> None:
    contenders = {"slow": script.Contender(lambda: scan)}
    errors, failed = checked(contenders, clock=lambda run: (1.5, 1.5))
    assert errors == {} and failed == {"slow": "TimeoutError: a run takes 1.5 s"}


def test_something_else_is_not_compared(script: ModuleType, checked) -> None:
    softmax = script.Contender(lambda: not_a_number, same=False)
    assert checked({"softmax": softmax}) == ({}, {})


# --- Rows ----------------------------------------------------------------------------------------


def test_contenders_take_turns(script: ModuleType) -> None:
    calls, failed = [], {}

    def breaks():
        calls.append("b")
        if len(calls) > 6:
            raise RuntimeError("late")

    runs = {"a": lambda: calls.append("a"), "b": breaks}
    times, host = script.in_turns(runs, 3, Counter(), failed)
    assert calls == ["a", "b", "a", "b", "a", "b", "a", "b", "a"]
    assert list(times) == ["a"] and len(times["a"]) == 3  # after two that do not count
    assert failed == {"b": "RuntimeError: late"}
    assert host["a"] == 1e-3


def test_a_row(script: ModuleType) -> None:
    contenders = {
        "tensor_core": script.Contender(lambda: scan),
        "other": script.Contender(lambda: heads_behind, heads_first=False),
        "broken": script.Contender(lambda: 1 / 0),
    }
    failed = {"broken": "ZeroDivisionError: division by zero"}
    row = script.measure_row(
        SHAPE, "forward", torch.float16, "cpu", contenders, failed, CEILING, Counter(), 3
    )
    assert row["seconds"] == pytest.approx({"tensor_core": 0.07, "other": 0.08})
    assert row["spread"] == {
        "tensor_core": pytest.approx([0.06, 0.08]),
        "other": pytest.approx([0.07, 0.09]),
    }
    assert row["ratio"] == pytest.approx({"tensor_core": 1, "other": 8 / 7})
    assert row["floors"]["other"] == pytest.approx(0.08 / row["floor"])


# --- The whole -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the script writes when it is tried without a GPU."""
    output = tmp_path_factory.mktemp("kernels") / "result.json"
    command = f"kernels.py --device cpu --shapes 1,2,70,16 --repeats 1 --output {output}".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        script.main()
    return json.loads(output.read_text(encoding="utf-8"))


def test_everyone_is_right(tried: dict) -> None:
    missing = {"fla, chunk", "fla, fused chunk"}
    for row in tried["rows"]:
        assert set(row["failed"]) <= missing, row["failed"]
        assert {*OURS, "softmax", "torch, chunkwise", "torch, cumsum"} <= set(row["seconds"])
        assert set(row["error"]) == set(row["seconds"]) - {"softmax"}


def test_a_result_says_what_it_depends_on(tried: dict) -> None:
    assert {"driver", "cuda", "cupy", "nvrtc", "triton", "fla-core"} <= set(tried["versions"])
    assert {"machine", "date", "seed", "dtype", *CEILING} <= set(tried)


def test_every_speed_that_is_wanted_is_measured(script: ModuleType) -> None:
    assert {shape[:3] for shape in script.SHAPES} == {
        (8, 16, 4096),
        (1, 8, 65_536),
        (4, 16, 2048),
    }
    assert {shape[3] for shape in script.SHAPES} == {64, 128}
    assert set(script.contenders("cuda")) >= {*OURS, "softmax", "fla, chunk", "fla, fused chunk"}


class Event:
    """An event of a GPU on which every launch takes a second."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = Event.now = Event.now + 1

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


class Graph:
    replay = MagicMock()


@pytest.fixture
def pretended_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda without a GPU: arrays lie on the CPU, and the kernels run in the emulator."""
    cuda = MagicMock(Event=Event, CUDAGraph=Graph)
    cuda.is_available.return_value = cuda.is_initialized.return_value = True
    cuda.get_device_properties.return_value.L2_cache_size = 1000
    cuda.mem_get_info.return_value = (2**20, 2**21)
    cuda.get_device_name.return_value = "pretended"
    monkeypatch.setattr(torch, "cuda", cuda)
    for name in ("ones", "zeros", "randn", "randint"):
        function = getattr(torch, name)
        on_cpu = functools.partial(_on_cpu, function)
        monkeypatch.setattr(torch, name, on_cpu)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    product = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: product(a[:9, :9], b[:9, :9]))
    contenders = script.contenders
    monkeypatch.setattr(script, "contenders", lambda device: contenders("cpu"))
    monkeypatch.setattr(script, "LIMIT", 2.0)


def _on_cpu(function, *args, device=None, **options):
    return function(*args, **options)


@pytest.mark.usefixtures("pretended_gpu")
def test_the_clock_of_a_gpu_and_the_graphs(
    script: ModuleType, tried: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "result.json"
    command = f"kernels.py --shapes 1,1,70,16 --repeats 2 --output {output}".split()
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    result = json.loads(output.read_text(encoding="utf-8"))
    assert set(result) == set(tried) and result["machine"]["device"] == "pretended"
    assert result["bytes_per_second"] == 2 * 2**18
    for row in result["rows"]:
        assert set(row) == set(tried["rows"][0])
        assert set(row["seconds"].values()) == {1.0}
        assert row["replayed"].keys() == row["seconds"].keys()
        assert set(row["replayed"].values()) == {1.0}


@pytest.mark.usefixtures("pretended_gpu")
def test_a_broken_gpu_is_started_again(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(script.os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--repeats", "3"])
    script.start_again_if_broken("chunked")
    assert started == []
    torch.cuda.synchronize.side_effect = RuntimeError("an illegal memory access was encountered")
    script.start_again_if_broken("chunked")
    again = [sys.executable, "kernels.py", "--repeats", "3", "--without", "chunked"]
    assert started == [again]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--device", "cpu"], "name an --output"), (["--shapes", "1,2,3"], "invalid _shape value")],
)
def test_wrong_arguments(script: ModuleType, arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
    with pytest.raises(SystemExit):
        script.main()
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_script_says_what_can_be_done(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    with pytest.raises(SystemExit):
        script.main()
    assert "--device cpu tries the script without one" in capsys.readouterr().err
