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

`LanguageModel` stacks them, in any mixture, between an embedding and logits.
"""

from lesson_code.torch.modules.language_model import LanguageModel
from lesson_code.torch.modules.linear import LinearAttention, LinearTransformerLayer
from lesson_code.torch.modules.mixer import Mixer
from lesson_code.torch.modules.softmax import KVCache, SoftmaxAttention

__all__ = [
    "KVCache",
    "LanguageModel",
    "LinearAttention",
    "LinearTransformerLayer",
    "Mixer",
    "SoftmaxAttention",
]
