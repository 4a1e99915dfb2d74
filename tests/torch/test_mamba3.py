"""Mamba-3's state space in torch: its gradients, also where nothing is kept or nothing written."""

import math

import pytest
import torch

from lesson_code.measure import peak_bytes
from lesson_code.torch import Mamba3State, mamba3
from tests.arrays import assert_close
from tests.operators import draw, draw_state, to_torch

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def gradients(form, arrays, state, since=None):
    inputs = [x.clone().requires_grad_() for x in (*arrays.values(), *state)]
    n = len(arrays)
    out, last = mamba3(
        *inputs[:n],
        form=form,
        chunk_size=4,
        initial_state=Mamba3State(*inputs[n:]),
        return_state=True,
    )
    loss = out[since:].sin().sum()
    if since is None:
        loss = loss + last.S.cos().sum() + last.x.sum() + last.k.sum()
    found = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return dict(zip([*arrays, *state._fields], found, strict=True))


def given(N=9):
    return to_torch(draw("mamba3", N)), to_torch(draw_state("mamba3"))


@every_form
def test_every_form_has_the_gradients_of_the_loop(form):
    arrays, state = given()
    expected = gradients("recurrent", arrays, state)
    for name, x in gradients(form, arrays, state).items():
        assert_close(x, expected[name], torch.float64)
        assert (x != 0).any(), name


@every_form
def test_what_is_forgotten_has_no_gradient(form):
    """At -inf nothing of before is left, and the late write of the token before neither."""
    arrays, state = given()
    arrays["log_decay"][5] = -math.inf
    found = gradients(form, arrays, state, since=5)
    for name in ("x", "delta", "log_decay", "trapezoid", "B", "C"):
        assert found[name].isfinite().all() and (found[name][:5] == 0).all()
    assert found["log_decay"][5] == 0 and (found["S"] == 0).all()
    assert (found["angle"][:5].abs() < 1e-12).all()  # only angles in between matter


@every_form
def test_a_step_of_zero_has_a_gradient(form):
    arrays, state = given()
    arrays["delta"][:] = 0
    assert (gradients(form, arrays, state)["delta"] != 0).all()


def test_chunks_keep_a_state_for_each_chunk_only():
    """The loop keeps K P numbers for each token, 64 times the inputs."""
    sizes = {"P": 64, "R": 32}
    arrays = to_torch(draw("mamba3", 512, dtype="float32", sizes=sizes))
    inputs = [x.requires_grad_() for x in arrays.values()]

    def run(form):
        torch.autograd.grad(mamba3(*inputs, form=form).sum(), inputs)

    assert peak_bytes(lambda: run("chunkwise")) < 0.6 * 4 * 512 * 64 * 64
    assert peak_bytes(lambda: run("recurrent")) > 4 * 512 * 64 * 64
