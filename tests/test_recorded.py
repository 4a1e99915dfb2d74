"""What other people's programs compute: outputs and states recorded from two libraries.

tests/recorded/ has the recordings and the scripts that made them: the reference functions of
flash-linear-attention (fla_core), and three whole models of RWKV's author (rwkv). Neither library
is needed here. All of it was computed in float32, so an error is that of float32 even in float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import lesson_code.numpy as ln
import lesson_code.torch as lt
from lesson_code.numpy.linear import CAUSAL
from lesson_code.numpy.mesa import conjugate_gradients
from lesson_code.numpy.ttt import gradient, normed
from lesson_code.torch.modules.rwkv6 import RWKV6State
from lesson_code.torch.modules.rwkv7 import RWKV7BlockState
from tests.arrays import in_dtype, numbers
from tests.operators import CONTRACTS, leaves

FOLDER = Path(__file__).with_name("recorded")


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


FLA, RWKV = load("fla"), load("rwkv")
LIBRARIES = {"numpy": ln, "torch": lt}
DTYPES = {"numpy": {32: "float32", 64: "float64"}, "torch": {32: torch.float32, 64: torch.float64}}


def error(found, expected) -> float:
    """Relative to the length of all that is expected."""
    expected = numbers(expected)
    assert found.shape == expected.shape
    return np.linalg.norm(numbers(found) - expected) / np.linalg.norm(expected)


# --- fla: the operators --------------------------------------------------------------------------

# Each case: the operator, and how its arguments are called in the recording. What stands in no
# recording is computed from what does.
CASES = {
    "delta_rule": ("delta_rule", "q k v beta"),
    "gated_delta_rule": ("gated_delta_rule", "q k v beta g"),
    "kimi_delta_attention": ("kimi_delta_attention", "q k v beta g_channel"),
    "gated_delta_product": ("gated_delta_product", "q k_steps v_steps beta_steps g"),
    "generalized_delta_rule": ("generalized_delta_rule", "q k v a b g_channel"),
    "generalized_delta_rule without decay": ("generalized_delta_rule", "q k v a b zero"),
    "generalized_delta_rule as GDN-2": ("generalized_delta_rule", "q k written found -k g_channel"),
    "rwkv7": ("rwkv7", "q k v g_channel kappa rate"),
    "gated_linear_attention": ("gated_linear_attention", "q k v g_channel"),
    "rwkv6": ("rwkv6", "q k v g_channel bonus"),
    "state_space_dual": ("state_space_dual", "v g k q"),
    "retention": ("retention", "q k v decay"),
    "linear_attention": ("linear_attention", "q k v"),
    "linear_attention, normalized": ("linear_attention", "|q| |k| v"),
    "linear_attention of taylor": ("linear_attention", "q k v"),
    "softmax_attention": ("softmax_attention", "q k v"),
    "sliding_window_attention": ("sliding_window_attention", "q k v"),
    "forgetting_attention": ("forgetting_attention", "q k v g"),
    "log_linear_attention": ("log_linear_attention", "q k v g level_weights"),
    "momentum_delta_rule": ("momentum_delta_rule", "q k v step g momentum"),
    "mesa": ("mesa", "q k v beta g ridge"),
}
# Programs of fla that are not right, each with a test of its own below.
BUGS = {"mesa in fla's steps", "ttt_linear", "titans, one token"}
COMPUTED = {
    "zero": lambda x: np.zeros_like(x["g_channel"]),
    "-k": lambda x: -x["k"],
    "|q|": lambda x: abs(x["q"]),
    "|k|": lambda x: abs(x["k"]),
    "found": lambda x: np.exp(x["g_channel"]) * x["erase"] * x["k"],
    "written": lambda x: x["write"] * x["v"],
    "decay": lambda x: ln.retention_decays(x["q"].shape[1]),
}


def arguments(case: str, dtype) -> list:
    """Computed in float64, so that nothing is rounded before it must be."""
    exact = {name: x.astype(float) for name, x in FLA.items() if x.dtype == "float32"}
    exact |= {name: compute(exact) for name, compute in COMPUTED.items()}
    return [in_dtype(exact[name], dtype) for name in CASES[case][1].split()]


def options(case: str, library: str, dtype) -> dict:
    module, given = LIBRARIES[library], {}
    if case.startswith("linear_attention"):
        phi = module.taylor(4) if case.endswith("taylor") else module.identity
        given = {"causal": True, "normalize": case != "linear_attention", "feature_map": phi}
    if case == "softmax_attention":
        given = {"causal": True}
    if case == "sliding_window_attention":
        given = {"window": 5}
    if f"{case}/state" in FLA:
        S, z = (in_dtype(FLA[name], dtype) for name in ("S", "z"))
        if case.startswith("linear_attention"):
            S = module.LinearAttentionState(S, z if case.endswith("normalized") else 0 * z)
        if case == "momentum_delta_rule":
            S = module.MomentumState(S, in_dtype(FLA["write_before"], dtype))
        if case == "mesa":
            S = module.MesaState(in_dtype(np.broadcast_to(np.eye(4), (2, 3, 4, 4)), dtype), S)
        given |= {"initial_state": S, "return_state": True}
    return given


def results(case: str, library: str, bits: int) -> list[tuple]:
    """Outputs and last states of every form, with chunks of which the last one is not full."""
    name, dtype = CASES[case][0], DTYPES[library][bits]
    function, given = getattr(LIBRARIES[library], name), options(case, library, dtype)
    forms = CAUSAL if name == "linear_attention" else CONTRACTS[name].forms
    ways = [{"form": form, "chunk_size": 12} for form in forms] or [{}]
    ways += [{"form": "chunkwise", "chunk_size": 8}, {}] if "chunkwise" in forms else []
    args = arguments(case, dtype)
    found = [function(*args, **given, **way) for way in ways]
    return [x if "return_state" in given else (x,) for x in found]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", CASES)
def test_operators_compute_what_fla_does(case: str, library: str, bits: int) -> None:
    parts = (f"{case}/{part}" for part in ("out", "state", "second"))
    expected = [FLA[part] for part in parts if part in FLA]
    for found in results(case, library, bits):
        for one, other in zip(leaves(found)[: len(expected)], expected, strict=True):
            assert error(one, other) < 1e-6


def test_nothing_recorded_is_left_out() -> None:
    assert {name.split("/")[0] for name in FLA if "/" in name} == set(CASES) | BUGS
    assert json.loads(str(FLA["versions"]))["fla_core"] and json.loads(str(RWKV["versions"]))


WRONG = {
    "the error before the decay": (
        "kimi_delta_attention",
        lambda q, k, v, beta, g, **given: ln.generalized_delta_rule(
            q, beta[..., None] * k, v, k, -beta[..., None] * k, g, **given
        ),
    ),
    "the error after the decay": (
        "rwkv7",
        lambda r, k, v, g, kappa, a, **given: ln.generalized_delta_rule(
            r, k, v, np.exp(g) * kappa, -a * kappa, g, **given
        ),
    ),
    "a decay after the corrections": (
        "gated_delta_product",
        lambda q, k, v, beta, g, initial_state: ln.gated_delta_product(
            q, k, v, beta, np.roll(g, -1, axis=-1), initial_state=initial_state
        ),
    ),
    "queries divided by the root of D": (
        "delta_rule",
        lambda q, *rest, **given: ln.delta_rule(q / 2, *rest, **given),
    ),
    "what reads and what is moved exchanged": (
        "generalized_delta_rule",
        lambda q, k, v, a, b, g, **given: ln.generalized_delta_rule(q, k, v, b, a, g, **given),
    ),
    "read after the write": (
        "rwkv6",
        lambda r, k, v, g, u, **given: ln.gated_linear_attention(r, k, v, g, **given),
    ),
    "queries and keys exchanged": (
        "state_space_dual",
        lambda x, g, B, C, **given: ln.state_space_dual(x, g, C, B, **given),
    ),
    "a window of one key more": (
        "sliding_window_attention",
        lambda q, k, v, window: ln.sliding_window_attention(q, k, v, window=window + 1),
    ),
    "gates divided by the root of D too": (
        "forgetting_attention",
        lambda q, k, v, g: ln.forgetting_attention(q, k, v, g / 2),
    ),
    "levels in the other order": (
        "log_linear_attention",
        lambda *args: ln.log_linear_attention(*args[:4], args[4][..., ::-1]),
    ),
    "the momentum of the token before": (
        "momentum_delta_rule",
        lambda *args, **given: ln.momentum_delta_rule(
            *args[:5], np.roll(args[5], 1, axis=-1), **given
        ),
    ),
    "pairs that all weigh the same": (
        "mesa",
        lambda q, k, v, beta, *rest, **given: ln.mesa(q, k, v, 0 * beta + 1, *rest, **given),
    ),
    "the own token decayed": (
        "retention",
        lambda q, k, v, decay: decay[:, None, None] * ln.retention(q, k, v, decay),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_recording_tells_mistakes_apart(mistake: str) -> None:
    case, wrong = WRONG[mistake]
    given = options(case, "numpy", "float64")
    given.pop("return_state", None)
    assert error(wrong(*arguments(case, "float64"), **given), FLA[f"{case}/out"]) > 0.01


# --- fla: what is not right there ----------------------------------------------------------------


def fla_test_time(eta, share, library: str, bits: int):
    """TTT-Linear on what its recording has, in batches of 8: the last one has 5 tokens."""
    module, dtype = LIBRARIES[library], DTYPES[library][bits]
    S = FLA["S"][..., :4]
    W, b, zero = S, FLA["z"], np.zeros_like(FLA["z"])
    state = module.TTTState(*(in_dtype(x, dtype) for x in (W, b, 0 * S, zero)), 0)
    norm = FLA["norm_weight"], FLA["norm_bias"]
    arrays = FLA["q"], FLA["k"], FLA["v"][..., :4], eta, share, *norm
    given = {"initial_state": state, "return_state": True, "batch_size": 8}
    forms = ({"form": form} for form in ("recurrent", "chunkwise"))
    args = [in_dtype(x, dtype) for x in arrays]
    return [module.ttt_linear(*args, **form, **given) for form in forms]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("library", LIBRARIES)
def test_known_bug_fla_takes_the_rate_of_the_token_that_reads(library: str, bits: int) -> None:
    """Of each batch's sum: it is our share, and the tokens that are written have a rate of 1.

    Besides, it adds what it found, z, to its norm where TTT-Linear adds the query; and its last
    batch is filled up with keys and values of 0, which the bias learns to find (fla #185).
    """
    step, ones = FLA["step"], np.ones_like(FLA["step"])
    w, c = (FLA[f"norm_{x}"].astype(float)[:, None] for x in ("weight", "bias"))
    for out, state in fla_test_time(ones, step, library, bits):
        normal = numbers(out) - FLA["q"]
        z = FLA["ttt_linear/out"] - normal
        assert error(c + w * normed(z, True)[0], normal) < 1e-6
        W, b, dW, db = map(numbers, state[:4])
        last = step[..., -1:].astype(float)
        assert error(W - last[..., None] * dW, FLA["ttt_linear/state"]) < 1e-6
        filled = 3 * gradient(b[..., None, :], 0.0, w, c, True)[..., 0, :]
        assert error(b - last * (db + filled), FLA["ttt_linear/second"]) < 1e-6
        assert error(b - last * db, FLA["ttt_linear/second"]) > 0.01
    for _, state in fla_test_time(step, ones, library, bits):
        W, _, dW, _ = map(numbers, state[:4])
        assert error(W - dW, FLA["ttt_linear/state"]) > 0.1


def test_known_bug_fla_divides_the_wrong_part_of_the_gradient_of_titans() -> None:
    """D g - (sum of g) / (D s) for (D g - sum of g) / (D s): too much by D g - g / s."""
    W, k, v = (FLA[x].astype(float) for x in ("S", "k", "v"))
    W, k, v = W[..., :4], k[..., :1, :], v[..., :1, :4]
    w, c = (FLA[f"norm_{x}"].astype(float)[:, None] for x in ("weight", "bias"))
    theirs = k @ (W - FLA["titans, one token/state"])  # of length 1: what was written
    x, deviation = normed(k @ W, True)
    right, g = gradient(k @ W, v - k, w, c, True), w * (w * x + c - (v - k))
    assert error(right + 4 * g - g / deviation, theirs) < 1e-6
    assert error(right, theirs) > 0.5


def test_known_bug_fla_adds_to_the_denominators_of_conjugate_gradients(monkeypatch) -> None:
    """1e-5, against 0/0 at the end; so its steps get stuck before they are there."""
    args = arguments("mesa", "float64")
    given = options("mesa", "numpy", "float64") | {"form": "chunkwise", "return_state": False}
    theirs, exact = FLA["mesa in fla's steps/out"], FLA["mesa/out"]
    assert error(ln.mesa(*args, **given), exact) < 1e-6 < error(theirs, exact) / 10
    monkeypatch.setitem(conjugate_gradients.__globals__, "divide", lambda x, y: x / (y + 1e-5))
    assert error(ln.mesa(*args, **given), theirs) < 1e-6


# --- The models of RWKV's author -----------------------------------------------------------------

# Names of this package, and those of published checkpoints.
NAMES = {
    "embedding": "emb",
    "norm": "ln_out",
    "time_mix": "att",
    "mixer": "att",
    "channel_mix": "ffn",
    "norm_0": "ln0",
    "norm_1": "ln1",
    "norm_2": "ln2",
}
OF_RWKV4 = {
    "mix_key": "time_mix_k",
    "mix_value": "time_mix_v",
    "mix_receptance": "time_mix_r",
    "log_rate": "time_decay",
    "bonus": "time_first",
}
OF_RWKV6 = {
    "first_share": "time_maa_x",
    "shares_down": "time_maa_w1",
    "shares_up": "time_maa_w2",
    "decay_base": "time_decay",
    "decay_down": "time_decay_w1",
    "decay_up": "time_decay_w2",
    "bonus": "time_faaaa",
}
OF_RWKV7 = {
    "removal": "k_k",
    "replacement": "k_a",
    "bonus": "r_k",
    "share": "x_k",
    **{
        f"{ours}.{part}": f"{theirs}{i}"
        for ours, theirs in (("decay", "w"), ("rate", "a"), ("first_share", "v"), ("gate", "g"))
        for i, part in enumerate(("base", "down", "up"))
    },
}


def published(name: str, generation: int) -> np.ndarray:
    """A parameter under its name in a checkpoint."""
    *path, last = name.split(".")
    block, inner = path[:2], path[2:]
    if path[0] != "blocks":
        return RWKV[f"{generation}/{NAMES.get(path[0], path[0])}.{last}"]
    sublayer, *rest = *inner, last
    where = f"{generation}/{'.'.join(block)}.{NAMES[sublayer]}."
    if rest == ["shares"]:
        letters, prefix = {6: ("wkvrg", "time_maa_"), 7: ("rwkvag", "x_")}[generation]
        return np.stack([RWKV[f"{where}{prefix}{letter}"].reshape(-1) for letter in letters])
    if rest[0] == "norm":
        return RWKV[f"{where}ln_x.{rest[1]}"]
    own = ".".join(rest)
    return RWKV[where + {4: OF_RWKV4, 6: OF_RWKV6, 7: OF_RWKV7}[generation].get(own, own)]


def model(generation: int, dtype) -> lt.LanguageModel:
    block = {4: lt.RWKV4Block, 6: lt.RWKV6TimeMix, 7: lt.RWKV7Block}[generation]
    made = lt.LanguageModel(11, 8, [block] * 2, num_heads=2).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "feed_forward" in name:  # which is not RWKV-6's; the recorded one gives 0
                parameter.zero_()
            else:
                value = torch.from_numpy(published(name, generation))
                parameter.copy_(value.reshape(parameter.shape))
        if generation == 6:
            norm = (in_dtype(RWKV[f"6/blocks.0.ln0.{x}"], dtype) for x in ("weight", "bias"))
            embedding = made.embedding.weight
            embedding.copy_(torch.nn.functional.layer_norm(embedding, (8,), *norm))
    return made


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("generation", [4, 6, 7])
@torch.no_grad()
def test_models_compute_what_those_of_rwkv_do(generation: int, bits: int) -> None:
    """In one go, token by token, and the state at the end."""
    found, logits = model(generation, DTYPES["torch"][bits]), RWKV[f"{generation}/logits"]
    tokens = torch.from_numpy(RWKV["tokens"])[None]
    whole, last = found(tokens, return_state=True)
    assert error(whole[0], logits) < 3e-6
    state = found.initial_state(1)
    for t, token in enumerate(tokens.unbind(dim=1)):
        logit, state = found.step(token, state)
        assert error(logit[0], logits[t]) < 1e-5
    for end in (last, state):
        for i, x in enumerate(x for block in end for x in recorded_order(block)):
            if x is not None:
                assert error(x[0], RWKV[f"{generation}/state/{i}"]) < 1e-5


def recorded_order(block: tuple) -> list:
    """The state of a block as RWKV's author keeps it: in RWKV-7 the rows are those of values."""
    if isinstance(block, RWKV6State):
        return [block.last, block.S, None]  # and the last input of the channel mix
    if isinstance(block, RWKV7BlockState):
        return [block.time_last, block.S.mT, block.channel_last]
    return list(block)


def test_all_recorded_weights_are_used() -> None:
    for generation in (4, 7):  # an RWKV-6 has a channel mix besides
        stored = {x: y.size for x, y in RWKV.items() if x.startswith(f"{generation}/")}
        weights = sum(n for x, n in stored.items() if "state" not in x and "logits" not in x)
        assert weights == sum(p.numel() for p in model(generation, torch.float32).parameters())


def test_a_recording_tells_models_apart() -> None:
    """One vector of zeros in one layer is another model."""
    tokens = torch.from_numpy(RWKV["tokens"])[None]
    changes = (4, "bonus"), (6, "shares_up"), (6, "bonus"), (6, "decay_down"), (6, "first_share")
    for generation, name in (*changes, (7, "removal"), (7, "first_share.base"), (7, "shares")):
        changed = model(generation, torch.float64)
        block = changed.blocks[1]
        with torch.no_grad():
            (block.mixer if generation == 6 else block.time_mix).get_parameter(name).zero_()
            assert error(changed(tokens)[0], RWKV[f"{generation}/logits"]) > 0.01
