"""The models of the transformers library give the same results on this package's operators."""

from __future__ import annotations

import importlib
import math
import os
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from lesson_code.exercises.real_models import lightning_decays
from lesson_code.torch import in_transformers
from lesson_code.torch import transformers as module
from tests.arrays import assert_close

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up
transformers = pytest.importorskip("transformers", reason="transformers is missing: install it")
transformers.logging.set_verbosity_error()

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4}
MODELS = {
    "Qwen3Next": {
        **SMALL,
        **EXPERTS,
        "layer_types": LAYERS,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "KimiLinear": {
        **SMALL,
        **EXPERTS,
        "layer_types": LAYERS,
        "num_experts_per_token": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "OlmoHybrid": {
        **SMALL,
        "layer_types": LAYERS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "Mamba2": {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def draw(*shape):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(1))


def watched(engine):
    engine = importlib.import_module(f"lesson_code.torch.engines.{engine}")
    return mock.patch.object(engine, "_forward", side_effect=engine._forward)


@every_model
def test_a_model_has_the_same_logits(name):
    model, tokens = build(name).eval(), draw(2, 70)
    with torch.no_grad():
        expected = model(tokens).logits
        with watched("delta") as corrected, watched("additive") as added, in_transformers():
            found = model(tokens).logits
    assert corrected.called or added.called
    assert_close(found, expected, torch.float32)


@every_model
def test_a_model_generates_the_same_tokens(name):
    """A prompt is read in chunks, then one step for each token, with the library's own cache."""
    model, prompt = build(name).eval(), draw(1, 20)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    with in_transformers():
        assert torch.equal(model.generate(prompt, **options), expected)


@every_model
def test_a_model_trains_alike(name):
    losses = []
    for inside in (False, True):
        model, tokens = build(name), draw(2, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        steps = []
        for _ in range(3):
            with in_transformers() if inside else warnings.catch_warnings():
                loss = model(tokens, labels=tokens).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < losses[0][0] - 0.05
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear"])
def test_steps_of_training_have_the_same_losses(name):
    """Two texts are learned by heart. The losses agree to 1 in 10,000.

    Rounding grows from step to step, most where Adam divides by gradients near 0: hence its eps.
    """
    tokens, losses = draw(2, 20), []
    for inside in (False, True):
        model = build(name)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
        steps = []
        with in_transformers() if inside else nullcontext():
            for _ in range(25):
                loss = model(tokens, labels=tokens).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps.append(loss.item())
        losses.append(steps)
    assert losses[0][-1] < losses[0][0] - 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_lightning_slopes():
    """The rates of MiniMax's heads and layers are those of the book's equation."""
    heads, layers = 4, 6
    config = transformers.MiniMaxConfig(
        hidden_size=16,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        block_size=4,
        layer_types=["linear_attention"] * layers,
    )
    for layer in range(layers):
        mixer = of("minimax", "MiniMaxLightningAttention")(config, layer)
        found = torch.exp(-mixer.slope_rate.flatten().double())
        expected = torch.from_numpy(lightning_decays.reference(heads, layer, layers))
        assert_close(found, expected, tolerance=1e-6)


# The functions themselves.


def of(model, name):
    path = f"transformers.models.{model}.modeling_{model}"
    return getattr(importlib.import_module(path), name)


def both(model, name, *args, **options):
    """What the library's function and the one in its place return."""
    expected = of(model, name)(*args, **options)
    with in_transformers():
        return of(model, name)(*args, **options), expected


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(results, tolerance=2e-6):
    for found, expected in zip(*map(leaves, results), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert_close(found.double(), expected.double(), tolerance=tolerance)


def leaves(x):
    return [y for y in (x if isinstance(x, tuple) else (x,)) if y is not None]


@pytest.mark.parametrize("by_channel", [False, True], ids=["gated delta rule", "KDA"])
@pytest.mark.parametrize("N", [1, 2, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rules(by_channel, N, dtype):
    heads = (2, 2) if by_channel else (2, 4)  # of keys, of values
    q, k, v = (
        normal(3, N, heads[0], 16),
        normal(3, N, heads[0], 16, seed=1),
        normal(3, N, heads[1], 8),
    )
    q, k, v = (x.to(dtype) for x in (q, k, v))
    beta = normal(3, N, heads[1]).sigmoid()
    g = -normal(3, N, heads[1], *([16] if by_channel else [])).exp()
    model, kind = (
        ("kimi_linear", "kimi_delta_attention")
        if by_channel
        else ("qwen3_next", "gated_delta_rule")
    )
    names = ["chunk_", "recurrent_"] if by_channel else ["torch_chunk_", "torch_recurrent_"]
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    if not by_channel:  # in which the step function wants as many heads of each
        each = heads[1] // heads[0]
        alike = [q.repeat_interleave(each, 2), k.repeat_interleave(each, 2), v]
    for name in names:
        for state in (None, normal(3, heads[1], 16, 8, seed=3)):
            arrays = [q, k, v] if by_channel or "chunk" in name else alike
            more = {"initial_state": state, "output_final_state": state is not None}
            found = both(model, name + kind, *arrays, **options, **more)
            same(found, 2e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("N", [1, 31, 70])
def test_mamba_2(N):
    x, dt, D = normal(2, N, 4, 8), normal(2, N, 4), normal(4)
    A, B, C = -normal(4).exp(), normal(2, N, 2, 5), normal(2, N, 2, 5, seed=2)
    options = {"D": D, "dt_bias": normal(4, seed=5), "dt_softplus": True}
    for state in (None, normal(2, 4, 8, 5, seed=3)):
        for more in ({}, {"dt_limit": (0.1, 0.5)}, {"return_final_states": True}):
            more |= {"initial_states": state}
            same(both("nemotron_h", "mamba2_chunk_scan", x, dt, A, B, C, 32, **options, **more))


def test_a_step_of_mamba_2():
    """Which writes to the state that it is given."""
    x, dt, D = (
        normal(2, 4, 8),
        normal(2, 4)[..., None].expand(2, 4, 8),
        normal(4)[:, None].expand(4, 8),
    )
    A = -normal(4).exp()[:, None, None].expand(4, 8, 5)
    B, C, S = normal(2, 2, 5), normal(2, 2, 5, seed=2), normal(2, 4, 8, 5, seed=3)
    states = [S.clone(), S.clone()]
    options = {"dt_bias": normal(4, seed=5)[:, None].expand(4, 8), "dt_softplus": True}
    name = "mamba2_selective_state_update"
    expected = of("mamba2", name)(states[0], x, dt, A, B, C, D, **options)
    with in_transformers():
        found = of("mamba2", name)(states[1], x, dt, A, B, C, D, **options)
    same(((found, states[1]), (expected, states[0])))
    assert (states[0] != S).any()


def test_closed_gates_are_exact():
    q, k, v = (normal(1, 9, 2, 4, seed=i) for i in range(3))
    beta, g = normal(1, 9, 2).sigmoid(), torch.zeros(1, 9, 2)
    g[:, 5] = -math.inf
    with in_transformers():
        chunk = of("qwen3_next", "torch_chunk_gated_delta_rule")
        out, _ = chunk(q, k, v, g, beta)
        fresh, _ = chunk(q[:, 5:], k[:, 5:], v[:, 5:], 0 * beta[:, 5:], beta[:, 5:])
    assert_close(out[:, 5:], fresh, torch.float32)


# The context.


def test_what_is_replaced_is_reported_and_restored():
    name = "transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule"
    before = of("qwen3_next", "torch_chunk_gated_delta_rule")
    with pytest.raises(KeyError, match="inside"), in_transformers() as replaced:
        assert name in replaced and len(set(replaced)) == len(replaced)
        assert of("qwen3_next", "torch_chunk_gated_delta_rule") is not before
        with in_transformers():  # once more
            pass
        assert of("qwen3_next", "torch_chunk_gated_delta_rule") is not before
        raise KeyError("inside")
    assert of("qwen3_next", "torch_chunk_gated_delta_rule") is before


@pytest.mark.parametrize(("package", "kept"), [("fla", "delta"), ("mamba_ssm", "mamba2")])
def test_a_package_that_the_library_prefers_stays(package, kept):
    def found(name, *args):
        return object() if name == package else find_spec(name, *args)

    with mock.patch.object(module, "find_spec", found), in_transformers() as replaced:
        assert replaced and not any(kept in name.rsplit(".", 1)[1] for name in replaced)


def test_packed_sequences_are_refused_by_the_library():
    x = normal(1, 4, 2, 4)
    with in_transformers(), pytest.raises(ValueError, match="packed"):
        of("qwen3_next", "torch_chunk_gated_delta_rule")(
            x, x, x, x[..., 0], x[..., 0], cu_seqlens=torch.tensor([0, 2, 4])
        )


def test_without_the_library():
    with mock.patch.object(module, "find_spec", lambda name, *_: None):
        with pytest.raises(ImportError, match="^in_transformers needs .* install transformers"):
            with in_transformers():
                pass
    assert "transformers" in sys.modules
