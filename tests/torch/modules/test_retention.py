"""Retention as a module: against NumPy, its positions, decays, norm and gate."""

import numpy as np
import pytest
import torch

from lesson_code import numpy as reference
from lesson_code.torch.modules import Retention, RetentionState


def rotate(heads, start=0):
    """Channels 2i and 2i + 1 as one complex number, times e^(i angle); angles end at 1/10000."""
    N, D = heads.shape
    planes = D // 2
    frequency = 1 / 10000 ** np.linspace(0, 1, planes)
    z = heads[:, 0 : 2 * planes : 2] + 1j * heads[:, 1 : 2 * planes : 2]
    z = z * np.exp(1j * (start + np.arange(N))[:, None] * frequency)
    turned = np.stack([z.real, z.imag], axis=-1).reshape(N, 2 * planes)
    return np.concatenate([turned, heads[:, 2 * planes :]], axis=-1)


def in_numpy(module, x):
    """One sequence x (N, F) through the module's weights, head by head, as the paper writes it."""
    x = x.numpy()
    weights = {name: p.detach().numpy() for name, p in module.named_parameters()}
    D = x.shape[-1] // module.num_heads
    read = []
    for h, decay in enumerate(reference.retention_decays(module.num_heads)):
        rows = slice(h * D, (h + 1) * D)
        q, k, v = (x @ weights[f"{name}.weight"][rows].T for name in ("query", "key", "value"))
        out = reference.retention(rotate(q), rotate(k) / np.sqrt(D), v, decay)
        read.append(out / np.sqrt((out**2).mean(axis=-1, keepdims=True) + 1e-6))
    gate = x @ weights["gate.weight"].T
    swish = gate / (1 + np.exp(-gate))
    return (swish * np.concatenate(read, axis=-1)) @ weights["output.weight"].T


@pytest.mark.parametrize("num_heads", [1, 3, 4, 12])  # head widths 12, 4, 3 and 1
def test_against_numpy(num_heads):
    torch.manual_seed(0)
    module = Retention(12, num_heads).double()
    x = torch.randn(2, 70, 12, dtype=torch.float64)
    y = module(x).detach().numpy()
    for i in range(2):
        np.testing.assert_allclose(y[i], in_numpy(module, x[i]), rtol=0, atol=1e-12)


def test_initialization_is_the_papers():
    """Xavier, uniform: up to gain * sqrt(6 / (F + F)), with gains 2^-2.5 and, at the end, 1/2."""
    torch.manual_seed(0)
    module = Retention(64, 4)
    for name, parameter in module.named_parameters():
        gain = 0.5 if name == "output.weight" else 2**-2.5
        bound = gain * (6 / 128) ** 0.5
        assert 0.99 * bound < parameter.abs().max() <= bound, name
        assert abs(parameter.std() / (bound / 3**0.5) - 1) < 0.05, name
    names = {"query", "key", "value", "gate", "output"}
    assert {name for name, _ in module.named_parameters()} == {f"{name}.weight" for name in names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_decays_are_exact_in_every_dtype(dtype):
    """A buffer of decays would be rounded with the weights: 1 - 2^-12 to 1 in half precision."""
    module = Retention(8, 8).to(dtype)
    decays = 1 - module.forgetting.to(torch.float64)
    assert decays.tolist() == reference.retention_decays(8).tolist()
    assert "forgetting" in module.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_heads_forget_at_their_own_rates(dtype):
    """After a first token and 300 of zero, S has faded by the decay of its head, unrounded."""
    torch.manual_seed(0)
    module = Retention(16, 8).to(dtype)
    x = torch.zeros(1, 301, 16, dtype=dtype)
    x[:, 0] = 1
    _, first = module(x[:, :1], return_state=True)
    _, state = module(x, return_state=True)
    faded = (state.S[0] / first.S[0]).double()
    for h, decay in enumerate(reference.retention_decays(8)):
        expected = torch.full((2, 2), decay**300, dtype=torch.float64)
        torch.testing.assert_close(faded[h], expected, rtol=1e-4, atol=0)


def test_positions_count_by_their_distance():
    """An empty memory at any position gives the same outputs."""
    torch.manual_seed(0)
    module = Retention(8, 2).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    empty = module.initial_state(2)
    for starts in ([1.0, 100.0], [0.0, 100_000.0]):
        state = RetentionState(empty.S, torch.tensor(starts, dtype=torch.float64))
        y, after = module(x, state=state, return_state=True)
        torch.testing.assert_close(y, module(x), rtol=0, atol=1e-10)
        assert after.position.tolist() == [start + 6 for start in starts]


def test_a_read_beyond_the_range_of_half_precision_is_rounded_after_the_norm():
    torch.manual_seed(0)
    module = Retention(16, 1)
    for projection in (module.query, module.key, module.value):
        torch.nn.init.constant_(projection.weight, 1.0)
    x = 10 + torch.randn(1, 300, 16)
    expected = module(x)
    y, state = module.half()(x.half(), return_state=True)
    assert state.S.max() > 65504 and y.isfinite().all()
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=5e-3 * expected.abs().max().item())


def test_the_state_is_a_memory_and_a_position():
    module = Retention(12, 3)
    _, state = module(torch.randn(2, 5, 12), return_state=True)
    assert isinstance(state, RetentionState)
    assert state.S.shape == (2, 3, 4, 4) and state.position.tolist() == [5, 5]
    _, state = module.step(torch.randn(2, 12), state)
    assert state.position.tolist() == [6, 6]
