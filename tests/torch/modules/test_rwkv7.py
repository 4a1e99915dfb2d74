"""RWKV-7 as modules: against the paper's layers, how they begin, and the values that they share."""

import math

import numpy as np
import pytest
import torch

from lesson_code.torch.modules import (
    ImageModel,
    LanguageModel,
    LinearAttention,
    RWKV7Block,
    RWKV7BlockState,
    RWKV7ChannelMix,
    RWKV7State,
    RWKV7TimeMix,
    SoftmaxAttention,
)
from tests.torch.modules.family import disturb, draw, refuses

F, H, D = 12, 3, 4
with_heads = pytest.mark.parametrize("kind", [RWKV7TimeMix, RWKV7Block])


def make(kind, *heads, **options):
    torch.manual_seed(0)
    return disturb(kind(F, *heads, **options))


def weights(module):
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


# The layers, token by token in plain loops.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def layer_norm(x, weight, bias, epsilon=1e-5):
    return weight * (x - x.mean()) / np.sqrt(x.var() + epsilon) + bias


def low_rank(W, name, x, between=lambda few: few):
    return between(x @ W[f"{name}.down"]) @ W[f"{name}.up"] + W.get(f"{name}.base", 0)


class TimeMix:
    """One time mix, which reads a token (F,) and, in later layers, its first value."""

    def __init__(self, W):
        self.W, self.last, self.S = W, np.zeros(F), np.zeros((H, D, D))

    def __call__(self, x, v_first=None):
        W = self.W
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (self.last - x) * share for share in W["shares"])
        self.last = x
        r, k, v = (
            W[f"{name}.weight"] @ x_name
            for name, x_name in (("receptance", x_r), ("key", x_k), ("value", x_v))
        )
        w = np.exp(-np.exp(-0.5) * sigmoid(low_rank(W, "decay", x_w, np.tanh)))
        a = sigmoid(low_rank(W, "rate", x_a))
        g = low_rank(W, "gate", x_g, sigmoid)
        v_first = v if v_first is None else v_first
        if "first_share.base" in W:
            share = sigmoid(low_rank(W, "first_share", x_v))
            v = (1 - share) * v + share * v_first
        kappa, k = k * W["removal"], k * (1 - W["replacement"]) + k * W["replacement"] * a
        y = np.zeros(F)
        for h in range(H):
            at = slice(h * D, h * D + D)
            unit = kappa[at] / np.sqrt((kappa[at] ** 2).sum())
            S = np.zeros((D, D))
            for i in range(D):
                for j in range(D):
                    removed = a[at][i] * unit[i] * sum(unit[c] * self.S[h, c, j] for c in range(D))
                    S[i, j] = w[at][i] * self.S[h, i, j] - removed + k[at][i] * v[at][j]
            self.S[h] = S
            y[at] = layer_norm(S.T @ r[at], W["norm.weight"][at], W["norm.bias"][at], 64e-5)
            y[at] += sum(r[at] * k[at] * W["bonus"][h]) * v[at]
        return W["output.weight"] @ (y * g), v_first


class ChannelMix:
    def __init__(self, W):
        self.W, self.last = W, np.zeros(F)

    def __call__(self, x):
        hidden = self.W["key.weight"] @ ((1 - self.W["share"]) * x + self.W["share"] * self.last)
        self.last = x
        return self.W["value.weight"] @ np.maximum(hidden, 0) ** 2


def part_of(W, name):
    return {key.removeprefix(f"{name}."): p for key, p in W.items() if key.startswith(f"{name}.")}


class Block:
    def __init__(self, W):
        self.norms = {key: p for key, p in W.items() if key.startswith("norm_")}
        self.time_mix = TimeMix(part_of(W, "time_mix"))
        self.channel_mix = ChannelMix(part_of(W, "channel_mix"))

    def normed(self, i, x):
        return layer_norm(x, self.norms[f"norm_{i}.weight"], self.norms[f"norm_{i}.bias"])

    def __call__(self, x, v_first=None):
        x = self.normed(0, x) if "norm_0.weight" in self.norms else x
        y, v_first = self.time_mix(self.normed(1, x), v_first)
        x = x + y
        return x + self.channel_mix(self.normed(2, x)), v_first


def assert_close(found, expected):
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("layer", [0, 1])
def test_time_mix(layer):
    module = make(RWKV7TimeMix, H, layer=layer, num_layers=3)
    assert (module.first_share is not None) == (layer > 0)
    x, first = draw(module, 9), draw(module, 9, seed=2)
    y, state, values = module(
        x, return_state=True, first_values=first if layer else None, return_first_values=True
    )
    assert isinstance(state, RWKV7State)
    for i in range(2):
        mix = TimeMix(weights(module))
        for t in range(9):
            expected, v_first = mix(x[i, t].numpy(), first[i, t].numpy() if layer else None)
            assert_close(y[i, t], expected)
            assert_close(values[i, t], v_first)
        assert_close(state.S[i], mix.S)
        assert_close(state.last[i], mix.last)


def test_channel_mix():
    module = make(RWKV7ChannelMix, layer=1, num_layers=3)
    x = draw(module, 9)
    for i in range(2):
        mix = ChannelMix(weights(module))
        assert_close(module(x)[i], np.array([mix(x_t.numpy()) for x_t in x[i]]))


@pytest.mark.parametrize("layer", [0, 2])
def test_block(layer):
    module = make(RWKV7Block, H, layer=layer, num_layers=3)
    x = draw(module, 9)
    for i in range(2):
        block = Block(weights(module))
        assert ("norm_0.weight" in block.norms) == (layer == 0)
        assert_close(module(x)[i], np.array([block(x_t.numpy())[0] for x_t in x[i]]))


def test_the_state_holds_the_normed_last_inputs():
    block = make(RWKV7Block, H)
    x = draw(block, 9)
    _, state = block(x, return_state=True)
    assert isinstance(state, RWKV7BlockState)
    u = block.norm_1(block.norm_0(x))
    torch.testing.assert_close(state.time_last, u[:, -1])
    u = block.norm_0(x) + block.time_mix(u)
    torch.testing.assert_close(state.channel_last, block.norm_2(u)[:, -1])


def test_decays_stay_in_their_range_for_any_weights():
    """Between exp(-exp(-1/2)) = 0.545 and 1: a memory fades by less than half at a token."""
    module = make(RWKV7TimeMix, 1)
    x = draw(module, 2)
    with torch.no_grad():
        module.rate.base.fill_(-1e4)  # nothing is removed
        for base, smallest in ((1e4, math.exp(-math.exp(-0.5))), (-1e4, 1.0)):
            module.decay.base.fill_(base)
            _, state = module(x[:, :1], return_state=True)
            module.value.weight.zero_()
            _, after = module.step(x[:, 1], state)
            torch.testing.assert_close(after.S, smallest * state.S, rtol=0, atol=1e-12)
            module.value.weight.fill_(1)


# How they begin, number by number as in the code of RWKV-7.


def published(width, heads, layer, num_layers):
    """Initial values of one layer's vectors, channel by channel."""
    size = width // heads
    to_one = layer / (num_layers - 1) if num_layers > 1 else 0
    to_almost_zero = 1 - layer / num_layers
    found = {name: [] for name in ("decay", "rate", "first_share", "removal")}
    for n in range(width):
        linear = n / (width - 1) - 0.5 if width > 1 else -0.5
        zigzag = (n % size - (size - 1) / 2) / ((size - 1) / 2) if size > 1 else 0
        zigzag *= abs(zigzag)
        speed = (n / (width - 1) if width > 1 else 0) ** (1 + to_one**0.3)
        found["decay"].append(-6 + 6 * speed + 0.5 + 2.5 * zigzag)
        found["rate"].append(-0.19 + 0.3 * zigzag + 0.4 * linear)
        found["first_share"].append(0.73 - 0.4 * linear)
        found["removal"].append(0.71 - 0.1 * linear)
    powers = 0.2, 0.9, 0.7, 0.7, 0.9, 0.2  # r, w, k, v, a, g
    shares = [[1 - (n / width) ** (p * to_almost_zero) for n in range(width)] for p in powers]
    return found, shares


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize(("width", "heads"), [(1, 1), (2, 2), (12, 3), (14, 2)])
def test_initial_vectors_of_the_time_mix(width, heads, layer, num_layers):
    torch.manual_seed(0)
    module = RWKV7TimeMix(width, heads, layer=layer, num_layers=num_layers)
    expected, shares = published(width, heads, layer, num_layers)
    torch.testing.assert_close(module.shares.detach(), torch.tensor(shares), rtol=0, atol=1e-5)
    for name, values in expected.items():
        if name == "removal":
            found = module.removal
        elif name == "first_share" and layer == 0:
            assert module.first_share is None
            continue
        else:
            found = module.get_parameter(f"{name}.base")
        torch.testing.assert_close(found.detach(), torch.tensor(values), rtol=0, atol=1e-5)
    assert module.gate.base is None
    assert module.replacement.allclose(torch.tensor(1.02))
    assert module.bonus.shape == (heads, width // heads)
    assert module.bonus.allclose(torch.tensor(-0.04))
    scale = ((layer + 1) / num_layers) ** 0.7
    assert module.norm.weight.allclose(torch.tensor(scale)) and not module.norm.bias.any()
    assert module.norm.eps == 64e-5


def test_initial_matrices():
    torch.manual_seed(0)
    module = RWKV7TimeMix(256, 4, layer=1, num_layers=2)
    ranks = {"decay": 32, "rate": 32, "first_share": 32, "gate": 64}
    for name, rank in ranks.items():
        down, up = (module.get_parameter(f"{name}.{part}") for part in ("down", "up"))
        assert down.shape == (256, rank) and not down.any()
        torch.testing.assert_close(up @ up.T, 0.01 * torch.eye(rank), rtol=0, atol=1e-6)
    for name, gain in (("receptance", 1), ("key", 0.1), ("value", 1)):
        W = module.get_parameter(f"{name}.weight")
        torch.testing.assert_close(W @ W.T, gain**2 * torch.eye(256), rtol=0, atol=1e-5)
    assert not module.output.weight.any()
    # Of a model of 2560 channels, and of one that is narrower than the smallest rank.
    wide = RWKV7TimeMix(2560, 40)
    assert (wide.decay.up.shape[0], wide.gate.up.shape[0]) == (128, 256)
    assert RWKV7TimeMix(8, 2).gate.up.shape == (8, 8)


@pytest.mark.parametrize(("layer", "num_layers"), [(0, 1), (0, 3), (2, 3)])
def test_initial_values_of_the_channel_mix(layer, num_layers):
    torch.manual_seed(0)
    module = RWKV7ChannelMix(5, layer=layer, num_layers=num_layers)
    expected = [1 - (i / 5) ** ((1 - layer / num_layers) ** 4) for i in range(5)]
    torch.testing.assert_close(module.share.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    assert not module.value.weight.any()
    product = module.key.weight.T @ module.key.weight
    torch.testing.assert_close(product, torch.eye(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_new_block_passes_on_its_input_and_learns_nevertheless(layer):
    torch.manual_seed(0)
    block = RWKV7Block(F, H, layer=layer, num_layers=2)
    x, first, target = torch.randn(3, 2, 9, F)
    passed = torch.nn.functional.layer_norm(x, (F,)) if layer == 0 else x
    torch.testing.assert_close(block(x, first_values=first), passed)
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    start = {name: p.detach().clone() for name, p in block.named_parameters()}
    losses = []
    for _ in range(4):
        losses.append((block(x, first_values=first) - target).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    for name, p in block.named_parameters():
        assert not torch.equal(p, start[name]), name
    assert losses[-1] < losses[0]


# The first values.


def model_of(mixers, **options):
    torch.manual_seed(0)
    model = disturb(LanguageModel(11, F, mixers, num_heads=H, **options))
    return model, torch.randint(11, (2, 7))


def test_a_model_of_blocks_is_the_papers():
    """Three blocks over a text, token by token, where v_first goes from the first to the others."""
    model, tokens = model_of([RWKV7Block] * 3)
    W, logits = weights(model), model(tokens)
    for i in range(2):
        blocks = [Block(part_of(W, f"blocks.{n}")) for n in range(3)]
        for t in range(7):
            x, v_first = W["embedding.weight"][tokens[i, t]], None
            for block in blocks:
                x, v_first = block(x, v_first)
            x = layer_norm(x, W["norm.weight"], W["norm.bias"])
            assert_close(logits[i, t], W["head.weight"] @ x)


@pytest.mark.parametrize(
    "mixers",
    [
        [RWKV7Block] * 3,
        [RWKV7TimeMix] * 3,
        [RWKV7TimeMix, SoftmaxAttention, RWKV7Block],
        [LinearAttention, RWKV7TimeMix, RWKV7TimeMix],
    ],
)
def test_first_values_reach_the_later_layers(mixers):
    """In forward, in steps, from a prompt, and when it writes; past layers of other kinds."""
    model, tokens = model_of(mixers)
    logits = model(tokens)
    state, steps = model.initial_state(2), []
    for token in tokens.unbind(dim=1):
        y_t, state = model.step(token, state)
        steps.append(y_t)
    torch.testing.assert_close(torch.stack(steps, dim=1), logits, rtol=0, atol=1e-10)
    _, state = model(tokens[:, :3], return_state=True)
    torch.testing.assert_close(model(tokens[:, 3:], state=state), logits[:, 3:])
    text = model.generate(tokens, 5, temperature=0)
    assert torch.equal(text[:, 7:], model(text)[:, 6:-1].argmax(dim=-1))
    # The later one looks at them: its share of them has an effect, and a gradient.
    last = getattr(model.blocks[-1], "mixer", None) or model.blocks[-1].time_mix
    (slope,) = torch.autograd.grad(logits.square().sum(), last.first_share.base)
    assert slope.abs().min() > 1e-6


def test_values_of_the_first_layer_replace_those_of_a_later_one():
    """With a share of 1 a later layer's own values are of no account."""
    model, tokens = model_of([RWKV7Block] * 2)
    late = model.blocks[1].time_mix
    with torch.no_grad():
        late.first_share.base.fill_(1e4)
        expected = model(tokens)
        late.value.weight += 1
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)
        model.blocks[0].time_mix.value.weight += 1
        assert not model(tokens).allclose(expected, atol=1e-3)


def test_images_share_values_too():
    torch.manual_seed(0)
    model = disturb(ImageModel(6, 5, F, [RWKV7Block, RWKV7TimeMix], num_heads=H))
    images = torch.randint(5, (2, 6))
    expected = model(images)
    found, state = model.read(images[:, :2])
    for t in range(2, 6):
        torch.testing.assert_close(found, expected[:, t], rtol=0, atol=1e-10)
        if t < 5:
            found, state = model.step(images[:, t], state)


@with_heads
def test_a_module_alone_is_its_own_first(kind):
    first, later = make(kind, H), make(kind, H, layer=1, num_layers=2)
    x, others = draw(first, 5), draw(first, 5, seed=2)
    torch.testing.assert_close(first(x, first_values=others), first(x), rtol=0, atol=0)
    own = later(x, return_first_values=True)[1]
    torch.testing.assert_close(later(x, first_values=own), later(x), rtol=0, atol=1e-12)
    assert not later(x, first_values=others).allclose(later(x), atol=1e-3)
    y_t, _, own_t = later.step(x[:, 0], later.initial_state(2), return_first_values=True)
    torch.testing.assert_close(y_t, later(x)[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(own_t, own[:, 0], rtol=0, atol=1e-12)


@with_heads
def test_what_is_refused(kind):
    module = make(kind, H, layer=1, num_layers=2)
    x = draw(module, 5)
    with refuses(ValueError, "first_values must have shape (2, 5, 12), got (2, 4, 12)."):
        module(x, first_values=x[:, :4])
    with refuses(ValueError, "first_values must have shape (2, 12), got (2, 5, 12)."):
        module.step(x[:, 0], module.initial_state(2), first_values=x)
    with refuses(TypeError, "first_values must be a torch tensor, got ndarray."):
        module(x, first_values=x.numpy())
    with refuses(TypeError, "return_first_values must be True or False, got 1."):
        module(x, return_first_values=1)


@pytest.mark.parametrize("kind", [RWKV7TimeMix, RWKV7ChannelMix, RWKV7Block])
def test_places_are_refused(kind):
    heads = () if kind is RWKV7ChannelMix else (H,)
    with refuses(ValueError, "layer must be below num_layers, 2, got 2."):
        kind(F, *heads, layer=2, num_layers=2)
    with refuses(ValueError, "layer must be at least 0, got -1."):
        kind(F, *heads, layer=-1)
    with refuses(TypeError, "num_layers must be an integer, got 1.0."):
        kind(F, *heads, num_layers=1.0)
