"""Layers of the transformers library, by other authors, and modules with the same weights."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from lesson_code.torch.modules import (
    GatedDeltaNet,
    KimiDeltaAttention,
    SelectiveSSM,
    StateSpaceDual,
)

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up
transformers = pytest.importorskip("transformers", reason="transformers is missing: install it")
transformers.logging.set_verbosity_error()

F, H = 24, 3
LINEAR = {
    "hidden_size": F,
    "rms_norm_eps": 1e-5,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": H,
}
OLMO = {
    **LINEAR,
    "linear_num_key_heads": H,
    "linear_num_value_heads": H,
    "linear_key_head_dim": F // H,
    "linear_value_head_dim": F // H,
}
KIMI = {**LINEAR, "linear_num_heads": H, "linear_head_dim": F // H}
MAMBA = {"hidden_size": F, "state_size": 5, "num_hidden_layers": 1}
MAMBA_2 = {**MAMBA, "n_groups": 1, "num_heads": H, "head_dim": 2 * F // H, "chunk_size": 16}

# A parameter of the module, and its name in the layer.
DELTA_NAMES = {
    "query.weight": "q_proj.weight",
    "key.weight": "k_proj.weight",
    "value.weight": "v_proj.weight",
    "convolution.weight": "conv1d.weight",
    "beta.weight": "b_proj.weight",
    "norm.weight": "o_norm.weight",
    "output.weight": "o_proj.weight",
}
OLMO_NAMES = {
    **DELTA_NAMES,
    "log_rate": "A_log",
    "decay_bias": "dt_bias",
    "decay.weight": "a_proj.weight",
    "gate.weight": "g_proj.weight",
}
KIMI_NAMES = {
    **DELTA_NAMES,
    "log_rate": "forget_gate.A_log",
    "decay_bias": "forget_gate.dt_bias",
    "decay.0.weight": "forget_gate.f_a_proj.weight",
    "decay.1.weight": "forget_gate.f_b_proj.weight",
    "gate.0.weight": "g_a_proj.weight",
    "gate.1.weight": "g_b_proj.weight",
}
BOTH_NAMES = {
    "input.weight": "in_proj.weight",
    "convolution.weight": "conv1d.weight",
    "convolution.bias": "conv1d.bias",
    "log_rate": "A_log",
    "skip": "D",
    "output.weight": "out_proj.weight",
}
MAMBA_NAMES = {
    **BOTH_NAMES,
    "select.weight": "x_proj.weight",
    "step_size.weight": "dt_proj.weight",
    "step_size.bias": "dt_proj.bias",
}
MAMBA_2_NAMES = {**BOTH_NAMES, "step_bias": "dt_bias", "norm": "norm.weight"}

# The library's model and its layer, its settings, the module, and the names.
LAYERS = {
    "Kimi Linear": (
        ("KimiLinear", "DeltaAttention"),
        KIMI,
        lambda: KimiDeltaAttention(F, H),
        KIMI_NAMES,
    ),
    "OLMo Hybrid": (
        ("OlmoHybrid", "GatedDeltaNet"),
        {**OLMO, "linear_allow_neg_eigval": True},
        lambda: GatedDeltaNet(F, H, allow_negative_eigenvalues=True),
        OLMO_NAMES,
    ),
    "OLMo Hybrid, beta below 1": (
        ("OlmoHybrid", "GatedDeltaNet"),
        {**OLMO, "linear_allow_neg_eigval": False},
        lambda: GatedDeltaNet(F, H),
        OLMO_NAMES,
    ),
    "Mamba": (
        ("Mamba", "Mixer"),
        MAMBA,
        lambda: SelectiveSSM(F, state_width=5),
        MAMBA_NAMES,
    ),
    "Mamba-2": (
        ("Mamba2", "Mixer"),
        MAMBA_2,
        lambda: StateSpaceDual(F, H, state_width=5),
        MAMBA_2_NAMES,
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def snake(name: str) -> str:
    return "".join(f"_{x.lower()}" if x.isupper() else x for x in name).lstrip("_")


def layer_and_module(name: str):
    """Both in float32, with random weights of which none is left as it was."""
    (model, kind), settings, make, names = LAYERS[name]
    config = getattr(transformers, f"{model}Config")(**settings)
    path = f"transformers.models.{snake(model)}.modeling_{snake(model)}"
    torch.manual_seed(0)
    layer = getattr(importlib.import_module(path), model + kind)(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.5
            parameter.normal_(0.5 if parameter.ndim == 1 else 0, spread)
    module, theirs = make(), dict(layer.named_parameters())
    with torch.no_grad():
        for ours, parameter in module.named_parameters():
            if ours == "gate.1.bias":  # which the library leaves out
                parameter.zero_()
            else:
                parameter.copy_(theirs.pop(names[ours]).reshape(parameter.shape))
    assert not theirs, "the layer has more"
    return layer, module


def error(found, expected) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@every_layer
@torch.no_grad()
def test_a_module_is_the_layer_of_the_library(name):
    layer, module = layer_and_module(name)
    x = torch.randn(2, 70, F)
    expected = layer(x)
    assert error(module(x), expected) < 5e-6
    state = module.initial_state(2)
    for t in range(9):
        y_t, state = module.step(x[:, t], state)
        assert error(y_t, expected[:, t]) < 2e-5


@every_layer
@torch.no_grad()
def test_each_weight_matters(name):
    """What is zero in one of them is another layer, so that the names are those of the same."""
    layer, module = layer_and_module(name)
    x = torch.randn(2, 20, F)
    expected = layer(x)
    for ours, parameter in module.named_parameters():
        if ours != "gate.1.bias":
            kept = parameter.clone()
            parameter.zero_()
            assert error(module(x), expected) > 1e-3, ours
            parameter.copy_(kept)
