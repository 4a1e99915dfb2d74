"""The WKV kernels: against NumPy and torch in float64, what they load and store, and refuse."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest
import torch

import lesson_code.numpy as ln
import lesson_code.torch as lt
from lesson_code.cupy import _arrays, _kernels, emulator
from lesson_code.cupy.wkv import THREADS, backward, forward, wkv
from lesson_code.numpy.wkv import EMPTY

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype("float32"), np.dtype("float16"), BFLOAT16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOLERANCE = {"float32": 1e-5, "float16": 2.0**-11 + 1e-5, "bfloat16": 2.0**-8 + 1e-5}
LEADING = [((), ()), ((2,), (2,)), ((2, 1), (3,)), ((), (2,)), ((2, 1, 2), (3, 1)), ((0,), (1,))]
TORCH = {str(x): getattr(torch, str(x)) for x in DTYPES}

on_cpu = functools.partial(wkv, device="cpu")


def draw(seed=0, N=19, D=3, leading=((), ()), dtype="float32"):
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(size=(*lead, N, D)) for lead in leading)
    w, u = np.exp(rng.uniform(-3, 1.5, size=D)), rng.normal(size=D)
    return [x.astype(dtype) for x in (k, v, w, u)]


def draw_state(D=3, leading=(), dtype="float32"):
    rng = np.random.default_rng(1)
    a, b, maximum = rng.normal(size=(3, *leading, D))
    return ln.WKVState(*(x.astype(dtype) for x in (a, abs(b) + 0.5, maximum)))


def exactly(args, state=None):
    """What NumPy makes of the same numbers in float64."""
    state = None if state is None else ln.WKVState(*(x.astype(float) for x in state))
    args = (x.astype(float) for x in args)
    return ln.wkv(*args, initial_state=state, return_state=True)


def run(place, args, state=None):
    """The kernel on NumPy's numbers, wherever it runs."""
    kind = lt.WKVState if place.library == "torch" else ln.WKVState
    state = None if state is None else kind(*place.put(*state))
    out, last = wkv(*place.put(*args), initial_state=state, return_state=True, device=place.device)
    assert isinstance(last, kind) and str(args[0].dtype) in str(out.dtype)
    return place.get(out), ln.WKVState(*map(place.get, last))


def assert_close(found, expected, tolerance=1e-5):
    found, expected = (np.asarray(x, float) for x in (found, expected))
    assert found.shape == expected.shape
    bound = tolerance * np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def assert_result(found, expected, dtype):
    assert_close(found[0], expected[0], TOLERANCE[str(dtype)])
    for x, y in zip(found[1], expected[1], strict=True):
        assert x.dtype == np.float32
        assert_close(x, y)


# The function is that of the other two packages.


@every_dtype
def test_it_is_numpys_function(place, dtype):
    """N around the 8 tokens that are read ahead; D around the 32 threads of a block.

    States and parameters come in either dtype.
    """
    sizes = [(0, 3), (1, 1), (2, 32), (7, 5), (8, 33), (9, 31), (16, 64), (17, 2), (40, 70)]
    for seed, (N, D) in enumerate(sizes):
        args = draw(seed, N, D, LEADING[seed % len(LEADING)], dtype)
        if seed % 2:
            args[2:] = (x.astype(np.float32) for x in args[2:])
        state = None if seed % 3 == 0 else draw_state(D, dtype=(dtype, np.float32)[seed % 3 - 1])
        assert_result(run(place, args, state), exactly(args, state), dtype)
    args, state = draw(2, leading=((3, 1), (1, 1)), dtype=dtype), draw_state(leading=(2,))
    assert_result(run(place, args, state), exactly(args, state), dtype)  # three, by two of a state


@every_dtype
def test_half_precision_is_only_how_numbers_are_stored(place, dtype):
    args = draw(4, 50, leading=((2,), (2,)), dtype=dtype)
    found, state = run(place, args)
    expected, expected_state = run(place, [x.astype(np.float32) for x in args])
    np.testing.assert_array_equal(found, expected.astype(dtype).astype(found.dtype))
    np.testing.assert_array_equal(state, expected_state)


def test_arrays_may_lie_anywhere_in_memory(place):
    k, v, w, u = draw(5, 11, 6, ((2, 3), (2, 3)))
    expected, _ = run(place, (k, v, w, u))
    for axes in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (3, 2, 1, 0), (0, 1, 3, 2)]:
        order = np.argsort(axes)
        x, y = (np.ascontiguousarray(x.transpose(axes)) for x in (k, v))
        x, y, *parameters = place.put(x, y, w, u)
        x, y = (
            x.permute(*order) if place.library == "torch" else x.transpose(order) for x in (x, y)
        )
        found = wkv(x, y, *parameters, device=place.device)
        np.testing.assert_array_equal(place.get(found), expected)
    both, parameters = np.concatenate([k, v], axis=-1), np.stack([w, u], axis=-1)
    both, parameters = place.put(both, parameters)  # rows and parameters that are parts of others
    parts = both[..., :6], both[..., 6:], parameters[:, 0], parameters[:, 1]
    np.testing.assert_array_equal(place.get(wkv(*parts, device=place.device)), expected)
    expected, _ = run(place, (np.repeat(k[:1], 2, axis=0), v, w, u))
    k, v, w, u = place.put(k[:1], v, w, u)
    for x in (k, k[0], _arrays.broadcast(k, v.shape)):  # one sequence in memory for two
        found = wkv(x, v, w, u, device=place.device)
        np.testing.assert_array_equal(place.get(found), expected)


VALUES = np.array([[10], [30], [50]], "float32")
HALVING = np.log(np.array([2], "float32"))


def test_worked_numbers(place):
    """10, then (10 + 30) / 2, then (5 + 30 + 50) / 2.5: the previous token carries no decay."""
    out, state = run(place, (0 * VALUES, VALUES, HALVING, 0 * HALVING))
    assert_close(out, [[10], [20], [34]])
    assert_close(state, [[2.5 + 15 + 50], [0.25 + 0.5 + 1], [0]])
    out, _ = run(place, (0 * VALUES, VALUES, 0 * HALVING + 1e4, 0 * HALVING))
    assert_close(out, [[10], [20], [40]])


def test_the_bonus_is_not_stored(place):
    """Nor does it move the maximum: that of the keys is kept."""
    out, state = run(place, (0 * VALUES, VALUES, HALVING, 0 * HALVING + 100))
    assert_close(out, VALUES)
    _, without = run(place, (0 * VALUES, VALUES, HALVING, 0 * HALVING))
    np.testing.assert_array_equal(state, without)


def test_no_tokens(place):
    state = draw_state()
    for given in (None, state):
        out, last = run(place, draw(N=0), given)
        assert out.shape == (0, 3)
        np.testing.assert_array_equal(last, given or [[0] * 3, [0] * 3, [np.float32(EMPTY)] * 3])
    with emulator.trace() as trace:
        on_cpu(*draw(leading=((0,), (0,))))
    assert not trace.kernels  # nor does an array without numbers start any threads


# Streaming.


def test_split_anywhere_and_hand_the_state_on(place):
    k, v, w, u = draw(7, leading=((2, 1), (3,)))
    whole, final = run(place, (k, v, w, u))
    for t in (0, 1, 8, 9, 18, 19):
        head, state = run(place, (k[..., :t, :], v[..., :t, :], w, u))
        before = [x.copy() for x in state]
        tail, last = run(place, (k[..., t:, :], v[..., t:, :], w, u), state)
        np.testing.assert_array_equal(np.concatenate([head, tail], axis=-2), whole)
        np.testing.assert_array_equal(last, final)
        np.testing.assert_array_equal(state, before)


def test_states_can_be_handed_to_the_other_packages_and_come_from_there():
    k, v, w, u = draw(8, leading=((2,), (2,)))
    expected, _ = exactly((k, v, w, u))
    arrays, tensors = (k, v, w, u), tuple(map(torch.from_numpy, (k, v, w, u)))
    for first, then, (k, v, w, u) in [
        (on_cpu, ln.wkv, arrays),
        (ln.wkv, on_cpu, arrays),
        (on_cpu, lt.wkv, tensors),
        (lt.wkv, on_cpu, tensors),
    ]:
        _, state = first(k[:, :7], v[:, :7], w, u, return_state=True)
        assert_close(then(k[:, 7:], v[:, 7:], w, u, initial_state=state), expected[:, 7:])


# Keys of any size, and many tokens.


def hard(N=60, D=9, dtype="float32"):
    """Keys from -80 to 80, decays from e^-5 to e^3, tokens without weight at the beginning."""
    rng = np.random.default_rng(9)
    k = rng.choice([-80.0, -79.0, 0.0, 80.0, 79.5], size=(N, D))
    k[:5] = -80
    k[:2, ::2] = k[30:40, 1] = -np.inf
    k[:, 4] = -np.inf
    v, u = rng.normal(size=(N, D)), rng.normal(size=D)
    return [x.astype(dtype) for x in (k, v, np.exp(np.linspace(-5, 3, D)), u)]


@every_dtype
def test_keys_up_to_80_and_minus_infinity(place, dtype):
    args = hard(dtype=dtype)
    found, expected = run(place, args), exactly(args)
    assert_close(found[0], expected[0], 2 * TOLERANCE[str(dtype)])
    assert (found[0][:2, ::2] == 0).all() and (found[0][:, 4] == 0).all()
    assert np.isfinite(found[0]).all() and np.isfinite(found[1]).all()
    assert (found[1].maximum[4], found[1].denominator[4]) == (np.float32(EMPTY), 0)


@pytest.mark.parametrize("constant", [-1e4, 1e4])
def test_a_constant_cancels(place, constant):
    """Multiples of 1/8, to which 10,000 can be added in float32."""
    k, v, w, _ = draw(10, 30)
    k, u = np.round(8 * k) / 8, np.array([0.5, 0, -1], "float32")
    expected, _ = run(place, (k, v, w, u))
    found, _ = run(place, (k + np.float32(constant), v, w, u))
    assert_close(found, expected, 1e-6)


def test_a_state_of_half_precision_may_hold_minus_infinity(place):
    args = draw(11, dtype="float16")
    args[0][0] = -np.inf
    zeros = np.zeros(3, "float16")
    state = ln.WKVState(zeros, zeros, zeros - np.float16(np.inf))
    found, last = run(place, args, state)
    np.testing.assert_array_equal(found, run(place, args)[0])
    assert np.isfinite(last).all()


def test_nan_goes_forward_in_its_channel_only(place):
    for spoiled in range(2):
        args = draw(12, leading=((2,), (2,)))
        args[spoiled][1, 5, 2] = np.nan
        bad = np.isnan(run(place, args)[0])
        assert bad[1, 5:, 2].all() and bad.sum() == 14
    k, v, w, u = draw(12)
    assert np.isnan(run(place, (k, v, w * np.nan, u))[0][1:]).all()
    state = draw_state()
    for part in state._fields:
        broken = getattr(state, part).copy()
        broken[1] = np.nan
        bad = np.isnan(run(place, (k, v, w, u), state._replace(**{part: broken}))[0])
        assert bad[:, 1].all() and bad.sum() == 19


@pytest.mark.parametrize(("N", "slowest"), [(5_000, -9), (100_000, -5)])
def test_many_tokens(device, N, slowest):
    """The maximum loses less per token than float32 can tell: the sums make up for it."""
    k, v, _, u = draw(13, N, 4)
    w = np.exp(np.linspace(slowest, 3, 4)).astype("float32")
    found, state = run(device, (5 * k, v, w, u))
    exact = [torch.from_numpy(x.astype(float)) for x in (5 * k, v, w, u)]
    expected, last = lt.wkv(*exact, return_state=True)
    assert_close(found, expected)
    assert_close(state.numerator / state.denominator, last.numerator / last.denominator, 1e-4)


# Gradients.


def leaves(arrays, dtype=None):
    """Tensors of these numbers that want a gradient; bfloat16 by way of float32."""
    for x in arrays:
        tensor = torch.from_numpy(x.astype(np.float32)).to(dtype or TORCH[str(x.dtype)])
        yield tensor.requires_grad_()


def gradients(function, k, v, w, u, *state, seed=0, through_state=True):
    """Gradients of all arguments, through the outputs and what the returned state stands for."""
    state_given = lt.WKVState(*state) if state else None
    out, last = function(k, v, w, u, initial_state=state_given, return_state=True)
    rng = np.random.default_rng(seed)
    weights = rng.integers(-8, 9, size=out.shape) / 8  # which bfloat16 holds
    loss = (out * torch.from_numpy(weights).to(out)).sum()
    if through_state:
        mean, log = last.numerator / last.denominator, last.denominator.log() + last.maximum
        loss = loss + (3 * mean).sin().sum().to(loss) + (2 * log).cos().sum().to(loss)
    return torch.autograd.grad(loss, (k, v, w, u, *state), materialize_grads=True)


def assert_gradients(found, args, expected, tolerance=2e-5):
    assert len(found) == len(expected)
    for x, arg, y in zip(found, args, expected, strict=True):
        assert x.dtype == arg.dtype and x.shape == arg.shape
        y, x = (z.double().cpu().numpy() for z in (y, x))
        # Half a last place, and another for the sum over what was broadcast.
        rounding = {torch.float32: 0, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[arg.dtype]
        bound = (tolerance + rounding) * np.abs(y).max(initial=0)
        np.testing.assert_allclose(x, y, rtol=0, atol=bound)


@pytest.fixture(params=["cpu", *["cuda"] * torch.cuda.is_available()])
def torch_device(request):
    return request.param


@every_dtype
def test_gradients_of_everything(torch_device, dtype):
    on_device = functools.partial(wkv, device=torch_device)
    sizes = [(1, 2), (7, 3), (8, 33), (17, 4), (40, 2)]
    for seed, (N, D) in enumerate(sizes):
        leading = LEADING[seed % (len(LEADING) - 1)]
        args = draw(seed, N, D, leading, dtype)
        if seed % 2:
            args[2:] = (x.astype(np.float32) for x in args[2:])
        args += draw_state(D, [(), (2,), (2, 1), (2,), (3, 2)][seed]) if seed != 3 else []
        args = [x.detach().to(torch_device).requires_grad_() for x in leaves(args)]
        exact = [x.detach().double().requires_grad_() for x in args]
        found, expected = gradients(on_device, *args), gradients(lt.wkv, *exact)
        assert_gradients(found, args, expected)
        assert all(x.any() for x in found)


@every_dtype
def test_gradients_of_half_precision_are_rounded_only_once(dtype):
    """The kernel keeps the outputs as they were before they were rounded: to the last bit."""
    args = draw(14, 50, 4, ((2,), (2,)), dtype)
    args[1] += args[1].dtype.type(8)  # far from zero, where rounding an output is felt
    found = gradients(on_cpu, *leaves(args))
    wide = gradients(on_cpu, *leaves(args, torch.float32))
    for x, y in zip(found, wide, strict=True):
        assert torch.equal(x, y.to(x.dtype))


@every_dtype
def test_gradients_of_hard_keys(dtype):
    args = list(leaves(hard(dtype=dtype)))
    exact = [x.detach().double().requires_grad_() for x in args]
    found = gradients(on_cpu, *args, through_state=False)
    expected = gradients(lt.wkv, *exact, through_state=False)
    assert all(x.isfinite().all() for x in found)
    assert_gradients(found, args, expected, 2e-4)
    assert (found[0][args[0].isinf()] == 0).all() and found[2].any() and found[3].any()


def test_gradients_with_keys_of_10000_are_finite():
    for size in (1e4, 1e30):
        k, v, w, u = draw(15, 40)
        k = np.where(k > 0, size, -size).astype("float32")
        for x in gradients(on_cpu, *leaves((k, v, w, u)), through_state=False):
            assert x.isfinite().all()


@pytest.mark.parametrize(("N", "slowest"), [(5_000, -7), (100_000, -3)])
def test_gradients_after_many_tokens(N, slowest):
    k, v, _, u = draw(16, N, 3)
    args = list(leaves((2 * k, v, np.exp(np.linspace(slowest, 3, 3)), u), torch.float32))
    exact = [x.detach().double().requires_grad_() for x in args]
    assert_gradients(gradients(on_cpu, *args), args, gradients(lt.wkv, *exact), 1e-4)


def test_gradients_go_through_a_split():
    args = list(leaves(draw(17)))
    weights = torch.randn(19, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((on_cpu(*args) * weights).sum(), args)
    k, v, w, u = args
    for t in (0, 8, 11, 19):
        head, state = on_cpu(k[:t], v[:t], w, u, return_state=True)
        tail = on_cpu(k[t:], v[t:], w, u, initial_state=state)
        found = torch.autograd.grad((torch.cat([head, tail]) * weights).sum(), args)
        assert_gradients(found, args, expected)


def test_without_tokens_the_gradient_passes_through():
    args = list(leaves((*draw(N=0), *draw_state())))
    exact = [x.detach().double().requires_grad_() for x in args]
    assert_gradients(gradients(on_cpu, *args), args, gradients(lt.wkv, *exact))


def test_nothing_is_kept_where_no_gradient_is_wanted():
    """The forward kernel then stores the outputs and the state alone."""
    k, v, w, u = leaves(draw(20, 16, 32))
    for run_it, stored in [
        (lambda: on_cpu(k, v, w, u), 2 * 16 + 3),
        (lambda: on_cpu(k.detach(), v.detach(), w.detach(), u.detach()), 16 + 3),
        (torch.no_grad()(lambda: on_cpu(k, v, w, u)), 16 + 3),
    ]:
        with emulator.trace() as trace:
            run_it()
        assert trace.kernels["forward"].global_store_bytes == 4 * 32 * stored


# What the kernels do: bytes, lines, threads.


def both_kernels(N, D, leading, dtype, keep=True):
    """Start them on NumPy arrays; all that they return."""
    k, v, w, u = draw(25, N, D, (leading, leading), dtype)
    w, u = (x.astype(np.float32) for x in (w, u))
    state = np.stack(draw_state(D, leading), axis=-2)
    out, last, mean, log_denominator = forward(k, v, w, u, state, keep)
    if not keep:
        return out, last
    mean = mean if dtype != "float32" else out
    arguments = k, v, w, u, state, last, mean, log_denominator
    return out, last, mean, log_denominator, *backward(k + v, state + 1, *arguments)


@every_dtype
@pytest.mark.parametrize("N", [5, 24, 37])
def test_every_byte_once(dtype, N):
    """Each number is loaded once and stored once, side by side with those of the warp."""
    channels, size = 6 * 64, dtype.itemsize
    with emulator.trace() as trace:
        both_kernels(N, 64, (2, 3), dtype)
    trace.check()  # no races
    kept = 4 if size == 4 else 8  # the logarithm, and the output unless it is one of float32
    for name, tokens, loaded, stored in [
        ("forward", (2 * size, size + kept), 2 + 3, 3),  # w, u and the state; the state
        # w, u, the state, mu and two numbers of the last; three gradients of the state, dw, du
        ("backward", (3 * size + 8, 2 * size), 2 + 3 + 1 + 2, 3 + 2),
    ]:
        counts = trace.kernels[name]
        assert counts.global_load_bytes == channels * (N * tokens[0] + 4 * loaded)
        assert counts.global_store_bytes == channels * (N * tokens[1] + 4 * stored)
        assert counts.distinct_store_bytes == counts.global_store_bytes
        shared_by_sequences = (channels - 64) * 4 * 2  # w and u
        assert counts.distinct_load_bytes == counts.global_load_bytes - shared_by_sequences
        assert counts.line_efficiency == counts.sector_efficiency == 1
        assert counts.blocks == channels / THREADS
        assert counts.barriers == counts.shared_accesses == counts.idle_threads == 0
    with emulator.trace() as trace:
        both_kernels(N, 64, (2, 3), dtype, keep=False)
    assert trace.kernels["forward"].global_store_bytes == channels * (N * size + 12)


def test_the_source_says_what_the_functions_assume():
    source = _kernels.text("wkv.cu")
    assert f"constexpr int THREADS = {THREADS};" in source
    assert f"constexpr float EMPTY = {EMPTY:g}f;".replace("e+", "e") in source
    assert "#include" not in source and "__shared__" not in source and "__sync" not in source
    assert max(map(len, source.splitlines())) <= 105


# Errors.


def refuses(error, message):
    return pytest.raises(error, match="^" + re.escape(message))


K, V, W, U = draw(26)
HALF = [x.astype("float16") for x in (K, V)]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [  # what a kernel refuses of arrays is in test_linear.py
        ((K.tolist(), V, W, U), TypeError, "k must be a NumPy array or a torch CPU tensor with"),
        ((K, V.astype("float16"), W, U), TypeError, "v must have the dtype of k, float32, got"),
        ((K, V, W.astype("float16"), U), TypeError, "decay must have dtype float32, got float16."),
        ((*HALF, W, U.astype(BFLOAT16)), TypeError, "bonus must have dtype float16 or float32, g"),
        ((K[0], V, W, U), ValueError, "k must have shape (..., N, D), got (3,)."),
        ((K, V[1:], W, U), ValueError, "v must have shape (..., N, D), (..., 19, 3), got (18, 3)"),
        ((K, V, W, U[1:]), ValueError, "bonus must have shape (..., D), (..., 3), got (2,)."),
        ((K, V, W[None], U), ValueError, "decay must have shape (D,), (3,), got (1, 3)."),
        ((np.stack([K] * 2), np.stack([V] * 3), W, U), ValueError, "the leading dimensions of k a"),
    ],
)
def test_what_is_refused(args, error, message):
    with refuses(error, message):
        on_cpu(*args)


def test_what_is_refused_of_values_and_states(place):
    k, v, w, u = place.put(*draw(26))
    kind = lt.WKVState if place.library == "torch" else ln.WKVState
    state = kind(*place.put(*draw_state()))
    call = functools.partial(wkv, k, v, device=place.device)
    for wrong in (0.0, -1.0, np.inf):
        (decay,) = place.put(np.array([1, wrong, 1], "float32"))
        with refuses(ValueError, f"decay must be positive and finite, got {wrong}."):
            call(decay, u)
    with refuses(TypeError, "initial_state must be a WKVState, got tuple."):
        call(w, u, initial_state=tuple(state))
    with refuses(TypeError, "return_state must be True or False, got 1."):
        call(w, u, return_state=1)
    (short,) = place.put(np.zeros(2, "float32"))
    with refuses(ValueError, "maximum of initial_state must have shape (..., D), (..., 3), got"):
        call(w, u, initial_state=state._replace(maximum=short))
    (half,) = place.put(np.zeros(3, "float16"))
    with refuses(TypeError, "numerator of initial_state must have dtype float32, got float16."):
        call(w, u, initial_state=state._replace(numerator=half))
    (two,) = place.put(np.zeros((2, 3), "float32"))
    k, v = place.put(*draw(26, leading=((3,), (3,)))[:2])
    with refuses(ValueError, "the leading dimensions of k, v"):
        wkv(k, v, w, u, initial_state=kind(two, two, two), device=place.device)
