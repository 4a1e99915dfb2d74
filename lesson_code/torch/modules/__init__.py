"""Modules: one set of weights, trained in parallel and run step by step.

``forward`` reads a whole sequence (B, N, F), ``step`` one token (B, F) and a state; both give the
same outputs, and a sequence can be split anywhere between them (:class:`Mixer`). Each module is
made as ``Name(width, num_heads, ...)``:

`SoftmaxAttention`
    whose state, a `KVCache`, grows with the sequence
`LinearAttention`
    with a norm and a projection after the read
`LinearTransformerLayer`
    a whole block: the layer that makes a transformer an RNN
`Retention`
    RetNet's layer: a decay for each head, a norm and a gate
`DeltaNet`, `GatedDeltaNet`
    whose heads correct what they remember, the second after forgetting
`GatedDeltaProduct`
    the same, several times for each token
`KimiDeltaAttention`
    the same, where each channel forgets at its own rate
`GatedLinearAttention`
    a gate for each token and channel, from half as wide keys
`RWKV6TimeMix`
    RWKV-6's layer: a token mixes with the last one, and is read before it is written
`AFTSimple`
    a mean of the past in each channel, weighted by keys alone, and a gate
`RWKV4TimeMix`, `RWKV4ChannelMix`, `RWKV4Block`
    RWKV-4's sublayers, in which a token mixes with the last one, and the block of both
`RWKV7TimeMix`, `RWKV7ChannelMix`, `RWKV7Block`
    RWKV-7's sublayers, of which the first forgets, removes and writes, and the block of both
`SelectiveSSM`
    Mamba's block: the token chooses what is written, read and forgotten
`StateSpaceDual`
    Mamba-2's block: the same with one decay for each head
`Mamba3`
    Mamba-3's block: a state that rotates, and a second write in the place of the convolution
`TTTLinear`
    fits a linear model while it reads, by a step of gradient descent for each batch of tokens
`MesaLayer`
    reads the least-squares answer to all pairs so far
`LogLinearAttention`
    a state for each of log₂ N blocks of the past
`SlidingWindowAttention`
    softmax over the last tokens, whose `KVCache` stops growing
`ForgettingAttention`
    softmax whose tokens fade the ones before, with a `FadingCache`

`LanguageModel` stacks them, in any mixture, between an embedding and logits; `ImageModel` between
the pixels of an image and what it expects of each.
"""

from lesson_code.torch.modules.aft import AFTSimple
from lesson_code.torch.modules.delta import (
    DeltaNet,
    DeltaNetState,
    GatedDeltaNet,
    GatedDeltaProduct,
    KimiDeltaAttention,
)
from lesson_code.torch.modules.forgetting import FadingCache, ForgettingAttention
from lesson_code.torch.modules.gated import GatedLinearAttention
from lesson_code.torch.modules.image_model import ImageModel, ImageState
from lesson_code.torch.modules.language_model import LanguageModel
from lesson_code.torch.modules.linear import LinearAttention, LinearTransformerLayer
from lesson_code.torch.modules.log_linear import LogLinearAttention, LogLinearAttentionState
from lesson_code.torch.modules.mamba import (
    SelectiveSSM,
    SelectiveSSMState,
    StateSpaceDual,
    StateSpaceDualState,
)
from lesson_code.torch.modules.mamba3 import Mamba3
from lesson_code.torch.modules.mesa import MesaLayer, MesaLayerState
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.retention import Retention, RetentionState
from lesson_code.torch.modules.rwkv4 import (
    RWKV4Block,
    RWKV4BlockState,
    RWKV4ChannelMix,
    RWKV4State,
    RWKV4TimeMix,
)
from lesson_code.torch.modules.rwkv6 import RWKV6State, RWKV6TimeMix
from lesson_code.torch.modules.rwkv7 import (
    RWKV7Block,
    RWKV7BlockState,
    RWKV7ChannelMix,
    RWKV7State,
    RWKV7TimeMix,
)
from lesson_code.torch.modules.softmax import KVCache, RaggedCache, SoftmaxAttention
from lesson_code.torch.modules.ttt import TTTLinear
from lesson_code.torch.modules.window import SlidingWindowAttention

__all__ = [
    "AFTSimple",
    "DeltaNet",
    "DeltaNetState",
    "FadingCache",
    "ForgettingAttention",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "ImageModel",
    "ImageState",
    "KVCache",
    "KimiDeltaAttention",
    "LanguageModel",
    "LinearAttention",
    "LinearTransformerLayer",
    "LogLinearAttention",
    "LogLinearAttentionState",
    "Mamba3",
    "MesaLayer",
    "MesaLayerState",
    "Mixer",
    "RWKV4Block",
    "RWKV4BlockState",
    "RWKV4ChannelMix",
    "RWKV4State",
    "RWKV4TimeMix",
    "RWKV6State",
    "RWKV6TimeMix",
    "RWKV7Block",
    "RWKV7BlockState",
    "RWKV7ChannelMix",
    "RWKV7State",
    "RWKV7TimeMix",
    "RaggedCache",
    "Retention",
    "RetentionState",
    "SelectiveSSM",
    "SelectiveSSMState",
    "SlidingWindowAttention",
    "SoftmaxAttention",
    "StateSpaceDual",
    "StateSpaceDualState",
    "TTTLinear",
]
