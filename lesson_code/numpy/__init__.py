"""The book's equations in NumPy: a reference that a reader can check by eye.

Arrays are (..., N, D): any leading dimensions, N positions, width D. Float in, the same float dtype
out; sums are kept in float32 at least. No epsilon is added anywhere, but to the variance that
`ttt_linear` divides by. The functions, by chapter:

- Softmax attention: `softmax_attention`, `attention_weights`, `similarity_attention`
- The bracket trick: `linear_attention` with the forms "quadratic" and "linear"
- Outer-product memory: `LinearAttentionState`, its `write` and its `read`
- Recurrent = parallel: `linear_attention` with ``causal=True`` and the forms "masked",
  "recurrent" and "cumsum"; "scan" and "chunkwise" are those of the chapter on scans
- Feature maps: `elu_plus_one`, `relu`, `identity`, `exponential`, `polynomial`, `taylor`,
  `hedgehog`
- Random features: `positive_random_features`
- Measuring: `tiled_softmax_attention`
- Generating: `grouped_query_attention`, `latent_attention`
- AFT and RWKV-4: `aft_simple`, `aft_full`, `wkv`, `WKVState`, `token_shift`, `time_mix`,
  `channel_mix`
- Decay: `retention`, `retention_decays`
- Gates: `gated_linear_attention`, `rwkv6`, `selective_scan`, `state_space_dual`
- The delta rule: `delta_rule`, `gated_delta_rule`
- Forget, then correct: `kimi_delta_attention`, `rwkv7`, `generalized_delta_rule`,
  `gated_delta_product`
- Mamba-3: `mamba3`, `Mamba3State`
- Memory that learns: `momentum_delta_rule`, `MomentumState`, `ttt_linear`, `TTTState`, `mesa`,
  `MesaState`
- Between a state and a cache: `sliding_window_attention`, `forgetting_attention`,
  `log_linear_attention`, `LogLinearState`
- One recurrence, many models: `family`, a module with every model as a row of one table
"""

from lesson_code.numpy import family
from lesson_code.numpy.aft import aft_full, aft_simple
from lesson_code.numpy.delta import (
    delta_rule,
    gated_delta_product,
    gated_delta_rule,
    kimi_delta_attention,
)
from lesson_code.numpy.feature_maps import (
    elu_plus_one,
    exponential,
    hedgehog,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)
from lesson_code.numpy.forgetting import forgetting_attention
from lesson_code.numpy.gated import gated_linear_attention
from lesson_code.numpy.generalized_delta import generalized_delta_rule
from lesson_code.numpy.linear import linear_attention
from lesson_code.numpy.log_linear import LogLinearState, log_linear_attention
from lesson_code.numpy.mamba import selective_scan, state_space_dual
from lesson_code.numpy.mamba3 import Mamba3State, mamba3
from lesson_code.numpy.memory import LinearAttentionState
from lesson_code.numpy.mesa import MesaState, mesa
from lesson_code.numpy.momentum import MomentumState, momentum_delta_rule
from lesson_code.numpy.retention import retention, retention_decays
from lesson_code.numpy.rwkv4 import channel_mix, time_mix, token_shift
from lesson_code.numpy.rwkv6 import rwkv6
from lesson_code.numpy.rwkv7 import rwkv7
from lesson_code.numpy.softmax import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)
from lesson_code.numpy.ttt import TTTState, ttt_linear
from lesson_code.numpy.window import sliding_window_attention
from lesson_code.numpy.wkv import WKVState, wkv

__all__ = [
    "LinearAttentionState",
    "LogLinearState",
    "Mamba3State",
    "MesaState",
    "MomentumState",
    "TTTState",
    "WKVState",
    "aft_full",
    "aft_simple",
    "attention_weights",
    "channel_mix",
    "delta_rule",
    "elu_plus_one",
    "exponential",
    "family",
    "forgetting_attention",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_linear_attention",
    "generalized_delta_rule",
    "grouped_query_attention",
    "hedgehog",
    "identity",
    "kimi_delta_attention",
    "latent_attention",
    "linear_attention",
    "log_linear_attention",
    "mamba3",
    "mesa",
    "momentum_delta_rule",
    "polynomial",
    "positive_random_features",
    "relu",
    "retention",
    "retention_decays",
    "rwkv6",
    "rwkv7",
    "selective_scan",
    "similarity_attention",
    "sliding_window_attention",
    "softmax_attention",
    "state_space_dual",
    "taylor",
    "tiled_softmax_attention",
    "time_mix",
    "token_shift",
    "ttt_linear",
    "wkv",
]
