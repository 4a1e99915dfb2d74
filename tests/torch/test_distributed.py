"""Attention across ranks: against one process, and where the ranks do not agree.

Functions whose first argument is `rank` run on every rank of a group; the tests call them by name
through `across`, with NumPy arrays.
"""

import itertools
import os
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lesson_code.torch as plain
from lesson_code import costs
from lesson_code.torch import _exchange, distributed, feature_maps, linear
from lesson_code.torch.linear import LinearAttentionState
from tests.torch.ranks import Ranks

FORMS = {
    "linear": ["masked", "recurrent", "cumsum", "scan", "chunkwise", None],
    "gated": ["recurrent", "parallel", "chunkwise", None],
}
PLAIN = {"linear": plain.linear_attention, "gated": plain.gated_linear_attention}
ACROSS = {"linear": distributed.linear_attention, "gated": distributed.gated_linear_attention}
every_size = pytest.mark.parametrize("ranks", [2, 3, 4, 8])
both = pytest.mark.parametrize("kind", ["linear", "gated"])


@pytest.fixture(scope="module")
def across():
    ranks = Ranks(__file__)
    yield ranks
    ranks.close()


def warm_up():
    for kind in PLAIN:
        tensors = [torch.zeros(3, 1, requires_grad=True) for _ in range(3 + (kind == "gated"))]
        options = {"form": "chunkwise", "chunk_size": 2}
        options |= {"causal": True} if kind == "linear" else {}
        PLAIN[kind](*tensors, **options)


def draw(kind, seed=0, N=7, D=3, M=4, leading=((),) * 5):
    """Inputs q, k, v (and log_decay) of a whole sequence, and an initial state, as arrays."""
    rng = np.random.default_rng(seed)
    shapes = ((N, D), (N, D), (N, M), (N, D), (D, M))
    q, k, v, g, S = (
        rng.normal(size=(*lead, *shape)) for lead, shape in zip(leading, shapes, strict=True)
    )
    if kind == "linear":
        return [q, k, v], [S, 1 + abs(rng.normal(size=(*leading[-1], D)))]
    g = -np.exp(2 * g - 1)
    g[rng.random(g.shape) < 0.1] = 0
    g[rng.random(g.shape) < 0.05] = -np.inf
    return [q, k, v, g], [S]


def split(seed, N, ranks):
    """The ends of random parts, some of them empty."""
    return sorted(np.random.default_rng(seed).integers(0, N + 1, ranks - 1)) + [N]


def part(arrays, ends, rank):
    return [x[..., ends[rank - 1] if rank else 0 : ends[rank], :] for x in arrays]


def loss(out, last, rank):
    """Another one on every rank, of the outputs and the last state."""
    total = (out.double().sin() * (rank + 1)).sum()
    return total if last is None else total + sum((x * (rank + 2)).cos().sum() for x in last)


def as_state(kind, tensors):
    if tensors is None:
        return None
    return LinearAttentionState(*tensors) if kind == "linear" else tensors[0]


def attend(function, kind, tensors, state, options):
    """Outputs, and the last state as a list or None."""
    options = dict(options)
    if "feature_map" in options:
        options["feature_map"] = getattr(feature_maps, options["feature_map"])
    out = function(*tensors, initial_state=as_state(kind, state), **options)
    if not options.get("return_state"):
        return out, None
    out, last = out
    return out, list(last) if kind == "linear" else [last]


def leaves(arrays, dtype):
    if arrays is None:
        return None
    return [torch.from_numpy(np.array(x)).to(dtype).requires_grad_() for x in arrays]


def numbers(tensors):
    return [x.detach().double().numpy() for x in tensors or ()]


def gradients_of(tensors):
    """Their gradients, zeros where they are not used."""
    return numbers(torch.zeros_like(x) if x.grad is None else x.grad for x in tensors)


def on_a_rank(rank, kind, arrays, state, ends, options, dtype="float64"):
    """Outputs, last state and gradients of a rank: of its part, and of the initial state."""
    dtype = getattr(torch, dtype)
    inputs = leaves(part(arrays, ends, rank), dtype)
    # What the other ranks are given in its place is not read.
    state = leaves(state, dtype) if rank == 0 else state and ["not read"] * len(state)
    out, last = attend(ACROSS[kind], kind, inputs, state, options)
    loss(out, last, rank).backward()
    gradients = gradients_of([*inputs, *(state if state and rank == 0 else [])])
    return [*numbers([out]), *numbers(last), *gradients]


def in_one_process(kind, arrays, state, ends, options, dtype=torch.float64):
    """What the ranks should have: for each the list that `on_a_rank` returns."""
    inputs, state = leaves(arrays, dtype), leaves(state, dtype)
    out, last = attend(PLAIN[kind], kind, inputs, state, options)
    outs = [part([out], ends, rank)[0] for rank in range(len(ends))]
    sum(loss(x, last, rank) for rank, x in enumerate(outs)).backward()
    results = []
    for rank, x in enumerate(outs):
        gradients = part(gradients_of(inputs), ends, rank)
        gradients += gradients_of(state) if state and rank == 0 else []
        results.append([*numbers([x]), *numbers(last), *gradients])
    return results


def assert_same(found, expected, tolerance=1e-10):
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(ours, theirs, strict=True):
            assert x.shape == y.shape
            bound = tolerance * max(1, abs(y).max(initial=0))
            np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=f"rank {rank}")


def check(across, ranks, kind, arrays, state, ends, options):
    found = across(ranks, "on_a_rank", kind, arrays, state, ends, options)
    assert_same(found, in_one_process(kind, arrays, state, ends, options))


@every_size
@both
def test_every_form_and_option_is_one_process(across, ranks, kind):
    cases = itertools.product(FORMS[kind], [True, False], [True, False])
    for seed, (form, with_state, return_state) in enumerate(cases):
        N = 5 * ranks - seed % 3
        arrays, state = draw(kind, seed, N, D=3, M=2 + seed % 3)
        options = {"form": form, "chunk_size": 3, "return_state": return_state}
        if kind == "linear":
            options |= {"causal": True, "normalize": seed // 2 % 2 == 0}
        ends = split(seed, N, ranks)
        check(across, ranks, kind, arrays, state if with_state else None, ends, options)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_without_normalizer_in_every_form(across, ranks):
    for seed, form in enumerate(FORMS["linear"]):
        arrays, state = draw("linear", seed, N=11)
        options = {"form": form, "causal": True, "normalize": False, "feature_map": "identity"}
        check(across, ranks, "linear", arrays, state, split(seed, 11, ranks), options)


@both
def test_parts_of_every_kind(across, kind):
    options = {"causal": True} if kind == "linear" else {}
    for ends in ([0, 0, 9], [9, 9, 9], [0, 9, 9], [1, 2, 9], [3, 3, 9], [3, 6, 9]):
        arrays, state = draw(kind, N=9)
        check(across, 3, kind, arrays, state, ends, options | {"return_state": True})
    arrays, state = draw(kind, N=0)
    check(across, 3, kind, arrays, state, [0, 0, 0], options | {"return_state": True})


@both
@pytest.mark.parametrize(
    "leading",
    [
        ((2,), (2,), (2,), (2,), ()),
        ((2, 1), (3,), (1, 1), (2, 3), (3,)),
        ((5, 2, 3), (3,), (2, 1), (), (3,)),
        ((), (), (), (), (2, 3)),  # only the first rank knows that there are six memories
        ((0, 2), (2,), (1,), (2,), ()),
        ((2,), (0, 1), (1,), (2,), ()),
    ],
)
def test_leading_dimensions_broadcast(across, kind, leading):
    arrays, state = draw(kind, N=8, leading=leading)
    options = {"causal": True} if kind == "linear" else {}
    for return_state in (True, False):
        given = options | {"return_state": return_state, "chunk_size": 2}
        check(across, 3, kind, arrays, state, [3, 7, 8], given)


@both
def test_widths_of_nothing(across, kind):
    options = {"causal": True} if kind == "linear" else {}
    for D, M in ((0, 2), (3, 0))[kind == "gated" :]:
        arrays, state = draw(kind, N=5, D=D, M=M)
        check(across, 2, kind, arrays, state, [2, 5], options | {"return_state": True})


@every_size
def test_all_positions(across, ranks):
    for seed, (normalize, form) in enumerate(itertools.product([True, False], [None, "linear"])):
        arrays, _ = draw("linear", seed, N=9, leading=((2, 1), (3,), (2, 3), (), ()))
        options = {"normalize": normalize, "form": form}
        check(across, ranks, "linear", arrays, None, split(seed, 9, ranks), options)


def queries_of_their_own(rank, arrays, q):
    q, k, v = (torch.from_numpy(x) for x in (q[: rank + 2], *part(arrays[1:], [4, 9], rank)))
    return [distributed.linear_attention(q, k, v).numpy()]


def test_all_positions_with_other_queries_than_keys(across):
    arrays, _ = draw("linear", N=9)
    q = np.random.default_rng(1).normal(size=(5, 3))
    found = across(2, "queries_of_their_own", arrays, q)
    for rank, (out,) in enumerate(found):
        tensors = (torch.from_numpy(x) for x in (q[: rank + 2], *arrays[1:]))
        np.testing.assert_allclose(out, plain.linear_attention(*tensors), atol=1e-12)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes(across, kind, dtype):
    arrays, state = draw(kind, N=40)
    arrays, state = ([np.float16(x) for x in both] for both in (arrays, state))
    options = {"chunk_size": 8, "return_state": True}
    options |= {"causal": True} if kind == "linear" else {}
    found = across(3, "on_a_rank", kind, arrays, state, [11, 30, 40], options, dtype)
    # In the same dtype, whose rounding of the outputs is in the gradients.
    expected = in_one_process(kind, arrays, state, [11, 30, 40], options, getattr(torch, dtype))
    tolerance = {"float32": 1e-4, "bfloat16": 2.0**-7, "float16": 2.0**-10}
    assert_same(found, expected, tolerance[dtype])


def last_states(rank, kind, arrays, ends, options):
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, rank)]
    out, last = attend(ACROSS[kind], kind, inputs, None, options)
    # The state goes on, as it would in one process.
    again, end = attend(ACROSS[kind], kind, inputs, last, options)
    return [*numbers([out]), *numbers(last), *numbers([again]), *numbers(end)]


@both
def test_the_state_is_the_same_number_for_number_and_begins_the_next_call(across, kind):
    arrays, _ = draw(kind, N=9)
    options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
    found = across(3, "last_states", kind, arrays, [2, 7, 9], options)
    states = 2 if kind == "linear" else 1
    for ours in found[1:]:
        for x, y in zip(ours[1 : 1 + states], found[0][1 : 1 + states], strict=True):
            assert np.array_equal(x, y)
    twice = [torch.from_numpy(np.concatenate([x, x])) for x in arrays]
    out, last = attend(PLAIN[kind], kind, twice, None, options)
    again = np.concatenate([ours[1 + states] for ours in found])
    np.testing.assert_allclose(again, out[9:], atol=1e-12)
    for x, y in zip(found[1][2 + states :], last, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def outputs(rank, kind, arrays, ends, options):
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, rank)]
    return attend(ACROSS[kind], kind, inputs, None, options)[0].numpy()


@both
def test_nan_goes_forward_only(across, kind):
    options = {"causal": True} if kind == "linear" else {}
    for spoiled in range(1, 3):
        arrays, _ = draw(kind, N=9, leading=((2,),) * 5)
        arrays[spoiled][1, 5, 1] = np.nan
        first, second, third = across(3, "outputs", kind, arrays, [3, 6, 9], options)
        assert not np.isnan(first).any() and not np.isnan(third[0]).any()
        assert np.isnan(second[1, 2]).any() and np.isnan(third[1]).any(axis=-1).all()


@both
def test_closed_gates_and_small_sums(across, kind):
    """Gradients are finite where a gate is closed, and 0 where the normalizer is."""
    arrays, state = draw(kind, N=12)
    options = {"return_state": True}
    if kind == "gated":
        arrays[3][::2] = -np.inf
        arrays[3][1] = -1e4
    else:
        arrays[0][3:], arrays[1][:5] = -1, -1  # relu makes zeros of them
        state, options = None, {"causal": True, "feature_map": "relu"}
    check(across, 3, kind, arrays, state, [4, 8, 12], options)


# Who needs gradients, and how often.


def needed_by_some(rank, kind, arrays, state, ends, needed):
    """Gradients of the inputs in `needed`, pairs of a rank and an index."""
    inputs = [torch.from_numpy(x) for x in (*part(arrays, ends, rank), *state)]
    wanted = [x for i, x in enumerate(inputs) if (rank, i) in needed]
    for x in wanted:
        x.requires_grad_()
    options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
    out, last = attend(ACROSS[kind], kind, inputs[: len(arrays)], inputs[len(arrays) :], options)
    assert out.requires_grad and all(x.requires_grad for x in last)
    loss(out, last, rank).backward()
    return [[x.grad.numpy() for x in wanted], [x.grad is None for x in inputs].count(False)]


@both
def test_gradients_that_some_ranks_need(across, kind):
    arrays, state = draw(kind, N=9)
    ends, n = [3, 6, 9], len(arrays)
    options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
    expected = in_one_process(kind, arrays, state, ends, options)
    before = len(expected[1]) - n
    for needed in ([(0, n)], [(2, 0)], [(1, 1), (2, 2)], [(0, 2)], [(2, n - 1), (0, n)]):
        found = across(3, "needed_by_some", kind, arrays, state, ends, needed)
        for rank, (gradients, count) in enumerate(found):
            wanted = sorted(i for r, i in needed if r == rank)
            assert count == len(wanted)
            for i, gradient in zip(wanted, gradients, strict=True):
                assert_same([[gradient]], [[expected[rank][before + i]]])


def learned_map(rank, arrays, ends, weight):
    map_ = torch.nn.Linear(3, 5).double()
    with torch.no_grad():
        map_.weight.copy_(torch.from_numpy(weight))
        map_.bias.fill_(0.5)
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, rank)]
    attention = PLAIN["linear"] if len(ends) == 1 else ACROSS["linear"]
    out = attention(*inputs, causal=True, feature_map=lambda x: map_(x).exp())
    out.square().sum().backward()
    return [map_.weight.grad.numpy(), map_.bias.grad.numpy()]


def test_the_gradient_of_a_learned_map_is_the_sum_over_the_ranks(across):
    arrays, _ = draw("linear", N=9)
    weight = np.random.default_rng(0).normal(size=(5, 3))
    found = across(3, "learned_map", arrays, [2, 2, 9], weight)
    expected = learned_map(0, arrays, [9], weight)
    assert_same([[sum(x) for x in zip(*found, strict=True)]], [expected])


def without_gradients(rank, kind, arrays, ends, mode):
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "": nullcontext}[mode]():
        if not mode:
            inputs = [x.detach() for x in inputs]
        options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
        out, last = attend(ACROSS[kind], kind, inputs, None, options)
    assert not out.requires_grad and out.grad_fn is None
    return [*numbers([out]), *numbers(last)]


@both
def test_without_gradients(across, kind):
    arrays, _ = draw(kind, N=9)
    options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
    expected = in_one_process(kind, arrays, None, [5, 9], options)
    for mode in ("no_grad", "inference", ""):
        found = across(2, "without_gradients", kind, arrays, [5, 9], mode)
        n = len(found[0])
        assert_same(found, [x[:n] for x in expected])


def no_grad_on_one(rank, kind, arrays, ends, needy):
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    with nullcontext() if rank == needy else torch.no_grad():
        attend(ACROSS[kind], kind, inputs, None, {"causal": True} if kind == "linear" else {})


@both
def test_gradients_off_on_one_rank_and_needed_on_another(across, kind):
    found = across(2, "no_grad_on_one", kind, draw(kind)[0], [4, 7], 1)
    message = (
        "gradients must be recorded on every rank when one needs them, got torch.no_grad on rank 0 "
        "and inputs that need gradients on rank 1."
    )
    assert [(type(x), str(x)) for x in found] == [(ValueError, message)] * 2


def several_calls(rank, arrays, state, gated_arrays, ends):
    """Three layers of two kinds, each fed by the one before, and a state used twice."""
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    gates = leaves(part(gated_arrays, ends, rank)[3:], torch.float64)[0]
    first = LinearAttentionState(*leaves(state, torch.float64))
    one = len(ends) == 1
    attention, gated = (PLAIN if one else ACROSS)["linear"], (PLAIN if one else ACROSS)["gated"]
    q, k, v = inputs
    x, last = attention(q, k, v, causal=True, initial_state=first, return_state=True)
    y, S = gated(q, k, x, gates, initial_state=last.S, return_state=True)
    y = y + attention(k, q, y, causal=True, initial_state=last, normalize=False)
    # The last state counts once, though every rank holds it.
    total = y.sin().sum() + (S.sin().sum() if rank == 0 else 0)
    total.backward(retain_graph=True)
    total.backward()
    gradients = gradients_of([*inputs, gates, *(first if rank == 0 else ())])
    try:
        total.backward()
    except RuntimeError as error:
        assert "second time" in str(error)
        return [*numbers([y]), *gradients]


@every_size
def test_several_calls_in_one_graph_and_a_graph_used_twice(across, ranks):
    arrays, state = draw("linear", N=13, M=4)
    gates, _ = draw("gated", N=13, M=4)
    ends = split(3, 13, ranks)
    y, *gradients = several_calls(0, arrays, state, gates, [13])
    expected = []
    for rank in range(ranks):
        own = part([y, *gradients[:4]], ends, rank)
        expected.append(own + (gradients[4:] if rank == 0 else []))
    assert_same(across(ranks, "several_calls", arrays, state, gates, ends), expected)


def twice_differentiated(rank, kind, arrays, ends):
    """Gradients in a graph, and the errors when each is differentiated by each input."""
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    options = {"form": "recurrent"} | ({"causal": True} if kind == "linear" else {})
    out, _ = attend(ACROSS[kind], kind, inputs, None, options)
    gradients = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    errors = []
    for x in inputs:
        try:
            torch.autograd.grad(gradients[2].square().sum(), x, retain_graph=True)
        except RuntimeError as error:
            errors.append(str(error))
    return numbers(gradients), errors


@both
def test_a_second_derivative_is_an_error_on_every_rank(across, kind):
    arrays, _ = draw(kind, N=9)
    for values, messages in across(3, "twice_differentiated", kind, arrays, [3, 6, 9]):
        assert all(np.isfinite(x).all() for x in values)
        assert len(messages) == len(arrays)
        assert {x.partition(" once,")[0] for x in messages} == {
            "attention across ranks can be differentiated"
        }


# What is sent, and when.

COLLECTIVES = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast"))] + [
    *("send", "recv", "isend", "irecv", "gather", "scatter", "barrier", "batch_isend_irecv"),
]


def what_is_sent(rank, kind, arrays, ends, options, differentiate):
    """Bytes passed to collectives, forward and backward, as (name, bytes of a message)."""
    calls = []

    def counted(name, function):
        def call(*args, **kwargs):
            calls.append((name, args[1].numel() * args[1].element_size()))
            return function(*args, **kwargs)

        return call

    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    names = [name for name in names if callable(getattr(dist, name))]
    patches = [mock.patch.object(dist, name, counted(name, getattr(dist, name))) for name in names]
    inputs = leaves(part(arrays, ends, rank), torch.float32)
    before = written()
    for patch in patches:
        patch.start()
    out, last = attend(ACROSS[kind], kind, inputs, None, options)
    forward = len(calls)
    if differentiate:
        loss(out, last, rank).backward()
    for patch in patches:
        patch.stop()
    return calls[:forward], calls[forward:], written() - before


def written():
    """Bytes that this process has written: to the other ranks, as it writes nothing else."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@every_size
@both
def test_bytes_are_those_of_the_formula(across, ranks, kind):
    for return_state in (False, True):
        sent = set()
        for N in (4, 90):  # whatever the length
            arrays, _ = draw(kind, N=N, D=32, M=48, leading=((2, 1), (3,), (2, 3), (1,), ()))
            options = {"return_state": return_state}
            options |= {"causal": True} if kind == "linear" else {}
            args = (kind, arrays, split(1, N, ranks), options, True)
            for forward, backward, wire in across(ranks, "what_is_sent", *args):
                assert len(forward) == len(backward) == 2
                assert {name for name, _ in forward + backward} <= {
                    "all_gather_single",
                    "all_gather_into_tensor",
                }
                assert forward[0][1] == backward[0][1] == costs.EXCHANGE_HEADER_BYTES
                found = [(ranks - 1) * sum(n for _, n in calls) for calls in (forward, backward)]
                expected = [
                    costs.state_exchange_bytes(ranks, 32, 48, heads=6),
                    costs.state_exchange_bytes(
                        ranks, 32, 48, heads=6, extra=int(kind == "linear"), states=1 + return_state
                    ),
                ]
                assert found == expected
                # gloo puts some bytes before each message
                if wire:
                    assert 0 <= wire - sum(expected) <= 4 * (ranks - 1) * 500
                sent.add(tuple(found))
        assert len(sent) == 1


def order_of_events(rank, kind, arrays, ends):
    events = []
    start = distributed._Exchange._start

    def started(exchange, x):
        what = "header" if x.dtype == torch.int64 else "states"
        events.append(f"send {what}")
        finish = start(exchange, x)

        def finished():
            events.append(f"wait for {what}")
            return finish()

        return finished

    def inside(function):
        def call(*args, **kwargs):
            events.append("inside")
            result = function(*args, **kwargs)
            out = result[0] if isinstance(result, tuple) else result
            out.register_hook(lambda grad: events.append("inside"))
            return result

        return call

    inputs = leaves(part(arrays, ends, rank), torch.float64)
    name = {"linear": "_inside", "gated": "additive"}[kind]
    with (
        mock.patch.object(distributed._Exchange, "_start", started),
        mock.patch.object(distributed, name, inside(getattr(distributed, name))),
    ):
        out, _ = attend(
            ACROSS[kind], kind, inputs, None, {"causal": True} if kind == "linear" else {}
        )
        forward = len(events)
        out.sum().backward()
    return events[:forward], events[forward:]


@both
def test_states_travel_while_the_inside_is_computed(across, kind):
    arrays, _ = draw(kind, N=200)
    expected = ["send header", "wait for header", "send states", "inside", "wait for states"]
    for forward, backward in across(2, "order_of_events", kind, arrays, [90, 200]):
        assert forward == expected
        assert backward == expected


# Ranks that do not agree.


def with_own_arguments(rank, kind, arrays, state, options):
    dtype = options.pop("dtype", "float64")
    inputs = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
    state = None if state is None else [torch.from_numpy(x) for x in state]
    function = {"linear": "linear", "gated": "gated"}[options.pop("function", kind)]
    out, last = attend(
        ACROSS[function], function, inputs[: 3 + (function == "gated")], state, options
    )
    return numbers([out])


WIDE = ((2,),) * 5
DISAGREE = {
    "dtype": ({}, {"dtype": "float32"}, "the dtype must be the same on every rank, got float64"),
    "causal": ({}, {"causal": False}, "causal must be the same on every rank, got True on rank 0"),
    "normalize": ({}, {"normalize": False}, "normalize must be the same on every rank, got True"),
    "state": ({}, {"return_state": True}, "return_state must be the same on every rank, got F"),
    "C": ({"D": 2}, {}, "the width of the keys, after the feature map, must be the same on every"),
    "M": ({"M": 5}, {}, "the width M of the values must be the same on every rank, got 4 on rank"),
    "q": (
        {"leading": ((2,), (), (), (), ())},
        {},
        r"the leading dimensions of q must be the same on every rank, got \(\) on rank 0 and \(2,",
    ),
    "k": (
        {"leading": WIDE},
        {},
        r"the leading dimensions of q must be the same on every rank, got \(\) on rank 0 and \(2,",
    ),
    "v": (
        {"leading": ((), (), (2,), (), ())},
        {},
        r"the leading dimensions of k and v must be the same on every rank, got \(\) on rank 0 an",
    ),
    "function": ({}, {"function": "gated"}, "every rank must make the same calls in the same orde"),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_all_raise_and_can_go_on(across, what):
    changed, options, message = DISAGREE[what]
    kind = "gated" if what == "function" else "linear"
    same, other = draw(kind)[0], draw(kind, **changed)[0]
    common = {"function": "linear", "causal": True}
    options = common | options if what != "function" else options
    each = [(same, None, common), (other, None, options), (same, None, common)]
    start = time.monotonic()
    found = across(3, "with_own_arguments", kind, each=each)
    assert time.monotonic() - start < 10  # no one waited for the timeout
    types = {str(type(x).__name__) for x in found}
    assert types == ({"RuntimeError"} if what == "function" else {"ValueError"})
    assert len({str(x) for x in found}) == 1 and re.match(message, str(found[0]))
    arrays, state = draw("linear")
    check(across, 3, "linear", arrays, state, [2, 5, 7], {"causal": True})


def test_gated_ranks_that_disagree(across):
    same, other = draw("gated")[0], draw("gated", D=5)[0]
    found = across(2, "with_own_arguments", "gated", each=[(same, None, {}), (other, None, {})])
    for x in found:
        assert type(x) is ValueError and str(x).endswith("got 3 on rank 0 and 5 on rank 1.")


REFUSED = {
    "shape": ("linear", 0, {}, (ValueError, "v must have the length of k")),
    "dtype": ("linear", 1, {}, (TypeError, "v must have the dtype of q")),
    "no tensor": ("linear", 2, {}, (TypeError, "q must be a torch tensor, got list")),
    "flag": ("linear", None, {"normalize": 1}, (TypeError, "normalize must be True or False")),
    "form": ("gated", None, {"form": "masked"}, (ValueError, "form must be None or one of")),
    "value": ("gated", 3, {}, (ValueError, "log_decay must be at most 0, got 1.0")),
    "state": ("gated", None, {"chunk_size": 0}, (ValueError, "chunk_size must be at least 1")),
    "map": ("linear", None, {"feature_map": 3}, (TypeError, "feature_map must be callable")),
    "axes": ("linear", 4, {}, (ValueError, "q must have at most 8 leading dimensions across")),
    "func": ("linear", 5, {}, (RuntimeError, "linear_attention across ranks does not run under")),
}


def refuses(rank, kind, arrays, options, spoil, wrong):
    inputs = [torch.from_numpy(x) for x in arrays]
    attention = ACROSS[kind]
    options = dict(options)
    if rank == wrong:
        options |= REFUSED[spoil][2]
        how = REFUSED[spoil][1]
        if how == 0:
            inputs[2] = inputs[2][1:]
        elif how == 1:
            inputs[2] = inputs[2].float()
        elif how == 2:
            inputs[0] = inputs[0].tolist()
        elif how == 3:
            inputs[3] = inputs[3].abs() * 0 + 1
        elif how == 4:
            inputs = [x.expand(*[1] * 9, *x.shape) for x in inputs]
        elif how == 5:
            return torch.func.vmap(lambda *x: attention(*x, **options))(*(x[None] for x in inputs))
    return attention(*inputs, **options).numpy()


@pytest.mark.parametrize("what", REFUSED)
def test_a_rank_that_refuses_its_arguments_is_an_error_on_all(across, what):
    kind, _, _, (error, message) = REFUSED[what]
    options = {"causal": True} if kind == "linear" else {}
    for wrong in (0, 2):
        start = time.monotonic()
        found = across(3, "refuses", kind, draw(kind)[0], options, what, wrong)
        assert time.monotonic() - start < 10
        for rank, x in enumerate(found):
            if rank == wrong:
                assert type(x) is error and str(x).startswith(message)
            else:
                name = f"{kind if kind == 'linear' else 'gated_linear'}_attention"
                assert type(x) is RuntimeError
                assert str(x) == f"{name}: rank {wrong} has refused its arguments."


def goes_on_after_errors(rank, arrays, state, ends, options):
    """Errors that no rank waits for leave the group as it is, in whatever order they come."""
    refused = 0
    for wrong in (0, 1, "all"):
        try:
            refuses(
                rank, "linear", arrays, {"causal": True}, "shape", wrong if wrong != "all" else rank
            )
        except (ValueError, RuntimeError):
            refused += 1
    assert refused == 3
    return on_a_rank(rank, "linear", arrays, state, ends, options)


def test_a_group_goes_on_after_errors(across):
    arrays, state = draw("linear")
    options = {"causal": True}
    found = across(2, "goes_on_after_errors", arrays, state, [3, 7], options)
    assert_same(found, in_one_process("linear", arrays, state, [3, 7], options))


FAILED = "linear_attention: the exchange with the other ranks has failed. A rank died, or did not"


def dies(rank, arrays, ends, when):
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    if rank == 1 and when == "before":
        os._exit(1)
    if rank == 1 and when == "between":
        with mock.patch.object(distributed._Exchange, "send", lambda *args: os._exit(1)):
            distributed.linear_attention(*inputs, causal=True)
    out = distributed.linear_attention(*inputs, causal=True)
    if rank == 1:
        os._exit(1)
    out.sum().backward()


@pytest.mark.parametrize("when", ["before", "between", "backward"])
def test_a_rank_that_dies_is_an_error_on_the_others(across, when):
    start = time.monotonic()
    arrays, _ = draw("linear")
    found = across(4, "dies", arrays, [2, 4, 6, 7], when, timeout=5, fresh=True)
    assert time.monotonic() - start < 5 + 15
    assert found[1] is None
    for x in (found[0], *found[2:]):
        assert type(x) is RuntimeError and str(x).startswith(FAILED)


def stays_away(rank, arrays, ends, backward):
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    if rank == 2 and not backward:
        time.sleep(6)
        return "away"
    out = distributed.linear_attention(*inputs, causal=True)
    if rank == 2:
        time.sleep(6)
        return "away"
    out.sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_that_makes_no_call_is_an_error_within_the_timeout(across, backward):
    arrays, _ = draw("linear")
    found = across(3, "stays_away", arrays, [2, 4, 7], backward, timeout=4, fresh=True)
    assert found[2] == "away"
    for x in found[:2]:
        assert type(x) is RuntimeError and str(x).startswith(FAILED)


def other_order(rank, arrays, ends, case):
    inputs = leaves(part(arrays, ends, rank), torch.float64)
    first, second = (distributed.linear_attention(*inputs, causal=True) for _ in range(2))
    if case == "calls":
        (first if rank else second).sum().backward()
    elif rank:
        first.sum().backward()
    else:
        distributed.linear_attention(*inputs, causal=True)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "calls",
            r"got the backward pass of linear_attention, call (\d+), on rank 0 and the backward "
            r"pass of linear_attention, call (\d+), on rank 1\.$",
        ),
        (
            "passes",
            r"got a call of linear_attention on rank 0 and the backward pass of linear_attention, ",
        ),
    ],
)
def test_ranks_that_go_in_different_orders(across, case, message):
    for x in across(2, "other_order", draw("linear")[0], [3, 7], case):
        assert type(x) is RuntimeError
        assert str(x).startswith("every rank must make the same calls in the same order, got ")
        assert re.search(message, str(x))


# Groups.


def in_subgroups(rank, kind, arrays, ends, options):
    """Ranks 3 and 1, in that order of their numbers, are a group; 0 and 2 another."""
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    mine, other = (groups[0], groups[1]) if rank in (1, 3) else (groups[1], groups[0])
    place = dist.get_rank(mine)
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, place)]
    out = ACROSS[kind](*inputs, group=mine, **options)
    try:
        ACROSS[kind](*inputs, group=other, **options)
    except ValueError as error:
        return place, out.numpy(), str(error)


@both
def test_a_group_of_some_ranks(across, kind):
    arrays, _ = draw(kind, N=9)
    options = {"causal": True} if kind == "linear" else {}
    found = across(4, "in_subgroups", kind, arrays, [4, 9], options, fresh=True)
    expected = PLAIN[kind](*map(torch.from_numpy, arrays), **options)
    for place, out, message in found:
        np.testing.assert_allclose(out, part([expected], [4, 9], place)[0], atol=1e-12)
        assert message == "group must have this process among its ranks, got one without it."


def with_a_wrong_group(rank):
    q = torch.zeros(3, 2)
    return distributed.linear_attention(q, q, q, group="all")


def test_what_is_no_group(across):
    for x in across(2, "with_a_wrong_group"):
        assert type(x) is TypeError and str(x) == "group must be a ProcessGroup or None, got str."


@both
def test_without_a_group_it_says_what_is_missing(kind):
    tensors = [torch.zeros(3, 2)] * (3 + (kind == "gated"))
    with pytest.raises(RuntimeError, match="_attention across ranks needs a process group: call t"):
        ACROSS[kind](*tensors)


@both
def test_one_rank_is_the_plain_function(kind):
    arrays, state = draw(kind)
    options = {"return_state": True} | ({"causal": True} if kind == "linear" else {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = on_a_rank(0, kind, arrays, state, [7], options)
    finally:
        dist.destroy_process_group()
    for x, y in zip(found, in_one_process(kind, arrays, state, [7], options)[0], strict=True):
        assert np.array_equal(x, y)


def on_kernels(rank, arrays, state, ends, options, dtype):
    """As on a GPU, with the plain function in place of the kernels."""

    def kernels(q, k, v, feature_map, normalize, initial_state, return_state):
        assert {x.dtype for x in (q, k, v)} == {getattr(torch, dtype)}
        return plain.linear_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            causal=True,
            normalize=normalize,
            initial_state=initial_state,
            return_state=return_state,
        )

    with (
        mock.patch.object(linear, "_by_kernels", kernels),
        mock.patch.object(linear, "_on_kernels", lambda backend, *_: backend == "cupy"),
    ):
        return on_a_rank(rank, "linear", arrays, state, ends, options | {"backend": "cupy"}, dtype)


def test_kernels_begin_with_the_state_before_the_part(across):
    arrays, state = draw("linear", N=9)
    for normalize, return_state in itertools.product([True, False], repeat=2):
        options = {"causal": True, "normalize": normalize, "return_state": return_state}
        found = across(3, "on_kernels", arrays, state, [2, 2, 9], options, "float64")
        assert_same(found, in_one_process("linear", arrays, state, [2, 2, 9], options))
    arrays, state = ([np.float16(x) for x in both] for both in (arrays, state))
    found = across(3, "on_kernels", arrays, state, [2, 2, 9], options, "float16")
    expected = in_one_process("linear", arrays, state, [2, 2, 9], options, torch.float16)
    assert_same(found, expected, 2.0**-5)  # the kernels read features in half precision


def refuses_form(rank, options):
    q = torch.zeros(3, 2)
    return distributed.linear_attention(q, q, q, **options)


def test_what_needs_all_keys_is_refused(across):
    for options, message in (
        ({"form": "quadratic"}, "form must be None or one of 'linear' across ranks when causal=F"),
        ({"return_state": True}, "return_state needs causal=True, got causal=False."),
        ({"backend": "cupy", "causal": True}, "backend='cupy' needs tensors on a GPU, got q on cp"),
    ):
        for x in across(2, "refuses_form", options):
            assert type(x) is ValueError and str(x).startswith(message)


def test_the_header_has_the_size_of_the_formula():
    header = _exchange.Header(
        refused=1, call=5, C=7, M=2, queries=(2, 0), keys=(), state=(1, 2, 3, 4, 5, 6, 7, 8)
    )
    assert 8 * len(header.encode()) == costs.EXCHANGE_HEADER_BYTES
    assert _exchange.Header.decode(header.encode()) == header
