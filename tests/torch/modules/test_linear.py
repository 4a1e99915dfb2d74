"""Linear attention as a module and as a layer: against the equations, their norms, their state."""

import numpy as np
import pytest
import torch

from lesson_code import numpy as reference
from lesson_code.torch import feature_maps
from lesson_code.torch.modules import LinearAttention, LinearTransformerLayer
from tests.torch.modules.family import disturb, draw, refuses


class Learned(torch.nn.Module):
    """A feature map with weights of its own, C = 5."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.linear(x).exp()


def make(kind, *args, **options):
    torch.manual_seed(0)
    module = disturb(kind(*args, **options))
    return module, draw(module, 9)


def reads_of(module, x, normalize=True):
    """Equations 8 to 10 and the fraction in 11, in NumPy: token by token, head by head."""
    W = {name: p.detach().numpy().T for name, p in module.named_parameters()}
    D = module.width // module.num_heads
    reads = np.zeros((len(x), module.num_heads, D))
    for h in range(module.num_heads):
        columns = slice(h * D, (h + 1) * D)
        W_Q, W_K, W_V = (W[f"{name}.weight"][:, columns] for name in ("query", "key", "value"))
        S, z = np.zeros((D, D)), np.zeros(D)
        for i, x_i in enumerate(x):
            S = S + np.outer(reference.elu_plus_one(x_i @ W_K), x_i @ W_V)
            z = z + reference.elu_plus_one(x_i @ W_K)
            phi = reference.elu_plus_one(x_i @ W_Q)
            reads[i, h] = phi @ S / (phi @ z if normalize else 1)
    return reads, W


def layer_norm(u, weight, bias):
    centered = u - u.mean(-1, keepdims=True)
    return weight * centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) + bias


def gelu(x):
    return x * 0.5 * (1 + torch.erf(torch.from_numpy(x / 2**0.5)).numpy())


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("normalize", [True, False])
def test_attention_is_read_norm_projection(num_heads, normalize):
    module, x = make(LinearAttention, 12, num_heads, normalize=normalize)
    for one, y in zip(x.numpy(), module(x).detach().numpy(), strict=True):
        reads, W = reads_of(module, one, normalize)
        rms = np.sqrt((reads**2).mean(-1, keepdims=True) + 1e-5)  # of each token and head
        expected = (W["norm.weight"] * reads / rms).reshape(9, 12) @ W["output.weight"]
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_layer_is_equations_8_to_11(num_heads):
    layer, x = make(LinearTransformerLayer, 12, num_heads)
    for one, y in zip(x.numpy(), layer(x).detach().numpy(), strict=True):
        reads, W = reads_of(layer, one)
        u = layer_norm(reads.reshape(9, 12) + one, W["norm_1.weight"], W["norm_1.bias"])
        hidden = gelu(u @ W["feed_forward.0.weight"] + W["feed_forward.0.bias"])
        u = u + hidden @ W["feed_forward.2.weight"] + W["feed_forward.2.bias"]
        expected = layer_norm(u, W["norm_2.weight"], W["norm_2.bias"])
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-11)


def test_the_norm_sees_one_token_and_one_head():
    """The fault of a group norm over time: there the last token moved earlier outputs by 1.28."""
    module, x = make(LinearAttention, 12, 3)
    y = module(x)
    x[:, -1] *= 1000
    torch.testing.assert_close(module(x)[:, :-1], y[:, :-1], rtol=0, atol=1e-13)
    # Values of one head 1,000 times as large change nothing at all after the norm.
    with torch.no_grad():
        x[:, -1] /= 1000
        module.value.weight[:4] *= 1000
    torch.testing.assert_close(module(x), y, rtol=0, atol=1e-3)


def test_the_norm_undoes_the_normalizer():
    module, x = make(LinearAttention, 12, 3)
    y = module(10 * x)
    module.normalize = False
    torch.testing.assert_close(module(10 * x), y, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [LinearAttention, LinearTransformerLayer])
def test_feature_maps(kind):
    for feature_map, C in (
        (feature_maps.relu, 4),
        (feature_maps.taylor(4), 15),
        (feature_maps.positive_random_features(7, 4), 7),
        (Learned(), 5),
    ):
        module, x = make(kind, 12, 3, feature_map=feature_map)
        state = module.initial_state(2)
        assert state.S.shape == (2, 3, C, 4) and state.z.shape == (2, 3, C)
        y = module(x)
        for t in range(9):
            y_t, state = module.step(x[:, t], state)
            torch.testing.assert_close(y_t, y[:, t], rtol=0, atol=1e-10)
    learned = set(dict(module.named_parameters())) & {"feature_map.linear.weight"}
    assert learned  # trained and stored with the rest


@pytest.mark.parametrize("kind", [LinearAttention, LinearTransformerLayer])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_do_not_stick(kind, dtype):
    """A running sum of ones sticks at 256 in bfloat16, and at 2,048 in float16."""
    module, x = make(kind, 4, 1)
    module, x = module.to(dtype), x[:, :1].to(dtype)
    _, one = module(x, return_state=True)
    _, state = module(x.expand(-1, 2500, -1), return_state=True)
    for _ in range(500):
        _, state = module.step(x[:, 0], state)
    for kept, first in zip(state, one, strict=True):
        assert kept.dtype == torch.float32
        torch.testing.assert_close(kept, 3000 * first, rtol=1e-4, atol=0)


def test_what_is_refused():
    module = LinearAttention(12, 3)
    wrong = LinearAttention(12, 3, feature_map=Learned()).initial_state(2)
    for call in (
        lambda: module(torch.randn(2, 5, 12), state=wrong),
        lambda: module.step(torch.randn(2, 12), wrong),
    ):
        with pytest.raises(ValueError, match="S of (the state|initial_state) must have"):
            call()
    for kind in (LinearAttention, LinearTransformerLayer):
        with refuses(TypeError, "feature_map must be callable, got str."):
            kind(12, 3, feature_map="elu")
    with refuses(TypeError, "normalize must be True or False, got 1."):
        LinearAttention(12, 3, normalize=1)


def test_a_read_beyond_the_range_of_half_precision_is_rounded_after_the_norm():
    """Unnormalized reads grow with N; float16 ends at 65,504, and inf over inf is no number."""
    torch.manual_seed(0)
    module = LinearAttention(16, 1, normalize=False)
    for projection in (module.query, module.key, module.value):
        torch.nn.init.eye_(projection.weight)
    x = 10 + torch.randn(1, 3_000, 16)
    y, state = module.half()(x.half(), return_state=True)
    expected = module.float()(x)
    assert (module.half().step(x[:, 0].half(), state)[0]).isfinite().all()
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_map_to_train_may_have_weights_in_half_precision(dtype):
    module = LinearAttention(8, 2, feature_map=torch.nn.Linear(4, 5)).to(dtype)
    x = torch.randn(1, 70, 8, dtype=dtype)
    y, state = module(x, return_state=True)
    assert y.dtype == dtype and state.S.dtype == torch.float32
    assert module.step(x[:, 0], state)[0].dtype == dtype
