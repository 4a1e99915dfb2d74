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
    "delta": ["recurrent", "chunkwise", None],
}
CAUSAL = {"linear": {"causal": True}, "gated": {}, "delta": {}}
PLAIN = {
    "linear": plain.linear_attention,
    "gated": plain.gated_linear_attention,
    "delta": plain.gated_delta_rule,
}
ACROSS = {
    "linear": distributed.linear_attention,
    "gated": distributed.gated_linear_attention,
    "delta": distributed.gated_delta_rule,
}
NUMBER = {"linear": 3, "gated": 4, "delta": 5}  # of arguments
every_size = pytest.mark.parametrize("ranks", [2, 3, 4, 8])
both = pytest.mark.parametrize("kind", ["linear", "gated"])
every_kind = pytest.mark.parametrize("kind", PLAIN)


@pytest.fixture(scope="module")
def across():
    ranks = Ranks(__file__)
    yield ranks
    ranks.close()


def warm_up():
    for kind in PLAIN:
        tensors = [torch.zeros(3, 1, requires_grad=True) for _ in range(NUMBER[kind])]
        attend(PLAIN[kind], kind, tensors, None, {"form": "chunkwise", "chunk_size": 2})


def draw(kind, seed=0, N=7, D=3, M=4, leading=((),) * 5):
    """Inputs q, k, v, ... of a whole sequence, and an initial state, as arrays.

    The beta and log_decay of the delta rule are columns here.
    """
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
    if kind == "delta":
        k /= np.maximum(np.linalg.norm(k, axis=-1, keepdims=True), 1e-9)
        beta = rng.uniform(0, 2, size=(*leading[3], N, 1))
        g = -rng.exponential(size=beta.shape)
        g[rng.random(g.shape) < 0.1] = -np.inf
        return [q, k, v, beta, g], [S]
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


def attend(function, kind, tensors, state, options):
    """Outputs, and the last state as a list or None; linear attention is causal here."""
    options = CAUSAL[kind] | options
    if "feature_map" in options:
        options["feature_map"] = getattr(feature_maps, options["feature_map"])
    if state is not None:
        state = LinearAttentionState(*state) if kind == "linear" else state[0]
    if kind == "delta":
        tensors = [*tensors[:3], *(x[..., 0] for x in tensors[3:])]
    out = function(*tensors, initial_state=state, **options)
    if not options.get("return_state"):
        return out, None
    out, last = out
    return out, list(last) if kind == "linear" else [last]


def leaves(arrays, dtype=torch.float64):
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


def check(across, kind, arrays, state, ends, options):
    found = across(len(ends), "on_a_rank", kind, arrays, state, ends, options)
    assert_same(found, in_one_process(kind, arrays, state, ends, options))


# Together they are one process.


@every_size
@every_kind
def test_every_form_and_option_is_one_process(across, ranks, kind):
    # A form works inside of a rank, so that each is tried among one number of them.
    forms = FORMS[kind] if ranks == 3 else ["chunkwise", None]
    cases = itertools.product(forms, [True, False], [True, False])
    for seed, (form, with_state, return_state) in enumerate(cases):
        N = 5 * ranks - seed % 3
        arrays, state = draw(kind, seed, N, D=3, M=2 + seed % 3)
        options = {"form": form, "chunk_size": 3, "return_state": return_state}
        if kind == "linear" and seed // 2 % 2:
            options |= {"normalize": False, "feature_map": "identity"}
        check(across, kind, arrays, state if with_state else None, split(seed, N, ranks), options)


@every_size
def test_all_positions(across, ranks):
    for seed, (normalize, form) in enumerate(itertools.product([True, False], [None, "linear"])):
        arrays, _ = draw("linear", seed, N=9, leading=((2, 1), (3,), (2, 3), (), ()))
        options = {"causal": False, "normalize": normalize, "form": form}
        check(across, "linear", arrays, None, split(seed, 9, ranks), options)


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


SHAPES = {
    "parts": [({"N": 9}, ends) for ends in ([0, 0, 9], [9, 9, 9], [0, 9, 9], [1, 2, 9], [3, 3, 9])],
    "nothing": [({"N": 0}, [0, 0, 0])],
    "no width": [({"N": 5, "M": 0}, [2, 5])],
    "no keys": [({"N": 5, "D": 0, "M": 2}, [2, 5])],
    "leading": [
        ({"N": 8, "leading": leading}, [3, 7, 8])
        for leading in (
            ((2,), (2,), (2,), (2,), ()),
            ((2, 1), (3,), (1, 1), (2, 3), (3,)),
            ((5, 2, 3), (3,), (2, 1), (), (3,)),
            ((), (), (), (), (2, 3)),  # only the first rank knows that there are six memories
            ((0, 2), (2,), (1,), (2,), ()),
            ((2,), (0, 1), (1,), (2,), ()),
        )
    ],
}


@pytest.mark.parametrize(
    ("kind", "what"),
    # A gate is for a channel: without any, there is nothing to gate.
    [case for case in itertools.product(PLAIN, SHAPES) if case != ("gated", "no keys")],
)
def test_shapes(across, kind, what):
    for sizes, ends in SHAPES[what]:
        arrays, state = draw(kind, **sizes)
        for return_state in (True, False):
            check(
                across, kind, arrays, state, ends, {"return_state": return_state, "chunk_size": 2}
            )


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes(across, kind, dtype):
    arrays, state = draw(kind, N=40)
    arrays, state = ([np.float16(x) for x in both] for both in (arrays, state))
    case = kind, arrays, state, [11, 30, 40], {"chunk_size": 8, "return_state": True}
    # In the same dtype, whose rounding of the outputs is in the gradients.
    expected = in_one_process(*case, getattr(torch, dtype))
    tolerance = {"float32": 1e-4, "bfloat16": 2.0**-7, "float16": 2.0**-10}
    assert_same(across(3, "on_a_rank", *case, dtype), expected, tolerance[dtype])


def last_states(rank, kind, arrays, ends):
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, rank)]
    out, last = attend(ACROSS[kind], kind, inputs, None, {"return_state": True})
    # The state goes on, as it would in one process.
    again, end = attend(ACROSS[kind], kind, inputs, last, {"return_state": True})
    return numbers([again]), numbers(last), numbers(end)


@every_kind
def test_the_state_is_the_same_number_for_number_and_begins_the_next_call(across, kind):
    arrays, _ = draw(kind, N=9)
    found = across(3, "last_states", kind, arrays, [2, 7, 9])
    for _, last, _ in found[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(last, found[0][1], strict=True))
    twice = [torch.from_numpy(np.concatenate([x, x])) for x in arrays]
    out, end = attend(PLAIN[kind], kind, twice, None, {"return_state": True})
    again = np.concatenate([again for (again,), _, _ in found])
    assert_same([[again, *found[1][2]]], [[*numbers([out[9:]]), *numbers(end)]], 1e-12)


def outputs(rank, kind, arrays, ends):
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, rank)]
    return attend(ACROSS[kind], kind, inputs, None, {})[0].numpy()


@every_kind
def test_nan_goes_forward_only(across, kind):
    for spoiled in range(1, 3):
        arrays, _ = draw(kind, N=9, leading=((2,),) * 5)
        arrays[spoiled][1, 5, 1] = np.nan
        first, second, third = across(3, "outputs", kind, arrays, [3, 6, 9])
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
        state, options = None, {"feature_map": "relu"}
    check(across, kind, arrays, state, [4, 8, 12], options)


# Who needs gradients, and how often.


def needed_by_some(rank, kind, arrays, state, ends, needed):
    """Gradients of the inputs in `needed`, pairs of a rank and an index."""
    inputs = [torch.from_numpy(x) for x in (*part(arrays, ends, rank), *state)]
    wanted = [x for i, x in enumerate(inputs) if (rank, i) in needed]
    for x in wanted:
        x.requires_grad_()
    n = len(arrays)
    out, last = attend(ACROSS[kind], kind, inputs[:n], inputs[n:], {"return_state": True})
    assert out.requires_grad and all(x.requires_grad for x in last)
    loss(out, last, rank).backward()
    return [[x.grad.numpy() for x in wanted], [x.grad is None for x in inputs].count(False)]


@every_kind
def test_gradients_that_some_ranks_need(across, kind):
    arrays, state = draw(kind, N=9)
    ends, n = [3, 6, 9], len(arrays)
    expected = in_one_process(kind, arrays, state, ends, {"return_state": True})
    before = len(expected[1]) - n
    for needed in ([(0, n)], [(2, 0)], [(1, 1), (2, 2)], [(0, 2)], [(2, n - 1), (0, n)]):
        found = across(3, "needed_by_some", kind, arrays, state, ends, needed)
        for rank, (gradients, count) in enumerate(found):
            wanted = sorted(i for r, i in needed if r == rank)
            assert count == len(wanted)
            assert_same([gradients], [[expected[rank][before + i] for i in wanted]])


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
    inputs = leaves(part(arrays, ends, rank))
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode, "": nullcontext}[mode]():
        if not mode:
            inputs = [x.detach() for x in inputs]
        out, last = attend(ACROSS[kind], kind, inputs, None, {"return_state": True})
    assert not out.requires_grad and out.grad_fn is None
    return [*numbers([out]), *numbers(last)]


@every_kind
@pytest.mark.parametrize("mode", ["no_grad", "inference", ""])
def test_without_gradients(across, kind, mode):
    arrays, _ = draw(kind, N=9)
    expected = in_one_process(kind, arrays, None, [5, 9], {"return_state": True})
    found = across(2, "without_gradients", kind, arrays, [5, 9], mode)
    assert_same(found, [x[: len(found[0])] for x in expected])


def no_grad_on_one(rank, kind, arrays, ends, needy):
    with nullcontext() if rank == needy else torch.no_grad():
        attend(ACROSS[kind], kind, leaves(part(arrays, ends, rank)), None, {})


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
    inputs = leaves(part(arrays, ends, rank))
    gates = leaves(part(gated_arrays, ends, rank)[3:])[0]
    first = LinearAttentionState(*leaves(state))
    functions = PLAIN if len(ends) == 1 else ACROSS
    attention, gated = functions["linear"], functions["gated"]
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
    inputs = leaves(part(arrays, ends, rank))
    out, _ = attend(ACROSS[kind], kind, inputs, None, {"form": "recurrent"})
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


def what_is_sent(rank, kind, arrays, ends, options):
    """Bytes passed to collectives, forward and backward, as (name, bytes of a message)."""
    calls = []

    def counted(name, function):
        def call(*args, **kwargs):
            calls.append((name, args[1].numel() * args[1].element_size()))
            return function(*args, **kwargs)

        return call

    inputs = leaves(part(arrays, ends, rank), torch.float32)
    before = written()
    functions = {name: getattr(dist, name, None) for name in COLLECTIVES}
    functions = {name: counted(name, f) for name, f in functions.items() if callable(f)}
    with mock.patch.multiple(dist, **functions):
        out, last = attend(ACROSS[kind], kind, inputs, None, options)
        forward = len(calls)
        loss(out, last, rank).backward()
    return calls[:forward], calls[forward:], written() - before


def written():
    """Bytes that this process has written: to the other ranks, as it writes nothing else."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


@every_size
@every_kind
def test_bytes_are_those_of_the_formula(across, ranks, kind):
    for return_state, N in itertools.product((False, True), (4, 90)):  # whatever the length
        arrays, _ = draw(kind, N=N, D=32, M=48, leading=((2, 1), (3,), (2, 3), (1,), ()))
        args = kind, arrays, split(1, N, ranks), {"return_state": return_state}
        there = {"extra": 32 if kind == "delta" else 1}  # z, a decay, or a transition
        back = {"extra": int(kind == "linear"), "states": 1 + return_state}
        expected = [
            costs.state_exchange_bytes(ranks, 32, 48, heads=6, **more) for more in (there, back)
        ]
        for *both_ways, wire in across(ranks, "what_is_sent", *args):
            for calls, bytes_ in zip(both_ways, expected, strict=True):
                names, messages = zip(*calls, strict=True)
                assert set(names) <= {"all_gather_single", "all_gather_into_tensor"}
                assert len(messages) == 2 and messages[0] == costs.EXCHANGE_HEADER_BYTES
                assert (ranks - 1) * sum(messages) == bytes_
            if wire:  # gloo puts some bytes before each message
                assert 0 <= wire - sum(expected) <= 4 * (ranks - 1) * 500


def order_of_events(rank, kind, arrays, ends):
    events = []
    start = _exchange.Exchange._start

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

    name = {"linear": "_inside", "gated": "additive"}[kind]
    with (
        mock.patch.object(_exchange.Exchange, "_start", started),
        mock.patch.object(distributed, name, inside(getattr(distributed, name))),
    ):
        out, _ = attend(ACROSS[kind], kind, leaves(part(arrays, ends, rank)), None, {})
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


def test_the_header_has_the_size_of_the_formula():
    header = _exchange.Header(
        refused=1, call=5, C=7, M=2, queries=(2, 0), keys=(), state=(1, 2, 3, 4, 5, 6, 7, 8)
    )
    assert 8 * len(header.encode()) == costs.EXCHANGE_HEADER_BYTES
    assert _exchange.Header.decode(header.encode()) == header


# Ranks that do not agree.


def with_own_arguments(rank, kind, arrays, options):
    dtype = getattr(torch, options.pop("dtype", "float64"))
    kind = options.pop("function", kind)
    inputs = [torch.from_numpy(x).to(dtype) for x in arrays]
    out, _ = attend(ACROSS[kind], kind, inputs[: 3 + (kind == "gated")], None, options)
    return numbers([out])


SAME = "must be the same on every rank, got"
WIDTH_OF_KEYS = "the width of the keys, after the feature map,"
DISAGREE = {  # what is drawn and asked on one rank, and what all say
    "dtype": ("linear", {}, {"dtype": "float32"}, f"the dtype {SAME} float64"),
    "causal": ("linear", {}, {"causal": False}, f"causal {SAME} True on rank 0"),
    "normalize": ("linear", {}, {"normalize": False}, f"normalize {SAME} True"),
    "state": ("linear", {}, {"return_state": True}, f"return_state {SAME} False"),
    "C": ("linear", {"D": 2}, {}, f"{WIDTH_OF_KEYS} {SAME} 3 on rank 0 and 2 on rank 1"),
    "M": ("linear", {"M": 5}, {}, f"the width M of the values {SAME} 4 on rank 0 and 5"),
    "q": (
        "linear",
        {"leading": ((2,), (), (), (), ())},
        {},
        f"the leading dimensions of q {SAME} () on rank 0 and (2,",
    ),
    "v": (
        "linear",
        {"leading": ((), (), (2,), (), ())},
        {},
        f"the leading dimensions of k and v {SAME} () on rank 0 and (2,",
    ),
    "gated": ("gated", {"D": 5}, {}, f"{WIDTH_OF_KEYS} {SAME} 3 on rank 0 and 5 on rank 1."),
    "function": (
        "gated",
        {},
        {"function": "linear"},
        "every rank must make the same calls in the same order, got a call of gated_",
    ),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_all_raise_and_can_go_on(across, what):
    kind, changed, options, message = DISAGREE[what]
    same, other = draw(kind)[0], draw(kind, **changed)[0]
    start = time.monotonic()
    found = across(3, "with_own_arguments", kind, each=[(same, {}), (other, options), (same, {})])
    assert time.monotonic() - start < 10  # no one waited for the timeout
    error = RuntimeError if what == "function" else ValueError
    assert {type(x) for x in found} == {error}
    assert len({str(x) for x in found}) == 1 and str(found[0]).startswith(message)
    arrays, state = draw("linear")
    check(across, "linear", arrays, state, [2, 5, 7], {})


REFUSED = {
    "shape": ("linear", {}, ValueError, "v must have shape"),
    "dtype": ("linear", {}, TypeError, "v must have the dtype of q"),
    "no tensor": ("linear", {}, TypeError, "q must be a torch tensor, got list"),
    "axes": ("linear", {}, ValueError, "q must have at most 8 leading dimensions across"),
    "func": ("linear", {}, RuntimeError, "linear_attention across ranks does not run under"),
    "flag": ("linear", {"normalize": 1}, TypeError, "normalize must be True or False"),
    "map": ("linear", {"feature_map": 3}, TypeError, "feature_map must be callable"),
    "state": (
        "linear",
        {"causal": False, "return_state": True},
        ValueError,
        "return_state needs causal=True, got causal=False.",
    ),
    "quadratic": (
        "linear",
        {"causal": False, "form": "quadratic"},
        ValueError,
        "form must be None or one of 'linear' across ranks when causal=False",
    ),
    "backend": ("linear", {"backend": "tpu"}, ValueError, "backend must be None"),
    "group": ("linear", {"group": "all"}, TypeError, "group must be a ProcessGroup or None, got s"),
    "value": ("gated", {}, ValueError, "log_decay must be at most 0, got 1.0"),
    "form": ("gated", {"form": "masked"}, ValueError, "form must be None or one of"),
    "size": ("gated", {"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
}
SPOIL = {
    "shape": lambda q, k, v: (q, k, v[1:]),
    "dtype": lambda q, k, v: (q, k, v.float()),
    "no tensor": lambda q, k, v: (q.tolist(), k, v),
    "axes": lambda *inputs: [x.expand(*[1] * 9, *x.shape) for x in inputs],
    "value": lambda q, k, v, g: (q, k, v, 0 * g.abs() + 1),
}


def refuses(rank, arrays, what, wrong):
    inputs = [torch.from_numpy(x) for x in arrays]
    kind, options, *_ = REFUSED[what]
    if rank != wrong:
        return ACROSS[kind](*inputs, **CAUSAL[kind]).numpy()
    if what == "func":
        batch = (x[None] for x in inputs)
        return torch.func.vmap(lambda *x: ACROSS[kind](*x, causal=True))(*batch)
    if what in SPOIL:
        inputs = SPOIL[what](*inputs)
    return ACROSS[kind](*inputs, **CAUSAL[kind] | options).numpy()


@pytest.mark.parametrize("what", [name for name in REFUSED if name != "group"])
def test_a_rank_that_refuses_its_arguments_is_an_error_on_all(across, what):
    kind, _, error, message = REFUSED[what]
    name = {"linear": "linear_attention", "gated": "gated_linear_attention"}[kind]
    for wrong in (0, 2):
        start = time.monotonic()
        found = across(3, "refuses", draw(kind)[0], what, wrong)
        assert time.monotonic() - start < 10
        refused = found.pop(wrong)
        assert type(refused) is error and str(refused).startswith(message)
        told = (RuntimeError, f"{name}: rank {wrong} has refused its arguments.")
        assert {(type(x), str(x)) for x in found} == {told}


def goes_on_after_errors(rank, arrays, state, ends):
    """Errors that no rank waits for leave the group as it is, in whatever order they come."""
    for wrong in (0, 1, rank):
        try:
            refuses(rank, arrays, "shape", wrong)
        except (ValueError, RuntimeError):
            continue
        raise AssertionError("It has refused nothing.")
    return on_a_rank(rank, "linear", arrays, state, ends, {})


def test_a_group_goes_on_after_errors(across):
    case = *draw("linear"), [3, 7]
    found = across(2, "goes_on_after_errors", *case)
    assert_same(found, in_one_process("linear", *case, {}))


TIMEOUT = 5
FAILED = "linear_attention: the exchange with the other ranks has failed. A rank died, or did not"


def fails(rank, arrays, ends, what, when):
    """The last rank dies, or goes away for longer than the timeout, before or after its call."""
    inputs = leaves(part(arrays, ends, rank))
    last = rank == len(ends) - 1

    def fail(*_):
        if what == "dies":
            os._exit(1)
        time.sleep(TIMEOUT + 2)

    if last and when == "before":
        return fail()
    if last and when == "between":
        with mock.patch.object(_exchange.Exchange, "send", fail):
            distributed.linear_attention(*inputs, causal=True)
    out = distributed.linear_attention(*inputs, causal=True)
    return fail() if last else out.sum().backward()


FAILURES = [
    ("dies", "before"),
    ("dies", "between"),
    ("dies", "backward"),
    ("stays away", "before"),
    ("stays away", "backward"),
]


@pytest.fixture(scope="module")
def failures(across):
    """What the ranks of each group say, all groups at once, as they wait for their timeouts."""
    arrays, ends = draw("linear")[0], [2, 4, 7]
    start = time.monotonic()
    found = across.at_once([(3, "fails", arrays, ends, *case) for case in FAILURES], TIMEOUT)
    return dict(zip(FAILURES, found, strict=True)), time.monotonic() - start


@pytest.mark.parametrize("case", FAILURES, ids=" ".join)
def test_a_rank_that_fails_is_an_error_on_the_others_within_the_timeout(failures, case):
    found, seconds = failures
    assert seconds < TIMEOUT + 20
    for x in found[case][:2]:
        assert type(x) is RuntimeError and str(x).startswith(FAILED)
    assert found[case][2] is None


def other_order(rank, arrays, ends, case):
    inputs = leaves(part(arrays, ends, rank))
    first, second = (distributed.linear_attention(*inputs, causal=True) for _ in range(2))
    if case == "calls":
        (first if rank else second).sum().backward()
    elif rank:
        first.sum().backward()
    else:
        distributed.linear_attention(*inputs, causal=True)


PASS = r"the backward pass of linear_attention, call \d+,"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("calls", rf"{PASS} on rank 0 and {PASS} on rank 1\.$"),
        ("passes", rf"a call of linear_attention on rank 0 and {PASS} on rank 1\.$"),
    ],
)
def test_ranks_that_go_in_different_orders(across, case, message):
    for x in across(2, "other_order", draw("linear")[0], [3, 7], case):
        assert type(x) is RuntimeError
        assert re.match(
            f"every rank must make the same calls in the same order, got {message}", str(x)
        )


# Groups.


def in_subgroups(rank, kind, arrays, ends):
    """Ranks 3 and 1, in that order of their numbers, are a group; 0 and 2 another."""
    groups = [dist.new_group([1, 3]), dist.new_group([0, 2])]
    mine, other = (groups[0], groups[1]) if rank in (1, 3) else (groups[1], groups[0])
    place = dist.get_rank(mine)
    inputs = [torch.from_numpy(x) for x in part(arrays, ends, place)]
    out, _ = attend(ACROSS[kind], kind, inputs, None, {"group": mine})
    try:
        attend(ACROSS[kind], kind, inputs, None, {"group": other})
    except ValueError as error:
        return place, out.numpy(), str(error)


def test_a_group_of_some_ranks(across):
    arrays = {kind: draw(kind, N=9)[0] for kind in PLAIN}
    calls = [(4, "in_subgroups", kind, arrays[kind], [4, 9]) for kind in PLAIN]
    for kind, found in zip(PLAIN, across.at_once(calls), strict=True):
        inputs = list(map(torch.from_numpy, arrays[kind]))
        expected, _ = attend(PLAIN[kind], kind, inputs, None, {})
        for place, out, message in found:
            np.testing.assert_allclose(out, part([expected], [4, 9], place)[0], atol=1e-12)
            assert message == "group must have this process among its ranks, got one without it."


def test_what_is_no_group(across):
    _, _, error, message = REFUSED["group"]
    for rank, x in enumerate(across(1, "refuses", draw("linear")[0], "group", 0)):
        assert rank == 0 and type(x) is error and str(x).startswith(message)


@both
def test_without_a_group_it_says_what_is_missing(kind):
    tensors = [torch.zeros(3, 2)] * (3 + (kind == "gated"))
    with pytest.raises(RuntimeError, match="_attention across ranks needs a process group: call t"):
        ACROSS[kind](*tensors)


@both
def test_one_rank_is_the_plain_function(across, kind):
    case = kind, *draw(kind), [7], {"return_state": True}
    (found,) = across(1, "on_a_rank", *case)
    for x, y in zip(found, in_one_process(*case)[0], strict=True):
        assert np.array_equal(x, y)


def on_kernels(rank, arrays, state, ends, options, dtype):
    """As on a GPU, with the plain function in place of the kernels."""

    def kernels(q, k, v, feature_map, normalize, initial_state, return_state):
        assert {x.dtype for x in (q, k, v)} == {getattr(torch, dtype)}
        options = {"initial_state": initial_state, "return_state": return_state}
        options |= {"feature_map": feature_map, "normalize": normalize}
        return plain.linear_attention(q, k, v, causal=True, **options)

    with (
        mock.patch.object(linear, "by_kernels", kernels),
        mock.patch.object(linear, "on_kernels", lambda backend, *_: backend == "cupy"),
    ):
        return on_a_rank(rank, "linear", arrays, state, ends, options | {"backend": "cupy"}, dtype)


def test_kernels_begin_with_the_state_before_the_part(across):
    arrays, state = draw("linear", N=9)
    for normalize, return_state in itertools.product([True, False], repeat=2):
        case = arrays, state, [2, 2, 9], {"normalize": normalize, "return_state": return_state}
        found = across(3, "on_kernels", *case, "float64")
        assert_same(found, in_one_process("linear", *case))
    arrays, state = ([np.float16(x) for x in both] for both in (arrays, state))
    case = arrays, state, *case[2:]
    expected = in_one_process("linear", *case, torch.float16)
    # The kernels read features in half precision.
    assert_same(across(3, "on_kernels", *case, "float16"), expected, 2.0**-5)
