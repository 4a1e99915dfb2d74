"""Log-linear attention in torch: gradients of closed gates, and memory."""

import pytest
import torch

from lesson_code.measure import peak_bytes
from lesson_code.torch import LogLinearState, log_linear_attention
from tests.arrays import assert_close
from tests.operators import draw, draw_state, to_torch

FORMS = ["recurrent", "parallel", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def gradients(form, arrays, S, at=slice(None)):
    inputs = [x.clone().requires_grad_() for x in (*arrays.values(), S)]
    out, last = log_linear_attention(
        *inputs[:-1],
        form=form,
        chunk_size=4,
        initial_state=LogLinearState(inputs[-1], 5),
        return_state=True,
    )
    return torch.autograd.grad(out[at].sin().sum() + last.S[:, 0].sum(), inputs)


def given(N=13):
    arrays = to_torch(draw("log_linear_attention", N))
    return arrays, to_torch(draw_state("log_linear_attention")).S


@every_form
def test_every_form_has_the_gradients_of_the_loop(form):
    for x, y in zip(gradients(form, *given()), gradients("recurrent", *given()), strict=True):
        assert_close(x, y, torch.float64)
        assert (x != 0).any()


@every_form
def test_what_is_forgotten_has_no_gradient(form):
    arrays, S = given()
    arrays["log_decay"][[6, 7]] = -torch.inf
    *found, d_S = gradients(form, arrays, S, at=slice(7, None))
    assert all(x.isfinite().all() and (x[:7] == 0).all() for x in found)
    assert found[3][7] == 0 and (d_S == 0).all()


def test_memory_grows_with_N_log_N():
    """A state of all levels for each chunk, and no N×N array."""

    def peak(N, levels):
        arrays = draw(
            "log_linear_attention", N, dtype="float32", sizes={"D": 8, "M": 8, "levels": levels}
        )
        inputs = [x.requires_grad_() for x in to_torch(arrays).values()]
        return peak_bytes(
            lambda: torch.autograd.grad(log_linear_attention(*inputs, chunk_size=16).sum(), inputs)
        )

    short, long = peak(256, 9), peak(1024, 11)
    assert long < 1.2 * 4 * 11 / 9 * short
    assert long < 4 * 4 * 1024**2
