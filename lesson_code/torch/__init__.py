"""The book's equations in PyTorch, under the names that they have in NumPy.

The functions take and return tensors (..., N, D) on any device, in float64, float32, bfloat16 or
float16; they are differentiable and work under ``torch.compile``, ``torch.func`` and
``torch.autocast``. The modules train on whole sequences and decode token by token, with one set of
weights: `forward`, `step` and `initial_state`.
"""

import torch

from lesson_code.torch.feature_maps import (
    elu_plus_one,
    exponential,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)
from lesson_code.torch.linear import LinearAttentionState, linear_attention
from lesson_code.torch.modules import (
    KVCache,
    LanguageModel,
    LinearAttention,
    LinearTransformerLayer,
    Mixer,
    SoftmaxAttention,
)
from lesson_code.torch.softmax import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)

# A state is a tuple of tensors, which torch.load may read.
torch.serialization.add_safe_globals([KVCache, LinearAttentionState])

__all__ = [
    "KVCache",
    "LanguageModel",
    "LinearAttention",
    "LinearAttentionState",
    "LinearTransformerLayer",
    "Mixer",
    "SoftmaxAttention",
    "attention_weights",
    "elu_plus_one",
    "exponential",
    "grouped_query_attention",
    "identity",
    "latent_attention",
    "linear_attention",
    "polynomial",
    "positive_random_features",
    "relu",
    "similarity_attention",
    "softmax_attention",
    "taylor",
    "tiled_softmax_attention",
]
