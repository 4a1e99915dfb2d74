"""The mixers that trained comparisons share, with memories of equal size.

`MIXERS` has for each name a function (width, num_heads) -> module, whose memory has
width² / num_heads numbers: a square for each head. Where a module of the package would make another
one, the function says what it changes:

    window      has as many tokens as have so many keys and values
    Taylor      queries and keys are narrower, so that their features are as many as a head is wide
    GLA         keys are as wide as values, not half as wide
    RWKV        the ranks of its small maps are 4, not 32 or 64, in proportion to the width
    Mamba       as many numbers of state for each channel as a head is wide, and no expansion
    mesa        has two squares for each head, so it has twice as many heads
    hybrids     two mixers side by side, with twice as many heads each; their outputs add up

Three keep more, as is their nature: softmax and its hybrid all of the text, and log-linear
attention a square for each of about log₂ N blocks of it. `state_numbers` counts what a model keeps,
normalizers, last tokens and tails of convolutions included.
"""

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils import parametrize

import lesson_code.torch as lt
from lesson_code.torch.modules._parts import ShortConvolution

RANK = 4  # of the small maps of RWKV


def few_features(width, num_heads):
    """Linear attention with Taylor features of narrow queries and keys."""
    D = width // num_heads
    narrow = min(range(1, D + 1), key=lambda d: abs(lt.taylor(d).num_features - D))
    layer = lt.LinearAttention(width, num_heads, feature_map=lt.taylor(narrow))
    layer.query, layer.key = (nn.Linear(width, num_heads * narrow, bias=False) for _ in range(2))
    return layer


def wide_keys(width, num_heads):
    """Gated linear attention whose keys are as wide as its values."""
    layer = lt.GatedLinearAttention(width, num_heads)
    layer.head_width = width // num_heads
    rank = layer.forget[0].out_features
    layer.query, layer.key = (nn.Linear(width, width, bias=False) for _ in range(2))
    layer.forget = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
    return layer


def small_shift(width, num_heads):
    """The time mix of RWKV-6 with a token shift of a small rank."""
    layer = lt.RWKV6TimeMix(width, num_heads)
    layer.shares_down = nn.Parameter(torch.zeros(width, 5 * RANK))
    layer.shares_up = nn.Parameter(torch.empty(5, RANK, width).uniform_(-0.01, 0.01))
    return layer


def small_ranks(width, num_heads):
    """The time mix of RWKV-7 with maps of a small rank."""
    layer = lt.RWKV7TimeMix(width, num_heads)
    for part in (layer.decay, layer.rate, layer.gate):
        part.down = nn.Parameter(part.down.data[:, :RANK].clone())
        part.up = nn.Parameter(part.up.data[:RANK].clone())
    return layer


class Share(nn.Module):
    """Any number as a share between 0 and 1."""

    def forward(self, x):
        return x.sigmoid()

    def right_inverse(self, share):
        return share.logit()


def fitted_decay(width, num_heads):
    """Retention whose decays are learned, from memories of 8 and 64 tokens on."""
    layer = lt.Retention(width, num_heads)
    del layer.forgetting
    layer.forgetting = nn.Parameter(2.0 ** -torch.tensor([3.0, 6.0]))
    parametrize.register_parametrization(layer, "forgetting", Share())
    return layer


def square_states(module):
    """The block of Mamba-2 or Mamba-3 with states as wide as they are high."""

    def make(width, num_heads):
        return module(width, num_heads, state_width=width // num_heads, expand=1)

    return make


def short_window(width, num_heads):
    """Softmax over so many tokens that their keys and values are width² / num_heads numbers."""
    return lt.SlidingWindowAttention(width, num_heads, 1 + max(width // num_heads // 2, 1))


def more_heads(mixer):
    """Twice as many heads: half of the memory."""

    def make(width, num_heads):
        return mixer(width, 2 * num_heads)

    return make


def two_squares(width, num_heads):
    """A mesa layer of half as wide heads, each solved in as many iterations as it is wide."""
    layer = lt.MesaLayer(width, 2 * num_heads)
    layer.iterations = max(width // num_heads // 2, 1)
    return layer


class SideBySide(lt.Mixer):
    """The sum of two mixers, each with a state of its own."""

    def __init__(self, first, second):
        super().__init__(first.width)
        self.mixers = nn.ModuleList([first, second])

    def mix(self, x, state):
        pairs = zip(self.mixers, state or (None, None), strict=True)
        outs = [mixer(x, state=own, return_state=True) for mixer, own in pairs]
        return outs[0][0] + outs[1][0], tuple(own for _, own in outs)


def beside_gated_delta(mixer):
    def make(width, num_heads):
        halves = more_heads(mixer), more_heads(lt.GatedDeltaNet)
        return SideBySide(*(half(width, num_heads) for half in halves))

    return make


MIXERS = {
    "softmax": lt.SoftmaxAttention,
    "window": short_window,
    "linear (elu + 1)": lt.LinearAttention,
    "linear (Taylor)": few_features,
    "RetNet": lt.Retention,
    "GLA": wide_keys,
    "RWKV-6": small_shift,
    "RWKV-7": small_ranks,
    "Mamba-2": square_states(lt.StateSpaceDual),
    "Mamba-3": square_states(lt.Mamba3),
    "DeltaNet": lt.DeltaNet,
    "gated delta": lt.GatedDeltaNet,
    "KDA": lt.KimiDeltaAttention,
    "DeltaProduct": lt.GatedDeltaProduct,
    "log-linear": lt.LogLinearAttention,
    "mesa": two_squares,
    "window + gated delta": beside_gated_delta(short_window),
    "softmax + gated delta": beside_gated_delta(lt.SoftmaxAttention),
}


class PairEmbedding(nn.Module):
    """A vector for the key of a token plus one for its value, or for the question.

    Token (values + 1) a + b is key a with value b, and b is `values` or, in some tasks, 0 where key
    a is asked for.
    """

    def __init__(self, keys, values, width):
        super().__init__()
        self.key, self.value = nn.Embedding(keys, width), nn.Embedding(values + 1, width)

    def forward(self, tokens):
        rows = self.value.num_embeddings
        return self.key(tokens // rows) + self.value(tokens % rows)


class LastWords(nn.Module):
    """The embedding of a token, mixed with those of the three before it."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.taps = nn.Parameter(0.5 * torch.randn(4, width))

    def forward(self, tokens):
        x = self.table(tokens)
        shifted = (pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(4))
        return sum(tap * y for tap, y in zip(self.taps, shifted, strict=True))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def begin_as_identity(module):
    """Let each short convolution give the token itself, at first."""
    for part in module.modules():
        if isinstance(part, ShortConvolution):
            nn.init.zeros_(part.weight)
            nn.init.ones_(part.weight[:, -1])


def fill_up(block, parameters):
    """Make the feed-forward sublayer of a block as wide as gives it so many parameters."""
    width, block.feed_forward = block.width, nn.Identity()
    hidden = round((parameters - count(block) - width) / (2 * width + 1))
    block.feed_forward = nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
    )


def state_numbers(model, tokens):
    """Numbers that a model keeps of a text of so many tokens; of a cache, those at the end."""
    with torch.no_grad():
        _, state = model(torch.zeros(1, tokens, dtype=torch.int64), return_state=True)
    return sum(x.numel() for x in torch.utils._pytree.tree_leaves(state))
