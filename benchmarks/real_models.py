"""Models of the transformers library on its own recurrences and on this package's operators.

python benchmarks/real_models.py                    writes lesson_code/results/real_models.json
python benchmarks/real_models.py --output FILE      writes another file

Small models of random weights, float32, one sequence: four layers, of which the last has softmax
attention and the others a recurrence (a gated delta rule in Qwen3-Next, Kimi delta attention in
Kimi Linear, Mamba-2 in Nemotron-H), each with a feed-forward layer without experts. "prefill" reads
the prompt and fills the cache, "training" is the forward and the backward pass, "decode" is 16
steps after the prompt. The library falls back to plain PyTorch, as it does wherever the packages
with its kernels are missing; inside `in_transformers` the recurrences run here, and all else is the
same. Both variants take turns in one run, and the best time of each counts. "logits" is the largest
difference between the two in the prompt's logits.
"""

import argparse
import os
from pathlib import Path

import torch

from lesson_code import measure, results
from lesson_code.torch import in_transformers

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up
import transformers  # noqa: E402

SEED, VOCABULARY, STEPS = 0, 1024, 16
LAYERS = ["linear_attention"] * 3 + ["full_attention"]


def settings(width, head):
    """By name: what a model's configuration is given."""
    heads = width // head
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "intermediate_size": 2 * width,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    hybrid = {**common, "num_hidden_layers": 4, "layer_types": LAYERS}
    return {
        "Qwen3Next": {
            **hybrid,
            "mlp_only_layers": [0, 1, 2, 3],
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
            "linear_num_key_heads": heads // 2,
            "linear_num_value_heads": heads,
        },
        "KimiLinear": {
            **{key: value for key, value in hybrid.items() if key != "head_dim"},
            "mlp_layer_types": ["dense"] * 4,
            "linear_num_heads": heads,
            "linear_head_dim": head,
            "kv_lora_rank": 2 * head,
            "qk_nope_head_dim": head,
            "qk_rope_head_dim": head // 2,
            "v_head_dim": head,
        },
        "NemotronH": {
            **common,
            "layers_block_type": [x for layer in LAYERS for x in (layer, "mlp")],
            "mamba_num_heads": 2 * heads,
            "mamba_head_dim": head,
            "ssm_state_size": head,
            "n_groups": heads // 2,
        },
    }


def tasks(model, tokens):
    """By name: what is measured, and how many tokens it deals with."""

    def prefill():
        with torch.no_grad():
            return model(tokens, use_cache=True)

    def train():
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    cache = prefill().past_key_values

    def decode():  # these steps lengthen the cache of the softmax layer a little
        with torch.no_grad():
            for _ in range(STEPS):
                model(tokens[:, :1], past_key_values=cache, use_cache=True)

    N = tokens.shape[1]
    return {"prefill": (prefill, N), "training": (train, N), "decode": (decode, STEPS)}


def inside(function):
    """The same, on this package's operators."""

    def run():
        with in_transformers():
            return function()

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["Qwen3Next", "KimiLinear", "NemotronH"])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure.keep_freed_memory()
    transformers.logging.set_verbosity_error()
    known, rows = settings(options.width, options.head), []
    for name in options.models:
        torch.manual_seed(SEED)
        config = getattr(transformers, f"{name}Config")(**known[name])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        tokens = torch.randint(3, VOCABULARY, (1, options.length))
        for task, (function, count) in tasks(model, tokens).items():
            both = {"library": function, "here": inside(function)}
            best = measure.seconds(both, repeats=options.repeats)
            rows.append({"model": name, "task": task, "tokens": count, "seconds": best})
            speed = {key: f"{count / value:,.0f} tokens/s" for key, value in best.items()}
            print(name, task, speed, f"{best['library'] / best['here']:.2f} times", flush=True)
            if task == "prefill":
                difference = (function().logits - inside(function)().logits).abs().max()
                rows[-1]["logits"] = difference.item()
    result = {
        "what": "models of transformers on its own recurrences and on this package's, float32",
        "transformers": transformers.__version__,
        "seed": SEED,
        "length": options.length,
        "width": options.width,
        "head": options.head,
        "rows": rows,
    }
    results.save("real_models", result, output=options.output)


if __name__ == "__main__":
    main()
