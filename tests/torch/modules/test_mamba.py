"""What is special in the blocks of Mamba and Mamba-2; the rest is in test_mixer.py."""

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, rms_norm, silu, softplus

import lesson_code.numpy as reference
from lesson_code.torch.modules import SelectiveSSM, StateSpaceDual
from tests.torch.modules.family import disturb, refuses


def convolve(module, x):
    """torch's own convolution, padded in front, without what it adds at the end."""
    x = torch.nn.functional.pad(x.mT, (3, 0))
    y = conv1d(x, module.weight[:, None], module.bias, groups=len(module.weight))
    return silu(y).mT


@torch.no_grad()
def test_selective_ssm_is_its_equation():
    torch.manual_seed(0)
    module = disturb(SelectiveSSM(20, state_width=3))  # a rank of 20/16, rounded up: 2
    x = torch.randn(2, 9, 20, dtype=torch.float64)
    u, z = module.input(x).split([40, 40], dim=-1)
    u = convolve(module.convolution, u)
    low, B, C = module.select(u).split([2, 3, 3], dim=-1)
    delta = softplus(low @ module.step_size.weight.mT + module.step_size.bias)
    arrays = [a.numpy() for a in (u, delta, -module.log_rate.exp(), B, C, module.skip)]
    y = torch.from_numpy(reference.selective_scan(*arrays))
    torch.testing.assert_close(module(x), module.output(y * silu(z)))


@torch.no_grad()
def test_state_space_dual_is_its_equation():
    torch.manual_seed(0)
    module = disturb(StateSpaceDual(6, 3, state_width=5))
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    z, uBC, raw = module.input(x).split([12, 22, 3], dim=-1)
    u, B, C = convolve(module.convolution, uBC).split([12, 5, 5], dim=-1)
    delta = softplus(raw + module.step_bias)
    heads = []
    for h in range(3):  # each with channels and a decay of its own, all with the same B and C
        u_h, delta_h = u[..., 4 * h : 4 * h + 4], delta[..., h]
        g = -module.log_rate[h].exp() * delta_h
        arrays = [a.numpy() for a in (delta_h[..., None] * u_h, g, B, C)]
        y = torch.from_numpy(reference.state_space_dual(*arrays))
        heads.append(y + module.skip[h] * u_h)
    y = torch.cat(heads, dim=-1)
    y = rms_norm(y * silu(z), (12,), module.norm, eps=1e-5)  # the gate first, then the norm
    torch.testing.assert_close(module(x), module.output(y))


def test_initialization():
    torch.manual_seed(0)
    module = SelectiveSSM(128)
    A = -module.log_rate.exp()
    torch.testing.assert_close(A, -torch.arange(1.0, 17).expand(256, 16))
    assert (module.skip == 1).all() and module.skip.shape == (256,)
    assert module.step_size.weight.shape == (256, 8)
    assert 0.9 * 8**-0.5 < module.step_size.weight.abs().max() <= 8**-0.5
    dual = StateSpaceDual(2048, 1024)
    assert (dual.skip == 1).all() and (dual.norm == 1).all()
    assert 1 <= dual.log_rate.exp().min() < 1.2 and 15.8 < dual.log_rate.exp().max() <= 16
    for bias in (module.step_size.bias, dual.step_bias):
        steps = softplus(bias)
        assert steps.min() > 0.00099 and steps.max() < 0.101
        assert abs(steps.log10().mean() + 2) < 0.15  # evenly on a logarithmic scale
    assert module.input.bias is module.output.bias is module.select.bias is None
    assert dual.input.bias is dual.output.bias is None


def test_the_tail_holds_what_went_into_the_convolution():
    """The last three inputs, before its weights and its SiLU."""
    module = SelectiveSSM(8)
    x = torch.randn(2, 5, 8)
    _, state = module(x, return_state=True)
    torch.testing.assert_close(state.tail, module.input(x)[:, 2:, :16])


def test_the_second_norm_keeps_half_precision_finite():
    """What is read may be too large for float16 before the norm."""
    torch.manual_seed(0)
    module = StateSpaceDual(8, 2, state_width=4)
    with torch.no_grad():
        module.convolution.weight *= 100
    x = torch.randn(1, 50, 8)
    y = module(x)
    found = module.half()(x.half())
    assert found.isfinite().all()
    assert (found.float() - y).abs().max() < 0.1 * y.abs().max()


def test_what_is_refused():
    with refuses(ValueError, "state_width must be at least 1, got 0."):
        SelectiveSSM(8, state_width=0)
    with refuses(TypeError, "expand must be an integer, got 1.5."):
        StateSpaceDual(8, 2, expand=1.5)


@pytest.mark.parametrize("make", [lambda: SelectiveSSM(8), lambda: StateSpaceDual(8, 2)])
def test_a_token_can_close_the_gate_of_the_memory(make):
    """With Δ near 0 the memory keeps what it has: the step is chosen by the token."""
    torch.manual_seed(0)
    module = make()
    x = torch.randn(1, 6, 8)
    _, state = module(x, return_state=True)
    with torch.no_grad():
        bias = module.step_size.bias if isinstance(module, SelectiveSSM) else module.step_bias
        bias -= 100
    _, (_, memory) = module(x, state=state, return_state=True)
    np.testing.assert_allclose(memory.detach(), state[1].detach(), rtol=1e-6)
