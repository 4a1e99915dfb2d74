"""The delta rules in torch: gradients of what is forgotten, and systems that are hard to solve.

That both forms are the recurrence is tested in test_definitions.py.
"""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch import delta_rule, gated_delta_rule
from tests.arrays import tensors
from tests.operators import draw_all

FORMS = ["recurrent", "chunkwise"]
every_form = pytest.mark.parametrize("form", FORMS)


def draw(N=7):
    return draw_all("gated_delta_rule", N, dtype=torch.float64)


@every_form
def test_what_is_forgotten_has_no_gradient(form):
    *args, log_decay, state = draw(40)
    log_decay = 1e-3 * log_decay.clamp(min=-2)
    log_decay[[0, 21]], log_decay[7], log_decay[[30, 31]] = -50, -1e6, -math.inf
    tensors = [x.requires_grad_() for x in (*args, log_decay, state)]
    options = {"form": form, "chunk_size": 16, "initial_state": tensors[5], "return_state": True}
    out, last = gated_delta_rule(*tensors[:5], **options)
    gradients = torch.autograd.grad(out[31:].sum() + last.sum(), tensors)
    for x in gradients[:5]:
        assert (x[:31] == 0).all() and (x[32:39] != 0).all()
    assert (gradients[5] == 0).all()


def correlated(N=512, D=16, M=8, seed=12):
    """Unit keys that are nearly parallel, and a beta near 2: the system has entries near 2."""
    rng = np.random.default_rng(seed)
    k = np.ones(D) + 0.05 * rng.normal(size=(N, D))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = (rng.normal(size=(N, D)), k, rng.normal(size=(N, M)), rng.uniform(1.9, 2, size=N))
    return tensors(*arrays)


def test_the_triangular_system_of_correlated_keys_is_solved_well():
    """Float32 errors grow with the chunk size, not with powers of it; gradients included."""
    errors = {}
    for form in FORMS:
        results = []
        for dtype in (torch.float64, torch.float32):
            args = [x.to(dtype).requires_grad_() for x in correlated()]
            out = delta_rule(*args, form=form)
            results.append([out, *torch.autograd.grad(out.square().sum(), args)])
        errors[form] = [
            ((found - exact).abs().max() / exact.abs().max()).item()
            for exact, found in zip(*results, strict=True)
        ]
    assert max(errors["recurrent"]) < 1e-5 and max(errors["chunkwise"]) < 1e-4, errors


def test_meta_tensors_have_the_right_shapes():
    leading = ((2,), (3, 1), (), (), (), ())
    shapes = ((7, 4), (7, 4), (7, 3), (7,), (7,), (4, 3))
    tensors = [torch.empty(a + b, device="meta") for a, b in zip(leading, shapes, strict=True)]
    for form in FORMS:
        out, last = gated_delta_rule(*tensors[:5], form=form, return_state=True)
        assert out.shape == (3, 2, 7, 3) and last.shape == (3, 1, 4, 3)


def test_decays_above_one_are_refused_in_eager_mode_only():
    *args, log_decay, _ = draw()
    log_decay[3] = 0.25
    for form in FORMS:
        with pytest.raises(ValueError, match="^log_decay must be at most 0, got 0.25"):
            gated_delta_rule(*args, log_decay, form=form)
    torch.func.vmap(gated_delta_rule)(*(x[None] for x in (*args, log_decay)))
    log_decay[3] = math.nan  # is not refused
    assert gated_delta_rule(*args, log_decay)[3:].isnan().all()
