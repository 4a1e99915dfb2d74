"""Which backend a call takes: what was timed on this machine, and torch where nothing was."""

import sys

import pytest
import torch

import lesson_code.cupy
import lesson_code.torch as lt
from lesson_code import measure
from lesson_code.torch import backends


@pytest.fixture(autouse=True)
def nothing_was_timed(monkeypatch):
    monkeypatch.setattr(backends, "_faster", {})


@pytest.fixture
def scans(monkeypatch):
    """The number of tokens of each scan that the kernels have made."""
    seen, scan = [], lesson_code.cupy.decaying_scan

    def counted(q, *args, **options):
        seen.append(q.shape[-2])
        return scan(q, *args, **options)

    monkeypatch.setattr(lesson_code.cupy, "decaying_scan", counted)
    return seen


@pytest.fixture
def kernels_are_faster(monkeypatch):
    """As on a GPU: here kernels are emulated, and torch is faster."""

    def seconds(functions, **options):
        for function in functions.values():
            function()
        return {"torch": 2.0, "cupy": 1.0}

    monkeypatch.setattr(measure, "seconds", seconds)


def drawn(N=9, dtype=torch.float32):
    return torch.rand(3, 2, N, 4, generator=torch.manual_seed(0)).to(dtype).unbind()


def test_here_torch_is_faster(scans):
    q, k, v = drawn(N=200)
    times = lt.compare_backends(lt.retention, q, k, v, 0.5, repeats=2)
    assert 0 < times["torch"] < times["cupy"]
    assert scans == [200] * 3  # one of them was not timed
    lt.retention(q, k, v, 0.5)
    assert scans == [200] * 3


def test_what_was_timed_takes_the_faster_and_all_else_takes_torch(scans, kernels_are_faster):
    q, k, v = drawn()
    lt.retention(q, k, v, 0.5)
    assert not scans
    assert lt.compare_backends(lt.retention, q, k, v, 0.5) == {"torch": 2.0, "cupy": 1.0}
    scans.clear()

    out = lt.retention(q, k, v, decay=0.9)
    assert scans == [9]
    torch.testing.assert_close(out, lt.retention(q, k, v, 0.9, backend="torch"))
    assert scans == [9]
    first, S = lt.retention(q, k, v, 0.9, return_state=True)
    lt.retention(q, k, v, 0.9, initial_state=S)
    assert scans == [9] * 3

    others = (
        lambda: lt.retention(q, k, v, 0.9, form="recurrent"),
        lambda: lt.retention(q, k, v, 0.9, chunk_size=8),
        lambda: lt.retention(*drawn(N=8), 0.9),
        lambda: lt.retention(*drawn(dtype=torch.float64), 0.9),
        lambda: lt.retention(q.clone().requires_grad_(), k, v, 0.9),
        lambda: lt.gated_linear_attention(q, k, v, -k),
    )
    for other in others:
        other()
    assert scans == [9] * 3


def test_training_is_timed_with_its_gradients(scans, kernels_are_faster, monkeypatch):
    backward, asked = torch.autograd.grad, []
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **o: (asked.append(1), backward(*a, **o))
    )
    q, k, v = drawn()
    q.requires_grad_()
    lt.compare_backends(lt.retention, q, k, v, 0.5)
    assert len(asked) == 2
    scans.clear()
    lt.retention(q, k, v, 0.5)
    assert scans == [9]
    with torch.no_grad():
        lt.retention(q, k, v, 0.5)
    assert scans == [9]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_code_takes_it_too(scans, kernels_are_faster):
    q, k, v = drawn()
    lt.compare_backends(lt.retention, q, k, v, 0.5)
    scans.clear()
    compiled = torch.compile(lt.retention, fullgraph=True, backend="eager")
    expected = lt.retention(q, k, v, 0.9, backend="torch")
    torch.testing.assert_close(compiled(q, k, v, 0.9), expected)
    assert scans


def test_modules_take_it_too(scans, kernels_are_faster, monkeypatch):
    """With the arguments that a layer calls its operator with."""
    layer, x = lt.Retention(8, num_heads=2).requires_grad_(False), torch.rand(1, 9, 8)
    module, called = sys.modules[lt.Retention.__module__], []

    def heard(*args, **options):
        called.append((args, options))
        return lt.retention(*args, **options)

    monkeypatch.setattr(module, "retention", heard)
    plain = layer(x)
    assert not scans
    args, options = called[0]
    lt.compare_backends(lt.retention, *args, **options)
    scans.clear()
    torch.testing.assert_close(layer(x), plain)
    assert scans


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q: lt.compare_backends(lt.softmax_attention, q, q, q), ValueError, "has a backend"),
        (lambda q: lt.compare_backends("retention", q, q, q), ValueError, "got 'retention'"),
        (
            lambda q: lt.compare_backends(lt.retention, q, q, q, 0.5, form="parallel"),
            ValueError,
            "form must be left out",
        ),
        (
            lambda q: lt.compare_backends(lt.retention, q, q, q, 0.5, backend="cupy"),
            ValueError,
            "backend must be left out",
        ),
        (
            lambda q: lt.compare_backends(lt.retention, q, q, q, 0.5, repeats=0),
            ValueError,
            "repeats must be at least 1, got 0",
        ),
        (lambda q: lt.compare_backends(lt.retention, q, q, q), TypeError, "decay"),
        (lambda q: lt.compare_backends(lt.linear_attention, q, q, q), ValueError, "causal=True"),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(drawn()[0])
    assert not backends._faster


def test_a_wrong_option_is_named_as_ever(kernels_are_faster):
    q, k, v = drawn()
    lt.compare_backends(lt.retention, q, k, v, 0.5)
    with pytest.raises(TypeError, match="chunk_size must be an integer"):
        lt.retention(q, k, v, 0.5, chunk_size=[3])
