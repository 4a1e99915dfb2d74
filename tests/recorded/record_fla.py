"""Record what the reference functions of flash-linear-attention compute, for test_recorded.py.

Its package fla_core needs triton, which is there for Linux only, so it is not in requirements.txt.
To record again, in an environment that has numpy and torch:

    pip install fla_core==0.6.0 triton einops
    python tests/recorded/record_fla.py

Inputs are float32 and drawn with one seed. They are stored as this package takes them, heads before
tokens, and given to fla as each of its functions wants them. Where fla has a second program for the
same function, its chunks, nothing is written unless the two agree. All scales are 1 but
those of softmax; where a function divides queries by the root of D = 4 whatever it is told, they
come twice as large.
"""

from __future__ import annotations

import importlib
import json
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

PATH = Path(__file__).with_name("fla.npz")
B, H, N, D, M, J = 2, 3, 29, 4, 6, 2
LEVELS = 6  # enough for 32 tokens
WINDOW = 5
CHUNK = 8  # three of them, and a part of one


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=(B, H, *shape))

    def unit(*shape):
        x = normal(*shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    def decay_log(*shape):
        """Mostly weak, one in ten almost closed."""
        weak = rng.exponential(0.2, size=(B, H, *shape))
        return -np.where(rng.random((B, H, *shape)) < 0.1, 8 * weak, weak)

    drawn = {
        "q": normal(N, D),
        "k": unit(N, D),
        "v": normal(N, M),
        "beta": rng.uniform(0, 2, size=(B, H, N)),
        "g": decay_log(N),
        "g_channel": decay_log(N, D),
        "a": unit(N, D),
        "b": 0.5 * unit(N, D),
        "kappa": unit(N, D),
        "rate": rng.uniform(0, 1, size=(B, H, N, D)),
        "erase": rng.uniform(0, 1, size=(B, H, N, D)),
        "write": rng.uniform(0, 1, size=(B, H, N, M)),
        "bonus": rng.normal(size=(H, D)),
        "k_steps": unit(N, J, D),
        "v_steps": normal(N, J, M),
        "beta_steps": rng.uniform(0, 2, size=(B, H, N, J)),
        "S": normal(D, M),
        "z": 1 + abs(normal(D)),
        "step": rng.uniform(0, 1, size=(B, H, N)),
        "momentum": rng.uniform(0.1, 0.9, size=(B, H, N)),
        "write_before": normal(D, M),
        "level_weights": rng.uniform(0, 2, size=(B, H, N, LEVELS)),
        "ridge": rng.uniform(0.5, 1.5, size=(H, D)),
        "norm_weight": rng.uniform(0.5, 1.5, size=(H, D)),
        "norm_bias": rng.normal(size=(H, D)),
    }
    return {name: x.astype("float32") for name, x in drawn.items()}


def fla(operator: str, function: str, module: str = "naive"):
    return getattr(importlib.import_module(f"fla.ops.{operator}.{module}"), function)


def tokens_first(x):
    """(B, H, N, ...) -> (B, N, H, ...), and back."""
    return x.transpose(1, 2)


def steps_in_a_row(x):
    """(B, H, N, J, ...) -> (B, N J, H, ...)"""
    return tokens_first(x.flatten(2, 3))


def turned(function, *arrays, **options):
    """A function of arrays with tokens first."""
    out, state = function(*map(tokens_first, arrays), **options)
    return tokens_first(out), state


def whole_chunks(function, S, *arrays, **options):
    """A function of whole chunks: zeros at the end change nothing."""
    missing = -N % CHUNK
    arrays = [torch.cat([x, x.new_zeros(B, H, missing, *x.shape[3:])], dim=2) for x in arrays]
    options |= {"chunk_size": CHUNK, "initial_state": S, "output_final_state": True}
    out, state = function(*arrays, **options)
    return out[:, :, :N], state


def as_wide_as_keys(function, v, S):
    """A function that asks for M = D, called twice: each column of values is for itself."""
    first, last = (function(v[..., part], S[..., part]) for part in (slice(D), slice(M - D, M)))
    columns = slice(2 * D - M, D)
    out, G = (torch.cat([first[i], last[i][..., columns]], dim=-1) for i in (0, 2))
    return out, first[1], G


def recorded(x) -> dict[str, tuple]:
    """Outputs (B, H, N, M) and the arrays of last states of each function, from its recurrence."""
    q, k, v, beta, g, g_channel, S = (
        x[name] for name in ("q", "k", "v", "beta", "g", "g_channel", "S")
    )
    twice, given = 2 * q, {"initial_state": S, "output_final_state": True}
    scaled = given | {"scale": 1.0}

    recurrent_delta = fla("delta_rule", "delta_rule_recurrence")
    recurrent_gated = fla("gated_delta_rule", "naive_recurrent_gated_delta_rule")
    recurrent_kda = fla("kda", "naive_recurrent_kda")
    dplr = fla("generalized_delta_rule.dplr", "dplr_recurrence")
    iplr = fla("generalized_delta_rule.iplr", "iplr_recurrence")
    product = fla("gated_delta_product", "naive_recurrent_gated_delta_product")
    gdn2 = fla("gdn2", "naive_recurrent_gdn2")
    gla = fla("gla", "naive_recurrent_gla")
    rwkv6 = fla("rwkv6", "naive_recurrent_rwkv6", "recurrent_naive")
    simple_gla = fla("simple_gla", "naive_recurrent_simple_gla")
    linear = fla("linear_attn", "naive_recurrent_linear_attn")
    retention, based = fla("retention", "naive_retention"), fla("based", "naive_parallel_based")
    softmax = fla("attn", "naive_parallel_attn")

    moved = -x["rate"] * x["kappa"]
    rank_one = (twice, k, v, x["a"], x["b"])
    found = {
        "delta_rule": recurrent_delta(twice, k, v, beta, S),
        "gated_delta_rule": turned(recurrent_gated, q, k, v, beta, g, **scaled),
        "kimi_delta_attention": turned(recurrent_kda, q, k, v, g_channel, beta, **scaled),
        "generalized_delta_rule": dplr(*rank_one, g_channel, S),
        "generalized_delta_rule without decay": iplr(*rank_one, S),
        "generalized_delta_rule as GDN-2": turned(
            gdn2, q, k, v, g_channel, x["erase"], x["write"], **scaled
        ),
        "rwkv7": dplr(twice, k, v, x["kappa"], moved, g_channel, S),
        "gated_linear_attention": turned(gla, twice, k, v, g_channel, **given),
        "rwkv6": rwkv6(q, k, v, g_channel, x["bonus"], **scaled),
        "state_space_dual": turned(simple_gla, q, k, v, g, **scaled),
        "linear_attention": turned(linear, q, k, v, **scaled),
        "retention": (retention(twice, k, v), None),
        "linear_attention of taylor": (based(q, k, v), None),
        "softmax_attention": (turned(softmax, q, k, v)[0], None),
    }
    out, state = product(
        tokens_first(q),
        *(steps_in_a_row(x[f"{name}_steps"]) for name in ("k", "v")),
        tokens_first(g),
        steps_in_a_row(x["beta_steps"]),
        num_householder=J,
        **scaled,
    )
    found["gated_delta_product"] = tokens_first(out), state
    # A normalizer has the keys summed, (B, 1, H, D).
    first = S, x["z"][:, None]
    positive = [tokens_first(y) for y in (q.abs(), k.abs(), v)]
    out, (state, z) = linear(*positive, **scaled | {"initial_state": first}, normalize=True)
    found["linear_attention, normalized"] = tokens_first(out), state, z[:, 0]

    found |= newer(x)

    gated_chunks = fla("gated_delta_rule", "naive_chunk_gated_delta_rule")
    kda_chunks = fla("kda", "naive_chunk_kda")
    dplr_chunks = fla("generalized_delta_rule.dplr", "dplr_chunkwise")
    iplr_chunks = fla("generalized_delta_rule.iplr", "iplr_chunkwise")
    gla_chunks = fla("simple_gla", "naive_chunk_simple_gla")
    for name, function, *arrays in (
        ("gated_delta_rule", partial(turned, gated_chunks, scale=1.0), q, k, v, g, beta),
        ("kimi_delta_attention", partial(turned, kda_chunks, scale=1.0), q, k, v, g_channel, beta),
        ("generalized_delta_rule", dplr_chunks, *rank_one, g_channel),
        ("generalized_delta_rule without decay", iplr_chunks, *rank_one),
        ("state_space_dual", partial(turned, gla_chunks, scale=1.0), q, k, v, g),
    ):
        for one, other in zip(found[name], whole_chunks(function, S, *arrays), strict=True):
            assert (one - other).norm() < 1e-5 * one.norm(), f"fla's two programs differ in {name}"
    return found


def newer(x) -> dict[str, tuple]:
    """Of models whose state is none, or several arrays; and programs of fla that are not right."""
    q, k, v, beta, g, S, step = (x[name] for name in ("q", "k", "v", "beta", "g", "S", "step"))
    softmax = fla("attn", "naive_parallel_attn")
    forgetting = fla("forgetting_attn", "naive_forgetting_attn")
    log_linear = fla("log_linear_attn", "naive_log_linear_attn")
    momentum = fla("momentum_delta_rule", "recurrent_momentum_delta_rule_ref")
    momentum_chunks = fla("momentum_delta_rule", "chunk_momentum_delta_rule_ref")
    mesa = fla("mesa_net", "naive_mesa_net_exact")
    mesa_steps = fla("mesa_net", "naive_mesa_net_CG")
    ttt = fla("ttt", "chunk_ttt_linear_ref")
    titans = fla("titans", "titans_linear")
    first = [tokens_first(y) for y in (q, k, v, g)]

    faded = tokens_first(forgetting(*first))
    other = tokens_first(softmax(*first[:3], g=first[3])[0])
    assert (faded - other).norm() < 1e-5 * faded.norm(), "fla's two programs differ"
    # fla's M is what will be taken away, so its sign is the other one. Its p reads, its k writes.
    rates = {"log_alpha": g, "log_mu": x["momentum"].log(), "eta": step, "beta": 1 + 0 * step}
    arrays = {"q": q, "k": k, "p": k, "v": v} | rates
    given = {name: tokens_first(y) for name, y in arrays.items()}
    given |= {"initial_S": S, "initial_M": -x["write_before"], "scale": 1.0}
    out, (state, moved) = momentum(**given, output_final_state=True)
    # Its chunks lose digits under strong decays: 3e-6 here, 2e-4 with 16 tokens, all with 29.
    assert (out - momentum_chunks(**given, chunk_size=CHUNK)[0]).norm() < 1e-5 * out.norm()
    found = {
        "sliding_window_attention": turned(softmax, q, k, v, window_size=WINDOW)[:1],
        "forgetting_attention": (faded,),
        "log_linear_attention": (
            tokens_first(log_linear(*first, tokens_first(x["level_weights"]))),
        ),
        "momentum_delta_rule": (tokens_first(out), state, -moved),
    }

    def solved(program, **options):
        def of_columns(v, S):
            arrays = map(tokens_first, (q, k, v, g))
            given = {"h_kk_init": torch.eye(D).expand(B, H, D, D), "h_kv_init": S}
            out, *state = program(*arrays, x["ridge"], tokens_first(beta), **given, **options)
            return tokens_first(out), *state

        return as_wide_as_keys(of_columns, v, S)

    found["mesa"] = solved(mesa)
    found["mesa in fla's steps"] = solved(mesa_steps, chunk_size=N)[:1]

    narrow, W = v[..., :D], S[..., :D].contiguous()
    norm = x["norm_weight"], x["norm_bias"]
    out, W_end, b_end = ttt(
        *map(tokens_first, (q, k, narrow)),
        *norm,
        tokens_first(step[..., None]),
        scale=1.0,
        mini_batch_size=CHUNK,
        initial_state=W,
        initial_state_bias=x["z"][..., None, :],
        output_final_state=True,
    )
    found["ttt_linear"] = tokens_first(out), W_end, b_end[..., 0, :]
    # One token of Titans: with a step of 1/2 twice, M - M_1 is the key times the gradient.
    half = torch.full((B, H, 1, 1), 0.5)
    one = (y[:, :, :1] for y in (q, k, narrow))
    given = {"eps": 1e-6, "chunk_size": 1, "initial_state": W, "output_final_state": True}
    state = titans(*one, *norm, half, 0 * half, 0 * half, **given)[1]
    found["titans, one token"] = None, state
    return found


def main() -> None:
    drawn = inputs()
    found = recorded({name: torch.tensor(x) for name, x in drawn.items()})
    arrays = dict(drawn)
    for case, results in found.items():
        for part, x in zip(("out", "state", "second"), results, strict=False):
            if x is not None:
                assert x.isfinite().all()
                arrays[f"{case}/{part}"] = x.contiguous().numpy()
    names = ("fla_core", "torch", "numpy", "triton", "einops")
    versions = {"python": platform.python_version()} | {name: version(name) for name in names}
    np.savez_compressed(PATH, versions=json.dumps(versions), **arrays)
    print(f"{PATH.name}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
