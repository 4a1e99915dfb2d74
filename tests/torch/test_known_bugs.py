"""Known bugs of other implementations of the delta family and its relatives, one test for each.

Each test says where its bug was found, makes the mistake in a few lines, which must go wrong, and
then tries the functions or modules of this package, which must not. More of them stand beside their
operators, as test_known_bug_...; `ELSEWHERE` lists those that tests of another name keep out.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, pad, softplus

import lesson_code.torch as lt
from lesson_code.torch import RWKV4TimeMix, RWKV6TimeMix, RWKV7TimeMix, operator
from tests.arrays import assert_close, numbers
from tests.operators import CONTRACTS, draw, draw_state, to_torch
from tests.torch.modules.family import HEADS, KINDS, WIDTH, in_steps, leaves
from tests.torch.modules.family import draw as draw_x

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    # fla #885 asks whether the order is a bug: it is what sets the gated rules and RWKV-7 apart.
    "forget before the error, or after it": (
        "tests/numpy/test_generalized_delta.py::"
        "test_kda_looks_for_its_error_after_the_decay_and_rwkv7_before"
    ),
    # fla's reference of DPLR casts all arrays but one, so that float64 raises.
    "float64 is refused": "tests/test_definitions.py::test_every_form_is_the_definition",
    # RWKV-LM and fla: layer / (num_layers - 1).
    "division by zero with one layer": (
        "tests/torch/modules/test_rwkv7.py::test_initial_vectors_of_the_time_mix"
    ),
    # fla's reference of log-linear attention.
    "differences of cumulative sums are NaN at -inf": (
        "tests/torch/engines/test_decays.py::test_known_bug_a_difference_of_cumulative_sums"
    ),
    # fla's reference of TTT: q *= scale.
    "operators that change their inputs": ("tests/test_operators.py::test_inputs_stay_as_they_are"),
    # fla #832: the configuration of DeltaNet took the option and did nothing with it.
    "allow_neg_eigval is ignored": (
        "tests/torch/modules/test_delta.py::test_the_layer_is_the_chapters"
    ),
    "the same in KDA": (
        "tests/torch/modules/test_delta.py::test_kimi_delta_attention_is_the_layer_of_the_paper"
    ),
    "the same in DeltaProduct": (
        "tests/torch/modules/test_delta.py::test_delta_product_is_the_layer_of_the_paper"
    ),
    # Servers such as vLLM and sglang may keep states in half precision, or in less.
    "operators with states in half precision": (
        "tests/test_operators.py::test_the_dtype_is_kept_and_sums_are_float32"
    ),
    "modules with states in half precision": "tests/torch/modules/test_mixer.py::test_dtypes",
}


@pytest.mark.parametrize("bug", ELSEWHERE)
def test_a_bug_is_kept_out_elsewhere(bug):
    path, name = ELSEWHERE[bug].split("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}


# Operators.

ALL = ["delta_rule", "gated_delta_rule", "kimi_delta_attention", "gated_delta_product"]
ALL += ["generalized_delta_rule", "rwkv7", "gated_linear_attention", "rwkv6", "state_space_dual"]
GATED = [name for name in ALL if "log_decay" in CONTRACTS[name].axes]
CALLS = [(name, form) for name in ALL for form in CONTRACTS[name].forms]
every_call = pytest.mark.parametrize(("name", "form"), CALLS)
every_gated_call = pytest.mark.parametrize(
    ("name", "form"), [call for call in CALLS if call[0] in GATED]
)


def positions(name, argument):
    """Whether an argument has an entry for each token."""
    return CONTRACTS[name].axes[argument].startswith("N")


def arrays_of(name, N, seed=0, dtype=torch.float64):
    """Arguments with which a memory stays bounded: keys of length 1, rates up to 1.

    A bonus, which has no positions, is always the same.
    """
    arrays = to_torch(draw(name, N, seed=seed))
    arrays |= {x: y for x, y in to_torch(draw(name, 1)).items() if not positions(name, x)}
    for x in {"k", "a", "b", "removal_key"} & set(arrays):
        arrays[x] = normalize(arrays[x], dim=-1)
    if "learning_rate" in arrays:
        arrays["learning_rate"] = arrays["learning_rate"].sigmoid()
    if "b" in arrays:
        arrays["b"] *= 0.5
    return {x: y.to(dtype) for x, y in arrays.items()}


def run(name, arrays, form, chunk_size=16, **options):
    return getattr(lt, name)(**arrays, form=form, chunk_size=chunk_size, **options)


def products_with_exp_before_mask(q, k, g):
    """Of a chunk: e^{G_i - G_j} of the future is inf, and is masked too late."""
    G = g.cumsum(dim=0)
    return ((G[:, None] - G).exp() * q[:, None] * k).sum(dim=-1).tril()


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("L", [32, 64])
def test_known_bug_exp_before_mask(name, L):
    """fla's reference of KDA, and transformers #48455: outputs are finite, gradients 0 · inf.

    With g = -5, as strong as the bounded gate of newer models, chunks of 16 escape it.
    """
    for size in (16, L):
        q, k = torch.ones(2, size, 3)
        g = torch.full((size, 3), -5.0, requires_grad=True)
        P = products_with_exp_before_mask(q, k, g)
        (gradient,) = torch.autograd.grad(P.sum(), g)
        assert P.isfinite().all() and gradient.isfinite().all() == (size == 16)

    results = []
    for form, dtype in (("chunkwise", torch.float32), ("recurrent", torch.float64)):
        arrays = arrays_of(name, 70, dtype=dtype)
        arrays["log_decay"] = torch.full_like(arrays["log_decay"], -5.0)
        inputs = [x.requires_grad_() for x in arrays.values()]
        out = run(name, arrays, form, chunk_size=L)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, right in zip(*results, strict=True):
        assert found.isfinite().all()
        assert_close(found, right.detach(), torch.float32)


def products_anchored_at(row, q, k, g):
    """Of a chunk in bfloat16, as two factors: rows decay since an anchor, columns until it."""
    G = g.float().cumsum(dim=0)
    rows = (q * (G - G[row]).exp()).bfloat16()
    return (rows @ (k * (G[row] - G).exp()).bfloat16().mT).tril()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_gated_call
def test_known_bug_an_anchor_in_the_future(name, form, dtype):
    """fla #1240: the decay until a later row did not cancel, and earlier outputs changed with it.

    They must not, in a single bit.
    """
    rng = torch.Generator().manual_seed(0)
    q, k, g = torch.randn(3, 16, 4, generator=rng)
    g, later = -g.abs(), -g.abs()
    later[5:] *= 3
    middle, first = ([products_anchored_at(row, q, k, x)[:5] for x in (g, later)] for row in (8, 0))
    assert torch.equal(*first) and not torch.equal(*middle)

    arrays, others = arrays_of(name, 40, dtype=dtype), arrays_of(name, 40, seed=1, dtype=dtype)
    out = run(name, arrays, form)
    for t in (1, 5, 15, 16, 19, 39):
        first = {x: y[:t] if positions(name, x) else y for x, y in arrays.items()}
        rest = {x: y[t:] for x, y in others.items()}
        for strength in (0, 1, 50, 1e4):
            gates = {"log_decay": strength * rest["log_decay"]}
            found = run(name, joined(name, first, rest | gates), form)
            assert torch.equal(found[:t], out[:t]) and not torch.equal(found[t:], out[t:])


@every_call
def test_known_bug_the_last_chunk_is_read_past_its_end(name, form):
    """fla before #1143, log-linear attention: a chunk that is not full took what stands behind."""
    arrays = arrays_of(name, 21)
    S = to_torch(draw_state(name))
    options = {"form": form, "initial_state": S, "return_state": True}
    expected = run(name, arrays, **options)
    views = dict(arrays)
    for x in arrays:
        if positions(name, x):
            buffer = pad(arrays[x], (0, 0) * (arrays[x].ndim - 1) + (0, 11), value=math.nan)
            views[x] = buffer[:21]
            strided = views[x].as_strided((32, *views[x].shape[1:]), views[x].stride())
            assert strided.isnan().any()  # what a whole second chunk would read
    for found, right in zip(run(name, views, **options), expected, strict=True):
        assert_close(found, right)


@every_call
def test_known_bug_the_first_state_has_no_gradient(name, form):
    """mamba #175 and #258: no state could be given, or none that learns.

    Outputs are affine in it, so that its gradient tells the difference of two of them exactly.
    """
    arrays = arrays_of(name, 21)
    S, step = (to_torch(draw_state(name, seed=seed)) for seed in (1, 2))

    def loss(S):
        out, last = run(name, arrays, form, initial_state=S, return_state=True)
        return out.sum() + last.sum()

    (gradient,) = torch.autograd.grad(loss(S.requires_grad_()), S)
    difference = loss(S + step) - loss(S)
    assert abs((gradient * step).sum() / difference - 1) < 1e-9 and abs(difference) > 1e-3


# What has to be zero at padding, so that nothing is written and nothing forgotten.
SILENT = {
    "delta_rule": ["beta"],
    "gated_delta_rule": ["beta", "log_decay"],
    "kimi_delta_attention": ["beta", "log_decay"],
    "gated_delta_product": ["beta", "log_decay"],
    "generalized_delta_rule": ["k", "b", "log_decay"],
    "rwkv7": ["k", "learning_rate", "log_decay"],
    "gated_linear_attention": ["v", "log_decay"],
    "rwkv6": ["v", "log_decay"],
    "state_space_dual": ["x", "log_decay"],
}


@every_call
def test_known_bug_padding_forgets(name, form):
    """fla #1272, simple GLA: values were masked, and gates decayed on; with zeros nothing changes.

    transformers #46873 puts the blame on the zeros themselves: they are exact, in front or behind.
    """
    S = to_torch(draw_state(name))
    options = {"form": form, "initial_state": S, "return_state": True}
    arrays, junk = arrays_of(name, 32), arrays_of(name, 9, seed=1)
    out, last = run(name, arrays, **options)
    padding = {x: 0 * y if x in SILENT[name] else y for x, y in junk.items()}
    found, state = run(name, joined(name, arrays, padding), **options)
    assert_close(found[:32], out)
    assert_close(state, last)
    if form != "parallel":  # where one more column makes other sums
        assert torch.equal(found[:32], out) and torch.equal(state, last)
    found, state = run(name, joined(name, padding, arrays), **options)
    assert_close(found[9:], out)
    assert_close(state, last)
    if name in GATED:  # the bug itself
        padding["log_decay"] = junk["log_decay"]
        _, state = run(name, joined(name, arrays, padding), **options)
        assert (state - last).abs().max() > 0.01


def joined(name, first, second):
    """Two texts, one after the other; what has no positions is that of the first."""
    return {x: torch.cat([first[x], second[x]]) if positions(name, x) else first[x] for x in first}


def test_known_bug_rates_and_decays_are_exchanged():
    """fla's two references of one rule take (beta, g) and (g, beta), which fit each other's places.

    And its w is a logarithm where RWKV's is the decay itself (#351). Here both mistakes are errors.
    """
    arrays = arrays_of("gated_delta_rule", 5)
    q, k, v, beta, log_decay = arrays.values()
    with pytest.raises(ValueError, match="^log_decay must be at most 0"):
        lt.gated_delta_rule(q, k, v, log_decay, beta)
    arrays = arrays_of("rwkv7", 5)
    with pytest.raises(ValueError, match="^log_decay must be at most 0"):
        lt.rwkv7(**arrays | {"log_decay": arrays["log_decay"].exp()})


# Modules.

# The vector that is added before the gate, in modules that have one.
GATES = {
    "GatedDeltaNet": "decay_bias",
    "GatedDeltaProduct": "decay_bias",
    "KimiDeltaAttention": "decay_bias",
    "SelectiveSSM": "step_size.bias",
    "StateSpaceDual": "step_bias",
    "GatedLinearAttention": "forget.1.bias",
    "RWKV7TimeMix": "decay.base",
}


def fresh(kind, **options):
    takes_heads = "num_heads" in inspect.signature(kind).parameters
    torch.manual_seed(0)
    return kind(WIDTH, **({"num_heads": HEADS} if takes_heads else {}), **options)


@pytest.mark.parametrize("bias", [20.0, 89.0, 1e4, -200.0])
@pytest.mark.parametrize("name", GATES)
def test_known_bug_softplus_by_where(name, bias):
    """transformers, Kimi Linear: where(g > 20, g, log(1 + e^g)), with 0 · inf as its gradient."""
    g = torch.tensor(bias, requires_grad=True)
    for function, finite in ((softplus, True), (softplus_by_where, bias < 89)):
        (gradient,) = torch.autograd.grad(function(g), g)
        assert gradient.isfinite() == finite

    module = fresh(KINDS[name])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        module.get_parameter(GATES[name]).fill_(bias)
    y = module(torch.randn(2, 9, WIDTH))
    y.sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


def softplus_by_where(g):
    return torch.where(g > 20, g, (1 + g.exp()).log())


@contextlib.contextmanager
def values_of(argument):
    """All that operators are given for an argument, in a list."""
    found, check = [], operator.check_values

    def note(name, x, *rest):
        if name == argument:
            found.append(x)
        return check(name, x, *rest)

    with mock.patch.object(operator, "check_values", note):
        yield found


@pytest.mark.parametrize("name", GATES)
def test_known_bug_every_rate_is_positive(name):
    """fla before #1012, Mamba-3: -softplus(x).clamp(max=-floor) is +floor, and memories grow."""
    x = torch.linspace(-9, 9, 7)
    assert (-softplus(x).clamp(max=-1e-4) == 1e-4).all()

    module, x = fresh(KINDS[name]), torch.randn(2, 9, WIDTH)
    argument = "A" if name == "SelectiveSSM" else "log_decay"
    with values_of(argument) as found, torch.no_grad():
        module(x)
        (initial,) = found
        assert (initial < 0).all() and initial.isfinite().all()
        for strength in (-80, 80):
            for gate in (GATES[name], "log_rate"):
                if gate in dict(module.named_parameters()):
                    module.get_parameter(gate).fill_(strength)
            assert module(100 * x).isfinite().all()
        assert len(found) == 3 and all((g <= 0).all() for g in found)


@contextlib.contextmanager
def memory_of_nan():
    """What is allocated and not filled is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_known_bug_a_layer_alone_is_not_initialized(kind):
    """fla #150: parameters were filled by the model around a layer, and NaN where there was none.

    A text of zeros, where keys have no length, has finite gradients too.
    """
    with memory_of_nan():
        module = fresh(kind)
    assert all(p.isfinite().all() for p in module.parameters())
    for x in (torch.zeros(2, 9, WIDTH), torch.randn(2, 9, WIDTH)):
        module.zero_grad()
        y = module(x)
        y.sum().backward()
        assert y.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_known_bug_half_precision_is_not_initialized(kind, dtype, default_dtype):
    """fla before 0.6.0, RWKV-7: a copy in float32 became orthogonal, and the weights did not."""
    with memory_of_nan():
        weight = torch.empty(4, 4, dtype=dtype)
        torch.nn.init.orthogonal_(weight.float())
        assert weight.isnan().all()
        default_dtype(dtype)
        module = fresh(kind)
    assert all(p.dtype == dtype and p.isfinite().all() for p in module.parameters())
    assert module(torch.randn(2, 9, WIDTH)).isfinite().all()


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [RWKV4TimeMix, RWKV6TimeMix, RWKV7TimeMix])
def test_matrices_of_half_precision_are_orthogonal(kind, dtype, default_dtype):
    default_dtype(dtype)
    W = fresh(kind).value.weight.double()
    assert_close(W @ W.T, torch.eye(WIDTH, dtype=torch.float64), tolerance=0.01)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_known_bug_inputs_are_scaled_in_place(kind):
    """As q *= scale did in fla's reference of TTT; here for modules, their parameters too."""
    q = torch.ones(3)
    q *= 2
    assert q._version == 1

    module, x = fresh(kind), torch.randn(2, 5, WIDTH)
    before = [p._version for p in module.parameters()]
    with torch.no_grad():
        _, state = module(x, return_state=True)
        module.step(x[:, 0], state)
    assert x._version == 0 and [p._version for p in module.parameters()] == before


CONVOLVED = [name for name, kind in KINDS.items() if hasattr(fresh(kind), "convolution")]


@pytest.mark.parametrize("N", [1, 2, 3])
@pytest.mark.parametrize("name", CONVOLVED)
def test_known_bug_a_prompt_is_shorter_than_the_convolution(name, N):
    """transformers #46190: a prompt, read in one go and continued in steps, was another text."""
    module = fresh(KINDS[name]).double()
    x = draw_x(module, 8)
    with torch.no_grad():
        expected, last = module(x, return_state=True)
        prompt, state = module(x[:, :N], return_state=True)
        rest, end = in_steps(module, x[:, N:], state)
    assert state.tail.shape[1] == 3 and x[:, :N][:, -3:].shape[1] == N  # the last three are too few
    assert_close(torch.cat([prompt, rest], dim=1), expected)
    for found, right in zip(leaves(end), leaves(last), strict=True):
        np.testing.assert_allclose(numbers(found), numbers(right), rtol=0, atol=1e-11)
