"""TTT-Linear in torch: the inner gradient against autograd, the outer one, and memory."""

import pytest
import torch
from torch.nn.functional import layer_norm

from lesson_code.measure import peak_bytes
from lesson_code.torch import TTTState, ttt_linear
from tests.arrays import assert_close
from tests.operators import draw, draw_state, to_torch

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def given(N=9, **options):
    arrays, S = to_torch(draw("ttt_linear", N, **options)), to_torch(draw_state("ttt_linear"))
    return arrays, TTTState(S.W, S.b, 0 * S.W, 0 * S.b, 0)


@every_form
def test_it_is_gradient_descent_as_torch_does_it(form):
    """Autograd's gradient of each token's loss, with torch's own norm, batch after batch."""
    arrays, state = given(10)
    q, k, v, eta, share, w, c = arrays.values()

    def f(x, W, b):
        return layer_norm(x @ W + b, (4,), w, c, eps=1e-6)

    W, b, expected = state.W, state.b, []
    for start in range(0, 10, 4):
        sums = [torch.zeros(4, 4).double(), torch.zeros(4).double()]
        leaves = [x.clone().requires_grad_() for x in (W, b)]
        for t in range(start, min(start + 4, 10)):
            loss = (f(k[t], *leaves) - (v[t] - k[t])).square().sum() / 2
            gradients = torch.autograd.grad(loss, leaves)
            sums = [s + eta[t] * g for s, g in zip(sums, gradients, strict=True)]
            W_t, b_t = W - share[t] * sums[0], b - share[t] * sums[1]
            expected.append(q[t] + f(q[t], W_t, b_t))
        W, b = W_t, b_t
    found = ttt_linear(**arrays, form=form, batch_size=4, initial_state=state)
    assert_close(found, torch.stack(expected), torch.float64)


def test_both_forms_have_the_same_gradients():
    def gradients(form):
        arrays, state = given()
        inputs = [x.requires_grad_() for x in (*arrays.values(), state.W, state.b)]
        options = {"form": form, "batch_size": 4, "initial_state": state}
        out, last = ttt_linear(**arrays, **options, return_state=True)
        return torch.autograd.grad(out.sin().sum() + last.W.sum() + last.dW.sum(), inputs)

    for x, y in zip(gradients("chunkwise"), gradients("recurrent"), strict=True):
        assert_close(x, y, torch.float64)
        assert (x != 0).any()


def test_it_can_be_differentiated_twice():
    arrays, state = given(5)
    inputs = [x.requires_grad_() for x in arrays.values()]

    def run(*inputs):
        return ttt_linear(*inputs, batch_size=3, initial_state=state)

    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_a_batch_keeps_one_memory_not_one_for_each_token():
    arrays, _ = given(256, sizes={"D": 64}, dtype="float32")
    inputs = [x.requires_grad_() for x in arrays.values()]

    def run(form):
        torch.autograd.grad(ttt_linear(*inputs, form=form).sum(), inputs)

    assert 4 * peak_bytes(lambda: run("chunkwise")) < peak_bytes(lambda: run("recurrent"))
