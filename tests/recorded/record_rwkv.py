"""Record what the package of RWKV's author computes for three small models, for test_recorded.py.

It is by other hands than fla, and runs whole models, of which an RWKV-4, an RWKV-6 and an RWKV-7
are recorded: random weights under the names of published checkpoints, the logits after each token
of a text, and the last state. The channel mix of the RWKV-6 gives 0, as this package has none. To
record again, in an environment that has numpy and torch:

    pip install rwkv==0.8.32 tokenizers
    python tests/recorded/record_rwkv.py
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

PATH = Path(__file__).with_name("rwkv.npz")
VOCABULARY, F, H, LAYERS, RANK, N = 11, 8, 2, 2, 8, 13


def common(rng) -> dict[str, np.ndarray]:
    """What both have: embedding, norms, matrices and head."""

    def matrix(*shape):
        return rng.normal(size=shape) / np.sqrt(shape[-1])

    weights = {"emb.weight": rng.normal(size=(VOCABULARY, F)), "head.weight": matrix(VOCABULARY, F)}
    norms = ["ln_out", "blocks.0.ln0"]
    for block in (f"blocks.{i}." for i in range(LAYERS)):
        norms += [f"{block}ln1", f"{block}ln2"]
        for name in ("receptance", "key", "value", "output"):
            weights[f"{block}att.{name}.weight"] = matrix(F, F)
        weights[f"{block}ffn.key.weight"] = matrix(4 * F, F)
        weights[f"{block}ffn.value.weight"] = matrix(F, 4 * F)
    for norm in norms:
        weights[f"{norm}.weight"] = rng.uniform(0.5, 1.5, size=F)
        weights[f"{norm}.bias"] = 0.2 * rng.normal(size=F)
    return weights


def rwkv4(rng) -> dict[str, np.ndarray]:
    weights = common(rng)
    for block in (f"blocks.{i}." for i in range(LAYERS)):
        weights[f"{block}att.time_decay"] = rng.uniform(-3, 1, size=F)
        weights[f"{block}att.time_first"] = rng.normal(size=F)
        weights[f"{block}ffn.receptance.weight"] = rng.normal(size=(F, F)) / np.sqrt(F)
        for name in ("att.time_mix_k", "att.time_mix_v", "att.time_mix_r"):
            weights[block + name] = rng.uniform(size=(1, 1, F))
        for name in ("ffn.time_mix_k", "ffn.time_mix_r"):
            weights[block + name] = rng.uniform(size=(1, 1, F))
    return weights


def rwkv6(rng) -> dict[str, np.ndarray]:
    weights = common(rng)
    for i in range(LAYERS):
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        for name in ("x", "w", "k", "v", "r", "g"):
            weights[f"{att}time_maa_{name}"] = rng.uniform(size=(1, 1, F))
        weights[f"{att}time_maa_w1"] = rng.normal(size=(F, 5 * RANK)) / np.sqrt(F)
        weights[f"{att}time_maa_w2"] = rng.normal(size=(5, RANK, F)) / np.sqrt(RANK)
        weights[f"{att}time_decay"] = rng.uniform(-3, 1, size=(1, 1, F))
        weights[f"{att}time_decay_w1"] = rng.normal(size=(F, RANK)) / np.sqrt(F)
        weights[f"{att}time_decay_w2"] = rng.normal(size=(RANK, F)) / np.sqrt(RANK)
        weights[f"{att}time_faaaa"] = rng.normal(size=(H, F // H))
        weights[f"{att}gate.weight"] = rng.normal(size=(F, F)) / np.sqrt(F)
        weights[f"{att}ln_x.weight"] = rng.uniform(0.5, 1.5, size=F)
        weights[f"{att}ln_x.bias"] = 0.2 * rng.normal(size=F)
        for name in ("k", "r"):
            weights[f"{ffn}time_maa_{name}"] = rng.uniform(size=(1, 1, F))
        weights[f"{ffn}receptance.weight"] = rng.normal(size=(F, F)) / np.sqrt(F)
        weights[f"{ffn}value.weight"] *= 0
    return weights


def rwkv7(rng) -> dict[str, np.ndarray]:
    weights = common(rng)
    for i in range(LAYERS):
        att = f"blocks.{i}.att."
        for name in ("r", "w", "k", "v", "a", "g"):
            weights[f"{att}x_{name}"] = rng.uniform(size=(1, 1, F))
        for name in ("w", "a", "v", "g"):
            if name == "v" and i == 0:
                continue  # the first layer's values are those that the others share
            weights[f"{att}{name}1"] = rng.normal(size=(F, RANK)) / np.sqrt(F)
            weights[f"{att}{name}2"] = rng.normal(size=(RANK, F)) / np.sqrt(RANK)
            if name != "g":
                weights[f"{att}{name}0"] = rng.normal(size=(1, 1, F))
        weights[f"{att}k_k"] = rng.uniform(0.5, 1, size=(1, 1, F))
        weights[f"{att}k_a"] = rng.uniform(0.5, 1.5, size=(1, 1, F))
        weights[f"{att}r_k"] = rng.normal(size=(H, F // H))
        weights[f"{att}ln_x.weight"] = rng.uniform(0.5, 1.5, size=F)
        weights[f"{att}ln_x.bias"] = 0.2 * rng.normal(size=F)
        weights[f"blocks.{i}.ffn.x_k"] = rng.uniform(size=(1, 1, F))
    return weights


def run(generation: int, weights: dict[str, np.ndarray], tokens: list[int]):
    """Logits (N, vocabulary) and the last state, a list of tensors."""
    os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": str(+(generation == 7))}
    package = importlib.reload(importlib.import_module("rwkv.model"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        torch.save({k: torch.from_numpy(x) for k, x in weights.items()}, f"{path}.pth")
        model = package.RWKV(model=str(path), strategy="cpu fp32")
        state, logits = None, []
        for token in tokens:
            out, state = model.forward([token], state)
            logits.append(out.clone())
        whole, _ = model.forward(tokens, None, full_output=True)
    logits = torch.stack(logits)
    assert (whole - logits).norm() < 1e-5 * logits.norm(), "in one go it is another model"
    return logits, state


def main() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCABULARY, size=N)
    arrays = {"tokens": tokens}
    for generation, make in ((4, rwkv4), (6, rwkv6), (7, rwkv7)):
        weights = {name: x.astype("float32") for name, x in make(rng).items()}
        logits, state = run(generation, weights, tokens.tolist())
        arrays |= {f"{generation}/{name}": x for name, x in weights.items()}
        arrays[f"{generation}/logits"] = logits.numpy()
        arrays |= {f"{generation}/state/{i}": x.numpy() for i, x in enumerate(state)}
    names = ("rwkv", "torch", "numpy")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    np.savez_compressed(PATH, versions=json.dumps(versions), **arrays)
    print(f"{PATH.name}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
