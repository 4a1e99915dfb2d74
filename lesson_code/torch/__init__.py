"""The book's equations in PyTorch, under the names that they have in NumPy.

The functions take and return tensors (..., N, D) on any device, in float64, float32, bfloat16 or
float16; they are differentiable and work under ``torch.compile``, ``torch.func`` and
``torch.autocast``. The modules train on whole sequences and decode token by token, with one set of
weights: `forward`, `step` and `initial_state`.
"""

import torch

from lesson_code.torch import distributed, modules
from lesson_code.torch.aft import aft_full, aft_simple
from lesson_code.torch.backends import compare_backends
from lesson_code.torch.delta import (
    delta_rule,
    gated_delta_product,
    gated_delta_rule,
    kimi_delta_attention,
)
from lesson_code.torch.feature_maps import (
    elu_plus_one,
    exponential,
    hedgehog,
    identity,
    polynomial,
    positive_random_features,
    relu,
    taylor,
)
from lesson_code.torch.forgetting import forgetting_attention
from lesson_code.torch.gated import gated_linear_attention
from lesson_code.torch.generalized_delta import generalized_delta_rule
from lesson_code.torch.linear import linear_attention
from lesson_code.torch.log_linear import LogLinearState, log_linear_attention
from lesson_code.torch.logistics import draw_logistic_mixture, logistic_mixture
from lesson_code.torch.mamba import selective_scan, state_space_dual
from lesson_code.torch.mamba3 import Mamba3State, mamba3
from lesson_code.torch.memory import LinearAttentionState
from lesson_code.torch.mesa import MesaState, mesa
from lesson_code.torch.modules import *  # noqa: F403
from lesson_code.torch.momentum import MomentumState, momentum_delta_rule
from lesson_code.torch.retention import retention, retention_decays
from lesson_code.torch.rwkv4 import channel_mix, time_mix, token_shift
from lesson_code.torch.rwkv6 import rwkv6
from lesson_code.torch.rwkv7 import rwkv7
from lesson_code.torch.softmax import (
    attention_weights,
    grouped_query_attention,
    latent_attention,
    similarity_attention,
    softmax_attention,
    tiled_softmax_attention,
)
from lesson_code.torch.transformers import in_transformers
from lesson_code.torch.ttt import TTTState, ttt_linear
from lesson_code.torch.window import sliding_window_attention
from lesson_code.torch.wkv import WKVState, wkv

__all__ = [
    *modules.__all__,
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
    "compare_backends",
    "delta_rule",
    "distributed",
    "draw_logistic_mixture",
    "elu_plus_one",
    "exponential",
    "forgetting_attention",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_linear_attention",
    "generalized_delta_rule",
    "grouped_query_attention",
    "hedgehog",
    "identity",
    "in_transformers",
    "kimi_delta_attention",
    "latent_attention",
    "linear_attention",
    "log_linear_attention",
    "logistic_mixture",
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

# A state is a tuple of tensors, which torch.load may read.
torch.serialization.add_safe_globals(
    [x for x in map(globals().get, __all__) if isinstance(x, type) and issubclass(x, tuple)]
)
