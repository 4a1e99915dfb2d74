"""The book's equations in NumPy: a reference that a reader can check by eye.

Arrays are (..., N, D): any leading dimensions, N positions, width D. Float in, the same float dtype
out; sums are kept in float32 at least. No epsilon is added anywhere. The functions, by chapter:

1. Softmax attention: `softmax_attention`, `attention_weights`, `similarity_attention`,
   `tiled_softmax_attention`, `grouped_query_attention`, `latent_attention`
2. The bracket trick: `linear_attention` with the forms "quadratic" and "linear"
3. Outer-product memory: `LinearAttentionState`, its `write` and its `read`
4. Recurrent = parallel: `linear_attention` with ``causal=True`` and the forms "masked",
   "recurrent" and "cumsum" (chapter 7: "scan" and "chunkwise")
5. Feature maps: `elu_plus_one`, `relu`, `identity`, `exponential`, `polynomial`, `taylor`,
   `positive_random_features`
"""

from lesson_code.numpy.feature_maps import (
    elu_plus_one,
    exponential,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)
from lesson_code.numpy.linear import LinearAttentionState, linear_attention
from lesson_code.numpy.softmax import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)

__all__ = [
    "LinearAttentionState",
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
