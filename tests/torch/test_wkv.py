"""WKV in torch: the scan, keys of any size and their gradients, time and memory.

That both forms are the sum of the paper is tested in test_definitions.py.
"""

import time

import numpy as np
import pytest
import torch

import lesson_code.numpy as reference
from lesson_code.measure import peak_bytes
from lesson_code.torch import WKVState, wkv
from tests.arrays import TOLERANCE, assert_close, name_of, normal, numbers, tensors

FORMS = ["recurrent", "parallel"]
every_form = pytest.mark.parametrize("form", FORMS)


def draw(N=7, D=3, dtype=torch.float64):
    k, v, w, u = normal((N, D), (N, D), (D,), (D,))
    return tensors(k, v, abs(w) + 0.05, u, dtype=dtype)


def numpy_wkv(args):
    return reference.wkv(*map(numbers, args), return_state=True)


def assert_result(found, expected):
    assert_close(found[0], expected[0])
    for x, y in zip(found[1], expected[1], strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 100])
def test_the_scan_joins_any_number_of_tokens(N):
    args = draw(N)
    assert_result(wkv(*args, form="parallel", return_state=True), numpy_wkv(args))


def hard(N=60, D=9, dtype=torch.float64):
    """Keys from -80 to 80, decays from e^-5 to e^3, tokens without weight at the beginning."""
    rng = np.random.default_rng(7)
    k = rng.choice([-80.0, -79.0, 0.0, 80.0, 79.5], size=(N, D))
    k[:5] = -80
    k[:2, ::2] = k[30:40, 1] = -np.inf
    k[:, 4] = -np.inf
    v, u = rng.normal(size=(N, D)), rng.normal(size=D)
    return tensors(*(k, v, np.exp(np.linspace(-5, 3, D)), u), dtype=dtype)


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_keys_up_to_80_and_minus_infinity(form, dtype):
    args = [x.requires_grad_() for x in hard(dtype=dtype)]
    expected, _ = numpy_wkv(args)
    assert np.isfinite(expected).all() and (expected[:2, ::2] == 0).all()
    out, state = wkv(*args, form=form, return_state=True)
    assert_close(out, expected, dtype)
    assert (out[:2, ::2] == 0).all() and (out[:, 4] == 0).all()
    assert all(x.isfinite().all() for x in state)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    found = torch.autograd.grad((out * weights.to(dtype)).sum(), args)
    exact = [x.detach().double().requires_grad_() for x in args]
    other = FORMS[form == "recurrent"]
    wanted = torch.autograd.grad((wkv(*exact, form=other) * weights).sum(), exact)
    for x, y in zip(found, wanted, strict=True):
        assert x.isfinite().all()
        assert_close(x, y, dtype, 20 * TOLERANCE[name_of(dtype)])
    assert (found[0][args[0].isinf()] == 0).all() and found[2].any() and found[3].any()


@every_form
def test_the_forms_of_float32_agree_after_many_tokens(form):
    """The maximum loses 0.0001 per token there, less than float32 can tell: the sums make up."""
    k, v, _, u = draw(3000, 5)
    args = k * 5, v, torch.linspace(-9, 3, 5).double().exp(), u
    expected = numpy_wkv(args)
    found = wkv(*(x.float() for x in args), form=form, return_state=True)
    assert_close(found[0], expected[0], torch.float32)
    mean = expected[1].numerator / expected[1].denominator
    assert_close(found[1].numerator / found[1].denominator, mean, torch.float32, 1e-4)


def test_a_state_of_half_precision_may_hold_minus_infinity():
    args = draw(dtype=torch.float16)
    args[0][0] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.float16)
    state = WKVState(zeros, zeros, zeros - torch.inf)
    for form in FORMS:
        found = wkv(*args, form=form, initial_state=state)
        assert torch.equal(found, wkv(*args, form=form))


@every_form
def test_gradients_go_through_a_split(form):
    k, v, w, u = (x.requires_grad_() for x in draw())
    expected = torch.autograd.grad(wkv(k, v, w, u).square().sum(), (k, v, w, u))
    head, state = wkv(k[:3], v[:3], w, u, form=form, return_state=True)
    tail = wkv(k[3:], v[3:], w, u, form=form, initial_state=state)
    found = torch.autograd.grad(torch.cat([head, tail]).square().sum(), (k, v, w, u))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_meta_tensors():
    args = [torch.empty(shape, device="meta") for shape in ((2, 7, 3), (2, 7, 3), (3,), (3,))]
    for form in FORMS:
        out, state = wkv(*args, form=form, return_state=True)
        assert out.shape == (2, 7, 3) and {x.shape for x in state} == {(2, 3)}
        assert out.device.type == state.maximum.device.type == "meta"


def test_parallel_needs_less_time_than_recurrent():
    """Forward and backward at N = 1,024; it is about ten times as fast."""
    args = [x.requires_grad_() for x in draw(1024, 32, dtype=torch.float32)]
    seconds = {form: [] for form in (*FORMS, None)}
    for _ in range(3):
        for form in seconds:
            start = time.perf_counter()
            wkv(*args, form=form).sum().backward()
            seconds[form].append(time.perf_counter() - start)
    assert min(seconds["parallel"]) < min(seconds["recurrent"]) / 2
    assert min(seconds[None]) < min(seconds["recurrent"]) / 2  # and so it is what None takes


def test_parallel_keeps_no_number_for_each_pair_of_tokens():
    """Nor one for each level of the scan: twice the tokens, twice the memory."""

    def peak(N):
        args = [x.requires_grad_() for x in draw(N, 16, dtype=torch.float32)]
        return peak_bytes(lambda: wkv(*args, form="parallel").sum().backward())

    assert peak(8192) < 2.4 * peak(4096) + 2**20
