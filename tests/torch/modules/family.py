"""The modules that are tested, and how: what the tests in this folder share.

A new module needs a line in `MODULES`; all that holds for every module is then tried on it.
"""

import re

import pytest
import torch

from lesson_code.torch.modules import (
    AFTSimple,
    DeltaNet,
    ForgettingAttention,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    LanguageModel,
    LinearAttention,
    LinearTransformerLayer,
    LogLinearAttention,
    Mamba3,
    MesaLayer,
    Retention,
    RWKV4Block,
    RWKV4ChannelMix,
    RWKV4TimeMix,
    RWKV6TimeMix,
    RWKV7Block,
    RWKV7ChannelMix,
    RWKV7TimeMix,
    SelectiveSSM,
    SlidingWindowAttention,
    SoftmaxAttention,
    StateSpaceDual,
    TTTLinear,
)

VOCABULARY, WIDTH, HEADS = 11, 12, 3


def widen(x):
    """A positive map that is not elementwise: C = D + 1."""
    return torch.cat([x * x, torch.ones_like(x[..., :1])], dim=-1)


def mesa():
    """With as many iterations as its four channels need in float64; 30 are for wider ones."""
    layer = MesaLayer(WIDTH, HEADS)
    layer.iterations = 12
    return layer


MODULES = {
    "softmax": lambda: SoftmaxAttention(WIDTH, HEADS),
    "softmax without positions": lambda: SoftmaxAttention(WIDTH, HEADS, rotary=False),
    "softmax, odd head width": lambda: SoftmaxAttention(WIDTH, 4),
    "linear": lambda: LinearAttention(WIDTH, HEADS),
    "linear, unnormalized": lambda: LinearAttention(WIDTH, 1, normalize=False),
    "linear, C is not D": lambda: LinearAttention(WIDTH, HEADS, feature_map=widen),
    "layer": lambda: LinearTransformerLayer(WIDTH, HEADS),
    "layer, C is not D": lambda: LinearTransformerLayer(WIDTH, 1, feature_map=widen),
    "retention": lambda: Retention(WIDTH, HEADS),
    "retention, odd head width": lambda: Retention(WIDTH, 4),
    "AFT-simple": lambda: AFTSimple(WIDTH),
    "RWKV-4 time mix": lambda: RWKV4TimeMix(WIDTH),
    "RWKV-4 channel mix": lambda: RWKV4ChannelMix(WIDTH),
    "RWKV-4 block": lambda: RWKV4Block(WIDTH),
    "gated": lambda: GatedLinearAttention(WIDTH, HEADS),
    "gated, odd head width": lambda: GatedLinearAttention(WIDTH, 4),
    "rwkv6": lambda: RWKV6TimeMix(WIDTH, HEADS),
    "RWKV-7 time mix": lambda: RWKV7TimeMix(WIDTH, HEADS),
    "RWKV-7 channel mix": lambda: RWKV7ChannelMix(WIDTH),
    "RWKV-7 block": lambda: RWKV7Block(WIDTH, HEADS),
    "delta net": lambda: DeltaNet(WIDTH, HEADS),
    "delta net, beta up to 2": lambda: DeltaNet(WIDTH, 1, allow_negative_eigenvalues=True),
    "gated delta net": lambda: GatedDeltaNet(WIDTH, HEADS),
    "delta product": lambda: GatedDeltaProduct(WIDTH, HEADS),
    "delta product, three steps": lambda: GatedDeltaProduct(WIDTH, 1, 3),
    "KDA": lambda: KimiDeltaAttention(WIDTH, HEADS),
    "KDA, beta up to 2": lambda: KimiDeltaAttention(WIDTH, 4, allow_negative_eigenvalues=True),
    "selective": lambda: SelectiveSSM(WIDTH, state_width=5),
    "dual": lambda: StateSpaceDual(WIDTH, HEADS, state_width=5),
    "Mamba-3": lambda: Mamba3(WIDTH, HEADS, state_width=4),
    "Mesa": mesa,
    "TTT": lambda: TTTLinear(WIDTH, HEADS, batch_size=3),
    "TTT, one head": lambda: TTTLinear(WIDTH, 1, batch_size=4),
    "log-linear": lambda: LogLinearAttention(WIDTH, HEADS, levels=9),
    "forgetting": lambda: ForgettingAttention(WIDTH, HEADS),
    "window": lambda: SlidingWindowAttention(WIDTH, HEADS, 3),
    "window, odd head width": lambda: SlidingWindowAttention(WIDTH, 4, 2),
    "language model of RWKV-7": lambda: LanguageModel(
        VOCABULARY, WIDTH, [RWKV7TimeMix, AFTSimple, RWKV7Block], num_heads=HEADS
    ),
    "language model": lambda: LanguageModel(
        VOCABULARY,
        WIDTH,
        [LinearAttention, SoftmaxAttention, LinearTransformerLayer],
        num_heads=HEADS,
    ),
}
# The classes of them that are mixers, each once, for what does not depend on the settings.
KINDS = {type(make()).__name__: type(make()) for make in MODULES.values()}
KINDS.pop("LanguageModel")

every_module = pytest.mark.parametrize("name", MODULES)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def disturb(module):
    """The module in float64, with no weight at 0 or 1, such as those of a new norm."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.double()


def make(name, dtype=torch.float64):
    torch.manual_seed(0)
    return disturb(MODULES[name]()).to(dtype)


def draw(module, N, B=2, seed=1):
    """Inputs (B, N, F) of a module, or tokens (B, N) of a language model."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(module, LanguageModel):
        return torch.randint(VOCABULARY, (B, N), generator=generator)
    x = torch.randn(B, N, module.width, generator=generator, dtype=torch.float64)
    return x.to(next(module.parameters()).dtype)


def in_steps(module, x, state=None):
    """Outputs and last state of a sequence, token by token."""
    state = module.initial_state(len(x)) if state is None else state
    outputs = []
    for x_t in x.unbind(dim=1):
        y_t, state = module.step(x_t, state)
        outputs.append(y_t)
    return torch.stack(outputs, dim=1), state


def leaves(state):
    return torch.utils._pytree.tree_leaves(state)


def assert_close(found, expected, tolerance=1e-11):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bound = tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def assert_same_state(found, expected, tolerance=1e-10):
    assert type(found) is type(expected)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert_close(a, b, tolerance)


def refuses(error, message):
    """The whole message, or its beginning."""
    return pytest.raises(error, match="^" + re.escape(message))
