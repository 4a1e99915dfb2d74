"""Mesa in torch: the gradient of a solution, which no iteration is kept for."""

import pytest
import torch

from lesson_code.measure import peak_bytes
from lesson_code.torch import MesaState, mesa
from tests.arrays import assert_close
from tests.operators import draw, draw_state, to_torch


def given(N=9, **options):
    return to_torch(draw("mesa", N, **options)), to_torch(draw_state("mesa"))


def gradients(form, arrays, state, **options):
    inputs = [x.clone().requires_grad_() for x in (*arrays.values(), *state)]
    n = len(arrays)
    out, last = mesa(
        *inputs[:n],
        form=form,
        chunk_size=4,
        initial_state=MesaState(*inputs[n:]),
        return_state=True,
        **options,
    )
    loss = out.sin().sum() + last.H.cos().sum() + last.G.cos().sum()
    return dict(zip([*arrays, *state._fields], torch.autograd.grad(loss, inputs), strict=True))


def assert_same(found, expected, tolerance=1e-9):
    for name, x in found.items():
        assert_close(x, expected[name], torch.float64, tolerance)


def test_the_gradient_is_that_of_the_solution():
    assert_same(gradients("chunkwise", *given()), gradients("recurrent", *given()))


@pytest.mark.parametrize("iterations", [1, 30, 500])
def test_the_gradient_is_finite_where_the_iterations_end_early(iterations):
    """Λ = I and keys of 0: solved in one step, and what is left is exactly 0; 0/0 would follow."""
    arrays, state = given()
    arrays["k"][:6], arrays["ridge"][:] = 0, 1
    state = MesaState(0 * state.H, state.G)
    found = gradients("chunkwise", arrays, state, iterations=iterations)
    assert all(x.isfinite().all() for x in found.values())
    if iterations > 1:
        assert_same(found, gradients("recurrent", arrays, state))


def test_a_query_of_zero_has_a_gradient():
    arrays, state = given()
    arrays["q"][3] = 0
    found = gradients("chunkwise", arrays, state)
    assert_same(found, gradients("recurrent", arrays, state))
    assert (found["q"][3] != 0).all()


def test_what_is_forgotten_has_no_gradient():
    arrays, state = given()
    arrays["log_decay"][5] = -torch.inf
    inputs = [x.requires_grad_() for x in arrays.values()]
    for form in ("recurrent", "chunkwise"):
        out = mesa(*inputs, form=form, chunk_size=4)
        found = torch.autograd.grad(out[5:].sum(), inputs)
        assert all(x.isfinite().all() for x in found)
        assert all((x[:5] == 0).all() for x in found[:5]) and found[4][5] == 0


def test_iterations_cost_no_memory():
    inputs = [x.requires_grad_() for x in given(256, sizes={"D": 16, "M": 16})[0].values()]

    def peak(iterations):
        def run():
            out = mesa(*inputs, form="chunkwise", iterations=iterations)
            torch.autograd.grad(out.sum(), inputs)

        return peak_bytes(run)

    assert peak(40) < 1.1 * peak(4)


def test_it_can_be_differentiated_once():
    q, *rest = given()[0].values()
    q.requires_grad_()
    (dq,) = torch.autograd.grad(mesa(q, *rest, form="chunkwise").sin().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()
